//! Tensor values in logical order, as f32: what the oracle computes with, whatever the memory looked like.
//!
//! f32 holds every number of the other types exactly, so that nothing is lost on the way.

use flashcore_core::{Data, Element, Layout};

/// Appends the `dim` values from `start` on.
pub fn row(data: Data<'_>, start: usize, dim: usize, into: &mut Vec<f32>) {
    match data {
        Data::F16(slice) => into.extend(slice[start..start + dim].iter().map(|x| x.to_f32())),
        Data::BF16(slice) => into.extend(slice[start..start + dim].iter().map(|x| x.to_f32())),
        Data::F32(slice) => into.extend_from_slice(&slice[start..start + dim]),
        Data::E4M3(slice) => into.extend(slice[start..start + dim].iter().map(|x| x.to_f32())),
        Data::E5M2(slice) => into.extend(slice[start..start + dim].iter().map(|x| x.to_f32())),
        _ => unreachable!("an element type that the testkit does not know"),
    }
}

/// Every value of a tensor, dense in the order batch, heads, sequence, dim.
pub fn gather(data: Data<'_>, layout: &Layout) -> Vec<f32> {
    let mut values = Vec::with_capacity(layout.dims().count().unwrap_or(0));
    for_each_row(layout, |_, start| row(data, start, layout.dims().dim, &mut values));
    values
}

/// Writes those rows of dense values that `select(batch, seq)` picks to where the layout says, rounded to the
/// tensor's element type.
pub fn scatter<T: Element>(
    values: &[f32],
    data: &mut [T],
    layout: &Layout,
    select: impl Fn(usize, usize) -> bool,
) {
    let dim = layout.dims().dim;
    let mut rows = values.chunks_exact(dim);
    for_each_row(layout, |[batch, _, seq], start| {
        let row = rows.next().unwrap_or(&[]);
        if select(batch, seq) {
            data[start..].iter_mut().zip(row).for_each(|(to, &from)| *to = T::from_f32(from));
        }
    });
}

/// Calls `visit` with each row's batch entry, head and position and the index of its first element.
pub fn for_each_row(layout: &Layout, mut visit: impl FnMut([usize; 3], usize)) {
    let dims = layout.dims();
    for batch in 0..dims.batch {
        for head in 0..dims.heads {
            for seq in 0..dims.seq {
                visit([batch, head, seq], layout.row(batch, head, seq));
            }
        }
    }
}
