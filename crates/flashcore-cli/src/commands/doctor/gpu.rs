//! What `doctor` tells about GPUs: driver, devices, NVIDIA's tools, the cache of compiled kernels.

use flashcore_cuda::{
    DeviceProps, Driver,
    cache::Cache,
    toolchain::{Search, Tool},
};
use flashcore_lab::memory::human;

use super::Finding;

/// Everything about GPUs.
pub fn look() -> Vec<Finding> {
    let mut findings = vec![driver()];
    findings.extend(devices());
    findings.extend([ptxas(), nvdisasm(), cache()]);
    findings
}

fn driver() -> Finding {
    match Driver::get() {
        Ok(driver) => Finding::good("driver", format!("serves CUDA {}", cuda_version(driver.cuda_version()))),
        Err(error) => Finding::limited("driver", "none", error.to_string()),
    }
}

/// One finding per GPU; none where there is no driver, which has its own.
fn devices() -> Vec<Finding> {
    let Ok(driver) = Driver::get() else { return Vec::new() };
    match driver.device_count() {
        Ok(0) => vec![Finding::limited("gpu", "none", "check nvidia-smi and CUDA_VISIBLE_DEVICES")],
        Ok(count) => (0..count).map(|index| device(driver, index)).collect(),
        Err(error) => vec![Finding::limited("gpu", "not known", error.to_string())],
    }
}

fn device(driver: Driver, index: u32) -> Finding {
    match driver.device(index) {
        Ok(device) => Finding::good("gpu", describe(device.props())),
        Err(error) => Finding::limited("gpu", format!("number {index} cannot be used"), error.to_string()),
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

fn ptxas() -> Finding {
    let otherwise = "the driver compiles instead; for reproducible builds: pip install nvidia-cuda-nvcc";
    tool("ptxas", Tool::Ptxas, otherwise)
}

fn nvdisasm() -> Finding {
    let otherwise = "machine code cannot be shown; nvdisasm comes with the CUDA toolkit";
    tool("nvdisasm", Tool::Nvdisasm, otherwise)
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
