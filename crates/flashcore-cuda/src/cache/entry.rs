//! The bytes of a cache entry: header (magic, version, key, payload length, payload SHA-256), then the payload (report
//! length, report, machine code). Reading trusts nothing: sizes are checked before memory is allocated.

use super::Key;
use crate::report::BuildReport;
use sha2::{Digest, Sha256};
use std::{fs::File, io::Read};

const MAGIC: [u8; 8] = *b"FLASHCUB";
const VERSION: u32 = 1;
const HEADER: usize = 8 + 4 + 32 + 8 + 32;
/// No kernel comes near this; a file that claims more is damaged.
const MAX_PAYLOAD: u64 = 256 << 20;

/// What an entry holds.
#[derive(Clone, Debug, PartialEq)]
pub struct Stored {
    /// The machine code.
    pub cubin: Vec<u8>,
    /// How it was built.
    pub report: BuildReport,
}

/// Why an entry cannot be used.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum Damage {
    /// It cannot be read.
    #[error("unreadable: {0}")]
    Unreadable(String),
    /// It is a link, a folder, a device.
    #[error("not a plain file")]
    NotAFile,
    /// It belongs to somebody else.
    #[error("owned by user {0}")]
    Owner(u32),
    /// Others may write it.
    #[error("writable by others (mode {0:o})")]
    Mode(u32),
    /// It is not an entry, or one of another version.
    #[error("not an entry of this version")]
    Format,
    /// It is the entry of another kernel.
    #[error("the entry of another key")]
    WrongKey,
    /// It is shorter or longer than its header says.
    #[error("{found} bytes where the header says {expected}")]
    Length {
        /// What the header says.
        expected: u64,
        /// What there is.
        found: u64,
    },
    /// Its contents have changed.
    #[error("the checksum does not match")]
    Checksum,
}

/// The file of an entry.
pub(super) fn encode(key: &Key, stored: &Stored) -> Vec<u8> {
    let report = stored.report.to_text();
    let mut payload = Vec::with_capacity(4 + report.len() + stored.cubin.len());
    payload.extend_from_slice(&(report.len() as u32).to_le_bytes());
    payload.extend_from_slice(report.as_bytes());
    payload.extend_from_slice(&stored.cubin);

    let mut file = Vec::with_capacity(HEADER + payload.len());
    file.extend_from_slice(&MAGIC);
    file.extend_from_slice(&VERSION.to_le_bytes());
    file.extend_from_slice(key.bytes());
    file.extend_from_slice(&(payload.len() as u64).to_le_bytes());
    file.extend_from_slice(&Sha256::digest(&payload));
    file.extend_from_slice(&payload);
    file
}

/// Reads and verifies an entry.
pub(super) fn read(file: &mut File, key: &Key) -> Result<Stored, Damage> {
    let unreadable = |error: std::io::Error| Damage::Unreadable(error.to_string());
    let size = file.metadata().map_err(unreadable)?.len();
    let too_short = Damage::Length { expected: HEADER as u64, found: size };
    let mut header = [0; HEADER];
    file.read_exact(&mut header).map_err(|_| too_short)?;
    let (length, checksum) = read_header(&header, key)?;

    let (expected, found) = (length, size.saturating_sub(HEADER as u64));
    if expected != found || length > MAX_PAYLOAD {
        return Err(Damage::Length { expected, found });
    }
    let mut payload = Vec::with_capacity(length as usize);
    file.take(length + 1).read_to_end(&mut payload).map_err(unreadable)?;
    if Sha256::digest(&payload)[..] != checksum[..] {
        return Err(Damage::Checksum);
    }
    split(payload).ok_or(Damage::Format)
}

fn read_header(header: &[u8; HEADER], key: &Key) -> Result<(u64, [u8; 32]), Damage> {
    let (magic, rest) = header.split_at(8);
    let (version, rest) = rest.split_at(4);
    let (stored_key, rest) = rest.split_at(32);
    let (length, checksum) = rest.split_at(8);
    if magic != MAGIC || version != VERSION.to_le_bytes() {
        return Err(Damage::Format);
    }
    if stored_key != key.bytes() {
        return Err(Damage::WrongKey);
    }
    let word = length.try_into().map_err(|_| Damage::Format)?;
    Ok((u64::from_le_bytes(word), checksum.try_into().map_err(|_| Damage::Format)?))
}

fn split(mut payload: Vec<u8>) -> Option<Stored> {
    let length = u32::from_le_bytes(*payload.first_chunk::<4>()?) as usize;
    let report = payload.get(4..length.checked_add(4)?)?;
    let report = BuildReport::from_text(std::str::from_utf8(report).ok()?)?;
    payload.drain(..4 + length);
    Some(Stored { cubin: payload, report })
}
