//! One screen about what bounds a kernel, from the counters of [`super::ncu`].

use serde::Serialize;

use super::ncu::Counter;

/// Shares above which something is called the bound.
const BUSY: f64 = 60.0;

/// What the counters come to. Shares are percent.
#[derive(Clone, PartialEq, Serialize, Debug)]
pub struct Reading {
    /// Microseconds of the launch.
    pub duration_us: Option<f64>,
    pub tensor: Option<f64>,
    pub compute: Option<f64>,
    /// Fraction of DRAM bandwidth.
    pub dram: Option<f64>,
    /// Fraction of L2 bandwidth.
    pub l2: Option<f64>,
    /// Share of a multiprocessor's warps that were active.
    pub occupancy: Option<f64>,
    /// Conflicts between accesses to shared memory.
    pub conflicts: Option<f64>,
    pub stalls: Vec<(String, f64)>,
    pub bound: String,
}

impl Reading {
    /// Picks out of `counters` what matters.
    pub fn of(counters: &[Counter]) -> Self {
        let largest = |prefix: &str, suffix: &str| {
            let fits = |c: &&Counter| c.name.starts_with(prefix) && c.name.ends_with(suffix);
            counters.iter().filter(fits).filter_map(number).reduce(f64::max)
        };
        let share = |prefix: &str| largest(prefix, ".avg.pct_of_peak_sustained_elapsed");
        let mut reading = Self {
            duration_us: duration(counters),
            tensor: largest("sm__pipe_tensor", "pct_of_peak_sustained_active"),
            compute: share("sm__throughput"),
            dram: share("dram__throughput").or_else(|| share("gpu__dram_throughput")),
            l2: share("lts__throughput").or_else(|| share("lts__t_sectors")),
            occupancy: largest("sm__warps_active", ".avg.pct_of_peak_sustained_active"),
            conflicts: largest("l1tex__data_bank_conflicts", ".sum"),
            stalls: stalls(counters),
            bound: String::new(),
        };
        reading.bound = reading.judge();
        reading
    }

    fn judge(&self) -> String {
        let busy = |share: Option<f64>| share.filter(|share| *share >= BUSY);
        let stall = self.stalls.first().map_or("nothing in particular", |(name, _)| name.as_str());
        if let Some(tensor) = busy(self.tensor) {
            format!("tensor cores, busy {tensor:.0} % of the time")
        } else if let Some(dram) = busy(self.dram) {
            format!("memory, at {dram:.0} % of its bandwidth")
        } else if let Some(l2) = busy(self.l2) {
            format!("the L2 cache, at {l2:.0} % of its bandwidth")
        } else if let Some(compute) = busy(self.compute) {
            format!("instructions other than matrix products, {compute:.0} % busy")
        } else {
            format!("latency: no unit is busy, warps wait for {stall}")
        }
    }
}

fn number(counter: &Counter) -> Option<f64> {
    counter.value.replace(',', "").parse().ok().filter(|x: &f64| x.is_finite())
}

fn duration(counters: &[Counter]) -> Option<f64> {
    let counter = counters.iter().find(|c| c.name == "gpu__time_duration.sum")?;
    let scale = match counter.unit.as_str() {
        "nsecond" | "ns" => 1e-3,
        "usecond" | "us" => 1.0,
        "msecond" | "ms" => 1e3,
        _ => 1e6,
    };
    Some(number(counter)? * scale)
}

fn stalls(counters: &[Counter]) -> Vec<(String, f64)> {
    let reason = |counter: &Counter| {
        let rest = counter.name.strip_prefix("smsp__average_warps_issue_stalled_")?;
        let name = rest.strip_suffix("_per_issue_active.ratio")?;
        Some((name.replace('_', " "), number(counter)?))
    };
    let mut stalls: Vec<_> = counters.iter().filter_map(reason).collect();
    stalls.sort_by(|a, b| b.1.total_cmp(&a.1));
    stalls.truncate(3);
    stalls
}

#[cfg(test)]
mod tests {
    use super::*;

    fn counter(name: &str, unit: &str, value: &str) -> Counter {
        Counter { name: name.to_owned(), unit: unit.to_owned(), value: value.to_owned() }
    }

    #[test]
    fn the_bound_is_named() {
        let mut counters = vec![
            counter("gpu__time_duration.sum", "nsecond", "1,500"),
            counter("sm__pipe_tensor_op_hmma_cycles_active.avg.pct_of_peak_sustained_active", "%", "84.2"),
            counter("dram__throughput.avg.pct_of_peak_sustained_elapsed", "%", "12"),
            counter("sm__warps_active.avg.pct_of_peak_sustained_active", "%", "18.7"),
            counter(
                "smsp__average_warps_issue_stalled_long_scoreboard_per_issue_active.ratio",
                "inst",
                "0.5",
            ),
            counter("smsp__average_warps_issue_stalled_barrier_per_issue_active.ratio", "inst", "3.5"),
        ];
        let reading = Reading::of(&counters);
        assert_eq!((reading.duration_us, reading.tensor, reading.l2), (Some(1.5), Some(84.2), None));
        assert!(reading.bound.starts_with("tensor cores"), "{reading:?}");
        assert_eq!(reading.stalls[0], ("barrier".to_owned(), 3.5));
        counters[1].value = "20".to_owned();
        assert!(Reading::of(&counters).bound.contains("barrier"));
        counters[2].value = "91".to_owned();
        assert!(Reading::of(&counters).bound.starts_with("memory"));
        assert!(Reading::of(&[]).bound.starts_with("latency"));
    }
}
