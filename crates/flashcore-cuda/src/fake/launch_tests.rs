//! What the driver sees of a launch, what it costs, and how its errors are reported.

use super::{
    Fake, World,
    functions::{self, PRIMARY},
    world,
};
use crate::{
    error::Error,
    launch::{LaunchError, Prepared, launch_all},
    memory::DeviceBuffer,
    stream::Stream,
    tensor_map::TensorMapError,
};
use flashcore_ptx::{
    launch::{LaunchSpec, Param, Slot, TensorElement, TensorMapSpec},
    layout::Swizzle,
};
use std::{
    alloc::{GlobalAlloc, Layout, System},
    cell::Cell,
    time::{Duration, Instant},
};

fn map(slot: u8) -> Param {
    Param::TensorMap(TensorMapSpec {
        slot: Slot(slot),
        element: TensorElement::F16,
        dims: vec![64, 8],
        strides: vec![128],
        box_dims: vec![64, 8],
        swizzle: Swizzle::B128,
    })
}

/// A parameter list as attention kernels have it.
fn attention(fake: &Fake) -> Prepared {
    let maps = (0..4).map(map);
    let rest = [Param::Buffer(Slot(4)), Param::U32(7), Param::F32(0.5), Param::U64(9)];
    fake.prepare(|spec| spec.params = maps.chain(rest).collect()).unwrap()
}

fn launch(prepared: &Prepared, stream: &Stream, buffers: &[u64]) -> Result<(), Error> {
    // SAFETY: the fake driver touches no memory.
    unsafe { prepared.launch(stream, buffers) }
}

#[test]
fn the_driver_sees_this_launchs_addresses_and_the_prepared_constants() {
    let fake = Fake::new();
    let (prepared, stream) = (attention(&fake), Stream::new(fake.device).unwrap());
    for base in [0x10_0000u64, 0x20_0000] {
        launch(&prepared, &stream, &[base, base + 16, base + 32, base + 48, base + 5]).unwrap();
        let seen = fake.launches().pop().unwrap();
        assert_eq!(seen.stream, stream.raw() as usize);
        for (at, param) in seen.params[..4].iter().enumerate() {
            assert_eq!(param[..8], (base + 16 * at as u64).to_ne_bytes());
            assert_eq!(
                param[8..24],
                [2u64.to_ne_bytes(), 3u64.to_ne_bytes()].concat(),
                "rank and swizzle survive"
            );
        }
        assert_eq!(seen.params[4], (base + 5).to_ne_bytes());
        assert_eq!(
            (&seen.params[5][..], &seen.params[6][..]),
            (&7u32.to_ne_bytes()[..], &0.5f32.to_ne_bytes()[..])
        );
    }
}

/// The calls that `work` makes.
fn calls_of(work: impl FnOnce()) -> Vec<&'static str> {
    let before = world(|world| world.calls.len());
    work();
    world(|world| world.calls[before..].to_vec())
}

#[test]
fn a_launch_is_one_call_beside_the_look_at_the_context() {
    let fake = Fake::new();
    let (prepared, stream) = (attention(&fake), Stream::new(fake.device).unwrap());
    fake.device
        .with_context(|| {
            let calls = calls_of(|| launch(&prepared, &stream, &[1 << 46; 5]).unwrap());
            assert_eq!(calls, ["cuLaunchKernelEx"]);
            let beyond = calls_of(|| launch(&prepared, &stream, &[1 << 47; 5]).unwrap());
            assert_eq!(beyond.len(), 5, "addresses that were not tried are left to the driver: {beyond:?}");
        })
        .unwrap();
}

/// A step of a serving engine: new lengths and new tensors in every call of a plan of two kernels. Nothing is copied,
/// allocated or waited for; the driver gets one launch for each kernel, with this step's addresses.
#[test]
fn a_thousand_steps_with_new_lengths_are_launches_and_nothing_else() {
    let fake = Fake::new();
    let stream = Stream::new(fake.device).unwrap();
    let lengths = |fake: &Fake| {
        fake.prepare(|spec| spec.params = (0..3).map(|slot| Param::Buffer(Slot(slot))).collect()).unwrap()
    };
    let plan = [lengths(&fake), lengths(&fake)];
    fake.device
        .with_context(|| {
            for step in 1..=1000u64 {
                let addresses = [step << 20, step << 21, step << 22];
                // SAFETY: the fake driver touches no memory.
                let calls = calls_of(|| unsafe { launch_all(&plan, stream.raw(), &addresses).unwrap() });
                assert_eq!(calls, ["cuLaunchKernelEx"; 2]);
                let seen = fake.launches().pop().unwrap();
                let expected = addresses.map(|address| address.to_ne_bytes().to_vec());
                assert_eq!(seen.params[..3], expected);
            }
        })
        .unwrap();
    world(|world| world.record = false);
    let before = ALLOCATIONS.get();
    // SAFETY: as above.
    (1..100u64).for_each(|n| unsafe { launch_all(&plan, stream.raw(), &[n << 20; 3]).unwrap() });
    assert_eq!(ALLOCATIONS.get(), before);
}

#[test]
fn maps_of_another_encoding_are_left_to_the_driver() {
    let fake = Fake::of(World { halves_addresses: true, ..World::default() });
    let (prepared, stream) = (attention(&fake), Stream::new(fake.device).unwrap());
    let probes = fake.calls_of("cuTensorMapReplaceAddress");
    launch(&prepared, &stream, &[0x20_0000; 5]).unwrap();
    assert_eq!(fake.calls_of("cuTensorMapReplaceAddress"), probes + 4);
    assert_eq!(fake.launches().pop().unwrap().params[0][..8], 0x10_0000u64.to_ne_bytes());
}

#[test]
fn parameters_are_compared_without_asking_past_the_end() {
    let two = vec![Param::U32(1), Param::U64(2)];
    for (counts_params, kernel, refused) in [
        (false, vec![4, 8], false),
        (true, vec![4, 8], false),
        (false, vec![4, 4], true),
        (false, vec![4], true),
        (true, vec![4, 8, 8], true),
    ] {
        let fake = Fake::of(World { counts_params, ..World::default() });
        let kernel_of = fake.kernel();
        world(|world| world.param_bytes = kernel.clone());
        let prepared = Prepared::new(&kernel_of, &LaunchSpec { params: two.clone(), ..Fake::spec() });
        let mismatch = matches!(prepared, Err(Error::Launch(LaunchError::ParamMismatch { .. })));
        assert_eq!((mismatch, prepared.is_err()), (refused, refused), "{kernel:?}");
        let past = fake.calls_of("cuFuncGetParamInfo past the end");
        assert_eq!(past, usize::from(kernel.len() < 2), "{kernel:?}");
    }
}

#[test]
fn threads_launching_at_once_do_not_mix_their_addresses() {
    let fake = Fake::new();
    let prepared = attention(&fake);
    std::thread::scope(|scope| {
        for thread in 1..=4u64 {
            let (prepared, device) = (&prepared, fake.device);
            scope.spawn(move || {
                let stream = Stream::new(device).unwrap();
                (0..200).for_each(|_| launch(prepared, &stream, &[thread << 24; 5]).unwrap());
            });
        }
    });
    let seen = fake.launches();
    assert_eq!(seen.len(), 800);
    for launch in seen {
        let addresses = launch.params[..5].iter().map(|param| param[..8].to_vec());
        assert!(addresses.into_iter().all(|address| address == launch.params[4]), "{launch:?}");
    }
}

#[test]
fn clusters_and_dependent_launches_become_attributes() {
    let fake = Fake::new();
    let stream = Stream::new(fake.device).unwrap();
    for (cluster, dependent, expected) in
        [([1; 3], false, vec![]), ([2, 1, 1], false, vec![4]), ([2, 1, 1], true, vec![4, 6])]
    {
        let prepared = fake.prepare(|spec| (spec.cluster, spec.dependent) = (cluster, dependent)).unwrap();
        launch(&prepared, &stream, &[]).unwrap();
        assert_eq!(fake.launches().pop().unwrap().attributes, expected);
    }
}

#[test]
fn a_launch_that_cannot_be_right_never_reaches_the_driver() {
    let fake = Fake::new();
    let (prepared, stream) = (attention(&fake), Stream::new(fake.device).unwrap());
    let missing = LaunchError::MissingBuffers { given: 2, needed: 5 };
    assert_eq!(launch(&prepared, &stream, &[16, 16]), Err(missing.into()));
    let misaligned = TensorMapError::Address { address: 24 };
    assert_eq!(launch(&prepared, &stream, &[16, 24, 16, 16, 16]), Err(misaligned.into()));
    let wrong = fake.prepare(|spec| spec.grid = [0, 1, 1]);
    assert!(matches!(wrong, Err(Error::Launch(LaunchError::Grid { .. }))));
    assert_eq!(fake.calls_of("cuLaunchKernelEx"), 0);
}

#[test]
fn the_callers_context_is_restored() {
    let fake = Fake::new();
    for theirs in [0, 0x2000, PRIMARY] {
        functions::set_current(theirs);
        let prepared = attention(&fake);
        let stream = Stream::new(fake.device).unwrap();
        launch(&prepared, &stream, &[16; 5]).unwrap();
        assert_eq!(functions::current(), theirs);
        assert!(launch(&prepared, &stream, &[]).is_err());
        drop((stream, DeviceBuffer::new(fake.device, 64).unwrap()));
        assert_eq!(functions::current(), theirs, "also after errors and drops");
        let nested = fake.device.with_context(|| fake.device.with_context(functions::current).unwrap());
        assert_eq!((nested, functions::current()), (Ok(PRIMARY), theirs));
    }
    assert_eq!(fake.calls_of("cuDevicePrimaryCtxRetain"), 1, "retained once, never created");
}

#[test]
fn a_sticky_error_is_blamed_on_earlier_launches_and_stays() {
    let fake = Fake::new();
    let (prepared, stream) = (attention(&fake), Stream::new(fake.device).unwrap());
    launch(&prepared, &stream, &[16; 5]).unwrap();
    fake.fail("cuLaunchKernelEx", 700);
    let Err(Error::ContextPoisoned { first_cause, .. }) = launch(&prepared, &stream, &[16; 5]) else {
        panic!("not poisoned")
    };
    assert_eq!((first_cause.error.call, first_cause.error.code), ("cuLaunchKernelEx", 700));
    assert_eq!(first_cause.error.kernel, None, "the launch that met the error is not the culprit");
    assert_eq!((first_cause.suspects.clone(), first_cause.exact), (vec!["kernel".to_owned()], false));

    let before = world(|world| world.calls.len());
    let again = Err(Error::ContextPoisoned { device: 0, first_cause: first_cause.clone() });
    assert_eq!(launch(&prepared, &stream, &[16; 5]), again);
    assert_eq!(stream.synchronize(), again);
    assert_eq!(DeviceBuffer::new(fake.device, 64).map(drop), again);
    drop(stream);
    assert_eq!(world(|world| world.calls.len()), before, "a lost context is not asked again");
    assert_eq!(fake.device.first_cause(), Some(&*first_cause));
}

/// This program with one test of this file and a variable set: the environment belongs to the whole process. What it
/// says on standard error; `None` inside it.
fn child(test: &str, variable: &str) -> Option<String> {
    if std::env::var(variable).is_ok() {
        return None;
    }
    let mut child = std::process::Command::new(std::env::current_exe().unwrap());
    child.args([&format!("fake::launch_tests::{test}"), "--exact", "--nocapture"]).env(variable, "1");
    let output = child.output().unwrap();
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stdout));
    Some(String::from_utf8(output.stderr).unwrap())
}

#[test]
fn a_trace_has_a_line_for_each_launch() {
    let Some(trace) = child("a_trace_has_a_line_for_each_launch", "FLASHCORE_TRACE") else {
        let fake = Fake::new();
        let (prepared, stream) = (attention(&fake), Stream::new(fake.device).unwrap());
        launch(&prepared, &stream, &[16; 5]).unwrap();
        fake.fail("cuLaunchKernelEx", 701);
        launch(&prepared, &stream, &[16; 5]).unwrap_err();
        return;
    };
    let lines: Vec<_> = trace.lines().filter(|line| line.starts_with("flashcore: ")).collect();
    let start = "flashcore: kernel: grid 4x1x1, block 128x1x1, 0 bytes of shared memory, ";
    assert!(lines.len() == 2 && lines.iter().all(|line| line.starts_with(start)), "{trace}");
    assert!(lines[0].ends_with(" us on the host") && lines[1].ends_with(", failed"), "{trace}");
}

#[test]
fn waiting_for_each_launch_names_the_kernel_at_fault() {
    if child("waiting_for_each_launch_names_the_kernel_at_fault", "FLASHCORE_SYNC").is_some() {
        return;
    }
    for (before_launch, kernel) in [(true, None), (false, Some("kernel"))] {
        let fake = Fake::new();
        let (prepared, stream) = (attention(&fake), Stream::new(fake.device).unwrap());
        launch(&prepared, &stream, &[16; 5]).unwrap();
        let fault = ("cuStreamSynchronize", 719);
        world(
            |world| {
                if before_launch { world.failures.push(fault) } else { world.failures_of_kernel.push(fault) }
            },
        );
        let Err(Error::ContextPoisoned { first_cause, .. }) = launch(&prepared, &stream, &[16; 5]) else {
            panic!("not poisoned")
        };
        assert_eq!((first_cause.error.kernel.as_deref(), first_cause.exact), (kernel, !before_launch));
    }
}

#[test]
fn recoverable_errors_name_the_call_and_leave_the_device_usable() {
    let fake = Fake::new();
    let (prepared, stream) = (attention(&fake), Stream::new(fake.device).unwrap());
    fake.fail("cuLaunchKernelEx", 701);
    let Err(Error::Driver(error)) = launch(&prepared, &stream, &[16; 5]) else { panic!("not refused") };
    assert_eq!((error.call, error.code, error.kernel.as_deref()), ("cuLaunchKernelEx", 701, Some("kernel")));
    assert_eq!(launch(&prepared, &stream, &[16; 5]), Ok(()));
    fake.fail("cuMemAlloc", 2);
    let full = Error::OutOfMemory { requested: 64, free: 1 << 20, total: 1 << 30 };
    assert_eq!(DeviceBuffer::new(fake.device, 64).map(drop), Err(full));
}

#[test]
fn an_error_in_a_drop_is_kept_apart_from_later_calls() {
    let fake = Fake::new();
    let buffer = DeviceBuffer::new(fake.device, 64).unwrap();
    fake.fail("cuMemFree", 1);
    drop(buffer);
    assert!(DeviceBuffer::new(fake.device, 64).is_ok());
    let kept = fake.device.take_drop_errors();
    assert_eq!(kept.iter().map(|error| (error.call, error.code)).collect::<Vec<_>>(), [("cuMemFree_v2", 1)]);
    assert!(fake.device.take_drop_errors().is_empty());
}

thread_local! {
    static ALLOCATIONS: Cell<u64> = const { Cell::new(0) };
}

/// Counts this thread's allocations.
struct Counting;

// SAFETY: every call goes to the system's allocator unchanged.
unsafe impl GlobalAlloc for Counting {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        // A thread that is ending has no counter left; what it allocates is nobody's concern.
        let _ = ALLOCATIONS.try_with(|count| count.set(count.get() + 1));
        // SAFETY: the caller's promise.
        unsafe { System.alloc(layout) }
    }

    unsafe fn dealloc(&self, at: *mut u8, layout: Layout) {
        // SAFETY: the caller's promise.
        unsafe { System.dealloc(at, layout) }
    }
}

#[global_allocator]
static COUNTING: Counting = Counting;

#[test]
fn a_launch_allocates_nothing_and_costs_little() {
    let fake = Fake::new();
    let (prepared, stream) = (attention(&fake), Stream::new(fake.device).unwrap());
    world(|world| world.record = false);
    let before = ALLOCATIONS.get();
    // The best of many short bursts: other programs on the machine only ever make a burst slower.
    let burst = || {
        let start = Instant::now();
        (0..100u64).for_each(|i| launch(&prepared, &stream, &[(i + 1) << 20; 5]).unwrap());
        start.elapsed() / 100
    };
    let best = (0..50).map(|_| burst()).min().unwrap();
    assert_eq!(ALLOCATIONS.get(), before);
    println!("our share of a launch: {best:?}");
    assert!(best < Duration::from_micros(3), "{best:?}");
}
