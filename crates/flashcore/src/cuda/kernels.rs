//! Kernels of one GPU, each built and loaded once.

use std::{
    collections::HashMap,
    sync::{Arc, Mutex, PoisonError},
};

use flashcore_cuda::{Compiler, Device, Kernel, Prepared, Route};
use flashcore_kernels::{AnyProgram, KernelConfig, Plan};

use super::Error;

/// A program and its loaded kernel.
#[derive(Debug)]
pub(super) struct Loaded {
    program: AnyProgram,
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

    /// Makes every launch of a plan ready; also the kernel of the first, which does most of the work.
    pub(super) fn prepare(&self, plan: &Plan) -> Result<(Arc<Loaded>, Vec<Prepared>), Error> {
        let first = self.get(plan.kernel())?;
        let mut prepared = Vec::new();
        for launch in plan.launches() {
            let loaded = self.get(launch.kernel())?;
            let spec = launch.spec(&loaded.program);
            prepared.extend(spec.map(|spec| Prepared::new(&loaded.kernel, &spec)).transpose()?);
        }
        Ok((first, prepared))
    }

    /// The kernel of a config. Two threads that ask at once may both build it; one result is kept.
    fn get(&self, config: &KernelConfig) -> Result<Arc<Loaded>, Error> {
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
