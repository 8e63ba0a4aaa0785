//! How gradients are split into units and tiles. Knows the problem but no memory.

use std::ops::Range;

use flashcore_core::{Instance, Problem, Sequence};

/// Keys of a unit: with their gradients they stay in the second-level cache.
pub(super) const KEYS: usize = 128;

/// Queries of a tile: their scores stay there, too.
pub(super) const ROWS: usize = 64;

/// A block of keys of one key head.
#[derive(Clone, PartialEq, Eq, Debug)]
pub(super) struct Unit {
    pub(super) index: usize,
    pub(super) sequence: usize,
    pub(super) kv_head: usize,
    /// Keys, counted within the sequence.
    pub(super) keys: Range<usize>,
    /// The unit with the keys before these.
    pub(super) after: Option<usize>,
}

/// All units, the first of every head first: neighbours in the list seldom wait for each other.
pub(super) fn units(problem: Instance<'_>) -> Vec<Unit> {
    let heads = problem.heads_kv();
    let mut units: Vec<Unit> = Vec::new();
    let keys = |n: usize| problem.sequence(n).kv_len;
    let mut left: Vec<usize> = (0..problem.sequences()).filter(|&n| keys(n) > 0).collect();
    let mut last = vec![None; left.last().map_or(0, |last| last + 1) * heads];
    let mut start = 0;
    while !left.is_empty() {
        for (&sequence, kv_head) in left.iter().flat_map(|n| (0..heads).map(move |head| (n, head))) {
            let index = units.len();
            let after = last[sequence * heads + kv_head].replace(index);
            let keys = start..keys(sequence).min(start + KEYS);
            units.push(Unit { index, sequence, kv_head, keys, after });
        }
        start += KEYS;
        left.retain(|&n| keys(n) > start);
    }
    units
}

/// The queries of tile `n` of a sequence.
pub(super) fn tile(s: &Sequence, n: usize) -> Range<usize> {
    n * ROWS..s.q_len.min((n + 1) * ROWS)
}

/// Tiles of a sequence.
pub(super) fn tiles(s: &Sequence) -> usize {
    s.q_len.div_ceil(ROWS)
}

/// All keys that some of the queries see; bands move with the query, so the first and the last bound them.
pub(super) fn visible(problem: &Problem, s: &Sequence, queries: &Range<usize>) -> Range<usize> {
    let keys = |query: usize| problem.mask().keys(query, s.q_len, s.kv_len);
    let (start, end) = (keys(queries.start).start, keys(queries.end - 1).end);
    start.min(end)..end
}

#[cfg(test)]
mod tests {
    use super::*;
    use flashcore_core::{DType, Dims, Layout, Lengths, Spec, Values};

    #[test]
    fn units_hold_every_key_once_and_follow_each_other() {
        let layout = |heads, seq| Layout::bhsd(Dims::new(3, heads, seq, 8)).unwrap();
        let values = Values { lengths: Lengths::keys(vec![300, 0, 128]), ..Values::default() };
        let kv = layout(2, 300);
        let problem = Spec::new(DType::F32, layout(4, 5), kv, kv).with(&values).parse().unwrap();
        let units = units(Instance::new(&problem, &values).unwrap());
        assert_eq!(units.len(), 2 * (3 + 1));
        for (sequence, kv_head, len) in [(0, 0, 300), (0, 1, 300), (1, 0, 0), (2, 1, 128)] {
            let of_head = |unit: &&Unit| unit.sequence == sequence && unit.kv_head == kv_head;
            let (mut end, mut before) = (0, None);
            for unit in units.iter().filter(of_head) {
                assert_eq!((unit.keys.start, unit.after), (end, before));
                assert!(unit.after.is_none_or(|after| after < unit.index));
                (end, before) = (unit.keys.end, Some(unit.index));
            }
            assert_eq!(end, len);
        }
    }
}
