"""Caches on dense arrays of MLX, for what kvpool's caches under mlx-lm do not do: quantize, or evict at random.

Nothing is paged and nothing is packed: evicted tokens are cut out, K and V of few bits make a round trip through
`mx.quantize`. What stays, and so what a model says, is what it would be in packed storage.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterator
from typing import Any

import mlx.core as mx
import numpy as np

from kvpool.cli.bench.quality.policies import DECAY, SINK, Policy

SEED = 1


class SimulatedCache:
    """One layer's cache, with the methods of mlx-lm's own.

    Before a token is stored where `policy.max_kv` are, some leave. Positions go on counting.

    Attributes
    ----------
    offset : int
        Tokens read.
    keys, values : array ``[rows, kv_heads, kept, head_dim]``, or None
        What is kept, in the order of positions.
    scores : float32 ``[rows, kv_heads, kept]``
        What makes them worth keeping.
    """

    def __init__(self, policy: Policy, layer: int) -> None:
        self.policy, self.offset = policy, 0
        self.keys: Any = None
        self.values: Any = None
        self.scores: Any = None
        self._rng = np.random.default_rng([SEED, layer])

    @property
    def nbytes(self) -> float:
        """Bytes that K and V take where they are packed."""
        if self.keys is None:
            return 0.0
        rows, heads, kept, _ = self.keys.shape
        return rows * kept * self.policy.bytes_per_token(heads, (self.keys.shape[-1], self.values.shape[-1]), 1)

    def make_mask(self, length: int, *args: Any, **options: Any) -> Any:
        """Return the mask of the next tokens: many are read only while everything is kept."""
        return "causal" if length > 1 else None

    def update_and_fetch(self, keys: mx.array, values: mx.array) -> tuple[mx.array, mx.array]:
        """Store K and V ``[rows, kv_heads, new, head_dim]``, evict, and return what is kept."""
        new = keys.shape[2]
        if self.policy.kind != "unlimited" and self.keys is not None and self.keys.shape[2] >= self.policy.max_kv:
            self._keep(self._chosen(self.keys.shape[2]))
        keys, values = self._stored(keys, self.policy.k_bits), self._stored(values, self.policy.v_bits)
        fresh = mx.zeros(keys.shape[:3], mx.float32)
        if self.keys is None:
            self.keys, self.values, self.scores = keys, values, fresh
        else:
            self.keys = mx.concatenate([self.keys, keys], axis=2)
            self.values = mx.concatenate([self.values, values], axis=2)
            self.scores = mx.concatenate([self.scores, fresh], axis=2)
        self.offset += new
        return self.keys, self.values

    def observe(self, queries: mx.array, scale: float) -> None:
        """Learn from the newest of the queries ``[rows, heads, new, head_dim]`` what every kept token is worth."""
        if self.policy.kind != "h2o":
            return
        rows, _, new, dim = queries.shape
        kv_heads, kept = self.keys.shape[1:3]
        grouped = (queries[:, :, -1] * scale).reshape(rows, kv_heads, -1, dim)
        raw = (grouped @ self.keys.swapaxes(-1, -2)).astype(mx.float32)
        seen = mx.abs(raw.mean(axis=2)) if self.policy.scores == "raw" else mx.softmax(raw, axis=-1).mean(axis=2)
        known = kept - new
        moved = self.scores[..., :known] + (1 - DECAY) * (seen - self.scores)[..., :known]
        self.scores = mx.concatenate([moved, seen[..., known:]], axis=-1)

    def _stored(self, x: mx.array, bits: int | None) -> mx.array:
        if bits is None:
            return x
        packed = mx.quantize(x, self.policy.group_size, bits)
        return mx.dequantize(*packed, self.policy.group_size, bits)

    def _chosen(self, kept: int) -> mx.array:
        """Return the places that stay, ascending: ``[rows, kv_heads, max_kv - slack]``."""
        policy, (rows, heads) = self.policy, self.keys.shape[:2]
        count, end = policy.heavy - policy.slack, kept - (policy.max_kv - SINK - policy.heavy)
        if policy.kind == "h2o":
            worth = self.scores[:, :, SINK:end]
        else:
            worth = mx.array(self._rng.random((rows, heads, end - SINK), np.float32))
        best = mx.argpartition(-worth, count - 1, axis=-1)[..., :count]
        sink, newest = (mx.broadcast_to(x, (rows, heads, x.size)) for x in (mx.arange(SINK), mx.arange(end, kept)))
        return mx.concatenate([sink, mx.sort(best, axis=-1) + SINK, newest], axis=-1)

    def _keep(self, places: mx.array) -> None:
        self.scores = mx.take_along_axis(
            self.scores, mx.broadcast_to(places, (*self.keys.shape[:2], places.shape[2])), 2
        )
        self.keys, self.values = (mx.take_along_axis(x, places[..., None], axis=2) for x in (self.keys, self.values))


Watch = Callable[[mx.array, mx.array, Any, float], None]


@contextlib.contextmanager
def watched(model: Any, watch: Watch) -> Iterator[None]:
    """Have every attention of a model tell its queries, keys, cache and scale when it is done."""
    module: Any = sys.modules[type(model).__module__]
    original = module.scaled_dot_product_attention

    def attend(
        queries: mx.array, keys: mx.array, values: mx.array, cache: Any, scale: float, *args: Any, **options: Any
    ) -> mx.array:
        out = original(queries, keys, values, cache, scale, *args, **options)
        watch(queries, keys, cache, scale)
        return out

    module.scaled_dot_product_attention = attend
    try:
        yield
    finally:
        module.scaled_dot_product_attention = original


def observing(model: Any) -> contextlib.AbstractContextManager[None]:
    """Have the simulated caches of a model learn from its attention."""

    def watch(queries: mx.array, keys: mx.array, cache: Any, scale: float) -> None:
        if isinstance(cache, SimulatedCache):
            cache.observe(queries, scale)

    return watched(model, watch)
