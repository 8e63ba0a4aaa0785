//! What every check needs: a device, a stream, the kernels, and short ways to launch and compare.

use flashcore_cuda::{Compiler, Device, DeviceBuffer, Kernel, Module, Prepared, Stream, toolchain};
use flashcore_ptx::{
    ident::Ident,
    launch::{LaunchSpec, Param, Slot, TensorElement, TensorMapSpec, Workspace},
    layout::Swizzle,
    target::Target,
};
use std::error::Error;

/// A detail worth printing, or what went wrong.
pub(crate) type Outcome = Result<String, Box<dyn Error>>;

pub(crate) struct Source {
    pub(crate) name: &'static str,
    pub(crate) target: Target,
    pub(crate) ptx: &'static str,
}

macro_rules! source {
    ($constant:ident, $file:literal, $target:ident) => {
        pub(crate) const $constant: Source = Source {
            name: concat!("fc_", $file),
            target: Target::$target,
            ptx: include_str!(concat!("../ptx/", $file, ".ptx")),
        };
    };
}

source!(SCALE, "scale", Sm80);
source!(TICKET, "ticket", Sm80);
source!(FAULT, "fault", Sm80);
source!(TMA_COPY, "tma_copy", Sm90);
source!(CLUSTER, "cluster", Sm90);
source!(CHAIN, "chain", Sm90);
source!(PARAMS, "params", Sm90);
source!(EMPTY, "empty", Sm90);

pub(crate) struct Bench {
    pub(crate) device: Device,
    pub(crate) stream: Stream,
    /// No cache: checks that want one bring their own.
    pub(crate) compiler: Compiler,
}

impl Bench {
    pub(crate) fn new(index: u32) -> Result<Self, Box<dyn Error>> {
        let device = Device::new(index)?;
        let ptxas = toolchain::Search::from_env(toolchain::Tool::Ptxas).find(toolchain::Tool::Ptxas)?;
        Ok(Self { device, stream: Stream::new(device)?, compiler: Compiler::new(None, ptxas) })
    }

    pub(crate) fn kernel(&self, source: &Source) -> Result<Kernel, flashcore_cuda::Error> {
        let cubin = self.compiler.compile(source.ptx, source.target, self.device)?;
        Module::load(self.device, &cubin)?.kernel(source.name)
    }

    pub(crate) fn prepare(
        &self,
        source: &Source,
        spec: &LaunchSpec,
    ) -> Result<Prepared, flashcore_cuda::Error> {
        Prepared::new(&self.kernel(source)?, spec)
    }

    /// A buffer full of 0xAB, so that what a kernel leaves unwritten shows.
    pub(crate) fn poisoned(&self, bytes: u64) -> Result<DeviceBuffer, flashcore_cuda::Error> {
        let mut buffer = DeviceBuffer::new(self.device, bytes)?;
        buffer.fill(&self.stream, 0xAB)?;
        self.stream.synchronize()?;
        Ok(buffer)
    }

    pub(crate) fn read_u32(&self, buffer: &DeviceBuffer) -> Result<Vec<u32>, flashcore_cuda::Error> {
        let bytes = buffer.to_host(&self.stream)?;
        Ok(bytes
            .chunks_exact(4)
            .map(|word| u32::from_ne_bytes([word[0], word[1], word[2], word[3]]))
            .collect())
    }
}

pub(crate) fn spec(source: &Source, grid: [u32; 3], threads: u32, params: Vec<Param>) -> LaunchSpec {
    LaunchSpec {
        entry: Ident::new(source.name).expect("the kernels here have plain names"),
        grid,
        block: [threads, 1, 1],
        cluster: [1, 1, 1],
        shared_bytes: 0,
        dependent: false,
        params,
        workspace: Vec::new(),
    }
}

/// Rows of `columns` 2-byte elements, copied in boxes of 64 x 8.
pub(crate) fn matrix_map(slot: u8, columns: u64, rows: u64) -> Param {
    Param::TensorMap(TensorMapSpec {
        slot: Slot(slot),
        element: TensorElement::BF16,
        dims: vec![columns, rows],
        strides: vec![2 * columns],
        box_dims: vec![64, 8],
        swizzle: Swizzle::B128,
    })
}

pub(crate) fn ticket_spec(ctas: u32) -> LaunchSpec {
    let counter = Workspace { slot: Slot(1), bytes: 4, zeroed: true };
    let params = vec![Param::Buffer(Slot(0)), Param::Buffer(Slot(1))];
    LaunchSpec { workspace: vec![counter], ..spec(&TICKET, [ctas, 1, 1], 32, params) }
}

pub(crate) fn expect(condition: bool, message: impl FnOnce() -> String) -> Result<(), Box<dyn Error>> {
    if condition { Ok(()) } else { Err(message().into()) }
}
