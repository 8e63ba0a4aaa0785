//! Small kernels that together use every part of the language.

use flashcore_ptx::{
    ident::Ident,
    launch::{Slot, TensorElement, TensorMapSpec},
    layout::Swizzle,
    target::Target,
};
use flashcore_tile::{
    Acc, Builder, Cmp, F32, Fragment, Half, Major, Params, Pipeline, Program, Reg, RegisterBudget, Roles,
    Scope, Start, U32,
};

/// Arguments of the samples.
pub struct Rows {
    pub rows: u32,
    pub factor: f32,
}

pub const DATA: Slot = Slot(0);
pub const OUT: Slot = Slot(1);

fn name() -> Ident {
    Ident::new("fc_sample").unwrap()
}

/// Multiplies each of `rows` numbers by a factor, one thread each, CTA after CTA.
pub fn scale_rows() -> Program<Rows> {
    let name = name();
    let (mut b, mut params) = (Builder::new(Target::Sm80, &name, 64, 1), Params::<Rows>::default());
    let rows = params.u32(&mut b, "rows", |a| a.rows);
    let factor = params.f32(&mut b, "factor", |a| a.factor);
    let data = params.buffer(&mut b, "data", DATA);
    let (thread, cta, ctas) = (b.thread(), b.cta(), b.ctas());
    let start = b.mad(cta, 64, thread);
    let row = b.var_in(Scope::Lane, start);
    let step = b.mul(ctas, 64);
    b.while_(
        |b| b.test(Cmp::Lt, row, rows),
        |b| {
            let offset = b.mul_wide(row, 4);
            let at = b.add(data, offset);
            let [x] = b.load_global::<F32, 1>(at);
            let x = b.mul(x, factor);
            b.store_global(at, &[x.into()]);
            b.add_to(row, step);
        },
    );
    b.finish(&name, params).unwrap()
}

/// The same kernel, with every instruction from the line that calls this macro.
macro_rules! same_at_one_line {
    () => {{
        let name = name();
        let (mut b, mut params) = (Builder::new(Target::Sm80, &name, 64, 1), Params::<Rows>::default());
        let rows = params.u32(&mut b, "rows", |a| a.rows);
        let factor = params.f32(&mut b, "factor", |a| a.factor);
        let data = params.buffer(&mut b, "data", DATA);
        let (thread, cta, ctas) = (b.thread(), b.cta(), b.ctas());
        let start = b.mad(cta, 64, thread);
        let row = b.var_in(Scope::Lane, start);
        let step = b.mul(ctas, 64);
        b.while_(
            |b| b.test(Cmp::Lt, row, rows),
            |b| {
                let offset = b.mul_wide(row, 4);
                let at = b.add(data, offset);
                let [x] = b.load_global::<F32, 1>(at);
                let x = b.mul(x, factor);
                b.store_global(at, &[x.into()]);
                b.add_to(row, step);
            },
        );
        b.finish(&name, params).unwrap()
    }};
}

/// [`scale_rows`], built from one line.
pub fn scale_rows_at_one_line() -> Program<Rows> {
    same_at_one_line!()
}

/// Two products in flight at once: one from shared memory, one from registers.
pub fn product() -> Program<Rows> {
    let name = name();
    let mut b = Builder::new(Target::Sm90a, &name, 128, 1);
    let tile = b.smem_tile(Half::Bf16, [64, 64], Swizzle::B128, 2);
    let (q, v) = (tile.operand(&mut b, Major::K, 0), tile.operand(&mut b, Major::Mn, tile.bytes()));
    let (s, o, p) = (Acc::new(&mut b, 64), Acc::zero(&mut b, 64), Fragment::new(&mut b, 16));
    for &reg in p.regs() {
        b.set(reg, flashcore_tile::Packed(0x3f80_3f80));
    }
    let s = b.wgmma_ss(s, Start::Zero, [&q, &q], 32);
    let o = b.wgmma_rs(o, Start::Accumulate, p, &v);
    let s = s.wait(&mut b);
    let _ = b.exp2(s.regs()[0]);
    o.wait(&mut b);
    b.finish(&name, Params::default()).unwrap()
}

/// A producer that fills a ring by tensor copies, consumers that read it.
pub fn pipeline() -> Program<Rows> {
    let name = name();
    let roles =
        Roles { consumers: 2, budget: Some(RegisterBudget { producer: 24, consumer: 240 }), mover: None };
    let (mut b, mut params) =
        (Builder::new(Target::Sm90a, &name, roles.threads(), 1), Params::<Rows>::default());
    let rows = params.u32(&mut b, "rows", |a| a.rows);
    let map = params.tensor_map(&mut b, "data", data_map);
    let out = params.buffer(&mut b, "out", OUT);
    let tile = b.smem_tile(Half::F16, [64, 64], Swizzle::B128, 3);
    let ring = Pipeline::new(&mut b, tile, 3, 2);
    start(&mut b, &ring);
    let turns = b.div_ceil(rows, 64);
    b.specialise(
        roles,
        |b| {
            let lane = b.thread();
            let leader = b.test(Cmp::Eq, lane, 0);
            b.if_(leader, |b| {
                each(b, turns, |b, turn| {
                    let stage = ring.stage(b, turn);
                    stage.wait_empty(b);
                    stage.expect_tile(b);
                    let (to, row) = (stage.at(b), b.shl(turn, 6));
                    b.tma_load(
                        map,
                        ring.tile(),
                        to,
                        [0.into(), row.into(), 0.into(), 0.into()],
                        stage.full(),
                    );
                });
            });
        },
        |b, group| {
            let (thread, sum) = (b.thread(), Acc::zero(b, 16));
            each(b, turns, |b, turn| {
                let stage = ring.stage(b, turn);
                stage.wait_full(b);
                let from = stage.at(b);
                let [x, y] = b.load_shared::<F32, 2>(from);
                sum.scale_rows(b, [x, y]);
                let inner = b.and(thread, 127);
                let leader = b.test(Cmp::Eq, inner, 0);
                stage.release(b, leader);
            });
            let total = b.shuffle_xor(sum.regs()[0], 1);
            let at = b.mul_wide(group, 4);
            let at = b.add(out, at);
            b.store_global(at, &[total.into()]);
        },
    );
    b.finish(&name, params).unwrap()
}

fn start(b: &mut Builder, ring: &Pipeline) {
    let thread = b.thread();
    let first = b.test(Cmp::Eq, thread, 0);
    b.if_(first, |b| {
        ring.init(b);
        b.fence_mbarrier_init();
    });
    b.sync_cta();
}

/// Runs `body` with the numbers below `turns`.
fn each(b: &mut Builder, turns: Reg<U32>, body: impl FnOnce(&mut Builder, Reg<U32>)) {
    let turn = b.var_in(Scope::Lane, 0);
    b.while_(
        |b| b.test(Cmp::Lt, turn, turns),
        |b| {
            body(b, turn);
            b.add_to(turn, 1);
        },
    );
}

fn data_map(args: &Rows) -> TensorMapSpec {
    TensorMapSpec {
        slot: DATA,
        element: TensorElement::F16,
        dims: vec![64, u64::from(args.rows), 1, 1],
        strides: vec![128, 128 * u64::from(args.rows), 128 * u64::from(args.rows)],
        box_dims: vec![64, 64, 1, 1],
        swizzle: Swizzle::B128,
    }
}
