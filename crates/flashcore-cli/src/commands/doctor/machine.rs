//! What `doctor` tells about the machine itself: processor, cores, memory, and the CPU backend they make.

use std::thread;

use flashcore_cpu::SimdLevel;

use super::Finding;
use flashcore_lab::memory as room;

/// Least memory that the examples of the documentation need.
const ENOUGH_MEMORY: u64 = 1 << 30;

/// Everything about the machine itself.
pub fn look() -> Vec<Finding> {
    vec![version(), processor(), cores(), memory(), cpu_backend()]
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

fn memory() -> Finding {
    let (Some(free), Some(total)) = (room::available(), room::total()) else {
        return Finding::limited("memory", "not known", "huge shapes are refused only when allocation fails");
    };
    let found = format!("{} free of {}", room::human(free), room::human(total));
    if free < ENOUGH_MEMORY {
        Finding::limited("memory", found, "close other programs before running long sequences")
    } else {
        Finding::good("memory", found)
    }
}
