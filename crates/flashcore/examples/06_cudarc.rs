//! Attention on the slices and the stream of a program that uses cudarc: nothing is copied, no context is made.
//! `cargo run --release --example 06_cudarc`
#![allow(unsafe_code)] // The launch takes device addresses.

use std::error::Error;

use bytemuck::cast_slice;
use cudarc::driver::{CudaContext, DevicePtr, DevicePtrMut};
use flashcore::{
    BackendKind, DType, Dims, Layout, Mask, Spec, TensorView, attention,
    cuda::{Cuda, DeviceTensors},
    f16,
};

/// Batch, heads, sequence, dim.
const DIMS: [usize; 4] = [2, 8, 1024, 128];

fn main() -> Result<(), Box<dyn Error>> {
    match Cuda::open(0) {
        Ok(cuda) => run(&cuda),
        Err(error) => {
            println!("there is no GPU to run on: {error}");
            Ok(())
        }
    }
}

fn run(cuda: &Cuda) -> Result<(), Box<dyn Error>> {
    // FlashCore and cudarc both retain the GPU's primary context: they share memory and streams.
    let stream = CudaContext::new(0)?.new_stream()?;
    let host: [Vec<f16>; 3] = [1, 2, 3].map(numbers);
    // The bits of halves: cudarc knows the type itself with its feature `f16`.
    let [q, k, v] = host.each_ref().map(|tensor| stream.clone_htod(cast_slice::<f16, u16>(tensor)));
    let (q, k, v) = (q?, k?, v?);
    let mut out = stream.alloc_zeros::<u16>(q.len())?;

    let [batch, heads, seq, dim] = DIMS;
    let layout = Layout::bhsd(Dims::new(batch, heads, seq, dim))?;
    let spec = Spec { mask: Mask::CAUSAL, ..Spec::new(DType::F16, layout, layout, layout) };
    let ready = cuda.prepare(&spec.parse()?)?;
    println!("{}", ready.plan());
    {
        // The guards tell cudarc that the slices are in use on the stream until the launch is queued.
        let ((q, _q), (k, _k)) = (q.device_ptr(&stream), k.device_ptr(&stream));
        let ((v, _v), (out, _out)) = (v.device_ptr(&stream), out.device_ptr_mut(&stream));
        let tensors = DeviceTensors { q, k, v, out, ..DeviceTensors::default() };
        // SAFETY: four live slices of this GPU with the problem's layout, which nothing else touches; the stream is
        // alive, and it is waited for below.
        unsafe { ready.launch_raw(&tensors, stream.cu_stream().cast())? };
    }
    let result = stream.clone_dtoh(&out)?;
    stream.synchronize()?;
    println!("largest difference from the CPU: {:.2e}", difference(&host, cast_slice(&result))?);
    Ok(())
}

/// The largest difference between `result` and what the CPU computes.
fn difference(host: &[Vec<f16>; 3], result: &[f16]) -> Result<f32, flashcore::Error> {
    let [q, k, v] = host.each_ref().map(|tensor| TensorView::bhsd(tensor, DIMS));
    let expected = attention(q?, k?, v?).mask(Mask::CAUSAL).backend(BackendKind::Cpu).run()?.out;
    let [batch, heads, seq, _] = DIMS;
    let rows = (0..batch * heads * seq).map(|n| (n / seq / heads, n / seq % heads, n % seq));
    let expected = expected.view();
    let pairs = rows.flat_map(|(b, h, s)| expected.row(b, h, s)).zip(result);
    Ok(pairs.map(|(x, y)| (x.to_f32() - y.to_f32()).abs()).fold(0.0, f32::max))
}

fn numbers(seed: usize) -> Vec<f16> {
    let len = DIMS.iter().product();
    (0..len).map(|i| f16::from_f32(((i * 7919 + seed * 104_729) % 2003) as f32 / 1001.5 - 1.0)).collect()
}
