//! Every way in which grouped products can be wrong, and what offsets mean.

use super::*;

type Attempt = Result<(), ProblemError>;

fn dense(extents: [usize; 3]) -> ExpertLayout {
    ExpertLayout::dense(extents).unwrap()
}

fn spec(a: [usize; 3], b: [usize; 3], grouping: Grouping) -> GroupedSpec {
    GroupedSpec::new(DType::F32, dense(a), dense(b), grouping)
}

fn parsed(a: [usize; 3], b: [usize; 3], grouping: Grouping) -> Attempt {
    spec(a, b, grouping).parse().map(drop)
}

/// Three rows of four for two groups, whose results have five columns.
fn usual() -> GroupedSpec {
    spec([1, 3, 4], [2, 4, 5], Grouping::Rows)
}

fn bound(spec: GroupedSpec, offsets: Option<&[i32]>, lens: [usize; 3]) -> Attempt {
    let problem = spec.parse()?;
    let zeros = [0f32; 64];
    let inputs = GroupedInputs { a: Data::F32(&zeros[..lens[0]]), b: Data::F32(&zeros[..lens[1]]), offsets };
    let mut out = [0f32; 64];
    GroupedCall::bind(&problem, inputs, DataMut::F32(&mut out[..lens[2]])).map(drop)
}

#[test]
fn every_error_is_provoked() {
    let out = |dims: Dims| GroupedSpec { out: Some(Layout::bhsd(dims).unwrap()), ..usual() };
    let overlapping = Layout::strided(Dims::new(1, 1, 3, 5), [0, 0, 0, 1]).unwrap();
    let half = GroupedSpec { dtype: DType::F16, ..usual() };
    let batch = spec([2, 1, 4], [2, 4, 5], Grouping::Batch);
    let fits = [12, 40, 15];
    let wrong: [(Attempt, &str); 14] = [
        (
            parsed([2, 3, 4], [2, 4, 5], Grouping::Rows),
            "offsets divide mat_a into groups, but it has 2 matrices",
        ),
        (parsed([2, 3, 4], [2, 4, 5], Grouping::Columns), "divide mat_b"),
        (parsed([1, 3, 4], [2, 4, 5], Grouping::Depth { groups: 2 }), "divide mat_b"),
        (parsed([3, 3, 4], [2, 4, 5], Grouping::Batch), "mat_b has 2 matrices but mat_a has 3"),
        (parsed([1, 3, 4], [2, 6, 5], Grouping::Rows), "mat_b has 6 rows but mat_a has 4"),
        (parsed([1, 3, 4], [0, 4, 5], Grouping::Rows), "0 groups; give 1 to 1024"),
        (parsed([1, 3, 4], [1, 4, 5], Grouping::Depth { groups: 1025 }), "1025 groups"),
        (out(Dims::new(1, 1, 3, 6)).parse().map(drop), "out is 1x3x6 but the product is 1x3x5"),
        (GroupedSpec { out: Some(overlapping), ..usual() }.parse().map(drop), "its own elements"),
        (bound(usual(), None, fits), "give the end of each group"),
        (bound(usual(), Some(&[1]), fits), "1 offsets for 2 groups"),
        (bound(batch, Some(&[1, 2]), fits), "omit the offsets"),
        (bound(usual(), Some(&[1, 3]), [12, 39, 15]), "mat_b holds 39 elements but its layout reaches 40"),
        (bound(half, Some(&[1, 3]), fits), "mat_a is f32 but the problem expects f16"),
    ];
    for (attempt, says) in wrong {
        let error = attempt.expect_err(says);
        assert!(error.to_string().contains(says), "`{error}` does not say `{says}`");
    }
    assert_eq!(bound(usual(), Some(&[1, 3]), fits), Ok(()));
    assert_eq!(bound(batch, None, [8, 40, 10]), Ok(()));
}

#[test]
fn any_offsets_give_ranges_within_bounds() {
    let problem = spec([1, 10, 4], [4, 4, 5], Grouping::Rows).parse().unwrap();
    let ranges = |offsets: [i32; 4]| problem.ranges(&offsets);
    assert_eq!(ranges([2, 2, 7, 10]), [0..2, 2..2, 2..7, 7..10]);
    assert_eq!(ranges([i32::MIN, 5, 3, i32::MAX]), [0..0, 0..5, 5..5, 5..10]);
}
