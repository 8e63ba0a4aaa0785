//! The gradients of the sinks: what each took from the rows of its head, `−Σ exp(sink − lse)·sum`.
//!
//! One CTA has a head. Its threads go through the rows in a fixed order and add up in a fixed order, so that the same call
//! gives the same bits.

use std::f32::consts::LOG2_E;

use flashcore_core::{BackwardProblem, DType};
use flashcore_ptx::{ident::Ident, launch::Workspace, sm::REGISTERS, target::Target};
use flashcore_tile::{BuildError, Builder, Cta, Extent, F32, Params, Program, Reg, Scope, U32, U64};

use super::{ROW_BYTES, TermsArgument};
use crate::{
    parts::{
        lengths::{LengthArguments, LengthsKind},
        sinks::{SinkArgument, sink_name},
    },
    slots::backward as slots,
};

const THREADS: u32 = 256;
const WARPS: u32 = THREADS / 32;
const CTAS_PER_SM: u32 = 4;

/// A kernel of this family: two configs that are equal give the same text.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub struct Config {
    /// Element type of the sinks.
    pub sinks: DType,
    /// How sequences are told.
    pub lengths: LengthsKind,
    /// Whether gradients are added to what is there.
    pub accumulate: bool,
}

impl Config {
    /// The kernel's name: every field of the config is in it.
    pub fn name(&self) -> Ident {
        let accumulate = if self.accumulate { "_acc" } else { "" };
        let sinks = sink_name(Some(self.sinks));
        let name = format!("fc_backward_sinks{sinks}_{}{accumulate}", self.lengths.name());
        Ident::new(name).expect("made of legal parts")
    }

    /// Most registers of a thread.
    pub const fn registers(&self) -> u32 {
        REGISTERS / (CTAS_PER_SM * THREADS) / 8 * 8
    }
}

/// The launch that computes `problem`: one CTA for each head.
pub fn extent(problem: &BackwardProblem, workspace: &[Workspace]) -> Option<Extent> {
    let grid = [problem.forward().heads_q() as u32, 1, 1];
    Some(Extent { grid, workspace: workspace.to_vec(), dependent: false })
}

/// Builds the kernel.
pub fn backward_sinks(cfg: &Config) -> Result<Program<BackwardProblem>, BuildError> {
    let name = cfg.name();
    let mut b = Builder::new(Target::Sm80, &name, THREADS, CTAS_PER_SM);
    let mut params = Params::default();
    let args = Arguments::declare(&mut b, &mut params, cfg);
    let unwanted = b.uniform::<Cta>(args.to.eq(0));
    b.if_uniform(unwanted, Builder::exit);
    let head = b.cta();
    let taken = args.taken(&mut b, head);
    write(&mut b, cfg, &args, head, taken);
    b.finish(&name, params)
}

/// What the host passes, as registers.
struct Arguments {
    sinks: SinkArgument,
    /// Where gradients go; 0 where nobody wants them.
    to: Reg<U64>,
    terms: TermsArgument,
    lengths: LengthArguments,
    sequences: Reg<U32>,
    /// 1 where a sequence is a batch entry, 0 where sequences are packed.
    apart: Reg<U32>,
}

impl Arguments {
    fn declare(b: &mut Builder, params: &mut Params<BackwardProblem>, cfg: &Config) -> Self {
        let packed = cfg.lengths == LengthsKind::Ragged;
        let seq_q = params.u32(b, "seq_q", |p| p.forward().seq_q() as u32);
        let seq_kv = params.u32(b, "seq_kv", |p| p.forward().seq_kv() as u32);
        Self {
            sinks: SinkArgument::of(b, params, cfg.sinks),
            to: params.buffer(b, "d_sinks", slots::D_SINKS),
            terms: TermsArgument::declare(b, params),
            lengths: LengthArguments::declare(b, params, cfg.lengths, [seq_q, seq_kv]),
            sequences: params.u32(b, "sequences", |p| p.forward().sequences() as u32),
            apart: b.var(u32::from(!packed)),
        }
    }

    /// This thread's share of what the sink of `head` took.
    fn taken(&self, b: &mut Builder, head: Reg<U32>) -> Reg<F32> {
        let thread = b.thread();
        let sink = self.sinks.of_head(b, head);
        let sink = b.let_(sink * LOG2_E);
        let taken = b.var_in::<F32>(Scope::Lane, 0.0);
        let sequence = b.var_in(Scope::Cta, 0);
        b.while_(
            |_| sequence.lt(self.sequences),
            |b| {
                let [queries, _] = self.lengths.sequence(b, sequence);
                let batch = b.let_(sequence * self.apart);
                let start = self.terms.at(b, batch, head, queries.start);
                let row = b.var_in(Scope::Lane, thread);
                b.while_(
                    |_| row.lt(queries.len),
                    |b| {
                        let at = b.let_(start + row.mul_wide(ROW_BYTES));
                        let [offset, minus_sum] = b.load_global::<F32, 2>(at);
                        let share = b.exp2(sink + offset);
                        b.fma_into(taken, share, minus_sum, taken);
                        b.add_to(row, THREADS);
                    },
                );
                b.add_to(sequence, 1);
            },
        );
        taken
    }
}

/// Adds up the shares of all threads, those of a warp first, and writes the gradient.
fn write(b: &mut Builder, cfg: &Config, args: &Arguments, head: Reg<U32>, taken: Reg<F32>) {
    let of_warp = [16, 8, 4, 2, 1].into_iter().fold(taken, |sum, distance| {
        let other = b.shuffle_xor(sum, distance);
        b.add(sum, other)
    });
    let place = b.shared(WARPS * 4, 16);
    let (thread, lane) = (b.thread(), b.lane());
    let warps = b.shared_at(place);
    let own = warps.plus(b, (thread / 32) * 4);
    b.predicated(lane.eq(0), |b| b.store_shared(own, &[of_warp.into()]));
    b.sync_cta();
    b.if_(thread.eq(0), |b| {
        let to = b.let_(args.to + head.mul_wide(4));
        let start = if cfg.accumulate { b.load_global::<F32, 1>(to)[0] } else { b.var(0.0) };
        let sum = (0..WARPS).fold(b.var(0.0), |sum, warp| {
            let [share] = b.load_shared::<F32, 1>(warps.at(warp * 4));
            b.add(sum, share)
        });
        let sum = b.add(sum, start);
        b.store_global(to, &[sum.into()]);
    });
}
