//! The prefill kernel on matrix units, which multiply small matrices of bf16 and sum in f32.
//!
//! Scores have the layout of `tile`, `[key][row]`: they are K·Qᵀ, with K unchanged and Q in pairs of features,
//! `[feature pair][row]`. The result, `[feature][row]`, is Vᵀ·P, with V transposed, `[feature][key]`, and the weights
//! in pairs of keys, `[key pair][row]`. The softmax between the two products is that of `tile`.
//!
//! The left factors, K and Vᵀ, are stored in *squares* of 16 rows × 32 numbers, one after another along their rows:
//! what an instruction reads is contiguous.
//!
//! Numbers with more digits than bf16 are split into *parts*: the remainder of a part is in the next one. Two parts hold an
//! f16, and three of the products of their parts are computed: that of the two last ones is lost in rounding. Three parts
//! would hold an f32; their six products took as long as vectors of f32 do.
//!
//! Every sum has the same order whatever its neighbours are: sums run over 32 keys from a multiple of 32, and masked keys
//! add exact zeros. So a row's bits do not depend on its place in a tile.

use half::bf16;

use super::{
    dropout::BlockDropout,
    tile::{Logits, TileState},
};

/// Features, or keys, that one instruction sums over: extents are padded to multiples of it.
pub(crate) const DEPTH: usize = 32;

/// Rows of a tile.
pub(crate) const ROWS: usize = 32;

/// Rows of a square.
pub(crate) const SIDE: usize = 16;

/// Most parts of a number.
pub(crate) const MOST_PARTS: usize = 2;

/// A tile and the keys to fold into it.
pub(crate) struct MatrixBlock<'a> {
    /// Features of queries and keys, and of values: multiples of [`DEPTH`].
    pub(crate) dims: [usize; 2],
    /// Parts of a number.
    pub(crate) parts: usize,
    /// Number of keys.
    pub(crate) keys: usize,
    /// First key among those that are laid out: a multiple of [`DEPTH`].
    pub(crate) skip: usize,
    /// Keys that there is room for in `k` and `v`: a multiple of [`DEPTH`].
    pub(crate) room: usize,
    /// Queries, `[part][feature pair][row]`.
    pub(crate) q: &'a [u32],
    /// Keys, `[part][key][feature]` in squares.
    pub(crate) k: &'a [bf16],
    /// Values, `[part][feature][key]` in squares.
    pub(crate) v: &'a [bf16],
    /// From scores to logits.
    pub(crate) logits: Logits,
    /// First visible key and one past the last for each row, relative to `skip`, where some are hidden.
    pub(crate) bounds: Option<[&'a [f32]; 2]>,
    /// Weights that are dropped once they are summed, if any are.
    pub(crate) dropout: Option<BlockDropout<'a>>,
    /// Space for `[key][row]`.
    pub(crate) scores: &'a mut [f32],
    /// Space for weights, `[part][key pair][row]`.
    pub(crate) weights: &'a mut [u32],
    /// What the rows have seen; features of the result are padded.
    pub(crate) state: TileState<'a>,
}

impl MatrixBlock<'_> {
    /// Keys with padding.
    pub(crate) fn padded(&self) -> usize {
        self.keys.next_multiple_of(DEPTH)
    }

    /// Panics unless all buffers hold what the sizes say.
    pub(crate) fn check(&self) {
        let ([dim_qk, dim_v], parts) = (self.dims, self.parts);
        assert!(dim_qk.is_multiple_of(DEPTH) && dim_v.is_multiple_of(DEPTH), "features are padded");
        assert!((1..=MOST_PARTS).contains(&parts), "numbers have parts");
        assert!(self.keys > 0 && self.skip + self.padded() <= self.room, "keys fit");
        assert!(self.skip.is_multiple_of(DEPTH) && self.room.is_multiple_of(DEPTH), "keys are padded");
        assert!(self.q.len() >= parts * dim_qk / 2 * ROWS, "queries fit");
        assert!(self.k.len() >= parts * self.room * dim_qk, "keys lie in their slice");
        assert!(self.v.len() >= parts * self.room * dim_v, "values lie in their slice");
        assert!(self.scores.len() >= self.padded() * ROWS, "scores fit");
        assert!(self.weights.len() >= parts * self.padded() / 2 * ROWS, "weights fit");
        self.state.check(ROWS, dim_v);
        assert!(self.bounds.is_none_or(|[a, b]| a.len() >= ROWS && b.len() >= ROWS), "bounds fit");
        self.dropout.iter().for_each(|dropout| dropout.check(ROWS));
    }
}

/// Which parts of the left and the right factor are multiplied, small products first.
pub(crate) const fn products(parts: usize) -> &'static [[usize; 2]] {
    match parts {
        1 => &[[0, 0]],
        _ => &[[1, 0], [0, 1], [0, 0]],
    }
}
