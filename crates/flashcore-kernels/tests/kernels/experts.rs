//! Mixtures of experts and grouped products in the simulator, against the f64 oracle of the testkit.

use flashcore_core::{Activation, DType, Routing};
use flashcore_kernels::{
    Gpu, covering_experts,
    moe::{Cut, product, product_sm90},
};
use flashcore_lab::simulator::Simulator;
use flashcore_testkit::{Outcome, grouped, moe};

use super::simulator::all_pass;

/// The mixtures of experts of the covering set.
#[test]
fn covering_experts_are_right_under_every_schedule() {
    let problems = covering_experts().unwrap();
    all_pass(&problems, |(n, problem)| {
        let gpu = [Gpu::HOPPER, Gpu::CONSUMER][n % 2];
        let traffic = match problem.routing() {
            Routing::Given { .. } => moe::Traffic::Repeated,
            Routing::Computed { score, .. } => moe::Traffic::Logits(*score),
        };
        let outcome = moe::check_problem(&Simulator::seeded(gpu, n as u64), problem, traffic, n as u64);
        (outcome != Outcome::Passed).then(|| format!("{problem:?}: {outcome}"))
    });
}

/// The suite of mixtures of experts: every step under hostile schedules.
#[test]
fn experts_are_right_under_every_schedule() {
    let (cases, dtypes) = (moe::cases(), [DType::BF16, DType::F16]);
    let gpus = [Gpu::HOPPER, Gpu::CONSUMER];
    let work: Vec<_> = (0..gpus.len()).flat_map(|gpu| cases.iter().map(move |case| (gpu, case))).collect();
    all_pass(&work, |(n, &(gpu, case))| {
        let simulator = Simulator::seeded(gpus[gpu], n as u64);
        let outcome = moe::check(&simulator, case, dtypes[(n + gpu) % 2], 1);
        // Rows that are not whole chunks are the reason not to take a case.
        let taken = (case.hidden | case.intermediate | case.padding) % 8 == 0;
        let passed = outcome == Outcome::Passed || (!taken && !outcome.is_failure());
        (!passed).then(|| format!("{case} on {:?}: {outcome}", gpus[gpu].capability))
    });
}

/// Grouped products: the covering set, the suite and random cases, under hostile schedules.
#[test]
fn grouped_products_are_right_under_every_schedule() {
    let random = (0..12).map(|n| grouped::random(5, n));
    let cases: Vec<_> = grouped::cases().into_iter().chain(random).collect();
    all_pass(&cases, |(n, case)| {
        let simulator = Simulator::seeded([Gpu::HOPPER, Gpu::CONSUMER][n % 2], n as u64);
        let outcome = grouped::check(&simulator, case, [DType::BF16, DType::F16][n / 2 % 2], 1);
        // Lines that are not whole chunks, and offsets along them, are the reasons not to take a case.
        let taken = case.padding % 8 == 0 && case.rows != 19 && case.name != "depth of contiguous rows";
        let passed = outcome == Outcome::Passed || (!taken && !outcome.is_failure());
        (!passed).then(|| format!("{case}: {outcome}"))
    });
}

/// Grouped products by the kernel for Hopper, which rules keep for many rows: the suite and random cases, by CTAs that have
/// several tiles each.
#[test]
fn grouped_products_of_warpgroups_are_right_under_every_schedule() {
    let random = (0..24).map(|n| grouped::random(7, n));
    let cases: Vec<_> = grouped::cases().into_iter().chain(random).collect();
    all_pass(&cases, |(n, case)| {
        let (tile_n, stages) = [(256, 4), (64, 3), (128, 6), (192, 4)][n % 4];
        let cut = Cut::Sm90(product_sm90::Shape { tile_n, turns: false, stages, pair: false, rows: 128 });
        let simulator = Simulator::seeded(Gpu { sms: 2, ..Gpu::HOPPER }, n as u64).cutting_groups(cut);
        let outcome = grouped::check(&simulator, case, [DType::BF16, DType::F16][n / 2 % 2], 1);
        // As above; and tensor copies know no tensor without elements.
        let taken = case.padding % 8 == 0 && case.rows != 19 && case.name != "depth of contiguous rows";
        let passed = outcome == Outcome::Passed || ((!taken || case.depth == 0) && !outcome.is_failure());
        (!passed).then(|| format!("{case}: {outcome}"))
    });
}

/// Experts with many tokens on Hopper, cut in every way, by CTAs that have several tiles each.
#[test]
fn experts_with_many_tokens_are_right_under_every_schedule() {
    let case = |name| moe::cases().into_iter().find(|case| case.name == name).unwrap();
    let (many, padded) = (case("many tokens per expert"), case("many tokens per expert, padded"));
    let hopper = |tile_n, turns, stages, pair, rows| {
        Cut::Sm90(product_sm90::Shape { tile_n, turns, stages, pair, rows })
    };
    let cut = |tile_n, turns, stages| hopper(tile_n, turns, stages, false, 128);
    let pair = |tile_n, turns, stages| hopper(tile_n, turns, stages, true, 128);
    let past = |rows, stages| [hopper(128, false, stages, false, rows); 2];
    let work = [
        (
            moe::Case { activation: Activation::OSS, biases: true, ..many },
            [cut(256, false, 4), cut(192, true, 4)],
        ),
        (moe::Case { traffic: moe::Traffic::OneExpert, ..many }, [cut(192, true, 3), cut(256, false, 3)]),
        (moe::Case { tokens: 40, ..many }, [cut(192, false, 5), cut(128, true, 4)]),
        (moe::Case { tokens: 300, ..many }, [pair(256, false, 4), pair(192, true, 4)]),
        (moe::Case { tokens: 300, ..many }, [pair(192, true, 4), pair(256, false, 3)]),
        (moe::Case { traffic: moe::Traffic::OneExpert, ..padded }, [pair(128, false, 3), cut(128, true, 4)]),
        (padded, [cut(128, true, 6), cut(64, false, 5)]),
        (moe::Case { activation: Activation::OSS, biases: true, tokens: 9, ..many }, past(16, 6)),
        (moe::Case { tokens: 40, ..padded }, past(32, 5)),
        (moe::Case { tokens: 100, traffic: moe::Traffic::OneExpert, ..many }, past(64, 4)),
        (moe::Case { tokens: 2, ..many }, past(16, 3)),
        (moe::Case { tokens: 60, ..padded }, [hopper(256, false, 5, false, 32); 2]),
    ];
    all_pass(&work, |(n, (case, cuts))| {
        let gpu = Gpu { sms: 4, ..Gpu::HOPPER };
        let simulator = Simulator::seeded(gpu, n as u64).cutting_experts(*cuts);
        let outcome = moe::check(&simulator, case, [DType::BF16, DType::F16][n % 2], 1);
        (outcome != Outcome::Passed).then(|| format!("{case}, cut {cuts:?}: {outcome}"))
    });
}

/// Experts with few tokens, stages of several lines and tiles of few features among them.
#[test]
fn experts_with_few_tokens_are_right_however_they_are_cut() {
    let case = |name| moe::cases().into_iter().find(|case| case.name == name).unwrap();
    let (many, padded) = (case("many tokens per expert"), case("many tokens per expert, padded"));
    let cut = |tile_m, tile_n, warps, [stages, ctas_per_sm, lines]: [u32; 3]| {
        Cut::General(product::Shape { tile_m, tile_n, warps, stages, ctas_per_sm, lines })
    };
    let work = [
        (moe::Case { tokens: 1, ..many }, [cut(16, 64, [1, 2], [5, 2, 2]), cut(16, 32, [1, 2], [3, 2, 4])]),
        (moe::Case { tokens: 9, ..many }, [cut(16, 128, [1, 4], [3, 2, 2]), cut(16, 128, [1, 4], [3, 1, 4])]),
        (
            moe::Case { tokens: 40, ..padded },
            [cut(64, 64, [2, 2], [3, 2, 2]), cut(64, 256, [2, 4], [2, 2, 1])],
        ),
    ];
    all_pass(&work, |(n, (case, cuts))| {
        let simulator = Simulator::seeded(Gpu::HOPPER, n as u64).cutting_experts(*cuts);
        let outcome = moe::check(&simulator, case, [DType::BF16, DType::F16][n % 2], 1);
        (outcome != Outcome::Passed).then(|| format!("{case}, cut {cuts:?}: {outcome}"))
    });
}
