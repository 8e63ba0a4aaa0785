//! The driver's own launch call with everything made ready beforehand: what no launch on this machine can go below.

use crate::bench::{Bench, EMPTY, PARAMS, Source};
use cudarc::driver::sys::{self, CUfunction, CUlaunchConfig, CUresult};
use std::{
    error::Error,
    ffi::{CString, c_void},
};

/// Bytes of the parameters of [`PARAMS`]: four maps, two addresses, six numbers.
const BYTES: usize = 4 * 128 + 2 * 8 + 6 * 4;

/// A kernel with the parameter list of attention and a parameter block that does not change.
pub(crate) struct Bare {
    function: CUfunction,
    empty: CUfunction,
    config: CUlaunchConfig,
    block: Box<Block>,
}

#[repr(C, align(128))]
struct Block([u8; BYTES]);

impl Bare {
    /// `out` is where the kernel writes its one word.
    pub(crate) fn new(bench: &Bench, out: u64) -> Result<Self, Box<dyn Error>> {
        let mut block = Box::new(Block([0; BYTES]));
        block.0[520..528].copy_from_slice(&out.to_ne_bytes());
        let config = CUlaunchConfig {
            gridDimX: 1,
            gridDimY: 1,
            gridDimZ: 1,
            blockDimX: 32,
            blockDimY: 1,
            blockDimZ: 1,
            sharedMemBytes: 0,
            hStream: bench.stream.raw().cast(),
            attrs: std::ptr::null_mut(),
            numAttrs: 0,
        };
        Ok(Self { function: load(bench, &PARAMS)?, empty: load(bench, &EMPTY)?, config, block })
    }

    /// A kernel that has no parameters and does nothing.
    pub(crate) fn nothing(&self) -> Result<(), Box<dyn Error>> {
        let (none, extra) = (std::ptr::null_mut(), std::ptr::null_mut());
        // SAFETY: the kernel takes no parameters.
        check(unsafe { sys::cuLaunchKernelEx(&self.config, self.empty, none, extra) })
    }

    /// A kernel with parameters.
    pub(crate) fn launch(&self) -> Result<(), Box<dyn Error>> {
        let (mut params, extra) = (self.pointers(), std::ptr::null_mut());
        // SAFETY: one pointer per parameter, into the block, which outlives the call.
        check(unsafe { sys::cuLaunchKernelEx(&self.config, self.function, params.as_mut_ptr(), extra) })
    }

    /// The same by the call that knows no attributes.
    pub(crate) fn older_call(&self) -> Result<(), Box<dyn Error>> {
        let CUlaunchConfig { blockDimX, sharedMemBytes, hStream, .. } = self.config;
        let (mut params, extra) = (self.pointers(), std::ptr::null_mut());
        // SAFETY: one pointer per parameter, into the block, which outlives the call.
        check(unsafe {
            let params = params.as_mut_ptr();
            sys::cuLaunchKernel(
                self.function,
                1,
                1,
                1,
                blockDimX,
                1,
                1,
                sharedMemBytes,
                hStream,
                params,
                extra,
            )
        })
    }

    fn pointers(&self) -> [*mut c_void; 12] {
        let start = self.block.0.as_ptr();
        let maps = (0..4).map(|at| 128 * at);
        let offsets = maps.chain([512, 520]).chain((0..6).map(|at| 528 + 4 * at));
        let mut params = [std::ptr::null_mut(); 12];
        for (param, offset) in params.iter_mut().zip(offsets) {
            *param = start.wrapping_add(offset).cast_mut().cast();
        }
        params
    }
}

/// The kernel as the driver knows it; its module stays loaded.
fn load(bench: &Bench, source: &Source) -> Result<CUfunction, Box<dyn Error>> {
    let cubin = bench.compiler.compile(source.ptx, source.target, bench.device)?;
    let name = CString::new(source.name)?;
    let (mut module, mut function) = (std::ptr::null_mut(), std::ptr::null_mut());
    bench.device.with_context(|| {
        // SAFETY: a whole image made by the compiler; `module` is a valid place.
        check(unsafe { sys::cuModuleLoadData(&mut module, cubin.bytes().as_ptr().cast()) })?;
        // SAFETY: the module is loaded, the name ends in NUL, `function` is a valid place.
        check(unsafe { sys::cuModuleGetFunction(&mut function, module, name.as_ptr()) })
    })??;
    Ok(function)
}

fn check(result: CUresult) -> Result<(), Box<dyn Error>> {
    if result == CUresult::CUDA_SUCCESS { Ok(()) } else { Err(format!("{result:?}").into()) }
}
