//! Layouts and masks against brute force.

use std::collections::HashSet;

use flashcore_core::{Align, Dims, Instance, Layout, Lengths, Mask, Spec, Tensor, TensorViewMut, Values};
use proptest::prelude::*;

/// Every element index that a layout reaches, positions in order.
fn reached(layout: &Layout) -> Vec<usize> {
    let d = layout.dims();
    let rows = (0..d.batch).flat_map(|b| (0..d.heads).flat_map(move |h| (0..d.seq).map(move |s| (b, h, s))));
    rows.flat_map(|(b, h, s)| (0..d.dim).map(move |i| layout.row(b, h, s) + i)).collect()
}

fn any_layout() -> impl Strategy<Value = Layout> {
    let extents = (0usize..4, 0usize..4, 0usize..5, 1usize..5);
    let strides = (0usize..40, 0usize..40, 0usize..40);
    (extents, strides).prop_map(|((b, h, s, d), (sb, sh, ss))| {
        Layout::strided(Dims::new(b, h, s, d), [sb, sh, ss, 1]).unwrap()
    })
}

/// Dimensions nested in any order with any padding: what real tensors are.
fn nested_layout() -> impl Strategy<Value = Layout> {
    let extents = (1usize..4, 1usize..4, 1usize..5, 1usize..5);
    let order = Just([0usize, 1, 2]).prop_shuffle();
    (extents, order, [0usize..5, 0..5, 0..5]).prop_map(|((b, h, s, d), order, pads)| {
        let dims = Dims::new(b, h, s, d);
        let mut strides = [0, 0, 0, 1];
        let mut reach = d;
        for (dimension, pad) in order.into_iter().zip(pads) {
            strides[dimension] = reach + pad;
            reach = strides[dimension] * dims.array()[dimension];
        }
        Layout::strided(dims, strides).unwrap()
    })
}

proptest! {
    #[test]
    fn span_is_one_more_than_the_largest_index(layout in any_layout()) {
        let largest = reached(&layout).into_iter().max();
        prop_assert_eq!(layout.span(), largest.map_or(0, |index| index + 1));
    }

    #[test]
    fn shared_elements_are_never_missed(layout in any_layout()) {
        let all = reached(&layout);
        let distinct: HashSet<_> = all.iter().collect();
        if distinct.len() < all.len() {
            prop_assert!(layout.may_overlap());
            let mut data = vec![0f32; layout.span()];
            prop_assert!(TensorViewMut::new(&mut data, layout).is_err());
        }
    }

    #[test]
    fn nested_layouts_are_never_refused(layout in nested_layout()) {
        prop_assert!(!layout.may_overlap());
        let mut tensor = Tensor::<f32>::zeros(layout).unwrap();
        prop_assert!(tensor.view_mut().is_ok());
    }

    #[test]
    fn no_strides_make_a_layout_panic(dims in [0usize..9, 0..9, 0..9, 0..9], strides: [usize; 4], seed: u8) {
        let [b, h, s, d] = dims;
        let scaled = strides.map(|stride| stride >> (seed % 64));
        if let Ok(layout) = Layout::strided(Dims::new(b, h, s, d), [scaled[0], scaled[1], scaled[2], 1]) {
            // Indexing stays in range for all positions, even of tensors without elements.
            let last = |extent: usize| extent.saturating_sub(1);
            prop_assert!(layout.row(last(b), last(h), last(s)) < usize::MAX / 8);
            layout.may_overlap();
        }
    }

    #[test]
    fn masks_are_bands(
        left in proptest::option::of(0u32..12),
        right in proptest::option::of(0u32..12),
        top_left: bool,
        seq_q in 0usize..12,
        seq_kv in 0usize..12,
    ) {
        let band = Mask::window(left, right);
        let mask = if top_left { band.top_left() } else { band };
        for i in 0..seq_q {
            let diagonal = if top_left { i as i64 } else { i as i64 + seq_kv as i64 - seq_q as i64 };
            let sees = |j: usize| {
                left.is_none_or(|l| j as i64 >= diagonal - i64::from(l))
                    && right.is_none_or(|r| j as i64 <= diagonal + i64::from(r))
            };
            let seen: Vec<usize> = (0..seq_kv).filter(|&j| sees(j)).collect();
            prop_assert_eq!(mask.keys(i, seq_q, seq_kv).collect::<Vec<_>>(), seen);
        }
        let pairs: usize = (0..seq_q).map(|i| mask.keys(i, seq_q, seq_kv).len()).sum();
        prop_assert_eq!(mask.pairs(seq_q, seq_kv), pairs as u64);
    }

    #[test]
    fn packed_sequences_tile_the_rows(lengths in proptest::collection::vec((0u32..9, 0u32..9), 0..6)) {
        let offsets = |of: fn(&(u32, u32)) -> u32| {
            let mut ends = vec![0];
            lengths.iter().for_each(|pair| ends.push(ends[ends.len() - 1] + of(pair)));
            ends
        };
        let (q, kv) = (offsets(|p| p.0), offsets(|p| p.1));
        let layout = |end: u32| Layout::bhsd(Dims::new(1, 1, end as usize, 8)).unwrap();
        let (of_q, of_kv) = (layout(q[q.len() - 1]), layout(kv[kv.len() - 1]));
        let values = Values { lengths: Lengths::ragged(q, kv), ..Values::default() };
        let spec = Spec::new(flashcore_core::DType::F32, of_q, of_kv, of_kv).with(&values);
        let problem = spec.parse().unwrap();
        let problem = Instance::new(&problem, &values).unwrap();
        prop_assert_eq!(problem.sequences(), lengths.len());
        let (mut next_q, mut next_kv) = (0, 0);
        for (n, &(len_q, len_kv)) in lengths.iter().enumerate() {
            let s = problem.sequence(n);
            prop_assert_eq!((s.batch, s.q_start, s.kv_start), (0, next_q, next_kv));
            prop_assert_eq!((s.q_len, s.kv_len), (len_q as usize, len_kv as usize));
            (next_q, next_kv) = (next_q + s.q_len, next_kv + s.kv_len);
        }
    }
}

#[test]
fn masks_survive_the_largest_bounds_and_name_themselves() {
    let widest = Mask::window(u32::MAX, u32::MAX);
    assert_eq!(widest.keys(0, 1, 5), 0..5);
    assert_eq!(widest.keys(i32::MAX as usize - 1, i32::MAX as usize, 1), 0..1);
    let long = i32::MAX as usize;
    assert_eq!(widest.pairs(long, long), (long * long) as u64);
    assert_eq!(Mask::CAUSAL.pairs(long, long), (long * (long + 1) / 2) as u64);
    let names = [
        (Mask::NONE, "full"),
        (Mask::CAUSAL, "causal"),
        (Mask::CAUSAL.top_left(), "causal top-left"),
        (Mask::window(3, None), "window 3,inf"),
        (Mask::NONE.top_left(), "full"),
    ];
    for (mask, name) in names {
        assert_eq!(mask.to_string(), name);
    }
    assert_eq!(Mask::CAUSAL.top_left().align(), Align::TopLeft);
}

#[test]
fn dense_orders_are_plain_views() {
    let dims = Dims::new(2, 3, 5, 7);
    assert_eq!(Layout::bhsd(dims).unwrap().strides(), [105, 35, 7, 1]);
    assert_eq!(Layout::bshd(dims).unwrap().strides(), [105, 7, 21, 1]);
    let tensor = Tensor::bshd((0..210).map(|x| x as f32).collect(), [2, 3, 5, 7]).unwrap();
    assert_eq!(tensor.view().row(1, 2, 3)[0], (105 + 2 * 7 + 3 * 21) as f32);
}
