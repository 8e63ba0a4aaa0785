//! Everything in the instruction table can be executed: instances of every row are launched, and none is refused.

use crate::sample::{self, Dice, Sampler};
use flashcore_ptx::{
    ident::Ident,
    launch::{LaunchSpec, Param, Slot, TensorElement, TensorMapSpec},
    layout::Swizzle,
    module::{Module, Statement},
    table::{self, Row},
    target::Target,
};
use flashcore_sim::{Buffer, Launch, Options, SimError};

/// Instances of each row.
const SEEDS: u64 = 24;

/// A kernel with one instance of `row`.
fn module(row: &'static Row, seed: u64) -> Module {
    let mut module = sample::module(Target::Sm90a);
    let inst = Sampler { kernel: &mut module.kernels[0], dice: Dice(seed) }.inst(row);
    module.kernels[0].body = vec![Statement::Inst(inst), Statement::Label(sample::name("end"))];
    module
}

fn spec() -> LaunchSpec {
    let map = TensorMapSpec {
        slot: Slot(0),
        element: TensorElement::F32,
        dims: vec![4, 4],
        strides: vec![16],
        box_dims: vec![4, 4],
        swizzle: Swizzle::None,
    };
    LaunchSpec {
        entry: Ident::new("k").expect("a name"),
        grid: [1; 3],
        block: [128, 1, 1],
        cluster: [1; 3],
        shared_bytes: 4096,
        dependent: false,
        params: vec![Param::TensorMap(map), Param::Buffer(Slot(0))],
        workspace: Vec::new(),
    }
}

#[test]
fn every_row_is_executed() {
    let (mut refused, mut options) = (Vec::new(), Options::new());
    options.step_limit = 10_000;
    for row in table::rows() {
        for seed in 0..SEEDS {
            let (module, spec) = (module(row, seed), spec());
            let buffers = vec![Buffer::input(Slot(0), vec![0; 64])];
            let launch = Launch { module: &module, provenance: None, spec: &spec, buffers };
            if let Err(error @ SimError::Unsupported { .. }) = launch.run(&options) {
                refused.push(error.to_string());
            }
        }
    }
    refused.sort();
    refused.dedup();
    assert!(refused.is_empty(), "{} refused:\n{}", refused.len(), refused.join("\n"));
}
