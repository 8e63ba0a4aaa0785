//! Printing and parsing agree: random modules of instances of table rows, foreign PTX, and hostile text.

use crate::sample::{self, Dice, Sampler};
use flashcore_ptx::{
    module::{Module, Statement},
    op::{Mod, Op},
    parse::parse,
    provenance::Provenance,
    table,
    target::Target,
    types::{ScalarType, SpecialReg},
    verify::verify,
};
use proptest::{prelude::*, sample::select};

/// A module whose instructions are instances of the rows with these numbers.
fn module(rows: &[(usize, u64)]) -> Module {
    let all: Vec<_> = table::rows().collect();
    let mut module = sample::module(Target::Sm90a);
    let kernel = &mut module.kernels[0];
    for (i, &(row, seed)) in rows.iter().enumerate() {
        let mut sampler = Sampler { kernel, dice: Dice(seed) };
        let mut inst = sampler.inst(all[row % all.len()]);
        if seed % 3 == 0 {
            let guard = kernel.registers.add_named(ScalarType::Pred, sample::name(&format!("%guard_{i}")));
            inst = inst.guarded(guard, seed % 2 == 0);
        }
        kernel.body.push(Statement::Inst(inst));
    }
    kernel.body.push(Statement::Label(sample::name("end")));
    module.version = module.lowest_version();
    module
}

fn check(module: &Module) {
    let text = module.to_string();
    let parsed = parse(&text).unwrap_or_else(|error| panic!("{error}\n{text}"));
    assert_eq!(&parsed.module, module, "{text}");
    assert_eq!(parsed.module.to_string(), text);
}

#[test]
fn every_row_round_trips() {
    let rows = table::rows().count();
    for seed in 0..20 {
        check(&module(&(0..rows).map(|row| (row, seed)).collect::<Vec<_>>()));
    }
}

#[test]
fn every_name_reads_back() {
    assert!(Op::ALL.iter().all(|&op| Op::parse(op.text()) == Some(op) && !table::rows_of(op).is_empty()));
    assert!(ScalarType::ALL.iter().all(|&ty| ScalarType::parse(ty.text()) == Some(ty)));
    assert!(SpecialReg::ALL.iter().all(|&reg| SpecialReg::parse(reg.text()) == Some(reg)));
    assert!(Mod::WORDS.iter().all(|&word| Mod::parse(&word.to_string()) == Some(word)));
    let prefixes: std::collections::HashSet<_> =
        ScalarType::ALL.iter().map(|ty| ty.register_prefix()).collect();
    assert_eq!(prefixes.len(), ScalarType::ALL.len());
}

/// Pieces from which PTX-like nonsense is made.
const PIECES: &[&str] = &[
    ".version 8.0",
    ".target sm_90a",
    ".address_size 64",
    ".visible .entry k(",
    ".param .u64 p",
    ")",
    "{",
    "}",
    "[",
    "]",
    ".reg .b32 %r<4>;",
    ".reg .pred p, q;",
    "add.u32 %r1, %r2, 3;",
    "@!p bra L;",
    "L:",
    ";",
    ",",
    ".shared .b8 s[",
    "99",
    "0f3F800000",
    "1.5e+",
    "0x",
    "-",
    "ld.global.v4.f32",
    "\"",
    "/*",
    "*/",
    "//",
    "é",
    "%tid.x",
    "$L",
    ".loc 1 2 3",
    ".file 1",
    "wgmma.mma_async.sync.aligned.m64n8k16.f32.f16.f16",
    "mov.u32",
    ".section .x {",
    "|",
    "_",
    "m0n0k99999999",
    "<4294967295>",
];

proptest! {
    #![proptest_config(ProptestConfig::with_cases(256))]

    #[test]
    fn random_modules_round_trip(rows in prop::collection::vec((0usize..10_000, any::<u64>()), 1..40)) {
        check(&module(&rows));
    }

    #[test]
    fn the_verifier_never_panics(rows in prop::collection::vec((0usize..10_000, any::<u64>()), 1..40), cut in any::<prop::sample::Index>()) {
        let mut module = module(&rows);
        verify(&module, &Provenance::default());
        // A label in the middle makes loops of the branches; a lost one makes dangling names.
        let body = &mut module.kernels[0].body;
        let label = body.pop().unwrap();
        body.insert(cut.index(body.len()), label);
        verify(&module, &Provenance::default());
        let body = &mut module.kernels[0].body;
        body.remove(cut.index(body.len()));
        verify(&module, &Provenance::default());
    }

    #[test]
    fn nonsense_never_panics(pieces in prop::collection::vec(select(PIECES), 0..40)) {
        let _ = parse(&pieces.join(" "));
        let _ = parse(&format!(".version 8.0 .target sm_90a {}", pieces.concat()));
        let _ = parse(&format!(".version 8.0 .target sm_90a .entry k() {{ {}", pieces.join(" ")));
    }

    #[test]
    fn arbitrary_text_never_panics(text in "\\PC{0,200}") {
        let _ = parse(&text);
    }

    #[test]
    fn damaged_modules_never_panic(seed in any::<u64>(), cut in any::<prop::sample::Index>(), with in "\\PC{0,3}") {
        let text = module(&[(seed as usize, seed), (seed as usize / 7, seed)]).to_string();
        let at = cut.index(text.len());
        let _ = parse(&format!("{}{with}{}", &text[..at], &text[at + 1..]));
        let _ = parse(&text[..at]);
    }
}
