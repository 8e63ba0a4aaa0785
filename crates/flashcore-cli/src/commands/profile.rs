//! `flashcore profile`: what limits the GPU kernel of a problem.
//!
//! What the build says needs no GPU. Where there is one and Nsight Compute is found, this program is started again
//! under it with a hidden command ([`execute_target`]).

use std::{fs, path::PathBuf, process::Command};

use clap::Args;
use flashcore_kernels::Tile;
use flashcore_lab::{
    LabError,
    competitor::{cuda::CudaCompetitor, roster::Ours},
    latency::time,
    profile::{
        self,
        ncu::{self, Ncu},
        reading::Reading,
    },
    save,
    simulator::{Simulator, judge},
    task::Task,
    workload::Workload,
};
use flashcore_sim::Outcome;
use serde_json::json;

use super::inspect::kernel::Subject;
use crate::{
    error::{CliError, Verdict},
    files::Place,
    flags::BackendFlags,
    gpu_flags::Chosen,
    lab_flags::TaskFlags,
    output::{Output, Page, Text, faint, good},
    program, simulation,
};

/// Multiply-adds beyond which a problem takes the simulator too long: about half a minute.
const MOST_SIMULATED: f64 = 4e7;

const EXAMPLES: &str = "\
Examples:
  flashcore profile --shape 1x16x16384x128 --dtype bf16 --causal
  flashcore profile --suite forward --filter '1x16x16384x128' --out bench/runs
  FLASHCORE_NCU=/opt/ncu/ncu flashcore profile

Without a GPU, the kernel is planned for an H200 and assembled if ptxas is found; small problems are
simulated. Nsight Compute's report is written to PROBLEM.ncu-rep and PROBLEM.csv in the folder of
--out. Existing files are kept unless --force is given.";

/// Show what limits a GPU kernel: registers, occupancy, and hardware counters if Nsight Compute is found
#[derive(Args, Clone, Debug)]
#[command(after_help = EXAMPLES)]
pub struct Flags {
    #[command(flatten)]
    task: TaskFlags,
    #[command(flatten)]
    backend: BackendFlags,
    /// Folder for the reports of Nsight Compute
    #[arg(long, value_name = "FOLDER", default_value = ".")]
    out: PathBuf,
    /// Overwrite existing reports
    #[arg(long)]
    force: bool,
}

/// What a child is told.
#[derive(Args, Clone, Debug)]
pub struct TargetFlags {
    /// The task, as JSON
    task: String,
    /// How to cut the work, as JSON [default: as planned]
    #[arg(long)]
    tile: Option<String>,
}

/// The child's side: launches the kernel a few times.
pub fn execute_target(flags: &TargetFlags) -> Result<Verdict, CliError> {
    let task = Task::parse(serde_json::from_str(&flags.task)?).map_err(LabError::from)?;
    let cuda = flashcore::cuda::Cuda::open(0)
        .map_err(|e| LabError::Failed { competitor: "cuda".to_owned(), reason: e.to_string() })?;
    let tile = flags.tile.as_deref().map(serde_json::from_str).transpose()?;
    profile::target(&CudaCompetitor::cut(cuda.into(), tile), task)?;
    Ok(Verdict::Pass)
}

/// This program again, which launches the kernel of `tile` for `task` a few times.
fn target(task: &Task, tile: &Tile) -> Result<Command, LabError> {
    let text = |value: serde_json::Result<String>| value.unwrap_or_default();
    let mut child = program::again()?;
    child.args(["profile-target", &text(serde_json::to_string(task.spec())), "--tile"]);
    child.arg(text(serde_json::to_string(tile)));
    Ok(child)
}

/// How busy the busiest unit of the GPU is when `tile` computes `task`, from 0 to 1; `None` where nothing counts it.
pub fn busy(task: &Task, tile: &Tile) -> Option<f64> {
    let (ncu, folder) = (Ncu::find()?, tempfile::tempdir().ok()?);
    let report = folder.path().join("candidate.ncu-rep");
    ncu.collect("regex:^fc_", &report, &target(task, tile).ok()?).ok()?;
    let reading = Reading::of(&ncu::counters(&ncu.csv(&report).ok()?)?);
    let shares = [reading.tensor, reading.dram, reading.l2].into_iter().flatten();
    shares.reduce(f64::max).map(|percent| (percent / 100.0).clamp(0.0, 1.0))
}

/// Profiles every problem asked for.
pub fn execute(flags: Flags, output: &Output) -> Result<Verdict, CliError> {
    let there = matches!(flags.backend.ours()?, Ours::Cuda(_));
    let tasks = flags.task.tasks()?;
    if there && Ncu::find().is_some() {
        fs::create_dir_all(&flags.out).map_err(LabError::io("make", &flags.out))?;
        // Asked before anything is measured.
        tasks.iter().try_for_each(|task| flags.places(task).map(drop))?;
    }
    let chosen = Chosen::usual(there);
    let (mut profiles, mut page) = (Vec::new(), Page::default());
    for task in &tasks {
        let (json, more) = flags.profile(task, &chosen, page)?;
        profiles.push(json);
        page = more;
    }
    output.answer(&json!({ "planned_for": chosen.describe(), "profiles": profiles }), || page)?;
    Ok(Verdict::Pass)
}

impl Flags {
    /// One problem as JSON, and added to a page.
    fn profile(
        &self,
        task: &Task,
        chosen: &Chosen,
        page: Page,
    ) -> Result<(serde_json::Value, Page), CliError> {
        let (choice, problem) = (self.backend.choice()?, task.forward().map_err(LabError::from)?.clone());
        let subject = Subject::planned(problem, *chosen, &choice)?;
        let built = subject.build();
        let (mut reading, mut files, mut simulated, mut note) = (None, Vec::new(), None, None);
        match (chosen.device, Ncu::find()) {
            (None, _) if task.flops() / 2.0 > MOST_SIMULATED => {
                note = Some(
                    "not run: there is no GPU, and the problem is too large for the simulator".to_owned(),
                );
            }
            (None, _) => simulated = simulate(task, Simulator::new(chosen.gpu).choosing(choice))?,
            (_, None) => note = Some(format!("Nsight Compute was not found; set {} to its ncu", ncu::NCU)),
            (Some(_), Some(ncu)) => match count(task, &subject, &ncu, self.places(task)?) {
                Ok(counted) => (reading, files) = (Some(counted.0), counted.1),
                Err(error) => note = Some(error.to_string()),
            },
        }
        let build = built.as_ref().map(|(build, _)| build);
        let json = json!({
            "task": task.to_string(), "kernel": subject.json(build), "reading": reading,
            "counters": simulated.as_ref().map(|outcome| simulation::json(outcome)["counters"].take()),
            "files": files, "note": note,
        });
        let page = subject.add_to(page, build).facts(reading.iter().flat_map(facts));
        let page = simulated.iter().fold(page, simulation::add_to);
        let ending = note.into_iter().map(|note| ("note", faint(note)));
        Ok((json, page.facts(files.into_iter().map(|file| ("wrote", file.into())).chain(ending))))
    }

    /// Where the report on a task and its counters go: to no file that exists, unless told to.
    fn places(&self, task: &Task) -> Result<[PathBuf; 2], CliError> {
        let name = task.to_string().replace(|c: char| !c.is_ascii_alphanumeric() && c != '.', "-");
        let place = |ending| Place::checked(&self.out.join(format!("{name}.{ending}")), self.force);
        Ok([place("ncu-rep")?, place("csv")?].map(|place| place.path().to_owned()))
    }
}

fn simulate(task: &Task, simulator: Simulator) -> Result<Option<Outcome>, CliError> {
    let workload = Workload::new(task.clone(), 0)?;
    let mut outputs = workload.outputs()?;
    let plan = simulator.plan(task.forward().map_err(LabError::from)?)?;
    let outcome = simulator.launch(&mut workload.call(&mut outputs)?, &plan)?;
    outcome.as_ref().map_or(Ok(()), judge)?;
    Ok(outcome)
}

/// What Nsight Compute counts, and the files with all of it.
fn count(
    task: &Task,
    subject: &Subject,
    ncu: &Ncu,
    [report, table]: [PathBuf; 2],
) -> Result<(Reading, Vec<String>), LabError> {
    ncu.collect(&subject.kernel().name(), &report, &target(task, &subject.kernel().tile())?)?;
    let csv = ncu.csv(&report)?;
    save::replace(&table, &[csv.as_bytes()]).map_err(LabError::io("write", &table))?;
    let unreadable =
        || LabError::Failed { competitor: "ncu".to_owned(), reason: "its table has no counters".to_owned() };
    let counters = ncu::counters(&csv).ok_or_else(unreadable)?;
    Ok((Reading::of(&counters), [report, table].map(|path| path.display().to_string()).to_vec()))
}

fn facts(r: &Reading) -> Vec<(&'static str, Text)> {
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
        ("bound by", good(r.bound.as_str())),
    ]
}

#[cfg(test)]
mod tests {
    use clap::Parser;
    use flashcore_core::{DType, Mask};

    use super::*;

    #[derive(Parser)]
    struct Alone {
        #[command(flatten)]
        flags: Flags,
    }

    #[test]
    fn reports_that_exist_are_kept() {
        let folder = tempfile::tempdir().unwrap();
        let flags = |more: &[&str]| {
            let out = ["profile", "--out", folder.path().to_str().unwrap()];
            Alone::parse_from(out.iter().chain(more)).flags
        };
        let task = |mask| Task::square(DType::BF16, [1, 2, 64, 64], mask).unwrap();
        let [report, table] = flags(&[]).places(&task(Mask::CAUSAL)).unwrap();
        assert_eq!(report, folder.path().join("1x2x64x64-bf16-causal.ncu-rep"));
        fs::write(&table, "counters").unwrap();
        assert!(matches!(flags(&[]).places(&task(Mask::CAUSAL)), Err(CliError::File(_))));
        assert!(
            flags(&[]).places(&task(Mask::NONE)).is_ok()
                && flags(&["--force"]).places(&task(Mask::CAUSAL)).is_ok()
        );
    }
}
