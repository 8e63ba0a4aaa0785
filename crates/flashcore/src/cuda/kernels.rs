//! Kernels of one GPU, each built and loaded once.

use std::{
    collections::HashMap,
    sync::{Arc, Mutex, PoisonError},
};

use flashcore_core::Problem;
use flashcore_cuda::{Compiler, Device, Kernel, Route};
use flashcore_kernels::KernelConfig;
use flashcore_tile::Program;

use super::Error;

/// A program and its loaded kernel.
#[derive(Debug)]
pub(super) struct Loaded {
    pub(super) program: Program<Problem>,
    pub(super) kernel: Kernel,
    pub(super) route: Route,
}

/// The kernels of one GPU.
#[derive(Debug)]
pub(super) struct Kernels {
    device: Device,
    compiler: Compiler,
    loaded: Mutex<HashMap<KernelConfig, Arc<Loaded>>>,
}

impl Kernels {
    pub(super) fn new(device: Device, compiler: Compiler) -> Self {
        Self { device, compiler, loaded: Mutex::new(HashMap::new()) }
    }

    /// The kernel of a config. Two threads that ask at once may both build it; one result is kept.
    pub(super) fn get(&self, config: &KernelConfig) -> Result<Arc<Loaded>, Error> {
        if let Some(found) = self.table().get(config) {
            return Ok(found.clone());
        }
        let built = Arc::new(self.build(config)?);
        Ok(self.table().entry(*config).or_insert(built).clone())
    }

    fn build(&self, config: &KernelConfig) -> Result<Loaded, Error> {
        let program = config.program()?;
        let (module, cubin) = self.compiler.load(program.text(), config.target(), self.device)?;
        let kernel = module.kernel(program.entry().as_str())?;
        Ok(Loaded { program, kernel, route: cubin.route() })
    }

    fn table(&self) -> std::sync::MutexGuard<'_, HashMap<KernelConfig, Arc<Loaded>>> {
        self.loaded.lock().unwrap_or_else(PoisonError::into_inner)
    }
}
