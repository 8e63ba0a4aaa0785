//! What a kernel shows to the outside: name, parameters, size, target.

use flashcore_ptx::{ident::Ident, layout::Swizzle, target::Target};
use flashcore_tile::{
    Acc, B32, Builder, F32, Half, Major, Packed, Params, RegisterBudget, Roles, Start, Val,
};

use crate::{AMPERE, Bench, HOPPER, expect};

fn kernel() -> (Ident, Builder) {
    let name = Ident::new("k").unwrap();
    let b = Builder::new(Target::Sm90a, &name, 128, 1);
    (name, b)
}

#[test]
fn a_parameter_name_that_ptx_cannot_carry() {
    expect(|| {
        let ((name, mut b), mut params) = (kernel(), Params::<u32>::default());
        params.u32(&mut b, "rows; trap", |&rows| rows); //~ `p_rows; trap` is not a PTX identifier
        b.finish(&name, params)
    });
}

#[test]
fn two_parameters_of_one_name() {
    expect(|| {
        let ((name, mut b), mut params) = (kernel(), Params::<u32>::default());
        params.u32(&mut b, "rows", |&rows| rows);
        params.f32(&mut b, "rows", |&rows| rows as f32); //~ parameter `rows` is already declared
        b.finish(&name, params)
    });
}

#[test]
fn a_kernel_under_another_name() {
    expect(|| {
        let (_, b) = kernel();
        b.finish::<()>(&Ident::new("other").unwrap(), Params::default()) //~ the kernel `k` with 0 parameters is finished as `other`
    });
}

#[test]
fn arguments_of_another_kernel() {
    expect(|| {
        let ((name, mut b), mut params) = (kernel(), Params::<u32>::default());
        params.u32(&mut b, "rows", |&rows| rows);
        b.finish::<u32>(&name, Params::default()) //~ with 1 parameters is finished as `k` with 0 arguments
    });
}

#[test]
fn no_threads() {
    expect(|| {
        let name = Ident::new("k").unwrap();
        let b = Builder::new(Target::Sm80, &name, 0, 1); //~ a CTA has from 1 to 1024 threads, not 0
        b.finish::<()>(&name, Params::default())
    });
}

#[test]
fn too_many_threads() {
    expect(|| {
        let name = Ident::new("k").unwrap();
        let b = Builder::new(Target::Sm80, &name, 1056, 1); //~ a CTA has from 1 to 1024 threads, not 1056
        b.finish::<()>(&name, Params::default())
    });
}

#[test]
fn a_cluster_on_an_old_gpu() {
    AMPERE.check(|b| {
        b.cluster(2); //~ a cluster of 2 CTAs for sm_80
    });
}

#[test]
fn a_cluster_that_is_too_large() {
    HOPPER.check(|b| {
        b.cluster(32); //~ sm_90 and later have clusters of 1 to 16
    });
}

#[test]
fn wgmma_on_ampere() {
    AMPERE.check(|b| {
        let (x, d) =
            (b.smem_tile(Half::F16, [64, 64], Swizzle::B128, 1).operand(b, Major::K, 0), Acc::new(b, 64));
        let sum = b.wgmma_ss(d, Start::Zero, [&x, &x], 64); //~ needs target sm_90a, not sm_80
        sum.wait(b);
    });
}

/// wgmma belongs to one architecture: later ones do not have it.
#[test]
fn wgmma_on_blackwell() {
    Bench { target: Target::Sm100, ..HOPPER }.check(|b| {
        let (x, d) =
            (b.smem_tile(Half::F16, [64, 64], Swizzle::B128, 1).operand(b, Major::K, 0), Acc::new(b, 64));
        let sum = b.wgmma_ss(d, Start::Zero, [&x, &x], 64); //~ needs target sm_90a, not sm_100
        sum.wait(b);
    });
}

#[test]
fn register_budgets_without_the_architecture() {
    let roles =
        Roles { consumers: 2, budget: Some(RegisterBudget { producer: 24, consumer: 240 }), mover: None };
    Bench { target: Target::Sm90, threads: 384, ..HOPPER }.check(|b| {
        b.specialise(roles, |_| (), |_, _| ()); //~ needs target sm_90a, not sm_90
    });
}

#[test]
fn tensor_copies_on_ampere() {
    AMPERE.check(|b| {
        b.tma_commit(); //~ needs target sm_90, not sm_80
    });
}

#[test]
fn matrix_stores_on_ampere() {
    AMPERE.check(|b| {
        b.shared(1024, 1024);
        let (at, x) = (b.shared_at(0), b.var::<B32>(Packed(0)));
        b.stmatrix(at, [x; 4]); //~ needs target sm_90, not sm_80
    });
}

#[test]
fn dependent_launches_on_ampere() {
    AMPERE.check(|b| {
        b.wait_for_predecessor(); //~ needs target sm_90, not sm_80
    });
}

/// A store of nothing is no store.
#[test]
fn a_store_of_nothing() {
    AMPERE.check(|b| {
        b.shared(64, 16);
        let at = b.shared_at(0);
        b.store_shared::<F32>(at, &[] as &[Val<F32>]); //~ st.shared
    });
}
