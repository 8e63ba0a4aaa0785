//! The two kernels under test: their launches, inputs and exact results.

use flashcore_ptx::{
    ident::Ident,
    launch::{LaunchSpec, Param, Slot, TensorElement, TensorMapSpec},
    layout::Swizzle,
    module::Module,
    parse::parse,
};
use flashcore_sim::{Buffer, Options, Outcome};
use half::bf16;
use std::{fs, path::Path};

/// A kernel with a launch and what must come of it.
pub(crate) struct Kernel {
    pub name: &'static str,
    pub module: Module,
    pub spec: LaunchSpec,
    pub buffers: Vec<Buffer>,
    /// Bytes that must be in each slot.
    expected: Vec<(Slot, Vec<u8>)>,
}

impl Kernel {
    /// The first slot with other bytes than expected.
    pub(crate) fn mismatch(&self, outcome: &Outcome) -> Option<Slot> {
        let wrong = |(slot, bytes): &&(Slot, Vec<u8>)| outcome.bytes(*slot) != Some(bytes);
        self.expected.iter().find(wrong).map(|(slot, _)| *slot)
    }
}

/// Mutants that never end are given up soon.
pub(crate) fn small_steps(mut options: Options) -> Options {
    options.step_limit = 300_000;
    options
}

fn load(name: &str) -> Module {
    let path =
        Path::new(env!("CARGO_MANIFEST_DIR")).join("../../tests/ptx/kernels").join(format!("{name}.ptx"));
    let text = fs::read_to_string(path).expect("the kernels are part of the repository");
    parse(&text).expect("the kernels are PTX").module
}

fn spec(entry: &str, block: u32, shared_bytes: u32, params: Vec<Param>) -> LaunchSpec {
    LaunchSpec {
        entry: Ident::new(entry).expect("a name"),
        grid: [1; 3],
        block: [block, 1, 1],
        cluster: [1; 3],
        shared_bytes,
        dependent: false,
        params,
        workspace: Vec::new(),
    }
}

/// Small whole numbers, so that sums are exact in any order.
fn matrix(rows: usize, cols: usize, seed: usize) -> Vec<f32> {
    let value = |i: usize| ((i * 7 + i / cols * 5 + seed) % 11) as f32 - 5.0;
    (0..rows * cols).map(value).collect()
}

fn to_bf16(values: &[f32]) -> Vec<u8> {
    values.iter().flat_map(|v| bf16::from_f32(*v).to_bits().to_le_bytes()).collect()
}

fn to_f32(values: &[f32]) -> Vec<u8> {
    values.iter().flat_map(|v| v.to_le_bytes()).collect()
}

/// C = A·B for row-major operands.
fn product(a: &[f32], b: impl Fn(usize, usize) -> f32, rows: usize, cols: usize, depth: usize) -> Vec<f32> {
    let cell = |i: usize| (0..depth).map(|k| a[i / cols * depth + k] * b(k, i % cols)).sum();
    (0..rows * cols).map(cell).collect()
}

/// `rows` of 64 rows are wanted: a warp stops inside of its tile.
pub(crate) fn mma_gemm(rows: usize) -> Kernel {
    let depth = 64;
    let (a, b) = (matrix(64, depth, 1), matrix(depth, 64, 5));
    let c = product(&a, |k, n| b[k * 64 + n], rows, 64, depth);
    let sums: Vec<f32> = c.chunks(64).map(|row| row.iter().sum()).collect();
    let slots: Vec<_> = (0..4).map(|i| Param::Buffer(Slot(i))).collect();
    let numbers = [Param::U32(depth as u32), Param::U32(rows as u32)];
    Kernel {
        name: "mma_gemm",
        module: load("mma_gemm"),
        spec: spec("mma_gemm", 128, 0, slots.into_iter().chain(numbers).collect()),
        buffers: vec![
            Buffer::input(Slot(0), to_bf16(&a)),
            Buffer::input(Slot(1), to_bf16(&b)),
            Buffer::output(Slot(2), rows * 64 * 4),
            Buffer::output(Slot(3), rows * 4),
        ],
        expected: vec![(Slot(2), to_f32(&c)), (Slot(3), to_f32(&sums))],
    }
}

pub(crate) fn wgmma_gemm() -> Kernel {
    let (tiles, depth) = (3, 256);
    let rows = tiles * 64;
    let (a, b) = (matrix(rows, depth, 2), matrix(64, depth, 7));
    let c = product(&a, |k, n| b[n * depth + k], rows, 64, depth);
    let map = |slot: u8, dims: [usize; 2]| {
        Param::TensorMap(TensorMapSpec {
            slot: Slot(slot),
            element: TensorElement::BF16,
            dims: dims.map(|d| d as u64).to_vec(),
            strides: vec![dims[0] as u64 * 2],
            box_dims: vec![64, 64],
            swizzle: Swizzle::B128,
        })
    };
    let maps = [map(0, [depth, rows]), map(1, [depth, 64]), map(2, [64, rows])];
    let numbers = [Param::U32(depth as u32 / 64), Param::U32(tiles as u32)];
    Kernel {
        name: "wgmma_gemm",
        module: load("wgmma_gemm"),
        spec: spec("wgmma_gemm", 256, 41_984, maps.into_iter().chain(numbers).collect()),
        buffers: vec![
            Buffer::input(Slot(0), to_bf16(&a)),
            Buffer::input(Slot(1), to_bf16(&b)),
            Buffer::output(Slot(2), rows * 64 * 2),
        ],
        expected: vec![(Slot(2), to_bf16(&c))],
    }
}
