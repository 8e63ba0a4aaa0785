//! Matrix products: operands that do not fit, registers in flight, missing fences.

use flashcore_ptx::{
    ident::Ident,
    layout::Swizzle,
    module::{Module, Statement},
    op::Op,
    provenance::Provenance,
    target::Target,
    verify::{grouped, verify},
};
use flashcore_tile::{
    Acc, BuildError, Builder, Fragment, Half, Major, MatrixOperand, Packed, Params, Program, Start,
};

use crate::{AMPERE, check, expect, names};

const HALF: Half = Half::Bf16;

fn operand(b: &mut Builder, rows: u32, cols: u32, swizzle: Swizzle, major: Major) -> MatrixOperand {
    b.smem_tile(Half::F16, [rows, cols], swizzle, 1).operand(b, major, 0)
}

fn square(b: &mut Builder) -> MatrixOperand {
    operand(b, 64, 64, Swizzle::B128, Major::K)
}

#[test]
fn columns_come_in_eights() {
    check(|b| {
        let (x, d) = (square(b), Acc::new(b, 12));
        let sum = b.wgmma_ss(d, Start::Zero, [&x, &x], 64); //~ into 12 columns
        sum.wait(b);
    });
}

#[test]
fn depth_comes_in_sixteens() {
    check(|b| {
        let (x, d) = (square(b), Acc::new(b, 64));
        let sum = b.wgmma_ss(d, Start::Zero, [&x, &x], 24); //~ a product of depth 24
        sum.wait(b);
    });
}

#[test]
fn depth_ends_with_the_tile() {
    check(|b| {
        let (x, d) = (square(b), Acc::new(b, 64));
        let sum = b.wgmma_ss(d, Start::Zero, [&x, &x], 80); //~ no K-major operand of depth 80 and extent 64
        sum.wait(b);
    });
}

#[test]
fn columns_end_with_the_tile() {
    check(|b| {
        let (x, d) = (square(b), Acc::new(b, 128));
        let sum = b.wgmma_ss(d, Start::Zero, [&x, &x], 64); //~ no K-major operand of depth 64 and extent 128
        sum.wait(b);
    });
}

#[test]
fn a_left_operand_has_64_rows() {
    check(|b| {
        let (short, x) = (operand(b, 32, 64, Swizzle::B128, Major::K), square(b));
        let d = Acc::new(b, 64);
        let sum = b.wgmma_ss(d, Start::Zero, [&short, &x], 64); //~ a 32x64 tile with B128 swizzle is no K-major operand
        sum.wait(b);
    });
}

#[test]
fn tiles_for_wgmma_are_swizzled() {
    check(|b| {
        let (plain, x) = (operand(b, 64, 64, Swizzle::None, Major::K), square(b));
        let d = Acc::new(b, 64);
        let sum = b.wgmma_ss(d, Start::Zero, [&x, &plain], 64); //~ a 64x64 tile with None swizzle is no K-major operand
        sum.wait(b);
    });
}

#[test]
fn probabilities_are_as_many_as_values() {
    check(|b| {
        let v = operand(b, 64, 64, Swizzle::B128, Major::Mn);
        let (d, p, scores) = (Acc::zero(b, 64), Fragment::new(b, 128), Acc::zero(b, 128));
        scores.pack_into(b, HALF, &p);
        let sum = b.wgmma_rs(d, Start::Accumulate, p, &v); //~ no Mn-major operand of depth 128 and extent 64
        sum.wait(b);
    });
}

#[test]
fn a_fragment_holds_what_is_rounded_into_it() {
    check(|b| {
        let (p, scores) = (Fragment::new(b, 64), Acc::zero(b, 128));
        scores.pack_into(b, HALF, &p); //~ 128 columns are packed into a fragment with room for 64
    });
}

#[test]
fn a_fragment_is_written_before_it_is_multiplied() {
    check(|b| {
        let v = operand(b, 64, 64, Swizzle::B128, Major::Mn);
        let (d, p) = (Acc::zero(b, 64), Fragment::new(b, 64));
        let sum = b.wgmma_rs(d, Start::Accumulate, p, &v); //~ is read here before anything is written to it
        sum.wait(b);
    });
}

#[test]
fn nothing_is_added_to_an_unwritten_tile() {
    check(|b| {
        let (x, d) = (square(b), Acc::new(b, 64));
        let sum = b.wgmma_ss(d, Start::Accumulate, [&x, &x], 64); //~ is read here before anything is written to it
        sum.wait(b);
    });
}

#[test]
fn a_product_of_columns_that_are_not_there() {
    AMPERE.check(|b| {
        let (sum, x) = (Acc::zero(b, 16), b.var(Packed(0)));
        b.mma(HALF, &sum, 2, [x; 4], [x; 2]); //~ column 16 is beyond an accumulator of 16 columns
    });
}

#[test]
fn an_accumulator_is_read_after_the_wait() {
    check(|b| {
        let (x, d) = (square(b), Acc::zero(b, 64));
        let kept = d.regs()[0];
        let sum = b.wgmma_ss(d, Start::Zero, [&x, &x], 64);
        b.exp2(kept); //~ is in flight as accumulator of a wgmma
        sum.wait(b);
    });
}

#[test]
fn a_fragment_is_written_after_the_wait() {
    check(|b| {
        let v = operand(b, 64, 64, Swizzle::B128, Major::Mn);
        let (d, p, scores) = (Acc::zero(b, 64), Fragment::new(b, 64), Acc::zero(b, 64));
        scores.pack_into(b, HALF, &p);
        let kept = p.regs()[0];
        let sum = b.wgmma_rs(d, Start::Accumulate, p, &v);
        b.set(kept, Packed(0)); //~ is in flight as A fragment of a wgmma
        sum.wait(b);
    });
}

#[test]
fn a_younger_product_is_not_waited_for_with_an_older_one() {
    check(|b| {
        let (x, [d, e]) = (square(b), [Acc::new(b, 64), Acc::new(b, 64)]);
        let kept = e.regs()[0];
        let older = b.wgmma_ss(d, Start::Zero, [&x, &x], 64);
        let younger = b.wgmma_ss(e, Start::Zero, [&x, &x], 64);
        older.wait(b);
        b.exp2(kept); //~ `wgmma.wait_group 0` or less must come first
        younger.wait(b);
    });
}

#[test]
fn a_product_nobody_waits_for() {
    expect(|| {
        let name = Ident::new("k").unwrap();
        let mut b = Builder::new(Target::Sm90a, &name, 128, 1);
        let (x, d) = (square(&mut b), Acc::new(&mut b, 64));
        let _ = b.wgmma_ss(d, Start::Zero, [&x, &x], 64);
        b.finish::<()>(&name, Params::default()) //~ the kernel ends while the wgmma on
    });
}

/// Two products of one accumulator, with the line of the second.
fn two_products() -> (Program<()>, u32) {
    let name = Ident::new("k").unwrap();
    let mut b = Builder::new(Target::Sm90a, &name, 128, 1);
    let (x, d) = (square(&mut b), Acc::zero(&mut b, 64));
    let d = b.wgmma_ss(d, Start::Zero, [&x, &x], 64).wait(&mut b);
    d.scale_rows(&mut b, [d.regs()[0], d.regs()[2]]);
    let (d, line) = (b.wgmma_ss(d, Start::Accumulate, [&x, &x], 64), line!());
    d.wait(&mut b);
    (b.finish(&name, Params::default()).unwrap(), line)
}

/// What the verifier says once the last instruction of a kind is gone: the builder itself never leaves it out.
fn without_last(op: Op) -> (BuildError, u32) {
    let (program, line) = two_products();
    let mut module: Module = program.module().clone();
    let body = &mut module.kernels[0].body;
    let gone = body.iter().rposition(|s| matches!(s, Statement::Inst(inst) if inst.op == op)).unwrap();
    body.remove(gone);
    let mut lines = Provenance::default();
    for at in 0..body.len() {
        let old = program.provenance().location(0, at + usize::from(at >= gone)).unwrap();
        lines.record(0, at, old.file, old.line);
    }
    let found = verify(&module, &lines);
    let error = BuildError { kernel: "k".into(), faults: grouped(&found) };
    assert!(error.faults.len() <= 2, "{} findings of one cause: {error}", found.len());
    (error, line)
}

#[test]
fn the_text_is_checked_for_what_the_builder_promises() {
    let cases = [
        (Op::WgmmaFence, "may have been touched since the last wgmma.fence", 0),
        (Op::WgmmaCommitGroup, "is not committed", 1),
        (Op::WgmmaWaitGroup, "the kernel ends while the wgmma on", 2),
    ];
    for (op, words, below) in cases {
        let (error, line) = without_last(op);
        let place = format!("{}:{}: ", file!(), line + below);
        assert!(names(&error, &place, words), "expected {place}{words}, but {error}");
    }
}
