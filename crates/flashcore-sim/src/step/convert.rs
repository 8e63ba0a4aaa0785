//! Conversions between address spaces.

use super::{Flow, Outcome, Step};
use crate::{
    memory::{
        CONST_WINDOW, LOCAL_WINDOW, PARAM_WINDOW, SHARED_WINDOW, WINDOW_BYTES, rank_address, shared_offset,
        shared_rank,
    },
    program::{Dst, Lanes, Space, Src},
};

/// Where the window of a space starts; global memory has none.
const fn window(space: Space) -> u64 {
    match space {
        Space::SharedCta | Space::SharedCluster => SHARED_WINDOW,
        Space::Local => LOCAL_WINDOW,
        Space::Param => PARAM_WINDOW,
        Space::Const => CONST_WINDOW,
        Space::Global | Space::Generic => 0,
    }
}

impl Step<'_, '_> {
    fn map(&mut self, dst: Dst, src: Src, f: impl Fn(u64) -> u64) -> Outcome {
        let sources = self.sources(&[src]);
        self.write_made(dst, |values| values[0].map(&f), &sources);
        Ok(Flow::Next)
    }

    pub(super) fn make_generic(&mut self, dst: Dst, src: Src, space: Space) -> Outcome {
        self.map(dst, src, |a| if window(space) == 0 { a } else { window(space) + (a & (WINDOW_BYTES - 1)) })
    }

    pub(super) fn leave_generic(&mut self, dst: Dst, src: Src, space: Space) -> Outcome {
        self.map(dst, src, |a| if window(space) == 0 { a } else { a & (WINDOW_BYTES - 1) })
    }

    pub(super) fn is_space(&mut self, dst: Dst, src: Src, space: Space) -> Outcome {
        let windows = [SHARED_WINDOW, LOCAL_WINDOW, PARAM_WINDOW, CONST_WINDOW];
        self.map(dst, src, |a| {
            let home = a & !(WINDOW_BYTES - 1);
            u64::from(if window(space) == 0 { !windows.contains(&home) } else { home == window(space) })
        })
    }

    /// `mapa`: the same offset in another CTA of the cluster.
    pub(super) fn map_address(&mut self, dst: Dst, src: Src, rank: Src, generic: bool) -> Outcome {
        let (addresses, ranks) = (self.read(src), self.read(rank));
        let high = if generic { SHARED_WINDOW } else { 0 };
        let mapped: Lanes = std::array::from_fn(|i| {
            high + u64::from(rank_address(ranks[i] as u32 & 0xff, shared_offset(addresses[i] as u32)))
        });
        self.write(dst, &mapped);
        Ok(Flow::Next)
    }

    pub(super) fn cta_rank(&mut self, dst: Dst, src: Src) -> Outcome {
        self.map(dst, src, |a| shared_rank(a as u32).into())
    }
}
