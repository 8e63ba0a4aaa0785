//! Triggers every way in which the arguments of a mixture of experts can be wrong, and checks the message.

use super::*;
use crate::{Data, DataMut, Index, MAX_EXTENT};

type Attempt = Result<(), ProblemError>;

const GIVEN: Routing = Routing::Given { ids: Index::I32, weights: DType::F32, top_k: 2 };

/// 3 tokens of 8 features to 2 of 4 experts with 5 features each.
fn good() -> MoeSpec {
    let [gate_up, down] = [[4, 10, 8], [4, 8, 5]].map(|extents| ExpertLayout::dense(extents).unwrap());
    MoeSpec::new(DType::F32, Layout::matrix(3, 8).unwrap(), gate_up, down, GIVEN)
}

fn parse(change: impl Fn(&mut MoeSpec)) -> Result<MoeProblem, ProblemError> {
    let mut spec = good();
    change(&mut spec);
    spec.parse()
}

fn refused(change: impl Fn(&mut MoeSpec)) -> Attempt {
    parse(change).map(drop)
}

fn experts(extents: [usize; 3]) -> ExpertLayout {
    ExpertLayout::dense(extents).unwrap()
}

fn sigmoid(change: impl Fn(&mut Sigmoid)) -> Routing {
    let mut sigmoid = Sigmoid::PLAIN;
    change(&mut sigmoid);
    Routing::Computed { logits: DType::F32, top_k: 2, score: Score::Sigmoid(sigmoid) }
}

const LOGITS: Routing = Routing::Computed { logits: DType::F32, top_k: 2, score: Score::Softmax };

/// Binds memory of the right sizes to a changed problem, with a change of its own.
fn bound(change: impl Fn(&mut MoeSpec), rebind: impl Fn(&mut MoeInputs<'_>)) -> Attempt {
    let problem = parse(change)?;
    let (zeros, ids) = (vec![0f32; 4096], [0i32; 6]);
    let routed = Routed::Given { ids: Ids::I32(&ids), weights: Data::F32(&zeros[..6]) };
    let all = Data::F32(&zeros);
    let mut inputs = MoeInputs { x: all, gate_up: all, down: all, biases: None, shared: None, routed };
    rebind(&mut inputs);
    let mut out = vec![0f32; 24];
    MoeCall::bind(&problem, inputs, DataMut::F32(&mut out)).map(drop)
}

/// Binds gradients of the right sizes, but for one change, to a changed problem.
fn bound_gradients(change: impl Fn(&mut MoeSpec), len: usize, weights: usize) -> Attempt {
    let problem = parse(change)?;
    let (zeros, ids) = (vec![0f32; 4096], [0i32; 6]);
    let all = Data::F32(&zeros);
    let routed = Routed::Given { ids: Ids::I32(&ids), weights: Data::F32(&zeros[..6]) };
    let inputs = MoeInputs { x: all, gate_up: all, down: all, biases: None, shared: None, routed };
    let [mut x, mut gate_up, mut down] = [24, 320, len].map(|len| vec![0f32; len]);
    let [x, gate_up, down] = [&mut x, &mut gate_up, &mut down].map(|grad| DataMut::F32(grad));
    let mut weights = vec![0f32; weights];
    let grads = MoeGradientsMut { x, gate_up, down, biases: None, shared: None, weights: &mut weights };
    MoeGradientCall::bind(&problem, inputs, all, grads).map(drop)
}

const NOTHING: Data<'static> = Data::F32(&[]);
const SIX: Data<'static> = Data::F32(&[0.0; 6]);

#[rustfmt::skip] // a table: one attempt, one expectation per line
fn wrong_problems() -> Vec<(Attempt, &'static str)> {
    let x = |dims: [usize; 4]| Layout::bhsd(Dims::new(dims[0], dims[1], dims[2], dims[3])).unwrap();
    vec![
        (refused(|s| s.x = x([2, 1, 3, 8])), "x is 2x1x3x8 but must have batch 1"),
        (refused(|s| s.x = x([1, 1, 3, 0])), "x is 1x1x3x0"),
        (refused(|s| s.x = x([1, 1, 3, 9])), "gate_up has 8 columns but 9 are needed to match x"),
        (refused(|s| s.gate_up = experts([4, 9, 8])), "gate_up is 4x9x8"),
        (refused(|s| s.gate_up = experts([0, 10, 8])), "at least one expert"),
        (refused(|s| s.down = experts([5, 8, 5])), "down has 5 experts but 4"),
        (refused(|s| s.down = experts([4, 7, 5])), "down has 7 rows but 8"),
        (refused(|s| s.down = experts([4, 8, 6])), "down has 6 columns but 5 are needed to match gate_up"),
        (refused(|s| s.shared = Some(Shared { gate_up: experts([2, 4, 8]), down: experts([2, 8, 2]) })), "the shared expert's gate_up has 2 experts"),
        (refused(|s| s.activation = Activation::Clamped { alpha: f32::NAN, limit: 7.0 }), "alpha NaN"),
        (refused(|s| s.activation = Activation::Clamped { alpha: 1.0, limit: 0.0 }), "limit 0 above 0"),
        (refused(|s| s.shard = Some(Shard { first: 5, of: 8 })), "experts 5.. (4 of them)"),
        (refused(|s| s.shard = Some(Shard { first: usize::MAX, of: 8 })), "the layer's 8"),
        (refused(|s| s.shard = Some(Shard { first: 0, of: 1025 })), "may be 1024"),
        (refused(|s| s.routing = Routing::Given { ids: Index::I32, weights: DType::F32, top_k: 0 }), "go to 0 experts"),
        (refused(|s| s.routing = Routing::Given { ids: Index::I32, weights: DType::F32, top_k: 33 }), "give 1 to 32"),
        (refused(|s| s.routing = Routing::Computed { logits: DType::F32, top_k: 5, score: Score::Softmax }), "give 1 to 4"),
        (refused(|s| s.routing = sigmoid(|o| o.scale = 0.0)), "scale 0"),
        (refused(|s| s.routing = sigmoid(|o| o.groups = Some(Groups { count: 3, top: 1 }))), "3 groups of 4 experts"),
        (refused(|s| s.routing = sigmoid(|o| o.groups = Some(Groups { count: 4, top: 1 }))), "cannot supply 2 experts"),
        (refused(|s| s.out = Some(Layout::matrix(3, 7).unwrap())), "out has dim 7 but 8 is needed"),
        (refused(|s| s.out = Some(Layout::strided(Dims::new(1, 1, 3, 8), [0, 0, 0, 1]).unwrap())), "its own elements"),
        (ExpertLayout::strided([1, 2, 3], [6, 6, 2]).map(drop), "strides [6, 6, 2]"),
        (ExpertLayout::dense([1, MAX_EXTENT + 1, 3]).map(drop), "no extent may exceed"),
        (ExpertLayout::strided([3, 2, 2], [usize::MAX, 2, 1]).map(drop), "exceeds the address space"),
        (ExpertView::dense(&[0f32; 5], [1, 2, 3]).map(drop), "holds 5 elements but its layout reaches 6"),
    ]
}

#[rustfmt::skip] // a table: one attempt, one expectation per line
fn wrong_calls() -> Vec<(Attempt, &'static str)> {
    let same = |_: &mut MoeSpec| {};
    const NARROW: &[half::f16] = &[half::f16::ZERO; 6];
    vec![
        (bound(same, |i| i.x = Data::F32(&[0.0; 23])), "x holds 23 elements"),
        (bound(same, |i| i.gate_up = NOTHING), "gate_up holds 0"),
        (bound(same, |i| i.down = Data::F16(&[])), "down is f16 but the problem expects f32"),
        (bound(same, |i| i.biases = Some([NOTHING; 2])), "passes biases but the problem has none"),
        (bound(|s| s.biases = true, |_| {}), "lacks biases"),
        (bound(|s| s.biases = true, |i| i.biases = Some([NOTHING; 2])), "biases holds 0 elements but its layout reaches 40"),
        (bound(same, |i| i.shared = Some([NOTHING; 2])), "passes the shared expert"),
        (bound(same, |i| i.routed = Routed::Given { ids: Ids::I64(&[0; 6]), weights: SIX }), "ids are I64"),
        (bound(same, |i| i.routed = Routed::Given { ids: Ids::I32(&[0; 5]), weights: SIX }), "expert ids: 5 values where 6"),
        (bound(same, |i| i.routed = Routed::Given { ids: Ids::I32(&[0; 6]), weights: NOTHING }), "routing weights: 0 values"),
        (bound(same, |i| i.routed = Routed::Given { ids: Ids::I32(&[0; 6]), weights: Data::F16(NARROW) }), "routing weights is f16"),
        (bound(same, |i| i.routed = Routed::Computed { logits: SIX, bias: None }), "expects ids and weights"),
        (bound(|s| s.routing = LOGITS, |_| {}), "expects logits"),
        (bound(|s| s.routing = LOGITS, |i| i.routed = Routed::Computed { logits: SIX, bias: None }), "router logits: 6 values where 12"),
        (bound_gradients(|s| s.routing = LOGITS, 160, 6), "choose experts first"),
        (bound_gradients(|s| s.biases = true, 160, 6), "lacks biases"),
        (bound_gradients(|_| {}, 159, 6), "down holds 159 elements but its layout reaches 160"),
        (bound_gradients(|_| {}, 160, 5), "routing weights: 5 values where 6"),
        (bound(|s| s.routing = sigmoid(|o| o.bias = true), |i| i.routed = Routed::Computed { logits: Data::F32(&[0.0; 12]), bias: None }), "lacks the router's bias"),
    ]
}

#[test]
fn every_error_is_provoked() {
    for (attempt, says) in wrong_problems().into_iter().chain(wrong_calls()) {
        let error = attempt.expect_err(says);
        assert!(error.to_string().contains(says), "`{error}` does not say `{says}`");
    }
}

#[test]
fn what_fits_is_bound() {
    assert_eq!(bound(|_| {}, |_| {}), Ok(()));
    assert_eq!(bound_gradients(|_| {}, 160, 6), Ok(()));
    let logits =
        |i: &mut MoeInputs<'_>| i.routed = Routed::Computed { logits: Data::F32(&[0.0; 12]), bias: None };
    assert_eq!(bound(|s| s.routing = LOGITS, logits), Ok(()));
    let empty = parse(|s| s.x = Layout::matrix(0, 8).unwrap()).unwrap();
    assert_eq!((empty.entries(), empty.out().span(), empty.flops()), (0, 0, 0.0));
}

#[test]
fn ids_outside_the_shard_have_no_weights_here() {
    let problem = parse(|s| s.shard = Some(Shard { first: 4, of: 12 })).unwrap();
    let locals = [i64::MIN, -1, 3, 4, 7, 8, i64::MAX].map(|id| problem.local(id));
    assert_eq!(locals, [None, None, None, Some(0), Some(3), None, None]);
}

#[test]
fn gates_and_ups_are_halves_or_neighbours() {
    let rows =
        |order: GateUp| [(0, false), (0, true), (2, false), (2, true)].map(|(n, up)| order.row(n, 3, up));
    assert_eq!(rows(GateUp::Halves), [0, 3, 2, 5]);
    assert_eq!(rows(GateUp::Interleaved), [0, 1, 4, 5]);
}
