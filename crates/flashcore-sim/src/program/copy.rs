//! Asynchronous copies and their groups.

use super::{
    memory::combine,
    operand::{Context, Decoded, refuse, space_of},
    uop::{Bulk, BulkPlace, Combine, CpAsync, CpLimit, Src, Uop},
};
use crate::tensor_map::Field;
use flashcore_ptx::{
    inst::{Inst, Operand},
    op::{Mod, Op},
    types::ScalarType,
    version::{V8_5, Version},
};

/// Decodes a copy, a commit or a wait.
pub(super) fn decode(cx: &Context<'_>, inst: &Inst) -> Decoded<Uop> {
    let keep = || inst.operands.first().and_then(Operand::as_int).unwrap_or(0) as u32;
    Ok(match inst.op {
        Op::CpAsync => Uop::CpAsync(Box::new(cp_async(cx, inst)?)),
        Op::CpAsyncCommitGroup => Uop::CpCommit,
        Op::CpAsyncWaitGroup => Uop::CpWait { keep: keep(), commit: false },
        Op::CpAsyncWaitAll => Uop::CpWait { keep: 0, commit: true },
        Op::CpAsyncMbarrierArrive => Uop::CpArrive {
            mbarrier: cx.addr(&inst.operands[0])?,
            space: space_of(&inst.mods),
            noinc: inst.has(Mod::Noinc),
        },
        Op::CpAsyncBulkCommitGroup => Uop::BulkCommit,
        Op::CpAsyncBulkWaitGroup => Uop::BulkWait { keep: keep(), read_only: inst.has(Mod::Read) },
        Op::CpAsyncBulkPrefetch | Op::CpAsyncBulkPrefetchTensor => Uop::Nop,
        Op::TensormapReplace => replace_field(cx, inst)?,
        Op::TensormapCpFenceproxy => {
            Uop::CopyMap { dst: cx.addr(&inst.operands[0])?, src: cx.addr(&inst.operands[1])? }
        }
        Op::StAsync | Op::RedAsync => Uop::Bulk(Box::new(send(cx, inst)?)),
        _ => Uop::Bulk(Box::new(bulk(cx, inst)?)),
    })
}

fn cp_async(cx: &Context<'_>, inst: &Inst) -> Decoded<CpAsync> {
    let [dst, src, bytes, rest @ ..] = inst.operands.as_slice() else { return refuse("too few operands") };
    let policy = usize::from(inst.has(Mod::L2CacheHint));
    let limit = match &rest[..rest.len() - policy] {
        [] => CpLimit::All,
        [limit, ..] => match cx.value(limit)? {
            src @ (Src::Not(_) | Src::Reg(super::uop::Reg::Predicate(_))) => CpLimit::IgnoreIf(src),
            src => CpLimit::Bytes(src),
        },
    };
    let Some(bytes) = bytes.as_int() else { return refuse("the size must be a literal") };
    Ok(CpAsync { dst: cx.addr(dst)?, src: cx.addr(src)?, bytes: bytes as u32, limit })
}

fn bulk(cx: &Context<'_>, inst: &Inst) -> Decoded<Bulk> {
    let tensor = matches!(inst.op, Op::CpAsyncBulkTensor | Op::CpReduceAsyncBulkTensor);
    let [dst, src, rest @ ..] = inst.operands.as_slice() else { return refuse("too few operands") };
    let (size, rest) = match (tensor, rest) {
        (true, rest) => (None, rest),
        (false, [size, rest @ ..]) => (Some(cx.value(size)?), rest),
        _ => return refuse("a bulk copy without a size"),
    };
    if inst.has(Mod::BulkGroup) {
        let op = inst.mods.iter().find_map(|m| combine(*m));
        let reduce = op.map(|op| (op, inst.ty(0)));
        return Ok(Bulk::Store { dst: place(cx, dst)?, src: cx.addr(src)?, size, reduce });
    }
    let [mbarrier, rest @ ..] = rest else { return refuse("a bulk load without an mbarrier") };
    let mbarrier = cx.addr(mbarrier)?;
    if !inst.has(Mod::Global) {
        let Some(size) = size else { return refuse("a copy inside the cluster without a size") };
        let (dst, src) = (cx.addr(dst)?, cx.addr(src)?);
        return Ok(Bulk::Remote { dst, src, size, mbarrier, reduce: reduction(inst) });
    }
    let multicast = match (inst.has(Mod::MulticastCluster), rest) {
        (true, [mask, ..]) => Some(cx.value(mask)?),
        _ => None,
    };
    let cluster = inst.has(Mod::SharedCluster);
    Ok(Bulk::Load { dst: cx.addr(dst)?, src: place(cx, src)?, size, mbarrier, multicast, cluster })
}

fn send(cx: &Context<'_>, inst: &Inst) -> Decoded<Bulk> {
    let ([dst, data, mbarrier], Some(ty)) = (inst.operands.as_slice(), inst.ty(0)) else {
        return refuse("a store of another form");
    };
    let (dst, srcs, mbarrier) = (cx.addr(dst)?, cx.srcs(data, ty)?, cx.addr(mbarrier)?);
    Ok(Bulk::Send { dst, srcs, bytes: ty.bytes(), mbarrier, reduce: reduction(inst) })
}

/// How what comes is combined with what is there, if it is.
fn reduction(inst: &Inst) -> Option<(Combine, ScalarType)> {
    inst.mods.iter().find_map(|m| combine(*m)).zip(inst.ty(0))
}

fn place(cx: &Context<'_>, operand: &Operand) -> Decoded<BulkPlace> {
    match operand {
        Operand::Tensor(tensor) => Ok(BulkPlace::Tensor {
            map: cx.addr(&Operand::Address(tensor.map.clone()))?,
            coords: tensor.coords.iter().map(|c| cx.value(c)).collect::<Decoded<_>>()?,
        }),
        other => cx.addr(other).map(BulkPlace::Global),
    }
}

/// The oldest `.version` whose assembler takes strides of tensor maps in bytes; those before take them in 16 bytes.
const STRIDES_IN_BYTES: Version = V8_5;

fn replace_field(cx: &Context<'_>, inst: &Inst) -> Decoded<Uop> {
    let (place, ordinal, value) = match inst.operands.as_slice() {
        [place, value] => (place, 0, value),
        [place, ordinal, value] => (place, ordinal.as_int().unwrap_or(0) as usize, value),
        _ => return refuse("two or three operands expected"),
    };
    let named = |field: &Mod| {
        Some(match field {
            Mod::GlobalAddress => Field::GlobalAddress,
            Mod::Rank => Field::Rank,
            Mod::BoxDim => Field::BoxDim(ordinal),
            Mod::GlobalDim => Field::GlobalDim(ordinal),
            Mod::GlobalStride => Field::GlobalStride(ordinal, cx.module.version < STRIDES_IN_BYTES),
            Mod::ElementStride => Field::ElementStride(ordinal),
            Mod::Elemtype => Field::Element,
            Mod::InterleaveLayout => Field::Interleave,
            Mod::SwizzleMode => Field::Swizzle,
            Mod::FillMode => Field::Fill,
            _ => return None,
        })
    };
    let Some(field) = inst.mods.iter().find_map(named) else { return refuse("no field") };
    let space = space_of(&inst.mods);
    Ok(Uop::ReplaceField { place: cx.addr(place)?, space, field, value: cx.value(value)? })
}
