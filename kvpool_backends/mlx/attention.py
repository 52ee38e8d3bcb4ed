"""Attention over gathered contexts in MLX operations: the plain route. It runs on every device of MLX."""

from __future__ import annotations

import mlx.core as mx
import numpy as np

from kvpool.protocol import AttentionOptions


def attention(
    q: mx.array,
    k: mx.array,
    v: mx.array,
    scale: float,
    position: np.ndarray,
    options: AttentionOptions,
    mask: np.ndarray | None,
) -> mx.array:
    """Attend with a padded batch, see `AttentionOptions`.

    Parameters
    ----------
    q : ``[B, Hq, n, D]``
    k, v : ``[B, Hk, C, D]``, ``[B, Hk, C, Dv]``, dtype of q
        Keys that no query of the row sees may hold anything, values past the row's context must be finite.
    position : int ``[B, n]``
        Of the queries in their rows.
    mask : bool or float32 ``[B, n, 1 or Hq, C]``, optional
        The options' mask for these queries.

    Returns
    -------
    ``[B, Hq, n, Dv]``, dtype of q
    """
    seen, distance = _seen_and_distance(k.shape[2], position, options)
    if options.window is not None:
        v = mx.where(seen.any(axis=2)[..., None], v, mx.array(0, v.dtype))  # a weight of 0 does not hide a NaN
    if options.soft_cap is options.alibi_slopes is mask is None:
        sinks = None if options.sinks is None else sinks_like(q, mx.array(options.sinks))
        return mx.fast.scaled_dot_product_attention(q, k, v, scale=scale, mask=seen, sinks=sinks)
    weights = _softmax_with_sinks(_scores(q, k, scale, distance, seen, options, mask), options.sinks)
    return _by_kv_head(weights, v.astype(mx.float32)).astype(q.dtype)


def sinks_like(q: mx.array, sinks: mx.array) -> mx.array:
    """Return float32 sinks in the dtype of the queries, for MLX's attention, which knows no infinite ones."""
    most = mx.finfo(q.dtype).max
    return mx.clip(sinks, -most, most).astype(q.dtype)


def exported_scores(
    q: mx.array,
    k: mx.array,
    scale: float,
    position: np.ndarray,
    options: AttentionOptions,
    mask: np.ndarray | None,
    kind: str,
) -> mx.array:
    """Return the scores of `KVBackend.attend` for one query per row, float32 ``[B, Hk, C]``. See `attention`."""
    seen, distance = _seen_and_distance(k.shape[2], position, options)
    scores = _scores(q, k, scale, distance, seen, options, mask)
    if kind == "mass":
        return mass_of_scores(scores, k.shape[1], options.sinks)
    return _of_kv_heads(mx.where(scores == -mx.inf, 0, scores), k.shape[1])


def _seen_and_distance(context: int, position: np.ndarray, options: AttentionOptions) -> tuple[mx.array, mx.array]:
    """Return which keys queries at `position` ``[B, n]`` see, and key minus query position, ``[B, 1, n, C]``."""
    distance = mx.arange(context) - mx.array(position.astype(np.int32))[:, None, :, None]
    seen = distance <= 0
    if options.window is not None:
        seen = seen & (distance > -min(options.window, 2**31 - 1))
    return seen, distance


def mass_of_scores(scores: mx.array, num_kv_heads: int, sinks: np.ndarray | None) -> mx.array:
    """Return scores ``[B, Hk, C]`` of the exponents ``[B, Hq, 1, C]``, by one more pass over them."""
    return _of_kv_heads(_softmax_with_sinks(scores, sinks), num_kv_heads)


def _of_kv_heads(x: mx.array, num_kv_heads: int) -> mx.array:
    """Return the means over the query heads of each KV head: ``[B, Hk, C]`` of ``[B, Hq, 1, C]``."""
    group = x.shape[1] // num_kv_heads
    return (x / group).reshape(x.shape[0], num_kv_heads, group, x.shape[3]).sum(axis=2)  # a sum may be no float32


def _scores(
    q: mx.array,
    k: mx.array,
    scale: float,
    distance: mx.array,
    seen: mx.array,
    options: AttentionOptions,
    mask: np.ndarray | None,
) -> mx.array:
    """Return the exponents of the softmax, float32 ``[B, Hq, n, C]``. -inf where the query does not see the key."""
    scores = _by_kv_head(q.astype(mx.float32) * scale, k.astype(mx.float32).swapaxes(2, 3))
    if options.soft_cap is not None:
        scores = mx.tanh(scores / options.soft_cap) * options.soft_cap
    if options.alibi_slopes is not None:
        scores = scores + mx.array(options.alibi_slopes)[:, None, None] * distance
    if mask is not None:
        given = mx.array(mask).swapaxes(1, 2)
        if mask.dtype == np.bool_:
            seen = seen & given
        else:
            scores = scores + given
    return mx.where(seen, scores, -mx.inf)


def _by_kv_head(x: mx.array, y: mx.array) -> mx.array:
    """``x[:, h] @ y[:, h // G]`` for ``[B, Hq, n, i]`` and ``[B, Hk, i, j]``."""
    groups = x.reshape(x.shape[0], y.shape[1], -1, *x.shape[2:])
    return mx.matmul(groups, y[:, :, None]).flatten(1, 2)


def _softmax_with_sinks(scores: mx.array, sinks: np.ndarray | None) -> mx.array:
    """Softmax of ``[B, Hq, n, C]`` with one more key of score ``sinks[h]``; 0 in rows of -inf."""
    peak = scores.max(axis=-1, keepdims=True)
    sink = mx.array(-mx.inf) if sinks is None else mx.array(sinks)[:, None, None]
    peak = mx.maximum(peak, sink)
    peak = mx.where(peak == -mx.inf, 0, peak)  # -inf - -inf would be NaN
    weights = mx.exp(scores - peak)
    total = weights.sum(axis=-1, keepdims=True) + mx.exp(sink - peak)
    return weights / mx.where(total > 0, total, 1)
