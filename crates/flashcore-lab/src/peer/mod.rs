//! A process of PyTorch that computes and times for us: one JSON object per line in, one per line out.
//!
//! [`crate::arm::torch`] makes competitors of it. What the process can be asked is in `peer.py`; a process that hangs
//! or dies is an error that says so, never a hang of ours.

use std::{
    ffi::OsString,
    io::{BufRead, BufReader, Read, Write},
    process::{Child, ChildStdin, ChildStdout, Command, Stdio},
    sync::mpsc::{Receiver, RecvTimeoutError, channel},
    thread,
    time::Duration,
};

use serde::{Deserialize, Serialize, de::DeserializeOwned};
use serde_json::Value;

use crate::error::LabError;

const SCRIPT: &str = include_str!("peer.py");
/// The variable that names another Python.
pub const PYTHON: &str = "FLASHCORE_PYTHON";
/// Longest answer: a thousand samples have about 25 KiB.
const LONGEST: u64 = 16 << 20;
/// How long an answer may take: the first call of a compiled competitor takes minutes.
const PATIENCE: Duration = Duration::from_secs(600);

/// What the process says about itself.
#[derive(Clone, PartialEq, Deserialize, Debug)]
pub struct Hello {
    /// Version of PyTorch.
    pub torch: String,
    /// Version of Python.
    pub python: String,
    /// CUDA that PyTorch was built for.
    pub cuda: Option<String>,
    /// Version of cuDNN.
    pub cudnn: Option<u64>,
    /// The GPU.
    pub gpu: Option<String>,
    /// Threads on the CPU.
    pub threads: usize,
    /// Competitors it offers.
    pub arms: Vec<String>,
}

/// A running process.
pub struct Peer {
    child: Child,
    requests: Option<ChildStdin>,
    answers: Receiver<String>,
    hello: Hello,
}

impl Peer {
    /// Starts `$FLASHCORE_PYTHON`, or `python3`.
    pub fn start() -> Result<Self, LabError> {
        let named = std::env::var_os(PYTHON).filter(|name| !name.is_empty());
        Self::start_with(named.unwrap_or_else(|| "python3".into()), &["-c", SCRIPT])
    }

    /// Starts any program that speaks the same language.
    pub fn start_with(program: OsString, args: &[&str]) -> Result<Self, LabError> {
        let mut command = Command::new(&program);
        command.args(args).stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::null());
        let named = program.to_string_lossy().into_owned();
        let advice =
            |e| unavailable(format!("{named} does not start ({e}); set {PYTHON} to a Python with torch"));
        let mut child = command.spawn().map_err(advice)?;
        let (requests, stdout) = (child.stdin.take(), child.stdout.take());
        let answers = listen(stdout.ok_or_else(|| unavailable("it has no output".to_owned()))?);
        let nobody = Hello {
            torch: String::new(),
            python: String::new(),
            cuda: None,
            cudnn: None,
            gpu: None,
            threads: 0,
            arms: Vec::new(),
        };
        let mut peer = Self { child, requests, answers, hello: nobody };
        peer.hello = peer.ask("torch", &serde_json::json!({ "op": "hello" }))?;
        Ok(peer)
    }

    /// What the process said about itself.
    pub fn hello(&self) -> &Hello {
        &self.hello
    }

    /// Sends a request on behalf of `arm` and waits for the answer.
    pub fn ask<T: DeserializeOwned>(&mut self, arm: &str, request: &impl Serialize) -> Result<T, LabError> {
        let failed = |reason: String| LabError::Failed { arm: arm.to_owned(), reason };
        let request = serde_json::to_string(request).map_err(|e| failed(e.to_string()))?;
        let pipe = self.requests.as_mut().ok_or_else(|| failed("its process is gone".to_owned()))?;
        let sent = writeln!(pipe, "{request}").and_then(|()| pipe.flush());
        sent.map_err(|e| failed(format!("its process died ({e})")))?;
        let line = self.answers.recv_timeout(PATIENCE).map_err(|problem| {
            self.end();
            failed(match problem {
                RecvTimeoutError::Timeout => format!("no answer within {} s", PATIENCE.as_secs()),
                RecvTimeoutError::Disconnected => "its process died".to_owned(),
            })
        })?;
        read_answer(arm, &line)
    }

    fn end(&mut self) {
        self.requests = None;
        // Already gone is as good as ended.
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

impl Drop for Peer {
    fn drop(&mut self) {
        self.end();
    }
}

fn unavailable(reason: String) -> LabError {
    LabError::Unavailable { arm: "torch".to_owned(), reason }
}

/// Reads lines in a thread of its own, so that waiting for one can end.
fn listen(stdout: ChildStdout) -> Receiver<String> {
    let (sender, receiver) = channel();
    thread::spawn(move || {
        let mut reader = BufReader::new(stdout);
        loop {
            let mut line = String::new();
            let read = reader.by_ref().take(LONGEST).read_line(&mut line);
            if !matches!(read, Ok(n) if n > 0) || sender.send(line).is_err() {
                return;
            }
        }
    });
    receiver
}

fn read_answer<T: DeserializeOwned>(arm: &str, line: &str) -> Result<T, LabError> {
    let arm = arm.to_owned();
    let not_understood =
        |e| LabError::Failed { arm: arm.clone(), reason: format!("its answer makes no sense ({e})") };
    let value: Value = serde_json::from_str(line).map_err(not_understood)?;
    let text = |name: &str| value.get(name).and_then(Value::as_str).map(str::to_owned);
    if let Some(what) = text("unsupported") {
        return Err(LabError::Unsupported { arm, what });
    }
    if let Some(reason) = text("unavailable") {
        return Err(LabError::Unavailable { arm, reason: format!("{reason}; set {PYTHON} to one that has") });
    }
    if let Some(reason) = text("failed") {
        return Err(LabError::Failed { arm, reason });
    }
    serde_json::from_value(value).map_err(not_understood)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn start(script: &str) -> Result<Peer, LabError> {
        Peer::start_with("sh".into(), &["-c", script])
    }

    const HELLO: &str = r#"read l; echo '{"torch":"2","python":"3","cuda":null,"cudnn":null,"gpu":null,"threads":1,"arms":[]}'"#;

    #[track_caller]
    fn check(script: &str, words: &str) {
        let asked = start(script).and_then(|mut peer| peer.ask::<Value>("it", &serde_json::json!({})));
        let message = asked.unwrap_err().to_string();
        assert!(message.contains(words), "{message}");
    }

    #[test]
    fn a_peer_that_misbehaves_is_an_error() {
        check("exit 0", "died");
        check("read l; echo nonsense", "makes no sense");
        check("read l; echo '{\"torch\": 7}'", "makes no sense");
        check("read l; echo '{\"unavailable\": \"no torch here\"}'", PYTHON);
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
