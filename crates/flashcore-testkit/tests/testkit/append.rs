//! The append suite against a plain backend, right and wrong in single ways.

use flashcore_core::{AppendCall, AppendOutputs, Backend, BackendError, DType, HostCall, Ran};
use flashcore_testkit::{Outcome, append};

faults! {
    /// Rows go where the sequence begins.
    First,
    /// A length of −1 counts as 0.
    NoSequence,
    /// Pages are taken in their order.
    Pages,
    /// Keys are not turned.
    Unturned,
    /// Pairs are always neighbours.
    Neighbours,
    /// Angles have the other sign.
    Backwards,
    /// Queries stand at the first position, or one after another, the other way round.
    Queries,
    /// Values are not written.
    Values,
    /// The cache is cleared before.
    Clears,
}

/// f32, plainly.
struct Plain(Fault);

impl Backend for Plain {
    fn name(&self) -> &'static str {
        "plain"
    }

    fn forward(&self, _: &mut HostCall<'_>) -> Result<Ran, BackendError> {
        unreachable!("only appends are asked for")
    }

    fn append(&self, call: &mut AppendCall<'_>) -> Result<Ran, BackendError> {
        let (problem, inputs, fault) = (call.problem(), call.inputs(), self.0);
        let (spec, mut values) = (problem.spec(), call.values().clone());
        if matches!(fault, Fault::First | Fault::NoSequence) {
            let moved = |&len: &i32| if fault == Fault::First { len.min(0) } else { len.max(0) };
            values.lengths = values.lengths.iter().map(moved).collect();
        }
        let tables = inputs.rotary.map(|tables| tables.map(|table| table.slice::<f32>().unwrap()));
        let turn = |row: &[f32], position: usize| {
            let (Some(rotary), Some([cos, sin])) = (spec.rotary, tables) else { return row.to_vec() };
            let (mut turned, half) = (row.to_vec(), rotary.dim / 2);
            let first = position.min(rotary.positions - 1) * half;
            for n in 0..half {
                let neighbours = rotary.interleaved || fault == Fault::Neighbours;
                let (a, b) = if neighbours { (2 * n, 2 * n + 1) } else { (n, n + half) };
                let sin = if fault == Fault::Backwards { -sin[first + n] } else { sin[first + n] };
                turned[a] = row[a] * cos[first + n] - row[b] * sin;
                turned[b] = row[b] * cos[first + n] + row[a] * sin;
            }
            turned
        };
        let AppendOutputs { cache_k, cache_v, q } = call.outputs();
        let (cache_k, cache_v) = (cache_k.into_slice::<f32>().unwrap(), cache_v.into_slice::<f32>().unwrap());
        let of_v = inputs.v.slice::<f32>().unwrap();
        let of_k = inputs.k.slice::<f32>().unwrap();
        if fault == Fault::Clears {
            cache_k[..spec.cache_k.span()].fill(0.0);
        }
        let dims = spec.k.dims();
        for (batch, head, row) in places([dims.batch, dims.heads, dims.seq]) {
            let Some((page, at)) = values.place(problem, batch, row) else { continue };
            let page = if fault == Fault::Pages { (batch + at) % spec.cache_k.dims().batch } else { page };
            let position = values.lengths.get(batch).map_or(0, |&len| len as usize) + row;
            let from = &of_k[spec.k.row(batch, head, row)..][..dims.dim];
            let turned = if fault == Fault::Unturned { from.to_vec() } else { turn(from, position) };
            cache_k[spec.cache_k.row(page, head, at)..][..dims.dim].copy_from_slice(&turned);
            if fault != Fault::Values {
                let dim = spec.v.dims().dim;
                let from = &of_v[spec.v.row(batch, head, row)..][..dim];
                cache_v[spec.cache_v.row(page, head, at)..][..dim].copy_from_slice(from);
            }
        }
        if let (Some(from), Some(to), Some([of_q, of_out])) = (inputs.q, q, spec.q) {
            let (from, to) = (from.slice::<f32>().unwrap(), to.into_slice::<f32>().unwrap());
            let dims = of_q.dims();
            for (batch, head, row) in places([dims.batch, dims.heads, dims.seq]) {
                let together = spec.rotary.is_some_and(|r| r.together) != (fault == Fault::Queries);
                let position = values.position(batch).unwrap_or(0) + if together { 0 } else { row };
                let turned = turn(&from[of_q.row(batch, head, row)..][..dims.dim], position);
                to[of_out.row(batch, head, row)..][..dims.dim].copy_from_slice(&turned);
            }
        }
        Ok(Ran { kernel: "plain".to_owned() })
    }
}

fn places([batch, heads, rows]: [usize; 3]) -> impl Iterator<Item = (usize, usize, usize)> {
    (0..batch).flat_map(move |b| (0..heads).flat_map(move |h| (0..rows).map(move |r| (b, h, r))))
}

#[test]
fn a_plain_append_passes() {
    for case in append::cases() {
        assert_eq!(
            append::check(&Plain(Fault::None), &case, (DType::F32, DType::F32), 1),
            Outcome::Passed,
            "{case}"
        );
    }
}

#[test]
fn every_fault_is_found() {
    for &fault in FAULTS {
        let check = |case| append::check(&Plain(fault), &case, (DType::F32, DType::F32), 1);
        assert!(
            append::cases().into_iter().map(check).any(|found| found != Outcome::Passed),
            "{fault:?} passes"
        );
    }
}
