//! AMX: eight registers that hold 16 × 16 f32, or 16 × 32 bf16, and an instruction that multiplies two of them.
//!
//! Stable Rust has no intrinsics for it, so products are written in assembly. On Linux a process must request the
//! registers ([`is_available`]) before it may use them.

// Explicit indices, no closures: a closure would be compiled without the kernel's target features.
#![allow(clippy::needless_range_loop)]

use std::{
    arch::{asm, x86_64::*},
    sync::OnceLock,
};

use half::bf16;

use super::{
    Simd,
    avx512::Avx512,
    avx512bf16,
    exp2::Exp2,
    matrix::{DEPTH, MatrixBlock, ROWS, SIDE, products},
    pairs::Pairs,
    tile::{self, NO_MAX, Scores, Vectors, load, store},
};

/// Vectors of a tile's rows.
const RV: usize = 2;
/// Maxima of a row that are taken side by side: each waits for four cycles, and two are taken in one.
const CHAINS: usize = 4;

/// Whether this machine has the instructions and the system lends the registers.
pub(crate) fn is_available() -> bool {
    static AVAILABLE: OnceLock<bool> = OnceLock::new();
    *AVAILABLE.get_or_init(|| avx512bf16::is_available() && has_bf16_tiles() && permitted())
}

/// What the processor says: bf16 products, tiles, and a system that keeps both parts of their state.
fn has_bf16_tiles() -> bool {
    // SAFETY: every machine with AVX-512 has CPUID leaf 7 and, where the system set bit 27 of leaf 1, XGETBV.
    unsafe {
        let (features, extended) = (__cpuid(1), __cpuid_count(7, 0));
        let has = |register: u32, bit: u32| register >> bit & 1 == 1;
        has(features.ecx, 27)
            && has(extended.edx, 22)
            && has(extended.edx, 24)
            && state_bits() & 0x6_0000 == 0x6_0000
    }
}

#[target_feature(enable = "xsave")]
unsafe fn state_bits() -> u64 {
    // SAFETY: the caller saw that the system uses XSAVE.
    unsafe { _xgetbv(0) }
}

/// Asks Linux for the registers, for the whole process; other systems are not asked.
#[cfg(target_os = "linux")]
fn permitted() -> bool {
    const ARCH_PRCTL: i64 = 158;
    const REQUEST_PERMISSION: usize = 0x1023;
    const TILE_DATA: usize = 18;
    let mut result = ARCH_PRCTL;
    // SAFETY: the call reads its two arguments and no memory; a kernel that does not know it says so.
    unsafe {
        asm!("syscall", inout("rax") result, in("rdi") REQUEST_PERMISSION, in("rsi") TILE_DATA,
            lateout("rcx") _, lateout("r11") _, options(nostack));
    }
    result == 0
}

#[cfg(not(target_os = "linux"))]
fn permitted() -> bool {
    false
}

/// What `ldtilecfg` reads: every register has 16 rows of 64 bytes.
#[repr(C, align(64))]
struct Config {
    palette: u8,
    start_row: u8,
    reserved: [u8; 14],
    row_bytes: [u16; 16],
    rows: [u8; 16],
}

const CONFIG: Config = {
    let (mut row_bytes, mut rows) = ([0; 16], [0; 16]);
    let mut n = 0;
    while n < 8 {
        (row_bytes[n], rows[n]) = (64, SIDE as u8);
        n += 1;
    }
    Config { palette: 1, start_row: 0, reserved: [0; 14], row_bytes, rows }
};

/// A product of 32 × 32 numbers: A is in squares, B in pairs.
#[repr(C)]
struct Corner {
    a: *const bf16,
    b: *const u32,
    c: *mut f32,
    /// Bytes from one row of a square to the next, and from 16 rows to the next 16.
    a_row: usize,
    a_half: usize,
    /// Bytes from one row to the next, and over 16 of them.
    b_row: usize,
    b_half: usize,
    c_row: usize,
    c_half: usize,
    /// Steps of [`DEPTH`] along what is summed over.
    depth: usize,
    /// Runs of such steps.
    count: usize,
    /// Bytes from `a` and `b` to where each run begins.
    runs: [[usize; 2]; 3],
}

macro_rules! multiply {
    ($corner:expr, $($start:literal),*) => {
        asm!(
            "mov {n}, [{x} + 16]",
            "mov {sa}, [{x} + 56]",
            $($start,)*
            "mov {sa}, [{x} + 24]",
            "mov {sb}, [{x} + 40]",
            "mov {count}, [{x} + 80]",
            "lea {runs}, [{x} + 88]",
            "3:",
            "mov {a}, [{x}]",
            "mov {b}, [{x} + 8]",
            "add {a}, [{runs}]",
            "add {b}, [{runs} + 8]",
            "mov {n}, [{x} + 72]",
            "2:",
            "mov {t}, [{x} + 32]",
            "add {t}, {a}",
            "tileloadd tmm6, [{b} + {sb}*1]",
            "tileloadd tmm4, [{a} + {sa}*1]",
            "tileloadd tmm7, [{b} + {sb}*1 + 64]",
            "tileloadd tmm5, [{t} + {sa}*1]",
            "tdpbf16ps tmm0, tmm4, tmm6",
            "tdpbf16ps tmm1, tmm4, tmm7",
            "tdpbf16ps tmm2, tmm5, tmm6",
            "tdpbf16ps tmm3, tmm5, tmm7",
            "add {a}, 1024",
            "add {b}, [{x} + 48]",
            "dec {n}",
            "jnz 2b",
            "add {runs}, 16",
            "dec {count}",
            "jnz 3b",
            "mov {n}, [{x} + 16]",
            "mov {sa}, [{x} + 56]",
            "mov {t}, [{x} + 64]",
            "add {t}, {n}",
            "tilestored [{n} + {sa}*1], tmm0",
            "tilestored [{n} + {sa}*1 + 64], tmm1",
            "tilestored [{t} + {sa}*1], tmm2",
            "tilestored [{t} + {sa}*1 + 64], tmm3",
            x = in(reg) $corner,
            a = out(reg) _, b = out(reg) _, sa = out(reg) _, sb = out(reg) _,
            n = out(reg) _, t = out(reg) _, count = out(reg) _, runs = out(reg) _,
            out("tmm0") _, out("tmm1") _, out("tmm2") _, out("tmm3") _,
            out("tmm4") _, out("tmm5") _, out("tmm6") _, out("tmm7") _,
            options(nostack),
        )
    };
}

impl Corner {
    /// `C = A·B`.
    ///
    /// # Safety
    /// Registers are configured; all that strides and runs reach is there.
    unsafe fn write(&self) {
        // SAFETY: the caller's promise.
        unsafe {
            multiply!(self, "tilezero tmm0", "tilezero tmm1", "tilezero tmm2", "tilezero tmm3");
        }
    }

    /// `C += A·B`.
    ///
    /// # Safety
    /// As for [`Self::write`].
    unsafe fn add(&self) {
        // SAFETY: the caller's promise.
        unsafe {
            multiply!(
                self,
                "mov {t}, [{x} + 64]",
                "add {t}, {n}",
                "tileloadd tmm0, [{n} + {sa}*1]",
                "tileloadd tmm1, [{n} + {sa}*1 + 64]",
                "tileloadd tmm2, [{t} + {sa}*1]",
                "tileloadd tmm3, [{t} + {sa}*1 + 64]"
            );
        }
    }
}

/// Folds a block of keys into a tile.
///
/// # Safety
/// [`is_available`] said yes.
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx512bf16,avx2,fma,f16c")]
pub(crate) unsafe fn tile(block: &mut MatrixBlock<'_>) {
    block.check();
    // SAFETY: the caller's promise, and `check` saw that all buffers hold what the sizes say.
    unsafe {
        asm!("ldtilecfg [{}]", in(reg) &CONFIG, options(nostack, readonly));
        scores(block);
        let top = adjust(block);
        probabilities(block, top);
        accumulate(block);
        // Whoever is switched away from with registers in use has 8 KiB saved.
        asm!("tilerelease", options(nostack, nomem));
    }
}

/// Writes all dot products, those of padding included.
#[inline(always)]
unsafe fn scores(block: &mut MatrixBlock<'_>) {
    let [dim, _] = block.dims;
    let (band, plane) = (SIDE * dim, block.room * dim);
    let line = ROWS * size_of::<u32>();
    // SAFETY: `MatrixBlock::check`.
    unsafe {
        for n in (0..block.padded()).step_by(2 * SIDE) {
            let a = block.k.as_ptr().add((block.skip + n) * dim);
            let c = block.scores.as_mut_ptr().add(n * ROWS);
            corner(block, (a, band, plane), (block.q.as_ptr(), dim / 2 * line), c, dim).write();
        }
    }
}

/// The product that starts at `a`, `b` and `c` and sums over `depth` numbers; `band` numbers hold 16 rows of A.
#[inline(always)]
fn corner(
    block: &MatrixBlock<'_>,
    (a, band, a_part): (*const bf16, usize, usize),
    (b, b_part): (*const u32, usize),
    c: *mut f32,
    depth: usize,
) -> Corner {
    let line = ROWS * size_of::<f32>();
    let products = products(block.parts);
    let mut runs = [[0; 2]; 3];
    for n in 0..products.len() {
        runs[n] = [products[n][0] * a_part * size_of::<bf16>(), products[n][1] * b_part];
    }
    Corner {
        a,
        b,
        c,
        a_row: DEPTH * size_of::<bf16>(),
        a_half: band * size_of::<bf16>(),
        b_row: line,
        b_half: SIDE * line,
        c_row: line,
        c_half: SIDE * line,
        depth: depth / DEPTH,
        count: products.len(),
        runs,
    }
}

/// Caps and masks the scores where they must be; returns the largest of each row.
#[inline(always)]
unsafe fn adjust(block: &mut MatrixBlock<'_>) -> Vectors<Avx512, RV> {
    let scores = Scores { at: block.scores.as_mut_ptr(), keys: block.keys };
    // SAFETY: `MatrixBlock::check`.
    unsafe {
        if block.logits.softcap.is_some() || block.bounds.is_some() {
            return tile::adjust::<Avx512, RV>(scores, block.logits.softcap, block.bounds);
        }
        let mut tops = [[Avx512::splat(NO_MAX); RV]; CHAINS];
        let whole = block.keys / CHAINS * CHAINS;
        for n in (0..whole).step_by(CHAINS) {
            for chain in 0..CHAINS {
                tops[chain] = larger(tops[chain], load::<Avx512, RV>(scores.at.add((n + chain) * ROWS)));
            }
        }
        for n in whole..block.keys {
            tops[0] = larger(tops[0], load::<Avx512, RV>(scores.at.add(n * ROWS)));
        }
        larger(larger(tops[0], tops[1]), larger(tops[2], tops[3]))
    }
}

/// The larger of `top` and each of `s` that is a number.
#[inline(always)]
unsafe fn larger(mut top: Vectors<Avx512, RV>, s: Vectors<Avx512, RV>) -> Vectors<Avx512, RV> {
    for r in 0..RV {
        // SAFETY: the caller has AVX-512.
        top[r] = unsafe { Avx512::max(s[r], top[r]) };
    }
    top
}

/// Turns scores into pairs of weights, part after part, and shrinks what was summed before.
#[inline(always)]
unsafe fn probabilities(block: &mut MatrixBlock<'_>, top: Vectors<Avx512, RV>) {
    let (at, to) = (block.scores.as_mut_ptr(), block.weights.as_mut_ptr());
    let plane = block.padded() / 2 * ROWS;
    // SAFETY: `MatrixBlock::check`.
    unsafe {
        let exp2 = Exp2::<Avx512>::new(block.logits.factor);
        let tile::Update { max, mut sum, shrink } = tile::update::<Avx512, RV>(&mut block.state, exp2, top);
        let dropout = block.dropout;
        if block.keys % 2 == 1 {
            store::<Avx512, RV>(at.add(block.keys * ROWS), [Avx512::splat(f32::NEG_INFINITY); RV]);
        }
        let pairs = block.keys.div_ceil(2);
        for n in 0..pairs {
            let first = load::<Avx512, RV>(at.add(2 * n * ROWS));
            let second = load::<Avx512, RV>(at.add((2 * n + 1) * ROWS));
            for r in 0..RV {
                let mut a = exp2.of(Avx512::sub(first[r], max[r]));
                let mut b = exp2.of(Avx512::sub(second[r], max[r]));
                sum[r] = Avx512::add(sum[r], Avx512::add(a, b));
                if let Some(dropout) = dropout {
                    a = dropout.along_rows::<Avx512>(r * Avx512::LANES, 2 * n, a);
                    b = dropout.along_rows::<Avx512>(r * Avx512::LANES, 2 * n + 1, b);
                }
                let to = to.add(n * ROWS + r * Avx512::LANES);
                let mut rounded = Avx512::round_pairs(a, b);
                Avx512::store_pairs(to, rounded);
                for part in 1..block.parts {
                    a = Avx512::sub(a, first_of(rounded));
                    b = Avx512::sub(b, second_of(rounded));
                    rounded = Avx512::round_pairs(a, b);
                    Avx512::store_pairs(to.add(part * plane), rounded);
                }
            }
        }
        for part in 0..block.parts {
            let unused = &mut block.weights[part * plane + pairs * ROWS..(part + 1) * plane];
            unused.fill(0);
        }
        store::<Avx512, RV>(block.state.sum.as_mut_ptr(), sum);
        scale(block, shrink);
    }
}

/// The first numbers of pairs.
#[inline(always)]
unsafe fn first_of(pairs: __m512i) -> __m512 {
    // SAFETY: the caller has AVX-512.
    unsafe { _mm512_castsi512_ps(_mm512_slli_epi32::<16>(pairs)) }
}

/// The second numbers of pairs.
#[inline(always)]
unsafe fn second_of(pairs: __m512i) -> __m512 {
    // SAFETY: the caller has AVX-512.
    unsafe { _mm512_castsi512_ps(_mm512_and_si512(pairs, _mm512_set1_epi32(0xffff_0000_u32.cast_signed()))) }
}

/// Multiplies what was summed before, unless all factors are 1: after a few blocks maxima seldom change.
#[inline(always)]
unsafe fn scale(block: &mut MatrixBlock<'_>, shrink: Vectors<Avx512, RV>) {
    // SAFETY: `MatrixBlock::check`.
    unsafe {
        let one = Avx512::splat(1.0);
        let kept = _mm512_cmp_ps_mask::<_CMP_EQ_OQ>(shrink[0], one)
            & _mm512_cmp_ps_mask::<_CMP_EQ_OQ>(shrink[1], one);
        if kept == u16::MAX {
            return;
        }
        for d in 0..block.dims[1] {
            let at = block.state.out.as_mut_ptr().add(d * ROWS);
            let mut x = load::<Avx512, RV>(at);
            for r in 0..RV {
                x[r] = Avx512::mul(x[r], shrink[r]);
            }
            store::<Avx512, RV>(at, x);
        }
    }
}

/// Adds the values, weighted.
#[inline(always)]
unsafe fn accumulate(block: &mut MatrixBlock<'_>) {
    let [_, dim] = block.dims;
    let (band, plane) = (SIDE * block.room, block.room * dim);
    let (keys, line) = (block.padded(), ROWS * size_of::<u32>());
    // SAFETY: `MatrixBlock::check`.
    unsafe {
        for d in (0..dim).step_by(2 * SIDE) {
            let a = block.v.as_ptr().add(d * block.room + SIDE * block.skip);
            let c = block.state.out.as_mut_ptr().add(d * ROWS);
            corner(block, (a, band, plane), (block.weights.as_ptr(), keys / 2 * line), c, keys).add();
        }
    }
}

/// Transposes 16 rows of `width` numbers, square by square: see [`super::runner::Runner::turn`].
///
/// # Safety
/// [`is_available`] said yes.
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx2,fma,f16c")]
pub(crate) unsafe fn turn(from: &[u32], width: usize, to: &mut [u32], [row, square]: [usize; 2]) {
    assert!(width.is_multiple_of(SIDE) && from.len() >= SIDE * width, "16 rows of whole vectors");
    let last = (width / SIDE).saturating_sub(1) * square + (SIDE - 1) * row + SIDE;
    assert!(width == 0 || to.len() >= last, "the result fits");
    for n in 0..width / SIDE {
        // SAFETY: 16 numbers lie in each row from there on, and there is room for a square.
        unsafe { turn_square(from.as_ptr().add(n * SIDE), width, to.as_mut_ptr().add(n * square), row) };
    }
}

/// Transposes 16 × 16 numbers.
#[inline(always)]
unsafe fn turn_square(from: *const u32, stride: usize, to: *mut u32, to_stride: usize) {
    // SAFETY: the caller's promise.
    unsafe {
        let mut x = [_mm512_setzero_ps(); SIDE];
        for n in 0..SIDE {
            x[n] = _mm512_loadu_ps(from.add(n * stride).cast());
        }
        let mut y = x;
        for n in (0..SIDE).step_by(2) {
            y[n] = _mm512_unpacklo_ps(x[n], x[n + 1]);
            y[n + 1] = _mm512_unpackhi_ps(x[n], x[n + 1]);
        }
        for n in (0..SIDE).step_by(4) {
            for h in 0..2 {
                let (a, b) = (_mm512_castps_pd(y[n + h]), _mm512_castps_pd(y[n + 2 + h]));
                x[n + 2 * h] = _mm512_castpd_ps(_mm512_unpacklo_pd(a, b));
                x[n + 2 * h + 1] = _mm512_castpd_ps(_mm512_unpackhi_pd(a, b));
            }
        }
        // Quarter q of x[4g + c] is column 4q + c of rows 4g .. 4g + 4.
        for c in 0..4 {
            let low = _mm512_shuffle_f32x4::<0x88>(x[c], x[4 + c]);
            let high = _mm512_shuffle_f32x4::<0x88>(x[8 + c], x[12 + c]);
            y[c] = _mm512_shuffle_f32x4::<0x88>(low, high);
            y[8 + c] = _mm512_shuffle_f32x4::<0xdd>(low, high);
            let low = _mm512_shuffle_f32x4::<0xdd>(x[c], x[4 + c]);
            let high = _mm512_shuffle_f32x4::<0xdd>(x[8 + c], x[12 + c]);
            y[4 + c] = _mm512_shuffle_f32x4::<0x88>(low, high);
            y[12 + c] = _mm512_shuffle_f32x4::<0xdd>(low, high);
        }
        for n in 0..SIDE {
            _mm512_storeu_ps(to.add(n * to_stride).cast(), y[n]);
        }
    }
}
