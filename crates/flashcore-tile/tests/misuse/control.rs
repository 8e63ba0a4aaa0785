//! Instructions that threads execute together, where they may have parted; blocks that do not fit their surroundings.

use flashcore_ptx::layout::Swizzle;
use flashcore_tile::{
    Acc, Builder, Cmp, Half, Major, MatrixOperand, Pred, RegisterBudget, Roles, Scope, Start, Uniform, Warp,
    Warpgroup,
};

use crate::{AMPERE, Bench, HOPPER, check};

fn first_lane(b: &mut Builder) -> Pred {
    let lane = b.lane();
    b.test(Cmp::Eq, lane, 0)
}

fn first_warp(b: &mut Builder) -> Uniform<Warp> {
    let warp = b.warp();
    let first = b.test(Cmp::Eq, warp, 0);
    b.uniform(first)
}

fn first_group(b: &mut Builder) -> Uniform<Warpgroup> {
    let group = b.warpgroup();
    let first = b.test(Cmp::Eq, group, 0);
    b.uniform(first)
}

fn operands(b: &mut Builder) -> [MatrixOperand; 2] {
    let tile = b.smem_tile(Half::F16, [64, 64], Swizzle::B128, 2);
    [tile.operand(b, Major::K, 0), tile.operand(b, Major::K, tile.bytes())]
}

#[test]
fn a_barrier_of_the_cta_under_a_lane_condition() {
    check(|b| {
        let first = first_lane(b);
        b.if_(first, |b| {
            b.sync_cta(); //~ must be executed by a whole CTA, but control is only lane-uniform here
        });
    });
}

#[test]
fn a_barrier_of_the_cta_in_one_warpgroup() {
    Bench { threads: 256, ..HOPPER }.check(|b| {
        let first = first_group(b);
        b.if_uniform(first, |b| {
            b.sync_cta(); //~ must be executed by a whole CTA, but control is only warpgroup-uniform here
        });
    });
}

#[test]
fn a_named_barrier_under_a_lane_condition() {
    check(|b| {
        let (first, barrier) = (first_lane(b), b.named_barrier(64));
        b.if_(first, |b| {
            b.sync(barrier); //~ bar.sync must be executed by a whole warp
        });
    });
}

#[test]
fn a_named_barrier_under_a_predicate() {
    check(|b| {
        let (first, barrier) = (first_lane(b), b.named_barrier(64));
        b.predicated(first, |b| {
            b.arrive(barrier); //~ bar.arrive must be executed by a whole warp
        });
    });
}

#[test]
fn a_cluster_barrier_under_a_lane_condition() {
    check(|b| {
        let first = first_lane(b);
        b.if_(first, |b| {
            b.sync_cluster(); //~ barrier.cluster must be executed by a whole warp
        });
    });
}

#[test]
fn a_shuffle_after_lanes_have_parted() {
    AMPERE.check(|b| {
        let first = first_lane(b);
        let one = b.var(1.0);
        b.if_(first, |b| {
            b.shuffle_xor(one, 1); //~ shfl.sync over a full warp must be executed by a whole warp
        });
    });
}

#[test]
fn a_vote_in_a_loop_that_lanes_leave_one_by_one() {
    AMPERE.check(|b| {
        let lane = b.lane();
        let left = b.var_in(Scope::Lane, lane);
        b.while_(
            |b| b.test(Cmp::Gt, left, 0),
            |b| {
                let last = b.test(Cmp::Eq, left, 1);
                b.any(last); //~ vote.sync over a full warp must be executed by a whole warp
                let next = b.sub(left, 1);
                b.set(left, next);
            },
        );
    });
}

#[test]
fn a_matrix_product_under_a_lane_condition() {
    AMPERE.check(|b| {
        let (first, sum) = (first_lane(b), Acc::zero(b, 8));
        let [x, y] = [0, 1].map(|n| b.var(flashcore_tile::Packed(n)));
        b.if_(first, |b| {
            b.mma(Half::F16, &sum, 0, [x, y, x, y], [x, y]); //~ mma.sync must be executed by a whole warp
        });
    });
}

#[test]
fn a_warpgroup_product_in_one_warp() {
    check(|b| {
        let first = first_warp(b);
        let [x, y] = operands(b);
        b.if_uniform(first, |b| {
            let d = Acc::new(b, 64);
            let sum = b.wgmma_ss(d, Start::Zero, [&x, &y], 64); //~ wgmma must be executed by a whole warpgroup
            sum.wait(b);
        });
    });
}

/// The author claims that all warps hold one value; the text tells otherwise.
#[test]
fn a_claim_about_a_warpgroup_that_is_not_so() {
    check(|b| {
        let thread = b.thread();
        let warp = b.shr(thread, 5);
        let claimed = b.broadcast(warp, Scope::Warpgroup);
        let first = b.test(Cmp::Eq, claimed, 0);
        let first = b.uniform::<Warpgroup>(first);
        let [x, y] = operands(b);
        b.if_uniform(first, |b| {
            let d = Acc::new(b, 64);
            let sum = b.wgmma_ss(d, Start::Zero, [&x, &y], 64); //~ needs the whole warpgroup, but single warps may arrive here
            sum.wait(b);
        });
    });
}

#[test]
fn registers_are_given_away_by_whole_warpgroups() {
    let roles =
        Roles { consumers: 1, budget: Some(RegisterBudget { producer: 40, consumer: 256 }), mover: None };
    Bench { threads: 256, ..HOPPER }.check(|b| {
        let first = first_warp(b);
        b.if_uniform(first, |b| {
            b.specialise(roles, |_| (), |_, _| ()); //~ setmaxnreg must be executed by a whole warpgroup
        });
    });
}

#[test]
fn a_barrier_after_some_lanes_have_ended() {
    AMPERE.check(|b| {
        let first = first_lane(b);
        b.if_(first, |b| b.exit());
        b.sync_cta(); //~ needs the whole warp
    });
}

#[test]
fn nothing_runs_after_the_end() {
    check(|b| {
        b.exit();
        b.fence_async(); //~ this instruction is unreachable
    });
}

#[test]
fn a_warpgroup_that_is_not_whole() {
    Bench { threads: 192, ..HOPPER }.check(|b| {
        let [x, y] = operands(b);
        let d = Acc::new(b, 64);
        let sum = b.wgmma_ss(d, Start::Zero, [&x, &y], 64); //~ executed by whole warpgroups, but 192 threads come here
        sum.wait(b);
    });
}

#[test]
fn a_warp_that_is_not_whole() {
    Bench { threads: 48, ..AMPERE }.check(|b| {
        b.sync_warp(); //~ executed by whole warps, but 48 threads come here
    });
}

#[test]
fn a_product_in_flight_out_of_one_branch() {
    Bench { threads: 256, ..HOPPER }.check(|b| {
        let first = first_group(b);
        let [x, y] = operands(b);
        let mut sum = None;
        b.if_uniform(first, |b| {
            //~ 0 wgmma groups are in flight at the start of this block but 1 at its end
            let d = Acc::new(b, 64);
            sum = Some(b.wgmma_ss(d, Start::Zero, [&x, &y], 64));
        });
        sum.unwrap().wait(b);
    });
}

#[test]
fn a_product_in_flight_round_a_loop() {
    check(|b| {
        let [x, y] = operands(b);
        let turns = b.ctas();
        b.do_while(|b| {
            //~ 0 wgmma groups are in flight at the start of this block but 1 at its end
            let d = Acc::new(b, 64);
            let _ = b.wgmma_ss(d, Start::Zero, [&x, &y], 64);
            let again = b.test(Cmp::Gt, turns, 1);
            b.uniform::<Warpgroup>(again)
        });
    });
}

#[test]
fn a_carried_tile_comes_back_in_its_registers() {
    check(|b| {
        let start = Acc::zero(b, 8);
        let turns = b.ctas();
        b.do_while_carrying(start, |b, _| {
            //~ does not return in the registers it entered with
            let other = Acc::zero(b, 8);
            let again = b.test(Cmp::Gt, turns, 1);
            (b.uniform::<Warpgroup>(again), other)
        });
    });
}

#[test]
fn a_tile_leaves_a_branch_in_its_registers() {
    check(|b| {
        let (start, first) = (Acc::zero(b, 8), first_group(b));
        b.if_carrying(first, start, |b, _| Acc::zero(b, 8)); //~ does not return in the registers it entered with
    });
}
