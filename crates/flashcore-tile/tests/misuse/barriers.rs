//! Barriers with impossible counts, roles with impossible budgets.

use flashcore_tile::{RegisterBudget, Roles};

use crate::{AMPERE, Bench, HOPPER, check};

const ROLES: Bench = Bench { threads: 384, ..HOPPER };

fn roles(producer: u32, consumer: u32) -> Roles {
    Roles { consumers: 2, budget: Some(RegisterBudget { producer, consumer }), mover: None }
}

#[test]
fn barriers_run_out() {
    AMPERE.check(|b| {
        for _ in 0..16 {
            b.named_barrier(64); //~ a CTA has 16 named barriers and all are taken
        }
    });
}

#[test]
fn a_barrier_counts_whole_warps() {
    AMPERE.check(|b| {
        b.named_barrier(65); //~ a barrier for 65 threads: the count must be a multiple of 32, at most 128
    });
}

#[test]
fn a_barrier_for_nobody() {
    AMPERE.check(|b| {
        b.named_barrier(0); //~ a barrier for 0 threads
    });
}

#[test]
fn a_barrier_for_more_threads_than_there_are() {
    AMPERE.check(|b| {
        b.named_barrier(160); //~ a barrier for 160 threads: the count must be a multiple of 32, at most 128
    });
}

#[test]
fn an_mbarrier_for_nobody() {
    check(|b| {
        let at = b.mbarriers(1);
        b.mbarrier_at(at).init(b, 0); //~ arrivals, not 0
    });
}

#[test]
fn an_mbarrier_for_more_than_it_can_count() {
    check(|b| {
        let at = b.mbarriers(1);
        b.mbarrier_at(at).init(b, 1 << 20); //~ an mbarrier counts 1 to 1048575 arrivals, not 1048576
    });
}

#[test]
fn more_bytes_than_an_mbarrier_can_count() {
    check(|b| {
        let at = b.mbarriers(1);
        b.mbarrier_at(at).arrive_expecting(b, 1 << 20); //~ bytes, not 1048576
    });
}

#[test]
fn more_registers_than_there_are() {
    ROLES.check(|b| {
        b.specialise(roles(40, 240), |_| (), |_, _| ()); //~ ask for 66560, but 384 threads have 64512, 168 each
    });
}

/// What fits on an SM alone does not fit beside another CTA.
#[test]
fn more_registers_than_two_ctas_share() {
    Bench { ctas_per_sm: 2, ..ROLES }.check(|b| {
        b.specialise(roles(24, 240), |_| (), |_, _| ()); //~ 384 threads have 30720, 80 each
    });
}

#[test]
fn a_producer_takes_no_registers() {
    ROLES.check(|b| {
        b.specialise(roles(176, 160), |_| (), |_, _| ()); //~ a producer can give some away, consumers can take them
    });
}

#[test]
fn registers_come_in_eights() {
    ROLES.check(|b| {
        b.specialise(roles(25, 232), |_| (), |_, _| ()); //~ setmaxnreg
    });
}

#[test]
fn roles_are_all_threads() {
    check(|b| {
        b.specialise(roles(24, 240), |_| (), |_, _| ()); //~ the roles have 384 threads but the CTA has 128
    });
}
