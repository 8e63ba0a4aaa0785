//! Tensor-core instructions.

use super::{
    operand::{Context, Decoded, refuse},
    uop::{Element, Mma, Sparse, Uop, Wgmma, WgmmaA},
};
use crate::numeric::{BF16, E4M3, E5M2, F16};
use flashcore_ptx::{
    inst::{Inst, Operand},
    op::{Mod, Op, Shape},
    types::ScalarType,
};

/// Decodes an `mma` or `wgmma` instruction.
pub(super) fn decode(cx: &Context<'_>, inst: &Inst) -> Decoded<Uop> {
    Ok(match inst.op {
        Op::MmaSync if is_unusual(inst) => Uop::MmaOther(Box::new(super::wmma::fragments(cx, inst)?)),
        Op::MmaSync | Op::MmaSp | Op::MmaSpOrdered => Uop::Mma(Box::new(mma(cx, inst)?)),
        Op::WgmmaMmaAsync => Uop::Wgmma(Box::new(wgmma(cx, inst)?)),
        Op::WgmmaFence => Uop::WgmmaFence,
        Op::WgmmaCommitGroup => Uop::WgmmaCommit,
        _ => Uop::WgmmaWait { keep: inst.operands.first().and_then(Operand::as_int).unwrap_or(0) as u32 },
    })
}

/// Whether a product has other operands than 16 rows of floats or bytes.
fn is_unusual(inst: &Inst) -> bool {
    use ScalarType::{B1, F64, S4, U4};
    let eight_rows = inst.mods.iter().any(|m| m.as_shape().is_some_and(|shape| shape.m == 8));
    eight_rows || matches!(inst.ty(1), Some(B1 | F64 | S4 | U4))
}

fn shape(inst: &Inst) -> Decoded<Shape> {
    inst.mods.iter().find_map(|m| m.as_shape()).map_or_else(|| refuse("no shape"), Ok)
}

fn element(ty: Option<ScalarType>) -> Decoded<Element> {
    Ok(match ty {
        Some(ScalarType::F16) => Element::Small(F16, 16),
        Some(ScalarType::Bf16) => Element::Small(BF16, 16),
        Some(ScalarType::E4m3) => Element::Small(E4M3, 8),
        Some(ScalarType::E5m2) => Element::Small(E5M2, 8),
        Some(ScalarType::Tf32) => Element::Tf32,
        Some(ScalarType::U8) => Element::U8,
        Some(ScalarType::S8) => Element::S8,
        other => return refuse(format!("operands of type {other:?}")),
    })
}

fn mma(cx: &Context<'_>, inst: &Inst) -> Decoded<Mma> {
    let [d, a, b, c, rest @ ..] = inst.operands.as_slice() else { return refuse("four operands expected") };
    let (word, k) = (ScalarType::B32, usize::from(shape(inst)?.k));
    Ok(Mma {
        k,
        element: element(inst.ty(1))?,
        right: element(inst.ty(2))?,
        saturate: inst.has(Mod::Satfinite),
        accumulate_f16: inst.ty(0) == Some(ScalarType::F16),
        d: cx.regs(d)?,
        a: cx.srcs(a, word)?,
        b: cx.srcs(b, word)?,
        c: cx.srcs(c, ScalarType::F32)?,
        sparse: sparse(cx, inst.op, rest)?,
    })
}

fn sparse(cx: &Context<'_>, op: Op, operands: &[Operand]) -> Decoded<Option<Sparse>> {
    let [metadata, selector] = operands else { return Ok(None) };
    let selector = selector.as_int().unwrap_or(0) as usize;
    Ok(Some(Sparse { metadata: cx.value(metadata)?, selector, ordered: op == Op::MmaSpOrdered }))
}

fn wgmma(cx: &Context<'_>, inst: &Inst) -> Decoded<Wgmma> {
    let [d, a, b, scale_d, flags @ ..] = inst.operands.as_slice() else { return refuse("too few operands") };
    let flag = |i: usize| flags.get(i).and_then(Operand::as_int);
    let in_registers = matches!(a, Operand::Vector(_));
    let (transpose_a, transpose_b) = if in_registers { (None, flag(2)) } else { (flag(2), flag(3)) };
    let shape = shape(inst)?;
    Ok(Wgmma {
        n: shape.n.into(),
        k: shape.k.into(),
        element: element(inst.ty(1))?,
        right: element(inst.ty(2))?,
        saturate: inst.has(Mod::Satfinite),
        accumulate_f16: inst.ty(0) == Some(ScalarType::F16),
        d: cx.regs(d)?,
        a: if in_registers { WgmmaA::Registers(cx.regs(a)?) } else { WgmmaA::Descriptor(cx.value(a)?) },
        b: cx.value(b)?,
        scale_d: cx.value(scale_d)?,
        negate_a: flag(0) == Some(-1),
        negate_b: flag(1) == Some(-1),
        transpose_a: transpose_a == Some(1),
        transpose_b: transpose_b == Some(1),
    })
}
