//! Shared memory: too much, misaligned, never reserved; tiles and rings that do not fit.

use flashcore_ptx::layout::Swizzle;
use flashcore_tile::{B32, CopyWidth, Element, F32, Half, MatrixOrder, Packed, Pipeline, U32, U64};

use crate::{AMPERE, Bench, HOPPER, check};

#[test]
fn more_than_an_sm_has() {
    AMPERE.check(|b| {
        b.smem_tile(Half::F16, [128, 128], Swizzle::B128, 6); //~ the kernel needs 196608 bytes of shared memory but a CTA has at most 166912
    });
}

#[test]
fn more_than_numbers_hold() {
    check(|b| {
        b.smem_tile(Half::F16, [1 << 16, 1 << 16], Swizzle::B128, 9); //~ bytes of shared memory but a CTA has at most 232448
    });
}

#[test]
fn an_alignment_that_is_none() {
    check(|b| {
        b.shared(64, 0); //~ an alignment must be a power of two, at most 1024, not 0
    });
}

#[test]
fn a_word_at_an_odd_place() {
    check(|b| {
        b.shared(64, 4);
        let at = b.shared_at(2);
        b.load_shared::<U32, 1>(at); //~ must be a multiple of 4
    });
}

#[test]
fn four_words_at_a_place_for_one() {
    check(|b| {
        b.shared(64, 16);
        let at = b.shared_at(8);
        b.store_shared::<F32>(at, &[1.0.into(), 2.0.into(), 3.0.into(), 4.0.into()]); //~ must be a multiple of 16
    });
}

#[test]
fn a_copy_to_half_of_a_chunk() {
    AMPERE.check(|b| {
        b.shared(64, 16);
        let (to, from) = (b.shared_at(8), b.var::<U64>(0));
        b.copy_async(CopyWidth::B16, to, from, None); //~ must be a multiple of 16
    });
}

#[test]
fn an_mbarrier_at_half_its_place() {
    check(|b| {
        let at = b.mbarriers(2);
        b.mbarrier_at(at + 4).init(b, 1); //~ must be a multiple of 8
    });
}

#[test]
fn matrices_at_half_a_row() {
    check(|b| {
        b.shared(1024, 1024);
        let (at, x) = (b.shared_at(8), b.var::<B32>(Packed(0)));
        b.stmatrix(at, [x; 4]); //~ must be a multiple of 16
    });
}

#[test]
fn memory_that_nobody_reserved() {
    check(|b| {
        let at = b.mbarriers(1);
        b.mbarrier_at(at + 8); //~ byte 8 of shared memory is used, but only 8 are reserved before this line
    });
}

#[test]
fn columns_that_no_swizzle_divides() {
    check(|b| {
        b.smem_tile(Half::F16, [64, 48], Swizzle::B128, 1); //~ needs rows in eights and columns in 64s
    });
}

#[test]
fn rows_that_no_pattern_divides() {
    check(|b| {
        b.smem_tile(Half::F16, [60, 64], Swizzle::B128, 1); //~ a 60x64 tile with B128 swizzle needs rows in eights
    });
}

#[test]
fn a_tile_over_others_in_the_middle_of_a_pattern() {
    check(|b| {
        b.smem_tile(Half::F16, [64, 64], Swizzle::B128, 2);
        b.smem_tile_over(512, Half::F16, [64, 64], Swizzle::B128); //~ must start at a multiple of 1024
    });
}

#[test]
fn a_tile_over_others_that_is_larger() {
    check(|b| {
        b.smem_tile(Half::F16, [64, 64], Swizzle::B128, 1);
        b.smem_tile_over(0, Half::F16, [128, 64], Swizzle::B128); //~ must start at a multiple of 1024 and end by 8192
    });
}

#[test]
fn a_tile_over_others_with_odd_columns() {
    check(|b| {
        b.smem_tile(Half::F16, [64, 64], Swizzle::B128, 1);
        b.smem_tile_over(0, Half::F16, [64, 40], Swizzle::B64); //~ columns in 32s
    });
}

#[test]
fn a_ring_of_more_stages_than_tiles() {
    check(|b| {
        let tile = b.smem_tile(Half::F16, [64, 64], Swizzle::B128, 2);
        Pipeline::new(b, tile, 3, 1); //~ a pipeline of 3 stages over 2 copies of its tile: it takes 1 to 2
    });
}

#[test]
fn a_ring_that_nobody_empties() {
    check(|b| {
        let tile = b.smem_tile(Half::F16, [64, 64], Swizzle::B128, 2);
        Pipeline::new(b, tile, 2, 0).init(b); //~ arrivals, not 0
    });
}

#[test]
fn a_block_outside_of_its_tile() {
    AMPERE.check(|b| {
        let tile = b.smem_tile(Half::F16, [64, 64], Swizzle::B128, 1);
        let view = tile.matrix_rows(b, MatrixOrder::RowsFirst).at(b, 0);
        view.load(b, 64, 0); //~ no 16x16 block starts at 64, 0 of a 64x64 tile
    });
}

#[test]
fn a_block_between_columns() {
    AMPERE.check(|b| {
        let tile = b.smem_tile(Half::F16, [64, 64], Swizzle::B128, 1);
        let view = tile.matrix_rows(b, MatrixOrder::ColumnsFirst).at(b, 0);
        view.load_transposed(b, 0, 8); //~ no 16x16 block starts at 0, 8 of a 64x64 tile
    });
}

#[test]
fn matrix_rows_without_a_swizzle() {
    AMPERE.check(|b| {
        let tile = b.smem_tile(Half::F16, [64, 8], Swizzle::None, 1);
        tile.matrix_rows(b, MatrixOrder::RowsFirst); //~ ldmatrix over 16 columns needs a swizzled tile
    });
}

#[test]
fn little_shared_memory_on_gpus_for_workstations() {
    Bench { target: flashcore_ptx::target::Target::Sm86, ..HOPPER }.check(|b| {
        b.shared(100 * 1024, 16); //~ a CTA has at most 101376
    });
}

#[test]
fn words_of_a_tile_of_halves() {
    AMPERE.check(|b| {
        let tile = b.smem_tile(Half::F16, [64, 64], Swizzle::B128, 1);
        tile.word_rows(b); //~ words are read from a swizzled tile of 32-bit elements
    });
}

#[test]
fn words_outside_of_their_tile() {
    AMPERE.check(|b| {
        let tile = b.smem_tile(Element::F32, [64, 32], Swizzle::B128, 1);
        let view = tile.word_rows(b).at(b, 0);
        view.load(b, 56, 16);
        view.load(b, 0, 24); //~ no 8x16 block starts at 0, 24 of a 64x32 tile
    });
}
