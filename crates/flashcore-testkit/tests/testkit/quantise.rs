//! The suite of tensors rounded to 8 bits against a plain backend, right and wrong in single ways.

use flashcore_core::{
    Backend, BackendError, COUNTS, DType, Data, DataMut, E4M3, E5M2, HostCall, QuantiseCall, QuantisedMut,
    Ran, turned_place,
};
use flashcore_testkit::{Outcome, quantise};

faults! {
    /// One factor for everything.
    OneFactor,
    /// Numbers are cut off instead of rounded.
    CutsOff,
    /// What is too large becomes infinity, or NaN where there is none.
    Overflows,
    /// Infinities have a say in factors.
    CountsInfinity,
    /// NaN becomes zero.
    ClearsNan,
    /// Factors of zeros are zero.
    ZeroFactor,
    /// Rows that are not used have a say in factors and come out.
    ReadsUnused,
    /// Means are written but not subtracted.
    KeepsMeans,
    /// Means are over all rows, used or not.
    MeansOfAll,
    /// Sums are f32, which overflow where means do not.
    SumsOverflow,
    /// Every row has the factor of the first.
    FirstBlock,
    /// Turned keys stay in their order.
    KeepsOrder,
    /// Turned values have nothing that counts.
    CountsNothing,
}

/// f32, plainly.
struct Plain(Fault);

/// A place with its features, less their means.
type Row = ([usize; 3], Vec<f32>);

impl Plain {
    /// All used rows, and the means that were subtracted.
    fn rows(&self, call: &QuantiseCall<'_>) -> (Vec<Row>, Vec<f32>) {
        let (problem, Data::F32(x)) = (call.problem(), call.x()) else {
            unreachable!("f32 alone is asked for")
        };
        let (dims, fault) = (problem.dims(), self.0);
        let used = |batch| if fault == Fault::ReadsUnused { dims.seq } else { call.rows_of(batch) };
        let mut rows: Vec<Row> = Vec::new();
        let mut means = vec![0.0; problem.means()];
        for (batch, head) in (0..dims.batch).flat_map(|b| (0..dims.heads).map(move |h| (b, h))) {
            let first = rows.len();
            for seq in 0..used(batch) {
                let start = problem.x().row(batch, head, seq);
                rows.push(([batch, head, seq], x[start..start + dims.dim].to_vec()));
            }
            if !problem.spec().centred {
                continue;
            }
            let count = if fault == Fault::MeansOfAll { dims.seq } else { used(batch) };
            for n in 0..dims.dim {
                let finite = rows[first..].iter().map(|(_, row)| row[n]).filter(|x| x.is_finite());
                let sum = match fault {
                    Fault::SumsOverflow => finite.sum::<f32>().into(),
                    _ => finite.map(f64::from).sum::<f64>(),
                };
                let mean = (sum / count.max(1) as f64) as f32;
                means[(batch * dims.heads + head) * dims.dim + n] = mean;
                let less = if fault == Fault::KeepsMeans { 0.0 } else { mean };
                rows[first..].iter_mut().for_each(|(_, row)| row[n] -= less);
            }
        }
        (rows, means)
    }

    fn factors(&self, call: &QuantiseCall<'_>, rows: &[Row]) -> Vec<f32> {
        let (problem, fault) = (call.problem(), self.0);
        let mut largest = vec![0f32; problem.factors()];
        for (place, row) in rows {
            for (n, x) in row.iter().map(|x| x.abs()).enumerate() {
                let at = if fault == Fault::OneFactor { 0 } else { problem.factor_index(*place, n) };
                let counts = x.is_finite() || (fault == Fault::CountsInfinity && x.is_infinite());
                largest[at] = if counts { largest[at].max(x) } else { largest[at] };
            }
        }
        if fault == Fault::OneFactor {
            let first = largest.first().copied().unwrap_or(0.0);
            largest.fill(first);
        }
        let factor = |largest: f32| match (fault, largest == 0.0) {
            (Fault::ZeroFactor, true) => 0.0,
            _ => problem.factor_of(largest),
        };
        largest.into_iter().map(factor).collect()
    }

    fn byte(&self, to: DType, x: f32) -> u8 {
        let fault = self.0;
        if x.is_nan() && fault == Fault::ClearsNan {
            return 0;
        }
        if fault == Fault::Overflows && x.abs() > to.largest() {
            return if to == DType::E4M3 { 0x7f } else { 0x7c };
        }
        let nearest = |x: f32| match to {
            DType::E4M3 => (E4M3::from_f32(x).to_bits(), E4M3::from_f32(x).to_f32()),
            _ => (E5M2::from_f32(x).to_bits(), E5M2::from_f32(x).to_f32()),
        };
        let (bits, value) = nearest(x);
        if fault == Fault::CutsOff && value.abs() > x.abs() { bits - 1 } else { bits }
    }
}

impl Backend for Plain {
    fn name(&self) -> &'static str {
        "plain"
    }

    fn forward(&self, _: &mut HostCall<'_>) -> Result<Ran, BackendError> {
        unreachable!("only quantising is asked for")
    }

    fn quantise(&self, call: &mut QuantiseCall<'_>) -> Result<Ran, BackendError> {
        let (problem, (rows, all_means)) = (call.problem(), self.rows(call));
        let all_factors = self.factors(call, &rows);
        let (dims, to) = (problem.dims(), problem.spec().to);
        let QuantisedMut { mut out, factors, means } = call.outputs();
        factors.copy_from_slice(&all_factors);
        means.into_iter().for_each(|means| means.copy_from_slice(&all_means));
        let bytes = match &mut out {
            DataMut::E4M3(out) => bytemuck::cast_slice_mut::<E4M3, u8>(out),
            DataMut::E5M2(out) => bytemuck::cast_slice_mut::<E5M2, u8>(out),
            _ => unreachable!("8 bits are asked for"),
        };
        let out = problem.out();
        for batch in 0..dims.batch {
            for (head, row) in (0..dims.heads).flat_map(|h| (0..out.dims().seq).map(move |s| (h, s))) {
                let counts = row.checked_sub(dims.dim).filter(|_| problem.spec().turned);
                let count = counts.and_then(|n| COUNTS.get(n)).filter(|_| self.0 != Fault::CountsNothing);
                let count = count.map_or(0, |count| count.to_bits());
                bytes[out.row(batch, head, row)..][..out.dims().dim].fill(count);
            }
        }
        let place_of = |[batch, head, seq]: [usize; 3], n: usize| match problem.spec().turned {
            true if self.0 == Fault::KeepsOrder => out.row(batch, head, n) + seq,
            true => out.row(batch, head, n) + turned_place(seq),
            false => out.row(batch, head, seq) + n,
        };
        for (place, row) in rows {
            let [batch, head, _] = place;
            for (n, x) in row.into_iter().enumerate() {
                let from = if self.0 == Fault::FirstBlock { [batch, head, 0] } else { place };
                let factor = all_factors[problem.factor_index(from, n)];
                bytes[place_of(place, n)] = self.byte(to, x / factor);
            }
        }
        Ok(Ran { kernel: "plain".to_owned() })
    }
}

#[test]
fn a_plain_backend_passes() {
    let failed = quantise::failures(&Plain(Fault::None), &[DType::F32], 1);
    assert!(failed.is_empty(), "{}", failed.join("\n"));
}

#[test]
fn every_fault_is_found() {
    for &fault in FAULTS {
        let failed = quantise::failures(&Plain(fault), &[DType::F32], 1);
        assert!(!failed.is_empty(), "{fault:?} passes");
    }
    let case = quantise::cases()[0];
    assert_eq!(quantise::check(&Plain(Fault::None), &case, [DType::F32, DType::E5M2], 3), Outcome::Passed);
}
