//! Which kernel is chosen for what, without a GPU, and how refusals read.

use flashcore_core::{
    BackwardSpec, DType, Dims, ExpertLayout, GroupedSpec, Grouping, Index, Layout, Mask, MoeSpec, Pages,
    Problem, Routing, Sequences, Spec,
};
use flashcore_kernels::{
    Choice, Family, Gpu, KernelConfig, Plan, PlanError, Tile, backward_rows, covering_set,
    forward_sm80::Shape, plan, plan_backward, plan_general, plan_grouped, plan_moe, plan_tile,
};

fn spec(dtype: DType, [heads_q, heads_kv, seq_q, seq_kv]: [usize; 4], dim: usize) -> Spec {
    let layout = |heads, seq| Layout::bshd(Dims::new(2, heads, seq, dim)).unwrap();
    Spec::new(dtype, layout(heads_q, seq_q), layout(heads_kv, seq_kv), layout(heads_kv, seq_kv))
}

fn problem(dim: usize) -> Problem {
    spec(DType::BF16, [4, 2, 1000, 1000], dim).parse().unwrap()
}

fn consumer(capability: (u32, u32)) -> Gpu {
    Gpu { capability, ..Gpu::CONSUMER }
}

/// Kernel names begin with `name`, and the plan says `why` among its reasons.
#[track_caller]
fn check(problem: &Problem, gpu: Gpu, alignment: u64, name: &str, why: &str) {
    let plan = plan(problem, &gpu, alignment).unwrap();
    assert!(plan.kernel().name().starts_with(name), "{plan}");
    assert!(plan.explain().contains(why), "{plan}");
}

#[test]
fn the_kernel_follows_the_architecture() {
    for (gpu, name) in [
        (Gpu::HOPPER, "fc_forward_sm_90a_bf16_d128v128"),
        (Gpu::AMPERE, "fc_forward_sm_80_bf16_d128v128_w4x2n32x32"),
        (Gpu::BLACKWELL, "fc_forward_sm_100_bf16_d128v128_w4x2n64x32"),
        (consumer((8, 6)), "fc_forward_sm_86_bf16_d128v128_w4x1n32x32"),
        (consumer((8, 7)), "fc_forward_sm_86_"),
        (consumer((8, 9)), "fc_forward_sm_89_"),
        (consumer((12, 0)), "fc_forward_sm_120_"),
        (Gpu { capability: (10, 3), ..Gpu::BLACKWELL }, "fc_forward_sm_100_"),
    ] {
        check(&problem(128), gpu, 16, name, "");
    }
}

#[test]
fn grouped_products_of_many_rows_are_for_warpgroups() {
    let check = |grouping, [a, b]: [ExpertLayout; 2], gpu: Gpu, name: &str, why: &str| {
        let problem = GroupedSpec::new(DType::BF16, a, b, grouping).parse().unwrap();
        let plan = plan_grouped(&problem, &gpu, 16).unwrap();
        assert!(plan.kernel().name().starts_with(name) && plan.explain().contains(why), "{plan}");
    };
    let dense = |extents| ExpertLayout::dense(extents).unwrap();
    let turned = |extents| ExpertLayout::transposed(extents).unwrap();
    let rows = |rows, depth, columns| [dense([1, rows, depth]), turned([8, depth, columns])];
    let many = "fc_grouped_sm_90a_bf16_rows_along_along_m128n256s4";
    check(Grouping::Rows, rows(16384, 4096, 14336), Gpu::HOPPER, many, "by warpgroups");
    // Fewer tiles than SMs: narrower ones.
    check(
        Grouping::Rows,
        rows(512, 4096, 1024),
        Gpu::HOPPER,
        "fc_grouped_sm_90a_bf16_rows_along_along_m128n128",
        "",
    );
    check(Grouping::Rows, rows(256, 4096, 14336), Gpu::HOPPER, "fc_grouped_bf16_rows_", "64 rows");
    check(Grouping::Rows, rows(16384, 4096, 40), Gpu::HOPPER, "fc_grouped_bf16_rows_", "not by warpgroups");
    check(Grouping::Rows, rows(16384, 40, 4096), Gpu::HOPPER, "fc_grouped_bf16_rows_", "not by warpgroups");
    check(Grouping::Rows, rows(16384, 4096, 14336), Gpu::AMPERE, "fc_grouped_bf16_rows_", "square tiles");
    let depth = [turned([1, 4096, 16384]), dense([1, 16384, 14336])];
    check(
        Grouping::Depth { groups: 8 },
        depth,
        Gpu::HOPPER,
        "fc_grouped_sm_90a_bf16_depth_across_across_",
        "",
    );
    let columns = [dense([8, 14336, 4096]), turned([1, 4096, 16384])];
    check(Grouping::Columns, columns, Gpu::HOPPER, "fc_grouped_sm_90a_bf16_rows_along_along_turned_", "");
    let batch = [turned([8, 4096, 512]), dense([8, 512, 512])];
    check(Grouping::Batch, batch, Gpu::HOPPER, "fc_grouped_sm_90a_bf16_batch_across_across_", "");
}

/// Which kernels multiply, for layers as models have them: hidden, intermediate, experts, experts of a token.
#[test]
fn products_of_experts_follow_the_tokens_of_each() {
    let (qwen, mixtral, oss) = ([2048, 768, 128, 8], [4096, 14336, 8, 2], [2880, 2880, 128, 4]);
    let check = |[hidden, intermediate, experts, top_k]: [usize; 4],
                 tokens,
                 batch_invariant,
                 ends: [&str; 2]| {
        let dense = |extents| ExpertLayout::dense(extents).unwrap();
        let weights = [dense([experts, 2 * intermediate, hidden]), dense([experts, hidden, intermediate])];
        let routing = Routing::Given { ids: Index::I32, weights: DType::F32, top_k };
        let x = Layout::matrix(tokens, hidden).unwrap();
        let spec = MoeSpec::new(DType::BF16, x, weights[0], weights[1], routing);
        let problem = MoeSpec { batch_invariant, ..spec }.parse().unwrap();
        let plan = plan_moe(&problem, &Gpu::HOPPER, 16).unwrap();
        let names: Vec<_> = plan.launches().iter().map(|launch| launch.kernel().name()).collect();
        let products: Vec<_> = names.iter().filter(|n| n.contains("_up_") || n.contains("_down_")).collect();
        assert!(products.iter().zip(ends).all(|(name, end)| name.ends_with(end)), "{tokens} tokens: {plan}");
    };
    check(qwen, 1, false, ["m16n64w1x2s8c2", "m16n64w1x2s8c2"]);
    check(mixtral, 1, false, ["m16n64w1x2s5c1l4", "m16n64w1x2s5c1l4"]);
    check(oss, 1, false, ["m16n128w1x4s3c2l2", "m16n32w1x2s6c2l2"]);
    check(qwen, 16, false, ["m16n64w1x2s5c2l2", "m16n64w1x2s5c2l2"]);
    check(mixtral, 16, false, ["sm_90a_bf16_whole_m16n128s6", "m16n128w1x4s6c2"]);
    check(mixtral, 16, true, ["m16n64w1x2s5c2l2", "m16n64w1x2s5c2l2"]);
    check(mixtral, 128, false, ["sm_90a_bf16_whole_m64n128s4", "sm_90a_bf16_whole_m64n128s4"]);
    check(mixtral, 128, true, ["m64n128w2x2s4c2", "m64n128w2x2s4c2"]);
    check(mixtral, 8192, false, ["whole_pair_m128n256s4", "whole_pair_m128n256s4"]);
}

#[test]
fn hopper_falls_back_and_says_why() {
    let plain = spec(DType::F16, [4, 2, 300, 300], 64);
    let one = |heads| Layout::bshd(Dims::new(1, heads, 300, 64)).unwrap();
    let ragged = Spec {
        sequences: Sequences::Ragged { count: 2, longest_q: 200, longest_kv: 200 },
        ..Spec::new(DType::F16, one(4), one(2), one(2))
    };
    let odd = Layout::strided(Dims::new(2, 4, 300, 64), [4 * 300 * 65, 300 * 65, 65, 1]).unwrap();
    let empty = spec(DType::F16, [4, 2, 300, 0], 64);
    let dims = |dim| spec(DType::F16, [4, 2, 300, 300], dim);
    for (spec, alignment, name, why) in [
        (plain.clone(), 16, "fc_forward_sm_90a_", ""),
        (plain.clone(), 8, "fc_forward_sm_90_", "not forward_sm90: tensor copies need"),
        (Spec { q: odd, ..plain }, 16, "fc_forward_sm_90_", "multiples of 16 bytes"),
        (ragged, 16, "fc_forward_sm_90a_", ""),
        (empty, 16, "fc_forward_sm_90_", "cannot be empty"),
        (dims(59), 16, "fc_forward_sm_90_f16_d59v59_", "multiples of 8 up to 256"),
        (dims(320), 16, "fc_forward_sm_90_f16_d320v320_", "multiples of 8 up to 256"),
    ] {
        check(&spec.parse().unwrap(), Gpu::HOPPER, alignment, name, why);
    }
}

/// A cache of 8 bits has its own tiles for few queries, the general kernel for many, and is refused where nobody widens it.
#[test]
fn caches_of_8_bits_have_kernels() {
    let cache = |[seq_q, seq_kv]: [usize; 2], dim| {
        spec(DType::BF16, [8, 2, seq_q, seq_kv], dim).over(DType::E4M3).parse().unwrap()
    };
    let (few, many) = (cache([1, 8192], 128), cache([300, 300], 128));
    for (problem, gpu, name, why) in [
        (&few, Gpu::HOPPER, "fc_decode_sm_90_bf16_e4m3_d128v128_w", "few queries"),
        (&few, Gpu::AMPERE, "fc_decode_sm_80_bf16_e4m3_d128v128_w4x1n32s2c2", "over 8 bits"),
        (&many, Gpu::HOPPER, "fc_forward_sm_90_bf16_e4m3_d128v128_", "of the queries' type"),
        (&cache([1, 8192], 40), Gpu::HOPPER, "fc_forward_sm_90_bf16_e4m3_d40v40_", "of the queries' type"),
    ] {
        check(problem, gpu, 16, name, why);
    }
    for (problem, gpu, alignment, why) in [
        (&cache([300, 300], 59), Gpu::HOPPER, 16, "from even addresses and by even strides"),
        (&many, Gpu::HOPPER, 1, "from even addresses"),
        (&many, Gpu::TURING, 16, "7.5"),
    ] {
        let error = plan(problem, &gpu, alignment).unwrap_err().to_string();
        assert!(error.contains(why), "{error}");
    }
}

/// What the general kernel's tiles are on each kind of GPU: as much as its shared memory holds.
#[test]
fn tiles_follow_shared_memory() {
    for (gpu, tiles) in [
        (Gpu::TURING, ["w4x2n32x32s2c2q", "w4x1n16x16s2c2q", "w4x1n16x16s2c1", ""]),
        (Gpu::AMPERE, ["w4x2n128x64s2c2q", "w4x2n32x32s2c2", "w8x1n32x32s2c1", "w8x1n16x16s2c1"]),
        (Gpu::CONSUMER, ["w4x2n64x64s2c2q", "w4x1n32x32s2c2q", "w4x1n32x32s2c1", "w4x1n16x16s2c1"]),
        (Gpu::ADA, ["w4x2n64x64s2c2q", "w4x1n32x32s2c2q", "w4x1n32x32s2c1", "w4x1n16x16s2c1"]),
        (Gpu::HOPPER, ["w4x2n128x64s2c2q", "w4x2n64x32s2c2", "w8x1n64x64s2c1", "w8x1n32x32s2c1"]),
        (Gpu::BLACKWELL, ["w4x2n128x64s2c2q", "w4x2n64x32s2c2", "w8x1n64x64s2c1", "w8x1n32x32s2c1"]),
        (Gpu::BLACKWELL_RTX, ["w4x2n64x64s2c2q", "w4x1n32x32s2c2q", "w4x1n32x32s2c1", "w4x1n16x16s2c1"]),
    ] {
        for (dim, tile) in [64, 128, 256, 512].into_iter().zip(tiles) {
            let problem = spec(DType::F16, [4, 2, 1000, 1000], dim).parse().unwrap();
            let Ok(plan) = plan_general(&problem, &gpu, 16) else {
                assert_eq!(tile, "", "{dim} features on {gpu:?}");
                continue;
            };
            let target = format!("fc_forward_sm_{}{}_", gpu.capability.0, gpu.capability.1);
            let name = plan.kernel().name();
            assert!(name.starts_with(&target) && name.contains(&format!("_{tile}_")), "{plan} on {gpu:?}");
            let launch = plan.launches()[0].spec(&plan.kernel().program().unwrap()).unwrap();
            assert!(launch.shared_bytes <= gpu.shared_bytes, "{plan}");
        }
    }
}

/// An f32 output is written by address, its alignment counts in its own elements, and what accumulates waits for the
/// kernel before, whose output it reads.
#[test]
fn f32_outputs_have_kernels_of_their_own() {
    let padded = |more: usize| {
        let row = 64 + more;
        Layout::strided(Dims::new(2, 4, 300, 64), [4 * 300 * row, 300 * row, row, 1]).unwrap()
    };
    let wide = |more, accumulate| {
        let plain = spec(DType::F16, [4, 2, 300, 300], 64);
        Spec { out: Some(padded(more)), out_dtype: Some(DType::F32), accumulate, ..plain }.parse().unwrap()
    };
    let name = |problem: &Problem| plan(problem, &Gpu::HOPPER, 16).unwrap().kernel().name();
    assert!(
        name(&wide(4, false)).starts_with("fc_forward_sm_90a_") && name(&wide(4, false)).ends_with("_to_f32")
    );
    assert!(name(&wide(4, true)).ends_with("_to_f32_acc"));
    assert!(
        name(&wide(2, false)).starts_with("fc_forward_sm_90_")
            && name(&wide(2, false)).ends_with("_to_f32_a8")
    );
    assert!(name(&wide(1, true)).ends_with("_to_f32_acc_a4"));
    let few = Spec { out_dtype: Some(DType::F32), ..spec(DType::F16, [4, 4, 64, 300], 64) };
    for accumulate in [false, true] {
        let plan = plan(&Spec { accumulate, ..few.clone() }.parse().unwrap(), &Gpu::HOPPER, 16).unwrap();
        let KernelConfig::Sm90(cfg) = plan.kernel() else { panic!("{plan}") };
        assert_eq!(cfg.policy.producer_waits, !accumulate, "{plan}");
    }
}

#[test]
fn masks_that_show_few_keys_get_short_steps() {
    let masked = |seq, mask, sequences| {
        let spec = Spec { mask, sequences, ..spec(DType::BF16, [64, 64, seq, seq], 128) };
        spec.parse().unwrap()
    };
    let (short, usual) =
        ("fc_forward_sm_90a_bf16_d128v128_g2n64s4", "fc_forward_sm_90a_bf16_d128v128_g2n128s2");
    let (window, used) = (Mask::window(1023, 0), Sequences::Used { q: true, kv: true });
    for (seq, mask, sequences, name, why) in [
        (1024, Mask::CAUSAL, Sequences::Uniform, short, "rows see few keys"),
        (4096, window, Sequences::Uniform, short, "rows see few keys"),
        (1024, Mask::NONE, Sequences::Uniform, usual, ""),
        (2048, Mask::CAUSAL, Sequences::Uniform, usual, ""),
        (1024, Mask::CAUSAL, used, usual, ""),
    ] {
        check(&masked(seq, mask, sequences), Gpu::HOPPER, 16, name, why);
    }
}

/// Two tiles share a CTA where there are two for nearly every SM, all of them long and alike.
#[test]
fn pairs_of_tiles_share_a_cta() {
    let (pair, one) = ("fc_forward_sm_90a_f16_d64v64_g2n128s2q1", "fc_forward_sm_90a_f16_d64v64_g1n");
    for ([heads, seq], mask, softcap, name, why) in [
        ([4, 2048], Mask::NONE, None, pair, "alternate"),
        ([8, 1000], Mask::NONE, None, pair, "alternate"),
        ([7, 1024], Mask::NONE, None, pair, "alternate"),
        ([6, 1024], Mask::NONE, None, one, "two CTAs"),
        ([16, 512], Mask::NONE, None, one, "two CTAs"),
        ([4, 2048], Mask::CAUSAL, None, one, "two CTAs"),
        ([4, 2048], Mask::NONE, Some(20.0), one, "two CTAs"),
    ] {
        let spec = Spec { mask, softcap, ..spec(DType::F16, [heads, heads, seq, seq], 64) };
        check(&spec.parse().unwrap(), Gpu::HOPPER, 16, name, why);
    }
}

#[test]
fn what_is_unsupported_says_what_is_supported() {
    let refused = |problem: &Problem, gpu: Gpu| plan(problem, &gpu, 16).unwrap_err();
    let old = Gpu { capability: (7, 0), ..Gpu::AMPERE };
    let single = spec(DType::F32, [4, 2, 100, 100], 64).parse().unwrap();
    let wide = |dim| problem(dim);
    assert_eq!(refused(&problem(64), old), PlanError::Capability { given: (7, 0), needed: (7, 5) });
    assert_eq!(refused(&problem(64), Gpu::TURING), PlanError::Turing(DType::BF16));
    assert_eq!(refused(&single, Gpu::TURING), PlanError::Turing(DType::F32));
    assert_eq!(refused(&wide(513), Gpu::HOPPER), PlanError::HeadDim { qk: 513, v: 513 });
    let tiny = Gpu { shared_bytes: 10_000, ..Gpu::AMPERE };
    assert_eq!(refused(&problem(64), tiny), PlanError::SharedMemory { qk: 64, v: 64, shared_bytes: 10_000 });
    let message = refused(&wide(520), Gpu::HOPPER).to_string();
    assert!(
        message.contains("head dims up to 576 (q, k) and 512 (v)") && message.contains("CPU"),
        "{message}"
    );
}

/// f32 goes to the general kernel, also on Hopper, in a tile that fits on every GPU.
#[test]
fn f32_tensors_have_tiles_everywhere() {
    let single = |dim| spec(DType::F32, [4, 2, 300, 300], dim).parse().unwrap();
    let not_hopper = "not forward_sm90: it supports f16, bf16 and e4m3, not f32";
    check(&single(128), Gpu::HOPPER, 16, "fc_forward_sm_90_f32_d128v128_w4x1n32x32s2c2_full", not_hopper);
    let gpus =
        [Gpu::AMPERE, consumer((8, 6)), consumer((8, 9)), consumer((12, 0)), Gpu::BLACKWELL, Gpu::HOPPER];
    for gpu in gpus {
        for dim in [8, 64, 72, 128, 192, 256] {
            check(&single(dim), gpu, 4, "fc_forward_sm_", "");
        }
    }
    check(
        &single(256),
        consumer((8, 6)),
        16,
        "fc_forward_sm_86_f32_d256v256_w2x1n16x16",
        "a small shared memory",
    );
}

#[test]
fn options_reach_the_kernel() {
    let spec = Spec {
        mask: Mask::window(7, 3),
        softcap: Some(30.0),
        sinks: Some(DType::BF16),
        sequences: Sequences::Used { q: false, kv: true },
        ..spec(DType::F16, [4, 2, 40, 40], 64)
    };
    let KernelConfig::Sm80(cfg) = *plan(&spec.parse().unwrap(), &Gpu::AMPERE, 4).unwrap().kernel() else {
        panic!("an A100 runs the general kernel");
    };
    assert!(cfg.mask.left && cfg.mask.right && cfg.softcap);
    assert_eq!(cfg.sinks, Some(DType::BF16));
    assert_eq!((cfg.access.bytes(), cfg.lengths.name()), (4, "used_kv"));
}

#[test]
fn the_general_kernel_can_be_asked_for() {
    let plan = plan_general(&problem(128), &Gpu::HOPPER, 16).unwrap();
    assert!(plan.kernel().name().starts_with("fc_forward_sm_90_bf16_d128v128_w4x2n64x32"), "{plan}");
    let KernelConfig::Sm80(cfg) = plan.kernel() else { panic!("{plan}") };
    let tile = Tile::Sm80(Shape { tile_n: 32, ..cfg.shape });
    let other = plan_tile(&problem(128), &Gpu::HOPPER, 16, tile).unwrap();
    assert!(other.kernel().name().contains("n32x32"), "{other}");
}

#[test]
fn batch_invariance_keeps_batch_and_heads_out_of_the_choice() {
    let kernel = |batch_invariant: bool, [batch, heads]: [usize; 2], gpu: &Gpu| {
        let layout = Layout::bshd(Dims::new(batch, heads, 500, 64)).unwrap();
        let spec = Spec { batch_invariant, ..Spec::new(DType::F16, layout, layout, layout) };
        *plan(&spec.parse().unwrap(), gpu, 16).unwrap().kernel()
    };
    for gpu in [Gpu::AMPERE, Gpu::HOPPER] {
        let one = kernel(true, [1, 1], &gpu);
        assert!([[1, 64], [64, 1], [64, 64]].into_iter().all(|size| kernel(true, size, &gpu) == one));
    }
    assert_ne!(
        kernel(false, [1, 1], &Gpu::HOPPER),
        kernel(false, [64, 64], &Gpu::HOPPER),
        "otherwise they count"
    );
}

/// Sequences of one token each: their tiles are few, however many rows the batch has.
#[test]
fn tiles_of_ragged_batches_are_those_of_its_sequences() {
    const SEQUENCES: usize = 65_536;
    let layout = Layout::bshd(Dims::new(1, 32, SEQUENCES, 64)).unwrap();
    let sequences = Sequences::Ragged { count: SEQUENCES, longest_q: 1, longest_kv: 1 };
    let problem = Spec { sequences, ..Spec::new(DType::F16, layout, layout, layout) }.parse().unwrap();
    // CTAs of the Hopper kernel are persistent: as many as run at once.
    for (gpu, ctas) in [(Gpu::AMPERE, 32 * SEQUENCES as u64), (Gpu::HOPPER, 2 * 132)] {
        let chosen = plan(&problem, &gpu, 16).unwrap();
        let grid = chosen.launches()[0].spec(&chosen.kernel().program().unwrap()).unwrap().grid;
        assert_eq!(grid.map(u64::from).iter().product::<u64>(), ctas, "{chosen}");
    }
}

/// Prompts and single queries in one packed batch: tiles of prompts follow from the rows, not from the longest sequence.
#[test]
fn mixed_batches_have_a_kernel_for_each_kind() {
    let q = Layout::bshd(Dims::new(1, 32, 900, 128)).unwrap();
    let of = |size: usize, count, longest_q| {
        let pool = Layout::bshd(Dims::new(4096, 8, size, 128)).unwrap();
        let sequences = Sequences::PackedQueries { count, longest_q };
        let pages = Some(Pages::new(512));
        let spec = Spec { out: Some(q), sequences, pages, ..Spec::new(DType::BF16, q, pool, pool) };
        plan(&spec.parse().unwrap(), &Gpu::HOPPER, 16).unwrap()
    };
    let mixed = of(4, 16, 512);
    let [long, short] = mixed.launches() else { panic!("{mixed}") };
    assert!(long.kernel().name().ends_with("_long") && short.kernel().name().contains("_short"), "{mixed}");
    // Seven full tiles at most, and one that is not full for each sequence.
    let grid = long.spec(&long.kernel().program().unwrap()).unwrap().grid;
    assert_eq!(grid, [(7 + 16) * 32, 1, 1], "{mixed}");
    assert!(mixed.explain().contains("it copies pages of a multiple of 8 keys, not of 4"), "{mixed}");
    assert_eq!(of(16, 1, 512).launches().len(), 1, "nothing is mixed");
    assert_eq!(of(16, 16, 4).launches().len(), 1, "all are short");
    // Larger pages are copied as they are, or by as many rows as divide a key tile of 64 too.
    for (size, rows) in [(8, 8), (16, 16), (24, 8), (32, 32), (64, 64), (192, 64)] {
        let mixed = of(size, 16, 512);
        let KernelConfig::Sm90(long) = mixed.kernel() else { panic!("{mixed}") };
        assert_eq!(
            (long.page_rows, long.tile_n(), mixed.passed_over().len()),
            (Some(rows), 64, 0),
            "{mixed}"
        );
    }
    let mixed = of(64, 16, 512);
    let [long, short] = mixed.launches() else { panic!("{mixed}") };
    assert!(long.kernel().name().ends_with("_long") && short.kernel().name().contains("_short"), "{mixed}");
    let [wanted, others] =
        [long, short].map(|one| one.spec(&one.kernel().program().unwrap()).unwrap().workspace);
    assert_eq!(wanted, others, "launches of a plan share their scratch memory");
}

#[test]
fn nothing_to_compute_is_no_launch() {
    let empty = spec(DType::F16, [4, 2, 0, 100], 64).parse().unwrap();
    let chosen = plan(&empty, &Gpu::AMPERE, 16).unwrap();
    assert_eq!(chosen.launches()[0].spec(&chosen.kernel().program().unwrap()), None);
}

#[test]
fn launches_name_only_documented_slots_and_plans_cross_threads() {
    const fn crosses_threads<T: Send + Sync>() {}
    crosses_threads::<Plan>();
    for member in covering_set().unwrap() {
        let plan = member.plan().unwrap();
        let program = plan.kernel().program().unwrap();
        let launch = plan.launches()[0].spec(&program).unwrap();
        assert_eq!(launch.params.len(), program.module().kernels[0].params.len());
        assert!(launch.shared_bytes <= member.gpu.shared_bytes, "{plan}");
        assert!(launch.grid[0] > 0);
    }
}

#[test]
fn a_kernel_can_be_named() {
    let named = |name: &str, gpu: &Gpu| Choice::Kernel(name.parse().unwrap()).plan(&problem(128), gpu, 16);
    assert_eq!(named("forward_sm80", &Gpu::HOPPER), plan_general(&problem(128), &Gpu::HOPPER, 16));
    assert_eq!(named("forward_sm90", &Gpu::HOPPER), plan(&problem(128), &Gpu::HOPPER, 16));
    let refusal = named("forward_sm90", &Gpu::CONSUMER).unwrap_err().to_string();
    let wanted = "forward_sm90: it runs on compute capability 9.0, not 8.6; the kernels are decode, forward_sm90, forward_sm80";
    assert!(refusal.starts_with(wanted), "{refusal}");
    let refusal = named("decode", &Gpu::HOPPER).unwrap_err().to_string();
    assert!(refusal.starts_with("decode: it takes up to 32 queries"), "{refusal}");
    let unknown = "forward_sm42".parse::<Family>().unwrap_err().to_string();
    assert_eq!(
        unknown,
        "there is no kernel `forward_sm42`; the kernels are decode, forward_sm90, forward_sm80"
    );
    for family in Family::ALL {
        assert_eq!(family.name().parse(), Ok(family));
    }
}

#[test]
fn gradients_of_wide_heads_take_two_kernels() {
    let plan = |dtype, dim_qk, dim_v| {
        let layout = |dim| Layout::bhsd(Dims::new(1, 32, 4096, dim)).unwrap();
        let spec = Spec::new(dtype, layout(dim_qk), layout(dim_qk), layout(dim_v));
        plan_backward(&BackwardSpec::new(spec).parse().unwrap(), &Gpu::HOPPER, 16).unwrap()
    };
    let names = |plan: Plan| plan.launches().iter().map(|launch| launch.kernel().name()).collect::<Vec<_>>();
    for (qk, v) in [(256, 256), (192, 128), (192, 192), (160, 160), (136, 64), (64, 248)] {
        for (dtype, half) in [(DType::BF16, "bf16"), (DType::F16, "f16")] {
            let names = names(plan(dtype, qk, v));
            let keys = if v >= qk { "ahead" } else { "paired" };
            for (name, side) in names[1..].iter().zip([keys, "queries"]) {
                let start = format!("fc_backward_sm_90a_{side}_{half}_d{qk}v{v}_");
                assert!(name.starts_with(&start), "{name} does not start with {start}");
            }
        }
    }
    for (qk, v) in [(264, 128), (128, 264), (132, 128)] {
        let plan = plan(DType::BF16, qk, v);
        let wanted = "backward_sm90: its head dims are multiples of 8 up to 256";
        assert_eq!(plan.passed_over(), [wanted], "{qk}/{v}");
    }
}

/// Terms of rows are copied with the queries of a step, and padded to whole steps.
#[test]
fn steps_of_queries_end_where_terms_do() {
    let layout = |dim| Layout::bhsd(Dims::new(1, 32, 4096, dim)).unwrap();
    for (dim, softcap) in [64, 128, 192, 256].into_iter().flat_map(|dim| [(dim, None), (dim, Some(20.0))]) {
        let spec = Spec { softcap, ..Spec::new(DType::F16, layout(dim), layout(dim), layout(dim)) };
        let plan = plan_backward(&BackwardSpec::new(spec).parse().unwrap(), &Gpu::HOPPER, 16).unwrap();
        let KernelConfig::BackwardSm90(keys) = plan.kernel() else { panic!("{}", plan.kernel().name()) };
        let (step, padding) = (keys.shape.step, backward_rows::PADDING);
        assert!(padding.is_multiple_of(step), "{dim} features, {softcap:?}: {step} queries");
    }
}

#[test]
fn long_gradients_of_many_heads_take_one_kernel() {
    let kernel = |spec: Spec| {
        let problem = BackwardSpec::new(spec).parse().unwrap();
        plan_backward(&problem, &Gpu::HOPPER, 16).unwrap().kernel().name()
    };
    let of = |dtype, heads, seq| spec(dtype, [heads, heads, seq, seq], 128);
    let long = of(DType::BF16, 32, 4096);
    let causal = Spec { mask: Mask::CAUSAL, ..long.clone() };
    for spec in [long.clone(), causal, of(DType::BF16, 64, 2048), of(DType::F16, 32, 4096)] {
        let wanted = format!("fc_backward_sm_90a_fused_{}_d128v128", spec.dtype);
        assert!(kernel(spec).starts_with(&wanted), "{wanted}");
    }
    let used = Spec { sequences: Sequences::Used { q: false, kv: true }, ..long.clone() };
    let window = Spec { mask: Mask::window(512, 0), ..long.clone() };
    let capped = Spec { softcap: Some(20.0), ..long };
    let (few_heads, short) = (of(DType::BF16, 1, 4096), of(DType::BF16, 64, 1024));
    for spec in [used, window, capped, few_heads, short] {
        assert!(kernel(spec).starts_with("fc_backward_sm_90a_keys_"));
    }
}
