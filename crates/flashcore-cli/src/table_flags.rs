//! `--table` and `--kernel`: what decides about GPU kernels instead of the rules; commands that plan some flatten both.

use std::{path::PathBuf, sync::Arc};

use clap::{
    Args,
    builder::{PossibleValuesParser, TypedValueParser},
};
use flashcore_kernels::{Choice, Family, tuned::Table};
use flashcore_lab::tune::load_table;

use crate::error::CliError;

/// Which table of measured tiles.
#[derive(Args, Clone, Debug)]
pub struct TableFlags {
    /// Use the tiles of this table, written by `flashcore tune`, for the problems it lists
    #[arg(long, value_name = "FILE", help_heading = "How to run")]
    table: Option<PathBuf>,
}

impl TableFlags {
    /// The table that was named.
    pub fn load(&self) -> Result<Option<Arc<Table>>, CliError> {
        Ok(self.table.as_deref().map(load_table).transpose()?.map(Arc::new))
    }
}

/// Which kernel.
#[derive(Args, Clone, Debug)]
pub struct KernelFlags {
    /// Use this GPU kernel instead of the planned one, for comparison
    #[arg(id = "family", long = "kernel", value_name = "NAME", value_parser = families(), conflicts_with = "table",
          help_heading = "How to run")]
    family: Option<Family>,
    /// Use the general GPU kernel; the same as --kernel forward_sm80
    #[arg(long, conflicts_with_all = ["table", "family"], help_heading = "How to run")]
    general: bool,
}

/// The values of `--kernel`.
pub fn families() -> impl TypedValueParser<Value = Family> {
    PossibleValuesParser::new(Family::ALL.map(Family::name)).try_map(|name| name.parse::<Family>())
}

impl KernelFlags {
    /// The kernel that was named.
    pub fn named(&self) -> Option<Family> {
        self.family.or(self.general.then_some(Family::Sm80))
    }

    /// How it was named, to say what is wrong with it.
    pub const fn flag(&self) -> &'static str {
        if self.general { "--general" } else { "--kernel" }
    }

    /// The kernel that was named, else the table, else the rules.
    pub fn choice(&self, table: &TableFlags) -> Result<Choice, CliError> {
        Ok(match self.named() {
            Some(family) => Choice::Kernel(family),
            None => table.load()?.map_or(Choice::Rules, Choice::Table),
        })
    }
}
