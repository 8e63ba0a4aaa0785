//! The Hopper kernel, `forward_sm90`: what it does not support, and its tiles with the reason beside each row.

use flashcore_core::{Layout, Problem, Scales, Sequences};
use flashcore_tile::{Element, RegisterBudget};

use super::{Gpu, narrow};
use crate::{
    forward_sm80::Access,
    forward_sm90::{Config, Order, Policy, ROWS_PER_GROUP, Settles, Shape, Staging},
    parts::mask::Sides,
};

/// What the Hopper kernel multiplies for a problem of `input`s, or why it cannot take the problem.
pub(super) fn accept(problem: &Problem, input: Element, gpu: &Gpu, access: Access) -> Result<(), String> {
    let no = |reason: &str| Err(reason.to_owned());
    if gpu.capability != (9, 0) {
        return Err(format!(
            "it runs on compute capability 9.0, not {}.{}",
            gpu.capability.0, gpu.capability.1
        ));
    }
    if !matches!(input, Element::F16 | Element::Bf16 | Element::E4m3) {
        return Err(format!("it supports f16, bf16 and e4m3, not {}", input.name()));
    }
    if problem.kv_dtype() != problem.dtype() {
        return no("it needs keys and values of the queries' type");
    }
    let dims = [problem.dim_qk(), problem.dim_v()];
    if input == Element::E4m3 && dims.into_iter().any(|dim| !dim.is_multiple_of(16) || dim > MOST_FEATURES) {
        return Err(format!("its head dims of e4m3 tensors are multiples of 16 up to {MOST_FEATURES}"));
    }
    if [problem.dim_qk(), problem.dim_v()]
        .into_iter()
        .any(|dim| !dim.is_multiple_of(8) || dim > MOST_FEATURES)
    {
        return Err(format!("its head dims are multiples of 8 up to {MOST_FEATURES}"));
    }
    if let Some(Scales::PerBlock { q, k }) = problem.scales() {
        narrow::check_blocks(problem, [q, k])?;
    }
    if problem.bias().is_some() {
        return no("it does not support biases");
    }
    if problem.dropout().is_some() {
        return no("it does not support dropout");
    }
    if input == Element::E4m3 && (problem.pages().is_some() || is_packed(problem)) {
        return no("it does not support 8-bit values in pages or packed sequences");
    }
    if let Some(size) = problem.page_size().filter(|size| !size.is_multiple_of(PAGE)) {
        return Err(format!("it copies pages of a multiple of {PAGE} keys, not of {size}"));
    }
    if access != Access::B16 {
        return no("tensor copies need addresses and strides at multiples of 16 bytes");
    }
    if problem.rows() == 0 || problem.seq_kv() == 0 || problem.sequences() == 0 {
        return no("tensor maps cannot be empty");
    }
    let far = |layout: &Layout| layout.strides().into_iter().any(|s| s * problem.dtype().bytes() >= 1 << 40);
    // An output of another type is written by address.
    let out = (problem.out_dtype() == problem.dtype()).then_some(problem.out());
    if [problem.q(), problem.k(), problem.v()].into_iter().chain(out).any(far) {
        return no("strides of 2^40 bytes and more do not fit in a tensor map");
    }
    Ok(())
}

/// Keys that one copy brings of a page, where keys lie in pages.
pub(super) fn page_rows(problem: &Problem, shape: &Shape) -> Option<u32> {
    let shared = |mut a: u32, mut b: u32| {
        while b != 0 {
            (a, b) = (b, a % b);
        }
        a
    };
    problem.page_size().map(|size| shared(size as u32, shape.tile_n))
}

/// Query heads that share a tile: those of a group, where the rows of one leave most of a tile empty.
pub(super) fn pack(problem: &Problem) -> u32 {
    let group = problem.group();
    // Rows of several heads would have several factors.
    let blocks = matches!(problem.scales(), Some(Scales::PerBlock { .. }));
    let packs = group.is_power_of_two()
        && group <= ROWS
        && problem.longest_q() < ROWS
        && !problem.batch_invariant()
        && !blocks;
    if packs { group as u32 } else { 1 }
}

/// Most features of a head: the output of more does not fit in the registers of a warpgroup.
const MOST_FEATURES: usize = 256;
/// Keys whose multiples pages are: tensor copies swizzle rows by eights, so that copies of eight fit together to a tile.
const PAGE: usize = 8;
/// Keys of a step where tiles are few.
const STEP: u32 = 128;
/// Keys of a tile up to which the edges of a mask decide: short steps are as fast at 2048, 3 % faster at 1024.
const NEAR_EDGES: usize = 1152;
/// Rows of the smallest tile.
const ROWS: usize = ROWS_PER_GROUP as usize;

/// The tile of the Hopper kernel, and why.
pub(super) fn shape(problem: &Problem, gpu: &Gpu) -> (Shape, &'static str) {
    let (shape, why) = tile_of(problem, gpu);
    (for_searches(problem, shape), why)
}

/// The same tile where the producer looks for tiles or pages, which takes more registers than counting does.
fn for_searches(problem: &Problem, shape: Shape) -> Shape {
    let wide = problem.dim_qk().max(problem.dim_v()) > 128;
    let tile_n = match (is_packed(problem), problem.pages().is_some()) {
        (false, false) => return shape,
        // Consumers of wide heads have none to spare, and the search alone fits in what their producer has.
        (true, false) if wide => return shape,
        (_, true) if wide && shape.tile_n > 64 => shape.tile_n - 32,
        _ => shape.tile_n,
    };
    Shape { budget: shape.budget.map(|_| SEARCHING), tile_n, ..shape }
}

/// The tile, whatever its producer does.
fn tile_of(problem: &Problem, gpu: &Gpu) -> (Shape, &'static str) {
    if problem.dtype().is_narrow() {
        return narrow::shape(problem);
    }
    let small = if is_packed(problem) { short_sequences(problem, gpu) } else { few_tiles(problem, gpu) };
    if let Some(small) = small {
        return small;
    }
    let (qk, v) = (problem.dim_qk() as u32, problem.dim_v() as u32);
    let row = TABLE.iter().find(|row| qk <= row.dim_qk && v <= row.dim_v).unwrap_or(&TABLE[TABLE.len() - 1]);
    let order = order(problem);
    let many = many_tiles(problem, gpu);
    if let Some(brief) = row.brief {
        let brief = Shape { order, ..brief };
        if !many {
            return (brief, "few tiles on each SM: short steps start and end sooner");
        }
        if has_near_edges(problem) {
            return (brief, "rows see few keys: short steps waste less at the edges of the mask");
        }
    }
    // Narrow heads have registers for one key tile at a time: two in a turn of the loop are 2 to 3 % slower there, and as
    // much faster with wider ones.
    let turn = if many && qk.max(v) > 64 { 2 } else { 1 };
    if let Some(tall) = row.tall.as_ref().filter(|tall| tall.pays(problem, gpu)) {
        let why = "three consumers of 64 rows read K and V a third less often";
        return (Shape { order, turn, ..tall.shape }, why);
    }
    (Shape { order, turn, ..row.shape }, row.why)
}

/// In which order CTAs take tiles: by tickets where these are not equally long.
pub(super) fn order(problem: &Problem) -> Order {
    let uneven = problem.mask().right().is_some() || problem.sequences_kind() != Sequences::Uniform;
    if uneven { Order::Atomic } else { Order::Static }
}

/// Whether every SM has so many tiles that it does not matter how long the first takes.
fn many_tiles(problem: &Problem, gpu: &Gpu) -> bool {
    let planes = problem.heads_q() * problem.batch();
    problem.batch_invariant() || planes * problem.seq_q() >= gpu.sms as usize * 8 * ROWS
}

/// Whether rows see so few keys that it counts how many more their tiles hold. Where sequences have lengths of their own,
/// nothing of a tile is passed over, so that short steps would not save any.
fn has_near_edges(problem: &Problem) -> bool {
    let masked = problem.mask().right().is_some() && problem.sequences_kind() == Sequences::Uniform;
    masked && keys_of_tile(problem) <= NEAR_EDGES
}

/// Whether a problem has options that take registers.
fn optioned(problem: &Problem) -> bool {
    problem.softcap().is_some() || problem.sequences_kind() != Sequences::Uniform
}

/// A tile of 192 rows for long sequences.
struct Tall {
    shape: Shape,
    /// Rows from which on it pays.
    rows: usize,
    /// Which edges of a mask it is worth the wasted rows of.
    edges: Sides,
}

impl Tall {
    /// Whether it beats tiles of 128 rows: it needs registers that options would take, rows that the diagonal does not
    /// waste, and as many rounds of tiles over the GPU as make up for their length.
    fn pays(&self, problem: &Problem, gpu: &Gpu) -> bool {
        let mask = problem.mask();
        let cut =
            (mask.left().is_some() && !self.edges.left) || (mask.right().is_some() && !self.edges.right);
        if optioned(problem) || cut || problem.seq_q() < self.rows {
            return false;
        }
        if problem.batch_invariant() {
            return true;
        }
        let planes = problem.heads_q() * problem.batch();
        let rounds =
            |rows: usize| (problem.seq_q().div_ceil(rows) * planes).div_ceil(gpu.sms as usize) * rows;
        rounds(192) * 15 <= rounds(128) * 16
    }
}

/// Where tiles of 64 rows hardly fill the GPU, each has CTAs to itself: two share an SM or, where there are fewer, each
/// has an SM, and a cluster shares the keys of a tile. Pairs of tiles may share a CTA.
fn few_tiles(problem: &Problem, gpu: &Gpu) -> Option<(Shape, &'static str)> {
    let dim = problem.dim_qk().max(problem.dim_v());
    let tiles = tiles_of(problem, ROWS);
    let (sms, keys) = (gpu.sms as usize, keys_of_tile(problem));
    if problem.batch_invariant() || dim > 128 {
        return None;
    }
    match dim {
        0..=64 if keys <= 64 && tiles <= 2 * sms => {
            Some((few(dim, 64, 1), "few tiles: 64 keys are all there are"))
        }
        0..=64 if keys > 128 && tiles <= sms => {
            // With these stages a CTA keeps the next kernel's from sharing its SM before all SMs have one.
            let shape = Shape { stages: 4, ctas_per_sm: 1, ..few(dim, STEP, cluster(tiles, keys, sms)) };
            Some((shape, "few tiles: one for each SM, or a cluster that shares the keys"))
        }
        0..=64 if pairs_up(problem, gpu) => {
            let shape =
                Shape { consumers: 2, budget: Some(TWO_CONSUMERS), ctas_per_sm: 1, ..few(dim, STEP, 1) };
            Some((shape, "few tiles of many keys: two share a CTA, whose consumers alternate"))
        }
        0..=64 if tiles <= 2 * sms => {
            // Two CTAs on an SM have no registers to spare.
            let step = if optioned(problem) { 96 } else { STEP };
            Some((few(dim, step, 1), "few tiles: two CTAs hide each other's latency"))
        }
        65..=128 if tiles <= sms => {
            // Half a step at a time: the first product starts sooner, and the last tile wastes less.
            let parts = cluster(tiles, keys, sms);
            let shape = Shape { stages: 4, ctas_per_sm: 1, ..few(dim, STEP / 2, parts) };
            Some((shape, "few tiles: one for each SM, or a cluster that shares the keys"))
        }
        _ => None,
    }
}

/// Whether the queries of sequences lie one after another.
pub(super) fn is_packed(problem: &Problem) -> bool {
    matches!(problem.sequences_kind(), Sequences::Ragged { .. } | Sequences::PackedQueries { .. })
}

/// Packed sequences that fill no tile of 128 rows, or so few of them that tiles of 64 rows hardly fill the GPU: only the
/// device knows which tile is whose, so that CTAs are persistent all the same.
fn short_sequences(problem: &Problem, gpu: &Gpu) -> Option<(Shape, &'static str)> {
    let dim = problem.dim_qk().max(problem.dim_v());
    let rows = |rows: usize| rows * pack(problem) as usize;
    let heads = problem.heads_q() / pack(problem) as usize;
    let tiles = (rows(problem.seq_q()) / ROWS + problem.sequences()) * heads;
    let short = rows(problem.longest_q()) <= ROWS || tiles <= 2 * gpu.sms as usize;
    if problem.batch_invariant() || dim > 128 || !short {
        return None;
    }
    let shape = Shape { order: Order::Atomic, ..few(dim, STEP / 2, 1) };
    Some((shape, "short sequences: tiles of 64 rows waste less, and two CTAs hide each other's latency"))
}

/// Whether two tiles get a CTA together: where nearly every SM has two, and keys enough that reading them once counts.
/// At 512 keys this is as fast as a CTA for each, from a thousand on 2 to 4 % faster.
fn pairs_up(problem: &Problem, gpu: &Gpu) -> bool {
    let (sms, mask) = (gpu.sms as usize, problem.mask());
    let fill = tiles_of(problem, 2 * ROWS) <= sms && 3 * tiles_of(problem, ROWS) > 5 * sms;
    let alike = mask.left().is_none() && mask.right().is_none() && !optioned(problem);
    fill && alike && problem.seq_kv() > 4 * STEP as usize
}

/// Tiles of `rows` rows.
fn tiles_of(problem: &Problem, rows: usize) -> usize {
    let pack = pack(problem) as usize;
    (problem.seq_q() * pack).div_ceil(rows) * (problem.heads_q() / pack) * problem.batch()
}

/// Keys that a tile of 64 rows sees at most.
fn keys_of_tile(problem: &Problem) -> usize {
    let (mask, all) = (problem.mask(), problem.seq_kv());
    match (mask.left(), mask.right()) {
        (Some(left), Some(right)) => all.min((left as usize).saturating_add(right as usize + ROWS)),
        _ => all,
    }
}

/// A tile of 64 rows for each cluster of `parts` CTAs.
const fn few(dim: usize, tile_n: u32, parts: u32) -> Shape {
    Shape {
        consumers: 1,
        tile_n,
        stages: 2,
        q_stages: 1,
        staging: if dim <= 64 { WHOLE_64 } else { WHOLE_128 },
        budget: None,
        order: Order::Single { parts },
        ctas_per_sm: 2,
        turn: 1,
    }
}

/// CTAs that share the steps of a tile: as many as there are steps and SMs for. Larger clusters than pairs leave
/// some SMs of every group of them idle, and the largest pay from two steps each.
fn cluster(tiles: usize, keys: usize, sms: usize) -> u32 {
    let steps = keys.div_ceil(STEP as usize);
    let fits = |&(parts, least_steps, most): &(u32, usize, usize)| {
        tiles * parts as usize <= most && steps >= parts as usize * least_steps
    };
    let room = sms - sms / 4;
    [(8, 2, room), (4, 1, room), (2, 1, sms)].iter().find(|option| fits(option)).map_or(1, |option| option.0)
}

/// The same kernel with the policy that suits it.
pub(super) const fn with_policy(cfg: Config) -> Config {
    Config { policy: policy(&cfg), ..cfg }
}

/// How the consumers of a kernel share tensor cores and keys; asks everything of the config but its policy.
pub(crate) const fn policy(cfg: &Config) -> Policy {
    Policy {
        in_turn: in_turn(cfg),
        waits_once: waits_once(cfg),
        passes_over: passes_over(cfg),
        producer_waits: producer_waits(cfg),
        adapts: adapts(cfg),
    }
}

/// Consumers multiply in turn at up to 64 features, where that is 2 to 12 % faster; at 128 and more it is 3 to 16 %
/// slower, but 5 to 9 % faster where elements have 8 bits and products are half as long. A softcap would hold the turn while
/// hyperbolic tangents are taken.
const fn in_turn(cfg: &Config) -> bool {
    let short = cfg.narrow() || (cfg.dim_qk <= 64 && cfg.dim_v <= 64);
    let together = !matches!(cfg.settles, Settles::Parts);
    cfg.shape.consumers > 1 && short && together && !cfg.softcap
}

/// Where a step waits for scores first, the assembler takes exponentials until PV has ended, into registers of their
/// own. PV of narrow heads is too short for that: up to 48 features are up to 14 % faster if they wait for both products
/// at once, and do not spill. Two tiles that share a CTA are 3 % faster.
const fn waits_once(cfg: &Config) -> bool {
    let narrow = cfg.dim_qk <= 48 && cfg.dim_v <= 48;
    narrow || (in_turn(cfg) && matches!(cfg.shape.order, Order::Single { .. }))
}

/// Consumers pass over key tiles that only the rows of others see, wherever there can be any and the pipeline allows it.
const fn passes_over(cfg: &Config) -> bool {
    let (tile_m, tile_n) = (cfg.tile_m(), cfg.tile_n());
    // There is at most one such tile at either end: while the last values of a row tile are multiplied, two tiles of
    // keys can be given back before the producer has to wait for these values.
    let one_at_most = tile_m - ROWS_PER_GROUP <= tile_n;
    // A diagonal crosses the last key tile of all consumers where that is as wide as the rows are many.
    let bounded = (cfg.mask.left || cfg.mask.right) && tile_n < tile_m;
    // Unused values are cleared by all consumers together, so that all work through the same tiles.
    bounded && one_at_most && !cfg.lengths.has_keys()
}

/// Only the producer waits for the kernel before, wherever consumers touch nothing of its that did not come through the
/// producer, which knows by then where its copies start.
const fn producer_waits(cfg: &Config) -> bool {
    matches!(cfg.shape.order, Order::Single { .. }) && !cfg.used() && cfg.sinks.is_none() && !cfg.accumulate
}

/// Tiles are told how those before them went, where there are several and references move often: in f16 sharp scores are
/// 6 to 19 % faster so, plain ones up to 3 % slower. In bf16 references hardly ever move.
const fn adapts(cfg: &Config) -> bool {
    !matches!(cfg.shape.order, Order::Single { .. }) && matches!(cfg.input, Element::F16)
}

/// Registers of one producer and two consumers: what 384 threads have.
pub(super) const TWO_CONSUMERS: RegisterBudget = RegisterBudget { producer: 24, consumer: 240 };
/// The same with a producer that searches: with 24 registers it spills up to 25 of them, and consumers do without 8.
const SEARCHING: RegisterBudget = RegisterBudget { producer: 40, consumer: 232 };
/// Registers of one producer and three consumers: what 512 threads have.
pub(super) const THREE_CONSUMERS: RegisterBudget = RegisterBudget { producer: 32, consumer: 160 };

/// All columns of a narrow output at once.
pub(super) const WHOLE_64: Staging = Staging { cols: 64, places: 1 };
/// All columns of a wider one.
pub(super) const WHOLE_128: Staging = Staging { cols: 128, places: 1 };
/// One slab at a time: all that fits beside K and V.
pub(super) const SLAB: Staging = Staging { cols: 64, places: 1 };
/// One slab leaves while the next is gathered.
const SLABS: Staging = Staging { cols: 64, places: 2 };

/// One row of the Hopper table: up to these dims, this tile.
struct Row {
    dim_qk: u32,
    dim_v: u32,
    shape: Shape,
    why: &'static str,
    /// The tile where each SM has few of them, or rows see few keys.
    brief: Option<Shape>,
    tall: Option<Tall>,
}

const fn tall(tile_n: u32, staging: Staging) -> Shape {
    Shape { consumers: 3, budget: Some(THREE_CONSUMERS), ..tile(tile_n, 2, staging) }
}

const fn tile(tile_n: u32, q_stages: u32, staging: Staging) -> Shape {
    Shape {
        consumers: 2,
        tile_n,
        stages: 2,
        q_stages,
        staging,
        budget: Some(TWO_CONSUMERS),
        order: Order::Static,
        ctas_per_sm: 1,
        turn: 1,
    }
}

/// Tiles of the Hopper kernel, narrowest heads first.
const TABLE: &[Row] = &[
    Row {
        dim_qk: 64,
        dim_v: 64,
        shape: Shape { stages: 4, ..tile(128, 2, WHOLE_64) },
        why: "two consumers leave registers for masks, and shared memory for four stages",
        brief: None,
        tall: Some(Tall { shape: tall(128, WHOLE_64), rows: 2048, edges: Sides { left: true, right: true } }),
    },
    Row {
        dim_qk: 72,
        dim_v: 72,
        shape: tile(128, 2, WHOLE_128),
        why: "as with up to 128 features",
        brief: Some(Shape { stages: 4, ..tile(64, 2, WHOLE_128) }),
        // 677 instead of 819 us at 4x16x4096x72; 128 keys, which leave no room for a second Q tile, take 687.
        tall: Some(Tall { shape: tall(80, SLAB), rows: 4096, edges: Sides { left: false, right: false } }),
    },
    Row {
        dim_qk: 128,
        dim_v: 128,
        shape: tile(128, 2, WHOLE_128),
        why: "128 x 128 fills the registers; the next tile's first product covers the epilogue",
        brief: Some(Shape { stages: 4, ..tile(64, 2, WHOLE_128) }),
        tall: Some(Tall { shape: tall(64, SLAB), rows: 8192, edges: Sides { left: false, right: true } }),
    },
    Row {
        dim_qk: 192,
        dim_v: 128,
        shape: tile(128, 1, SLAB),
        why: "128 keys still fit beside one Q tile; two would not",
        brief: None,
        tall: None,
    },
    Row {
        dim_qk: 192,
        dim_v: 192,
        shape: tile(96, 1, SLABS),
        why: "96 keys are what two stages of K and V leave room for",
        brief: None,
        tall: None,
    },
    Row {
        dim_qk: 256,
        dim_v: 256,
        shape: tile(64, 1, SLABS),
        why: "the output takes half of the registers and Q a quarter of shared memory; 64 keys fit beside them",
        brief: None,
        tall: None,
    },
];
