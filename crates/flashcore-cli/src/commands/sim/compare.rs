//! `--compare`: results against arrays that say what must come out.

use std::path::{Path, PathBuf};

use serde_json::{Value, json};

use crate::{
    error::CliError,
    files::AnyArray,
    output::{Text, bad, good},
};

/// How far results may lie from what is expected: `|got - want| <= atol + rtol * |want|`.
#[derive(Clone, Copy, PartialEq, Debug)]
pub struct Tolerance {
    pub rtol: f64,
    pub atol: f64,
}

/// A result held against what is expected.
#[derive(Debug)]
pub struct Comparison {
    name: String,
    want: PathBuf,
    /// Elements that differ by more than they may, of how many.
    differ: usize,
    of: usize,
    /// The worst of them: index, what came out, what was wanted.
    worst: Option<(usize, f64, f64)>,
    /// What makes a comparison of elements impossible.
    mismatch: Option<String>,
}

impl Comparison {
    /// Compares `got`, called `name`, with the array in a file.
    pub fn new(name: &str, got: &AnyArray, want: &Path, tolerance: Tolerance) -> Result<Self, CliError> {
        let expected = AnyArray::read(want)?;
        let mut comparison = Self {
            name: name.to_owned(),
            want: want.to_owned(),
            differ: 0,
            of: 0,
            worst: None,
            mismatch: None,
        };
        if (got.element, &got.shape) == (expected.element, &expected.shape) {
            comparison.elements(got, &expected, tolerance);
        } else {
            let kind = |array: &AnyArray| format!("{} {:?}", array.element.name, array.shape);
            comparison.mismatch = Some(format!("{}, but {} is expected", kind(got), kind(&expected)));
        }
        Ok(comparison)
    }

    fn elements(&mut self, got: &AnyArray, want: &AnyArray, tolerance: Tolerance) {
        let values = |array: &AnyArray| -> Vec<f64> {
            array.bytes.chunks_exact(array.element.bytes).map(array.element.number).collect()
        };
        let mut excess = 0.0;
        for (index, (got, want)) in values(got).into_iter().zip(values(want)).enumerate() {
            self.of += 1;
            let same = got == want || got.is_nan() && want.is_nan();
            let distance = (got - want).abs() - (tolerance.atol + tolerance.rtol * want.abs());
            // NaN where a number is expected is as far as can be.
            let distance = if distance.is_nan() { f64::INFINITY } else { distance };
            if same || distance <= 0.0 {
                continue;
            }
            self.differ += 1;
            if distance > excess || self.worst.is_none() {
                (excess, self.worst) = (distance, Some((index, got, want)));
            }
        }
    }

    /// Whether the result is as expected.
    pub fn is_good(&self) -> bool {
        self.differ == 0 && self.mismatch.is_none()
    }

    pub fn json(&self) -> Value {
        json!({
            "result": self.name, "expected": self.want.display().to_string(), "equal": self.is_good(),
            "differ": self.differ, "of": self.of, "mismatch": self.mismatch,
            "worst": self.worst.map(|(at, got, want)| json!({ "index": at, "got": got, "want": want })),
        })
    }

    /// The comparison as a row of a table.
    pub fn row(&self) -> Vec<Text> {
        let verdict = match (&self.mismatch, self.worst) {
            (Some(mismatch), _) => bad(mismatch.clone()),
            (None, Some((at, got, want))) => {
                bad(format!("{} of {} differ, most at {at}: {got} instead of {want}", self.differ, self.of))
            }
            (None, None) => good(format!("{} elements as expected", self.of)),
        };
        vec![self.name.as_str().into(), format!("like {}", self.want.display()).into(), verdict]
    }
}
