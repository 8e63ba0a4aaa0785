//! Calls, returns and branches through a table.

use super::{
    operand::{Context, Decoded, FRAME_ALIGN, OperandError, Place, refuse},
    routine::{builtin, callee, find},
    uop::{Call, Callee, Piece, Uop},
};
use flashcore_ptx::{
    inst::{Inst, Operand},
    module::{Kernel, TargetList},
    op::Op,
};

/// Decodes `alloca`, `stacksave` and `stackrestore`.
pub(super) fn stack(cx: &Context<'_>, inst: &Inst) -> Decoded<Uop> {
    let align = inst.operands.get(2).and_then(Operand::as_int).unwrap_or(8) as u32;
    Ok(match (inst.op, inst.operands.as_slice()) {
        (Op::Alloca, [dst, bytes, ..]) => Uop::Alloca { dst: cx.dst(dst)?, bytes: cx.value(bytes)?, align },
        (Op::Stacksave, [dst]) => Uop::StackSave { dst: cx.dst(dst)? },
        (_, [src]) => Uop::StackRestore { src: cx.value(src)? },
        _ => return refuse("too few operands"),
    })
}

/// Decodes `call`.
pub(super) fn call(cx: &Context<'_>, inst: &Inst) -> Decoded<Uop> {
    let Some(who) = callee(inst) else { return refuse("the call has no target") };
    let has_result = matches!(inst.operands.first(), Some(Operand::Group(_))) && inst.operands.len() > 1;
    let mut groups = inst.operands.iter().filter_map(|operand| match operand {
        Operand::Group(items) => Some(items.as_slice()),
        _ => None,
    });
    let result = if has_result { groups.next().unwrap_or_default() } else { &[] };
    let args = groups.next().unwrap_or_default();
    let pieces = |items: &[Operand]| items.iter().map(|item| piece(cx, item)).collect::<Decoded<Vec<_>>>();
    Ok(Uop::Call(Box::new(Call {
        callee: target(cx, who)?,
        args: pieces(args)?,
        result: pieces(result)?.first().copied(),
        frame: cx.scope.frame_bytes.next_multiple_of(FRAME_ALIGN),
    })))
}

fn target(cx: &Context<'_>, who: &Operand) -> Decoded<Callee> {
    let Operand::Symbol(name) = who else { return Ok(Callee::Pointer(cx.value(who)?)) };
    let undeclared = || OperandError::Undeclared(name.to_string());
    let function = find(cx.module, name.as_str()).ok_or_else(undeclared)?;
    if let Some(at) = cx.routines.iter().position(|&index| index == function) {
        return Ok(Callee::Routine(at));
    }
    match builtin(name.as_str()) {
        Some(known) => Ok(Callee::Builtin(known)),
        None if ["malloc", "free"].contains(&name.as_str()) => {
            refuse(format!("`{name}`: the simulator has no heap; pass an array, or use local memory"))
        }
        None => refuse(format!("`{name}` is only declared here; compile its definition into the same PTX")),
    }
}

/// Where a `.param` variable lies in the frame.
fn piece(cx: &Context<'_>, operand: &Operand) -> Decoded<Piece> {
    let Operand::Symbol(name) = operand else { return refuse(format!("{operand} as an argument")) };
    match cx.place_of(name.as_str()) {
        Some((Place::Local(offset), bytes)) => Ok(Piece { offset, bytes }),
        Some(_) => refuse(format!("`{name}`, which is no `.param` variable of this body, as an argument")),
        None => Err(OperandError::Undeclared(name.to_string())),
    }
}

/// Decodes `brx.idx`.
pub(super) fn branch_to(cx: &Context<'_>, kernel: &Kernel, inst: &Inst) -> Decoded<Uop> {
    let [index, Operand::Symbol(name)] = inst.operands.as_slice() else {
        return refuse("an index and a list of labels expected");
    };
    let Some(TargetList::Branch(labels)) = kernel.targets_of(name) else {
        return Err(OperandError::Undeclared(name.to_string()));
    };
    let target = |label: &flashcore_ptx::ident::Name| {
        cx.labels.get(label.as_str()).copied().ok_or_else(|| OperandError::Undeclared(label.to_string()))
    };
    let targets = labels.iter().map(target).collect::<Decoded<_>>()?;
    Ok(Uop::BranchTo { index: cx.value(index)?, targets })
}
