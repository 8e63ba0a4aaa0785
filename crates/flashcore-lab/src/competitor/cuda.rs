//! FlashCore's own GPU kernels as a competitor, timed by events on a stream of their own.
#![allow(unsafe_code)] // Launching a kernel over device memory that this file owns.

use std::{rc::Rc, sync::Arc};

use flashcore::cuda::{
    Cuda, DeviceTensors, Error, Tile,
    driver::{self, DeviceBuffer, Event, Graph, Stream},
};

use super::{Competitor, Place, Ready};
use crate::{
    burst::Run,
    error::LabError,
    workload::{Outputs, Workload},
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

/// A task on a GPU, with a kernel for it.
pub(crate) struct CudaReady {
    workload: Rc<Workload>,
    ready: Arc<flashcore::cuda::Ready>,
    kernel: String,
    stream: Stream,
    inputs: [DeviceBuffer; 3],
    out: DeviceBuffer,
    lse: DeviceBuffer,
    sinks: Option<DeviceBuffer>,
    evictor: Option<DeviceBuffer>,
}

impl CudaReady {
    /// With the kernel that the plan chooses.
    pub(crate) fn planned(cuda: &Cuda, workload: &Rc<Workload>) -> Result<Self, LabError> {
        Self::new(cuda, workload).map_err(into_lab)
    }

    /// How its kernel cuts the work.
    pub(crate) fn tile(&self) -> Tile {
        self.ready.plan().kernel().tile()
    }

    /// Takes another kernel for the same task.
    pub(crate) fn switch(&mut self, cuda: &Cuda, tile: &Tile) -> Result<(), LabError> {
        let ready = cuda.prepare_tile(self.workload.task().problem(), *tile).map_err(into_lab)?;
        self.kernel = ready.plan().kernel().name();
        self.ready = ready;
        Ok(())
    }

    fn new(cuda: &Cuda, workload: &Rc<Workload>) -> Result<Self, Error> {
        let problem = workload.task().problem();
        let ready = cuda.prepare(problem)?;
        let stream = Stream::new(cuda.device())?;
        let [q, k, v] = workload.inputs().map(|data| DeviceBuffer::from_host(&stream, data.bytes()));
        let bytes = |elements: usize, size: usize| (elements * size) as u64;
        let out = DeviceBuffer::new(cuda.device(), bytes(problem.out().span(), problem.dtype().bytes()))?;
        let lse = DeviceBuffer::new(cuda.device(), bytes(problem.rows(), size_of::<f32>()))?;
        let kernel = ready.plan().kernel().name();
        let inputs = [q?, k?, v?];
        let logits = workload.instance().sink_logits();
        let sinks = logits.map(|sinks| DeviceBuffer::from_host(&stream, bytemuck::cast_slice(sinks)));
        let (workload, sinks) = (workload.clone(), sinks.transpose()?);
        Ok(Self { workload, ready, kernel, stream, inputs, out, lse, sinks, evictor: None })
    }

    fn launch(&self, lse: bool) -> Result<(), Error> {
        let [q, k, v] = self.inputs.each_ref().map(DeviceBuffer::address);
        let lse = if lse { self.lse.address() } else { 0 };
        let sinks = self.sinks.as_ref().map_or(0, DeviceBuffer::address);
        let out = self.out.address();
        let tensors = DeviceTensors { q, k, v, out, lse, sinks, ..DeviceTensors::default() };
        // SAFETY: the buffers have the problem's sizes and live as long as `self`; freeing them waits for the device.
        unsafe { self.ready.launch(&tensors, &self.stream) }
    }

    fn outputs(&mut self) -> Result<Outputs, Error> {
        self.out.fill(&self.stream, 0xff)?;
        self.lse.fill(&self.stream, 0xff)?;
        self.launch(true)?;
        let mut outputs = self.workload.outputs().map_err(|_| no_memory(self.out.len()))?;
        self.out.copy_to_host(&self.stream, 0, outputs.out.data_mut().bytes_mut())?;
        if let Some(lse) = outputs.lse.as_deref_mut() {
            self.lse.copy_to_host(&self.stream, 0, bytemuck::cast_slice_mut(lse))?;
        }
        Ok(outputs)
    }

    fn calls(&self, count: u32) -> Result<(), Error> {
        (0..count).try_for_each(|_| self.launch(false))
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

fn no_memory(bytes: u64) -> Error {
    Error::Driver(driver::Error::OutOfMemory { requested: bytes, free: 0, total: 0 })
}

fn between(start: &Event, end: &Event) -> Result<f64, Error> {
    Ok(f64::from(end.milliseconds_since(start)?) * 1e-3)
}

impl Ready for CudaReady {
    fn kernel(&self) -> &str {
        &self.kernel
    }

    fn compute(&mut self) -> Result<Outputs, LabError> {
        self.outputs().map_err(into_lab)
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
