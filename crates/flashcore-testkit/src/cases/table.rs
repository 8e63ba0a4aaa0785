//! The table of cases: one function per subject, one line per case.

use flashcore_core::{Dims, Lengths, Mask};

use super::{Case, Sinks, Tag, bias, dropout};
use crate::{
    inputs::{Inputs, Placement},
    kinds::Kind,
    pages,
};

/// Every case.
pub fn all() -> Vec<Case> {
    let families = [
        named(),
        used_lengths(),
        empty_rows(),
        zero_lengths(),
        extremes(),
        kinds(),
        big(),
        layouts(),
        masks(),
        gqa(),
        ragged(),
        head_dims(),
        lengths(),
        softcaps(),
        sinks(),
        bias::cases(),
        dropout::cases(),
        pages::cases(),
    ];
    families.into_iter().flatten().collect()
}

/// The project's bars: these shapes, and these sequence lengths at 1×8×S×64.
fn named() -> Vec<Case> {
    let shapes = [[1, 8, 512, 64], [1, 2, 64, 64], [1, 4, 128, 64], [2, 2, 64, 64], [1, 8, 2048, 64]];
    let sweep = [4, 64, 65, 128, 192, 256].map(|seq| [1, 8, seq, 64]);
    let named = |[batch, heads, seq, dim]: [usize; 4]| {
        let name = format!("named {}", Dims::new(batch, heads, seq, dim));
        let shape = [batch, heads, heads, seq, seq];
        Case { f16_bar: Some(2e-3), ..Case::new(Tag::Named, name, shape, dim) }
    };
    shapes.into_iter().chain(sweep).map(named).collect()
}

/// Key padding: what lies beyond the used lengths is NaN and Inf.
fn used_lengths() -> Vec<Case> {
    let case = |name: &str, lengths, mask| Case {
        lengths,
        mask,
        ..Case::new(Tag::UsedLengths, format!("used {name}"), [4, 2, 2, 70, 130], 64)
    };
    let keys = || Lengths::keys(vec![130, 129, 64, 1]);
    let both = || Lengths::used(vec![70, 1, 33, 64], vec![130, 128, 17, 65]);
    let queries = Lengths::Used { q: Some(vec![1, 70, 64, 7].into()), kv: None };
    vec![
        case("keys", keys(), Mask::NONE),
        case("keys causal", keys(), Mask::CAUSAL),
        case("keys window", keys(), Mask::window(20, 5)),
        case("both", both(), Mask::NONE),
        case("both causal", both(), Mask::CAUSAL),
        case("both causal top-left", both(), Mask::CAUSAL.top_left()),
        case("both window", both(), Mask::window(16, 0)),
        case("queries", queries, Mask::NONE),
        case("some zero", Lengths::used(vec![0, 70, 5, 0], vec![130, 0, 5, 0]), Mask::CAUSAL),
        Case { placement: Placement::Padded, ..case("both padded", both(), Mask::CAUSAL) },
        Case { placement: Placement::ExpandedBatch, ..case("keys expanded", keys(), Mask::NONE) },
        Case { sinks: Sinks::Normal, ..case("both sinks", both(), Mask::CAUSAL) },
    ]
}

/// Rows that see nothing: zeros with LSE −∞.
fn empty_rows() -> Vec<Case> {
    let case = |name: &str, [seq_q, seq_kv]: [usize; 2], mask| Case {
        mask,
        ..Case::new(Tag::EmptyRows, format!("empty rows {name}"), [1, 2, 1, seq_q, seq_kv], 64)
    };
    vec![
        case("causal, more queries than keys", [130, 64], Mask::CAUSAL),
        case("causal, one key", [67, 1], Mask::CAUSAL),
        case("window left behind", [150, 40], Mask::window(8, 8).top_left()),
        case("window ahead", [150, 40], Mask::window(8, 8)),
        Case { lengths: Lengths::keys(vec![0]), ..case("no used key", [65, 64], Mask::NONE) },
        Case { lengths: Lengths::keys(vec![3]), ..case("three used keys, causal", [65, 64], Mask::CAUSAL) },
    ]
}

fn zero_lengths() -> Vec<Case> {
    let case = |name: &str, shape| Case::new(Tag::ZeroLength, format!("zero {name}"), shape, 64);
    let causal = |name: &str, shape| Case { mask: Mask::CAUSAL, ..case(name, shape) };
    vec![
        case("queries", [2, 2, 2, 0, 64]),
        case("keys", [2, 2, 2, 65, 0]),
        case("queries and keys", [2, 2, 1, 0, 0]),
        case("batch", [0, 2, 2, 64, 64]),
        causal("queries causal", [1, 2, 2, 0, 64]),
        causal("keys causal", [1, 2, 2, 64, 0]),
        Case { sinks: Sinks::Normal, ..case("keys with sinks", [1, 2, 2, 5, 0]) },
        Case::ragged(
            Tag::ZeroLength,
            "zero ragged rows",
            &[(0, 0), (0, 7), (9, 0), (5, 5), (0, 0)],
            [2, 1],
            64,
        ),
        Case::ragged(Tag::ZeroLength, "zero ragged sequences", &[], [2, 1], 64),
    ]
}

/// Scores and values at the ends of their ranges.
fn extremes() -> Vec<Case> {
    let case = |name: &str, inputs, mask| Case {
        inputs,
        mask,
        ..Case::new(Tag::Extremes, name, [1, 2, 2, 66, 135], 64)
    };
    let scaled = |name: &str, scale| Case { scale: Some(scale), ..case(name, Inputs::Normal, Mask::NONE) };
    vec![
        case("row LSE below -88.7", Inputs::Low, Mask::NONE),
        case("row LSE below -88.7 causal", Inputs::Low, Mask::CAUSAL),
        Case { sinks: Sinks::Nothing, ..case("row LSE below -88.7 sinks", Inputs::Low, Mask::CAUSAL) },
        case("equal logits", Inputs::EqualKeys, Mask::NONE),
        case("equal logits causal", Inputs::EqualKeys, Mask::CAUSAL),
        Case { scale: Some(1.0), ..case("logits of 60000", Inputs::Sixty, Mask::NONE) },
        Case { scale: Some(1.0), ..case("logits of 60000 causal", Inputs::Sixty, Mask::CAUSAL) },
        Case {
            scale: Some(1.0),
            softcap: Some(50.0),
            ..case("logits of 60000 capped", Inputs::Sixty, Mask::NONE)
        },
        scaled("tiny scale", 1e-6),
        scaled("tiniest scale", 1e-37),
        case("peaked", Inputs::Peaked, Mask::NONE),
        case("rising scores", Inputs::Rising, Mask::NONE),
        case("rising scores causal", Inputs::Rising, Mask::CAUSAL),
        case("falling scores", Inputs::Falling, Mask::NONE),
        case("falling scores causal", Inputs::Falling, Mask::CAUSAL),
        case("large values", Inputs::LargeValues, Mask::CAUSAL),
    ]
}

/// Every kind of data but the one that all other cases have.
fn kinds() -> Vec<Case> {
    let case = |kind: Kind, mask: Mask| {
        let name = format!("{} {mask}", kind.name());
        let plain = Case::new(Tag::Kinds, name, [1, 2, 2, 66, 200], 64);
        Case { inputs: Inputs::Of(kind), mask, ..plain }
    };
    let others = Kind::ALL.into_iter().filter(|kind| !kind.is_normal());
    others.flat_map(|kind| [Mask::NONE, Mask::CAUSAL].map(|mask| case(kind, mask))).collect()
}

/// Element offsets past 2^31, and more heads than a grid dimension holds.
fn big() -> Vec<Case> {
    let far = Case::new(Tag::BigOffsets, "offsets past 2^31", [2, 4, 2, 65, 130], 64);
    let many = Case::new(Tag::ManyHeads, "batch 8300, one row", [8300, 8, 8, 1, 1], 64);
    vec![
        Case { placement: Placement::Sparse, mask: Mask::CAUSAL, ..far },
        many,
        Case::new(Tag::ManyHeads, "batch 8300, GQA", [8300, 8, 2, 1, 3], 32),
    ]
}

fn layouts() -> Vec<Case> {
    let case = |name: &str, placement, dim, mask| Case {
        placement,
        mask,
        ..Case::new(Tag::Layouts, format!("layout {name}"), [2, 2, 1, 40, 130], dim)
    };
    vec![
        case("interleaved", Placement::Interleaved, 64, Mask::CAUSAL),
        case("padded", Placement::Padded, 64, Mask::NONE),
        case("padded 128", Placement::Padded, 128, Mask::CAUSAL),
        case("unaligned", Placement::Unaligned, 64, Mask::CAUSAL),
        case("unaligned 40", Placement::Unaligned, 40, Mask::NONE),
        case("unaligned 128", Placement::Unaligned, 128, Mask::NONE),
        case("strided output", Placement::StridedOutput, 64, Mask::CAUSAL),
        case("expanded heads", Placement::ExpandedHeads, 64, Mask::CAUSAL),
        case("expanded batch", Placement::ExpandedBatch, 64, Mask::NONE),
        case("expanded sequence", Placement::ExpandedSequence, 64, Mask::NONE),
        Case {
            lengths: Lengths::ragged(vec![0, 25, 40], vec![0, 99, 130]),
            q: Dims::new(1, 2, 40, 64),
            k: Dims::new(1, 1, 130, 64),
            ..case("ragged interleaved", Placement::Interleaved, 64, Mask::CAUSAL)
        },
    ]
}

/// Masks at their edges, in both alignments, with as many, fewer and more queries than keys.
fn masks() -> Vec<Case> {
    let masks = [
        Mask::CAUSAL,
        Mask::window(0, 0),
        Mask::window(16, 0),
        Mask::window(0, 16),
        Mask::window(63, 65),
        Mask::window(5, None),
        Mask::window(None, 5),
        Mask::window(1000, 1000),
        Mask::window(u32::MAX, u32::MAX),
    ];
    let lengths = [[128, 128], [65, 190], [190, 65]];
    let case = |mask: Mask, [seq_q, seq_kv]: [usize; 2]| Case {
        mask,
        ..Case::new(Tag::Masks, format!("mask {mask} {seq_q}x{seq_kv}"), [1, 2, 1, seq_q, seq_kv], 64)
    };
    // As they are where a sequence is split: the last hides every key.
    let shifted = [
        Mask::CAUSAL.shifted(-40),
        Mask::CAUSAL.top_left().shifted(100),
        Mask::window(16, 0).shifted(-70),
        Mask::window(8, 8).top_left().shifted(70),
        Mask::window(5, None).top_left().shifted(30),
        Mask::window(None, 5).shifted(-1000),
    ];
    let aligned = masks.into_iter().flat_map(|mask| [mask, mask.top_left()]);
    let all = aligned.flat_map(|mask| lengths.map(|lengths| case(mask, lengths)));
    all.chain(shifted.map(|mask| case(mask, [128, 190]))).collect()
}

fn gqa() -> Vec<Case> {
    let heads = [[2, 1], [3, 1], [8, 1], [6, 2], [10, 2], [12, 2], [14, 2], [16, 4], [7, 7]];
    let case = |[heads_q, heads_kv]: [usize; 2], [seq_q, seq_kv]: [usize; 2]| Case {
        mask: Mask::CAUSAL,
        ..Case::new(
            Tag::Gqa,
            format!("gqa {heads_q}/{heads_kv} {seq_q}x{seq_kv}"),
            [1, heads_q, heads_kv, seq_q, seq_kv],
            64,
        )
    };
    heads.into_iter().flat_map(|heads| [case(heads, [70, 90]), case(heads, [1, 200])]).collect()
}

fn ragged() -> Vec<Case> {
    let case = |name: &str, pairs: &[(u32, u32)], heads, mask| Case {
        mask,
        ..Case::ragged(Tag::Ragged, format!("ragged {name}"), pairs, heads, 64)
    };
    let pairs = [(1, 1), (239, 1), (799, 3), (113, 203)];
    let single = |pair: (u32, u32), heads, mask: Mask| {
        case(&format!("{}x{} {mask}", pair.0, pair.1), &[pair], heads, mask)
    };
    let mut cases = vec![
        case("mixture", &pairs, [4, 2], Mask::NONE),
        case("mixture causal", &pairs, [4, 2], Mask::CAUSAL),
        case("mixture window", &pairs, [4, 2], Mask::window(64, 16)),
        case("decode batch", &[(1, 77), (1, 1), (1, 300), (1, 128), (3, 65)], [6, 2], Mask::CAUSAL),
        case("equal lengths", &[(64, 64); 5], [2, 2], Mask::CAUSAL),
        Case { sinks: Sinks::Normal, ..case("sinks", &pairs, [2, 1], Mask::CAUSAL) },
        Case { placement: Placement::Unaligned, ..case("unaligned", &pairs, [2, 1], Mask::CAUSAL) },
    ];
    for mask in [Mask::NONE, Mask::CAUSAL] {
        cases.extend(pairs.map(|pair| single(pair, [2, 1], mask)));
        cases.push(single((1023, 1024), [2, 1], mask));
    }
    cases.push(single((4224, 4224), [1, 1], Mask::CAUSAL));
    cases.push(Case {
        dim_v: 32,
        ..Case::ragged(Tag::Ragged, "ragged 4224x4224 dim 32", &[(4224, 4224)], [1, 1], 32)
    });
    cases
}

fn head_dims() -> Vec<Case> {
    let dims = [1, 3, 7, 8, 16, 24, 32, 33, 40, 48, 59, 64, 72, 80, 96, 100, 111, 112, 128, 160, 192, 256];
    let uneven = [(192, 128), (64, 128), (128, 64), (40, 72), (8, 256), (256, 8), (59, 33), (2, 111)];
    let case = |(dim, dim_v): (usize, usize), mask, shape| Case {
        dim_v,
        mask,
        ..Case::new(Tag::HeadDims, format!("dims {dim}/{dim_v} {mask}"), shape, dim)
    };
    let usual = dims.into_iter().map(|dim| (dim, dim)).chain(uneven).map(|dims| (dims, [1, 2, 1, 66, 130]));
    // Few rows, so that a simulator takes them too.
    let wide = [(257, 257), (320, 320), (512, 512), (512, 64), (64, 512), (511, 3), (5, 451)];
    let all = usual.chain(wide.map(|dims| (dims, [1, 2, 1, 20, 70])));
    let masked = all.flat_map(|(dims, shape)| [Mask::NONE, Mask::CAUSAL].map(|mask| case(dims, mask, shape)));
    masked.chain(long_wide_heads()).chain(head_dims_with_options()).collect()
}

/// Many rows of the widest heads, so that their tiles follow one another.
fn long_wide_heads() -> impl Iterator<Item = Case> {
    let masks = [Mask::NONE, Mask::CAUSAL, Mask::window(100, 30)];
    [(160, 160), (192, 128), (256, 256)].into_iter().flat_map(move |(dim, dim_v)| {
        masks.map(|mask| Case {
            dim_v,
            mask,
            ..Case::new(Tag::HeadDims, format!("dims {dim}/{dim_v} long {mask}"), [2, 4, 2, 333, 450], dim)
        })
    })
}

/// Head dims that are no multiples of a chunk, or wider than a warp's registers, together with everything else.
fn head_dims_with_options() -> Vec<Case> {
    let case = |name: &str, [dim, dim_v]: [usize; 2], mask| Case {
        dim_v,
        mask,
        ..Case::new(Tag::HeadDims, format!("dims {dim}/{dim_v} {name}"), [2, 2, 1, 20, 40], dim)
    };
    let placed = |name: &str, dims, placement| Case { placement, ..case(name, dims, Mask::CAUSAL) };
    let options = |dims: [usize; 2]| {
        let both = Lengths::used(vec![20, 7], vec![33, 40]);
        let pairs = [(1, 9), (17, 30), (0, 4), (25, 25)];
        [
            placed("interleaved", dims, Placement::Interleaved),
            placed("padded", dims, Placement::Padded),
            placed("unaligned", dims, Placement::Unaligned),
            placed("strided output", dims, Placement::StridedOutput),
            Case { lengths: both, ..case("used", dims, Mask::CAUSAL) },
            Case {
                softcap: Some(20.0),
                sinks: Sinks::Normal,
                ..case("capped, sinks", dims, Mask::window(9, 3))
            },
            Case {
                dim_v: dims[1],
                mask: Mask::CAUSAL,
                ..Case::ragged(
                    Tag::HeadDims,
                    format!("dims {}/{} ragged", dims[0], dims[1]),
                    &pairs,
                    [2, 1],
                    dims[0],
                )
            },
        ]
    };
    [[59, 59], [60, 111], [40, 301], [192, 160], [256, 256]].into_iter().flat_map(options).collect()
}

/// Sequence lengths around tile edges, and one query over many keys.
fn lengths() -> Vec<Case> {
    let case = |tag, [seq_q, seq_kv]: [usize; 2], dim, mask| Case {
        mask,
        ..Case::new(tag, format!("length {seq_q}x{seq_kv}x{dim} {mask}"), [1, 2, 2, seq_q, seq_kv], dim)
    };
    let edges = [1, 2, 15, 31, 63, 127, 129, 193, 257];
    let square = edges.map(|seq| case(Tag::Lengths, [seq, seq], 64, Mask::CAUSAL));
    let cross =
        [[1, 2], [2, 1], [64, 1], [33, 257], [128, 383]].map(|l| case(Tag::Lengths, l, 128, Mask::NONE));
    let decode =
        [1, 31, 64, 129, 512, 1025, 4097].map(|keys| case(Tag::Decode, [1, keys], 128, Mask::CAUSAL));
    square.into_iter().chain(cross).chain(decode).collect()
}

fn softcaps() -> Vec<Case> {
    let case = |softcap, mask, shape| Case {
        softcap: Some(softcap),
        mask,
        ..Case::new(Tag::Softcap, format!("softcap {softcap} {mask}"), shape, 64)
    };
    vec![
        case(30.0, Mask::NONE, [1, 2, 2, 70, 130]),
        case(30.0, Mask::CAUSAL, [1, 2, 2, 70, 130]),
        case(50.0, Mask::window(32, 0), [1, 4, 2, 130, 130]),
        case(0.5, Mask::NONE, [1, 2, 2, 70, 130]),
        case(1e4, Mask::CAUSAL, [1, 2, 2, 70, 130]),
        // Scores are a millionth of the cap.
        case(1e6, Mask::CAUSAL, [1, 2, 2, 70, 130]),
        Case { inputs: Inputs::Peaked, ..case(15.0, Mask::CAUSAL, [1, 2, 2, 70, 130]) },
    ]
}

fn sinks() -> Vec<Case> {
    let case = |name: &str, sinks, mask, shape| Case {
        sinks,
        mask,
        ..Case::new(Tag::Sinks, format!("sinks {name}"), shape, 64)
    };
    let capped = case("softcap", Sinks::Normal, Mask::CAUSAL, [1, 4, 2, 70, 130]);
    vec![
        case("full", Sinks::Normal, Mask::NONE, [2, 3, 3, 70, 130]),
        case("causal", Sinks::Normal, Mask::CAUSAL, [2, 3, 1, 70, 130]),
        case("window", Sinks::Normal, Mask::window(16, 0), [1, 8, 2, 130, 130]),
        case("strong", Sinks::Strong, Mask::CAUSAL, [1, 2, 2, 70, 130]),
        case("nothing", Sinks::Nothing, Mask::CAUSAL, [1, 2, 2, 70, 130]),
        case("empty rows", Sinks::Normal, Mask::CAUSAL, [1, 2, 2, 130, 64]),
        case("empty rows, nothing", Sinks::Nothing, Mask::CAUSAL, [1, 2, 2, 130, 64]),
        case("decode", Sinks::Normal, Mask::CAUSAL, [2, 8, 2, 1, 300]),
        Case { softcap: Some(20.0), ..capped },
    ]
}
