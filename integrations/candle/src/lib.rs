//! candle-flash-attn's functions by their names and signatures, for tensors on the CPU and, with the feature `cuda`, on
//! NVIDIA GPUs.
//!
//! `candle-flash-attn = { package = "flashcore-candle", path = … }` in a manifest switches a program over: where
//! candle-flash-attn needs CUDA and an hour of nvcc, this computes on any machine. On a GPU lengths, page tables and slopes
//! stay where they are, and calls are queued on candle's stream.
//! Tensors are batch × sequence × heads × dim, those of `varlen` functions sequence × heads × dim, of f16, bf16 or f32 and any
//! strides with dense features.

#![deny(unsafe_code)]

#[cfg(feature = "cuda")]
#[allow(unsafe_code)] // Launching a kernel over raw device memory.
mod cuda;
mod op;

use candle_core::{Result, Tensor};

use op::{Asked, Bands, Packed, attend, numbers};

/// Attention; with `causal` a query sees the keys up to its own position, and the last query stands at the last key.
pub fn flash_attn(q: &Tensor, k: &Tensor, v: &Tensor, softmax_scale: f32, causal: bool) -> Result<Tensor> {
    flash_attn_windowed(q, k, v, softmax_scale, None, causal.then_some(0))
}

/// Attention over a window of keys before and after each query's position; `None` does not limit.
pub fn flash_attn_windowed(
    q: &Tensor,
    k: &Tensor,
    v: &Tensor,
    softmax_scale: f32,
    window_size_left: Option<usize>,
    window_size_right: Option<usize>,
) -> Result<Tensor> {
    let bands = Bands { left: window_size_left, right: window_size_right };
    attend(q, k, v, Asked::new(softmax_scale, bands))
}

/// [`flash_attn`] with ALiBi's slopes, one for each query head.
pub fn flash_attn_alibi(
    q: &Tensor,
    k: &Tensor,
    v: &Tensor,
    alibi_slopes: &Tensor,
    softmax_scale: f32,
    causal: bool,
) -> Result<Tensor> {
    flash_attn_alibi_windowed(q, k, v, alibi_slopes, softmax_scale, None, causal.then_some(0))
}

/// [`flash_attn_windowed`] with ALiBi's slopes.
pub fn flash_attn_alibi_windowed(
    q: &Tensor,
    k: &Tensor,
    v: &Tensor,
    alibi_slopes: &Tensor,
    softmax_scale: f32,
    window_size_left: Option<usize>,
    window_size_right: Option<usize>,
) -> Result<Tensor> {
    let bands = Bands { left: window_size_left, right: window_size_right };
    attend(q, k, v, Asked { slopes: Some(numbers(alibi_slopes)?), ..Asked::new(softmax_scale, bands) })
}

/// [`flash_attn_windowed`] with everything: slopes where there are any, and a limit of the scores where it is not 0.
#[expect(clippy::too_many_arguments, reason = "candle-flash-attn's signature")]
pub fn flash_attn_alibi_windowed_softcap(
    q: &Tensor,
    k: &Tensor,
    v: &Tensor,
    alibi_slopes: Option<&Tensor>,
    softmax_scale: f32,
    window_size_left: Option<usize>,
    window_size_right: Option<usize>,
    softcap: f32,
) -> Result<Tensor> {
    let bands = Bands { left: window_size_left, right: window_size_right };
    let slopes = alibi_slopes.map(numbers).transpose()?;
    let softcap = (softcap > 0.0).then_some(softcap);
    attend(q, k, v, Asked { slopes, softcap, ..Asked::new(softmax_scale, bands) })
}

/// Attention over sequences that lie one after another; `seqlens` are the offsets of each, u32.
#[expect(clippy::too_many_arguments, reason = "candle-flash-attn's signature")]
pub fn flash_attn_varlen(
    q: &Tensor,
    k: &Tensor,
    v: &Tensor,
    seqlens_q: &Tensor,
    seqlens_k: &Tensor,
    max_seqlen_q: usize,
    max_seqlen_k: usize,
    softmax_scale: f32,
    causal: bool,
) -> Result<Tensor> {
    let (left, right) = (None, causal.then_some(0));
    flash_attn_varlen_windowed(
        q,
        k,
        v,
        seqlens_q,
        seqlens_k,
        max_seqlen_q,
        max_seqlen_k,
        softmax_scale,
        left,
        right,
    )
}

/// [`flash_attn_varlen`] over a window of keys.
#[expect(clippy::too_many_arguments, reason = "candle-flash-attn's signature")]
pub fn flash_attn_varlen_windowed(
    q: &Tensor,
    k: &Tensor,
    v: &Tensor,
    seqlens_q: &Tensor,
    seqlens_k: &Tensor,
    max_seqlen_q: usize,
    max_seqlen_k: usize,
    softmax_scale: f32,
    window_size_left: Option<usize>,
    window_size_right: Option<usize>,
) -> Result<Tensor> {
    let bands = Bands { left: window_size_left, right: window_size_right };
    varlen([q, k, v], None, [seqlens_q, seqlens_k], [max_seqlen_q, max_seqlen_k], softmax_scale, bands, 0.0)
}

/// [`flash_attn_varlen`] with ALiBi's slopes.
#[expect(clippy::too_many_arguments, reason = "candle-flash-attn's signature")]
pub fn flash_attn_varlen_alibi(
    q: &Tensor,
    k: &Tensor,
    v: &Tensor,
    alibi_slopes: &Tensor,
    seqlens_q: &Tensor,
    seqlens_k: &Tensor,
    max_seqlen_q: usize,
    max_seqlen_k: usize,
    softmax_scale: f32,
    causal: bool,
) -> Result<Tensor> {
    let (slopes, longest) = (Some(alibi_slopes), [max_seqlen_q, max_seqlen_k]);
    let bands = Bands { left: None, right: causal.then_some(0) };
    varlen([q, k, v], slopes, [seqlens_q, seqlens_k], longest, softmax_scale, bands, 0.0)
}

/// [`flash_attn_varlen_windowed`] with ALiBi's slopes.
#[expect(clippy::too_many_arguments, reason = "candle-flash-attn's signature")]
pub fn flash_attn_varlen_alibi_windowed(
    q: &Tensor,
    k: &Tensor,
    v: &Tensor,
    alibi_slopes: &Tensor,
    seqlens_q: &Tensor,
    seqlens_k: &Tensor,
    max_seqlen_q: usize,
    max_seqlen_k: usize,
    softmax_scale: f32,
    window_size_left: Option<usize>,
    window_size_right: Option<usize>,
) -> Result<Tensor> {
    let (slopes, longest) = (Some(alibi_slopes), [max_seqlen_q, max_seqlen_k]);
    let bands = Bands { left: window_size_left, right: window_size_right };
    varlen([q, k, v], slopes, [seqlens_q, seqlens_k], longest, softmax_scale, bands, 0.0)
}

/// [`flash_attn_varlen_windowed`] with everything: slopes where there are any, and a limit of the scores where it is not 0.
#[expect(clippy::too_many_arguments, reason = "candle-flash-attn's signature")]
pub fn flash_attn_varlen_alibi_windowed_softcap(
    q: &Tensor,
    k: &Tensor,
    v: &Tensor,
    alibi_slopes: Option<&Tensor>,
    seqlens_q: &Tensor,
    seqlens_k: &Tensor,
    max_seqlen_q: usize,
    max_seqlen_k: usize,
    softmax_scale: f32,
    window_size_left: Option<usize>,
    window_size_right: Option<usize>,
    softcap: f32,
) -> Result<Tensor> {
    let bands = Bands { left: window_size_left, right: window_size_right };
    let longest = [max_seqlen_q, max_seqlen_k];
    varlen([q, k, v], alibi_slopes, [seqlens_q, seqlens_k], longest, softmax_scale, bands, softcap)
}

fn varlen(
    [q, k, v]: [&Tensor; 3],
    slopes: Option<&Tensor>,
    [of_q, of_k]: [&Tensor; 2],
    longest: [usize; 2],
    scale: f32,
    bands: Bands,
    softcap: f32,
) -> Result<Tensor> {
    let (packed, slopes) = (Some(Packed::new(of_q, of_k, longest)?), slopes.map(numbers).transpose()?);
    let softcap = (softcap > 0.0).then_some(softcap);
    attend(q, k, v, Asked { packed, slopes, softcap, ..Asked::new(scale, bands) })
}

/// [`flash_attn_varlen_windowed`] over keys in pages, `k` and `v` pages × rows × heads × dim: `block_table` has a row of page
/// numbers for each sequence.
#[expect(clippy::too_many_arguments, reason = "candle-flash-attn's signature")]
pub fn flash_attn_varlen_paged_windowed(
    q: &Tensor,
    k: &Tensor,
    v: &Tensor,
    seqlens_q: &Tensor,
    seqlens_k: &Tensor,
    block_table: &Tensor,
    mm_prefix_ranges: Option<&Tensor>,
    max_seqlen_q: usize,
    max_seqlen_k: usize,
    softmax_scale: f32,
    window_size_left: Option<usize>,
    window_size_right: Option<usize>,
    _page_block_size: usize,
    softcap: Option<f32>,
) -> Result<Tensor> {
    if mm_prefix_ranges.is_some() {
        candle_core::bail!("ranges that see each other are not supported; pass mm_prefix_ranges = None");
    }
    let bands = Bands { left: window_size_left, right: window_size_right };
    let packed = Some(Packed::paged(seqlens_q, seqlens_k, [max_seqlen_q, max_seqlen_k])?);
    let table = Some(op::table(block_table)?);
    attend(q, k, v, Asked { packed, table, softcap, ..Asked::new(softmax_scale, bands) })
}
