//! Sums of more than 64 bits, one piece at a time: `add.cc`, `addc` and the like.

use super::{
    integer::widen,
    operand::{Context, Decoded, refuse},
    uop::{Carry, Uop},
};
use flashcore_ptx::{
    inst::Inst,
    op::{Mod, Op},
};

/// Whether an instruction takes a carry or leaves one.
pub(super) fn is_carry(inst: &Inst) -> bool {
    matches!(inst.op, Op::Addc | Op::Subc | Op::Madc) || inst.has(Mod::Cc)
}

/// Decodes such an instruction.
pub(super) fn decode(cx: &Context<'_>, inst: &Inst) -> Decoded<Uop> {
    let Some(ty) = inst.ty(0) else { return refuse("no type") };
    let [dst, sources @ ..] = inst.operands.as_slice() else { return refuse("too few operands") };
    let op = Carry {
        ty,
        subtract: matches!(inst.op, Op::Sub | Op::Subc),
        product: matches!(inst.op, Op::Mad | Op::Madc).then(|| inst.has(Mod::Hi)),
        takes: matches!(inst.op, Op::Addc | Op::Subc | Op::Madc),
        leaves: inst.has(Mod::Cc),
    };
    let srcs = sources.iter().map(|o| cx.src(o, ty)).collect::<Decoded<_>>()?;
    Ok(Uop::Carry { op, dst: cx.dst(dst)?, srcs })
}

impl Carry {
    /// The result and the carry out of one lane.
    pub(crate) fn sum(self, sources: &[u64], carry: bool) -> (u64, bool) {
        let bits = self.ty.bits();
        let mask = u128::from(u64::MAX >> (64 - bits));
        let plain = |value: u64| u128::from(value) & mask;
        let (first, second) = match (self.product, sources) {
            (Some(high), &[a, b, c]) => {
                let product = widen(a, self.ty).wrapping_mul(widen(b, self.ty)) as u128;
                (if high { product >> bits & mask } else { product & mask }, plain(c))
            }
            (None, &[a, b]) => (plain(a), plain(b)),
            _ => (0, 0),
        };
        // Hardware subtracts by adding the complement, so that a borrow is the absence of a carry: `addc` behind `sub.cc`
        // sees that.
        let (second, carry) = match self.subtract {
            true => (!second & mask, carry || !self.takes),
            false => (second, carry && self.takes),
        };
        let total = first + second + u128::from(carry);
        ((total & mask) as u64, total >> bits & 1 == 1)
    }
}
