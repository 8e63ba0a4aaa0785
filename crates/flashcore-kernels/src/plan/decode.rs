//! The kernel for few queries over many keys, `decode`: what it refuses, and its tiles with the reason beside each row.

use flashcore_core::Problem;
use flashcore_ptx::sm::Sm;
use flashcore_tile::{Element, Half, MMA_M};

use super::Gpu;
use crate::{
    decode::{
        Copies, MOST_SEQUENCES, Order, Shape, exchange_bytes, most_messages, nanoseconds, room, row_tiles,
        rows,
    },
    forward_sm80::Access,
    launch::KernelConfig,
    parts::share::most_short_rows,
};

/// Most features of a head: the output of more does not fit in the registers of a warp.
const MOST_FEATURES: usize = 256;
/// Most sequences, and most heads: what the grid can number along an axis.
const MOST_NUMBERED: usize = 65_535;
const ROWS: usize = MMA_M as usize;

/// What the kernel multiplies for a problem of `input`s, or why it cannot take the problem.
pub(super) fn accept(problem: &Problem, input: Element, gpu: &Gpu, access: Access) -> Result<Half, String> {
    let most = most_short_rows(problem);
    if rows(problem) > most {
        return Err(format!("it takes up to {most} queries × heads per key head, not {}", rows(problem)));
    }
    accept_rows_apart(problem, input, gpu, access)
}

/// Like [`accept`], whatever the number of queries.
pub(super) fn accept_rows_apart(
    problem: &Problem,
    input: Element,
    gpu: &Gpu,
    access: Access,
) -> Result<Half, String> {
    let no = |reason: &str| Err(reason.to_owned());
    if gpu.capability < (8, 0) {
        return no("it needs compute capability 8.0 or later");
    }
    let Some(half) = input.half() else {
        return Err(format!("it supports f16 and bf16, not {}", input.name()));
    };
    let dims = [problem.dim_qk(), problem.dim_v()];
    // Copies move 16 bytes.
    let unit = 16 / stored(problem).bytes() as usize;
    if dims.into_iter().any(|dim| !dim.is_multiple_of(unit) || dim > MOST_FEATURES) {
        return Err(format!("its head dims are multiples of {unit} up to {MOST_FEATURES}"));
    }
    if access != Access::B16 {
        return no("its copies need addresses and strides at multiples of 16 bytes");
    }
    if problem.bias().is_some() {
        return no("it does not support biases");
    }
    if problem.dropout().is_some() {
        return no("it does not support dropout");
    }
    if problem.accumulate() {
        return no("it does not accumulate into its output");
    }
    if problem.sequences().max(problem.heads_kv()) > MOST_NUMBERED {
        return Err(format!("its grid covers up to {MOST_NUMBERED} sequences and heads"));
    }
    let some =
        if problem.batch_invariant() { fixed(problem, gpu).is_some() } else { find(problem, gpu).is_some() };
    if !some {
        return no("none of its tiles fit in shared memory");
    }
    Ok(half)
}

/// The tile for a problem that is accepted, and why.
pub(super) fn shape(problem: &Problem, gpu: &Gpu) -> (Shape, &'static str) {
    shape_for(problem, gpu, rows(problem))
}

/// The same where tiles have so many rows.
pub(super) fn shape_for(problem: &Problem, gpu: &Gpu, rows: usize) -> (Shape, &'static str) {
    let blocks = rows.div_ceil(ROWS).max(1) as u32;
    if let (true, Some(shape)) = (problem.batch_invariant(), fixed(problem, gpu)) {
        let why =
            "few queries, split at fixed keys: each warp streams its own keys and restarts at every split";
        return (with_stages(problem, gpu, Shape { blocks, ..shape }), why);
    }
    let table = table(problem);
    let row = find(problem, gpu).unwrap_or(&table[table.len() - 1]);
    // Two blocks of a wide output leave no registers for queries.
    let q_in_registers = row.shape.q_in_registers && blocks == 1;
    (Shape { blocks, q_in_registers, ..row.shape }, row.why)
}

/// The warps and tiles of a problem whose bits must not depend on the batch: they follow from features and GPU alone.
fn fixed(problem: &Problem, gpu: &Gpu) -> Option<Shape> {
    let dims = [problem.dim_qk() as u32, problem.dim_v() as u32];
    let table = if problem.kv_dtype().is_narrow() { FIXED_NARROW } else { FIXED };
    // The most rows there may be, whatever the problem has: those of others must not decide.
    let rows = most_short_rows(problem);
    let suits = |stages: u32| {
        move |(dim, shape): &&(u32, Shape)| {
            let most = Shape { stages, blocks: rows.div_ceil(ROWS) as u32, ..*shape };
            dims.into_iter().all(|of| of <= *dim) && fits_folded(problem, gpu, &most, rows)
        }
    };
    [2, 1].into_iter().find_map(|stages| table.iter().find(suits(stages))).map(|(_, shape)| *shape)
}

/// As many stages as there is room for, up to those of the table: they decide nothing but how soon keys are there.
fn with_stages(problem: &Problem, gpu: &Gpu, shape: Shape) -> Shape {
    let with = |stages: u32| Shape { stages, ..shape };
    let rows = rows(problem).min(most_short_rows(problem));
    let some = (1..=shape.stages).rev().map(with).find(|shape| fits_folded(problem, gpu, shape, rows));
    let some = some.unwrap_or(with(1));
    Shape { q_in_registers: some.q_in_registers && some.blocks == 1, ..some }
}

/// Whether a shape fits together with pieces of so many rows that meet and are folded.
fn fits_folded(problem: &Problem, gpu: &Gpu, shape: &Shape, rows: usize) -> bool {
    let dims = [problem.dim_qk() as u32, problem.dim_v() as u32];
    let rows = (shape.blocks * MMA_M).min(room_for(rows));
    let [met, folded] = shape.fold_bytes(rows, dims[1]);
    all_fit(shape.ctas_per_sm, shape.shared_bytes(dims, stored(problem)) + met + folded, gpu)
}

/// Other ways to cut a problem on a Hopper, beside `shape`: as wide CTAs, in clusters, or evenly. Where bits must not depend
/// on the batch, CTAs of one kind share a row in all these ways.
pub(super) fn others(problem: &Problem, gpu: &Gpu, shape: Shape) -> Vec<(Shape, &'static str)> {
    if gpu.capability != (9, 0) {
        return Vec::new();
    }
    let wide = Shape { warps: 2 * shape.warps, ctas_per_sm: 1, ..shape };
    let wide = (shape.ctas_per_sm == 2 && wide.warps <= 8 && !problem.batch_invariant()).then_some(wide);
    // Keys of a tile in many pages are found sooner where another CTA works meanwhile.
    let wide = wide.filter(|wide| problem.page_size().is_none_or(|size| size >= wide.tile_n as usize));
    let mut found = Vec::new();
    for cut in wide.into_iter().chain([shape]) {
        let mut add = |order, why| found.push((Shape { order, ..cut }, why));
        add(Order::Grid, "few queries: the keys of a row are split between CTAs");
        let narrow_enough = problem.pages().is_none() || cut == shape;
        if narrow_enough && problem.sequences() <= MOST_SEQUENCES as usize {
            add(Order::Even, "few queries: keys are split so that all CTAs have equal work");
        }
        let turns = problem.longest_kv().div_ceil((cut.warps * cut.tile_n) as usize);
        for parts in [2, 4, 8].into_iter().filter(|&parts| turns >= parts as usize) {
            let order = Order::Cluster { parts };
            // Where there are more than fit at once, others wait for all CTAs of a cluster.
            if row_tiles(problem) * parts as usize <= room(order, gpu.sms) as usize {
                add(
                    order,
                    "few queries: the CTAs of a cluster split a row's keys and merge in shared memory",
                );
            }
        }
    }
    found.into_iter().filter_map(|(shape, why)| Some((with_room(problem, gpu, shape)?, why))).collect()
}

/// A shape that fits, together with what a cluster exchanges. Pieces of a row take so much room there that it may leave less
/// for the ring: at (8, 32, 8, 4096), two stages in a cluster take 32.7 µs, and three without one 36.0; for four queries over
/// (8, 32, 8, 8192) one stage takes 65.6 µs, and two without a cluster 72.4.
fn with_room(problem: &Problem, gpu: &Gpu, shape: Shape) -> Option<Shape> {
    let dims = [problem.dim_qk() as u32, problem.dim_v() as u32];
    let least = if problem.batch_invariant() { 1 } else { shape.stages };
    let with = |stages: u32| Shape { stages, ..shape };
    (least..=shape.stages).rev().map(with).find(|shape| fits_cluster(problem, shape, dims, gpu))
}

/// Nanoseconds that a config takes, about.
pub(super) fn cost(problem: &Problem, gpu: &Gpu, config: &KernelConfig) -> f64 {
    match config {
        KernelConfig::Decode(cfg) => nanoseconds(cfg, problem, gpu.sms),
        _ => f64::INFINITY,
    }
}

/// Whether as many CTAs as a shape counts on fit on an SM.
fn fits(shape: &Shape, dims: [u32; 2], stored: Element, gpu: &Gpu) -> bool {
    all_fit(shape.ctas_per_sm, shape.shared_bytes(dims, stored), gpu)
}

/// The same of a cluster, with room for what its CTAs exchange, and of pieces.
fn fits_cluster(problem: &Problem, shape: &Shape, dims: [u32; 2], gpu: &Gpu) -> bool {
    let rows = rows_of(problem, shape);
    let exchange = match shape.order {
        Order::Cluster { parts } => exchange_bytes(rows * dims[1], parts, messages(problem, shape)),
        _ => 0,
    };
    let folded = if problem.batch_invariant() { shape.fold_bytes(rows, dims[1]) } else { [0, 0] };
    let bytes = shape.shared_bytes(dims, stored(problem)) + folded.into_iter().sum::<u32>() + exchange;
    all_fit(shape.ctas_per_sm, bytes, gpu)
}

fn all_fit(ctas: u32, bytes: u32, gpu: &Gpu) -> bool {
    let reserved = Sm::of(gpu.capability).reserved;
    ctas * (bytes + reserved) <= gpu.shared_bytes + reserved
}

/// Rows that a cluster or a fold has room for; 0 where there is neither.
pub(super) fn rows_of(problem: &Problem, shape: &Shape) -> u32 {
    match shape.order {
        Order::Cluster { .. } => room_for(rows(problem)),
        _ if problem.batch_invariant() => room_for(rows(problem)).min(shape.blocks * MMA_M),
        _ => 0,
    }
}

fn room_for(rows: usize) -> u32 {
    rows.max(1).next_power_of_two() as u32
}

/// Parts of a row that a cluster has room for.
pub(super) fn messages(problem: &Problem, shape: &Shape) -> u32 {
    match shape.order {
        Order::Cluster { parts } if problem.batch_invariant() => most_messages(problem, parts),
        Order::Cluster { parts } => parts,
        _ => 0,
    }
}

fn find(problem: &Problem, gpu: &Gpu) -> Option<&'static Row> {
    let (dims, stored) = ([problem.dim_qk() as u32, problem.dim_v() as u32], stored(problem));
    let suits = |row: &&Row| dims.into_iter().all(|dim| dim <= row.dim) && row.fits(dims, stored, gpu);
    table(problem).iter().find(suits)
}

/// Element type of keys and values: 8 bits, or 16, whichever those are.
fn stored(problem: &Problem) -> Element {
    if problem.kv_dtype().is_narrow() { Element::E4m3 } else { Element::F16 }
}

fn table(problem: &Problem) -> &'static [Row] {
    if problem.kv_dtype().is_narrow() { NARROW } else { TABLE }
}

/// Up to this dim, this tile.
struct Row {
    dim: u32,
    shape: Shape,
    why: &'static str,
}

impl Row {
    /// Whether as many CTAs as the row counts on fit on an SM, with as many rows as there may be.
    fn fits(&self, dims: [u32; 2], stored: Element, gpu: &Gpu) -> bool {
        fits(&Shape { blocks: 2, ..self.shape }, dims, stored, gpu)
    }
}

const fn tile([warps, tile_n, stages]: [u32; 3], ctas_per_sm: u32) -> Shape {
    Shape {
        warps,
        blocks: 1,
        tile_n,
        stages,
        ctas_per_sm,
        q_in_registers: true,
        copies: Copies::Lanes,
        order: Order::Grid,
        splits: None,
    }
}

/// Tiles, narrowest heads first; of the rows for a head dim, the first whose CTAs fit on an SM is taken.
const TABLE: &[Row] = &[
    Row {
        dim: 64,
        shape: tile([4, 32, 3], 2),
        why: "few queries: each warp streams its own keys, 192 KiB in flight per SM",
    },
    Row {
        dim: 64,
        shape: tile([4, 16, 2], 2),
        why: "few queries: as many keys in flight as shared memory holds",
    },
    Row {
        dim: 128,
        shape: tile([4, 16, 3], 2),
        why: "few queries: each warp streams its own keys, 192 KiB in flight per SM",
    },
    Row {
        dim: 128,
        shape: tile([4, 16, 2], 2),
        why: "few queries: as many keys in flight as shared memory holds",
    },
    Row {
        dim: 128,
        shape: tile([4, 16, 2], 1),
        why: "few queries: as many keys in flight as shared memory holds",
    },
    Row {
        dim: 256,
        shape: Shape { q_in_registers: false, ..tile([4, 16, 3], 1) },
        why: "few queries: the output takes half of the registers; one CTA fills shared memory",
    },
    Row {
        dim: 256,
        shape: Shape { q_in_registers: false, ..tile([4, 16, 2], 1) },
        why: "few queries: as many keys in flight as shared memory holds",
    },
    Row {
        dim: 256,
        shape: Shape { q_in_registers: false, ..tile([2, 16, 2], 1) },
        why: "few queries: as many keys in flight as a small shared memory holds",
    },
];

/// The same for keys and values of 8 bits: twice as many keys are in flight in as many bytes.
const NARROW: &[Row] = &[
    Row {
        dim: 64,
        shape: tile([4, 32, 6], 2),
        why: "few queries over 8 bits: each warp streams its own keys, 192 KiB in flight per SM",
    },
    Row {
        dim: 64,
        shape: tile([4, 32, 4], 2),
        why: "few queries over 8 bits: as many keys in flight as shared memory holds",
    },
    Row {
        dim: 64,
        shape: tile([4, 32, 2], 2),
        why: "few queries over 8 bits: as many keys in flight as a small shared memory holds",
    },
    Row {
        dim: 128,
        shape: tile([4, 32, 3], 2),
        why: "few queries over 8 bits: each warp streams its own keys, 192 KiB in flight per SM",
    },
    Row {
        dim: 128,
        shape: tile([4, 32, 2], 2),
        why: "few queries over 8 bits: as many keys in flight as shared memory holds",
    },
    Row {
        dim: 128,
        shape: tile([4, 32, 2], 1),
        why: "few queries over 8 bits: as many keys in flight as a small shared memory holds",
    },
    Row {
        dim: 256,
        shape: Shape { q_in_registers: false, ..tile([4, 32, 3], 1) },
        why: "few queries over 8 bits: the output takes half of the registers; one CTA fills shared memory",
    },
    Row {
        dim: 256,
        shape: Shape { q_in_registers: false, ..tile([4, 32, 2], 1) },
        why: "few queries over 8 bits: as many keys in flight as shared memory holds",
    },
    Row {
        dim: 256,
        shape: Shape { q_in_registers: false, ..tile([2, 32, 2], 1) },
        why: "few queries over 8 bits: as many keys in flight as a small shared memory holds",
    },
];

/// Tiles where bits must not depend on the batch: of the rows for a head dim, the first of which two stages fit. Pieces are
/// folded beside the ring, so that one CTA fills an SM.
const FIXED: &[(u32, Shape)] = &[
    (64, tile([8, 16, 6], 1)),
    (64, tile([4, 16, 6], 1)),
    (128, tile([8, 16, 3], 1)),
    (128, tile([4, 16, 6], 1)),
    (128, tile([2, 16, 6], 1)),
    (256, Shape { q_in_registers: false, ..tile([4, 16, 3], 1) }),
    (256, Shape { q_in_registers: false, ..tile([2, 16, 6], 1) }),
    (256, Shape { q_in_registers: false, ..tile([1, 16, 6], 1) }),
];

/// The same for keys and values of 8 bits.
const FIXED_NARROW: &[(u32, Shape)] = &[
    (64, tile([4, 32, 8], 1)),
    (64, tile([2, 32, 8], 1)),
    (128, tile([4, 32, 6], 1)),
    (128, tile([2, 32, 6], 1)),
    (256, Shape { q_in_registers: false, ..tile([4, 32, 3], 1) }),
    (256, Shape { q_in_registers: false, ..tile([2, 32, 6], 1) }),
    (256, Shape { q_in_registers: false, ..tile([1, 32, 6], 1) }),
];
