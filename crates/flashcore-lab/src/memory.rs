//! Whether the machine has room for a problem, checked before anything is allocated.

use std::fs;

/// Not enough memory; `needed` is `u64::MAX` when even the number of bytes overflows.
#[derive(Clone, PartialEq, Eq, Debug, thiserror::Error)]
#[error("the problem needs {} but {}; use a smaller shape or element type", human(*needed), room(*available))]
pub struct MemoryError {
    pub needed: u64,
    pub available: Option<u64>,
}

/// Refuses `needed` bytes when the machine is known to have less.
pub fn check(needed: u64) -> Result<(), MemoryError> {
    let available = available();
    if available.is_some_and(|room| room < needed) { Err(MemoryError { needed, available }) } else { Ok(()) }
}

/// Bytes that can be allocated without swapping: the least of free memory and the control group's limit.
pub fn available() -> Option<u64> {
    let free = meminfo(&fs::read_to_string("/proc/meminfo").ok()?, "MemAvailable")?;
    Some(cgroup_room().map_or(free, |room| room.min(free)))
}

/// Bytes of memory in the machine.
pub fn total() -> Option<u64> {
    meminfo(&fs::read_to_string("/proc/meminfo").ok()?, "MemTotal")
}

fn meminfo(text: &str, field: &str) -> Option<u64> {
    let line = text.lines().find_map(|line| line.strip_prefix(field)?.strip_prefix(':'))?;
    let kib: u64 = line.trim().strip_suffix("kB")?.trim().parse().ok()?;
    kib.checked_mul(1024)
}

fn cgroup_room() -> Option<u64> {
    let read = |name| fs::read_to_string(format!("/sys/fs/cgroup/{name}")).ok()?.trim().parse::<u64>().ok();
    Some(read("memory.max")?.saturating_sub(read("memory.current")?))
}

/// A human-readable byte count.
pub fn human(bytes: u64) -> String {
    const UNITS: [&str; 7] = ["B", "KiB", "MiB", "GiB", "TiB", "PiB", "EiB"];
    if bytes == u64::MAX {
        return "more memory than any machine has".to_owned();
    }
    let mut value = bytes as f64;
    let mut unit = 0;
    while value >= 1024.0 && unit + 1 < UNITS.len() {
        value /= 1024.0;
        unit += 1;
    }
    if unit == 0 { format!("{bytes} B") } else { format!("{value:.1} {}", UNITS[unit]) }
}

fn room(available: Option<u64>) -> String {
    available.map_or("the allocation failed".to_owned(), |bytes| format!("only {} is free", human(bytes)))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn reads_meminfo() {
        let text = "MemTotal:       24000 kB\nMemAvailable:    1000 kB\n";
        assert_eq!(meminfo(text, "MemAvailable"), Some(1000 * 1024));
        assert_eq!(meminfo(text, "Mem"), None);
        assert_eq!(meminfo("MemTotal: many\n", "MemTotal"), None);
    }

    #[test]
    fn counts_read_well() {
        let cases =
            [(0, "0 B"), (1023, "1023 B"), (1536, "1.5 KiB"), (3 << 40, "3.0 TiB"), (5 << 60, "5.0 EiB")];
        for (bytes, text) in cases {
            assert_eq!(human(bytes), text);
        }
    }

    #[test]
    fn more_than_the_machine_has_is_refused() {
        assert!(check(0).is_ok());
        if available().is_some() {
            let message = check(u64::MAX - 1).unwrap_err().to_string();
            assert!(message.contains("smaller shape"), "{message}");
        }
    }
}
