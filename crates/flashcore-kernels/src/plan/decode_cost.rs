//! What a tile of the kernel for few queries takes on a Hopper, estimated: the start, the keys of the busiest SM at the rate at
//! which it gets them, and the end, where CTAs that share rows put their parts together.
//!
//! The constants were fitted to several hundred tiles over shapes from one sequence of 1,024 keys to 128 of 2,048, measured
//! on an H200 (`bench/runs`); what counts is not the time but which tile has the least.

use flashcore_core::Problem;

use super::Gpu;
use crate::decode::{Config, Order, Shape, row_tiles, splits};

/// Nanoseconds of a launch that computes next to nothing.
const START: f64 = 2000.0;
/// Bytes per nanosecond that one SM gets, and that all get together: from memory, and where everything fits in L2.
const SM_RATE: f64 = 70.0;
const MEMORY_RATE: f64 = 4400.0;
const L2_RATE: f64 = 5500.0;
/// Bytes that stay in L2 from one launch to the next.
const L2_BYTES: f64 = 34e6;
/// Nanoseconds from a request to its bytes.
const LATENCY: f64 = 900.0;
/// Nanoseconds of another CTA behind the first of a place.
const WAVE: f64 = 500.0;

/// How much longer the busiest SM works than it would with equal sequences, where each may have a length of its own and work
/// is not shared evenly.
const UNEVEN: f64 = 1.3;

/// Nanoseconds that the end takes, once and for each part, by how CTAs share rows.
const fn end(order: Order) -> [f64; 2] {
    match order {
        Order::Grid => [1200.0, 20.0],
        Order::Even => [2000.0, 50.0],
        Order::Cluster { .. } => [500.0, 30.0],
    }
}

/// What the CTAs of a launch have to do.
struct Load {
    ctas: u64,
    /// Keys of each, whole turns.
    keys: u64,
    /// CTAs that share a row.
    parts: f64,
}

impl Load {
    fn new(problem: &Problem, gpu: &Gpu, cfg: &Config) -> Self {
        let (rows, turn) = (row_tiles(problem).max(1) as u64, u64::from(cfg.keys_per_turn()));
        let turns = (problem.longest_kv() as u64).div_ceil(turn).max(1);
        let parts = match cfg.shape.order {
            Order::Grid => u64::from(splits(cfg, problem, gpu.sms)),
            Order::Cluster { parts } => parts.into(),
            Order::Even => {
                let each = (rows * turns).div_ceil(u64::from(gpu.sms * cfg.shape.ctas_per_sm));
                let ctas = (rows * turns).div_ceil(each);
                return Self { ctas, keys: each * turn, parts: (ctas as f64 / rows as f64).max(1.0) };
            }
        };
        Self { ctas: rows * parts, keys: turns.div_ceil(parts) * turn, parts: parts as f64 }
    }
}

/// Nanoseconds that the kernel takes, about.
pub(super) fn nanoseconds(problem: &Problem, gpu: &Gpu, cfg: &Config) -> f64 {
    let Load { ctas, keys, parts } = Load::new(problem, gpu, cfg);
    let Shape { warps, tile_n, stages, ctas_per_sm, order, .. } = cfg.shape;
    let key = f64::from((cfg.dim_qk + cfg.dim_v) * 2);
    let (sms, places) = (u64::from(gpu.sms), u64::from(gpu.sms * ctas_per_sm));
    let of_sm = ctas.div_ceil(sms);
    let under_way = of_sm.min(ctas_per_sm.into()) as f64 * f64::from(warps * stages * tile_n) * key;
    let all = row_tiles(problem) as f64 * problem.longest_kv() as f64 * key;
    let shared = if all <= L2_BYTES { L2_RATE } else { MEMORY_RATE } / ctas.min(sms) as f64;
    let rate = SM_RATE.min(shared).min(under_way / LATENCY);
    let waves = (ctas.div_ceil(places) - 1) as f64 * WAVE;
    let [once, each] = end(order);
    let end = if parts > 1.0 || order != Order::Grid { once + each * parts } else { 0.0 };
    let differ = cfg.lengths.has_keys() && problem.sequences() > 1 && order != Order::Even;
    let uneven = if differ { UNEVEN } else { 1.0 };
    START + of_sm as f64 * keys as f64 * key / rate * uneven + waves + end
}
