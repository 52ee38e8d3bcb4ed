"""float8 e4m3 as bytes: a sign, 4 bits of exponent (bias 7), 3 of mantissa, no infinities, NaN as 0x7f and 0xff.

The format "E4M3" of "FP8 Formats for Deep Learning" (Micikevicius et al., 2022). Its largest number is 448.
"""

from __future__ import annotations

import numpy as np

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
    """Round to the nearest float8, ties to even.

    Parameters
    ----------
    x : float array, any shape
        Converted to float32 first, so a float64 may be rounded twice.

    Returns
    -------
    uint8, same shape
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
