//! A kernel's policy is the plan's choice: it has a name of its own where it is not the usual one.

use std::collections::BTreeSet;

use flashcore_core::{DType, Dims, Layout, Mask, Problem, Spec};
use flashcore_kernels::{Gpu, KernelConfig, covering_set, forward_sm90::Config, plan, slots};
use flashcore_sim::{Buffer, Launch, Options, Schedule, Timing};

/// Configs of the Hopper kernel in the covering set.
fn hopper_configs() -> Vec<Config> {
    let members = covering_set().unwrap();
    let kernels = members.iter().map(|member| *member.plan().unwrap().kernel());
    kernels.filter_map(|kernel| if let KernelConfig::Sm90(cfg) = kernel { Some(cfg) } else { None }).collect()
}

/// The same kernel with one choice made the other way.
fn others(cfg: Config) -> [Config; 2] {
    let (mut turns, mut waits) = (cfg, cfg);
    turns.policy.in_turn ^= true;
    waits.policy.waits_once ^= true;
    [turns, waits]
}

#[test]
fn names_tell_policies_apart() {
    for cfg in hopper_configs() {
        let [turns, waits] = others(cfg);
        let names: BTreeSet<_> = [cfg, turns, waits].iter().map(|cfg| cfg.name().to_string()).collect();
        assert_eq!(names.len(), 3, "{names:?}");
        assert!(!cfg.name().to_string().contains("_by_"), "the usual policy needs no name");
    }
}

/// What the plan did not choose is slower, not wrong: every kernel can be built either way.
#[test]
fn kernels_obey_the_policy() {
    let several = hopper_configs().into_iter().filter(|cfg| cfg.shape.consumers > 1);
    for cfg in several.step_by(4) {
        let text =
            |cfg| KernelConfig::Sm90(cfg).program().unwrap_or_else(|e| panic!("{e}")).text().to_owned();
        let body = |cfg: Config| text(cfg).replace(&cfg.name().to_string(), "kernel");
        assert!(others(cfg).into_iter().all(|other| body(other) != body(cfg)), "{}", cfg.name());
    }
}

/// A consumer that passes over keys multiplies nothing, which would bring its lanes together: the one that releases a stage must
/// not leave others behind that still wait for it, else they may find the stage filled again, and wait for ever.
#[test]
fn lanes_that_pass_over_keys_stay_together() {
    let layout = Layout::bhsd(Dims::new(1, 2, 640, 128)).unwrap();
    for mask in [Mask::CAUSAL, Mask::window(100, 0)] {
        let spec = Spec { mask, ..Spec::new(DType::F16, layout, layout, layout) };
        let problem: Problem = spec.parse().unwrap();
        let plan = plan(&problem, &Gpu { sms: 2, ..Gpu::HOPPER }, 16).unwrap();
        assert!(matches!(plan.kernel(), KernelConfig::Sm90(cfg) if cfg.policy.passes_over), "{plan}");
        let program = plan.kernel().program().unwrap();
        let spec = plan.launches()[0].spec(&program).unwrap();
        let tensors = [slots::Q, slots::K, slots::V, slots::OUT].map(|slot| (slot, 2 * layout.span()));
        let all = tensors.into_iter().chain([(slots::LSE, 4 * problem.rows())]);
        let buffers: Vec<_> = all.map(|(slot, bytes)| Buffer::input(slot, vec![0; bytes])).collect();
        for seed in 0..3 {
            let (module, provenance) = (program.module(), Some(program.provenance()));
            let launch = Launch { module, provenance, spec: &spec, buffers: buffers.clone() };
            let options = Options::adversarial(Schedule::Apart, Timing::Early, seed);
            let outcome = launch.run(&options).unwrap();
            assert!(outcome.is_clean(), "{mask} with seed {seed}: {:?}", outcome.findings);
        }
    }
}
