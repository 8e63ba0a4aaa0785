//! Instructions that the table lacks: only where one is executed, the launch is refused. Each kernel has a twin.

use flashcore_ptx::{
    ident::Ident,
    launch::{LaunchSpec, Param, Slot},
    parse::{ParseErrorKind, parse, parse_lenient},
};
use flashcore_sim::{Buffer, FindingKind, Launch, Options, Outcome, SimError};

const PROGRAM: &str = "
.version 8.4
.target sm_90
.address_size 64
.func (.param .b32 r) looked(.param .b32 a)
{
    .reg .b32 %r<4>; .reg .f32 %f<4>; .reg .b64 %t;
    ld.param.b32 %r0, [a];
    mov.b64 %t, 0;
    tex.2d.v4.f32.s32 {%f0, %f1, %f2, %f3}, [%t, {%r0, %r0}];
    mov.b32 %r1, %f0;
    st.param.b32 [r], %r1;
    ret;
}
.visible .entry plain(.param .u64 to, .param .u32 n)
{
    .reg .b64 %d; .reg .b32 %n;
    ld.param.u64 %d, [to]; ld.param.u32 %n, [n];
    st.global.u32 [%d], %n;
    ret;
}
.visible .entry branch(.param .u64 to, .param .u32 n)
{
    .reg .b64 %d; .reg .b32 %n; .reg .pred %p;
    ld.param.u64 %d, [to]; ld.param.u32 %n, [n];
    setp.eq.u32 %p, %n, 0;
    @%p bra done;
    frob.u32.x7 %n, %n, [%d+4], {%n, %n};
done:
    st.global.u32 [%d], %n;
    ret;
}
.visible .entry guarded(.param .u64 to, .param .u32 n)
{
    .reg .b64 %d; .reg .b32 %n; .reg .pred %p;
    ld.param.u64 %d, [to]; ld.param.u32 %n, [n];
    setp.eq.u32 %p, %n, 0;
    @!%p add.u32.x7 %n, %n, 1;
    st.global.u32 [%d], %n;
    ret;
}
.visible .entry calls(.param .u64 to, .param .u32 n)
{
    .reg .b64 %d; .reg .b32 %n; .reg .pred %p;
    ld.param.u64 %d, [to]; ld.param.u32 %n, [n];
    setp.eq.u32 %p, %n, 0;
    @%p bra done;
    { .param .b32 a, s; st.param.b32 [a], %n; call.uni (s), looked, (a); ld.param.b32 %n, [s]; }
done:
    st.global.u32 [%d], %n;
    ret;
}
";

/// Reads what nobody wrote before it comes to what is unknown.
const FAULTY: &str = "
.visible .entry faulty(.param .u64 to, .param .u32 n)
{
    .reg .b64 %d; .reg .b32 %n;
    ld.param.u64 %d, [to]; ld.global.u32 %n, [%d];
    frob.u32 %n;
    ret;
}
";

fn run(entry: &str, n: u32) -> Result<Outcome, SimError> {
    run_text(&format!("{PROGRAM}{FAULTY}"), entry, n)
}

fn run_text(text: &str, entry: &str, n: u32) -> Result<Outcome, SimError> {
    let parsed = parse_lenient("test.ptx", text).expect("a text whose gaps are kept");
    let spec = LaunchSpec {
        entry: Ident::new(entry).expect("a name"),
        grid: [1; 3],
        block: [1; 3],
        cluster: [1; 3],
        shared_bytes: 0,
        dependent: false,
        params: vec![Param::Buffer(Slot(0)), Param::U32(n)],
        workspace: Vec::new(),
    };
    let (module, provenance) = (&parsed.module, Some(&parsed.provenance));
    Launch { module, provenance, spec: &spec, buffers: vec![Buffer::output(Slot(0), 4)] }.run(&Options::new())
}

#[test]
fn other_kernels_of_the_file_run_as_ever() {
    let outcome = run("plain", 7).expect("a launch");
    assert_eq!((outcome.bytes(Slot(0)), outcome.findings.len()), (Some([7, 0, 0, 0].as_slice()), 0));
}

#[test]
fn what_is_not_executed_is_a_note() {
    for (entry, mnemonic) in
        [("branch", "frob.u32.x7"), ("guarded", "add.u32.x7"), ("calls", "tex.2d.v4.f32.s32")]
    {
        let outcome = run(entry, 0).expect("a launch");
        assert_eq!(outcome.bytes(Slot(0)), Some([0; 4].as_slice()), "{entry}");
        let [note] = outcome.findings.as_slice() else { panic!("{entry}: {:?}", outcome.findings) };
        assert!(outcome.is_clean() && note.kind == FindingKind::NotJudged, "{entry}: {note}");
        let text = note.to_string();
        assert!(text.contains(&format!("`{mnemonic}` cannot be simulated")), "{text}");
        assert!(text.contains(&format!("at   {mnemonic} ")) && text.contains("test.ptx:"), "{text}");
    }
}

#[test]
fn what_is_executed_is_refused_with_its_line() {
    for (entry, line, text, reason) in [
        ("branch", 28, "frob.u32.x7 %n, %n, [%d+4], {%n, %n}", "unknown instruction `frob.u32.x7`"),
        ("guarded", 38, "add.u32.x7 %n, %n, 1", "unknown modifier `.x7` of `add`"),
        ("calls", 10, "tex.2d.v4.f32.s32 {%f0, %f1, %f2, %f3}, [%t, {%r0, %r0}]", "pass a buffer"),
    ] {
        let error = run(entry, 1).expect_err("an instruction that cannot be simulated");
        assert!(
            matches!(&error, SimError::Unknown { line: l, text: t, reason: r, .. }
                if *l == line && t == text && r.contains(reason)),
            "{entry}: {error:?}"
        );
        assert!(error.to_string().contains("docs/adding-an-instruction.md"), "{error}");
    }
}

#[test]
fn faults_before_it_are_told() {
    let outcome = run("faulty", 1).expect("an outcome");
    let kinds: Vec<_> = outcome.findings.iter().map(|finding| finding.kind).collect();
    assert_eq!(kinds, [FindingKind::UninitGlobal, FindingKind::NotJudged]);
    assert!(outcome.halted && !outcome.is_clean());
    let text = outcome.findings[1].to_string();
    assert!(text.contains("the launch ended here: line") && text.contains("`frob.u32 %n`"), "{text}");
}

/// Kernels of one wrong instruction, with what is said about it.
const INVALID: &[(&str, &str)] = &[
    ("bar.sync 16", "operand 1 of `bar.sync` must be"),
    ("bar.sync 1, 48", "operand 2 of `bar.sync` must be"),
    ("min.u32 %n, %n", "`min.u32` takes 3 operands, not 2"),
    ("mov.u32 zz, 1", "not `zz`, which is not declared as a register"),
    ("st.param.u32 [n], 1", "parameters of a kernel are only read"),
];

#[test]
fn wrong_text_is_called_wrong_and_not_unsupported() {
    for (wrong, reason) in INVALID {
        let error = run_text(&one_instruction(wrong), "one", 1).expect_err("an invalid instruction");
        let SimError::Invalid { place, reason: r, .. } = &error else { panic!("{wrong}: {error:?}") };
        assert!(r.contains(reason), "{error}");
        assert!(place.ends_with('8'), "{error}");
        let text = error.to_string();
        assert!(text.contains("is not valid PTX") && !text.contains("not supported"), "{text}");
    }
    let outcome = run_text(&one_instruction("min.u32 %n, %n, 1; bar.sync 15"), "one", 1);
    assert!(outcome.expect("a launch").is_clean());
}

#[test]
fn an_undeclared_name_is_told_with_its_line() {
    let error = run_text(&one_instruction("mov.u32 %n, nobody"), "one", 1).expect_err("an undeclared name");
    assert_eq!(error.to_string(), "test.ptx:8, in `one`: `nobody` is not declared");
}

/// A kernel whose eighth line, from 1, is the instruction.
fn one_instruction(inst: &str) -> String {
    format!(
        "\n.version 8.4\n.target sm_90\n.address_size 64\n.visible .entry one(.param .u64 to, .param .u32 n)\n{{\n\
         .reg .b32 %n; ld.param.u32 %n, [n];\n{inst};\nret;\n}}\n"
    )
}

/// What is written, assembled or verified must be known; and what no table could make right is refused by both.
#[test]
fn gaps_are_kept_by_the_lenient_alone() {
    let error = parse(PROGRAM).expect_err("an unknown instruction");
    assert_eq!(error.line, 10, "{error}");
    let wrong = PROGRAM.replace("st.global.u32 [%d], %n;", "st.global.u32 [%d], %nobody;");
    let (error, _) = parse_lenient("test.ptx", &wrong).expect_err("an undeclared register");
    assert!(matches!(error.kind, ParseErrorKind::UndeclaredRegister(_)), "{error}");
    let printed = parse_lenient("test.ptx", PROGRAM).expect("a text").module.to_string();
    assert!(printed.contains("    @!%p add.u32.x7 %n, %n, 1;\n"), "{printed}");
    assert_eq!(parse_lenient("again", &printed).expect("what was printed").module.to_string(), printed);
}
