//! The forms of `wmma`: fragments are loaded from shared memory, multiplied, and stored there again.
//!
//! The ISA does not say which lane has which element, so the addend is the same number everywhere. As in
//! [`super::families`], operands have few bits, and sums are exact in any order.

/// One product: its types as `wmma.mma` names them, element type and bits of A and B, and registers of each fragment.
struct Product {
    /// What stands between `wmma.mma` and `.sync`.
    operator: &'static str,
    shape: (usize, usize, usize),
    /// Types behind the shape.
    types: &'static str,
    element: &'static str,
    bits: usize,
    /// Registers of A, B, C and D.
    registers: [usize; 4],
    /// Types of C and D.
    sums: [&'static str; 2],
    /// What is kept of random bits, and what is set.
    cut: (u32, u32),
}

const SQUARE: (usize, usize, usize) = (16, 16, 16);
const WIDE: (usize, usize, usize) = (32, 8, 16);
const TALL: (usize, usize, usize) = (8, 32, 16);
/// 2 and 3 with either sign: 16 products and a small number fit in a half.
const F16: (u32, u32) = (0x8200_8200, 0x4000_4000);
/// 2.0 to 3.75 in steps of 0.25, with either sign.
const BF16: (u32, u32) = (0x8070_8070, 0x4000_4000);
const TF32: (u32, u32) = (0x8070_0000, 0x4000_0000);
const ANY: (u32, u32) = (u32::MAX, 0);
/// The upper words of doubles; the lower ones are 0.
const F64: (u32, u32) = (0x8007_0000, 0x4000_0000);

#[rustfmt::skip]
fn products() -> Vec<Product> {
    let mut all = Vec::new();
    let mut add = |operator, shape, types, (element, bits), registers, sums, cut| {
        all.push(Product { operator, shape, types, element, bits, registers, sums, cut });
    };
    for shape in [SQUARE, WIDE, TALL] {
        let f16 = ("f16", 16);
        add("", shape, "f32.f32", f16, [8, 8, 8, 8], ["f32", "f32"], F16);
        add("", shape, "f16.f16", f16, [8, 8, 4, 4], ["f16", "f16"], F16);
        add("", shape, "f32.f16", f16, [8, 8, 4, 8], ["f16", "f32"], F16);
        add("", shape, "f16.f32", f16, [8, 8, 8, 4], ["f32", "f16"], F16);
    }
    for (shape, a, b) in [(SQUARE, 4, 4), (WIDE, 8, 2), (TALL, 2, 8)] {
        add("", shape, "f32.bf16.bf16.f32", ("bf16", 16), [a, b, 8, 8], ["f32", "f32"], BF16);
    }
    for (shape, a, b) in [(SQUARE, 2, 2), (WIDE, 4, 1), (TALL, 1, 4)] {
        add("", shape, "s32.s8.s8.s32", ("s8", 8), [a, b, 8, 8], ["s32", "s32"], ANY);
        add("", shape, "s32.u8.u8.s32.satfinite", ("u8", 8), [a, b, 8, 8], ["s32", "s32"], ANY);
    }
    add("", (16, 16, 8), "f32.tf32.tf32.f32", ("tf32", 32), [4, 4, 8, 8], ["f32", "f32"], TF32);
    add("", (8, 8, 32), "s32.s4.s4.s32", ("s4", 4), [1, 1, 2, 2], ["s32", "s32"], ANY);
    add("", (8, 8, 32), "s32.u4.u4.s32.satfinite", ("u4", 4), [1, 1, 2, 2], ["s32", "s32"], ANY);
    add(".xor.popc", (8, 8, 128), "s32.b1.b1.s32", ("b1", 1), [1, 1, 2, 2], ["s32", "s32"], ANY);
    add(".and.popc", (8, 8, 128), "s32.b1.b1.s32", ("b1", 1), [1, 1, 2, 2], ["s32", "s32"], ANY);
    add("", (8, 8, 4), "f64.f64.f64.f64", ("f64", 64), [1, 1, 2, 2], ["f64", "f64"], F64);
    all
}

/// Every product with rows or columns of A and B side by side.
pub(super) fn forms() -> Vec<String> {
    let majors = [["row", "row"], ["row", "col"], ["col", "row"], ["col", "col"]];
    let fits = |product: &Product, major: &[&str; 2]| product.bits >= 8 || *major == ["row", "col"];
    products()
        .iter()
        .flat_map(|product| majors.iter().filter(|m| fits(product, m)).map(|m| product.form(*m)))
        .collect()
}

impl Product {
    fn form(&self, [a, b]: [&str; 2]) -> String {
        let (m, n, k) = self.shape;
        let shape = format!("m{m}n{n}k{k}");
        let (element, [c_type, d_type]) = (self.element, self.sums);
        let of = |ty: &str| if ty == "f64" { "%z" } else { "%y" };
        // A, B, D and C, one behind the other; C is one register again and again.
        let list = |prefix: &str, from: usize, count: usize| {
            let names: Vec<_> = (from..from + count).map(|i| format!("{prefix}{i}")).collect();
            names.join(", ")
        };
        let [na, nb, nc, nd] = self.registers;
        let left = list(of(element), 0, na);
        let right = list(of(element), na, nb);
        let result = list(of(d_type), na + nb, nd);
        let c = if c_type == "f64" { "%w3" } else { "%x7" };
        let sum = vec![c; nc].join(", ");
        let lda = self.stride(if a == "row" { k } else { m });
        let ldb = self.stride(if b == "row" { n } else { k });
        let (operator, types) = (self.operator, self.types);
        format!(
            "{} {} bar.warp.sync -1; st.shared.v4.b32 [%m], {{%x0, %x1, %x2, %x3}}; st.shared.v4.b32 [%m+16], {{%x2, %x1, %x0, %x3}}; \
             bar.warp.sync -1; wmma.load.a.sync.aligned.{a}.{shape}.shared.{element} {{{left}}}, [%k], {lda}; \
             wmma.load.b.sync.aligned.{b}.{shape}.shared.{element} {{{right}}}, [%k], {ldb}; \
             wmma.mma{operator}.sync.aligned.{a}.{b}.{shape}.{types} {{{result}}}, {{{left}}}, {{{right}}}, {{{sum}}}; \
             bar.warp.sync -1; wmma.store.d.sync.aligned.row.{shape}.shared.{d_type} [%k], {{{result}}}, {n}; \
             bar.warp.sync -1; ld.shared.v2.b32 {{D, E}}, [%m];",
            self.operands(),
            summand(c_type)
        )
    }

    /// Elements from row to row, or column to column: at least 16 bytes.
    fn stride(&self, natural: usize) -> usize {
        natural.max(128 / self.bits)
    }

    /// `%x0` to `%x3` with few bits each.
    fn operands(&self) -> String {
        let (keep, set) = self.cut;
        let word = |(n, from): (usize, &str)| match self.element {
            "f64" if n % 2 == 0 => format!("mov.u32 %x{n}, 0;"),
            _ => format!(
                "shf.l.wrap.b32 %x{n}, {from}, {from}, {}; and.b32 %x{n}, %x{n}, {keep:#x}; or.b32 %x{n}, %x{n}, {set:#x};",
                3 * n
            ),
        };
        ["A", "B", "C", "A"].into_iter().enumerate().map(word).collect::<Vec<_>>().join(" ")
    }
}

/// Makes the summand: a number below 32.
fn summand(ty: &str) -> &'static str {
    match ty {
        "f16" => "mov.u32 %x7, N; cvt.rn.f16.u32 %h0, %x7; mov.b32 %x7, {%h0, %h0};",
        "f32" => "mov.u32 %x7, N; cvt.rn.f32.u32 %x7, %x7;",
        "f64" => "mov.u32 %x7, N; cvt.rn.f64.u32 %w3, %x7;",
        _ => "mov.u32 %x7, N;",
    }
}
