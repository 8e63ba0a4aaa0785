//! Launches as data: what a script and Python ask for, and the launches it means.

use std::time::{Duration, Instant};

use flashcore_ptx::{
    ident::Ident,
    launch::{LaunchSpec, Param, Slot},
    module::Kernel,
    parse::Parsed,
};
use flashcore_sim::{Buffer, CheckSet, Launch, Options, Outcome, Schedule};
use serde::Deserialize;

use super::{SimFailure, map::MapSettings};

/// One launch.
#[derive(Deserialize, Clone, Debug)]
#[serde(deny_unknown_fields)]
pub struct LaunchRequest {
    /// The kernel; the only one if it is not named.
    pub entry: Option<String>,
    pub grid: Vec<u32>,
    /// Threads of a CTA; what `.reqntid` says if they are not named.
    pub block: Option<Vec<u32>>,
    /// CTAs of a cluster; what `.reqnctapercluster` says if they are not named.
    pub cluster: Option<Vec<u32>>,
    #[serde(default)]
    pub smem: u32,
    #[serde(default)]
    pub args: Vec<ArgRequest>,
}

/// One argument, as in `{"u32": 7}`.
#[derive(Deserialize, Clone, Debug)]
#[serde(rename_all = "lowercase")]
pub enum ArgRequest {
    /// The address of an array, by name.
    Array(String),
    U32(u32),
    S32(i32),
    U64(u64),
    S64(i64),
    F32(f32),
    F64(f64),
    /// Bytes of a struct, in hexadecimal.
    Bytes(String),
    /// A struct by value: its members, laid out as C does it.
    Struct(Vec<Self>),
    /// A tensor map over an array.
    TensorMap {
        array: String,
        #[serde(flatten)]
        map: MapSettings,
    },
}

/// How to run launches.
#[derive(Deserialize, Clone, Default, Debug)]
#[serde(deny_unknown_fields)]
pub struct HowRequest {
    pub schedule: Option<String>,
    #[serde(default)]
    pub seed: u64,
    pub check: Option<String>,
    pub max_steps: Option<u64>,
}

/// What is known of an array that arguments name.
#[derive(Clone, Copy, Debug)]
pub struct Known<'a> {
    pub slot: Slot,
    /// Its element type and extents, outermost first.
    pub element: &'a str,
    pub shape: &'a [usize],
}

/// One launch that ran.
#[derive(Debug)]
pub struct Ran {
    pub spec: LaunchSpec,
    pub outcome: Outcome,
    pub took: Duration,
}

impl HowRequest {
    /// The options it asks for.
    pub fn options(&self) -> Result<Options, SimFailure> {
        let wrong = |what: &str, value: &str| SimFailure::Script(format!("`{value}` is not a {what}"));
        let schedule = self.schedule.as_deref();
        let schedule =
            schedule.map(|name| Schedule::parse(name).ok_or_else(|| wrong("schedule", name))).transpose()?;
        let checks = self.check.as_deref().unwrap_or("all");
        let checks = CheckSet::parse(checks).map_err(|word| wrong("check", &word))?;
        Ok(options(schedule, self.seed, checks, self.max_steps.unwrap_or(MAX_STEPS)))
    }
}

/// Warp instructions after which a launch is given up unless more are allowed: about a minute.
pub const MAX_STEPS: u64 = 100_000_000;

/// Round-robin and tame, or one of the hostile runs.
pub fn options(schedule: Option<Schedule>, seed: u64, checks: CheckSet, max_steps: u64) -> Options {
    let hostile = |schedule| Options::gauntlet(seed).into_iter().find(|o| o.schedule == schedule);
    let mut options = schedule.and_then(hostile).unwrap_or_default();
    options.seed = seed;
    options.step_limit = max_steps;
    options.with_checks(checks)
}

impl LaunchRequest {
    /// The launch it means; `find` knows the arrays.
    pub fn spec<'a>(
        &self,
        parsed: &Parsed,
        find: &dyn Fn(&str) -> Option<Known<'a>>,
    ) -> Result<LaunchSpec, SimFailure> {
        let kernel = kernel(parsed, self.entry.as_deref())?;
        let named = |(at, arg): (usize, &ArgRequest)| arg.param(find).map_err(|error| error.of_argument(at));
        let params: Result<_, _> = self.args.iter().enumerate().map(named).collect();
        Ok(LaunchSpec {
            entry: Ident::new(kernel.name.as_str())?,
            grid: triple(&self.grid)?,
            block: block(kernel, self.block.as_deref().map(triple).transpose()?)?,
            cluster: cluster(kernel, self.cluster.as_deref().map(triple).transpose()?),
            shared_bytes: self.smem,
            dependent: false,
            params: params?,
            workspace: Vec::new(),
        })
    }
}

/// The kernel of that name, or the only one.
pub fn kernel<'p>(parsed: &'p Parsed, name: Option<&str>) -> Result<&'p Kernel, SimFailure> {
    let kernels = &parsed.module.kernels;
    let found = match name {
        Some(name) => kernels.iter().find(|kernel| kernel.name.as_str() == name),
        None => kernels.first().filter(|_| kernels.len() == 1),
    };
    let names = || kernels.iter().map(|kernel| kernel.name.to_string()).collect();
    found.ok_or_else(|| SimFailure::Entry { found: names() })
}

/// The threads of a CTA that were asked for, or that the kernel asks for.
pub fn block(kernel: &Kernel, asked: Option<[u32; 3]>) -> Result<[u32; 3], SimFailure> {
    let block = asked.or(kernel.directives.required_threads);
    block.ok_or_else(|| SimFailure::Block { kernel: kernel.name.to_string() })
}

/// The CTAs of a cluster that were asked for, or that the kernel asks for.
pub fn cluster(kernel: &Kernel, asked: Option<[u32; 3]>) -> [u32; 3] {
    asked.or(kernel.directives.required_cluster).unwrap_or([1; 3])
}

fn triple(values: &[u32]) -> Result<[u32; 3], SimFailure> {
    let wrong =
        || SimFailure::Script(format!("{values:?} is not a grid or block: write one to three numbers"));
    if values.is_empty() || values.len() > 3 {
        return Err(wrong());
    }
    Ok(std::array::from_fn(|i| values.get(i).copied().unwrap_or(1)))
}

impl ArgRequest {
    fn param<'a>(&self, find: &dyn Fn(&str) -> Option<Known<'a>>) -> Result<Param, SimFailure> {
        let array = |name: &str| {
            find(name)
                .ok_or_else(|| SimFailure::Script(format!("there is no array `{name}`; declare it first")))
        };
        Ok(match self {
            Self::Array(name) => Param::Buffer(array(name)?.slot),
            Self::U32(value) => Param::U32(*value),
            Self::S32(value) => Param::U32(*value as u32),
            Self::U64(value) => Param::U64(*value),
            Self::S64(value) => Param::U64(*value as u64),
            Self::F32(value) => Param::F32(*value),
            Self::F64(value) => Param::U64(value.to_bits()),
            Self::Struct(members) => {
                Param::Struct(members.iter().map(|member| member.param(find)).collect::<Result<_, _>>()?)
            }
            Self::Bytes(text) => Param::Bytes(hexadecimal(text).map_err(SimFailure::Script)?),
            Self::TensorMap { array: name, map } => {
                Param::TensorMap(map.spec(&array(name)?).map_err(SimFailure::Script)?)
            }
        })
    }
}

/// Bytes written as pairs of hexadecimal digits.
pub fn hexadecimal(text: &str) -> Result<Vec<u8>, String> {
    let wrong = || format!("`{text}` is not bytes; write two hexadecimal digits for each, as in 00ff10");
    let digits: Option<Vec<u8>> = text.chars().map(|c| Some(c.to_digit(16)? as u8)).collect();
    let digits = digits.filter(|digits| digits.len() % 2 == 0).ok_or_else(wrong)?;
    Ok(digits.chunks_exact(2).map(|pair| pair[0] << 4 | pair[1]).collect())
}

/// Runs launches one after the other on the same buffers, as long as `going` says so; a finding that ends one ends them
/// all.
pub fn run_all(
    parsed: &Parsed,
    specs: Vec<LaunchSpec>,
    mut buffers: Vec<Buffer>,
    options: &Options,
    going: &(dyn Fn() -> bool + Sync),
) -> Result<Vec<Ran>, SimFailure> {
    let mut all: Vec<Ran> = Vec::new();
    for spec in specs {
        if let Some(last) = all.last() {
            if last.outcome.halted {
                break;
            }
            buffers.clone_from(&last.outcome.buffers);
        }
        let (module, provenance) = (&parsed.module, Some(&parsed.provenance));
        let started = Instant::now();
        let launch = Launch { module, provenance, spec: &spec, buffers: std::mem::take(&mut buffers) };
        let outcome = launch.run_while(options, going)?;
        all.push(Ran { outcome, took: started.elapsed(), spec });
    }
    Ok(all)
}
