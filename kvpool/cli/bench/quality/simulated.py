"""Caches of any policy on dense arrays of MLX, for any model of mlx-lm that attends by mlx-lm's own function.

Nothing is paged and nothing is packed: evicted tokens are cut out, K and V of few bits make a round trip through
`mx.quantize`. What a policy keeps, and so what a model says, is what it would be with the real thing.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterator
from typing import Any

import mlx.core as mx
import numpy as np

from kvpool.cli.bench.quality.policies import DECAY, SINK, Policy

BLOCK_SIZE = 16
SEED = 1


class SimulatedCache:
    """One layer's cache, with the methods of mlx-lm's own.

    Before a token is attended to, others leave until no more than `policy.max_kv` are there. Positions go on counting.

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
        keys, values = self._stored(keys, self.policy.k_bits), self._stored(values, self.policy.v_bits)
        fresh = mx.zeros(keys.shape[:3], mx.float32)
        if self.keys is None:
            self.keys, self.values, self.scores = keys, values, fresh
        else:
            self.keys = mx.concatenate([self.keys, keys], axis=2)
            self.values = mx.concatenate([self.values, values], axis=2)
            self.scores = mx.concatenate([self.scores, fresh], axis=2)
        self.offset += new
        if self.policy.kind != "unlimited" and self.keys.shape[2] > self.policy.max_kv:
            if new > 1:
                raise ValueError(f"[quality] {new} tokens at once into a full cache of {self.policy.max_kv}")
            self._keep(self._chosen(self.keys.shape[2]))
        return self.keys, self.values

    def observe(self, queries: mx.array, scale: float) -> None:
        """Learn from the queries ``[rows, heads, new, head_dim]`` what every kept token is worth."""
        if self.policy.kind not in ("h2o", "block"):
            return
        rows, _, new, dim = queries.shape
        kv_heads, kept = self.keys.shape[1:3]
        grouped = (queries * scale).reshape(rows, kv_heads, -1, dim)
        raw = (grouped @ self.keys.swapaxes(-1, -2)).astype(mx.float32).reshape(rows, kv_heads, -1, new, kept)
        places = mx.arange(kept)[None] <= mx.arange(kept - new, kept)[:, None]
        if self.policy.scores == "raw":
            seen = mx.where(places, mx.abs(raw.mean(axis=2)), 0)
        else:
            seen = mx.softmax(mx.where(places, raw, -mx.inf), axis=-1).mean(axis=2)
        for step in range(new):
            self.scores = self.scores + (1 - DECAY) * (seen[:, :, step] - self.scores)

    def _stored(self, x: mx.array, bits: int | None) -> mx.array:
        if bits is None:
            return x
        packed = mx.quantize(x, self.policy.group_size, bits)
        return mx.dequantize(*packed, self.policy.group_size, bits)

    def _chosen(self, kept: int) -> mx.array:
        """Return the places that stay, ascending: ``[rows or 1, kv_heads or 1, fewer]``."""
        policy = self.policy
        if policy.kind == "block":
            return self._without_a_block(kept)
        end = kept - (policy.max_kv - SINK - policy.heavy)
        places = [mx.arange(SINK), mx.arange(end, kept)]
        if policy.kind == "rotating":
            return mx.concatenate(places)[None, None]
        rows, heads = self.keys.shape[:2]
        if policy.kind == "h2o":
            worth = self.scores[:, :, SINK:end]
        else:
            worth = mx.array(self._rng.random((rows, heads, end - SINK), np.float32))
        best = mx.argpartition(-worth, policy.heavy - 1, axis=-1)[..., : policy.heavy]
        sink, newest = (mx.broadcast_to(part, (rows, heads, part.size)) for part in places)
        return mx.concatenate([sink, mx.sort(best, axis=-1) + SINK, newest], axis=-1)

    def _without_a_block(self, kept: int) -> mx.array:
        """All but the block with the least score, the same for all heads; the first and the newest are not asked."""
        blocks = (kept - 1) // BLOCK_SIZE - 1
        inner = self.scores[:, :, BLOCK_SIZE : BLOCK_SIZE * (1 + blocks)]
        worth = inner.reshape(len(inner), -1, blocks, BLOCK_SIZE).sum(axis=(1, 3))
        gone = BLOCK_SIZE * (1 + mx.argmin(worth, axis=-1))[:, None]
        places = mx.arange(kept - BLOCK_SIZE)[None]
        return mx.where(places < gone, places, places + BLOCK_SIZE)[:, None]

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
