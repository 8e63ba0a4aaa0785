//! Lane functions of f32 and f64 arithmetic and of the special-function unit.

use super::{
    decode::{map1, map2, map3},
    uop::LaneFn,
};
use crate::numeric::{
    Rounding,
    approx::{Function, divide},
    double,
    single::{Mode, extremum, extremum64},
};
use flashcore_ptx::{
    inst::Inst,
    op::{Mod, Op},
    types::ScalarType,
};

/// The function of a float instruction, `None` where there is none.
pub(super) fn lane_fn(inst: &Inst, ty: ScalarType) -> Option<LaneFn> {
    match ty {
        ScalarType::F32 => single(inst),
        ScalarType::F64 if rounding(inst) == Rounding::NearestEven => nearest(inst),
        ScalarType::F64 => directed(inst, rounding(inst)),
        _ => None,
    }
}

/// The rounding that the modifiers name; to nearest even where they name none.
pub(super) fn rounding(inst: &Inst) -> Rounding {
    let named = inst.mods.iter().find_map(|m| match m {
        Mod::Rz | Mod::Rzi => Some(Rounding::Zero),
        Mod::Rm | Mod::Rmi => Some(Rounding::Down),
        Mod::Rp | Mod::Rpi => Some(Rounding::Up),
        Mod::Rna => Some(Rounding::NearestAway),
        _ => None,
    });
    named.unwrap_or(Rounding::NearestEven)
}

fn mode_of(inst: &Inst) -> Mode {
    Mode { rounding: rounding(inst), ftz: inst.has(Mod::Ftz), sat: inst.has(Mod::Sat) }
}

fn function(op: Op) -> Option<Function> {
    Some(match op {
        Op::Ex2 => Function::Ex2,
        Op::Lg2 => Function::Lg2,
        Op::Rcp => Function::Rcp,
        Op::Sqrt => Function::Sqrt,
        Op::Rsqrt => Function::Rsqrt,
        Op::Sin => Function::Sin,
        Op::Cos => Function::Cos,
        Op::Tanh => Function::Tanh,
        _ => return None,
    })
}

fn single(inst: &Inst) -> Option<LaneFn> {
    let mode = mode_of(inst);
    if let Some(function) = function(inst.op) {
        return Some(special(inst, function, mode));
    }
    Some(match inst.op {
        Op::Add => map2(move |a, b| mode.output(mode.add(mode.input(a), mode.input(b)))),
        Op::Sub => map2(move |a, b| mode.output(mode.add(mode.input(a), -mode.input(b)))),
        Op::Mul => map2(move |a, b| mode.output(mode.mul(mode.input(a), mode.input(b)))),
        Op::Fma | Op::Mad => {
            map3(move |a, b, c| mode.output(mode.fma(mode.input(a), mode.input(b), mode.input(c))))
        }
        Op::Div if inst.has(Mod::Approx) || inst.has(Mod::Full) => {
            map2(move |a, b| mode.output(divide(mode.input(a), mode.input(b))))
        }
        Op::Div => {
            map2(move |a, b| mode.output(mode.round_f64(f64::from(mode.input(a)) / f64::from(mode.input(b)))))
        }
        Op::Abs => map1(move |a| mode.output(mode.input(a).abs())),
        Op::Neg => map1(move |a| mode.output(-mode.input(a))),
        Op::Min | Op::Max => extremes(inst, mode),
        Op::Copysign => map2(|a, b| a & 0x8000_0000 | b & 0x7fff_ffff),
        Op::Testp => testp(inst)?,
        _ => return None,
    })
}

fn special(inst: &Inst, function: Function, mode: Mode) -> LaneFn {
    if inst.has(Mod::Approx) {
        return map1(move |a| function.on_f32(a, mode.ftz));
    }
    map1(move |a| mode.output(mode.round_f64(function.exact(f64::from(mode.input(a))))))
}

fn extremes(inst: &Inst, mode: Mode) -> LaneFn {
    let (least, propagate) = (inst.op == Op::Min, inst.has(Mod::NaN));
    map2(move |a, b| mode.output(extremum(mode.input(a), mode.input(b), least, propagate)))
}

fn testp(inst: &Inst) -> Option<LaneFn> {
    let test: fn(f32) -> bool = match inst.mods.first()? {
        Mod::Finite => f32::is_finite,
        Mod::Infinite => f32::is_infinite,
        Mod::Number => |x| !x.is_nan(),
        Mod::Notanumber => f32::is_nan,
        // Zero counts as normal.
        Mod::Normal => |x| x.is_finite() && !x.is_subnormal(),
        Mod::Subnormal => f32::is_subnormal,
        _ => return None,
    };
    Some(map1(move |a| u64::from(test(f32::from_bits(a as u32)))))
}

fn nearest(inst: &Inst) -> Option<LaneFn> {
    let read = f64::from_bits;
    if let Some(function) = function(inst.op) {
        return Some(map1(move |a| function.exact(read(a)).to_bits()));
    }
    Some(match inst.op {
        Op::Add => map2(move |a, b| (read(a) + read(b)).to_bits()),
        Op::Sub => map2(move |a, b| (read(a) - read(b)).to_bits()),
        Op::Mul => map2(move |a, b| (read(a) * read(b)).to_bits()),
        Op::Div => map2(move |a, b| (read(a) / read(b)).to_bits()),
        Op::Fma => map3(move |a, b, c| read(a).mul_add(read(b), read(c)).to_bits()),
        Op::Abs => map1(|a| a & (u64::MAX >> 1)),
        Op::Neg => map1(|a| a ^ (1 << 63)),
        Op::Min => map2(move |a, b| extremum64(read(a), read(b), true).to_bits()),
        Op::Max => map2(move |a, b| extremum64(read(a), read(b), false).to_bits()),
        Op::Copysign => map2(|a, b| a & (1 << 63) | b & (u64::MAX >> 1)),
        Op::Testp => testp64(inst)?,
        _ => return None,
    })
}

fn directed(inst: &Inst, mode: Rounding) -> Option<LaneFn> {
    let read = f64::from_bits;
    Some(match inst.op {
        Op::Add => map2(move |a, b| double::add(read(a), read(b), mode).to_bits()),
        Op::Sub => map2(move |a, b| double::add(read(a), -read(b), mode).to_bits()),
        Op::Mul => map2(move |a, b| double::mul(read(a), read(b), mode).to_bits()),
        Op::Div => map2(move |a, b| double::div(read(a), read(b), mode).to_bits()),
        Op::Rcp => map1(move |a| double::div(1.0, read(a), mode).to_bits()),
        Op::Sqrt => map1(move |a| double::sqrt(read(a), mode).to_bits()),
        Op::Fma => map3(move |a, b, c| double::fma(read(a), read(b), read(c), mode).to_bits()),
        _ => return None,
    })
}

fn testp64(inst: &Inst) -> Option<LaneFn> {
    let test: fn(f64) -> bool = match inst.mods.first()? {
        Mod::Finite => f64::is_finite,
        Mod::Infinite => f64::is_infinite,
        Mod::Number => |x| !x.is_nan(),
        Mod::Notanumber => f64::is_nan,
        Mod::Normal => |x| x.is_finite() && !x.is_subnormal(),
        Mod::Subnormal => f64::is_subnormal,
        _ => return None,
    };
    Some(map1(move |a| u64::from(test(f64::from_bits(a)))))
}
