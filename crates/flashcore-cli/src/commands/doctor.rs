//! `flashcore doctor`: what this machine offers, and what to do about what is missing.
//!
//! Each line is a [`Finding`] made by one of the [`PROBES`]; a new subject (a driver, a compiler, a cache) is one more
//! probe in that list.

use std::thread;

use clap::Args;
use flashcore_cpu::SimdLevel;
use serde::Serialize;

use crate::{
    error::{CliError, Verdict},
    memory,
    output::{Output, Page, Report, Text, Tone},
};

/// Show what was found on this machine and what to do about what is missing
#[derive(Args, Debug)]
pub struct Flags {}

/// Least memory that the examples of the documentation need.
const ENOUGH_MEMORY: u64 = 1 << 30;

type Probe = fn() -> Finding;

/// What is looked at, in the order shown.
const PROBES: &[Probe] = &[version, processor, cores, cpu_backend, free_memory];

/// Looks at everything; passes if at least one backend can run.
pub fn execute(_flags: Flags, output: &Output) -> Result<Verdict, CliError> {
    let report = Findings { findings: PROBES.iter().map(|probe| probe()).collect() };
    output.show(&report)?;
    Ok(Verdict::from_bool(report.findings.iter().all(|f| f.state != State::Broken)))
}

/// How a finding bears on what the user can do.
#[derive(Clone, Copy, PartialEq, Eq, Serialize, Debug)]
#[serde(rename_all = "lowercase")]
enum State {
    /// As it should be.
    Good,
    /// Works, but something could be better.
    Limited,
    /// Attention cannot run.
    Broken,
}

/// One thing that was looked at.
#[derive(Serialize, Debug)]
struct Finding {
    subject: &'static str,
    state: State,
    found: String,
    #[serde(skip_serializing_if = "Option::is_none")]
    advice: Option<&'static str>,
}

impl Finding {
    fn good(subject: &'static str, found: impl Into<String>) -> Self {
        Self { subject, state: State::Good, found: found.into(), advice: None }
    }

    fn limited(subject: &'static str, found: impl Into<String>, advice: &'static str) -> Self {
        Self { subject, state: State::Limited, found: found.into(), advice: Some(advice) }
    }

    fn row(&self) -> Vec<Text> {
        let mark = match self.state {
            State::Good => Text::new("ok", Tone::Good),
            State::Limited => Text::new("--", Tone::Faint),
            State::Broken => Text::new("!!", Tone::Bad),
        };
        let advice = self.advice.map(|advice| format!(" -> {advice}")).unwrap_or_default();
        vec![mark, self.subject.into(), format!("{}{advice}", self.found).into()]
    }
}

#[derive(Serialize, Debug)]
struct Findings {
    findings: Vec<Finding>,
}

impl Report for Findings {
    fn page(&self) -> Page {
        Page::default().table(self.findings.iter().map(Finding::row))
    }
}

fn version() -> Finding {
    let text =
        format!("{} on {} {}", env!("CARGO_PKG_VERSION"), std::env::consts::OS, std::env::consts::ARCH);
    Finding::good("flashcore", text)
}

fn processor() -> Finding {
    let name = processor_name().unwrap_or_else(|| std::env::consts::ARCH.to_owned());
    let features = cpu_features();
    let listed = if features.is_empty() { String::new() } else { format!(": {}", features.join(" ")) };
    Finding::good("processor", name + &listed)
}

fn processor_name() -> Option<String> {
    let text = std::fs::read_to_string("/proc/cpuinfo").ok()?;
    let line = text.lines().find(|line| line.starts_with("model name"))?;
    Some(line.split_once(':')?.1.trim().to_owned())
}

#[cfg(target_arch = "x86_64")]
fn cpu_features() -> Vec<&'static str> {
    macro_rules! detect {
        ($($name:tt)*) => { [$(($name, is_x86_feature_detected!($name))),*] };
    }
    let known = detect!("sse4.2" "avx" "avx2" "fma" "f16c" "avx512f" "avx512bw" "avx512vl" "avx512vnni" "avx512bf16" "avx512fp16");
    known.into_iter().filter_map(|(name, found)| found.then_some(name)).collect()
}

#[cfg(target_arch = "aarch64")]
fn cpu_features() -> Vec<&'static str> {
    macro_rules! detect {
        ($($name:tt)*) => { [$(($name, std::arch::is_aarch64_feature_detected!($name))),*] };
    }
    let known = detect!("neon" "fp16" "bf16" "dotprod" "sve");
    known.into_iter().filter_map(|(name, found)| found.then_some(name)).collect()
}

#[cfg(not(any(target_arch = "x86_64", target_arch = "aarch64")))]
fn cpu_features() -> Vec<&'static str> {
    Vec::new()
}

fn cores() -> Finding {
    match thread::available_parallelism() {
        Ok(n) => Finding::good("cores", n.to_string()),
        Err(_) => Finding::limited("cores", "not known", "pass --threads N to run"),
    }
}

fn cpu_backend() -> Finding {
    let level = SimdLevel::detect();
    let fastest = SimdLevel::ALL.last() == Some(&level);
    let found = format!("{level} kernels");
    if fastest {
        Finding::good("cpu backend", found)
    } else {
        Finding::limited(
            "cpu backend",
            found,
            "faster kernels exist for processors with more vector instructions",
        )
    }
}

fn free_memory() -> Finding {
    let (Some(free), Some(total)) = (memory::available(), memory::total()) else {
        return Finding::limited("memory", "not known", "huge shapes are refused only when allocation fails");
    };
    let found = format!("{} free of {}", memory::human(free), memory::human(total));
    if free < ENOUGH_MEMORY {
        Finding::limited("memory", found, "close other programs before running long sequences")
    } else {
        Finding::good("memory", found)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn whatever_is_not_good_says_what_to_do() {
        for finding in PROBES.iter().map(|probe| probe()) {
            assert!(!finding.found.is_empty(), "{finding:?}");
            assert_eq!(finding.state == State::Good, finding.advice.is_none(), "{finding:?}");
        }
    }
}
