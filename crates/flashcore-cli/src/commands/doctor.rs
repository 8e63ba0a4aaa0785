//! `flashcore doctor`: what this machine offers, and what to do about what is missing.
//!
//! Each line is a [`Finding`]; a new subject is one more function in [`execute`].

use clap::Args;
use flashcore_cpu::SimdLevel;
use flashcore_cuda::{
    DeviceProps, Driver,
    cache::Cache,
    toolchain::{Search, Tool},
};
use flashcore_lab::{
    machine::Machine,
    memory::{self, human},
};
use serde::Serialize;
use serde_json::json;

use crate::{
    error::{CliError, Verdict},
    output::{Output, Page, Text, faint, good},
};

/// Least memory that the examples of the documentation need.
const ENOUGH_MEMORY: u64 = 1 << 30;

/// Show what this machine offers and what to do about anything missing
#[derive(Args, Debug)]
pub struct Flags {}

/// Looks at everything; whatever is missing, the CPU can compute.
pub fn execute(_flags: Flags, output: &Output) -> Result<Verdict, CliError> {
    let machine = Machine::this(None);
    let mut findings = vec![
        version(),
        Finding::good("processor", machine.cpu),
        Finding::good("cores", machine.cores.to_string()),
        memory(),
        cpu_backend(),
        driver(),
    ];
    findings.extend(devices());
    let compiled = "the driver compiles instead; for reproducible builds: pip install nvidia-cuda-nvcc";
    let shown = "machine code cannot be shown; nvdisasm comes with the CUDA toolkit";
    findings.extend([tool("ptxas", Tool::Ptxas, compiled), tool("nvdisasm", Tool::Nvdisasm, shown), cache()]);
    output.answer(&json!({ "findings": findings }), || {
        Page::default().table(findings.iter().map(Finding::row))
    })?;
    Ok(Verdict::Pass)
}

/// One thing that was looked at: `good`, or `limited` with advice.
#[derive(Serialize, Debug)]
struct Finding {
    subject: &'static str,
    state: &'static str,
    found: String,
    #[serde(skip_serializing_if = "Option::is_none")]
    advice: Option<String>,
}

impl Finding {
    fn good(subject: &'static str, found: impl Into<String>) -> Self {
        Self { subject, state: "good", found: found.into(), advice: None }
    }

    fn limited(subject: &'static str, found: impl Into<String>, advice: impl Into<String>) -> Self {
        Self { subject, state: "limited", found: found.into(), advice: Some(advice.into()) }
    }

    fn row(&self) -> Vec<Text> {
        let mark = if self.advice.is_none() { good("ok") } else { faint("--") };
        let advice = self.advice.as_ref().map(|advice| format!(" -> {advice}")).unwrap_or_default();
        vec![mark, self.subject.into(), format!("{}{advice}", self.found).into()]
    }
}

fn version() -> Finding {
    let (version, os, arch) = (env!("CARGO_PKG_VERSION"), std::env::consts::OS, std::env::consts::ARCH);
    Finding::good("flashcore", format!("{version} on {os} {arch}"))
}

fn cpu_backend() -> Finding {
    let level = SimdLevel::detect();
    let found = format!("{level} kernels");
    match level {
        SimdLevel::Portable | SimdLevel::Avx2 => {
            let advice = "faster kernels exist for processors with more vector instructions";
            Finding::limited("cpu backend", found, advice)
        }
        _ => Finding::good("cpu backend", found),
    }
}

fn memory() -> Finding {
    let (Some(free), Some(total)) = (memory::available(), memory::total()) else {
        return Finding::limited(
            "memory",
            "unknown",
            "shapes that are too large fail only when memory is allocated",
        );
    };
    let found = format!("{} free of {}", memory::human(free), memory::human(total));
    if free < ENOUGH_MEMORY {
        Finding::limited("memory", found, "close other programs before running long sequences")
    } else {
        Finding::good("memory", found)
    }
}

fn driver() -> Finding {
    match Driver::get() {
        Ok(driver) => {
            Finding::good("driver", format!("supports CUDA {}", cuda_version(driver.cuda_version())))
        }
        Err(error) => Finding::limited("driver", "none", error.to_string()),
    }
}

/// One finding per GPU; none where there is no driver, which has its own.
fn devices() -> Vec<Finding> {
    let Ok(driver) = Driver::get() else { return Vec::new() };
    match driver.device_count() {
        Ok(0) => vec![Finding::limited("gpu", "none", "check nvidia-smi and CUDA_VISIBLE_DEVICES")],
        Ok(count) => (0..count).map(|index| device(driver, index)).collect(),
        Err(error) => vec![Finding::limited("gpu", "unknown", error.to_string())],
    }
}

fn device(driver: Driver, index: u32) -> Finding {
    match driver.device(index) {
        Ok(device) => Finding::good("gpu", describe(device.props())),
        Err(error) => Finding::limited("gpu", format!("GPU {index} cannot be used"), error.to_string()),
    }
}

fn describe(gpu: &DeviceProps) -> String {
    let (major, minor) = gpu.capability;
    let memory = human(gpu.memory_bytes);
    format!("{}: {}, sm_{major}{minor}, {} SMs, {memory}", gpu.index, gpu.name, gpu.sms)
}

fn cuda_version(number: u32) -> String {
    format!("{}.{}", number / 1000, number % 1000 / 10)
}

fn tool(name: &'static str, tool: Tool, otherwise: &str) -> Finding {
    match Search::from_env(tool).find(tool) {
        Ok(None) => Finding::limited(name, "none", otherwise),
        Err(error) => Finding::limited(name, "none", error.to_string()),
        Ok(Some(found)) => match found.version() {
            Ok(version) => Finding::good(name, format!("{version} at {}", found.path().display())),
            Err(error) => Finding::limited(name, "found but not usable", error.to_string()),
        },
    }
}

fn cache() -> Finding {
    if Cache::is_off() {
        let advice = "every process compiles its kernels again; unset FLASHCORE_CACHE to keep them";
        return Finding::limited("kernel cache", "off", advice);
    }
    let listed = Cache::open_default().and_then(|cache| Ok((cache.list()?, cache)));
    match listed {
        Ok((entries, cache)) => {
            let bytes = human(entries.iter().map(|entry| entry.bytes).sum());
            let place = cache.path().display();
            Finding::good("kernel cache", format!("{} kernels, {bytes} in {place}", entries.len()))
        }
        Err(error) => Finding::limited("kernel cache", "cannot be used", error.to_string()),
    }
}
