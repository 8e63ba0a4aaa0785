//! The answer of `sim`: results, counts, findings.

use std::path::{Path, PathBuf};

use flashcore_ptx::launch::LaunchSpec;
use flashcore_sim::Outcome;
use serde::Serialize;

use super::bound::Written;
use crate::{
    output::{Page, Report, Text, Tone},
    simulation::Simulated,
};

/// Elements of a result that are shown.
const SHOWN: usize = 8;

/// Everything `sim` tells.
#[derive(Serialize, Debug)]
pub struct SimReport {
    file: String,
    kernel: String,
    grid: [u32; 3],
    block: [u32; 3],
    #[serde(flatten)]
    simulated: Simulated,
    results: Vec<ArrayReport>,
    /// Files of arrays that were only to be read, and that the kernel has changed.
    overwritten: Vec<String>,
}

#[derive(Serialize, Debug)]
struct ArrayReport {
    file: String,
    dtype: &'static str,
    shape: Vec<usize>,
    /// The first few elements.
    first: Vec<String>,
    written: bool,
}

impl SimReport {
    /// Puts together what ran and what came of it.
    pub fn new(
        file: &Path,
        spec: &LaunchSpec,
        outcome: &Outcome,
        results: &[Written],
        overwritten: &[PathBuf],
    ) -> Self {
        let array = |result: &Written| {
            let content = &result.content;
            let elements = content.bytes.chunks_exact(content.element.bytes()).take(SHOWN);
            ArrayReport {
                file: result.path().display().to_string(),
                dtype: content.element.name(),
                shape: content.shape.clone(),
                first: elements.map(|bytes| content.element.show(bytes)).collect(),
                written: !outcome.halted,
            }
        };
        Self {
            file: file.display().to_string(),
            kernel: spec.entry.to_string(),
            grid: spec.grid,
            block: spec.block,
            simulated: outcome.into(),
            results: results.iter().map(array).collect(),
            overwritten: overwritten.iter().map(|path| path.display().to_string()).collect(),
        }
    }

    fn launch(&self) -> String {
        let text = |[x, y, z]: [u32; 3]| format!("{x} x {y} x {z}");
        format!("grid {}, block {}", text(self.grid), text(self.block))
    }
}

impl ArrayReport {
    fn row(&self) -> Vec<Text> {
        let shape: Vec<_> = self.shape.iter().map(usize::to_string).collect();
        let more = if self.shape.iter().product::<usize>() > SHOWN { " ..." } else { "" };
        let kept = if self.written { "" } else { " (not written: the launch ended early)" };
        let values = format!("{}{more}{kept}", self.first.join(" "));
        vec![self.file.as_str().into(), format!("{} {}", self.dtype, shape.join("x")).into(), values.into()]
    }
}

impl Report for SimReport {
    fn page(&self) -> Page {
        let page = Page::default().facts::<Text>([
            ("kernel", format!("{} of {}", self.kernel, self.file).into()),
            ("launch", self.launch().into()),
            ("result", self.simulated.verdict()),
        ]);
        let lost = |file: &String| {
            let text =
                format!("FAIL: {file} was only to be read; to keep what is written, pass inout:{file}");
            ("input", Text::new(text, Tone::Bad))
        };
        let page = page.facts(self.overwritten.iter().map(lost));
        let page = if self.results.is_empty() {
            page
        } else {
            page.table(self.results.iter().map(ArrayReport::row))
        };
        self.simulated.add_to(page)
    }
}
