//! Where and when something was measured: a result is worth little without these facts.

use std::{
    fs,
    process::Command,
    time::{SystemTime, UNIX_EPOCH},
};

use serde::{Deserialize, Serialize};

/// The machine.
#[derive(Clone, PartialEq, Eq, Serialize, Deserialize, Debug)]
#[serde(deny_unknown_fields)]
pub struct Machine {
    pub system: String,
    pub cpu: String,
    pub cores: usize,
    /// The GPU, where there is one.
    pub gpu: Option<String>,
    pub driver: Option<String>,
    pub peers: Option<String>,
}

impl Machine {
    /// This machine, with what is known about its peers.
    pub fn this(peers: Option<String>) -> Self {
        let gpu = query_gpu();
        Self {
            system: format!("{} {}", std::env::consts::OS, std::env::consts::ARCH),
            cpu: processor().unwrap_or_else(|| "unknown".to_owned()),
            cores: std::thread::available_parallelism().map_or(1, usize::from),
            gpu: gpu.as_ref().map(|(name, _)| name.clone()),
            driver: gpu.map(|(_, driver)| driver),
            peers,
        }
    }
}

/// The processor's name, as Linux, macOS and Windows know it.
fn processor() -> Option<String> {
    let named = |text: String, name: &str| {
        let line = text.lines().find(|line| line.to_lowercase().starts_with(name))?;
        Some(line.split_once(':')?.1.trim().to_owned())
    };
    fs::read_to_string("/proc/cpuinfo")
        .ok()
        .and_then(|text| named(text, "model name"))
        // On aarch64 the file holds numbers alone.
        .or_else(|| output("lscpu", &[]).and_then(|text| named(text, "model name")))
        .or_else(|| output("sysctl", &["-n", "machdep.cpu.brand_string"]).map(|name| name.trim().to_owned()))
        .or_else(|| std::env::var("PROCESSOR_IDENTIFIER").ok())
}

fn query_gpu() -> Option<(String, String)> {
    let text = output("nvidia-smi", &["--query-gpu=name,driver_version", "--format=csv,noheader", "--id=0"])?;
    let (name, driver) = text.lines().next()?.split_once(',')?;
    Some((name.trim().to_owned(), driver.trim().to_owned()))
}

/// Names the commit where the program was built from a copy without its repository.
const COMMIT: &str = "FLASHCORE_COMMIT";
/// The commit that the program was built from, where that was a repository.
const BUILT_FROM: Option<&str> = option_env!("FLASHCORE_BUILT_FROM");
/// The compiler that built the program.
pub const RUSTC: &str = env!("FLASHCORE_RUSTC");

/// The commit that is measured: what `FLASHCORE_COMMIT` says, or the one that the program was built from.
pub fn commit() -> Option<String> {
    let named = std::env::var(COMMIT).ok().filter(|name| is_commit(name));
    named.or_else(|| BUILT_FROM.map(str::to_owned))
}

/// Whether files differ from that commit; `None` where the working folder is not at it.
pub fn changed() -> Option<bool> {
    let head = output("git", &["rev-parse", "HEAD"])?;
    let status = output("git", &["status", "--porcelain", "--untracked-files=no"])?;
    (commit()? == head.trim()).then_some(!status.is_empty())
}

fn is_commit(name: &str) -> bool {
    (7..=64).contains(&name.len()) && name.bytes().all(|byte| byte.is_ascii_hexdigit())
}

fn output(program: &str, args: &[&str]) -> Option<String> {
    let run = Command::new(program).args(args).output().ok().filter(|run| run.status.success())?;
    String::from_utf8(run.stdout).ok()
}

/// The time as `2026-01-31T12:00:00Z`.
pub fn now() -> String {
    let seconds = SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |since| since.as_secs());
    timestamp(seconds)
}

fn timestamp(seconds: u64) -> String {
    let (days, rest) = (seconds / 86_400, seconds % 86_400);
    let (year, month, day) = date(days);
    let (hour, minute, second) = (rest / 3600, rest / 60 % 60, rest % 60);
    format!("{year:04}-{month:02}-{day:02}T{hour:02}:{minute:02}:{second:02}Z")
}

/// Year, month and day of a day counted from 1970. Years are taken to begin in March, so that leap days come last.
const fn date(days: u64) -> (u64, u64, u64) {
    let shifted = days + 719_468;
    let (era, of_era) = (shifted / 146_097, shifted % 146_097);
    let year = (of_era - of_era / 1460 + of_era / 36_524 - of_era / 146_096) / 365;
    let of_year = of_era - (365 * year + year / 4 - year / 100);
    let month = (5 * of_year + 2) / 153;
    let day = of_year - (153 * month + 2) / 5 + 1;
    let (month, next) = if month < 10 { (month + 3, 0) } else { (month - 9, 1) };
    (era * 400 + year + next, month, day)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn days_become_dates() {
        let cases = [
            (0, "1970-01-01T00:00:00Z"),
            (951_782_400, "2000-02-29T00:00:00Z"),
            (1_709_251_199, "2024-02-29T23:59:59Z"),
            (1_709_251_200, "2024-03-01T00:00:00Z"),
            (4_102_444_799, "2099-12-31T23:59:59Z"),
        ];
        for (seconds, text) in cases {
            assert_eq!(timestamp(seconds), text);
        }
    }

    #[test]
    fn commits_are_hexadecimal() {
        let names = ["ea6f0a9", "EA6F0A9C", "ea6f0a", "", "<b>ea6f0a9", &"a".repeat(65)];
        assert_eq!(names.map(is_commit), [true, true, false, false, false, false]);
    }

    #[test]
    fn this_machine_has_cores() {
        assert!(Machine::this(None).cores > 0);
    }
}
