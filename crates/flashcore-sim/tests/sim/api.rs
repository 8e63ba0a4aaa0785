//! Launches that cannot be simulated are typed errors that name what is wrong; equal launches give equal outcomes.

use flashcore_ptx::{
    ident::Ident,
    launch::{LaunchSpec, Param, Slot, TensorElement, TensorMapSpec, Workspace},
    layout::Swizzle,
    module::Module,
    parse::parse,
};
use flashcore_sim::{Buffer, CheckSet, FindingKind, Launch, Options, Schedule, SimError};

const PROGRAM: &str = "
.version 8.0
.target sm_90
.address_size 64
.visible .entry copy(.param .u64 src, .param .u64 dst, .param .u32 n)
{
    .reg .b64 %s, %d, %o; .reg .b32 %t, %r, %n; .reg .pred %p;
    ld.param.u64 %s, [src]; ld.param.u64 %d, [dst]; ld.param.u32 %n, [n];
    mov.u32 %t, %tid.x; setp.ge.u32 %p, %t, %n; @%p exit;
    mul.wide.u32 %o, %t, 4; add.u64 %s, %s, %o; add.u64 %d, %d, %o;
    ld.global.u32 %r, [%s]; st.global.u32 [%d], %r;
    ret;
}
.visible .entry wide()
{
    .reg .b128 %q; .reg .b32 %a;
    mov.b32 %a, 1; mov.b128 %q, {%a, %a, %a, %a};
    ret;
}
.visible .entry mapped(.param .align 64 .b8 map[128]) { ret; }
.visible .entry large() { .local .b8 depot[1000000]; ret; }
.visible .entry many()
{
    .shared .b8 a[268435456], b[268435456], c[268435456], d[268435456], e[268435456], f[268435456], g[268435456],
        h[268435456], i[268435456], j[268435456], k[268435456], l[268435456], m[268435456], n[268435456],
        o[268435456], p[268435456];
    ret;
}
.visible .entry small().maxntid 64,1,1 { ret; }
.global .b128 minus_one = -1;
.visible .entry extreme(.param .u64 dst).maxntid 65536,65536,65536 .minnctapersm 134217728
{
    .reg .b64 %d, %r<2>;
    ld.param.u64 %d, [dst];
    ld.global.v2.u64 {%r0, %r1}, [minus_one]; st.global.v2.u64 [%d], {%r0, %r1};
    ret;
}
";

fn module() -> Module {
    parse(PROGRAM).expect("PTX").module
}

fn spec(entry: &str, params: Vec<Param>) -> LaunchSpec {
    LaunchSpec {
        entry: Ident::new(entry).expect("a name"),
        grid: [1; 3],
        block: [4, 1, 1],
        cluster: [1; 3],
        shared_bytes: 0,
        dependent: false,
        params,
        workspace: Vec::new(),
    }
}

fn copy_spec() -> LaunchSpec {
    spec("copy", vec![Param::Buffer(Slot(0)), Param::Buffer(Slot(1)), Param::U32(4)])
}

fn buffers() -> Vec<Buffer> {
    vec![Buffer::input(Slot(0), (0..16).collect::<Vec<u8>>()), Buffer::output(Slot(1), 16)]
}

fn run(spec: &LaunchSpec, buffers: Vec<Buffer>) -> Result<flashcore_sim::Outcome, SimError> {
    Launch { module: &module(), provenance: None, spec, buffers }.run(&Options::new())
}

/// The launch must fail, and its error must say all of `words`.
fn check(spec: &LaunchSpec, words: &[&str]) {
    let error = run(spec, buffers()).expect_err("a launch that cannot be simulated").to_string();
    for word in words {
        assert!(error.contains(word), "`{error}` does not say `{word}`");
    }
}

#[test]
fn errors_name_what_is_wrong() {
    let map = |box_dims: Vec<u32>| {
        let element = TensorElement::F32;
        let slot = Slot(0);
        TensorMapSpec { slot, element, dims: vec![4], strides: vec![], box_dims, swizzle: Swizzle::None }
    };
    let with = |change: fn(&mut LaunchSpec)| {
        let mut spec = copy_spec();
        change(&mut spec);
        spec
    };
    check(&spec("nothing", vec![]), &["no kernel `nothing`", "copy, wide"]);
    check(&spec("wide", vec![]), &["wide", "mov.b128", "128 bits are made of two registers"]);
    check(&spec("large", vec![]), &["large", "1000000 bytes of local variables"]);
    check(&spec("many", vec![]), &["many", "4294967296 bytes of shared variables"]);
    check(&spec("copy", vec![]), &["0 arguments for 3 parameters"]);
    check(&spec("mapped", vec![Param::U32(1)]), &["argument 0", "4 bytes for a parameter of 128"]);
    check(&spec("mapped", vec![Param::TensorMap(map(vec![3]))]), &["a multiple of 16 bytes"]);
    check(&spec("mapped", vec![Param::TensorMap(map(vec![4, 4]))]), &["rank"]);
    check(&with(|s| s.params[1] = Param::Buffer(Slot(7))), &["slot 7 has no buffer"]);
    check(&with(|s| s.block = [2000, 1, 1]), &["2000"]);
    check(&with(|s| s.block = [0, 1, 1]), &["a block of [0, 1, 1]"]);
    check(&with(|s| s.grid = [3, 1, 1]).tap(|s| s.cluster = [2, 1, 1]), &["not a multiple of the cluster"]);
    check(&with(|s| s.shared_bytes = 300_000), &["300000 bytes of shared memory"]);
    check(&spec("small", vec![]).tap(|s| s.block = [128, 1, 1]), &["at most [64, 1, 1] threads"]);
}

trait Tap: Sized {
    fn tap(mut self, change: impl FnOnce(&mut Self)) -> Self {
        change(&mut self);
        self
    }
}

impl Tap for LaunchSpec {}

#[test]
fn what_no_hardware_has_is_taken_as_the_assembler_takes_it() {
    let outcome = run(&spec("extreme", vec![Param::Buffer(Slot(1))]), buffers()).expect("a launch");
    assert_eq!(outcome.bytes(Slot(1)), Some([255; 16].as_slice()));
}

#[test]
fn equal_launches_give_equal_outcomes() {
    for options in Options::gauntlet(3) {
        let once = || {
            let (module, spec) = (module(), copy_spec());
            Launch { module: &module, provenance: None, spec: &spec, buffers: buffers() }.run(&options)
        };
        assert_eq!(once(), once());
    }
}

#[test]
fn results_workspace_and_counts_come_back() {
    let spec = copy_spec().tap(|s| s.workspace.push(Workspace { slot: Slot(2), bytes: 8, zeroed: true }));
    let outcome = run(&spec, buffers()).expect("a launch");
    assert!(outcome.is_clean() && !outcome.halted);
    assert_eq!(outcome.bytes(Slot(1)), outcome.bytes(Slot(0)));
    assert_eq!(outcome.bytes(Slot(2)), Some([0; 8].as_slice()));
    assert_eq!(outcome.counters.global_sectors, 2);
    assert_eq!(outcome.counters.total_instructions(), outcome.executions.iter().sum::<u64>());
}

#[test]
fn findings_tell_where() {
    let parsed = parse(PROGRAM).expect("PTX");
    let spec = copy_spec().tap(|s| s.params[2] = Param::U32(5)).tap(|s| s.block = [5, 1, 1]);
    let launch = Launch {
        module: &parsed.module,
        provenance: Some(&parsed.provenance),
        spec: &spec,
        buffers: buffers(),
    };
    let outcome = launch.run(&Options::new()).expect("a launch");
    let finding = outcome.errors().next().expect("a finding");
    assert!(outcome.halted);
    assert_eq!((finding.cta, finding.warp, finding.lane), ([0, 0, 0], 0, 4));
    let text = finding.to_string();
    for word in [
        "OutOfBounds",
        "bytes 16..20 of argument 0 (src), which has 16",
        "ld.global.u32",
        "<ptx>:11",
        "lane 4",
    ] {
        assert!(text.contains(word), "`{text}` does not say `{word}`");
    }
}

#[test]
fn a_wrong_number_of_registers_is_told_with_where_the_other_came_from() {
    let launched = "`setmaxnreg.inc` names 200 registers a thread, fewer than the 255 that the warp has since its launch: as";
    for (directive, body, expected) in [
        ("", "setmaxnreg.inc.sync.aligned.u32 200;", launched),
        (
            ".maxnreg 240",
            "setmaxnreg.inc.sync.aligned.u32 200;",
            "the 240 that the warp has since its launch, by `.maxnreg`",
        ),
        (
            ".maxnreg 240",
            "setmaxnreg.dec.sync.aligned.u32 200; setmaxnreg.dec.sync.aligned.u32 208;",
            "names 208 registers a thread, more than the 200 that the warp has since its last `setmaxnreg`",
        ),
    ] {
        let text = format!(
            ".version 8.0\n.target sm_90a\n.address_size 64\n.visible .entry k() .maxntid 128,1,1 {directive}\n{{ {body} ret; }}"
        );
        let parsed = parse(&text).expect("PTX");
        let spec = copy_spec().tap(|s| {
            (s.entry, s.params, s.workspace) = (Ident::new("k").expect("a name"), Vec::new(), Vec::new());
            s.block = [128, 1, 1];
        });
        let launch = Launch { module: &parsed.module, provenance: None, spec: &spec, buffers: Vec::new() };
        let outcome = launch.run(&Options::new()).expect("a launch");
        let finding = outcome.errors().next().expect("a finding");
        assert!(finding.kind == FindingKind::RegisterPool && finding.message.contains(expected), "{finding}");
    }
}

#[test]
fn names_on_the_command_line_are_read() {
    assert!(Schedule::ALL.into_iter().all(|s| Schedule::parse(s.name()) == Some(s)));
    assert_eq!(CheckSet::parse("all"), Ok(CheckSet::ALL));
    let some = CheckSet::parse("race,bounds").expect("a list");
    assert!(some.race && some.bounds && !some.init);
    assert_eq!(CheckSet::parse("race,luck"), Err("luck".to_string()));
}

const GRIDS: &str = "
.version 8.0
.target sm_80
.address_size 64
.visible .entry spread(.param .u64 dst)
{
    .reg .b64 %d, %o; .reg .b32 %t, %c;
    ld.param.u64 %d, [dst]; mov.u32 %t, %tid.x; mov.u32 %c, %ctaid.x;
    mad.lo.u32 %t, %c, 32, %t; mul.wide.u32 %o, %t, 4; add.u64 %d, %d, %o;
    ld.global.u32 %c, [%d]; mad.lo.u32 %c, %c, 3, %t; st.global.u32 [%d], %c;
    ret;
}
.visible .entry clash(.param .u64 dst)
{
    .reg .b64 %d; .reg .b32 %c;
    ld.param.u64 %d, [dst]; mov.u32 %c, %ctaid.x; st.global.u32 [%d], %c;
    ret;
}
.visible .entry endless(.param .u64 dst)
{
    .reg .b64 %d; .reg .b32 %c;
    ld.param.u64 %d, [dst]; mov.u32 %c, 0;
again: add.u32 %c, %c, 1; st.global.u32 [%d], %c; bra again;
}
.visible .entry loose(.param .u64 dst, .param .u32 store)
{
    .reg .b64 %d; .reg .b32 %a, %b, %c, %t; .reg .pred %p;
    ld.param.u64 %d, [dst]; ld.param.u32 %c, [store]; mov.u32 %t, %tid.x;
    setp.lt.u32 %p, %t, 3; @%p mov.u32 %a, 7;
    mov.b32 %b, %a; shfl.sync.idx.b32 %b, %b, 3, 0x1f, 0xf; add.u32 %b, %b, 1; and.b32 %a, %b, 0;
    setp.eq.u32 %p, %c, 0; @%p mov.b32 %b, %a;
    st.global.u32 [%d], %b;
    ret;
}
.visible .entry greedy().maxnreg 255 { ret; }
.visible .entry roomy() { .shared .b8 room[50000]; ret; }
";

/// Launches of `GRIDS` on 1280 words.
fn grid(
    entry: &str,
    ctas: u32,
    more: &[Param],
    options: &Options,
) -> Result<flashcore_sim::Outcome, SimError> {
    let mut spec = spec(entry, [&[Param::Buffer(Slot(0))], more].concat());
    (spec.grid, spec.block) = ([ctas, 1, 1], [if entry == "spread" { 32 } else { 4 }, 1, 1]);
    let module = parse(GRIDS).expect("PTX").module;
    let words: Vec<u8> = (0..1280u32).flat_map(u32::to_le_bytes).collect();
    Launch { module: &module, provenance: None, spec: &spec, buffers: vec![Buffer::input(Slot(0), words)] }
        .run(options)
}

/// Forty CTAs are enough for parts on all cores; seven are not.
#[test]
fn parts_of_a_grid_come_together() {
    for options in [Options::new()].into_iter().chain(Options::gauntlet(5)) {
        let outcome = grid("spread", 40, &[], &options).expect("a launch");
        let words: Vec<u8> = (0..1280u32).flat_map(|i| (i * 4).to_le_bytes()).collect();
        assert_eq!((outcome.bytes(Slot(0)), outcome.findings.as_slice()), (Some(words.as_slice()), &[][..]));
        assert_eq!(outcome.counters.total_instructions(), outcome.executions.iter().sum::<u64>());
        assert_eq!(outcome.executions.last(), Some(&40));
    }
    for ctas in [7, 40] {
        let outcome = grid("clash", ctas, &[], &Options::new()).expect("a launch");
        let races = outcome.errors().filter(|f| f.kind == FindingKind::GlobalRace).map(|f| f.count);
        assert_eq!(races.collect::<Vec<_>>(), [u64::from(ctas) - 1], "{:?}", outcome.findings);
    }
}

#[test]
fn a_kernel_without_end_is_given_up() {
    let mut options = Options::new();
    options.step_limit = 5000;
    let error = grid("endless", 1, &[], &options).expect_err("no end").to_string();
    for word in ["without ending", "--max-steps", "max_steps"] {
        assert!(error.contains(word), "{error}");
    }
    let spec = spec("endless", vec![Param::Buffer(Slot(0))]);
    let module = parse(GRIDS).expect("PTX").module;
    let launch = Launch { module: &module, provenance: None, spec: &spec, buffers: buffers() };
    let error = launch.run_while(&Options::new(), &|| false).expect_err("no end");
    assert_eq!(error, SimError::Interrupted { kernel: "endless".into() });
}

/// Lane 3 never sets what all lanes shuffle; it matters only if it is stored.
#[test]
fn what_nobody_wrote_is_told_where_it_matters() {
    let stored = |store| grid("loose", 1, &[Param::U32(store)], &Options::new()).expect("a launch").findings;
    let [finding] = &stored(1)[..] else { panic!("{:?}", stored(1)) };
    let site = finding.site.as_ref().expect("an instruction");
    assert_eq!(finding.kind, FindingKind::UninitRegister);
    assert!(site.text.starts_with("st.global") && finding.message.contains("mov.b32"), "{finding}");
    assert_eq!(stored(0), []);
}

#[test]
fn limits_of_the_target_are_said() {
    let launch = |entry: &str, change: fn(&mut LaunchSpec)| {
        let spec =
            spec(entry, if entry == "spread" { vec![Param::Buffer(Slot(0))] } else { vec![] }).tap(change);
        let module = parse(GRIDS).expect("PTX").module;
        let launch = Launch { module: &module, provenance: None, spec: &spec, buffers: buffers() };
        launch.run(&Options::new()).expect_err("too much").to_string()
    };
    for (error, says) in [
        (launch("spread", |s| s.shared_bytes = 170_000), "a CTA of sm_80 has 166912"),
        (launch("spread", |s| (s.grid, s.cluster) = ([2, 1, 1], [2, 1, 1])), "sm_80 has none"),
        (launch("spread", |s| s.grid = [1, 70_000, 1]), "65535"),
        (launch("spread", |s| s.block = [1, 1, 65]), "1024, 64"),
        (launch("greedy", |s| s.block = [512, 1, 1]), "so that 128 each fit"),
        (launch("roomy", |_| {}), "extern __shared__"),
    ] {
        assert!(error.contains(says), "`{error}` does not say `{says}`");
    }
}

/// As nvcc of CUDA 13.1 and later compiles `volatile` variables; drivers of CUDA 13.0 do not take it.
const VOLATILE: &str = ".version 9.1\n.target sm_90\n.address_size 64
.visible .entry kept(.param .u64 dst)
{
    .local .align 8 .b8 depot[16]; .reg .b32 %t, %v; .reg .b64 %d, %o, %w;
    mov.u32 %t, %tid.x; st.volatile.local.u32 [depot], %t; mov.u64 %w, 2; st.volatile.local.u64 [depot+8], %w;
    ld.volatile.local.u32 %v, [depot]; ld.volatile.local.u64 %w, [depot+8];
    cvt.u32.u64 %t, %w; mad.lo.u32 %v, %v, %t, 1;
    ld.param.u64 %d, [dst]; mov.u32 %t, %tid.x; mul.wide.u32 %o, %t, 4; add.u64 %d, %d, %o; st.global.u32 [%d], %v;
    ret;
}";

#[test]
fn volatile_local_memory_is_memory() {
    let parsed = parse(VOLATILE).expect("PTX");
    let spec = LaunchSpec { block: [4, 1, 1], ..spec("kept", vec![Param::Buffer(Slot(0))]) };
    let buffers = vec![Buffer::output(Slot(0), 16)];
    let launch = Launch { module: &parsed.module, provenance: None, spec: &spec, buffers };
    let outcome = launch.run(&Options::new()).expect("a launch");
    assert!(outcome.is_clean(), "{:?}", outcome.findings);
    let words: Vec<u8> = [1u32, 3, 5, 7].iter().flat_map(|word| word.to_le_bytes()).collect();
    assert_eq!(outcome.bytes(Slot(0)), Some(words.as_slice()));
}
