"""Finds the shapes of a model's KV cache by tracing the model."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import mlx.core as mx
from mlx_lm.models.cache import KVCache, RotatingKVCache

from kvpool.adapters.mlx_lm.cache_hook import Hook
from kvpool.config import KVSpec


def inspect_model(model: Any, block_size: int) -> tuple[KVSpec, tuple[int | None, ...]]:
    """Return the shapes of a model's KV cache, and the attention window of each layer or None.

    Found by tracing one token through the model with mlx-lm's own caches. Nothing is computed.
    """
    if not hasattr(model, "layers") and not hasattr(model, "make_cache"):
        raise TypeError(f"[install] model must be one that mlx_lm.load returns, got {type(model).__name__}")
    caches = Hook.stock_caches(model)
    for layer, cache in enumerate(caches):
        if type(cache) not in (KVCache, RotatingKVCache) or getattr(cache, "keep", 0) != 0:
            raise ValueError(f"[install] layer {layer} uses {type(cache).__name__}, not KVCache or RotatingKVCache")
    model(mx.zeros((1, 1), mx.int32), cache=caches)
    idle = [layer for layer, cache in enumerate(caches) if cache.keys is None]
    if idle:
        raise ValueError(f"[install] layers {idle} never use their cache")
    shapes = {
        (c.keys.shape[1], c.keys.shape[3], c.values.shape[3], x.dtype) for c in caches for x in (c.keys, c.values)
    }
    if len(shapes) != 1:
        raise ValueError(f"[install] layers differ in KV heads, head dims or dtype: {sorted(map(str, shapes))}")
    ((heads, k_dim, v_dim, dtype),) = shapes
    name = str(dtype).removeprefix("mlx.core.")
    windows = tuple(getattr(cache, "max_size", None) for cache in caches)
    return KVSpec(len(caches), heads, k_dim, name, block_size, v_dim), windows


def max_positions(model: Any) -> int | None:
    """Return the most tokens that a model supports, None if it does not say."""
    found = getattr(getattr(model, "args", None), "max_position_embeddings", None)
    return found if isinstance(found, int) else None


def with_bits(
    spec: KVSpec,
    call: str = "install",
    /,
    *,
    kv_bits: int | None = None,
    k_bits: int | None = None,
    v_bits: int | None = None,
    quant_group_size: int | None = None,
    **unknown: Any,
) -> KVSpec:
    """Return `spec` with quantized keys, values, or both (`kv_bits`). See docs/quantized.md.

    Raises
    ------
    TypeError, ValueError
        `kv_bits` beside one of the others; what `KVSpec` refuses; an unknown option.
    """
    if unknown:
        raise TypeError(f"[{call}] unexpected keyword argument {next(iter(unknown))!r}")
    if kv_bits is not None and (k_bits, v_bits) != (None, None):
        raise TypeError(f"[{call}] kv_bits is for both, give it or k_bits and v_bits")
    if kv_bits is not None:
        k_bits = v_bits = kv_bits
    group_size = spec.quant_group_size if quant_group_size is None else quant_group_size
    return replace(spec, k_bits=k_bits, v_bits=v_bits, quant_group_size=group_size)


def require_bits(spec: KVSpec, **bits: int | None) -> None:
    """Raise unless `spec` has these bits already. Without any bits, accept all."""
    if all(value is None for value in bits.values()):
        return
    asked = with_bits(spec, "make_cache", **bits)
    if asked != spec:
        shown = [f"k_bits {s.k_bits}, v_bits {s.v_bits}, quant_group_size {s.quant_group_size}" for s in (asked, spec)]
        raise ValueError(f"[make_cache] {shown[0]} are asked for, the blocks have {shown[1]}: give them to install")
