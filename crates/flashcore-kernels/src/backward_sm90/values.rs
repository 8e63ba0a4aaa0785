//! The product for the gradient of values, dV += Pᵀ·dO: when it is issued, and what happens to its registers.
//!
//! It is issued after the exponentials or, if there are too few registers for exponentials on the other side of a
//! branch, together with them: `Config::multiplies_values_early`.

use flashcore_tile::{Acc, Builder, Fragment, Pending, Stage, Start};

use super::consumer::Consumer;

/// The gradient of values, and the probabilities that it is made of.
pub(super) enum Values {
    /// They are not multiplied yet.
    Due(Acc, Fragment),
    Issued(Pending<(Acc, Fragment)>),
    /// They have been multiplied, and dO was released.
    Done(Acc, Fragment),
}

impl Values {
    /// Probabilities, but while they are multiplied.
    pub(super) const fn probs(&self) -> Option<&Fragment> {
        match self {
            Self::Due(_, probs) | Self::Done(_, probs) => Some(probs),
            Self::Issued(_) => None,
        }
    }
}

impl Consumer<'_> {
    /// Issues the product if that has not been done.
    pub(super) fn issue_values(&self, b: &mut Builder, values: Values, stage: &Stage) -> Values {
        match values {
            Values::Due(acc, probs) => {
                let streamed = self.along[1].plus(b, stage.bytes);
                Values::Issued(b.wgmma_rs(acc, Start::Accumulate, probs, &streamed))
            }
            others => others,
        }
    }

    /// Issues the product behind that of slopes, where it is issued early.
    pub(super) fn issue_early(&self, b: &mut Builder, values: Values, stage: &Stage) -> Values {
        if self.cfg.multiplies_values_early() { self.issue_values(b, values, stage) } else { values }
    }

    /// Waits for a product that was issued early: slopes are multiplied with what it reads.
    pub(super) fn settle_early(&self, b: &mut Builder, values: Values, stage: &Stage) -> Values {
        if !self.cfg.multiplies_values_early() {
            return values;
        }
        let (acc, probs) = self.settle_values(b, values, stage);
        Values::Done(acc, probs)
    }

    /// Waits for a product in flight, and releases dO after it.
    pub(super) fn settle_values(&self, b: &mut Builder, values: Values, stage: &Stage) -> (Acc, Fragment) {
        match values {
            Values::Issued(product) => {
                let done = product.wait(b);
                stage.release(b, self.leader);
                done
            }
            Values::Due(acc, probs) | Values::Done(acc, probs) => (acc, probs),
        }
    }
}
