//! Lane functions of the integer instructions.

use super::{
    decode::{map1, map2, map3, map4},
    uop::LaneFn,
};
use flashcore_ptx::{
    inst::Inst,
    op::{Mod, Op},
    types::ScalarType,
};

/// Evaluates `$body` with `$T` standing for the Rust type of the PTX type.
macro_rules! with_int {
    ($ty:expr, $T:ident => $body:expr) => {
        match $ty {
            ScalarType::U16 | ScalarType::B16 => {
                type $T = u16;
                $body
            }
            ScalarType::S16 => {
                type $T = i16;
                $body
            }
            ScalarType::U32 | ScalarType::B32 => {
                type $T = u32;
                $body
            }
            ScalarType::S32 => {
                type $T = i32;
                $body
            }
            ScalarType::U64 | ScalarType::B64 => {
                type $T = u64;
                $body
            }
            ScalarType::S64 => {
                type $T = i64;
                $body
            }
            _ => return None,
        }
    };
}
pub(super) use with_int;

/// The function of an integer instruction, `None` where there is none.
#[allow(clippy::unnecessary_cast, reason = "`T` stands for u64 as well")]
pub(super) fn lane_fn(inst: &Inst, ty: ScalarType) -> Option<LaneFn> {
    if matches!(inst.op, Op::Mul | Op::Mad) {
        return product(inst, ty);
    }
    if matches!(inst.op, Op::Bfe | Op::Bfi | Op::Bfind | Op::Dp2a | Op::Dp4a | Op::Bmsk | Op::Szext | Op::Fns)
    {
        return fields(inst, ty);
    }
    if matches!(inst.op, Op::Mul24 | Op::Mad24) {
        return Some(product24(inst, ty));
    }
    if let Some(video) = super::video::lane_fn(inst) {
        return Some(video);
    }
    if matches!(ty, ScalarType::U16x2 | ScalarType::S16x2) {
        return pairs(inst, ty);
    }
    let (sat, relu) = (inst.has(Mod::Sat), inst.has(Mod::Relu));
    Some(with_int!(ty, T => match inst.op {
        Op::Add if sat => map2(|a, b| (a as T).saturating_add(b as T) as u64),
        Op::Sub if sat => map2(|a, b| (a as T).saturating_sub(b as T) as u64),
        Op::Add => map2(|a, b| (a as T).wrapping_add(b as T) as u64),
        Op::Sub => map2(|a, b| (a as T).wrapping_sub(b as T) as u64),
        // The hardware answers all ones for a quotient by zero, and for the remainder as well.
        Op::Div => map2(|a, b| match b as T { 0 => u64::MAX, d => (a as T).wrapping_div(d) as u64 }),
        Op::Rem => map2(|a, b| match b as T { 0 => u64::MAX, d => (a as T).wrapping_rem(d) as u64 }),
        Op::Sad => map3(|a, b, c| (c as T).wrapping_add((a as T).abs_diff(b as T) as T) as u64),
        Op::Abs => map1(|a| if (a as T) < (0 as T) { (0 as T).wrapping_sub(a as T) as u64 } else { a }),
        Op::Neg => map1(|a| (0 as T).wrapping_sub(a as T) as u64),
        Op::Min if relu => map2(|a, b| (a as T).min(b as T).max(0 as T) as u64),
        Op::Max if relu => map2(|a, b| (a as T).max(b as T).max(0 as T) as u64),
        Op::Min => map2(|a, b| (a as T).min(b as T) as u64),
        Op::Max => map2(|a, b| (a as T).max(b as T) as u64),
        Op::Popc => map1(|a| (a as T).count_ones().into()),
        Op::Clz => map1(|a| (a as T).leading_zeros().into()),
        Op::Brev => map1(|a| (a as T).reverse_bits() as u64),
        _ => return None,
    }))
}

/// Two halves of a word, each for itself.
fn pairs(inst: &Inst, ty: ScalarType) -> Option<LaneFn> {
    let half = if ty == ScalarType::S16x2 { ScalarType::S16 } else { ScalarType::U16 };
    let f: fn(i128, i128) -> i128 = match inst.op {
        Op::Add => |a, b| a + b,
        Op::Min => i128::min,
        Op::Max => i128::max,
        _ => return None,
    };
    let least = if inst.has(Mod::Relu) { 0 } else { i128::MIN };
    let one = move |a: u64, b: u64| f(widen(a, half), widen(b, half)).max(least) as u64 & 0xffff;
    Some(map2(move |a, b| one(a, b) | one(a >> 16, b >> 16) << 16))
}

fn product(inst: &Inst, ty: ScalarType) -> Option<LaneFn> {
    let wide = move |a: u64, b: u64| -> i128 { widen(a, ty).wrapping_mul(widen(b, ty)) };
    let bits = ty.bits();
    if !ty.is_integer() {
        return None;
    }
    let mad = inst.op == Op::Mad;
    Some(if inst.has(Mod::Wide) {
        if mad {
            map3(move |a, b, c| (wide(a, b) as u64).wrapping_add(c))
        } else {
            map2(move |a, b| wide(a, b) as u64)
        }
    } else if inst.has(Mod::Hi) {
        let high = move |a, b| (wide(a, b) >> bits) as u64;
        match (mad, inst.has(Mod::Sat)) {
            (false, _) => map2(high),
            (true, false) => map3(move |a, b, c| high(a, b).wrapping_add(c)),
            (true, true) => map3(move |a, b, c| (high(a, b) as i32).saturating_add(c as i32) as u64),
        }
    } else if mad {
        map3(|a, b, c| a.wrapping_mul(b).wrapping_add(c))
    } else {
        map2(u64::wrapping_mul)
    })
}

/// The value of a register as an integer of type `ty`.
pub(super) fn widen(bits: u64, ty: ScalarType) -> i128 {
    match ty {
        ScalarType::S8 => i128::from(bits as i8),
        ScalarType::S16 => i128::from(bits as i16),
        ScalarType::S32 => i128::from(bits as i32),
        ScalarType::S64 => i128::from(bits as i64),
        ScalarType::U8 | ScalarType::B8 => i128::from(bits as u8),
        ScalarType::U16 | ScalarType::B16 => i128::from(bits as u16),
        ScalarType::U32 | ScalarType::B32 => i128::from(bits as u32),
        _ => i128::from(bits),
    }
}

fn fields(inst: &Inst, ty: ScalarType) -> Option<LaneFn> {
    let width = u64::from(ty.bits());
    let signed = matches!(ty, ScalarType::S32 | ScalarType::S64);
    Some(match inst.op {
        Op::Bfe => map3(move |a, position, length| extract(a, position & 0xff, length & 0xff, width, signed)),
        Op::Bfi => map4(move |a, b, position, length| insert(a, b, position & 0xff, length & 0xff, width)),
        Op::Bfind => {
            let shift = inst.has(Mod::Shiftamt);
            map1(move |a| leading_bit(a, ty, signed, shift))
        }
        Op::Bmsk => {
            let clamp = inst.has(Mod::Clamp);
            map2(move |position, length| bit_mask(position as u32, length as u32, clamp))
        }
        Op::Szext => {
            let clamp = inst.has(Mod::Clamp);
            map2(move |a, length| resized(a, length as u32, signed, clamp))
        }
        Op::Fns => map3(|mask, base, offset| nth_bit(mask as u32, base as u32, offset as i32)),
        Op::Dp2a => {
            let (left, right) = (half_type(ty), byte_type(inst.ty(1)?));
            let skip = if inst.has(Mod::Hi) { 16 } else { 0 };
            map3(move |a, b, c| dot2(a, b >> skip, left, right).wrapping_add(c))
        }
        Op::Dp4a => {
            let (left, right) = (byte_type(ty), byte_type(inst.ty(1)?));
            map3(move |a, b, c| dot4(a, b, left, right).wrapping_add(c))
        }
        _ => return None,
    })
}

/// `bmsk`: `length` ones from `position` on; what is too large is clamped, or taken modulo 32.
fn bit_mask(position: u32, length: u32, clamp: bool) -> u64 {
    let (position, length) = if clamp { (position, length) } else { (position & 31, length & 31) };
    let from = u32::MAX.checked_shl(position).unwrap_or(0);
    let behind = u32::MAX.checked_shl(position.saturating_add(length)).unwrap_or(0);
    u64::from(from & !behind)
}

/// `szext`: the lower `length` bits, with zeros or their sign above.
fn resized(a: u64, length: u32, signed: bool, clamp: bool) -> u64 {
    let length = if clamp { length.min(32) } else { length & 31 };
    if length == 0 {
        return 0;
    }
    let top = (a as u32) << (32 - length);
    let value = if signed { (top as i32 >> (32 - length)) as u32 } else { top >> (32 - length) };
    u64::from(value)
}

/// `fns`: the place of the n-th one at or above `base` (below, where n is negative); all ones where there is none.
fn nth_bit(mask: u32, base: u32, offset: i32) -> u64 {
    let is_set = |at: &i64| mask >> at & 1 == 1;
    let base = i64::from(base.min(32));
    let found = match offset {
        0 => Some(base).filter(|at| *at < 32).filter(is_set),
        1.. => (base..32).filter(is_set).nth(offset as usize - 1),
        _ => (0..=base.min(31)).rev().filter(is_set).nth(offset.unsigned_abs() as usize - 1),
    };
    found.map_or(u64::from(u32::MAX), |at| at as u64)
}

fn byte_type(ty: ScalarType) -> ScalarType {
    if ty == ScalarType::S32 { ScalarType::S8 } else { ScalarType::U8 }
}

fn half_type(ty: ScalarType) -> ScalarType {
    if ty == ScalarType::S32 { ScalarType::S16 } else { ScalarType::U16 }
}

fn dot2(a: u64, b: u64, left: ScalarType, right: ScalarType) -> u64 {
    (0..2).map(|i| widen(a >> (16 * i), left) * widen(b >> (8 * i), right)).sum::<i128>() as u64
}

/// `mul24`, `mad24`: of the 48 bits of a product the lower or the upper 32.
fn product24(inst: &Inst, ty: ScalarType) -> LaneFn {
    let signed = ty == ScalarType::S32;
    let narrow = move |v: u64| match (v << 40, signed) {
        (top, true) => i128::from(top as i64 >> 40),
        (top, false) => i128::from(top >> 40),
    };
    let shift = if inst.has(Mod::Hi) { 16 } else { 0 };
    let product = move |a, b| (narrow(a) * narrow(b)) >> shift;
    match (inst.op == Op::Mad24, inst.has(Mod::Sat)) {
        (false, _) => map2(move |a, b| product(a, b) as u64),
        (true, false) => map3(move |a, b, c| (product(a, b) as u64).wrapping_add(c)),
        (true, true) => map3(move |a, b, c| (product(a, b) as i32).saturating_add(c as i32) as u64),
    }
}

fn dot4(a: u64, b: u64, left: ScalarType, right: ScalarType) -> u64 {
    (0..4).map(|i| widen(a >> (8 * i), left) * widen(b >> (8 * i), right)).sum::<i128>() as u64
}

/// `bfe`: bits beyond the operand repeat its sign where signed.
fn extract(a: u64, position: u64, length: u64, width: u64, signed: bool) -> u64 {
    let sign = signed && {
        let top = (position + length).saturating_sub(1).min(width - 1);
        length > 0 && a >> top & 1 == 1
    };
    let bit = |i: u64| match position + i {
        from if i < length && from < width => a >> from & 1,
        _ => u64::from(sign),
    };
    (0..width).map(|i| bit(i) << i).sum()
}

/// `bfi`: `length` bits of `a` replace those of `b` from `position` on.
fn insert(a: u64, b: u64, position: u64, length: u64, width: u64) -> u64 {
    (0..length.min(width)).filter(|i| position + i < width).fold(b, |word, i| {
        let to = position + i;
        word & !(1 << to) | (a >> i & 1) << to
    })
}

fn leading_bit(a: u64, ty: ScalarType, signed: bool, shift: bool) -> u64 {
    let width = ty.bits();
    let value = widen(a, ty);
    let magnitude = if signed && value < 0 { !value } else { value } as u64;
    let magnitude = if width == 32 { magnitude & 0xffff_ffff } else { magnitude };
    match (magnitude.checked_ilog2(), shift) {
        (None, _) => u64::from(u32::MAX),
        (Some(position), false) => position.into(),
        (Some(position), true) => u64::from(width - 1 - position),
    }
}
