//! Launches that cannot be simulated are typed errors that name what is wrong; equal launches give equal outcomes.

use flashcore_ptx::{
    ident::Ident,
    launch::{LaunchSpec, Param, Slot, TensorElement, TensorMapSpec, Workspace},
    layout::Swizzle,
    module::Module,
    parse::parse,
};
use flashcore_sim::{Buffer, CheckSet, Launch, Options, Schedule, SimError};

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
    check(&with(|s| s.grid = [3, 1, 1]).tap(|s| s.cluster = [2, 1, 1]), &["no multiple of the cluster"]);
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
    for word in
        ["OutOfBounds", "bytes 16..20 of buffer 0, which has 16", "ld.global.u32", "<ptx>:11", "lane 4"]
    {
        assert!(text.contains(word), "`{text}` does not say `{word}`");
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
