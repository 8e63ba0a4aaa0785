//! The flags of `flashcore run`, as clap parses them; [`super::request`] makes sense of them.

use clap::Args;
use flashcore::{BackendKind, DType};

use crate::{
    backends,
    files::TensorPath,
    values::{Shape, Window},
};

const EXAMPLES: &str = "\
Examples:
  flashcore run
  flashcore run --shape 2x32x4096x128 --kv-heads 8 --causal --dtype bf16
  flashcore run --shape 1x8x1x64 --seq-kv 8192 --json
  flashcore run --q q.npy --k k.npy --v v.npy --out o.npy --lse lse.npy
  flashcore run --q x.safetensors#q --k x.safetensors#k --v x.safetensors#v --out o.safetensors

Arrays are batch x heads x sequence x dim, or heads x sequence x dim.
The result is compared with an f64 computation; where that would take too long, on evenly spaced rows.
Nothing is written if the comparison fails.";

/// Compute attention, check it against f64, time it
#[derive(Args, Clone, Debug)]
#[command(after_help = EXAMPLES)]
pub struct Flags {
    /// Shape of random queries: batch x heads x sequence x dim
    #[arg(long, value_name = "BxHxSxD", default_value = "1x8x512x64", help_heading = "Random tensors")]
    pub shape: Shape,
    /// Heads of keys and values, which must divide the heads of the shape [default: the same]
    #[arg(long, value_name = "N", help_heading = "Random tensors")]
    pub kv_heads: Option<usize>,
    /// Sequence length of keys and values [default: the same]
    #[arg(long, value_name = "N", help_heading = "Random tensors")]
    pub seq_kv: Option<usize>,
    /// Features of a value [default: the same]
    #[arg(long, value_name = "N", help_heading = "Random tensors")]
    pub dim_v: Option<usize>,
    /// Element type: f16, bf16 or f32 [default: f16, or what the files hold]
    #[arg(long, value_name = "TYPE", help_heading = "Random tensors")]
    pub dtype: Option<DType>,
    /// Seed of the random numbers
    #[arg(long, value_name = "N", default_value_t = 0, help_heading = "Random tensors")]
    pub seed: u64,

    #[command(flatten)]
    pub files: FileFlags,

    /// Hide keys after a query
    #[arg(long, help_heading = "Options of attention")]
    pub causal: bool,
    /// Show only L keys before and R after a query; `inf` does not limit
    #[arg(long, value_name = "L,R", conflicts_with = "causal", help_heading = "Options of attention")]
    pub window: Option<Window>,
    /// Align the mask to the first query and key instead of the last
    #[arg(long, help_heading = "Options of attention")]
    pub top_left: bool,
    /// Factor on the scores [default: 1/sqrt(dim)]
    #[arg(long, value_name = "X", allow_negative_numbers = true, help_heading = "Options of attention")]
    pub scale: Option<f32>,
    /// Bend scores to X * tanh(score / X)
    #[arg(long, value_name = "X", allow_negative_numbers = true, help_heading = "Options of attention")]
    pub softcap: Option<f32>,

    /// What computes
    #[arg(long, value_name = "NAME", default_value = "auto", value_parser = backends::names(), help_heading = "How to run")]
    pub backend: BackendKind,
    /// Threads of the CPU backend [default: all cores]
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u16).range(1..=1024), help_heading = "How to run")]
    pub threads: Option<u16>,
    /// Timed runs after the first [default: about a second's worth]
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(1..), help_heading = "How to run")]
    pub iters: Option<u32>,
}

/// Tensors from files; `--q`, `--k`, `--v` and `--out` go together.
#[derive(Args, Clone, Debug)]
#[group(multiple = true, conflicts_with_all = ["shape", "kv_heads", "seq_kv", "dim_v", "seed"])]
pub struct FileFlags {
    /// Queries: FILE.npy, FILE.safetensors or FILE.safetensors#TENSOR
    #[arg(long, value_name = "FILE", requires_all = ["k", "v", "out"], help_heading = "Tensors from files")]
    q: Option<TensorPath>,
    /// Keys
    #[arg(long, value_name = "FILE", requires = "q", help_heading = "Tensors from files")]
    k: Option<TensorPath>,
    /// Values
    #[arg(long, value_name = "FILE", requires = "q", help_heading = "Tensors from files")]
    v: Option<TensorPath>,
    /// Where the result goes
    #[arg(long, value_name = "FILE", requires = "q", help_heading = "Tensors from files")]
    out: Option<TensorPath>,
    /// Where the log-sum-exp of each row goes
    #[arg(long, value_name = "FILE", requires = "q", help_heading = "Tensors from files")]
    lse: Option<TensorPath>,
    /// Replace output files that exist
    #[arg(long, requires = "q", help_heading = "Tensors from files")]
    force: bool,
}

/// The files of a run.
#[derive(Clone, Debug)]
pub struct FileNames {
    pub q: TensorPath,
    pub k: TensorPath,
    pub v: TensorPath,
    pub out: TensorPath,
    pub lse: Option<TensorPath>,
    pub force: bool,
}

impl FileFlags {
    /// The files, if any were named; clap has seen to it that then all were.
    pub fn names(self) -> Option<FileNames> {
        let Self { q, k, v, out, lse, force } = self;
        Some(FileNames { q: q?, k: k?, v: v?, out: out?, lse, force })
    }
}
