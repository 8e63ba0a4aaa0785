//! A step of training: attention, the gradient of a loss with respect to its output, the gradients of its inputs.
//! `cargo run --release --example 07_gradients`
use flashcore::{BackendKind, Error, Mask, Tensor, attention};

fn main() -> Result<(), Error> {
    let dims = [1, 4, 64, 32];
    let tensor = |phase: f32| {
        let values = (0..dims.iter().product()).map(|i| (i as f32 * 0.37 + phase).sin()).collect();
        Tensor::bhsd(values, dims)
    };
    let (q, k, target) = (tensor(0.0)?, tensor(1.0)?, tensor(2.0)?);
    let mut v = tensor(3.0)?;
    for step in 0..5 {
        let call = attention(q.view(), k.view(), v.view()).mask(Mask::CAUSAL).backend(BackendKind::Cpu);
        let result = call.run_for_grad()?;
        // The loss is half the square of the distance from the target: its gradient is the difference.
        let difference: Vec<f32> = result.out.data().iter().zip(target.data()).map(|(a, b)| a - b).collect();
        let loss = difference.iter().map(|x| x * x).sum::<f32>() / 2.0;
        let grads = result.grad(Tensor::bhsd(difference, dims)?.view())?;
        println!("step {step}: loss {loss:.1}, by {}", grads.ran.kernel);
        let learned = v.data().iter().zip(grads.dv.data()).map(|(v, dv)| v - 0.2 * dv).collect();
        v = Tensor::bhsd(learned, dims)?;
    }
    Ok(())
}
