//! Judging results: the testkit's error rule, with the f64 result of a task computed once for all competitors.

pub mod experts;
pub mod gradients;

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
    buffer::Buffer,
    competitor::Ready,
    error::LabError,
    task::Operation,
    workload::{Outputs, Turn, Workload},
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
    expected: Expected,
}

/// What was computed in f64 and plainly, by operation.
enum Expected {
    Rows { rows: Rows, oracle: Answer, yardstick: Answer },
    Gradients(gradients::Expected),
    Experts(experts::Expected),
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
    fn of(verdict: &Verdict, rows: usize) -> Self {
        Self {
            max_error: verdict.max_error,
            relative_rms: Some(verdict.relative_rms),
            tolerance: verdict.tolerance,
            rows,
            wrong: verdict.reason.as_ref().map(ToString::to_string),
        }
    }

    /// Where there is nothing to judge.
    const fn nothing() -> Self {
        Self { max_error: 0.0, relative_rms: None, tolerance: 0.0, rows: 0, wrong: None }
    }

    /// Whether the result passes.
    pub const fn pass(&self) -> bool {
        self.wrong.is_none()
    }
}

impl Judge {
    /// Computes the task in f64 and plainly.
    pub fn new(workload: &Rc<Workload>) -> Result<Self, LabError> {
        Self::with(workload, Care::Usual)
    }

    /// The same on as many rows of attention as `care` allows.
    pub fn with(workload: &Rc<Workload>, care: Care) -> Result<Self, LabError> {
        let inputs = workload.inputs();
        let task = workload.task();
        let expected = match (task.operation(), workload.instance(), workload.d_out(Turn::Judged)) {
            (Operation::Forward(_), Some(problem), _) => {
                let rows = Rows::within(&problem, care.budget());
                let (oracle, yardstick) =
                    (reference(problem, inputs, rows), yardstick(problem, inputs, rows));
                Expected::Rows { rows, oracle, yardstick }
            }
            (Operation::Backward(problem), Some(instance), Some(d_out)) => {
                Expected::Gradients(gradients::Expected::new(problem, instance.values(), inputs, d_out)?)
            }
            (Operation::Experts(problem), ..) => {
                let inputs = workload.experts(Turn::Judged).expect("a mixture of experts has its inputs");
                Expected::Experts(experts::Expected::new(problem, &inputs))
            }
            _ => unreachable!("attention has an instance, and gradients those of the output"),
        };
        Ok(Self { workload: workload.clone(), expected })
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
        match (&self.expected, self.workload.task().operation(), &outputs.tensors[..]) {
            (Expected::Rows { rows, oracle, yardstick }, Operation::Forward(problem), [out]) => {
                let got = Answer::gather(problem, out.data(), outputs.lse.as_deref(), *rows);
                let verdict = Rule::of(problem).judge(&got, oracle, yardstick);
                Finding::of(&verdict, Grid::of(problem, *rows).total_rows())
            }
            (Expected::Gradients(expected), Operation::Backward(problem), [dq, dk, dv]) => {
                let verdict = expected.judge([dq, dk, dv].map(Buffer::data));
                let rows = gradients::judged_rows(problem);
                verdict.map_or_else(Finding::nothing, |verdict| Finding::of(&verdict, rows))
            }
            (Expected::Experts(expected), _, [out]) => {
                Finding::of(&expected.judge(out.data()), expected.tokens())
            }
            _ => unreachable!("outputs are those of the task"),
        }
    }
}

fn same_bits(a: &Outputs, b: &Outputs) -> bool {
    let bits = |lse: &Option<Vec<f32>>| lse.as_deref().map(|lse| Data::F32(lse).bytes().to_vec());
    let same = a.tensors.iter().zip(&b.tensors).all(|(a, b)| a.data().bytes() == b.data().bytes());
    same && bits(&a.lse) == bits(&b.lse)
}
