//! `flashcore profile`: what limits the GPU kernel of a problem.
//!
//! What the build says needs no GPU. Where there is one and Nsight Compute is found, this program is started again
//! under it with a hidden command ([`execute_target`]).

mod report;

use std::{fs, path::PathBuf, process::Command};

use clap::Args;
use flashcore_kernels::{ALLOCATED_ALIGNMENT, Gpu, Tile, plan_by, plan_general};
use flashcore_lab::{
    LabError,
    arm::{cuda::CudaArm, roster::Ours},
    profile::{
        self,
        build::Build,
        count,
        ncu::{self, Ncu},
        reading::Reading,
    },
    save,
    task::Task,
};

use self::report::{ProfileReport, Profiled};
use super::inspect::InspectFailure;
use crate::{
    error::{CliError, Verdict},
    files::Place,
    flags::BackendFlags,
    lab_flags::TaskFlags,
    output::Output,
    program,
};

const EXAMPLES: &str = "\
Examples:
  flashcore profile --shape 1x16x16384x128 --dtype bf16 --causal
  flashcore profile --suite forward --filter '1x16x16384x128' --out bench/runs
  FLASHCORE_NCU=/opt/ncu/ncu flashcore profile

Without a GPU the kernel is planned for an H200 and assembled by ptxas, if one is found.
Nsight Compute's report goes to PROBLEM.ncu-rep and PROBLEM.csv in the folder of --out. Files that exist
are kept unless --force is given.";

/// Say what limits a GPU kernel: registers and occupancy, and counters where Nsight Compute is found
#[derive(Args, Clone, Debug)]
#[command(after_help = EXAMPLES)]
pub struct Flags {
    #[command(flatten)]
    task: TaskFlags,
    #[command(flatten)]
    backend: BackendFlags,
    /// Folder for Nsight Compute's report
    #[arg(long, value_name = "FOLDER", default_value = ".")]
    out: PathBuf,
    /// Replace reports that exist
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
        .map_err(|e| LabError::Failed { arm: "cuda".to_owned(), reason: e.to_string() })?;
    let tile = flags.tile.as_deref().map(serde_json::from_str).transpose()?;
    profile::target(&CudaArm::cut(cuda.into(), tile), task)?;
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
    let ours = flags.backend.ours()?;
    let gpu = match &ours {
        Ours::Cuda(cuda) => Some(cuda.gpu()),
        Ours::Cpu(_) => None,
    };
    let tasks = flags.task.tasks()?;
    if gpu.is_some() && Ncu::find().is_some() {
        fs::create_dir_all(&flags.out).map_err(LabError::io("make", &flags.out))?;
        // Asked before anything is measured.
        tasks.iter().try_for_each(|task| flags.places(task).map(drop))?;
    }
    let profiles = tasks.iter().map(|task| flags.profile(task, gpu)).collect::<Result<_, _>>()?;
    output.show(&ProfileReport { planned_for: planned_for(&ours), profiles })?;
    Ok(Verdict::Pass)
}

fn planned_for(ours: &Ours) -> String {
    match ours {
        Ours::Cuda(cuda) => cuda.device().props().name.clone(),
        Ours::Cpu(_) => "an H200, for want of a GPU".to_owned(),
    }
}

impl Flags {
    fn profile(&self, task: &Task, gpu: Option<Gpu>) -> Result<Profiled, CliError> {
        let planned = gpu.unwrap_or(Gpu::HOPPER);
        let table = self.backend.table()?;
        let plan = match self.backend.general() {
            true => plan_general(task.problem(), &planned, ALLOCATED_ALIGNMENT),
            false => plan_by(task.problem(), &planned, ALLOCATED_ALIGNMENT, &table),
        };
        let build = Build::of(&planned, &plan.map_err(InspectFailure::from)?)?;
        let mut profiled = Profiled::new(task, build);
        match (gpu, Ncu::find()) {
            (None, _) => profiled.counters = count::count(task, planned, table)?,
            (_, None) => profiled.note = Some(format!("no Nsight Compute; set {} to its ncu", ncu::NCU)),
            (Some(_), Some(ncu)) => match self.count(task, &profiled.build, &ncu, self.places(task)?) {
                Ok((reading, files)) => (profiled.reading, profiled.files) = (Some(reading), files),
                Err(error) => profiled.note = Some(error.to_string()),
            },
        }
        if gpu.is_none() && profiled.counters.is_none() {
            profiled.note = Some("no GPU, and too large for the simulator: nothing was run".to_owned());
        }
        Ok(profiled)
    }

    /// Where the report on a task and its counters go: to no file that exists, unless told to.
    fn places(&self, task: &Task) -> Result<[PathBuf; 2], CliError> {
        let name = task.to_string().replace(|c: char| !c.is_ascii_alphanumeric() && c != '.', "-");
        let place = |ending| Place::checked(&self.out.join(format!("{name}.{ending}")), self.force);
        Ok([place("ncu-rep")?, place("csv")?].map(|place| place.path().to_owned()))
    }

    fn count(
        &self,
        task: &Task,
        build: &Build,
        ncu: &Ncu,
        [report, table]: [PathBuf; 2],
    ) -> Result<(Reading, Vec<String>), LabError> {
        ncu.collect(&build.kernel, &report, &target(task, &build.tile)?)?;
        let csv = ncu.csv(&report)?;
        save::replace(&table, &[csv.as_bytes()]).map_err(LabError::io("write", &table))?;
        let unreadable =
            || LabError::Failed { arm: "ncu".to_owned(), reason: "its table has no counters".to_owned() };
        let counters = ncu::counters(&csv).ok_or_else(unreadable)?;
        let files = [report, table].map(|path| path.display().to_string());
        Ok((Reading::of(&counters), files.to_vec()))
    }
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
