//! What can be asked on the command line; called by `main`, calls one command.
//!
//! A new command is a file in [`crate::commands`], a variant of [`Command`] and a line in [`Command::execute`].

use clap::{Args, Parser, Subcommand};

use crate::{
    commands::{
        bench, cache, completions, doctor, gate, inspect, profile, report, repro, run, sim, tune, verify,
        warm,
    },
    error::{CliError, Verdict},
    output::Output,
};

const EXAMPLES: &str = "\
Examples:
  flashcore run                                  attention at 1x8x512x64, checked and timed
  flashcore run --shape 1x32x4096x128 --causal   another problem
  flashcore run --q q.npy --k k.npy --v v.npy --out o.npy
  flashcore verify --quick                       is every backend right?
  flashcore bench --suite cpu                    how fast, against whom
  flashcore gate --suite cpu --max-ratio 0.95    pass or fail, for CI
  flashcore tune --shape 4x16x4096x128 --causal  the fastest tile, kept in a table
  flashcore repro                                verify, measure, pack into one file
  flashcore report --out report.html             saved runs as a page with plots
  flashcore inspect --gpu sm_90                  which GPU kernel, and why
  flashcore sim k.ptx --grid 1 --block 32        a PTX kernel on the CPU, checked
  flashcore doctor                               what this machine offers

Exit codes: 0 passed, 1 ran and failed, 2 could not run.";

/// FlashAttention in Rust: run it, check it, measure it, look at the machine.
#[derive(Parser, Debug)]
#[command(name = "flashcore", version, arg_required_else_help = true, after_help = EXAMPLES)]
pub struct Cli {
    #[command(flatten)]
    pub style: Style,
    #[command(subcommand)]
    pub command: Command,
}

/// How answers are shown; every command takes these flags.
#[derive(Args, Clone, Copy, Debug, Default)]
pub struct Style {
    /// Print one JSON object instead of tables
    #[arg(long, global = true, help_heading = "Output")]
    pub json: bool,
    /// Print nothing but errors; the exit code tells the result
    #[arg(long, global = true, help_heading = "Output")]
    pub quiet: bool,
}

/// One variant per command.
#[derive(Subcommand, Debug)]
pub enum Command {
    Run(Box<run::Flags>),
    Verify(verify::Flags),
    Bench(Box<bench::Flags>),
    Gate(Box<gate::Flags>),
    Profile(Box<profile::Flags>),
    Tune(Box<tune::Flags>),
    Repro(Box<repro::Flags>),
    Report(report::Flags),
    Inspect(Box<inspect::Flags>),
    Sim(Box<sim::Flags>),
    Warm(Box<warm::Flags>),
    Doctor(doctor::Flags),
    Cache(cache::Flags),
    Completions(completions::Flags),
    #[command(hide = true)]
    VerifyGroup(verify::GroupFlags),
    #[command(hide = true)]
    ProfileTarget(profile::TargetFlags),
}

impl Command {
    /// Does what was asked.
    pub fn execute(self, output: &Output) -> Result<Verdict, CliError> {
        match self {
            Self::Run(flags) => run::execute(*flags, output),
            Self::Verify(flags) => verify::execute(flags, output),
            Self::Bench(flags) => bench::execute(*flags, output),
            Self::Gate(flags) => gate::execute(*flags, output),
            Self::Profile(flags) => profile::execute(*flags, output),
            Self::Tune(flags) => tune::execute(*flags, output),
            Self::Repro(flags) => repro::execute(*flags, output),
            Self::Report(flags) => report::execute(&flags, output),
            Self::Inspect(flags) => inspect::execute(&flags, output),
            Self::Sim(flags) => sim::execute(&flags, output),
            Self::Warm(flags) => warm::execute(&flags, output),
            Self::Doctor(flags) => doctor::execute(flags, output),
            Self::Cache(flags) => cache::execute(flags, output),
            Self::Completions(flags) => completions::execute(flags, output),
            Self::VerifyGroup(flags) => verify::execute_group(&flags),
            Self::ProfileTarget(flags) => profile::execute_target(&flags),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use clap::CommandFactory;

    #[test]
    fn flags_are_consistent() {
        Cli::command().debug_assert();
    }
}
