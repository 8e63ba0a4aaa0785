//! The npy format: a checked parser of its header, and a writer of one; called by [`super`].
//!
//! An npy file is a magic string, a version, the length of a header, the header (a Python dictionary with `descr`,
//! `fortran_order` and `shape`) and the elements. The header is read from a bounded number of bytes; its claims are
//! compared with the length of the file before anything is allocated for them.

use std::io::Read;

use flashcore_core::DType;
use serde::Deserialize;

use super::{FormatError, Header, read_up_to};

const MAGIC: &[u8; 6] = b"\x93NUMPY";
/// Longest header taken; numpy itself refuses longer ones.
const MAX_HEADER: u64 = 10_000;
/// Most bytes before the header's text.
const MAX_PREAMBLE: u64 = 12;
/// Elements start at a multiple of this, as numpy writes them.
const ALIGN: usize = 64;

/// What a header says, before anybody asks whether such elements are welcome.
pub struct Claim {
    /// numpy's name of the element type, such as `<f4`.
    pub descr: String,
    pub shape: Vec<usize>,
    /// Where the elements start.
    pub start: u64,
}

/// Reads the header of a file of `file_len` bytes; `expected` settles what 2-byte elements without a type are.
pub fn read_header(
    file: &mut impl Read,
    file_len: u64,
    expected: Option<DType>,
) -> Result<Header, FormatError> {
    let Claim { descr, shape, start } = read_claim(file, file_len)?;
    Header::new(dtype_of(&descr, expected)?, shape, start, file_len)
}

/// Reads the header of a file of `file_len` bytes with elements of any type.
pub fn read_claim(file: &mut impl Read, file_len: u64) -> Result<Claim, FormatError> {
    let prefix = read_up_to(file, MAX_PREAMBLE + MAX_HEADER)?;
    if !prefix.starts_with(MAGIC) {
        return Err(FormatError::Magic);
    }
    let (begin, len) = header_span(&prefix, file_len)?;
    if len > MAX_HEADER {
        return Err(FormatError::HeaderTooLong { len, max: MAX_HEADER });
    }
    let start = begin as u64 + len;
    let text =
        prefix.get(begin..start as usize).ok_or(FormatError::Truncated { len: file_len, needed: start })?;
    let fields = fields(text)?;
    if fields.fortran_order && fields.shape.iter().filter(|&&extent| extent != 1).count() > 1 {
        return Err(FormatError::Fortran);
    }
    let record = || FormatError::DType { descr: "record array".to_owned() };
    let descr = fields.descr.as_str().ok_or_else(record)?.to_owned();
    Ok(Claim { descr, shape: fields.shape, start })
}

/// Where the header's text begins and how long it is.
fn header_span(prefix: &[u8], file_len: u64) -> Result<(usize, u64), FormatError> {
    let cut = |needed| FormatError::Truncated { len: file_len, needed };
    let version = prefix.get(6..8).ok_or(cut(8))?;
    match (version[0], version[1]) {
        (1, 0) => prefix.get(8..10).map(|n| (10, u64::from(n[0]) | u64::from(n[1]) << 8)).ok_or(cut(10)),
        (2 | 3, 0) => {
            let bytes = prefix.get(8..12).and_then(|n| n.try_into().ok()).ok_or(cut(12))?;
            Ok((12, u64::from(u32::from_le_bytes(bytes))))
        }
        (major, minor) => Err(FormatError::Version(major, minor)),
    }
}

fn dtype_of(descr: &str, expected: Option<DType>) -> Result<DType, FormatError> {
    let owned = || descr.to_owned();
    match descr {
        "<f2" => Ok(DType::F16),
        "<f4" => Ok(DType::F32),
        "bfloat16" => Ok(DType::BF16),
        // What ml_dtypes makes of bfloat16, but also what any other 2-byte record looks like.
        "<V2" | "|V2" if expected == Some(DType::BF16) => Ok(DType::BF16),
        "<V2" | "|V2" => Err(FormatError::Void { descr: owned() }),
        ">f2" | ">f4" => Err(FormatError::BigEndian { descr: owned() }),
        _ => Err(FormatError::DType { descr: owned() }),
    }
}

/// What the dictionary says.
#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct Fields {
    /// A name, or the fields of a record.
    descr: serde_json::Value,
    fortran_order: bool,
    shape: Vec<usize>,
}

/// Reads the dictionary as JSON, which it is but for quotes, parentheses, capitals and commas before a bracket.
fn fields(text: &[u8]) -> Result<Fields, FormatError> {
    let text = String::from_utf8_lossy(text).replace('\'', "\"").replace('(', "[").replace(')', "]");
    let text = text.replace("False", "false").replace("True", "true");
    let mut json = String::new();
    for letter in text.chars() {
        if let (']' | '}', Some(rest)) = (letter, json.trim_end().strip_suffix(',')) {
            json.truncate(rest.len());
        }
        json.push(letter);
    }
    serde_json::from_str(&json).map_err(FormatError::Header)
}

/// The bytes before the elements of an array; `None` where npy has no such element type.
pub fn header(dtype: DType, shape: &[usize]) -> Option<Vec<u8>> {
    let descr = match dtype {
        DType::F16 => "<f2",
        DType::F32 => "<f4",
        _ => return None,
    };
    header_of(descr, shape)
}

/// The bytes before the elements of an array whose type numpy calls `descr`; `None` where the shape is absurdly long.
pub fn header_of(descr: &str, shape: &[usize]) -> Option<Vec<u8>> {
    let extents: String = shape.iter().map(|extent| format!("{extent}, ")).collect();
    let text = format!("{{'descr': '{descr}', 'fortran_order': False, 'shape': ({}), }}", extents.trim_end());
    let unpadded = MAGIC.len() + 4 + text.len() + 1;
    let padding = unpadded.next_multiple_of(ALIGN) - unpadded;
    let len = u16::try_from(text.len() + padding + 1).ok()?;
    let mut bytes = MAGIC.to_vec();
    bytes.extend([1, 0]);
    bytes.extend(len.to_le_bytes());
    bytes.extend(text.bytes());
    bytes.extend(std::iter::repeat_n(b' ', padding));
    bytes.push(b'\n');
    Some(bytes)
}
