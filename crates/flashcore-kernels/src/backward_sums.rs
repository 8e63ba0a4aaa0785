//! The end of dQ where it was summed in memory: sums become gradients, and zero again.
//!
//! Sums lie as the kernel has them in registers: blocks of 64 rows; in each, for every 8 columns, four values of each of 128
//! threads. Four neighbouring threads have 8 columns of two rows between them: 64 bytes, which one thread reads here. It reads
//! those of 16 columns, a whole sector of each row when they are rounded. A CTA has a block to itself, and overwrites it with
//! zeros from one end to the other once all of it has been read.

use flashcore_core::{BackwardProblem, Problem, Sequences};
use flashcore_ptx::{ident::Ident, launch::Workspace, sm::REGISTERS, target::Target};
use flashcore_tile::{
    B32, BuildError, Builder, Cta, Extent, F32, Global, Half, Params, Pred, Program, Reg, Scope, U32, U64,
    Val, Warp,
};

use crate::{
    backward_sm90::{Ending, packed},
    parts::{
        lengths::{LengthArguments, LengthsKind, Span},
        schedule::Side,
        tensor::TensorArgument,
    },
    slots::backward as slots,
};

/// Bytes of the sums of 8 columns of 64 rows.
pub(crate) const QUAD_BYTES: u32 = 128 * 16;
/// Rows of a block.
const ROWS: u32 = 64;
/// Threads of a CTA; a lane of each warp has one of 32 pairs of rows.
const THREADS: u32 = 128;
/// Its warps.
const WARPS: u32 = 4;
/// Quads of 8 columns that a thread reads at once.
const AT_ONCE: u32 = 2;
/// CTAs that share an SM.
const CTAS_PER_SM: u32 = 8;

/// A kernel of this family: two configs that are equal give the same text.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub struct Config {
    /// The tensors' type.
    pub input: Half,
    /// What becomes of sums.
    pub ending: Ending,
    /// Features of queries: a multiple of 8.
    pub dim: u32,
    /// Rows to whose multiple those of a head are padded: a multiple of 64.
    pub step: u32,
    /// Keys of a tile.
    pub keys: u32,
    /// Whether sequences are packed one after another, each with blocks of its own.
    pub packed: bool,
}

impl Config {
    /// The kernel's name: every field of the config is in it.
    pub fn name(&self) -> Ident {
        let name = format!(
            "fc_backward_sums_{}_d{}m{}n{}{}{}",
            self.input.element().name(),
            self.dim,
            self.step,
            self.keys,
            if self.packed { "_ragged" } else { "" },
            self.ending.suffix()
        );
        Ident::new(name).expect("made of legal parts")
    }

    /// Most registers of a thread.
    pub const fn registers(&self) -> u32 {
        REGISTERS / (CTAS_PER_SM * THREADS) / 8 * 8
    }

    const fn quads(&self) -> u32 {
        self.dim / 8
    }
}

/// Blocks of 64 rows of a head.
fn blocks(problem: &Problem, step: u32) -> u64 {
    if is_packed(problem) {
        return packed::sums(problem, step) * u64::from(step / ROWS);
    }
    (problem.seq_q() as u64).next_multiple_of(step.into()) / u64::from(ROWS)
}

/// Blocks of all heads.
pub(crate) fn all_blocks(problem: &Problem, step: u32) -> u64 {
    blocks(problem, step) * problem.heads_q() as u64 * problem.batch() as u64
}

fn is_packed(problem: &Problem) -> bool {
    matches!(problem.sequences_kind(), Sequences::Ragged { .. })
}

/// Numbers of tiles of keys of all heads. Offsets that say more than the host knows of are cut off inside a packed sequence,
/// whose tiles are numbered head by head and taken in another order: so the numbers of one sequence come on top.
fn tiles(problem: &Problem, keys: u32) -> u64 {
    let (heads, longest) = (problem.heads_kv() as u64, (problem.longest_kv() as u64).div_ceil(keys.into()));
    if is_packed(problem) {
        return packed::tiles(problem, Side::Keys, keys) + longest * heads;
    }
    longest * heads * problem.batch() as u64
}

/// The workspace that holds the sums, and that in which tiles of keys tell how far they are.
pub(crate) fn workspace(cfg: &Config, problem: &Problem) -> [Workspace; 2] {
    let bytes = all_blocks(problem, cfg.step) * u64::from(cfg.quads() * QUAD_BYTES);
    let turns = 4 * tiles(problem, cfg.keys);
    [(slots::DQ_SUMS, bytes), (slots::TURNS, turns)].map(|(slot, bytes)| Workspace {
        slot,
        bytes,
        zeroed: true,
    })
}

/// The launch that computes `problem`; there are fewer than 2³¹ CTAs.
pub fn extent(cfg: &Config, problem: &BackwardProblem, workspace: &[Workspace]) -> Extent {
    let forward = problem.forward();
    let turns = tiles(forward, cfg.keys).div_ceil(THREADS.into());
    let ctas = all_blocks(forward, cfg.step).max(turns) as u32;
    Extent { grid: [ctas, 1, 1], workspace: workspace.to_vec(), dependent: true }
}

/// Builds the kernel.
pub fn backward_sums(cfg: &Config) -> Result<Program<BackwardProblem>, BuildError> {
    let name = cfg.name();
    let mut b = Builder::new(Target::Sm90a, &name, THREADS, CTAS_PER_SM);
    let mut params = Params::default();
    let args = Arguments::declare(&mut b, &mut params, cfg);
    b.launch_dependents();
    b.wait_for_predecessor();
    args.block(&mut b, cfg);
    b.finish(&name, params)
}

/// What the host passes, as registers.
struct Arguments {
    sums: Reg<U64>,
    turns: Reg<U64>,
    tiles: Reg<U32>,
    dq: TensorArgument,
    heads: Reg<U32>,
    /// Blocks of a head, and of all.
    blocks: Reg<U32>,
    all_blocks: Reg<U32>,
    seq: Reg<U32>,
    /// The factor on scores.
    factor: Reg<F32>,
    /// Where packed sequences lie, and how many there are.
    packed: Option<(LengthArguments, Reg<U32>)>,
}

/// Where a packed sequence lies.
#[derive(Clone, Copy)]
struct Home {
    /// Its first row among those of a head's blocks.
    first: Reg<U32>,
    span: Span,
}

/// Eight columns of a row.
type Row = [Reg<F32>; 8];

impl Arguments {
    fn declare(b: &mut Builder, params: &mut Params<BackwardProblem>, cfg: &Config) -> Self {
        let Config { step, keys, .. } = *cfg;
        Self {
            sums: params.buffer(b, "sums", slots::DQ_SUMS),
            turns: params.buffer(b, "turns", slots::TURNS),
            tiles: params.u32(b, "tiles", move |p| tiles(p.forward(), keys) as u32),
            dq: TensorArgument::declare(b, params, "dq", slots::DQ, |p| (p.dq(), p.grad_dtype())),
            heads: params.u32(b, "heads", |p| p.forward().heads_q() as u32),
            blocks: params.u32(b, "blocks", move |p| blocks(p.forward(), step) as u32),
            all_blocks: params.u32(b, "all_blocks", move |p| all_blocks(p.forward(), step) as u32),
            seq: params.u32(b, "seq", |p| p.forward().seq_q() as u32),
            factor: params.f32(b, "factor", |p| p.forward().scale()),
            packed: None,
        }
        .with_offsets(b, params, cfg)
    }

    /// The same with what packed sequences need.
    fn with_offsets(self, b: &mut Builder, params: &mut Params<BackwardProblem>, cfg: &Config) -> Self {
        let packed = cfg.packed.then(|| {
            let keys = params.u32(b, "seq_kv", |p| p.forward().seq_kv() as u32);
            let lengths = LengthArguments::declare(b, params, LengthsKind::Ragged, [self.seq, keys]);
            (lengths, params.u32(b, "sequences", |p| p.forward().sequences() as u32))
        });
        Self { packed, ..self }
    }

    /// Whether row `row` among those of a head's blocks exists, and which row of the tensor it is.
    fn place(&self, b: &mut Builder, home: Option<Home>, row: Reg<U32>) -> (Pred, Reg<U32>) {
        match home {
            None => (b.let_(row.lt(self.seq)), row),
            // Before the first row of the sequence the difference is larger than any length.
            Some(Home { first, span }) => {
                let position = b.let_(row - first);
                (b.let_(position.lt(span.len)), b.let_(span.start + position))
            }
        }
    }

    /// The packed sequence to which the block from row `row` of a head's blocks on belongs: the last that begins no later.
    fn home(&self, b: &mut Builder, cfg: &Config, row: Reg<U32>) -> Option<Home> {
        let (lengths, sequences) = self.packed?;
        let (lane, last) = (b.lane(), b.let_(sequences - 1));
        let found = b.var_in(Scope::Warp, 0);
        b.do_while(|b| {
            let index = b.let_(found + lane);
            let clamped = b.let_(index.min(last));
            let first = self.first_row(b, cfg, lengths, clamped);
            let begins = b.let_(first.le(row) & index.le(last));
            let one = b.select(begins, 1, 0);
            let all = b.warp_sum(one);
            b.add_to(found, all);
            b.uniform::<Warp>(all.eq(32))
        });
        // The one after it was counted too.
        let index = b.let_(found.max(1) - 1);
        let [span, _] = lengths.sequence(b, index);
        Some(Home { first: self.first_row(b, cfg, lengths, index), span })
    }

    /// The first row of a sequence among those of a head's blocks.
    fn first_row(
        &self,
        b: &mut Builder,
        cfg: &Config,
        lengths: LengthArguments,
        sequence: Reg<U32>,
    ) -> Reg<U32> {
        let [queries, _] = lengths.sequence(b, sequence);
        let tile = packed::first_sums(b, queries.start, sequence, cfg.step);
        b.let_(tile * cfg.step)
    }

    /// The rows of one block, by one CTA.
    fn block(&self, b: &mut Builder, cfg: &Config) {
        let (thread, block) = (b.thread(), b.cta());
        let index = b.let_(block * THREADS + thread);
        let turn = b.let_(self.turns + index.mul_wide(4));
        b.predicated(index.lt(self.tiles), |b| b.store_global::<U32>(turn, &[Val::Const(0)]));
        let there = b.uniform::<Cta>(block.lt(self.all_blocks));
        b.if_uniform(there, |b| {
            let sums = b.let_(self.sums + block.mul_wide(cfg.quads() * QUAD_BYTES));
            let pair = b.lane();
            let (plane, first) = (b.let_(block / self.blocks), b.let_((block % self.blocks) * ROWS));
            let (batch, head) = (b.let_(plane / self.heads), b.let_(plane % self.heads));
            let home = self.home(b, cfg, first);
            let row = b.let_((pair >> 3) * 16 + (pair & 7) + first);
            let rows = [0, 8].map(|further| {
                let row = b.let_(row + further);
                let (exists, row) = self.place(b, home, row);
                (exists, self.dq.at(b, batch, head, row))
            });
            for turn in 0..cfg.quads().div_ceil(AT_ONCE * WARPS) {
                self.columns(b, cfg, sums, turn, rows);
            }
            b.sync_cta();
            let mine = b.let_(sums + thread.mul_wide(16));
            for quad in 0..cfg.quads() {
                let at = Global::from(mine).at((quad * QUAD_BYTES) as i32);
                b.store_global::<F32>(at, &[Val::Const(0.0); 4]);
            }
        });
    }

    /// Neighbouring columns of two rows, by one thread.
    fn columns(&self, b: &mut Builder, cfg: &Config, sums: Reg<U64>, turn: u32, rows: [(Pred, Reg<U64>); 2]) {
        let (warp, pair) = (b.warp(), b.lane());
        let first = b.let_((warp + turn * WARPS) * AT_ONCE);
        let quads: [_; AT_ONCE as usize] = std::array::from_fn(|n| {
            let quad = b.let_(first + n as u32);
            let there = b.let_(quad.lt(cfg.quads()));
            let within = b.let_(quad * QUAD_BYTES + pair * 64);
            let from = b.let_(sums + within.widen());
            (quad, there, self.read(b, there, from))
        });
        for (quad, there, values) in quads {
            for (values, (exists, at)) in values.into_iter().zip(rows) {
                let column = b.let_(quad * (8 * self.bytes(cfg)));
                let to = b.let_(at + column.widen());
                let exists = b.let_(exists & there);
                self.write(b, cfg, exists, to, values);
            }
        }
    }

    const fn bytes(&self, cfg: &Config) -> u32 {
        match cfg.ending {
            Ending::Rounded => 2,
            Ending::Wide | Ending::Added => 4,
        }
    }

    /// Reads eight columns of both rows.
    fn read(&self, b: &mut Builder, there: Pred, from: Reg<U64>) -> [Row; 2] {
        let values: [[Reg<F32>; 4]; 4] = std::array::from_fn(|n| {
            let four = [(); 4].map(|()| b.var_in(Scope::Lane, 0.0));
            b.predicated(there, |b| b.load_global_into(four, Global::from(from).at(16 * n as i32)));
            four
        });
        [0, 1].map(|row| std::array::from_fn(|column| values[column / 2][2 * row + column % 2]))
    }

    fn write(&self, b: &mut Builder, cfg: &Config, exists: Pred, to: Reg<U64>, values: Row) {
        let scaled = values.map(|value| b.mul(value, self.factor));
        if cfg.ending == Ending::Rounded {
            let words: [Reg<B32>; 4] =
                std::array::from_fn(|n| b.pack(cfg.input, scaled[2 * n], scaled[2 * n + 1]));
            return b.predicated(exists, |b| b.store_global(to, &words.map(Val::from)));
        }
        for (n, four) in (0..).zip(scaled.chunks_exact(4)) {
            let to = Global::from(to).at(16 * n);
            b.if_(exists, |b| {
                let old = match cfg.ending {
                    Ending::Added => b.load_global::<F32, 4>(to),
                    _ => [(); 4].map(|()| b.var(0.0)),
                };
                let sums: [Val<F32>; 4] = std::array::from_fn(|i| b.add(old[i], four[i]).into());
                b.store_global(to, &sums);
            });
        }
    }
}
