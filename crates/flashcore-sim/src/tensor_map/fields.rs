//! Tensor maps as bytes of memory, and their fields as `tensormap.replace` names them.

use super::{Element, MAP_BYTES, MAX_RANK, TensorMap};
use flashcore_ptx::layout::Swizzle;
use std::array::from_fn;

/// Marks bytes that are a tensor map.
const MAGIC: u64 = 0x7054_616d_726f_736e;
/// Where fields lie: each in a number of eight bytes, the first of its kind here.
const ADDRESS: usize = 1;
const DIMS: usize = 2;
const STRIDES: usize = 7;
/// Four numbers of two bytes and one more: extents of the box; then bytes.
const BOX: usize = 88;
const ELEMENT_STRIDES: usize = 98;
const RANK: usize = 103;
const ELEMENT: usize = 104;
const INTERLEAVE: usize = 105;
const SWIZZLE: usize = 106;
const FILL: usize = 107;

/// One field of a tensor map; of a dimension, where there are several.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Field {
    GlobalAddress,
    Rank,
    BoxDim(usize),
    GlobalDim(usize),
    /// Bytes between neighbours along the dimension after that; or, if so said, how many times 16 of them.
    GlobalStride(usize, bool),
    ElementStride(usize),
    Element,
    Interleave,
    Swizzle,
    Fill,
}

/// The bytes of a tensor map.
#[derive(Clone, Copy, Debug)]
pub(crate) struct MapBytes(pub(crate) [u8; MAP_BYTES]);

impl MapBytes {
    fn word(&self, at: usize) -> u64 {
        u64::from_le_bytes(from_fn(|i| self.0[8 * at + i]))
    }

    fn set_word(&mut self, at: usize, value: u64) {
        self.0[8 * at..8 * at + 8].copy_from_slice(&value.to_le_bytes());
    }

    /// Changes a field; what was zeros before becomes a tensor map. False if the bytes are something else.
    pub(crate) fn replace(&mut self, field: Field, value: u64) -> bool {
        let blank = self.0.iter().all(|byte| *byte == 0);
        if !blank && self.word(0) != MAGIC {
            return false;
        }
        if blank {
            self.0[ELEMENT_STRIDES..ELEMENT_STRIDES + MAX_RANK].fill(1);
        }
        self.set_word(0, MAGIC);
        match field {
            Field::GlobalAddress => self.set_word(ADDRESS, value),
            Field::GlobalDim(at) => self.set_word(DIMS + at, value),
            Field::GlobalStride(at, in_sixteens) => {
                self.set_word(STRIDES + at, if in_sixteens { value << 4 } else { value });
            }
            Field::BoxDim(at) => {
                let extent = u16::try_from(value).unwrap_or(u16::MAX);
                self.0[BOX + 2 * at..BOX + 2 * at + 2].copy_from_slice(&extent.to_le_bytes());
            }
            Field::ElementStride(at) => self.0[ELEMENT_STRIDES + at] = small(value),
            Field::Rank => self.0[RANK] = small(value),
            Field::Element => self.0[ELEMENT] = small(value),
            Field::Interleave => self.0[INTERLEAVE] = small(value),
            Field::Swizzle => self.0[SWIZZLE] = small(value),
            Field::Fill => self.0[FILL] = small(value),
        }
        true
    }

    /// The tensor map that the bytes are, or what is wrong with it; `None` if they are none.
    pub(crate) fn read(&self) -> Option<Result<TensorMap, String>> {
        (self.word(0) == MAGIC).then(|| self.map())
    }

    fn map(&self) -> Result<TensorMap, String> {
        let need = |ok: bool, what: &str| if ok { Ok(()) } else { Err(format!("tensor map: {what}")) };
        let rank = usize::from(self.0[RANK]) + 1;
        need(rank <= MAX_RANK, "rank must be 1 to 5 (and the field holds one less)")?;
        need(self.0[INTERLEAVE] == 0, "an interleaved layout cannot be simulated")?;
        need(self.0[FILL] == 0, "filling with NaN cannot be simulated")?;
        let element_strides = &self.0[ELEMENT_STRIDES..ELEMENT_STRIDES + rank];
        need(element_strides.iter().all(|s| *s == 1), "element strides other than 1 cannot be simulated")?;
        let swizzle = Swizzle::ALL.get(usize::from(self.0[SWIZZLE])).copied();
        let swizzle = swizzle.ok_or("tensor map: no such swizzle")?;
        let element = Element::numbered(self.0[ELEMENT].into()).ok_or("tensor map: no such element")?;
        let stride = |i: usize| if i == 0 { element.bytes().into() } else { self.word(STRIDES + i - 1) };
        let extent = |i: usize| u16::from_le_bytes([self.0[BOX + 2 * i], self.0[BOX + 2 * i + 1]]).into();
        let map = TensorMap {
            address: self.word(ADDRESS),
            element,
            rank,
            dims: from_fn(|i| if i < rank { self.word(DIMS + i) } else { 1 }),
            strides: from_fn(|i| if i < rank { stride(i) } else { 0 }),
            box_dims: from_fn(|i| if i < rank { extent(i) } else { 1 }),
            swizzle,
        };
        map.check()?;
        Ok(map)
    }
}

/// A value of a field of one byte; what does not fit is no value of any.
fn small(value: u64) -> u8 {
    u8::try_from(value).unwrap_or(u8::MAX)
}

/// The bytes of a tensor map.
impl From<&TensorMap> for MapBytes {
    fn from(map: &TensorMap) -> Self {
        let mut bytes = Self([0; MAP_BYTES]);
        let mut set = |field, value| bytes.replace(field, value);
        set(Field::GlobalAddress, map.address);
        set(Field::Rank, map.rank as u64 - 1);
        set(Field::Element, map.element.number().into());
        set(Field::Swizzle, map.swizzle.tma_code().into());
        for i in 0..map.rank {
            set(Field::GlobalDim(i), map.dims[i]);
            set(Field::BoxDim(i), map.box_dims[i].into());
            if i > 0 {
                set(Field::GlobalStride(i - 1, false), map.strides[i]);
            }
        }
        bytes
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use flashcore_ptx::launch::{Slot, TensorElement, TensorMapSpec};

    #[test]
    fn bytes_are_read_as_they_were_written_and_changed() {
        let spec = TensorMapSpec {
            slot: Slot(0),
            element: TensorElement::BF16,
            dims: vec![64, 10, 3],
            strides: vec![128, 1280],
            box_dims: vec![64, 2, 1],
            swizzle: Swizzle::B128,
        };
        let map = TensorMap::new(&spec, 0x1000).expect("a valid map");
        let mut bytes = MapBytes::from(&map);
        assert_eq!(bytes.read(), Some(Ok(map)));
        assert!(bytes.replace(Field::GlobalDim(1), 7) && bytes.replace(Field::GlobalAddress, 0x2000));
        let changed = bytes.read().expect("a tensor map").expect("a valid one");
        assert_eq!((changed.address, changed.dims[1], changed.rank), (0x2000, 7, 3));
        assert!(
            bytes.replace(Field::GlobalStride(0, false), 8) && bytes.read().is_some_and(|map| map.is_err())
        );
        let (mut zeros, mut other) = (MapBytes([0; MAP_BYTES]), MapBytes([5; MAP_BYTES]));
        assert!(zeros.read().is_none() && zeros.replace(Field::Rank, 0) && zeros.read().is_some());
        assert!(!other.replace(Field::Rank, 0));
    }
}
