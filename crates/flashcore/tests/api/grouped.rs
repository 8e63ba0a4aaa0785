//! The front door of grouped products: every option reaches the backend, and whatever is wrong is an error.

use flashcore::{BackendKind, Error, ExpertView, GroupedMm, Grouping, TensorViewMut, grouped_mm};

/// Matrices of 1, 2, 3, …: all elements of a matrix are its number.
fn matrices(count: usize, each: usize) -> Vec<f32> {
    (0..count * each).map(|n| (1 + n / each) as f32).collect()
}

fn product<'a>(
    (a, left): (&'a [f32], [usize; 3]),
    (b, right): (&'a [f32], [usize; 3]),
    grouping: Grouping,
) -> GroupedMm<'a, f32> {
    let (a, b) = (ExpertView::dense(a, left).unwrap(), ExpertView::dense(b, right).unwrap());
    grouped_mm(a, b, grouping).backend(BackendKind::Cpu)
}

#[test]
fn every_grouping_gives_its_products() {
    let (one, two) = (matrices(1, 12), matrices(2, 12));
    let run = |product: GroupedMm<'_, f32>| product.run().unwrap().out.data().to_vec();
    // Three rows of four: two for the first group, none for the second, one for nobody.
    let rows = run(product((&one, [1, 3, 4]), (&two, [2, 4, 3]), Grouping::Rows).offsets(&[2, 1]));
    assert_eq!(rows, [4.0, 4.0, 4.0, 4.0, 4.0, 4.0, 0.0, 0.0, 0.0]);
    let columns = run(product((&two, [2, 3, 4]), (&one, [1, 4, 3]), Grouping::Columns).offsets(&[1, 2]));
    assert_eq!(columns, [4.0, 8.0, 0.0, 4.0, 8.0, 0.0, 4.0, 8.0, 0.0]);
    let depth = Grouping::Depth { groups: 2 };
    let depth = run(product((&one, [1, 1, 12]), (&one, [1, 12, 1]), depth).offsets(&[5, 11]));
    assert_eq!(depth, [5.0, 6.0]);
    let batch = run(product((&two, [2, 1, 12]), (&two, [2, 12, 1]), Grouping::Batch));
    assert_eq!(batch, [12.0, 48.0]);
}

#[test]
fn results_go_into_own_memory() {
    let (one, two) = (matrices(1, 12), matrices(2, 12));
    let mut out = [f32::NAN; 12];
    let view = TensorViewMut::strided(&mut out, [1, 1, 3, 3], [0, 0, 4, 1]).unwrap();
    product((&one, [1, 3, 4]), (&two, [2, 4, 3]), Grouping::Rows).offsets(&[1, 3]).run_into(view).unwrap();
    assert_eq!((out[2], out[4], out[10]), (4.0, 8.0, 8.0));
    assert!(out[3].is_nan() && out[11].is_nan(), "rows lie where the layout says");
}

#[test]
fn what_is_wrong_is_an_error() {
    let (one, two) = (matrices(1, 12), matrices(2, 12));
    let rows = || product((&one, [1, 3, 4]), (&two, [2, 4, 3]), Grouping::Rows);
    let message = |product: GroupedMm<'_, f32>| match product.run() {
        Err(Error::Problem(error)) => error.to_string(),
        other => panic!("{other:?}"),
    };
    assert!(message(rows()).contains("give the end of each group"));
    assert!(message(rows().offsets(&[3])).contains("1 offsets for 2 groups"));
    let other = product((&one, [1, 3, 4]), (&two, [2, 3, 4]), Grouping::Rows).offsets(&[1, 3]);
    assert!(message(other).contains("mat_b has 3 rows but mat_a has 4"));
}
