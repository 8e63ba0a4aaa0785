//! A folder with tensors to run in, and the one way all suites run the binary.

use std::{
    fs,
    io::Read,
    path::PathBuf,
    process::{Child, Command, Output, Stdio},
    thread::sleep,
    time::{Duration, Instant},
};

use assert_cmd::cargo::CommandCargoExt;
use serde_json::Value;
use tempfile::TempDir;

/// What a run left behind.
pub struct Ended {
    pub code: i32,
    pub stdout: String,
    pub stderr: String,
}

impl Ended {
    fn of(output: Output) -> Self {
        let text = |bytes| String::from_utf8(bytes).unwrap();
        let code = output.status.code().unwrap_or(-1);
        Self { code, stdout: text(output.stdout), stderr: text(output.stderr) }
    }

    /// Standard output as the one JSON object it must be.
    #[track_caller]
    pub fn json(&self) -> Value {
        serde_json::from_str(&self.stdout).unwrap_or_else(|e| panic!("{e}: {}{}", self.stdout, self.stderr))
    }
}

/// Fails unless a run ended with this code and said these words.
#[track_caller]
pub fn expect(ended: &Ended, code: i32, words: &str) {
    let text = format!("{}{}", ended.stdout, ended.stderr);
    assert_eq!(ended.code, code, "{text}");
    assert!(text.contains(words), "`{words}` is missing in {text}");
}

/// A folder of its own for one test.
pub struct Workplace {
    folder: TempDir,
}

impl Workplace {
    /// An empty folder.
    pub fn new() -> Self {
        Self { folder: tempfile::tempdir().unwrap() }
    }

    /// A folder with `q.npy`, `k.npy` and `v.npy`: 1 batch entry, 2 heads, 5 queries, 7 keys, 4 features, f32.
    pub fn with_tensors() -> Self {
        let place = Self::new();
        for (name, seq) in [("q.npy", 5), ("k.npy", 7), ("v.npy", 7)] {
            place.write(name, &npy("<f4", "False", &[1, 2, seq, 4], 4));
        }
        place
    }

    pub fn path(&self, name: &str) -> PathBuf {
        self.folder.path().join(name)
    }

    pub fn write(&self, name: &str, bytes: &[u8]) {
        fs::write(self.path(name), bytes).unwrap();
    }

    pub fn read(&self, name: &str) -> Vec<u8> {
        fs::read(self.path(name)).unwrap()
    }

    /// Names of the files in the folder.
    pub fn names(&self) -> Vec<String> {
        let entries = fs::read_dir(self.folder.path()).unwrap();
        let mut names: Vec<_> =
            entries.map(|e| e.unwrap().file_name().to_string_lossy().into_owned()).collect();
        names.sort();
        names
    }

    /// Runs `flashcore` in the folder; arguments are separated by spaces.
    pub fn run(&self, args: &str) -> Ended {
        // Whatever Python a machine has, tests compare with what is in the binary.
        self.run_with(args, "FLASHCORE_PYTHON", "/no/such/python")
    }

    /// [`Self::run`] with one more variable set.
    pub fn run_with(&self, args: &str, variable: &str, value: &str) -> Ended {
        Ended::of(self.command(args, &[(variable, value)]).output().unwrap())
    }

    /// [`Self::run`] that does not wait for the end.
    pub fn start(&self, args: &str) -> Started {
        self.start_with(args, &[("FLASHCORE_PYTHON", "/no/such/python")])
    }

    /// [`Self::run_with`] that does not wait for the end.
    pub fn start_with(&self, args: &str, variables: &[(&str, &str)]) -> Started {
        let mut command = self.command(args, variables);
        command.stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::piped());
        Started(command.spawn().unwrap())
    }

    fn command(&self, args: &str, variables: &[(&str, &str)]) -> Command {
        let mut command = Command::cargo_bin("flashcore").unwrap();
        command.env_remove("FLASHCORE_COMMIT").env("FLASHCORE_CACHE_DIR", self.path("cache"));
        command.envs(variables.iter().copied());
        command.current_dir(self.folder.path()).args(args.split_whitespace());
        command
    }
}

/// A run that has not ended.
pub struct Started(Child);

impl Started {
    /// Waits until something is true, or the run has ended.
    pub fn wait_until(&mut self, what: impl Fn() -> bool) {
        while !what() && self.0.try_wait().unwrap().is_none() {
            sleep(Duration::from_millis(10));
        }
    }

    /// The next line that it prints, as soon as it is there.
    pub fn line(&mut self) -> String {
        let (stdout, mut line) = (self.0.stdout.as_mut().unwrap(), Vec::new());
        // Byte by byte, so that nothing is lost to a buffer.
        while !line.ends_with(b"\n") {
            let mut byte = [0];
            stdout.read_exact(&mut byte).unwrap();
            line.extend(byte);
        }
        String::from_utf8(line).unwrap()
    }

    /// Whether it comes to deal with Ctrl-C itself within that time, and then ends it. A run that does not may still have
    /// been told to ignore it, as everything is that a shell starts in the background.
    #[cfg(target_os = "linux")]
    pub fn catches_ctrl_c(mut self, within: Duration) -> bool {
        const SIGINT: u64 = 2;
        let path = format!("/proc/{}/status", self.0.id());
        let caught = || {
            let status = fs::read_to_string(&path).unwrap();
            let mask = status.lines().find_map(|line| line.strip_prefix("SigCgt:")).unwrap_or("0");
            u64::from_str_radix(mask.trim(), 16).unwrap() >> (SIGINT - 1) & 1 == 1
        };
        let begin = Instant::now();
        self.wait_until(|| caught() || begin.elapsed() > within);
        let catches = caught();
        self.0.kill().unwrap();
        self.0.wait().unwrap();
        catches
    }

    /// Presses Ctrl-C and waits for the end.
    pub fn stop(self) -> Ended {
        Command::new("kill").args(["-INT", &self.0.id().to_string()]).status().unwrap();
        Ended::of(self.0.wait_with_output().unwrap())
    }
}

/// An npy file with this header.
pub fn npy_file(text: &str, elements: &[u8]) -> Vec<u8> {
    let len = (text.len() as u16).to_le_bytes();
    [b"\x93NUMPY\x01\x00", &len[..], text.as_bytes(), elements].concat()
}

/// An npy file of small, varied numbers.
pub fn npy(descr: &str, fortran: &str, shape: &[usize], element: usize) -> Vec<u8> {
    let extents: String = shape.iter().map(|n| format!("{n}, ")).collect();
    let text = format!("{{'descr': '{descr}', 'fortran_order': {fortran}, 'shape': ({extents}), }}\n");
    let count: usize = shape.iter().product();
    let mut bytes = npy_file(&text, &[]);
    for i in 0..count {
        let value = ((i * 37 + shape[2] * 11) % 19) as f32 / 8.0 - 1.0;
        match element {
            // Eighths below 2 are exact in bf16 too, whose bits are the upper half of an f32.
            2 => bytes.extend(half_bits(descr, value).to_le_bytes()),
            _ => bytes.extend(value.to_le_bytes()),
        }
    }
    bytes
}

fn half_bits(descr: &str, value: f32) -> u16 {
    if descr == "<f2" { half::f16::from_f32(value).to_bits() } else { half::bf16::from_f32(value).to_bits() }
}
