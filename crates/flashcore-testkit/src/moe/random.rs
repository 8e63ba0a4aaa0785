//! Random legal layers: extents, layouts, routings and options from a seed, all supported on GPUs.

use flashcore_core::{Activation, DType, GateUp, Groups, Index, Score, Shard, Sigmoid};

use super::cases::{Case, Traffic};
use crate::rng::Rng;

const TOKENS: [usize; 10] = [1, 2, 3, 7, 16, 33, 64, 100, 150, 260];
const EXPERTS: [usize; 8] = [1, 2, 2, 3, 4, 5, 8, 33];
/// Features of a token and of an expert.
const FEATURES: [usize; 9] = [8, 16, 40, 64, 72, 128, 136, 192, 264];
const ACTIVATIONS: [Activation; 3] = [Activation::SwiGlu, Activation::GeGlu, Activation::OSS];
const GIVEN: [Traffic; 5] =
    [Traffic::Random, Traffic::Random, Traffic::OneExpert, Traffic::Repeated, Traffic::Outside];

/// The `index`-th random layer of a seed.
pub fn random(seed: u64, index: u64) -> Case {
    let mut rng = Rng::new(seed.wrapping_mul(0x4000_0001).wrapping_add(index));
    let experts = rng.pick(&EXPERTS);
    let top_k = rng.pick(&[1, 2, 4]).min(experts);
    let shard = rng.one_in(4).then(|| Shard { first: rng.range(0..=3), of: experts + 4 });
    Case {
        name: "random",
        tokens: rng.pick(&TOKENS),
        hidden: rng.pick(&FEATURES),
        intermediate: rng.pick(&FEATURES),
        experts,
        top_k,
        traffic: traffic(&mut rng, shard.map_or(experts, |shard| shard.of)),
        ids: if rng.one_in(2) { Index::I32 } else { Index::I64 },
        routing: rng.pick(&[DType::F32, DType::BF16]),
        order: if rng.one_in(2) { GateUp::Halves } else { GateUp::Interleaved },
        transposed: rng.one_in(4),
        activation: rng.pick(&ACTIVATIONS),
        biases: rng.one_in(3),
        shard,
        shared: rng.one_in(5).then(|| rng.pick(&FEATURES)),
        padding: rng.pick(&[0, 0, 8]),
        batch_invariant: rng.one_in(6),
    }
}

/// Who goes where, among `all` experts.
fn traffic(rng: &mut Rng, all: usize) -> Traffic {
    let grouped =
        Sigmoid { bias: true, groups: Some(Groups { count: 2, top: 1 }), renormalise: true, scale: 2.5 };
    match rng.range(0..=7) {
        0 => Traffic::Logits(Score::Softmax),
        1 => Traffic::Logits(Score::SoftmaxOfChosen),
        // Each group has as many experts as a token may choose.
        2 if all.is_multiple_of(2) && all >= 8 => Traffic::Logits(Score::Sigmoid(grouped)),
        2 => Traffic::Logits(Score::Sigmoid(Sigmoid::PLAIN)),
        _ => rng.pick(&GIVEN),
    }
}
