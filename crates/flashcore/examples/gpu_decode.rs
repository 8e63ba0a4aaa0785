//! Times of few queries over many keys on GPU 0, as inference engines call it: replayed graphs, with or without pages.
//!
//! `cargo run --release --example gpu_decode CASES [SECONDS]` reads one JSON object per line:
//!
//! ```json
//! {"name": "two", "sequences": [[1, 8192], [512, 3000]], "heads": [32, 8], "page": 16, "invariant": false, "tiles": [null]}
//! ```
//!
//! Sequences are queries and keys. `page` 0 is a dense cache of equal sequences, batch x heads x sequence x dim; otherwise
//! pages are permuted, and where keys fit in L2, several caches are read in turn. Queries are packed and the mask is causal
//! where sequences differ in queries. With `"cache": "e4m3"` keys and values have 8 bits, with a factor. A tile is what the plan may choose in its JSON form, or null for what it does choose.
//! Prints one JSON object per tile, the largest difference from the first tile's output among its fields.
#![allow(unsafe_code)] // Launching kernels.

use std::{
    io::BufRead,
    sync::Arc,
    time::{Duration, Instant},
};

use flashcore::{
    DType, Dims, Layout, Mask, Pages, Problem, Scales, Sequences, Spec,
    cuda::{
        Cuda, DeviceTensors, Ready, Tile,
        driver::{DeviceBuffer, Event, Graph},
    },
};
use flashcore_testkit::Rng;
use serde_json::{Value, json};

/// Features of a head.
const DIM: usize = 128;
/// Elements of each pool: what the largest cell takes.
const POOL: usize = 64 * 8 * 8192 * DIM;
/// Elements of the block of random numbers that pools repeat: an odd number of rows of no cell.
const BLOCK: usize = (4 << 20) + 1031;
/// Bytes of keys and values after which nothing is left in L2.
const BEYOND_L2: usize = 320 << 20;
/// Launches of a graph at least, and microseconds of a span.
const LAUNCHES: usize = 8;
const SPAN: f64 = 4_000.0;
const SPANS: usize = 5;

type Outcome<T> = Result<T, Box<dyn std::error::Error>>;

fn main() -> Outcome<()> {
    let args: Vec<String> = std::env::args().skip(1).collect();
    let file = args.first().ok_or("usage: gpu_decode CASES [SECONDS]")?;
    let seconds = args.get(1).map_or(Ok(600.0), |text| text.parse())?;
    let end = Instant::now() + Duration::from_secs_f64(seconds);
    let cuda = Cuda::open(0)?;
    let lines = std::io::BufReader::new(std::fs::File::open(file)?).lines();
    let cells = lines.map(|line| Cell::new(&serde_json::from_str(&line?)?)).collect::<Outcome<Vec<_>>>()?;
    let ready = prepare(&cuda, &cells);
    eprintln!("kernels are ready {:.1} s before the end", (end - Instant::now()).as_secs_f64());
    let pools = [pool(&cuda, 1)?, pool(&cuda, 2)?];
    for (cell, ready) in cells.iter().zip(ready) {
        let bound = Bound::new(&cuda, cell, &pools)?;
        let mut first = None;
        for (tile, ready) in cell.tiles.iter().zip(ready) {
            if Instant::now() > end {
                return Err("out of time".into());
            }
            let result = ready.and_then(|ready| bound.measure(&cuda, cell, &ready, &mut first));
            let result = result.unwrap_or_else(|error| json!({ "error": error.to_string() }));
            println!("{}", json!({ "cell": cell.name, "tile": tile, "result": result }));
        }
    }
    Ok(())
}

/// What is timed.
struct Cell {
    name: Value,
    problem: Problem,
    /// Queries and keys of each sequence.
    sequences: Vec<[usize; 2]>,
    page: usize,
    heads_kv: usize,
    tiles: Vec<Value>,
}

impl Cell {
    fn new(given: &Value) -> Outcome<Self> {
        let tiles = given["tiles"].as_array().cloned().unwrap_or_else(|| vec![Value::Null]);
        let sequences: Vec<[usize; 2]> = serde_json::from_value(given["sequences"].clone())?;
        let heads: [usize; 2] = serde_json::from_value(given["heads"].clone())?;
        let page = given["page"].as_u64().unwrap_or_default() as usize;
        let problem = problem(given, &sequences, heads, page)?;
        let name = json!([given["name"], given["invariant"]]);
        Ok(Self { name, problem, sequences, page, heads_kv: heads[1], tiles })
    }

    /// Page numbers of each sequence.
    fn columns(&self) -> usize {
        self.problem.pages().map_or(0, |pages| pages.columns)
    }

    /// Bytes of the keys and values of all sequences.
    fn bytes(&self) -> usize {
        let keys: usize = self.sequences.iter().map(|[_, keys]| keys).sum();
        keys * self.heads_kv * DIM * 2 * self.problem.kv_dtype().bytes()
    }
}

fn problem(given: &Value, sequences: &[[usize; 2]], heads: [usize; 2], page: usize) -> Outcome<Problem> {
    let most = |n: usize| sequences.iter().map(|sequence| sequence[n]).max().unwrap_or_default();
    let (batch, [queries, keys]) = (sequences.len(), [most(0), most(1)]);
    let packed = sequences.iter().any(|sequence| sequence[0] != queries);
    let all = sequences.iter().map(|sequence| sequence[0]).sum();
    let q = Layout::bshd(match packed {
        true => Dims::new(1, heads[0], all, DIM),
        false => Dims::new(batch, heads[0], queries, DIM),
    })?;
    let kv = match page {
        0 => Layout::bhsd(Dims::new(batch, heads[1], keys, DIM))?,
        _ => Layout::bshd(Dims::new(POOL / (page * heads[1] * DIM), heads[1], page, DIM))?,
    };
    let lengths = match (page > 0, packed) {
        (false, _) => Sequences::Uniform,
        (true, false) => Sequences::Used { q: false, kv: true },
        (true, true) => Sequences::PackedQueries { count: batch, longest_q: queries },
    };
    let pages = Pages { longest_kv: Some(keys), ..Pages::new(keys.div_ceil(page.max(1))) };
    let spec = Spec {
        out: Some(q),
        mask: if packed { Mask::CAUSAL } else { Mask::NONE },
        sequences: lengths,
        pages: (page > 0).then_some(pages),
        batch_invariant: given["invariant"].as_bool().unwrap_or_default(),
        ..Spec::new(DType::BF16, q, kv, kv)
    };
    let cached = given["cache"].as_str().map(str::parse::<DType>).transpose()?;
    let scales = cached.map(|_| Scales::PerTensor);
    Ok(Spec { kv_dtype: cached, scales, ..spec }.parse()?)
}

/// All kernels, built side by side.
fn prepare(cuda: &Cuda, cells: &[Cell]) -> Vec<Vec<Outcome<Arc<Ready>>>> {
    let tasks: Vec<_> =
        cells.iter().flat_map(|cell| cell.tiles.iter().map(move |tile| (cell, tile))).collect();
    let next = std::sync::atomic::AtomicUsize::new(0);
    std::thread::scope(|scope| {
        for _ in 0..std::thread::available_parallelism().map_or(1, usize::from) {
            scope.spawn(|| {
                while let Some((cell, tile)) =
                    tasks.get(next.fetch_add(1, std::sync::atomic::Ordering::Relaxed))
                {
                    // Errors come again below, where they are told.
                    drop(one(cuda, cell, tile));
                }
            });
        }
    });
    cells.iter().map(|cell| cell.tiles.iter().map(|tile| one(cuda, cell, tile)).collect()).collect()
}

fn one(cuda: &Cuda, cell: &Cell, tile: &Value) -> Outcome<Arc<Ready>> {
    if tile.is_null() {
        return Ok(cuda.prepare(&cell.problem)?);
    }
    let tile: Tile = serde_json::from_value(json!({ "decode": tile }))?;
    Ok(cuda.prepare_tile(&cell.problem, tile)?)
}

/// Random bf16 numbers.
fn pool(cuda: &Cuda, seed: u64) -> Outcome<DeviceBuffer> {
    let mut rng = Rng::new(seed);
    let block: Vec<u8> =
        (0..BLOCK).flat_map(|_| flashcore::bf16::from_f32(rng.normal()).to_le_bytes()).collect();
    let mut buffer = DeviceBuffer::new(cuda.device(), 2 * POOL as u64)?;
    for at in (0..2 * POOL).step_by(block.len()) {
        buffer.copy_from_host(cuda.stream(), at as u64, &block[..block.len().min(2 * POOL - at)])?;
    }
    Ok(buffer)
}

/// Elements of the queries, and of the output.
fn elements(cell: &Cell) -> usize {
    cell.problem.q().dims().array().into_iter().product()
}

/// A cell in device memory.
struct Bound<'a> {
    pools: &'a [DeviceBuffer; 2],
    q: DeviceBuffer,
    out: DeviceBuffer,
    /// Offsets of packed queries, and keys of each sequence.
    lengths: [DeviceBuffer; 2],
    /// Page tables that are taken in turn.
    tables: Vec<DeviceBuffer>,
    /// The factor of keys and values of 8 bits.
    factor: DeviceBuffer,
}

impl<'a> Bound<'a> {
    fn new(cuda: &Cuda, cell: &Cell, pools: &'a [DeviceBuffer; 2]) -> Outcome<Self> {
        let (stream, elements) = (cuda.stream(), elements(cell));
        let mut rng = Rng::new(7);
        let q: Vec<u8> =
            (0..elements).flat_map(|_| flashcore::bf16::from_f32(rng.normal()).to_le_bytes()).collect();
        let words = |numbers: &[i32]| numbers.iter().flat_map(|n| n.to_le_bytes()).collect::<Vec<u8>>();
        let keys: Vec<i32> = cell.sequences.iter().map(|sequence| sequence[1] as i32).collect();
        let mut offsets = vec![0];
        offsets.extend(cell.sequences.iter().scan(0, |sum, sequence| {
            *sum += sequence[0] as i32;
            Some(*sum)
        }));
        let mut tables = Vec::new();
        if cell.page > 0 {
            let numbers = cell.columns() * cell.sequences.len();
            let pages = cell.problem.k().dims().batch;
            let shuffled = rng.permutation(pages);
            let turns = (pages / numbers).min(BEYOND_L2 / cell.bytes() + 1).max(1);
            // Tables with room for more pages than there are name some of them twice.
            let mut shuffled = shuffled.iter().cycle();
            for _ in 0..turns {
                let own: Vec<i32> = shuffled.by_ref().take(numbers).map(|&page| page as i32).collect();
                tables.push(DeviceBuffer::from_host(stream, &words(&own))?);
            }
        }
        Ok(Self {
            pools,
            q: DeviceBuffer::from_host(stream, &q)?,
            out: DeviceBuffer::new(cuda.device(), 2 * elements as u64)?,
            lengths: [
                DeviceBuffer::from_host(stream, &words(&offsets))?,
                DeviceBuffer::from_host(stream, &words(&keys))?,
            ],
            tables,
            factor: DeviceBuffer::from_host(stream, &0.01f32.to_le_bytes())?,
        })
    }

    fn tensors(&self, turn: usize) -> DeviceTensors {
        let table = self.tables.get(turn % self.tables.len().max(1));
        DeviceTensors {
            q: self.q.address(),
            k: self.pools[0].address(),
            v: self.pools[1].address(),
            out: self.out.address(),
            lengths_q: self.lengths[0].address(),
            lengths_kv: self.lengths[1].address(),
            table: table.map_or(0, DeviceBuffer::address),
            factors: [0, self.factor.address(), self.factor.address()],
            ..DeviceTensors::default()
        }
    }

    /// Microseconds of a launch, the kernel, and how far its output is from the first one's.
    fn measure(
        &self,
        cuda: &Cuda,
        cell: &Cell,
        ready: &Ready,
        first: &mut Option<Vec<f32>>,
    ) -> Outcome<Value> {
        let stream = cuda.stream();
        let launch = |turn: usize| {
            // SAFETY: the buffers hold what the problem's layouts reach, and outlive the replays.
            unsafe { ready.launch(&self.tensors(turn), stream) }
        };
        launch(0)?;
        let mut bytes = vec![0; 2 * elements(cell)];
        self.out.copy_to_host(stream, 0, &mut bytes)?;
        let numbers: Vec<f32> = bytes
            .chunks_exact(2)
            .map(|pair| flashcore::bf16::from_le_bytes([pair[0], pair[1]]).to_f32())
            .collect();
        let first = first.get_or_insert_with(|| numbers.clone());
        let off = numbers.iter().zip(first.iter()).map(|(x, y)| (x - y).abs()).fold(0.0, f32::max);
        let launches = self.tables.len().max(1) * LAUNCHES.div_ceil(self.tables.len().max(1));
        let graph = Graph::capture(stream, |_| {
            (0..launches).try_for_each(launch).map_err(|error| match error {
                flashcore::cuda::Error::Driver(error) => error,
                other => panic!("{other}"),
            })
        })?;
        let micros = median(cuda, &graph, launches)?;
        let explained = ready.plan().explain();
        let kernel = explained.lines().next().unwrap_or_default();
        let attributes = ready.kernel().attributes();
        let tb_s = cell.bytes() as f64 / micros / 1e6;
        Ok(json!({
            "us": micros, "tb_s": tb_s, "off": off, "kernel": kernel, "registers": attributes.registers, "local": attributes.local,
        }))
    }
}

/// Microseconds of one of a graph's launches: the median of several spans of replays.
fn median(cuda: &Cuda, graph: &Graph, launches: usize) -> Outcome<f64> {
    let stream = cuda.stream();
    let (start, end) = (Event::timed(cuda.device())?, Event::timed(cuda.device())?);
    let span = |replays: usize| -> Outcome<f64> {
        start.record(stream)?;
        (0..replays).try_for_each(|_| graph.launch(stream))?;
        end.record(stream)?;
        end.synchronize()?;
        Ok(f64::from(end.milliseconds_since(&start)?) * 1e3 / (replays * launches) as f64)
    };
    let once = span(1)?.min(span(1)?);
    let replays = ((SPAN / (once * launches as f64)) as usize).clamp(1, 400);
    let mut spans = (0..SPANS).map(|_| span(replays)).collect::<Outcome<Vec<_>>>()?;
    spans.sort_by(f64::total_cmp);
    Ok(spans[spans.len() / 2])
}
