//! Names that may appear in PTX text: checked once, so that no string can smuggle an instruction in.

use std::fmt;

/// A PTX identifier: `[A-Za-z_][A-Za-z0-9_]{0,63}`.
#[derive(Clone, PartialEq, Eq, PartialOrd, Ord, Hash, Debug)]
pub struct Ident(String);

/// A name that PTX cannot carry.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("`{0}` is not a PTX identifier: a letter or `_`, then at most 63 letters, digits or `_`")]
pub struct BadIdent(pub String);

impl Ident {
    /// Checks `name`.
    pub fn new(name: impl Into<String>) -> Result<Self, BadIdent> {
        let name = name.into();
        let mut chars = name.chars();
        let head = chars.next().is_some_and(|c| c.is_ascii_alphabetic() || c == '_');
        let tail = chars.all(|c| c.is_ascii_alphanumeric() || c == '_');
        if head && tail && name.len() <= 64 { Ok(Self(name)) } else { Err(BadIdent(name)) }
    }

    /// The name as text.
    pub fn as_str(&self) -> &str {
        &self.0
    }
}

impl fmt::Display for Ident {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}
