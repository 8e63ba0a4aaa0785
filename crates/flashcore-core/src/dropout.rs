//! Dropout: a call drops weights at random, as training does, and scales the rest so that sums stay the same on
//! average.
//!
//! Whether a weight is dropped is a function of a seed and of the weight's position: its sequence, query head, query and key.
//! Nothing is kept between forward and backward, and every backend drops the same weights, however it divides the work.
//! The function is a hash of 32-bit words, small enough to be computed for each weight beside the products.

use crate::error::ProblemError;

/// What the number of a key is multiplied by: neighbours then differ in every second bit.
pub const DROPOUT_STEP: u32 = 0x9E37_79B9;

/// Odd factors between shifts that let every bit of a word depend on every other.
pub const DROPOUT_FACTORS: [u32; 2] = [0x7FEB_352D, 0x846C_A68B];

/// The probability with which weights are dropped.
#[derive(Clone, Copy, PartialEq, Debug)]
pub struct Dropout {
    probability: f32,
}

impl Dropout {
    /// Drops weights with this probability, which [`Spec::parse`](crate::Spec::parse) checks.
    pub const fn new(probability: f32) -> Self {
        Self { probability }
    }

    /// The probability with which a weight is dropped.
    pub const fn probability(self) -> f32 {
        self.probability
    }

    /// Checks the probability; `None` if it drops nothing.
    pub fn parse(self) -> Result<Option<Self>, ProblemError> {
        match self.probability {
            p if (0.0..1.0).contains(&p) => Ok((self.threshold() > 0).then_some(self)),
            p => Err(ProblemError::Dropout(p)),
        }
    }

    /// A weight is dropped where its hash is below this.
    pub fn threshold(self) -> u32 {
        (f64::from(self.probability) * 2f64.powi(32)) as u32
    }

    /// What the weights that stay are multiplied by.
    pub fn factor(self) -> f32 {
        1.0 / (1.0 - self.probability)
    }
}

/// Mixes the bits of a word.
const fn mix(word: u32) -> u32 {
    let word = (word ^ word >> 16).wrapping_mul(DROPOUT_FACTORS[0]);
    let word = (word ^ word >> 15).wrapping_mul(DROPOUT_FACTORS[1]);
    word ^ word >> 16
}

/// What hashes of one plane, or of one of its rows, begin with.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct DropoutWords([u32; 2]);

impl DropoutWords {
    /// Those of a query head of a sequence, whose number is that of the sequence times the number of heads, plus that of
    /// the head.
    pub const fn of_plane(seed: u64, plane: u32) -> Self {
        let first = mix(seed as u32 ^ mix(plane.wrapping_add(DROPOUT_STEP)));
        let second = mix((seed >> 32) as u32 ^ mix(first.wrapping_add(DROPOUT_STEP)));
        Self([first, second])
    }

    /// Those of a query of the plane, by its number in the sequence.
    #[must_use]
    pub const fn of_row(self, row: u32) -> Self {
        let first = mix(self.0[0].wrapping_add(row));
        Self([first, mix(self.0[1] ^ first)])
    }

    /// The two words.
    pub const fn words(self) -> [u32; 2] {
        self.0
    }

    /// The hash of a key of the row, by its number in the sequence.
    #[inline]
    pub const fn hash(self, key: u32) -> u32 {
        let [first, second] = self.0;
        let word = first.wrapping_add(key.wrapping_mul(DROPOUT_STEP));
        let word = (word ^ word >> 16).wrapping_mul(DROPOUT_FACTORS[0]);
        (word ^ word >> 15 ^ second).wrapping_mul(DROPOUT_FACTORS[1])
    }
}

/// Which weights of one query head of a sequence a call drops.
#[derive(Clone, Copy, Debug)]
pub struct HeadDropout {
    words: DropoutWords,
    dropout: Dropout,
}

impl HeadDropout {
    /// For the plane's words.
    pub const fn new(words: DropoutWords, dropout: Dropout) -> Self {
        Self { words, dropout }
    }

    /// The words of a query.
    pub const fn row(&self, query: usize) -> DropoutWords {
        self.words.of_row(query as u32)
    }

    /// A weight is dropped where its hash is below this.
    pub fn threshold(&self) -> u32 {
        self.dropout.threshold()
    }

    /// What the weights that stay are multiplied by.
    pub fn factor(&self) -> f32 {
        self.dropout.factor()
    }

    /// Whether the weight of a query and a key stays.
    pub fn keeps(&self, query: usize, key: usize) -> bool {
        self.row(query).hash(key as u32) >= self.threshold()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// How many of 256 × 256 weights of a plane stay, and how often two weights do that lie as far apart as given.
    fn kept(seed: u64, plane: u32, probability: f32, [rows, keys]: [usize; 2]) -> [f64; 2] {
        const SIDE: usize = 256;
        let head = HeadDropout::new(DropoutWords::of_plane(seed, plane), Dropout::new(probability));
        let places = || (0..SIDE).flat_map(|query| (0..SIDE).map(move |key| (query, key)));
        let share = |found: usize| found as f64 / (SIDE * SIDE) as f64;
        let both =
            |(query, key): (usize, usize)| head.keeps(query, key) && head.keeps(query + rows, key + keys);
        let alone = places().filter(|&(query, key)| head.keeps(query, key)).count();
        [share(alone), share(places().filter(|&place| both(place)).count())]
    }

    /// 65,536 draws: five standard deviations of a share are at most 0.01.
    #[test]
    fn as_many_weights_stay_as_should_and_neighbours_know_nothing_of_each_other() {
        for probability in [0.1, 0.17, 0.5, 0.9] {
            let stay = 1.0 - f64::from(probability);
            for (seed, plane) in [(0, 0), (0, 1), (1, 0), (1 << 32, 0), (u64::MAX, 77)] {
                for apart in [[0, 1], [1, 0], [1, 1], [0, 2], [0, 64], [16, 0]] {
                    let [alone, both] = kept(seed, plane, probability, apart);
                    assert!((alone - stay).abs() < 0.01, "{alone} of {stay}, seed {seed}, plane {plane}");
                    assert!((both - stay * stay).abs() < 0.01, "{both} of {}, {apart:?}", stay * stay);
                }
            }
        }
    }

    #[test]
    fn other_seeds_and_planes_leave_out_other_weights() {
        let words: Vec<_> = [(5, 0), (6, 0), (5 | 1 << 40, 0), (5, 1), (5, 2)]
            .map(|(seed, plane)| DropoutWords::of_plane(seed, plane))
            .to_vec();
        let head = |n: usize| HeadDropout::new(words[n], Dropout::new(0.5));
        for (a, b) in (0..words.len()).flat_map(|a| (0..a).map(move |b| (a, b))) {
            let alike = (0..64 * 64)
                .filter(|n| head(a).keeps(n / 64, n % 64) == head(b).keeps(n / 64, n % 64))
                .count();
            assert!((1_800..2_300).contains(&alike), "{alike} of 4096 alike, {a} and {b}");
        }
    }

    #[test]
    fn a_probability_that_leaves_out_nothing_is_no_dropout() {
        assert_eq!(Dropout::new(0.0).parse(), Ok(None));
        assert_eq!(Dropout::new(1e-12).parse(), Ok(None));
        assert_eq!(Dropout::new(0.25).parse(), Ok(Some(Dropout::new(0.25))));
        assert_eq!(Dropout::new(0.25).threshold(), 1 << 30);
        for wrong in [1.0, -0.1, f32::NAN, f32::INFINITY] {
            assert!(matches!(Dropout::new(wrong).parse(), Err(ProblemError::Dropout(_))), "{wrong}");
        }
    }
}
