//! `--table`: measured tiles from a file; commands that plan GPU kernels flatten it.

use std::{path::PathBuf, sync::Arc};

use clap::Args;
use flashcore_kernels::tuned::Table;
use flashcore_lab::tune::load_table;

use crate::error::CliError;

/// Which table of measured tiles.
#[derive(Args, Clone, Debug)]
pub struct TableFlags {
    /// Take GPU kernels' tiles from this table, which `flashcore tune` writes, where it has the problem
    #[arg(long, value_name = "FILE", help_heading = "How to run")]
    table: Option<PathBuf>,
}

impl TableFlags {
    /// The table that was named.
    pub fn load(&self) -> Result<Option<Arc<Table>>, CliError> {
        Ok(self.table.as_deref().map(load_table).transpose()?.map(Arc::new))
    }
}
