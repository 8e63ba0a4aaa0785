//! Functions that the system provides: `vprintf` and `__assertfail`.

use super::{Flow, Outcome, Step, format::Directive};
use crate::{
    finding::FindingKind,
    memory::resolve,
    program::{Call, Order, Piece, Space},
    regfile::lanes_of,
};

/// Most bytes of a string that an assertion or a print names.
const LONGEST_TEXT: u64 = 4096;

impl Step<'_, '_> {
    /// `__assertfail(message, file, line, function, size of a character)`.
    pub(super) fn assertion(&mut self, call: &Call) -> Outcome {
        let lane = self.first_lane();
        let number = |step: &mut Self, i: usize| call.args.get(i).map_or(0, |arg| step.argument(lane, *arg));
        let [message, file, line, function] = std::array::from_fn(|i| number(self, i));
        let [message, file, function] = [message, file, function].map(|address| self.text_at(lane, address));
        let said = format!("assertion `{message}` failed in {function}, {file}:{line}");
        self.halt(FindingKind::AssertFailed, lane, said)
    }

    /// `vprintf(format, arguments)`: prints for each lane in turn.
    pub(super) fn print(&mut self, call: &Call) -> Outcome {
        for lane in lanes_of(self.mask) {
            let number = |step: &mut Self, i: usize| call.args.get(i).map_or(0, |a| step.argument(lane, *a));
            let (format, arguments) = (number(self, 0), number(self, 1));
            let template = self.text_at(lane, format);
            let line = self.formatted(lane, &template, arguments);
            self.machine.printed.push_str(&line);
            if let Some(result) = call.result {
                let at = self.machine.warps[self.warp].calls.base(lane) + result.offset;
                let range = self.local_range(lane, at.into(), result.bytes as usize)?;
                let warp = &mut self.machine.warps[self.warp];
                warp.local_written.mark(range.clone());
                warp.local[range].fill(0);
            }
        }
        Ok(Flow::Next)
    }

    /// An argument of a call, as a number.
    fn argument(&mut self, lane: usize, piece: Piece) -> u64 {
        let base = self.machine.warps[self.warp].calls.base(lane);
        let mut bytes = [0; 8];
        let len = (piece.bytes as usize).min(8);
        if let Ok(range) = self.local_range(lane, (base + piece.offset).into(), len) {
            bytes[..len].copy_from_slice(&self.machine.warps[self.warp].local[range]);
        }
        u64::from_le_bytes(bytes)
    }

    /// A number at a generic address.
    fn word_at(&mut self, lane: usize, address: u64, bytes: usize) -> Option<u64> {
        let mut out = [0; 8];
        let place = resolve(Space::Generic, address);
        let read = self.read_place(lane, place, Space::Generic, &mut out[..bytes], Order::default());
        read.ok().map(|()| u64::from_le_bytes(out))
    }

    /// The text at a generic address, up to its zero.
    fn text_at(&mut self, lane: usize, address: u64) -> String {
        let byte = |step: &mut Self, i: u64| Some(step.word_at(lane, address.wrapping_add(i), 1)? as u8);
        let bytes: Vec<u8> = (0..LONGEST_TEXT).map_while(|i| byte(self, i).filter(|&b| b != 0)).collect();
        String::from_utf8_lossy(&bytes).into_owned()
    }

    /// A format with its arguments, which lie one after the other, each aligned to its size.
    fn formatted(&mut self, lane: usize, template: &str, mut at: u64) -> String {
        let (mut line, mut rest) = (String::new(), template);
        while let Some((before, behind)) = rest.split_once('%') {
            line.push_str(before);
            let next = || self.next_argument(lane, &mut at, 4) as i32;
            let Some((directive, after)) = Directive::read(behind, next) else { break };
            rest = after;
            if directive.kind == '%' {
                line.push('%');
                continue;
            }
            let value = self.next_argument(lane, &mut at, if directive.wide { 8 } else { 4 });
            line.push_str(&match directive.kind {
                's' => directive.text(&self.text_at(lane, value)),
                _ => directive.number(value),
            });
        }
        line + rest
    }

    fn next_argument(&mut self, lane: usize, at: &mut u64, bytes: u64) -> u64 {
        let start = at.next_multiple_of(bytes);
        *at = start + bytes;
        self.word_at(lane, start, bytes as usize).unwrap_or(0)
    }
}
