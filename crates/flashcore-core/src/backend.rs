//! Anything that computes attention: one trait, implemented by CPU, GPU and simulator, and tested by one suite.

use std::error::Error;

use crate::{
    append::AppendCall,
    backward::BackwardCall,
    call::HostCall,
    error::ProblemError,
    grouped::GroupedCall,
    merge::MergeCall,
    moe::{MoeCall, MoeGradientCall},
    quantise::QuantiseCall,
};

/// Something that computes attention on host tensors.
pub trait Backend: Send + Sync {
    /// A short name: `cpu`, `cuda`, `sim`.
    fn name(&self) -> &'static str;

    /// Computes the whole call: every output row is written, or an error is returned.
    fn forward(&self, call: &mut HostCall<'_>) -> Result<Ran, BackendError>;

    /// Merges partial results: every output row is written, or an error is returned.
    fn merge(&self, _: &mut MergeCall<'_>) -> Result<Ran, BackendError> {
        let (what, instead) = ("merging".to_owned(), "use another backend".to_owned());
        Err(BackendError::Unsupported { backend: self.name(), what, instead })
    }

    /// Writes new rows into a cache: every row that has a place is written, or an error is returned.
    fn append(&self, _: &mut AppendCall<'_>) -> Result<Ran, BackendError> {
        let (what, instead) = ("appending to a cache".to_owned(), "use another backend".to_owned());
        Err(BackendError::Unsupported { backend: self.name(), what, instead })
    }

    /// Computes gradients: every one of them is written completely, or an error is returned.
    fn backward(&self, _: &mut BackwardCall<'_>) -> Result<Ran, BackendError> {
        let (what, instead) = ("gradients".to_owned(), "compute them on the cpu backend".to_owned());
        Err(BackendError::Unsupported { backend: self.name(), what, instead })
    }

    /// Rounds a tensor to 8 bits: every output row, factor and mean is written, or an error is returned.
    fn quantise(&self, _: &mut QuantiseCall<'_>) -> Result<Ran, BackendError> {
        let (what, instead) = ("quantising".to_owned(), "use another backend".to_owned());
        Err(BackendError::Unsupported { backend: self.name(), what, instead })
    }

    /// Computes a mixture of experts: every output row is written, or an error is returned.
    fn moe(&self, _: &mut MoeCall<'_>) -> Result<Ran, BackendError> {
        let (what, instead) = ("mixtures of experts".to_owned(), "use another backend".to_owned());
        Err(BackendError::Unsupported { backend: self.name(), what, instead })
    }

    /// Computes gradients of a mixture of experts: every one of them is written completely, or an error is returned.
    fn moe_gradients(&self, _: &mut MoeGradientCall<'_>) -> Result<Ran, BackendError> {
        let (what, instead) =
            ("gradients of mixtures of experts".to_owned(), "compute them on the cpu backend".to_owned());
        Err(BackendError::Unsupported { backend: self.name(), what, instead })
    }

    /// Computes grouped products: every element of the result is written, or an error is returned.
    fn grouped(&self, _: &mut GroupedCall<'_>) -> Result<Ran, BackendError> {
        let (what, instead) = ("grouped products".to_owned(), "use another backend".to_owned());
        Err(BackendError::Unsupported { backend: self.name(), what, instead })
    }
}

impl<B: Backend + ?Sized> Backend for &B {
    fn name(&self) -> &'static str {
        (**self).name()
    }

    fn forward(&self, call: &mut HostCall<'_>) -> Result<Ran, BackendError> {
        (**self).forward(call)
    }

    fn merge(&self, call: &mut MergeCall<'_>) -> Result<Ran, BackendError> {
        (**self).merge(call)
    }

    fn append(&self, call: &mut AppendCall<'_>) -> Result<Ran, BackendError> {
        (**self).append(call)
    }

    fn backward(&self, call: &mut BackwardCall<'_>) -> Result<Ran, BackendError> {
        (**self).backward(call)
    }

    fn quantise(&self, call: &mut QuantiseCall<'_>) -> Result<Ran, BackendError> {
        (**self).quantise(call)
    }

    fn moe(&self, call: &mut MoeCall<'_>) -> Result<Ran, BackendError> {
        (**self).moe(call)
    }

    fn moe_gradients(&self, call: &mut MoeGradientCall<'_>) -> Result<Ran, BackendError> {
        (**self).moe_gradients(call)
    }

    fn grouped(&self, call: &mut GroupedCall<'_>) -> Result<Ran, BackendError> {
        (**self).grouped(call)
    }
}

/// What a backend did.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Ran {
    /// The kernel that ran, for reports.
    pub kernel: String,
}

/// Why a backend computed nothing.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum BackendError {
    /// The problem is legal but this backend does not take it.
    #[error("the {backend} backend does not support {what}; {instead}")]
    Unsupported {
        /// The backend's name.
        backend: &'static str,
        /// What it does not support.
        what: String,
        /// What to do instead.
        instead: String,
    },
    /// The backend is not usable on this machine.
    #[error("the {backend} backend is not available: {reason}")]
    Unavailable {
        /// The backend's name.
        backend: &'static str,
        /// Why, and what to do.
        reason: String,
    },
    /// The arguments do not form a problem.
    #[error(transparent)]
    Problem(#[from] ProblemError),
    /// The backend failed while running.
    #[error("the {backend} backend failed")]
    Failed {
        /// The backend's name.
        backend: &'static str,
        /// The cause.
        #[source]
        source: Box<dyn Error + Send + Sync>,
    },
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{
        AppendInputs, AppendOutputs, AppendSpec, AppendValues, BackwardInputs, BackwardSpec, DType, Data,
        DataMut, Dims, E4M3, ExpertLayout, GradientsMut, GroupedInputs, GroupedSpec, Grouping, Ids, Index,
        Layout, MergeSpec, MoeGradientsMut, MoeInputs, MoeSpec, Parts, QuantiseSpec, QuantisedMut, Routed,
        Routing, RowTerms, Spec, Values,
    };

    /// Returns the name of every operation as its result.
    struct Named;

    fn ran(kernel: &str) -> Result<Ran, BackendError> {
        Ok(Ran { kernel: kernel.to_owned() })
    }

    impl Backend for Named {
        fn name(&self) -> &'static str {
            "named"
        }

        fn forward(&self, _: &mut HostCall<'_>) -> Result<Ran, BackendError> {
            ran("forward")
        }

        fn merge(&self, _: &mut MergeCall<'_>) -> Result<Ran, BackendError> {
            ran("merge")
        }

        fn append(&self, _: &mut AppendCall<'_>) -> Result<Ran, BackendError> {
            ran("append")
        }

        fn backward(&self, _: &mut BackwardCall<'_>) -> Result<Ran, BackendError> {
            ran("backward")
        }

        fn quantise(&self, _: &mut QuantiseCall<'_>) -> Result<Ran, BackendError> {
            ran("quantise")
        }

        fn moe(&self, _: &mut MoeCall<'_>) -> Result<Ran, BackendError> {
            ran("moe")
        }

        fn moe_gradients(&self, _: &mut MoeGradientCall<'_>) -> Result<Ran, BackendError> {
            ran("moe_gradients")
        }

        fn grouped(&self, _: &mut GroupedCall<'_>) -> Result<Ran, BackendError> {
            ran("grouped")
        }
    }

    /// A reference to a backend computes whatever the backend computes: methods not forwarded here would be refused.
    #[test]
    fn a_reference_hands_on_every_operation() {
        let backend: &dyn Backend = &&Named;
        let layout = Layout::bhsd(Dims::new(1, 1, 1, 1)).unwrap();
        let problem = Spec::new(DType::F32, layout, layout, layout).parse().unwrap();
        let (one, mut out) = ([0.0f32], [0.0f32]);
        let mut call = HostCall::bind(&problem, Values::NONE, [&one[..]; 3], &mut out, None).unwrap();
        assert_eq!(backend.forward(&mut call).unwrap().kernel, "forward");
        let problem = MergeSpec::new(DType::F32, layout, Parts::Listed(1)).parse().unwrap();
        let (parts, lses) = ([Data::F32(&one)], [&one[..]]);
        let mut call = MergeCall::bind(&problem, &parts, &lses, DataMut::F32(&mut out), None).unwrap();
        assert_eq!(backend.merge(&mut call).unwrap().kernel, "merge");
        let problem = AppendSpec::new(DType::F32, [layout; 2], [layout; 2]).parse().unwrap();
        let values = AppendValues { lengths: [0].into(), ..AppendValues::default() };
        let ([mut cache_k, mut cache_v], data) = ([[0.0f32]; 2], Data::F32(&one));
        let inputs = AppendInputs { k: data, v: data, rotary: None, q: None };
        let [cache_k, cache_v] = [&mut cache_k, &mut cache_v].map(|cache| DataMut::F32(cache));
        let outputs = AppendOutputs { cache_k, cache_v, q: None };
        let mut call = AppendCall::bind(&problem, &values, inputs, outputs).unwrap();
        assert_eq!(backend.append(&mut call).unwrap().kernel, "append");
        let spec = Spec::new(DType::F32, layout, layout, layout);
        let problem = BackwardSpec::new(spec).parse().unwrap();
        let [mut dq, mut dk, mut dv] = [[0.0f32]; 3];
        let data = Data::F32(&one);
        let inputs = BackwardInputs { qkv: [data; 3], lse: &one, terms: RowTerms::Out(data), d_out: data };
        let qkv = [&mut dq, &mut dk, &mut dv].map(|grad| DataMut::F32(grad));
        let grads = GradientsMut { qkv, sinks: None };
        let mut call = BackwardCall::bind(&problem, Values::NONE, inputs, grads).unwrap();
        assert_eq!(backend.backward(&mut call).unwrap().kernel, "backward");
        let problem = QuantiseSpec::new(DType::F32, layout).parse().unwrap();
        let (mut factor, mut narrow) = ([0.0f32], [E4M3::default()]);
        let into = QuantisedMut { out: DataMut::E4M3(&mut narrow), factors: &mut factor, means: None };
        let mut call = QuantiseCall::bind(&problem, data, None, into).unwrap();
        assert_eq!(backend.quantise(&mut call).unwrap().kernel, "quantise");
        let [gate_up, down] = [[1, 2, 1], [1, 1, 1]].map(|extents| ExpertLayout::dense(extents).unwrap());
        let routing = Routing::Given { ids: Index::I32, weights: DType::F32, top_k: 1 };
        let problem = MoeSpec::new(DType::F32, layout, gate_up, down, routing).parse().unwrap();
        let routed = Routed::Given { ids: Ids::I32(&[0]), weights: data };
        let two = [0.0f32; 2];
        let inputs =
            MoeInputs { x: data, gate_up: Data::F32(&two), down: data, biases: None, shared: None, routed };
        let mut call = MoeCall::bind(&problem, inputs, DataMut::F32(&mut out)).unwrap();
        assert_eq!(backend.moe(&mut call).unwrap().kernel, "moe");
        let (mut x, mut gate_up, mut d_down, mut weights) = ([0.0f32], [0.0f32; 2], [0.0f32], [0.0f32]);
        let [x, gate_up, d_down] = [&mut x[..], &mut gate_up, &mut d_down].map(DataMut::F32);
        let weights = &mut weights[..];
        let grads = MoeGradientsMut { x, gate_up, down: d_down, biases: None, shared: None, weights };
        let mut call = MoeGradientCall::bind(&problem, inputs, data, grads).unwrap();
        assert_eq!(backend.moe_gradients(&mut call).unwrap().kernel, "moe_gradients");
        let problem = GroupedSpec::new(DType::F32, down, down, Grouping::Batch).parse().unwrap();
        let inputs = GroupedInputs { a: data, b: data, offsets: None };
        let mut call = GroupedCall::bind(&problem, inputs, DataMut::F32(&mut out)).unwrap();
        assert_eq!(backend.grouped(&mut call).unwrap().kernel, "grouped");
    }
}
