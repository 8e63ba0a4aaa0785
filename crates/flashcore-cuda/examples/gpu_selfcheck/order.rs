//! Streams, graphs, dependent launches, and whose workspace is whose.

use crate::bench::{self, Bench, CHAIN, Outcome, TICKET, expect, ticket_spec};
use cudarc::driver::sys;
use flashcore_cuda::{DeviceBuffer, Error, Graph, Prepared, Stream};
use flashcore_ptx::launch::{LaunchSpec, Param, Slot};

const LINKS: u32 = 200;
const VALUES: u32 = 132 * 128;

/// A chain of launches, each of which may start before the one before it has ended.
pub(crate) fn chain(bench: &Bench) -> Outcome {
    let kernel = bench.kernel(&CHAIN)?;
    let link = |step| {
        let params = vec![Param::Buffer(Slot(0)), Param::U32(step)];
        let spec = bench::spec(&CHAIN, [VALUES / 128, 1, 1], 128, params);
        Prepared::new(&kernel, &LaunchSpec { dependent: true, ..spec })
    };
    let links: Vec<Prepared> = (0..LINKS).map(link).collect::<Result<_, _>>()?;
    let mut values = DeviceBuffer::new(bench.device, 4 * u64::from(VALUES))?;
    let address = [values.address()];
    let run = |stream: &Stream| -> Result<(), Error> {
        // SAFETY: the kernel touches VALUES words of a buffer that outlives every replay; links follow one another.
        links.iter().try_for_each(|link| unsafe { link.launch(stream, &address) })
    };
    let expected = (0..LINKS).fold(0u32, |value, step| value.wrapping_mul(3).wrapping_add(step));
    let graph = Graph::capture(&bench.stream, run)?;
    for replay in [false, true] {
        values.fill(&bench.stream, 0)?;
        if replay {
            graph.launch(&bench.stream)?
        } else {
            run(&bench.stream)?
        }
        let right = bench.read_u32(&values)?.iter().all(|&value| value == expected);
        expect(right, || format!("links out of order (graph: {replay})"))?;
    }
    Ok(format!("{LINKS} links, eager and captured"))
}

const CTAS: u32 = 64;
const LAUNCHES: u64 = 100;
const REPLAYS: usize = 20;

/// Two streams and a graph, all drawing tickets at once; each launch must see every ticket exactly once.
pub(crate) fn tickets(bench: &Bench) -> Outcome {
    let prepared = bench.prepare(&TICKET, &ticket_spec(CTAS))?;
    let one = 4 * u64::from(CTAS);
    let outputs = [0, 1, 2].map(|_| bench.poisoned(one * LAUNCHES));
    let [first, second, captured] = outputs;
    let (first, second, captured) = (first?, second?, captured?);
    let submit = |stream: &Stream, out: &DeviceBuffer| -> Result<(), Error> {
        // SAFETY: each launch writes its own slice of a buffer that outlives the waits below.
        (0..LAUNCHES).try_for_each(|i| unsafe { prepared.launch(stream, &[out.address() + i * one]) })
    };
    let graph = Graph::capture(&bench.stream, |stream| submit(stream, &captured))?;
    let streams = (Stream::new(bench.device)?, Stream::new(bench.device)?);
    std::thread::scope(|scope| -> Outcome {
        let a = scope.spawn(|| submit(&streams.0, &first));
        let b = scope.spawn(|| submit(&streams.1, &second));
        (0..REPLAYS).try_for_each(|_| graph.launch(&bench.stream))?;
        a.join().map_err(|_| "panicked")??;
        b.join().map_err(|_| "panicked")??;
        Ok(String::new())
    })?;
    bench.device.synchronize()?;
    for (name, out) in [("stream 1", &first), ("stream 2", &second), ("graph", &captured)] {
        check_tickets(bench, name, out)?;
    }
    drop((graph, streams));
    let freed = all_workspace_back(bench)?;
    Ok(format!("{LAUNCHES} launches each, {REPLAYS} replays; {freed} B of workspace came back"))
}

/// The driver returns a destroyed graph's workspace from a thread of its own, a little later.
fn all_workspace_back(bench: &Bench) -> Result<u64, Box<dyn std::error::Error>> {
    let mut freed = 0;
    for _ in 0..100 {
        freed += bench.device.trim_workspaces()?;
        if bench.device.workspace_bytes() == 0 {
            return Ok(freed);
        }
        std::thread::sleep(std::time::Duration::from_millis(10));
    }
    Err(format!("{freed} bytes freed, {} left", bench.device.workspace_bytes()).into())
}

fn check_tickets(bench: &Bench, name: &str, out: &DeviceBuffer) -> Result<(), Box<dyn std::error::Error>> {
    let tickets = bench.read_u32(out)?;
    for (launch, drawn) in tickets.chunks_exact(CTAS as usize).enumerate() {
        let mut sorted = drawn.to_vec();
        sorted.sort_unstable();
        let once = sorted.iter().copied().eq(0..CTAS);
        expect(once, || format!("{name}, launch {launch}: tickets {sorted:?}"))?;
    }
    Ok(())
}

/// A stream that somebody else made, used by handle, wrapped and bare.
pub(crate) fn foreign_stream(bench: &Bench) -> Outcome {
    let prepared = bench.prepare(&TICKET, &ticket_spec(CTAS))?;
    let out = bench.poisoned(8 * u64::from(CTAS))?;
    let mut theirs = std::ptr::null_mut();
    // SAFETY: valid place; the context is current inside.
    let made = bench.device.with_context(|| unsafe { sys::cuStreamCreate(&mut theirs, 1) })?;
    expect(made == sys::CUresult::CUDA_SUCCESS, || format!("{made:?}"))?;
    let run = || -> Result<(), Error> {
        // SAFETY: the stream lives until the end of this function.
        let wrapped = unsafe { Stream::from_raw(bench.device, theirs.cast())? };
        // SAFETY: the two launches write halves of `out`, which outlives the wait.
        unsafe {
            prepared.launch(&wrapped, &[out.address()])?;
            prepared.launch_raw(theirs.cast(), &[out.address() + 4 * u64::from(CTAS)])?;
        }
        wrapped.synchronize()
    };
    let done = run();
    // SAFETY: made above and idle.
    let _ = bench.device.with_context(|| unsafe { sys::cuStreamDestroy_v2(theirs) })?;
    done?;
    check_tickets(bench, "foreign stream", &out)?;
    Ok("wrapped and raw".into())
}
