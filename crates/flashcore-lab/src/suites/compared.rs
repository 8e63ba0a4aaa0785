//! Suites of comparisons: each option of attention against the plain kernel that does the same work without it,
//! and sequence lengths of all kinds against the next one that fills its last row tile.

use flashcore_core::{DType, Mask, Problem};
use flashcore_kernels::{ALLOCATED_ALIGNMENT, Gpu, KernelConfig, plan};

use crate::{
    comparison::Comparison,
    task::{AttentionSpec, Task, TaskError},
};

/// Comparisons, or why they cannot be made.
pub(super) type Comparisons = Result<Vec<Comparison>, TaskError>;

/// An option beside the plain kernel, or beside a peer that has the option too; without a mask, and causal.
struct Row {
    what: &'static str,
    shapes: &'static [[usize; 4]],
    change: fn(&mut AttentionSpec),
    peer: Option<&'static str>,
    /// Upper bound on the ratio.
    wanted: f64,
}

const ROWS: [Row; 3] = [
    Row {
        what: "8 heads of keys, against as many as of queries",
        shapes: &[[4, 32, 4096, 128], [2, 64, 4096, 128]],
        change: |spec| spec.k[1] = 8,
        peer: None,
        wanted: 1.05,
    },
    Row {
        what: "sinks, against none",
        shapes: &[[4, 16, 4096, 128], [4, 16, 4096, 64]],
        change: |spec| spec.sinks = true,
        peer: None,
        wanted: 1.05,
    },
    Row {
        what: "softcap, against FlexAttention with the same score function",
        shapes: &[[4, 16, 4096, 128]],
        change: |spec| spec.softcap = Some(30.0),
        peer: Some("torch-flex"),
        wanted: 1.0,
    },
];

/// Keys that a query sees in the window, itself included.
const WINDOW: u32 = 1024;
/// What a window may cost for the tiles that it visits.
const WINDOWED: f64 = 1.10;
/// Rows and keys of a tile where no GPU kernel takes a problem.
const USUAL_TILE: [usize; 2] = [128, 128];

/// The suite `options`: windows, then the rows, those that need a peer last.
pub(super) fn options(dtype: DType) -> Comparisons {
    let mut all = vec![window(dtype, [1, 16, 16_384, 128])?, window(dtype, [1, 32, 16_384, 64])?];
    for Row { what, shapes, change, peer, wanted } in ROWS {
        for (shape, mask) in shapes.iter().flat_map(|shape| [(*shape, Mask::NONE), (*shape, Mask::CAUSAL)]) {
            let plain = Task::square(dtype, shape, mask)?;
            let task = plain.changed(change)?;
            let other = if peer.is_some() { task.clone() } else { plain };
            all.push(Comparison { peer, ..Comparison::of_ours(what, task, other, wanted) });
        }
    }
    Ok(all)
}

/// A window beside full attention of the same rows over as many keys as its tiles hold on average, to whole tiles; what
/// the rounding changes is in `work`.
fn window(dtype: DType, shape: [usize; 4]) -> Result<Comparison, TaskError> {
    let task = Task::square(dtype, shape, Mask::window(WINDOW - 1, 0))?;
    let tile = planned_tile(task.forward()?);
    let visited = visited_keys(task.forward()?, tile);
    let keys = (visited / tile[1] as f64).round() as usize * tile[1];
    let [batch, heads, _, dim] = shape;
    let plain = Task::square(dtype, shape, Mask::NONE)?.changed(|spec| spec.k = [batch, heads, keys, dim])?;
    let work = visited / visited_keys(plain.forward()?, planned_tile(plain.forward()?));
    let what = format!("window of {WINDOW} keys, against as many tiles of keys for every row");
    Ok(Comparison { work, ..Comparison::of_ours(what, task, plain, WINDOWED) })
}

/// Rows and keys of the tiles that a problem is cut into on an H200.
fn planned_tile(problem: &Problem) -> [usize; 2] {
    let sizes = plan(problem, &Gpu::HOPPER, ALLOCATED_ALIGNMENT).map(|plan| match plan.kernel() {
        KernelConfig::Sm80(cfg) => [cfg.tile_m(), cfg.shape.tile_n],
        KernelConfig::Sm90(cfg) => [cfg.tile_m(), cfg.tile_n()],
        _ => USUAL_TILE.map(|size| size as u32),
    });
    sizes.map_or(USUAL_TILE, |sizes| sizes.map(|size| size as usize))
}

/// Keys of the tiles of `rows` by `keys` that a row goes through on average, those that its mask hides included.
fn visited_keys(problem: &Problem, [rows, keys]: [usize; 2]) -> f64 {
    let (queries, all, mask) = (problem.seq_q(), problem.seq_kv(), problem.mask());
    let visited = (0..queries).step_by(rows).map(|first| {
        let last = (first + rows).min(queries) - 1;
        let (start, end) = (mask.keys(first, queries, all).start, mask.keys(last, queries, all).end);
        (last - first + 1) * (end.div_ceil(keys) - start / keys) * keys
    });
    visited.sum::<usize>() as f64 / queries as f64
}

/// Rows that lengths are rounded up to.
const TILE_ROWS: usize = 128;
/// What a tile that is not full may cost.
const NOT_FULL: f64 = 1.10;

/// Lengths beside powers of two and three quarters of them, and primes between.
const LENGTHS: [usize; 36] = [
    64, 65, 96, 127, 129, 191, 193, 255, 257, 320, 383, 385, 449, 511, 513, 641, 769, 1000, 1023, 1025, 1151,
    1537, 2047, 2049, 2503, 3073, 4095, 4097, 5003, 6145, 8191, 8193, 10_007, 12_289, 16_257, 16_383,
];

/// The suite `sweep`: every length, full and causal.
pub(super) fn sweep(dtype: DType) -> Comparisons {
    let mut all = Vec::new();
    for [heads, dim] in [[16, 128], [32, 64]] {
        for (mask, name) in [(Mask::NONE, "full"), (Mask::CAUSAL, "causal")] {
            let what = format!("1x{heads}xSx{dim} {name}, against S rounded up to {TILE_ROWS}");
            for seq in LENGTHS {
                let [task, other] = [seq, seq.next_multiple_of(TILE_ROWS)]
                    .map(|seq| Task::square(dtype, [1, heads, seq, dim], mask));
                all.push(Comparison::of_ours(what.clone(), task?, other?, NOT_FULL));
            }
        }
    }
    Ok(all)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_length_leaves_its_last_tile_partly_empty() {
        assert!(LENGTHS.is_sorted() && LENGTHS[0] == 64 && LENGTHS.iter().all(|seq| seq % TILE_ROWS != 0));
        let all = sweep(DType::F16).unwrap();
        assert_eq!(all.len(), 4 * LENGTHS.len());
        assert!(all.iter().all(|c| c.work == 1.0 && c.task.spec().dtype() == "f16"));
    }

    #[track_caller]
    fn check_visited([queries, keys]: [usize; 2], mask: Mask, tile: [usize; 2], tiles: f64) {
        let plain = Task::square(DType::F16, [1, 1, queries, 64], mask).unwrap();
        let task = plain.changed(|spec| spec.k[2] = keys).unwrap();
        assert_eq!(visited_keys(task.forward().unwrap(), tile), tiles * tile[1] as f64, "{task} by {tile:?}");
    }

    #[test]
    fn tiles_that_a_mask_hides_are_not_visited() {
        let window = Mask::window(WINDOW - 1, 0);
        // The first eight row tiles visit 1 to 8 tiles of keys, the 120 others 9.
        check_visited([16_384; 2], window, [128, 128], (36.0 + 120.0 * 9.0) / 128.0);
        check_visited([256; 2], Mask::CAUSAL, [64, 64], 2.5);
        check_visited([256, 130], Mask::NONE, [128, 64], 3.0);
        // A last row tile of 2 rows visits all 3 tiles.
        check_visited([130; 2], Mask::CAUSAL, [64, 64], (64.0 + 2.0 * 64.0 + 3.0 * 2.0) / 130.0);
    }

    #[test]
    fn windows_do_the_work_of_their_counterpart() {
        for one in options(DType::F16).unwrap().iter().take(2) {
            assert!((0.8..1.25).contains(&one.work) && one.work != 1.0, "{one:?}");
        }
    }

    #[test]
    fn every_option_is_compared_with_its_plain_counterpart() {
        let other = |c: &Comparison| c.peer.map_or_else(|| c.other.to_string(), str::to_owned);
        let names = |c: &Comparison| (c.task.to_string(), other(c), c.wanted);
        let found: Vec<_> = options(DType::F16).unwrap().iter().map(names).collect();
        let wanted = [
            ("4x32x4096x128 f16 kv8", "4x32x4096x128 f16", 1.05),
            ("2x64x4096x128 f16 kv8 causal", "2x64x4096x128 f16 causal", 1.05),
            ("4x16x4096x64 f16 sinks", "4x16x4096x64 f16", 1.05),
            ("4x16x4096x128 f16 causal cap30", "torch-flex", 1.0),
        ];
        for (task, other, most) in wanted {
            let row = (task.to_owned(), other.to_owned(), most);
            assert!(found.contains(&row), "no {row:?} in {found:#?}");
        }
        assert_eq!(found.len(), 12);
    }
}
