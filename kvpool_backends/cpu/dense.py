"""Attention with scores on dense arrays, quantized or not: the kernels without a pool.

A dense cache ``[B, Hk, C, D]`` is a pool in layout "HND" of B blocks of C tokens, so nothing is copied.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from kvpool.protocol import AttentionOptions
from kvpool.spec import KVSpec
from kvpool_backends.cpu._kernels import BlockStore

_DTYPES = {"f4": "float32", "f2": "float16", "u2": "bfloat16"}  # bfloat16 as its bits


def attention_with_scores(
    q: np.ndarray,
    k: np.ndarray,
    v: np.ndarray,
    *,
    scale: float | None = None,
    scores: str = "raw",
    options: AttentionOptions | None = None,
) -> tuple[np.ndarray, np.ndarray]:
    """Causal attention over dense keys and values, and what the newest query of each row makes of every position.

    Parameters
    ----------
    q : ``[B, Hq, n, D]``
        Queries of the n newest of C tokens; float32, float16, or uint16 (bfloat16 as bits).
    k, v : ``[B, Hk, C, D]``, ``[B, Hk, C, Dv]``
        Of one of these dtypes. Copied where they are not contiguous or read-only.
    scale : float, optional
        ``1 / sqrt(D)`` by default.
    scores : "raw" or "mass"
        See `kvpool.protocol.KVBackend.attend`.
    options : AttentionOptions, optional
        A mask has a row for each query of the batch, row after row: ``[B * n, C']`` or ``[B * n, 1 or Hq, C']``.

    Returns
    -------
    out : float32 ``[B, Hq, n, Dv]``
    s : float32 ``[B, Hk, C]``

    Raises
    ------
    TypeError, ValueError
        ``[attention_with_scores] ...``, or ``[attend] ...`` from `BlockStore.attend`.

    Notes
    -----
    K and V are read once for all query heads of a KV head. After "H2O Attention Score KV Cache Eviction for On-Device
    LLM Inference" (AtomGradient, 2026), whose function of this name returns the scores of every query head.
    """
    call = "attention_with_scores"
    q, k, v = (_array(call, name, x) for name, x in (("q", q), ("k", k), ("v", v)))
    _check(call, "v", v, (*k.shape[:3], v.shape[3]), k.dtype)
    spec = KVSpec(1, k.shape[1], k.shape[3], _DTYPES[k.dtype.str[1:]], k.shape[2], v.shape[3], "HND")
    return _attend(call, q, [k, v], spec, scale, scores, options)


def quantized_attention_with_scores(
    q: np.ndarray,
    k: Sequence[np.ndarray],
    v: Sequence[np.ndarray],
    *,
    bits: int | tuple[int, int] = 8,
    group_size: int = 64,
    scale: float | None = None,
    scores: str = "raw",
    options: AttentionOptions | None = None,
) -> tuple[np.ndarray, np.ndarray]:
    """`attention_with_scores` over what ``mx.quantize`` makes of K and V: dequantized in registers, never stored.

    Parameters
    ----------
    q, scale, scores, options
        As there.
    k, v : (words, scales, biases)
        uint32 ``[B, Hk, C, D * bits / 32]``, and floats of one dtype ``[B, Hk, C, D / group_size]`` twice.
    bits : 4 or 8, or a pair of them for K and V
    group_size : 32, 64 or 128

    Returns
    -------
    out, s
        As there.
    """
    call = "quantized_attention_with_scores"
    k_bits, v_bits = bits if isinstance(bits, tuple) else (bits, bits)
    q = _array(call, "q", q)
    planes: list[np.ndarray] = []
    for name, given in (("k", k), ("v", v)):
        if not isinstance(given, (tuple, list)) or len(given) != 3:
            raise TypeError(f"[{call}] {name} must be (words, scales, biases), got {type(given).__name__}")
        planes += [_array(call, f"{name}[{i}]", x, words=i == 0) for i, x in enumerate(given)]
    rows, heads, context, _ = planes[0].shape
    head_dim, v_head_dim = (planes[i].shape[3] * group_size for i in (1, 4))
    spec = KVSpec(
        1, heads, head_dim, _DTYPES[planes[1].dtype.str[1:]], context, v_head_dim, "HND", k_bits, v_bits, group_size
    )
    for stored, plane in zip(spec.stored_planes, planes, strict=True):
        dtype = np.dtype(np.uint32) if stored.dtype == "uint32" else planes[1].dtype
        _check(call, stored.name, plane, (rows, heads, context, stored.dim), dtype)
    return _attend(call, q, planes, spec, scale, scores, options)


def _attend(
    call: str,
    q: np.ndarray,
    planes: list[np.ndarray],
    spec: KVSpec,
    scale: float | None,
    scores: str,
    options: AttentionOptions | None,
) -> tuple[np.ndarray, np.ndarray]:
    rows, num_q_heads, num_queries, _ = q.shape
    _check(call, "q", q, (len(planes[0]), num_q_heads, num_queries, spec.head_dim), q.dtype)
    arrays: list[np.ndarray] = []
    for x in planes:  # a store wants memory of their own for all of them
        x = np.require(x, requirements=("C", "A", "W"))
        arrays.append(x.copy() if any(np.may_share_memory(x, other) for other in arrays) else x)
    store = BlockStore(spec, rows, arrays)
    tokens = q.swapaxes(1, 2).reshape(rows * num_queries, num_q_heads, spec.head_dim)
    out = np.empty((*tokens.shape[:2], spec.value_head_dim), np.float32)
    s = np.empty((rows, spec.num_kv_heads, spec.block_size), np.float32)
    tables = np.arange(rows, dtype=np.int32)[:, None]
    starts = np.arange(rows + 1) * num_queries
    lens = np.full(rows, spec.block_size)
    store.attend(0, tokens, out, tables, lens, starts, scale, options, scores=scores, scores_out=s)
    return out.reshape(rows, num_queries, num_q_heads, -1).swapaxes(1, 2), s


def _array(call: str, name: str, x: Any, *, words: bool = False) -> np.ndarray:
    """A numpy array of four dimensions and of a dtype that can be stored."""
    if not isinstance(x, np.ndarray):
        raise TypeError(f"[{call}] {name} must be a numpy array, got {type(x).__name__}")
    if x.dtype.str[1:] not in (("u4",) if words else _DTYPES):
        wanted = "uint32" if words else "float32, float16 or uint16 (bfloat16 as bits)"
        raise TypeError(f"[{call}] {name} must be {wanted}, got {x.dtype}")
    if x.ndim != 4:
        raise ValueError(f"[{call}] {name} must have four dimensions, [B, heads, tokens, dim], got {list(x.shape)}")
    return x


def _check(call: str, name: str, x: np.ndarray, shape: tuple[int, ...], dtype: np.dtype[Any]) -> None:
    if x.shape != shape:
        raise ValueError(f"[{call}] {name} must have shape {list(shape)}, got {list(x.shape)}")
    if x.dtype != dtype:
        raise TypeError(f"[{call}] {name} must be {dtype}, got {x.dtype}")
