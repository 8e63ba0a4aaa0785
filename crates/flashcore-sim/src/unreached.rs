//! Notes about code that cannot be simulated and was not reached: a clean launch says nothing about it.
//!
//! Called by `launch.rs` at the end of a launch.

use crate::{
    finding::{Finding, FindingKind},
    machine::Machine,
    program::Uop,
};
use std::collections::BTreeMap;

impl Machine<'_> {
    /// Adds one note for each mnemonic, at the first place where it stands.
    pub(crate) fn note_unreached(&mut self) {
        let program = self.context.program;
        let mut places = BTreeMap::<&str, Vec<u32>>::new();
        for (pc, code) in program.code.iter().enumerate() {
            if matches!(code.uop, Uop::Refused(_)) {
                let text = &program.origins[pc].text;
                let mnemonic = text.split_once(' ').map_or(text.as_str(), |(mnemonic, _)| mnemonic);
                places.entry(mnemonic).or_default().push(pc as u32);
            }
        }
        for (mnemonic, places) in places {
            self.findings.add(Finding {
                kind: FindingKind::NotJudged,
                kernel: program.kernel.clone(),
                cta: [0; 3],
                warp: 0,
                lane: 0,
                site: Some(self.context.site(places[0])),
                message: format!("`{mnemonic}` cannot be simulated; this launch did not execute it"),
                count: places.len() as u64,
            });
        }
    }
}
