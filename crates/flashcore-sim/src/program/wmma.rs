//! `wmma` and `movmatrix`.

use super::{
    float::rounding,
    operand::{Context, Decoded, refuse, space_of},
    uop::{Combine, Fragment, Src, Uop, Wmma, WmmaPlace},
};
use flashcore_ptx::{
    inst::{Inst, Operand},
    op::{Mod, Op, Shape},
    types::ScalarType,
};

/// Decodes a `wmma` instruction.
pub(super) fn decode(cx: &Context<'_>, inst: &Inst) -> Decoded<Uop> {
    let Some(shape) = inst.mods.iter().find_map(|m| m.as_shape()) else { return refuse("no shape") };
    let types: Vec<_> = inst.mods.iter().filter_map(|m| m.as_type()).collect();
    let Some(&first) = types.first() else { return refuse("no type") };
    match inst.op {
        Op::WmmaMma => product(cx, inst, shape, &types).map(|product| Uop::Wmma(Box::new(product))),
        Op::WmmaStoreD => {
            let [address, data, stride @ ..] = inst.operands.as_slice() else {
                return refuse("too few operands");
            };
            let fragment = fragment(shape, Part::Sum, first);
            let place = place(cx, inst, address, stride.first(), fragment)?;
            Ok(Uop::WmmaStore { fragment, place, srcs: cx.srcs(data, first)? })
        }
        op => {
            let [data, address, stride @ ..] = inst.operands.as_slice() else {
                return refuse("too few operands");
            };
            let part = match op {
                Op::WmmaLoadA => Part::Left,
                Op::WmmaLoadB => Part::Right,
                _ => Part::Sum,
            };
            let fragment = fragment(shape, part, first);
            let place = place(cx, inst, address, stride.first(), fragment)?;
            Ok(Uop::WmmaLoad { fragment, place, dsts: cx.regs(data)? })
        }
    }
}

/// Which matrix of a product.
#[derive(Clone, Copy)]
enum Part {
    Left,
    Right,
    Sum,
}

fn fragment(shape: Shape, part: Part, element: ScalarType) -> Fragment {
    let (rows, cols) = match part {
        Part::Left => (shape.m, shape.k),
        Part::Right => (shape.k, shape.n),
        Part::Sum => (shape.m, shape.n),
    };
    Fragment { rows: rows.into(), cols: cols.into(), element }
}

fn place(
    cx: &Context<'_>,
    inst: &Inst,
    address: &Operand,
    stride: Option<&Operand>,
    fragment: Fragment,
) -> Decoded<WmmaPlace> {
    let col_major = inst.has(Mod::ColMajor);
    let dense = if col_major { fragment.rows } else { fragment.cols };
    let stride = stride.map_or(Ok(Src::Imm(dense.into())), |operand| cx.value(operand))?;
    Ok(WmmaPlace { space: space_of(&inst.mods), addr: cx.addr(address)?, stride, col_major })
}

/// `wmma.mma` names the types of D and C, and those of A and B between them unless they are halves.
fn product(cx: &Context<'_>, inst: &Inst, shape: Shape, types: &[ScalarType]) -> Decoded<Wmma> {
    let [d, a, b, c] = inst.operands.as_slice() else { return refuse("four operands expected") };
    let half = ScalarType::F16;
    let (td, ta, tb, tc) = match *types {
        [d, c] => (d, half, half, c),
        [d, a, b, c] => (d, a, b, c),
        _ => return refuse("two or four types expected"),
    };
    let parts = [(Part::Sum, td), (Part::Left, ta), (Part::Right, tb), (Part::Sum, tc)];
    let bits = inst.mods.iter().find_map(|m| match m {
        Mod::And => Some(Combine::And),
        Mod::Xor => Some(Combine::Xor),
        _ => None,
    });
    Ok(Wmma {
        fragments: parts.map(|(part, ty)| fragment(shape, part, ty)),
        d: cx.regs(d)?,
        sources: [cx.srcs(a, ta)?, cx.srcs(b, tb)?, cx.srcs(c, tc)?],
        saturate: inst.has(Mod::Satfinite),
        bits,
        rounding: rounding(inst),
    })
}

/// An `mma` whose matrices are taken as they are, element by element.
pub(super) fn fragments(cx: &Context<'_>, inst: &Inst) -> Decoded<Wmma> {
    let Some(shape) = inst.mods.iter().find_map(|m| m.as_shape()) else { return refuse("no shape") };
    let types: Vec<_> = inst.mods.iter().filter_map(|m| m.as_type()).collect();
    product(cx, inst, shape, &types)
}

/// Decodes `movmatrix`.
pub(super) fn movmatrix(cx: &Context<'_>, inst: &Inst) -> Decoded<Uop> {
    let [dst, src] = inst.operands.as_slice() else { return refuse("two operands expected") };
    Ok(Uop::MoveMatrix { dst: cx.dst(dst)?, src: cx.value(src)? })
}
