//! A deliberately naive backend: the plain computation in f32, for comparison and to test the suite itself.

use flashcore_core::{Backend, BackendError, DataMut, Element, HostCall, Problem, Ran};

use crate::{
    answer::{Answer, Position, Rows},
    plain,
};

/// Unfused attention in f32: slow, simple, right.
#[derive(Clone, Copy, Debug, Default)]
pub struct NaiveBackend;

impl Backend for NaiveBackend {
    fn name(&self) -> &'static str {
        "naive"
    }

    fn forward(&self, call: &mut HostCall<'_>) -> Result<Ran, BackendError> {
        let mut answer = plain::single(call.instance(), call.inputs());
        if call.problem().accumulate() {
            let (problem, instance) = (call.problem(), call.instance());
            let (out, lse) = call.outputs();
            let old = Answer::gather(problem, out.as_data(), lse.as_deref(), Rows::ALL);
            answer = answer.onto(&old, instance);
        }
        write(&answer, call);
        Ok(Ran { kernel: "unfused".to_owned() })
    }
}

/// Writes a result to the call's output.
pub fn write(answer: &Answer, call: &mut HostCall<'_>) {
    let problem = call.problem();
    let (out, lse) = call.outputs();
    match out {
        DataMut::F16(out) => write_rows(answer, problem, out),
        DataMut::BF16(out) => write_rows(answer, problem, out),
        DataMut::F32(out) => write_rows(answer, problem, out),
        _ => unreachable!("an element type that the testkit does not know"),
    }
    let narrowed = answer.lse.iter().map(|&lse| lse as f32);
    lse.into_iter().flatten().zip(narrowed).for_each(|(to, lse)| *to = lse);
}

fn write_rows<T: Element>(answer: &Answer, problem: &Problem, out: &mut [T]) {
    for (index, row) in answer.out.chunks_exact(answer.grid.dim).enumerate() {
        let Position { batch, head, seq, .. } = answer.grid.position(index * answer.grid.dim);
        let start = problem.out().row(batch, head, seq);
        out[start..].iter_mut().zip(row).for_each(|(to, &x)| *to = T::from_f32(x as f32));
    }
}
