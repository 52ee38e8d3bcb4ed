"""Elements that NumPy lacks, in NumPy: bfloat16, e4m3, and quantized storage."""

from __future__ import annotations

import numpy as np

_QUIET_NAN = np.uint16(0x0040)


def to_bfloat16(x: np.ndarray) -> np.ndarray:
    """uint16 bits of the nearest bfloat16, ties to even; of a float64, those of its float32.

    Values beyond the largest bfloat16 become infinite, NaN stays NaN (quiet, its sign and upper payload kept).
    """
    with np.errstate(over="ignore"):  # a float64 beyond float32 is infinite in bfloat16 too
        bits = np.ascontiguousarray(x, np.float32).view(np.uint32)
    upper = bits >> 16
    rounded = (bits + (0x7FFF + (upper & 1))) >> 16  # half of the last place, less one where that place is even
    nan = (bits & 0x7FFF_FFFF) > 0x7F80_0000
    # Rounding could carry a NaN into infinity or past the sign bit.
    return np.where(nan, upper | _QUIET_NAN, rounded).astype(np.uint16).reshape(np.shape(x))


def from_bfloat16(bits: np.ndarray) -> np.ndarray:
    """float32 values of uint16 bit patterns; exact."""
    return (np.asarray(bits, np.uint16).astype(np.uint32) << 16).view(np.float32)


_MAX = np.float32(448)
_NAN = np.uint8(0x7F)


def _every_value() -> np.ndarray:
    """float32 ``[256]``: a float16 has the same digits, and an exponent that is larger by 8."""
    code = np.arange(256, dtype=np.uint16)
    values = ((code & 0x7F) << 7).view(np.float16).astype(np.float32) * np.float32(256)
    values[_NAN] = values[0xFF] = np.nan
    return np.where(code < 128, values, -values)


_VALUES = _every_value()


def to_float8(x: np.ndarray) -> np.ndarray:
    """uint8 bits of the nearest float8, ties to even; of a float64, those of its float32.

    What is beyond 448, infinity too, becomes 448 (with its sign); NaN stays NaN.
    """
    with np.errstate(over="ignore"):
        x = np.asarray(x).astype(np.float32)
    size = np.minimum(np.abs(x), _MAX)
    exponent = np.frexp(np.maximum(size, np.float32(2.0**-6)))[1] - 1  # size = 1.m * 2**exponent, or less
    steps = np.rint(np.ldexp(size, 3 - exponent))  # of the last place: 0 .. 16
    steps = np.where(np.isnan(x), 0, steps).astype(np.int32)
    code = ((exponent + 6) * 8 + steps).astype(np.uint8)  # 16 is a carry, and 8 or more the next exponent
    return np.where(np.isnan(x), _NAN, code) | np.signbit(x).astype(np.uint8) << np.uint8(7)


def from_float8(bits: np.ndarray) -> np.ndarray:
    """float32 values of bytes; exact."""
    return _VALUES[np.asarray(bits, np.uint8)]


_LEAST_SCALE = np.float32(1e-7)


def quantize(x: np.ndarray, group_size: int, bits: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Quantize the last axis of float32 ``[..., D]``; `group_size` elements share a scale, `bits` is 4 or 8.

    Returns words, uint32 ``[..., D * bits / 32]``, the first element in the lowest bits; scales and biases, float32
    ``[..., D / group_size]``. A group that holds a NaN or an infinity has NaN as both, and words of 0.
    """
    groups = x.reshape(*x.shape[:-1], x.shape[-1] // group_size, group_size)
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
    groups = numbers.reshape(*scales.shape, numbers.shape[-1] // scales.shape[-1]).astype(np.float32)
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
        numbers = np.stack([numbers & 15, numbers >> 4], axis=-1).reshape(*numbers.shape[:-1], 2 * numbers.shape[-1])
    return numbers
