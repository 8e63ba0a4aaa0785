//! Competitors from PyTorch: SDPA's backends and FlexAttention, computed and timed by a [`Peer`].

use std::{cell::RefCell, fs, rc::Rc};

use serde::{Deserialize, Serialize, de::DeserializeOwned};
use serde_json::{Value, json};

use super::{Arm, Place, Ready};
use crate::{
    burst::Run,
    error::LabError,
    peer::Peer,
    workload::{Outputs, Workload},
};

/// One process, shared by all its competitors, and the task it holds.
pub struct Torch {
    peer: RefCell<Peer>,
    loaded: RefCell<Option<Rc<Workload>>>,
    threads: Option<usize>,
}

impl Torch {
    /// Starts the process; CPU competitors use `threads` threads.
    pub fn start(threads: Option<usize>) -> Result<Rc<Self>, LabError> {
        let peer = RefCell::new(Peer::start()?);
        Ok(Rc::new(Self { peer, loaded: RefCell::default(), threads }))
    }

    /// What it runs on, for the record.
    pub fn describe(&self) -> String {
        let peer = self.peer.borrow();
        let hello = peer.hello();
        let cudnn = hello.cudnn.map_or(String::new(), |version| format!(", cuDNN {version}"));
        let cuda = hello.cuda.as_ref().map_or(String::new(), |version| format!(", CUDA {version}"));
        format!("PyTorch {}{cuda}{cudnn}, Python {}", hello.torch, hello.python)
    }

    /// Its competitors.
    pub fn arms(self: &Rc<Self>) -> Vec<TorchArm> {
        let names = self.peer.borrow().hello().arms.clone();
        names.into_iter().map(|name| TorchArm { name, torch: self.clone() }).collect()
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

    fn ask<T: DeserializeOwned>(&self, arm: &str, request: &impl Serialize) -> Result<T, LabError> {
        self.peer.borrow_mut().ask(arm, request)
    }

    fn load(&self, workload: &Rc<Workload>) -> Result<(), LabError> {
        let held = self.loaded.borrow().as_ref().is_some_and(|held| Rc::ptr_eq(held, workload));
        if !held {
            let task = workload.task().spec();
            let folder = workload.folder()?;
            let request = json!({ "op": "load", "task": task, "folder": folder, "threads": self.threads });
            self.ask::<Value>("torch", &request)?;
            *self.loaded.borrow_mut() = Some(workload.clone());
        }
        Ok(())
    }
}

/// A competitor.
pub struct TorchArm {
    name: String,
    torch: Rc<Torch>,
}

impl Arm for TorchArm {
    fn name(&self) -> &str {
        &self.name
    }

    fn place(&self) -> Place {
        if self.name.starts_with("torch-cpu") { Place::Cpu } else { Place::Gpu }
    }

    fn prepare(&self, workload: &Rc<Workload>) -> Result<Box<dyn Ready>, LabError> {
        #[derive(Deserialize)]
        struct Prepared {
            kernel: String,
        }
        self.torch.load(workload)?;
        let request = json!({ "op": "prepare", "arm": self.name });
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
        let request = json!({ "op": "compute", "arm": self.name, "out": path });
        self.torch.ask::<Value>(&self.name, &request)?;
        let mut outputs = self.workload.outputs()?;
        let bytes = fs::read(&path).map_err(LabError::io("read", &path))?;
        let mut out = outputs.out.data_mut();
        let (to, expected) = (out.bytes_mut(), bytes.len());
        if to.len() != expected {
            let reason = format!("its output has {expected} bytes instead of {}", to.len());
            return Err(LabError::Failed { arm: self.name.clone(), reason });
        }
        to.copy_from_slice(&bytes);
        fs::remove_file(&path).map_err(LabError::io("remove", &path))?;
        outputs.lse = None;
        Ok(outputs)
    }

    fn time(&mut self, run: &Run) -> Result<Vec<f64>, LabError> {
        #[derive(Deserialize)]
        struct Timed {
            seconds: Vec<f64>,
        }
        #[derive(Serialize)]
        struct Timing<'a> {
            op: &'static str,
            arm: &'a str,
            #[serde(flatten)]
            run: &'a Run,
        }
        let request = Timing { op: "time", arm: &self.name, run };
        let Timed { seconds } = self.torch.ask(&self.name, &request)?;
        let sensible = seconds.len() == run.samples && seconds.iter().all(|s| s.is_finite() && *s > 0.0);
        let failed =
            || LabError::Failed { arm: self.name.clone(), reason: "its times make no sense".to_owned() };
        sensible.then_some(seconds).ok_or_else(failed)
    }
}
