//! Tensors rounded to 8 bits: the means of heads, the largest magnitudes of shares, then the values, each over all
//! threads. Called by `cpu`.

use flashcore_core::{
    DType, DataMut, E4M3, Granularity, Layout, QuantiseCall, QuantiseProblem, QuantisedMut, turn_values,
};
use half::{bf16, f16};

use crate::{
    crew::Crew,
    output::Shared,
    simd::{
        Lane,
        convert::Widen,
        narrow::{Float8, Magnitudes, Round},
        runner::Runner,
    },
};

/// Quantises on all threads; returns the kernel's name, or `None` for element types unknown here.
pub(crate) fn quantise(call: &mut QuantiseCall<'_>, with: (Runner, Crew)) -> Option<&'static str> {
    match call.problem().spec().dtype {
        DType::F32 => quantise_from::<f32>(call, with),
        DType::F16 => quantise_from::<f16>(call, with),
        DType::BF16 => quantise_from::<bf16>(call, with),
        _ => None,
    }
}

fn quantise_from<T: Lane>(
    call: &mut QuantiseCall<'_>,
    (runner, crew): (Runner, Crew),
) -> Option<&'static str> {
    let problem = call.problem();
    let input = Input { problem, x: call.x().slice::<T>()?, used: call.used(), runner, crew };
    let QuantisedMut { out, factors, mut means } = call.outputs();
    if let Some(means) = means.as_deref_mut() {
        crew.chunks(means, problem.dims().dim, |plane, means| input.mean(plane, means));
    }
    let means = means.as_deref();
    input.find_factors(means, factors);
    match out {
        DataMut::E4M3(out) if problem.spec().turned => {
            let rows = Layout::bhsd(problem.dims()).ok()?;
            let mut plain = vec![E4M3::from_bits(0); rows.span()];
            input.round(means, factors, (&rows, &mut plain));
            turn_values((&rows, &plain), (problem.out(), out), |batch| input.used_rows(batch));
        }
        DataMut::E4M3(out) => input.round(means, factors, (problem.out(), out)),
        DataMut::E5M2(out) => input.round(means, factors, (problem.out(), out)),
        _ => return None,
    }
    Some("quantise")
}

/// The numbers of a call, their element type known.
struct Input<'a, T> {
    problem: &'a QuantiseProblem,
    x: &'a [T],
    used: Option<&'a [u32]>,
    runner: Runner,
    crew: Crew,
}

impl<T: Lane> Input<'_, T> {
    /// Batch entries times heads.
    const fn planes(&self) -> usize {
        self.problem.dims().batch * self.problem.dims().heads
    }

    /// Batch entry and head of a plane.
    const fn place(&self, plane: usize) -> [usize; 2] {
        [plane / self.problem.dims().heads, plane % self.problem.dims().heads]
    }

    fn used_rows(&self, batch: usize) -> usize {
        self.used.map_or(self.problem.dims().seq, |used| used[batch] as usize)
    }

    /// The used rows of a plane.
    fn rows(&self, plane: usize) -> impl Iterator<Item = &[T]> {
        let [batch, head] = self.place(plane);
        let start = move |seq| self.problem.x().row(batch, head, seq);
        (0..self.used_rows(batch)).map(move |seq| &self.x[start(seq)..][..self.problem.dims().dim])
    }

    /// The mean of each feature of a plane; what is not finite counts as nothing. Sums are f64: one of f32 could overflow
    /// where the mean does not.
    fn mean(&self, plane: usize, means: &mut [f32]) {
        let mut sums = vec![0f64; means.len()];
        for row in self.rows(plane) {
            let finite = row.iter().map(|x| Some(x.to_f32()).filter(|x| x.is_finite()).unwrap_or(0.0));
            sums.iter_mut().zip(finite).for_each(|(sum, x)| *sum += f64::from(x));
        }
        let rows = self.used_rows(self.place(plane)[0]).max(1) as f64;
        means.iter_mut().zip(sums).for_each(|(mean, sum)| *mean = (sum / rows) as f32);
    }

    /// What is subtracted from each feature of a plane.
    fn means_of(&self, plane: usize, means: Option<&[f32]>) -> Vec<f32> {
        let dim = self.problem.dims().dim;
        means.map_or_else(|| vec![0.0; dim], |means| means[plane * dim..][..dim].to_vec())
    }

    /// The factors of all shares: their largest magnitudes brought to the largest float.
    fn find_factors(&self, means: Option<&[f32]>, factors: &mut [f32]) {
        let mut largest = vec![Vec::new(); self.planes()];
        self.crew.chunks(&mut largest, 1, |plane, to| to.fill(self.largest(plane, means)));
        factors.fill(0.0);
        for (plane, largest) in largest.into_iter().enumerate() {
            let [batch, head] = self.place(plane);
            let first = self.problem.factor_index([batch, head, 0], 0);
            factors[first..].iter_mut().zip(largest).for_each(|(all, own)| *all = all.max(own));
        }
        factors.iter_mut().for_each(|factor| *factor = self.problem.factor_of(*factor));
    }

    /// The largest finite magnitude of each share of a plane.
    fn largest(&self, plane: usize, means: Option<&[f32]>) -> Vec<f32> {
        let (dims, per) = (self.problem.dims(), self.problem.spec().per);
        let shares = match per {
            Granularity::PerTensor | Granularity::PerHead => 1,
            Granularity::PerBlock(rows) => dims.seq.div_ceil(rows),
            Granularity::PerChannel => dims.dim,
        };
        let (mut largest, means) = (vec![0f32; shares], self.means_of(plane, means));
        let (mut wide, mut own) = (vec![0f32; dims.dim], vec![0f32; dims.dim]);
        for (seq, from) in self.rows(plane).enumerate() {
            self.runner.run(Widen { from, to: &mut wide });
            self.runner.run(Magnitudes { row: &wide, means: &means, largest: &mut own });
            if let Granularity::PerBlock(rows) = per {
                let share = &mut largest[seq / rows];
                *share = own.iter().copied().fold(*share, f32::max);
                own.fill(0.0);
            }
        }
        match per {
            Granularity::PerChannel => own,
            Granularity::PerBlock(_) => largest,
            _ => vec![own.into_iter().fold(0.0, f32::max)],
        }
    }

    /// Writes every row; those that are not used become zeros.
    fn round<N: Float8>(&self, means: Option<&[f32]>, factors: &[f32], (to, out): (&Layout, &mut [N])) {
        let (out, dims) = (Shared::new(out), self.problem.dims());
        self.crew.each(self.planes(), |plane| {
            let mut wide = vec![0f32; dims.dim];
            let ([batch, head], means) = (self.place(plane), self.means_of(plane, means));
            let used = self.rows(plane).map(Some).chain(std::iter::repeat(None));
            for (seq, row) in (0..dims.seq).zip(used) {
                // SAFETY: planes are disjoint, and so are the rows of an output (`QuantiseSpec::parse`).
                let to = unsafe { out.range(to.row(batch, head, seq), dims.dim) };
                let Some(row) = row else {
                    to.fill(N::from_f32(0.0));
                    continue;
                };
                let first = self.problem.factor_index([batch, head, seq], 0);
                let count = if self.problem.spec().per == Granularity::PerChannel { dims.dim } else { 1 };
                self.runner.run(Widen { from: row, to: &mut wide });
                let factors = &factors[first..][..count];
                self.runner.run(Round { row: &mut wide, means: &means, factors, to });
            }
        });
    }
}
