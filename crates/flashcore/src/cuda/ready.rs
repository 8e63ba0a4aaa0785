//! What is ready to launch: a problem with its plan and laid-out launches. What changes from call to call is an address.
//!
//! Every operation has a file beside this one. It names the addresses that a launch binds and the slots that they go to
//! ([`Operation`]), and offers `prepare_…`, which ends in [`Cuda::find_or_prepare`].

use std::{ffi::c_void, sync::Arc};

use flashcore_core::{Operand, Ran};
use flashcore_cuda::{Kernel, Prepared, Route, Stream, launch_all, launch_all_with};
use flashcore_kernels::{Plan, PlanError, slots::Slot};

use super::{Cuda, Error, kernels::Loaded, recent::Recent};

/// No kernel makes use of more than this.
const MOST_ASKED: u64 = 16;

/// What addresses of f32 numbers are multiples of.
pub(super) const FLOAT: u64 = size_of::<f32>() as u64;

/// What the address of a seed is a multiple of.
pub(super) const SEED: u64 = size_of::<u64>() as u64;

/// A problem that a GPU can be made ready for.
pub trait Operation: Clone + PartialEq {
    /// Addresses in device memory that a launch binds.
    type Tensors<'a>;
    /// An array with an address for each slot of the launches.
    type Slots: AsRef<[u64]>;

    /// The address of every slot, or what is wrong with the first that cannot be bound.
    fn slots(ready: &ReadyOf<Self>, tensors: &Self::Tensors<'_>) -> Result<Self::Slots, Error>;
}

/// A problem ready to launch on one GPU, from any thread, on any of its streams, several at a time.
#[derive(Debug)]
pub struct ReadyOf<P> {
    problem: P,
    alignment: u64,
    plan: Plan,
    main: Arc<Loaded>,
    /// Empty where there is nothing to compute.
    launches: Vec<Prepared>,
}

impl<P> ReadyOf<P> {
    /// The problem it computes.
    pub const fn problem(&self) -> &P {
        &self.problem
    }

    /// Which kernels, and why.
    pub const fn plan(&self) -> &Plan {
        &self.plan
    }

    /// The loaded kernel that does most of the work: registers, spills, occupancy.
    pub fn kernel(&self) -> &Kernel {
        &self.main.kernel
    }

    /// How its machine code was obtained.
    pub fn route(&self) -> Route {
        self.main.route
    }

    pub(super) fn ran(&self) -> Ran {
        Ran { kernel: self.plan.kernel().name() }
    }

    /// The alignment that addresses of tensors must have, in bytes.
    pub(super) fn tensor_alignment(&self) -> u64 {
        self.alignment.min(MOST_ASKED)
    }

    /// The addresses in their slots. Where nothing is launched, each may be 0.
    pub(super) fn bind<const SLOTS: usize>(
        &self,
        all: impl IntoIterator<Item = Asked>,
    ) -> Result<[u64; SLOTS], Error> {
        bound(all, !self.launches.is_empty())
    }
}

impl<P: Operation> ReadyOf<P> {
    /// Launches on `stream`; returns as soon as the launches are queued. Nothing is read back or waited for, and nothing
    /// allocated but, at a stream's first call, the plan's workspace, if it has one.
    ///
    /// # Safety
    /// The addresses must be those of live device memory of this GPU with the problem's layouts, until the launches are
    /// done (or, where the stream is being captured, until the last replay is done). Nothing else may write the inputs or
    /// access the outputs meanwhile.
    pub unsafe fn launch(&self, tensors: &P::Tensors<'_>, stream: &Stream) -> Result<(), Error> {
        for launch in &self.launches {
            launch.check_stream(stream)?;
        }
        // SAFETY: the caller's promise; the stream is alive and of this GPU.
        unsafe { self.launch_raw(tensors, stream.raw()) }
    }

    /// As [`launch`](Self::launch) on another program's stream (`CUstream`, `cudaStream_t`; null is the legacy one).
    ///
    /// # Safety
    /// As [`launch`](Self::launch); `stream` must be alive and of this GPU's primary context.
    pub unsafe fn launch_raw(&self, tensors: &P::Tensors<'_>, stream: *mut c_void) -> Result<(), Error> {
        let slots = P::slots(self, tensors)?;
        // SAFETY: the caller's promise.
        unsafe { launch_all(&self.launches, stream, slots.as_ref())? };
        Ok(())
    }

    /// As [`launch_raw`](Self::launch_raw) with a workspace of the caller's: `allocate` is asked for so many bytes, and
    /// returns an address that is a multiple of 256, or none.
    ///
    /// # Safety
    /// As [`launch_raw`](Self::launch_raw); the workspace must stay allocated until the launches are done.
    pub unsafe fn launch_with(
        &self,
        tensors: &P::Tensors<'_>,
        stream: *mut c_void,
        allocate: &dyn Fn(u64) -> Option<u64>,
    ) -> Result<(), Error> {
        let slots = P::slots(self, tensors)?;
        // SAFETY: the caller's promise.
        unsafe { launch_all_with(&self.launches, stream, slots.as_ref(), allocate)? };
        Ok(())
    }
}

/// An address that a launch binds, and what it has to be.
pub(super) struct Asked {
    slot: Slot,
    operand: Operand,
    address: u64,
    /// What it must be a multiple of; `None` where the problem reads nothing there, so that any address will do.
    alignment: Option<u64>,
    nullable: bool,
}

impl Asked {
    pub(super) fn new(slot: Slot, operand: Operand, address: u64, alignment: impl Into<Option<u64>>) -> Self {
        Self { slot, operand, address, alignment: alignment.into(), nullable: false }
    }

    /// Says whether the address may be 0: nobody wants what lies there, or nothing does.
    pub(super) fn nullable(self, nullable: bool) -> Self {
        Self { nullable, ..self }
    }
}

fn bound<const SLOTS: usize>(
    all: impl IntoIterator<Item = Asked>,
    launched: bool,
) -> Result<[u64; SLOTS], Error> {
    let mut addresses = [0; SLOTS];
    for Asked { slot, operand, address, alignment, nullable } in all {
        let Some(alignment) = alignment else { continue };
        if address == 0 && launched && !nullable {
            return Err(Error::Missing { operand });
        }
        if !address.is_multiple_of(alignment) {
            return Err(Error::Alignment { operand, address, alignment });
        }
        addresses[slot.0 as usize] = address;
    }
    Ok(addresses)
}

impl Cuda {
    /// The one that was made ready for an equal problem, or else one with this plan, which is kept.
    pub(super) fn find_or_prepare<P: Operation>(
        &self,
        kept: &Recent<ReadyOf<P>>,
        problem: &P,
        alignment: u64,
        plan: impl FnOnce() -> Result<Plan, PlanError>,
    ) -> Result<Arc<ReadyOf<P>>, Error> {
        kept.find_or(
            |ready| ready.alignment == alignment && ready.problem == *problem,
            || self.prepare_plan(plan()?, problem, alignment),
        )
    }

    /// Makes exactly this plan ready; nothing is remembered but the built kernels.
    pub(super) fn prepare_plan<P: Operation>(
        &self,
        plan: Plan,
        problem: &P,
        alignment: u64,
    ) -> Result<ReadyOf<P>, Error> {
        let (main, launches) = self.kernels.prepare(&plan)?;
        Ok(ReadyOf { problem: problem.clone(), alignment, plan, main, launches })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn addresses_are_checked_and_put_into_slots() {
        let asked = |address, alignment: Option<u64>| Asked::new(Slot(1), Operand::K, address, alignment);
        let missing = "the problem reads k but its address is 0; bind it";
        let odd = "the address 0x18 of k must be a multiple of 16; use `prepare_aligned` for it";
        let table = [
            (asked(32, Some(16)), true, Ok(32)),
            (asked(24, Some(16)), true, Err(odd)),
            (asked(24, Some(16)), false, Err(odd)),
            (asked(0, Some(16)), true, Err(missing)),
            (asked(0, Some(16)), false, Ok(0)),
            (asked(0, Some(16)).nullable(true), true, Ok(0)),
            (asked(24, Some(16)).nullable(true), true, Err(odd)),
            (asked(24, None), true, Ok(0)),
        ];
        for (n, (asked, launched, expected)) in table.into_iter().enumerate() {
            let first = Asked::new(Slot(0), Operand::Q, 256, 256);
            let got = bound::<2>([first, asked], launched).map_err(|error| error.to_string());
            assert_eq!(got, expected.map(|address| [256, address]).map_err(str::to_owned), "row {n}");
        }
    }
}
