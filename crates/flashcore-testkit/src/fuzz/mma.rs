//! The forms of `mma.sync` and `mma.sp`: operands are truncated to few bits, so that sums are exact in any order.

/// The family of the products that every compiler emits, of the rarer ones, and of sparse ones.
pub(super) fn forms(family: &str) -> Vec<String> {
    match family {
        "matrix" => COMMON.iter().map(Mma::form).collect(),
        "product" => RARE.iter().map(Mma::form).chain(DOUBLES.iter().flat_map(Doubles::forms)).collect(),
        "sparse" => SPARSE.iter().flat_map(Sparse::forms).collect(),
        _ => Vec::new(),
    }
}

/// One `mma.sync`: `keep` and `set` make operands of few bits.
struct Mma {
    shape: &'static str,
    /// What follows the layouts.
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
/// So close to the largest number that some sums exceed it.
const LARGE_SUM: &str = "and.b32 %x7, C, 0xffff; xor.b32 %x7, %x7, 0x7fffffff;";
const F16_SUM: &str = "and.b32 %x7, C, 31; cvt.rn.f16.u32 %h0, %x7; mov.u32 %x7, N; cvt.rn.f16.u32 %h1, %x7; mov.b32 %x7, {%h0, %h1};";
/// 2.0 to 3.75 in steps of 0.25, with either sign.
const F16: (u32, u32) = (0x8380_8380, 0x4000_4000);
const BF16: (u32, u32) = (0x8070_8070, 0x4000_4000);
const TF32: (u32, u32) = (0x8070_0000, 0x4000_0000);
/// 2 and 3, with either sign.
const E4M3: (u32, u32) = (0x8484_8484, 0x4040_4040);
const E5M2: (u32, u32) = (0x8282_8282, 0x4040_4040);
const COARSE_F16: (u32, u32) = (0x8200_8200, 0x4000_4000);
/// 2 with either sign, in both formats of 8 bits.
const FP8: (u32, u32) = (0x8080_8080, 0x4040_4040);
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

const COMMON: &[Mma] = &[
    mma("m16n8k16", "f32.f16.f16.f32", [4, 4, 2], F16, F32_SUM),
    mma("m16n8k16", "f32.bf16.bf16.f32", [4, 4, 2], BF16, F32_SUM),
    mma("m16n8k8", "f32.f16.f16.f32", [4, 2, 1], F16, F32_SUM),
    mma("m16n8k8", "f32.bf16.bf16.f32", [4, 2, 1], BF16, F32_SUM),
    mma("m16n8k8", "f32.tf32.tf32.f32", [4, 4, 2], TF32, F32_SUM),
    mma("m16n8k4", "f32.tf32.tf32.f32", [4, 2, 1], TF32, F32_SUM),
    mma("m16n8k32", "s32.s8.s8.s32", [4, 4, 2], ANY, S32_SUM),
    mma("m16n8k32", "s32.u8.u8.s32", [4, 4, 2], ANY, S32_SUM),
    mma("m16n8k32", "s32.s8.u8.s32", [4, 4, 2], ANY, S32_SUM),
    mma("m16n8k16", "s32.u8.s8.s32", [4, 2, 1], ANY, S32_SUM),
    mma("m16n8k32", "f32.e4m3.e4m3.f32", [4, 4, 2], E4M3, F32_SUM),
    mma("m16n8k32", "f32.e5m2.e5m2.f32", [4, 4, 2], E5M2, F32_SUM),
];

const RARE: &[Mma] = &[
    mma("m16n8k16", "f16.f16.f16.f16", [2, 4, 2], COARSE_F16, F16_SUM),
    mma("m16n8k8", "f16.f16.f16.f16", [2, 2, 1], COARSE_F16, F16_SUM),
    mma("m16n8k32", "f32.e4m3.e5m2.f32", [4, 4, 2], FP8, F32_SUM),
    mma("m16n8k32", "f32.e5m2.e4m3.f32", [4, 4, 2], FP8, F32_SUM),
    mma("m16n8k32", "satfinite.s32.s8.s8.s32", [4, 4, 2], ANY, LARGE_SUM),
    mma("m16n8k16", "satfinite.s32.u8.u8.s32", [4, 2, 1], ANY, LARGE_SUM),
    mma("m8n8k16", "s32.s8.s8.s32", [2, 1, 1], ANY, S32_SUM),
    mma("m8n8k16", "s32.u8.s8.s32", [2, 1, 1], ANY, S32_SUM),
    mma("m8n8k16", "satfinite.s32.u8.u8.s32", [2, 1, 1], ANY, LARGE_SUM),
    mma("m8n8k32", "s32.s4.s4.s32", [2, 1, 1], ANY, S32_SUM),
    mma("m8n8k32", "s32.u4.s4.s32", [2, 1, 1], ANY, S32_SUM),
    mma("m16n8k32", "s32.s4.u4.s32", [4, 2, 1], ANY, S32_SUM),
    mma("m16n8k32", "satfinite.s32.u4.u4.s32", [4, 2, 1], ANY, S32_SUM),
    mma("m16n8k64", "s32.s4.s4.s32", [4, 4, 2], ANY, S32_SUM),
    mma("m16n8k64", "s32.u4.s4.s32", [4, 4, 2], ANY, S32_SUM),
    mma("m8n8k128", "s32.b1.b1.s32.xor.popc", [2, 1, 1], ANY, S32_SUM),
    mma("m8n8k128", "s32.b1.b1.s32.and.popc", [2, 1, 1], ANY, S32_SUM),
    mma("m16n8k128", "s32.b1.b1.s32.and.popc", [4, 2, 1], ANY, S32_SUM),
    mma("m16n8k256", "s32.b1.b1.s32.xor.popc", [4, 4, 2], ANY, S32_SUM),
    mma("m16n8k256", "s32.b1.b1.s32.and.popc", [4, 4, 2], ANY, S32_SUM),
];

/// Registers `prefix` from number `from` on.
fn list(prefix: &str, from: usize, count: usize) -> String {
    (from..from + count).map(|n| format!("{prefix}{n}")).collect::<Vec<_>>().join(", ")
}

impl Mma {
    /// Makes `%x0` and on, as many as A and B need.
    fn operands(&self) -> String {
        let (keep, set) = (self.keep, self.set);
        let cut = |n: usize| {
            let from = ["A", "B", "C"][n % 3];
            format!(
                "shf.l.wrap.b32 %x{n}, {from}, {from}, {}; and.b32 %x{n}, %x{n}, {keep:#x}; or.b32 %x{n}, %x{n}, {set:#x};",
                n * 5 % 32
            )
        };
        (0..self.a + self.b).map(cut).collect::<Vec<_>>().join(" ")
    }

    fn form(&self) -> String {
        let Self { shape, types, accumulator, .. } = self;
        let (a, b, d) = (list("%x", 0, self.a), list("%x", self.a, self.b), list("%x", 8, self.d));
        let c = vec!["%x7"; self.d].join(", ");
        let results = match self.d {
            2 => "mov.b32 D, %x8; mov.b32 E, %x9;",
            _ => "xor.b32 D, %x8, %x9; add.u32 E, %x10, %x11;",
        };
        format!(
            "{} {accumulator} bar.warp.sync -1; mma.sync.aligned.{shape}.row.col.{types} {{{d}}}, {{{a}}}, {{{b}}}, {{{c}}}; {results}",
            self.operands()
        )
    }
}

/// An `mma.sync` of doubles.
struct Doubles {
    shape: &'static str,
    a: usize,
    b: usize,
    d: usize,
}

const DOUBLES: &[Doubles] = &[
    Doubles { shape: "m8n8k4", a: 1, b: 1, d: 2 },
    Doubles { shape: "m16n8k4", a: 2, b: 1, d: 4 },
    Doubles { shape: "m16n8k8", a: 4, b: 2, d: 4 },
    Doubles { shape: "m16n8k16", a: 8, b: 4, d: 4 },
];

impl Doubles {
    /// One form for each way of rounding, of which exact sums show the sign of zero.
    fn forms(&self) -> Vec<String> {
        ["", "rn.", "rz.", "rm.", "rp."].iter().map(|rounding| self.form(rounding)).collect()
    }

    fn form(&self, rounding: &str) -> String {
        let (shape, count) = (self.shape, self.a + self.b);
        let double = |n: usize| {
            let from = ["A", "B", "C"][n % 3];
            format!(
                "shf.l.wrap.b32 %x0, {from}, {from}, {}; and.b32 %x0, %x0, 0x80070000; or.b32 %x0, %x0, 0x40000000; mov.b64 %z{n}, {{%x1, %x0}};",
                n * 5 % 32
            )
        };
        let operands: Vec<_> = (0..count).map(double).collect();
        let (a, b, d) = (list("%z", 0, self.a), list("%z", self.a, self.b), list("%z", 12, self.d));
        let c = vec!["%w3"; self.d].join(", ");
        let results = match self.d {
            2 => "mov.b64 {%x0, D}, %z12; mov.b64 {%x1, E}, %z13;",
            _ => {
                "xor.b64 %z12, %z12, %z13; add.u64 %z14, %z14, %z15; mov.b64 {%x0, D}, %z12; mov.b64 {%x1, E}, %z14;"
            }
        };
        format!(
            "mov.u32 %x1, 0; {} and.b32 %x0, C, 0xff; cvt.rn.f64.u32 %w3, %x0; bar.warp.sync -1; \
             mma.sync.aligned.{shape}.row.col.{rounding}f64.f64.f64.f64 {{{d}}}, {{{a}}}, {{{b}}}, {{{c}}}; {results}",
            operands.join(" ")
        )
    }
}

/// One `mma.sp`, and the largest selector it takes.
struct Sparse {
    product: Mma,
    selectors: usize,
}

const fn sparse(
    shape: &'static str,
    types: &'static str,
    [d, a, b]: [usize; 3],
    cut: (u32, u32),
    accumulator: &'static str,
    selectors: usize,
) -> Sparse {
    Sparse { product: mma(shape, types, [d, a, b], cut, accumulator), selectors }
}

const SPARSE: &[Sparse] = &[
    sparse("m16n8k16", "f32.f16.f16.f32", [4, 2, 2], F16, F32_SUM, 4),
    sparse("m16n8k16", "f16.f16.f16.f16", [2, 2, 2], COARSE_F16, F16_SUM, 4),
    sparse("m16n8k16", "f32.bf16.bf16.f32", [4, 2, 2], BF16, F32_SUM, 4),
    sparse("m16n8k32", "f32.f16.f16.f32", [4, 4, 4], F16, F32_SUM, 2),
    sparse("m16n8k32", "f16.f16.f16.f16", [2, 4, 4], COARSE_F16, F16_SUM, 2),
    sparse("m16n8k32", "f32.bf16.bf16.f32", [4, 4, 4], BF16, F32_SUM, 2),
    sparse("m16n8k8", "f32.tf32.tf32.f32", [4, 2, 2], TF32, F32_SUM, 4),
    sparse("m16n8k16", "f32.tf32.tf32.f32", [4, 4, 4], TF32, F32_SUM, 2),
    sparse("m16n8k32", "s32.s8.s8.s32", [4, 2, 2], ANY, S32_SUM, 2),
    sparse("m16n8k32", "satfinite.s32.u8.s8.s32", [4, 2, 2], ANY, LARGE_SUM, 2),
    sparse("m16n8k64", "s32.s8.u8.s32", [4, 4, 4], ANY, S32_SUM, 1),
    sparse("m16n8k64", "satfinite.s32.u8.u8.s32", [4, 4, 4], ANY, LARGE_SUM, 1),
    sparse("m16n8k64", "f32.e4m3.e4m3.f32", [4, 4, 4], FP8, F32_SUM, 1),
    sparse("m16n8k64", "f32.e5m2.e4m3.f32", [4, 4, 4], FP8, F32_SUM, 1),
];

/// Metadata from the bits of `A`: the first of two elements in the lower half of four and the second in the upper one, or
/// both in one half, which is the only choice of tf32.
const METADATA: [&str; 2] = [
    "and.b32 %y12, A, 0x55555555; or.b32 %y12, %y12, 0x88888888;",
    "and.b32 %y12, A, 0x22222222; shl.b32 %y13, %y12, 2; or.b32 %y12, %y12, %y13; or.b32 %y12, %y12, 0x44444444;",
];

impl Sparse {
    fn forms(&self) -> Vec<String> {
        let skip = usize::from(self.product.types.contains("tf32"));
        let spellings = ["mma.sp", "mma.sp::ordered_metadata"];
        let selectors = 0..self.selectors;
        let each = |selector: usize| METADATA[skip..].iter().map(move |metadata| (selector, metadata));
        let form = |(selector, metadata): (usize, &&str)| {
            spellings.map(|spelling| self.form(spelling, selector, metadata))
        };
        selectors.flat_map(each).flat_map(form).collect()
    }

    fn form(&self, spelling: &str, selector: usize, metadata: &str) -> String {
        let Mma { shape, types, a, b, d, accumulator, .. } = self.product;
        // The accumulator is made first: eight operands take its register.
        let sum = format!("{accumulator} mov.b32 %y14, %x7;");
        let (left, right, result) = (list("%x", 0, a), list("%x", a, b), list("%x", 8, d));
        let c = vec!["%y14"; d].join(", ");
        let results = match d {
            2 => "mov.b32 D, %x8; mov.b32 E, %x9;",
            _ => "xor.b32 D, %x8, %x9; add.u32 E, %x10, %x11;",
        };
        format!(
            "{sum} {metadata} {} bar.warp.sync -1; {spelling}.sync.aligned.{shape}.row.col.{types} \
             {{{result}}}, {{{left}}}, {{{right}}}, {{{c}}}, %y12, {selector}; {results}",
            self.product.operands()
        )
    }
}
