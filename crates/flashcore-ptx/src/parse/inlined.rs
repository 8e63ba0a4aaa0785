//! `.loc` lines of inlined functions: which line of which file to show the user.
//!
//! A compiler inlines functions from headers, and names for each such instruction the place of the call, whose own `.loc`
//! came before. Users know the kernel's file: the innermost line of the chain in that file is the one to show.

use std::collections::BTreeMap;

/// File, line and column, as `.loc` gives them.
pub(super) type Position = (u32, u32, u32);

/// What is known of the chains of calls in one body.
#[derive(Default)]
pub(super) struct Inlined(BTreeMap<Position, Shown>);

#[derive(Clone, Copy)]
struct Shown {
    /// File and line to report.
    place: (u32, u32),
    /// The file of the outermost call.
    outermost: u32,
}

impl Inlined {
    /// The file and line to tell for an instruction at `own`, which was inlined at `call`.
    pub(super) fn place(&mut self, own: Position, call: Option<Position>) -> (u32, u32) {
        let by_itself = |(file, line, _): Position| Shown { place: (file, line), outermost: file };
        let shown = match call {
            None => by_itself(own),
            Some(call) => {
                let caller = self.0.get(&call).copied().unwrap_or_else(|| by_itself(call));
                let place = if own.0 == caller.outermost { (own.0, own.1) } else { caller.place };
                Shown { place, ..caller }
            }
        };
        self.0.insert(own, shown);
        shown.place
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_innermost_line_of_the_kernels_own_file_counts() {
        let mut inlined = Inlined::default();
        assert_eq!(inlined.place((1, 20, 3), None), (1, 20), "the kernel");
        assert_eq!(inlined.place((1, 12, 5), Some((1, 20, 3))), (1, 12), "a function beside it");
        assert_eq!(inlined.place((2, 300, 1), Some((1, 12, 5))), (1, 12), "a header that it calls");
        assert_eq!(inlined.place((3, 7, 1), Some((2, 300, 1))), (1, 12), "a header that this calls");
        assert_eq!(inlined.place((1, 5, 1), Some((3, 7, 1))), (1, 5), "and what that calls back");
        assert_eq!(inlined.place((3, 7, 1), Some((1, 30, 1))), (1, 30), "a call that was not seen before");
    }
}
