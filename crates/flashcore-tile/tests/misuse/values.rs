//! Registers: wrong widths, values less uniform than claimed, values nobody wrote.

use flashcore_ptx::{ident::Ident, target::Target};
use flashcore_tile::{Acc, Builder, Cmp, Cta, F32, Half, U32, U64, Warp, Warpgroup};

use crate::{HOPPER, check};

#[test]
fn a_uniform_variable_takes_no_value_of_a_lane() {
    check(|b| {
        let count = b.var::<U32>(0);
        let thread = b.thread();
        b.set(count, thread); //~ a grid-uniform variable is set to a lane-uniform value
    });
}

#[test]
fn a_uniform_variable_is_not_set_by_some_lanes() {
    check(|b| {
        let (count, thread) = (b.var::<U32>(0), b.thread());
        let first = b.test(Cmp::Eq, thread, 0);
        b.if_(first, |b| {
            b.set(count, 1); //~ in lane-uniform control flow
        });
    });
}

#[test]
fn nor_under_a_predicate() {
    check(|b| {
        let (count, thread) = (b.var::<U32>(0), b.thread());
        let first = b.test(Cmp::Eq, thread, 0);
        b.predicated(first, |b| {
            b.add_to(count, 1); //~ a grid-uniform variable is set
        });
    });
}

#[test]
fn arithmetic_in_place_is_held_to_the_same() {
    check(|b| {
        let sum = b.var::<F32>(0.0);
        let thread = b.thread();
        let mine = b.to_f32(thread);
        b.mul_into(sum, mine, 2.0); //~ a grid-uniform variable is set to a lane-uniform value
    });
}

#[test]
fn selection_in_place_too() {
    check(|b| {
        let (sum, thread) = (b.var::<F32>(0.0), b.thread());
        let first = b.test(Cmp::Eq, thread, 0);
        b.select_into(sum, first, 1.0, 0.0); //~ a grid-uniform variable is set to a lane-uniform value
    });
}

#[test]
fn a_warp_does_not_agree_on_its_lanes() {
    check(|b| {
        let lane = b.lane();
        let first = b.test(Cmp::Eq, lane, 0);
        b.uniform::<Warp>(first); //~ a warp-uniform condition is needed, but this one is only lane-uniform
    });
}

#[test]
fn a_warpgroup_does_not_agree_on_its_warps() {
    check(|b| {
        let warp = b.warp();
        let first = b.test(Cmp::Eq, warp, 0);
        b.uniform::<Warpgroup>(first); //~ a warpgroup-uniform condition is needed, but this one is only warp-uniform
    });
}

#[test]
fn a_cta_does_not_agree_on_a_vote_of_one_warp() {
    check(|b| {
        let lane = b.lane();
        let first = b.test(Cmp::Eq, lane, 0);
        let any = b.any(first);
        b.uniform::<Cta>(any.pred()); //~ a CTA-uniform condition is needed
    });
}

#[test]
fn what_is_found_in_divergent_code_is_not_uniform() {
    check(|b| {
        let (cta, lane) = (b.cta(), b.lane());
        let first = b.test(Cmp::Eq, lane, 0);
        b.if_(first, |b| {
            let zero = b.test(Cmp::Eq, cta, 0);
            b.uniform::<Warp>(zero); //~ a warp-uniform condition is needed, but this one is only lane-uniform
        });
    });
}

#[test]
fn nothing_divides_by_zero() {
    check(|b| {
        let cta = b.cta();
        b.div(cta, 0); //~ division by the constant zero
    });
}

#[test]
fn nor_has_a_remainder() {
    check(|b| {
        let cta = b.cta();
        b.rem(cta, 0); //~ division by the constant zero
    });
}

#[test]
fn shuffles_move_32_bits() {
    check(|b| {
        let wide = b.var::<U64>(1);
        b.broadcast(wide, flashcore_tile::Scope::Warp); //~ shfl.sync
    });
}

#[test]
fn three_values_are_no_vector() {
    check(|b| {
        let at = b.var::<U64>(0);
        b.load_global::<F32, 3>(at); //~ ld.global
    });
}

#[test]
fn four_wide_values_are_too_many() {
    check(|b| {
        let at = b.var::<U64>(0);
        b.load_global::<U64, 4>(at); //~ 32 bytes
    });
}

#[test]
fn a_tile_is_written_before_it_is_read() {
    check(|b| {
        let acc = Acc::new(b, 16);
        b.exp2(acc.regs()[3]); //~ is read here before anything is written to it
    });
}

#[test]
fn a_value_of_one_branch_is_no_value_after_it() {
    check(|b| {
        let (cta, sum) = (b.cta(), Acc::new(b, 8));
        let first = b.test(Cmp::Eq, cta, 0);
        b.if_(first, |b| sum.fill(b, 1.0));
        b.pack(Half::F16, sum.regs()[0], 0.0); //~ is read here before anything is written to it
    });
}

#[test]
fn registers_of_another_kernel_are_unknown() {
    let mut other = Builder::new(Target::Sm90a, &Ident::new("other").unwrap(), 128, 1);
    let foreign = (0..9).map(|_| other.var::<F32>(1.0)).last().unwrap();
    HOPPER.check(|b| {
        b.add(foreign, 1.0); //~ undeclared register
    });
}
