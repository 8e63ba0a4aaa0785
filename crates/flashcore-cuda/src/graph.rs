//! Graphs: work of a stream captured once, replayed at the cost of one call.

use crate::sys::{CUgraph, CUgraphExec, CUstreamCaptureMode};
use crate::{driver::Device, error::Error, stream::Stream};

/// A captured graph, ready to be replayed.
///
/// Workspaces of the launches in it belong to it alone, so a replay may run beside other graphs and streams. Buffers
/// stay the caller's: they must live until the last replay is done (part of the promise made at each `launch`).
#[derive(Debug)]
pub struct Graph {
    device: Device,
    captured: CUgraph,
    exec: CUgraphExec,
}

// SAFETY: the driver allows any thread to use a graph, one at a time; `launch` of the exec is thread-safe.
unsafe impl Send for Graph {}
// SAFETY: the only shared operation is `launch`, which the driver serialises.
unsafe impl Sync for Graph {}

impl Graph {
    /// Captures what `record` submits to `stream`. Nothing runs until [`Graph::launch`].
    pub fn capture(
        stream: &Stream,
        record: impl FnOnce(&Stream) -> Result<(), Error>,
    ) -> Result<Self, Error> {
        let capture = Capture::begin(stream)?;
        record(stream)?;
        let captured = capture.end()?;
        let mut graph = Self { device: stream.device(), captured, exec: std::ptr::null_mut() };
        let _inside = graph.device.enter()?;
        // SAFETY: the graph is alive, `exec` a valid place.
        let status = unsafe { graph.device.api().graph_instantiate(&mut graph.exec, captured, 0) };
        graph.device.check(status)?;
        Ok(graph)
    }

    /// Replays it in the order of `stream`; replays of one graph never overlap each other.
    pub fn launch(&self, stream: &Stream) -> Result<(), Error> {
        let _inside = self.device.enter()?;
        // SAFETY: exec and stream are alive.
        self.device.check(unsafe { self.device.api().graph_launch(self.exec, stream.handle()) })
    }
}

impl Drop for Graph {
    fn drop(&mut self) {
        let Ok(_inside) = self.device.enter() else { return };
        let api = self.device.api();
        if !self.exec.is_null() {
            // SAFETY: made by `capture`; the driver defers destruction until a replay in flight is done.
            self.device.check_in_drop(unsafe { api.graph_exec_destroy(self.exec) });
        }
        // SAFETY: made by `capture`.
        self.device.check_in_drop(unsafe { api.graph_destroy(self.captured) });
    }
}

/// A capture in progress: ended by `end`, or abandoned on an early return or panic.
struct Capture<'s> {
    stream: &'s Stream,
    ended: bool,
}

impl<'s> Capture<'s> {
    fn begin(stream: &'s Stream) -> Result<Self, Error> {
        let device = stream.device();
        let _inside = device.enter()?;
        // Thread-local: what other threads do with other streams cannot invalidate this capture.
        let mode = CUstreamCaptureMode::CU_STREAM_CAPTURE_MODE_THREAD_LOCAL;
        // SAFETY: the stream is alive.
        device.check(unsafe { device.api().stream_begin_capture(stream.handle(), mode) })?;
        Ok(Self { stream, ended: false })
    }

    fn end(mut self) -> Result<CUgraph, Error> {
        self.ended = true;
        let device = self.stream.device();
        let _inside = device.enter()?;
        let mut graph = std::ptr::null_mut();
        // SAFETY: the stream is capturing, `graph` is a valid place.
        device.check(unsafe { device.api().stream_end_capture(self.stream.handle(), &mut graph) })?;
        Ok(graph)
    }
}

impl Drop for Capture<'_> {
    fn drop(&mut self) {
        if self.ended {
            return;
        }
        let device = self.stream.device();
        let Ok(_inside) = device.enter() else { return };
        let mut graph = std::ptr::null_mut();
        // SAFETY: the stream is capturing. The result is irrelevant: the capture is being thrown away.
        let _ = unsafe { device.api().stream_end_capture(self.stream.handle(), &mut graph) };
        if !graph.is_null() {
            // SAFETY: the driver handed the graph over.
            device.check_in_drop(unsafe { device.api().graph_destroy(graph) });
        }
    }
}
