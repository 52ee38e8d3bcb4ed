"""Affine quantization as ``mx.quantize(x, group_size, bits)`` does it, bit for bit, in plain numpy.

A group of elements w has a scale s and a bias b, and is stored as integers ``rint((w - b) / s)``, of which
``s * q + b`` comes back. The bias is the end of the group's range that is farther from 0, the sign of the scale points
to the other end, and the scale is stretched until 0 is one of the steps: ``scale = edge / rint(edge / scale)``. All of
it is float32, in the order in which MLX computes; scales and biases are rounded to the storage's dtype afterwards.
"""

from __future__ import annotations

import numpy as np

_LEAST_SCALE = np.float32(1e-7)


def quantize(x: np.ndarray, group_size: int, bits: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Quantize the last axis.

    Parameters
    ----------
    x : float32 ``[..., D]``
        D is a multiple of `group_size`.
    group_size, bits : int
        Elements that share a scale; 4 or 8.

    Returns
    -------
    words : uint32 ``[..., D * bits / 32]``
        The first element in the lowest bits.
    scales, biases : float32 ``[..., D / group_size]``
        A group that holds a NaN or an infinity has NaN as both, and words of 0: all of it comes back as NaN.
    """
    groups = x.reshape(*x.shape[:-1], -1, group_size)
    steps = np.float32(2**bits - 1)
    finite = np.isfinite(groups).all(axis=-1, keepdims=True)
    groups = np.where(finite, groups, np.float32(0))
    low, high = groups.min(axis=-1, keepdims=True), groups.max(axis=-1, keepdims=True)
    below = np.abs(low) > np.abs(high)
    with np.errstate(over="ignore", invalid="ignore", divide="ignore"):
        scale = np.maximum((high - low) / steps, _LEAST_SCALE)
        scale = np.where(below, scale, -scale)
        edge = np.where(below, low, high)
        whole = np.rint(edge / scale)
        scale = np.where(whole != 0, edge / whole, scale)
        bias = np.where(whole != 0, edge, np.float32(0))
        numbers = np.clip(np.rint((groups - bias) / scale), np.float32(0), steps)
    words = pack(np.where(finite, numbers, 0).astype(np.uint8).reshape(x.shape), bits)
    nan = np.float32(np.nan)
    return words, np.where(finite, scale, nan)[..., 0], np.where(finite, bias, nan)[..., 0]


def dequantize(words: np.ndarray, scales: np.ndarray, biases: np.ndarray, bits: int) -> np.ndarray:
    """float32 ``[..., D]`` of what `quantize` returned, scales and biases in float32: ``s * q + b``, rounded twice."""
    numbers = unpack(words, bits)
    groups = numbers.reshape(*scales.shape, -1).astype(np.float32)
    with np.errstate(over="ignore", invalid="ignore"):
        return (groups * scales[..., None] + biases[..., None]).reshape(numbers.shape)


def pack(numbers: np.ndarray, bits: int) -> np.ndarray:
    """uint32 words of uint8 numbers below ``2**bits``, `bits` 4 or 8."""
    if bits == 4:
        numbers = numbers[..., 0::2] | numbers[..., 1::2] << 4
    return np.ascontiguousarray(numbers).view("<u4")


def unpack(words: np.ndarray, bits: int) -> np.ndarray:
    """uint8 numbers of words that `pack` made."""
    numbers = np.ascontiguousarray(words, "<u4").view(np.uint8)
    if bits == 4:
        numbers = np.stack([numbers & 15, numbers >> 4], axis=-1).reshape(*numbers.shape[:-1], -1)
    return numbers
