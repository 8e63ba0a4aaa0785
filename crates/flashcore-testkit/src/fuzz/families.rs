//! The instruction families of random programs, as forms that [`super::Program`] fills with registers.
//!
//! Left out are documented approximations, and what depends on an order that nobody promises. Operands of tensor cores
//! are cut to few bits, so that sums are exact in any order.

/// A family.
#[derive(Clone, Copy, Debug)]
pub struct Family {
    /// Its name.
    pub name: &'static str,
    /// Its forms; letters as [`super::Program`] says.
    pub forms: fn() -> Vec<String>,
}

/// Every family.
pub const FAMILIES: &[Family] = &[
    Family { name: "integer", forms: || lines(INTEGER) },
    Family { name: "bits", forms: || lines(BITS) },
    Family { name: "wide", forms: || wide(WIDE) },
    Family { name: "float", forms: || lines(FLOAT) },
    Family { name: "double", forms: || double(DOUBLE) },
    Family { name: "half", forms: || lines(HALF) },
    Family { name: "convert", forms: || lines(CONVERT) },
    Family { name: "warp", forms: || lines(WARP) },
    Family { name: "memory", forms: || lines(MEMORY) },
    Family { name: "matrix", forms: matrix },
    Family { name: "control", forms: || lines(CONTROL) },
];

/// The forms of a text: a line each, or one for each of the words in `<a/b/c>`.
fn lines(text: &str) -> Vec<String> {
    text.lines().map(str::trim).filter(|line| !line.is_empty()).flat_map(expanded).collect()
}

fn expanded(line: &str) -> Vec<String> {
    let parts = line.split_once('<').and_then(|(head, rest)| Some((head, rest.split_once('>')?)));
    let Some((head, (words, tail))) = parts else { return vec![line.to_owned()] };
    words.split('/').map(|word| format!("{head}{word}{tail}")).collect()
}

const INTEGER: &str = "
    <add.u32/add.sat.s32/sub.s32/sub.sat.s32/mul.lo.u32/mul.hi.u32/mul.hi.s32> D, A, B;
    mul.wide.<u32/s32> %w0, A, B; mov.b64 {D, E}, %w0;
    mad.<lo.s32/hi.u32/hi.s32> D, A, B, C;
    mov.b64 %w1, {B, C}; mad.wide.u32 %w0, A, B, %w1; mov.b64 {D, E}, %w0;
    mov.b64 %w1, {B, C}; mad.wide.s32 %w0, A, C, %w1; mov.b64 {D, E}, %w0;
    or.b32 %x0, B, 1; <div/rem>.u32 D, A, %x0;
    and.b32 %x0, B, 0xffff; or.b32 %x0, %x0, 1; <div/rem>.s32 D, A, %x0;
    sad.<u32/s32> D, A, B, C;
    <min.s32/max.s32/min.u32/max.u32> D, A, B;
    <abs/neg>.s32 D, A;
    dp4a.<u32.u32/s32.s32/s32.u32> D, A, B, C;
    cvt.u16.u32 %h0, A; cvt.u16.u32 %h1, B; mul.lo.s16 %h2, %h0, %h1; cvt.s32.s16 D, %h2;
    cvt.u16.u32 %h0, A; cvt.u16.u32 %h1, B; mul.hi.u16 %h2, %h0, %h1; cvt.u32.u16 D, %h2;
    cvt.u16.u32 %h0, A; cvt.u16.u32 %h1, B; mul.wide.s16 D, %h0, %h1;
    cvt.u16.u32 %h0, A; cvt.u16.u32 %h1, B; min.s16 %h2, %h0, %h1; cvt.s32.s16 D, %h2;
    setp.ge.s32 %p, A, B; selp.b32 D, B, C, %p;
    setp.hi.u32 %p, A, B; @%p xor.b32 D, A, C;
    setp.lt.s32 %p|%q, A, B; selp.b32 D, A, B, %q;
    setp.lo.u32 %p, A, B; setp.ge.and.s32 %q, B, C, %p; selp.u32 D, A, C, %q;
    set.<le.u32.s32/gt.s32.u32> D, A, B;
    slct.s32.s32 D, A, B, C;
";

const BITS: &str = "
    <and/or/xor>.b32 D, A, B;
    <not/cnot>.b32 D, A;
    shl.b32 D, A, <N/B>;
    shr.u32 D, A, B;
    shr.s32 D, A, <N/B>;
    shf.<l.wrap/r.wrap/l.clamp>.b32 D, A, B, C;
    shf.r.clamp.b32 D, A, B, N;
    bfe.u32 D, A, N, 9;
    bfe.s32 D, A, N, 5;
    and.b32 %x0, B, 31; and.b32 %x1, C, 31; bfe.<u32/s32> D, A, %x0, %x1;
    bfi.b32 D, A, B, N, 7;
    and.b32 %x0, C, 31; bfi.b32 D, A, B, %x0, N;
    <brev.b32/popc.b32/clz.b32/bfind.u32/bfind.s32/bfind.shiftamt.u32> D, A;
    prmt.b32 D, A, B, <C/0x5410/0xf8d2>;
    prmt.b32.<f4e/b4e/rc8/ecl/ecr/rc16> D, A, B, C;
    lop3.b32 D, A, B, C, <0x96/0xca/0x1e/0xe8>;
    mov.b32 {%h0, %h1}, A; mov.b32 D, {%h1, %h0};
    mov.b32 {%h0, %h1}, A; shl.b16 %h2, %h0, N; mov.b32 D, {%h2, %h1};
";

/// What is done to `%w0` and `%w1`; the result is in `%w2`.
const WIDE: &str = "
    <add.u64/sub.s64/mul.lo.u64/mul.hi.u64/mul.hi.s64> %w2, %w0, %w1;
    mad.lo.s64 %w2, %w0, %w1, %w0;
    <min.s64/max.u64> %w2, %w0, %w1;
    or.b64 %w1, %w1, 1; <div/rem>.u64 %w2, %w0, %w1;
    shr.u64 %w1, %w1, 20; or.b64 %w1, %w1, 1; <div/rem>.s64 %w2, %w0, %w1;
    <abs/neg>.s64 %w2, %w0;
    <and/xor>.b64 %w2, %w0, %w1;
    <not/brev>.b64 %w2, %w0;
    <shl.b64/shr.u64> %w2, %w0, N;
    shr.s64 %w2, %w0, B;
    shl.b64 %w2, %w0, C;
    bfe.u64 %w2, %w0, N, 40;
    bfe.s64 %w2, %w0, N, 33;
    bfi.b64 %w2, %w0, %w1, N, 19;
    popc.b64 %x0, %w0; clz.b64 %x1, %w1; mov.b64 %w2, {%x0, %x1};
    bfind.u64 %x0, %w0; bfind.s64 %x1, %w1; mov.b64 %w2, {%x0, %x1};
    setp.<lt.s64/hs.u64> %p, %w0, %w1; selp.b64 %w2, %w0, %w1, %p;
    cvt.rn.f32.u64 %x0, %w0; cvt.rz.f32.s64 %x1, %w1; mov.b64 %w2, {%x0, %x1};
    cvt.rm.f32.s64 %x0, %w0; cvt.rp.f32.u64 %x1, %w1; mov.b64 %w2, {%x0, %x1};
    cvt.sat.s32.s64 %x0, %w0; cvt.sat.u32.s64 %x1, %w1; mov.b64 %w2, {%x0, %x1};
    cvt.s64.s32 %w0, A; cvt.u64.u32 %w1, B; sub.u64 %w2, %w0, %w1;
";

fn wide(forms: &str) -> Vec<String> {
    let around =
        |form: String| format!("mov.b64 %w0, {{A, B}}; mov.b64 %w1, {{C, A}}; {form} mov.b64 {{D, E}}, %w2;");
    lines(forms).into_iter().map(around).collect()
}

const FLOAT: &str = "
    <add.rn/add.rz/add.rm/add.rp/add.rn.ftz/add.rn.sat/sub.rn/sub.rz.ftz/mul.rn/mul.rp/mul.rn.ftz>.f32 D, A, B;
    mul.rn.ftz.sat.f32 D, A, B;
    fma.<rn/rz/rm/rp/rn.ftz/rn.sat>.f32 D, A, B, C;
    div.rn.f32 D, A, B;
    <rcp.rn/rcp.rz/sqrt.rn/sqrt.rp>.f32 D, A;
    <min/max/min.ftz/min.NaN/max.NaN/max.ftz.NaN/copysign>.f32 D, A, B;
    testp.finite.f32 %p, A; selp.b32 D, A, B, %p;
    testp.<subnormal/notanumber>.f32 %p, A; selp.b32 D, B, C, %p;
    setp.<lt/geu/eq.ftz/nan>.f32 %p, A, B; selp.b32 D, A, C, %p;
    setp.lt.f32 %q, B, C; setp.neu.or.f32 %p, A, B, %q; selp.b32 D, A, C, %p;
    set.<gt.f32/ltu.u32>.f32 D, A, B;
    slct.b32.f32 D, A, B, C;
";

/// What is done to `%w0` and `%w1`; the result is in `%w2`, and nothing is compared of a NaN but that it is one.
const DOUBLE: &str = "
    <add.rn/add.rm/sub.rz/mul.rn/mul.rp>.f64 %w2, %w0, %w1;
    fma.rn.f64 %w2, %w0, %w1, %w0;
    fma.rz.f64 %w2, %w0, %w1, %w1;
    div.rn.f64 %w2, %w0, %w1;
    rcp.rn.f64 %w2, %w0;
    abs.f64 %w3, %w0; sqrt.rn.f64 %w2, %w3;
    <min/max>.f64 %w2, %w0, %w1;
    neg.f64 %w2, %w0;
    copysign.f64 %w2, %w0, %w1;
    setp.ltu.f64 %p, %w0, %w1; selp.b64 %w2, %w0, %w1, %p;
    cvt.rni.f64.f64 %w2, %w0;
    cvt.f64.f32 %w2, A;
    cvt.<rn.f64.s64/rz.f64.u64> %w2, %w0;
    cvt.rn.f64.s32 %w2, A;
    cvt.<rn/rz>.f32.f64 %x0, %w0; cvt.f64.f32 %w2, %x0;
";

fn double(forms: &str) -> Vec<String> {
    let plain = "testp.notanumber.f64 %p, %w2; @%p mov.b64 %w2, 0;";
    let around = |form: String| {
        format!("mov.b64 %w0, {{A, B}}; mov.b64 %w1, {{C, A}}; {form} {plain} mov.b64 {{D, E}}, %w2;")
    };
    lines(forms).into_iter().map(around).collect()
}

const HALF: &str = "
    <add.rn/add.rn.ftz/add.rn.sat/sub.rn/mul.rn/mul.rn.ftz.sat>.f16x2 D, A, B;
    fma.rn.f16x2 D, A, B, C;
    fma.rn.<ftz/sat/relu>.f16x2 D, A, B, C;
    <min.f16x2/max.f16x2/min.NaN.f16x2/max.ftz.f16x2/add.rn.bf16x2/sub.rn.bf16x2/mul.rn.bf16x2> D, A, B;
    fma.rn.bf16x2 D, A, B, C;
    fma.rn.relu.bf16x2 D, A, B, C;
    <min/max/max.NaN>.bf16x2 D, A, B;
    setp.<lt.f16x2/geu.f16x2/gt.bf16x2> %p|%q, A, B; selp.b32 D, A, C, %p; selp.b32 E, B, C, %q;
    mov.b32 {%h0, %h1}, A; mov.b32 {%h2, %h3}, B; add.rn.f16 %h0, %h1, %h2; mov.b32 D, {%h0, %h3};
    mov.b32 {%h0, %h1}, A; mov.b32 {%h2, %h3}, B; fma.rn.<f16/bf16> %h0, %h1, %h2, %h3; mov.b32 D, {%h0, %h1};
    mov.b32 {%h0, %h1}, A; setp.le.f16 %p, %h0, %h1; selp.b32 D, B, C, %p;
";

const CONVERT: &str = "
    cvt.<rni.s32/rzi.u32/rmi.s32/rpi.ftz.s32/rni.f32/rmi.ftz.f32/sat.f32>.f32 D, A;
    cvt.<rn.f32.s32/rz.f32.u32/rp.f32.s32> D, A;
    cvt.<rn.f16x2/rz.f16x2/rn.relu.f16x2/rn.bf16x2/rz.bf16x2/rn.relu.bf16x2>.f32 D, A, B;
    cvt.rn.f16.f32 %h0, A; cvt.rp.f16.f32 %h1, B; mov.b32 D, {%h0, %h1};
    cvt.rm.f16.f32 %h0, A; cvt.rn.sat.f16.f32 %h1, B; mov.b32 D, {%h0, %h1};
    cvt.rn.bf16.f32 %h0, A; cvt.rz.relu.bf16.f32 %h1, B; mov.b32 D, {%h0, %h1};
    mov.b32 {%h0, %h1}, A; cvt.f32.f16 D, %h0; cvt.sat.f32.f16 E, %h1;
    mov.b32 {%h0, %h1}, A; cvt.f32.bf16 D, %h0; cvt.ftz.f32.f16 E, %h1;
    mov.b32 {%h0, %h1}, A; cvt.rzi.s32.f16 D, %h0; cvt.rni.u32.f16 E, %h1;
    cvt.rn.f16.s32 %h0, A; cvt.rz.f16.u32 %h1, B; mov.b32 D, {%h0, %h1};
    cvt.<rna/rn/rz.relu>.tf32.f32 D, A;
    cvt.rn.satfinite.e4m3x2.f32 %h0, A, B; cvt.rn.satfinite.e5m2x2.f32 %h1, A, C; mov.b32 D, {%h0, %h1};
    cvt.rn.satfinite.relu.e4m3x2.f32 %h0, A, B; cvt.rn.satfinite.relu.e5m2x2.f32 %h1, B, C; mov.b32 D, {%h0, %h1};
    cvt.rn.satfinite.e4m3x2.f16x2 %h0, A; cvt.rn.satfinite.e5m2x2.f16x2 %h1, B; mov.b32 D, {%h0, %h1};
    mov.b32 {%h0, %h1}, A; cvt.rn.f16x2.e4m3x2 D, %h0; cvt.rn.f16x2.e5m2x2 E, %h1;
    mov.b32 {%h0, %h1}, A; cvt.rn.relu.f16x2.e4m3x2 D, %h0; cvt.rn.relu.f16x2.e5m2x2 E, %h1;
    cvt.sat.<u8/s8>.s32 D, A;
    cvt.sat.s16.u32 %h0, A; cvt.sat.u16.s32 %h1, B; mov.b32 D, {%h0, %h1};
    cvt.<s32.s8/u32.u8/s32.s16> D, A;
";

const WARP: &str = "
    shfl.sync.bfly.b32 D, A, N, 0x1f, 0xffffffff;
    shfl.sync.up.b32 D, A, N, 0x0, 0xffffffff;
    shfl.sync.down.b32 D, A, N, 0x1f, 0xffffffff;
    shfl.sync.idx.b32 D, A, B, 0x1f, 0xffffffff;
    shfl.sync.bfly.b32 D, A, 3, 0x1c03, 0xffffffff;
    shfl.sync.down.b32 D|%p, A, N, 0x180f, 0xffffffff; selp.b32 E, B, C, %p;
    shfl.sync.up.b32 D|%p, A, N, 0x1800, 0xffffffff; selp.b32 E, B, C, %p;
    shfl.sync.idx.b32 D|%p, A, B, 0x1807, 0xffffffff; selp.b32 E, B, C, %p;
    redux.sync.<add.u32/add.s32/min.s32/max.u32/and.b32/or.b32/xor.b32> D, A, 0xffffffff;
    setp.ne.u32 %p, A, B; vote.sync.ballot.b32 D, %p, 0xffffffff;
    setp.lt.s32 %p, A, B; vote.sync.all.pred %q, %p, 0xffffffff; selp.b32 D, A, C, %q;
    setp.lt.s32 %p, A, B; vote.sync.any.pred %q, !%p, 0xffffffff; selp.b32 D, A, C, %q;
    setp.lt.s32 %p, A, B; vote.sync.uni.pred %q, %p, 0xffffffff; selp.b32 D, A, C, %q;
    and.b32 %x0, A, 3; match.any.sync.b32 D, %x0, 0xffffffff;
    and.b32 %x0, A, 1; match.all.sync.b32 D|%p, %x0, 0xffffffff; selp.b32 E, B, C, %p;
    setp.lt.u32 %p, %t, 16; selp.b32 %x0, 0xffff, 0xffff0000, %p; redux.sync.add.u32 D, A, %x0;
    setp.lt.u32 %p, %t, 16; selp.b32 %x0, 0xffff, 0xffff0000, %p; shfl.sync.bfly.b32 D, A, 5, 0x1f, %x0;
";

/// Lanes write their own 16 bytes and read any; a barrier before writing keeps readers of the form before apart.
const MEMORY: &str = "
    bar.warp.sync -1; st.shared.b32 [%s], A; bar.warp.sync -1; xor.b32 %x0, %t, N; mad.lo.u32 %x0, %x0, 16, %b; ld.shared.b32 D, [%x0];
    bar.warp.sync -1; st.shared.v2.b32 [%s], {A, B}; bar.warp.sync -1; xor.b32 %x0, %t, N; mad.lo.u32 %x0, %x0, 16, %b; ld.shared.v2.b32 {D, E}, [%x0];
    bar.warp.sync -1; st.shared.v4.b32 [%s], {A, B, C, A}; bar.warp.sync -1; ld.shared.v4.b32 {%x0, %x1, %x2, %x3}, [%s]; xor.b32 D, %x0, %x2; add.u32 E, %x1, %x3;
    bar.warp.sync -1; st.shared.b32 [%s], A; bar.warp.sync -1; and.b32 %x0, B, 31; mad.lo.u32 %x0, %x0, 16, %b; ld.shared.u8 D, [%x0+3]; ld.shared.s8 E, [%x0+1];
    bar.warp.sync -1; st.shared.b32 [%s], A; bar.warp.sync -1; and.b32 %x0, B, 31; mad.lo.u32 %x0, %x0, 16, %b; ld.shared.u16 D, [%x0+2]; ld.shared.s16 E, [%x0];
    bar.warp.sync -1; st.shared.b32 [%s], A; st.shared.u8 [%s+1], B; st.shared.u16 [%s+2], C; ld.shared.b32 D, [%s];
    bar.warp.sync -1; st.shared.b64 [%s+8], %in; st.shared.v2.b32 [%s+8], {A, B}; ld.shared.b64 %w0, [%s+8]; mov.b64 {D, E}, %w0;
    bar.warp.sync -1; st.shared.b32 [%s], A; atom.shared.<add.u32/min.s32> D, [%s], B; ld.shared.b32 E, [%s];
    bar.warp.sync -1; st.shared.b32 [%s], A; atom.shared.<max/inc/dec>.u32 D, [%s], B; ld.shared.b32 E, [%s];
    bar.warp.sync -1; st.shared.b32 [%s], A; atom.shared.exch.b32 D, [%s], B; ld.shared.b32 E, [%s];
    bar.warp.sync -1; st.shared.b32 [%s], A; atom.shared.cas.b32 D, [%s], A, B; ld.shared.b32 E, [%s];
    bar.warp.sync -1; st.shared.b32 [%s], A; atom.shared.xor.b32 D, [%s], B; ld.shared.b32 E, [%s];
    bar.warp.sync -1; st.shared.v2.b32 [%s], {A, B}; mov.b64 %w1, {B, C}; atom.shared.add.u64 %w0, [%s], %w1; ld.shared.v2.b32 {D, E}, [%s];
    bar.warp.sync -1; st.shared.v2.b32 [%s], {A, B}; mov.b64 %w1, {B, C}; atom.shared.max.s64 %w0, [%s], %w1; ld.shared.v2.b32 {D, E}, [%s];
    bar.warp.sync -1; setp.eq.u32 %p, %t, 0; @%p st.shared.b32 [%b], 0; bar.warp.sync -1; red.shared.add.u32 [%b], A; bar.warp.sync -1; ld.shared.b32 D, [%b];
    bar.warp.sync -1; setp.eq.u32 %p, %t, 0; @%p st.shared.b32 [%b], 0; bar.warp.sync -1; red.shared.xor.b32 [%b], A; bar.warp.sync -1; ld.shared.b32 D, [%b];
";

const CONTROL: &str = "
    setp.lt.s32 %p, A, B; @%p bra L; add.u32 D, A, C; L:
    setp.gt.u32 %p, A, B; @%p bra L; xor.b32 D, A, C; bra M; L: sub.u32 D, B, C; M:
    setp.lt.s32 %p, A, B; @%p add.u32 D, A, C; @!%p xor.b32 D, A, C;
    and.b32 %x0, A, 7; mov.b32 %x1, B; L: mad.lo.u32 %x1, %x1, 5, %x0; sub.u32 %x0, %x0, 1; setp.ge.s32 %p, %x0, 0; @%p bra L; mov.b32 D, %x1;
    mov.u32 %x0, N; mov.b32 %x1, A; L: shf.l.wrap.b32 %x1, %x1, %x1, 3; add.u32 %x1, %x1, B; sub.u32 %x0, %x0, 8; setp.gt.s32 %p, %x0, 0; @%p bra L; mov.b32 D, %x1;
    and.b32 %x0, A, 3; mov.b32 %x1, C; L: setp.eq.u32 %p, %x0, 0; @%p bra M; xor.b32 %x1, %x1, B; shl.b32 %x1, %x1, 1; sub.u32 %x0, %x0, 1; bra L; M: mov.b32 D, %x1;
    setp.lt.s32 %p, A, B; @%p bra L; setp.lt.s32 %q, B, C; @%q bra L; not.b32 D, A; L:
    setp.lt.u32 %p, %t, N; @%p bra L; mov.b32 D, A; L: shfl.sync.bfly.b32 E, B, 1, 0x1f, 0xffffffff;
    setp.lt.s32 %p, A, B; @%p bra L; activemask.b32 %x0; and.b32 %x1, %x0, 0; or.b32 D, A, %x1; L: redux.sync.xor.b32 E, C, 0xffffffff;
    abs.s32 %x0, A; and.b32 %x0, %x0, 15; mov.u32 %x1, 0; L: add.u32 %x1, %x1, %x0; and.b32 %x2, %x1, 1; setp.eq.u32 %p, %x2, 0; @%p add.u32 %x1, %x1, C; add.u32 %x0, %x0, 3; setp.lt.u32 %q, %x0, 20; @%q bra L; mov.b32 D, %x1;
";

/// `mma.sync` of each shape and type, `ldmatrix` and `stmatrix`.
fn matrix() -> Vec<String> {
    let mut forms: Vec<String> = MMAS.iter().map(Mma::form).collect();
    forms.extend(lines(MATRIX));
    forms
}

/// One `mma.sync`: `keep` and `set` make operands of few bits.
struct Mma {
    shape: &'static str,
    types: &'static str,
    a: usize,
    b: usize,
    d: usize,
    keep: u32,
    set: u32,
    /// Makes the accumulator `%x7` from the bits of `C`.
    accumulator: &'static str,
}

const F32_SUM: &str = "and.b32 %x7, C, 0xff; cvt.rn.f32.u32 %x7, %x7;";
const S32_SUM: &str = "mov.b32 %x7, C;";
/// 2.0 to 3.75 in steps of 0.25, with either sign.
const F16: (u32, u32) = (0x8380_8380, 0x4000_4000);
const BF16: (u32, u32) = (0x8070_8070, 0x4000_4000);
const TF32: (u32, u32) = (0x8070_0000, 0x4000_0000);
/// 2 and 3, with either sign.
const E4M3: (u32, u32) = (0x8484_8484, 0x4040_4040);
const E5M2: (u32, u32) = (0x8282_8282, 0x4040_4040);
const ANY: (u32, u32) = (u32::MAX, 0);

const fn mma(
    shape: &'static str,
    types: &'static str,
    [d, a, b]: [usize; 3],
    (keep, set): (u32, u32),
    accumulator: &'static str,
) -> Mma {
    Mma { shape, types, a, b, d, keep, set, accumulator }
}

const MMAS: &[Mma] = &[
    mma("m16n8k16", "f32.f16.f16.f32", [4, 4, 2], F16, F32_SUM),
    mma("m16n8k16", "f32.bf16.bf16.f32", [4, 4, 2], BF16, F32_SUM),
    mma("m16n8k8", "f32.f16.f16.f32", [4, 2, 1], F16, F32_SUM),
    mma("m16n8k8", "f32.bf16.bf16.f32", [4, 2, 1], BF16, F32_SUM),
    mma("m16n8k8", "f32.tf32.tf32.f32", [4, 4, 2], TF32, F32_SUM),
    mma("m16n8k4", "f32.tf32.tf32.f32", [4, 2, 1], TF32, F32_SUM),
    mma("m16n8k32", "s32.s8.s8.s32", [4, 4, 2], ANY, S32_SUM),
    mma("m16n8k32", "s32.u8.u8.s32", [4, 4, 2], ANY, S32_SUM),
    mma("m16n8k32", "f32.e4m3.e4m3.f32", [4, 4, 2], E4M3, F32_SUM),
    mma("m16n8k32", "f32.e5m2.e5m2.f32", [4, 4, 2], E5M2, F32_SUM),
];

impl Mma {
    fn form(&self) -> String {
        let Self { shape, types, keep, set, accumulator, .. } = self;
        let cut = |n: usize| {
            let from = ["A", "B", "C"][n % 3];
            format!(
                "shf.l.wrap.b32 %x{n}, {from}, {from}, {}; and.b32 %x{n}, %x{n}, {keep:#x}; or.b32 %x{n}, %x{n}, {set:#x};",
                n * 5
            )
        };
        let operands: Vec<String> = (0..self.a + self.b).map(cut).collect();
        let list = |from: usize, count: usize| {
            (from..from + count).map(|n| format!("%x{n}")).collect::<Vec<_>>().join(", ")
        };
        let (a, b, d) = (list(0, self.a), list(self.a, self.b), list(8, self.d));
        let c = vec!["%x7"; self.d].join(", ");
        format!(
            "{} {accumulator} bar.warp.sync -1; mma.sync.aligned.{shape}.row.col.{types} {{{d}}}, {{{a}}}, {{{b}}}, {{{c}}}; \
             xor.b32 D, %x8, %x9; add.u32 E, %x10, %x11;",
            operands.join(" ")
        )
    }
}

/// Each lane's row is its own 16 bytes.
const MATRIX: &str = "
    bar.warp.sync -1; st.shared.v4.b32 [%s], {A, B, C, A}; bar.warp.sync -1; ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%x0, %x1, %x2, %x3}, [%s]; xor.b32 D, %x0, %x1; sub.u32 E, %x2, %x3;
    bar.warp.sync -1; st.shared.v4.b32 [%s], {A, B, C, A}; bar.warp.sync -1; ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%x0, %x1, %x2, %x3}, [%s]; xor.b32 D, %x0, %x1; sub.u32 E, %x2, %x3;
    bar.warp.sync -1; st.shared.v4.b32 [%s], {A, B, C, A}; bar.warp.sync -1; ldmatrix.sync.aligned.m8n8.x2.trans.shared.b16 {D, E}, [%s];
    bar.warp.sync -1; st.shared.v4.b32 [%s], {C, B, A, B}; bar.warp.sync -1; ldmatrix.sync.aligned.m8n8.x1.shared.b16 {D}, [%s];
    bar.warp.sync -1; stmatrix.sync.aligned.m8n8.x4.shared.b16 [%s], {A, B, C, A}; bar.warp.sync -1; ld.shared.v2.b32 {D, E}, [%s+8];
    bar.warp.sync -1; st.shared.v2.b32 [%s], {B, C}; bar.warp.sync -1; stmatrix.sync.aligned.m8n8.x2.trans.shared.b16 [%s], {A, B}; bar.warp.sync -1; ld.shared.v2.b32 {D, E}, [%s];
";
