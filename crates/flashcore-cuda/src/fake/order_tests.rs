//! Whose workspace is whose: streams, captures, growth, reused handles.

use super::{Fake, world};
use crate::{
    error::Error,
    launch::{Prepared, launch_all, launch_all_with},
    stream::Stream,
};
use flashcore_ptx::launch::{Param, Slot, Workspace};
use std::ffi::c_void;

const ZEROED: bool = true;

fn with_workspace(fake: &Fake, sizes: &[(u64, bool)]) -> Prepared {
    fake.prepare(|spec| {
        let list = sizes.iter().zip(0..).map(|(&(bytes, zeroed), slot)| Workspace {
            slot: Slot(slot),
            bytes,
            zeroed,
        });
        spec.workspace = list.collect();
        spec.params = spec.workspace.iter().map(|workspace| Param::Buffer(workspace.slot)).collect();
    })
    .unwrap()
}

/// Launches and returns the addresses of the workspaces that the driver saw.
fn used(fake: &Fake, prepared: &Prepared, stream: *mut c_void) -> Vec<u64> {
    let sizes = vec![8; prepared.workspace_count()];
    world(|world| world.param_bytes = sizes);
    // SAFETY: the fake driver touches no memory.
    unsafe { prepared.launch_raw(stream, &[]).unwrap() };
    let seen = fake.launches().pop().unwrap();
    seen.params.iter().map(|param| u64::from_ne_bytes(param[..8].try_into().unwrap())).collect()
}

#[test]
fn launches_of_one_stream_share_and_of_two_do_not() {
    let fake = Fake::new();
    let prepared = with_workspace(&fake, &[(4, ZEROED), (4096, false)]);
    let (a, b) = (Stream::new(fake.device).unwrap(), Stream::new(fake.device).unwrap());
    let first = used(&fake, &prepared, a.raw());
    assert_eq!(used(&fake, &prepared, a.raw()), first);
    let other = used(&fake, &prepared, b.raw());
    assert!(first.iter().all(|address| !other.contains(address)));
    assert_ne!(first[0], first[1]);
    let zeroed: Vec<u64> = world(|world| world.zeroed.iter().map(|(to, _)| *to).collect());
    assert_eq!(zeroed, [first[0], other[0]], "zeroed once each, and only where asked for");
}

#[test]
fn what_a_refused_launch_leaves_counts_as_dirty() {
    let fake = Fake::new();
    let plan = [0, 1].map(|_| with_workspace(&fake, &[(4, ZEROED), (4096, false)]));
    let stream = Stream::new(fake.device).unwrap();
    let before = used(&fake, &plan[0], stream.raw());
    refuse(&plan, 1, stream.raw());
    let after = used(&fake, &plan[0], stream.raw());
    assert_ne!(after[0], before[0], "a block that nobody has cleaned up must not pass for zeros");
    assert_eq!(world(|world| world.zeroed.last().map(|(to, _)| *to)), Some(after[0]));
    assert_eq!(used(&fake, &plan[0], stream.raw()), after);
}

/// So many launches of a plan are taken, the next is not.
fn refuse(plan: &[Prepared], taken: usize, stream: *mut c_void) {
    let answers = std::iter::repeat_n(0, taken).chain([1]);
    world(|world| world.failures = answers.map(|code| ("cuLaunchKernelEx", code)).collect());
    // SAFETY: the fake driver touches no memory.
    assert!(unsafe { launch_all(plan, stream, &[]) }.is_err());
}

#[test]
fn a_plan_of_which_nothing_was_launched_leaves_zeros() {
    let fake = Fake::new();
    let plan = [0, 1].map(|_| with_workspace(&fake, &[(4, ZEROED), (4096, false)]));
    let stream = Stream::new(fake.device).unwrap();
    let before = used(&fake, &plan[0], stream.raw());
    for _ in 0..3 {
        refuse(&plan, 0, stream.raw());
    }
    assert_eq!(used(&fake, &plan[0], stream.raw()), before);
}

#[test]
fn what_a_graph_of_half_a_plan_leaves_counts_as_dirty() {
    let fake = Fake::new();
    let plan = [0, 1].map(|_| with_workspace(&fake, &[(4, ZEROED)]));
    let stream = Stream::new(fake.device).unwrap();
    fake.begin_capture(stream.raw(), 71);
    let before = used(&fake, &plan[0], stream.raw());
    refuse(&plan, 1, stream.raw());
    let after = used(&fake, &plan[0], stream.raw());
    assert_ne!(after, before, "every replay leaves something there");
    fake.end_capture(stream.raw());
    fake.destroy_graph(71);
    let reused = [0, 1].map(|_| {
        let stream = std::mem::ManuallyDrop::new(Stream::new(fake.device).unwrap());
        used(&fake, &plan[0], stream.raw())
    });
    assert!(reused.contains(&after) && !reused.contains(&before));
}

#[test]
fn scratch_memory_may_be_the_callers() {
    let fake = Fake::new();
    let prepared = with_workspace(&fake, &[(4, ZEROED), (4096, false)]);
    let (stream, bytes) = (Stream::new(fake.device).unwrap(), std::cell::RefCell::new(vec![]));
    world(|world| world.param_bytes = vec![8; 2]);
    let launch = |allocate: &dyn Fn(u64) -> Option<u64>| {
        // SAFETY: the fake driver touches no memory.
        unsafe { launch_all_with(std::slice::from_ref(&prepared), stream.raw(), &[], allocate) }
    };
    launch(&|asked| {
        bytes.borrow_mut().push(asked);
        Some(asked << 20)
    })
    .unwrap();
    let seen = fake.launches().pop().unwrap();
    let addresses: Vec<u64> =
        seen.params.iter().map(|param| u64::from_ne_bytes(param[..8].try_into().unwrap())).collect();
    assert_eq!((bytes.take(), addresses), (vec![4, 4096], vec![4 << 20, 4096 << 20]));
    assert_eq!(world(|world| world.zeroed.iter().map(|(to, _)| *to).collect::<Vec<_>>()), [4 << 20]);
    assert!(matches!(launch(&|_| None), Err(Error::OutOfMemory { requested: 4, .. })));
}

#[test]
fn a_captured_graph_owns_its_workspace_until_it_is_destroyed() {
    let fake = Fake::new();
    let prepared = with_workspace(&fake, &[(4, ZEROED)]);
    let stream = Stream::new(fake.device).unwrap();
    let eager = used(&fake, &prepared, stream.raw());
    let mut captured = vec![];
    for capture in [71, 72] {
        fake.begin_capture(stream.raw(), capture);
        let block = used(&fake, &prepared, stream.raw());
        assert_eq!(used(&fake, &prepared, stream.raw()), block, "nodes of one stream follow one another");
        fake.end_capture(stream.raw());
        assert!(block != eager && !captured.contains(&block));
        captured.push(block);
    }
    assert_eq!(used(&fake, &prepared, stream.raw()), eager);
    let others = |n: usize| -> Vec<Vec<u64>> {
        (0..n)
            .map(|_| {
                used(&fake, &prepared, std::mem::ManuallyDrop::new(Stream::new(fake.device).unwrap()).raw())
            })
            .collect()
    };
    assert!(
        others(3).iter().all(|block| !captured.contains(block)),
        "a living graph can be replayed any time"
    );
    fake.destroy_graph(71);
    let reused = others(2);
    assert!(reused.contains(&captured[0]) && !reused.contains(&captured[1]));
}

#[test]
fn streams_of_one_capture_do_not_share() {
    let fake = Fake::new();
    let prepared = with_workspace(&fake, &[(4, ZEROED)]);
    let (a, b) = (Stream::new(fake.device).unwrap(), Stream::new(fake.device).unwrap());
    [&a, &b].iter().for_each(|stream| fake.begin_capture(stream.raw(), 5));
    assert_ne!(used(&fake, &prepared, a.raw()), used(&fake, &prepared, b.raw()));
    [&a, &b].iter().for_each(|stream| fake.end_capture(stream.raw()));
    fake.destroy_graph(5);
}

#[test]
fn a_block_that_is_too_small_waits_for_its_last_user() {
    let fake = Fake::new();
    let small = with_workspace(&fake, &[(1 << 16, false)]);
    let large = with_workspace(&fake, &[(1 << 20, false)]);
    let (a, b) = (Stream::new(fake.device).unwrap(), Stream::new(fake.device).unwrap());
    let old = used(&fake, &small, a.raw());
    world(|world| world.events_pending = true);
    let grown = used(&fake, &large, a.raw());
    assert_ne!(grown, old);
    assert_ne!(used(&fake, &small, b.raw()), old, "a launch on the first stream may still use it");
    world(|world| world.events_pending = false);
    let third = Stream::new(fake.device).unwrap();
    assert_eq!(used(&fake, &small, third.raw()), old, "and then it is reused");
}

#[test]
fn a_reused_handle_is_another_stream() {
    let fake = Fake::new();
    let prepared = with_workspace(&fake, &[(4, ZEROED)]);
    let foreign = 0x5000 as *mut c_void;
    let before = used(&fake, &prepared, foreign);
    world(|world| world.stream_ids.insert(foreign as usize, 99));
    assert_ne!(used(&fake, &prepared, foreign), before, "the old stream's work may still be running");
}

#[test]
fn a_dropped_stream_hands_its_blocks_on_once_its_work_is_done() {
    let fake = Fake::new();
    let prepared = with_workspace(&fake, &[(4, ZEROED)]);
    let stream = Stream::new(fake.device).unwrap();
    let block = used(&fake, &prepared, stream.raw());
    world(|world| world.events_pending = true);
    drop(stream);
    let next = Stream::new(fake.device).unwrap();
    assert_ne!(used(&fake, &prepared, next.raw()), block);
    world(|world| world.events_pending = false);
    let last = Stream::new(fake.device).unwrap();
    assert_eq!(used(&fake, &prepared, last.raw()), block);
    assert_eq!(fake.device.workspace_bytes(), 2 << 16);
    assert_eq!(fake.device.trim_workspaces(), Ok(2 << 16));
    assert_eq!(world(|world| world.memory.len()), 0, "nothing leaks");
}
