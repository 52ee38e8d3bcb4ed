"""Bytes that mlx-lm's caches of a model hold of tokens, and those that `kvpool.sizing` computes, by layer group."""

from collections import Counter

import mlx.core as mx
from mlx_lm.models.cache import ArraysCache, ChunkedKVCache, KVCache, RotatingKVCache, make_prompt_cache

KINDS = {KVCache: "full", RotatingKVCache: "window", ChunkedKVCache: "chunk"}


def flat(caches):
    for cache in caches:
        if hasattr(cache, "caches"):
            yield from flat(cache.caches)
        else:
            yield cache


def fed(model, num_tokens, compute=False):
    """The caches of a sequence of so many tokens: a prompt and a step. Sizes are known before values are computed."""
    caches = make_prompt_cache(model)
    for first, end in ((0, num_tokens - 1), (num_tokens - 1, num_tokens)):
        logits = model(mx.array([[(7 * i) % 90 + 1 for i in range(first, end)]]), cache=caches)
        if compute:
            mx.eval(logits)
    return [cache for cache in flat(caches) if not is_unused(cache)]


def is_unused(cache):
    return type(cache) in KINDS and cache.keys is None


def key_of(cache):
    """What tells the group of a cache."""
    if isinstance(cache, ArraysCache):
        return ("state", tuple((array.shape[1:], str(array.dtype)[9:]) for array in cache.cache if array is not None))
    keys, values = cache.keys, cache.values
    size = getattr(cache, "max_size", getattr(cache, "chunk_size", None))
    return (KINDS[type(cache)], size, keys.shape[1], keys.shape[3], values.shape[3], str(keys.dtype)[9:])


def key_of_group(group):
    if group.kind == "state":
        return ("state", tuple((array.shape, array.dtype) for array in group.arrays))
    return (group.kind, group.size, group.num_kv_heads, group.head_dim, group.v_head_dim, group.dtype)


def measured(model, num_tokens, compute=False):
    """Bytes of the tokens that mlx-lm holds, by group."""
    held = Counter()
    for cache in fed(model, num_tokens, compute):
        key = key_of(cache)
        if key[0] == "state":
            held[key] += cache.nbytes
            continue
        size = key[1] or num_tokens
        rows = min(cache.offset, size)
        held[key] += cache.nbytes // cache.keys.shape[2] * rows
    return held


def computed(groups, num_tokens):
    """The same from a config."""
    held = Counter()
    for group in groups:
        held[key_of_group(group)] += min(num_tokens, group.size or num_tokens) * group.token_nbytes + group.state_nbytes
    return held
