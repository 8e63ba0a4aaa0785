//! Sizes that follow from the element: tiles, swizzles, chunks and depths of products.

use flashcore_ptx::{ident::Ident, launch::TensorElement, layout::Swizzle, target::Target};
use flashcore_tile::{Acc, Builder, Element, Half, Major, Params, Start};

/// Bytes, elements of a chunk, depth of an instruction, columns of a slab, element of a tensor map.
#[test]
fn sizes_follow_from_the_width() {
    let table = [
        (Element::E4m3, 1, 16, 32, 128, TensorElement::U8),
        (Element::E5m2, 1, 16, 32, 128, TensorElement::U8),
        (Element::F16, 2, 8, 16, 64, TensorElement::F16),
        (Element::Bf16, 2, 8, 16, 64, TensorElement::BF16),
        (Element::F32, 4, 4, 8, 32, TensorElement::F32),
    ];
    for (element, bytes, per_chunk, depth, slab, tensor) in table {
        assert_eq!((element.bytes(), element.per_chunk()), (bytes, per_chunk), "{element:?}");
        assert_eq!(
            (element.depth(), element.slab_cols(), element.tensor()),
            (depth, slab, tensor),
            "{element:?}"
        );
        assert_eq!(element.tensor().bytes(), bytes);
        assert_eq!(element.swizzle(slab), Swizzle::B128);
        assert_eq!(element.half().map(Half::element), (bytes == 2).then_some(element));
    }
}

/// One product over 64 elements of depth: how many instructions, and how far each descriptor moves.
#[test]
fn products_go_as_deep_as_elements_allow() {
    for element in [Element::E4m3, Element::E5m2, Element::F16, Element::Bf16] {
        let name = Ident::new("fc_product").unwrap();
        let mut b = Builder::new(Target::Sm90a, &name, 128, 1);
        let cols = element.slab_cols();
        let tile = b.smem_tile(element, [64, cols], Swizzle::B128, 1);
        assert_eq!((tile.bytes(), tile.slabs(), tile.tma_box()), (64 * 128, 1, [cols, 64]));
        let x = tile.operand(&mut b, Major::K, 0);
        let d = Acc::new(&mut b, 64);
        b.wgmma_ss(d, Start::Zero, [&x, &x], 64).wait(&mut b);
        let program = b.finish(&name, Params::<()>::default()).unwrap();
        let form = format!("m64n64k{}.f32.{1}.{1}", element.depth(), element.name());
        assert_eq!(program.text().matches(&form).count() as u32, 64 / element.depth(), "{element:?}");
    }
}

#[test]
fn only_halves_are_packed_in_pairs() {
    let name = Ident::new("fc_pack").unwrap();
    let mut b = Builder::new(Target::Sm80, &name, 32, 1);
    b.pack(Half::F16, 1.0, 2.0);
    b.pack(Element::F32, 1.0, 2.0);
    let error = b.finish(&name, Params::<()>::default()).unwrap_err().to_string();
    assert!(error.contains("packed as 16-bit floats, not as f32"), "{error}");
}

#[test]
fn bytes_are_multiplied_along_their_rows_only() {
    let name = Ident::new("fc_product").unwrap();
    let mut b = Builder::new(Target::Sm90a, &name, 128, 1);
    let tile = b.smem_tile(Element::E4m3, [128, 128], Swizzle::B128, 1);
    let [x, y] = [Major::K, Major::Mn].map(|major| tile.operand(&mut b, major, 0));
    let d = Acc::new(&mut b, 64);
    b.wgmma_ss(d, Start::Zero, [&x, &y], 64).wait(&mut b);
    let error = b.finish(&name, Params::<()>::default()).unwrap_err().to_string();
    assert!(error.contains("is no Mn-major operand"), "{error}");
}
