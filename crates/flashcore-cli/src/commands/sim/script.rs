//! `flashcore sim --script FILE`: several launches on the same arrays, as a JSON file says.
//!
//! ```json
//! {
//!   "ptx": "op.ptx",
//!   "arrays": {
//!     "x": { "file": "x.npy" },
//!     "sums": { "dtype": "f32", "shape": [64], "fill": 0 },
//!     "y": { "dtype": "f32", "shape": [64, 32], "save": "y.npy", "expect": "want.npy", "rtol": 1e-3 }
//!   },
//!   "launches": [
//!     { "entry": "first", "grid": [8], "block": [128], "args": [{ "array": "x" }, { "array": "sums" }, { "u32": 64 }] },
//!     { "entry": "second", "grid": [8], "block": [128], "args": [{ "array": "sums" }, { "array": "y" }] }
//!   ]
//! }
//! ```

use std::{
    collections::BTreeMap,
    path::{Path, PathBuf},
};

use flashcore_lab::{buffer::filled, memory};
use flashcore_ptx::launch::Slot;
use flashcore_sim::Buffer;
use serde::Deserialize;
use serde_json::json;

use super::{
    Flags, SimFailure,
    compare::{Comparison, Tolerance},
    parse, read_text,
    request::{HowRequest, Known, LaunchRequest, Ran, run_all},
    stats,
};
use crate::{
    error::{CliError, Verdict},
    files::{AnyArray, Place},
    output::{Output, Page, Text},
    simulation,
};

/// A script file.
#[derive(Deserialize, Debug)]
#[serde(deny_unknown_fields)]
struct Script {
    ptx: PathBuf,
    #[serde(default)]
    arrays: BTreeMap<String, ArrayRequest>,
    launches: Vec<LaunchRequest>,
    #[serde(default)]
    how: HowRequest,
}

/// An array: a file, or a type with a shape.
#[derive(Deserialize, Debug)]
#[serde(deny_unknown_fields)]
struct ArrayRequest {
    file: Option<PathBuf>,
    dtype: Option<String>,
    shape: Option<Vec<usize>>,
    /// Every byte of it at the start; without it, reading before writing is a finding.
    fill: Option<u8>,
    save: Option<PathBuf>,
    expect: Option<PathBuf>,
    #[serde(default)]
    rtol: f64,
    #[serde(default)]
    atol: f64,
}

/// An array of a script with its content.
struct Array {
    name: String,
    content: AnyArray,
    initialised: bool,
    save: Option<Place>,
    expect: Option<(PathBuf, Tolerance)>,
}

/// Runs the script; files are named relative to it. What it does not say about how to run, the flags do.
pub fn execute(path: &Path, flags: &Flags, output: &Output) -> Result<Verdict, CliError> {
    let text = read_text(path)?;
    let wrong = |error: serde_json::Error| SimFailure::Script(format!("{}: {error}", path.display()));
    let script: Script = serde_json::from_str(&text).map_err(wrong)?;
    let folder = path.parent().unwrap_or(Path::new(""));
    let parsed = parse(&folder.join(&script.ptx))?;
    let arrays: Vec<Array> = script
        .arrays
        .into_iter()
        .map(|(name, request)| request.array(name, folder, flags.force))
        .collect::<Result<_, _>>()?;
    if arrays.len() > super::bound::MOST {
        return Err(SimFailure::TooMany { given: arrays.len(), most: super::bound::MOST }.into());
    }
    let find = |name: &str| {
        let at = arrays.iter().position(|array| array.name == name)?;
        let content = &arrays[at].content;
        Some(Known { slot: Slot(at as u8), element: content.element.name, shape: &content.shape })
    };
    let specs = script.launches.iter().map(|launch| launch.spec(&parsed, &find)).collect::<Result<_, _>>()?;
    let buffer = |(at, array): (usize, &Array)| Buffer {
        slot: Slot(at as u8),
        bytes: array.content.bytes.clone(),
        initialised: array.initialised,
        name: Some(format!("array `{}`", array.name)),
    };
    let buffers = arrays.iter().enumerate().map(buffer).collect();
    let mut options = script.how.options()?;
    options.step_limit = script.how.max_steps.unwrap_or(flags.max_steps);
    let ran = run_all(&parsed, specs, buffers, &options, &|| true)?;
    finish(arrays, &ran, flags.stats, output)
}

impl ArrayRequest {
    fn array(self, name: String, folder: &Path, force: bool) -> Result<Array, CliError> {
        let (content, initialised) = match (&self.file, &self.dtype, self.shape) {
            (Some(file), None, None) => (AnyArray::read(&folder.join(file))?, true),
            (None, Some(dtype), Some(shape)) => {
                let element: crate::files::ElementType = dtype.parse().map_err(SimFailure::Script)?;
                let len = shape.iter().try_fold(element.bytes, |n, &extent| n.checked_mul(extent));
                let len = len.unwrap_or(usize::MAX);
                memory::check(len as u64)?;
                let bytes = filled(self.fill.unwrap_or(0xff), len)?;
                (AnyArray { element, shape, bytes }, self.fill.is_some())
            }
            _ => {
                let text = format!("array `{name}` needs a file, or a dtype and a shape");
                return Err(SimFailure::Script(text).into());
            }
        };
        let save = self.save.map(|path| Place::checked(&folder.join(path), force)).transpose()?;
        let tolerance = Tolerance { rtol: self.rtol, atol: self.atol };
        let expect = self.expect.map(|path| (folder.join(path), tolerance));
        Ok(Array { name, content, initialised, save, expect })
    }
}

/// Saves, compares and tells.
fn finish(arrays: Vec<Array>, ran: &[Ran], stats: bool, output: &Output) -> Result<Verdict, CliError> {
    let halted = ran.iter().any(|ran| ran.outcome.halted);
    let mut comparisons = Vec::new();
    for (at, mut array) in arrays.into_iter().enumerate() {
        let bytes = ran.last().and_then(|ran| ran.outcome.bytes(Slot(at as u8)));
        let Some(bytes) = bytes.filter(|_| !halted) else { continue };
        array.content.bytes = bytes.to_vec();
        if let Some(place) = &array.save {
            array.content.save(place)?;
        }
        if let Some((want, tolerance)) = &array.expect {
            comparisons.push(Comparison::new(&array.name, &array.content, want, *tolerance)?);
        }
    }
    let clean = ran.iter().all(|ran| ran.outcome.is_clean()) && comparisons.iter().all(Comparison::is_good);
    let launch = |ran: &Ran| {
        let answer =
            json!({ "kernel": ran.spec.entry.to_string(), "grid": ran.spec.grid, "block": ran.spec.block });
        simulation::merged(answer, stats_merged(simulation::json(&ran.outcome), ran, stats))
    };
    let answer = json!({
        "clean": clean,
        "launches": ran.iter().map(launch).collect::<Vec<_>>(),
        "comparisons": comparisons.iter().map(Comparison::json).collect::<Vec<_>>(),
    });
    output.answer(&answer, || page(ran, &comparisons, stats))?;
    Ok(Verdict::from_bool(clean))
}

fn stats_merged(json: serde_json::Value, ran: &Ran, wanted: bool) -> serde_json::Value {
    if wanted { simulation::merged(json, stats::json(ran)) } else { json }
}

fn page(ran: &[Ran], comparisons: &[Comparison], stats: bool) -> Page {
    let mut page = Page::default();
    for ran in ran {
        page = page.facts::<Text>([
            ("kernel", ran.spec.entry.to_string().into()),
            ("result", simulation::verdict(&ran.outcome)),
        ]);
        if stats {
            page = page.facts::<Text>([("speed", stats::line(ran).into())]);
        }
        page = simulation::add_findings(page, &ran.outcome);
    }
    page.table(comparisons.iter().map(Comparison::row))
}
