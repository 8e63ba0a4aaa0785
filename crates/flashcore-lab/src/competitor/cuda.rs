//! FlashCore's own GPU kernels as a competitor, timed by events on their own stream.
#![allow(unsafe_code)] // Launching a kernel over device memory that this file owns.

use std::{rc::Rc, sync::Arc};

use flashcore::cuda::{
    BackwardTensors, Cuda, DeviceTensors, Error, MoeTensors, ReadyBackward, ReadyMoe, Tile,
    driver::{DeviceBuffer, Event, Graph, Stream},
};

use super::{Competitor, Place, Ready};
use crate::{
    burst::Run,
    error::LabError,
    task::Operation,
    workload::{Array, Outputs, Turn, Workload},
};

/// The name used on the command line and in results.
pub const NAME: &str = "cuda";
/// Bytes that, once written, have pushed everything else out of a GPU's L2.
const EVICTING: u64 = 256 << 20;
/// Bytes of each side of the copy that tells the memory's rate.
const COPIED: u64 = 1 << 30;
/// Copies that are timed, of which the fastest counts.
const COPIES: usize = 10;

/// A GPU as a competitor.
pub struct CudaCompetitor {
    cuda: Arc<Cuda>,
    /// How the work is cut, where that is not left to the plan.
    tile: Option<Tile>,
}

impl CudaCompetitor {
    /// A competitor on an open GPU.
    pub const fn new(cuda: Arc<Cuda>) -> Self {
        Self::cut(cuda, None)
    }

    /// The same with a tile of its own.
    pub const fn cut(cuda: Arc<Cuda>, tile: Option<Tile>) -> Self {
        Self { cuda, tile }
    }
}

impl Competitor for CudaCompetitor {
    fn name(&self) -> &str {
        NAME
    }

    fn place(&self) -> Place {
        Place::Gpu
    }

    fn prepare(&self, workload: &Rc<Workload>) -> Result<Box<dyn Ready>, LabError> {
        let mut ready = CudaReady::planned(&self.cuda, workload)?;
        self.tile.iter().try_for_each(|tile| ready.switch(&self.cuda, tile))?;
        Ok(Box::new(ready))
    }
}

fn into_lab(error: Error) -> LabError {
    match error {
        Error::Plan(refusal) => {
            LabError::Unsupported { competitor: NAME.to_owned(), what: refusal.to_string() }
        }
        other => LabError::Failed { competitor: NAME.to_owned(), reason: other.to_string() },
    }
}

/// A task on a GPU, with kernels for it.
pub(crate) struct CudaReady {
    workload: Rc<Workload>,
    prepared: Prepared,
    kernel: String,
    stream: Stream,
    inputs: Vec<Input>,
    outputs: Vec<DeviceBuffer>,
    /// The LSE of forward, and its output where gradients need it.
    lse: DeviceBuffer,
    saved: DeviceBuffer,
    evictor: Option<DeviceBuffer>,
}

/// What is launched.
enum Prepared {
    Forward(Arc<flashcore::cuda::Ready>),
    Backward(Arc<ReadyBackward>),
    Experts(Arc<ReadyMoe>),
}

/// An input in device memory, perhaps several sets of it one after another.
struct Input {
    name: &'static str,
    buffer: DeviceBuffer,
    sets: usize,
}

impl Input {
    fn new(stream: &Stream, array: &Array<'_>) -> Result<Self, Error> {
        let bytes = array.bytes.len() as u64;
        let mut buffer = DeviceBuffer::new(stream.device(), bytes * array.copies as u64)?;
        for n in 0..array.copies as u64 {
            buffer.copy_from_host(stream, n * bytes, &array.bytes)?;
        }
        Ok(Self { name: array.name, buffer, sets: array.sets })
    }

    /// Where the set of a call lies.
    fn address(&self, turn: Turn) -> u64 {
        let set = if let Turn::Timed(n) = turn { n % self.sets } else { 0 };
        self.buffer.address() + set as u64 * (self.buffer.len() / self.sets as u64)
    }
}

impl CudaReady {
    /// With the kernels that the plan chooses.
    pub(crate) fn planned(cuda: &Cuda, workload: &Rc<Workload>) -> Result<Self, LabError> {
        Self::new(cuda, workload)?.map_err(into_lab)
    }

    /// How its kernel cuts the work, where it is one of forward.
    pub(crate) fn tile(&self) -> Option<Tile> {
        match &self.prepared {
            Prepared::Forward(ready) => Some(ready.plan().kernel().tile()),
            _ => None,
        }
    }

    /// Takes another kernel for the same forward attention.
    pub(crate) fn switch(&mut self, cuda: &Cuda, tile: &Tile) -> Result<(), LabError> {
        let ready = cuda.prepare_tile(self.workload.task().forward()?, *tile).map_err(into_lab)?;
        self.kernel = ready.plan().kernel().name();
        self.prepared = Prepared::Forward(ready);
        Ok(())
    }

    fn new(cuda: &Cuda, workload: &Rc<Workload>) -> Result<Result<Self, Error>, LabError> {
        let poisoned = workload.outputs()?;
        let make = || {
            let (prepared, kernel) = Prepared::new(cuda, workload.task().operation())?;
            let stream = Stream::new(cuda.device())?;
            let arrays = workload.arrays();
            let inputs = arrays.iter().map(|array| Input::new(&stream, array)).collect::<Result<_, _>>()?;
            let fresh = |bytes: usize| DeviceBuffer::new(cuda.device(), bytes as u64);
            let outputs = poisoned.tensors.iter().map(|tensor| fresh(tensor.data().bytes().len()));
            let outputs = outputs.collect::<Result<_, _>>()?;
            let instance = workload.instance();
            let lse = fresh(instance.map_or(0, |p| p.rows() * size_of::<f32>()).max(1))?;
            let keeps = matches!(prepared, Prepared::Backward(_));
            let saved = instance.filter(|_| keeps).map_or(0, |p| p.out().span() * p.out_dtype().bytes());
            let (workload, saved) = (workload.clone(), fresh(saved.max(1))?);
            let evictor = None;
            let ready = Self { workload, prepared, kernel, stream, inputs, outputs, lse, saved, evictor };
            ready.save(cuda)?;
            Ok(ready)
        };
        Ok(make())
    }

    /// Computes what gradients need of forward.
    fn save(&self, cuda: &Cuda) -> Result<(), Error> {
        let Operation::Backward(problem) = self.workload.task().operation() else { return Ok(()) };
        let ready = cuda.prepare(problem.forward())?;
        let tensors = DeviceTensors { out: self.saved.address(), ..self.attention(Turn::Judged) };
        // SAFETY: the buffers have the problem's sizes and live as long as `self`; freeing them waits for the device.
        unsafe { ready.launch(&tensors, &self.stream) }
    }

    fn at(&self, name: &str, turn: Turn) -> u64 {
        self.inputs.iter().find(|input| input.name == name).map_or(0, |input| input.address(turn))
    }

    fn attention(&self, turn: Turn) -> DeviceTensors {
        let at = |name| self.at(name, turn);
        DeviceTensors {
            q: at("q"),
            k: at("k"),
            v: at("v"),
            out: self.outputs[0].address(),
            lse: if turn == Turn::Judged { self.lse.address() } else { 0 },
            lengths_q: at("lengths_q"),
            lengths_kv: at("lengths_kv"),
            table: at("table"),
            sinks: at("sinks"),
            ..DeviceTensors::default()
        }
    }

    fn gradients(&self, turn: Turn) -> BackwardTensors {
        let DeviceTensors { q, k, v, sinks, .. } = self.attention(turn);
        let at = |n: usize| self.outputs.get(n).map_or(0, DeviceBuffer::address);
        BackwardTensors {
            q,
            k,
            v,
            sinks,
            out: self.saved.address(),
            lse: self.lse.address(),
            d_out: self.at(if turn == Turn::Judged { "d_judged" } else { "d_out" }, turn),
            dq: at(0),
            dk: at(1),
            dv: at(2),
            ..BackwardTensors::default()
        }
    }

    fn experts(&self, turn: Turn) -> MoeTensors {
        let at = |name| self.at(name, turn);
        MoeTensors {
            x: at("x"),
            gate_up: at("gate_up"),
            down: at("down"),
            ids: at("ids"),
            weights: at("weights"),
            out: self.outputs[0].address(),
            ..MoeTensors::default()
        }
    }

    fn launch(&self, turn: Turn) -> Result<(), Error> {
        let stream = &self.stream;
        // SAFETY: the buffers have the problem's sizes and live as long as `self`; freeing them waits for the device.
        unsafe {
            match &self.prepared {
                Prepared::Forward(ready) => ready.launch(&self.attention(turn), stream),
                Prepared::Backward(ready) => ready.launch_raw(&self.gradients(turn), stream.raw()),
                Prepared::Experts(ready) => ready.launch_raw(&self.experts(turn), stream.raw()),
            }
        }
    }

    fn computed(&mut self, results: &mut Outputs) -> Result<(), Error> {
        for output in &mut self.outputs {
            output.fill(&self.stream, 0xff)?;
        }
        if results.lse.is_some() {
            self.lse.fill(&self.stream, 0xff)?;
        }
        self.launch(Turn::Judged)?;
        for (output, to) in self.outputs.iter().zip(&mut results.tensors) {
            output.copy_to_host(&self.stream, 0, to.data_mut().bytes_mut())?;
        }
        if let Some(lse) = results.lse.as_deref_mut() {
            self.lse.copy_to_host(&self.stream, 0, bytemuck::cast_slice_mut(lse))?;
        }
        Ok(())
    }

    fn calls(&self, count: u32) -> Result<(), Error> {
        (0..count as usize).try_for_each(|n| self.launch(Turn::Timed(n)))
    }

    /// `count` launches as one graph.
    fn captured(&self, count: u32) -> Result<Graph, Error> {
        let mut refusal = None;
        let graph = Graph::capture(&self.stream, |_| match self.calls(count) {
            Err(Error::Driver(error)) => Err(error),
            Err(other) => {
                refusal = Some(other);
                Ok(())
            }
            Ok(()) => Ok(()),
        });
        refusal.map_or(Ok(graph?), Err)
    }

    fn seconds(&mut self, run: &Run) -> Result<Vec<f64>, Error> {
        let graph = run.conditions.replay.then(|| self.captured(run.calls)).transpose()?;
        if run.conditions.cold && self.evictor.is_none() {
            self.evictor = Some(DeviceBuffer::new(self.stream.device(), EVICTING)?);
        }
        let mut evictor = self.evictor.take();
        let body = || match &graph {
            Some(graph) => Ok(graph.launch(&self.stream)?),
            None => self.calls(run.calls),
        };
        body()?;
        let times = match evictor.as_mut().filter(|_| run.conditions.cold) {
            Some(evictor) => self.cold(run.samples, evictor, &body),
            None => self.back_to_back(run.samples, &body),
        };
        self.evictor = evictor;
        Ok(times?.into_iter().map(|seconds| seconds / f64::from(run.calls)).collect())
    }

    fn back_to_back(&self, samples: usize, body: &dyn Fn() -> Result<(), Error>) -> Result<Vec<f64>, Error> {
        let marks = self.events(samples + 1)?;
        marks[0].record(&self.stream)?;
        for mark in &marks[1..] {
            body()?;
            mark.record(&self.stream)?;
        }
        self.stream.synchronize()?;
        marks.windows(2).map(|pair| between(&pair[0], &pair[1])).collect()
    }

    /// Each sample after something else has filled the caches.
    fn cold(
        &self,
        samples: usize,
        evictor: &mut DeviceBuffer,
        body: &dyn Fn() -> Result<(), Error>,
    ) -> Result<Vec<f64>, Error> {
        let (starts, ends) = (self.events(samples)?, self.events(samples)?);
        for (start, end) in starts.iter().zip(&ends) {
            evictor.fill(&self.stream, 0)?;
            start.record(&self.stream)?;
            body()?;
            end.record(&self.stream)?;
        }
        self.stream.synchronize()?;
        starts.iter().zip(&ends).map(|(start, end)| between(start, end)).collect()
    }

    fn events(&self, count: usize) -> Result<Vec<Event>, Error> {
        (0..count).map(|_| Ok(Event::timed(self.stream.device())?)).collect()
    }
}

impl Prepared {
    /// What computes an operation, and the name of its main kernel.
    fn new(cuda: &Cuda, operation: &Operation) -> Result<(Self, String), Error> {
        Ok(match operation {
            Operation::Forward(problem) => {
                let ready = cuda.prepare(problem)?;
                let kernel = ready.plan().kernel().name();
                (Self::Forward(ready), kernel)
            }
            Operation::Backward(problem) => {
                let ready = cuda.prepare_backward(problem)?;
                let kernel = ready.plan().kernel().name();
                (Self::Backward(ready), kernel)
            }
            Operation::Experts(problem) => {
                let ready = cuda.prepare_moe(problem)?;
                let kernel = ready.plan().kernel().name();
                (Self::Experts(ready), kernel)
            }
        })
    }
}

fn between(start: &Event, end: &Event) -> Result<f64, Error> {
    Ok(f64::from(end.milliseconds_since(start)?) * 1e-3)
}

impl Ready for CudaReady {
    fn kernel(&self) -> &str {
        &self.kernel
    }

    fn compute(&mut self) -> Result<Outputs, LabError> {
        let mut outputs = self.workload.outputs()?;
        self.computed(&mut outputs).map_err(into_lab)?;
        Ok(outputs)
    }

    fn time(&mut self, run: &Run) -> Result<Vec<f64>, LabError> {
        self.seconds(run).map_err(into_lab)
    }
}

/// Bytes read plus bytes written per second in a large copy on the GPU.
pub fn copy_rate(cuda: &Cuda) -> Result<f64, LabError> {
    let seconds = copy_seconds(cuda).map_err(into_lab)?;
    Ok(2.0 * COPIED as f64 / seconds)
}

fn copy_seconds(cuda: &Cuda) -> Result<f64, Error> {
    let stream = Stream::new(cuda.device())?;
    let from = DeviceBuffer::new(cuda.device(), COPIED)?;
    let mut to = DeviceBuffer::new(cuda.device(), COPIED)?;
    let (start, end) = (Event::timed(cuda.device())?, Event::timed(cuda.device())?);
    let mut once = |_| {
        start.record(&stream)?;
        to.copy_from_device(&stream, &from)?;
        end.record(&stream)?;
        stream.synchronize()?;
        between(&start, &end)
    };
    (0..COPIES).map(&mut once).try_fold(f64::INFINITY, |least, seconds| Ok(least.min(seconds?)))
}
