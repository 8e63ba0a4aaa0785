//! Grid, clusters, CTAs and warps of a launch as numbers, checked once.

use crate::{error::SimError, program::Program};
use flashcore_ptx::{
    launch::LaunchSpec,
    module::Directives,
    sm::{REGISTERS, Sm, THREAD_REGISTERS},
    target::Target,
};

/// Most threads of a CTA, in all and in each direction.
const MAX_THREADS: u32 = 1024;
const MAX_BLOCK: [u32; 3] = [1024, 1024, 64];
/// Most CTAs of a grid in each direction.
const MAX_GRID: [u32; 3] = [i32::MAX as u32, 65_535, 65_535];
/// Most CTAs of a cluster, with the non-portable size.
const MAX_CLUSTER: u32 = 16;
/// Most shared memory that a kernel declares itself: more must be asked for at the launch.
const MAX_STATIC_SHARED: u32 = 48 << 10;

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
    /// Whether `.maxnreg` says how many.
    pub(crate) fixed_registers: bool,
}

impl Geometry {
    /// Checks the launch against the hardware's limits and the kernel's directives.
    pub(crate) fn new(
        program: &Program,
        spec: &LaunchSpec,
        directives: &Directives,
        target: Target,
    ) -> Result<Self, SimError> {
        let fail = |reason: String| SimError::Geometry { kernel: program.kernel.clone(), reason };
        let volume = |dims: [u32; 3]| dims.iter().try_fold(1u32, |v, &d| v.checked_mul(d));
        let (grid, block, cluster) = (spec.grid, spec.block, spec.cluster);
        let threads = volume(block).filter(|t| (1..=MAX_THREADS).contains(t) && inside(block, MAX_BLOCK));
        let threads = threads.ok_or_else(|| {
            fail(format!("a block of {block:?} threads; 1 to 1024 fit, at most {MAX_BLOCK:?} each way"))
        })?;
        let ctas = volume(grid).filter(|&n| n > 0 && inside(grid, MAX_GRID));
        let ctas = ctas.ok_or_else(|| {
            fail(format!(
                "a grid of {grid:?} CTAs; at least 1 each way, at most {MAX_GRID:?}, 2^32 - 1 in all"
            ))
        })?;
        let cluster_ctas = volume(cluster).filter(|n| (1..=MAX_CLUSTER).contains(n));
        let cluster_ctas =
            cluster_ctas.ok_or_else(|| fail(format!("a cluster of {cluster:?} CTAs; 1 to 16 fit")))?;
        if (0..3).any(|d| !grid[d].is_multiple_of(cluster[d])) {
            return Err(fail(format!("a grid of {grid:?} is not a multiple of the cluster {cluster:?}")));
        }
        let sm = Sm::of(target.capability());
        let shared_bytes =
            shared(program.layout.static_shared, spec.shared_bytes, sm, target).map_err(fail)?;
        if cluster_ctas > 1 && target.capability() < (9, 0) {
            return Err(fail(format!(
                "clusters of {cluster_ctas} CTAs; {target} has none, sm_90 and later have"
            )));
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
            registers: launch_registers(directives, threads, sm).map_err(fail)?,
            fixed_registers: directives.max_registers.is_some(),
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

/// Whether each extent is at most that of `most`.
fn inside(extents: [u32; 3], most: [u32; 3]) -> bool {
    extents.iter().zip(most).all(|(extent, most)| *extent <= most)
}

/// Shared memory of a CTA, if the target has as much.
fn shared(declared: u32, asked: u32, sm: Sm, target: Target) -> Result<u32, String> {
    if declared > MAX_STATIC_SHARED {
        return Err(format!(
            "it declares {declared} bytes of shared memory, but assemblers accept {MAX_STATIC_SHARED}: make it \
             `extern __shared__` and request the bytes at launch"
        ));
    }
    let (bytes, most) = (declared.saturating_add(asked), sm.most_shared());
    if bytes > most {
        return Err(format!(
            "{bytes} bytes of shared memory ({declared} declared, {asked} asked for); a CTA of {target} has {most}"
        ));
    }
    Ok(bytes)
}

fn agrees(directives: &Directives, block: [u32; 3], cluster: [u32; 3]) -> Result<(), String> {
    if let Some(required) = directives.required_threads.filter(|&r| r != block) {
        return Err(format!("the kernel requires blocks of {required:?} threads, not {block:?}"));
    }
    let volume = |dims: [u32; 3]| dims.into_iter().map(u64::from).fold(1, u64::saturating_mul);
    if let Some(most) = directives.max_threads.filter(|&m| volume(block) > volume(m)) {
        return Err(format!("the kernel allows at most {most:?} threads, not {block:?}"));
    }
    if let Some(required) = directives.required_cluster.filter(|&r| r != cluster) {
        return Err(format!("the kernel requires clusters of {required:?} CTAs, not {cluster:?}"));
    }
    Ok(())
}

/// Registers a thread was compiled for: `.maxnreg`, or what lets the CTAs asked for fit on an SM.
fn launch_registers(directives: &Directives, threads: u32, sm: Sm) -> Result<u32, String> {
    // As ptxas does, numbers that no SM reaches are passed over.
    let ctas = directives.min_ctas_per_sm.filter(|ctas| (1..=sm.ctas).contains(ctas)).unwrap_or(1);
    let threads = threads.next_multiple_of(32);
    let fit = REGISTERS / (threads * ctas) / 8 * 8;
    let registers = directives.max_registers.unwrap_or(fit).min(THREAD_REGISTERS);
    if registers * threads > REGISTERS {
        return Err(format!(
            "{registers} registers (.maxnreg) for each of {threads} threads; an SM has {REGISTERS}, so that {} each fit",
            REGISTERS / threads
        ));
    }
    Ok(registers)
}
