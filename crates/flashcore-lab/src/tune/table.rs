//! Tables as files, and the CPU backend with one; `--table` and `tune --out` come here.

use std::{io::ErrorKind, path::Path, sync::Arc};

use flashcore_core::{Backend, BackendError, HostCall, Ran};
use flashcore_cpu::{Cpu, Tiles};
use flashcore_kernels::tuned::{Row, Subject, Table, TableError};

use super::{TuneError, stand::tiles_of};
use crate::{error::LabError, save};

/// Reads a table, or says what is wrong with it.
pub fn load_table(path: &Path) -> Result<Table, LabError> {
    Ok(Table::load(path).map_err(|source| TuneError::Table { path: path.to_owned(), source })?)
}

/// Adds rows to the table at `path`, which need not be there yet, and writes it in one step: readers see the old one or
/// the new one, whole.
pub fn extend_table(path: &Path, rows: Vec<Row>) -> Result<(), LabError> {
    let refused = |source| TuneError::Table { path: path.to_owned(), source };
    let mut table = present_table(path)?;
    rows.into_iter().try_for_each(|row| table.insert(row)).map_err(refused)?;
    let text = table.to_json().map_err(refused)?;
    save::replace(path, &[text.as_bytes()]).map_err(LabError::io("write", path))
}

/// Whether [`extend_table`] can add to `path`; asked before anything is measured.
pub fn check_table(path: &Path) -> Result<(), LabError> {
    present_table(path)?;
    save::temporary(path).map(drop).map_err(LabError::io("write", path))
}

/// The table at `path`, an empty one where there is none yet.
fn present_table(path: &Path) -> Result<Table, LabError> {
    match Table::load(path) {
        Err(TableError::Io(error)) if error.kind() == ErrorKind::NotFound => Ok(Table::default()),
        table => Ok(table.map_err(|source| TuneError::Table { path: path.to_owned(), source })?),
    }
}

/// The CPU backend with a table of measured tiles.
#[derive(Clone, Debug)]
pub struct TunedCpu {
    cpu: Cpu,
    table: Arc<Table>,
}

impl TunedCpu {
    /// `cpu`, which asks `table` for every call.
    pub const fn new(cpu: Cpu, table: Arc<Table>) -> Self {
        Self { cpu, table }
    }

    /// The backend without the table.
    pub const fn plain(&self) -> &Cpu {
        &self.cpu
    }

    /// The backend for a call: another clone of the same threads and memory where a row holds the problem.
    fn cut(&self, call: &HostCall<'_>) -> Option<Cpu> {
        if self.table.rows().is_empty() {
            return None;
        }
        let threads = self.cpu.install(rayon::current_num_threads) as u32;
        let subject = Subject::new(self.cpu.simd().name(), threads, call.problem())?;
        let tiles = self.table.find(&subject).find_map(|(_, row)| tiles_of(&row.tile))?;
        Some(self.cpu.clone().with_tiles(tiles))
    }
}

impl From<Cpu> for TunedCpu {
    fn from(cpu: Cpu) -> Self {
        Self::new(cpu, Arc::default())
    }
}

impl Backend for TunedCpu {
    fn name(&self) -> &'static str {
        self.cpu.name()
    }

    fn forward(&self, call: &mut HostCall<'_>) -> Result<Ran, BackendError> {
        let Some(cpu) = self.cut(call) else { return self.cpu.forward(call) };
        let ran = cpu.forward(call)?;
        Ok(Ran { kernel: kernel_name(&ran.kernel, cpu.tiles()) })
    }
}

/// What to call a kernel of the CPU that works in such tiles: the shipped ones are not named.
pub(super) fn kernel_name(kernel: &str, tiles: Tiles) -> String {
    if tiles == Tiles::USUAL { kernel.to_owned() } else { format!("{kernel}-{tiles}") }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::fs;

    #[test]
    fn tables_are_files_like_any_other() {
        let folder = tempfile::tempdir().unwrap();
        let [table, plain] = ["table", "plain"].map(|name| folder.path().join(name));
        fs::write(&plain, "").unwrap();
        extend_table(&table, Vec::new()).unwrap();
        assert!(load_table(&table).unwrap().rows().is_empty());
        let [mode, usual] = [&table, &plain].map(|path| path.metadata().unwrap().permissions());
        assert_eq!(mode, usual, "others may read it too");
    }
}
