"""New keys and values on their way into a cache, for `flash_attn_with_kvcache`."""

from __future__ import annotations

from typing import Any, NamedTuple

from . import _frameworks
from ._append import append
from ._arguments import whole


class NewKeys(NamedTuple):
    """New keys and values, and how they are turned."""

    k: Any
    v: Any
    rotary: tuple[Any, Any] | None
    interleaved: bool
    together: bool
    factors: tuple[Any, ...] | None
    """What those of a cache of 8 bits are divided by."""
    positions: Any = None
    """Those of each sequence's first new key, where they are not behind its cache."""

    def widened(self) -> NewKeys:
        """The same, with keys and values of 8 bits in 16: they go into the cache as they are, not divided by anything."""
        if "float8" not in str(getattr(self.k, "dtype", "")) or self.v is None:
            return self
        wide = lambda x: _frameworks.of(x).bfloat16(x)
        return self._replace(k=wide(self.k), v=wide(self.v), rotary=self.rotary and tuple(map(wide, self.rotary)), factors=None)

    def write(self, q: Any, k_cache: Any, v_cache: Any, lengths: Any, table: Any) -> tuple[Any, Any]:
        """Writes them into the cache; returns the queries, turned where asked to, and the lengths that there are then."""
        if self.v is None or lengths is None:
            raise ValueError("new keys need v and cache_seqlens; pass both")
        shape = _frameworks.shape("k", self.k)
        if is_number(lengths):
            lengths = (whole("cache_seqlens", lengths),) * shape[0]
        if self.rotary is not None and self.positions is not None:
            at = _frameworks.of(q).indices("rotary_seqlens", self.positions, q)
            q, k = self.turned(q, at, self.together), self.turned(self.k, at, False)
            return self._replace(k=k, rotary=None).write(q, k_cache, v_cache, lengths, table)
        turned = append(
            self.k,
            self.v,
            k_cache,
            v_cache,
            lengths,
            page_table=table,
            rotary=self.rotary,
            interleaved=self.interleaved,
            q=None if self.rotary is None else q,
            together=self.together,
            factors=self.factors,
        )
        # A sequence that is none, below 0, stays none.
        if hasattr(lengths, "shape"):
            lengths = (lengths + shape[1]) * (lengths >= 0)
        else:
            lengths = tuple((length + shape[1]) * (length >= 0) for length in lengths)
        return q if turned is None else turned, lengths

    def write_packed(
        self, q: Any, k_cache: Any, v_cache: Any, lengths: Any, table: Any, query_offsets: Any, key_offsets: Any
    ) -> tuple[Any, Any]:
        """`write` of packed keys and queries: each token is appended by itself."""
        if self.v is None or lengths is None or key_offsets is None:
            raise ValueError("new keys of packed queries need v, cache_seqlens and cu_seqlens_k_new; pass all of them")
        framework = _frameworks.of(q)
        offsets = framework.indices("cu_seqlens_k_new", key_offsets, q)
        before = framework.indices("cache_seqlens", lengths, q) + offsets[:-1] * 0
        sequence, step = _tokens(framework, q, offsets, _frameworks.shape("k", self.k)[0])
        one = lambda tokens: tokens[:, None]
        rows, keys, positions, how = framework.table(table, q)[sequence], one(self.k), before, {}
        if self.rotary is not None and self.positions is not None:
            positions = framework.indices("rotary_seqlens", self.positions, q)
            keys = self.turned(keys, positions[sequence] + step, False)
        elif self.rotary is not None:
            how = dict(rotary=self.rotary, interleaved=self.interleaved)
        # A factor of each sequence is that of each of its tokens.
        factors = self.factors and [x[sequence] if getattr(x, "ndim", 0) == 2 and x.shape[0] > 1 else x for x in self.factors]
        append(keys, one(self.v), k_cache, v_cache, before[sequence] + step, page_table=rows, factors=factors, **how)
        after = (before + offsets[1:] - offsets[:-1]) * (before >= 0)
        if self.rotary is None:
            return q, after
        offsets = framework.indices("cu_seqlens_q", query_offsets, q)
        sequence, step = _tokens(framework, q, offsets, _frameworks.shape("q", q)[0])
        return self.turned(one(q), positions[sequence] + (step * 0 if self.together else step), False)[:, 0], after

    def turned(self, x: Any, positions: Any, together: bool) -> Any:
        """Queries or keys, batch x sequence x heads x dim, turned from these positions on."""
        # As queries beside keys that nobody needs: those of a page that is thrown away.
        spare, pages = x[:, :1, :1] * 0, [x[:1, :1, :1] * 0 for _ in range(2)]
        table = (positions * 0).reshape(-1, 1)
        how = dict(rotary=self.rotary, interleaved=self.interleaved, together=together)
        return append(spare, spare, *pages, positions, page_table=table, q=x, **how)


def _tokens(framework: Any, q: Any, offsets: Any, count: int) -> tuple[Any, Any]:
    """The sequence of each token, and its place there."""
    tokens = framework.numbers_to(count, q)
    sequence = (tokens.reshape(-1, 1) >= offsets[1:-1].reshape(1, -1)).sum(-1)
    return sequence, tokens - offsets[sequence]


def is_number(lengths: Any) -> bool:
    return getattr(lengths, "ndim", 0) == 0 and not isinstance(lengths, (list, tuple))
