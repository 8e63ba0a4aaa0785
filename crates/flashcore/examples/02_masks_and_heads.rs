//! Causal and sliding-window masks, grouped heads, attention sinks. `cargo run --release --example 02_masks_and_heads`
use flashcore::{Error, Mask, Tensor, attention, f16};

fn main() -> Result<(), Error> {
    // 8 query heads share 2 key heads (GQA); 16 new queries over 64 keys, the last 16 of which are their own.
    let q = Tensor::bhsd(vec![f16::from_f32(0.5); 8 * 16 * 64], [1, 8, 16, 64])?;
    let kv = Tensor::bhsd(vec![f16::from_f32(0.25); 2 * 64 * 64], [1, 2, 64, 64])?;
    let masks = [
        ("every key", Mask::NONE),
        ("causal, aligned to the end", Mask::CAUSAL),
        ("causal, aligned to the start", Mask::CAUSAL.top_left()),
        ("the last 9 keys", Mask::window(8, 0)),
    ];
    for (name, mask) in masks {
        let result = attention(q.view(), kv.view(), kv.view()).mask(mask).sinks([0.0; 8]).run()?;
        println!("{name}: first row's log-sum-exp is {:.3}", result.lse.at(0, 0, 0));
    }
    Ok(())
}
