//! Sinks: one extra logit per query head, which a call binds in a type of its own.

use flashcore_core::DType;
use flashcore_tile::{Builder, F32, Half, Params, Reg, U32, U64};

use crate::slots;

/// The part of a kernel's name that tells the type of its sinks.
pub(crate) const fn sink_name(sinks: Option<DType>) -> &'static str {
    match sinks {
        Some(DType::F16) => "_sinkf16",
        Some(DType::BF16) => "_sinkbf16",
        _ => "_sink",
    }
}

/// Where the sinks of a call lie.
#[derive(Clone, Copy, Debug)]
pub(crate) struct SinkArgument {
    base: Reg<U64>,
    dtype: DType,
}

impl SinkArgument {
    #[track_caller]
    pub(crate) fn declare<A>(b: &mut Builder, params: &mut Params<A>, dtype: Option<DType>) -> Option<Self> {
        dtype.map(|dtype| Self::of(b, params, dtype))
    }

    /// Sinks of a problem that has them.
    #[track_caller]
    pub(crate) fn of<A>(b: &mut Builder, params: &mut Params<A>, dtype: DType) -> Self {
        Self { base: params.buffer(b, "sinks", slots::SINKS), dtype }
    }

    /// The sink of a head.
    #[track_caller]
    pub(crate) fn of_head(&self, b: &mut Builder, head: Reg<U32>) -> Reg<F32> {
        let at = b.let_(self.base + head.mul_wide(self.dtype.bytes() as u32));
        let half = match self.dtype {
            DType::F16 => Half::F16,
            DType::BF16 => Half::Bf16,
            _ => {
                let [sink] = b.load_global::<F32, 1>(at);
                return sink;
            }
        };
        let bits = b.load_global_16(at);
        let [sink, _] = b.unpack(half, bits);
        sink
    }
}
