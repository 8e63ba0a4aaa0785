//! What a launch may request from a device: exceeding a limit is a typed error before the driver is called.

use crate::{module::KernelAttributes, props::DeviceProps};
use flashcore_ptx::launch::LaunchSpec;

/// The widest grid along x, y, z.
const MAX_GRID: [u32; 3] = [i32::MAX as u32, 65_535, 65_535];
/// The most threads of a CTA along z; x and y are limited by the product.
const MAX_BLOCK_Z: u32 = 64;
/// The largest cluster of any device.
const MAX_CLUSTER: u32 = 16;

/// A launch that the device cannot do or that does not fit its kernel.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum LaunchError {
    /// The module has no such kernel.
    #[error("the module has no kernel `{name}`")]
    NoSuchKernel {
        /// The name asked for.
        name: String,
    },
    /// A grid that is empty or too large.
    #[error("a grid of {grid:?} CTAs; each must be at least 1 and at most {MAX_GRID:?}")]
    Grid {
        /// CTAs along x, y, z.
        grid: [u32; 3],
    },
    /// A CTA that is empty or too large.
    #[error(
        "a CTA of {block:?} threads; the kernel takes 1 to {limit} in all (at most 64 along z) with {registers} registers each"
    )]
    Block {
        /// Threads along x, y, z.
        block: [u32; 3],
        /// The most threads the kernel takes.
        limit: u32,
        /// Its registers per thread.
        registers: u32,
    },
    /// A cluster that is empty, too large, or does not divide the grid.
    #[error(
        "a cluster of {cluster:?} CTAs in a grid of {grid:?}: it must divide the grid and have 1 to {MAX_CLUSTER} CTAs"
    )]
    Cluster {
        /// CTAs of a cluster along x, y, z.
        cluster: [u32; 3],
        /// CTAs of the grid along x, y, z.
        grid: [u32; 3],
    },
    /// A device without clusters.
    #[error("clusters need compute capability 9.0; the GPU has {}.{}", capability.0, capability.1)]
    NoClusters {
        /// The GPU's compute capability.
        capability: (u32, u32),
    },
    /// More shared memory than the device gives a CTA.
    #[error("{dynamic} bytes of dynamic and {fixed} of static shared memory; the GPU gives a CTA {limit}")]
    SharedMemory {
        /// Dynamic bytes asked for.
        dynamic: u32,
        /// Static bytes of the kernel.
        fixed: u32,
        /// The device's limit.
        limit: u32,
    },
    /// More arguments than a launch can carry.
    #[error("{params} kernel parameters; the limit is {limit}")]
    TooManyParams {
        /// Requested parameters.
        params: usize,
        /// The limit.
        limit: usize,
    },
    /// More bytes of arguments than a launch can carry.
    #[error("{bytes} bytes of kernel parameters; the limit is {limit}")]
    ParamsTooLarge {
        /// Bytes needed.
        bytes: usize,
        /// The limit.
        limit: usize,
    },
    /// More workspaces than a launch can carry.
    #[error("{workspaces} workspaces; the limit is {limit}")]
    TooManyWorkspaces {
        /// Requested workspaces.
        workspaces: usize,
        /// The limit.
        limit: usize,
    },
    /// A kind of argument that this crate does not know.
    #[error("parameter {param} cannot be passed by this version of flashcore-cuda")]
    UnknownParam {
        /// The parameter.
        param: String,
    },
    /// The kernel declares other parameters than the specification fills.
    #[error("the kernel takes parameters of {kernel:?} bytes, but the launch passes {spec:?}")]
    ParamMismatch {
        /// Sizes that the kernel declares.
        kernel: Vec<usize>,
        /// Sizes that the launch fills.
        spec: Vec<usize>,
    },
    /// Fewer buffers than the kernel's parameters name.
    #[error("{given} buffers were passed, the launch needs {needed}")]
    MissingBuffers {
        /// Buffers passed.
        given: usize,
        /// Buffers needed.
        needed: usize,
    },
}

/// Checks a launch against its device and kernel.
pub(crate) fn check(
    spec: &LaunchSpec,
    device: &DeviceProps,
    kernel: KernelAttributes,
) -> Result<(), LaunchError> {
    let &LaunchSpec { grid, block, .. } = spec;
    if grid.iter().zip(MAX_GRID).any(|(&n, limit)| n == 0 || n > limit) {
        return Err(LaunchError::Grid { grid });
    }
    let limit = kernel.max_threads.min(device.threads_per_block);
    let threads: u128 = block.iter().map(|&n| u128::from(n)).product();
    if threads == 0 || threads > u128::from(limit) || block[2] > MAX_BLOCK_Z {
        return Err(LaunchError::Block { block, limit, registers: kernel.registers });
    }
    let shared = spec.shared_bytes.checked_add(kernel.static_shared);
    if shared.is_none_or(|bytes| bytes > device.shared_optin) {
        let (dynamic, fixed, limit) = (spec.shared_bytes, kernel.static_shared, device.shared_optin);
        return Err(LaunchError::SharedMemory { dynamic, fixed, limit });
    }
    check_cluster(spec, device)
}

fn check_cluster(spec: &LaunchSpec, device: &DeviceProps) -> Result<(), LaunchError> {
    let &LaunchSpec { grid, cluster, .. } = spec;
    if cluster == [1, 1, 1] {
        return Ok(());
    }
    if !device.clusters {
        return Err(LaunchError::NoClusters { capability: device.capability });
    }
    let divides = grid.iter().zip(cluster).all(|(&n, c)| c != 0 && n % c == 0);
    let size: u128 = cluster.iter().map(|&n| u128::from(n)).product();
    if divides && size <= u128::from(MAX_CLUSTER) {
        Ok(())
    } else {
        Err(LaunchError::Cluster { cluster, grid })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use flashcore_ptx::ident::Ident;

    const KERNEL: KernelAttributes =
        KernelAttributes { registers: 168, static_shared: 1024, local: 0, max_threads: 384 };

    fn hopper() -> DeviceProps {
        DeviceProps {
            index: 0,
            name: "H200".into(),
            pci_bus_id: "0000:18:00.0".into(),
            capability: (9, 0),
            sms: 132,
            warp_size: 32,
            threads_per_block: 1024,
            threads_per_sm: 2048,
            registers_per_sm: 65_536,
            shared_optin: 232_448,
            shared_per_sm: 233_472,
            shared_reserved: 1024,
            l2_bytes: 60 << 20,
            memory_bytes: 141 << 30,
            clusters: true,
        }
    }

    #[track_caller]
    fn expect(good: bool, change: impl FnOnce(&mut LaunchSpec, &mut DeviceProps)) {
        let mut device = hopper();
        let mut spec = LaunchSpec {
            entry: Ident::new("k").unwrap(),
            grid: [132, 1, 1],
            block: [384, 1, 1],
            cluster: [1, 1, 1],
            shared_bytes: 200_000,
            dependent: false,
            params: vec![],
            workspace: vec![],
        };
        change(&mut spec, &mut device);
        let answer = check(&spec, &device, KERNEL);
        assert_eq!(answer.is_ok(), good, "{answer:?} for {spec:?}");
    }

    #[test]
    fn every_limit_is_checked_before_the_driver_is_asked() {
        expect(true, |_, _| {});
        expect(false, |s, _| s.grid[2] = 0);
        expect(true, |s, _| s.grid = [i32::MAX as u32, 65_535, 65_535]);
        expect(false, |s, _| s.grid[0] = 1 << 31);
        expect(false, |s, _| s.grid[1] = 65_536);
        expect(false, |s, _| s.block[1] = 0);
        expect(false, |s, _| s.block[0] = 385);
        expect(false, |s, _| s.block = [u32::MAX, u32::MAX, u32::MAX]);
        expect(false, |s, _| s.block = [1, 1, 65]);
        expect(true, |s, _| s.shared_bytes = 232_448 - 1024);
        expect(false, |s, _| s.shared_bytes = 232_448 - 1023);
        expect(false, |s, _| s.shared_bytes = u32::MAX);
        expect(true, |s, _| s.cluster = [2, 1, 1]);
        expect(false, |s, _| s.cluster = [5, 1, 1]);
        expect(false, |s, _| s.cluster = [0, 1, 1]);
        expect(true, |s, _| (s.cluster, s.grid) = ([16, 1, 1], [32, 1, 1]));
        expect(false, |s, _| (s.cluster, s.grid) = ([32, 1, 1], [32, 1, 1]));
        expect(false, |s, d| (s.cluster, d.clusters) = ([2, 1, 1], false));
    }
}
