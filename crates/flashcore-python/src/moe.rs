//! Mixtures of experts: tensors by DLPack, computed on the CPU or on the caller's stream.

use flashcore::{
    Activation, GateUp, Groups, Operand, Routing, Score, Shard, Shared, Sigmoid, cuda::MoeTensors,
};
use flashcore_core::{DType, MoeProblem, MoeSpec, ProblemError};
use pyo3::{
    exceptions::{PyNotImplementedError, PyValueError},
    prelude::*,
};

use crate::{
    array::{Array, Numbers, Order, Place},
    call::stream_of,
    device,
    error::CallError,
    host,
    import::Request,
    kept::Kept,
    launched::Launched,
};

/// What a caller chose, item by item of a mapping.
#[derive(FromPyObject)]
#[pyo3(from_item_all)]
pub(crate) struct MoeOptions {
    top_k: usize,
    scoring: String,
    renormalise: bool,
    scale: f32,
    groups: Option<(usize, usize)>,
    activation: String,
    alpha: f32,
    limit: f32,
    interleaved: bool,
    transposed: bool,
    /// The first expert here, and how many the layer has.
    experts: Option<(usize, usize)>,
    batch_invariant: bool,
}

/// Tensors, item by item of a mapping; ids, weights and logits have one dimension.
#[derive(FromPyObject)]
#[pyo3(from_item_all)]
pub(crate) struct Objects<'py> {
    x: Bound<'py, PyAny>,
    gate_up: Bound<'py, PyAny>,
    down: Bound<'py, PyAny>,
    out: Bound<'py, PyAny>,
    ids: Option<Bound<'py, PyAny>>,
    weights: Option<Bound<'py, PyAny>>,
    logits: Option<Bound<'py, PyAny>>,
    routing_bias: Option<Bound<'py, PyAny>>,
    biases: Option<[Bound<'py, PyAny>; 2]>,
    shared_expert: Option<[Bound<'py, PyAny>; 2]>,
}

/// Computes a mixture of experts into `tensors["out"]`.
///
/// Streams and `record` are those of `forward`; `bits_are_bf16` says whether 16-bit integers are bfloat16.
#[pyfunction]
#[pyo3(signature = (tensors, options, stream=None, record=false, bits_are_bf16=false))]
pub(crate) fn moe(
    py: Python<'_>,
    tensors: Objects<'_>,
    options: MoeOptions,
    stream: Option<usize>,
    record: bool,
    bits_are_bf16: bool,
) -> PyResult<Option<Launched>> {
    let request = Request { stream, order: Order::Bhsd, bits_are_bf16 };
    let mut kept = Kept::default();
    let call = Call::read(request, &mut kept, &tensors)?;
    let place = call.place()?;
    let spec = call.spec(&options)?;
    let stream = stream_of(py, place, stream, kept.exchange)?;
    py.detach(|| call.compute(&parse(spec, options.transposed)?, place, stream))?;
    match place {
        Place::Cuda(index) if record => {
            // SAFETY: the framework's stream, or ours: alive.
            Ok(Some(unsafe { Launched::record(index, stream, kept.into_owned())? }))
        }
        _ => Ok(None),
    }
}

/// Gradients, item by item of a mapping.
#[derive(FromPyObject)]
#[pyo3(from_item_all)]
pub(crate) struct GradientObjects<'py> {
    x: Bound<'py, PyAny>,
    gate_up: Bound<'py, PyAny>,
    down: Bound<'py, PyAny>,
    weights: Bound<'py, PyAny>,
    biases: Option<[Bound<'py, PyAny>; 2]>,
    shared_expert: Option<[Bound<'py, PyAny>; 2]>,
}

/// Computes the gradients of a mixture of experts into `grads`, each like its tensor but without gaps, that of the weights
/// in float32; `tensors["out"]` is the gradient of the result. On the CPU alone.
#[pyfunction]
pub(crate) fn moe_gradients(
    py: Python<'_>,
    tensors: Objects<'_>,
    options: MoeOptions,
    grads: GradientObjects<'_>,
) -> PyResult<()> {
    let request = Request { stream: None, order: Order::Bhsd, bits_are_bf16: false };
    let mut kept = Kept::default();
    let call = Call::read(request, &mut kept, &tensors)?;
    if let Place::Cuda(_) = call.place()? {
        return Err(PyNotImplementedError::new_err(
            "gradients of moe are computed on the CPU only; on a GPU call it under torch.no_grad()",
        ));
    }
    let problem = parse(call.spec(&options)?, options.transposed)?;
    let to = call.gradients(&options, &problem, (request, &mut kept), &grads)?;
    // SAFETY: views that their producers handed out and `check` and `gradients` compared; Python's caller holds them.
    py.detach(|| unsafe { host::moe_gradients(&problem, &call.tensors(), &call.lengths(), &to) })?;
    Ok(())
}

/// The problem, or what is wrong in the caller's words.
fn parse(spec: MoeSpec, transposed: bool) -> Result<MoeProblem, CallError> {
    spec.parse().map_err(|error| match error {
        ProblemError::Moe(error) if transposed => CallError::Transposed(error),
        error => error.into(),
    })
}

/// The tensors of one call, as plain data.
struct Call {
    x: Array,
    gate_up: Array,
    down: Array,
    out: Array,
    ids: Option<Numbers>,
    weights: Option<Array>,
    logits: Option<Array>,
    routing_bias: Option<Array>,
    biases: Option<[Array; 2]>,
    shared: Option<[Array; 2]>,
}

impl Call {
    fn read(request: Request, kept: &mut Kept, tensors: &Objects<'_>) -> Result<Self, CallError> {
        let x = kept.keep(request.input(&tensors.x, Operand::X)?);
        let out = kept.keep(request.output(&tensors.out, Operand::Out)?);
        let ids = tensors.ids.as_ref().map(|ids| request.numbers(ids, Operand::Ids)).transpose()?;
        let ids = ids.map(|ids| kept.keep(ids));
        let mut one = |object: &Bound<'_, PyAny>, operand| {
            Ok::<_, CallError>(kept.keep(request.input(object, operand)?))
        };
        let (gate_up, down) = (one(&tensors.gate_up, Operand::GateUp)?, one(&tensors.down, Operand::Down)?);
        let mut maybe = |object: &Option<Bound<'_, PyAny>>, operand| {
            object.as_ref().map(|object| one(object, operand)).transpose()
        };
        let weights = maybe(&tensors.weights, Operand::RoutingWeights)?;
        let logits = maybe(&tensors.logits, Operand::Logits)?;
        let routing_bias = maybe(&tensors.routing_bias, Operand::RoutingBias)?;
        let mut pair = |objects: &Option<[Bound<'_, PyAny>; 2]>, [first, second]: [Operand; 2]| {
            let Some([a, b]) = objects else { return Ok(None) };
            Ok::<_, CallError>(Some([one(a, first)?, one(b, second)?]))
        };
        let biases = pair(&tensors.biases, [Operand::Biases; 2])?;
        let shared = pair(&tensors.shared_expert, [Operand::SharedGateUp, Operand::SharedDown])?;
        Ok(Self { x, gate_up, down, out, ids, weights, logits, routing_bias, biases, shared })
    }

    fn arrays(&self) -> impl Iterator<Item = &Array> {
        let pairs = self.biases.iter().chain(&self.shared).flatten();
        let single = self.weights.iter().chain(&self.logits).chain(&self.routing_bias);
        [&self.x, &self.gate_up, &self.down, &self.out].into_iter().chain(single).chain(pairs)
    }

    fn place(&self) -> Result<Place, CallError> {
        let first = self.x.place;
        let places = self.arrays().map(|array| (array.operand, array.place));
        let mut places = places.chain(self.ids.iter().map(|ids| (ids.operand, ids.place)));
        match places.find(|(_, place)| *place != first) {
            Some((operand, place)) => {
                Err(CallError::OtherPlace { operand, place, because: Operand::X, first })
            }
            None => Ok(first),
        }
    }

    fn spec(&self, options: &MoeOptions) -> PyResult<MoeSpec> {
        let (x, out) = (self.x.layout(Order::Bhsd)?, self.out.layout(Order::Bhsd)?);
        self.check()?;
        let experts = |array: &Array| array.experts(options.transposed);
        let (gate_up, down) = (experts(&self.gate_up)?, experts(&self.down)?);
        let shared = match &self.shared {
            Some([gate_up, down]) => Some(Shared { gate_up: experts(gate_up)?, down: experts(down)? }),
            None => None,
        };
        Ok(MoeSpec {
            order: if options.interleaved { GateUp::Interleaved } else { GateUp::Halves },
            activation: options.activation()?,
            biases: self.biases.is_some(),
            shard: options.experts.map(|(first, of)| Shard { first, of }),
            shared,
            out: Some(out),
            batch_invariant: options.batch_invariant,
            ..MoeSpec::new(self.x.dtype, x, gate_up, down, self.routing(options)?)
        })
    }

    fn routing(&self, options: &MoeOptions) -> PyResult<Routing> {
        let top_k = options.top_k;
        match (&self.ids, &self.weights, &self.logits) {
            (Some(ids), Some(weights), None) => {
                Ok(Routing::Given { ids: ids.index, weights: weights.dtype, top_k })
            }
            (None, None, Some(logits)) => {
                let score = options.score(self.routing_bias.is_some())?;
                Ok(Routing::Computed { logits: logits.dtype, top_k, score })
            }
            _ => Err(PyValueError::new_err("give either ids and weights, or logits")),
        }
    }

    /// Demands elements of one type, at addresses where they may lie, and an output that is nobody else's.
    fn check(&self) -> Result<(), CallError> {
        self.arrays().try_for_each(Array::check_alignment)?;
        let pairs = self.biases.iter().chain(&self.shared).flatten();
        for array in [&self.gate_up, &self.down, &self.out].into_iter().chain(pairs) {
            if array.dtype != self.x.dtype {
                return Err(array.other_dtype(&self.x));
            }
        }
        let flat = self.weights.iter().chain(&self.logits).chain(&self.routing_bias);
        let dense = |array: &&Array| array.is_dense();
        let pairs = self.biases.iter().flatten();
        if let Some(array) = flat.chain(pairs).find(|array| !dense(array)) {
            return Err(CallError::NotAList { operand: array.operand });
        }
        if let Some(bias) = self.routing_bias.filter(|bias| bias.dtype != DType::F32) {
            let (operand, got, expected) = (bias.operand, bias.dtype, DType::F32);
            return Err(ProblemError::OtherDType { operand, got, expected }.into());
        }
        let out = self.out.range();
        let inside = |array: &&Array| {
            let range = array.range();
            !range.is_empty() && range.start < out.end && out.start < range.end
        };
        let inputs = self.arrays().filter(|array| array.operand != Operand::Out);
        match inputs.into_iter().find(inside) {
            Some(array) => Err(CallError::Shared { operand: array.operand }),
            None => Ok(()),
        }
    }

    fn compute(&self, problem: &MoeProblem, place: Place, stream: usize) -> Result<(), CallError> {
        let tensors = self.tensors();
        match place {
            Place::Host => {
                // SAFETY: views that their producers handed out and `check` compared; Python's caller holds them.
                unsafe { host::moe(problem, &tensors, &self.lengths()) }
            }
            Place::Cuda(index) => {
                let wide = [tensors.x, tensors.gate_up, tensors.down, tensors.out];
                let alignment = device::alignment(wide.into_iter().chain(tensors.shared));
                self.check_lengths(problem)?;
                let ready = device::open(index)?.prepare_moe_aligned(problem, alignment)?;
                // SAFETY: as above; frameworks free memory in the order of the stream, and others hold `Launched`.
                unsafe { device::launch(&ready, &tensors, stream.into()) }
            }
        }
    }

    /// Where gradients go, each compared with its tensor.
    fn gradients(
        &self,
        options: &MoeOptions,
        problem: &MoeProblem,
        (request, kept): (Request, &mut Kept),
        objects: &GradientObjects<'_>,
    ) -> Result<host::MoeGradientAddresses, CallError> {
        let mut one = |object: &Bound<'_, PyAny>, like: &Array| {
            let array = kept.keep(request.output(object, like.operand)?);
            array.check_alignment()?;
            if array.dtype != like.dtype {
                return Err(array.other_dtype(like));
            }
            let alike = match like.operand {
                Operand::X | Operand::Biases => array.is_dense() && array.count() == like.count(),
                _ => array.lies_as(like, options.transposed)?,
            };
            if alike && array.place == Place::Host { Ok(array.address) } else { Err(CallError::OtherPart) }
        };
        let mut both =
            |objects: &Option<[Bound<'_, PyAny>; 2]>, like: &Option<[Array; 2]>| match (objects, like) {
                (Some([a, b]), Some([first, second])) => {
                    Ok::<_, CallError>(Some([one(a, first)?, one(b, second)?]))
                }
                _ => Ok(None),
            };
        let (biases, shared) =
            (both(&objects.biases, &self.biases)?, both(&objects.shared_expert, &self.shared)?);
        let x = one(&objects.x, &self.x)?;
        let (gate_up, down) = (one(&objects.gate_up, &self.gate_up)?, one(&objects.down, &self.down)?);
        let weights = kept.keep(request.output(&objects.weights, Operand::RoutingWeights)?);
        weights.check_dense_f32(&[problem.tokens(), problem.top_k()])?;
        Ok(host::MoeGradientAddresses { x, gate_up, down, weights: weights.address, biases, shared })
    }

    fn tensors(&self) -> MoeTensors {
        let at = |array: &Option<Array>| array.map_or(0, |array| array.address as u64);
        MoeTensors {
            x: self.x.address as u64,
            gate_up: self.gate_up.address as u64,
            down: self.down.address as u64,
            biases: self.biases.map_or([0; 2], |biases| biases.map(|bias| bias.address as u64)),
            shared: self.shared.map_or([0; 2], |shared| shared.map(|array| array.address as u64)),
            out: self.out.address as u64,
            ids: self.ids.map_or(0, |ids| ids.address as u64),
            weights: at(&self.weights),
            logits: at(&self.logits),
            routing_bias: at(&self.routing_bias),
        }
    }

    fn lengths(&self) -> host::MoeLengths {
        host::MoeLengths {
            ids: self.ids.map_or(0, |ids| ids.len),
            routing: self.weights.or(self.logits).map_or(0, |array| array.count()),
            routing_bias: self.routing_bias.map(|bias| bias.count()),
            biases: self.biases.map(|biases| biases.map(|bias| bias.count())),
        }
    }

    /// Demands as many numbers as kernels read.
    fn check_lengths(&self, problem: &MoeProblem) -> Result<(), CallError> {
        let (entries, all) = (problem.entries(), problem.shard().of);
        let what =
            "ids and weights are tokens x top-k, logits tokens x experts, biases as many as their rows";
        let count = |array: &Option<Array>| array.map(|array| array.count());
        let [first, second] = self.biases.map_or([None; 2], |biases| biases.map(|bias| Some(bias.count())));
        let rows = problem.experts() * problem.gate_up().rows();
        let wanted = [
            (Operand::Ids, self.ids.map(|ids| ids.len), entries),
            (Operand::RoutingWeights, count(&self.weights), entries),
            (Operand::Logits, count(&self.logits), problem.tokens() * all),
            (Operand::RoutingBias, count(&self.routing_bias), all),
            (Operand::Biases, first, rows),
            (Operand::Biases, second, problem.experts() * problem.hidden()),
        ];
        for (operand, given, needed) in wanted {
            if let Some(given) = given.filter(|&given| given != needed) {
                return Err(CallError::Count { operand, given, needed, what });
            }
        }
        Ok(())
    }
}

impl MoeOptions {
    fn activation(&self) -> PyResult<Activation> {
        match self.activation.as_str() {
            "swiglu" => Ok(Activation::SwiGlu),
            "geglu" => Ok(Activation::GeGlu),
            "clamped" => Ok(Activation::Clamped { alpha: self.alpha, limit: self.limit }),
            other => Err(PyValueError::new_err(format!(
                "activation is {other:?}; use \"swiglu\", \"geglu\" or \"clamped\""
            ))),
        }
    }

    fn score(&self, bias: bool) -> PyResult<Score> {
        let groups = self.groups.map(|(count, top)| Groups { count, top });
        match self.scoring.as_str() {
            "softmax" if groups.is_some() || self.scale != 1.0 => Err(PyValueError::new_err(
                "groups and scale go with scoring=\"sigmoid\"; omit them, or choose experts first and pass ids and weights",
            )),
            "softmax" if self.renormalise => Ok(Score::SoftmaxOfChosen),
            "softmax" => Ok(Score::Softmax),
            "sigmoid" => {
                let (renormalise, scale) = (self.renormalise, self.scale);
                Ok(Score::Sigmoid(Sigmoid { bias, groups, renormalise, scale }))
            }
            other => {
                Err(PyValueError::new_err(format!("scoring is {other:?}; use \"softmax\" or \"sigmoid\"")))
            }
        }
    }
}
