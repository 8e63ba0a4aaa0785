//! The instruction families of random programs, as forms that [`super::Program`] fills with registers.
//!
//! Left out are documented approximations, and what depends on an order that nobody promises. Operands of tensor cores
//! are cut to few bits, so that sums are exact in any order.

/// The forms of all families but those of `mma.sync` and `wmma`.
const FORMS: &str = include_str!("forms.txt");

/// Every family.
pub const FAMILIES: [&str; 19] = [
    "integer", "bits", "wide", "float", "double", "half", "convert", "warp", "memory", "matrix", "control",
    "video", "carry", "truth", "halves", "vector", "atomic", "call", "wmma",
];

/// The forms of a family; letters as [`super::Program`] says.
pub(super) fn forms(family: &str) -> Vec<String> {
    if family == "wmma" {
        return super::wmma::forms();
    }
    let products = MMAS.iter().filter(|_| family == "matrix").map(Mma::form);
    let section = FORMS.split("\n[").find_map(|part| part.strip_prefix(family)?.strip_prefix("]\n"));
    let lines = section.unwrap_or_default().lines().filter(|line| !line.is_empty() && !line.starts_with('#'));
    let (around, lines): (Vec<&str>, Vec<&str>) = lines.partition(|line| line.starts_with("around: "));
    let around = around.first().map_or("FORM", |line| &line["around: ".len()..]);
    products.chain(lines.into_iter().flat_map(expanded).map(|form| around.replace("FORM", &form))).collect()
}

fn expanded(line: &str) -> Vec<String> {
    let parts = line.split_once('<').and_then(|(head, rest)| Some((head, rest.split_once('>')?)));
    let Some((head, (words, tail))) = parts else { return vec![line.to_owned()] };
    words.split('/').flat_map(|word| expanded(&format!("{head}{word}{tail}"))).collect()
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
    mma("m16n8k32", "s32.s8.u8.s32", [4, 4, 2], ANY, S32_SUM),
    mma("m16n8k16", "s32.u8.s8.s32", [4, 2, 1], ANY, S32_SUM),
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
