//! Clock, temperature and power while something is timed: figures taken at different clocks are not comparable.
//!
//! On a GPU `nvidia-smi` reports every 50 ms; on the CPU the kernel's files are read before and after.

use std::{
    fs,
    process::{Command, Stdio},
    time::Instant,
};

use serde::{Deserialize, Serialize};

use crate::{competitor::Place, lines::Lines};

/// What the sensors said during a burst.
#[derive(Clone, Copy, PartialEq, Serialize, Deserialize, Debug)]
#[serde(deny_unknown_fields)]
pub struct Noise {
    /// Lowest clock, in MHz.
    pub clock_min: f64,
    /// Highest clock, in MHz.
    pub clock_max: f64,
    /// Mean clock, in MHz.
    pub clock_mean: f64,
    /// Highest temperature, in °C.
    pub temperature: Option<f64>,
    /// Mean power, in watts.
    pub power: Option<f64>,
}

#[derive(Clone, Copy, PartialEq, Debug)]
struct Reading {
    clock: f64,
    temperature: Option<f64>,
    power: Option<f64>,
}

/// The sensors of this machine.
pub struct Sensors {
    /// A running `nvidia-smi`.
    gpu: Option<Lines<(Instant, Reading)>>,
}

impl Sensors {
    /// Starts watching the GPU where there is one.
    pub fn start() -> Self {
        Self::watching("nvidia-smi")
    }

    fn watching(program: &str) -> Self {
        let mut command = Command::new(program);
        command.args(["--query-gpu=clocks.sm,temperature.gpu,power.draw", "--format=csv,noheader,nounits"]);
        command.args(["--id=0", "--loop-ms=50"]);
        let read = |line: &str| Some((Instant::now(), parse(line)?));
        Self { gpu: Lines::start(&mut command, Stdio::null(), read).ok() }
    }

    /// Does `work` and says what the sensors of `place` saw meanwhile.
    pub fn during<T>(&self, place: Place, work: impl FnOnce() -> T) -> (T, Option<Noise>) {
        let begin = Instant::now();
        let before = read_cpu();
        let result = work();
        let readings: Vec<Reading> = match place {
            Place::Gpu => {
                let read = self.gpu.iter().flat_map(|child| child.lines.try_iter());
                read.filter(|(at, _)| *at >= begin).map(|(_, reading)| reading).collect()
            }
            Place::Cpu => before.into_iter().chain(read_cpu()).collect(),
        };
        (result, Noise::of(&readings))
    }
}

/// A line such as `1980, 45, 312.50`.
fn parse(line: &str) -> Option<Reading> {
    let mut fields = line.split(',').map(|field| field.trim().parse::<f64>().ok());
    let clock = fields.next()??;
    Some(Reading { clock, temperature: fields.next().flatten(), power: fields.next().flatten() })
}

fn read_cpu() -> Option<Reading> {
    let number = |path: &str| fs::read_to_string(path).ok()?.trim().parse::<f64>().ok();
    let from_cpuinfo = || {
        let text = fs::read_to_string("/proc/cpuinfo").ok()?;
        let line = text.lines().find(|line| line.starts_with("cpu MHz"))?;
        line.split_once(':')?.1.trim().parse().ok()
    };
    let scaled = number("/sys/devices/system/cpu/cpu0/cpufreq/scaling_cur_freq").map(|khz| khz / 1e3);
    let clock = scaled.or_else(from_cpuinfo)?;
    let temperature = number("/sys/class/thermal/thermal_zone0/temp").map(|milli| milli / 1e3);
    Some(Reading { clock, temperature, power: None })
}

impl Noise {
    fn of(readings: &[Reading]) -> Option<Self> {
        let clocks = || readings.iter().map(|reading| reading.clock);
        let mean = |values: Vec<f64>| values.iter().sum::<f64>() / values.len() as f64;
        let powers: Vec<f64> = readings.iter().filter_map(|reading| reading.power).collect();
        (!readings.is_empty()).then(|| Self {
            clock_min: clocks().fold(f64::INFINITY, f64::min),
            clock_max: clocks().fold(0.0, f64::max),
            clock_mean: mean(clocks().collect()),
            temperature: readings.iter().filter_map(|reading| reading.temperature).reduce(f64::max),
            power: (!powers.is_empty()).then(|| mean(powers)),
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lines_are_read() {
        let full = Reading { clock: 1980.0, temperature: Some(45.0), power: Some(312.5) };
        assert_eq!(parse("1980, 45, 312.50"), Some(full));
        assert_eq!(parse("1980, 45, [N/A]"), Some(Reading { power: None, ..full }));
        assert_eq!(parse("clocks.sm [MHz], temperature.gpu"), None);
        let noise = Noise::of(&[full, Reading { clock: 1000.0, power: Some(100.5), ..full }]).unwrap();
        assert_eq!((noise.clock_min, noise.clock_max, noise.power), (1000.0, 1980.0, Some(206.5)));
        assert_eq!(Noise::of(&[]), None);
    }

    #[test]
    fn without_a_gpu_nothing_is_read() {
        let sensors = Sensors::watching("/no/such/nvidia-smi");
        assert_eq!(sensors.during(Place::Gpu, || 7), (7, None));
    }
}
