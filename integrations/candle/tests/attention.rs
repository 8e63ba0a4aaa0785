//! The functions beside attention made of candle's own operations.

use candle_core::{D, DType, Device, Result, Tensor};
use flashcore_candle::{
    flash_attn, flash_attn_alibi_windowed_softcap, flash_attn_varlen, flash_attn_varlen_paged_windowed,
    flash_attn_windowed,
};

const SCALE: f32 = 0.3;

fn random(shape: &[usize]) -> Result<Tensor> {
    Tensor::randn(0f32, 1.0, shape, &Device::Cpu)
}

/// What is added to scores: −∞ where a key is hidden, minus slopes times distances.
fn bias(queries: usize, keys: usize, heads: usize, left: Option<usize>, right: Option<usize>, slope: f32) -> Result<Tensor> {
    let at = |head: usize, query: usize, key: usize| {
        let past = key as i64 - query as i64 - (keys as i64 - queries as i64);
        let hidden = right.is_some_and(|right| past > right as i64) || left.is_some_and(|left| -past > left as i64);
        if hidden { f32::NEG_INFINITY } else { -slope * (head + 1) as f32 * past.unsigned_abs() as f32 }
    };
    let pairs = (0..queries).flat_map(|query| (0..keys).map(move |key| (query, key)));
    let numbers: Vec<f32> =
        (0..heads).flat_map(|head| pairs.clone().map(move |(query, key)| at(head, query, key))).collect();
    Tensor::from_vec(numbers, (1, heads, queries, keys), &Device::Cpu)
}

/// Attention over batch × sequence × heads × dim.
fn plain(q: &Tensor, k: &Tensor, v: &Tensor, bias: &Tensor, cap: f64) -> Result<Tensor> {
    let group = q.dim(2)? / k.dim(2)?;
    let turn = |x: &Tensor| x.transpose(1, 2)?.contiguous();
    let repeat = |x: &Tensor| {
        let (b, s, h, d) = x.dims4()?;
        turn(&x.unsqueeze(3)?.expand((b, s, h, group, d))?.reshape((b, s, h * group, d))?)
    };
    let mut scores = (turn(q)?.matmul(&repeat(k)?.transpose(2, 3)?.contiguous()?)? * f64::from(SCALE))?;
    if cap > 0.0 {
        scores = ((scores / cap)?.tanh()? * cap)?;
    }
    let scores = scores.broadcast_add(bias)?;
    let weights = scores.broadcast_sub(&scores.max_keepdim(D::Minus1)?)?.exp()?;
    let weights = weights.broadcast_div(&weights.sum_keepdim(D::Minus1)?)?;
    weights.matmul(&repeat(v)?)?.transpose(1, 2)
}

fn close(got: &Tensor, wanted: &Tensor, tolerance: f32) -> Result<()> {
    assert_eq!(got.dims(), wanted.dims());
    let off = (got.to_dtype(DType::F32)? - wanted)?.abs()?.max_all()?.to_scalar::<f32>()?;
    assert!(off <= tolerance, "off by {off}");
    Ok(())
}

#[test]
fn dense_functions_are_attention() -> Result<()> {
    let (q, k, v) = (random(&[2, 9, 4, 16])?, random(&[2, 20, 2, 16])?, random(&[2, 20, 2, 16])?);
    let none = bias(9, 20, 4, None, None, 0.0)?;
    close(&flash_attn(&q, &k, &v, SCALE, false)?, &plain(&q, &k, &v, &none, 0.0)?, 1e-5)?;
    let causal = bias(9, 20, 4, None, Some(0), 0.0)?;
    close(&flash_attn(&q, &k, &v, SCALE, true)?, &plain(&q, &k, &v, &causal, 0.0)?, 1e-5)?;
    let window = bias(9, 20, 4, Some(5), Some(2), 0.0)?;
    let got = flash_attn_windowed(&q, &k, &v, SCALE, Some(5), Some(2))?;
    close(&got, &plain(&q, &k, &v, &window, 0.0)?, 1e-5)?;
    let slopes = Tensor::new(&[0.1f32, 0.2, 0.3, 0.4], &Device::Cpu)?;
    let sloped = bias(9, 20, 4, None, Some(0), 0.1)?;
    let got = flash_attn_alibi_windowed_softcap(&q, &k, &v, Some(&slopes), SCALE, None, Some(0), 5.0)?;
    close(&got, &plain(&q, &k, &v, &sloped, 5.0)?, 1e-5)
}

#[test]
fn strides_offsets_and_halves_are_taken_as_they_are() -> Result<()> {
    let qkv = random(&[2, 12, 3, 4, 16])?;
    let parts: Vec<_> = (0..3).map(|n| qkv.narrow(2, n, 1)?.squeeze(2)).collect::<Result<_>>()?;
    let wanted = plain(&parts[0], &parts[1], &parts[2], &bias(12, 12, 4, None, Some(0), 0.0)?, 0.0)?;
    close(&flash_attn(&parts[0], &parts[1], &parts[2], SCALE, true)?, &wanted, 1e-5)?;
    let halves: Vec<_> = parts.iter().map(|x| x.to_dtype(DType::BF16)).collect::<Result<_>>()?;
    close(&flash_attn(&halves[0], &halves[1], &halves[2], SCALE, true)?, &wanted, 4e-2)?;
    assert!(flash_attn(&halves[0], &parts[1], &parts[2], SCALE, true).is_err());
    Ok(())
}

#[test]
fn packed_sequences_and_pages() -> Result<()> {
    let (q, k) = (random(&[8, 4, 16])?, random(&[29, 2, 16])?);
    let of_q = Tensor::new(&[0u32, 5, 8], &Device::Cpu)?;
    let of_k = Tensor::new(&[0u32, 9, 29], &Device::Cpu)?;
    let got = flash_attn_varlen(&q, &k, &k, &of_q, &of_k, 5, 20, SCALE, true)?;
    for (n, (start, queries, first, keys)) in [(0, 5, 0, 9), (5, 3, 9, 20)].into_iter().enumerate() {
        let one = q.narrow(0, start, queries)?.unsqueeze(0)?;
        let own = k.narrow(0, first, keys)?.unsqueeze(0)?;
        let wanted = plain(&one, &own, &own, &bias(queries, keys, 4, None, Some(0), 0.0)?, 0.0)?;
        close(&got.narrow(0, start, queries)?.unsqueeze(0)?, &wanted, 1e-5)?;
        assert!(n < 2);
    }
    // The same keys in pages of four, the last ones of each sequence cut.
    let pages = Tensor::zeros((8, 4, 2, 16), DType::F32, &Device::Cpu)?;
    let pages = pages.slice_assign(&[0..2, 0..4, 0..2, 0..16], &k.narrow(0, 0, 8)?.reshape((2, 4, 2, 16))?)?;
    let pages = pages.slice_assign(&[2..3, 0..1, 0..2, 0..16], &k.narrow(0, 8, 1)?.unsqueeze(0)?)?;
    let pages = pages.slice_assign(&[3..8, 0..4, 0..2, 0..16], &k.narrow(0, 9, 20)?.reshape((5, 4, 2, 16))?)?;
    let table = Tensor::new(&[[0i64, 1, 2, 0, 0], [3, 4, 5, 6, 7]], &Device::Cpu)?;
    let paged = flash_attn_varlen_paged_windowed(
        &q, &pages, &pages, &of_q, &of_k, &table, None, 5, 20, SCALE, None, Some(0), 4, None,
    )?;
    close(&paged, &got, 1e-6)
}
