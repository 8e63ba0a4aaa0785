//! The suite `options`: each option of attention beside the plain kernel that does the same work without it.

use flashcore_core::{DType, Mask, Problem};
use flashcore_kernels::{ALLOCATED_ALIGNMENT, Gpu, KernelConfig, plan};

use super::Comparisons;
use crate::{
    comparison::Comparison,
    task::{Task, TaskError, TaskSpec},
};

/// What grouped heads and sinks may cost.
const SLIGHT: f64 = 1.05;
/// What a window may cost for the tiles that it visits.
const WINDOWED: f64 = 1.10;
/// Keys that a query sees in the window, itself included.
const WINDOW: u32 = 1024;
/// The limit of scores.
const SOFTCAP: f32 = 30.0;
/// Who else computes attention with a limit of scores.
const FLEX: &str = "torch-flex";
/// Rows and keys of a tile where no GPU kernel takes a problem.
const USUAL_TILE: [usize; 2] = [128, 128];

/// All comparisons, those that need a peer last.
pub(super) fn comparisons(dtype: DType) -> Comparisons {
    Ok([grouped(dtype)?, with_sinks(dtype)?, windows(dtype)?, capped(dtype)?].concat())
}

fn grouped(dtype: DType) -> Comparisons {
    let against = |shape: [usize; 4], mask| {
        let plain = Task::square(dtype, shape, mask)?;
        let [batch, heads, seq, dim] = shape;
        let task = changed(&plain, |spec| spec.k = [batch, 8, seq, dim])?;
        let what = format!("{heads} heads on 8, against {heads} on {heads}");
        Ok(Comparison::of_ours(what, task, plain, SLIGHT))
    };
    full_and_causal(&[[4, 32, 4096, 128], [2, 64, 4096, 128]], against)
}

fn with_sinks(dtype: DType) -> Comparisons {
    let against = |shape, mask| {
        let plain = Task::square(dtype, shape, mask)?;
        let task = changed(&plain, |spec| spec.sinks = true)?;
        Ok(Comparison::of_ours("sinks, against none", task, plain, SLIGHT))
    };
    full_and_causal(&[[4, 16, 4096, 128], [4, 16, 4096, 64]], against)
}

fn capped(dtype: DType) -> Comparisons {
    let against = |shape, mask| {
        let task = changed(&Task::square(dtype, shape, mask)?, |spec| spec.softcap = Some(SOFTCAP))?;
        let what = "softcap, against FlexAttention with the same score function";
        Ok(Comparison { peer: Some(FLEX), ..Comparison::of_ours(what, task.clone(), task, 1.0) })
    };
    full_and_causal(&[[4, 16, 4096, 128]], against)
}

fn full_and_causal(
    shapes: &[[usize; 4]],
    make: impl Fn([usize; 4], Mask) -> Result<Comparison, TaskError>,
) -> Comparisons {
    let masked = shapes.iter().flat_map(|&shape| [(shape, Mask::NONE), (shape, Mask::CAUSAL)]);
    masked.map(|(shape, mask)| make(shape, mask)).collect()
}

fn windows(dtype: DType) -> Comparisons {
    [[1, 16, 16_384, 128], [1, 32, 16_384, 64]].into_iter().map(|shape| window(dtype, shape)).collect()
}

/// A window beside full attention of the same rows over as many keys as its tiles hold on average, to whole tiles; what
/// the rounding changes is in `work`.
fn window(dtype: DType, shape: [usize; 4]) -> Result<Comparison, TaskError> {
    let task = Task::square(dtype, shape, Mask::window(WINDOW - 1, 0))?;
    let tile = planned_tile(task.problem());
    let visited = visited_keys(task.problem(), tile);
    let keys = (visited / tile[1] as f64).round() as usize * tile[1];
    let [batch, heads, _, dim] = shape;
    let plain = changed(&Task::square(dtype, shape, Mask::NONE)?, |spec| spec.k = [batch, heads, keys, dim])?;
    let work = visited / visited_keys(plain.problem(), planned_tile(plain.problem()));
    let what = format!("window of {WINDOW} keys, against as many tiles of keys for every row");
    Ok(Comparison { work, ..Comparison::of_ours(what, task, plain, WINDOWED) })
}

fn changed(task: &Task, change: impl FnOnce(&mut TaskSpec)) -> Result<Task, TaskError> {
    let mut spec = task.spec().clone();
    change(&mut spec);
    Task::parse(spec)
}

/// Rows and keys of the tiles that a problem is cut into on an H200.
fn planned_tile(problem: &Problem) -> [usize; 2] {
    let sizes = plan(problem, &Gpu::HOPPER, ALLOCATED_ALIGNMENT).map(|plan| match plan.kernel() {
        KernelConfig::Sm80(cfg) => [cfg.shape.tile_m(), cfg.shape.tile_n],
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

#[cfg(test)]
mod tests {
    use super::*;

    #[track_caller]
    fn check_visited([queries, keys]: [usize; 2], mask: Mask, tile: [usize; 2], tiles: f64) {
        let plain = Task::square(DType::F16, [1, 1, queries, 64], mask).unwrap();
        let task = changed(&plain, |spec| spec.k[2] = keys).unwrap();
        assert_eq!(visited_keys(task.problem(), tile), tiles * tile[1] as f64, "{task} by {tile:?}");
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
        for comparison in windows(DType::F16).unwrap() {
            assert!((0.8..1.25).contains(&comparison.work), "{comparison:?}");
        }
    }

    #[test]
    fn every_option_is_compared_with_its_plain_counterpart() {
        let other = |c: &Comparison| c.peer.map_or_else(|| c.other.to_string(), str::to_owned);
        let names = |c: &Comparison| (c.task.to_string(), other(c), c.wanted);
        let found: Vec<_> = comparisons(DType::F16).unwrap().iter().map(names).collect();
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
