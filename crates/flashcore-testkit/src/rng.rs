//! A small seeded generator: the same seed gives the same tensors on every machine.

/// SplitMix64, with the few distributions that tests need.
#[derive(Clone, Debug)]
pub struct Rng {
    state: u64,
    spare: Option<f32>,
}

impl Rng {
    /// A generator that always yields the same numbers for the same seed.
    pub fn new(seed: u64) -> Self {
        let mut rng = Self { state: seed ^ 0x9e37_79b9_7f4a_7c15, spare: None };
        // Neighbouring seeds start from neighbouring states; one step mixes them apart.
        rng.state = rng.next_u64();
        rng
    }

    /// 64 random bits.
    pub fn next_u64(&mut self) -> u64 {
        self.state = self.state.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut z = self.state;
        z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        z ^ (z >> 31)
    }

    /// Uniform in [0, 1).
    pub fn uniform(&mut self) -> f32 {
        (self.next_u64() >> 40) as f32 / (1u32 << 24) as f32
    }

    /// Uniform in `range`.
    pub fn range(&mut self, range: std::ops::RangeInclusive<usize>) -> usize {
        let width = (range.end() - range.start()) as u64 + 1;
        range.start() + (self.next_u64() % width) as usize
    }

    /// True once in `n` times.
    pub fn one_in(&mut self, n: usize) -> bool {
        self.range(1..=n) == 1
    }

    /// One of `options`, which must not be empty.
    pub fn pick<T: Copy>(&mut self, options: &[T]) -> T {
        options[self.range(0..=options.len() - 1)]
    }

    /// Standard normal, by Marsaglia's polar method.
    pub fn normal(&mut self) -> f32 {
        if let Some(spare) = self.spare.take() {
            return spare;
        }
        loop {
            let (x, y) = (2.0 * self.uniform() - 1.0, 2.0 * self.uniform() - 1.0);
            let square = x * x + y * y;
            if square > 0.0 && square < 1.0 {
                let factor = (-2.0 * square.ln() / square).sqrt();
                self.spare = Some(y * factor);
                return x * factor;
            }
        }
    }

    /// The numbers below `n` in random order.
    pub fn permutation(&mut self, n: usize) -> Vec<usize> {
        let mut order: Vec<usize> = (0..n).collect();
        for i in (1..n).rev() {
            order.swap(i, self.range(0..=i));
        }
        order
    }
}

#[cfg(test)]
mod tests {
    use super::Rng;

    #[test]
    fn same_seed_same_numbers_other_seed_other_numbers() {
        let draw = |seed| {
            let mut rng = Rng::new(seed);
            [(); 8].map(|()| rng.next_u64())
        };
        assert_eq!(draw(7), draw(7));
        assert_ne!(draw(7), draw(8));
    }

    #[test]
    fn normal_has_mean_zero_and_variance_one() {
        let mut rng = Rng::new(1);
        let xs: Vec<f64> = (0..100_000).map(|_| f64::from(rng.normal())).collect();
        let mean = xs.iter().sum::<f64>() / xs.len() as f64;
        let variance = xs.iter().map(|x| (x - mean).powi(2)).sum::<f64>() / xs.len() as f64;
        assert!(mean.abs() < 0.02, "mean {mean}");
        assert!((variance - 1.0).abs() < 0.03, "variance {variance}");
    }

    #[test]
    fn permutation_keeps_every_number() {
        let mut order = Rng::new(3).permutation(97);
        assert_ne!(order, (0..97).collect::<Vec<_>>());
        order.sort_unstable();
        assert_eq!(order, (0..97).collect::<Vec<_>>());
    }
}
