"""The compiled part: attention on memory that frameworks share by DLPack."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

__version__: str

class Options:
    """What a call asks for beside its tensors, checked as far as it can be without them."""

    def __init__(
        self,
        layout: str,
        *,
        left: int | None = None,
        right: int | None = None,
        top_left: bool = False,
        scale: float | None = None,
        softcap: float | None = None,
        accumulate: bool = False,
        shift: int = 0,
        batch_invariant: bool = False,
        dropout: float | None = None,
    ) -> None: ...
    def attributes(self) -> dict[str, int | float | str]: ...

class Values:
    """Lengths and sinks of one call: arrays where the tensors are; ranges of keys on the host."""

    lengths_q: Any | None
    lengths_kv: Any | None
    sinks: Any | None
    longest: tuple[int, int] | None
    ranges: tuple[list[int], list[int]] | None
    table: Any | None
    bias: Any | None
    factors: list[Any]
    blocks: tuple[int, int] | None
    turned: bool
    seed: Any | None

    def __init__(
        self,
        lengths_q: Any | None = None,
        lengths_kv: Any | None = None,
        sinks: Any | None = None,
        longest: tuple[int, int] | None = None,
        ranges: tuple[Sequence[int], Sequence[int]] | None = None,
        table: Any | None = None,
        bias: Any | None = None,
        factors: Sequence[Any] = (),
        blocks: Sequence[int] | None = None,
        turned: bool = False,
        seed: Any | None = None,
    ) -> None: ...

class Direct:
    """The short way of a framework with DLPack's C exchange API: one call that makes the output and launches."""

    def __init__(
        self,
        is_grad_enabled: Callable[[], bool],
        is_autocast_enabled: Callable[[], bool],
        recipe: Callable[[str, Any, Any, str], Any],
    ) -> None: ...
    def attention(
        self,
        q: Any,
        k: Any,
        v: Any,
        out: Any | None,
        options: Options,
        lengths_q: Any | None = None,
        lengths_kv: Any | None = None,
        sinks: Any | None = None,
        longest: tuple[int, int] | None = None,
        table: Any | None = None,
        factors: tuple[Any, Any] | None = None,
        /,
    ) -> Any | None: ...
    def recorded(
        self,
        q: Any,
        k: Any,
        v: Any,
        options: Options,
        lengths_q: Any | None = None,
        lengths_kv: Any | None = None,
        sinks: Any | None = None,
        longest: tuple[int, int] | None = None,
        /,
    ) -> tuple[Any, Any] | None: ...
    def gradients(
        self,
        q: Any,
        k: Any,
        v: Any,
        out: Any,
        sums: Any | None,
        lse: Any,
        d_out: Any,
        options: Options,
        lengths_q: Any | None = None,
        lengths_kv: Any | None = None,
        longest: tuple[int, int] | None = None,
        /,
    ) -> tuple[Any, Any, Any] | None: ...

class Launched:
    """A launch under way; holds the tensors that it reads."""

    def is_done(self) -> bool: ...
    def wait(self, stream: int | None = None) -> None: ...

def xla_handlers(minor: int) -> dict[tuple[str, str], Any]: ...
def xla_check(
    arrays: Sequence[tuple[str, str, Sequence[int]]],
    options: Options,
    longest: tuple[int, int] | None = None,
    ranges: tuple[Sequence[int], Sequence[int]] | None = None,
) -> None: ...
def simulate(request: str, arrays: Sequence[bytes]) -> tuple[str, list[bytes]]: ...
def kernels(ptx: str) -> str: ...
def forward(
    q: Any,
    k: Any,
    v: Any,
    out: Any,
    lse: Any | None,
    options: Options,
    values: Values | None = None,
    stream: int | None = None,
    record: bool = False,
    bits_are_bf16: Sequence[bool] = (False, False, False, False),
) -> Launched | None: ...
def merge(
    parts: Sequence[Any],
    lses: Sequence[Any],
    out: Any,
    lse: Any | None,
    layout: str,
    stream: int | None = None,
    record: bool = False,
    bits_are_bf16: Sequence[bool] = (False, False),
) -> Launched | None: ...
def quantise(
    tensors: Mapping[str, Any],
    options: Mapping[str, Any],
    stream: int | None = None,
    record: bool = False,
    bits_are_bf16: bool = False,
) -> Launched | None: ...
def append(
    tensors: Mapping[str, Any],
    options: Mapping[str, bool],
    stream: int | None = None,
    record: bool = False,
    bits_are_bf16: bool = False,
) -> Launched | None: ...
def moe(
    tensors: Mapping[str, Any],
    options: Mapping[str, Any],
    stream: int | None = None,
    record: bool = False,
    bits_are_bf16: bool = False,
) -> Launched | None: ...
def moe_gradients(tensors: Mapping[str, Any], options: Mapping[str, Any], grads: Mapping[str, Any]) -> None: ...
def grouped_mm(
    mat_a: Any,
    mat_b: Any,
    out: Any,
    offs: Any | None,
    stream: int | None = None,
    record: bool = False,
    bits_are_bf16: bool = False,
) -> Launched | None: ...
def dropout_mask(probability: float, seed: int, extents: Sequence[int]) -> bytearray: ...
def exchanges(tensor: Any) -> bool: ...
def own_stream(index: int) -> int: ...
def config() -> list[tuple[str, str]]: ...
def cli(arguments: Sequence[str], program: Sequence[str]) -> int: ...
def backward(
    q: Any,
    k: Any,
    v: Any,
    out: Any | None,
    rows: Any | None,
    lse: Any,
    d_out: Any,
    dq: Any,
    dk: Any,
    dv: Any,
    d_sinks: Any | None,
    options: Options,
    values: Values | None = None,
    bits_are_bf16: bool = False,
    stream: int | None = None,
    record: bool = False,
) -> Launched | None: ...
