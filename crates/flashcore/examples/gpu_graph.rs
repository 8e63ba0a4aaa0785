//! A captured graph stays right while lengths and page tables change, on GPU 0: every replay against the CPU backend.
//!
//! `cargo run --release --example gpu_graph [steps]`. Half of the batch entries are prompts and chunks of them where queries
//! are packed; lengths of −1 and page numbers of nobody stand where nothing may be read.
#![allow(unsafe_code)] // Launching kernels.

use flashcore::{
    Backend, DType, Dims, Layout, Lengths, Mask, PageTable, Pages, Sequences, Spec, Values,
    cuda::{
        Cuda, DeviceTensors,
        driver::{DeviceBuffer, Graph},
    },
    f16,
};
use flashcore_core::{Data, DataMut, HostCall};
use flashcore_cpu::Cpu;
use flashcore_testkit::Rng;

const HEADS: usize = 8;
const HEADS_KV: usize = 2;
const DIM: usize = 64;
const SEQUENCES: usize = 6;
/// Keys of a page, pages, and pages of a sequence at most.
const PAGE: usize = 16;
const PAGES: usize = 300;
const COLUMNS: usize = 40;
/// Queries of each sequence at most where they are packed, and rows of Q.
const LONGEST: usize = 70;
const ROWS: usize = 160;
/// How far a result may be from the CPU's.
const TOLERANCE: f32 = 4e-3;

type Outcome<T> = Result<T, Box<dyn std::error::Error>>;

fn main() -> Outcome<()> {
    let steps = std::env::args().nth(1).map_or(Ok(1000), |text| text.parse())?;
    let cuda = Cuda::open(0)?;
    for (packed, invariant) in [(false, false), (true, false), (false, true), (true, true)] {
        let worst = replay(&cuda, steps, packed, invariant)?;
        let kind = if packed { "packed, prompts among them" } else { "one query each" };
        println!("{steps} steps, {kind}, batch invariant {invariant}: off by {worst:.5} at most");
        if worst.is_nan() || worst > TOLERANCE {
            return Err("wrong".into());
        }
    }
    Ok(())
}

fn numbers(count: usize, seed: u64) -> Vec<f16> {
    let mut rng = Rng::new(seed);
    (0..count).map(|_| f16::from_f32(rng.normal())).collect()
}

fn bytes(numbers: &[f16]) -> Vec<u8> {
    numbers.iter().flat_map(|x| x.to_le_bytes()).collect()
}

fn words(numbers: &[i32]) -> Vec<u8> {
    numbers.iter().flat_map(|n| n.to_le_bytes()).collect()
}

/// The numbers of one step: offsets of queries, keys, and pages.
struct Step {
    offsets: Vec<i32>,
    keys: Vec<i32>,
    table: Vec<i32>,
}

impl Step {
    fn draw(rng: &mut Rng, packed: bool) -> Self {
        let mut offsets = vec![0];
        let mut keys = Vec::new();
        let mut table = Vec::new();
        for n in 0..SEQUENCES {
            let queries = if packed && n % 2 == 1 { rng.range(0..=LONGEST - 20 * (n / 2)) } else { 1 };
            offsets.push((offsets[n] + queries as i32).min(ROWS as i32));
            let length = rng.range(0..=COLUMNS * PAGE + 1) as i32 - 1;
            keys.push(length);
            let used = (length.max(0) as usize).div_ceil(PAGE);
            let own = rng.permutation(PAGES).into_iter().take(used).map(|page| page as i32);
            let row: Vec<i32> = own.chain([-1, i32::MAX].into_iter().cycle()).take(COLUMNS).collect();
            table.extend(row);
        }
        Self { offsets, keys, table }
    }

    fn values(&self, packed: bool) -> Values {
        let whole = |numbers: &[i32]| numbers.iter().map(|&n| n.max(0) as u32).collect::<Vec<_>>();
        let keys = whole(&self.keys);
        let lengths =
            if packed { Lengths::packed_queries(whole(&self.offsets), keys) } else { Lengths::keys(keys) };
        Values { lengths, table: Some(PageTable::new(self.table.clone(), COLUMNS)), ..Values::default() }
    }
}

fn spec(q: Layout, kv: Layout, packed: bool, batch_invariant: bool) -> Spec {
    let sequences = match packed {
        true => Sequences::PackedQueries { count: SEQUENCES, longest_q: LONGEST },
        false => Sequences::Used { q: false, kv: true },
    };
    let pages = Some(Pages::new(COLUMNS));
    let problem = Spec::new(DType::F16, q, kv, kv);
    Spec { out: Some(q), mask: Mask::CAUSAL, sequences, pages, batch_invariant, ..problem }
}

/// Captures one launch, replays it over other numbers; returns how far any result was from the CPU's.
fn replay(cuda: &Cuda, steps: usize, packed: bool, invariant: bool) -> Outcome<f32> {
    let (stream, rows) = (cuda.stream(), if packed { ROWS } else { SEQUENCES });
    let q_dims = if packed { Dims::new(1, HEADS, ROWS, DIM) } else { Dims::new(SEQUENCES, HEADS, 1, DIM) };
    let (q, kv) = (Layout::bshd(q_dims)?, Layout::bshd(Dims::new(PAGES, HEADS_KV, PAGE, DIM))?);
    let spec = spec(q, kv, packed, invariant);
    let ready = cuda.prepare(&spec.clone().parse()?)?;
    let elements = rows * HEADS * DIM;
    let host = [numbers(elements, 1), numbers(kv.span(), 2), numbers(kv.span(), 3)];
    let [dq, dk, dv] = host.each_ref().map(|tensor| DeviceBuffer::from_host(stream, &bytes(tensor)));
    let (dq, dk, dv) = (dq?, dk?, dv?);
    let out = DeviceBuffer::from_host(stream, &vec![0; 2 * elements])?;
    let mut rng = Rng::new(9);
    let first = Step::draw(&mut rng, packed);
    let mut held =
        [&first.offsets, &first.keys, &first.table].map(|n| DeviceBuffer::from_host(stream, &words(n)));
    let [Ok(offsets), Ok(keys), Ok(table)] = &mut held else { return Err("no memory".into()) };
    let tensors = DeviceTensors {
        q: dq.address(),
        k: dk.address(),
        v: dv.address(),
        out: out.address(),
        lengths_q: offsets.address(),
        lengths_kv: keys.address(),
        table: table.address(),
        ..DeviceTensors::default()
    };
    let graph = Graph::capture(stream, |stream| {
        // SAFETY: the buffers hold what the problem's layouts reach, and outlive the replays.
        unsafe { ready.launch(&tensors, stream) }.map_err(|error| match error {
            flashcore::cuda::Error::Driver(error) => error,
            other => panic!("{other}"),
        })
    })?;
    let (cpu, mut worst) = (Cpu::new(), 0.0f32);
    for _ in 0..steps {
        let step = Step::draw(&mut rng, packed);
        for (buffer, numbers) in
            [(&mut *offsets, &step.offsets), (&mut *keys, &step.keys), (&mut *table, &step.table)]
        {
            buffer.copy_from_host(stream, 0, &words(numbers))?;
        }
        graph.launch(stream)?;
        let got = out.to_host(stream)?;
        // Rows that no sequence has are nobody's.
        let used = if packed { step.offsets[SEQUENCES] as usize } else { SEQUENCES };
        let dims = if packed { Dims { seq: used, ..q_dims } } else { q_dims };
        let spec = Spec { q: Layout::bshd(dims)?, out: Some(Layout::bshd(dims)?), ..spec.clone() };
        let wanted = on_cpu(&cpu, spec, &step.values(packed), &host, used * HEADS * DIM)?;
        let got = got.chunks_exact(2).map(|pair| f16::from_le_bytes([pair[0], pair[1]]).to_f32());
        let pairs = got.zip(&wanted);
        worst = pairs.map(|(x, y)| (x - y.to_f32()).abs()).fold(worst, f32::max);
    }
    Ok(worst)
}

fn on_cpu(
    cpu: &Cpu,
    spec: Spec,
    values: &Values,
    host: &[Vec<f16>; 3],
    elements: usize,
) -> Outcome<Vec<f16>> {
    let (problem, [q, k, v]) = (spec.with(values).parse()?, host);
    let mut out = vec![f16::ZERO; elements];
    let inputs = [Data::F16(&q[..elements]), Data::F16(k), Data::F16(v)];
    let mut call = HostCall::bind_erased(&problem, values, inputs, DataMut::F16(&mut out), None)?;
    cpu.forward(&mut call)?;
    Ok(out)
}
