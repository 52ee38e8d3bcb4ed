"""A cache of mlx-lm that evicts as `kvpool.eviction.SlidingWindow` does, by plain slices."""

import mlx.core as mx
import numpy as np
from mlx_lm.models.cache import KVCache


class SlidingCache(KVCache):
    """A stock cache that keeps the sinks and the newest tokens, as `SlidingWindow` says, by plain slices."""

    def __init__(self, policy):
        super().__init__()
        self.policy = policy

    def update_and_fetch(self, keys, values):
        held = 0 if self.keys is None else self.keys.shape[2]
        new = keys.shape[2]
        if held >= self.policy.max_kv:
            recent = int(self.policy.lens_after(np.array([held]), 4)[0]) - self.policy.sink
            parts = [(x[:, :, : self.policy.sink], x[:, :, held - recent :]) for x in (self.keys, self.values)]
            self.keys, self.values = (mx.concatenate(pair, axis=2) for pair in parts)
        if self.keys is not None:
            keys = mx.concatenate([self.keys, keys], axis=2)
            values = mx.concatenate([self.values, values], axis=2)
        self.offset += new
        self.keys, self.values = keys, values
        return keys, values

    def make_mask(self, N, return_array=False, window_size=None):
        if N == 1:
            return None
        held = 0 if self.keys is None else self.keys.shape[2]
        held = int(self.policy.lens_after(np.array([held]), 4)[0])
        return mx.arange(held + N)[None] <= mx.arange(held, held + N)[:, None]
