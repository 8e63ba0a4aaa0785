//! How a problem is split into units of work. Called by `forward`; knows the problem but no memory.
//!
//! The rows of a key head are its (query, head) pairs, queries first: row `r` is query `r / group` of the group's head
//! `r % group`. A row's bits depend only on the splits along its *keys*, and those depend on the queries and keys of
//! its own sequence; splits along rows may depend on the number of threads.

use std::ops::Range;

use flashcore_core::{Instance, Problem, Sequence, Sequences};

use crate::level::Shape;

/// Rows of a sequence up to which the decode kernel is faster than a tile that is mostly padding: this share of a vector. On
/// a Zen 5 eight rows of 8192 × 128 took 0.46 ms where tiles took 0.54 (bf16), 0.78 (f32) and 0.88 (f16); sixteen took 0.25
/// where tiles took 0.15 to 0.24.
const DECODE_SHARE: usize = 2;

/// Queries up to which it is the choice where the plan may not look at the number of heads.
const DECODE_QUERIES: usize = 2;

/// Rows that share a pass over keys and values where something is added to their scores: only the decode kernel does that.
const BIASED_ROWS: usize = 32;

/// Fewest keys worth a partial result.
const MIN_SPLIT: usize = 512;

/// Most partial results of a row.
const MAX_SPLITS: usize = 32;

/// Queries times splits of one head stay below this, which bounds the memory of partial results.
const SPLIT_QUERIES: usize = 512;

/// What to do with a unit.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Work {
    /// Many rows: tiles.
    Prefill,
    /// Fewer: tiles, but laying out keys for matrix units would take longer than multiplying them.
    Tiles,
    /// A few rows: stream the keys.
    Decode,
    /// Rows beyond the used queries: zeros.
    Clear,
}

/// Rows of one key head, and the keys to fold into them.
#[derive(Clone, PartialEq, Eq, Debug)]
pub(crate) struct Unit {
    pub(crate) work: Work,
    pub(crate) sequence: usize,
    pub(crate) kv_head: usize,
    /// Rows, counted within the sequence and key head.
    pub(crate) rows: Range<usize>,
    /// Keys, counted within the sequence.
    pub(crate) keys: Range<usize>,
    /// First row among the partial results, where the keys are only a part.
    pub(crate) partial: Option<usize>,
}

impl Unit {
    /// Something proportional to the time it takes.
    fn cost(&self) -> u64 {
        (self.rows.len() as u64).saturating_mul(self.keys.len() as u64 + 1)
    }
}

/// Partial results to merge.
#[derive(Clone, PartialEq, Eq, Debug)]
pub(crate) struct Merge {
    /// The rows, without their keys.
    pub(crate) unit: Unit,
    /// First row of the first part.
    pub(crate) first: usize,
    /// Number of parts, one after another.
    pub(crate) parts: usize,
}

/// Units of a problem; kept between calls so that planning allocates nothing.
#[derive(Default, Debug)]
pub(crate) struct Plan {
    /// Units, the longest first.
    pub(crate) units: Vec<Unit>,
    /// What to merge when all units are done.
    pub(crate) merges: Vec<Merge>,
    /// Rows of partial results.
    pub(crate) partial_rows: usize,
}

impl Plan {
    /// Plans `problem` for `threads` threads.
    pub(crate) fn build(&mut self, problem: Instance<'_>, shape: Shape, threads: usize) {
        self.units.clear();
        self.merges.clear();
        self.partial_rows = 0;
        // Empty sequences take no memory, so that there may be any number of them.
        if problem.rows() == 0 {
            return;
        }
        let chunk = chunk_rows(&problem, shape, threads);
        for n in 0..problem.sequences() {
            self.push_sequence(problem, n, chunk, shape);
        }
        self.units.sort_unstable_by_key(|u| std::cmp::Reverse(u.cost()));
    }

    /// Bytes held.
    pub(crate) fn bytes(&self) -> usize {
        self.units.capacity() * size_of::<Unit>() + self.merges.capacity() * size_of::<Merge>()
    }

    fn push_sequence(&mut self, problem: Instance<'_>, n: usize, chunk: usize, shape: Shape) {
        let (s, group) = (problem.sequence(n), problem.group());
        let rows = s.q_len * group;
        for kv_head in 0..problem.heads_kv() {
            let unit = |work, rows, keys| Unit { work, sequence: n, kv_head, rows, keys, partial: None };
            // In packed tensors the rows after a sequence belong to the next one.
            if matches!(problem.sequences_kind(), Sequences::Used { .. }) && s.q_len < problem.seq_q() {
                self.units.push(unit(Work::Clear, rows..problem.seq_q() * group, 0..0));
            }
            let work = work(&problem, s.q_len, shape);
            let height = match work {
                Work::Decode if problem.bias().is_some() => BIASED_ROWS,
                Work::Decode => rows,
                _ => chunk,
            };
            for start in (0..rows).step_by(height.max(1)) {
                let rows = start..rows.min(start + height);
                let keys = visible(&problem, &s, &rows);
                self.push_split(unit(work, rows, keys), s.q_len, shape.tiles.keys());
            }
        }
    }

    /// Splits the keys of a unit with few queries, so that few heads keep many cores busy.
    fn push_split(&mut self, unit: Unit, queries: usize, block: usize) {
        let step = split_keys(&unit.keys, queries, block);
        let first_key = unit.keys.start / block * block;
        if unit.keys.end <= first_key + step {
            return self.units.push(unit);
        }
        let first = self.partial_rows;
        for start in (first_key..unit.keys.end).step_by(step) {
            let keys = start.max(unit.keys.start)..unit.keys.end.min(start + step);
            self.units.push(Unit { keys, partial: Some(self.partial_rows), ..unit.clone() });
            self.partial_rows += unit.rows.len();
        }
        let parts = (self.partial_rows - first) / unit.rows.len();
        self.merges.push(Merge { unit, first, parts });
    }
}

fn work(problem: &Problem, queries: usize, shape: Shape) -> Work {
    // A plan for any batch may not look at the number of heads.
    let (rows, few) = if problem.batch_invariant() {
        (queries, DECODE_QUERIES)
    } else {
        (queries * problem.group(), shape.lanes / DECODE_SHARE)
    };
    match rows {
        _ if rows <= few || problem.bias().is_some() => Work::Decode,
        _ if rows < shape.many => Work::Tiles,
        _ => Work::Prefill,
    }
}

/// All keys that some of the rows see; bands move with the query, so the first and the last row bound them.
pub(crate) fn visible(problem: &Problem, s: &Sequence, rows: &Range<usize>) -> Range<usize> {
    let keys = |row: usize| problem.mask().keys(row / problem.group(), s.q_len, s.kv_len);
    let (start, end) = (keys(rows.start).start, keys(rows.end - 1).end);
    start.min(end)..end
}

/// Keys of one part: whole blocks.
fn split_keys(keys: &Range<usize>, queries: usize, block: usize) -> usize {
    let parts = (SPLIT_QUERIES / queries.max(1)).clamp(1, MAX_SPLITS);
    keys.len().div_ceil(parts).max(MIN_SPLIT).max(32 * queries).next_multiple_of(block)
}

/// Rows per unit: many share a pass over keys and values, few give every thread something to do.
fn chunk_rows(problem: &Problem, shape: Shape, threads: usize) -> usize {
    let tiles = (problem.rows() / shape.tile_rows).max(1);
    let chunk = (tiles / (threads * 4)).clamp(1, shape.tiles.chunk());
    chunk * shape.tile_rows
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::Tiles;
    use flashcore_core::{DType, Dims, Layout, Lengths, Mask, Spec, Values};
    use std::collections::HashMap;

    const SHAPE: Shape = Shape { lanes: 16, tile_rows: 32, many: 64, tiles: Tiles::USUAL };

    fn problem(
        [batch, heads_q, heads_kv, seq_q, seq_kv]: [usize; 5],
        mask: Mask,
        lengths: Lengths,
    ) -> (Problem, Values) {
        let layout = |heads, seq| Layout::bhsd(Dims::new(batch, heads, seq, 64)).unwrap();
        let (q, kv) = (layout(heads_q, seq_q), layout(heads_kv, seq_kv));
        let values = Values { lengths, ..Values::default() };
        let spec = Spec { mask, ..Spec::new(DType::F32, q, kv, kv) }.with(&values);
        (spec.parse().unwrap(), values)
    }

    fn plan(problem: Instance<'_>, threads: usize) -> Plan {
        let mut plan = Plan::default();
        plan.build(problem, SHAPE, threads);
        plan
    }

    /// Every row is written by one unit or merge, its visible keys are covered once, whatever the threads.
    fn check((problem, values): &(Problem, Values)) {
        let problem = Instance::new(problem, values).unwrap();
        let mut cuts = Vec::new();
        for threads in [1, 2, 16] {
            let plan = plan(problem, threads);
            let mut rows: HashMap<[usize; 3], Vec<Range<usize>>> = HashMap::new();
            for unit in &plan.units {
                for row in unit.rows.clone() {
                    rows.entry([unit.sequence, unit.kv_head, row]).or_default().push(unit.keys.clone());
                }
            }
            assert_eq!(rows.len(), problem.rows() * problem.heads_kv() / problem.heads_q() * problem.group());
            let mut covered: Vec<_> =
                rows.into_iter().map(|(row, keys)| (row, cut(problem, row, keys))).collect();
            covered.sort();
            cuts.push(covered);
        }
        assert!(cuts.windows(2).all(|pair| pair[0] == pair[1]), "cuts along keys follow the threads");
    }

    /// Where the visible keys of a row are split.
    fn cut(
        problem: Instance<'_>,
        [sequence, _, row]: [usize; 3],
        mut parts: Vec<Range<usize>>,
    ) -> Vec<usize> {
        let s = problem.sequence(sequence);
        let query = row / problem.group();
        if query >= s.q_len {
            assert!(parts.len() == 1 && parts[0].is_empty());
            return vec![];
        }
        let seen = problem.mask().keys(query, s.q_len, s.kv_len);
        parts.sort_by_key(|keys| keys.start);
        assert!(parts.windows(2).all(|pair| pair[0].end == pair[1].start), "parts touch");
        assert!(seen.is_empty() || parts[0].start <= seen.start && parts[parts.len() - 1].end >= seen.end);
        parts[1..].iter().map(|keys| keys.start).collect()
    }

    #[test]
    fn every_row_and_key_once() {
        for mask in [Mask::NONE, Mask::CAUSAL, Mask::window(100, 7), Mask::CAUSAL.top_left()] {
            for shape in [[1, 8, 8, 300, 300], [2, 6, 2, 1, 9000], [1, 4, 1, 8, 3000], [1, 2, 2, 64, 5000]] {
                check(&problem(shape, mask, Lengths::Uniform));
            }
            check(&problem([2, 4, 2, 90, 200], mask, Lengths::used([0, 33], [200, 1])));
            check(&problem([1, 4, 2, 90, 2000], mask, Lengths::ragged([0, 1, 1, 90], [0, 1500, 1501, 2000])));
        }
    }

    #[test]
    fn few_queries_split_their_keys() {
        let parts = |shape| {
            let (problem, values) = problem(shape, Mask::NONE, Lengths::Uniform);
            plan(Instance::new(&problem, &values).unwrap(), 1).merges.iter().map(|m| m.parts).max()
        };
        assert_eq!(parts([1, 1, 1, 1, 511]), None);
        assert_eq!(parts([1, 1, 1, 1, 8192]), Some(16));
        assert_eq!(parts([1, 1, 1, 1, 1 << 20]), Some(MAX_SPLITS));
        assert_eq!(parts([1, 1, 1, 600, 8192]), None);
    }
}
