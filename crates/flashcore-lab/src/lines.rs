//! A child process whose lines are read in a separate thread, so that waiting can time out; it does not outlive us.
//! `nvidia-smi`, PyTorch and the checks of `verify` are such children.

use std::{
    io::{self, BufRead, BufReader, Read},
    process::{Child, ChildStdin, Command, Stdio},
    sync::mpsc::{Receiver, channel},
    thread,
};

/// Longest line that is read: a thousand samples have about 25 KiB.
const LONGEST: u64 = 16 << 20;

/// A running child.
pub(crate) struct Lines<T> {
    pub(crate) child: Child,
    /// Where it reads from, if it was given something to read.
    pub(crate) stdin: Option<ChildStdin>,
    /// What became of its lines.
    pub(crate) lines: Receiver<T>,
}

impl<T: Send + 'static> Lines<T> {
    /// Starts `command` and passes on what `read` makes of each line; other lines are passed over.
    pub(crate) fn start(
        command: &mut Command,
        stdin: Stdio,
        read: impl Fn(&str) -> Option<T> + Send + 'static,
    ) -> io::Result<Self> {
        let mut child = command.stdin(stdin).stdout(Stdio::piped()).stderr(Stdio::null()).spawn()?;
        let (sender, lines) = channel();
        let stdin = child.stdin.take();
        let mut reader = BufReader::new(child.stdout.take().ok_or(io::ErrorKind::BrokenPipe)?);
        thread::spawn(move || {
            let mut line = String::new();
            while reader.by_ref().take(LONGEST).read_line(&mut line).is_ok_and(|n| n > 0) {
                let sent = read(&line).map_or(Ok(()), |value| sender.send(value));
                if sent.is_err() {
                    return;
                }
                line.clear();
            }
        });
        Ok(Self { child, stdin, lines })
    }
}

impl<T> Lines<T> {
    /// Ends it.
    pub(crate) fn end(&mut self) {
        self.stdin = None;
        // Already gone is as good as ended.
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

impl<T> Drop for Lines<T> {
    fn drop(&mut self) {
        self.end();
    }
}
