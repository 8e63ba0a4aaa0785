//! Errors that a device survives, and errors that it does not (in a child process).

use crate::bench::{self, Bench, FAULT, Outcome, expect};
use flashcore_cuda::{DeviceBuffer, Error};
use flashcore_ptx::launch::{Param, Slot};
use std::process::{Command, ExitCode};

pub(crate) fn out_of_memory(bench: &Bench) -> Outcome {
    let asked = 1 << 46;
    match DeviceBuffer::new(bench.device, asked) {
        Err(Error::OutOfMemory { requested, free, total }) if requested == asked && free <= total => {}
        other => return Err(format!("{other:?}").into()),
    }
    let alive = bench.poisoned(64)?.to_host(&bench.stream)?;
    expect(alive == [0xAB; 64], || "the device did not survive".into())?;
    Ok("the next allocation works".into())
}

pub(crate) fn sticky(bench: &Bench) -> Outcome {
    let index = bench.device.index().to_string();
    for sync in ["0", "1"] {
        let program = std::env::current_exe()?;
        let child = Command::new(program).args(["--fault", &index]).env("FLASHCORE_SYNC", sync).output()?;
        let text = String::from_utf8_lossy(&child.stdout);
        expect(child.status.success(), || format!("FLASHCORE_SYNC={sync}: {text}"))?;
    }
    bench.device.synchronize()?;
    Ok("suspects named; exact with FLASHCORE_SYNC=1".into())
}

/// Loses its GPU on purpose and checks what is said about it.
pub(crate) fn child() -> ExitCode {
    let index = std::env::args().nth(2).and_then(|text| text.parse().ok()).unwrap_or(0);
    match lose_the_device(index) {
        Ok(_) => ExitCode::SUCCESS,
        Err(error) => {
            println!("{error}");
            ExitCode::FAILURE
        }
    }
}

fn lose_the_device(index: u32) -> Outcome {
    let bench = Bench::new(index)?;
    let exact = std::env::var("FLASHCORE_SYNC").is_ok_and(|value| value == "1");
    let spec = bench::spec(&FAULT, [1, 1, 1], 1, vec![Param::Buffer(Slot(0))]);
    let prepared = bench.prepare(&FAULT, &spec)?;
    let buffer = bench.poisoned(64)?;
    // SAFETY: a null write is the point: the driver stops the kernel and this process keeps no other work.
    let launched = unsafe { prepared.launch(&bench.stream, &[0]) };
    let seen = launched.and_then(|()| bench.stream.synchronize());
    let Err(Error::ContextPoisoned { first_cause, .. }) = seen else {
        return Err(format!("{seen:?}").into());
    };
    expect(first_cause.error.code == 700, || first_cause.to_string())?;
    expect(first_cause.exact == exact, || format!("exact: {}", first_cause.exact))?;
    let named = if exact {
        first_cause.error.kernel.as_deref()
    } else {
        first_cause.suspects.first().map(String::as_str)
    };
    expect(named == Some(FAULT.name), || first_cause.to_string())?;
    let later = DeviceBuffer::new(bench.device, 64);
    let same =
        matches!(&later, Err(Error::ContextPoisoned { first_cause: again, .. }) if *again == first_cause);
    expect(same, || format!("a later call says {later:?}"))?;
    drop(buffer);
    expect(bench.device.take_drop_errors().is_empty(), || "a drop reported the old error again".into())?;
    Ok(String::new())
}
