//! Keys and values in pages: the kind, which a plan knows, and the table, which a call binds.
//!
//! K and V are pools of pages. In their layouts the batch axis counts pages and the sequence axis the rows of a page, with
//! any strides, so that every order of page, head and row is the same to a kernel. A table says which pages hold the keys
//! of a sequence, and a length how many keys there are. Table entries beyond the length are never read.

use std::sync::Arc;

use crate::{
    error::ProblemError,
    layout::{Dims, MAX_ELEMENTS},
    lengths::{Sequence, Sequences},
    problem::MAX_EXTENT,
};

/// That keys and values lie in pages, without the table: what a [`crate::Problem`] knows of them.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub struct Pages {
    /// Page numbers of a sequence in the table: it has as many pages at most.
    pub columns: usize,
    /// Numbers from one sequence's page numbers to the next one's, in device memory.
    pub row_stride: usize,
    /// No sequence has more keys than this; as many as its pages hold where `None`.
    pub longest_kv: Option<usize>,
}

impl Pages {
    /// A dense table with so many pages for each sequence.
    pub const fn new(columns: usize) -> Self {
        Self { columns, row_stride: columns, longest_kv: None }
    }

    /// Checks a table over pages of these extents and fills in defaults.
    pub(crate) fn parse(self, k: Dims, sequences: Sequences, batch: usize) -> Result<Self, ProblemError> {
        if k.seq == 0 {
            return Err(ProblemError::EmptyPages { dims: k });
        }
        if !matches!(sequences, Sequences::Used { kv: true, .. } | Sequences::PackedQueries { .. }) {
            return Err(ProblemError::PagesWithoutLengths);
        }
        let rows = sequences.count(batch);
        let reach = rows.checked_mul(self.row_stride).and_then(|all| all.checked_add(self.columns));
        if self.columns > MAX_EXTENT || reach.is_none_or(|reach| reach > MAX_ELEMENTS) {
            let Self { columns, row_stride, .. } = self;
            return Err(ProblemError::TableTooLarge { rows, columns, row_stride });
        }
        // Without pages there is nowhere for keys to lie.
        let room = if k.batch == 0 { 0 } else { self.columns.saturating_mul(k.seq).min(MAX_EXTENT) };
        Ok(Self { longest_kv: Some(self.longest_kv.map_or(room, |longest| longest.min(room))), ..self })
    }
}

/// The numbers of the pages that hold the keys of each sequence, on the host.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct PageTable {
    numbers: Arc<[i32]>,
    columns: usize,
}

impl PageTable {
    /// Rows of `columns` page numbers, one row for each sequence.
    ///
    /// Numbers beyond a sequence's keys may be anything, −1 for example.
    pub fn new(numbers: impl Into<Arc<[i32]>>, columns: usize) -> Self {
        Self { numbers: numbers.into(), columns }
    }

    /// Page numbers of a sequence.
    pub const fn columns(&self) -> usize {
        self.columns
    }

    /// The page numbers of sequence `n`.
    pub fn row(&self, n: usize) -> &[i32] {
        &self.numbers[n * self.columns..][..self.columns]
    }

    /// What a plan has to know of this table.
    pub const fn kind(&self) -> Pages {
        Pages::new(self.columns)
    }

    pub(crate) fn check(&self, sequences: usize) -> Result<(), ProblemError> {
        let (given, columns) = (self.numbers.len(), self.columns);
        match sequences.checked_mul(columns) {
            Some(needed) if needed == given => Ok(()),
            _ => Err(ProblemError::TableLength { given, sequences, columns }),
        }
    }

    /// Checks the pages that hold the first `keys` keys of sequence `n`.
    pub(crate) fn check_row(&self, n: usize, keys: usize, k: Dims) -> Result<(), ProblemError> {
        let used = &self.row(n)[..keys.div_ceil(k.seq)];
        match used
            .iter()
            .position(|&page| usize::try_from(page).is_ok_and(|page| page >= k.batch) || page < 0)
        {
            Some(column) => {
                let (page, pages) = (used[column], k.batch);
                Err(ProblemError::PageNumber { sequence: n, column, page, pages })
            }
            None => Ok(()),
        }
    }
}

/// Where the keys of one sequence lie.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Keys<'a> {
    /// One after another, from a row of a batch entry on.
    Together {
        /// The batch entry of K and V.
        batch: usize,
        /// The first row.
        first: usize,
    },
    /// In pages.
    Paged {
        /// The numbers of the pages.
        pages: &'a [i32],
        /// Keys of a page.
        size: usize,
    },
}

impl Keys<'_> {
    pub(crate) const fn together(sequence: Sequence) -> Self {
        Self::Together { batch: sequence.batch, first: sequence.kv_start }
    }

    /// Batch entry (or page) and row of a key in K and V.
    #[inline]
    pub const fn place(&self, key: usize) -> (usize, usize) {
        match *self {
            Self::Together { batch, first } => (batch, first + key),
            Self::Paged { pages, size } => (pages[key / size] as usize, key % size),
        }
    }

    /// How many keys from `key` on certainly lie one row after another; at least 1.
    pub const fn run(&self, key: usize) -> usize {
        match *self {
            Self::Together { .. } => usize::MAX,
            Self::Paged { size, .. } => size - key % size,
        }
    }
}
