"""``moe``: a mixture of experts, every token through a few of many small networks."""

from __future__ import annotations

from typing import Any

from . import _frameworks
from ._words import retell


def moe(
    x: Any,
    gate_up: Any,
    down: Any,
    ids: Any | None = None,
    weights: Any | None = None,
    *,
    logits: Any | None = None,
    top_k: int | None = None,
    scoring: str = "softmax",
    renormalise: bool = False,
    routing_bias: Any | None = None,
    groups: tuple[int, int] | None = None,
    scale: float = 1.0,
    activation: str = "swiglu",
    alpha: float = 1.702,
    limit: float = 7.0,
    interleaved: bool = False,
    transposed: bool = False,
    biases: tuple[Any, Any] | None = None,
    shared_expert: tuple[Any, Any] | None = None,
    experts: tuple[int, int] | None = None,
    batch_invariant: bool = False,
    out: Any | None = None,
) -> Any:
    """Sends each token through its experts and returns the weighted sum of their outputs.

    Weights are used as checkpoints store them; those of experts without tokens are never read. On a GPU nothing is
    read back, so a captured graph works for whatever routing it finds.

    Args:
        x: tokens x hidden: float16, bfloat16 or float32.
        gate_up: experts x 2*intermediate x hidden.
        down: experts x hidden x intermediate.
        ids: the experts of each token, tokens x top-k, int32 or int64. An id that is not an expert's adds nothing.
        weights: the routing weight of each of them, tokens x top-k.
        logits: tokens x experts, instead of ids and weights: each token goes to its `top_k` best experts, the lowest numbers
            first among equals.
        top_k: experts per token, with `logits`.
        scoring: how logits become scores, ``"softmax"`` or ``"sigmoid"``.
        renormalise: divide the weights of a token by their sum.
        routing_bias: added to each expert's sigmoid when choosing, not to its weight; float32.
        groups: (number of groups, groups to choose from): with ``"sigmoid"``, only experts of the best groups are chosen.
        scale: a factor on the weights of ``"sigmoid"``.
        activation: ``"swiglu"``, ``"geglu"`` (GELU by tanh), or ``"clamped"``, that of gpt-oss with `alpha` and `limit`.
        alpha: see `activation`.
        limit: see `activation`.
        interleaved: gates and ups alternate in `gate_up`; by default gates are the first half.
        transposed: gate_up is experts x hidden x 2*intermediate, and down experts x intermediate x hidden; those of
            `shared_expert` too.
        biases: biases of both products: experts x 2*intermediate, and experts x hidden.
        shared_expert: gate_up and down of an expert that every token passes through, with a weight of 1: matrices that lie
            as those of the other experts do, with `interleaved` and `transposed`, or 1 x such a matrix.
        experts: (first, of): the weights are those of the experts from `first` on, out of `of`; others add nothing.
        batch_invariant: a token's bits do not depend on the other tokens.
        out: where to write the result; a new tensor like x where None.

    >>> import numpy
    >>> x = numpy.ones((3, 8), "float32")
    >>> gate_up, down = numpy.ones((4, 32, 8), "float32"), numpy.ones((4, 8, 16), "float32")
    >>> moe(x, gate_up, down, numpy.array([[0, 1], [2, 3], [0, 3]]), numpy.full((3, 2), 0.5, "float32")).shape
    (3, 8)
    """
    try:
        if ids is not None:
            top_k = _last(ids, "ids")
        if top_k is None:
            raise ValueError("there is no routing; pass ids and weights, or logits and top_k")
        tensors = {"x": x, "gate_up": gate_up, "down": down, "out": out, "routing_bias": routing_bias}
        tensors |= {name: _flat(name, tensor) for name, tensor in (("ids", ids), ("weights", weights), ("logits", logits))}
        tensors |= {"biases": biases, "shared_expert": shared_expert}
        options = {
            "top_k": top_k,
            "scoring": scoring,
            "renormalise": renormalise,
            "scale": scale,
            "groups": groups,
            "activation": activation,
            "alpha": alpha,
            "limit": limit,
            "interleaved": interleaved,
            "transposed": transposed,
            "experts": experts,
            "batch_invariant": batch_invariant,
        }
        return _frameworks.of(x).moe(tensors, options)
    except Exception as error:
        retell(error, ids="ids", weights="weights", logits="logits", bias="routing_bias", shared="shared_expert", experts="gate_up and down")
        raise


def fused_experts(
    hidden_states: Any,
    w1: Any,
    w2: Any,
    topk_weights: Any,
    topk_ids: Any,
    inplace: bool = False,
    activation: Any = "silu",
    apply_router_weight_on_input: bool = False,
    global_num_experts: int = -1,
    expert_map: Any | None = None,
    quant_config: Any | None = None,
) -> Any:
    """`moe` with the arguments of vLLM's function of this name.

    `activation` is ``"silu"``, ``"gelu_tanh"`` or ``"swigluoai"``, as a string or as vLLM's enum. `expert_map` says which
    local expert each number means, -1 for none. Quantised weights, and routing weights on the input, are refused.
    """
    known = {
        "silu": {},
        "swiglu": {},
        "gelu_tanh": {"activation": "geglu"},
        "swigluoai": {"activation": "clamped", "interleaved": True},
    }
    kind = str(getattr(activation, "value", activation))
    if kind not in known:
        raise NotImplementedError(f"activation {kind!r} is not supported here; use one of {', '.join(known)}")
    quantised = quant_config is not None and getattr(quant_config, "quant_dtype", None) is not None
    for given, what in (
        (apply_router_weight_on_input, "apply_router_weight_on_input"),
        (quantised, "a quant_config with quantised weights"),
    ):
        if given:
            raise NotImplementedError(f"{what} is not supported; use vLLM's own kernel for this layer")
    biases = tuple(getattr(quant_config, name, None) for name in ("w1_bias", "w2_bias"))
    if expert_map is not None:
        # Numbers beyond the map are nobody's, as -1 is.
        topk_ids = _mapped(topk_ids, expert_map)
    elif global_num_experts not in (-1, w1.shape[0]):
        raise ValueError(f"{global_num_experts} experts but weights of {w1.shape[0]}; give expert_map, which says where they are")
    both = None if biases[0] is None or biases[1] is None else biases
    result = moe(hidden_states, w1, w2, topk_ids, topk_weights, biases=both, **known[kind])
    if not inplace:
        return result
    hidden_states[...] = result
    return hidden_states


def _mapped(ids: Any, expert_map: Any) -> Any:
    """The experts here that numbers mean; -1 for those that are elsewhere or nowhere."""
    count = expert_map.shape[0]
    inside = (ids >= 0) & (ids < count)
    within = ids * inside
    found = expert_map[within]
    return found * inside - (1 - inside * 1)


def _last(tensor: Any, name: str) -> int:
    shape = _frameworks.shape(name, tensor)
    if len(shape) != 2:
        raise ValueError(f"{name} has {len(shape)} dimensions but 2 are needed: tokens, experts of a token")
    return int(shape[1])


def _flat(name: str, tensor: Any | None) -> Any | None:
    if tensor is not None:
        _frameworks.shape(name, tensor)
    return None if tensor is None else tensor.reshape(-1)
