//! `tests/ptx/parse/*.ptx`: PTX in the manner of other compilers is read, verified and printed; what lies beyond is a
//! clear error with its place.

use flashcore_ptx::{
    ident::Name,
    inst::Operand,
    module::Space,
    parse::{Parsed, parse, parse_file},
    target::Target,
    verify::verify,
};

fn read(name: &str) -> Parsed {
    let path = format!("{}/../../tests/ptx/parse/{name}", env!("CARGO_MANIFEST_DIR"));
    let parsed =
        parse_file(name, &std::fs::read_to_string(path).unwrap()).unwrap_or_else(|e| panic!("{name}:{e}"));
    let again = parse(&parsed.module.to_string()).unwrap();
    assert_eq!(again.module, parsed.module);
    assert_eq!(verify(&parsed.module, &parsed.provenance), []);
    parsed
}

#[test]
fn nvcc_style() {
    let Parsed { module, provenance } = read("nvcc_style.ptx");
    assert_eq!(
        module.variables.iter().map(|v| (v.space, v.init.len())).collect::<Vec<_>>(),
        [(Space::Const, 4), (Space::Global, 5), (Space::Global, 1)]
    );
    let kernel = &module.kernels[0];
    assert_eq!(kernel.directives.max_threads, Some([256, 1, 1]));
    assert_eq!(kernel.param_layout(), (vec![0, 8, 12], 16));
    let (branch, _) = kernel.instructions().find(|(_, i)| i.guard.is_some()).unwrap();
    let place = provenance.location(0, branch).unwrap().to_string();
    assert_eq!(place, "/src/scale.cu:4", "the line of the function that was inlined");
    assert!(module.to_string().contains("mul.f32 %f5, %f4, 0f3F000000;"));
}

#[test]
fn triton_style() {
    let Parsed { module, provenance } = read("triton_style.ptx");
    let kernel = &module.kernels[0];
    let targets = kernel.instructions().flat_map(|(_, i)| &i.operands).filter_map(|o| match o {
        Operand::Label(name) => Some(name.clone()),
        _ => None,
    });
    let names = ["waitLoop", "waitLoop_1"].map(|n| Name::new(n).unwrap());
    assert_eq!(targets.collect::<Vec<_>>(), names, "each scope has its own label");
    assert!(
        module.to_string().contains("complete_1, [global_smem], %r1_1;"),
        "inner registers hide outer ones"
    );
    assert_eq!(provenance.location(0, 1).unwrap().to_string(), "triton_style.ptx:18");
}

#[test]
fn inline_assembly_has_the_line_it_stands_in() {
    let text = ".version 8.0\n.target sm_90a\n.entry k()\n{\n.loc 1 7 1\n// begin inline asm\n.loc 1 7 1\nexit;\n.loc 1 8 1\n\
                ret;\n// end inline asm\n.loc 1 9 1\nret;\n}\n.file 1 \"k.py\"\n";
    let provenance = parse(text).unwrap().provenance;
    let lines = [0, 1, 2].map(|statement| provenance.location(0, statement).unwrap().line);
    assert_eq!(lines, [7, 7, 9]);
}

#[test]
fn errors_say_where_and_what() {
    let kernel = |body: &str| format!(".version 8.0\n.target sm_90a\n.entry k()\n{{\n{body}\n}}");
    for (text, expected) in [
        ("".into(), "1:1: expected `.version`, found `end of text`"),
        (".version 8".into(), "1:10: `8` is out of range"),
        (".version 8.0 .target sn_90".into(), "1:22: expected a target such as sm_90a, found `sn_90`"),
        (
            ".version 8.0 .target sm_90 .address_size 32".into(),
            "an address size other than 64 is not supported",
        ),
        (
            ".version 8.0\n.target sm_90\n.func f(.reg .b32 x) { ret; }".into(),
            "3:9: a parameter in a register",
        ),
        (".version 8.0\n.target sm_90\n.alias f, g;".into(), "3:1: `.alias` is not supported"),
        (".version 8.0\n.target sm_90\n.global .texref t;".into(), "3:9: `.texref`: textures and surfaces"),
        (kernel("  ret"), "6:1: expected an operand, found `}`"),
        (kernel("ret; {"), "6:2: expected an instruction, a label or `}`, found `end of text`"),
        (kernel(".reg .b32 %r<2>, %r1;"), "5:18: `%r1` is declared twice"),
        (kernel("A: A: ret;"), "5:4: `A` is declared twice"),
        (kernel(".reg .bf16 x;"), "5:12: a `.bf16` register is not supported"),
        (kernel(".reg .b32 %r<99999999>;"), "`99999999` is out of range"),
        (kernel("call.uni f, (1);"), "operand 2 of `call.uni` must be `(…)` of `.param` variables"),
        (kernel("ts: .branchtargets nowhere;"), "5:20: expected a label of this kernel, found `nowhere`"),
        (kernel(".reg .f32 f; mov.f32 f, 99999999999999999999;"), "`99999999999999999999` is out of range"),
        (kernel("/* never"), "5:1: unterminated comment"),
        (kernel("é"), "5:1: stray character `é`"),
    ] {
        let said = parse(&text).unwrap_err().to_string();
        assert!(said.contains(expected), "{text}\nsaid {said}\nnot  {expected}");
    }
}

#[test]
fn unlisted_targets_are_read_as_their_nearest() {
    for (text, target) in [
        ("sm_52", Target::Sm75),
        ("sm_75", Target::Sm75),
        ("sm_80", Target::Sm80),
        ("sm_87", Target::Sm86),
        ("sm_90a", Target::Sm90a),
        ("sm_100a", Target::Sm100),
        ("sm_103", Target::Sm100),
        ("sm_121f", Target::Sm120),
    ] {
        assert_eq!(parse(&format!(".version 8.0 .target {text}")).unwrap().module.target, target, "{text}");
    }
}
