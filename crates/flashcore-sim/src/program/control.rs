//! Branches, exits, exchange inside a warp, register budgets.

use super::{
    memory::combine,
    operand::{Context, Decoded, OperandError, refuse},
    uop::{Shuffle, Uop, Vote},
};
use flashcore_ptx::{
    inst::{Inst, Operand},
    op::{Mod, Op},
    types::ScalarType,
};

/// Decodes control flow and warp-level exchange.
pub(super) fn decode(cx: &Context<'_>, inst: &Inst) -> Decoded<Uop> {
    match inst.op {
        Op::Bra => branch(cx, inst),
        Op::Ret | Op::Exit => Ok(Uop::Exit),
        Op::Trap | Op::Brkpt => Ok(Uop::Trap),
        Op::Setmaxnreg => {
            let count = inst.operands.first().and_then(Operand::as_int).unwrap_or(0) as u32;
            Ok(Uop::SetMaxReg { count, grow: inst.has(Mod::Inc) })
        }
        Op::BarWarpSync => Ok(Uop::WarpSync { mask: cx.value(&inst.operands[0])? }),
        Op::Activemask => Ok(Uop::ActiveMask { dst: cx.dst(&inst.operands[0])? }),
        Op::ElectSync => {
            let [dst, mask] = inst.operands.as_slice() else { return refuse("two operands expected") };
            Ok(Uop::Elect { dst: cx.dst(dst)?, ok: cx.second(dst)?, mask: cx.value(mask)? })
        }
        Op::ShflSync | Op::VoteSync | Op::Match | Op::ReduxSync => exchange(cx, inst),
        _ => Ok(Uop::Nop),
    }
}

fn branch(cx: &Context<'_>, inst: &Inst) -> Decoded<Uop> {
    let Some(Operand::Label(name)) = inst.operands.first() else { return refuse("no branch target") };
    let target = cx.labels.get(name.as_str()).copied();
    Ok(Uop::Branch { target: target.ok_or_else(|| OperandError::Undeclared(name.to_string()))? })
}

fn exchange(cx: &Context<'_>, inst: &Inst) -> Decoded<Uop> {
    let [dst, value, rest @ ..] = inst.operands.as_slice() else { return refuse("too few operands") };
    let Some(mask) = rest.last() else { return refuse("no member mask") };
    let mask = cx.value(mask)?;
    let ty = inst.ty(0).unwrap_or(ScalarType::B32);
    let (value, ok, dst) = (cx.src(value, ty)?, cx.second(dst)?, cx.dst(dst)?);
    Ok(match inst.op {
        Op::ShflSync => {
            let [lane, clamp, _] = rest else { return refuse("five operands expected") };
            let (lane, clamp) = (cx.value(lane)?, cx.value(clamp)?);
            Uop::Shuffle { mode: shuffle(inst), dst, ok, value, lane, clamp, mask }
        }
        Op::VoteSync => Uop::Vote { mode: vote(inst), dst, value, mask },
        Op::Match => Uop::Match { all: inst.has(Mod::All), dst, ok, value, mask },
        _ => {
            let Some(op) = inst.mods.iter().find_map(|m| combine(*m)) else { return refuse("no operator") };
            Uop::Redux { op, signed: ty == ScalarType::S32, dst, value, mask }
        }
    })
}

fn shuffle(inst: &Inst) -> Shuffle {
    match () {
        () if inst.has(Mod::Up) => Shuffle::Up,
        () if inst.has(Mod::Down) => Shuffle::Down,
        () if inst.has(Mod::Bfly) => Shuffle::Bfly,
        () => Shuffle::Idx,
    }
}

fn vote(inst: &Inst) -> Vote {
    match () {
        () if inst.has(Mod::All) => Vote::All,
        () if inst.has(Mod::Any) => Vote::Any,
        () if inst.has(Mod::Uni) => Vote::Uni,
        () => Vote::Ballot,
    }
}
