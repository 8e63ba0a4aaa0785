//! The safetensors format: its header through the `safetensors` crate, with sizes checked; called by [`super`].
//!
//! A file is the length of a JSON header (8 bytes), the header, and the elements of all tensors without gaps. The
//! crate checks that offsets fit the shapes; here they are compared with the length of the file.

use std::io::Read;

use flashcore_core::DType;
use safetensors::tensor::{Dtype, Metadata, TensorInfo};

use super::{FormatError, Header, read_up_to};

/// Bytes before the JSON text.
const PREAMBLE: u64 = 8;
/// Longest header taken: room for a hundred thousand tensors.
const MAX_HEADER: u64 = 16 << 20;

/// Reads the header of a file of `file_len` bytes and finds one tensor: `name`, or else `usual`, or the only one.
pub fn read_header(
    file: &mut impl Read,
    file_len: u64,
    name: Option<&str>,
    usual: &str,
) -> Result<Header, FormatError> {
    let len = json_len(file, file_len)?;
    let metadata: Metadata = serde_json::from_slice(&read_up_to(file, len)?)?;
    let data_start = PREAMBLE + len;
    let needed = data_start.saturating_add(metadata.data_len() as u64);
    if needed != file_len {
        return Err(FormatError::Length { len: file_len, needed });
    }
    let info = find(&metadata, name, usual)?;
    let (start, end) = info.data_offsets;
    let dtype = dtype_of(info.dtype)?;
    Header::new(dtype, info.shape.clone(), data_start + start as u64, data_start + end as u64)
}

/// Length of the JSON text.
fn json_len(file: &mut impl Read, file_len: u64) -> Result<u64, FormatError> {
    let cut = |needed| FormatError::Truncated { len: file_len, needed };
    let bytes = read_up_to(file, PREAMBLE)?.try_into().map_err(|_| cut(PREAMBLE))?;
    let len = u64::from_le_bytes(bytes);
    if len > MAX_HEADER {
        return Err(FormatError::HeaderTooLong { len, max: MAX_HEADER });
    }
    if PREAMBLE + len > file_len { Err(cut(PREAMBLE + len)) } else { Ok(len) }
}

fn find<'a>(metadata: &'a Metadata, name: Option<&str>, usual: &str) -> Result<&'a TensorInfo, FormatError> {
    let names = metadata.offset_keys();
    let only = || (name.is_none() && names.len() == 1).then(|| metadata.info(&names[0])).flatten();
    metadata.info(name.unwrap_or(usual)).or_else(only).ok_or_else(|| FormatError::NoTensor {
        name: name.unwrap_or(usual).to_owned(),
        found: summary(&names),
    })
}

/// The first few names, for a message.
fn summary(names: &[String]) -> String {
    const SHOWN: usize = 8;
    let shown: Vec<_> =
        names.iter().take(SHOWN).map(|name| name.chars().take(64).collect::<String>()).collect();
    match names.len() {
        0 => "none".to_owned(),
        n if n > SHOWN => format!("{} and {} more", shown.join(", "), n - SHOWN),
        _ => shown.join(", "),
    }
}

fn dtype_of(dtype: Dtype) -> Result<DType, FormatError> {
    match dtype {
        Dtype::F16 => Ok(DType::F16),
        Dtype::BF16 => Ok(DType::BF16),
        Dtype::F32 => Ok(DType::F32),
        other => Err(FormatError::DType { descr: format!("{other:?}") }),
    }
}

/// The bytes before the elements of a file with the one tensor `name`; `None` where there is no such element type.
pub fn header(name: &str, dtype: DType, shape: &[usize]) -> Option<Vec<u8>> {
    let stored = match dtype {
        DType::F16 => Dtype::F16,
        DType::BF16 => Dtype::BF16,
        DType::F32 => Dtype::F32,
        _ => return None,
    };
    let len = shape.iter().try_fold(dtype.bytes(), |n, &extent| n.checked_mul(extent))?;
    let info = TensorInfo { dtype: stored, shape: shape.to_vec(), data_offsets: (0, len) };
    let metadata = Metadata::new(None, vec![(name.to_owned(), info)]).ok()?;
    let mut json = serde_json::to_vec(&metadata).ok()?;
    json.resize(json.len().next_multiple_of(8), b' ');
    let mut bytes = (json.len() as u64).to_le_bytes().to_vec();
    bytes.extend(json);
    Some(bytes)
}
