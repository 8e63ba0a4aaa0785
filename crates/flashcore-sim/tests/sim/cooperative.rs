//! The barrier of a grid, as nvcc writes `grid.sync()`: all CTAs are resident, and what came before is seen behind it.

use flashcore_ptx::{
    ident::Ident,
    launch::{LaunchSpec, Param, Slot},
    parse::parse,
};
use flashcore_sim::{Buffer, FindingKind, Launch, Options, Outcome};

const CTAS: u32 = 9;

/// Each CTA adds 1 to the first word and writes what it reads there behind the barrier.
const PROGRAM: &str = "
.version 8.4
.target sm_90
.address_size 64
.visible .entry count(.param .u64 to)
{
    .reg .b64 %to, %grid, %high, %low, %at; .reg .b32 %r, %old, %add, %n, %c, %t; .reg .pred %p, %first, %q;
    ld.param.u64 %to, [to];
    mov.u32 %r, %envreg2; cvt.u64.u32 %low, %r;
    mov.u32 %r, %envreg1; cvt.u64.u32 %high, %r;
    bfi.b64 %grid, %high, %low, 32, 32;
    mov.u32 %t, %tid.x; setp.ne.s32 %first, %t, 0;
    @!%first red.global.add.u32 [%to], 1;
    setp.ne.s64 %p, %grid, 0; @%p bra sync;
    trap;
sync:
    BARRIER
    @%first bra done;
    ld.global.u32 %r, [%to];
    mov.u32 %c, %ctaid.x; mul.wide.u32 %at, %c, 4; add.u64 %at, %at, %to;
    st.global.u32 [%at+4], %r;
done:
    ret;
}
";

const BARRIER: &str = "
    barrier.sync 0;
    @%first bra behind;
    mov.u32 %n, %nctaid.x; mov.u32 %c, %ctaid.x; setp.eq.s32 %p, %c, 0;
    mov.u32 %r, -2147483647; sub.s32 %r, %r, %n; selp.b32 %add, %r, 1, %p;
    atom.add.release.gpu.u32 %old, [%grid+4], %add;
again:
    ld.acquire.gpu.u32 %r, [%grid+4]; xor.b32 %r, %r, %old; setp.gt.s32 %q, %r, -1; @%q bra again;
behind:
    barrier.sync 0;";

fn run(barrier: &str, options: &Options) -> Outcome {
    let parsed = parse(&PROGRAM.replace("BARRIER", barrier)).expect("PTX");
    let spec = LaunchSpec {
        entry: Ident::new("count").expect("a name"),
        grid: [CTAS, 1, 1],
        block: [64, 1, 1],
        cluster: [1; 3],
        shared_bytes: 0,
        dependent: false,
        params: vec![Param::Buffer(Slot(0))],
        workspace: Vec::new(),
    };
    let buffers = vec![Buffer::input(Slot(0), vec![0; 4 * (CTAS as usize + 1)])];
    let launch = Launch { module: &parsed.module, provenance: None, spec: &spec, buffers };
    launch.run(options).expect("a launch")
}

#[test]
fn behind_the_barrier_all_have_come() {
    for options in [Options::new()].into_iter().chain(Options::gauntlet(3)) {
        let outcome = run(BARRIER, &options);
        assert_eq!(outcome.findings, [], "{options:?}");
        let words = outcome.bytes(Slot(0)).expect("the buffer").chunks_exact(4);
        assert!(words.clone().all(|word| word == CTAS.to_le_bytes()), "{:?}", words.collect::<Vec<_>>());
    }
}

#[test]
fn without_the_barrier_it_is_a_race() {
    let outcome = run("barrier.sync 0;", &Options::new());
    assert!(
        outcome.errors().any(|finding| finding.kind == FindingKind::GlobalRace),
        "{:?}",
        outcome.findings
    );
}
