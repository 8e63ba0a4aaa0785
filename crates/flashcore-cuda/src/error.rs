//! What can go wrong, and whether the device survives it.
//!
//! One [`Error`] for the crate. A code from the driver is either recoverable (the call failed, the next may succeed) or
//! sticky (the context is lost until the process ends); [`severity`] is the one table that says which.

use crate::{launch::LaunchError, tensor_map::TensorMapError};
use std::{fmt, path::PathBuf};

/// Anything this crate can fail with.
#[derive(Clone, Debug, PartialEq, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// libcuda cannot be found.
    #[error(
        "no NVIDIA driver: libcuda was not found on the library path; install the driver or use the CPU backend"
    )]
    NoDriver,
    /// libcuda lacks a function that every supported driver has.
    #[error("the NVIDIA driver has no `{symbol}`: install a driver for CUDA 12.0 or newer")]
    MissingSymbol {
        /// The function's name.
        symbol: &'static str,
    },
    /// The driver supports only an older CUDA than FlashCore needs.
    #[error("the NVIDIA driver supports CUDA {}.{}; FlashCore needs 12.0 or newer", found / 1000, found % 1000 / 10)]
    DriverTooOld {
        /// `1000 * major + 10 * minor` as the driver reports it.
        found: u32,
    },
    /// There is no GPU with that number.
    #[error("GPU {index} does not exist: the driver shows {count}, numbered from 0")]
    NoSuchDevice {
        /// The number asked for.
        index: u32,
        /// How many there are.
        count: u32,
    },
    /// The driver refused a call; the device is unharmed.
    #[error(transparent)]
    Driver(#[from] DriverError),
    /// Device memory is exhausted.
    #[error("out of device memory: {requested} bytes requested, {free} of {total} free")]
    OutOfMemory {
        /// Requested bytes.
        requested: u64,
        /// Bytes free at that moment.
        free: u64,
        /// Bytes the device has.
        total: u64,
    },
    /// An earlier error destroyed the device's context: every call fails until the process is restarted.
    #[error("GPU {device} is unusable until the process restarts: {first_cause}")]
    ContextPoisoned {
        /// The GPU's number.
        device: u32,
        /// The error that did it.
        first_cause: Box<FirstCause>,
    },
    /// The kernel's target does not run on the device.
    #[error("PTX for {target} does not run on compute capability {}.{}", capability.0, capability.1)]
    WrongArchitecture {
        /// The kernel's `.target`.
        target: String,
        /// The device's compute capability.
        capability: (u32, u32),
    },
    /// No route turned the PTX into machine code.
    #[error("PTX was rejected for {arch}:\n{log}")]
    Compile {
        /// The architecture built for.
        arch: String,
        /// What ptxas and the driver's JIT said, in the order they were tried.
        log: String,
    },
    /// A tool the user named cannot be used.
    #[error("{variable} names {}, which is not an executable file: correct it, or unset it to let FlashCore search", path.display())]
    BadTool {
        /// The environment variable or option that named it.
        variable: &'static str,
        /// What it named.
        path: PathBuf,
    },
    /// Ctrl-C ended a tool, so that nothing follows from what it left undone.
    #[error("{} was interrupted", path.display())]
    Interrupted {
        /// The tool.
        path: PathBuf,
    },
    /// A tool could not be run.
    #[error("{} could not be run: {reason}", path.display())]
    ToolFailed {
        /// The tool.
        path: PathBuf,
        /// Why.
        reason: String,
    },
    /// A tensor that TMA cannot describe.
    #[error(transparent)]
    TensorMap(#[from] TensorMapError),
    /// A launch that the device cannot do or that does not fit its kernel.
    #[error(transparent)]
    Launch(#[from] LaunchError),
    /// A copy that leaves its buffer.
    #[error("{bytes} bytes at offset {offset} do not fit in a buffer of {len} bytes")]
    OutOfRange {
        /// Where the access starts.
        offset: u64,
        /// How long it is.
        bytes: u64,
        /// The buffer's size.
        len: u64,
    },
    /// A stream of another device or context was passed in.
    #[error(
        "the stream does not belong to the primary context of GPU {device}; use a stream of that context"
    )]
    ForeignStream {
        /// The GPU whose primary context was expected.
        device: u32,
    },
}

/// A call that the driver refused.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{call} failed: {name} ({text}){}", Kernel(kernel.as_deref()))]
pub struct DriverError {
    /// The driver function.
    pub call: &'static str,
    /// Its result code.
    pub code: u32,
    /// The code's name.
    pub name: String,
    /// The driver's description.
    pub text: String,
    /// The kernel that was being launched, where it is known.
    pub kernel: Option<String>,
}

/// The error that poisoned a context, as first seen.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct FirstCause {
    /// The refusal that revealed it.
    pub error: DriverError,
    /// Whether `error.kernel` is known to be the culprit (every launch was waited for: `FLASHCORE_SYNC=1`).
    pub exact: bool,
    /// Kernels launched on the device before it was seen, newest first; one of them is the likely culprit.
    pub suspects: Vec<String>,
}

impl fmt::Display for FirstCause {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}", self.error)?;
        if self.exact {
            return Ok(());
        }
        f.write_str("; the fault lies in work submitted earlier")?;
        if !self.suspects.is_empty() {
            write!(f, ", newest first: {}", self.suspects.join(", "))?;
        }
        f.write_str("; FLASHCORE_SYNC=1 names the kernel")
    }
}

struct Kernel<'a>(Option<&'a str>);

impl fmt::Display for Kernel<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.map_or(Ok(()), |name| write!(f, " in kernel `{name}`"))
    }
}

/// Whether the device can be used after an error.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Severity {
    /// The call failed; the context is as before.
    Recoverable,
    /// The context is lost; only a new process helps.
    Poisoned,
}

/// Result codes after which the driver repeats the error on every call of the context.
const STICKY: [u32; 18] = [
    4,   // deinitialized
    214, // uncorrectable ECC error
    220, // uncorrectable NVLink error
    226, // contained error
    700, // illegal address
    702, // launch timeout
    709, // context is destroyed
    710, // assert
    714, // hardware stack error
    715, // illegal instruction
    716, // misaligned address
    717, // invalid address space
    718, // invalid program counter
    719, // launch failed (a trap among others)
    721, // tensor memory leak
    806, // MPS server lost
    810, // MPS client terminated
    911, // asynchronous error of an external device
];

/// Classifies a driver result code.
pub fn severity(code: u32) -> Severity {
    if STICKY.contains(&code) { Severity::Poisoned } else { Severity::Recoverable }
}

pub(crate) const OUT_OF_MEMORY: u32 = 2;
pub(crate) const NOT_READY: u32 = 600;

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn codes_are_classified_by_what_the_driver_documents() {
        let sticky = [700, 702, 710, 714, 715, 716, 717, 718, 719, 214, 911];
        let recoverable = [0, 1, 2, 100, 209, 218, 222, 400, 500, 600, 701, 720, 900, 901, 912, 999];
        assert!(sticky.iter().all(|&code| severity(code) == Severity::Poisoned));
        assert!(recoverable.iter().all(|&code| severity(code) == Severity::Recoverable));
    }

    #[test]
    fn the_first_cause_says_where_to_look() {
        let error = DriverError {
            call: "cuStreamSynchronize",
            code: 700,
            name: "CUDA_ERROR_ILLEGAL_ADDRESS".into(),
            text: "an illegal memory access was encountered".into(),
            kernel: None,
        };
        let cause = FirstCause { error, exact: false, suspects: vec!["forward".into(), "merge".into()] };
        let text = Error::ContextPoisoned { device: 1, first_cause: Box::new(cause) }.to_string();
        for part in ["GPU 1", "cuStreamSynchronize", "ILLEGAL_ADDRESS", "forward, merge", "FLASHCORE_SYNC=1"]
        {
            assert!(text.contains(part), "{text}");
        }
    }
}
