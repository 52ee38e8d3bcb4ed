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


def near_ties(rng: np.random.Generator, num_tokens: int, bits: int, size: int = 64) -> np.ndarray:
    """Float32 elements a unit or two of the last place around (n + 1/2) * scale, ``[num_tokens, 1, size]``.

    1 / scale times them would often be wrong.
    """
    x = np.empty((num_tokens, 1, size), np.float32)
    for row in x[:, 0]:
        low, high = np.float32(-rng.random() - 0.5), np.float32(rng.random() + 0.2)
        scale = low / np.rint(low / ((high - low) / np.float32(2**bits - 1)))
        ties = low + (rng.integers(0, 2**bits - 1, size) + 0.5) * np.abs(scale)
        row[:] = np.clip(ties.astype(np.float32) * (1 + rng.integers(-2, 3, size) * 2.0**-24), low, high)
        row[:2] = low, high
    return x
