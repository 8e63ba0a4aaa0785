//! mbarriers, named barriers, cluster barriers and fences.

use super::{
    operand::{Context, Decoded, refuse, space_of},
    uop::{BarVote, Fence, MbarrierOp, Src, Uop, WaitPhase},
};
use flashcore_ptx::{
    inst::{Inst, Operand},
    op::{Mod, Op},
};

/// Decodes a barrier or a fence.
pub(super) fn decode(cx: &Context<'_>, inst: &Inst) -> Decoded<Uop> {
    let aligned = inst.has(Mod::Aligned) || inst.op.text().starts_with("bar.");
    Ok(match inst.op {
        Op::Fence | Op::Membar => Uop::Fence(Fence::Memory {
            within_cta: inst.has(Mod::Cta),
            acquire: !inst.has(Mod::Release),
            release: !inst.has(Mod::Acquire),
        }),
        Op::FenceProxy if inst.has(Mod::TensormapGeneric) && inst.has(Mod::Acquire) => {
            Uop::AcquireMap { place: cx.addr(&inst.operands[0])? }
        }
        Op::FenceProxy if inst.has(Mod::Async) || inst.has(Mod::AsyncGeneric) => {
            let named = |spaces: &[Mod]| spaces.iter().any(|space| inst.has(*space));
            let only_shared = named(&[Mod::SharedCta, Mod::SharedCluster, Mod::AsyncGeneric]);
            Uop::Fence(Fence::ProxyAsync { shared: !named(&[Mod::Global]), global: !only_shared })
        }
        Op::FenceProxy => Uop::Fence(Fence::Other),
        Op::FenceMbarrierInit => Uop::Fence(Fence::MbarrierInit),
        Op::BarrierClusterArrive => {
            Uop::ClusterArrive { release: !inst.has(Mod::Relaxed), aligned: inst.has(Mod::Aligned) }
        }
        Op::BarrierClusterWait => Uop::ClusterWait { acquire: true, aligned: inst.has(Mod::Aligned) },
        Op::BarSync | Op::BarrierSync | Op::BarArrive | Op::BarrierArrive => barrier(cx, inst, aligned)?,
        Op::BarRed | Op::BarrierRed => barrier_vote(cx, inst, aligned)?,
        Op::MbarrierPendingCount => {
            Uop::PendingCount { dst: cx.dst(&inst.operands[0])?, state: cx.value(&inst.operands[1])? }
        }
        _ => mbarrier(cx, inst)?,
    })
}

fn barrier(cx: &Context<'_>, inst: &Inst, aligned: bool) -> Decoded<Uop> {
    let wait = matches!(inst.op, Op::BarSync | Op::BarrierSync);
    let [id, rest @ ..] = inst.operands.as_slice() else { return refuse("no barrier id") };
    let count = rest.first().map(|c| cx.value(c)).transpose()?;
    Ok(Uop::Barrier { id: cx.value(id)?, count, wait, vote: None, aligned })
}

fn barrier_vote(cx: &Context<'_>, inst: &Inst, aligned: bool) -> Decoded<Uop> {
    let kind = match () {
        () if inst.has(Mod::Popc) => BarVote::Popc,
        () if inst.has(Mod::And) => BarVote::And,
        () => BarVote::Or,
    };
    let (dst, id, count, value) = match inst.operands.as_slice() {
        [dst, id, value] => (dst, id, None, value),
        [dst, id, count, value] => (dst, id, Some(cx.value(count)?), value),
        _ => return refuse("three or four operands expected"),
    };
    let vote = Some((kind, cx.dst(dst)?, cx.value(value)?));
    Ok(Uop::Barrier { id: cx.value(id)?, count, wait: true, vote, aligned })
}

fn mbarrier(cx: &Context<'_>, inst: &Inst) -> Decoded<Uop> {
    let space = space_of(&inst.mods);
    let at = usize::from(!matches!(inst.operands.first(), Some(Operand::Address(_))));
    let Some(place) = inst.operands.get(at) else { return refuse("no address") };
    let value = |i: usize| inst.operands.get(i).map(|o| cx.value(o)).transpose();
    let required = |v: Option<Src>| v.map_or_else(|| refuse("an operand is missing"), Ok);
    let op = match inst.op {
        Op::MbarrierInit => MbarrierOp::Init { count: required(value(at + 1)?)? },
        Op::MbarrierInval => MbarrierOp::Inval,
        Op::MbarrierExpectTx => MbarrierOp::ExpectTx { bytes: required(value(at + 1)?)? },
        Op::MbarrierCompleteTx => MbarrierOp::CompleteTx { bytes: required(value(at + 1)?)? },
        Op::MbarrierArrive | Op::MbarrierArriveDrop => arrive(cx, inst, value(at + 1)?)?,
        _ => {
            let phase = required(value(at + 1)?)?;
            MbarrierOp::Wait {
                done: cx.dst(&inst.operands[0])?,
                phase: if inst.has(Mod::Parity) { WaitPhase::Parity(phase) } else { WaitPhase::State(phase) },
                may_block: inst.op == Op::MbarrierTryWait,
                acquire: !inst.has(Mod::Relaxed),
            }
        }
    };
    Ok(Uop::Mbarrier { op, addr: cx.addr(place)?, space })
}

fn arrive(cx: &Context<'_>, inst: &Inst, operand: Option<Src>) -> Decoded<MbarrierOp> {
    let (count, expect) = match (inst.has(Mod::ExpectTx), operand) {
        (true, bytes @ Some(_)) => (Src::Imm(1), bytes),
        (_, Some(count)) => (count, None),
        (_, None) => (Src::Imm(1), None),
    };
    let state = match &inst.operands[0] {
        Operand::Address(_) => None,
        state => cx.dst(state)?,
    };
    Ok(MbarrierOp::Arrive {
        state,
        count,
        expect,
        drop: inst.op == Op::MbarrierArriveDrop,
        no_complete: inst.has(Mod::NoComplete),
        release: !inst.has(Mod::Relaxed),
    })
}
