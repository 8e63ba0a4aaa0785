//! Finds NVIDIA's offline tools (ptxas, nvdisasm) and runs them.
//!
//! `compile.rs` uses ptxas, the command line both. The search only looks at the file system: no process is
//! started to find a tool, so a first call that hits the cache stays fast.

use crate::error::Error;
use std::{
    ffi::{OsStr, OsString},
    fs::{self, File},
    io::{Read, Write},
    path::{Path, PathBuf},
    process::{Command, ExitStatus, Stdio},
    time::UNIX_EPOCH,
};

/// A tool of the CUDA toolkit.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Tool {
    /// The assembler.
    Ptxas,
    /// The disassembler.
    Nvdisasm,
}

impl Tool {
    fn file_name(self) -> &'static str {
        match (self, cfg!(windows)) {
            (Self::Ptxas, false) => "ptxas",
            (Self::Ptxas, true) => "ptxas.exe",
            (Self::Nvdisasm, false) => "nvdisasm",
            (Self::Nvdisasm, true) => "nvdisasm.exe",
        }
    }

    fn variable(self) -> &'static str {
        match self {
            Self::Ptxas => "FLASHCORE_PTXAS",
            Self::Nvdisasm => "FLASHCORE_NVDISASM",
        }
    }
}

/// Where to look, in order: the tool named by the user, `PATH`, CUDA installations, NVIDIA's Python wheels.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Search {
    /// A tool named by the user; `off` looks nowhere.
    pub explicit: Option<PathBuf>,
    /// Folders as in `PATH`; relative ones are ignored.
    pub path: Vec<PathBuf>,
    /// Roots of CUDA installations, with the tools in `bin`.
    pub cuda_roots: Vec<PathBuf>,
    /// Roots of Python installations, with wheels in `lib/python3*/site-packages`.
    pub python_roots: Vec<PathBuf>,
}

/// Where wheels keep the tools, newest packaging first.
const WHEEL_FOLDERS: [&str; 2] = ["nvidia/cu13/bin", "nvidia/cuda_nvcc/bin"];

impl Search {
    /// The search that the environment asks for.
    pub fn from_env(tool: Tool) -> Self {
        let var = |name| std::env::var_os(name).filter(|value: &OsString| !value.is_empty());
        let path: Vec<PathBuf> =
            var("PATH").map(|path| std::env::split_paths(&path).collect()).unwrap_or_default();
        let cuda = ["CUDA_HOME", "CUDA_PATH"].into_iter().filter_map(var).map(PathBuf::from);
        let environments = ["VIRTUAL_ENV", "CONDA_PREFIX"].into_iter().filter_map(var).map(PathBuf::from);
        let home = var("HOME").map(|home| PathBuf::from(home).join(".local"));
        Self {
            explicit: var(tool.variable()).map(PathBuf::from),
            cuda_roots: cuda.chain(["/usr/local/cuda".into()]).collect(),
            python_roots: environments
                .chain(python_prefix(&path))
                .chain(home)
                .chain(["/usr/local".into()])
                .collect(),
            path,
        }
    }

    /// The first place that has `tool`. A tool the user named must be there; one merely searched for need not.
    pub fn find(&self, tool: Tool) -> Result<Option<ToolPath>, Error> {
        match &self.explicit {
            Some(off) if off.as_os_str() == "off" => return Ok(None),
            Some(path) => {
                let bad = || Error::BadTool { variable: tool.variable(), path: path.clone() };
                return ToolPath::at(path).map(Some).ok_or_else(bad);
            }
            None => {}
        }
        let name = tool.file_name();
        let on_path = self.path.iter().filter(|folder| folder.is_absolute()).map(|folder| folder.join(name));
        let in_cuda = self.cuda_roots.iter().map(|root| root.join("bin").join(name));
        let in_wheels =
            self.python_roots.iter().flat_map(|root| wheel_folders(root)).map(|folder| folder.join(name));
        Ok(on_path.chain(in_cuda).chain(in_wheels).find_map(|path| ToolPath::at(&path)))
    }
}

/// The installation that `python3` on the path belongs to.
fn python_prefix(path: &[PathBuf]) -> Option<PathBuf> {
    let python = path.iter().filter(|folder| folder.is_absolute()).map(|folder| folder.join("python3"));
    // Not resolved through links: a virtual environment's python3 is a link to the system's.
    python.into_iter().find(|python| python.is_file())?.parent()?.parent().map(Path::to_owned)
}

fn wheel_folders(root: &Path) -> Vec<PathBuf> {
    let versions = fs::read_dir(root.join("lib")).into_iter().flatten().flatten().map(|entry| entry.path());
    let is_python = |path: &PathBuf| {
        path.file_name().and_then(OsStr::to_str).is_some_and(|name| name.starts_with("python3"))
    };
    let mut versions: Vec<PathBuf> = versions.filter(is_python).collect();
    versions.sort_by(|a, b| b.cmp(a));
    let packages =
        versions.iter().flat_map(|version| ["site-packages", "dist-packages"].map(|name| version.join(name)));
    packages.flat_map(|packages| WHEEL_FOLDERS.map(|folder| packages.join(folder))).collect()
}

/// A tool that exists.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ToolPath {
    path: PathBuf,
    identity: String,
}

impl ToolPath {
    pub(crate) fn at(path: &Path) -> Option<Self> {
        let meta = fs::metadata(path).ok().filter(|meta| meta.is_file() && is_executable(meta))?;
        let modified = meta.modified().ok()?.duration_since(UNIX_EPOCH).ok()?.as_nanos();
        let path = fs::canonicalize(path).ok()?;
        let identity = format!("{} {} {modified}", path.display(), meta.len());
        Some(Self { path, identity })
    }

    /// Where it is.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Place, size and date: changes whenever another version is installed, and needs no process to read.
    pub(crate) fn identity(&self) -> &str {
        &self.identity
    }

    /// Its release, such as `13.0.88`; runs the tool.
    pub fn version(&self) -> Result<String, Error> {
        let output = self.run(&["--version".into()], Input::None)?;
        let text = String::from_utf8_lossy(&output.stdout).into_owned();
        let version =
            text.split_whitespace().find_map(|word| word.strip_prefix('V').filter(|v| v.contains('.')));
        version.map(str::to_owned).ok_or_else(|| self.failed("it printed no version"))
    }

    /// Runs the tool to its end.
    pub(crate) fn run(&self, arguments: &[OsString], input: Input<'_>) -> Result<Output, Error> {
        let mut command = Command::new(&self.path);
        command.args(arguments).stdout(Stdio::piped()).stderr(Stdio::piped());
        let (stdin, text) = match input {
            Input::None => (Stdio::null(), None),
            Input::Text(text) => (Stdio::piped(), Some(text)),
            Input::File(file) => (file.into(), None),
        };
        let mut child = command.stdin(stdin).spawn().map_err(|error| self.failed(error))?;
        let pipe = child.stdin.take();
        std::thread::scope(|scope| {
            // Written from a thread of its own, or a tool that answers before it has read all would block both.
            if let (Some(mut pipe), Some(text)) = (pipe, text) {
                scope.spawn(move || pipe.write_all(text.as_bytes()));
            }
            let mut stderr = child.stderr.take();
            let log = scope.spawn(move || read_all(stderr.as_mut()));
            let stdout = read_all(child.stdout.as_mut());
            let status = child.wait().map_err(|error| self.failed(error))?;
            let log = log.join().unwrap_or_default();
            if is_interrupted(status) {
                return Err(Error::Interrupted { path: self.path.clone() });
            }
            // Ended by another signal (no memory left, say): its log is not about what it read.
            if status.code().is_none() {
                return Err(self.failed(status));
            }
            Ok(Output { success: status.success(), stdout, log: String::from_utf8_lossy(&log).into_owned() })
        })
    }

    fn failed(&self, reason: impl ToString) -> Error {
        Error::ToolFailed { path: self.path.clone(), reason: reason.to_string() }
    }
}

/// Whether Ctrl-C ended it, which reaches all programs of a terminal.
#[cfg(unix)]
fn is_interrupted(status: ExitStatus) -> bool {
    const SIGINT: i32 = 2;
    std::os::unix::process::ExitStatusExt::signal(&status) == Some(SIGINT)
}

#[cfg(not(unix))]
fn is_interrupted(_: ExitStatus) -> bool {
    false
}

/// What a tool reads.
pub(crate) enum Input<'a> {
    None,
    Text(&'a str),
    File(File),
}

/// A tool's output.
pub(crate) struct Output {
    pub(crate) success: bool,
    pub(crate) stdout: Vec<u8>,
    pub(crate) log: String,
}

fn read_all(from: Option<&mut impl Read>) -> Vec<u8> {
    let mut bytes = Vec::new();
    // A pipe that breaks means the tool died; its exit status says so.
    let _ = from.map(|from| from.read_to_end(&mut bytes));
    bytes
}

#[cfg(unix)]
fn is_executable(meta: &fs::Metadata) -> bool {
    use std::os::unix::fs::MetadataExt;
    meta.mode() & 0o111 != 0
}

#[cfg(not(unix))]
fn is_executable(_: &fs::Metadata) -> bool {
    true
}

#[cfg(test)]
#[cfg(unix)]
mod tests {
    use super::*;

    fn place(path: &Path, mode: u32) {
        fs::create_dir_all(path.parent().unwrap()).unwrap();
        // Written by another process: a file that this one has open, be it in a thread's fork, cannot be run.
        let write = "printf '#!/bin/sh\\necho release 13.0, V13.0.88\\n' > \"$1\" && chmod $2 \"$1\"";
        let mode = format!("{mode:o}");
        assert!(Command::new("sh").args(["-c", write, "sh"]).arg(path).arg(mode).status().unwrap().success());
    }

    #[test]
    fn places_are_searched_in_the_documented_order() {
        let root = tempfile::tempdir().unwrap();
        let at = |name: &str| root.path().join(name);
        let search = Search {
            explicit: None,
            path: vec!["relative".into(), at("path")],
            cuda_roots: vec![at("cuda")],
            python_roots: vec![at("venv")],
        };
        let worst_first = [
            "venv/lib/python3.9/site-packages/nvidia/cuda_nvcc/bin/ptxas",
            "venv/lib/python3.9/site-packages/nvidia/cu13/bin/ptxas",
            "cuda/bin/ptxas",
            "path/ptxas",
        ];
        assert_eq!(search.find(Tool::Ptxas), Ok(None));
        for place_name in worst_first {
            place(&at(place_name), 0o755);
            let found = search.find(Tool::Ptxas).unwrap().unwrap();
            assert_eq!(found.path(), fs::canonicalize(at(place_name)).unwrap());
        }
        assert_eq!(search.find(Tool::Ptxas).unwrap().unwrap().version().unwrap(), "13.0.88");
        assert_eq!(search.find(Tool::Nvdisasm), Ok(None));
    }

    #[test]
    fn a_tool_that_a_signal_ended_did_not_answer() {
        let shell = ToolPath::at(Path::new("/bin/sh")).unwrap();
        let run = |script: &str| shell.run(&["-c".into(), script.into()], Input::None);
        assert!(!run("echo no; exit 1").unwrap().success);
        let ended = run("echo no; kill -TERM $$").err().map(|error| error.to_string()).unwrap_or_default();
        assert!(ended.contains("signal: 15"), "{ended}");
    }

    #[test]
    fn an_interrupt_is_told_from_other_ends() {
        use std::os::unix::process::ExitStatusExt;
        let by_signal = |signal| is_interrupted(ExitStatus::from_raw(signal));
        let with_code = |code: i32| is_interrupted(ExitStatus::from_raw(code << 8));
        assert!(by_signal(2) && !by_signal(15) && !with_code(2));
    }

    #[test]
    fn a_tool_the_user_named_must_be_there() {
        let root = tempfile::tempdir().unwrap();
        let (good, plain) = (root.path().join("good"), root.path().join("plain"));
        place(&good, 0o755);
        place(&plain, 0o644);
        let find =
            |path: &Path| Search { explicit: Some(path.into()), ..Search::default() }.find(Tool::Ptxas);
        assert!(find(&good).unwrap().is_some());
        assert_eq!(find(Path::new("off")), Ok(None));
        for bad in [&plain, &root.path().join("absent"), &root.path().to_owned()] {
            assert_eq!(find(bad), Err(Error::BadTool { variable: "FLASHCORE_PTXAS", path: bad.clone() }));
        }
    }

    #[test]
    fn another_tool_at_the_same_place_has_another_identity() {
        let root = tempfile::tempdir().unwrap();
        let path = root.path().join("ptxas");
        place(&path, 0o755);
        let before = ToolPath::at(&path).unwrap();
        fs::write(&path, "#!/bin/sh\n").unwrap();
        assert_ne!(before.identity(), ToolPath::at(&path).unwrap().identity());
    }
}
