//! Flags that several commands share: a problem's tensors, the options of attention, what computes.
//!
//! Commands flatten these groups into their own flags and ask them for the parsed thing.

use std::sync::Arc;

use clap::{
    Args,
    builder::{PossibleValuesParser, TypedValueParser},
};
use flashcore::cuda::Cuda;
use flashcore::{Backend, BackendError, BackendKind, DType, Dims, Layout, Mask, Problem, ProblemError};
use flashcore_core::{Spec, Values};
use flashcore_cpu::Cpu;
use flashcore_kernels::Choice;
use flashcore_lab::{competitor::roster::Ours, task::normal_sinks};
use flashcore_testkit::Kind;

use crate::{
    error::CliError,
    table_flags::{KernelFlags, TableFlags},
    values::{Shape, Window},
};

/// Tensors that exist only as a description.
#[derive(Args, Clone, Debug)]
#[command(next_help_heading = "Random tensors")]
pub struct TensorFlags {
    /// Shape of the queries: batch x heads x sequence x dim
    #[arg(long, value_name = "BxHxSxD", default_value = "1x8x512x64")]
    shape: Shape,
    /// Key and value heads; must divide the query heads [default: as many]
    #[arg(long, value_name = "N")]
    kv_heads: Option<usize>,
    /// Query sequence length [default: that of --shape]
    #[arg(long, value_name = "N")]
    seq_q: Option<usize>,
    /// Key and value sequence length [default: that of --shape]
    #[arg(long, value_name = "N")]
    seq_kv: Option<usize>,
    /// Head dim of the values [default: that of --shape]
    #[arg(long, value_name = "N")]
    dim_v: Option<usize>,
}

impl TensorFlags {
    /// Names of these flags, for those that exclude them.
    pub const NAMES: [&str; 5] = ["shape", "kv_heads", "seq_q", "seq_kv", "dim_v"];

    /// Extents of Q, K and V.
    pub fn dims(&self) -> [Dims; 3] {
        let shape = self.shape.0;
        let q = Dims { seq: self.seq_q.unwrap_or(shape.seq), ..shape };
        let (heads, seq) = (self.kv_heads.unwrap_or(q.heads), self.seq_kv.unwrap_or(shape.seq));
        let k = Dims { heads, seq, ..q };
        [q, k, Dims { dim: self.dim_v.unwrap_or(q.dim), ..k }]
    }
}

/// The values of `--kind`.
pub fn kinds() -> impl TypedValueParser<Value = Kind> {
    PossibleValuesParser::new(Kind::ALL.map(Kind::name))
        .try_map(|name| Kind::named(&name).ok_or("no such kind of data"))
}

/// What is computed.
#[derive(Args, Clone, Debug)]
#[command(next_help_heading = "Attention options")]
pub struct AttentionFlags {
    /// Causal mask: hide the keys after each query
    #[arg(long, group = "masks")]
    causal: bool,
    /// Sliding window: show L keys before and R keys after each query; `inf` means no limit
    #[arg(long, value_name = "L,R", group = "masks")]
    window: Option<Window>,
    /// Align the mask to the first query and key instead of the last ones
    #[arg(long, requires = "masks")]
    top_left: bool,
    /// Softmax scale: factor on the scores [default: 1/sqrt(dim)]
    #[arg(long, value_name = "X", allow_negative_numbers = true)]
    scale: Option<f32>,
    /// Softcap: replace each score by X * tanh(score / X)
    #[arg(long, value_name = "X", allow_negative_numbers = true)]
    softcap: Option<f32>,
    /// Give every query head an attention sink: a random (standard normal) logit without a value
    #[arg(long)]
    sinks: bool,
    /// Make the bits of each row independent of the rest of the batch
    #[arg(long)]
    batch_invariant: bool,
}

impl AttentionFlags {
    /// Sinks drawn from `seed` for so many heads, if they were asked for.
    pub fn values(&self, heads: usize, seed: u64) -> Values {
        let sinks = self.sinks.then(|| normal_sinks(heads, seed)).flatten();
        Values { sinks, ..Values::default() }
    }

    /// Attention with these options over dense tensors.
    pub fn problem(&self, dtype: DType, dims: [Dims; 3]) -> Result<Problem, ProblemError> {
        self.spec(dtype, dims)?.parse()
    }

    /// The same, unchecked.
    pub fn spec(&self, dtype: DType, dims: [Dims; 3]) -> Result<Spec, ProblemError> {
        let sinks = self.sinks.then_some(DType::F32);
        let [q, k, v] = dims.map(Layout::bhsd);
        let plain = Spec::new(dtype, q?, k?, v?);
        let (mask, batch_invariant) = (self.mask(), self.batch_invariant);
        Ok(Spec { mask, scale: self.scale, softcap: self.softcap, sinks, batch_invariant, ..plain })
    }

    fn mask(&self) -> Mask {
        let mask = match self.window {
            Some(window) => window.0,
            None if self.causal => Mask::CAUSAL,
            None => Mask::NONE,
        };
        if self.top_left { mask.top_left() } else { mask }
    }
}

/// What `--backend` names.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Named {
    /// A backend of the library.
    Kind(BackendKind),
    /// The kernels of a GPU, run on the CPU with every check on.
    Simulator,
}

/// The values of `--backend`.
fn names() -> impl TypedValueParser<Value = Named> {
    const SIMULATOR: &str = "sim";
    let known = BackendKind::ALL.map(BackendKind::name).into_iter().chain([SIMULATOR]);
    PossibleValuesParser::new(known).try_map(|name| match name.as_str() {
        SIMULATOR => Ok(Named::Simulator),
        name => name.parse().map(Named::Kind),
    })
}

/// Tries `work` on each backend until one takes the problem; the last refusal is the error.
pub fn first_to_take<T>(
    candidates: &[Arc<dyn Backend>],
    mut work: impl FnMut(&dyn Backend) -> Result<T, BackendError>,
) -> Result<(&dyn Backend, T), BackendError> {
    let (last, others) = candidates.split_last().ok_or_else(none_left)?;
    for backend in others {
        match work(&**backend) {
            Err(BackendError::Unsupported { .. } | BackendError::Unavailable { .. }) => {}
            done => return done.map(|value| (&**backend, value)),
        }
    }
    work(&**last).map(|value| (&**last, value))
}

fn none_left() -> BackendError {
    BackendError::Unavailable { backend: "auto", reason: "this build contains no backend".to_owned() }
}

/// What computes.
#[derive(Args, Clone, Debug)]
#[command(next_help_heading = "How to run")]
pub struct BackendFlags {
    /// Backend to run on
    #[arg(long, value_name = "NAME", default_value = "auto", value_parser = names())]
    backend: Named,
    /// Threads of the CPU backend [default: all cores]
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u16).range(1..=1024),
          conflicts_with_all = ["general", "family"])]
    threads: Option<u16>,
    #[command(flatten)]
    kernel: KernelFlags,
    #[command(flatten)]
    table: TableFlags,
}

impl BackendFlags {
    /// Whether GPU kernels are to run in the simulator.
    pub fn simulated(&self) -> Result<bool, CliError> {
        Ok(self.named()? == Named::Simulator)
    }

    /// What was named, if the other flags do not ask for something else.
    fn named(&self) -> Result<Named, CliError> {
        match (self.backend, self.threads, self.kernel.named()) {
            (Named::Simulator, Some(_), _) => Err(CliError::Threads),
            (Named::Kind(BackendKind::Cpu), _, Some(_)) => {
                Err(CliError::KernelOnCpu { flag: self.kernel.flag() })
            }
            (named, ..) => Ok(named),
        }
    }

    /// The backends that may compute, best first.
    pub fn candidates(&self) -> Result<Vec<Arc<dyn Backend>>, CliError> {
        let ours = self.ours()?;
        let may_pass = self.kind()? == BackendKind::Auto && matches!(self.choice()?, Choice::Rules);
        let next: Option<Arc<dyn Backend>> =
            (may_pass && matches!(ours, Ours::Cuda(_))).then(|| Arc::new(Cpu::new()) as _);
        Ok(std::iter::once(ours.backend()).chain(next).collect())
    }

    fn kind(&self) -> Result<BackendKind, CliError> {
        match self.named()? {
            Named::Kind(kind) => Ok(kind),
            Named::Simulator => Err(CliError::NotTimed),
        }
    }

    /// The backend that competes with others: a GPU where there is one.
    pub fn ours(&self) -> Result<Ours, CliError> {
        let choice = self.choice()?;
        let open = || {
            let cuda = Cuda::open(0).map_err(flashcore::cuda::Error::on_opening)?;
            Ok(Ours::Cuda(Arc::new(cuda.choosing(choice))))
        };
        let kind = self.kind()?;
        match (kind, self.threads()) {
            (BackendKind::Auto | BackendKind::Cpu, Some(threads)) => {
                Ok(Ours::Cpu(Cpu::with_threads(threads)?))
            }
            (_, Some(_)) => Err(CliError::Threads),
            (BackendKind::Auto | BackendKind::Cuda, None) => match open() {
                Err(BackendError::Unavailable { .. })
                    if kind == BackendKind::Auto && self.kernel.named().is_none() =>
                {
                    Ok(Ours::Cpu(Cpu::new()))
                }
                opened => Ok(opened?),
            },
            (_, None) => Ok(Ours::Cpu(Cpu::new())),
        }
    }

    /// What decides about GPU kernels.
    pub fn choice(&self) -> Result<Choice, CliError> {
        self.kernel.choice(&self.table)
    }

    /// Threads asked for.
    pub fn threads(&self) -> Option<usize> {
        self.threads.map(usize::from)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn refusal() -> BackendError {
        BackendError::Unsupported { backend: "x", what: "this".to_owned(), instead: "do that".to_owned() }
    }

    #[test]
    fn a_refusal_leaves_the_problem_to_the_next() {
        let two: Vec<Arc<dyn Backend>> = vec![Arc::new(Cpu::new()), Arc::new(Cpu::new())];
        let mut calls = 0;
        let taken = first_to_take(&two, |_| {
            calls += 1;
            if calls == 1 { Err(refusal()) } else { Ok(calls) }
        });
        assert_eq!(taken.map(|(_, value)| value).ok(), Some(2));
        assert!(first_to_take::<()>(&two, |_| Err(refusal())).is_err(), "all refused");
        assert!(first_to_take::<()>(&[], |_| Ok(())).is_err(), "none there");
    }

    #[test]
    fn a_failure_is_not_hidden_by_the_next() {
        let two: Vec<Arc<dyn Backend>> = vec![Arc::new(Cpu::new()), Arc::new(Cpu::new())];
        let mut calls = 0;
        let failed = first_to_take::<()>(&two, |_| {
            calls += 1;
            Err(BackendError::Failed { backend: "x", source: "broken".into() })
        });
        assert!(failed.is_err() && calls == 1, "{calls} calls");
    }
}
