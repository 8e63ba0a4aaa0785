//! Wrong kernels are refused while they are built, with a message that says what is wrong and the Rust line that did it.

use flashcore_ptx::{ident::Ident, layout::Swizzle, target::Target};
use flashcore_tile::{
    Acc, Builder, Cmp, CopyWidth, Cta, Global, Half, Major, MatrixOrder, Params, Pred, RegisterBudget, Roles,
    Scope, Shared, Start, U32, U64, Val, Warp, Warpgroup,
};

const THREADS: u32 = 384;

/// Builds a kernel of 384 threads and returns what the builder says of it.
fn build<R>(
    target: Target,
    kernel: impl FnOnce(&mut Builder, &mut Params<()>) -> R,
) -> Result<String, String> {
    let name = Ident::new("fc_test").unwrap();
    let mut b = Builder::new(target, &name, THREADS, 1);
    let mut params = Params::default();
    kernel(&mut b, &mut params);
    b.finish(&name, params).map(|program| program.text().to_owned()).map_err(|error| error.to_string())
}

/// The kernel is refused, with `says` in the message and this file named in it.
#[track_caller]
fn refused<R>(target: Target, says: &str, kernel: impl FnOnce(&mut Builder, &mut Params<()>) -> R) {
    let message = build(target, kernel).expect_err("the kernel was accepted");
    assert!(message.contains(says), "{message}");
    assert!(message.contains("tests/misuse.rs:"), "no line in: {message}");
}

/// A condition on which the lanes of a warp differ.
#[track_caller]
fn per_lane(b: &mut Builder) -> Pred {
    let lane = b.lane();
    b.test(Cmp::Lt, lane, 7)
}

/// A condition on which the warps of a CTA differ.
#[track_caller]
fn per_warp(b: &mut Builder) -> Pred {
    let warp = b.warp();
    b.test(Cmp::Lt, warp, 3)
}

#[test]
fn products_need_a_whole_warp() {
    refused(Target::Sm80, "mma.sync must be executed by a whole warp", |b, _| {
        let tile = b.smem_tile(16, 64, Swizzle::B128, 1);
        let view = tile.matrix_rows(b, MatrixOrder::RowsFirst).at(b, 0);
        let sums = Acc::zero(b, 16);
        let quad = view.load(b, 0, 0);
        let some = per_lane(b);
        b.if_(some, |b| b.mma_pair(Half::F16, &sums, 0, quad, quad));
    });
}

#[test]
fn matrix_loads_need_a_whole_warp() {
    refused(Target::Sm80, "ldmatrix must be executed by a whole warp", |b, _| {
        let tile = b.smem_tile(16, 64, Swizzle::B128, 1);
        let view = tile.matrix_rows(b, MatrixOrder::RowsFirst).at(b, 0);
        let some = per_lane(b);
        b.if_(some, |b| {
            view.load(b, 0, 0);
        });
    });
}

#[test]
fn a_predicate_is_a_branch_too() {
    refused(Target::Sm80, "must be executed by a whole warp", |b, _| {
        let value = b.var(1.0);
        let some = per_lane(b);
        b.predicated(some, |b| {
            b.shuffle_xor(value, 1);
        });
    });
}

#[test]
fn votes_need_a_whole_warp() {
    refused(Target::Sm80, "vote.sync", |b, _| {
        let some = per_lane(b);
        b.if_(some, |b| {
            b.any(some);
        });
    });
}

#[test]
fn a_cta_barrier_needs_the_cta() {
    refused(Target::Sm80, "bar.sync over the CTA must be executed by a whole CTA", |b, _| {
        let some = per_warp(b);
        b.if_(some, |b| b.sync_cta());
    });
}

#[test]
fn wgmma_needs_a_warpgroup() {
    refused(Target::Sm90a, "wgmma must be executed by a whole warpgroup", |b, _| {
        let tile = b.smem_tile(64, 64, Swizzle::B128, 1);
        let operand = tile.operand(b, Major::K, 0);
        let sums = Acc::new(b, 64);
        let some = per_warp(b);
        b.if_(some, |b| drop(b.wgmma_ss(sums, Start::Zero, Half::F16, [&operand, &operand], 64).wait(b)));
    });
}

#[test]
fn uniformity_is_not_taken_on_trust() {
    refused(Target::Sm80, "a CTA-uniform condition is needed, but this one is only warp-uniform", |b, _| {
        let some = per_warp(b);
        b.uniform::<Cta>(some);
    });
    refused(Target::Sm80, "a warp-uniform condition is needed, but this one is only lane-uniform", |b, _| {
        let some = per_lane(b);
        b.uniform::<Warp>(some);
    });
}

#[test]
fn a_uniform_variable_stays_uniform() {
    refused(Target::Sm80, "is set to a lane-uniform value", |b, _| {
        let var = b.var::<U32>(0);
        let lane = b.lane();
        b.set(var, lane);
    });
    refused(Target::Sm80, "in lane-uniform control flow", |b, _| {
        let var = b.var::<U32>(0);
        let some = per_lane(b);
        b.if_(some, |b| b.set(var, 1));
    });
}

#[test]
fn shared_memory_ends() {
    for (target, most) in [(Target::Sm80, 166_912), (Target::Sm86, 101_376), (Target::Sm90a, 232_448)] {
        refused(target, &format!("but a CTA has at most {most}"), |b, _| b.shared(most + 1, 16));
        let fits = build(target, |b, _| b.shared(most, 16));
        assert!(fits.is_ok(), "{fits:?}");
    }
}

#[test]
fn tiles_are_whole_slabs() {
    refused(Target::Sm80, "columns in 64s", |b, _| b.smem_tile(64, 80, Swizzle::B128, 1));
    refused(Target::Sm80, "rows in eights", |b, _| b.smem_tile(12, 64, Swizzle::B128, 1));
}

#[test]
fn ldmatrix_needs_a_swizzle() {
    refused(Target::Sm80, "needs a swizzled tile", |b, _| {
        let tile = b.smem_tile(16, 64, Swizzle::None, 1);
        tile.matrix_rows(b, MatrixOrder::RowsFirst);
    });
}

#[test]
fn a_tile_over_others_lies_in_reserved_memory() {
    refused(Target::Sm80, "must start at a multiple of 1024 and end by 8192", |b, _| {
        b.smem_tile(64, 64, Swizzle::B128, 1);
        b.smem_tile_over(1024, 64, 64, Swizzle::B128);
    });
    refused(Target::Sm80, "must start at a multiple of 1024", |b, _| {
        b.smem_tile(64, 64, Swizzle::B128, 2);
        b.smem_tile_over(512, 64, 64, Swizzle::B128);
    });
}

#[test]
fn hardware_barriers_are_few_and_for_whole_warps() {
    refused(Target::Sm80, "16 named barriers", |b, _| (0..16).map(|_| b.named_barrier(64)).count());
    refused(Target::Sm80, "must be a multiple of 32", |b, _| b.named_barrier(100));
    refused(Target::Sm80, "at most 384", |b, _| b.named_barrier(512));
}

#[test]
fn roles_share_what_there_is() {
    let run = |consumers, producer| {
        move |b: &mut Builder, _: &mut Params<()>| {
            let budget = Some(RegisterBudget { producer, consumer: 240 });
            b.specialise(Roles { consumers, budget }, |_| (), |_, _| ());
        }
    };
    assert_eq!(build(Target::Sm90a, run(2, 24)).err(), None);
    refused(Target::Sm90a, "ask for", run(2, 40));
    refused(Target::Sm90a, "the roles have 256 threads", run(1, 24));
}

#[test]
fn names_are_checked() {
    refused(Target::Sm80, "p_a b", |b, params| params.u32(b, "a b", |()| 0));
    refused(Target::Sm80, "p_;ret", |b, params| params.u64(b, ";ret", |()| 0));
}

#[test]
fn instructions_need_their_architecture() {
    refused(Target::Sm80, "sm_90", |b, _| b.fence_async());
    refused(Target::Sm80, "sm_90", |b, _| b.sync_cluster());
    refused(Target::Sm90, "sm_90a", |b, _| {
        let tile = b.smem_tile(64, 64, Swizzle::B128, 1);
        let operand = tile.operand(b, Major::K, 0);
        let sums = Acc::new(b, 64);
        b.wgmma_ss(sums, Start::Zero, Half::F16, [&operand, &operand], 64).wait(b);
    });
}

#[test]
fn products_in_flight_do_not_differ_between_ways() {
    refused(Target::Sm90a, "wgmma groups are in flight", |b, _| {
        let tile = b.smem_tile(64, 64, Swizzle::B128, 1);
        let operand = tile.operand(b, Major::K, 0);
        let sums = Acc::new(b, 64);
        let group = b.warpgroup();
        let first = b.test(Cmp::Eq, group, 0);
        let first = b.uniform::<Warpgroup>(first);
        let mut left = None;
        b.if_uniform(first, |b| {
            left = Some(b.wgmma_ss(sums, Start::Zero, Half::F16, [&operand, &operand], 64))
        });
        left.map(|pending| pending.wait(b));
    });
}

#[test]
fn what_goes_round_a_loop_comes_back() {
    refused(Target::Sm80, "does not come back in the registers it entered with", |b, _| {
        let sums = Acc::zero(b, 16);
        b.do_while_carrying(sums, |b, _| {
            let again = b.test::<U32>(Cmp::Eq, 0, 1);
            (b.uniform::<Cta>(again), Acc::zero(b, 16))
        });
    });
}

#[test]
fn copies_are_aligned_to_their_width() {
    let copy = |width: CopyWidth, to: u32, from: i32| {
        move |b: &mut Builder, params: &mut Params<()>| {
            let source = params.u64(b, "source", |()| 0);
            let base = b.shared_base();
            b.copy_async(width, Shared { base, offset: to }, Global { base: source, offset: from }, None);
            b.commit_copies();
            b.wait_copies(0);
        }
    };
    assert!(build(Target::Sm80, copy(CopyWidth::B16, 32, 48)).is_ok());
    refused(Target::Sm80, "16", copy(CopyWidth::B16, 8, 0));
    refused(Target::Sm80, "8", copy(CopyWidth::B8, 4, 0));
}

#[test]
fn vectors_have_two_or_four_elements() {
    refused(Target::Sm80, "st", |b, params| {
        let to: flashcore_tile::Reg<U64> = params.u64(b, "to", |()| 0);
        b.store_global::<U32>(to, &[Val::Const(0); 3]);
    });
}

#[test]
fn registers_are_written_before_they_are_read() {
    refused(Target::Sm80, "before", |b, params| {
        let to: flashcore_tile::Reg<U64> = params.u64(b, "to", |()| 0);
        let sums = Acc::new(b, 16);
        b.store_global(to, &[sums.regs()[0].into()]);
    });
}

#[test]
fn every_fault_is_reported() {
    let message = build(Target::Sm80, |b, _| {
        b.named_barrier(100);
        b.smem_tile(12, 64, Swizzle::B128, 1);
        let some = per_lane(b);
        b.if_(some, |b| {
            assert_eq!(some.scope(), Scope::Lane);
            b.sync_warp();
        });
    })
    .unwrap_err();
    assert_eq!(message.lines().count(), 4, "{message}");
}
