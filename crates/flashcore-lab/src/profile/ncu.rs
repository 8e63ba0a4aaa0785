//! Nsight Compute: found, run over a child process, its counters read back as a table.

use std::{
    env,
    ffi::OsStr,
    fs,
    path::{Path, PathBuf},
    process::{Command, Stdio},
};

use crate::{error::LabError, profile::LAUNCHES};

/// The variable that names another ncu.
pub const NCU: &str = "FLASHCORE_NCU";
/// Largest table that is read back.
const MOST_BYTES: usize = 16 << 20;

/// What is collected: parts of the report, and the counters of the tensor cores under whatever name they have.
const SECTIONS: [&str; 6] = [
    "SpeedOfLight",
    "Occupancy",
    "LaunchStats",
    "ComputeWorkloadAnalysis",
    "MemoryWorkloadAnalysis",
    "WarpStateStats",
];
const COUNTERS: &str = "regex:sm__pipe_tensor.*cycles_active.avg.pct_of_peak_sustained_(active|elapsed)$,\
                        regex:l1tex__data_bank_conflicts_pipe_lsu.*\\.sum$";

/// An ncu that was found.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Ncu {
    path: PathBuf,
}

/// One counter of one launch.
#[derive(Clone, PartialEq, Debug)]
pub struct Counter {
    pub name: String,
    pub unit: String,
    pub value: String,
}

impl Ncu {
    /// Looks for one: `$FLASHCORE_NCU`, the path, the usual places of the CUDA toolkit.
    pub fn find() -> Option<Self> {
        let named = env::var_os(NCU).map(PathBuf::from);
        let on_path =
            env::var_os("PATH").into_iter().flat_map(|path| env::split_paths(&path).collect::<Vec<_>>());
        let beside = [("/usr/local", "bin/ncu"), ("/opt/nvidia/nsight-compute", "ncu")];
        let usual = beside.into_iter().flat_map(|(folder, tail)| {
            let mut found = folders(Path::new(folder));
            found.sort();
            found.into_iter().rev().map(move |folder| folder.join(tail))
        });
        let candidates = named.into_iter().chain(on_path.map(|folder| folder.join("ncu"))).chain(usual);
        candidates.into_iter().find(|path| path.is_file()).map(|path| Self { path })
    }

    /// Where it is.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Runs `child` and writes what the last launch of `kernel` did to `report` (`.ncu-rep`).
    pub fn collect(&self, kernel: &str, report: &Path, child: &Command) -> Result<(), LabError> {
        let mut command = Command::new(&self.path);
        for section in SECTIONS {
            command.args(["--section", section]);
        }
        command.args(["--metrics", COUNTERS, "--kernel-name", kernel, "--launch-count", "1"]);
        command.args(["--launch-skip", &(LAUNCHES - 1).to_string(), "--force-overwrite", "--export"]);
        command.arg(report).arg(child.get_program()).args(child.get_args());
        self.output(&mut command)?;
        if report.is_file() { Ok(()) } else { Err(self.failed("it wrote no report")) }
    }

    /// The counters of a report, as ncu prints them: a row of names, a row of units, a row per launch.
    pub fn csv(&self, report: &Path) -> Result<String, LabError> {
        let mut command = Command::new(&self.path);
        command.arg("--import").arg(report).args(["--csv", "--page", "raw"]);
        self.output(&mut command)
    }

    fn output(&self, command: &mut Command) -> Result<String, LabError> {
        let run = command.stdin(Stdio::null()).output().map_err(LabError::io("start", &self.path))?;
        let text = |bytes: &[u8]| String::from_utf8_lossy(&bytes[..bytes.len().min(MOST_BYTES)]).into_owned();
        let said = text(&run.stdout);
        if run.status.success() && !said.contains("ERR_NVGPUCTRPERM") {
            return Ok(said);
        }
        if said.contains("ERR_NVGPUCTRPERM") {
            return Err(
                self.failed("the driver lets only administrators count; see NVIDIA's ERR_NVGPUCTRPERM page")
            );
        }
        let said = said + &text(&run.stderr);
        let line = said.lines().find(|line| line.contains("ERROR")).or(said.lines().last());
        Err(self.failed(line.unwrap_or("it failed without a message")))
    }

    fn failed(&self, reason: &str) -> LabError {
        LabError::Failed { competitor: self.path.display().to_string(), reason: reason.to_owned() }
    }
}

fn folders(parent: &Path) -> Vec<PathBuf> {
    let entries = fs::read_dir(parent).into_iter().flatten().flatten();
    entries
        .map(|entry| entry.path())
        .filter(|path| path.is_dir() && path.file_name() != Some(OsStr::new("bin")))
        .collect()
}

/// Reads the table that [`Ncu::csv`] gives; lines before it are ncu's own remarks.
pub fn counters(csv: &str) -> Option<Vec<Counter>> {
    let mut rows = csv.lines().skip_while(|line| !line.starts_with("\"ID\"")).map(fields);
    let (names, units, values) = (rows.next()?, rows.next()?, rows.next()?);
    let counted = names.into_iter().zip(units.into_iter().zip(values));
    Some(counted.map(|(name, (unit, value))| Counter { name, unit, value }).collect())
}

/// The fields of one line of comma-separated values in quotes.
fn fields(line: &str) -> Vec<String> {
    let (mut fields, mut field, mut quoted) = (Vec::new(), String::new(), false);
    let mut letters = line.chars().peekable();
    while let Some(letter) = letters.next() {
        match letter {
            '"' if quoted && letters.peek() == Some(&'"') => field.extend(letters.next()),
            '"' => quoted = !quoted,
            ',' if !quoted => fields.push(std::mem::take(&mut field)),
            other => field.push(other),
        }
    }
    fields.push(field);
    fields
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn tables_are_read() {
        let csv = "==PROF== remark\n\"ID\",\"Kernel Name\",\"a,b\"\n\"\",\"\",\"%\"\n\"0\",\"say \"\"hi\"\"\",\"1,234.5\"\n";
        let read = counters(csv).unwrap();
        assert_eq!(read[1].value, "say \"hi\"");
        assert_eq!(
            (read[2].name.as_str(), read[2].unit.as_str(), read[2].value.as_str()),
            ("a,b", "%", "1,234.5")
        );
        assert_eq!(counters("no table here"), None);
        assert_eq!(counters("\"ID\",\"x\"\n"), None);
    }
}
