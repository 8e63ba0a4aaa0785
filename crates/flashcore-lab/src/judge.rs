//! Who is right: the testkit's error rule, with the f64 result of a task computed once for all competitors.

use std::rc::Rc;

use flashcore_core::Data;
use flashcore_testkit::{
    Answer, Rows, Verdict,
    answer::Grid,
    compare::Rule,
    plain::{reference, yardstick},
};
use serde::{Deserialize, Serialize};

use crate::{
    competitor::Ready,
    error::LabError,
    workload::{Outputs, Workload},
};

/// How much of a large task is judged: evenly spaced rows.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Care {
    /// As many rows as take about a second of eight cores, for errors that are compared with each other.
    Thorough,
    /// As many rows as take about a second of one core.
    Usual,
    /// As many as take about a tenth of that, for hundreds of tasks in a row.
    Brief,
}

impl Care {
    /// Multiply-adds of the f64 computation.
    const fn budget(self) -> f64 {
        match self {
            Self::Thorough => (1u64 << 32) as f64,
            Self::Usual => (1u64 << 29) as f64,
            Self::Brief => (1u64 << 26) as f64,
        }
    }
}

/// What a task should come to.
pub struct Judge {
    workload: Rc<Workload>,
    rows: Rows,
    oracle: Answer,
    yardstick: Answer,
}

/// What was found about one competitor's result.
#[derive(Clone, PartialEq, Serialize, Deserialize, Debug)]
#[serde(deny_unknown_fields)]
pub struct Finding {
    pub max_error: f64,
    /// Root mean square error over the root mean square of the result; missing in old files.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub relative_rms: Option<f64>,
    pub tolerance: f64,
    pub rows: usize,
    /// Why the result does not pass; missing when it does.
    pub wrong: Option<String>,
}

impl Finding {
    /// Whether the result passes.
    pub const fn pass(&self) -> bool {
        self.wrong.is_none()
    }
}

impl Judge {
    /// Computes the task in f64 and plainly.
    pub fn new(workload: &Rc<Workload>) -> Self {
        Self::with(workload, Care::Usual)
    }

    /// The same on as many rows as `care` allows.
    pub fn with(workload: &Rc<Workload>, care: Care) -> Self {
        let problem = workload.instance();
        let rows = Rows::within(&problem, care.budget());
        let inputs = workload.inputs();
        let oracle = reference(problem, inputs, rows);
        Self { workload: workload.clone(), rows, oracle, yardstick: yardstick(problem, inputs, rows) }
    }

    /// Judges what `ready` computes; two computations must agree bit for bit if `repeat`.
    pub fn judge(&self, ready: &mut dyn Ready, repeat: bool) -> Result<Finding, LabError> {
        let first = ready.compute()?;
        let mut finding = self.compare(&first);
        if repeat && finding.pass() && !same_bits(&first, &ready.compute()?) {
            finding.wrong = Some("two runs on the same input gave different bits".to_owned());
        }
        Ok(finding)
    }

    /// Applies the error rule.
    pub fn compare(&self, outputs: &Outputs) -> Finding {
        let problem = self.workload.task().problem();
        let got = Answer::gather(problem, outputs.out.data(), outputs.lse.as_deref(), self.rows);
        let verdict: Verdict = Rule::of(problem).judge(&got, &self.oracle, &self.yardstick);
        Finding {
            max_error: verdict.max_error,
            relative_rms: Some(verdict.relative_rms),
            tolerance: verdict.tolerance,
            rows: Grid::of(problem, self.rows).total_rows(),
            wrong: verdict.reason.map(|reason| reason.to_string()),
        }
    }
}

fn same_bits(a: &Outputs, b: &Outputs) -> bool {
    let bits = |lse: &Option<Vec<f32>>| lse.as_deref().map(|lse| Data::F32(lse).bytes().to_vec());
    a.out.data().bytes() == b.out.data().bytes() && bits(&a.lse) == bits(&b.lse)
}
