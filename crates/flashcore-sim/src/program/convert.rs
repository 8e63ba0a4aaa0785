//! `cvt` in all its forms, `mov`, and conversions of addresses.

use super::{
    decode::{map1, map2, map3, map4},
    float::rounding,
    integer::widen,
    operand::{Context, Decoded, refuse},
    uop::{LaneFn, Lanes, Space, Src, Uop},
};
use crate::numeric::{
    BF16, E4M3, E5M2, F16, F32, Format, Rounding,
    single::{NAN_BITS, flush, saturate},
    small::{narrow, tf32},
};
use flashcore_ptx::{
    inst::{Inst, Operand},
    op::{Mod, Op},
    types::{ScalarType, TypeKind},
};

/// Decodes a conversion or a move.
pub(super) fn decode(cx: &Context<'_>, inst: &Inst) -> Decoded<Uop> {
    match inst.op {
        Op::Cvt => cvt(cx, inst),
        Op::CvtPack => pack_saturated(cx, inst),
        Op::Mov => mov(cx, inst),
        _ => address(cx, inst),
    }
}

fn address(cx: &Context<'_>, inst: &Inst) -> Decoded<Uop> {
    let [dst, src, rest @ ..] = inst.operands.as_slice() else { return refuse("too few operands") };
    let space = cx.space_of(&inst.mods, src);
    let (dst, src) = (cx.dst(dst)?, cx.value(src)?);
    let generic = space == Space::Generic;
    Ok(match inst.op {
        Op::Cvta if inst.has(Mod::To) => Uop::FromGeneric { dst, src, space },
        Op::Cvta => Uop::ToGeneric { dst, src, space },
        Op::Isspacep => Uop::IsSpace { dst, src, space },
        Op::Getctarank => Uop::CtaRank { dst, src },
        _ => match rest {
            [rank] => Uop::MapA { dst, src, rank: cx.value(rank)?, generic },
            _ => return refuse("mapa without a rank"),
        },
    })
}

fn mov(cx: &Context<'_>, inst: &Inst) -> Decoded<Uop> {
    let Some(ty) = inst.ty(0) else { return refuse("no type") };
    let [dst, src] = inst.operands.as_slice() else { return refuse("mov takes two operands") };
    if ty == ScalarType::B128 {
        let (dsts, srcs) = (cx.dsts(dst)?, cx.srcs(src, ScalarType::B64)?);
        return match (dsts.len(), srcs.len()) {
            (2, 2) => Ok(Uop::Copy { dsts, srcs }),
            _ => refuse("128 bits are made of two registers"),
        };
    }
    match (dst, src) {
        (Operand::Vector(parts), src) => {
            let bits = ty.bits() / parts.len().max(1) as u32;
            Ok(Uop::Unpack { dsts: cx.dsts(dst)?, src: cx.src(src, ty)?, bits })
        }
        (dst, Operand::Vector(parts)) => {
            let bits = ty.bits() / parts.len().max(1) as u32;
            Ok(Uop::Pack { f: pack(bits), dst: cx.dst(dst)?, srcs: cx.srcs(src, ty)? })
        }
        _ => Ok(Uop::Move { dst: cx.dst(dst)?, src: cx.src(src, ty)? }),
    }
}

/// `{a, b, …}` into one register, first element lowest; missing sources read as zero.
fn pack(bits: u32) -> LaneFn {
    let mask = u64::MAX >> (64 - bits);
    match bits {
        32 => map2(|a, b| a & 0xffff_ffff | b << 32),
        _ => map4(move |a, b, c, d| {
            [a, b, c, d].iter().enumerate().map(|(i, v)| (v & mask) << (bits as usize * i)).sum()
        }),
    }
}

/// `cvt.pack`: the first source becomes the upper half, or the second byte.
fn pack_saturated(cx: &Context<'_>, inst: &Inst) -> Decoded<Uop> {
    let (Some(to), Some(from)) = (inst.ty(0), inst.ty(1)) else { return refuse("no types") };
    let [dst, sources @ ..] = inst.operands.as_slice() else { return refuse("too few operands") };
    let ((low, high), bits) = (range(to), to.bits());
    let one = move |v: u64| widen(v, from).clamp(low, high) as u64 & ((1 << bits) - 1);
    let rest = move |c: u64| if bits == 8 { c << 16 } else { 0 };
    let srcs = sources.iter().map(|o| cx.src(o, from)).collect::<Decoded<_>>()?;
    let f = map3(move |a, b, c| one(b) | one(a) << bits | rest(c));
    Ok(Uop::Alu { f, dst: cx.dst(dst)?, srcs })
}

fn cvt(cx: &Context<'_>, inst: &Inst) -> Decoded<Uop> {
    let (Some(to), Some(from)) = (inst.ty(0), inst.ty(1)) else { return refuse("no types") };
    let [dst, sources @ ..] = inst.operands.as_slice() else { return refuse("too few operands") };
    let f = match (kind(to), kind(from)) {
        (Kind::Int, Kind::Int) => int_to_int(inst, to, from),
        (Kind::Int, _) => float_to_int(inst, to, from),
        (_, Kind::Int) => int_to_float(inst, to, from),
        (Kind::Pair, _) | (_, Kind::Pair) => pairs(inst, to, from)?,
        _ => float_to_float(inst, to, from),
    };
    let srcs: Vec<Src> = sources.iter().map(|o| cx.src(o, from)).collect::<Decoded<_>>()?;
    let dst = cx.dst(dst)?;
    Ok(if srcs.len() > 1 { Uop::Pack { f, dst, srcs } } else { Uop::Alu { f, dst, srcs } })
}

#[derive(PartialEq, Eq)]
enum Kind {
    Int,
    Float,
    Pair,
}

fn kind(ty: ScalarType) -> Kind {
    use ScalarType::{Bf16x2, E4m3x2, E5m2x2, F16x2};
    match ty {
        F16x2 | Bf16x2 | E4m3x2 | E5m2x2 => Kind::Pair,
        ty if ty.kind() == TypeKind::Float => Kind::Float,
        _ => Kind::Int,
    }
}

/// The smallest and largest value of an integer type.
fn range(ty: ScalarType) -> (i128, i128) {
    match ty.kind() {
        TypeKind::Signed => (-(1i128 << (ty.bits() - 1)), (1i128 << (ty.bits() - 1)) - 1),
        _ => (0, (1i128 << ty.bits()) - 1),
    }
}

fn int_to_int(inst: &Inst, to: ScalarType, from: ScalarType) -> LaneFn {
    let sat = inst.has(Mod::Sat);
    let (low, high) = range(to);
    map1(move |a| {
        let value = widen(a, from);
        let value = if sat { value.clamp(low, high) } else { value };
        // narrower destinations keep the low bits, extended as their own sign says
        widen(value as u64, to) as u64
    })
}

/// Exact value of a float register.
fn read(bits: u64, ty: ScalarType, ftz: bool) -> f64 {
    match ty {
        ScalarType::F64 => f64::from_bits(bits),
        ScalarType::F16 => F16.decode(bits as u32 & 0xffff),
        ScalarType::Bf16 => BF16.decode(bits as u32 & 0xffff),
        _ => f64::from(flush(f32::from_bits(bits as u32), ftz)),
    }
}

fn round_to_integer(value: f64, mode: Rounding) -> f64 {
    match mode {
        Rounding::Zero => value.trunc(),
        Rounding::Down => value.floor(),
        Rounding::Up => value.ceil(),
        Rounding::NearestAway => value.round(),
        Rounding::NearestEven => value.round_ties_even(),
    }
}

/// Out of range saturates; NaN becomes 0 for narrow types and the top bit for 64-bit ones, as on sm_90.
fn float_to_int(inst: &Inst, to: ScalarType, from: ScalarType) -> LaneFn {
    let (mode, ftz) = (rounding(inst), inst.has(Mod::Ftz));
    let (low, high) = range(to);
    map1(move |a| {
        let value = round_to_integer(read(a, from, ftz), mode);
        if value.is_nan() {
            return if to.bits() == 64 { 1 << 63 } else { 0 };
        }
        (value as i128).clamp(low, high) as u64
    })
}

fn int_to_float(inst: &Inst, to: ScalarType, from: ScalarType) -> LaneFn {
    let (mode, sat) = (rounding(inst), inst.has(Mod::Sat));
    map1(move |a| {
        let value = widen(a, from);
        match to {
            ScalarType::F64 => rounded_f64(value, mode).to_bits(),
            ScalarType::F32 if mode == Rounding::NearestEven && !sat => u64::from((value as f32).to_bits()),
            _ => write(odd_f64(value), to, mode, false, sat),
        }
    })
}

/// An integer rounded to f64.
fn rounded_f64(value: i128, mode: Rounding) -> f64 {
    let away = match mode {
        Rounding::Up => value > 0,
        Rounding::Down => value < 0,
        Rounding::Zero => false,
        _ => return value as f64,
    };
    let truncated = truncated_f64(value);
    let exact = truncated as i128 == value;
    f64::from_bits(truncated.to_bits() + u64::from(away && !exact))
}

/// An integer as f64 whose last bit says whether any were lost, so that a second rounding is right.
fn odd_f64(value: i128) -> f64 {
    let truncated = truncated_f64(value);
    f64::from_bits(truncated.to_bits() | u64::from(truncated as i128 != value))
}

fn truncated_f64(value: i128) -> f64 {
    let nearest = value as f64;
    let too_far = (nearest.abs() as i128) > value.abs();
    if too_far { f64::from_bits(nearest.to_bits() - 1) } else { nearest }
}

/// A value rounded into the bits of a float type.
fn write(value: f64, ty: ScalarType, mode: Rounding, ftz: bool, sat: bool) -> u64 {
    let value = if sat { saturate_exact(value) } else { value };
    match ty {
        ScalarType::F64 => value.to_bits(),
        ScalarType::F16 => F16.encode(value, mode).into(),
        ScalarType::Bf16 => BF16.encode(value, mode).into(),
        _ => {
            let result = flush(f32::from_bits(F32.encode(value, mode)), ftz);
            u64::from(if result.is_nan() { NAN_BITS } else { result.to_bits() })
        }
    }
}

fn saturate_exact(value: f64) -> f64 {
    if value.is_nan() { 0.0 } else { value.clamp(0.0, 1.0) + 0.0 }
}

fn float_to_float(inst: &Inst, to: ScalarType, from: ScalarType) -> LaneFn {
    let (mode, ftz, sat) = (rounding(inst), inst.has(Mod::Ftz), inst.has(Mod::Sat));
    let (relu, finite) = (inst.has(Mod::Relu), inst.has(Mod::Satfinite));
    let to_integer = inst.mods.iter().any(|m| matches!(m, Mod::Rni | Mod::Rzi | Mod::Rmi | Mod::Rpi));
    if to == ScalarType::Tf32 {
        return map1(move |a| tf32(f32::from_bits(a as u32), mode, relu).into());
    }
    if from == ScalarType::F32 && matches!(to, ScalarType::F16 | ScalarType::Bf16) {
        let format = half_format(to);
        return map1(move |a| {
            let value = flush(f32::from_bits(a as u32), ftz);
            narrow(if sat { saturate(value) } else { value }, format, mode, relu, finite).into()
        });
    }
    if (to, from, sat) == (ScalarType::F32, ScalarType::Bf16, false) {
        // A shift: a NaN keeps its bits.
        return map1(|a| (a & 0xffff) << 16);
    }
    map1(move |a| {
        if let (Some(nan), false) = (kept_nan(a, to, from), sat) {
            return nan;
        }
        let value = read(a, from, ftz);
        let value = if to_integer { round_to_integer(value, mode) } else { value };
        write(value, to, mode, ftz, sat)
    })
}

/// A NaN that keeps its sign and payload, and becomes quiet: between f64 and 16 bits.
fn kept_nan(bits: u64, to: ScalarType, from: ScalarType) -> Option<u64> {
    match (to, from) {
        (ScalarType::F64, ScalarType::F16) if bits & 0x7fff > 0x7c00 => {
            Some((bits & 0x8000 | 0x7ff8) << 48 | (bits & 0x3ff) << 42)
        }
        (ScalarType::F16, ScalarType::F64) if bits << 1 > 0x7ff << 53 => {
            Some(bits >> 48 & 0x8000 | 0x7e00 | bits >> 42 & 0x3ff)
        }
        (ScalarType::F64, ScalarType::Bf16) if bits & 0x7fff > 0x7f80 => {
            Some((bits & 0x8000 | 0x7ff8) << 48 | (bits & 0x7f) << 45)
        }
        (ScalarType::Bf16, ScalarType::F64) if bits << 1 > 0x7ff << 53 => {
            Some(bits >> 48 & 0x8000 | 0x7fc0 | bits >> 45 & 0x7f)
        }
        _ => None,
    }
}

fn half_format(ty: ScalarType) -> Format {
    match ty {
        ScalarType::F16 | ScalarType::F16x2 => F16,
        ScalarType::E4m3x2 => E4M3,
        ScalarType::E5m2x2 => E5M2,
        _ => BF16,
    }
}

/// Conversions into or out of pairs: the first source becomes the upper half.
fn pairs(inst: &Inst, to: ScalarType, from: ScalarType) -> Decoded<LaneFn> {
    let (mode, relu, finite) = (rounding(inst), inst.has(Mod::Relu), inst.has(Mod::Satfinite));
    let target = half_format(to);
    let bits = to.bits() / 2;
    if from == ScalarType::F32 {
        let one = move |v: u64| u64::from(narrow(f32::from_bits(v as u32), target, mode, relu, finite));
        return Ok(Box::new(move |s: &[Lanes; 4]| {
            std::array::from_fn(|i| one(s[0][i]) << bits | one(s[1][i]))
        }));
    }
    let source = half_format(from);
    let width = from.bits() / 2;
    let mask = (1u64 << width) - 1;
    let one = move |v: u64| {
        let value = source.decode((v & mask) as u32) as f32;
        u64::from(narrow(value, target, mode, relu, finite))
    };
    Ok(map1(move |a| one(a >> width) << bits | one(a)))
}
