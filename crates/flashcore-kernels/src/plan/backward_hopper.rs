//! The Hopper kernels of gradients, `backward_sm90`: what they cannot take, and their tiles with the reason beside each
//! row.

use flashcore_core::{BackwardProblem, DType, Layout, Problem, Sequences};
use flashcore_tile::Half;

use super::{
    Gpu, PlanError,
    backward::{Form, Products},
};
use crate::{
    backward_sm90::{Config, Ending, Order, ROWS_PER_GROUP, Shape, counter, heads_at_once},
    backward_sums,
    launch::KernelConfig,
    parts::{elements::half, lengths::LengthsKind, mask::Sides, schedule::Side},
};

/// Most features of a head.
const MOST_FEATURES: usize = 256;
/// The same of packed sequences.
const PACKED_FEATURES: usize = 128;
/// What tensor copies need of addresses and strides, in bytes.
const UNIT: u64 = 16;
/// Keys of a tile of the fused kernel, and queries of a step.
const KEYS: usize = 2 * ROWS_PER_GROUP as usize;
const STEP: usize = 64;
/// Most tiles of a launch.
const MOST_TILES: u64 = i32::MAX as u64;
/// Bytes from which on strides do not fit a tensor map.
const FAR: usize = 1 << 40;

/// The 16-bit float that the kernels multiply where they take the problem, or why they do not.
pub(super) fn accept(problem: &BackwardProblem, gpu: &Gpu, alignment: u64) -> Result<Half, String> {
    let forward = problem.forward();
    let no = |reason: &str| Err(reason.to_owned());
    if gpu.capability != (9, 0) {
        let (major, minor) = gpu.capability;
        return Err(format!("it runs on compute capability 9.0, not {major}.{minor}"));
    }
    let Some(half) = half(forward.dtype()) else {
        return Err(format!("it multiplies f16 and bf16, not {}", forward.dtype()));
    };
    let odd = |dim: usize| !dim.is_multiple_of(8) || dim > MOST_FEATURES;
    if odd(forward.dim_qk()) || odd(forward.dim_v()) {
        return Err(format!("its head dims are multiples of 8 up to {MOST_FEATURES}"));
    }
    if forward.bias().is_some() {
        return no("it adds nothing to scores");
    }
    if forward.dropout().is_some() {
        return no("it leaves out no weights");
    }
    let packed = matches!(forward.sequences_kind(), Sequences::Ragged { .. });
    if packed && forward.dim_qk().max(forward.dim_v()) > PACKED_FEATURES {
        return Err(format!("packed sequences have up to {PACKED_FEATURES} features"));
    }
    if forward.rows() == 0
        || forward.longest_q() == 0
        || forward.longest_kv() == 0
        || forward.sequences() == 0
    {
        return no("tensor maps cannot be empty");
    }
    let tiles = |side: Side| side.tile_count(forward, ROWS_PER_GROUP);
    if tiles(Side::Keys).max(tiles(Side::Queries)) > MOST_TILES {
        return no("tiles are numbered by 31 bits");
    }
    copies(problem, alignment).map(|()| half)
}

/// Whether tensor copies can move all tensors.
fn copies(problem: &BackwardProblem, alignment: u64) -> Result<(), String> {
    let forward = problem.forward();
    let inputs = [forward.q(), forward.k(), forward.v(), problem.d_out()].map(|l| (l, forward.dtype()));
    let gradients = [problem.dq(), problem.dk(), problem.dv()].map(|l| (l, problem.grad_dtype()));
    let strides = |(layout, dtype): (&Layout, DType)| {
        let used = layout.dims().array().into_iter().zip(layout.strides()).take(3);
        let used = used.filter(|&(extent, _)| extent > 1);
        used.map(move |(_, stride)| stride * dtype.bytes()).collect::<Vec<_>>()
    };
    let all: Vec<usize> = inputs.into_iter().chain(gradients).flat_map(strides).collect();
    let bits = all.iter().fold(alignment, |bits, &stride| bits | stride as u64);
    if !bits.is_multiple_of(UNIT) {
        return Err("tensor copies need addresses and strides at multiples of 16 bytes".to_owned());
    }
    if all.into_iter().any(|stride| stride >= FAR) {
        return Err("tensor maps end at strides of 2^40 bytes".to_owned());
    }
    Ok(())
}

/// The kernels of a problem in a form, and why these.
pub(super) fn products(problem: &BackwardProblem, half: Half, form: Form) -> Result<Products, PlanError> {
    let forward = problem.forward();
    let lengths = LengthsKind::of(forward).ok_or(PlanError::Lengths)?;
    let row = row(forward);
    let config = |side: Side, shape: Shape| {
        KernelConfig::BackwardSm90(Config {
            side,
            input: half,
            ending: Ending::of(problem),
            dim_qk: forward.dim_qk() as u32,
            dim_v: forward.dim_v() as u32,
            mask: Sides::of(forward),
            lengths,
            softcap: forward.softcap().is_some(),
            shape,
        })
    };
    let fused = match form {
        _ if !fuses(forward) => None,
        Form::Split | Form::SplitBy(_) => None,
        Form::Fused => row.fused,
        Form::FusedBy(shape) => row.fused.map(|_| shape),
    };
    let Some(fused) = fused else {
        let order = order(forward);
        let [keys, queries] = match form {
            Form::SplitBy(shapes) => shapes,
            _ => row.shapes(forward),
        };
        let of = |side, shape: Shape| config(side, Shape { order, ..shape });
        let kernels = vec![of(Side::Keys, keys), of(Side::Queries, queries)];
        return Ok(Products { workspace: counter(order).into_iter().collect(), kernels, why: row.why });
    };
    let sums = backward_sums::Config {
        input: half,
        ending: Ending::of(problem),
        dim: forward.dim_qk() as u32,
        step: fused.step,
        keys: fused.consumers * ROWS_PER_GROUP,
        packed: lengths.packs_queries(),
    };
    Ok(Products {
        workspace: backward_sums::workspace(&sums, forward).into_iter().chain(counter(fused.order)).collect(),
        kernels: vec![config(Side::Keys, fused), KernelConfig::BackwardSums(sums)],
        why: "five products for each pair of tiles instead of seven",
    })
}

/// Whether the fused kernel takes the problem. Slopes of capped scores need weights of their own, and lengths more registers
/// than there are, as do packed sequences where rows do not fill whole places on their way out.
fn fuses(forward: &Problem) -> bool {
    /// Columns of a place.
    const PLACE: usize = 64;
    let taken = match forward.sequences_kind() {
        Sequences::Uniform => true,
        Sequences::Ragged { .. } => {
            [forward.dim_qk(), forward.dim_v()].iter().all(|dim| dim.is_multiple_of(PLACE))
        }
        _ => false,
    };
    forward.softcap().is_none() && taken
}

/// Queries from which on one kernel is faster than two: what a tile of keys costs at its start and end, and until its dQ is
/// added, counts the less the longer it is used.
const LEAST_QUERIES: usize = 2048;
/// Steps by which a tile of keys stays behind the one before it.
const BEHIND: usize = 2;
/// The share of its work that a CTA may wait for others at the start.
const WAITING: usize = 6;

/// The form that was measured to be faster.
pub(super) fn form(problem: &BackwardProblem, gpu: &Gpu) -> Form {
    let forward = problem.forward();
    let (most, average) = queries(forward);
    let (tiles, heads) = (lengths(forward)[1].div_ceil(KEYS), forward.sequences() * forward.heads_kv());
    // Tiles of a head wait for one another, so that the last of those in flight starts late.
    let at_once = heads_at_once(problem, Side::Keys).max(1) as usize;
    let late = BEHIND * tiles.min(gpu.sms as usize / at_once);
    let pairs = heads.saturating_mul(tiles).saturating_mul(average);
    let steps = pairs / STEP / gpu.sms.max(1) as usize;
    if most >= LEAST_QUERIES && late * WAITING <= steps { Form::Fused } else { Form::Split }
}

/// Queries and keys of the sequences that most of the work is spent on. Of packed ones the host knows how many and how long they
/// are at most; if they differ, long ones count more than in proportion.
fn lengths(forward: &Problem) -> [usize; 2] {
    let typical = |all: usize, longest: usize| longest.min(2 * all.div_ceil(forward.sequences().max(1)));
    match forward.sequences_kind() {
        Sequences::Ragged { .. } => {
            [typical(forward.seq_q(), forward.longest_q()), typical(forward.seq_kv(), forward.longest_kv())]
        }
        _ => [forward.seq_q(), forward.seq_kv()],
    }
}

/// How many queries may see a key, and how many do on average.
fn queries(forward: &Problem) -> (usize, usize) {
    let (all, mask) = (forward.group() * lengths(forward)[0], forward.mask());
    match (mask.left(), mask.right()) {
        (None, None) => (all, all),
        (Some(left), Some(right)) => {
            let seen = all.min(forward.group() * left.saturating_add(right) as usize);
            (seen, seen)
        }
        _ => (all, all / 2),
    }
}

/// Tiles are drawn where they are not equally long.
fn order(forward: &Problem) -> Order {
    let uniform = matches!(forward.sequences_kind(), Sequences::Uniform);
    if !uniform || forward.mask().right().is_some() { Order::Atomic } else { Order::Static }
}

/// The tiles for heads of up to `dim` features.
struct Row {
    dim: usize,
    keys: Shape,
    queries: Shape,
    /// Where there are registers for it.
    fused: Option<Shape>,
    why: &'static str,
}

fn row(forward: &Problem) -> &'static Row {
    let dim = forward.dim_qk().max(forward.dim_v());
    TABLE.iter().find(|row| dim <= row.dim).unwrap_or(&TABLE[TABLE.len() - 1])
}

impl Row {
    /// Shapes of keys and queries. The slope of a cap is a register more for each score, unless gradients leave enough of
    /// them or another consumer makes use of it; where three consumers share registers with a producer that looks for
    /// packed sequences, words that hide what lies before a window are too many. Steps of queries divide what terms are
    /// padded to.
    fn shapes(&self, forward: &Problem) -> [Shape; 2] {
        let (keys, queries) = (self.keys, self.queries);
        let capped = forward.softcap().is_some();
        let packed = matches!(forward.sequences_kind(), Sequences::Ragged { .. });
        let window = packed && forward.mask().left().is_some() && queries.consumers == 3;
        let enough = !capped || self.dim <= 64 || keys.paired;
        let step = if enough { keys.step } else { keys.step / 2 };
        let less = if capped || window { LESS } else { 0 };
        // The consumer that runs ahead has the gradient of values to make: of fewer features, it is ahead anyway. At 192
        // features 515 and 466 TFLOP/s against 465 and 455 without, at 192 and 128 412 to 448 against 465.
        let ahead = keys.ahead && forward.dim_v() >= forward.dim_qk();
        [Shape { step, ahead, ..keys }, Shape { step: queries.step - less, ..queries }]
    }
}

/// Keys that a step has less where there are too few registers.
const LESS: u32 = 16;

/// Registers of producer and consumers, by the number of consumers.
const TWO: [u32; 2] = [24, 240];
const THREE: [u32; 2] = [32, 160];

const fn shape(consumers: u32, step: u32, stages: [u32; 2], places: u32) -> Shape {
    let registers = if consumers == 3 { THREE } else { TWO };
    Shape {
        consumers,
        step,
        stages,
        places,
        registers,
        order: Order::Static,
        mover: None,
        paired: false,
        ahead: false,
    }
}

/// Two consumers for the same 64 keys.
const fn paired(step: u32, stages: [u32; 2]) -> Shape {
    Shape { paired: true, ahead: true, ..shape(2, step, stages, 1) }
}

/// Two consumers and a mover.
const fn fused(step: u32, stages: [u32; 2], [consumer, mover]: [u32; 2]) -> Shape {
    // The writer shares the producer's warpgroup.
    let registers = [32, consumer];
    let (order, mover) = (Order::Drawn, Some(mover));
    Shape { consumers: 2, step, stages, places: 1, registers, order, mover, paired: false, ahead: false }
}

const TABLE: [Row; 4] = [
    Row {
        dim: 64,
        keys: shape(2, 64, [6, 6], 1),
        queries: shape(3, 96, [3, 3], 1),
        fused: Some(fused(128, [2, 2], [208, 64])),
        why: "192 rows are held by three consumers; what streams past is read the less often",
    },
    Row {
        dim: 128,
        keys: shape(2, 64, [4, 4], 1),
        queries: shape(2, 128, [2, 2], 1),
        fused: Some(fused(64, [2, 2], [208, 64])),
        why: "gradients of 128 rows fill the registers of two consumers",
    },
    Row {
        dim: 192,
        keys: paired(64, [3, 2]),
        queries: shape(2, 96, [2, 1], 1),
        fused: None,
        why: "gradients of 64 keys and of their values fill the registers of a consumer each",
    },
    Row {
        dim: 256,
        keys: paired(64, [2, 2]),
        queries: shape(2, 64, [2, 1], 0),
        fused: None,
        why: "gradients of 64 keys and of their values fill the registers of a consumer each",
    },
];
