//! Loads, stores, atomics, matrix loads and stores.

use super::{
    decode::map1,
    operand::{Context, Decoded, invalid, refuse, space_of},
    uop::{Access, Atomic, Combine, Order, Space, Uop},
};
use flashcore_ptx::{
    inst::Inst,
    op::{Mod, Op},
    types::{ScalarType, TypeKind},
};

/// Decodes an access to memory.
pub(super) fn decode(cx: &Context<'_>, inst: &Inst) -> Decoded<Uop> {
    match inst.op {
        Op::Ld => {
            let access = access(cx, inst, 1)?;
            Ok(Uop::Load { access, dsts: cx.dsts(&inst.operands[0])? })
        }
        Op::St => {
            let (ty, access) = (element(inst)?, access(cx, inst, 0)?);
            if access.space == Space::Param {
                return invalid(
                    "parameters of a kernel are only read; `st.param` passes arguments to functions",
                );
            }
            Ok(Uop::Store { access, srcs: cx.srcs(&inst.operands[1], ty)? })
        }
        Op::Atom | Op::Red => atomic(cx, inst).map(|a| Uop::Atomic(Box::new(a))),
        Op::Ldmatrix | Op::Stmatrix => matrix(cx, inst),
        Op::Discard => Ok(Uop::Discard { addr: cx.addr(&inst.operands[0])? }),
        // a policy is a hint: any value serves
        Op::Createpolicy => Ok(Uop::Alu { f: map1(|_| 0), dst: cx.dst(&inst.operands[0])?, srcs: vec![] }),
        _ => Ok(Uop::Nop),
    }
}

/// The type of what is accessed; 128 bits are two elements of 64.
fn element(inst: &Inst) -> Decoded<ScalarType> {
    match inst.ty(0) {
        Some(ScalarType::B128) => Ok(ScalarType::B64),
        Some(ty) => Ok(ty),
        None => refuse("no type"),
    }
}

fn access(cx: &Context<'_>, inst: &Inst, at: usize) -> Decoded<Access> {
    let ty = element(inst)?;
    let strong = inst
        .mods
        .iter()
        .any(|m| matches!(m, Mod::Relaxed | Mod::Acquire | Mod::Release | Mod::AcqRel | Mod::Volatile));
    let order = Order {
        strong,
        acquire: inst.has(Mod::Acquire) || inst.has(Mod::AcqRel),
        release: inst.has(Mod::Release) || inst.has(Mod::AcqRel),
        within_cta: inst.has(Mod::Cta),
        non_coherent: inst.has(Mod::Nc),
    };
    Ok(Access {
        space: cx.space_of(&inst.mods, &inst.operands[at]),
        addr: cx.addr(&inst.operands[at])?,
        bytes: ty.bytes(),
        signed: ty.kind() == TypeKind::Signed,
        order,
    })
}

fn atomic(cx: &Context<'_>, inst: &Inst) -> Decoded<Atomic> {
    let has_result = inst.op == Op::Atom;
    let at = usize::from(has_result);
    let mut access = access(cx, inst, at)?;
    access.order.strong = true;
    let ty = element(inst)?;
    let Some(op) = inst.mods.iter().find_map(|m| combine(*m)) else { return refuse("no operator") };
    let swaps = if op == Combine::Cas { cx.srcs(&inst.operands[at + 2], ty)? } else { Vec::new() };
    Ok(Atomic {
        access,
        op,
        ty,
        dsts: if has_result { cx.dsts(&inst.operands[0])? } else { Vec::new() },
        values: cx.srcs(&inst.operands[at + 1], ty)?,
        swaps,
    })
}

/// The operator a modifier names.
pub(super) fn combine(modifier: Mod) -> Option<Combine> {
    Some(match modifier {
        Mod::Add => Combine::Add,
        Mod::Min => Combine::Min,
        Mod::Max => Combine::Max,
        Mod::Inc => Combine::Inc,
        Mod::Dec => Combine::Dec,
        Mod::And => Combine::And,
        Mod::Or => Combine::Or,
        Mod::Xor => Combine::Xor,
        Mod::Exch => Combine::Exch,
        Mod::Cas => Combine::Cas,
        _ => return None,
    })
}

fn matrix(cx: &Context<'_>, inst: &Inst) -> Decoded<Uop> {
    let (space, transpose) = (space_of(&inst.mods), inst.has(Mod::Trans));
    let [first, second] = inst.operands.as_slice() else { return refuse("two operands expected") };
    Ok(match inst.op {
        Op::Ldmatrix => Uop::LoadMatrix { space, addr: cx.addr(second)?, dsts: cx.regs(first)?, transpose },
        _ => {
            let srcs = cx.srcs(second, ScalarType::B32)?;
            Uop::StoreMatrix { space, addr: cx.addr(first)?, srcs, transpose }
        }
    })
}
