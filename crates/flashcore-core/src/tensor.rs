//! Host tensors: a slice with a layout, borrowed or owned.

use crate::{
    dtype::Element,
    error::{Operand, ProblemError},
    layout::{Dims, Layout},
};

/// A borrowed tensor whose layout stays inside its slice.
#[derive(Clone, Copy, Debug)]
pub struct TensorView<'a, T> {
    data: &'a [T],
    layout: Layout,
}

impl<'a, T: Element> TensorView<'a, T> {
    /// Views `data` through `layout`.
    pub fn new(data: &'a [T], layout: Layout) -> Result<Self, ProblemError> {
        layout.check_len(Operand::Tensor, data.len())?;
        Ok(Self { data, layout })
    }

    /// Views dense data in the order batch, heads, sequence, dim.
    pub fn bhsd(data: &'a [T], dims: [usize; 4]) -> Result<Self, ProblemError> {
        Self::new(data, Layout::bhsd(dims_of(dims))?)
    }

    /// Views dense data in the order batch, sequence, heads, dim; `dims` stays batch, heads, sequence, dim.
    pub fn bshd(data: &'a [T], dims: [usize; 4]) -> Result<Self, ProblemError> {
        Self::new(data, Layout::bshd(dims_of(dims))?)
    }

    /// Views dense rows × columns: a tensor of batch 1 and one head.
    pub fn matrix(data: &'a [T], rows: usize, cols: usize) -> Result<Self, ProblemError> {
        Self::new(data, Layout::matrix(rows, cols)?)
    }

    /// Views `data` with strides in elements for batch, heads, sequence and dim.
    pub fn strided(data: &'a [T], dims: [usize; 4], strides: [usize; 4]) -> Result<Self, ProblemError> {
        Self::new(data, Layout::strided(dims_of(dims), strides)?)
    }

    /// The elements.
    pub const fn data(&self) -> &'a [T] {
        self.data
    }

    /// Where they lie.
    pub const fn layout(&self) -> Layout {
        self.layout
    }

    /// The features at one position.
    ///
    /// # Panics
    /// If there is no such position, as slices do.
    pub fn row(&self, batch: usize, head: usize, seq: usize) -> &'a [T] {
        let dims = self.layout.dims();
        assert!(
            batch < dims.batch && head < dims.heads && seq < dims.seq,
            "row {batch},{head},{seq} of {dims}"
        );
        let start = self.layout.row(batch, head, seq);
        &self.data[start..start + self.layout.dims().dim]
    }
}

/// A mutably borrowed tensor whose positions share no memory.
#[derive(Debug)]
pub struct TensorViewMut<'a, T> {
    data: &'a mut [T],
    layout: Layout,
}

impl<'a, T: Element> TensorViewMut<'a, T> {
    /// Views `data` through `layout`.
    pub fn new(data: &'a mut [T], layout: Layout) -> Result<Self, ProblemError> {
        layout.check_output()?;
        layout.check_len(Operand::Out, data.len())?;
        Ok(Self { data, layout })
    }

    /// Views dense data in the order batch, heads, sequence, dim.
    pub fn bhsd(data: &'a mut [T], dims: [usize; 4]) -> Result<Self, ProblemError> {
        Self::new(data, Layout::bhsd(dims_of(dims))?)
    }

    /// Views dense data in the order batch, sequence, heads, dim; `dims` stays batch, heads, sequence, dim.
    pub fn bshd(data: &'a mut [T], dims: [usize; 4]) -> Result<Self, ProblemError> {
        Self::new(data, Layout::bshd(dims_of(dims))?)
    }

    /// Views dense rows × columns: a tensor of batch 1 and one head.
    pub fn matrix(data: &'a mut [T], rows: usize, cols: usize) -> Result<Self, ProblemError> {
        Self::new(data, Layout::matrix(rows, cols)?)
    }

    /// Views `data` with strides in elements for batch, heads, sequence and dim.
    pub fn strided(data: &'a mut [T], dims: [usize; 4], strides: [usize; 4]) -> Result<Self, ProblemError> {
        Self::new(data, Layout::strided(dims_of(dims), strides)?)
    }

    /// Where the elements lie.
    pub const fn layout(&self) -> Layout {
        self.layout
    }

    /// The elements.
    pub fn into_data(self) -> &'a mut [T] {
        self.data
    }
}

/// An owned tensor.
#[derive(Clone, PartialEq, Debug)]
pub struct Tensor<T> {
    data: Vec<T>,
    layout: Layout,
}

impl<T: Element> Tensor<T> {
    /// Takes data that lies as `layout` says.
    pub fn new(data: Vec<T>, layout: Layout) -> Result<Self, ProblemError> {
        layout.check_len(Operand::Tensor, data.len())?;
        Ok(Self { data, layout })
    }

    /// Takes dense data in the order batch, heads, sequence, dim.
    pub fn bhsd(data: Vec<T>, dims: [usize; 4]) -> Result<Self, ProblemError> {
        Self::new(data, Layout::bhsd(dims_of(dims))?)
    }

    /// Takes dense data in the order batch, sequence, heads, dim; `dims` stays batch, heads, sequence, dim.
    pub fn bshd(data: Vec<T>, dims: [usize; 4]) -> Result<Self, ProblemError> {
        Self::new(data, Layout::bshd(dims_of(dims))?)
    }

    /// A tensor of zeros that holds exactly what `layout` reaches.
    pub fn zeros(layout: Layout) -> Result<Self, ProblemError> {
        let (span, dims) = (layout.span(), layout.dims());
        let no_memory = |()| ProblemError::OutOfMemory { bytes: span.saturating_mul(size_of::<T>()), dims };
        Ok(Self { data: bytemuck::allocation::try_zeroed_vec(span).map_err(no_memory)?, layout })
    }

    /// Borrows the tensor.
    pub fn view(&self) -> TensorView<'_, T> {
        TensorView { data: &self.data, layout: self.layout }
    }

    /// Borrows the tensor mutably.
    pub fn view_mut(&mut self) -> Result<TensorViewMut<'_, T>, ProblemError> {
        TensorViewMut::new(&mut self.data, self.layout)
    }

    /// The elements.
    pub fn data(&self) -> &[T] {
        &self.data
    }

    /// Where they lie.
    pub const fn layout(&self) -> Layout {
        self.layout
    }

    /// The elements, owned.
    pub fn into_data(self) -> Vec<T> {
        self.data
    }
}

const fn dims_of([batch, heads, seq, dim]: [usize; 4]) -> Dims {
    Dims::new(batch, heads, seq, dim)
}
