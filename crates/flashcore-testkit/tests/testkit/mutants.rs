//! Backends that are wrong on purpose, each in one way.

use std::sync::atomic::{AtomicUsize, Ordering};

use flashcore_core::{
    Backend, BackendError, DType, DataMut, Dropout, Element, HostCall, Instance, Layout, Lengths, Mask,
    PageTable, Ran, Sequences, Spec, Values,
};
use flashcore_testkit::{Answer, Step, naive, plain};

/// A fault and the step of the suite that should name it.
pub(crate) struct Mutant {
    pub(crate) name: &'static str,
    pub(crate) caught_at: Step,
    fault: fn(&mut HostCall<'_>, usize) -> Result<(), BackendError>,
    runs: AtomicUsize,
}

impl Backend for Mutant {
    fn name(&self) -> &'static str {
        self.name
    }

    fn forward(&self, call: &mut HostCall<'_>) -> Result<Ran, BackendError> {
        let run = self.runs.fetch_add(1, Ordering::Relaxed);
        (self.fault)(call, run)?;
        Ok(Ran { kernel: "mutant".to_owned() })
    }
}

macro_rules! mutants {
    ($($name:literal, $step:ident => $fault:expr;)*) => {
        /// Every mutant.
        pub(crate) fn all() -> Vec<Mutant> {
            vec![$(Mutant {
                name: $name,
                caught_at: Step::$step,
                fault: $fault,
                runs: AtomicUsize::new(0),
            }),*]
        }
    };
}

mutants! {
    "panics", Launch => |call, _| {
        assert_eq!(call.problem().seq_kv(), 64, "only 64 keys");
        other_call(call, |_, _| {})
    };
    "reports a failure", Launch => |_, _| Err(BackendError::Failed { backend: "mutant", source: "broken".into() });
    "writes nothing", Sanity => |_, _| Ok(());
    "skips the last row", Sanity => |call, _| all_but_last_row(call);
    "leaves rows beyond the used length alone", Sanity => |call, _| used_rows_only(call);
    "runs at most 65535 heads", Sanity => |call, _| {
        let dim = call.problem().dim_v();
        other_answer(call, move |answer| answer.out.truncate(65535 * answer.grid.rows * dim))
    };
    "reads beyond used lengths", Sanity => |call, _| other_call(call, |_, values| {
        if matches!(values.lengths, Lengths::Used { .. }) {
            values.lengths = Lengths::Uniform;
        }
    });
    "does not subtract the maximum", Sanity => |call, _| other_answer(call, |answer| {
        for (row, lse) in answer.out.chunks_mut(answer.grid.dim).zip(&answer.lse) {
            let sum = (*lse as f32).exp();
            let lost = lse.is_finite() && !sum.is_normal(); // GPUs flush what is not
            row.iter_mut().filter(|_| lost).for_each(|x| *x = f64::NAN);
        }
    });
    "indexes with 32 bits", Sanity => |call, _| other_call(call, |spec, _| {
        let wrap = |layout: Layout| Layout::strided(layout.dims(), layout.strides().map(|s| s % (1 << 31)));
        spec.q = wrap(spec.q).unwrap();
    });
    "forgets the last, partial tile of keys", Correctness => |call, _| other_call(call, |spec, values| {
        let dims = spec.k.dims();
        if values.lengths == Lengths::Uniform && dims.seq > 64 {
            values.lengths = Lengths::keys(vec![dims.seq as u32 / 64 * 64; dims.batch]);
        }
    });
    "masks one key too few", Correctness => |call, _| other_call(call, |spec, _| {
        let right = spec.mask.right().map(|right| right.saturating_add(1));
        spec.mask = aligned_like(spec.mask, Mask::window(spec.mask.left(), right));
    });
    "masks one key too many on the left", Correctness => |call, _| other_call(call, |spec, _| {
        let left = spec.mask.left().map(|left| left.saturating_sub(1));
        spec.mask = aligned_like(spec.mask, Mask::window(left, spec.mask.right()));
    });
    "aligns every mask to the top left", Correctness => |call, _| other_call(call, |spec, _| {
        spec.mask = spec.mask.top_left();
    });
    "ignores where a diagonal is shifted to", Correctness => |call, _| other_call(call, |spec, _| {
        spec.mask = spec.mask.shifted(-spec.mask.shift());
    });
    "takes its scale from V", Correctness => |call, _| other_call(call, |spec, _| {
        spec.scale = Some(1.0 / (spec.v.dims().dim as f32).sqrt());
    });
    "ignores softcap", Correctness => |call, _| other_call(call, |spec, _| spec.softcap = None);
    "ignores sinks", Correctness => |call, _| other_call(call, |_, values| values.sinks = None);
    "ignores dropout", Correctness => |call, _| other_call(call, |spec, _| spec.dropout = None);
    "ignores the seed", Correctness => |call, _| other_call(call, |_, values| {
        values.seed = values.seed.map(|_| 1);
    });
    "leaves out more weights than it should", Correctness => |call, _| other_call(call, |spec, values| {
        let asked = spec.dropout.map_or(0.0, Dropout::probability);
        spec.dropout = values.seed.map(|_| Dropout::new(asked + 0.03));
    });
    "does not scale the weights that stay", Correctness => |call, _| {
        let factor = call.problem().dropout().map_or(1.0, Dropout::factor);
        other_answer(call, move |answer| answer.out.iter_mut().for_each(|x| *x /= f64::from(factor)))
    };
    "gives every query head the first key head", Correctness => |call, _| other_call(call, |spec, _| {
        let first = |layout: Layout| {
            let [batch, _, seq, dim] = layout.strides();
            Layout::strided(layout.dims(), [batch, 0, seq, dim])
        };
        (spec.k, spec.v) = (first(spec.k).unwrap(), first(spec.v).unwrap());
    });
    "takes packed sequences for one", Correctness => |call, _| other_call(call, |_, values| {
        if matches!(values.lengths, Lengths::Ragged { .. }) {
            values.lengths = Lengths::Uniform;
        }
    });
    "takes pages in their order", Sanity => |call, _| other_call(call, |spec, values| {
        let (pages, sequences) = (spec.k.dims().batch.max(1), spec.sequences);
        values.table = values.table.take().map(|table| {
            let count = if let Sequences::PackedQueries { count, .. } = sequences { count } else { spec.q.dims().batch };
            let numbers: Vec<i32> = (0..count * table.columns()).map(|n| (n % pages) as i32).collect();
            PageTable::new(numbers, table.columns())
        });
    });
    "reads whole pages", Sanity => |call, _| other_call(call, |spec, values| {
        let size = spec.k.dims().seq as u32;
        if let (Lengths::PackedQueries { kv, .. }, Some(_)) = (&mut values.lengths, &values.table) {
            *kv = kv.iter().map(|len| len.next_multiple_of(size)).collect();
        }
    });
    "weights sum to 1.02", Correctness => |call, _| other_answer(call, |answer| {
        answer.out.iter_mut().for_each(|x| *x *= 1.02);
    });
    "keeps 8 bits", Correctness => |call, _| other_answer(call, |answer| {
        answer.out.iter_mut().for_each(|x| *x = DType::BF16.round(*x));
    });
    "gives LSE to the base 2", Correctness => |call, _| other_answer(call, |answer| {
        answer.lse.iter_mut().for_each(|lse| *lse *= std::f64::consts::LOG2_E);
    });
    "gives an empty row an LSE of 0", Correctness => |call, _| other_answer(call, |answer| {
        answer.lse.iter_mut().filter(|lse| lse.is_infinite()).for_each(|lse| *lse = 0.0);
    });
    "leaves a trace in empty rows", Correctness => |call, _| other_answer(call, |answer| {
        for (row, empty) in answer.out.chunks_mut(answer.grid.dim).zip(&answer.sees_nothing) {
            row.iter_mut().filter(|_| *empty).for_each(|x| *x = 1e-5);
        }
    });
    "differs from run to run", Determinism => |call, run| other_answer(call, |answer| {
        answer.out.iter_mut().take(1).for_each(|x| *x *= 1.0 + run as f64 * 1e-3);
    });
    "differs from run to run in LSE", Determinism => |call, run| other_answer(call, |answer| {
        answer.lse.iter_mut().take(1).for_each(|x| *x += run as f64 * 1e-6);
    });
    "writes one element too many", Isolation => |call, _| {
        let end = call.problem().out().span();
        other_call(call, |_, _| {})?;
        overwrite(call, end);
        Ok(())
    };
    "writes whole rows of 8", Isolation => |call, _| {
        let (layout, dim) = (*call.problem().out(), call.problem().dim_v());
        other_call(call, |_, _| {})?;
        let room = layout.strides()[2] > dim.next_multiple_of(8);
        if room && layout.span() > 0 {
            overwrite(call, dim);
        }
        Ok(())
    };
    "depends on the batch size", Correctness => |call, _| {
        let batch = call.instance().sequences() as f64;
        other_answer(call, move |answer| answer.out.iter_mut().for_each(|x| *x *= 1.0 + batch * 1e-3))
    };
    "needs LSE", Correctness => |call, _| {
        let wanted = call.outputs().1.is_some();
        if wanted { other_call(call, |_, _| {}) } else { Ok(()) }
    };
}

fn aligned_like(mask: Mask, other: Mask) -> Mask {
    let other = other.shifted(mask.shift());
    if mask == mask.top_left() { other.top_left() } else { other }
}

/// Answers another problem than was asked.
fn other_call(call: &mut HostCall<'_>, change: impl Fn(&mut Spec, &mut Values)) -> Result<(), BackendError> {
    let (mut spec, mut values) = (call.problem().spec().clone(), call.instance().values().clone());
    change(&mut spec, &mut values);
    let problem = spec.with(&values).parse()?;
    naive::write(&plain::single(Instance::new(&problem, &values)?, call.inputs()), call);
    Ok(())
}

/// Gives another answer than is right.
fn other_answer(call: &mut HostCall<'_>, change: impl Fn(&mut Answer)) -> Result<(), BackendError> {
    let mut answer = plain::single(call.instance(), call.inputs());
    change(&mut answer);
    naive::write(&answer, call);
    Ok(())
}

fn all_but_last_row(call: &mut HostCall<'_>) -> Result<(), BackendError> {
    other_answer(call, |answer| answer.out.truncate(answer.out.len().saturating_sub(answer.grid.dim)))
}

fn used_rows_only(call: &mut HostCall<'_>) -> Result<(), BackendError> {
    let Lengths::Used { q: Some(used), .. } = call.instance().values().lengths.clone() else {
        return other_call(call, |_, _| {});
    };
    let last_entry = used.last().map_or(0, |&used| used as usize);
    let unused = call.problem().seq_q() - last_entry;
    other_answer(call, move |answer| answer.out.truncate(answer.out.len() - unused * answer.grid.dim))
}

fn overwrite(call: &mut HostCall<'_>, index: usize) {
    fn set<T: Element>(out: &mut [T], index: usize) {
        out[index] = T::from_f32(1.0);
    }
    match call.outputs().0 {
        DataMut::F16(out) => set(out, index),
        DataMut::BF16(out) => set(out, index),
        DataMut::F32(out) => set(out, index),
        _ => {}
    }
}
