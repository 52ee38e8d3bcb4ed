"""Dense attention and rounding in float64: the oracle that paged backends are measured against.

Written in another way than any backend here, on purpose: one matrix per head, explicit masks, the sink as a column
of its own, rounding by exponent and mantissa instead of by bits.
"""

from __future__ import annotations

import math
from functools import lru_cache

import numpy as np

from kvpool.config import KVSpec
from kvpool.protocol import AttentionOptions

_MANTISSA_BITS = {"float32": 24, "float16": 11, "bfloat16": 8}  # the hidden bit included
_MIN_EXPONENT = {"float32": -126, "float16": -14, "bfloat16": -126}  # of the smallest normal number
_FLOAT8 = [(1 + m / 8) * 2.0**e for e in range(-6, 9) for m in range(8)]  # normal ones, 2**8 * 1.875 is NaN
FLOAT8_E4M3 = np.array([*(m * 2.0**-9 for m in range(8)), *_FLOAT8[:-1]])  # value of each code 0 .. 0x7e
_MAX = {"float32": float(np.finfo(np.float32).max), "float16": 65504.0, "bfloat16": float(2.0**127 * (2 - 2**-7))}


def dense_attention(
    q: np.ndarray,
    k: np.ndarray,
    v: np.ndarray,
    scale: float | None = None,
    options: AttentionOptions | None = None,
) -> tuple[np.ndarray, np.ndarray]:
    """Causal attention of the last tokens of one sequence over all of it.

    Parameters
    ----------
    q : ``[n, Hq, D]``
        Queries of the n newest tokens.
    k, v : ``[C, Hk, D]``, ``[C, Hk, Dv]``
        The whole context, the n newest tokens included. Query head h belongs to KV head ``h // (Hq // Hk)``.
    scale : float, optional
        ``1 / sqrt(D)`` by default.
    options : AttentionOptions, optional
        Its mask has n rows, those of these queries.

    Returns
    -------
    out : float64 ``[n, Hq, Dv]``
    weights : float64 ``[n, Hq, C]``
        With sinks they sum to less than 1; all 0 for a query that sees nothing.
    """
    options = AttentionOptions() if options is None else options
    num_queries, num_q_heads = q.shape[:2]
    out = np.empty((num_queries, num_q_heads, v.shape[2]))
    weights = np.empty((num_queries, num_q_heads, len(k)))
    for head in range(num_q_heads):
        weights[:, head] = _weights_of_head(_scores_of_head(q, k, head, scale, options), head, options)
        out[:, head] = weights[:, head] @ v[:, head // (num_q_heads // k.shape[1])].astype(np.float64)
    return out, weights


def _scores_of_head(
    q: np.ndarray, k: np.ndarray, head: int, scale: float | None, options: AttentionOptions
) -> np.ndarray:
    """The exponents, float64 ``[n, C]``; -inf where the query does not see the key."""
    num_queries, num_q_heads, dim = q.shape
    context, num_kv_heads = k.shape[0], k.shape[1]
    # Of key minus query, [n, C]: 0 on the diagonal that ends in the last corner.
    distance = np.arange(context)[None, :] - np.arange(context - num_queries, context)[:, None]
    seen = distance <= 0
    if options.window is not None:
        seen &= -distance < options.window
    kv_head = head // (num_q_heads // num_kv_heads)
    scores = q[:, head].astype(np.float64) @ k[:, kv_head].astype(np.float64).T
    scores = scores * (1.0 / np.sqrt(dim) if scale is None else scale)
    if options.soft_cap is not None:
        scores = np.tanh(scores / options.soft_cap) * options.soft_cap
    if options.alibi_slopes is not None:
        scores += float(options.alibi_slopes[head]) * distance
    if options.mask is not None:
        mask = options.mask if options.mask.ndim == 2 else options.mask[:, min(head, options.mask.shape[1] - 1)]
        if mask.dtype == np.bool_:
            seen = seen & mask[:, :context]
        else:
            scores += mask[:, :context]
    return np.where(seen, scores, -np.inf)


def _weights_of_head(scores: np.ndarray, head: int, options: AttentionOptions) -> np.ndarray:
    """Softmax of each row, the sink as one key more; a row of -inf alone becomes 0."""
    sink = -np.inf if options.sinks is None else float(options.sinks[head])
    scores = np.column_stack([scores, np.full(len(scores), sink)])
    weights = np.zeros_like(scores)
    some = np.isfinite(scores).any(axis=1)
    shifted = np.exp(scores[some] - scores[some].max(axis=1, keepdims=True))
    weights[some] = shifted / shifted.sum(axis=1, keepdims=True)
    return weights[:, :-1]


def dense_scores(
    q: np.ndarray,
    k: np.ndarray,
    kind: str,
    scale: float | None = None,
    options: AttentionOptions | None = None,
) -> np.ndarray:
    """Scores of `KVBackend.attend` with ``scores=kind``, for one row whose newest token alone is the query.

    They are float64 ``[Hk, C]``, means over the query heads of each KV head, of q ``[1, Hq, D]`` and k ``[C, Hk, D]``.
    """
    options = AttentionOptions() if options is None else options
    scores = np.zeros((k.shape[1], len(k)))
    group = q.shape[1] // k.shape[1]
    for head in range(q.shape[1]):
        one = _scores_of_head(q, k, head, scale, options)
        one = _weights_of_head(one, head, options) if kind == "mass" else np.where(one == -np.inf, 0.0, one)
        scores[head // group] += one[0] / group
    return scores


def dense_attention_and_size(
    q: np.ndarray,
    k: np.ndarray,
    v: np.ndarray,
    scale: float | None = None,
    options: AttentionOptions | None = None,
) -> tuple[np.ndarray, np.ndarray]:
    """`dense_attention`'s result and, ``[n, Hq, 1]``, the size of what was added up: the largest ``sum_c w_c |v_c|``.

    Rounding errors are in proportion to this size. The result itself may be much smaller, because the values of a long
    context cancel.
    """
    both = dense_attention(q, k, np.concatenate([v, np.abs(v)], axis=2), scale, options)[0]
    return both[..., : v.shape[2]], both[..., v.shape[2] :].max(axis=-1, keepdims=True)


def round_to(x: np.ndarray, dtype: str) -> np.ndarray:
    """Nearest values of `dtype` as float32: ties to even, infinite (float8: 448) beyond the largest, NaN stays NaN."""
    with np.errstate(invalid="ignore"):  # a signalling NaN
        x = np.asarray(x, np.float64)
    if dtype == "float8_e4m3":
        rounded = np.copysign(FLOAT8_E4M3[_float8_codes(np.abs(x))], x)  # infinities too
        return np.where(np.isnan(x), x, rounded).astype(np.float32)
    _, exponent = np.frexp(x)  # |x| = mantissa * 2**exponent, 0.5 <= mantissa < 1
    bits = _MANTISSA_BITS[dtype]
    step = np.maximum(exponent, _MIN_EXPONENT[dtype] + 1) - bits  # exponent of the last place, fixed below normal
    with np.errstate(invalid="ignore", over="ignore"):
        rounded = np.ldexp(np.rint(np.ldexp(x, -step)), step)
        rounded = np.where(np.abs(rounded) > _MAX[dtype], np.copysign(np.inf, x), rounded)
        return np.where(np.isfinite(x), rounded, x).astype(np.float32)


def _float8_codes(size: np.ndarray) -> np.ndarray:
    """Codes of the nearest entries of the table; of NaN any."""
    upper = np.searchsorted(FLOAT8_E4M3, size).clip(1, len(FLOAT8_E4M3) - 1)  # the first that is not smaller
    size = np.minimum(size, FLOAT8_E4M3[-1])
    below, above = size - FLOAT8_E4M3[upper - 1], FLOAT8_E4M3[upper] - size
    return np.where((below < above) | ((below == above) & (upper % 2 == 1)), upper - 1, upper)


def stored_bytes(x: np.ndarray, dtype: str) -> np.ndarray:
    """Bytes (uint8, flat, little-endian) of values that `dtype` represents exactly."""
    if dtype == "bfloat16":
        pairs = np.ascontiguousarray(x, "<f4").view(np.uint8).reshape(-1, 4)
        return pairs[:, 2:].reshape(-1)  # the upper half of a float32
    if dtype == "float8_e4m3":
        codes = np.where(np.isnan(x), 0x7F, _float8_codes(np.abs(x)))
        return (codes + 128 * np.signbit(x)).astype(np.uint8).reshape(-1)
    return np.ascontiguousarray(x, {"float32": "<f4", "float16": "<f2"}[dtype]).view(np.uint8).reshape(-1)


_ONE = np.float32


def quantized_group(group: np.ndarray, bits: int) -> tuple[list[int], np.float32, np.float32]:
    """Numbers, scale and bias of float32 ``[group_size]``, before scale and bias are rounded to a dtype."""
    if not all(math.isfinite(x) for x in group):
        return [0] * len(group), _ONE(np.nan), _ONE(np.nan)
    low, high = min(map(_ONE, group)), max(map(_ONE, group))
    steps = _ONE(2**bits - 1)
    scale = max((high - low) / steps, _ONE(1e-7))
    edge = low if abs(low) > abs(high) else high
    scale = scale if abs(low) > abs(high) else -scale
    whole, bias = _ONE(round(float(edge / scale))), _ONE(0)  # Python's round takes ties to even
    if whole != 0:
        scale, bias = edge / whole, edge
    numbers = [min(max(round(float((_ONE(x) - bias) / scale)), 0), 2**bits - 1) for x in group]
    return numbers, scale, bias


@lru_cache(maxsize=256)  # layouts and backends are tried with the same tokens
def _quantized_groups(x: bytes, size: int, bits: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Numbers, scales and biases of the groups of `size` that float32 `x` is made of."""
    groups = np.frombuffer(x, _ONE).reshape(-1, size)
    numbers, scales, biases = zip(*(quantized_group(group, bits) for group in groups), strict=True)
    return np.array(numbers, np.uint8), np.array(scales), np.array(biases)


def quantized(x: np.ndarray, spec: KVSpec, bits: int) -> tuple[list[np.ndarray], np.ndarray]:
    """The stored form of tokens ``[T, Hk, D]`` in a plane of `bits` bits, and what comes back: float32 ``[T, Hk, D]``.

    Words, scales and biases are bytes ``[T, Hk, n]`` each, little-endian, as `export_blocks` has them.
    """
    x = round_to(x, spec.dtype)
    numbers, scales, biases = _quantized_groups(np.float32(x).tobytes(), spec.quant_group_size, bits)
    factors = [round_to(np.array(part, np.float64), spec.dtype)[:, None] for part in (scales, biases)]
    back = (np.array(numbers, np.float64) * factors[0] + factors[1]).astype(np.float32).reshape(x.shape)
    per_word = 32 // bits
    flat = np.array(numbers, np.uint64).reshape(*x.shape[:2], -1, per_word)
    words = (flat * np.array([2 ** (bits * i) for i in range(per_word)], np.uint64)).sum(axis=-1)
    parts = [words.astype("<u4").view(np.uint8)]
    for part in factors:
        parts.append(stored_bytes(part, spec.dtype).reshape(*x.shape[:2], -1))
    return parts, back
