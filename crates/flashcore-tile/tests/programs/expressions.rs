//! Operators: which instructions an expression becomes, and in which order.

use flashcore_ptx::{ident::Ident, launch::Slot, target::Target};
use flashcore_tile::{Builder, F32, Params, Program, Reg, U32, U64, Val};

use crate::body;

/// What a kernel has to compute with.
struct Inputs {
    x: Reg<U32>,
    y: Reg<U32>,
    start: Reg<U64>,
    f: Reg<F32>,
}

/// The instructions that `write` adds to a kernel with four parameters.
#[track_caller]
fn check(expected: &str, write: impl FnOnce(&mut Builder, Inputs)) {
    let name = Ident::new("fc_expressions").unwrap();
    let mut b = Builder::new(Target::Sm80, &name, 32, 1);
    let mut params = Params::default();
    let inputs = Inputs {
        x: params.u32(&mut b, "x", |&()| 1),
        y: params.u32(&mut b, "y", |&()| 2),
        start: params.buffer(&mut b, "start", Slot(0)),
        f: params.f32(&mut b, "f", |&()| 3.0),
    };
    write(&mut b, inputs);
    let program: Program<()> = b.finish(&name, params).unwrap();
    let text = body(&program);
    // The address of shared memory and the four parameters come first, `ret` last.
    let lines: Vec<_> = text.lines().skip(5).collect();
    let expected: Vec<_> = expected.trim().lines().map(str::trim).collect();
    assert_eq!(lines[..lines.len() - 1], expected);
}

#[test]
fn depth_first_from_left_to_right() {
    check(
        "
        shr.u32 %u3, %u1, 5;
        and.b32 %u4, %u3, 3;
        sub.u32 %u5, %u2, 1;
        xor.b32 %u6, %u4, %u5;
        ",
        |b, Inputs { x, y, .. }| {
            b.let_(((x >> 5) & 3) ^ (y - 1));
        },
    );
}

#[test]
fn a_product_that_is_added_to_is_one_instruction() {
    check(
        "
        mad.lo.u32 %u3, %u1, %u2, 7;
        sub.u32 %u4, %u2, 1;
        mad.lo.u32 %u5, %u1, 64, %u4;
        mul.wide.u32 %ud1, %u1, 1;
        mad.lo.u64 %ud2, %ud1, 16, %ud0;
        mul.f32 %f1, %f0, %f0;
        add.f32 %f2, %f1, 0f3F800000;
        ",
        |b, Inputs { x, y, start, f }| {
            b.let_(x * y + 7);
            b.let_((y - 1) + x * 64);
            b.let_(x.widen() * 16 + start);
            b.let_(f * f + 1.0);
        },
    );
}

#[test]
fn division_by_a_power_of_two_is_a_shift_or_a_mask() {
    check(
        "
        shr.u32 %u3, %u1, 3;
        and.b32 %u4, %u1, 7;
        div.u32 %u5, %u1, 6;
        rem.u32 %u6, %u1, %u2;
        add.u32 %u7, %u1, 63;
        shr.u32 %u8, %u7, 6;
        div.s32 %s0, %u1, 8;
        ",
        |b, Inputs { x, y, .. }| {
            b.let_(x / 8);
            b.let_(x % 8);
            b.let_(x / 6);
            b.let_(x % y);
            b.let_(x.div_ceil(64));
            b.let_(x.signed() / 8);
        },
    );
}

#[test]
fn conditions_join_and_select() {
    check(
        "
        setp.lt.u32 %p0, %u1, %u2;
        setp.eq.u32 %p1, %u1, 0;
        not.pred %p2, %p1;
        and.pred %p3, %p0, %p2;
        selp.u32 %u3, 0, %u1, %p3;
        setp.ge.f32 %p4, %f0, 0f3F800000;
        selp.u32 %u4, %u2, 4, %p4;
        ",
        |b, Inputs { x, y, f, .. }| {
            b.let_((x.lt(y) & !x.eq(0)).select(0, x));
            b.let_((!f.ge(1.0)).select::<U32>(4, y));
        },
    );
}

/// A register is itself; a constant, where a register is asked for, is moved into one.
#[test]
fn leaves_cost_nothing() {
    check("mov.u32 %u3, 5;", |b, Inputs { x, .. }| {
        assert_eq!(b.let_(x).id(), x.id());
        assert_eq!(b.let_(x.signed().unsigned()).id(), x.id());
        b.var(Val::<U32>::Const(5));
    });
}

/// What takes a value takes an expression.
#[test]
fn values_may_be_expressions() {
    check(
        "
        mov.u32 %u3, %u1;
        add.u32 %u4, %u3, 1;
        mov.u32 %u3, %u4;
        setp.ne.u32 %p0, %u3, %u2;
        @!%p0 bra.uni L1_end;
        min.u32 %u5, %u3, %u2;
        mov.u32 %u3, %u5;
        L1_end:
        ",
        |b, Inputs { x, y, .. }| {
            let count = b.var(x);
            b.set(count, count + 1);
            b.if_(count.ne(y), |b| b.set(count, count.min(y)));
        },
    );
}
