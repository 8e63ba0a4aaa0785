//! Atomics and reductions, on memory and for bulk reductions.

use super::{Flow, Outcome, Step};
use crate::{
    memory::{Place, resolve},
    numeric::{
        BF16, F16, single,
        small::{HalfMode, per_half},
    },
    program::{Atomic, Combine, Lanes, SHARED_BASE},
    regfile::lanes_of,
};
use flashcore_ptx::types::ScalarType;

impl Step<'_, '_> {
    /// Lanes act one after the other, lowest first.
    pub(super) fn atomic(&mut self, op: &Atomic) -> Outcome {
        let addresses = self.address(&op.access.addr);
        let values: Vec<Lanes> = op.values.iter().map(|v| self.read(*v)).collect();
        let swaps: Vec<Lanes> = op.swaps.iter().map(|s| self.read(*s)).collect();
        let bytes = op.access.bytes as usize * values.len();
        let mut old = vec![[0; 32]; values.len()];
        for lane in lanes_of(self.mask) {
            let own = |lanes: &[Lanes]| lanes.iter().map(|value| value[lane]).collect::<Vec<_>>();
            self.check_alignment(lane, resolve(op.access.space, addresses[lane]), bytes)?;
            let before = self.update(op, lane, addresses[lane], &own(&values), &own(&swaps))?;
            old.iter_mut().zip(before).for_each(|(old, word)| old[lane] = word);
        }
        self.count_access(op.access.space, &addresses, bytes);
        for (dst, old) in op.dsts.iter().zip(&old) {
            self.write(*dst, old);
        }
        self.machine.effect();
        Ok(Flow::Next)
    }

    /// A compare-and-swap finds out whether what was read before is old.
    fn excuse_reads(&mut self, place: Place, width: usize) {
        let word = match place {
            Place::Global(address) => (None, address / 4),
            Place::Shared { rank, offset } => {
                (self.machine.peer(self.cta, rank), u64::from(offset.wrapping_sub(SHARED_BASE)) / 4)
            }
            _ => return,
        };
        let reader = (self.cluster_number(), self.machine.warps[self.warp].agent);
        self.excuse(reader, word, width as u64);
        if let (Some(cta), at) = word {
            let start = 4 * at as usize;
            self.machine.ctas[cta].shared.shadow.forget_reads(start..start + width, reader.1);
        }
    }

    /// Replaces the elements at `address`; returns those before.
    fn update(
        &mut self,
        op: &Atomic,
        lane: usize,
        address: u64,
        values: &[u64],
        swaps: &[u64],
    ) -> Outcome<Vec<u64>> {
        let (space, width, order) = (op.access.space, op.access.bytes as usize, op.access.order);
        let places: Vec<Place> =
            (0..values.len()).map(|i| resolve(space, address.wrapping_add((i * width) as u64))).collect();
        let mut old = Vec::new();
        for place in &places {
            if op.op == Combine::Cas {
                self.excuse_reads(*place, width);
            }
            let mut bytes = [0; 8];
            self.read_place(lane, *place, space, &mut bytes[..width], order)?;
            old.push(u64::from_le_bytes(bytes));
        }
        let matches =
            old.iter().zip(values).all(|(old, value)| *old == value & (u64::MAX >> (64 - 8 * width)));
        for (i, place) in places.into_iter().enumerate() {
            let new = match (op.op, matches) {
                (Combine::Cas, true) => swaps[i],
                (Combine::Cas, false) => old[i],
                _ => updated(op, place, old[i], values[i]),
            };
            self.write_place(lane, place, space, &new.to_le_bytes()[..width], order)?;
        }
        Ok(old)
    }
}

fn updated(op: &Atomic, place: Place, old: u64, value: u64) -> u64 {
    match (place, op.op, op.ty) {
        (Place::Global(_), Combine::Add, ScalarType::F32) => {
            flushed(combine(op.op, op.ty, flushed(old), flushed(value)))
        }
        _ => combine(op.op, op.ty, old, value),
    }
}

/// Sums of f32 in global memory know no subnormals, those in shared memory do.
fn flushed(bits: u64) -> u64 {
    u64::from(single::flush(f32::from_bits(bits as u32), true).to_bits())
}

/// The new value of a location.
fn combine(op: Combine, ty: ScalarType, old: u64, value: u64) -> u64 {
    use ScalarType::{Bf16, Bf16x2, F16x2, F32, F64, S32, S64};
    let half = |format| HalfMode { format, ftz: false, sat: false, relu: false };
    let pick = |first: bool| if first { old } else { value };
    let (o, v) = (old, value);
    match (op, ty) {
        (Combine::Exch, _) => v,
        (Combine::And, _) => o & v,
        (Combine::Or, _) => o | v,
        (Combine::Xor, _) => o ^ v,
        (Combine::Inc, _) => {
            if o as u32 >= v as u32 {
                0
            } else {
                o + 1
            }
        }
        (Combine::Dec, _) => {
            if o as u32 == 0 || o as u32 > v as u32 {
                v
            } else {
                o - 1
            }
        }
        (Combine::Add, F32) => {
            // the result of NaN is canonical
            let sum = f32::from_bits(o as u32) + f32::from_bits(v as u32);
            u64::from(if sum.is_nan() { crate::numeric::single::NAN_BITS } else { sum.to_bits() })
        }
        (Combine::Add, F64) => (f64::from_bits(o) + f64::from_bits(v)).to_bits(),
        (_, ScalarType::F16 | F16x2 | Bf16 | Bf16x2) => {
            let format = if matches!(ty, Bf16 | Bf16x2) { BF16 } else { F16 };
            let mode = half(format);
            per_half(ty.bits() == 32, |s| match op {
                Combine::Min => mode.extremum(o >> s, v >> s, true, false),
                Combine::Max => mode.extremum(o >> s, v >> s, false, false),
                _ => mode.add(o >> s, v >> s),
            })
        }
        (Combine::Min, S32) => pick((o as i32) < v as i32),
        (Combine::Max, S32) => pick(o as i32 > v as i32),
        (Combine::Min, S64) => pick((o as i64) < v as i64),
        (Combine::Max, S64) => pick(o as i64 > v as i64),
        (Combine::Min, F32) => u64::from(f32::from_bits(o as u32).min(f32::from_bits(v as u32)).to_bits()),
        (Combine::Max, F32) => u64::from(f32::from_bits(o as u32).max(f32::from_bits(v as u32)).to_bits()),
        (Combine::Min, _) => pick(o < v & (u64::MAX >> (64 - ty.bits()))),
        (Combine::Max, _) => pick(o > v & (u64::MAX >> (64 - ty.bits()))),
        _ => o.wrapping_add(v),
    }
}

/// Combines `data` into `target`, element by element of type `ty`.
pub(crate) fn reduce_bytes(target: &mut [u8], data: &[u8], op: Combine, ty: ScalarType) {
    let width = ty.bytes() as usize;
    for (old, new) in target.chunks_exact_mut(width).zip(data.chunks_exact(width)) {
        let word = |bytes: &[u8]| {
            let mut word = [0; 8];
            word[..width].copy_from_slice(bytes);
            u64::from_le_bytes(word)
        };
        let value = combine(op, ty, word(old), word(new));
        old.copy_from_slice(&value.to_le_bytes()[..width]);
    }
}
