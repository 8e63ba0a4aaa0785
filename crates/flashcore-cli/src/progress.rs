//! How far long work is: a bar on a terminal, nothing elsewhere; the lab's commands report to it.

use flashcore_lab::{contest::Observer, task::Task};
use indicatif::{ProgressBar, ProgressStyle};

use crate::{
    error::CliError,
    interrupt,
    output::{Output, Text},
};

/// A bar over a known number of steps.
pub struct Progress {
    bar: ProgressBar,
}

impl Progress {
    /// A bar for work that asks whether it is to stop: the first Ctrl-C does not end it.
    pub fn stoppable(steps: usize, output: &Output) -> Self {
        interrupt::watch();
        Self::new(steps, output)
    }

    /// A bar on standard error, if that is a terminal and the user wants to see anything.
    pub fn new(steps: usize, output: &Output) -> Self {
        let bar = if output.is_talkative() { ProgressBar::new(steps as u64) } else { ProgressBar::hidden() };
        let style = ProgressStyle::with_template("{bar:24} {pos}/{len} {elapsed} {wide_msg}");
        if let Ok(style) = style {
            bar.set_style(style);
        }
        Self { bar }
    }

    /// Says what is being done.
    pub fn say(&self, what: String) {
        self.bar.set_message(what);
        self.bar.tick();
    }

    /// Prints a line that stays, at once and wherever the output goes: on standard error where a program reads the other.
    pub fn print(&self, line: &Text, output: &Output) -> Result<(), CliError> {
        self.bar.suspend(|| output.remark(line))
    }

    /// A step is done.
    pub fn step(&self) {
        self.bar.inc(1);
    }
}

impl Drop for Progress {
    fn drop(&mut self) {
        self.bar.finish_and_clear();
    }
}

impl Observer for Progress {
    fn at(&mut self, task: &Task, what: &str) {
        self.say(format!("{task}: {what}"));
    }

    fn stopped(&self) -> bool {
        interrupt::stopped()
    }
}
