//! The front door of mixtures of experts: every option reaches the backend, and whatever is wrong is an error.

use flashcore::{
    Activation, BackendKind, Error, ExpertView, GateUp, Ids, Moe, Score, Sigmoid, TensorView, TensorViewMut,
    moe,
};

const HIDDEN: usize = 4;
const HALF: usize = 3;
const EXPERTS: usize = 2;

/// Weights of which expert 0 is all ones and expert 1 all twos.
fn weights(each: usize) -> Vec<f32> {
    (0..EXPERTS * each).map(|n| (1 + n / each) as f32).collect()
}

struct Memory {
    x: Vec<f32>,
    gate_up: Vec<f32>,
    down: Vec<f32>,
}

impl Memory {
    fn new() -> Self {
        Self { x: vec![0.25; 2 * HIDDEN], gate_up: weights(2 * HALF * HIDDEN), down: weights(HIDDEN * HALF) }
    }

    fn layer(&self) -> Moe<'_, f32> {
        moe(
            TensorView::matrix(&self.x, 2, HIDDEN).unwrap(),
            ExpertView::dense(&self.gate_up, [EXPERTS, 2 * HALF, HIDDEN]).unwrap(),
            ExpertView::dense(&self.down, [EXPERTS, HIDDEN, HALF]).unwrap(),
        )
        .backend(BackendKind::Cpu)
    }
}

/// The result of expert `e` for a token of quarters: gate = up = e + 1.
fn alone(e: usize, join: impl Fn(f32, f32) -> f32) -> f32 {
    let sum = (e + 1) as f32;
    HALF as f32 * sum * join(sum, sum)
}

fn swiglu(gate: f32, up: f32) -> f32 {
    gate / (1.0 + (-gate).exp()) * up
}

fn assert_rows(layer: Moe<'_, f32>, expected: [f32; 2]) {
    let result = layer.run().unwrap();
    for (row, expected) in result.out.data().chunks_exact(HIDDEN).zip(expected) {
        assert!(
            row.iter().all(|x| (x - expected).abs() < 1e-5 * expected.abs().max(1.0)),
            "{row:?}, {expected}"
        );
    }
    assert_eq!(result.ran.kernel, "moe");
}

#[test]
fn tokens_go_where_they_are_sent() {
    let memory = Memory::new();
    let [first, second] = [0, 1].map(|e| alone(e, swiglu));
    let given = memory.layer().routed(2, Ids::I64(&[0, 1, 1, 7]), &[0.5f32, 0.25, 2.0, 9.0]);
    assert_rows(given, [0.5 * first + 0.25 * second, 2.0 * second]);
    let logits = [0.0f32, 1.0, 3.0, 3.0];
    let e = 1f32.exp();
    let softmax = memory.layer().route(&logits, 1, Score::Softmax);
    assert_rows(softmax, [e / (1.0 + e) * second, 0.5 * first]);
    let sigmoid = Score::Sigmoid(Sigmoid { bias: true, scale: 2.0, ..Sigmoid::PLAIN });
    let biased = memory.layer().route(&logits, 1, sigmoid).routing_bias(&[5.0, 0.0]);
    assert_rows(biased, [2.0 * 0.5 * first, 2.0 / (1.0 + (-3f32).exp()) * first]);
}

#[test]
fn options_reach_the_backend() {
    let memory = Memory::new();
    let first = |layer: Moe<'_, f32>, expected: f32| {
        assert_rows(layer.routed(1, Ids::I32(&[0, 0]), &[1.0f32; 2]), [expected; 2]);
    };
    first(memory.layer().gate_up_order(GateUp::Interleaved), alone(0, swiglu));
    let clamped = Activation::Clamped { alpha: 1.0, limit: 0.5 };
    first(memory.layer().activation(clamped), alone(0, |_, _| swiglu(0.5, 1.5)));
    let biases = [vec![1.0; EXPERTS * 2 * HALF], vec![1.0; EXPERTS * HIDDEN]];
    first(memory.layer().biases(&biases[0], &biases[1]), alone(0, |_, _| swiglu(2.0, 2.0)) + 1.0);
    let shared = [vec![1.0; 2 * HALF * HIDDEN], vec![1.0; HIDDEN * HALF]];
    let gate_up = ExpertView::dense(&shared[0], [1, 2 * HALF, HIDDEN]).unwrap();
    let down = ExpertView::dense(&shared[1], [1, HIDDEN, HALF]).unwrap();
    first(memory.layer().shared_expert(gate_up, down), 2.0 * alone(0, swiglu));
    first(memory.layer().experts(3..5, 8), 0.0);
    first(memory.layer().batch_invariant(true), alone(0, swiglu));
}

#[test]
fn results_go_into_own_memory() {
    let memory = Memory::new();
    let mut out = vec![f32::NAN; 2 * HIDDEN + 6];
    let view = TensorViewMut::strided(&mut out, [1, 1, 2, HIDDEN], [0, 0, HIDDEN + 3, 1]).unwrap();
    memory.layer().routed(1, Ids::I32(&[0, 1]), &[1.0f32; 2]).run_into(view).unwrap();
    assert!(out[..HIDDEN].iter().all(|x| (x - alone(0, swiglu)).abs() < 1e-5));
    assert!(out[HIDDEN].is_nan() && !out[HIDDEN + 3].is_nan(), "rows lie where the layout says");
}

#[test]
fn gradients_have_the_shapes_of_their_tensors() {
    let memory = Memory::new();
    let d_out = vec![1.0f32; 2 * HIDDEN];
    let d_out = TensorView::matrix(&d_out, 2, HIDDEN).unwrap();
    let grads = memory.layer().routed(1, Ids::I32(&[0, 7]), &[0.5f32, 1.0]).gradients(d_out).unwrap();
    // One token at expert 0, whose results are all alike; the other has no expert here.
    let whole = HIDDEN as f32 * alone(0, swiglu);
    assert!((grads.weights[0] - whole).abs() < 1e-4 && grads.weights[1] == 0.0, "{:?}", grads.weights);
    let d_down = 0.5 * swiglu(1.0, 1.0);
    assert!(grads.down[..HIDDEN * HALF].iter().all(|d| (d - d_down).abs() < 1e-6));
    assert!(grads.down[HIDDEN * HALF..].iter().chain(&grads.x[HIDDEN..]).all(|&d| d == 0.0));
    assert_eq!((grads.x.len(), grads.gate_up.len()), (2 * HIDDEN, EXPERTS * 2 * HALF * HIDDEN));
    assert!(grads.biases[0].is_empty() && grads.shared[1].is_empty());
}

#[test]
fn what_is_wrong_is_an_error() {
    let memory = Memory::new();
    let message = |layer: Moe<'_, f32>| match layer.run() {
        Err(Error::Problem(error)) => error.to_string(),
        other => panic!("{other:?}"),
    };
    assert!(message(memory.layer()).contains("call `routed` or `route`"));
    assert!(message(memory.layer().routed(2, Ids::I32(&[0; 3]), &[1.0f32; 4])).contains("3 values where 4"));
    assert!(message(memory.layer().routed(0, Ids::I32(&[]), &[0f32; 0])).contains("0 experts"));
    assert!(message(memory.layer().route(&[0f32; 3], 1, Score::Softmax)).contains("3 values where 4"));
    let short = memory.layer().biases(&[], &[]).routed(1, Ids::I32(&[0, 0]), &[1.0f32; 2]);
    assert!(message(short).contains("biases holds 0"));
    let d_out = vec![1.0f32; 2 * HIDDEN];
    let d_out = TensorView::matrix(&d_out, 2, HIDDEN).unwrap();
    let chosen = memory.layer().route(&[0f32; 4], 1, Score::Softmax).gradients(d_out);
    assert!(chosen.unwrap_err().to_string().contains("choose experts first"));
    let beyond = memory.layer().experts(3..5, 4).routed(1, Ids::I32(&[0, 0]), &[1.0f32; 2]);
    assert!(message(beyond).contains("experts 3.."));
}
