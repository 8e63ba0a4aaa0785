//! `flashcore completions SHELL`: a completion script on standard output.

use clap::{Args, CommandFactory};
use clap_complete::Shell;

use crate::{
    cli::Cli,
    error::{CliError, Verdict},
    output::Output,
};

const EXAMPLES: &str = "\
Examples:
  flashcore completions bash > ~/.local/share/bash-completion/completions/flashcore
  flashcore completions zsh > ~/.zfunc/_flashcore
  flashcore completions fish > ~/.config/fish/completions/flashcore.fish";

/// Print a completion script for a shell
#[derive(Args, Debug)]
#[command(after_help = EXAMPLES)]
pub struct Flags {
    /// The shell that will read it
    shell: Shell,
}

/// Prints the script as it is, whatever the output style.
pub fn execute(flags: Flags, output: &Output) -> Result<Verdict, CliError> {
    let mut script = Vec::new();
    clap_complete::generate(flags.shell, &mut Cli::command(), "flashcore", &mut script);
    output.raw(&String::from_utf8_lossy(&script))?;
    Ok(Verdict::Pass)
}
