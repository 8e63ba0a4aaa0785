//! A kernel's policy is the plan's choice: it has a name of its own where it is not the usual one.

use std::collections::BTreeSet;

use flashcore_kernels::{KernelConfig, covering_set, forward_sm90::Config};

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
