//! Gradients through the public API: every way to ask for them gives the same, and what does not fit is an error.

use flashcore::{
    Attention, BackendError, BackendKind, Element, Error, Gradients, Mask, Tensor, TensorView, TensorViewMut,
    attention, bf16,
};
use flashcore_testkit::{NaiveBackend, Rng};

const Q: [usize; 4] = [1, 4, 20, 16];
const KV: [usize; 4] = [1, 2, 30, 16];

fn tensor<T: Element>(dims: [usize; 4], seed: u64) -> Tensor<T> {
    let mut rng = Rng::new(seed);
    let values = (0..dims.iter().product()).map(|_| T::from_f32(rng.normal())).collect();
    Tensor::bhsd(values, dims).unwrap()
}

/// Q, K, V and the output's gradient.
struct Tensors<T>([Tensor<T>; 4]);

impl<T: Element> Tensors<T> {
    fn new() -> Self {
        Self([tensor(Q, 1), tensor(KV, 2), tensor(KV, 3), tensor(Q, 4)])
    }

    fn call(&self) -> Attention<'_, T> {
        let [q, k, v, _] = &self.0;
        attention(q.view(), k.view(), v.view())
            .mask(Mask::CAUSAL)
            .sinks([0.1, 0.2, 0.3, 0.4])
            .backend(BackendKind::Cpu)
    }

    fn d_out(&self) -> TensorView<'_, T> {
        self.0[3].view()
    }

    fn grad(&self) -> Gradients<T> {
        self.call().run_for_grad().unwrap().grad(self.d_out()).unwrap()
    }
}

fn near(a: &[f32], b: &[f32]) -> bool {
    a.iter().zip(b).all(|(a, b)| (a - b).abs() < 1e-4)
}

#[test]
fn every_way_gives_the_same_gradients() -> Result<(), Error> {
    let tensors = Tensors::<f32>::new();
    let expected = tensors.grad();
    assert!(expected.ran.kernel.starts_with("backward-"));
    assert!(expected.d_sinks.as_ref().is_some_and(|sinks| sinks.iter().all(|x| x.is_finite() && *x != 0.0)));
    let forward = tensors.call().run()?;
    let given = tensors.call().grad(tensors.d_out(), forward.out.view(), forward.lse.values());
    assert_eq!(given.run()?, expected);
    let rows = forward.out.data().chunks(16).zip(tensors.d_out().data().chunks(16));
    let sums: Vec<f32> = rows.map(|(a, b)| a.iter().zip(b).map(|(a, b)| a * b).sum()).collect();
    let by_sums = tensors.call().grad_from_sums(tensors.d_out(), &sums, forward.lse.values()).run()?;
    assert!(near(by_sums.dq.data(), expected.dq.data()) && near(by_sums.dk.data(), expected.dk.data()));
    assert_eq!(by_sums.dv, expected.dv, "values do not depend on row sums");
    Ok(())
}

#[test]
fn gradients_go_into_the_callers_memory() -> Result<(), Error> {
    let tensors = Tensors::<f32>::new();
    let (expected, forward) = (tensors.grad(), tensors.call().run_for_grad()?);
    let (mut dq, mut dk, mut dv, mut d_sinks) =
        (vec![1.0; 1280], vec![1.0; 960], vec![1.0; 960], vec![1.0; 4]);
    let add = [
        TensorViewMut::bhsd(&mut dq, Q)?,
        TensorViewMut::bhsd(&mut dk, KV)?,
        TensorViewMut::bhsd(&mut dv, KV)?,
    ];
    forward.describe(tensors.d_out()).accumulate_into(add, Some(&mut d_sinks))?;
    let plus_one = |grad: &[f32]| grad.iter().map(|x| x + 1.0).collect::<Vec<_>>();
    assert!(near(&dq, &plus_one(expected.dq.data())) && near(&dk, &plus_one(expected.dk.data())));
    assert!(near(&dv, &plus_one(expected.dv.data())));
    assert!(near(&d_sinks, &plus_one(expected.d_sinks.as_deref().unwrap())));
    let into = [
        TensorViewMut::bshd(&mut dq, Q)?,
        TensorViewMut::bshd(&mut dk, KV)?,
        TensorViewMut::bshd(&mut dv, KV)?,
    ];
    forward.describe(tensors.d_out()).run_into(into, None)?;
    assert_eq!(dq[16..32], expected.dq.data()[20 * 16..][..16], "the second head of the first query");
    Ok(())
}

#[test]
fn narrow_tensors_have_wide_gradients() -> Result<(), Error> {
    let tensors = Tensors::<bf16>::new();
    let forward = tensors.call().run_for_grad()?;
    let wide = forward.describe(tensors.d_out()).run_as::<f32>()?;
    let narrow = forward.grad(tensors.d_out())?;
    let rounded = wide.dq.data().iter().map(|&x| bf16::from_f32(x));
    assert!(rounded.eq(narrow.dq.data().iter().copied()));
    assert_eq!(forward.into_output().out.layout().dims().array(), Q);
    Ok(())
}

#[test]
fn what_does_not_fit_is_refused() {
    let tensors = Tensors::<f32>::new();
    let forward = tensors.call().run().unwrap();
    let (out, lse) = (forward.out.view(), forward.lse.values());
    let other = tensor::<f32>([1, 4, 20, 8], 5);
    let says = |attempt: Result<Gradients<f32>, Error>| attempt.unwrap_err().to_string();
    assert!(
        says(tensors.call().grad(other.view(), out, lse).run()).contains("d_out has dim 8 but 16 is needed")
    );
    assert!(says(tensors.call().grad(out, other.view(), lse).run()).contains("out has dim 8"));
    assert!(says(tensors.call().grad(out, out, &lse[1..]).run()).contains("lse holds 79 values"));
    assert!(
        says(tensors.call().grad_from_sums(out, &lse[2..], lse).run()).contains("row sums hold 78 values")
    );
    let narrow = tensors.call().grad(out, out, lse).run_as::<bf16>().unwrap_err().to_string();
    assert!(narrow.contains("the gradients are bf16 but q is f32"), "{narrow}");
}

#[test]
fn a_backend_without_gradients_says_where_they_are() {
    let tensors = Tensors::<f32>::new();
    let forward = tensors.call().on(&NaiveBackend).run_for_grad().unwrap();
    let error = forward.grad(tensors.d_out()).unwrap_err();
    assert!(matches!(&error, Error::Backend(BackendError::Unsupported { .. })), "{error}");
    assert!(
        error.to_string().contains("does not support gradients; compute them on the cpu backend"),
        "{error}"
    );
}
