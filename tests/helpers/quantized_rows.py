"""Rows of numbers that are hard to quantize, and the types that they may have."""

import numpy as np

FLOATS = ("float32", "float16", "bfloat16")


def rows(rng: np.random.Generator, shape: tuple[int, ...]) -> np.ndarray:
    """Groups of every kind: noise of many sizes, ties, one sign, one value, zeros of both signs."""
    x = rng.standard_normal(shape).astype(np.float32) * np.float32(10.0) ** rng.integers(-6, 4, (*shape[:-1], 1))
    x[0::7] = np.abs(x[0::7])
    x[1::7] = -np.abs(x[1::7])
    x[2::7] = rng.integers(-8, 8, x[2::7].shape)
    x[3::21] = np.float32(0.37)
    x[5::21] = np.float32(-0.0)
    return x.astype(np.float32)
