//! The flags of `flashcore run`, as clap parses them; [`super::request`] makes sense of them.

use clap::{Args, Subcommand};
use flashcore::DType;
use flashcore_kernels::Gpu;
use flashcore_testkit::Kind;

use super::moe;
use crate::{
    error::CliError,
    files::TensorPath,
    flags::{AttentionFlags, BackendFlags, TensorFlags, kinds},
    gpu_flags::GpuFlags,
};

const EXAMPLES: &str = "\
Examples:
  flashcore run
  flashcore run --shape 2x32x4096x128 --kv-heads 8 --causal --dtype bf16
  flashcore run --shape 1x8x1x64 --seq-kv 8192 --json
  flashcore run --shape 3x32x4096x128 --kv-heads 8 --seq-q 1 --page-size 16 --lengths 4096,100,0
  flashcore run --q q.npy --k k.npy --v v.npy --out o.npy --lse lse.npy
  flashcore run --q x.safetensors#q --k x.safetensors#k --v x.safetensors#v --out o.safetensors
  flashcore run --backward --shape 1x8x512x64 --causal --dropout 0.1
  flashcore run --backward --q q.npy --k k.npy --v v.npy --d-out do.npy --dq dq.npy --dk dk.npy --dv dv.npy
  flashcore run --backend sim --shape 1x2x192x128 --causal --gpu sm_90
  flashcore run moe --tokens 64 --hidden 256 --intermediate 128 --experts 8 --top-k 2

Arrays are batch x heads x sequence x dim, or heads x sequence x dim.
The output is checked against f64: every row, or evenly spaced rows if that would take too long.
Nothing is written if the check fails. --backend sim runs the GPU's kernel in the simulator with
all checks on; any finding is printed and fails the run.";

/// Compute attention, check it against f64, and time it
#[derive(Args, Clone, Debug)]
#[command(after_help = EXAMPLES, args_conflicts_with_subcommands = true)]
pub struct Flags {
    #[command(subcommand)]
    pub other: Option<Other>,
    #[command(flatten)]
    pub tensors: TensorFlags,
    /// Element type: f16, bf16 or f32 [default: f16, or what the files hold]
    #[arg(long, value_name = "TYPE", help_heading = "Random tensors")]
    pub dtype: Option<DType>,
    /// Seed of the random inputs
    #[arg(long, value_name = "N", default_value_t = 0, help_heading = "Random tensors")]
    pub seed: u64,
    /// Kind of random data: normal, outliers, sharp, sink, mean or drift
    #[arg(long, value_name = "NAME", default_value = "normal", value_parser = kinds(), hide_possible_values = true,
          help_heading = "Random tensors")]
    pub kind: Kind,
    /// Compute the gradients of Q, K and V instead of the output
    #[arg(long, conflicts_with_all = ["out", "page_size"], help_heading = "What to compute")]
    pub backward: bool,
    #[command(flatten)]
    pub cache: CacheFlags,
    #[command(flatten)]
    pub files: FileFlags,
    #[command(flatten)]
    pub attention: AttentionFlags,
    /// Drop each attention weight with probability P, as in training
    #[arg(long, value_name = "P", allow_negative_numbers = true, help_heading = "Attention options")]
    pub dropout: Option<f32>,
    /// Seed that decides which weights are dropped, as dropout_seed in Python [default: --seed; 0 with files]
    #[arg(long, value_name = "N", requires = "dropout", help_heading = "Attention options")]
    pub dropout_seed: Option<u64>,
    #[command(flatten)]
    pub backend: BackendFlags,
    #[command(flatten)]
    gpu: GpuFlags,
    /// Timed runs after the first [default: about a second's worth]; with sim, runs under a hostile schedule [default: 1]
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(1..), help_heading = "How to run")]
    pub iters: Option<u32>,
}

/// What is computed instead of attention.
#[derive(Subcommand, Clone, Debug)]
pub enum Other {
    Moe(Box<moe::Flags>),
}

impl Flags {
    /// The GPU whose kernel is to run in the simulator, if that is what computes.
    pub fn simulated(&self) -> Result<Option<Gpu>, CliError> {
        match (self.backend.simulated()?, self.gpu.is_named()) {
            (true, _) => Ok(Some(self.gpu.choose().gpu)),
            (false, true) => Err(CliError::Gpu),
            (false, false) => Ok(None),
        }
    }
}

/// Keys and values as a cache holds them.
#[derive(Args, Clone, Debug)]
#[command(next_help_heading = "Random tensors")]
pub struct CacheFlags {
    /// Put keys and values in pages of N rows, in random order
    #[arg(long, value_name = "N")]
    pub page_size: Option<usize>,
    /// Number of keys that each batch entry uses [default: all]
    #[arg(long, value_name = "N,N,...", value_delimiter = ',')]
    pub lengths: Vec<u32>,
}

/// Tensors from files; `--q`, `--k`, `--v` and `--out` go together, or with `--backward` all of the gradients.
#[derive(Args, Clone, Debug)]
#[command(next_help_heading = "Tensors from files")]
#[group(multiple = true, conflicts_with_all = TensorFlags::NAMES, conflicts_with_all = ["seed", "kind", "page_size", "lengths"])]
pub struct FileFlags {
    /// Queries: FILE.npy, FILE.safetensors or FILE.safetensors#TENSOR
    #[arg(long, value_name = "FILE", requires_all = ["k", "v", "results"])]
    pub q: Option<TensorPath>,
    /// Keys
    #[arg(long, value_name = "FILE", requires = "q")]
    pub k: Option<TensorPath>,
    /// Values
    #[arg(long, value_name = "FILE", requires = "q")]
    pub v: Option<TensorPath>,
    /// Output file
    #[arg(long, value_name = "FILE", requires = "q", group = "results")]
    pub out: Option<TensorPath>,
    /// With --backward: gradient of the output
    #[arg(long, value_name = "FILE", requires = "dq")]
    pub d_out: Option<TensorPath>,
    /// With --backward: output file for the gradient of the queries
    #[arg(long, value_name = "FILE", requires_all = ["q", "d_out", "dk", "dv", "backward"], group = "results")]
    pub dq: Option<TensorPath>,
    /// With --backward: output file for the gradient of the keys
    #[arg(long, value_name = "FILE", requires = "dq")]
    pub dk: Option<TensorPath>,
    /// With --backward: output file for the gradient of the values
    #[arg(long, value_name = "FILE", requires = "dq")]
    pub dv: Option<TensorPath>,
    /// Output file for the log-sum-exp of each row
    #[arg(long, value_name = "FILE", requires = "q")]
    pub lse: Option<TensorPath>,
    /// Overwrite existing output files
    #[arg(long, requires = "q")]
    pub force: bool,
}
