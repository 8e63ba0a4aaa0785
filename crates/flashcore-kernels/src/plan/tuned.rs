//! Tables of measured tiles: which tile serves a class of problems on a device, with the evidence beside each row.
//!
//! `flashcore tune` writes tables; [`super::plan`] asks the shipped one, others are read only when somebody names them.
//! A table is data and never trusted: size, version, every number and every text are checked before anything is made
//! of them, and a row is used only if its tile passes the same gate as any candidate (`fit`). Otherwise rules decide.

use std::{fs::File, io::Read, path::Path, sync::OnceLock};

use flashcore_core::{DType, Problem};
use serde::{Deserialize, Serialize};

pub use super::class::{Class, Span, Subject};
use super::{Gpu, Plan, Tile, plan_tile};
use crate::untrusted::{self, Head};

/// What tables are called inside.
pub const SCHEMA: &str = "flashcore-table";
/// The version of the format.
pub const VERSION: u32 = 2;
/// Largest table that is read.
const MOST_BYTES: u64 = 1 << 20;
/// Most rows of a table.
const MOST_ROWS: usize = 1000;
/// Longest text in a table.
const LONGEST_TEXT: usize = 200;
/// Longest time that is taken for one, in microseconds.
const LONGEST_TIME: f64 = 1e11;

/// Measured tiles; the first row that holds a problem and can be built decides.
#[derive(Clone, PartialEq, Serialize, Deserialize, Debug)]
#[serde(deny_unknown_fields)]
pub struct Table {
    schema: String,
    version: u32,
    rows: Vec<Row>,
}

/// One class of problems and its tile.
#[derive(Clone, PartialEq, Serialize, Deserialize, Debug)]
#[serde(deny_unknown_fields)]
pub struct Row {
    /// What the row is for.
    pub class: Class,
    /// How to cut the work.
    pub tile: Tile,
    /// Why: what was measured.
    pub evidence: Evidence,
}

/// What was measured, where and when.
#[derive(Clone, PartialEq, Serialize, Deserialize, Debug)]
#[serde(deny_unknown_fields)]
pub struct Evidence {
    /// The problem that was tuned.
    pub problem: String,
    /// Median time of the tile, in microseconds.
    pub median_us: f64,
    /// Where that median lies with 95 % confidence.
    pub interval_us: [f64; 2],
    /// Median time of what the plan would have chosen.
    pub plan_us: f64,
    /// The tile's time over that of the plan's choice: lower end, estimate, upper end.
    pub ratio: [f64; 3],
    /// Candidates that were measured.
    pub tried: u32,
    /// The GPU or processor.
    pub device: String,
    /// Its driver.
    pub driver: Option<String>,
    /// Version of FlashCore.
    pub flashcore: String,
    /// Commit that the program was built from.
    pub commit: Option<String>,
    /// When, in UTC.
    pub created: String,
}

/// Why a table is not taken.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum TableError {
    /// The operating system refused.
    #[error("cannot read it: {0}")]
    Io(#[from] std::io::Error),
    /// Too large.
    #[error("larger than {} KiB, which no table is", MOST_BYTES >> 10)]
    Size,
    /// Another kind of file.
    #[error("not a table of `flashcore tune`")]
    Schema,
    /// Another version.
    #[error("version {got} of the format; this program reads version {VERSION}: tune again")]
    Version {
        /// The file's version.
        got: u32,
    },
    /// Not the expected JSON.
    #[error("damaged or not a table ({0})")]
    Json(#[from] serde_json::Error),
    /// Too many rows.
    #[error("{0} rows are more than the {MOST_ROWS} a table may have")]
    Rows(usize),
    /// A row that cannot be.
    #[error("row {index}: {what}")]
    Row {
        /// Its number, from 0.
        index: usize,
        /// What is wrong.
        what: String,
    },
}

impl Default for Table {
    fn default() -> Self {
        Self { schema: SCHEMA.to_owned(), version: VERSION, rows: Vec::new() }
    }
}

impl Table {
    /// The table that is part of the program.
    pub fn shipped() -> &'static Self {
        static SHIPPED: OnceLock<Table> = OnceLock::new();
        // A test reads it; without a table the rules decide.
        SHIPPED.get_or_init(|| Self::parse(include_bytes!("tuned.json")).unwrap_or_default())
    }

    /// Reads a file.
    pub fn load(path: &Path) -> Result<Self, TableError> {
        let mut bytes = Vec::new();
        File::open(path)?.take(MOST_BYTES + 1).read_to_end(&mut bytes)?;
        Self::parse(&bytes)
    }

    /// Reads the contents of a file.
    pub fn parse(bytes: &[u8]) -> Result<Self, TableError> {
        if bytes.len() as u64 > MOST_BYTES {
            return Err(TableError::Size);
        }
        let head: Head = serde_json::from_slice(bytes)?;
        if head.schema != SCHEMA {
            return Err(TableError::Schema);
        }
        if head.version != VERSION {
            return Err(TableError::Version { got: head.version });
        }
        let table: Self = serde_json::from_slice(bytes)?;
        if table.rows.len() > MOST_ROWS {
            return Err(TableError::Rows(table.rows.len()));
        }
        let faulty = table.rows.iter().enumerate().find_map(|(n, row)| Some((n, row.check().err()?)));
        faulty.map_or(Ok(table), |(index, what)| Err(TableError::Row { index, what }))
    }

    /// The file's contents: one row to a line.
    pub fn to_json(&self) -> Result<String, TableError> {
        let rows: Vec<_> = self.rows.iter().map(serde_json::to_string).collect::<Result<_, _>>()?;
        let rows = if rows.is_empty() { String::new() } else { format!("\n{}\n", rows.join(",\n")) };
        Ok(format!("{{\"schema\":\"{SCHEMA}\",\"version\":{VERSION},\"rows\":[{rows}]}}\n"))
    }

    /// The rows, in the order in which they are asked.
    pub fn rows(&self) -> &[Row] {
        &self.rows
    }

    /// Adds a row in front; one of the same class gives way.
    pub fn insert(&mut self, row: Row) -> Result<(), TableError> {
        row.check().map_err(|what| TableError::Row { index: 0, what })?;
        self.rows.retain(|old| old.class != row.class);
        self.rows.insert(0, row);
        if self.rows.len() > MOST_ROWS { Err(TableError::Rows(self.rows.len())) } else { Ok(()) }
    }

    /// Rows that hold a problem on a device, with their numbers.
    pub fn find(&self, subject: &Subject<'_>) -> impl Iterator<Item = (usize, &Row)> {
        self.rows.iter().enumerate().filter(|(_, row)| row.class.holds(subject))
    }

    /// The plan of the first row that holds the problem and fits the GPU.
    pub(super) fn plan(&self, problem: &Problem, gpu: &Gpu, alignment: u64) -> Option<Plan> {
        if self.rows.is_empty() {
            return None;
        }
        let device = gpu.device();
        let subject = Subject::new(&device, gpu.sms, problem)?;
        self.find(&subject).find_map(|(index, row)| {
            let plan = plan_tile(problem, gpu, alignment, row.tile).ok()?;
            plan.check_build(problem).ok()?;
            let why = "measured to be faster than what the rules choose";
            Some(Plan { why, row: Some(row.describe(index)), ..plan })
        })
    }
}

impl Row {
    /// The row in words.
    pub fn describe(&self, index: usize) -> String {
        let Evidence { problem, median_us, plan_us, device, .. } = &self.evidence;
        format!(
            "row {index} of the table: {problem} took {median_us:.1} us instead of {plan_us:.1} us on {device}"
        )
    }

    fn check(&self) -> Result<(), String> {
        self.class.check()?;
        self.tile.check().map_err(|misfit| misfit.to_string())?;
        self.evidence.check()?;
        let on_cpu = matches!(self.tile, Tile::Cpu(_));
        let halves = [DType::F16, DType::BF16].iter().any(|dtype| dtype.name() == self.class.dtype);
        if on_cpu || halves { Ok(()) } else { Err(format!("GPU kernels take no {}", self.class.dtype)) }
    }
}

impl Evidence {
    fn check(&self) -> Result<(), String> {
        let texts = [&self.problem, &self.device, &self.flashcore, &self.created];
        let optional = [&self.driver, &self.commit].into_iter().flatten();
        texts.into_iter().chain(optional).try_for_each(|text| check_text(text))?;
        let [low, high] = self.interval_us;
        let numbers = [self.median_us, low, high, self.plan_us].into_iter().chain(self.ratio);
        match numbers.into_iter().find(|x| !(*x > 0.0 && *x <= LONGEST_TIME)) {
            Some(number) => Err(format!("{number} is not a time or a ratio")),
            None => Ok(()),
        }
    }
}

pub(super) fn check_text(text: &str) -> Result<(), String> {
    untrusted::check_text(text, LONGEST_TEXT)
}
