//! `flashcore cache`: the folder of compiled GPU kernels, listed, checked or emptied.

use std::time::SystemTime;

use clap::{Args, Subcommand};
use flashcore_cuda::cache::{Cache, Damage, EntryInfo};
use flashcore_lab::memory::human;
use serde::Serialize;
use serde_json::json;

use crate::{
    error::{CliError, Verdict},
    output::{Output, Page, Text, bad},
};

const EXAMPLES: &str = "\
Examples:
  flashcore cache ls
  flashcore cache verify --json
  FLASHCORE_CACHE_DIR=/fast/flashcore flashcore cache clear";

/// List, check or clear the cache of compiled GPU kernels
#[derive(Args, Debug)]
#[command(after_help = EXAMPLES)]
pub struct Flags {
    #[command(subcommand)]
    action: Action,
}

#[derive(Subcommand, Clone, Copy, Debug)]
enum Action {
    /// List all kernels, the least recently used first
    Ls,
    /// Check every kernel and report damaged ones; exit code 1 if there are any
    Verify,
    /// Remove all kernels; they are compiled again when needed
    Clear,
}

/// Does one of the three; every one of them reports what is in the cache, `clear` what was.
pub fn execute(flags: Flags, output: &Output) -> Result<Verdict, CliError> {
    let cache = Cache::open_default()?;
    let entries: Vec<Entry> = match flags.action {
        Action::Ls => cache.list()?.into_iter().map(|info| Entry::new(&info, None)).collect(),
        Action::Verify => {
            cache.verify()?.into_iter().map(|(info, damage)| Entry::new(&info, damage)).collect()
        }
        Action::Clear => Vec::new(),
    };
    let removed = matches!(flags.action, Action::Clear).then(|| cache.clear()).transpose()?;
    let (folder, good) =
        (cache.path().display().to_string(), entries.iter().all(|entry| entry.damage.is_none()));
    let mut json = json!({ "folder": folder, "entries": entries });
    if let Some(removed) = removed {
        json["removed"] = removed.into();
    }
    output.answer(&json, || {
        let total = human(entries.iter().map(|entry| entry.bytes).sum());
        let summary = match removed {
            Some(removed) => format!("{removed} kernels removed"),
            None => format!("{} kernels, {total}", entries.len()),
        };
        let facts = [("folder", folder), ("cache", summary)];
        Page::default().facts(facts).table(entries.iter().map(Entry::row))
    })?;
    Ok(Verdict::from_bool(good))
}

#[derive(Serialize, Debug)]
struct Entry {
    key: String,
    bytes: u64,
    /// Seconds since the entry was stored or used.
    unused_s: u64,
    damage: Option<String>,
}

impl Entry {
    fn new(info: &EntryInfo, damage: Option<Damage>) -> Self {
        let age = SystemTime::now().duration_since(info.used).unwrap_or_default();
        let damage = damage.map(|damage| damage.to_string());
        Self { key: info.key.to_string(), bytes: info.bytes, unused_s: age.as_secs(), damage }
    }

    fn row(&self) -> Vec<Text> {
        let unused = || format!("unused for {} s", self.unused_s).into();
        let state = self.damage.as_ref().map_or_else(unused, bad);
        vec![self.key.chars().take(16).collect::<String>().into(), human(self.bytes).into(), state]
    }
}
