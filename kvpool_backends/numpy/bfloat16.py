"""bfloat16 as bit patterns: numpy has no such dtype. A bfloat16 is the upper half of a float32."""

from __future__ import annotations

import numpy as np

_QUIET_NAN = np.uint16(0x0040)


def to_bfloat16(x: np.ndarray) -> np.ndarray:
    """Round to the nearest bfloat16, ties to even.

    Parameters
    ----------
    x : float array, any shape
        Converted to float32 first, so a float64 may be rounded twice.

    Returns
    -------
    uint16, same shape
        Bit patterns. Infinities stay, values beyond the largest bfloat16 become infinite, NaN stays NaN
        (quiet, its sign and upper payload kept).
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
