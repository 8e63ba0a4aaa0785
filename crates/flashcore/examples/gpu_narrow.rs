//! Times of attention over E4M3 tensors on GPU 0 in several forms of the kernel, and whether they are right.
//!
//! `cargo run --release --example gpu_narrow CELL… [form=FORM,FORM,…] [ms=N] [check=N] [drift=KEYS]` prints one JSON object
//! per line. A cell is `SEQUENCE:DIM:full|causal[:blocks]`, with 16k tokens and 2048 features; a form is `rules` or
//! `CONSUMERSxKEYSxSTAGESxtiles|pairs|partsxturns|free`: when sums are settled, and whether consumers take turns.
//! `check=1` first runs the test kit's cases in each form, `drift` compares sums over so many keys with f64.

use flashcore::{
    DType, Dims, E4M3, Layout, Mask, Problem, Scales, Spec, Values,
    cuda::{
        Choice, Cuda, DeviceTensors, NarrowForm,
        driver::{DeviceBuffer, Event},
    },
};
use flashcore_core::HostCall;
use flashcore_kernels::forward_sm90::Settles;
use flashcore_testkit::{Rng, Rows, narrow, plain};

const TOKENS: usize = 16384;
const FEATURES: usize = 2048;

type Outcome<T> = Result<T, Box<dyn std::error::Error>>;

fn main() -> Outcome<()> {
    let args: Vec<String> = std::env::args().skip(1).collect();
    let option = |name: &str| args.iter().find_map(|arg| arg.strip_prefix(name)).map(str::to_owned);
    let forms = option("form=").unwrap_or_else(|| "rules".to_owned());
    let millis: f64 = option("ms=").map_or(Ok(300.0), |n| n.parse())?;
    for form in forms.split(',') {
        let cuda = Cuda::open(0)?.choosing(choice(form)?);
        if option("check=").is_some() {
            let failed = narrow::failures(&cuda, &narrow::cases(), 1);
            let first = failed.first().map_or_else(String::new, |text| text.chars().take(300).collect());
            println!("{{\"form\":\"{form}\",\"failed\":{},\"first\":{first:?}}}", failed.len());
        }
        if let Some(keys) = option("drift=") {
            println!("{{\"form\":\"{form}\",\"drift\":{:e}}}", drift(&cuda, keys.parse()?)?);
        }
    }
    let numbers = numbers();
    for cell in args.iter().filter(|arg| !arg.contains('=')) {
        let mut first = None;
        for form in forms.split(',') {
            let cuda = Cuda::open(0)?.choosing(choice(form)?);
            let line =
                Cell::new(&cuda, cell, &numbers).and_then(|it| it.run(&cuda, form, millis, &mut first));
            let failed = |error| format!("{{\"cell\":\"{cell}\",\"form\":\"{form}\",\"error\":\"{error}\"}}");
            println!("{}", line.unwrap_or_else(failed));
        }
    }
    Ok(())
}

fn choice(form: &str) -> Outcome<Choice> {
    if form == "rules" {
        return Ok(Choice::Rules);
    }
    let words: Vec<&str> = form.split('x').collect();
    let &[consumers, tile_n, stages, settles, turns] = &words[..] else {
        return Err("a form has five words".into());
    };
    let settles = match settles {
        "tiles" => Settles::Tiles,
        "pairs" => Settles::Pairs,
        "parts" => Settles::Parts,
        other => return Err(format!("sums are settled by tiles, pairs or parts, not {other}").into()),
    };
    Ok(Choice::Narrow(NarrowForm {
        consumers: consumers.parse()?,
        tile_n: tile_n.parse()?,
        stages: stages.parse()?,
        settles,
        in_turn: turns == "turns",
    }))
}

/// E4M3 numbers, N(0, 1), a little more than a power of two of them.
fn numbers() -> Vec<u8> {
    let mut rng = Rng::new(5);
    (0..(1 << 20) + 1040).map(|_| E4M3::from_f32(rng.normal()).to_bits()).collect()
}

/// How far the sum of all outputs is off, as a share of itself, over so many keys with values around 1.
fn drift(cuda: &Cuda, keys: usize) -> Outcome<f64> {
    let dim = 64;
    let [q, kv] = [16, keys].map(|seq| Layout::bhsd(Dims::new(1, 1, seq, dim)));
    let (q, kv) = (q?, kv?);
    let problem = Spec { out_dtype: Some(DType::F32), ..Spec::new(DType::E4M3, q, kv, kv) }.parse()?;
    let mut rng = Rng::new(3);
    let mut tensor = |rows: usize, shift: f32, factor: f32| -> Vec<E4M3> {
        (0..rows * dim).map(|_| E4M3::from_f32((shift + rng.normal()) * factor)).collect()
    };
    let (q, k, v) = (tensor(16, 0.0, 1.0), tensor(keys, 0.0, 1.0), tensor(keys, 1.0, 72.0));
    let mut out = vec![0f32; 16 * dim];
    let mut call = HostCall::bind(&problem, Values::NONE, [&q[..], &k, &v], &mut out, None)?;
    flashcore::Backend::forward(cuda, &mut call)?;
    let oracle = plain::reference(call.instance(), call.inputs(), Rows::ALL);
    let [got, expected]: [f64; 2] = [out.iter().map(|&x| f64::from(x)).sum(), oracle.out.iter().sum()];
    Ok(got / expected - 1.0)
}

/// A problem with its tensors.
struct Cell {
    name: String,
    problem: Problem,
    /// Q, K, V, the output, and factors that are all 1.
    buffers: [DeviceBuffer; 5],
}

impl Cell {
    fn new(cuda: &Cuda, name: &str, numbers: &[u8]) -> Outcome<Self> {
        let words: Vec<&str> = name.split(':').collect();
        let &[seq, dim, mask, ref factors @ ..] = &words[..] else {
            return Err("a cell has three words".into());
        };
        let (seq, dim): (usize, usize) = (seq.parse()?, dim.parse()?);
        let layout = Layout::bshd(Dims::new((TOKENS / seq).max(1), FEATURES / dim, seq, dim))?;
        let mask = if mask == "causal" { Mask::CAUSAL } else { Mask::NONE };
        let scales =
            Some(if factors.is_empty() { Scales::PerTensor } else { Scales::PerBlock { q: 64, k: 128 } });
        let spec = Spec {
            mask,
            scales,
            out_dtype: Some(DType::BF16),
            ..Spec::new(DType::E4M3, layout, layout, layout)
        };
        let problem = spec.parse()?;
        let bytes = layout.span() as u64;
        let stream = cuda.stream();
        let filled = |bytes: u64, numbers: &[u8]| -> Outcome<DeviceBuffer> {
            let mut buffer = DeviceBuffer::new(cuda.device(), bytes)?;
            for at in (0..bytes).step_by(numbers.len()) {
                let len = numbers.len().min((bytes - at) as usize);
                buffer.copy_from_host(stream, at, &numbers[..len])?;
            }
            Ok(buffer)
        };
        let ones: Vec<u8> = std::iter::repeat_n(1f32.to_le_bytes(), 1 << 12).flatten().collect();
        let buffers = [
            filled(bytes, numbers)?,
            filled(bytes, &numbers[64..])?,
            filled(bytes, &numbers[144..])?,
            DeviceBuffer::new(cuda.device(), 2 * bytes)?,
            filled(1 << 20, &ones)?,
        ];
        Ok(Self { name: name.to_owned(), problem, buffers })
    }

    /// Runs one form: its time, how far its output is from that of the first, and whether two runs agree.
    fn run(&self, cuda: &Cuda, form: &str, millis: f64, first: &mut Option<Vec<f32>>) -> Outcome<String> {
        let (ready, stream) = (cuda.prepare(&self.problem)?, cuda.stream());
        let [q, k, v, out, ones] = self.buffers.each_ref().map(DeviceBuffer::address);
        let tensors = DeviceTensors { q, k, v, out, factors: [ones; 3], ..DeviceTensors::default() };
        // SAFETY: the buffers hold what the layouts reach, and live as long as the cell.
        let submit = || unsafe { ready.launch_raw(&tensors, stream.raw()) };
        submit()?;
        let got = self.output(cuda)?;
        submit()?;
        let same = got == self.output(cuda)?;
        let apart = first.as_ref().map_or(0.0, |first| apart(first, &got));
        first.get_or_insert(got);
        let (start, end) = (Event::timed(cuda.device())?, Event::timed(cuda.device())?);
        let span = |calls: usize| -> Outcome<f64> {
            start.record(stream)?;
            (0..calls).try_for_each(|_| submit())?;
            end.record(stream)?;
            end.synchronize()?;
            Ok(f64::from(end.milliseconds_since(&start)?) / calls as f64)
        };
        let once = span(3)?;
        let calls = ((millis / once / 3.0) as usize).clamp(2, 5000);
        let (_, one, two) = (span(calls)?, span(calls)?, span(calls)?);
        let ms = one.min(two);
        Ok(format!(
            "{{\"cell\":\"{}\",\"form\":\"{form}\",\"us\":{:.1},\"tflops\":{:.1},\"same_bits\":{same},\"apart\":{apart:e},\"kernel\":\"{}\"}}",
            self.name,
            ms * 1e3,
            self.problem.flops() / ms / 1e9,
            ready.plan().kernel().name()
        ))
    }

    fn output(&self, cuda: &Cuda) -> Outcome<Vec<f32>> {
        let mut bytes = vec![0; self.buffers[3].len() as usize];
        self.buffers[3].copy_to_host(cuda.stream(), 0, &mut bytes)?;
        let number = |pair: &[u8]| flashcore::bf16::from_le_bytes([pair[0], pair[1]]).to_f32();
        // Every 61st number is as good as all.
        Ok(bytes.chunks_exact(2).step_by(61).map(number).collect())
    }
}

/// Root mean square of the differences over that of the numbers.
fn apart(x: &[f32], y: &[f32]) -> f32 {
    let sum = |f: &dyn Fn(f32, f32) -> f32| x.iter().zip(y).map(|(&x, &y)| f64::from(f(x, y))).sum::<f64>();
    (sum(&|x, y| (x - y) * (x - y)) / sum(&|x, _| x * x)).sqrt() as f32
}
