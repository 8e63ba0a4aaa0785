//! Mixtures of experts on GPU 0: times of the plan's tiles and of others, on layers as models have them.
//!
//! `cargo run --release --example gpu_moe [layer] [tokens,tokens,…]` prints one JSON object per line: replayed graphs over
//! several random routings, so that weights do not come from the cache. `flashcore bench --suite moe` compares with peers,
//! `flashcore verify --backend cuda --filter moe/` checks results.

use flashcore::{
    DType, Error, ExpertLayout, Index, Layout, MoeSpec, Routing, bf16,
    cuda::{
        Cuda, ExpertCut, ExpertTile, HopperExpertTile, MoeTensors, ReadyMoe,
        driver::{DeviceBuffer, Event, Graph},
    },
};
use flashcore_testkit::Rng;
use rayon::prelude::*;

/// Name, hidden, intermediate, experts, experts of a token.
const LAYERS: [(&str, [usize; 4]); 4] = [
    ("qwen3", [2048, 768, 128, 8]),
    ("mixtral", [4096, 14336, 8, 2]),
    ("deepseek", [7168, 2048, 32, 8]),
    ("gpt-oss", [2880, 2880, 128, 4]),
];
const TOKENS: [usize; 5] = [1, 16, 128, 1024, 8192];
/// Routings of a graph.
const ROUTINGS: usize = 8;
/// Elements of the block of random numbers that weights repeat: an odd number of rows of no layer.
const BLOCK: usize = (16 << 20) + 1031;

type Outcome<T> = Result<T, Box<dyn std::error::Error>>;

fn main() -> Outcome<()> {
    let args: Vec<String> = std::env::args().skip(1).collect();
    let word = |n: usize| args.get(n).map_or("", String::as_str);
    let cuda = Cuda::open(0)?;
    times(&cuda, word(0), word(1))
}

/// Times of the layers whose names contain `only`.
fn times(cuda: &Cuda, only: &str, tokens: &str) -> Outcome<()> {
    let tokens = match tokens {
        "" => TOKENS.to_vec(),
        list => list.split(',').map(str::parse).collect::<Result<_, _>>()?,
    };
    for (name, extents) in LAYERS.into_iter().filter(|(name, _)| name.contains(only)) {
        let layer = Layer::new(cuda, extents)?;
        for &tokens in &tokens {
            let problem = layer.problem(tokens)?;
            let ready = cuda.prepare_moe(&problem)?;
            let planned = layer.time(cuda, &ready)?;
            println!("{}", planned.line(name, "", &planned.out));
            for cuts in cuts(tokens, tokens * extents[3] / extents[2]) {
                let Ok(ready) = cuda.prepare_moe_tiles(&problem, cuts) else { continue };
                println!("{}", layer.time(cuda, &ready)?.line(name, &format!("{cuts:?}"), &planned.out));
            }
        }
    }
    Ok(())
}

/// A cut for every GPU.
const fn general(
    tile_m: u32,
    tile_n: u32,
    warps: [u32; 2],
    [stages, ctas_per_sm, lines]: [u32; 3],
) -> ExpertCut {
    ExpertCut::General(ExpertTile { tile_m, tile_n, warps, stages, ctas_per_sm, lines })
}

/// The same cut for both products.
const fn same(cut: ExpertCut) -> [ExpertCut; 2] {
    [cut, cut]
}

/// A cut for Hopper: weights stream past so many rows.
const fn past(rows: u32, tile_n: u32, stages: u32) -> ExpertCut {
    ExpertCut::Sm90(HopperExpertTile { tile_n, turns: false, stages, pair: false, rows })
}

/// Pairs of cuts that are tried for so many tokens, and rows per expert.
fn cuts(tokens: usize, rows: usize) -> Vec<[ExpertCut; 2]> {
    let narrow = |stages| general(16, 64, [1, 2], stages);
    let wide = |stages| general(16, 128, [1, 4], stages);
    let thin = |stages| general(16, 32, [1, 2], stages);
    match rows {
        _ if tokens == 1 => vec![
            same(narrow([5, 1, 4])),
            [narrow([5, 1, 4]), thin([8, 1, 4])],
            [narrow([5, 1, 4]), thin([4, 2, 4])],
            [wide([3, 1, 4]), narrow([5, 1, 4])],
            [wide([3, 2, 2]), thin([6, 2, 2])],
            [wide([3, 2, 2]), narrow([5, 1, 4])],
        ],
        0..=12 => vec![
            same(wide([6, 2, 1])),
            same(past(16, 128, 6)),
            same(past(16, 256, 6)),
            [past(16, 128, 6), narrow([5, 2, 2])],
            [past(16, 128, 6), wide([6, 2, 1])],
            [past(16, 256, 6), wide([6, 2, 1])],
            same(narrow([5, 2, 2])),
        ],
        13..=40 => {
            vec![same(general(64, 128, [2, 2], [4, 2, 1])), same(past(64, 128, 4)), same(past(64, 128, 5))]
        }
        _ => many_rows(),
    }
}

/// Cuts for many rows per expert.
fn many_rows() -> Vec<[ExpertCut; 2]> {
    let hopper = |tile_n, turns, stages, pair| {
        ExpertCut::Sm90(HopperExpertTile { tile_n, turns, stages, pair, rows: 128 })
    };
    let (shared, turns) = (hopper(256, false, 4, false), hopper(192, true, 4, false));
    let (pair, pair_turns) = (hopper(256, false, 4, true), hopper(192, true, 4, true));
    vec![
        same(pair),
        same(pair_turns),
        [pair_turns, pair],
        [pair, pair_turns],
        [turns, shared],
        same(past(64, 128, 4)),
    ]
}

/// Weights in device memory.
struct Layer {
    extents: [usize; 4],
    gate_up: DeviceBuffer,
    down: DeviceBuffer,
}

/// How long a layer took.
struct Timed {
    extents: [usize; 4],
    tokens: usize,
    micros: f64,
    plan: String,
    /// What the first routing gave.
    out: Vec<bf16>,
}

impl Timed {
    /// The times, and by how much the largest number of the output the result differs from `planned`.
    fn line(&self, name: &str, cuts: &str, planned: &[bf16]) -> String {
        let Self { extents: [hidden, intermediate, experts, top_k], tokens, micros, plan, out } = self;
        let numbers = || out.iter().zip(planned).map(|(a, b)| (a.to_f32(), b.to_f32()));
        let most = numbers().map(|(_, b)| b.abs()).fold(0.0, f32::max);
        // NaN counts as a difference.
        let differs = numbers().map(|(a, b)| if a == b { 0.0 } else { (a - b).abs() / most });
        let differs = differs.fold(0.0, |all: f32, one| if one <= all { all } else { one });
        let flops = 6.0 * (tokens * top_k * hidden * intermediate) as f64;
        let missed = (1.0 - *top_k as f64 / *experts as f64).powi(*tokens as i32);
        let bytes = *experts as f64 * (1.0 - missed) * (6 * hidden * intermediate) as f64;
        format!(
            "{{\"layer\":\"{name}\",\"tokens\":{tokens},\"us\":{micros:.2},\"tflops\":{:.1},\"tb_s\":{:.3},\
             \"differs\":{differs:.1e},\"cuts\":\"{cuts}\",\"plan\":\"{plan}\"}}",
            flops / micros / 1e6,
            bytes / micros / 1e6,
        )
    }
}

/// bf16 numbers of about this size.
fn numbers(count: usize, size: f32) -> Vec<u8> {
    const EACH: usize = 1 << 16;
    let chunk = |n: usize| {
        let mut rng = Rng::new(n as u64);
        let own = EACH.min(count - n * EACH);
        (0..own).flat_map(|_| bf16::from_f32(size * rng.normal()).to_le_bytes()).collect::<Vec<_>>()
    };
    (0..count.div_ceil(EACH)).into_par_iter().map(chunk).collect::<Vec<_>>().concat()
}

fn filled(cuda: &Cuda, elements: usize, block: &[u8]) -> Outcome<DeviceBuffer> {
    let bytes = 2 * elements;
    let mut buffer = DeviceBuffer::new(cuda.device(), bytes as u64)?;
    for at in (0..bytes).step_by(block.len()) {
        buffer.copy_from_host(cuda.stream(), at as u64, &block[..block.len().min(bytes - at)])?;
    }
    Ok(buffer)
}

impl Layer {
    fn new(cuda: &Cuda, extents: [usize; 4]) -> Outcome<Self> {
        let [hidden, intermediate, experts, _] = extents;
        let block = numbers(BLOCK, 0.02);
        let gate_up = filled(cuda, experts * 2 * intermediate * hidden, &block)?;
        let down = filled(cuda, experts * hidden * intermediate, &block)?;
        Ok(Self { extents, gate_up, down })
    }

    fn problem(&self, tokens: usize) -> Result<flashcore::MoeProblem, Error> {
        let [hidden, intermediate, experts, top_k] = self.extents;
        let gate_up = ExpertLayout::dense([experts, 2 * intermediate, hidden])?;
        let down = ExpertLayout::dense([experts, hidden, intermediate])?;
        let routing = Routing::Given { ids: Index::I32, weights: DType::F32, top_k };
        Ok(MoeSpec::new(DType::BF16, Layout::matrix(tokens, hidden)?, gate_up, down, routing).parse()?)
    }

    /// Random routings in device memory.
    fn routings(&self, cuda: &Cuda, tokens: usize) -> Outcome<Vec<DeviceBuffer>> {
        let [_, _, experts, top_k] = self.extents;
        let mut rng = Rng::new(tokens as u64);
        let mut draw = || {
            let chosen = |_| rng.permutation(experts).into_iter().take(top_k).collect::<Vec<_>>();
            let ids: Vec<usize> = (0..tokens).flat_map(chosen).collect();
            let ids: Vec<u8> = ids.into_iter().flat_map(|id| (id as i32).to_le_bytes()).collect();
            DeviceBuffer::from_host(cuda.stream(), &ids)
        };
        Ok((0..ROUTINGS).map(|_| draw()).collect::<Result<Vec<_>, _>>()?)
    }

    fn time(&self, cuda: &Cuda, ready: &ReadyMoe) -> Outcome<Timed> {
        let tokens = ready.problem().tokens();
        let [hidden, _, _, top_k] = self.extents;
        let stream = cuda.stream();
        let x = filled(cuda, tokens * hidden, &numbers(tokens.min(64) * hidden, 1.0))?;
        let out = DeviceBuffer::new(cuda.device(), (2 * tokens * hidden) as u64)?;
        let weights: Vec<u8> = (0..tokens * top_k).flat_map(|_| 0.125f32.to_le_bytes()).collect();
        let weights = DeviceBuffer::from_host(stream, &weights)?;
        let ids = self.routings(cuda, tokens)?;
        let submit = |ids: &DeviceBuffer| {
            let tensors = MoeTensors {
                x: x.address(),
                gate_up: self.gate_up.address(),
                down: self.down.address(),
                out: out.address(),
                ids: ids.address(),
                weights: weights.address(),
                ..MoeTensors::default()
            };
            // SAFETY: the buffers hold what the problem's layouts reach, and outlive the replays.
            unsafe { ready.launch_raw(&tensors, stream.raw()) }
        };
        submit(&ids[0])?;
        let mut first = vec![bf16::ZERO; tokens * hidden];
        out.copy_to_host(stream, 0, bytemuck::cast_slice_mut(&mut first))?;
        let graph = Graph::capture(stream, |_| {
            ids.iter().try_for_each(submit).map_err(|error| match error {
                flashcore::cuda::Error::Driver(error) => error,
                other => panic!("{other}"),
            })
        })?;
        let plan = ready.plan().explain();
        let plan = plan.split(':').next().unwrap_or_default().to_owned();
        Ok(Timed {
            extents: self.extents,
            tokens,
            micros: median_of_replays(cuda, &graph)?,
            plan,
            out: first,
        })
    }
}

/// Microseconds of one routing: the median of several spans of replays.
fn median_of_replays(cuda: &Cuda, graph: &Graph) -> Outcome<f64> {
    let stream = cuda.stream();
    let (start, end) = (Event::timed(cuda.device())?, Event::timed(cuda.device())?);
    let span = |replays: usize| -> Outcome<f64> {
        start.record(stream)?;
        (0..replays).try_for_each(|_| graph.launch(stream))?;
        end.record(stream)?;
        end.synchronize()?;
        Ok(f64::from(end.milliseconds_since(&start)?) * 1e3 / (replays * ROUTINGS) as f64)
    };
    let once = span(2)?;
    let replays = ((50_000.0 / (once * ROUTINGS as f64)) as usize).clamp(1, 300);
    let mut spans = (0..5).map(|_| span(replays)).collect::<Outcome<Vec<_>>>()?;
    spans.sort_by(f64::total_cmp);
    Ok(spans[spans.len() / 2])
}
