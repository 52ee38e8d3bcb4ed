"""A cache of mlx-lm that keeps every token, and whose mask shows what `kvpool.eviction.SlidingWindow` says."""

import mlx.core as mx
import numpy as np
from mlx_lm.models.cache import CacheList, KVCache

from kvpool.adapters.mlx_lm.hooks import Hook


class SlidingCache(KVCache):
    """A query at position p sees the first `sink` tokens and the last ``max_kv - sink`` up to p."""

    def __init__(self, policy):
        super().__init__()
        self.sink, self.window = policy.sink, policy.max_kv - policy.sink

    def make_mask(self, N, return_array=False, window_size=None):
        query, key = np.arange(self.offset, self.offset + N)[:, None], np.arange(self.offset + N)
        return mx.array((key <= query) & ((key < self.sink) | (key > query - self.window)))[None, None]


def sliding(model, policy):
    """Return caches of mlx-lm, also inside of `install`, the layers that read every token under a window."""
    return [_slid(one, policy) for one in Hook.stock_caches(model)]


def _slid(cache, policy):
    if isinstance(cache, CacheList):
        return CacheList(*(_slid(one, policy) for one in cache.caches))
    return SlidingCache(policy) if type(cache) is KVCache else cache
