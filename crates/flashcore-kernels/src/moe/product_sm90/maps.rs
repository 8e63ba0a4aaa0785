//! Tensor maps: how tensor copies see weights as checkpoints hold them, and rows of the workspace.

use flashcore_ptx::{
    launch::{Slot, TensorMapSpec},
    layout::Swizzle,
};

use super::{
    super::{
        Layer,
        join::gate_steps,
        product::{DEPTH, Kind},
    },
    config::{BYTES, Config},
};
use crate::slots::moe as slots;

/// Strides of tensor maps are multiples of this many bytes.
const STRIDE_UNIT: u64 = 16;

/// Weights: depth, features, gate or up, experts. One copy brings all rows of a stage, gates above ups, or half of them.
pub(super) fn weights(cfg: &Config, layer: &Layer) -> TensorMapSpec {
    let problem = &layer.problem;
    let (layout, features, slot) = match cfg.kind {
        Kind::Up(_) => (problem.gate_up(), problem.intermediate(), slots::GATE_UP),
        Kind::Down => (problem.down(), problem.hidden(), slots::DOWN),
    };
    let [expert, row, _] = layout.strides().map(|stride| stride as u64 * u64::from(BYTES));
    let (matrices, [feature, up]) = match cfg.kind {
        Kind::Up(_) => (2, gate_steps(layer).map(|rows| rows * row)),
        Kind::Down => (1, [row, STRIDE_UNIT]),
    };
    let stride = |extent: usize, stride: u64| if extent == 1 { STRIDE_UNIT } else { stride };
    TensorMapSpec {
        slot,
        element: cfg.half.element().tensor(),
        dims: [layout.cols(), features, matrices, problem.experts()].map(|n| n as u64).to_vec(),
        strides: vec![stride(features, feature), up, stride(problem.experts(), expert)],
        box_dims: match (cfg.shape.pair, cfg.kind) {
            (false, _) => vec![DEPTH, cfg.features(), matrices as u32, 1],
            (true, Kind::Up(_)) => vec![DEPTH, cfg.features(), 1, 1],
            (true, Kind::Down) => vec![DEPTH, cfg.features() / 2, 1, 1],
        },
        swizzle: Swizzle::B128,
    }
}

/// Rows of the workspace, `width` features each; a copy moves `rows` of them.
pub(super) fn rows(
    cfg: &Config,
    layer: &Layer,
    (slot, width): (Slot, usize),
    ([cols, rows], swizzle): ([u32; 2], Swizzle),
) -> TensorMapSpec {
    TensorMapSpec {
        slot,
        element: cfg.half.element().tensor(),
        dims: vec![width as u64, layer.rows()],
        strides: vec![width as u64 * u64::from(BYTES)],
        box_dims: vec![cols, rows],
        swizzle,
    }
}
