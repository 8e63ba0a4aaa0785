//! Competitors from PyTorch: SDPA's backends, FlexAttention and FlashAttention-3's operator, computed and timed by a
//! Python process.
//!
//! The process takes one JSON object per line and answers with one; what it can be asked is in `peer.py`, what it
//! then does in `peer_calls.py`. A process that
//! hangs or dies is an error that says so, never a hang of ours.

use std::{
    cell::RefCell,
    ffi::OsString,
    fs,
    io::Write,
    process::{Command, Stdio},
    rc::Rc,
    sync::mpsc::RecvTimeoutError,
    time::Duration,
};

use serde::{Deserialize, de::DeserializeOwned};
use serde_json::{Value, json};

use super::{Competitor, Place, Ready, fa3};
use crate::{
    burst::{Conditions, Run},
    error::LabError,
    lines::Lines,
    task::{Operation, Task},
    workload::{Outputs, Workload},
};

const SCRIPT: &str = concat!(include_str!("peer_calls.py"), include_str!("peer.py"));
/// The variable that names another Python.
const PYTHON: &str = "FLASHCORE_PYTHON";
/// How long an answer may take: the first call of a compiled competitor takes minutes.
const PATIENCE: Duration = Duration::from_secs(600);

/// What the process says about itself.
#[derive(Clone, PartialEq, Deserialize, Debug, Default)]
struct Hello {
    torch: String,
    python: String,
    cuda: Option<String>,
    cudnn: Option<u64>,
    competitors: Vec<String>,
}

/// A running process.
struct Peer {
    process: Lines<String>,
    hello: Hello,
}

impl Peer {
    /// Starts `$FLASHCORE_PYTHON`, or `python3`.
    fn start() -> Result<Self, LabError> {
        let named = std::env::var_os(PYTHON).filter(|name| !name.is_empty());
        Self::start_with(named.unwrap_or_else(|| "python3".into()), &["-c", SCRIPT])
    }

    /// Starts any program that speaks the same language.
    fn start_with(program: OsString, args: &[&str]) -> Result<Self, LabError> {
        let unavailable = |reason| LabError::Unavailable { competitor: "torch".to_owned(), reason };
        let mut command = Command::new(&program);
        command.args(args);
        let process =
            Lines::start(&mut command, Stdio::piped(), |line| Some(line.to_owned())).map_err(|e| {
                let program = program.to_string_lossy();
                unavailable(format!("{program} does not start ({e}); set {PYTHON} to a Python with torch"))
            })?;
        let mut peer = Self { process, hello: Hello::default() };
        peer.hello = peer.ask("torch", &json!({ "op": "hello" }))?;
        Ok(peer)
    }

    /// Sends a request on behalf of `competitor` and waits for the answer.
    fn ask<T: DeserializeOwned>(&mut self, competitor: &str, request: &Value) -> Result<T, LabError> {
        let failed = |reason: String| LabError::Failed { competitor: competitor.to_owned(), reason };
        let pipe = self.process.stdin.as_mut().ok_or_else(|| failed("its process has exited".to_owned()))?;
        let sent = writeln!(pipe, "{request}").and_then(|()| pipe.flush());
        sent.map_err(|e| failed(format!("its process died ({e})")))?;
        let line = self.process.lines.recv_timeout(PATIENCE).map_err(|problem| {
            self.process.end();
            failed(match problem {
                RecvTimeoutError::Timeout => format!("no answer within {} s", PATIENCE.as_secs()),
                RecvTimeoutError::Disconnected => "its process died".to_owned(),
            })
        })?;
        read_answer(competitor, &line)
    }
}

fn read_answer<T: DeserializeOwned>(competitor: &str, line: &str) -> Result<T, LabError> {
    let competitor = competitor.to_owned();
    let not_understood = |e| LabError::Failed {
        competitor: competitor.clone(),
        reason: format!("its answer cannot be read ({e})"),
    };
    let value: Value = serde_json::from_str(line).map_err(not_understood)?;
    let text = |name: &str| value.get(name).and_then(Value::as_str).map(str::to_owned);
    if let Some(what) = text("unsupported") {
        return Err(LabError::Unsupported { competitor, what });
    }
    if let Some(reason) = text("unavailable") {
        return Err(LabError::Unavailable { competitor, reason });
    }
    if let Some(reason) = text("failed") {
        return Err(LabError::Failed { competitor, reason });
    }
    serde_json::from_value(value).map_err(not_understood)
}

/// One process, shared by all its competitors, and the task it holds.
pub struct Torch {
    peer: RefCell<Peer>,
    loaded: RefCell<Option<Rc<Workload>>>,
    /// Which FlashAttention-3 it has loaded.
    fa3: RefCell<Option<String>>,
    threads: Option<usize>,
}

impl Torch {
    /// Starts the process; CPU competitors use `threads` threads.
    pub fn start(threads: Option<usize>) -> Result<Rc<Self>, LabError> {
        let peer = RefCell::new(Peer::start()?);
        Ok(Rc::new(Self { peer, loaded: RefCell::default(), fa3: RefCell::default(), threads }))
    }

    /// Adds FlashAttention-3 to its competitors.
    pub fn load_fa3(&self, library: &fa3::Library) -> Result<(), LabError> {
        let description = library.describe()?;
        let hello = self.ask(fa3::NAME, &library.request())?;
        self.peer.borrow_mut().hello = hello;
        *self.fa3.borrow_mut() = Some(description);
        Ok(())
    }

    /// What it runs on, for the record.
    pub fn describe(&self) -> String {
        let hello = &self.peer.borrow().hello;
        let cudnn = hello.cudnn.map_or(String::new(), |version| format!(", cuDNN {version}"));
        let cuda = hello.cuda.as_ref().map_or(String::new(), |version| format!(", CUDA {version}"));
        let fa3 = self.fa3.borrow().as_ref().map_or(String::new(), |library| format!(", {library}"));
        format!("PyTorch {}{cuda}{cudnn}{fa3}, Python {}", hello.torch, hello.python)
    }

    /// Its competitors.
    pub fn competitors(self: &Rc<Self>) -> Vec<TorchCompetitor> {
        let names = self.peer.borrow().hello.competitors.clone();
        names.into_iter().map(|name| TorchCompetitor { name, torch: self.clone() }).collect()
    }

    /// Copy and matrix rates of the GPU: bytes and operations per second.
    pub fn ceiling(&self, dtype: &str) -> Result<(f64, f64), LabError> {
        #[derive(Deserialize)]
        struct Rates {
            copy: f64,
            matrix: f64,
        }
        let rates: Rates = self.ask("torch", &json!({ "op": "ceiling", "dtype": dtype }))?;
        Ok((rates.copy, rates.matrix))
    }

    fn ask<T: DeserializeOwned>(&self, competitor: &str, request: &Value) -> Result<T, LabError> {
        self.peer.borrow_mut().ask(competitor, request)
    }

    fn load(&self, workload: &Rc<Workload>) -> Result<(), LabError> {
        let held = self.loaded.borrow().as_ref().is_some_and(|held| Rc::ptr_eq(held, workload));
        if !held {
            let task = workload.task().spec();
            let folder = workload.folder()?;
            let sets = workload.task().sets();
            let request = json!({ "op": "load", "task": task, "folder": folder, "threads": self.threads, "sets": sets });
            self.ask::<Value>("torch", &request)?;
            *self.loaded.borrow_mut() = Some(workload.clone());
        }
        Ok(())
    }
}

/// A competitor.
pub struct TorchCompetitor {
    name: String,
    torch: Rc<Torch>,
}

impl Competitor for TorchCompetitor {
    fn name(&self) -> &str {
        &self.name
    }

    fn place(&self) -> Place {
        if self.name.starts_with("torch-cpu") { Place::Cpu } else { Place::Gpu }
    }

    fn takes(&self, task: &Task) -> bool {
        let of_experts = matches!(task.operation(), Operation::Experts(_));
        let backward = matches!(task.operation(), Operation::Backward(_));
        let paged = task.attention().is_some_and(|spec| spec.page.is_some());
        match self.name.as_str() {
            "torch-cpu" => true,
            "torch-grouped" => of_experts,
            "fa3-deterministic" => backward,
            "flashinfer" => paged,
            fa3::NAME => !of_experts,
            // Nothing of PyTorch's reads pages; its FlashAttention-2 takes packed keys.
            "torch-flash" | "torch-cpu-math" => !of_experts,
            _ => !of_experts && !paged,
        }
    }

    fn prepare(&self, workload: &Rc<Workload>) -> Result<Box<dyn Ready>, LabError> {
        #[derive(Deserialize)]
        struct Prepared {
            kernel: String,
        }
        self.torch.load(workload)?;
        let request = json!({ "op": "prepare", "competitor": self.name });
        let Prepared { kernel } = self.torch.ask(&self.name, &request)?;
        let (name, torch) = (self.name.clone(), self.torch.clone());
        Ok(Box::new(TorchReady { name, torch, workload: workload.clone(), kernel }))
    }
}

struct TorchReady {
    name: String,
    torch: Rc<Torch>,
    workload: Rc<Workload>,
    kernel: String,
}

impl Ready for TorchReady {
    fn kernel(&self) -> &str {
        &self.kernel
    }

    fn compute(&mut self) -> Result<Outputs, LabError> {
        let path = self.workload.folder()?.join(format!("{}.out", self.name));
        let request = json!({ "op": "compute", "competitor": self.name, "out": path });
        self.torch.ask::<Value>(&self.name, &request)?;
        let mut outputs = self.workload.outputs()?;
        let bytes = fs::read(&path).map_err(LabError::io("read", &path))?;
        let expected: usize = outputs.tensors.iter().map(|tensor| tensor.data().bytes().len()).sum();
        if bytes.len() != expected {
            let reason = format!("its output has {} bytes instead of {expected}", bytes.len());
            return Err(LabError::Failed { competitor: self.name.clone(), reason });
        }
        let mut rest = &bytes[..];
        for tensor in &mut outputs.tensors {
            let mut to = tensor.data_mut();
            let (own, others) = rest.split_at(to.bytes_mut().len());
            to.bytes_mut().copy_from_slice(own);
            rest = others;
        }
        fs::remove_file(&path).map_err(LabError::io("remove", &path))?;
        outputs.lse = None;
        Ok(outputs)
    }

    fn time(&mut self, run: &Run) -> Result<Vec<f64>, LabError> {
        #[derive(Deserialize)]
        struct Timed {
            seconds: Vec<f64>,
        }
        let Conditions { cold, replay } = run.conditions;
        let request = json!({
            "op": "time", "competitor": self.name, "samples": run.samples, "calls": run.calls, "cold": cold, "replay": replay,
        });
        let Timed { seconds } = self.torch.ask(&self.name, &request)?;
        let sensible = seconds.len() == run.samples && seconds.iter().all(|s| s.is_finite() && *s > 0.0);
        let failed = || LabError::Failed {
            competitor: self.name.clone(),
            reason: "its times are not positive numbers, or not as many as asked for".to_owned(),
        };
        sensible.then_some(seconds).ok_or_else(failed)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn start(script: &str) -> Result<Peer, LabError> {
        Peer::start_with("sh".into(), &["-c", script])
    }

    const HELLO: &str =
        r#"read l; echo '{"torch":"2","python":"3","cuda":null,"cudnn":null,"competitors":[]}'"#;

    #[track_caller]
    fn check(script: &str, words: &str) {
        let asked = start(script).and_then(|mut peer| peer.ask::<Value>("it", &json!({})));
        let message = asked.unwrap_err().to_string();
        assert!(message.contains(words), "{message}");
    }

    #[test]
    fn a_peer_that_misbehaves_is_an_error() {
        check("exit 0", "died");
        check("read l; echo nonsense", "cannot be read");
        check("read l; echo '{\"torch\": 7}'", "cannot be read");
        check(
            "read l; echo '{\"unavailable\": \"no torch here\"}'",
            "torch cannot be used here: no torch here",
        );
        check(&format!("{HELLO}; read l; echo '{{\"unsupported\": \"masks\"}}'"), "does not support masks");
        check(&format!("{HELLO}; read l; echo '{{\"failed\": \"boom\"}}'"), "it failed: boom");
        check(&format!("{HELLO}; exit 3"), "it failed");
    }

    #[test]
    fn a_python_that_is_not_there_is_named() {
        let error = Peer::start_with("/no/such/python".into(), &[]).err().unwrap();
        assert!(error.is_refusal() && error.to_string().contains("/no/such/python"), "{error}");
    }
}
