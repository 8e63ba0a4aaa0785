//! Every formula of `layout`, element by element.

use flashcore_ptx::{
    launch::TensorElement,
    layout::{
        Major, MatrixDescriptor, Place, Swizzle, Tile, TileError, box_address, box_bytes, fragment_a,
        fragment_b, fragment_c, fragment_home, ldmatrix_element, ldmatrix_row, warpgroup_fragment,
    },
};
use std::collections::HashSet;

/// The places that `lanes` × `elements` cover are exactly a `rows` × `cols` matrix, each once.
fn check_covers(rows: u32, cols: u32, lanes: u32, elements: u32, place: impl Fn(u32, u32) -> Place) {
    let all: Vec<Place> =
        (0..lanes).flat_map(|l| (0..elements).map(move |i| (l, i))).map(|(l, i)| place(l, i)).collect();
    assert!(all.iter().all(|p| p.row < rows && p.col < cols));
    assert_eq!(all.iter().collect::<HashSet<_>>().len(), (rows * cols) as usize);
    assert_eq!(all.len(), (rows * cols) as usize);
}

#[test]
fn fragments_cover_their_matrices_once() {
    check_covers(16, 16, 32, 8, |l, i| fragment_a(l, i, 2));
    check_covers(16, 8, 32, 4, |l, i| fragment_a(l, i, 2));
    check_covers(16, 32, 32, 16, |l, i| fragment_a(l, i, 4));
    check_covers(16, 8, 32, 4, |l, i| fragment_a(l, i, 1));
    check_covers(8, 8, 32, 2, |l, i| fragment_b(l, i, 2));
    check_covers(16, 8, 32, 4, |l, i| fragment_b(l, i, 2));
    check_covers(32, 8, 32, 8, |l, i| fragment_b(l, i, 4));
    check_covers(8, 8, 32, 2, |l, i| fragment_b(l, i, 1));
    check_covers(16, 8, 32, 4, fragment_c);
    check_covers(8, 8, 32, 2, |l, h| ldmatrix_element(l, h, false));
    check_covers(8, 8, 32, 2, |l, h| ldmatrix_element(l, h, true));
    for n in (8..=256).step_by(8) {
        check_covers(64, n, 128, n / 2, |t, i| warpgroup_fragment(t, i, 2));
    }
}

#[test]
fn fragments_match_the_manual() {
    // PTX ISA, figures of mma.m16n8k16 and wgmma accumulators, corners by hand.
    for (lane, i, row, col) in [(0, 0, 0, 0), (0, 2, 8, 0), (0, 4, 0, 8), (5, 1, 1, 3), (31, 7, 15, 15)] {
        assert_eq!(fragment_a(lane, i, 2), Place { row, col }, "A, lane {lane}, element {i}");
    }
    for (lane, i, k, n) in [(0, 0, 0, 0), (1, 1, 3, 0), (4, 2, 8, 1), (31, 3, 15, 7)] {
        assert_eq!(fragment_b(lane, i, 2), Place { row: k, col: n }, "B, lane {lane}, element {i}");
    }
    assert_eq!(warpgroup_fragment(127, 63, 2), Place { row: 63, col: 127 });
}

#[test]
fn home_inverts_fragment() {
    for per_register in [1, 2, 4] {
        for lane in 0..32 {
            for i in 0..16 * per_register {
                assert_eq!(fragment_home(fragment_a(lane, i, per_register), per_register), (lane, i));
            }
        }
    }
}

#[test]
fn accumulator_is_the_next_a_operand() {
    // Values 8j..8j+8 of S are the A fragment of columns 16j..16j+16 of P: no shuffle between the two products.
    for thread in 0..128 {
        for j in 0..16 {
            for i in 0..8 {
                let (s, a) = (warpgroup_fragment(thread, 8 * j + i, 2), warpgroup_fragment(thread, i, 2));
                assert_eq!(s, Place { row: a.row, col: a.col + 16 * j });
            }
        }
    }
}

#[test]
fn ldmatrix_yields_the_mma_fragments() {
    // x4 over the four 8×8 quadrants of a 16×16 A tile, rows first, gives exactly the A fragment.
    for lane in 0..32 {
        for i in 0..8 {
            let (matrix, half) = (i / 2, i % 2);
            let inside = ldmatrix_element(lane, half, false);
            let (row, col) = (inside.row + 8 * (matrix & 1), inside.col + 8 * (matrix >> 1));
            assert_eq!(fragment_a(lane, i, 2), Place { row, col });
        }
        // Transposed, from V stored as [k][n], it gives the B fragment.
        for i in 0..4 {
            let inside = ldmatrix_element(lane, i % 2, true);
            assert_eq!(fragment_b(lane, i, 2), Place { row: inside.row + 8 * (i / 2), col: inside.col });
        }
        assert_eq!(ldmatrix_row(lane), (lane / 8, lane % 8));
    }
}

#[test]
fn swizzle_is_an_involution_that_keeps_chunks() {
    for mode in Swizzle::ALL {
        let mut seen = HashSet::new();
        for address in 0..4096 {
            let swizzled = mode.apply(address);
            assert_eq!(mode.apply(swizzled), address);
            assert_eq!(swizzled % 16, address % 16);
            assert_eq!(swizzled / mode.row_bytes().max(16), address / mode.row_bytes().max(16));
            assert_eq!(mode.apply(address + mode.repeat_bytes()), swizzled + mode.repeat_bytes());
            assert!(seen.insert(swizzled));
        }
        assert_eq!(Swizzle::from_wgmma_code(mode.wgmma_code()), mode);
    }
    assert_eq!(Swizzle::ALL.map(Swizzle::tma_code), [0, 1, 2, 3]);
    assert_eq!(Swizzle::ALL.map(Swizzle::wgmma_code), [0, 3, 2, 1]);
}

#[test]
fn eight_rows_of_a_column_of_chunks_hit_all_banks() {
    // What the 128-byte mode is for: ldmatrix reads 8 rows of one chunk column without bank conflicts.
    let tile = Tile::new(64, 64, TensorElement::BF16, Swizzle::B128).unwrap();
    for chunk in 0..8 {
        let banks: HashSet<u32> = (0..8).map(|row| tile.offset(row, chunk * 8) % 128).collect();
        assert_eq!(banks.len(), 8);
    }
}

#[test]
fn descriptors_round_trip() {
    for swizzle in Swizzle::ALL {
        for start in (0..0x40000).step_by(4080) {
            let descriptor = MatrixDescriptor {
                start,
                leading: 0x3FFF0 - start,
                stride: (start / 2) & !15,
                base_offset: 5,
                swizzle,
            };
            assert_eq!(MatrixDescriptor::decode(descriptor.encode()), descriptor);
        }
    }
    // The CTA's rank in the upper bits of an address must not reach the neighbour field.
    let tile = Tile::new(64, 64, TensorElement::BF16, Swizzle::B128).unwrap();
    let (near, far) = (tile.descriptor(1024, Major::K), tile.descriptor(1024 | 1 << 24, Major::K));
    assert_eq!(near.encode(), far.encode());
    assert_eq!(near.encode(), 1 << 62 | 64 << 32 | 1 << 16 | 64);
}

/// Writes a tile as TMA does, slab by slab, and looks every element up as wgmma does.
fn check_tma_to_wgmma(rows: u32, cols: u32, element: TensorElement, swizzle: Swizzle, major: Major) {
    let tile = Tile::new(rows, cols, element, swizzle).unwrap();
    let (base, bytes) = (4 * tile.alignment(), element.bytes());
    let mut memory = vec![None; (base + tile.bytes()) as usize];
    for slab in 0..tile.slabs() {
        let slab_base = base + slab * tile.slab_bytes();
        for row in 0..rows {
            for inside in 0..tile.slab_cols() {
                let col = slab * tile.slab_cols() + inside;
                let address = box_address(slab_base, &tile.box_dims(), &[inside, row], bytes, swizzle);
                assert_eq!(address, base + tile.offset(row, col));
                assert_eq!(memory[address as usize].replace((row, col)), None);
            }
        }
    }
    assert_eq!(u64::from(tile.bytes()), u64::from(tile.slabs()) * box_bytes(&tile.box_dims(), bytes));
    let (mn_extent, k_extent) = if major == Major::K { (rows, cols) } else { (cols, rows) };
    for step in 0..k_extent / tile.k_step() {
        let descriptor = tile.descriptor(base + tile.k_advance(major, step), major);
        let descriptor = MatrixDescriptor::decode(descriptor.encode());
        for mn in 0..mn_extent {
            for inside in 0..tile.k_step() {
                let k = step * tile.k_step() + inside;
                let wanted = if major == Major::K { (mn, k) } else { (k, mn) };
                let address = descriptor.element_address(major, bytes, mn, inside);
                assert_eq!(memory[address as usize], Some(wanted), "{swizzle:?} {major:?} mn {mn} k {k}");
            }
        }
    }
}

#[test]
fn what_tma_writes_wgmma_reads() {
    for swizzle in Swizzle::ALL {
        for element in [TensorElement::BF16, TensorElement::U8, TensorElement::F32] {
            for (rows, cols) in [
                (64, 128),
                (128, 512 / element.bytes()),
                (176, 256 / element.bytes()),
                (8, 128 / element.bytes()),
            ] {
                check_tma_to_wgmma(rows, cols, element, swizzle, Major::K);
            }
        }
        // MN-major exists for 16-bit elements only.
        for (rows, cols) in [(64, 64), (128, 128), (80, 256), (16, 64)] {
            check_tma_to_wgmma(rows, cols, TensorElement::F16, swizzle, Major::Mn);
        }
    }
}

#[test]
fn wrong_tiles_are_refused() {
    let tile = |rows, cols, swizzle| Tile::new(rows, cols, TensorElement::BF16, swizzle).unwrap_err();
    assert_eq!(tile(12, 64, Swizzle::B128), TileError::Rows { rows: 12 });
    assert_eq!(
        tile(64, 48, Swizzle::B128),
        TileError::Row { row_bytes: 96, slab_bytes: 128, swizzle: Swizzle::B128 }
    );
    assert_eq!(tile(0, 64, Swizzle::None), TileError::Size { rows: 0, row_bytes: 128 });
    assert_eq!(
        tile(u32::MAX, u32::MAX, Swizzle::None),
        TileError::Size { rows: u32::MAX, row_bytes: u32::MAX }
    );
    assert_eq!(Swizzle::widest_for(256), Swizzle::B128);
    assert_eq!(Swizzle::widest_for(96), Swizzle::B32);
    assert_eq!(Swizzle::widest_for(16), Swizzle::None);
}
