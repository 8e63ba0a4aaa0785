//! From values to places: linear and logarithmic scales with ticks at round numbers. Every plot is made of two.

/// Where values lie on an axis, and where its ticks are.
#[derive(Clone, PartialEq, Debug)]
pub struct Scale {
    /// Values at the ends.
    domain: (f64, f64),
    /// Places of the ends.
    range: (f64, f64),
    logarithmic: bool,
    /// Values with a tick, in order.
    pub ticks: Vec<f64>,
}

impl Scale {
    /// From 0 to a round number not below `most`.
    pub fn from_zero(most: f64, range: (f64, f64)) -> Self {
        let most = if REACH.contains(&most) { most } else { 1.0 };
        let step = round_up(most / 4.5);
        let count = (most / step).ceil() as usize;
        let ticks: Vec<f64> = (0..=count).map(|n| n as f64 * step).collect();
        Self { domain: (0.0, count as f64 * step), range, logarithmic: false, ticks }
    }

    /// From a round number not above `least` to one not below `most`.
    pub fn around(least: f64, most: f64, range: (f64, f64)) -> Self {
        let span = (most - least) / 4.5;
        let step = round_up(if REACH.contains(&span) { span } else { 0.1 });
        let (first, last) = ((least / step).floor(), (most / step).ceil());
        let count = (last - first).clamp(1.0, 9.0) as usize;
        let ticks: Vec<f64> = (0..=count).map(|n| (first + n as f64) * step).collect();
        Self { domain: (ticks[0], ticks[count]), range, logarithmic: false, ticks }
    }

    /// A logarithmic axis between round numbers around `values`; `None` where no value is positive.
    pub fn logarithmic(values: impl IntoIterator<Item = f64>, range: (f64, f64)) -> Option<Self> {
        let (least, most) = ends(values)?;
        let domain = (round_down(least), round_up(most));
        let domain = if domain.0 < domain.1 { domain } else { (round_down(least * 0.9), domain.1) };
        Some(Self { domain, range, logarithmic: true, ticks: round_between(domain.0, domain.1) })
    }

    /// A logarithmic axis with ticks at `values`, which are in order, and nothing beyond them.
    pub fn at_values(values: &[f64], range: (f64, f64)) -> Option<Self> {
        let domain = ends(values.iter().copied())?;
        Some(Self { domain, range, logarithmic: true, ticks: values.to_vec() })
    }

    /// One tick for each of `count` things, in the middle of their shares.
    pub fn places(count: usize, range: (f64, f64)) -> Self {
        let ticks = (0..count).map(|n| n as f64).collect();
        Self { domain: (-0.5, count as f64 - 0.5), range, logarithmic: false, ticks }
    }

    /// The place of a value; the nearest end for one beyond the axis.
    pub fn at(&self, value: f64) -> f64 {
        let ((from, to), (start, end)) = (self.domain, self.range);
        let share = if self.logarithmic {
            (value / from).ln() / (to / from).ln()
        } else {
            (value - from) / (to - from)
        };
        // An axis of a single value has its place in the middle.
        let share = if share.is_nan() { 0.5 } else { share.clamp(0.0, 1.0) };
        start + share * (end - start)
    }

    /// Values at the ends.
    pub const fn domain(&self) -> (f64, f64) {
        self.domain
    }

    /// Ticks whose labels have room if each needs `space`.
    pub fn labelled(&self, space: f64) -> Vec<f64> {
        let mut kept: Vec<f64> = Vec::new();
        for &tick in &self.ticks {
            if kept.last().is_none_or(|last| (self.at(tick) - self.at(*last)).abs() >= space) {
                kept.push(tick);
            }
        }
        kept
    }
}

/// What axes reach: far beyond any measurement, far from where powers of ten end.
const REACH: std::ops::RangeInclusive<f64> = 1e-99..=1e99;

/// The least and the greatest positive value that an axis reaches.
fn ends(values: impl IntoIterator<Item = f64>) -> Option<(f64, f64)> {
    let reached = values.into_iter().filter(|v| REACH.contains(v));
    reached.fold(None, |ends, v| {
        Some(ends.map_or((v, v), |(least, most): (f64, f64)| (least.min(v), most.max(v))))
    })
}

/// 1, 2 or 5 times a power of ten.
const ROUND: [f64; 3] = [1.0, 2.0, 5.0];

fn power(value: f64) -> i32 {
    value.log10().floor() as i32
}

fn round_numbers(from: i32, to: i32) -> impl DoubleEndedIterator<Item = f64> {
    (from..=to).flat_map(|exponent| ROUND.map(|digit| digit * 10f64.powi(exponent)))
}

/// The least round number not below a positive value.
fn round_up(value: f64) -> f64 {
    let exponent = power(value);
    round_numbers(exponent, exponent + 1).find(|round| *round >= value * (1.0 - 1e-9)).unwrap_or(value)
}

/// The greatest round number not above a positive value.
fn round_down(value: f64) -> f64 {
    let exponent = power(value);
    round_numbers(exponent - 1, exponent).rev().find(|round| *round <= value * (1.0 + 1e-9)).unwrap_or(value)
}

/// Round numbers from one to another; powers of ten alone where there would be too many.
fn round_between(from: f64, to: f64) -> Vec<f64> {
    let inside = |v: &f64| *v >= from * (1.0 - 1e-9) && *v <= to * (1.0 + 1e-9);
    let all: Vec<f64> = round_numbers(power(from) - 1, power(to) + 1).filter(inside).collect();
    if all.len() <= 8 {
        return all;
    }
    (power(from)..=power(to) + 1).map(|exponent| 10f64.powi(exponent)).filter(inside).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    const RANGE: (f64, f64) = (100.0, 0.0);

    #[test]
    fn linear_axes_begin_at_zero_and_end_on_a_tick() {
        for (most, ticks) in [
            (700.0, &[0.0, 200.0, 400.0, 600.0, 800.0][..]),
            (1.0, &[0.0, 0.5, 1.0]),
            (0.0, &[0.0, 0.5, 1.0]),
            (f64::NAN, &[0.0, 0.5, 1.0]),
            (1.3, &[0.0, 0.5, 1.0, 1.5]),
        ] {
            let scale = Scale::from_zero(most, RANGE);
            assert_eq!(scale.ticks, ticks, "{most}");
            assert_eq!((scale.at(0.0), scale.at(scale.domain().1)), RANGE);
        }
        assert_eq!(Scale::from_zero(800.0, RANGE).at(200.0), 75.0);
    }

    #[test]
    fn logarithmic_axes_hold_their_values() {
        for (values, ticks) in [
            (&[3.0, 40.0][..], &[2.0, 5.0, 10.0, 20.0, 50.0][..]),
            (&[0.2, 0.0, -1.0, f64::INFINITY], &[0.1, 0.2]),
            (&[1.0, 1e4], &[1.0, 10.0, 100.0, 1e3, 1e4]),
        ] {
            let scale = Scale::logarithmic(values.iter().copied(), RANGE).unwrap();
            let close = scale.ticks.iter().zip(ticks).all(|(a, b)| (a / b - 1.0).abs() < 1e-9);
            assert!(close && scale.ticks.len() == ticks.len(), "{:?}", scale.ticks);
            assert!(values.iter().all(|v| (0.0..=100.0).contains(&scale.at(*v))));
        }
        assert_eq!(Scale::logarithmic([0.0, -2.0, f64::NAN, 1e-310, 1e300], RANGE), None);
    }

    #[test]
    fn equal_steps_of_two_are_equally_far_apart() {
        let lengths = [512.0, 1024.0, 2048.0, 4096.0];
        let scale = Scale::at_values(&lengths, (0.0, 90.0)).unwrap();
        let places = lengths.map(|s| scale.at(s).round());
        assert_eq!(places, [0.0, 30.0, 60.0, 90.0]);
        assert_eq!(Scale::at_values(&[64.0], (0.0, 90.0)).unwrap().at(64.0), 45.0);
        assert_eq!(scale.labelled(45.0), [512.0, 2048.0]);
        assert_eq!(Scale::places(2, (0.0, 100.0)).at(1.0), 75.0);
    }
}
