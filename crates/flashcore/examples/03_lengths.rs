//! Padded and packed batches. `cargo run --release --example 03_lengths`
use flashcore::{Error, Lengths, Mask, Tensor, attention};

fn main() -> Result<(), Error> {
    // Padded: three entries of up to 32 rows; what lies beyond the used lengths never matters, not even NaN.
    let mut data = vec![1.0_f32; 3 * 2 * 32 * 16];
    let padding = 32 * 16 - 16..32 * 16; // the last row of entry 0, head 0
    data[padding].fill(f32::NAN);
    let padded = Tensor::bhsd(data, [3, 2, 32, 16])?;
    let used = Lengths::used([31, 32, 7], [31, 32, 7]);
    let result = attention(padded.view(), padded.view(), padded.view()).lengths(used).run()?;
    println!("padded: row 0 starts with {}", result.out.view().row(0, 0, 0)[0]);
    println!("padded: an unused row has LSE {}", result.lse.at(2, 0, 31));

    // Packed: sequences of 5, 0 and 12 rows, one after another, without padding.
    let packed = Tensor::bshd(vec![1.0_f32; 17 * 2 * 16], [1, 2, 17, 16])?;
    let offsets = [0, 5, 5, 17];
    let result = attention(packed.view(), packed.view(), packed.view())
        .lengths(Lengths::ragged(offsets, offsets))
        .mask(Mask::CAUSAL)
        .run()?;
    println!("packed: rows 4 and 5 see {:.0} and {:.0} keys", keys(&result.lse, 4), keys(&result.lse, 5));
    Ok(())
}

/// All scores are √16 = 4 here, so that the log-sum-exp tells the number of keys.
fn keys(lse: &flashcore::Lse, row: usize) -> f32 {
    (lse.at(0, 0, row) - 4.0).exp()
}
