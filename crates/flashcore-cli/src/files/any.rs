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
#[derive(Clone, Copy, Debug)]
pub struct ElementType {
    /// Its name on the command line.
    pub name: &'static str,
    /// numpy's name for it.
    descr: &'static str,
    /// Bytes of an element.
    pub bytes: usize,
    /// One element as text.
    pub show: fn(&[u8]) -> String,
    /// One element as a number.
    pub number: fn(&[u8]) -> f64,
}

impl PartialEq for ElementType {
    fn eq(&self, other: &Self) -> bool {
        self.name == other.name
    }
}

macro_rules! element {
    ($name:literal, $descr:literal, $ty:ty) => {
        element!($name, $descr, $ty, |value| value as f64)
    };
    ($name:literal, $descr:literal, $ty:ty, $number:expr) => {
        ElementType {
            name: $name,
            descr: $descr,
            bytes: size_of::<$ty>(),
            show: |bytes| {
                let byte = |i| bytes.get(i).copied().unwrap_or_default();
                <$ty>::from_le_bytes(std::array::from_fn(byte)).to_string()
            },
            number: |bytes| {
                let byte = |i| bytes.get(i).copied().unwrap_or_default();
                let number: fn($ty) -> f64 = $number;
                number(<$ty>::from_le_bytes(std::array::from_fn(byte)))
            },
        }
    };
}

/// Every type.
const TYPES: [ElementType; 12] = [
    element!("u8", "|u1", u8),
    element!("s8", "|i1", i8),
    element!("u16", "<u2", u16),
    element!("s16", "<i2", i16),
    element!("u32", "<u4", u32),
    element!("s32", "<i4", i32),
    element!("u64", "<u8", u64),
    element!("s64", "<i8", i64),
    element!("f16", "<f2", f16, f16::to_f64),
    // numpy has no bfloat16; this is how ml_dtypes writes it.
    element!("bf16", "<V2", bf16, bf16::to_f64),
    element!("f32", "<f4", f32),
    element!("f64", "<f8", f64),
];

impl ElementType {
    /// All names, for messages.
    pub fn names() -> String {
        TYPES.map(|element| element.name).join(", ")
    }

    fn of_descr(descr: &str) -> Option<Self> {
        let same = match descr {
            "|V2" | "bfloat16" => "<V2",
            // Booleans, and numbers of eight bits that numpy has no name for.
            "|b1" | "|V1" | "<V1" => "|u1",
            _ => descr,
        };
        TYPES.into_iter().find(|element| element.descr == same)
    }
}

impl FromStr for ElementType {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let numpy =
            text.replace("uint", "u").replace("int", "s").replace("bfloat", "bf").replace("float", "f");
        let name = numpy.strip_prefix('i').map_or(numpy.clone(), |bits| format!("s{bits}"));
        let found = TYPES.into_iter().find(|element| element.name == name);
        found.ok_or_else(|| format!("`{text}` is not an element type; use one of {}", Self::names()))
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
        let elements = count(&claim.shape, element.bytes, have).map_err(wrong)?;
        memory::check(have)?;
        let mut bytes = filled(0, elements * element.bytes)?;
        let read = file.seek(SeekFrom::Start(claim.start)).and_then(|_| file.read_exact(&mut bytes));
        read.map_err(|source| FileError::Read { path: path.to_owned(), source })?;
        Ok(Self { element, shape: claim.shape, bytes })
    }

    /// Writes an npy file.
    pub fn save(&self, place: &Place) -> Result<(), FileError> {
        let header = npy::header_of(self.element.descr, &self.shape);
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
    fn types_have_names() {
        assert!(TYPES.into_iter().all(|element| {
            let ElementType { name, descr, bytes, .. } = element;
            name.parse() == Ok(element)
                && ElementType::of_descr(descr) == Some(element)
                && descr.ends_with(&bytes.to_string())
        }));
        assert!("f8".parse::<ElementType>().unwrap_err().contains("bf16"));
    }

    #[test]
    fn every_type_survives_its_file() {
        let folder = tempfile::tempdir().unwrap();
        for element in TYPES {
            let path = folder.path().join(format!("{}.npy", element.name));
            let bytes = (0..6 * element.bytes as u8).collect();
            let array = AnyArray { element, shape: vec![2, 3], bytes };
            array.save(&Place::checked(&path, false).unwrap()).unwrap();
            assert_eq!(AnyArray::read(&path).unwrap(), array);
        }
    }

    #[test]
    fn elements_read_as_numbers() {
        let shown = |name: &str, bytes: &[u8]| (name.parse::<ElementType>().unwrap().show)(bytes);
        assert_eq!(shown("s8", &[0xff]), "-1");
        assert_eq!(shown("u32", &7u32.to_le_bytes()), "7");
        assert_eq!(shown("f16", &f16::from_f32(0.5).to_le_bytes()), "0.5");
        assert_eq!(shown("f64", &f64::NEG_INFINITY.to_le_bytes()), "-inf");
    }
}
