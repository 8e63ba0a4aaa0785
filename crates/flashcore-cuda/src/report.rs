//! A compiler's report: registers, spills, stack, warnings.
//!
//! `compile.rs` fills a [`BuildReport`] from the log of ptxas or of the driver's JIT (both have the same format),
//! `cache/` keeps it beside the machine code, `module.rs` makes it queryable.

use std::fmt::Write;

/// How a module was built.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct BuildReport {
    /// The compiler, such as `ptxas 13.0.88` or `driver JIT 13.0`.
    pub compiler: String,
    /// How long it took.
    pub seconds: f64,
    /// One entry per kernel, in the order of the log.
    pub kernels: Vec<KernelReport>,
    /// Warnings, and remarks on lost performance (C75xx), as the compiler wrote them.
    pub warnings: Vec<String>,
    /// Why a preferred route was not taken, and the like.
    pub notes: Vec<String>,
}

/// What a kernel uses, as its compiler reports it.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct KernelReport {
    /// The kernel's name.
    pub name: String,
    /// Registers of a thread.
    pub registers: u32,
    /// Bytes of stack frame.
    pub stack: u32,
    /// Bytes written when registers were spilled.
    pub spill_stores: u32,
    /// Bytes read back.
    pub spill_loads: u32,
    /// Static shared memory in bytes.
    pub shared: u32,
    /// Named barriers.
    pub barriers: u32,
}

impl BuildReport {
    /// The entry for `kernel`.
    pub fn kernel(&self, kernel: &str) -> Option<&KernelReport> {
        self.kernels.iter().find(|entry| entry.name == kernel)
    }

    /// Reads a log of `ptxas -v` or of the driver's JIT.
    pub(crate) fn from_log(log: &str) -> Self {
        let mut report = Self::default();
        for line in log.lines() {
            report.read_line(line);
        }
        report
    }

    fn read_line(&mut self, line: &str) {
        if let Some(name) = quoted_after(line, "Compiling entry function") {
            self.kernels.push(KernelReport { name: name.to_owned(), ..KernelReport::default() });
        }
        if is_warning(line) {
            self.warnings.push(line.trim().to_owned());
        }
        let Some(kernel) = self.kernels.last_mut() else { return };
        let number = |unit: &str| number_before(line, unit);
        if let (Some(stack), Some(stores), Some(loads)) =
            (number("bytes stack frame"), number("bytes spill stores"), number("bytes spill loads"))
        {
            (kernel.stack, kernel.spill_stores, kernel.spill_loads) = (stack, stores, loads);
        }
        if let Some(registers) = number("registers") {
            kernel.registers = registers;
            kernel.barriers = number("barriers").unwrap_or(0);
            kernel.shared = number("bytes smem").unwrap_or(0);
        }
    }

    /// One fact per line, as kept in the cache.
    pub(crate) fn to_text(&self) -> String {
        let mut out = String::new();
        // Writing to a string cannot fail.
        let _ = writeln!(out, "compiler {}", one_line(&self.compiler));
        let _ = writeln!(out, "seconds {}", self.seconds);
        for k in &self.kernels {
            let numbers = [k.registers, k.stack, k.spill_stores, k.spill_loads, k.shared, k.barriers];
            let _ =
                writeln!(out, "kernel {} {}", one_line(&k.name), numbers.map(|n| n.to_string()).join(" "));
        }
        for (kind, lines) in [("warning", &self.warnings), ("note", &self.notes)] {
            for line in lines {
                let _ = writeln!(out, "{kind} {}", one_line(line));
            }
        }
        out
    }

    /// Reads [`BuildReport::to_text`] back; `None` for anything else.
    pub(crate) fn from_text(text: &str) -> Option<Self> {
        let mut report = Self::default();
        for line in text.lines() {
            let (kind, rest) = line.split_once(' ')?;
            match kind {
                "compiler" => report.compiler = rest.to_owned(),
                "seconds" => report.seconds = rest.parse().ok()?,
                "kernel" => report.kernels.push(kernel_from_text(rest)?),
                "warning" => report.warnings.push(rest.to_owned()),
                "note" => report.notes.push(rest.to_owned()),
                _ => return None,
            }
        }
        Some(report)
    }
}

fn kernel_from_text(text: &str) -> Option<KernelReport> {
    let (name, numbers) = text.split_once(' ')?;
    let numbers: Result<Vec<u32>, _> = numbers.split(' ').map(str::parse).collect();
    let [registers, stack, spill_stores, spill_loads, shared, barriers] = numbers.ok()?.try_into().ok()?;
    Some(KernelReport {
        name: name.to_owned(),
        registers,
        stack,
        spill_stores,
        spill_loads,
        shared,
        barriers,
    })
}

fn one_line(text: &str) -> String {
    text.replace(['\n', '\r'], " ")
}

/// Warnings proper, and the remarks with a code such as `(C7510)` by which ptxas reports serialised wgmma.
fn is_warning(line: &str) -> bool {
    let coded = line.split_once("(C").is_some_and(|(_, rest)| {
        let digits = rest.bytes().take_while(u8::is_ascii_digit).count();
        digits >= 4 && rest.as_bytes().get(digits) == Some(&b')')
    });
    coded || line.contains("warning")
}

fn quoted_after<'a>(line: &'a str, words: &str) -> Option<&'a str> {
    line.split_once(words)?.1.split('\'').nth(1)
}

/// The number in front of `unit`, as in `used 3 barriers`.
fn number_before(line: &str, unit: &str) -> Option<u32> {
    let before = line.split_once(unit)?.0.trim_end();
    before.rsplit(|c: char| !c.is_ascii_digit()).next()?.parse().ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    const LOG: &str = "\
ptxas info    : 0 bytes gmem
ptxas info    : (C7510) Potential Performance Loss: wgmma.mma_async instructions are serialized due to ...
ptxas info    : Compiling entry function 'forward' for 'sm_90a'
ptxas info    : Function properties for forward
    16 bytes stack frame, 24 bytes spill stores, 32 bytes spill loads
ptxas info    : Used 168 registers, used 16 barriers, 16 bytes cumulative stack size, 1024 bytes smem, 640 bytes cmem[0]
ptxas info    : Compile time = 61.280 ms
ptxas warning : Registers are spilled to local memory in function 'forward', 24 bytes spill stores
ptxas info    : Compiling entry function 'merge' for 'sm_90a'
ptxas info    : Function properties for merge
    0 bytes stack frame, 0 bytes spill stores, 0 bytes spill loads
ptxas info    : Used 32 registers, used 0 barriers
";

    #[test]
    fn a_log_of_ptxas_is_understood() {
        let report = BuildReport::from_log(LOG);
        let forward = KernelReport {
            name: "forward".into(),
            registers: 168,
            stack: 16,
            spill_stores: 24,
            spill_loads: 32,
            shared: 1024,
            barriers: 16,
        };
        assert_eq!(report.kernel("forward"), Some(&forward));
        assert_eq!(report.kernel("merge").map(|k| (k.registers, k.stack, k.shared)), Some((32, 0, 0)));
        assert_eq!(report.kernels.len(), 2);
        assert_eq!(report.warnings.len(), 2, "{:?}", report.warnings);
        assert!(report.warnings[0].contains("C7510") && report.warnings[1].contains("spilled"));
    }

    #[test]
    fn a_report_survives_the_cache() {
        let mut report = BuildReport::from_log(LOG);
        (report.compiler, report.seconds) = ("ptxas 13.0.88".into(), 0.25);
        report.notes = vec!["two\nlines".into()];
        let back = BuildReport::from_text(&report.to_text()).unwrap();
        report.notes = vec!["two lines".into()];
        assert_eq!(back, report);
    }

    #[test]
    fn other_text_is_no_report() {
        for text in ["kernel k 1 2 3", "kernel k 1 2 3 4 5 6 7", "seconds soon", "verdict good", "x"] {
            assert_eq!(BuildReport::from_text(text), None, "{text}");
        }
    }
}
