"""Attention with scores on dense MLX arrays, quantized or not, in lazy MLX operations on every device of MLX.

`kvpool_backends.cpu.dense` has the same two functions on numpy arrays, by the kernels.
"""

from __future__ import annotations

from collections.abc import Sequence

import mlx.core as mx
import numpy as np

from kvpool.protocol import SCORES, AttentionOptions
from kvpool_backends.mlx.attention import (
    attention,
    exported_scores,
    kind_of_scores,
    scores_of_products,
    seen_and_distance,
    softmax_with_sinks,
)

_PLAIN = AttentionOptions()


def attention_with_scores(
    q: mx.array,
    k: mx.array,
    v: mx.array,
    *,
    scale: float | None = None,
    scores: str = "raw",
    options: AttentionOptions | None = None,
) -> tuple[mx.array, mx.array]:
    """Return causal ``mx.fast.scaled_dot_product_attention``, and scores of the newest query of each row.

    Parameters
    ----------
    q : ``[B, Hq, n, D]``
        Queries of the n newest of C tokens.
    k, v : ``[B, Hk, C, D]``, ``[B, Hk, C, Dv]``
    scale : float, optional
        ``1 / sqrt(D)`` by default.
    scores : "raw" or "mass"
        See `kvpool.protocol.KVBackend.attend`.
    options : AttentionOptions, optional
        A mask has a row for each query of the batch: ``[B * n, C']`` or ``[B * n, 1 or Hq, C']``.

    Returns
    -------
    out : ``[B, Hq, n, Dv]``, dtype of q
    s : float32 ``[B, Hk, C]``

    Raises
    ------
    TypeError, ValueError
        ``[attention_with_scores] ...``; ``[attend] ...`` for options that do not fit.
    """
    call = "attention_with_scores"
    _check_kind(call, scores)
    if k.ndim != 4 or v.ndim != 4 or v.shape[:3] != k.shape[:3]:
        raise ValueError(f"[{call}] k must be [B, Hk, C, D], v [B, Hk, C, Dv]; their shapes are {k.shape}, {v.shape}")
    options, mask = _checked(call, q, k.shape[0], k.shape[1], k.shape[2], k.shape[3], options)
    scale = k.shape[3] ** -0.5 if scale is None else scale
    position = _positions(q, k.shape[2])
    out = attention(q, k.astype(q.dtype), v.astype(q.dtype), scale, position, options, mask)
    newest = None if mask is None else mask[:, -1:]
    return out, exported_scores(q[:, :, -1:], k, scale, position[:, -1:], options, newest, scores)


def quantized_attention_with_scores(
    q: mx.array,
    k: Sequence[mx.array],
    v: Sequence[mx.array],
    *,
    bits: int | tuple[int, int] = 8,
    group_size: int = 64,
    scale: float | None = None,
    scores: str = "raw",
    options: AttentionOptions | None = None,
) -> tuple[mx.array, mx.array]:
    """Do `attention_with_scores` over K and V from ``mx.quantize``, without a dense copy of them.

    Parameters
    ----------
    q, scale, scores, options
        As there.
    k, v : (words, scales, biases)
        Of ``mx.quantize(x, group_size, bits)``.
    bits : int, or a pair of them for K and V
    group_size : int

    Returns
    -------
    out, s
        As there.
    """
    call = "quantized_attention_with_scores"
    _check_kind(call, scores)
    k_bits, v_bits = bits if isinstance(bits, tuple) else (bits, bits)
    for name, planes in (("k", k), ("v", v)):
        if not isinstance(planes, (tuple, list)) or len(planes) != 3 or any(x.ndim != 4 for x in planes):
            raise ValueError(f"[{call}] {name} must be (words, scales, biases) of four dimensions each")
    rows, heads, context, groups = k[1].shape
    options, mask = _checked(call, q, rows, heads, context, groups * group_size, options)
    scale = (groups * group_size) ** -0.5 if scale is None else scale
    position = _positions(q, context)
    seen, distance = seen_and_distance(context, position, options)
    by_head = q.reshape(rows, heads, -1, *q.shape[2:]) * mx.array(scale, q.dtype)
    products = _multiplied(by_head, k, True, group_size, k_bits)
    weighed = scores_of_products(products.flatten(1, 2).astype(mx.float32), distance, seen, options, mask)
    weights = softmax_with_sinks(weighed, options.sinks).reshape(products.shape).astype(q.dtype)
    out = _multiplied(weights, v, False, group_size, v_bits)
    return out.flatten(1, 2), kind_of_scores(weighed[:, :, -1:], heads, options.sinks, scores)


def _multiplied(x: mx.array, planes: Sequence[mx.array], transpose: bool, group_size: int, bits: int) -> mx.array:
    """Multiply ``[B, Hk, G, n, i]`` by the stored values of each KV head, dequantized on the fly."""
    words, scales, biases = (plane[:, :, None] for plane in planes)
    return mx.quantized_matmul(x, words, scales, biases, transpose=transpose, group_size=group_size, bits=bits)


def _check_kind(call: str, scores: str) -> None:
    if scores not in SCORES:
        raise ValueError(f"[{call}] scores is {scores!r}, the kinds are {list(SCORES)}")


def _checked(
    call: str, q: mx.array, rows: int, heads: int, context: int, dim: int, options: AttentionOptions | None
) -> tuple[AttentionOptions, np.ndarray | None]:
    """Return the options, and their mask ``[B, n, 1 or Hq, C]``."""
    if q.ndim != 4 or q.shape[0] != rows or q.shape[3] != dim or not q.shape[1] or q.shape[1] % heads:
        raise ValueError(f"[{call}] q must have shape [{rows}, a multiple of {heads}, n, {dim}], got {q.shape}")
    num_queries = q.shape[2]
    if not 1 <= num_queries <= context:
        raise ValueError(f"[{call}] q has {num_queries} queries, the range is 1 .. {context}, the tokens of k")
    options = _PLAIN if options is None else options
    options.check(rows * num_queries, q.shape[1], context)
    mask = options.mask
    if mask is not None:
        mask = mask.reshape(rows, num_queries, -1, mask.shape[-1])[..., :context]
    return options, mask


def _positions(q: mx.array, context: int) -> np.ndarray:
    """Return the positions of the queries in their rows, ``[B, n]``."""
    return np.broadcast_to(np.arange(context - q.shape[2], context), (q.shape[0], q.shape[2]))
