//! The name of a cache entry: a SHA-256 over everything that changes the machine code.

use sha2::{Digest, Sha256};
use std::fmt;

/// Identifies what was compiled, for what, by what.
#[derive(Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Key([u8; 32]);

impl Key {
    /// Hashes the parts, each with its length in front so that no two lists of parts collide.
    pub fn of(parts: &[&str]) -> Self {
        let mut hash = Sha256::new();
        for part in parts {
            hash.update((part.len() as u64).to_le_bytes());
            hash.update(part);
        }
        Self(hash.finalize().into())
    }

    pub(super) fn bytes(&self) -> &[u8; 32] {
        &self.0
    }

    /// 64 hexadecimal digits.
    pub(super) fn file_name(&self) -> String {
        self.to_string()
    }

    pub(super) fn from_file_name(name: &str) -> Option<Self> {
        let well_formed = name.len() == 64 && name.bytes().all(|b| matches!(b, b'0'..=b'9' | b'a'..=b'f'));
        let mut bytes = [0; 32];
        for (at, byte) in bytes.iter_mut().enumerate().filter(|_| well_formed) {
            *byte = u8::from_str_radix(&name[2 * at..2 * at + 2], 16).ok()?;
        }
        well_formed.then_some(Self(bytes))
    }
}

impl fmt::Display for Key {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.iter().try_for_each(|byte| write!(f, "{byte:02x}"))
    }
}

impl fmt::Debug for Key {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Key({self})")
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_part_and_every_border_counts() {
        let base = Key::of(&["ptx", "sm_90a", "-O3"]);
        assert_eq!(base, Key::of(&["ptx", "sm_90a", "-O3"]));
        for other in [&["ptx", "sm_90", "-O3"], &["ptxs", "m_90a", "-O3"], &["pty", "sm_90a", "-O3"]] {
            assert_ne!(base, Key::of(other));
        }
        assert_ne!(base, Key::of(&["ptx", "sm_90a", "-O3", ""]));
    }

    #[test]
    fn file_names_are_64_lower_hex_digits() {
        let key = Key::of(&["x"]);
        assert_eq!(Key::from_file_name(&key.file_name()), Some(key));
        let upper = key.file_name().to_uppercase();
        for bad in ["", "abc", "../../etc/passwd", upper.as_str(), &"é".repeat(32)] {
            assert_eq!(Key::from_file_name(bad), None, "{bad}");
        }
    }
}
