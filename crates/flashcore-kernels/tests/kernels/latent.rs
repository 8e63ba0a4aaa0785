//! Kernels for what FlashAttention-3's callers ask for beside plain attention: rows of latents, whose values are a part of the
//! keys, in pages, and 16-bit queries over packed keys and values of 8 bits, as 8-bit queries become.

use std::error::Error;

use flashcore_core::{
    DType, Dims, Element, HostCall, Instance, Layout, Lengths, Mask, PageTable, Pages, Sequences, Spec,
    Values,
};
use flashcore_kernels::{Gpu, plan};
use flashcore_lab::simulator::{self, Simulator};
use flashcore_testkit::{Answer, Rng, Rows, Rule, plain};
use half::bf16;

use crate::simulator::all_pass;

/// Features of a row of latents, and of its values.
const ROW: usize = 576;
const VALUES: usize = 512;

const GPUS: [Gpu; 6] =
    [Gpu::AMPERE, Gpu::CONSUMER, Gpu::ADA, Gpu::HOPPER, Gpu::BLACKWELL, Gpu::BLACKWELL_RTX];

/// Pages of one key head whose values are the first features of the keys.
fn latents(q: Layout, page: usize, sequences: Sequences) -> Spec {
    let pool = |dim| Layout::strided(Dims::new(100, 1, page, dim), [page * ROW, ROW, ROW, 1]).unwrap();
    let pages = Some(Pages::new(4096 / page));
    Spec { sequences, pages, mask: Mask::CAUSAL, ..Spec::new(DType::BF16, q, pool(ROW), pool(VALUES)) }
}

#[track_caller]
fn check(spec: Spec, gpu: &Gpu, name: &str) {
    let plan = plan(&spec.parse().unwrap(), gpu, 16).unwrap_or_else(|error| panic!("{error} on {gpu:?}"));
    assert!(plan.kernel().name().contains(name), "{plan}");
    for launch in plan.launches() {
        let spec = launch.spec(&launch.kernel().program().unwrap());
        assert!(spec.is_none_or(|spec| spec.shared_bytes <= gpu.shared_bytes), "{plan}");
    }
}

#[test]
fn rows_of_latents_have_kernels() {
    let single = Layout::bshd(Dims::new(3, 16, 1, ROW)).unwrap();
    let packed = Layout::bshd(Dims::new(1, 16, 300, ROW)).unwrap();
    let used = Sequences::Used { q: false, kv: true };
    let queries = Sequences::PackedQueries { count: 3, longest_q: 300 };
    for gpu in &GPUS {
        for page in [1, 16, 64] {
            for (q, sequences) in [(single, used), (packed, queries)] {
                let spec = latents(q, page, sequences);
                check(spec.clone(), gpu, "_bf16_d576v512_");
                check(spec.over(DType::E4M3), gpu, "_bf16_e4m3_d576v512_");
            }
        }
    }
}

#[test]
fn packed_sequences_of_8_bits_have_kernels() {
    let layout = |heads, dim| Layout::bshd(Dims::new(1, heads, 300, dim)).unwrap();
    let sequences = Sequences::Ragged { count: 3, longest_q: 200, longest_kv: 200 };
    for gpu in &GPUS {
        for [qk, v] in [[64, 64], [128, 128], [192, 128], [256, 256]] {
            let plain = Spec::new(DType::BF16, layout(8, qk), layout(2, qk), layout(2, v));
            let spec = Spec { sequences, mask: Mask::CAUSAL, ..plain };
            check(spec.over(DType::E4M3), gpu, &format!("_bf16_e4m3_d{qk}v{v}_"));
        }
    }
}

/// Keys and values of one memory, in 16-bit rows that are wider than the smallest CTAs have threads, on every kind of GPU.
#[test]
fn rows_of_latents_are_right() {
    let (queries, keys) = ([0, 1, 6, 6], [20, 33, 7]);
    let q = Layout::bshd(Dims::new(1, 4, 6, ROW)).unwrap();
    let sequences = Sequences::PackedQueries { count: 3, longest_q: 5 };
    let table = [3, 9, 4, -1, -1, 0, 7, 2, 5, 11, 1, -1, -1, -1, -1];
    let values = Values {
        lengths: Lengths::packed_queries(queries, keys),
        table: Some(PageTable::new(table, 5)),
        ..Values::default()
    };
    let problem = latents(q, 8, sequences).with(&values).parse().unwrap();
    let mut rng = Rng::new(5);
    let [q, rows] = [problem.q(), problem.k()]
        .map(|layout| (0..layout.span()).map(|_| bf16::from_f32(rng.normal())).collect::<Vec<_>>());
    let instance = Instance::new(&problem, &values).unwrap();
    let erased = [&q, &rows, &rows].map(|tensor| bf16::erase(tensor));
    let [exact, rounded] =
        [plain::reference, plain::yardstick].map(|plain| plain(instance, erased, Rows::ALL));
    all_pass(&GPUS, |(n, &gpu)| {
        let plan = plan(&problem, &gpu, 16).unwrap();
        let (mut out, mut lse) = (vec![bf16::NAN; problem.out().span()], vec![f32::NAN; problem.rows()]);
        let inputs = [&q[..], &rows, &rows];
        let mut call = HostCall::bind(&problem, &values, inputs, &mut out, Some(&mut lse)).unwrap();
        let outcome = Simulator::seeded(gpu, n as u64).launch(&mut call, &plan).unwrap().unwrap();
        let answer = Answer::gather(&problem, bf16::erase(&out), Some(&lse), Rows::ALL);
        let verdict = Rule::of(&problem).judge(&answer, &exact, &rounded);
        let faults = simulator::judge(&outcome).err().map(|error| format!("{error}: {:?}", error.source()));
        faults
            .or(verdict.reason.map(|reason| reason.to_string()))
            .map(|reason| format!("{}: {reason}", plan.kernel().name()))
    });
}
