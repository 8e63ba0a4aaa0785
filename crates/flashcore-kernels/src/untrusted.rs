//! Checks that every reader makes before it trusts a file; tables here, results and bundles in the lab.

use serde::Deserialize;

/// What every file of ours says first: what it is, and the version of its format.
#[derive(Clone, PartialEq, Eq, Deserialize, Debug)]
pub struct Head {
    /// What it is.
    pub schema: String,
    /// The version of the format.
    pub version: u32,
}

/// Text from a file must not be able to play tricks on a terminal.
pub fn check_text(text: &str, longest: usize) -> Result<(), String> {
    if text.len() <= longest && !text.chars().any(char::is_control) {
        return Ok(());
    }
    Err("text is too long or has control characters".to_owned())
}
