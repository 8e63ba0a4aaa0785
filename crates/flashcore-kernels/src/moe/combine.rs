//! Adds up a token's results, each times its weight, in the order of its experts.
//!
//! A thread handles eight neighbouring features of one token, and sums in f32.

use flashcore_core::DType;
use flashcore_ptx::{ident::Ident, target::Target};
use flashcore_tile::{BuildError, Builder, Extent, F32, Half, Params, Program, Reg, Scope, U32, U64, Val};

use super::{IdSource, Layer, NONE, Source, ids::IdArgument, overlaps, sort::IndexArgument};
use crate::slots::moe as slots;

/// Threads of a CTA.
const THREADS: u32 = 128;
/// Features of a thread: 16 bytes of 16-bit elements.
const WIDTH: u32 = 8;

/// A kernel of this family.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub struct Config {
    /// The architecture it is built for.
    pub target: Target,
    /// Element type of results and output.
    pub half: Half,
    /// Where the numbers of experts are.
    pub ids: IdSource,
    /// Element type of the weights; f32 where they are computed.
    pub weights: DType,
    /// Where rows come from.
    pub source: Source,
    /// Experts of a token.
    pub top_k: u32,
    /// Whether a shared expert's results are added.
    pub shared: bool,
}

impl Config {
    /// The kernel's name: every field of the config is in it.
    pub fn name(&self) -> Ident {
        let Self { target, half, ids, weights, source, top_k, shared } = self;
        let (half, source) = (half.element().name(), source.name());
        let shared = if *shared { "_shared" } else { "" };
        let name =
            format!("fc_moe_combine_{target}_{half}_{}_{weights}_{source}_k{top_k}{shared}", ids.name());
        Ident::new(name).expect("made of legal parts")
    }
}

/// The launch for a layer; `None` where there are no tokens.
pub fn extent(cfg: &Config, layer: &Layer) -> Option<Extent> {
    let problem = &layer.problem;
    let columns = (problem.hidden() as u32).div_ceil(WIDTH * THREADS);
    let (grid, workspace) = ([problem.tokens() as u32, columns, 1], layer.workspace.clone());
    (problem.tokens() > 0).then(|| Extent { grid, workspace, dependent: overlaps(cfg.target) })
}

/// What the host passes, as registers.
struct Arguments {
    ids: IdArgument,
    index: IndexArgument,
    weights: Reg<U64>,
    results: Reg<U64>,
    /// Results of the shared expert, a row for each token.
    shared: Option<Reg<U64>>,
    /// Bytes between rows of results.
    row: Reg<U64>,
    out: Reg<U64>,
    out_row: Reg<U64>,
    hidden: Reg<U32>,
    tile_m: Reg<U32>,
}

impl Arguments {
    fn declare(b: &mut Builder, params: &mut Params<Layer>, cfg: &Config) -> Self {
        let chosen = cfg.ids == IdSource::Chosen;
        let weights = if chosen { slots::CHOSEN_WEIGHTS } else { slots::WEIGHTS };
        Self {
            ids: IdArgument::declare(b, params, cfg.ids),
            index: IndexArgument::declare(b, params),
            weights: params.buffer(b, "weights", weights),
            results: params.buffer(b, "results", slots::RESULTS),
            shared: cfg.shared.then(|| params.buffer(b, "shared", slots::SHARED_RESULTS)),
            row: params.u64(b, "result_row", |layer| 2 * layer.problem.hidden() as u64),
            out: params.buffer(b, "out", slots::OUT),
            out_row: params.u64(b, "out_row", |layer| 2 * layer.problem.out().strides()[2] as u64),
            hidden: params.u32(b, "hidden", |layer| layer.problem.hidden() as u32),
            tile_m: params.u32(b, "tile_m", |layer| layer.tile_m),
        }
    }

    /// The row of an entry's results; [`NONE`] where there is none.
    fn row_of(&self, b: &mut Builder, cfg: &Config, entry: Reg<U32>) -> Reg<U32> {
        match cfg.source {
            Source::Sorted => {
                let at = b.let_(self.index.rows + entry.mul_wide(4));
                b.load_global::<U32, 1>(at)[0]
            }
            Source::Pairs | Source::All => {
                let expert = self.ids.local(b, entry, None);
                b.let_(expert.eq(NONE).select(NONE, entry * self.tile_m))
            }
        }
    }

    fn weight_of(&self, b: &mut Builder, cfg: &Config, entry: Reg<U32>) -> Reg<F32> {
        let at = b.let_(self.weights + entry.mul_wide(cfg.weights.bytes() as u32));
        match cfg.weights {
            DType::F16 | DType::BF16 => {
                let half = if cfg.weights == DType::F16 { Half::F16 } else { Half::Bf16 };
                let word = b.load_global_16(at);
                b.unpack(half, word)[0]
            }
            _ => b.load_global::<F32, 1>(at)[0],
        }
    }
}

/// Builds the kernel.
pub fn combine(cfg: &Config) -> Result<Program<Layer>, BuildError> {
    let name = cfg.name();
    let mut b = Builder::new(cfg.target, &name, THREADS, 4);
    let mut params = Params::default();
    let args = Arguments::declare(&mut b, &mut params, cfg);
    let ([token, block, _], thread) = (b.cta_xyz(), b.thread());
    let column = b.let_((block * THREADS + thread) * WIDTH);
    if overlaps(cfg.target) {
        b.wait_for_predecessor();
        b.launch_dependents();
    }
    let first = b.let_(token * cfg.top_k);
    let entries: Vec<_> = (0..cfg.top_k).map(|slot| b.let_(first + slot)).collect();
    let rows: Vec<_> = entries.iter().map(|&entry| args.row_of(&mut b, cfg, entry)).collect();
    let weights: Vec<_> = entries.iter().map(|&entry| args.weight_of(&mut b, cfg, entry)).collect();
    b.if_(column.lt(args.hidden), |b| add_up(b, cfg, &args, (token, column), &rows, &weights));
    b.finish(&name, params)
}

/// The sums of a thread's features.
fn add_up(
    b: &mut Builder,
    cfg: &Config,
    args: &Arguments,
    (token, column): (Reg<U32>, Reg<U32>),
    rows: &[Reg<U32>],
    weights: &[Reg<F32>],
) {
    let from = b.let_(args.results + column.mul_wide(2));
    let sums = match args.shared {
        None => (0..WIDTH).map(|_| b.var_in(Scope::Lane, 0.0)).collect::<Vec<Reg<F32>>>(),
        Some(shared) => {
            let at = b.let_(token.widen() * args.row + shared);
            let at = b.let_(at + column.mul_wide(2));
            let words = b.load_global::<U32, 4>(at);
            let values: Vec<_> = words.into_iter().flat_map(|word| b.unpack(cfg.half, word)).collect();
            values.into_iter().map(|value| b.var_in(Scope::Lane, value)).collect()
        }
    };
    for (rows, weights) in rows.chunks(8).zip(weights.chunks(8)) {
        // All reads of a few experts before the first sum: memory is slow to answer.
        let read = |&row: &Reg<U32>| {
            let words: [Reg<U32>; 4] = std::array::from_fn(|_| b.var_in(Scope::Lane, 0u32));
            let at = b.let_(row.widen() * args.row + from);
            b.predicated(row.ne(NONE), |b| b.load_global_into(words, at));
            words
        };
        let words: Vec<_> = rows.iter().map(read).collect();
        for ((&row, &weight), words) in rows.iter().zip(weights).zip(words) {
            // An expert that is elsewhere adds nothing, whatever its weight.
            let weight = b.let_(row.eq(NONE).select(0.0, weight));
            let values = words.into_iter().flat_map(|word| b.unpack(cfg.half, word)).collect::<Vec<_>>();
            for (&sum, value) in sums.iter().zip(values) {
                b.fma_into(sum, value, weight, sum);
            }
        }
    }
    let words: Vec<Val<_>> =
        sums.chunks_exact(2).map(|pair| b.pack(cfg.half, pair[0], pair[1]).into()).collect();
    let to = b.let_(token.widen() * args.out_row + args.out);
    let to = b.let_(to + column.mul_wide(2));
    b.store_global(to, &words);
}
