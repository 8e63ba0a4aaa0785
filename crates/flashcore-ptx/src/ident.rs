//! Names that may appear in PTX text: checked once, so that no string can inject an instruction.

use std::{fmt, sync::Arc};

/// A PTX identifier that we give: `[A-Za-z_][A-Za-z0-9_]{0,1023}`, which has room for what C++ makes of templates.
#[derive(Clone, PartialEq, Eq, PartialOrd, Ord, Hash, Debug)]
pub struct Ident(String);

/// A name that PTX cannot carry.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("`{0}` is not a PTX identifier: a letter or `_`, then at most 1023 letters, digits or `_`")]
pub struct BadIdent(pub String);

impl Ident {
    /// Checks `name`.
    pub fn new(name: impl Into<String>) -> Result<Self, BadIdent> {
        let name = name.into();
        let mut chars = name.chars();
        let head = chars.next().is_some_and(|c| c.is_ascii_alphabetic() || c == '_');
        let tail = chars.all(|c| c.is_ascii_alphanumeric() || c == '_');
        if head && tail && name != "_" && name.len() <= Name::MAX_LEN {
            Ok(Self(name))
        } else {
            Err(BadIdent(name))
        }
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

/// Any name PTX allows, as other compilers print them too (`$L__BB0_2`, `%tile`): cheap to clone.
///
/// PTX ISA, "Identifiers": a letter, or one of `_ $ %` and at least one more sign; then letters, digits, `_`, `$`.
#[derive(Clone, PartialEq, Eq, PartialOrd, Ord, Hash, Debug)]
pub struct Name(Arc<str>);

impl Name {
    /// Longest name accepted; the ISA promises at least 1024 characters.
    pub const MAX_LEN: usize = 1024;

    /// Checks `name`.
    pub fn new(name: impl AsRef<str>) -> Result<Self, BadIdent> {
        let name = name.as_ref();
        let follows = |c: char| c.is_ascii_alphanumeric() || matches!(c, '_' | '$');
        let mut chars = name.chars();
        let ok = match chars.next() {
            Some(c) if c.is_ascii_alphabetic() => true,
            Some('_' | '$' | '%') => name.len() > 1,
            _ => false,
        };
        if ok && chars.all(follows) && name.len() <= Self::MAX_LEN {
            Ok(Self(name.into()))
        } else {
            Err(BadIdent(name.into()))
        }
    }

    /// `_`, which stands for an unnamed parameter.
    pub fn unnamed() -> Self {
        Self("_".into())
    }

    /// The name as text.
    pub fn as_str(&self) -> &str {
        &self.0
    }
}

impl From<&Ident> for Name {
    fn from(ident: &Ident) -> Self {
        Self(ident.as_str().into())
    }
}

impl From<Ident> for Name {
    fn from(ident: Ident) -> Self {
        Self::from(&ident)
    }
}

impl fmt::Display for Name {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}
