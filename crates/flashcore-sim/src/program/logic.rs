//! Logic, shifts, comparisons and selections.

use super::{
    decode::{map1, map2, map3},
    integer::{widen, with_int},
    operand::{Context, Decoded, refuse},
    uop::{Combine, LaneFn, Uop},
};
use crate::numeric::{BF16, F16, single::flush, small::HalfMode};
use flashcore_ptx::{
    inst::{Inst, Operand},
    op::{Mod, Op},
    types::{ScalarType, TypeKind},
};
use std::cmp::Ordering;

/// The function of a logic instruction, `None` where it is none.
pub(super) fn lane_fn(inst: &Inst, ty: ScalarType) -> Option<LaneFn> {
    Some(match inst.op {
        Op::And => map2(|a, b| a & b),
        Op::Or => map2(|a, b| a | b),
        Op::Xor => map2(|a, b| a ^ b),
        Op::Not => map1(|a| !a),
        Op::Cnot => with_int!(ty, T => map1(|a| u64::from(a as T == 0))),
        Op::Lop3 => lop3(inst.operands.get(4)?.as_int()? as u32),
        Op::Shf => funnel(inst),
        Op::Shl => shift_left(ty),
        Op::Shr => shift_right(ty),
        Op::Prmt => prmt(inst),
        _ => return None,
    })
}

fn lop3(table: u32) -> LaneFn {
    map3(move |a, b, c| {
        let term = |i: u32| {
            let pick = |bit: u32, v: u64| if i >> bit & 1 == 1 { v } else { !v };
            if table >> i & 1 == 1 { pick(2, a) & pick(1, b) & pick(0, c) } else { 0 }
        };
        (0..8).fold(0, |word, i| word | term(i))
    })
}

/// `shf`: the 64 bits `b:a` shifted; the upper word for `.l`, the lower one for `.r`.
fn funnel(inst: &Inst) -> LaneFn {
    let (left, wrap) = (inst.has(Mod::L), inst.has(Mod::Wrap));
    map3(move |a, b, c| {
        let amount = if wrap { c & 31 } else { (c & 0xffff_ffff).min(32) };
        let both = (b & 0xffff_ffff) << 32 | a & 0xffff_ffff;
        if left { ((u128::from(both) << amount) >> 32) as u64 } else { both >> amount }
    })
}

fn shift_left(ty: ScalarType) -> LaneFn {
    let width = u64::from(ty.bits());
    map2(move |a, b| if (b as u32) < width as u32 { a << b as u32 } else { 0 })
}

fn shift_right(ty: ScalarType) -> LaneFn {
    let last = ty.bits() - 1;
    let signed = ty.kind() == TypeKind::Signed;
    map2(move |a, b| match b as u32 {
        amount if amount > last && !signed => 0,
        amount => (widen(a, ty) >> amount.min(last)) as u64,
    })
}

fn prmt(inst: &Inst) -> LaneFn {
    let mode = inst
        .mods
        .iter()
        .copied()
        .find(|m| matches!(m, Mod::F4e | Mod::B4e | Mod::Rc8 | Mod::Ecl | Mod::Ecr | Mod::Rc16));
    map3(move |a, b, c| {
        let pool = (b & 0xffff_ffff) << 32 | a & 0xffff_ffff;
        (0..4).map(|i| permuted_byte(pool, c, i, mode) << (8 * i)).sum()
    })
}

fn permuted_byte(pool: u64, control: u64, i: u64, mode: Option<Mod>) -> u64 {
    let low = control & 3;
    let selector = match mode {
        None => control >> (4 * i) & 0xf,
        Some(Mod::F4e) => low + i,
        Some(Mod::B4e) => low.wrapping_sub(i) & 7,
        Some(Mod::Rc8) => low,
        Some(Mod::Ecl) => low.max(i),
        Some(Mod::Ecr) => low.min(i),
        Some(_) => (low & 1) * 2 + (i & 1),
    };
    let byte = pool >> (8 * (selector & 7)) & 0xff;
    match selector & 8 {
        0 => byte,
        _ => {
            if byte & 0x80 != 0 {
                0xff
            } else {
                0
            }
        }
    }
}

/// `selp`, `slct`, `set`.
pub(super) fn select(inst: &Inst, ty: ScalarType) -> Option<LaneFn> {
    match inst.op {
        Op::Selp => Some(map3(|a, b, p| if p & 1 == 1 { a } else { b })),
        Op::Slct => {
            let float = inst.ty(1)? == ScalarType::F32;
            // -0 and NaN: c >= 0 holds for -0, fails for NaN
            let chooses = move |c: u64| if float { f32::from_bits(c as u32) >= 0.0 } else { c as i32 >= 0 };
            Some(map3(move |a, b, c| if chooses(c) { a } else { b }))
        }
        _ => set(inst, ty),
    }
}

/// `set`: a number for true, of halves one for each half; a third source is a predicate to combine with.
fn set(inst: &Inst, ty: ScalarType) -> Option<LaneFn> {
    let packed = is_packed(ty);
    let truth = match inst.ty(0)? {
        ScalarType::F32 => u64::from(1.0f32.to_bits()),
        ScalarType::F16 | ScalarType::F16x2 => 0x3c00,
        ScalarType::Bf16 | ScalarType::Bf16x2 => 0x3f80,
        _ if packed => 0xffff,
        _ => u64::MAX,
    };
    let (test, join) = (comparison(inst, ty)?, combiner(inst));
    let one = move |a: u64, b: u64, c: u64| {
        let holds = test(a, b);
        let holds = match join {
            None => holds,
            Some(Combine::And) => holds && c & 1 == 1,
            Some(Combine::Or) => holds || c & 1 == 1,
            Some(_) => holds != (c & 1 == 1),
        };
        if holds { truth } else { 0 }
    };
    if packed {
        return Some(map3(move |a, b, c| one(a, b, c) | one(a >> 16, b >> 16, c) << 16));
    }
    Some(map3(one))
}

fn is_packed(ty: ScalarType) -> bool {
    matches!(ty, ScalarType::F16x2 | ScalarType::Bf16x2)
}

type Test = Box<dyn Fn(u64, u64) -> bool + Send + Sync>;

/// `setp`, with one result or two, combined or not.
pub(super) fn setp(cx: &Context<'_>, inst: &Inst) -> Decoded<Uop> {
    let Some(ty) = inst.ty(0) else { return refuse("no type") };
    let Some(test) = comparison(inst, ty) else { return refuse("no such comparison") };
    let [dst, a, b, rest @ ..] = inst.operands.as_slice() else { return refuse("too few operands") };
    let packed = is_packed(ty);
    let f = if packed {
        map2(move |a, b| u64::from(test(a, b)) | u64::from(test(a >> 16, b >> 16)) << 1)
    } else {
        map2(move |a, b| u64::from(test(a, b)))
    };
    let combine = match (combiner(inst), rest) {
        (Some(op), [c]) => Some((op, cx.value(c)?)),
        _ => None,
    };
    let srcs = vec![cx.src(a, ty)?, cx.src(b, ty)?];
    Ok(Uop::Compare { f, p: cx.dst(dst)?, q: second_result(cx, dst)?, srcs, packed, combine })
}

fn second_result(cx: &Context<'_>, dst: &Operand) -> Decoded<super::uop::Dst> {
    cx.second(dst)
}

fn combiner(inst: &Inst) -> Option<Combine> {
    inst.mods.iter().find_map(|m| match m {
        Mod::And => Some(Combine::And),
        Mod::Or => Some(Combine::Or),
        Mod::Xor => Some(Combine::Xor),
        _ => None,
    })
}

fn comparison(inst: &Inst, ty: ScalarType) -> Option<Test> {
    let how = *inst.mods.first()?;
    if ty.is_float() { float_test(inst, how, ty) } else { integer_test(how, ty) }
}

fn integer_test(how: Mod, ty: ScalarType) -> Option<Test> {
    // lo, ls, hi, hs compare as unsigned whatever the type says
    let unsigned = matches!(how, Mod::Lo | Mod::Ls | Mod::Hi | Mod::Hs);
    let ty = match ty {
        ScalarType::S16 if unsigned => ScalarType::U16,
        ScalarType::S32 if unsigned => ScalarType::U32,
        ScalarType::S64 if unsigned => ScalarType::U64,
        other => other,
    };
    Some(with_int!(ty, T => match how {
        Mod::Eq => Box::new(|a: u64, b: u64| a as T == b as T) as Test,
        Mod::Ne => Box::new(|a, b| a as T != b as T),
        Mod::Lt | Mod::Lo => Box::new(|a, b| (a as T) < b as T),
        Mod::Le | Mod::Ls => Box::new(|a, b| a as T <= b as T),
        Mod::Gt | Mod::Hi => Box::new(|a, b| a as T > b as T),
        Mod::Ge | Mod::Hs => Box::new(|a, b| a as T >= b as T),
        _ => return None,
    }))
}

fn float_test(inst: &Inst, how: Mod, ty: ScalarType) -> Option<Test> {
    let ftz = inst.has(Mod::Ftz);
    let half = move |format| HalfMode { format, ftz, sat: false, relu: false };
    let test = ordered(how)?;
    let single = move |bits: u64| flush(f32::from_bits(bits as u32), ftz);
    Some(match ty {
        ScalarType::F32 => Box::new(move |a, b| test(single(a).partial_cmp(&single(b)))),
        ScalarType::F64 => Box::new(move |a, b| test(f64::from_bits(a).partial_cmp(&f64::from_bits(b)))),
        ScalarType::F16 | ScalarType::F16x2 => {
            Box::new(move |a, b| test(half(F16).value(a).partial_cmp(&half(F16).value(b))))
        }
        _ => Box::new(move |a, b| test(half(BF16).value(a).partial_cmp(&half(BF16).value(b)))),
    })
}

/// What a comparison makes of the order of two numbers; there is none with a NaN.
fn ordered(how: Mod) -> Option<fn(Option<Ordering>) -> bool> {
    Some(match how {
        Mod::Eq => |order| order.is_some_and(Ordering::is_eq),
        Mod::Ne => |order| order.is_some_and(Ordering::is_ne),
        Mod::Lt => |order| order.is_some_and(Ordering::is_lt),
        Mod::Le => |order| order.is_some_and(Ordering::is_le),
        Mod::Gt => |order| order.is_some_and(Ordering::is_gt),
        Mod::Ge => |order| order.is_some_and(Ordering::is_ge),
        Mod::Equ => |order| order.is_none_or(Ordering::is_eq),
        Mod::Neu => |order| order.is_none_or(Ordering::is_ne),
        Mod::Ltu => |order| order.is_none_or(Ordering::is_lt),
        Mod::Leu => |order| order.is_none_or(Ordering::is_le),
        Mod::Gtu => |order| order.is_none_or(Ordering::is_gt),
        Mod::Geu => |order| order.is_none_or(Ordering::is_ge),
        Mod::Num => |order| order.is_some(),
        Mod::Nan => |order| order.is_none(),
        _ => return None,
    })
}
