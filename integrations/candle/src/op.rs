//! The operation behind every function, as candle takes it: a problem made of layouts, computed where the tensors are.

use candle_core::{CpuStorage, CustomOp3, DType, Layout, Result, Shape, Tensor, bail};
use flashcore::{BackendKind, Dims, Element, Lengths, Mask, Sequences, backend};
use flashcore_core::{Bias, HostCall, Index, Layout as Place, PageTable, Pages, Spec, Values};

/// Keys before and after a query's position.
#[derive(Clone, Copy)]
pub(crate) struct Bands {
    pub(crate) left: Option<usize>,
    pub(crate) right: Option<usize>,
}

/// Sequences that lie one after another.
pub(crate) struct Packed {
    /// Offsets of the queries of each, u32.
    pub(crate) queries: Tensor,
    /// Offsets of the keys of each, or with a table how many they are, u32.
    pub(crate) keys: Tensor,
    /// No sequence has more queries or keys.
    longest: [usize; 2],
}

impl Packed {
    pub(crate) fn new(queries: &Tensor, keys: &Tensor, longest: [usize; 2]) -> Result<Self> {
        let numbers = |tensor: &Tensor| tensor.to_dtype(DType::U32)?.contiguous();
        Ok(Self { queries: numbers(queries)?, keys: numbers(keys)?, longest })
    }

    /// With keys in pages, whose number is the difference of offsets.
    pub(crate) fn paged(queries: &Tensor, offsets: &Tensor, longest: [usize; 2]) -> Result<Self> {
        let Some(count) = offsets.dim(0)?.checked_sub(1) else {
            bail!("seqlens_k is empty; give one more than sequences")
        };
        let keys = (offsets.narrow(0, 1, count)? - offsets.narrow(0, 0, count)?)?;
        Self::new(queries, &keys, longest)
    }
}

/// What a call asks for.
pub(crate) struct Asked {
    pub(crate) scale: f32,
    pub(crate) bands: Bands,
    pub(crate) softcap: Option<f32>,
    /// f32, one for each query head.
    pub(crate) slopes: Option<Tensor>,
    pub(crate) packed: Option<Packed>,
    /// Page numbers of each sequence, i32.
    pub(crate) table: Option<Tensor>,
}

impl Asked {
    pub(crate) const fn new(scale: f32, bands: Bands) -> Self {
        Self { scale, bands, softcap: None, slopes: None, packed: None, table: None }
    }

    fn mask(&self) -> Mask {
        let keys = |side: Option<usize>| side.map(|keys| u32::try_from(keys).unwrap_or(u32::MAX));
        Mask::window(keys(self.bands.left), keys(self.bands.right))
    }

    /// The numbers of a call whose tensors are on the CPU.
    fn values(&self) -> Result<Values> {
        let table = self.table.as_ref().map(page_table).transpose()?;
        let lengths = match &self.packed {
            None => Lengths::Uniform,
            Some(packed) => {
                let (q, k) = (packed.queries.to_vec1::<u32>()?, packed.keys.to_vec1::<u32>()?);
                if table.is_some() { Lengths::packed_queries(q, k) } else { Lengths::ragged(q, k) }
            }
        };
        let bias = self.slopes.as_ref().map(Tensor::to_vec1::<f32>).transpose()?.map(Into::into);
        Ok(Values { lengths, bias, table, ..Values::default() })
    }

    /// What there is to compute, but for the kinds of lengths and pages.
    fn spec(&self, dtype: flashcore::DType, [q, k, v]: [&Layout; 3]) -> Result<Spec> {
        let pages = self.table.is_some();
        let places = [place(q, false)?, place(k, pages)?, place(v, pages)?];
        let dims = Dims { dim: places[2].dims().dim, ..places[0].dims() };
        Ok(Spec {
            mask: self.mask(),
            scale: Some(self.scale),
            softcap: self.softcap,
            bias: self.slopes.as_ref().map(|_| Bias::Slopes { per_sequence: false }),
            out: Some(Place::bshd(dims).map_err(told)?),
            ..Spec::new(dtype, places[0], places[1], places[2])
        })
    }

    /// What there is to compute where the numbers stay on a GPU.
    #[cfg_attr(not(feature = "cuda"), allow(dead_code))]
    pub(crate) fn device_spec(&self, dtype: flashcore::DType, layouts: [&Layout; 3]) -> Result<Spec> {
        let spec = self.spec(dtype, layouts)?;
        let Some(packed) = &self.packed else { return Ok(spec) };
        let offsets = packed.queries.dim(0)?;
        let Some(count) = offsets.checked_sub(1) else {
            bail!("seqlens_q is empty; give one more than sequences")
        };
        let [of_keys, needed] = [packed.keys.dim(0)?, if self.table.is_some() { count } else { offsets }];
        if of_keys != needed {
            bail!(
                "seqlens_q and seqlens_k have a different number of entries; give both one more than sequences"
            );
        }
        // Bounds are rounded, so that batches with slightly other ones share a plan.
        let [longest_q, longest_kv] = packed.longest.map(usize::next_power_of_two);
        let Some(table) = &self.table else {
            let sequences = Sequences::Ragged { count, longest_q, longest_kv };
            return Ok(Spec { sequences, index: Index::I32, ..spec });
        };
        let (rows, columns) = table.dims2()?;
        if rows != count {
            bail!("block_table has {rows} rows for {count} sequences; give one for each");
        }
        let pages = Some(Pages { row_stride: columns, longest_kv: Some(longest_kv), ..Pages::new(columns) });
        Ok(Spec {
            sequences: Sequences::PackedQueries { count, longest_q },
            index: Index::I32,
            pages,
            ..spec
        })
    }

    /// The result's shape: q's, with the features of v.
    pub(crate) fn shape(q: &Layout, v: &Layout) -> Shape {
        let mut shape = q.dims().to_vec();
        shape.pop();
        shape.extend(v.dims().last());
        shape.into()
    }

    fn compute<T: Element>(&self, tensors: [(&[T], &Layout); 3]) -> Result<(Vec<T>, Shape)> {
        let layouts = tensors.map(|(_, layout)| layout);
        let values = self.values()?;
        let problem = self.spec(T::DTYPE, layouts)?.with(&values).parse().map_err(told)?;
        let mut out = vec![T::from_f32(0.0); problem.out().span()];
        let inputs = tensors.map(|(data, layout)| &data[layout.start_offset()..]);
        let mut call = HostCall::bind(&problem, &values, inputs, &mut out, None).map_err(told)?;
        backend(BackendKind::Cpu).map_err(told)?.forward(&mut call).map_err(told)?;
        Ok((out, Self::shape(layouts[0], layouts[2])))
    }
}

impl CustomOp3 for Asked {
    fn name(&self) -> &'static str {
        "flash-attn"
    }

    fn cpu_fwd(
        &self,
        q: &CpuStorage,
        of_q: &Layout,
        k: &CpuStorage,
        of_k: &Layout,
        v: &CpuStorage,
        of_v: &Layout,
    ) -> Result<(CpuStorage, Shape)> {
        use CpuStorage::{BF16, F16, F32};
        Ok(match (q, k, v) {
            (F16(q), F16(k), F16(v)) => {
                let (out, shape) = self.compute([(q, of_q), (k, of_k), (v, of_v)])?;
                (F16(out), shape)
            }
            (BF16(q), BF16(k), BF16(v)) => {
                let (out, shape) = self.compute([(q, of_q), (k, of_k), (v, of_v)])?;
                (BF16(out), shape)
            }
            (F32(q), F32(k), F32(v)) => {
                let (out, shape) = self.compute([(q, of_q), (k, of_k), (v, of_v)])?;
                (F32(out), shape)
            }
            _ => bail!("{TYPES}"),
        })
    }

    #[cfg(feature = "cuda")]
    fn cuda_fwd(
        &self,
        q: &candle_core::CudaStorage,
        of_q: &Layout,
        k: &candle_core::CudaStorage,
        of_k: &Layout,
        v: &candle_core::CudaStorage,
        of_v: &Layout,
    ) -> Result<(candle_core::CudaStorage, Shape)> {
        crate::cuda::forward(self, [(q, of_q), (k, of_k), (v, of_v)])
    }
}

pub(crate) const TYPES: &str = "q, k and v must all be f16, bf16 or f32; convert them to one of these";

/// Attention over three tensors.
pub(crate) fn attend(q: &Tensor, k: &Tensor, v: &Tensor, asked: Asked) -> Result<Tensor> {
    q.apply_op3(k, v, asked)
}

/// Where a tensor lies: batch × sequence × heads × dim, or sequence × heads × dim.
fn place(layout: &Layout, pages: bool) -> Result<Place> {
    let (dims, strides) = (layout.dims(), layout.stride());
    let (dims, strides) = match (dims, strides) {
        (&[batch, seq, heads, dim], &[b, s, h, d]) => (Dims::new(batch, heads, seq, dim), [b, h, s, d]),
        (&[seq, heads, dim], &[s, h, d]) if !pages => (Dims::new(1, heads, seq, dim), [0, h, s, d]),
        _ => bail!("a tensor has {} dimensions; give 4, or 3 for packed sequences", dims.len()),
    };
    Place::strided(dims, strides).map_err(told)
}

/// Numbers of heads.
pub(crate) fn numbers(tensor: &Tensor) -> Result<Tensor> {
    tensor.to_dtype(DType::F32)?.contiguous()
}

/// Page numbers, a row for each sequence.
pub(crate) fn table(tensor: &Tensor) -> Result<Tensor> {
    tensor.dims2()?;
    tensor.to_dtype(DType::I32)?.contiguous()
}

fn page_table(table: &Tensor) -> Result<PageTable> {
    Ok(PageTable::new(table.flatten_all()?.to_vec1::<i32>()?, table.dim(1)?))
}

pub(crate) fn told(error: impl std::error::Error + Send + Sync + 'static) -> candle_core::Error {
    candle_core::Error::wrap(error)
}

#[cfg(test)]
mod tests {
    use candle_core::Device;

    use super::*;

    /// A GPU gets the problem that the CPU computes, but for bounds, which it has from the caller.
    #[test]
    fn a_gpu_is_asked_for_the_same() -> Result<()> {
        let cpu = &Device::Cpu;
        let offsets = |numbers: &[u32]| Tensor::new(numbers, cpu);
        let (of_q, of_k) = (offsets(&[0, 5, 8])?, offsets(&[0, 9, 29])?);
        let dense = Tensor::zeros((2, 9, 4, 16), DType::F32, cpu)?;
        let (q, k) =
            (Tensor::zeros((8, 4, 16), DType::F32, cpu)?, Tensor::zeros((29, 2, 16), DType::F32, cpu)?);
        let pages = Tensor::zeros((8, 4, 2, 16), DType::F32, cpu)?;
        let none = || Asked::new(0.5, Bands { left: Some(3), right: Some(0) });
        let slopes = Some(numbers(&Tensor::zeros(4, DType::F32, cpu)?)?);
        let block = Some(table(&Tensor::new(&[[0u32, 1, 2, 0, 0], [3, 4, 5, 6, 7]], cpu)?)?);
        for (q, k, asked) in [
            (&dense, &dense, Asked { slopes, softcap: Some(5.0), ..none() }),
            (&q, &k, Asked { packed: Some(Packed::new(&of_q, &of_k, [5, 20])?), ..none() }),
            (
                &q,
                &pages,
                Asked { packed: Some(Packed::paged(&of_q, &of_k, [5, 20])?), table: block, ..none() },
            ),
        ] {
            let layouts = [q.layout(), k.layout(), k.layout()];
            let on_host =
                asked.spec(flashcore::DType::F32, layouts)?.with(&asked.values()?).parse().map_err(told)?;
            let on_gpu = asked.device_spec(flashcore::DType::F32, layouts)?.parse().map_err(told)?;
            assert_eq!(on_gpu.sequences(), on_host.sequences());
            assert_eq!(
                (on_gpu.q(), on_gpu.out(), on_gpu.mask()),
                (on_host.q(), on_host.out(), on_host.mask())
            );
            assert_eq!((on_gpu.bias(), on_gpu.softcap()), (on_host.bias(), on_host.softcap()));
            assert_eq!(on_gpu.pages().is_some(), on_host.pages().is_some());
        }
        let short = Asked { packed: Some(Packed::new(&of_q, &offsets(&[0, 9])?, [5, 9])?), ..none() };
        assert!(short.device_spec(flashcore::DType::F32, [q.layout(), k.layout(), k.layout()]).is_err());
        Ok(())
    }
}
