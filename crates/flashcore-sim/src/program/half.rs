//! Lane functions of f16 and bf16 arithmetic, single and packed.

use super::{
    decode::{map1, map2, map3},
    uop::LaneFn,
};
use crate::numeric::{
    BF16, F16,
    approx::Function,
    small::{HalfMode, per_half},
};
use flashcore_ptx::{
    inst::Inst,
    op::{Mod, Op},
    types::ScalarType,
};

/// The function of a half-precision instruction, `None` where there is none.
pub(super) fn lane_fn(inst: &Inst, ty: ScalarType) -> Option<LaneFn> {
    let (format, packed) = match ty {
        ScalarType::F16 => (F16, false),
        ScalarType::F16x2 => (F16, true),
        ScalarType::Bf16 => (BF16, false),
        ScalarType::Bf16x2 => (BF16, true),
        _ => return None,
    };
    let mode = HalfMode {
        format,
        // bf16 has no `.ftz` arithmetic; on `ex2` the word is part of the name, and bf16 subnormals are flushed
        ftz: inst.has(Mod::Ftz) && format == F16,
        sat: inst.has(Mod::Sat),
        relu: inst.has(Mod::Relu),
    };
    let (least, propagate) = (inst.op == Op::Min, inst.has(Mod::NaN));
    Some(match inst.op {
        Op::Add => map2(move |a, b| per_half(packed, |s| mode.add(a >> s, b >> s))),
        Op::Sub => map2(move |a, b| per_half(packed, |s| mode.sub(a >> s, b >> s))),
        Op::Mul => map2(move |a, b| per_half(packed, |s| mode.mul(a >> s, b >> s))),
        Op::Fma => map3(move |a, b, c| per_half(packed, |s| mode.fma(a >> s, b >> s, c >> s))),
        Op::Neg => map1(move |a| per_half(packed, |s| mode.signed(a >> s, |sign| sign ^ 0x8000))),
        Op::Abs => map1(move |a| per_half(packed, |s| mode.signed(a >> s, |_| 0))),
        Op::Min | Op::Max => {
            map2(move |a, b| per_half(packed, |s| mode.extremum(a >> s, b >> s, least, propagate)))
        }
        Op::Ex2 => map1(move |a| per_half(packed, |s| mode.unary(a >> s, |x| Function::Ex2.exact(x)))),
        Op::Tanh => map1(move |a| per_half(packed, |s| mode.unary(a >> s, |x| Function::Tanh.exact(x)))),
        _ => return None,
    })
}
