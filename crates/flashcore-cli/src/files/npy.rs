//! The npy format: a checked parser of its header, and a writer of one; called by [`super`].
//!
//! An npy file is a magic string, a version, the length of a header, the header (a Python dictionary with `descr`,
//! `fortran_order` and `shape`) and the elements. The header is parsed by hand from a bounded number of bytes; its
//! claims are compared with the length of the file before anything is allocated for them.

use std::io::Read;

use flashcore_core::DType;

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
    let fields = Fields::parse(text)?;
    if fields.fortran && fields.shape.iter().filter(|&&extent| extent != 1).count() > 1 {
        return Err(FormatError::Fortran);
    }
    Ok(Claim { descr: fields.descr, shape: fields.shape, start })
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
struct Fields {
    descr: String,
    fortran: bool,
    shape: Vec<usize>,
}

impl Fields {
    fn parse(text: &[u8]) -> Result<Self, FormatError> {
        let mut at = Cursor { text, at: 0 };
        let (mut descr, mut fortran, mut shape) = (None, None, None);
        at.expect(b'{', "no dictionary")?;
        while !at.take(b'}') {
            let key = at.string()?;
            at.expect(b':', "no colon after a key")?;
            let new = match key.as_str() {
                "descr" => descr.replace(at.descr()?).is_none(),
                "fortran_order" => fortran.replace(at.boolean()?).is_none(),
                "shape" => shape.replace(at.tuple()?).is_none(),
                _ => false,
            };
            if !new {
                return Err(at.wrong("an unknown or repeated key"));
            }
            if !at.take(b',') {
                at.expect(b'}', "no comma between keys")?;
                break;
            }
        }
        at.end()?;
        let missing = at.wrong("descr, fortran_order or shape missing");
        let (Some(descr), Some(fortran), Some(shape)) = (descr, fortran, shape) else { return Err(missing) };
        Ok(Self { descr, fortran, shape })
    }
}

/// A position in the header's text.
struct Cursor<'a> {
    text: &'a [u8],
    at: usize,
}

impl Cursor<'_> {
    fn wrong(&self, what: &'static str) -> FormatError {
        FormatError::Header { what, at: self.at }
    }

    /// The next byte that is not white space.
    fn peek(&mut self) -> Option<u8> {
        while self.text.get(self.at).is_some_and(u8::is_ascii_whitespace) {
            self.at += 1;
        }
        self.text.get(self.at).copied()
    }

    fn take(&mut self, byte: u8) -> bool {
        let found = self.peek() == Some(byte);
        self.at += usize::from(found);
        found
    }

    fn expect(&mut self, byte: u8, otherwise: &'static str) -> Result<(), FormatError> {
        if self.take(byte) { Ok(()) } else { Err(self.wrong(otherwise)) }
    }

    fn end(&mut self) -> Result<(), FormatError> {
        if self.peek().is_none() { Ok(()) } else { Err(self.wrong("text after the dictionary")) }
    }

    /// The longest run of bytes that are `good`.
    fn run(&mut self, good: impl Fn(u8) -> bool) -> String {
        let rest = &self.text[self.at..];
        let len = rest.iter().position(|&byte| !good(byte)).unwrap_or(rest.len());
        self.at += len;
        String::from_utf8_lossy(&rest[..len]).into_owned()
    }

    fn string(&mut self) -> Result<String, FormatError> {
        let quote =
            self.peek().filter(|byte| matches!(byte, b'\'' | b'"')).ok_or(self.wrong("no quoted string"))?;
        self.at += 1;
        let text = self.run(|byte| byte != quote && byte.is_ascii_graphic() && byte != b'\\');
        // Not `expect`, which would skip white space inside the string.
        if self.text.get(self.at) != Some(&quote) {
            return Err(self.wrong("a string that does not end"));
        }
        self.at += 1;
        Ok(text)
    }

    fn descr(&mut self) -> Result<String, FormatError> {
        match self.peek() {
            Some(b'[') => Err(FormatError::DType { descr: "record array".to_owned() }),
            _ => self.string(),
        }
    }

    fn boolean(&mut self) -> Result<bool, FormatError> {
        self.peek();
        match self.run(|byte| byte.is_ascii_alphabetic()).as_str() {
            "True" => Ok(true),
            "False" => Ok(false),
            _ => Err(self.wrong("neither True nor False")),
        }
    }

    fn tuple(&mut self) -> Result<Vec<usize>, FormatError> {
        let mut extents = Vec::new();
        self.expect(b'(', "no tuple")?;
        while !self.take(b')') {
            let digits = self.run(|byte| byte.is_ascii_digit());
            extents.push(digits.parse().map_err(|_| self.wrong("no extent"))?);
            if !self.take(b',') {
                self.expect(b')', "no comma between extents")?;
                break;
            }
        }
        Ok(extents)
    }
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
