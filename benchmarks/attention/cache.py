"""What the kernels work on: KV memory full of random numbers, and calls of attention prepared on it."""

from __future__ import annotations

from typing import Any

import numpy as np

from kvpool.config import DTYPES, KVSpec

ELEMENTS = {"float32": np.float32, "float16": np.float16, "bfloat16": np.uint16}  # numpy has no bfloat16: its bits
TOLERANCE = {"float32": 2e-6, "float16": 2e-3, "bfloat16": 1e-2}
"""Most that a result may differ from float64 attention, as a share of the largest result of its head."""

TILE = 2**20 + 7  # elements drawn; no multiple of any head, so that equal tokens do not meet


class WrongResult(Exception):
    """A contestant computed something else. Its time means nothing."""


def narrowed(x: np.ndarray, dtype: str) -> np.ndarray:
    """Return float32 values as elements of `dtype`."""
    if dtype == "bfloat16":
        from kvpool_backends.numpy.elements import to_bfloat16

        return to_bfloat16(x)
    return x.astype(ELEMENTS[dtype])


def widened(x: np.ndarray, dtype: str) -> np.ndarray:
    """Return elements of `dtype` as float32."""
    if dtype == "bfloat16":
        return (x.astype(np.uint32) << 16).view(np.float32)
    return x.astype(np.float32, copy=False)


def random_elements(rng: np.random.Generator, shape: int | tuple[int, ...], dtype: str) -> np.ndarray:
    """Return an array of normal numbers, in memory as a backend's; a large one repeats itself."""
    from kvpool_backends.cpu.backend import zeroed

    tile = narrowed(rng.standard_normal(TILE, np.float32), dtype)
    (elements,) = zeroed([(shape,) if isinstance(shape, int) else shape], ELEMENTS[dtype])
    flat = elements.reshape(-1)
    for start in range(0, flat.size, TILE):
        part = flat[start : start + TILE]
        part[:] = tile[: part.size]
    return elements


def padded(context: int, block_size: int) -> int:
    """Return the tokens that the blocks of one context have room for."""
    return -(-context // block_size) * block_size


class PagedCall:
    """One call of attention: `batch` contexts whose blocks lie at random in a pool that they fill.

    Parameters
    ----------
    kernels : module
        `kvpool_backends.cpu._kernels`, or what looks like it.
    spec : KVSpec
        Of one layer.
    planes : pair of ndarray
        Flat memory for K and V; may be longer than the pool.
    num_queries : int
        Newest tokens of each context that are queries.
    """

    def __init__(
        self,
        kernels: Any,
        spec: KVSpec,
        planes: tuple[np.ndarray, ...],
        *,
        batch: int,
        context: int,
        num_q_heads: int,
        num_threads: int,
        rng: np.random.Generator,
        num_queries: int = 1,
    ) -> None:
        self.spec, self.context = spec, context
        width = padded(context, spec.block_size) // spec.block_size
        self.num_blocks = batch * width
        self.arrays = []
        for (name, _), plane in zip(spec.planes, planes, strict=True):
            shape = spec.plane_layout(name, self.num_blocks).shape
            self.arrays.append(plane[: int(np.prod(shape))].reshape(shape))
        self.tables = rng.permutation(self.num_blocks).reshape(batch, width).astype(np.int32)
        self.seq_lens = np.full(batch, context, np.int32)
        self.cu_q_lens = np.arange(batch + 1, dtype=np.int32) * num_queries
        self.q = random_elements(rng, (batch * num_queries, num_q_heads, spec.head_dim), spec.dtype)
        self.out = np.zeros((batch * num_queries, num_q_heads, spec.value_head_dim), ELEMENTS[spec.dtype])
        self.store = kernels.BlockStore(spec, self.num_blocks, self.arrays, num_threads=num_threads)

    def attend(self) -> None:
        """Compute `out`."""
        self.store.attend(0, self.q, self.out, self.tables, self.seq_lens, self.cu_q_lens)

    def exact(self, row: int, kv_head: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Scores and weights ``[G, C]`` of a row's newest query in the heads of one KV head, its result; float64."""
        dtype, token, heads = self.spec.dtype, self.cu_q_lens[row + 1] - 1, self.heads(kv_head)
        head_axis = 1 if self.spec.layout == "HND" else 2
        k, v = (
            widened(np.take(array[self.tables[row]], kv_head, head_axis), dtype)
            .reshape(-1, array.shape[-1])[: self.context]
            .astype(np.float64)
            for array in self.arrays
        )
        scores = widened(self.q[token, heads], dtype).astype(np.float64) @ k.T / np.sqrt(self.spec.head_dim)
        weights = np.exp(scores - scores.max(axis=1, keepdims=True))
        weights /= weights.sum(axis=1, keepdims=True)
        return scores, weights, weights @ v

    def heads(self, kv_head: int) -> slice:
        """The query heads of a KV head."""
        group = self.q.shape[1] // self.spec.num_kv_heads
        return slice(kv_head * group, (kv_head + 1) * group)

    def error(self, row: int, kv_head: int) -> float:
        """Return the largest error of the newest query of a row, in the heads of one KV head."""
        expected = self.exact(row, kv_head)[2]
        found = widened(self.out[self.cu_q_lens[row + 1] - 1, self.heads(kv_head)], self.spec.dtype)
        return float((np.abs(found - expected).max(axis=1) / np.abs(expected).max(axis=1)).max())

    def checked_error(self, rng: np.random.Generator) -> float:
        """Compute, and return the error of a row drawn at random.

        Raises
        ------
        WrongResult
            If it is more than `TOLERANCE` allows.
        """
        self.attend()
        row, kv_head = int(rng.integers(len(self.tables))), int(rng.integers(self.spec.num_kv_heads))
        error = self.error(row, kv_head)
        if not error <= TOLERANCE[self.spec.dtype]:
            raise WrongResult(
                f"{self.spec.dtype}, blocks of {self.spec.block_size}, {len(self.tables)} x {self.context} tokens: "
                f"row {row} is off by {error:.1e} of its largest result, {TOLERANCE[self.spec.dtype]:.0e} are allowed"
            )
        return error


def kv_nbytes(spec: KVSpec, tokens: int) -> int:
    """Return the bytes of K and V of so many tokens of one layer."""
    return tokens * spec.num_kv_heads * (spec.head_dim + spec.value_head_dim) * DTYPES[spec.dtype]
