//! Devices, builds, parameters, tensor maps, clusters.

use crate::bench::{self, Bench, CLUSTER, Outcome, SCALE, TMA_COPY, expect, matrix_map};
use cudarc::driver::sys;
use flashcore_cuda::{Compiler, Device, DeviceBuffer, Driver, Error, LaunchError, Prepared};
use flashcore_ptx::launch::{LaunchSpec, Param, Slot};

pub(crate) fn device(bench: &Bench) -> Outcome {
    let (props, version) = (bench.device.props(), Driver::get()?.cuda_version());
    let (free, total) = bench.device.memory_info()?;
    expect(free <= total && total <= props.memory_bytes, || format!("{free} free of {total}"))?;
    expect(Device::new(props.index)? == bench.device, || "a second handle differs from the first".into())?;
    let count = Driver::get()?.device_count()?;
    let beyond = Error::NoSuchDevice { index: count, count };
    expect(Device::new(count).err() == Some(beyond), || "a GPU past the last".into())?;
    let (major, minor) = props.capability;
    Ok(format!(
        "{}, sm_{major}{minor}, {} SMs, {} B shared, CUDA {version}",
        props.name, props.sms, props.shared_optin
    ))
}

fn current_context() -> sys::CUcontext {
    let mut context = std::ptr::null_mut();
    // SAFETY: `context` is a valid place; the driver is loaded and initialised.
    let status = unsafe { sys::cuCtxGetCurrent(&mut context) };
    assert_eq!(status, sys::CUresult::CUDA_SUCCESS);
    context
}

/// Another program's thread: first without a current context, then with one that is not the primary one.
pub(crate) fn context_restored(bench: &Bench) -> Outcome {
    let work = || bench.poisoned(4096).and_then(|buffer| buffer.to_host(&bench.stream)).map(drop);
    let run = || -> Result<(), String> {
        work().map_err(|error| error.to_string())?;
        if !current_context().is_null() {
            return Err("a context was left current where there was none".into());
        }
        let mut theirs = std::ptr::null_mut();
        // SAFETY: valid place, default parameters, an existing device.
        let made =
            unsafe { sys::cuCtxCreate_v4(&mut theirs, std::ptr::null_mut(), 0, bench.device.index() as i32) };
        if made != sys::CUresult::CUDA_SUCCESS {
            return Err(format!("no second context: {made:?}"));
        }
        let done = work().map_err(|error| error.to_string());
        let kept = current_context() == theirs;
        // SAFETY: made above and not used any more.
        let _ = unsafe { sys::cuCtxDestroy_v2(theirs) };
        done?;
        if kept { Ok(()) } else { Err("the caller's context was replaced".into()) }
    };
    std::thread::scope(|scope| scope.spawn(run).join()).map_err(|_| "panicked")??;
    Ok("with no context and with a foreign one".into())
}

pub(crate) fn bad_ptx(bench: &Bench) -> Outcome {
    let wrong = SCALE.ptx.replace("mul.f32", "mul.f33");
    let jit = Compiler::new(None, None);
    for compiler in [&bench.compiler, &jit] {
        match compiler.compile(&wrong, SCALE.target, bench.device) {
            Err(Error::Compile { log, .. }) if log.contains("f33") => {}
            other => return Err(format!("{other:?}").into()),
        }
    }
    Ok("the log names the modifier".into())
}

pub(crate) fn report(bench: &Bench) -> Outcome {
    let cubin = Compiler::new(None, None).compile(SCALE.ptx, SCALE.target, bench.device)?;
    let kernel = flashcore_cuda::Module::load(bench.device, &cubin)?.kernel(SCALE.name)?;
    let reported = kernel.report().kernel(SCALE.name).map(|k| (k.registers, k.spill_stores));
    let registers = kernel.attributes().registers;
    expect(reported == Some((registers, 0)), || {
        format!("{reported:?} reported, {registers} in fact: {:?}", cubin.report())
    })?;
    Ok(format!("{registers} registers, {} CTAs of 256 threads on an SM", kernel.blocks_per_sm(256, 0)?))
}

fn scale_spec(count: u32) -> LaunchSpec {
    let buffers = [Slot(0), Slot(1)].map(Param::Buffer);
    let params = buffers.into_iter().chain([Param::U32(count), Param::F32(2.5)]).collect();
    bench::spec(&SCALE, [count.div_ceil(256), 1, 1], 256, params)
}

pub(crate) fn scale(bench: &Bench) -> Outcome {
    let count = 100_003u32;
    let prepared = bench.prepare(&SCALE, &scale_spec(count))?;
    let input: Vec<u8> = (0..count).flat_map(|i| (i as f32).to_ne_bytes()).collect();
    let from = DeviceBuffer::from_host(&bench.stream, &input)?;
    let to = bench.poisoned(4 * u64::from(count) + 64)?;
    // SAFETY: both buffers hold `count` floats and live until the copy below has waited.
    unsafe { prepared.launch(&bench.stream, &[from.address(), to.address()])? };
    let output = bench.read_u32(&to)?;
    let right = (0..count).all(|i| output[i as usize] == (2.5 * i as f32).to_bits());
    expect(right, || "wrong values".into())?;
    expect(output[count as usize..].iter().all(|&word| word == 0xABAB_ABAB), || "wrote past the end".into())?;
    // SAFETY: refused before anything runs.
    let short = unsafe { prepared.launch(&bench.stream, &[from.address()]) };
    let expected = LaunchError::MissingBuffers { given: 1, needed: 2 };
    expect(short == Err(expected.into()), || format!("{short:?}"))?;
    Ok(format!("{count} floats"))
}

pub(crate) fn parameter_mismatch(bench: &Bench) -> Outcome {
    let kernel = bench.kernel(&SCALE)?;
    let mut spec = scale_spec(1);
    spec.params[2] = Param::U64(1);
    match Prepared::new(&kernel, &spec) {
        Err(Error::Launch(LaunchError::ParamMismatch { kernel, spec })) => {
            Ok(format!("{kernel:?} against {spec:?}"))
        }
        Ok(_) if bench.device.driver().cuda_version() < 12_040 => Ok("this driver cannot tell".into()),
        other => Err(format!("{other:?}").into()),
    }
}

const COLUMNS: u64 = 128;
/// Not a multiple of the box's eight: the last box reaches past the tensor and must read zeros there.
const ROWS: u64 = 20;

fn tma_spec() -> LaunchSpec {
    let params = vec![matrix_map(0, COLUMNS, ROWS), Param::Buffer(Slot(1))];
    bench::spec(&TMA_COPY, [COLUMNS as u32 / 64, ROWS.div_ceil(8) as u32, 1], 128, params)
}

fn matrix(seed: u16) -> Vec<u8> {
    (0..COLUMNS * ROWS).flat_map(|i| (i as u16).wrapping_mul(31).wrapping_add(seed).to_ne_bytes()).collect()
}

/// What shared memory must hold: rows of 128 bytes whose 16-byte chunks are permuted by the row number.
fn expected_boxes(matrix: &[u8]) -> Vec<u8> {
    let mut out = Vec::new();
    for (box_row, box_column) in (0..ROWS.div_ceil(8)).flat_map(|y| (0..COLUMNS / 64).map(move |x| (y, x))) {
        for line in 0..8 {
            for chunk in 0..8 {
                let start =
                    ((box_row * 8 + line) * COLUMNS * 2 + box_column * 128 + (chunk ^ line) * 16) as usize;
                out.extend_from_slice(matrix.get(start..start + 16).unwrap_or(&[0; 16]));
            }
        }
    }
    out
}

fn run_tma(bench: &Bench, prepared: &Prepared, seed: u16) -> Result<(), Box<dyn std::error::Error>> {
    let input = matrix(seed);
    let expected = expected_boxes(&input);
    let from = DeviceBuffer::from_host(&bench.stream, &input)?;
    let to = bench.poisoned(expected.len() as u64)?;
    // SAFETY: the map describes `from`, the kernel writes as many bytes as `to` has; both outlive the copy below.
    unsafe { prepared.launch(&bench.stream, &[from.address(), to.address()])? };
    expect(to.to_host(&bench.stream)? == expected, || format!("wrong bytes for seed {seed}"))
}

pub(crate) fn tma(bench: &Bench) -> Outcome {
    run_tma(bench, &bench.prepare(&TMA_COPY, &tma_spec())?, 1)?;
    Ok("zeros past the end, chunks permuted".into())
}

pub(crate) fn tma_moved(bench: &Bench) -> Outcome {
    let prepared = bench.prepare(&TMA_COPY, &tma_spec())?;
    (0..8).try_for_each(|seed| run_tma(bench, &prepared, seed))?;
    // SAFETY: refused before anything runs.
    let misaligned = unsafe { prepared.launch(&bench.stream, &[24, 16]) };
    expect(matches!(misaligned, Err(Error::TensorMap(_))), || format!("{misaligned:?}"))?;
    Ok("eight tensors through one prepared launch".into())
}

pub(crate) fn cluster(bench: &Bench) -> Outcome {
    let ctas = 264;
    let spec = LaunchSpec {
        cluster: [2, 1, 1],
        ..bench::spec(&CLUSTER, [ctas, 1, 1], 32, vec![Param::Buffer(Slot(0))])
    };
    let prepared = bench.prepare(&CLUSTER, &spec)?;
    let out = bench.poisoned(4 * u64::from(ctas))?;
    // SAFETY: the kernel writes one word per CTA; the copy below waits.
    unsafe { prepared.launch(&bench.stream, &[out.address()])? };
    let expected: Vec<u32> = (0..ctas).map(|cta| 100 + (cta ^ 1)).collect();
    expect(bench.read_u32(&out)? == expected, || "a CTA did not see its neighbour".into())?;
    Ok(format!("{} clusters fit at once", prepared.active_clusters()?))
}
