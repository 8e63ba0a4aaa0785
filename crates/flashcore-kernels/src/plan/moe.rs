//! How a mixture of experts is computed on a GPU: which kernels, and how rows and features are tiled.

use flashcore_core::{DType, ExpertLayout, Index, MoeProblem, MoeSpec, Routing, Score, Shared, Sigmoid};
use flashcore_ptx::target::Target;
use flashcore_tile::Half;

use super::{Gpu, Misfit, Plan, PlanError, Tile, check_capability};
use crate::{
    launch::{KernelConfig, Launch, Subject},
    moe::{
        Config, Cut, IdSource, Layer, Source, combine,
        product::{self, DEPTH, Glu, Kind, Shape, WeightOrder},
        product_sm90, route, sort,
    },
};

/// Elements that one copy moves.
pub(super) const CHUNK: usize = 8;
/// Shared memory that the driver keeps of each CTA's.
pub(super) const RESERVED: u32 = 1024;
/// Rows per expert from which on products wait for tensor cores more than for weights.
pub(super) const MANY_ROWS: usize = 64;
/// Most rows per expert for which tiles have 16.
const FEW_ROWS: usize = 12;
/// Entries from which on several CTAs sort them.
const MANY_ENTRIES: usize = 2048;
/// Depths up to which a tile's end takes long beside its products: of the first, and of the second.
const SHORT: usize = 2048;
const LONG: usize = 4096;

/// Plans a mixture of experts; `alignment` is what all addresses of tensors are multiples of, in bytes.
pub fn plan_moe(problem: &MoeProblem, gpu: &Gpu, alignment: u64) -> Result<Plan, PlanError> {
    if let Some(cuts) = hopper_cuts(problem, gpu).or_else(|| streaming_cuts(problem, gpu)) {
        return plan_with(problem, gpu, alignment, cuts);
    }
    let (shape, why) = shape(problem, gpu)?;
    let cuts = [(Kind::Up(Glu::of(problem)), problem.gate_up()), (Kind::Down, problem.down())]
        .map(|(kind, layout)| Cut::General(narrowed(problem, gpu, shape, kind, layout)));
    plan_with(problem, gpu, alignment, (cuts, why))
}

/// Like [`plan_moe`], with these tiles for both products, whose rows must match: for tuning.
pub fn plan_moe_tiles(
    problem: &MoeProblem,
    gpu: &Gpu,
    alignment: u64,
    cuts: [Cut; 2],
) -> Result<Plan, Misfit> {
    cuts.into_iter().try_for_each(|cut| Tile::Moe(Some(cut)).check())?;
    let refused = |reason: &str| Err(Misfit::Kernel { kernel: "moe", reason: reason.to_owned() });
    if cuts[0].tile_m() != cuts[1].tile_m() {
        return refused("both products share their rows");
    }
    if cuts.iter().any(|cut| matches!(cut, Cut::Sm90(_))) && !takes_hopper(problem, gpu) {
        return refused(
            "kernels for Hopper take contiguous rows of weights, 128 deep or more, and two tokens or more",
        );
    }
    let thin = |cut: &Cut| matches!(cut, Cut::General(shape) if shape.lines > 1 || shape.tile_n < DEPTH);
    let rows = problem.gate_up().is_row_major() && problem.down().is_row_major();
    if cuts.iter().any(thin) && !rows {
        return refused("several lines of a row, and few features, are for rows of weights");
    }
    Ok(plan_with(problem, gpu, alignment, (cuts, "tiles as requested"))?)
}

fn plan_with(
    problem: &MoeProblem,
    gpu: &Gpu,
    alignment: u64,
    (cuts, why): ([Cut; 2], &'static str),
) -> Result<Plan, PlanError> {
    check_capability(gpu, (8, 0))?;
    let half = check(problem, alignment)?;
    let target = if gpu.capability >= (9, 0) { Target::Sm90 } else { Target::Sm80 };
    // One token has every expert once: there is nothing to sort.
    let source = if problem.tokens() <= 1 { Source::Pairs } else { Source::Sorted };
    let (tile_m, even) = (cuts[0].tile_m(), cuts.iter().any(Cut::pairs));
    let layer = Layer { problem: problem.clone(), tile_m, source, even, workspace: Vec::new() };
    let shared = shared(problem, gpu)?;
    let layers = [Some(&layer), shared.as_ref().map(|shared| &shared.layer)];
    if layers.into_iter().flatten().any(|layer| layer.rows() > i32::MAX as u64) {
        return Err(PlanError::Tiles);
    }
    let workspace: Vec<_> = layers.into_iter().flatten().flat_map(Layer::own_workspace).collect();
    let layer = Layer { workspace: workspace.clone(), ..layer };
    let kernels = Kernels { problem, half, target, source, cuts, sms: gpu.sms };
    let mut launches = kernels
        .all()
        .into_iter()
        .map(|kernel| kernels.launch(kernel, &layer))
        .collect::<Result<Vec<_>, _>>()?;
    if let Some(shared) = shared {
        let layer = Layer { workspace, ..shared.layer };
        let products = kernels.of_shared(&layer.problem, shared.shapes);
        let products = products.map(|kernel| kernels.launch(kernel, &layer));
        // Sums come last.
        let last = launches.len() - 1;
        for (n, product) in products.into_iter().enumerate() {
            launches.insert(last + n, product?);
        }
    }
    let main = launches.iter().position(|launch| is_product(launch.kernel())).unwrap_or(0);
    Ok(Plan { main, ..Plan::of(launches, gpu, why) })
}

/// Whether kernels for Hopper take a problem. A token's bits are not those of other kernels: they may not be chosen by the
/// number of tokens where bits must not depend on it.
fn takes_hopper(problem: &MoeProblem, gpu: &Gpu) -> bool {
    let deep = |features: usize| features >= 2 * DEPTH as usize;
    let rows = problem.gate_up().is_row_major() && problem.down().is_row_major();
    let deep = deep(problem.hidden()) && deep(problem.intermediate());
    gpu.capability == (9, 0) && rows && deep && problem.tokens() > 1 && !problem.spec().batch_invariant
}

/// How products of many tokens per expert are cut on Hopper, where they are such.
///
/// Consumers that take turns hide the end of a tile, which counts where depth is short, but have no registers for biases.
/// CTAs that share weights hide how long these take, which counts where depth is long.
fn hopper_cuts(problem: &MoeProblem, gpu: &Gpu) -> Option<([Cut; 2], &'static str)> {
    if !takes_hopper(problem, gpu) {
        return None;
    }
    let past = |rows: u32, stages: u32| {
        Cut::Sm90(product_sm90::Shape { tile_n: 128, turns: false, stages, pair: false, rows })
    };
    match problem.entries() / problem.experts() {
        // Past few rows the second product is no faster by warpgroups, and with little depth neither is the first.
        ..=FEW_ROWS if problem.hidden() >= LONG => {
            let why = "few tokens per expert: weights stream past 16 rows, first by warpgroups";
            return Some(([past(16, 6), Cut::General(shape_for(0).0)], why));
        }
        29..MANY_ROWS => {
            return Some(([past(64, 4); 2], "weights stream past 64 rows, by tensor copies and warpgroups"));
        }
        ..MANY_ROWS => return None,
        _ => {}
    }
    let cut = |turns: bool, pair: bool| {
        let turns = turns && !problem.spec().biases;
        let tile_n = if turns { 192 } else { 256 };
        Cut::Sm90(product_sm90::Shape { tile_n, turns, stages: 4, pair, rows: product_sm90::TILE_M })
    };
    let [first, second] = [problem.hidden(), problem.intermediate()];
    let pair = first > SHORT;
    let cuts = [cut(!pair, pair), cut(second <= LONG, pair)];
    Some((cuts, "many tokens per expert: weights by tensor copies, products by warpgroups"))
}

/// How weights stream past few rows on Hopper by kernels for every GPU, where they are rows of memory.
///
/// Several lines of a row at a time, and tiles of few features, pay where they leave no SM without work: measured on an H200.
fn streaming_cuts(problem: &MoeProblem, gpu: &Gpu) -> Option<([Cut; 2], &'static str)> {
    let rows = problem.gate_up().is_row_major() && problem.down().is_row_major();
    if gpu.capability != (9, 0) || !rows || problem.entries() / problem.experts() > FEW_ROWS {
        return None;
    }
    let cut = |tile_n: u32, warps: u32, [stages, ctas_per_sm, lines]: [u32; 3]| Shape {
        tile_m: 16,
        tile_n,
        warps: [1, warps],
        stages,
        ctas_per_sm,
        lines,
    };
    let (tiles, sms) =
        (|tile_n: usize| problem.entries() * (2 * problem.intermediate()).div_ceil(tile_n), gpu.sms as usize);
    let whole = [problem.hidden(), problem.intermediate()].iter().all(|n| n.is_multiple_of(256));
    let (shapes, why) = match problem.tokens() {
        2.. => {
            let why = "few tokens per expert: weights stream past 16 rows, two lines of each at a time";
            ([cut(64, 2, [5, 2, 2]); 2], why)
        }
        1 if whole && tiles(64) >= 3 * sms => {
            ([cut(64, 2, [5, 1, 4]); 2], "one token, many tiles: four lines of each row of weights at a time")
        }
        1 if (sms..2 * sms).contains(&tiles(128)) => {
            let why = "one token, tiles for less than two CTAs per SM: thinner ones of the second product";
            ([cut(128, 4, [3, 2, 2]), cut(32, 2, [6, 2, 2])], why)
        }
        _ => return None,
    };
    let fits =
        |shape: &Shape| shape.ctas_per_sm * (shape.shared_bytes() + RESERVED) <= gpu.shared_bytes + RESERVED;
    shapes.iter().all(fits).then(|| (shapes.map(Cut::General), why))
}

/// How the expert of all tokens is computed.
struct SharedExpert {
    layer: Layer,
    shapes: [Shape; 2],
}

/// The shared expert of a problem as a problem of its own: all tokens to one expert.
fn shared(problem: &MoeProblem, gpu: &Gpu) -> Result<Option<SharedExpert>, PlanError> {
    let spec = problem.spec();
    let Some(Shared { gate_up, down }) = spec.shared else { return Ok(None) };
    let routing = Routing::Given { ids: Index::I32, weights: DType::F32, top_k: 1 };
    let alone = MoeSpec { gate_up, down, routing, biases: false, shard: None, shared: None, ..spec.clone() };
    let alone = alone.parse().map_err(|_| PlanError::Experts("a shared expert of such extents"))?;
    let (shape, _) = shape(&alone, gpu)?;
    let shapes = [(Kind::Up(Glu::of(&alone)), alone.gate_up()), (Kind::Down, alone.down())]
        .map(|(kind, layout)| narrowed(&alone, gpu, shape, kind, layout));
    let (tile_m, source) = (shape.tile_m, Source::All);
    let layer = Layer { problem: alone, tile_m, source, even: false, workspace: Vec::new() };
    Ok(Some(SharedExpert { layer, shapes }))
}

const fn is_product(kernel: &KernelConfig) -> bool {
    matches!(kernel, KernelConfig::Moe(Config::Product(_) | Config::ProductSm90(_)))
}

/// What the kernels require of a problem.
fn check(problem: &MoeProblem, alignment: u64) -> Result<Half, PlanError> {
    let spec = problem.spec();
    let half = match problem.dtype() {
        DType::F16 => Half::F16,
        DType::BF16 => Half::Bf16,
        DType::F32 => return Err(PlanError::Experts("f32 weights")),
        other => return Err(PlanError::DType(other)),
    };
    let groups = match spec.routing {
        Routing::Computed { score: Score::Sigmoid(Sigmoid { groups, .. }), .. } => groups,
        _ => None,
    };
    if groups.is_some_and(|groups| groups.count > route::MAX_GROUPS) {
        return Err(PlanError::Experts("more than 32 groups"));
    }
    let whole = |elements: usize| elements.is_multiple_of(CHUNK);
    let lines =
        |layout: &ExpertLayout| layout.strides().into_iter().all(|stride| stride == 1 || whole(stride));
    let rows = [spec.x.strides()[2], problem.out().strides()[2], problem.hidden(), problem.intermediate()];
    let shared = spec.shared.iter().flat_map(|shared| [&shared.gate_up, &shared.down]);
    let mut layouts = [&spec.gate_up, &spec.down].into_iter().chain(shared);
    let whole_columns = |layout: &ExpertLayout| whole(layout.cols()) && lines(layout);
    if alignment < 16 || !rows.into_iter().all(whole) || !layouts.all(whole_columns) {
        return Err(PlanError::Experts("rows that are not multiples of 16 bytes"));
    }
    Ok(half)
}

/// How tiles are cut: few rows per expert make products that wait for weights, many make products that do not.
fn shape(problem: &MoeProblem, gpu: &Gpu) -> Result<(Shape, &'static str), PlanError> {
    let (shape, why) = shape_for(problem.entries() / problem.experts());
    Ok((fitted(shape, gpu)?, why))
}

/// Tiles for products of so many rows.
pub(super) const fn shape_for(rows: usize) -> (Shape, &'static str) {
    const fn shape(tile_m: u32, tile_n: u32, warps: [u32; 2], stages: u32) -> Shape {
        Shape { tile_m, tile_n, warps, stages, ctas_per_sm: 2, lines: 1 }
    }
    match rows {
        0..=12 => (shape(16, 128, [1, 4], 6), "few tokens per expert: weights stream past 16 rows"),
        13..=28 => (shape(32, 128, [1, 4], 5), "weights stream past 32 rows"),
        29..=80 => (shape(64, 128, [2, 2], 4), "64 rows share weights"),
        _ => (shape(128, 128, [2, 2], 3), "many tokens per expert: square tiles"),
    }
}

/// Tiles of half as many features where there would be fewer than two for each SM.
fn narrowed(problem: &MoeProblem, gpu: &Gpu, shape: Shape, kind: Kind, layout: &ExpertLayout) -> Shape {
    let features = if kind == Kind::Down { problem.hidden() } else { 2 * problem.intermediate() };
    let used = problem.entries().min(problem.experts());
    let few = used * features.div_ceil(shape.tile_n as usize) < 2 * gpu.sms as usize;
    if few && shape.tile_m == 16 && layout.is_row_major() {
        return Shape { tile_n: 64, warps: [1, 2], stages: shape.stages + 2, ..shape };
    }
    shape
}

/// Fewer CTAs at a time, then fewer stages, until shared memory holds them.
pub(super) fn fitted(shape: Shape, gpu: &Gpu) -> Result<Shape, PlanError> {
    let options = [2, 1].into_iter().flat_map(|ctas_per_sm| {
        let fewest = if ctas_per_sm == 2 { 3 } else { 2 };
        (fewest..=shape.stages).rev().map(move |stages| Shape { stages, ctas_per_sm, ..shape })
    });
    let fits = |shape: &Shape| {
        let all = shape.ctas_per_sm * (shape.shared_bytes() + RESERVED);
        all <= gpu.shared_bytes + RESERVED
    };
    options.into_iter().find(fits).ok_or(PlanError::Experts("tiles for so little shared memory"))
}

/// The kernels of a problem.
struct Kernels<'a> {
    problem: &'a MoeProblem,
    half: Half,
    target: Target,
    source: Source,
    cuts: [Cut; 2],
    sms: u32,
}

impl Kernels<'_> {
    /// In order.
    fn all(&self) -> Vec<Config> {
        let (problem, target, half, source) = (self.problem, self.target, self.half, self.source);
        let (ids, top_k) = (IdSource::of(problem), problem.top_k() as u32);
        let weights = match *problem.routing() {
            Routing::Given { weights, .. } => weights,
            Routing::Computed { .. } => DType::F32,
        };
        let ([first, second], tile_m) = (self.cuts, self.cuts[0].tile_m());
        let route = route::Config::of(problem, target).map(Config::Route);
        let ctas = if target.includes(Target::Sm90) && problem.entries() >= MANY_ENTRIES { 8 } else { 1 };
        let sort = sort::Config { target, ids, tile_m, even: self.cuts.iter().any(Cut::pairs), ctas };
        let sort = (source == Source::Sorted).then_some(Config::Sort(sort));
        let up = self.product(Kind::Up(Glu::of(problem)), problem.gate_up(), first);
        let down = self.product(Kind::Down, problem.down(), second);
        let shared = problem.spec().shared.is_some();
        let combine = combine::Config { target, half, ids, weights, source, top_k, shared };
        [route, sort, Some(up), Some(down), Some(Config::Combine(combine))].into_iter().flatten().collect()
    }

    /// Both products of a shared expert.
    fn of_shared(&self, alone: &MoeProblem, [first, second]: [Shape; 2]) -> [Config; 2] {
        let Self { half, target, cuts, sms, .. } = *self;
        let kernels = Kernels { problem: alone, half, target, source: Source::All, cuts, sms };
        let ids = IdSource::of(self.problem);
        [(Kind::Up(Glu::of(alone)), alone.gate_up(), first), (Kind::Down, alone.down(), second)].map(
            |(kind, layout, shape)| {
                Config::Product(product::Config { ids, ..kernels.general(kind, layout, shape) })
            },
        )
    }

    fn product(&self, kind: Kind, layout: &ExpertLayout, cut: Cut) -> Config {
        match cut {
            Cut::General(shape) => Config::Product(self.general(kind, layout, shape)),
            Cut::Sm90(shape) => Config::ProductSm90(product_sm90::Config {
                half: self.half,
                kind,
                biases: self.problem.spec().biases,
                whole: layout.cols().is_multiple_of(DEPTH as usize),
                shape,
            }),
        }
    }

    fn general(&self, kind: Kind, layout: &ExpertLayout, shape: Shape) -> product::Config {
        let Self { problem, half, target, source, .. } = *self;
        let weights = WeightOrder::of(layout, problem.spec().order, kind);
        let (ids, biases) = (IdSource::of(problem), problem.spec().biases);
        let config =
            product::Config { target, half, kind, weights, ids, source, biases, whole: false, shape };
        let features = if kind == Kind::Down { problem.hidden() } else { problem.intermediate() };
        let whole = layout.cols().is_multiple_of(shape.depth() as usize)
            && features.is_multiple_of(config.features() as usize);
        product::Config { whole, ..config }
    }

    fn launch(&self, kernel: Config, layer: &Layer) -> Result<Launch, PlanError> {
        let extent = match &kernel {
            Config::Route(cfg) => route::extent(cfg, layer),
            Config::Sort(cfg) => sort::extent(cfg, layer),
            Config::Product(cfg) => product::extent(cfg, layer).ok_or(PlanError::Tiles)?,
            Config::ProductSm90(cfg) => product_sm90::extent(cfg, layer, self.sms).ok_or(PlanError::Tiles)?,
            Config::Combine(cfg) => combine::extent(cfg, layer),
        };
        let subject = Subject::Moe(Box::new(layer.clone()));
        Ok(Launch { kernel: KernelConfig::Moe(kernel), subject, extent })
    }
}
