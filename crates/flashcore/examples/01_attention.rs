//! Attention over random tensors, on the best backend found. `cargo run --release --example 01_attention`
use flashcore::{Error, Tensor, attention};

fn main() -> Result<(), Error> {
    let dims = [1, 8, 512, 64]; // batch, heads, sequence, dim
    let [q, k, v] = [1.0, 2.0, 3.0].map(|phase| wave(dims, phase));
    let result = attention(q.view(), k.view(), v.view()).run()?;
    println!("computed by {}", result.ran.kernel);
    println!("head 3, row 100 starts with {:.4?}", &result.out.view().row(0, 3, 100)[..4]);
    println!("its log-sum-exp is {:.4}", result.lse.at(0, 3, 100));
    Ok(())
}

/// Some numbers.
fn wave(dims: [usize; 4], phase: f32) -> Tensor<f32> {
    let data = (0..dims.iter().product()).map(|i| (i as f32 * 0.37 + phase).sin()).collect();
    Tensor::bhsd(data, dims).expect("as many elements as the extents say")
}
