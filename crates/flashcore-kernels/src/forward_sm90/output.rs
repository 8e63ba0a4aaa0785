//! The output of a tile while it is computed.
//!
//! Tensor cores accumulate products of 8-bit numbers with 13 fraction bits, truncating the rest. Over a key
//! tile that loses little; the result is then added to the rest in f32. Products of 16-bit numbers need none of
//! this.
//!
//! After their features, values of 8 bits have constants for every key. So the same products also sum the rounded
//! probabilities, truncated in the same way, and what both have lost cancels in the quotient.

use flashcore_core::{COUNTS, E4M3};
use flashcore_tile::{Acc, Builder, Carried, F32, Reg, Start};

use super::{Config, config::Settles, consumer::Consumer};
use crate::parts::softmax::{Rows, over_quad};

/// Sums of probabilities times values.
pub(super) struct Output {
    /// What products are added to; nothing where some features are multiplied at a time.
    pub(super) recent: Acc,
    /// What has been taken from there, where products keep few bits.
    pub(super) settled: Option<Settled>,
}

/// Sums in f32.
pub(super) struct Settled {
    output: Acc,
    /// Probabilities times constants, in the first columns.
    counted: Acc,
    when: Settles,
}

/// Which of the key tiles that are settled together a product belongs to.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(super) enum Place {
    /// It is the only one.
    Only,
    First,
    Last,
}

impl Output {
    /// Unwritten sums.
    pub(super) fn new(b: &mut Builder, cfg: Config) -> Self {
        let (dim, counted) = (cfg.dim_v as usize, cfg.counted_cols() as usize);
        let in_parts = cfg.settles == Settles::Parts;
        let recent = Acc::new(b, if in_parts { 0 } else { dim + counted });
        let settled = cfg.narrow().then(|| Settled {
            output: Acc::new(b, dim),
            counted: Acc::new(b, counted),
            when: cfg.settles,
        });
        Self { recent, settled }
    }

    /// Sets all sums to zero.
    pub(super) fn clear(&self, b: &mut Builder) {
        self.lasting(Place::Last).into_iter().for_each(|tile| tile.fill(b, 0.0));
        if let Some(Settled { when: Settles::AtEnd, output, counted }) = &self.settled {
            [output, counted].into_iter().for_each(|tile| tile.fill(b, 0.0));
        }
    }

    /// What a product starts from.
    pub(super) fn start(&self, place: Place) -> Start {
        match self.settled {
            None | Some(Settled { when: Settles::AtEnd, .. }) => Start::Accumulate,
            _ if place == Place::Last => Start::Accumulate,
            _ => Start::Zero,
        }
    }

    /// The tiles that hold the output when the product of a key tile has been added.
    pub(super) fn lasting(&self, place: Place) -> Vec<&Acc> {
        match &self.settled {
            None | Some(Settled { when: Settles::AtEnd, .. }) => vec![&self.recent],
            Some(Settled { output, counted, .. }) if place == Place::First => {
                vec![output, counted, &self.recent]
            }
            Some(Settled { output, counted, .. }) => vec![output, counted],
        }
    }

    /// The registers of all columns in which sums are settled, those of counts behind those of features.
    fn settled_sums(&self) -> impl Iterator<Item = &Reg<F32>> {
        let tiles = self.settled.iter().flat_map(|settled| [&settled.output, &settled.counted]);
        tiles.flat_map(Acc::regs)
    }

    /// Adds the products of some columns, from number `first` on, to what is settled of them.
    pub(super) fn add_part(&self, b: &mut Builder, part: &[Reg<F32>], first: usize) {
        let sums = self.settled_sums().skip(first / 2).zip(part);
        sums.for_each(|(&sum, &recent)| b.add_to(sum, recent));
    }

    /// Adds what is recent to what is settled, if there is such a thing; no product is in flight.
    fn add_recent(&self, b: &mut Builder) {
        if self.settled.is_some() {
            self.add_part(b, self.recent.regs(), 0);
        }
    }

    /// The output, when the last product has ended, and the sums of rounded probabilities where these were counted.
    pub(super) fn settle(&self, b: &mut Builder) -> (&Acc, Option<Rows<F32>>) {
        let Some(Settled { output, counted, when }) = &self.settled else { return (&self.recent, None) };
        if *when != Settles::Parts {
            self.add_recent(b);
        }
        // The other columns are zero, so that only the lane with the first ones has something to add.
        let sums = [0, 1].map(|row| {
            let own = b.add(counted.regs()[2 * row], counted.regs()[2 * row + 1]);
            let all = over_quad(b, own, |b, x, y| b.add(x, y));
            b.mul(all, 1.0 / COUNTS.map(E4M3::to_f32).iter().sum::<f32>())
        });
        (output, Some(sums))
    }
}

impl Carried for Output {
    fn identity(&self, b: &Builder) -> Vec<u64> {
        let settled = self.settled.iter().flat_map(|settled| [&settled.output, &settled.counted]);
        std::iter::once(&self.recent).chain(settled).flat_map(|tile| tile.identity(b)).collect()
    }

    fn twin(&self) -> Self {
        let settled = self.settled.as_ref().map(|Settled { output, counted, when }| Settled {
            output: output.twin(),
            counted: counted.twin(),
            when: *when,
        });
        Self { recent: self.recent.twin(), settled }
    }
}

impl Consumer<'_> {
    /// Adds what key tiles have come to, where it would begin to lose.
    pub(super) fn settle_early(&self, b: &mut Builder, output: &Output, place: Place) {
        if self.cfg.settles != Settles::AtEnd && place != Place::First {
            output.add_recent(b);
        }
    }
}
