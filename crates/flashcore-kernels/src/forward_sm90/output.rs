//! The output of a tile while it is computed.
//!
//! Tensor cores add up products of 8-bit numbers with 13 bits behind the point, cutting off what lies below. Over a key tile
//! that takes little away; what it adds up to is then added to the rest in f32. Products of 16-bit numbers need nothing of
//! the kind.
//!
//! Behind their features, values of 8 bits have a one for every key. The sum of probabilities, as they were rounded, so comes
//! out of the same products, cut off in the same way, and what both have lost cancels in the quotient.

use flashcore_tile::{Acc, Builder, Carried, F32, Start};

use super::{Config, consumer::Consumer};
use crate::parts::softmax::{Rows, over_quad};

/// Sums of probabilities times values.
pub(super) struct Output {
    /// What products are added to.
    pub(super) recent: Acc,
    /// What has been taken from there, where products keep few bits.
    pub(super) settled: Option<Settled>,
}

/// Sums in f32.
pub(super) struct Settled {
    output: Acc,
    /// Probabilities, in the first column.
    counted: Acc,
    /// Whether what is recent has been added after every key tile.
    early: bool,
}

impl Output {
    /// Unwritten sums.
    pub(super) fn new(b: &mut Builder, cfg: Config) -> Self {
        let (dim, counted) = (cfg.dim_v as usize, cfg.counted_cols() as usize);
        let recent = Acc::new(b, dim + counted);
        let settled = cfg.narrow().then(|| Settled {
            output: Acc::new(b, dim),
            counted: Acc::new(b, counted),
            early: cfg.settles,
        });
        Self { recent, settled }
    }

    /// Sets all sums to zero.
    pub(super) fn clear(&self, b: &mut Builder) {
        self.lasting().into_iter().for_each(|tile| tile.fill(b, 0.0));
        if let Some(Settled { early: false, output, counted }) = &self.settled {
            [output, counted].into_iter().for_each(|tile| tile.fill(b, 0.0));
        }
    }

    /// What the next product starts from.
    pub(super) fn start(&self) -> Start {
        if matches!(self.settled, Some(Settled { early: true, .. })) {
            Start::Zero
        } else {
            Start::Accumulate
        }
    }

    /// The tiles that hold the output from one key tile to the next.
    pub(super) fn lasting(&self) -> Vec<&Acc> {
        match &self.settled {
            Some(Settled { early: true, output, counted }) => vec![output, counted],
            _ => vec![&self.recent],
        }
    }

    /// Adds what is recent to what is settled, if there is such a thing; no product is in flight.
    fn add_recent(&self, b: &mut Builder) {
        let Some(Settled { output, counted, .. }) = &self.settled else { return };
        let sums = output.regs().iter().chain(counted.regs()).zip(self.recent.regs());
        sums.for_each(|(&sum, &recent)| b.add_to(sum, recent));
    }

    /// The output, when the last product has ended, and the sums of rounded probabilities where these were counted.
    pub(super) fn settle(&self, b: &mut Builder) -> (&Acc, Option<Rows<F32>>) {
        self.add_recent(b);
        let Some(Settled { output, counted, .. }) = &self.settled else { return (&self.recent, None) };
        // The other columns are zero, so that only the lane with the first one has something to add.
        let sums = [0, 1].map(|row| over_quad(b, counted.regs()[2 * row], |b, x, y| b.add(x, y)));
        (output, Some(sums))
    }
}

impl Carried for Output {
    fn identity(&self, b: &Builder) -> Vec<u64> {
        let settled = self.settled.iter().flat_map(|settled| [&settled.output, &settled.counted]);
        std::iter::once(&self.recent).chain(settled).flat_map(|tile| tile.identity(b)).collect()
    }

    fn twin(&self) -> Self {
        let settled = self.settled.as_ref().map(|Settled { output, counted, early }| Settled {
            output: output.twin(),
            counted: counted.twin(),
            early: *early,
        });
        Self { recent: self.recent.twin(), settled }
    }
}

impl Consumer<'_> {
    /// Adds what a key tile has come to, where it would begin to lose.
    pub(super) fn settle_early(&self, b: &mut Builder, output: &Output) {
        if self.cfg.settles {
            output.add_recent(b);
        }
    }
}
