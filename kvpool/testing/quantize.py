"""What a quantized plane holds of known tokens: group by group, number by number, in scalars of float32.

Deliberately written another way than any backend: no vectors, no bit operations; the words are sums of powers of two.
"""

from __future__ import annotations

import math
from functools import lru_cache

import numpy as np

from kvpool.config import KVSpec
from kvpool.testing.dense import round_to, stored_bytes

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
    """What a plane of `bits` bits holds of tokens ``[T, Hk, D]``, and what comes back.

    Returns
    -------
    parts : [words, scales, biases]
        uint8 bytes ``[T, Hk, n]`` each, little-endian, as `export_blocks` has them.
    back : float32 ``[T, Hk, D]``
        scale * number + bias, rounded once.
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
