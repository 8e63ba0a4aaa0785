//! Gradients, caches and experts in contests: right ones pass, wrong ones are found out, on every task of the small suites.

use std::{rc::Rc, sync::Arc};

use flashcore_core::{Backend, BackendError, BackwardCall, DType, DataMut, HostCall, Mask, MoeCall, Ran};
use flashcore_cpu::Cpu;
use flashcore_lab::{
    competitor::{Competitor, host::HostCompetitor},
    judge::{Finding, Judge},
    suites::Suite,
    task::Task,
    workload::Workload,
};

/// The CPU with one of its results changed a little.
struct Spoiled {
    /// Which tensor, and which of its elements from the end.
    spoil: Option<[usize; 2]>,
}

impl Spoiled {
    fn change(&self, n: usize, data: DataMut<'_>) {
        let Some([tensor, from_end]) = self.spoil.filter(|[tensor, _]| *tensor == n) else { return };
        let DataMut::F32(data) = data else { panic!("tensor {tensor} is not f32") };
        let at = data.len() - 1 - from_end;
        data[at] += 0.02;
    }
}

impl Backend for Spoiled {
    fn name(&self) -> &'static str {
        "spoiled"
    }

    fn forward(&self, call: &mut HostCall<'_>) -> Result<Ran, BackendError> {
        let ran = Cpu::new().forward(call)?;
        // What gradients are made from stays right.
        if call.outputs().1.is_none() || call.problem().pages().is_some() {
            self.change(0, call.outputs().0);
        }
        Ok(ran)
    }

    fn backward(&self, call: &mut BackwardCall<'_>) -> Result<Ran, BackendError> {
        let ran = Cpu::new().backward(call)?;
        for (n, data) in call.gradients().qkv.into_iter().enumerate() {
            self.change(n, data);
        }
        Ok(ran)
    }

    fn moe(&self, call: &mut MoeCall<'_>) -> Result<Ran, BackendError> {
        let ran = Cpu::new().moe(call)?;
        self.change(0, call.out());
        Ok(ran)
    }
}

fn judged(task: &Task, spoil: Option<[usize; 2]>) -> Finding {
    let workload = Rc::new(Workload::new(task.clone(), 1).unwrap());
    let mut ready = HostCompetitor::new(Arc::new(Spoiled { spoil })).prepare(&workload).unwrap();
    Judge::new(&workload).unwrap().judge(&mut *ready, true).unwrap()
}

#[test]
fn small_suites_are_right_and_their_last_element_counts() {
    for suite in [Suite::BACKWARD_CPU, Suite::SERVING_CPU, Suite::MOE_CPU] {
        for task in suite.tasks(DType::F32).unwrap() {
            let right = judged(&task, None);
            assert!(right.pass() && right.rows > 0, "{task}: {right:?}");
            assert!(!judged(&task, Some([0, 0])).pass(), "{task}");
        }
    }
}

/// So large that only some rows of the output's gradient are judged; still every element of each gradient is.
#[test]
fn gradients_of_large_problems_are_judged_whole() {
    let task = Task::square(DType::F32, [1, 1, 1500, 32], Mask::CAUSAL).unwrap();
    let task = task.changed(|spec| spec.backward = true).unwrap();
    let right = judged(&task, None);
    assert!(right.pass() && right.rows < 1500, "{right:?}");
    for spoil in [[0, 777], [1, 32 * 700], [2, 32 * 1499]] {
        assert!(!judged(&task, Some(spoil)).pass(), "{spoil:?}");
    }
}
