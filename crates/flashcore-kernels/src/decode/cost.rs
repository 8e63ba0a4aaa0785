//! Roughly how long a config takes, to choose between configs: the start, the keys of the busiest SM at the rate at which
//! they arrive, and the end, where CTAs that share rows merge their parts.
//!
//! The constants were fitted to 350 tiles over nine shapes, from one sequence of 1,024 keys to 128 of 2,048, measured on an
//! H200 (`bench/runs/2026-11-16-h200-decode-tiles.jsonl`). What matters is not the time itself but which config has the
//! lowest: the one chosen was never more than 1 % from the best.

use flashcore_core::Problem;

use super::{
    Config, Order, Shape,
    cuts::{SPAN, busiest},
    even::{members, range},
    row_tiles, splits,
};

/// Nanoseconds of a launch that computes next to nothing.
const START: f64 = 1100.0;
/// Bytes per nanosecond that one SM gets at most, and that each gets where all read.
const ALONE: f64 = 56.0;
const TOGETHER: f64 = 34.5;
/// Nanoseconds from a request to its bytes, where many are in flight.
const LATENCY: f64 = 3000.0;
/// Nanoseconds of another round of CTAs behind the first.
const ROUND: f64 = 1630.0;
/// Rounds from which on nobody waits for the slowest CTA of one.
const MANY_ROUNDS: u64 = 3;
/// Nanoseconds that parts of a row take to meet in memory, at the end of every CTA, and each of them.
const MEET: f64 = 1950.0;
const PART: f64 = 15.0;
/// Nanoseconds that they take in the shared memory of a cluster.
const CLUSTER: f64 = 760.0;
/// Nanoseconds until a CTA knows its share of all keys, and by how much rows that begin inside a CTA slow it down, the more
/// where page numbers have to be fetched anew.
const SHARE: f64 = 2600.0;
const EVEN: f64 = 1.02;
const EVEN_PAGES: f64 = 1.05;
/// How much of its longest CTA's time a launch takes longer, where sequences have lengths of their own.
const UNEVEN: f64 = 0.5;

/// Nanoseconds that the config takes on a GPU of `sms` multiprocessors, about.
pub(crate) fn nanoseconds(cfg: &Config, problem: &Problem, sms: u32) -> f64 {
    let parts = match cfg.shape.order {
        Order::Grid => splits(cfg, problem, sms),
        Order::Cluster { parts } => parts,
        Order::Even => 1,
    };
    of_parts(cfg, problem, sms, parts)
}

/// The same where `parts` CTAs share a row.
pub(super) fn of_parts(cfg: &Config, problem: &Problem, sms: u32, parts: u32) -> f64 {
    let Shape { warps, tile_n, stages, ctas_per_sm, order, .. } = cfg.shape;
    let key = f64::from((cfg.dim_qk + cfg.dim_v) * cfg.cache.bytes());
    let turn = if cfg.invariant { SPAN } else { cfg.keys_per_turn() };
    let (rows, turn) = (row_tiles(problem).max(1) as u64, u64::from(turn));
    let turns = (visible_keys(problem) as u64).div_ceil(turn).max(1);
    let (ctas, each) = match order {
        Order::Even => {
            let members = u64::from(members(problem, sms * ctas_per_sm));
            let teams = u64::from(sms * ctas_per_sm) / members;
            let each = range(rows / members, turns, teams);
            (members * (rows / members * turns).div_ceil(each), each)
        }
        _ if cfg.invariant => (rows * u64::from(parts), busiest(problem, parts).into()),
        _ => (rows * u64::from(parts), turns.div_ceil(parts.into())),
    };
    let room = u64::from(room(order, sms)).max(1);
    // Ranges that end where rows do leave some SMs idle, as rounds of whole rows would.
    let (of_sm, busy) = (ctas.div_ceil(room), if order == Order::Even { room } else { ctas.min(room) });
    let bytes = (each * turn) as f64 * key;
    let under_way = of_sm.min(ctas_per_sm.into()) as f64 * f64::from(warps * stages * tile_n) * key;
    let rate = ALONE.min(TOGETHER * f64::from(sms) / busy as f64).min(under_way / LATENCY);
    let waits = ctas > room * u64::from(ctas_per_sm) && of_sm < MANY_ROUNDS;
    let differ = cfg.lengths.has_keys() && problem.sequences() > 1;
    let paged = problem.pages().is_some();
    let stream = of_sm as f64 * bytes / rate;
    let ends = each.is_multiple_of(turns) || turns.is_multiple_of(each);
    START
        + if waits { ROUND } else { 0.0 }
        + match order {
            Order::Even if ends => stream + SHARE + if each < turns { MEET } else { 0.0 },
            Order::Even => stream * if paged { EVEN_PAGES } else { EVEN } + SHARE + MEET,
            _ => stream + if differ { UNEVEN * bytes / ALONE } else { 0.0 },
        }
        + match order {
            Order::Cluster { .. } => CLUSTER,
            Order::Grid if parts > 1 => {
                (MEET + PART * f64::from(parts)) * of_sm.div_ceil(ctas_per_sm.into()) as f64
            }
            _ => 0.0,
        }
}

/// SMs that have work at the same time: larger clusters than pairs leave some of every group of them idle.
pub(crate) const fn room(order: Order, sms: u32) -> u32 {
    match order {
        Order::Cluster { parts } if parts > 2 => sms - sms / 4,
        _ => sms,
    }
}

/// Keys of a row at most.
pub(super) fn visible_keys(problem: &Problem) -> usize {
    let (mask, all) = (problem.mask(), problem.longest_kv());
    match (mask.left(), mask.right()) {
        (Some(left), Some(right)) => {
            all.min((left as usize).saturating_add(right as usize).saturating_add(problem.longest_q()))
        }
        _ => all,
    }
}
