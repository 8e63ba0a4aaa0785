//! npy files of any plain element type, as bytes: what `sim` binds to the pointers of a kernel.

use std::{
    io::{Read, Seek, SeekFrom},
    path::Path,
    str::FromStr,
};

use flashcore_lab::{buffer::filled, memory};
use half::{bf16, f16};

use super::{FileError, Place, count, npy, open_file};
use crate::error::CliError;

/// What an element of a kernel's buffer is.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum ElementType {
    U8,
    S8,
    U16,
    S16,
    U32,
    S32,
    U64,
    S64,
    F16,
    BF16,
    F32,
    F64,
}

/// Every type, its name on the command line, numpy's name for it and its bytes.
const TYPES: [(ElementType, &str, &str, usize); 12] = [
    (ElementType::U8, "u8", "|u1", 1),
    (ElementType::S8, "s8", "|i1", 1),
    (ElementType::U16, "u16", "<u2", 2),
    (ElementType::S16, "s16", "<i2", 2),
    (ElementType::U32, "u32", "<u4", 4),
    (ElementType::S32, "s32", "<i4", 4),
    (ElementType::U64, "u64", "<u8", 8),
    (ElementType::S64, "s64", "<i8", 8),
    (ElementType::F16, "f16", "<f2", 2),
    // numpy has no bfloat16; this is how ml_dtypes writes it.
    (ElementType::BF16, "bf16", "<V2", 2),
    (ElementType::F32, "f32", "<f4", 4),
    (ElementType::F64, "f64", "<f8", 8),
];

impl ElementType {
    /// Its name on the command line.
    pub const fn name(self) -> &'static str {
        TYPES[self as usize].1
    }

    /// Bytes of an element.
    pub const fn bytes(self) -> usize {
        TYPES[self as usize].3
    }

    /// All names, for messages.
    pub fn names() -> String {
        TYPES.map(|(_, name, ..)| name).join(", ")
    }

    fn of_descr(descr: &str) -> Option<Self> {
        let same = if descr == "|V2" || descr == "bfloat16" { "<V2" } else { descr };
        TYPES.into_iter().find(|(_, _, known, _)| *known == same).map(|(ty, ..)| ty)
    }

    /// One element as text.
    pub fn show(self, bytes: &[u8]) -> String {
        macro_rules! read {
            ($ty:ty) => {
                <$ty>::from_le_bytes(std::array::from_fn(|i| bytes.get(i).copied().unwrap_or_default()))
                    .to_string()
            };
        }
        match self {
            Self::U8 => read!(u8),
            Self::S8 => read!(i8),
            Self::U16 => read!(u16),
            Self::S16 => read!(i16),
            Self::U32 => read!(u32),
            Self::S32 => read!(i32),
            Self::U64 => read!(u64),
            Self::S64 => read!(i64),
            Self::F16 => read!(f16),
            Self::BF16 => read!(bf16),
            Self::F32 => read!(f32),
            Self::F64 => read!(f64),
        }
    }
}

impl FromStr for ElementType {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let found = TYPES.into_iter().find(|(_, name, ..)| *name == text).map(|(ty, ..)| ty);
        found.ok_or_else(|| format!("`{text}` is not an element type; there are {}", Self::names()))
    }
}

/// An array of any plain type.
#[derive(Clone, PartialEq, Debug)]
pub struct AnyArray {
    pub element: ElementType,
    pub shape: Vec<usize>,
    pub bytes: Vec<u8>,
}

impl AnyArray {
    /// Reads an npy file.
    pub fn read(path: &Path) -> Result<Self, CliError> {
        let (mut file, len) = open_file(path)?;
        let wrong = |source| FileError::Format { path: path.to_owned(), source };
        let claim = npy::read_claim(&mut file, len).map_err(wrong)?;
        let Some(element) = ElementType::of_descr(&claim.descr) else {
            return Err(FileError::Element { path: path.to_owned(), descr: claim.descr }.into());
        };
        let have = len.saturating_sub(claim.start);
        let elements = count(&claim.shape, element.bytes(), have).map_err(wrong)?;
        memory::check(have)?;
        let mut bytes = filled(0, elements * element.bytes())?;
        let read = file.seek(SeekFrom::Start(claim.start)).and_then(|_| file.read_exact(&mut bytes));
        read.map_err(|source| FileError::Read { path: path.to_owned(), source })?;
        Ok(Self { element, shape: claim.shape, bytes })
    }

    /// Writes an npy file.
    pub fn save(&self, place: &Place) -> Result<(), FileError> {
        let header = npy::header_of(TYPES[self.element as usize].2, &self.shape);
        let path = place.path().to_owned();
        let header =
            header.ok_or(FileError::Write { path, source: std::io::ErrorKind::InvalidInput.into() })?;
        place.write(&header, &self.bytes)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_table_is_in_order() {
        assert!(TYPES.iter().enumerate().all(|(at, (ty, name, descr, bytes))| {
            *ty as usize == at
                && name.parse() == Ok(*ty)
                && ElementType::of_descr(descr) == Some(*ty)
                && (descr.ends_with(&bytes.to_string()) || *descr == "<V2")
        }));
        assert!("f8".parse::<ElementType>().unwrap_err().contains("bf16"));
    }

    #[test]
    fn every_type_survives_its_file() {
        let folder = tempfile::tempdir().unwrap();
        for (element, name, _, size) in TYPES {
            let path = folder.path().join(format!("{name}.npy"));
            let array = AnyArray { element, shape: vec![2, 3], bytes: (0..6 * size as u8).collect() };
            array.save(&Place::checked(&path, false).unwrap()).unwrap();
            assert_eq!(AnyArray::read(&path).unwrap(), array);
        }
    }

    #[test]
    fn elements_read_as_numbers() {
        let shown = |ty: ElementType, bytes: &[u8]| ty.show(bytes);
        assert_eq!(shown(ElementType::S8, &[0xff]), "-1");
        assert_eq!(shown(ElementType::U32, &7u32.to_le_bytes()), "7");
        assert_eq!(shown(ElementType::F16, &f16::from_f32(0.5).to_le_bytes()), "0.5");
        assert_eq!(shown(ElementType::F64, &f64::NEG_INFINITY.to_le_bytes()), "-inf");
    }
}
