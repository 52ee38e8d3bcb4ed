"""The control: a cache that evicts at random. What beats it has chosen well; a gate that it passes is none."""

from __future__ import annotations

from typing import Any

import mlx.core as mx
import numpy as np

from benchmarks.quality.policies import SINK, Policy

SEED = 1


class RandomCache:
    """One layer's cache with the methods of mlx-lm's own: H2O's budgets, but the heavy hitters are drawn.

    Attributes
    ----------
    offset : int
        Tokens read. Positions go on counting when tokens leave.
    keys, values : array ``[rows, kv_heads, kept, head_dim]``, or None
        What is kept, in the order of positions.
    """

    def __init__(self, policy: Policy, layer: int) -> None:
        self.policy, self.offset = policy, 0
        self.keys: Any = None
        self.values: Any = None
        self._rng = np.random.default_rng([SEED, layer])

    @property
    def nbytes(self) -> int:
        """Bytes of what is kept."""
        return 0 if self.keys is None else int(self.keys.nbytes + self.values.nbytes)

    def make_mask(self, length: int, *args: Any, **options: Any) -> Any:
        """Return the mask of the next tokens: many are read only while everything is kept."""
        return "causal" if length > 1 else None

    def update_and_fetch(self, keys: mx.array, values: mx.array) -> tuple[mx.array, mx.array]:
        """Evict where there is no room, store K and V ``[rows, kv_heads, new, head_dim]``, return what is kept."""
        self.offset += keys.shape[2]
        if self.keys is not None:
            if self.keys.shape[2] >= self.policy.max_kv:
                self._evict()
            keys, values = (mx.concatenate([*pair], axis=2) for pair in ((self.keys, keys), (self.values, values)))
        self.keys, self.values = keys, values
        return keys, values

    def _evict(self) -> None:
        policy, (rows, heads, kept, _) = self.policy, self.keys.shape
        end = kept - (policy.max_kv - SINK - policy.heavy)
        drawn = self._rng.random((rows, heads, end - SINK)).argsort(axis=-1)[..., : policy.heavy - policy.slack]
        ends = (np.broadcast_to(part, (rows, heads, len(part))) for part in (np.arange(SINK), np.arange(end, kept)))
        sink, newest = ends
        places = mx.array(np.concatenate([sink, SINK + np.sort(drawn, axis=-1), newest], axis=-1))[..., None]
        self.keys, self.values = (mx.take_along_axis(x, places, axis=2) for x in (self.keys, self.values))
