//! Grid, clusters, CTAs and warps of a launch as numbers, checked once.

use crate::{error::SimError, program::Program};
use flashcore_ptx::{
    launch::LaunchSpec,
    module::Directives,
    sm::{REGISTERS, Sm, THREAD_REGISTERS},
};

/// Most threads of a CTA.
const MAX_THREADS: u32 = 1024;
/// Most CTAs of a cluster, with the non-portable size.
const MAX_CLUSTER: u32 = 16;

/// The largest multiprocessor that is simulated.
const SM: Sm = Sm::of((9, 0));

/// The shape of a launch.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Geometry {
    pub(crate) grid: [u32; 3],
    pub(crate) block: [u32; 3],
    pub(crate) cluster: [u32; 3],
    /// Threads of a CTA.
    pub(crate) threads: u32,
    /// Warps of a CTA.
    pub(crate) warps: u32,
    /// CTAs of a cluster.
    pub(crate) cluster_ctas: u32,
    /// Clusters of the grid.
    pub(crate) clusters: u32,
    /// Bytes of shared memory of a CTA: static, padding, dynamic.
    pub(crate) shared_bytes: u32,
    pub(crate) dynamic_shared: u32,
    /// Registers of a thread at launch, which `setmaxnreg` moves between warpgroups.
    pub(crate) registers: u32,
}

impl Geometry {
    /// Checks the launch against the hardware's limits and the kernel's directives.
    pub(crate) fn new(
        program: &Program,
        spec: &LaunchSpec,
        directives: &Directives,
    ) -> Result<Self, SimError> {
        let fail = |reason: String| SimError::Geometry { kernel: program.kernel.clone(), reason };
        let volume = |dims: [u32; 3]| dims.iter().try_fold(1u32, |v, &d| v.checked_mul(d));
        let (grid, block, cluster) = (spec.grid, spec.block, spec.cluster);
        let threads = volume(block).filter(|t| (1..=MAX_THREADS).contains(t));
        let threads = threads.ok_or_else(|| fail(format!("a block of {block:?} threads; 1 to 1024 fit")))?;
        let ctas = volume(grid).filter(|&n| n > 0);
        let ctas = ctas.ok_or_else(|| fail(format!("a grid of {grid:?} CTAs")))?;
        let cluster_ctas = volume(cluster).filter(|n| (1..=MAX_CLUSTER).contains(n));
        let cluster_ctas = cluster_ctas.ok_or_else(|| fail(format!("a cluster of {cluster:?} CTAs")))?;
        if (0..3).any(|d| !grid[d].is_multiple_of(cluster[d])) {
            return Err(fail(format!("a grid of {grid:?} is no multiple of the cluster {cluster:?}")));
        }
        let shared_bytes = program.layout.static_shared.saturating_add(spec.shared_bytes);
        let most = SM.most_shared();
        if shared_bytes > most {
            return Err(fail(format!("{shared_bytes} bytes of shared memory; a CTA has {most}")));
        }
        agrees(directives, block, cluster).map_err(fail)?;
        Ok(Self {
            grid,
            block,
            cluster,
            threads,
            warps: threads.div_ceil(32),
            cluster_ctas,
            clusters: ctas / cluster_ctas,
            shared_bytes,
            dynamic_shared: spec.shared_bytes,
            registers: launch_registers(directives, threads),
        })
    }

    /// The grid index of the CTA with that rank in cluster `number`.
    pub(crate) fn cta_id(&self, number: u32, rank: u32) -> [u32; 3] {
        let per: [u32; 3] = std::array::from_fn(|d| self.grid[d] / self.cluster[d]);
        let outer = unflatten(number, per);
        let inner = unflatten(rank, self.cluster);
        std::array::from_fn(|d| outer[d] * self.cluster[d] + inner[d])
    }
}

/// Index from a linear number, x fastest.
pub(crate) fn unflatten(number: u32, dims: [u32; 3]) -> [u32; 3] {
    [number % dims[0], number / dims[0] % dims[1], number / dims[0] / dims[1]]
}

fn agrees(directives: &Directives, block: [u32; 3], cluster: [u32; 3]) -> Result<(), String> {
    if let Some(required) = directives.required_threads.filter(|&r| r != block) {
        return Err(format!("the kernel wants blocks of {required:?} threads, not {block:?}"));
    }
    let volume = |dims: [u32; 3]| dims.into_iter().map(u64::from).fold(1, u64::saturating_mul);
    if let Some(most) = directives.max_threads.filter(|&m| volume(block) > volume(m)) {
        return Err(format!("the kernel allows at most {most:?} threads, not {block:?}"));
    }
    if let Some(required) = directives.required_cluster.filter(|&r| r != cluster) {
        return Err(format!("the kernel wants clusters of {required:?} CTAs, not {cluster:?}"));
    }
    Ok(())
}

/// Registers a thread was compiled for: `.maxnreg`, or what lets the CTAs asked for fit on an SM.
fn launch_registers(directives: &Directives, threads: u32) -> u32 {
    // As ptxas does, numbers that no SM reaches are passed over.
    let ctas = directives.min_ctas_per_sm.filter(|ctas| (1..=SM.ctas).contains(ctas)).unwrap_or(1);
    let fit = REGISTERS / (threads.next_multiple_of(32) * ctas) / 8 * 8;
    directives.max_registers.unwrap_or(fit).min(THREAD_REGISTERS)
}
