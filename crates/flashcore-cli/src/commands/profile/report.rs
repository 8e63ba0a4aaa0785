//! The answer of `profile`: one screen per problem.

use flashcore_lab::{
    latency::time,
    memory::human,
    profile::{build::Build, count::Counts, reading::Reading},
    task::Task,
};
use serde::Serialize;

use crate::output::{Page, Report, Text, Tone};

/// Everything `profile` tells.
#[derive(Serialize, Debug)]
pub struct ProfileReport {
    pub planned_for: String,
    pub profiles: Vec<Profiled>,
}

/// One problem.
#[derive(Serialize, Debug)]
pub struct Profiled {
    pub task: String,
    pub build: Build,
    pub reading: Option<Reading>,
    pub counters: Option<Counts>,
    pub files: Vec<String>,
    pub note: Option<String>,
}

impl Report for ProfileReport {
    fn page(&self) -> Page {
        let page = Page::default().facts([("gpu", self.planned_for.as_str())]);
        self.profiles.iter().fold(page, |page, profiled| {
            let facts =
                [profiled.built(), profiled.simulated(), profiled.counted(), profiled.ending()].concat();
            page.facts(facts)
        })
    }
}

type Facts = Vec<(&'static str, Text)>;

impl Profiled {
    /// What is known before anything ran.
    pub fn new(task: &Task, build: Build) -> Self {
        let (reading, counters, files, note) = (None, None, Vec::new(), None);
        Self { task: task.to_string(), build, reading, counters, files, note }
    }

    fn simulated(&self) -> Facts {
        let Some(c) = &self.counters else { return Vec::new() };
        let mut classes: Vec<_> = c.by_class.iter().collect();
        classes.sort_by(|a, b| b.1.cmp(a.1));
        let classes: Vec<_> = classes.iter().take(5).map(|(class, n)| format!("{class} {n}")).collect();
        let useful = 100.0 * c.needed_macs as f64 / c.tensor_macs.max(1) as f64;
        let conflicts = format!("{} passes, {} of them conflicts", c.shared_wavefronts, c.bank_conflicts);
        let sectors = format!("{} sectors, {} copied ahead", c.global_sectors, human(c.async_bytes));
        vec![
            ("simulated", format!("{} warp instructions: {}", c.instructions, classes.join(", ")).into()),
            ("tensor cores", format!("{} multiply-adds, {useful:.0} % of them needed", c.tensor_macs).into()),
            ("shared memory", conflicts.into()),
            ("memory", sectors.into()),
        ]
    }

    fn built(&self) -> Facts {
        let b = &self.build;
        let known = |value: Option<u32>| value.map_or("not known".to_owned(), |value| value.to_string());
        let tone = if b.spilled.is_some_and(|bytes| bytes > 0) { Tone::Bad } else { Tone::Plain };
        let occupancy =
            b.occupancy.map_or(String::new(), |share| format!(", {:.0} % of the warps", share * 100.0));
        let mut facts: Facts = vec![
            ("problem", self.task.as_str().into()),
            ("kernel", b.kernel.as_str().into()),
            ("chosen", b.why.as_str().into()),
            ("built by", b.compiler.clone().unwrap_or_else(|| "nothing".to_owned()).into()),
            ("registers", known(b.registers).into()),
            ("spilled", Text::new(format!("{} bytes", known(b.spilled)), tone)),
            ("launch", format!("{} CTAs of {} threads", b.ctas, b.threads).into()),
            ("shared", human(u64::from(b.shared_bytes)).into()),
            ("per SM", format!("{} CTAs{occupancy}", known(b.ctas_per_sm)).into()),
        ];
        facts.extend(b.warnings.iter().map(|warning| ("warning", Text::new(warning, Tone::Bad))));
        facts
    }

    fn counted(&self) -> Facts {
        let Some(r) = &self.reading else { return Vec::new() };
        let percent =
            |share: Option<f64>| share.map_or("not counted".to_owned(), |share| format!("{share:.1} %"));
        let stalls: Vec<_> = r.stalls.iter().map(|(name, share)| format!("{name} {share:.2}")).collect();
        let conflicts = r.conflicts.map_or("not counted".to_owned(), |count| format!("{count:.0}"));
        vec![
            ("duration", r.duration_us.map_or(String::new(), time).into()),
            ("tensor cores", percent(r.tensor).into()),
            ("multiprocessors", percent(r.compute).into()),
            ("memory", format!("DRAM {}, L2 {}", percent(r.dram), percent(r.l2)).into()),
            ("active warps", percent(r.occupancy).into()),
            ("conflicts", format!("{conflicts} in shared memory").into()),
            ("warps wait for", stalls.join(", ").into()),
            ("bound by", Text::new(r.bound.as_str(), Tone::Good)),
        ]
    }

    fn ending(&self) -> Facts {
        let files = self.files.iter().map(|path| ("wrote", path.as_str().into()));
        files.chain(self.note.as_ref().map(|note| ("note", Text::new(note, Tone::Faint)))).collect()
    }
}
