//! Rounds values to 8-bit floats: less their means, divided by their factors. Unused rows become zeros.

use flashcore_core::QuantiseProblem;
use flashcore_tile::{B32, Builder, F32, Global, Params, Reg, Scope, U32, U64, Val};

use super::{
    Arguments, BYTES, Config, IN_FLIGHT, floats,
    slice::{Line, Slice},
    slots,
};
use crate::parts::{narrow::Narrow, tensor::TensorArgument};

pub(super) fn build(b: &mut Builder, params: &mut Params<QuantiseProblem>, cfg: &Config, args: &Arguments) {
    let x = TensorArgument::declare(b, params, "x", slots::X, |p| (p.x(), p.spec().dtype));
    let out = TensorArgument::declare(b, params, "out", slots::OUT, |p| (p.out(), p.spec().to));
    let factors = params.buffer(b, "factors", slots::FACTORS);
    let means = cfg.centred.then(|| params.buffer(b, "means", slots::MEANS));
    let slice = Slice::of_cta(b, cfg, args);
    let inverse = (!cfg.channels).then(|| {
        let index = b.let_(slice.index / args.share);
        let at = b.let_(factors + index.mul_wide(BYTES));
        let [factor] = b.load_global::<F32, 1>(at);
        b.rcp(factor)
    });
    slice.each_step(b, cfg, args, |b, _, column| {
        let there = b.let_(column.lt(args.dim));
        b.if_(there, |b| {
            let first = b.let_(slice.plane * args.dim + column);
            let inverses = match inverse {
                Some(inverse) => vec![inverse; cfg.shape.width as usize],
                None => {
                    let factors = floats(b, factors, first, cfg.shape.width);
                    factors.into_iter().map(|factor| b.rcp(factor)).collect()
                }
            };
            let means = means.map(|means| floats(b, means, first, cfg.shape.width));
            rows(b, cfg, &slice, (&x, &out, column), (&inverses, means.as_deref()));
        });
    });
}

/// This thread's columns of the rows of its group.
fn rows(
    b: &mut Builder,
    cfg: &Config,
    slice: &Slice,
    (x, out, column): (&TensorArgument, &TensorArgument, Reg<U32>),
    (inverses, means): (&[Reg<F32>], Option<&[Reg<F32>]>),
) {
    let from = slice.start(b, cfg, x, column, cfg.from.bytes());
    let to = slice.start(b, cfg, out, column, 1);
    let row = b.var_in(Scope::Lane, slice.first);
    let end = b.let_(slice.end.min(slice.used));
    b.while_(
        |_| row.lt(slice.end),
        |b| {
            let lines = Line::ask(b, cfg, from, (row, end), IN_FLIGHT);
            let addresses = to.next(b, IN_FLIGHT);
            for (n, (line, at)) in (0..).zip(lines.iter().zip(addresses)) {
                let values = line.values(b, means);
                let words = rounded(b, cfg, line, &values, inverses);
                let there = b.let_((row + n * cfg.shape.groups()).lt(slice.end));
                b.predicated(there, |b| store(b, cfg, at, &words));
            }
            b.add_to(row, IN_FLIGHT * cfg.shape.groups());
        },
    );
}

/// The floats of a row's values; zeros where it was not read.
pub(super) fn rounded(
    b: &mut Builder,
    cfg: &Config,
    line: &Line,
    values: &[Reg<F32>],
    inverses: &[Reg<F32>],
) -> Vec<Reg<B32>> {
    let narrow = Narrow::new(cfg.to, cfg.target);
    let scaled: Vec<Reg<F32>> =
        values.iter().zip(inverses).map(|(&value, &inverse)| b.let_(value * inverse)).collect();
    let word = |four: &[Reg<F32>]| {
        let word = b.var_in::<U32>(Scope::Lane, 0);
        narrow.pack_into(b, word.bits(), four);
        // What was not read is zero as it is, but for a mean.
        if cfg.centred { b.select(line.there, word, 0).bits() } else { word.bits() }
    };
    scaled.chunks(4).map(word).collect()
}

/// Writes the floats of a row.
pub(super) fn store(b: &mut Builder, cfg: &Config, to: Reg<U64>, words: &[Reg<B32>]) {
    if cfg.shape.width == 1 {
        return b.store_global_8(to, words[0]);
    }
    let words: Vec<Val<B32>> = words.iter().map(|&word| word.into()).collect();
    b.store_global(Global::from(to), &words);
}
