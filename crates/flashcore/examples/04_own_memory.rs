//! The caller's own memory in any layout: a fused QKV buffer in, interleaved heads out.
//! `cargo run --release --example 04_own_memory`
use flashcore::{BackendKind, Error, Mask, TensorView, TensorViewMut, attention};

fn main() -> Result<(), Error> {
    let (batch, heads, seq, dim) = (2, 4, 100, 64);
    let dims = [batch, heads, seq, dim];
    // A linear layer made this: batch × sequence × (q, k, v) × heads × dim.
    let position = 3 * heads * dim;
    let qkv: Vec<f32> = (0..batch * seq * position).map(|i| (i as f32 * 0.11).cos()).collect();
    let strides = [seq * position, dim, position, 1];
    let part = |n: usize| TensorView::strided(&qkv[n * heads * dim..], dims, strides);
    let mut out = vec![0.0; batch * seq * heads * dim];
    let mut lse = vec![0.0; batch * heads * seq];
    let into = TensorViewMut::bshd(&mut out, dims)?; // ready for the next linear layer
    let ran = attention(part(0)?, part(1)?, part(2)?)
        .mask(Mask::CAUSAL)
        .backend(BackendKind::Cpu)
        .run_into(into, Some(&mut lse))?;
    println!("computed by {}; out starts with {:.4?}", ran.kernel, &out[..4]);
    Ok(())
}
