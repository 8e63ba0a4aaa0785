//! Times of expert layers as models have them, on GPU 0: replayed graphs over several random routings.
//!
//! `cargo run --release --example gpu_moe [layer] [tokens,tokens,…] [tiles]` prints one JSON object per line; `tiles` also
//! tries tiles that the plan does not choose.

use flashcore::{
    DType, Error, ExpertLayout, Index, Layout, MoeSpec, Routing,
    cuda::{
        Cuda, ExpertTile, MoeTensors, ReadyMoe,
        driver::{DeviceBuffer, Event, Graph},
    },
};
use flashcore_testkit::Rng;

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
    let only = args.first().map_or("", String::as_str);
    let tokens: Vec<usize> = match args.get(1) {
        Some(list) => list.split(',').map(str::parse).collect::<Result<_, _>>()?,
        None => TOKENS.to_vec(),
    };
    let cuda = Cuda::open(0)?;
    for (name, extents) in LAYERS.into_iter().filter(|(name, _)| name.contains(only)) {
        let layer = Layer::new(&cuda, extents)?;
        for &tokens in &tokens {
            let problem = layer.problem(tokens)?;
            let mut ready = vec![cuda.prepare_moe(&problem)?];
            if args.get(2).is_some_and(|word| word == "tiles") {
                let tried = tiles(tokens * extents[3] / extents[2]);
                ready.extend(
                    tried
                        .into_iter()
                        .filter_map(|tiles| cuda.prepare_moe_tiles(&problem, tiles).ok().map(Into::into)),
                );
            }
            for ready in ready {
                let (micros, kernel) = layer.time(&cuda, &ready)?;
                let [hidden, intermediate, experts, top_k] = extents;
                let flops = 6.0 * (tokens * top_k * hidden * intermediate) as f64;
                let used = experts as f64 * (1.0 - (1.0 - top_k as f64 / experts as f64).powi(tokens as i32));
                let bytes = used * (6 * hidden * intermediate) as f64;
                println!(
                    "{{\"layer\":\"{name}\",\"tokens\":{tokens},\"us\":{micros:.2},\"tflops\":{:.1},\"tb_s\":{:.3},\"kernel\":\"{kernel}\"}}",
                    flops / micros / 1e6,
                    bytes / micros / 1e6,
                );
            }
        }
    }
    Ok(())
}

/// Pairs of tiles that are tried for so many rows per expert.
fn tiles(rows: usize) -> Vec<[ExpertTile; 2]> {
    let tile = |tile_m, tile_n, warps, stages, ctas_per_sm| ExpertTile {
        tile_m,
        tile_n,
        warps,
        stages,
        ctas_per_sm,
    };
    let narrow = |m, stages, ctas| tile(m, 64, [1, 2], stages, ctas);
    let wide = |m, stages, ctas| tile(m, 128, [1, 4], stages, ctas);
    let same = |tile: ExpertTile| [tile, tile];
    match rows {
        0..=12 => vec![
            same(narrow(16, 4, 4)),
            same(narrow(16, 8, 2)),
            same(narrow(16, 6, 3)),
            same(wide(16, 4, 2)),
            same(wide(16, 4, 3)),
            same(wide(16, 8, 1)),
            same(tile(16, 256, [1, 4], 3, 2)),
            [narrow(16, 6, 3), wide(16, 6, 2)],
            [wide(16, 6, 2), narrow(16, 6, 3)],
            same(wide(32, 5, 2)),
        ],
        13..=40 => vec![
            same(wide(32, 5, 2)),
            same(wide(32, 3, 3)),
            same(tile(32, 256, [1, 4], 3, 2)),
            same(wide(64, 4, 2)),
            same(tile(64, 128, [2, 2], 4, 2)),
            same(tile(64, 128, [2, 2], 3, 3)),
            same(tile(64, 256, [1, 4], 4, 1)),
            same(tile(64, 256, [2, 4], 4, 1)),
        ],
        _ => vec![
            same(tile(64, 128, [2, 2], 4, 2)),
            same(tile(64, 256, [1, 4], 4, 1)),
            same(tile(64, 256, [1, 4], 2, 2)),
            same(tile(128, 128, [2, 2], 3, 2)),
            same(tile(128, 128, [2, 4], 3, 2)),
            same(tile(128, 128, [4, 2], 3, 2)),
            same(tile(128, 256, [2, 4], 4, 1)),
            same(tile(128, 256, [2, 4], 3, 1)),
        ],
    }
}

/// Weights in device memory.
struct Layer {
    extents: [usize; 4],
    gate_up: DeviceBuffer,
    down: DeviceBuffer,
}

/// bf16 numbers of about this size.
fn numbers(count: usize, size: f32) -> Vec<u8> {
    let mut rng = Rng::new(count as u64);
    (0..count).flat_map(|_| flashcore::bf16::from_f32(size * rng.normal()).to_le_bytes()).collect()
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

    /// Microseconds of one layer, and its kernel.
    fn time(&self, cuda: &Cuda, ready: &ReadyMoe) -> Outcome<(f64, String)> {
        let tokens = ready.problem().tokens();
        let [hidden, _, experts, top_k] = self.extents;
        let stream = cuda.stream();
        let x = filled(cuda, tokens * hidden, &numbers(tokens.min(64) * hidden, 1.0))?;
        let out = DeviceBuffer::new(cuda.device(), (2 * tokens * hidden) as u64)?;
        let weights: Vec<u8> = (0..tokens * top_k).flat_map(|_| 0.125f32.to_le_bytes()).collect();
        let weights = DeviceBuffer::from_host(stream, &weights)?;
        let mut rng = Rng::new(tokens as u64);
        let mut draw = || {
            let chosen = |_| rng.permutation(experts).into_iter().take(top_k).collect::<Vec<_>>();
            let ids: Vec<usize> = (0..tokens).flat_map(chosen).collect();
            let ids: Vec<u8> = ids.into_iter().flat_map(|id| (id as i32).to_le_bytes()).collect();
            DeviceBuffer::from_host(stream, &ids)
        };
        let ids = (0..ROUTINGS).map(|_| draw()).collect::<Result<Vec<_>, _>>()?;
        let tensors = |ids: &DeviceBuffer| MoeTensors {
            x: x.address(),
            gate_up: self.gate_up.address(),
            down: self.down.address(),
            out: out.address(),
            ids: ids.address(),
            weights: weights.address(),
            ..MoeTensors::default()
        };
        let submit = |ids: &DeviceBuffer| {
            // SAFETY: the buffers hold what the problem's layouts reach, and outlive the replays.
            unsafe { ready.launch_raw(&tensors(ids), stream.raw()) }
        };
        submit(&ids[0])?;
        stream.synchronize()?;
        let graph = Graph::capture(stream, |_| {
            ids.iter().try_for_each(submit).map_err(|error| match error {
                flashcore::cuda::Error::Driver(error) => error,
                other => panic!("{other}"),
            })
        })?;
        let names = ready.plan().explain();
        let names = names.split(':').next().unwrap_or_default().to_owned();
        Ok((median_of_replays(cuda, &graph)?, names))
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
    let replays = ((20_000.0 / (once * ROUTINGS as f64)) as usize).clamp(1, 200);
    let mut spans = (0..7).map(|_| span(replays)).collect::<Outcome<Vec<_>>>()?;
    spans.sort_by(f64::total_cmp);
    Ok(spans[spans.len() / 2])
}
