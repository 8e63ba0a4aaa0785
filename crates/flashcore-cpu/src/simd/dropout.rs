//! Which weights of a block are dropped: the hash of each one's position, vector by vector.
//!
//! Vectors of prefill run along the rows of a tile, those of decode and of gradients along the keys. [`Simd::kept`] serves
//! both: it takes the initial hash state of each lane. Called by the kernels that compute weights.

use flashcore_core::{DROPOUT_STEP, Dropout, DropoutWords};

use super::{MOST_LANES, Simd};

/// What the words of neighbouring keys are apart from that of the first.
const STEPS: [u32; MOST_LANES] = {
    let mut steps = [0; MOST_LANES];
    let mut n = 0;
    while n < MOST_LANES {
        steps[n] = DROPOUT_STEP.wrapping_mul(n as u32);
        n += 1;
    }
    steps
};

/// Initial hash states of some rows; no rows if nothing is dropped.
pub(crate) struct RowWords<'a>([&'a mut [u32]; 2]);

impl<'a> RowWords<'a> {
    /// In this memory, a number for each row in either half.
    pub(crate) fn new(memory: [&'a mut [f32]; 2]) -> Self {
        Self(memory.map(bytemuck::cast_slice_mut))
    }

    /// Sets those of row `n`.
    pub(crate) fn set(&mut self, n: usize, words: DropoutWords) {
        [self.0[0][n], self.0[1][n]] = words.words();
    }

    /// What a kernel drops from these rows and keys from number `key` of the sequence on.
    pub(crate) fn block(&self, dropout: Option<Dropout>, key: usize) -> Option<BlockDropout<'_>> {
        let (dropout, [first, second]) = (dropout?, &self.0);
        let (threshold, factor) = (dropout.threshold(), dropout.factor());
        Some(BlockDropout { words: [first, second], key: key as u32, threshold, factor })
    }
}

/// Dropout of a block.
#[derive(Clone, Copy)]
pub(crate) struct BlockDropout<'a> {
    /// What the hashes of each row begin with.
    words: [&'a [u32]; 2],
    /// The number of the block's first key.
    key: u32,
    /// Weights with a hash below it are dropped.
    threshold: u32,
    /// What the others are multiplied by in the end.
    pub(crate) factor: f32,
}

impl BlockDropout<'_> {
    /// Panics unless it knows so many rows.
    pub(crate) fn check(&self, rows: usize) {
        assert!(self.words.into_iter().all(|words| words.len() >= rows), "words of rows fit");
    }

    /// How far the word of the block's key `n` is from that of key 0.
    #[inline(always)]
    fn offset(&self, n: usize) -> u32 {
        self.key.wrapping_add(n as u32).wrapping_mul(DROPOUT_STEP)
    }

    /// `x` where the weights of key `n` and a vector of rows, the first of which is `row`, stay; 0 elsewhere.
    ///
    /// # Safety
    /// The machine has the instructions of `S`, and [`Self::check`] saw the rows.
    #[inline(always)]
    pub(crate) unsafe fn along_rows<S: Simd>(&self, row: usize, n: usize, x: S::V) -> S::V {
        let [first, second] = self.words;
        // SAFETY: the caller's promise; words are loaded as the bits they are.
        unsafe {
            let words = [S::load(first.as_ptr().add(row).cast()), S::load(second.as_ptr().add(row).cast())];
            S::kept(x, words, self.offset(n), self.threshold)
        }
    }

    /// `x` where the weights of row `row` and a vector of keys, the first of which is `n`, stay; 0 elsewhere.
    ///
    /// # Safety
    /// As for [`Self::along_rows`].
    #[inline(always)]
    pub(crate) unsafe fn along_keys<S: Simd>(&self, row: usize, n: usize, x: S::V) -> S::V {
        let [first, second] = self.words;
        // SAFETY: the caller's promise; no vector has more lanes.
        unsafe {
            let offset = first.get_unchecked(row).wrapping_add(self.offset(n));
            let second = S::splat(f32::from_bits(*second.get_unchecked(row)));
            S::kept(x, [S::load(STEPS.as_ptr().cast()), second], offset, self.threshold)
        }
    }
}

#[cfg(test)]
mod tests {
    use flashcore_core::HeadDropout;

    use super::*;
    use crate::{
        SimdLevel,
        simd::{Kernel, runner::Runner},
    };

    const ROWS: usize = 32;
    const KEYS: usize = 48;
    /// Numbers of keys beyond 2³¹ wrap as all others do.
    const FIRST_KEYS: [usize; 3] = [0, 77, (1 << 31) - 5];

    /// Marks the weights that stay, `[row][key]`, by vectors of either way.
    struct Marks<'a> {
        dropout: BlockDropout<'a>,
        along_rows: &'a mut [f32],
        along_keys: &'a mut [f32],
    }

    impl Kernel for Marks<'_> {
        type Output = ();

        #[inline(always)]
        unsafe fn run<S: Simd>(self) {
            self.dropout.check(ROWS);
            let mut column = [0.0; MOST_LANES];
            // SAFETY: whole vectors of what `check` saw and of both slices; the caller promises the instructions.
            unsafe {
                for (key, row) in
                    (0..KEYS).flat_map(|key| (0..ROWS).step_by(S::LANES).map(move |row| (key, row)))
                {
                    S::store(column.as_mut_ptr(), self.dropout.along_rows::<S>(row, key, S::splat(7.0)));
                    for (n, mark) in column[..S::LANES].iter().enumerate() {
                        self.along_rows[(row + n) * KEYS + key] = *mark;
                    }
                }
                for (row, key) in
                    (0..ROWS).flat_map(|row| (0..KEYS).step_by(S::LANES).map(move |key| (row, key)))
                {
                    let kept = self.dropout.along_keys::<S>(row, key, S::splat(7.0));
                    S::store(self.along_keys[row * KEYS + key..].as_mut_ptr(), kept);
                }
            }
        }
    }

    #[test]
    fn vectors_leave_out_what_the_definition_does() {
        for (level, first) in SimdLevel::ALL.into_iter().flat_map(|level| FIRST_KEYS.map(|key| (level, key)))
        {
            let Some(runner) = Runner::new(level) else { continue };
            for probability in [0.1, 0.5, 0.96] {
                let dropout = Dropout::new(probability);
                let head = HeadDropout::new(DropoutWords::of_plane(3 << 40 | 5, 9), dropout);
                let mut memory = [[0.0; ROWS]; 2];
                let [a, b] = &mut memory;
                let mut words = RowWords::new([a, b]);
                (0..ROWS).for_each(|n| words.set(n, head.row(n)));
                let (mut along_rows, mut along_keys) = ([0.0; ROWS * KEYS], [0.0; ROWS * KEYS]);
                let dropout = words.block(Some(dropout), first).unwrap();
                runner.run(Marks { dropout, along_rows: &mut along_rows, along_keys: &mut along_keys });
                let mark = |at: usize| if head.keeps(at / KEYS, first + at % KEYS) { 7.0 } else { 0.0 };
                let expected: Vec<f32> = (0..ROWS * KEYS).map(mark).collect();
                assert!(along_rows[..] == expected, "{level}, {probability}, rows from key {first}");
                assert!(along_keys[..] == expected, "{level}, {probability}, keys from key {first}");
            }
        }
    }
}
