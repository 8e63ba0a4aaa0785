//! Times of gradients on GPU 0, one form of the kernels beside the other, and whether they agree.
//!
//! `cargo run --release --example gpu_backward CELL… [form=FORM,FORM,…] [ms=N]` prints one JSON object per line. A cell is
//! `SEQUENCE:DIM[/DIM_V]:full|causal[:KEY_HEADS[:QUERY_HEADS]]`, with 16k tokens and 2048 features of queries unless it says
//! otherwise; `pSEQUENCE` packs sequences of that length, `rCOUNT` as many of random lengths (whose `tflops` mean nothing).
//! Forms are `split`, `fused`, `general`, `rules`, `fSTEPxSTAGExSTAGExCONSUMERxMOVER`, a tile with its registers, and
//! `KEYS+QUERIES`, two tiles of the split form: `pSTEPxSTAGExSTAGExPLACES`, `a…` or `k…` for keys with consumers that are
//! paired, paired with the first ahead, or not, `q…` for queries.

use flashcore::{
    BackwardProblem, BackwardSpec, DType, Dims, Layout, Lengths, Mask, Spec, Values,
    cuda::{
        BackwardTensors, Choice, Cuda, DeviceTensors, Family, Form,
        driver::{DeviceBuffer, Event},
    },
};
use flashcore_kernels::backward_sm90::{Order, Shape};
use flashcore_testkit::Rng;

const TOKENS: usize = 16384;
const FEATURES: usize = 2048;

type Outcome<T> = Result<T, Box<dyn std::error::Error>>;

fn main() -> Outcome<()> {
    let args: Vec<String> = std::env::args().skip(1).collect();
    let option = |name: &str| args.iter().find_map(|arg| arg.strip_prefix(name)).map(str::to_owned);
    let forms = option("form=").unwrap_or_else(|| "split,fused".to_owned());
    let millis: f64 = option("ms=").map_or(Ok(600.0), |n| n.parse())?;
    let numbers = numbers();
    for cell in args.iter().filter(|arg| !arg.contains('=')) {
        let mut first = None;
        for form in forms.split(',') {
            let cuda = Cuda::open(0)?.choosing(choice(form)?);
            let cell = Cell::new(&cuda, cell, &numbers)?;
            let line = cell.run(&cuda, form, millis, &mut first);
            println!(
                "{}",
                line.unwrap_or_else(|error| format!("{{\"form\":\"{form}\",\"error\":\"{error}\"}}"))
            );
        }
    }
    Ok(())
}

fn choice(form: &str) -> Outcome<Choice> {
    Ok(match form {
        "rules" => Choice::Rules,
        "general" => Choice::Kernel(Family::Sm80),
        "split" => Choice::Gradients(Form::Split),
        "fused" => Choice::Gradients(Form::Fused),
        other if other.contains('+') => {
            let (keys, queries) = other.split_once('+').ok_or("two tiles")?;
            Choice::Gradients(Form::SplitBy([split_tile(keys)?, split_tile(queries)?]))
        }
        other => {
            let tile = other.strip_prefix('f').ok_or("no form has this name")?;
            let n: Vec<u32> = tile.split('x').map(str::parse).collect::<Result<_, _>>()?;
            let &[step, first, second, consumer, mover] = &n[..] else { return Err("five numbers".into()) };
            let (stages, registers) = ([first, second], [32, consumer]);
            let (order, mover) = (Order::Drawn, Some(mover));
            Choice::Gradients(Form::FusedBy(Shape {
                consumers: 2,
                step,
                stages,
                places: 1,
                registers,
                order,
                mover,
                paired: false,
                ahead: false,
            }))
        }
    })
}

/// A tile of the split form.
fn split_tile(name: &str) -> Outcome<Shape> {
    let (paired, ahead) = (name.starts_with(['p', 'a']), name.starts_with('a'));
    let n: Vec<u32> = name[1..].split('x').map(str::parse).collect::<Result<_, _>>()?;
    let &[step, first, second, places] = &n[..] else { return Err("four numbers".into()) };
    let (stages, registers, order) = ([first, second], [24, 240], Order::Static);
    Ok(Shape { consumers: 2, step, stages, places, registers, order, mover: None, paired, ahead })
}

/// bf16 numbers, N(0, 1), a little more than a power of two of them.
fn numbers() -> Vec<u8> {
    let mut rng = Rng::new(5);
    (0..(1 << 20) + 1031).flat_map(|_| flashcore::bf16::from_f32(rng.normal()).to_le_bytes()).collect()
}

/// A problem with its tensors.
struct Cell {
    name: String,
    problem: BackwardProblem,
    buffers: [DeviceBuffer; 9],
    /// Offsets of packed sequences; one number where they are not.
    offsets: DeviceBuffer,
}

/// Where packed sequences start, and where the last ends; `None` where they are not packed.
fn offsets(word: &str) -> Outcome<Option<Vec<u32>>> {
    let mut ends: Vec<usize> = if let Some(each) = word.strip_prefix('p') {
        let each = each.parse::<usize>()?.max(1);
        (1..=TOKENS / each).map(|n| n * each).collect()
    } else if let Some(count) = word.strip_prefix('r') {
        let mut rng = Rng::new(9);
        (1..count.parse()?).map(|_: usize| rng.range(1..=TOKENS - 1)).collect()
    } else {
        return Ok(None);
    };
    ends.extend([0, TOKENS]);
    ends.sort_unstable();
    ends.dedup();
    Ok(Some(ends.into_iter().map(|end| end as u32).collect()))
}

impl Cell {
    fn new(cuda: &Cuda, name: &str, numbers: &[u8]) -> Outcome<Self> {
        let words: Vec<&str> = name.split(':').collect();
        let &[seq, dim, mask, ref heads @ ..] = &words[..] else {
            return Err("a cell has three words".into());
        };
        let offsets = offsets(seq)?;
        let seq = if offsets.is_some() { TOKENS } else { seq.parse()? };
        let (dim, dim_v) = dim.split_once('/').unwrap_or((dim, dim));
        let (dim, dim_v): (usize, usize) = (dim.parse()?, dim_v.parse()?);
        let plain = FEATURES / dim;
        let heads = heads.iter().map(|n| n.parse()).collect::<Result<Vec<usize>, _>>()?;
        let queries = heads.get(1).copied().unwrap_or(plain);
        let keys = heads.first().copied().unwrap_or(plain);
        let layout = |heads, dim| Layout::bshd(Dims::new((TOKENS / seq).max(1), heads, seq, dim));
        let (q, k) = (layout(queries, dim)?, layout(keys, dim)?);
        let (out, v) = (layout(queries, dim_v)?, layout(keys, dim_v)?);
        let mask = if mask == "causal" { Mask::CAUSAL } else { Mask::NONE };
        let lengths =
            offsets.as_ref().map_or(Lengths::Uniform, |all| Lengths::ragged(all.clone(), all.clone()));
        let spec = Spec { mask, ..Spec::new(DType::BF16, q, k, v) };
        let problem = BackwardSpec::new(spec.with(&Values { lengths, ..Values::default() })).parse()?;
        let rows = 4 * problem.forward().rows() as u64;
        let bytes = [&q, &k, &v, &out].map(|layout: &Layout| 2 * layout.span() as u64);
        let stream = cuda.stream();
        let tensor = |bytes: u64, skip: usize| -> Outcome<DeviceBuffer> {
            let mut buffer = DeviceBuffer::new(cuda.device(), bytes)?;
            for at in (0..bytes).step_by(numbers.len() - skip) {
                let len = (numbers.len() - skip).min((bytes - at) as usize);
                buffer.copy_from_host(stream, at, &numbers[skip..skip + len])?;
            }
            Ok(buffer)
        };
        let [q, k, v, d_out] =
            [tensor(bytes[0], 0)?, tensor(bytes[1], 64)?, tensor(bytes[2], 130)?, tensor(bytes[3], 258)?];
        let fresh = |bytes| DeviceBuffer::new(cuda.device(), bytes);
        let buffers = [
            q,
            k,
            v,
            d_out,
            fresh(bytes[3])?,
            fresh(rows)?,
            fresh(bytes[0])?,
            fresh(bytes[1])?,
            fresh(bytes[2])?,
        ];
        let bytes: Vec<u8> =
            offsets.unwrap_or_else(|| vec![0]).into_iter().flat_map(u32::to_le_bytes).collect();
        let mut offsets = DeviceBuffer::new(cuda.device(), bytes.len() as u64)?;
        offsets.copy_from_host(stream, 0, &bytes)?;
        let cell = Self { name: name.to_owned(), problem, buffers, offsets };
        let [q, k, v, _, out, lse, ..] = cell.buffers.each_ref().map(DeviceBuffer::address);
        let forward = cuda.prepare(cell.problem.forward())?;
        let (lengths_q, lengths_kv) = (cell.offsets.address(), cell.offsets.address());
        let tensors = DeviceTensors { q, k, v, out, lse, lengths_q, lengths_kv, ..DeviceTensors::default() };
        // SAFETY: the buffers hold what the layouts reach, and live as long as the cell.
        unsafe { forward.launch_raw(&tensors, stream.raw())? };
        stream.synchronize()?;
        Ok(cell)
    }

    fn tensors(&self) -> BackwardTensors {
        let [q, k, v, d_out, out, lse, dq, dk, dv] = self.buffers.each_ref().map(DeviceBuffer::address);
        let (lengths_q, lengths_kv) = (self.offsets.address(), self.offsets.address());
        BackwardTensors {
            q,
            k,
            v,
            d_out,
            out,
            lse,
            dq,
            dk,
            dv,
            lengths_q,
            lengths_kv,
            ..BackwardTensors::default()
        }
    }

    /// Runs one form: its time, how far its gradients are from those of the first, and whether two runs agree.
    fn run(
        &self,
        cuda: &Cuda,
        form: &str,
        millis: f64,
        first: &mut Option<[Vec<f32>; 3]>,
    ) -> Outcome<String> {
        let (ready, stream, tensors) = (cuda.prepare_backward(&self.problem)?, cuda.stream(), self.tensors());
        // SAFETY: as for forward.
        let submit = || unsafe { ready.launch_raw(&tensors, stream.raw()) };
        submit()?;
        let got = self.gradients(cuda)?;
        submit()?;
        let same = got == self.gradients(cuda)?;
        let apart = first.as_ref().map_or([0.0; 3], |first| [0, 1, 2].map(|n| apart(&first[n], &got[n])));
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
        let flops = 2.5 * self.problem.forward().flops();
        Ok(format!(
            "{{\"cell\":\"{}\",\"form\":\"{form}\",\"us\":{:.1},\"tflops\":{:.1},\"same_bits\":{same},\"apart\":{apart:?},\"kernel\":\"{}\"}}",
            self.name,
            ms * 1e3,
            flops / ms / 1e9,
            ready.plan().kernel().name()
        ))
    }

    fn gradients(&self, cuda: &Cuda) -> Outcome<[Vec<f32>; 3]> {
        let read = |buffer: &DeviceBuffer| -> Outcome<Vec<f32>> {
            let mut bytes = vec![0; buffer.len() as usize];
            buffer.copy_to_host(cuda.stream(), 0, &mut bytes)?;
            let number = |pair: &[u8]| flashcore::bf16::from_le_bytes([pair[0], pair[1]]).to_f32();
            // Every 61st number is as good as all.
            Ok(bytes.chunks_exact(2).step_by(61).map(number).collect())
        };
        Ok([read(&self.buffers[6])?, read(&self.buffers[7])?, read(&self.buffers[8])?])
    }
}

/// Root mean square of the differences over that of the numbers.
fn apart(x: &[f32], y: &[f32]) -> f32 {
    let sum = |f: &dyn Fn(f32, f32) -> f32| x.iter().zip(y).map(|(&x, &y)| f64::from(f(x, y))).sum::<f64>();
    (sum(&|x, y| (x - y) * (x - y)) / sum(&|x, _| x * x)).sqrt() as f32
}
