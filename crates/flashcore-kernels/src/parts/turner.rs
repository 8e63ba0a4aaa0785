//! Values of 8 bits, transposed through shared memory: 128 keys of a head for each CTA, features of a key in, keys of a
//! feature out ([`flashcore_core::turn_values`] says in which order). Used by `turn_values` and `quantise`.

use flashcore_core::{COUNT_ROWS, COUNTS, TURNED_KEYS};
use flashcore_tile::{Builder, Global, Pred, Reg, Scope, Shared, U32, U64, Val};

/// Rows after the features, of which the first have a constant for every key.
pub(crate) const COUNTED: u32 = COUNT_ROWS as u32;
/// Keys of a CTA.
pub(crate) const KEYS: u32 = TURNED_KEYS as u32;
/// Threads of a CTA.
pub(crate) const THREADS: u32 = 256;
/// Features of a chunk, and bytes of one load or store.
pub(crate) const CHUNK: u32 = 16;
/// Keys whose order changes among themselves.
const SIXTEEN: u32 = 16;
/// Sixteens of a CTA.
const SIXTEENS: u32 = KEYS / SIXTEEN;

/// Turns the keys of a CTA.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Turner {
    dim: u32,
    memory: Shared,
}

/// Neighbouring features of a key that one thread brings.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Chunk {
    /// Whether there is such a chunk.
    pub(crate) there: Pred,
    /// Which of the CTA's keys.
    pub(crate) key: Reg<U32>,
    /// The first feature.
    pub(crate) column: Reg<U32>,
}

/// Bytes from a key's features to the next key's in shared memory, such that eight keys' words lie in banks of their own.
const fn pitch(dim: u32) -> u32 {
    dim.next_multiple_of(32) + CHUNK
}

impl Turner {
    /// For heads of `dim` features, a multiple of 16.
    pub(crate) fn reserve(b: &mut Builder, dim: u32) -> Self {
        let memory = b.shared(KEYS * pitch(dim), CHUNK);
        Self { dim, memory: b.shared_at(memory) }
    }

    /// The chunks of a thread.
    pub(crate) fn chunks(&self, b: &mut Builder, thread: Reg<U32>) -> Vec<Chunk> {
        let chunks = self.dim / CHUNK;
        let chunk = |first: u32| {
            let number = b.let_(thread + first);
            Chunk {
                there: b.let_(number.lt(KEYS * chunks)),
                key: b.let_(number / chunks),
                column: b.let_((number % chunks) * CHUNK),
            }
        };
        (0..KEYS * chunks).step_by(THREADS as usize).map(chunk).collect()
    }

    /// Puts a chunk down: those of one place of every sixteen lie next to each other.
    pub(crate) fn put(&self, b: &mut Builder, chunk: &Chunk, words: [Reg<U32>; 4]) {
        let line = b.let_((chunk.key % SIXTEEN) * SIXTEENS + chunk.key / SIXTEEN);
        let to = b.let_(line * pitch(self.dim) + chunk.column);
        let to = self.memory.plus(b, to);
        b.predicated(chunk.there, |b| b.store_shared(to, &words.map(Val::from)));
    }

    /// Writes the rows of the CTA's keys from `start` on, `row` bytes from one to the next, when all chunks have been put.
    pub(crate) fn write(&self, b: &mut Builder, (start, row): (Reg<U64>, Reg<U64>), thread: Reg<U32>) {
        b.sync_cta();
        self.scatter(b, (start, row), thread);
        self.count(b, (start, row), thread);
    }

    /// Writes the keys of every feature: a thread has four features of sixteen keys.
    fn scatter(&self, b: &mut Builder, (start, row): (Reg<U64>, Reg<U64>), thread: Reg<U32>) {
        let units = self.dim / 4 * SIXTEENS;
        for first in (0..units).step_by(THREADS as usize) {
            let unit = b.let_(thread + first);
            let (four, sixteen) = (b.let_((unit / SIXTEENS) * 4), b.let_(unit % SIXTEENS));
            b.if_(unit.lt(units), |b| {
                let from = b.let_(sixteen * pitch(self.dim) + four);
                let from = self.memory.plus(b, from);
                let mut features = [const { Vec::new() }; 4];
                for quad in 0..4 {
                    let words = [0, 1, 2, 3].map(|i| {
                        let key = 2 * quad + (i & 1) + 8 * (i >> 1);
                        let [word] = b.load_shared::<U32, 1>(from.at(key * SIXTEENS * pitch(self.dim)));
                        word
                    });
                    let turned = turn(b, words);
                    features.iter_mut().zip(turned).for_each(|(feature, word)| feature.push(word.into()));
                }
                let skip = b.let_(four.widen() * row + (sixteen * SIXTEEN).widen());
                let to = b.var_in(Scope::Lane, start + skip);
                for feature in features {
                    let feature: Vec<Val<U32>> = feature;
                    b.store_global(Global::from(to), &feature);
                    b.add_to(to, row);
                }
            });
        }
    }

    /// Writes the rows of constants and the zeros behind: a thread has sixteen places of one row. What is hidden has a
    /// probability of zero, so that it counts for nothing.
    fn count(&self, b: &mut Builder, (start, row): (Reg<U64>, Reg<U64>), thread: Reg<U32>) {
        b.if_(thread.lt(COUNTED * SIXTEENS), |b| {
            let (number, sixteen) = (b.let_(thread / SIXTEENS), b.let_((thread % SIXTEENS) * SIXTEEN));
            let zero = b.var_in::<U32>(Scope::Lane, 0);
            let word = (0..).zip(COUNTS).fold(zero, |word, (n, constant)| {
                let four = u32::from_ne_bytes([constant.to_bits(); 4]);
                b.let_(number.eq(n).select(four, word))
            });
            let skip = b.let_((number + self.dim).widen() * row + sixteen.widen());
            let to = b.let_(start + skip);
            b.store_global(Global::from(to), &[Val::from(word); 4]);
        });
    }
}

/// Turns four words of four bytes: byte `i` of word `j` becomes byte `j` of word `i`.
fn turn(b: &mut Builder, [w0, w1, w2, w3]: [Reg<U32>; 4]) -> [Reg<U32>; 4] {
    let [low, high] =
        [[w0, w1], [w2, w3]].map(|[x, y]| [0x5140, 0x7362].map(|order| b.bytes_of(x, y, order)));
    let out = |b: &mut Builder, n: usize, order| b.bytes_of(low[n], high[n], order);
    [out(b, 0, 0x5410), out(b, 0, 0x7632), out(b, 1, 0x5410), out(b, 1, 0x7632)]
}
