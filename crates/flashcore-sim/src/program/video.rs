//! SIMD video instructions: the bytes or halves of a word, independently.

use super::{decode::map3, uop::LaneFn};
use flashcore_ptx::{
    inst::Inst,
    op::{Mod, Op},
    types::ScalarType,
};

/// What happens to a pair of elements.
type Element = fn(i64, i64) -> i64;

/// The function of a SIMD video instruction, `None` where it is none.
pub(super) fn lane_fn(inst: &Inst) -> Option<LaneFn> {
    let (bits, f): (u32, Element) = match inst.op {
        Op::Vset2 => (16, comparison(inst)?),
        Op::Vset4 => (8, comparison(inst)?),
        Op::Vadd2 => (16, |a, b| a + b),
        Op::Vadd4 => (8, |a, b| a + b),
        Op::Vsub2 => (16, |a, b| a - b),
        Op::Vsub4 => (8, |a, b| a - b),
        // Halves are rounded away from zero.
        Op::Vavrg2 => (16, average),
        Op::Vavrg4 => (8, average),
        Op::Vabsdiff2 => (16, |a, b| (a - b).abs()),
        Op::Vabsdiff4 => (8, |a, b| (a - b).abs()),
        Op::Vmin2 => (16, |a, b| a.min(b)),
        Op::Vmin4 => (8, |a, b| a.min(b)),
        Op::Vmax2 => (16, |a, b| a.max(b)),
        Op::Vmax4 => (8, |a, b| a.max(b)),
        _ => return None,
    };
    let is_signed = |i| inst.ty(i).map(|ty| ty == ScalarType::S32);
    // Comparisons name no type of their result.
    let [to, left, right] = match inst.op {
        Op::Vset2 | Op::Vset4 => [false, is_signed(0)?, is_signed(1)?],
        _ => [is_signed(0)?, is_signed(1)?, is_signed(2)?],
    };
    let elements = 32 / bits;
    let each = move |a: u64, b: u64, i: u32| f(part(a, i, bits, left), part(b, i, bits, right));
    if inst.has(Mod::Add) {
        return Some(map3(move |a, b, c| {
            let sum: i64 = (0..elements).map(|i| each(a, b, i)).sum();
            (sum as u64).wrapping_add(c)
        }));
    }
    let saturate = inst.has(Mod::Sat);
    Some(map3(move |a, b, _| {
        (0..elements).map(|i| narrowed(each(a, b, i), bits, to, saturate) << (i * bits)).sum()
    }))
}

/// 1 where elements compare so, else 0.
fn comparison(inst: &Inst) -> Option<Element> {
    let all: [(Mod, Element); 6] = [
        (Mod::Eq, |a, b| (a == b).into()),
        (Mod::Ne, |a, b| (a != b).into()),
        (Mod::Lt, |a, b| (a < b).into()),
        (Mod::Le, |a, b| (a <= b).into()),
        (Mod::Gt, |a, b| (a > b).into()),
        (Mod::Ge, |a, b| (a >= b).into()),
    ];
    all.into_iter().find(|(name, _)| inst.has(*name)).map(|(_, f)| f)
}

fn average(a: i64, b: i64) -> i64 {
    let sum = a + b;
    (sum + i64::from(sum >= 0)) >> 1
}

/// Element `i` of a word.
fn part(word: u64, i: u32, bits: u32, signed: bool) -> i64 {
    let top = word << (64 - bits - i * bits);
    if signed { top as i64 >> (64 - bits) } else { (top >> (64 - bits)) as i64 }
}

/// A result in `bits` bits.
fn narrowed(value: i64, bits: u32, signed: bool, saturate: bool) -> u64 {
    let (low, high) = if signed { (-(1 << (bits - 1)), (1 << (bits - 1)) - 1) } else { (0, (1 << bits) - 1) };
    let value = if saturate { value.clamp(low, high) } else { value };
    value as u64 & ((1 << bits) - 1)
}
