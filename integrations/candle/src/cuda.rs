//! Tensors on a GPU: their addresses and candle's stream go to FlashCore, which launches and copies nothing.

use std::ffi::c_void;

use candle_core::{
    CudaStorage, DeviceLocation, Layout, Result, Shape, Storage, StorageRef, Tensor,
    backend::{BackendDevice, BackendStorage},
    bail,
    cuda_backend::{
        CudaDType, CudaDevice,
        cudarc::driver::{
            CudaSlice, CudaStream, DevicePtr, DevicePtrMut, DeviceRepr, SyncOnDrop, ValidAsZeroBits,
        },
    },
};
use flashcore::{
    Element,
    cuda::{Cuda, DeviceTensors},
};

use crate::op::{Asked, TYPES, told};

/// Widest alignment of addresses that any kernel makes use of, in bytes.
const WIDEST: u64 = 16;

/// Attention on candle's stream.
pub(crate) fn forward(asked: &Asked, tensors: [(&CudaStorage, &Layout); 3]) -> Result<(CudaStorage, Shape)> {
    use candle_core::DType::{BF16, F16, F32};
    match tensors.map(|(storage, _)| storage.dtype()) {
        [F16, F16, F16] => launch::<flashcore::f16>(asked, tensors),
        [BF16, BF16, BF16] => launch::<flashcore::bf16>(asked, tensors),
        [F32, F32, F32] => launch::<f32>(asked, tensors),
        _ => bail!("{TYPES}"),
    }
}

fn launch<T: CudaDType + DeviceRepr + ValidAsZeroBits + Element>(
    asked: &Asked,
    tensors: [(&CudaStorage, &Layout); 3],
) -> Result<(CudaStorage, Shape)> {
    let layouts = tensors.map(|(_, layout)| layout);
    let device = tensors[0].0.device.clone();
    let problem = asked.device_spec(T::DTYPE, layouts)?.parse().map_err(told)?;
    // Rows of packed tensors that belong to no sequence are left as they are.
    let mut out = device.alloc_zeros::<T>(problem.out().span())?;
    run::<T>(asked, tensors, &device, &problem, &mut out)?;
    Ok((CudaStorage::wrap_cuda_slice(out, device), Asked::shape(layouts[0], layouts[2])))
}

/// Binds addresses and launches.
fn run<T: CudaDType + DeviceRepr + Element>(
    asked: &Asked,
    [q, k, v]: [(&CudaStorage, &Layout); 3],
    device: &CudaDevice,
    problem: &flashcore::Problem,
    out: &mut CudaSlice<T>,
) -> Result<()> {
    let stream = device.cuda_stream();
    let packed = asked.packed.as_ref();
    let numbers = [
        packed.map(|packed| &packed.queries),
        packed.map(|packed| &packed.keys),
        asked.table.as_ref(),
        asked.slopes.as_ref(),
    ];
    let stored = numbers.map(|tensor| tensor.map(Tensor::storage_and_layout));
    let [lengths_q, lengths_kv, table, slopes] = &stored;
    // candle notes a use where these are dropped, so that they stay until the launch is queued.
    let (q, k, v) = (
        address::<T>(q, device, &stream)?,
        address::<T>(k, device, &stream)?,
        address::<T>(v, device, &stream)?,
    );
    let (lengths_q, lengths_kv) =
        (optional::<u32>(lengths_q, device, &stream)?, optional::<u32>(lengths_kv, device, &stream)?);
    let (table, slopes) =
        (optional::<i32>(table, device, &stream)?, optional::<f32>(slopes, device, &stream)?);
    let out = out.device_ptr_mut(&stream);
    let tensors = DeviceTensors {
        q: q.0,
        k: k.0,
        v: v.0,
        out: out.0,
        lengths_q: lengths_q.0,
        lengths_kv: lengths_kv.0,
        table: table.0,
        bias: slopes.0,
        ..DeviceTensors::default()
    };
    // SAFETY: addresses of tensors that the caller holds, with the layouts that the problem was made of; candle frees memory
    // in the order of its stream, which is one of the GPU's primary context.
    unsafe { queue(problem, &tensors, device, stream.cu_stream().cast()) }
}

/// Launches.
///
/// # Safety
/// As [`flashcore::cuda::Ready::launch_raw`].
unsafe fn queue(
    problem: &flashcore::Problem,
    tensors: &DeviceTensors,
    device: &CudaDevice,
    stream: *mut c_void,
) -> Result<()> {
    let bits = [tensors.q, tensors.k, tensors.v, tensors.out].iter().fold(WIDEST, |bits, at| bits | at);
    let DeviceLocation::Cuda { gpu_id } = device.location() else { bail!("q is on no NVIDIA GPU") };
    let cuda = Cuda::shared(u32::try_from(gpu_id).unwrap_or(u32::MAX)).map_err(told)?;
    let ready = cuda.prepare_aligned(problem, 1 << bits.trailing_zeros()).map_err(told)?;
    // SAFETY: the caller's promise.
    unsafe { ready.launch_raw(tensors, stream).map_err(told) }
}

/// Where a tensor starts, and what notes its use.
fn address<'a, T: CudaDType + DeviceRepr + 'a>(
    (storage, layout): (&'a CudaStorage, &Layout),
    device: &CudaDevice,
    stream: &'a CudaStream,
) -> Result<(u64, SyncOnDrop<'a>)> {
    if !storage.device.same_device(device) {
        bail!("all tensors must be on q's GPU; move them there");
    }
    let (start, held) = storage.as_cuda_slice::<T>()?.device_ptr(stream);
    Ok((start + (layout.start_offset() * size_of::<T>()) as u64, held))
}

/// Where numbers lie that stay on the GPU; 0 where there are none.
fn optional<'a, T: CudaDType + DeviceRepr + 'a>(
    tensor: &'a Option<(StorageRef<'_>, &Layout)>,
    device: &CudaDevice,
    stream: &'a CudaStream,
) -> Result<(u64, Option<SyncOnDrop<'a>>)> {
    let Some((storage, layout)) = tensor else { return Ok((0, None)) };
    let Storage::Cuda(storage) = &**storage else {
        bail!("lengths, tables and slopes must be where q is; move them there")
    };
    let (start, held) = address::<T>((storage, layout), device, stream)?;
    Ok((start, Some(held)))
}
