//! Attention over parts of the keys, merged by log-sum-exp: what splitting a long context over machines rests on.
//! `cargo run --release --example 05_merge_parts`
use flashcore::{Error, Output, Tensor, TensorView, attention, merge};

const DIM: usize = 64;

fn main() -> Result<(), Error> {
    let data: Vec<f32> = (0..1000 * DIM).map(|i| (i as f32 * 0.73).sin()).collect();
    let q = Tensor::bhsd(data[..DIM].to_vec(), [1, 1, 1, DIM])?;
    let over = |keys: std::ops::Range<usize>| -> Result<Output<f32>, Error> {
        let kv = TensorView::bhsd(&data[keys.start * DIM..keys.end * DIM], [1, 1, keys.len(), DIM])?;
        attention(q.view(), kv, kv).run()
    };
    let (left, right, whole) = (over(0..300)?, over(300..1000)?, over(0..1000)?);
    let merged =
        merge(&[left.out.view(), right.out.view()], &[left.lse.values(), right.lse.values()]).run()?;
    let pairs = merged.out.data().iter().zip(whole.out.data());
    let off = pairs.map(|(m, w)| (m - w).abs()).fold(0.0, f32::max);
    println!("two parts merged differ from the whole by at most {off:.1e}");
    Ok(())
}
