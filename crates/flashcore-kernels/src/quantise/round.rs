//! Numbers become floats: less their means, divided by their factors, rounded. Rows that are not used become zeros.

use flashcore_core::QuantiseProblem;
use flashcore_tile::{B32, Builder, F32, Global, Params, Reg, Scope, U32, U64, Val};

use super::{Arguments, BYTES, Config, Slice, floats, slots};
use crate::parts::{elements::load, narrow::Narrow, tensor::TensorArgument};

pub(super) fn build(b: &mut Builder, params: &mut Params<QuantiseProblem>, cfg: &Config, args: &Arguments) {
    let x = TensorArgument::declare(b, params, "x", slots::X, |p| (p.x(), p.spec().dtype));
    let out = TensorArgument::declare(b, params, "out", slots::OUT, |p| (p.out(), p.spec().to));
    let factors = params.buffer(b, "factors", slots::FACTORS);
    let means = cfg.centred.then(|| params.buffer(b, "means", slots::MEANS));
    let slice = Slice::of_cta(b, cfg, args);
    let inverse = (!cfg.channels).then(|| {
        let cta = b.cta();
        let index = b.let_(cta / args.share);
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
    let narrow = Narrow::new(cfg.to, cfg.target);
    let [from, from_step] = slice.start(b, cfg, x, column, cfg.from.bytes());
    let [to, to_step] = slice.start(b, cfg, out, column, 1);
    let [from, to] = [from, to].map(|at| b.var_in(Scope::Lane, at));
    let row = b.var_in(Scope::Lane, slice.first);
    let count = cfg.shape.width.div_ceil(4);
    b.while_(
        |_| row.lt(slice.end),
        |b| {
            let words: Vec<Reg<B32>> = (0..count).map(|_| b.var_in::<U32>(Scope::Lane, 0).bits()).collect();
            b.if_(row.lt(slice.used), |b| {
                let values = load(b, cfg.from, cfg.shape.width, from);
                let scaled: Vec<Reg<F32>> = (values.into_iter().enumerate())
                    .map(|(n, value)| {
                        let value = means.map_or(value, |means| b.let_(value - means[n]));
                        b.let_(value * inverses[n])
                    })
                    .collect();
                scaled.chunks(4).zip(&words).for_each(|(four, &word)| narrow.pack_into(b, word, four));
            });
            store(b, cfg, to, &words);
            b.add_to(from, from_step);
            b.add_to(to, to_step);
            b.add_to(row, cfg.shape.groups());
        },
    );
}

fn store(b: &mut Builder, cfg: &Config, to: Reg<U64>, words: &[Reg<B32>]) {
    if cfg.shape.width == 1 {
        return b.store_global_8(to, words[0]);
    }
    let words: Vec<Val<B32>> = words.iter().map(|&word| word.into()).collect();
    b.store_global(Global::from(to), &words);
}
