//! Right kernels: the text they print, where their lines come from, and how they launch.
#![allow(unreachable_pub)]

mod expressions;
mod random;
mod samples;

use flashcore_ptx::launch::{Param, Slot, Workspace};
use flashcore_tile::{Extent, Program};
use samples::{Rows, pipeline, product, scale_rows, scale_rows_at_one_line};

/// The body of the kernel, without declarations.
fn body<A>(program: &Program<A>) -> String {
    let text = program.text();
    let start = text.find(".reg").expect("registers are declared");
    let lines = text[start..].lines().map(str::trim).filter(|line| !line.starts_with(".reg"));
    lines.filter(|line| !line.is_empty() && *line != "}").map(|line| format!("{line}\n")).collect()
}

#[track_caller]
fn check<A>(program: &Program<A>, expected: &str) {
    let body = body(program);
    let expected: String = expected.trim().lines().map(|line| format!("{}\n", line.trim())).collect();
    assert_eq!(body, expected, "\n{body}");
}

#[test]
fn a_loop_over_rows() {
    check(
        &scale_rows(),
        "
        mov.u32 %u0, fc_shared;
        ld.param.u32 %u1, [p_rows];
        ld.param.f32 %f0, [p_factor];
        ld.param.u64 %ud0, [p_data];
        mov.u32 %u2, %tid.x;
        mov.u32 %u3, %ctaid.x;
        mov.u32 %u4, %nctaid.x;
        mad.lo.u32 %u5, %u3, 64, %u2;
        mov.u32 %u6, %u5;
        mul.lo.u32 %u7, %u4, 64;
        L1_while:
        setp.lt.u32 %p0, %u6, %u1;
        @!%p0 bra L2_done;
        mul.wide.u32 %ud1, %u6, 4;
        add.u64 %ud2, %ud0, %ud1;
        ld.global.f32 %f1, [%ud2];
        mul.f32 %f2, %f1, %f0;
        st.global.f32 [%ud2], %f2;
        add.u32 %u8, %u6, %u7;
        mov.u32 %u6, %u8;
        bra L1_while;
        L2_done:
        ret;
        ",
    );
}

#[test]
fn a_product_of_a_warpgroup() {
    let program = product();
    let ops: Vec<_> = body(&program).lines().filter(|l| l.contains("wgmma")).map(short).collect();
    let step = "wgmma.mma_async.sync.aligned.m64n64k16.f32.bf16.bf16";
    assert_eq!(
        ops,
        [
            "wgmma.fence.sync.aligned",
            step,
            step,
            "wgmma.commit_group.sync.aligned",
            "wgmma.fence.sync.aligned",
            step,
            "wgmma.commit_group.sync.aligned",
            "wgmma.wait_group.sync.aligned",
            "wgmma.wait_group.sync.aligned",
        ]
    );
    let waits: Vec<_> =
        body(&program).lines().filter(|l| l.contains("wait_group")).map(str::to_owned).collect();
    assert!(waits[0].ends_with(" 1;") && waits[1].ends_with(" 0;"), "each token knows its group: {waits:?}");
}

fn short(line: &str) -> String {
    line.split([' ', ';']).next().unwrap_or_default().to_owned()
}

/// Moving a line changes where instructions come from and nothing else.
#[test]
fn moving_lines_changes_no_text() {
    let (one, other) = (scale_rows_at_one_line(), scale_rows());
    assert_eq!(one.text(), other.text());
    assert_eq!(one.module(), other.module());
    assert_ne!(one.provenance(), other.provenance());
}

/// Whatever helpers of the language emit, the line is the author's.
#[test]
fn every_line_is_the_authors() {
    for program in [pipeline(), product(), scale_rows()] {
        let statements = program.module().kernels[0].body.len();
        for statement in 0..statements {
            let at = program.provenance().location(0, statement).expect("every statement has a line");
            assert!(at.file.ends_with("tests/programs/samples.rs"), "statement {statement} from {at}");
        }
    }
}

#[test]
fn arguments_follow_the_parameters() {
    let extent = Extent { grid: [7, 1, 1], workspace: vec![], dependent: false };
    let launch = scale_rows().launch(&Rows { rows: 9, factor: 0.5 }, extent);
    assert_eq!((launch.grid, launch.block, launch.cluster), ([7, 1, 1], [64, 1, 1], [1, 1, 1]));
    assert_eq!(launch.params, [Param::U32(9), Param::F32(0.5), Param::Buffer(samples::DATA)]);
    assert_eq!((launch.entry.as_str(), launch.shared_bytes), ("fc_sample", 0));
}

#[test]
fn a_launch_keeps_what_it_was_given() {
    let scratch = Workspace { slot: Slot(5), bytes: 64, zeroed: true };
    let extent = Extent { grid: [1, 2, 3], workspace: vec![scratch], dependent: true };
    let program = pipeline();
    let launch = program.launch(&Rows { rows: 128, factor: 1.0 }, extent);
    assert!(launch.dependent && launch.workspace == [scratch] && launch.block == [384, 1, 1]);
    assert_eq!(launch.shared_bytes, 3 * 8192 + 6 * 8);
    assert!(matches!(&launch.params[1], Param::TensorMap(map) if map.dims == [64, 128, 1, 1]));
}

/// What a program says of itself is what its text says.
#[test]
fn text_reads_back_as_the_module() {
    for program in [scale_rows(), product(), pipeline()] {
        let parsed = flashcore_ptx::parse::parse(program.text()).unwrap();
        assert_eq!(&parsed.module, program.module());
    }
}
