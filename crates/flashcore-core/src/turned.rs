//! Transposed values: E4M3 values as Hopper's tensor cores multiply them, the keys of a feature contiguous.
//!
//! A head has a row for each feature and [`COUNT_ROWS`] more after them, with which kernels sum probabilities: the first are
//! full of the constants of [`COUNTS`], the others of zeros. A row has the keys up to a multiple of [`TURNED_KEYS`], in the
//! order of [`turned_place`]; padding keys and unused keys are zeros, except for the constants.
//!
//! [`QuantiseSpec::turned`](crate::QuantiseSpec) writes such values, [`Spec::turned`](crate::Spec) reads them.

use crate::{
    error::ProblemError,
    float8::E4M3,
    layout::{Dims, Layout},
    quantise::ScaleError,
};

/// Rows of a head behind its features.
pub const COUNT_ROWS: usize = 8;
/// What the first of them are full of. Tensor cores cut off bits of products, and a product with 1 has few; with these, about
/// as much is lost as of products with values: over 256 keys both differ by less than 0.1 % of the sum, with ones by up to
/// 0.2 %.
pub const COUNTS: [E4M3; 2] = [E4M3::from_bits(0x3c), E4M3::from_bits(0x3e)];
/// Keys whose multiples rows are long.
pub const TURNED_KEYS: usize = 128;
/// Features whose multiples heads have.
const FEATURES: usize = 16;
/// Keys whose order changes among themselves.
const SIXTEEN: usize = 16;

/// Where a key lies in a row: place 4q + i of sixteen holds key 2q + (i & 1) + 8 (i >> 1), as probabilities lie in registers.
pub const fn turned_place(key: usize) -> usize {
    let (sixteen, within) = (key / SIXTEEN * SIXTEEN, key % SIXTEEN);
    sixteen + 4 * (within % 8 / 2) + 2 * (within / 8) + within % 2
}

/// Extents of transposed values: batch, heads, rows of a head, keys of a row.
pub const fn turned_dims(values: Dims) -> Dims {
    let Dims { batch, heads, seq, dim } = values;
    Dims { batch, heads, seq: dim + COUNT_ROWS, dim: seq.next_multiple_of(TURNED_KEYS) }
}

/// Extents of the values that are turned, `keys` to a head; refuses what cannot be such.
pub(crate) fn unturned_dims(turned: Dims, keys: usize) -> Result<Dims, ProblemError> {
    let wrong = ProblemError::Scales(ScaleError::Turned { dims: turned, keys });
    let dim = turned.seq.checked_sub(COUNT_ROWS).filter(|&dim| dim > 0 && dim.is_multiple_of(FEATURES));
    let values = Dims { seq: keys, dim: dim.ok_or(wrong.clone())?, ..turned };
    if turned_dims(values) == turned { Ok(values) } else { Err(wrong) }
}

/// Transposes values: `used` of each batch entry, later ones become zeros.
pub fn turn_values(
    (from, values): (&Layout, &[E4M3]),
    (to, turned): (&Layout, &mut [E4M3]),
    used: impl Fn(usize) -> usize,
) {
    let dims = from.dims();
    let zero = E4M3::from_bits(0);
    for (batch, head) in planes(dims) {
        for row in 0..dims.dim + COUNT_ROWS {
            let start = to.row(batch, head, row);
            let turned = &mut turned[start..][..to.dims().dim];
            let constant = row.checked_sub(dims.dim).and_then(|n| COUNTS.get(n));
            turned.fill(constant.copied().unwrap_or(zero));
            if row < dims.dim {
                (0..used(batch))
                    .for_each(|key| turned[turned_place(key)] = values[from.row(batch, head, key) + row]);
            }
        }
    }
}

/// The values before transposing, dense batch × heads × sequence × dim, and their layout.
pub fn unturned_values(
    (from, turned): (&Layout, &[E4M3]),
    keys: usize,
) -> Result<(Layout, Vec<E4M3>), ProblemError> {
    let dims = unturned_dims(from.dims(), keys)?;
    let to = Layout::bhsd(dims)?;
    let out_of_memory = |()| ProblemError::OutOfMemory { bytes: to.span(), dims };
    let mut values: Vec<E4M3> = bytemuck::allocation::try_zeroed_vec(to.span()).map_err(out_of_memory)?;
    for (batch, head) in planes(dims) {
        for (key, feature) in (0..keys).flat_map(|key| (0..dims.dim).map(move |feature| (key, feature))) {
            values[to.row(batch, head, key) + feature] =
                turned[from.row(batch, head, feature) + turned_place(key)];
        }
    }
    Ok((to, values))
}

fn planes(dims: Dims) -> impl Iterator<Item = (usize, usize)> {
    (0..dims.batch).flat_map(move |batch| (0..dims.heads).map(move |head| (batch, head)))
}
