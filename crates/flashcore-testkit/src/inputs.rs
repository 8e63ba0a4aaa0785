//! The contents of a case's tensors and their layout in memory.

use flashcore_core::{Dims, Layout, ProblemError};

use crate::{
    kinds::{Kind, Part},
    rng::Rng,
};

/// The numbers in Q, K and V.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
#[non_exhaustive]
pub enum Inputs {
    /// N(0, 1) everywhere.
    Normal,
    /// As in a kind of data.
    Of(Kind),
    /// All keys of a head are equal, so every visible key has the same weight.
    EqualKeys,
    /// Scores of exactly ±60000 (with scale 1 and dim 64).
    Sixty,
    /// Scores around −100 (with dim 64 and the default scale): a softmax without the row maximum underflows.
    Low,
    /// Scores with a standard deviation of 8: a few keys take nearly everything.
    Peaked,
    /// Scores that rise along the keys: an online softmax that runs forwards finds a new maximum in every tile.
    Rising,
    /// Scores that fall along the keys, and further: the same for one that runs backwards and moves late.
    Falling,
    /// Values up to ±60000, near the end of f16's range.
    LargeValues,
    /// Every value is 1, so that every row of the output is 1 too.
    Ones,
}

impl Inputs {
    /// Q, K and V, dense in the order batch, heads, sequence, dim.
    pub fn values(self, [q, k, v]: [Dims; 3], rng: &mut Rng) -> [Vec<f32>; 3] {
        [(Part::Q, q), (Part::K, k), (Part::V, v)].map(|(part, dims)| self.tensor(part, dims, rng))
    }

    fn tensor(self, part: Part, dims: Dims, rng: &mut Rng) -> Vec<f32> {
        let mut tensor = Vec::with_capacity(dims.count().unwrap_or(0));
        for plane in 0..dims.batch * dims.heads {
            for seq in 0..dims.seq {
                let start = tensor.len();
                let kind = if let Self::Of(kind) = self { kind } else { Kind::Normal };
                tensor.extend((start..start + dims.dim).map(|at| kind.element(part, dims, at, rng)));
                let first = plane * dims.seq * dims.dim;
                self.adjust(part, (seq, dims.seq), &mut tensor, first, start, rng);
            }
        }
        tensor
    }

    /// Changes the row that starts at `start`, the newest of the head that starts at `first`.
    fn adjust(
        self,
        part: Part,
        (seq, seqs): (usize, usize),
        tensor: &mut [f32],
        first: usize,
        start: usize,
        rng: &mut Rng,
    ) {
        let dim = tensor.len() - start;
        match (self, part) {
            (Self::EqualKeys, Part::K) => tensor.copy_within(first..first + dim, start),
            (Self::Sixty, Part::Q) => tensor[start..].fill(rng.pick(&[125.0, -125.0])),
            (Self::Sixty, Part::K) => tensor[start..].fill(rng.pick(&[7.5, -7.5])),
            (Self::Low, Part::Q) => tensor[start] = 32.0,
            (Self::Low, Part::K) => tensor[start] = -25.0,
            (Self::Peaked, Part::Q) => tensor[start..].iter_mut().for_each(|x| *x *= 8.0),
            (Self::Rising | Self::Falling, Part::Q) => tensor[start] = 8.0,
            (Self::Rising, Part::K) => tensor[start] = 32.0 * seq as f32 / seqs as f32,
            (Self::Falling, Part::K) => tensor[start] = 128.0 * (seqs - seq) as f32 / seqs as f32,
            (Self::LargeValues, Part::V) => {
                tensor[start..].iter_mut().for_each(|x| *x = 120_000.0 * (rng.uniform() - 0.5));
            }
            (Self::Ones, Part::V) => tensor[start..].fill(1.0),
            _ => {}
        }
    }
}

/// How the tensors lie in memory.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
#[non_exhaustive]
pub enum Placement {
    /// Dense: batch, heads, sequence, dim.
    Dense,
    /// Dense: batch, sequence, heads, dim.
    Interleaved,
    /// Rows, heads and batch entries apart from each other, still aligned.
    Padded,
    /// Nothing aligned: odd strides and an odd first address.
    Unaligned,
    /// Dense inputs; output rows interleaved and apart.
    StridedOutput,
    /// One key head and one value head stand for all (stride 0).
    ExpandedHeads,
    /// One batch entry of keys and values stands for all (stride 0).
    ExpandedBatch,
    /// One key and one value stand for all (stride 0).
    ExpandedSequence,
    /// Elements beyond 2^31, reached by batch, head and sequence strides; needs batch, heads and sequence above 1.
    Sparse,
    /// Strides, paddings and addresses drawn from a seed.
    Random(u64),
}

/// A tensor's layout, and how far its first element is from an aligned address.
pub type Place = (Layout, usize);

const BATCH: usize = 0;
const HEADS: usize = 1;
const SEQ: usize = 2;
const BHS: [usize; 3] = [BATCH, HEADS, SEQ];
const BSH: [usize; 3] = [BATCH, SEQ, HEADS];

impl Placement {
    /// Where Q, K, V and the output lie.
    pub fn places(self, dims: [Dims; 4]) -> Result<[Place; 4], ProblemError> {
        let [q, k, v, out] = dims;
        let inputs_expanded = |dimension| {
            Ok([
                (ordered(q, BHS, [0; 3])?, 0),
                (expanded(k, dimension)?, 0),
                (expanded(v, dimension)?, 0),
                (ordered(out, BHS, [0; 3])?, 0),
            ])
        };
        match self {
            Self::Dense => alike(dims, BHS, [0; 3], 0),
            Self::Interleaved => alike(dims, BSH, [0; 3], 0),
            Self::Padded => alike(dims, BSH, [8, 16, 64], 0),
            Self::Unaligned => alike(dims, BHS, [1, 3, 5], 1),
            Self::StridedOutput => {
                let inputs = alike(dims, BHS, [0; 3], 0)?;
                Ok([inputs[0], inputs[1], inputs[2], (ordered(out, BSH, [24, 8, 40])?, 0)])
            }
            Self::ExpandedHeads => inputs_expanded(HEADS),
            Self::ExpandedBatch => inputs_expanded(BATCH),
            Self::ExpandedSequence => inputs_expanded(SEQ),
            Self::Sparse => sparse(dims),
            Self::Random(seed) => random(dims, &mut Rng::new(seed)),
        }
    }
}

fn alike(
    dims: [Dims; 4],
    order: [usize; 3],
    pads: [usize; 3],
    shift: usize,
) -> Result<[Place; 4], ProblemError> {
    let [q, k, v, out] = dims.map(|dims| ordered(dims, order, pads).map(|layout| (layout, shift)));
    Ok([q?, k?, v?, out?])
}

/// Dimensions from outermost to innermost, with elements left free after each row, and after all of the inner two.
fn ordered(dims: Dims, order: [usize; 3], pads: [usize; 3]) -> Result<Layout, ProblemError> {
    let mut strides = [0, 0, 0, 1];
    let mut reach = dims.dim;
    for (dimension, pad) in order.into_iter().rev().zip(pads) {
        strides[dimension] = reach + pad;
        reach = strides[dimension] * dims.array()[dimension].max(1);
    }
    Layout::strided(dims, strides)
}

fn expanded(dims: Dims, dimension: usize) -> Result<Layout, ProblemError> {
    let mut strides = ordered(dims, BHS, [0; 3])?.strides();
    strides[dimension] = 0;
    Layout::strided(dims, strides)
}

fn sparse([q, k, v, out]: [Dims; 4]) -> Result<[Place; 4], ProblemError> {
    const FAR: usize = 1 << 31;
    let by_sequence = FAR / (v.seq - 1).max(1) + 64;
    Ok([
        (ordered(q, BHS, [0, 0, FAR])?, 0),
        (ordered(k, [HEADS, BATCH, SEQ], [0, 0, FAR])?, 0),
        (ordered(v, [SEQ, BATCH, HEADS], [0, 0, by_sequence])?, 0),
        (ordered(out, BHS, [0, 0, FAR])?, 0),
    ])
}

fn random(dims: [Dims; 4], rng: &mut Rng) -> Result<[Place; 4], ProblemError> {
    let mut place = |operand: usize| -> Result<Place, ProblemError> {
        let order = rng.permutation(3);
        let pads = [(); 3].map(|()| rng.pick(&[0, 0, 0, 1, 2, 3, 8, 16, 17, 64]));
        let mut layout = ordered(dims[operand], [order[0], order[1], order[2]], pads)?;
        if operand < 3 && rng.one_in(8) {
            let mut strides = layout.strides();
            strides[rng.range(BATCH..=SEQ)] = 0;
            layout = Layout::strided(dims[operand], strides)?;
        }
        Ok((layout, rng.pick(&[0, 0, 0, 1, 3, 8])))
    };
    Ok([place(0)?, place(1)?, place(2)?, place(3)?])
}
