//! A problem that is ready to launch: plan, kernels, laid-out arguments. What changes from call to call is an address.

use std::{ffi::c_void, sync::Arc};

use flashcore_core::{Operand, Problem};
use flashcore_cuda::{Kernel, Prepared, Route, Stream, launch_all};
use flashcore_kernels::{ALLOCATED_ALIGNMENT, Plan, Tile, plan_tile, slots};

use super::{Cuda, Error, kernels::Loaded};

/// Addresses in device memory that a launch binds. The kernels read what lies there when they run, so that a captured
/// graph is right for whatever it finds when it is replayed.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct DeviceTensors {
    /// Queries, in the problem's layout, like the other tensors.
    pub q: u64,
    /// Keys.
    pub k: u64,
    /// Values.
    pub v: u64,
    /// The result.
    pub out: u64,
    /// f32 log-sum-exp, dense batch × heads × sequence; 0 where nobody wants it.
    pub lse: u64,
    /// Used queries of each batch entry, or offsets of packed sequences, one after another in the problem's index type;
    /// 0 where the problem has none.
    ///
    /// A number below 0 counts as 0, one beyond the tensor as all of it. Rows of packed tensors that belong to no
    /// sequence are left alone.
    pub lengths_q: u64,
    /// The same of keys and values.
    pub lengths_kv: u64,
    /// i32 page numbers, a row for each sequence; 0 where keys do not lie in pages.
    ///
    /// Numbers beyond a sequence's keys are not looked at; others are brought into the range of the pages.
    pub table: u64,
    /// One sink per query head in the problem's type for them; 0 where it has none.
    pub sinks: u64,
    /// f32 factors of Q, K and V, as many as the problem's scales say; 0 where it has none, as queries over a cache of fewer
    /// bits.
    pub factors: [u64; 3],
    /// What is added to scores, as the problem's bias says; 0 where it has none.
    pub bias: u64,
}

/// A problem ready to launch on one GPU, from any thread, on any of its streams, several at a time.
#[derive(Debug)]
pub struct Ready {
    problem: Problem,
    alignment: u64,
    plan: Plan,
    main: Arc<Loaded>,
    /// Empty where there is nothing to compute.
    launches: Vec<Prepared>,
}

impl Ready {
    pub(super) fn new(
        (main, launches): (Arc<Loaded>, Vec<Prepared>),
        plan: Plan,
        problem: &Problem,
        alignment: u64,
    ) -> Self {
        Self { problem: problem.clone(), alignment, plan, main, launches }
    }

    pub(super) fn serves(&self, problem: &Problem, alignment: u64) -> bool {
        self.alignment == alignment && self.problem == *problem
    }

    /// The problem it computes.
    pub fn problem(&self) -> &Problem {
        &self.problem
    }

    /// Which kernels, and why.
    pub fn plan(&self) -> &Plan {
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

    /// Launches on `stream`; returns as soon as the launches are queued. Nothing is allocated, read back or waited for.
    ///
    /// # Safety
    /// The addresses must be those of live device memory of this GPU with the problem's layouts, until the launch is
    /// done (or, where the stream is being captured, until the last replay is done). Nobody else may write the inputs or
    /// touch the outputs meanwhile.
    pub unsafe fn launch(&self, tensors: &DeviceTensors, stream: &Stream) -> Result<(), Error> {
        let slots = self.slots(tensors)?;
        for launch in &self.launches {
            launch.check_stream(stream)?;
        }
        // SAFETY: the caller's promise.
        unsafe { launch_all(&self.launches, stream.raw(), &slots)? };
        Ok(())
    }

    /// As [`launch`](Self::launch) on another program's stream (`CUstream`, `cudaStream_t`; null is the legacy one).
    ///
    /// # Safety
    /// As [`launch`](Self::launch); `stream` must be alive and of this GPU's primary context.
    pub unsafe fn launch_raw(&self, tensors: &DeviceTensors, stream: *mut c_void) -> Result<(), Error> {
        let slots = self.slots(tensors)?;
        // SAFETY: the caller's promise.
        unsafe { launch_all(&self.launches, stream, &slots)? };
        Ok(())
    }

    /// The address of every slot.
    fn slots(&self, tensors: &DeviceTensors) -> Result<[u64; slots::COUNT], Error> {
        let mut addresses = [0; slots::COUNT];
        let operands = [
            (slots::Q, Operand::Q, tensors.q),
            (slots::K, Operand::K, tensors.k),
            (slots::V, Operand::V, tensors.v),
            (slots::OUT, Operand::Out, tensors.out),
        ];
        let alignment = self.alignment.min(MOST_ASKED);
        for (slot, operand, address) in operands {
            if !address.is_multiple_of(alignment) {
                return Err(Error::Alignment { operand, address, alignment });
            }
            addresses[slot.0 as usize] = address;
        }
        addresses[slots::LSE.0 as usize] = tensors.lse;
        let index = u64::from(self.problem.index().bytes());
        let [of_q, of_kv] = self.problem.sequences_kind().numbers();
        let table = self.problem.pages().map(|_| size_of::<i32>() as u64);
        let values = [
            (slots::LENGTHS_Q, Operand::LengthsQ, tensors.lengths_q, of_q.then_some(index)),
            (slots::LENGTHS_KV, Operand::LengthsKv, tensors.lengths_kv, of_kv.then_some(index)),
            (slots::TABLE, Operand::Table, tensors.table, table),
            (slots::SINKS, Operand::Sinks, tensors.sinks, self.problem.sinks().map(|s| s.bytes() as u64)),
            (slots::BIAS, Operand::Bias, tensors.bias, self.problem.bias().map(|b| b.bytes() as u64)),
        ];
        let scaled = self.problem.scales().map(|_| size_of::<f32>() as u64);
        let slots = [slots::FACTORS_Q, slots::FACTORS_K, slots::FACTORS_V].into_iter().zip(tensors.factors);
        // Queries over a cache of fewer bits have no factors.
        let cached = self.problem.kv_dtype() != self.problem.dtype();
        let slots = slots.skip(usize::from(cached));
        let factors = slots.map(|(slot, address)| (slot, Operand::Factors, address, scaled));
        for (slot, operand, address, wanted) in values.into_iter().chain(factors) {
            let Some(alignment) = wanted else { continue };
            if address == 0 && !self.launches.is_empty() {
                return Err(Error::Missing { operand });
            }
            if !address.is_multiple_of(alignment) {
                return Err(Error::Alignment { operand, address, alignment });
            }
            addresses[slot.0 as usize] = address;
        }
        if self.problem.accumulate() && tensors.lse == 0 && !self.launches.is_empty() {
            return Err(Error::Missing { operand: Operand::Lse });
        }
        Ok(addresses)
    }
}

/// No kernel makes use of more than this.
pub(super) const MOST_ASKED: u64 = 16;

impl Cuda {
    /// Makes a problem ready to launch: plans, builds or finds its kernel, lays out the arguments. Later calls with an
    /// equal problem return the same.
    pub fn prepare(&self, problem: &Problem) -> Result<Arc<Ready>, Error> {
        self.prepare_aligned(problem, ALLOCATED_ALIGNMENT)
    }

    /// As [`prepare`](Self::prepare), for tensors whose addresses are multiples of `alignment` bytes only.
    pub fn prepare_aligned(&self, problem: &Problem, alignment: u64) -> Result<Arc<Ready>, Error> {
        self.ready.find_or(
            |ready| ready.serves(problem, alignment),
            || self.make(self.choice.plan(problem, &self.gpu, alignment)?, problem, alignment),
        )
    }

    /// As [`prepare`](Self::prepare) with exactly this tile, or an error that says why it cannot serve: for tuning.
    /// Nothing is remembered but the built kernel.
    pub fn prepare_tile(&self, problem: &Problem, tile: Tile) -> Result<Arc<Ready>, Error> {
        let plan = plan_tile(problem, &self.gpu, ALLOCATED_ALIGNMENT, tile)?;
        plan.check_build(problem)?;
        Ok(Arc::new(self.make(plan, problem, ALLOCATED_ALIGNMENT)?))
    }

    fn make(&self, plan: Plan, problem: &Problem, alignment: u64) -> Result<Ready, Error> {
        let prepared = self.kernels.prepare(&plan)?;
        Ok(Ready::new(prepared, plan, problem, alignment))
    }
}
