//! FlashCore and cudarc, with the features that candle asks of it, in one build. Checked by `.ci/run`, never run.
#![forbid(unsafe_code)]

use cudarc::driver::{CudaSlice, CudaStream};
use flashcore::{TensorView, attention};
use std::{error::Error, sync::Arc};

/// Attention on the CPU; cudarc takes the first row of the result to a GPU.
pub fn first_row(
    numbers: &[f32],
    dims: [usize; 4],
    stream: &Arc<CudaStream>,
) -> Result<CudaSlice<f32>, Box<dyn Error>> {
    let x = TensorView::bhsd(numbers, dims)?;
    Ok(stream.clone_htod(attention(x, x, x).run()?.out.view().row(0, 0, 0))?)
}
