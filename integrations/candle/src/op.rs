//! The operation behind every function, as candle takes it.

use candle_core::{CpuStorage, CustomOp3, DType, Layout, Result, Shape, Tensor, bail};
use flashcore::{Backend, BackendKind, Dims, Element, Lengths, Mask, backend};
use flashcore_core::{Bias, HostCall, Layout as Place, PageTable, Spec, Values};

/// Keys before and after a query's position.
#[derive(Clone, Copy)]
pub(crate) struct Bands {
    pub(crate) left: Option<usize>,
    pub(crate) right: Option<usize>,
}

/// What a call asks for.
pub(crate) struct Asked {
    scale: f32,
    bands: Bands,
    pub(crate) softcap: Option<f32>,
    pub(crate) slopes: Option<Vec<f32>>,
    /// Offsets of packed queries and keys.
    pub(crate) packed: Option<[Vec<u32>; 2]>,
    /// Page numbers of each sequence.
    pub(crate) table: Option<PageTable>,
}

impl Asked {
    pub(crate) const fn new(scale: f32, bands: Bands) -> Self {
        Self { scale, bands, softcap: None, slopes: None, packed: None, table: None }
    }

    fn mask(&self) -> Mask {
        let keys = |side: Option<usize>| side.map(|keys| u32::try_from(keys).unwrap_or(u32::MAX));
        Mask::window(keys(self.bands.left), keys(self.bands.right))
    }

    fn values(&self) -> Values {
        let lengths = match (&self.packed, &self.table) {
            (None, _) => Lengths::Uniform,
            (Some([q, k]), None) => Lengths::ragged(q.clone(), k.clone()),
            (Some([q, k]), Some(_)) => {
                let used: Vec<_> = k.windows(2).map(|pair| pair[1].saturating_sub(pair[0])).collect();
                Lengths::packed_queries(q.clone(), used)
            }
        };
        let bias = self.slopes.clone().map(Into::into);
        Values { lengths, bias, table: self.table.clone(), ..Values::default() }
    }

    fn compute<T: Element>(&self, tensors: [(&[T], &Layout); 3]) -> Result<(Vec<T>, Shape)> {
        let [q, k, v] = tensors;
        let pages = self.table.is_some();
        let places = [place(q.1, false)?, place(k.1, pages)?, place(v.1, pages)?];
        let dims = Dims { dim: places[2].dims().dim, ..places[0].dims() };
        let values = self.values();
        let spec = Spec {
            mask: self.mask(),
            scale: Some(self.scale),
            softcap: self.softcap,
            bias: self.slopes.as_ref().map(|_| Bias::Slopes { per_sequence: false }),
            out: Some(Place::bshd(dims).map_err(told)?),
            ..Spec::new(T::DTYPE, places[0], places[1], places[2])
        };
        let problem = spec.with(&values).parse().map_err(told)?;
        let mut out = vec![T::from_f32(0.0); problem.out().span()];
        let inputs = tensors.map(|(data, layout)| &data[layout.start_offset()..]);
        let mut call = HostCall::bind(&problem, &values, inputs, &mut out, None).map_err(told)?;
        backend(BackendKind::Cpu).map_err(told)?.forward(&mut call).map_err(told)?;
        let mut shape = q.1.dims().to_vec();
        shape.splice(shape.len() - 1.., [dims.dim]);
        Ok((out, shape.into()))
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
            _ => bail!("q, k and v must all be f16, bf16 or f32; convert them to one of these"),
        })
    }
}

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

/// Offsets of sequences.
pub(crate) fn offsets(tensor: &Tensor) -> Result<Vec<u32>> {
    tensor.to_dtype(DType::U32)?.to_vec1()
}

/// Numbers of heads.
pub(crate) fn numbers(tensor: &Tensor) -> Result<Vec<f32>> {
    tensor.to_dtype(DType::F32)?.to_vec1()
}

/// Page numbers, a row for each sequence.
pub(crate) fn table(tensor: &Tensor) -> Result<PageTable> {
    let columns = tensor.dim(1)?;
    let numbers: Vec<i64> = tensor.to_dtype(DType::I64)?.flatten_all()?.to_vec1()?;
    let numbers: Vec<i32> = numbers.into_iter().map(|page| i32::try_from(page).unwrap_or(-1)).collect();
    Ok(PageTable::new(numbers, columns))
}

fn told(error: impl std::error::Error + Send + Sync + 'static) -> candle_core::Error {
    candle_core::Error::wrap(error)
}
