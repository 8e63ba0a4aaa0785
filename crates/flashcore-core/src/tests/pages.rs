//! Keys in pages: what is refused, and where keys lie.

use super::{Row, dense};
use crate::{
    BackwardSpec, DType, Instance, Keys, Lengths, MAX_EXTENT, PageTable, Pages, ProblemError, Sequences,
    Spec, Values,
};

/// Two sequences of 3 queries over pages of 4 keys, of which there are 6.
fn paged(values: &Values) -> Spec {
    let kv = dense([6, 2, 4, 64]);
    Spec::new(DType::F32, dense([2, 4, 3, 64]), kv, kv).with(values)
}

fn values(lengths: Lengths, numbers: &[i32], columns: usize) -> Values {
    Values { lengths, table: Some(PageTable::new(numbers, columns)), ..Values::default() }
}

fn bind(spec: Spec, values: &Values) -> Result<(), ProblemError> {
    Instance::new(&spec.parse()?, values).map(drop)
}

fn bound(lengths: Lengths, numbers: &[i32]) -> Result<(), ProblemError> {
    let values = values(lengths, numbers, 3);
    bind(paged(&values), &values)
}

fn changed(change: impl Fn(&mut Spec)) -> Result<(), ProblemError> {
    let mut spec = paged(&values(Lengths::keys([9, 0]), &[0; 6], 3));
    change(&mut spec);
    spec.parse().map(drop)
}

/// Pages.
#[rustfmt::skip] // a table: one attempt, one expectation per line
pub(super) fn wrong_pages() -> Vec<Row> {
    let good = values(Lengths::keys([9, 0]), &[5, 0, 3, -1, -1, -1], 3);
    let unpaged = Values { table: None, ..good.clone() };
    let narrow = values(Lengths::keys([1, 0]), &[5, 0], 1);
    let packed = values(Lengths::packed_queries([0, 1, 6], [9, 0]), &[0; 6], 3);
    vec![
        (changed(|s| (s.k, s.v) = (dense([6, 2, 0, 64]), dense([6, 2, 0, 64]))), "EmptyPages", "k is 6x2x0x64: a page must hold"),
        (changed(|s| s.sequences = Sequences::Uniform), "PagesWithoutLengths", "need key lengths"),
        (changed(|s| s.sequences = Sequences::Used { q: true, kv: false }), "PagesWithoutLengths", "one per sequence"),
        (changed(|s| s.v = dense([5, 2, 4, 64])), "Mismatch", "v has batch 5 but 6 is needed"),
        (changed(|s| s.k = dense([6, 2, 4, 32])), "Mismatch", "k has dim 32 but 64 is needed"),
        (changed(|s| s.pages = Some(Pages::new(MAX_EXTENT + 1))), "TableTooLarge", "check its extents and strides"),
        (changed(|s| s.pages = Some(Pages { row_stride: usize::MAX, ..Pages::new(3) })), "TableTooLarge", "2 rows of 3 numbers"),
        (bind(Spec { pages: None, ..paged(&packed) }, &packed), "QueriesWithoutPages", "need a page table"),
        (bind(paged(&packed), &packed), "RaggedBatch", "q has batch 2"),
        (bind(paged(&good), &unpaged), "OtherTable", "has 3 pages for each sequence but the call passes no page table"),
        (bind(paged(&good), &narrow), "OtherTable", "the call passes 1 pages"),
        (bound(Lengths::keys([9, 0]), &[0; 5]), "TableLength", "holds 5 numbers but there are 2 sequences of 3 pages"),
        (bound(Lengths::keys([9, 0, 0]), &[0; 6]), "LengthCount", "3 used lengths for k but a batch of 2"),
        (bound(Lengths::keys([9, 13]), &[0; 6]), "LengthTooLong", "uses 13 rows of k, which has 12"),
        (bound(Lengths::keys([9, 0]), &[5, 0, -1, 0, 0, 0]), "PageNumber", "keys in page -1 (column 2 of the table)"),
        (bound(Lengths::keys([9, 5]), &[5, 0, 1, 0, 6, 0]), "PageNumber", "sequence 1 has keys in page 6"),
        (BackwardSpec::new(paged(&good)).parse().map(drop), "PagedGradients", "gather the keys"),
    ]
}

#[test]
fn the_table_says_where_keys_lie() {
    let values = values(Lengths::keys([9, 0]), &[5, 0, 3, -1, i32::MAX, i32::MIN], 3);
    let problem = paged(&values).parse().unwrap();
    assert_eq!((problem.seq_kv(), problem.longest_kv(), problem.page_size()), (12, 12, Some(4)));
    let instance = Instance::new(&problem, &values).unwrap();
    assert_eq!((instance.sequence(0).kv_len, instance.sequence(1).kv_len), (9, 0));
    let keys = instance.keys(0);
    assert_eq!([0, 3, 4, 8].map(|key| keys.place(key)), [(5, 0), (5, 3), (0, 0), (3, 0)]);
    assert_eq!([0, 3, 5].map(|key| keys.run(key)), [4, 1, 3]);
    assert_eq!(instance.keys(1), Keys::Paged { pages: &[-1, i32::MAX, i32::MIN], size: 4 });
}

#[test]
fn packed_queries_share_a_table() {
    let values = values(Lengths::packed_queries([0, 1, 1, 6], [9, 0, 12]), &[1; 9], 3);
    let kv = dense([6, 2, 4, 64]);
    let spec = Spec::new(DType::F32, dense([1, 4, 6, 64]), kv, kv).with(&values);
    let problem = spec.clone().parse().unwrap();
    assert_eq!((problem.sequences(), problem.longest_q(), problem.batch()), (3, 5, 1));
    let last = Instance::new(&problem, &values).unwrap().sequence(2);
    assert_eq!((last.batch, last.q_start, last.q_len, last.kv_len), (0, 1, 5, 12));
    // Other numbers, the same problem.
    let other = Values { lengths: Lengths::packed_queries([0, 5, 6, 6], [1, 1, 1]), ..values };
    assert_eq!(spec.with(&other).parse().unwrap(), problem);
}

#[test]
fn bounds_never_exceed_what_the_pages_hold() {
    let longest = |pages: usize, bound: Option<usize>| {
        let kv = dense([pages, 2, 4, 64]);
        let given = Pages { longest_kv: bound, ..Pages::new(3) };
        let used = Sequences::Used { q: false, kv: true };
        let spec = Spec { pages: Some(given), sequences: used, ..Spec::new(DType::F32, kv, kv, kv) };
        spec.parse().unwrap().seq_kv()
    };
    assert_eq!([None, Some(5), Some(1 << 20)].map(|bound| longest(6, bound)), [12, 5, 12]);
    assert_eq!(longest(0, None), 0, "without pages there are no keys");
}
