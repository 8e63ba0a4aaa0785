//! Rounding to 8 bits by the public API: what comes out, what is refused, and attention by way of it.

use flashcore::{
    BackendKind, Error, Factors, Granularity, Lengths, Mask, ProblemError, Tensor, attention, bf16, quantise,
};
use flashcore_testkit::Rng;

fn drawn(dims: [usize; 4], seed: u64) -> Tensor<bf16> {
    let mut rng = Rng::new(seed);
    let count = dims.iter().product();
    Tensor::bhsd((0..count).map(|_| bf16::from_f32(rng.normal())).collect(), dims).unwrap()
}

#[test]
fn factors_serve_attention() {
    let [q, k, v] = [([1, 4, 70, 32], 1), ([1, 2, 90, 32], 2), ([1, 2, 90, 32], 3)].map(|(d, s)| drawn(d, s));
    let exact = attention(q.view(), k.view(), v.view()).mask(Mask::CAUSAL).run_as::<f32>().unwrap();
    let per_head = [
        quantise(q.view()).per(Granularity::PerHead).group(2).run().unwrap(),
        quantise(k.view()).per(Granularity::PerHead).run().unwrap(),
        quantise(v.view()).per(Granularity::PerHead).run().unwrap(),
    ];
    let fine = [
        quantise(q.view()).per(Granularity::PerBlock(16)).run().unwrap(),
        quantise(k.view()).per(Granularity::PerBlock(32)).centred(true).run().unwrap(),
        quantise(v.view()).per(Granularity::PerChannel).run().unwrap(),
    ];
    assert!(fine[1].means.as_ref().is_some_and(|means| means.len() == 64) && fine[0].means.is_none());
    let of = |all: &[flashcore::Quantised<flashcore::E4M3>; 3]| all.each_ref().map(|one| one.factors.clone());
    let both =
        [(&per_head, Factors::per_head(of(&per_head))), (&fine, Factors::per_block([16, 32], of(&fine)))];
    for ([q, k, v], factors) in
        both.map(|(all, factors)| (all.each_ref().map(|one| one.values.view()), factors))
    {
        let call = attention(q, k, v).mask(Mask::CAUSAL).factors(factors).backend(BackendKind::Cpu);
        let out = call.run_as::<f32>().unwrap().out;
        let far = out.data().iter().zip(exact.out.data()).map(|(x, y)| (x - y).abs()).fold(0.0, f32::max);
        assert!(far < 0.2, "{far}");
    }
}

#[test]
fn attention_quantises_by_itself() {
    let [q, k, v] =
        [([2, 2, 40, 32], 4), ([2, 2, 200, 32], 5), ([2, 2, 200, 32], 6)].map(|(d, s)| drawn(d, s));
    let call = attention(q.view(), k.view(), v.view()).lengths(Lengths::keys(vec![200, 30]));
    let (exact, quick) = (call.clone().run().unwrap(), call.clone().run_quantised().unwrap());
    let far = |x: &[f32], y: &[f32]| x.iter().zip(y).map(|(x, y)| (x - y).abs()).fold(0.0, f32::max);
    let wide = |out: &Tensor<bf16>| out.data().iter().map(|x| x.to_f32()).collect::<Vec<_>>();
    assert!(far(&wide(&exact.out), &wide(&quick.out)) < 0.2);
    assert!(far(exact.lse.values(), quick.lse.values()) < 0.2);
    let sunk = call.clone().sinks([1.0, -1.0]).softcap(10.0);
    let (exact, quick) = (sunk.clone().run().unwrap(), sunk.run_quantised().unwrap());
    assert!(far(exact.lse.values(), quick.lse.values()) < 0.2);
}

#[test]
fn mistakes_are_told() {
    let x = drawn([1, 4, 8, 16], 1);
    let refused = |error: Error, says: &str| assert!(error.to_string().contains(says), "{error}");
    refused(quantise(x.view()).run_as::<f32>().unwrap_err(), "not f32");
    refused(quantise(x.view()).per(Granularity::PerBlock(0)).run().unwrap_err(), "at least one row");
    refused(quantise(x.view()).group(2).run().unwrap_err(), "only factors per head");
    refused(quantise(x.view()).per(Granularity::PerHead).group(3).run().unwrap_err(), "groups of 3");
    refused(quantise(x.view()).used([9]).run().unwrap_err(), "9");
    let narrow = quantise(x.view()).run().unwrap();
    refused(quantise(narrow.values.view()).run().unwrap_err(), "does not support e4m3");
    let call = attention(narrow.values.view(), narrow.values.view(), narrow.values.view());
    let refusal = call.clone().run_quantised().unwrap_err();
    assert!(matches!(refusal, Error::Problem(ProblemError::NarrowOut { .. })), "{refusal}");
}
