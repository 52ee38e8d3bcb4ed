"""What the tests of decode and of chunks share: factors of cases, and a store full of NaN."""

from __future__ import annotations

from typing import Any

import numpy as np

from kvpool.config import KVSpec
from kvpool.protocol import AttentionOptions
from kvpool.testing.dense import round_to
from kvpool_backends.cpu import _kernels

SEED = 4
ISAS = _kernels.isas()

FACTORS: dict[str, tuple[Any, ...]] = {
    "isa": ISAS,
    "dtype": ("float32", "float16", "bfloat16"),
    "block_size": (1, 5, 16, 32),
    "dims": ((128, 128), (64, 64), (80, 96), (33, 17), (3, 256)),
    "group": (1, 3, 4, 17),
    "features": ("none", "window", "soft_cap", "alibi_slopes", "sinks", "mask", "all"),
    "queries": (9, 43, 128, 129, 300),
    "prior": (0, 1, 85, 127, 500),
    "layout": ("NHD", "HND"),
    "tokens": ("float32", "float16", "bfloat16"),
}


class Pool:
    """A store on memory full of NaN, and the tokens that were written into it, in the order of their sequences."""

    def __init__(self, spec: KVSpec, isa: str, num_threads: int = 2, num_blocks: int = 900) -> None:
        shapes = [shape for shape, _, _ in spec.base_arrays(num_blocks)]
        nan = {"float32": np.float32("nan"), "float16": np.float16("nan"), "bfloat16": np.uint16(0x7FC0)}[spec.dtype]
        self.arrays = [np.full(shape, nan) for shape in shapes]
        self.spec = spec
        self.store = _kernels.BlockStore(spec, num_blocks, self.arrays, isa=isa, num_threads=num_threads)
        self.free = list(np.random.default_rng(SEED).permutation(num_blocks))

    def add(self, k: np.ndarray, v: np.ndarray) -> np.ndarray:
        """Write one sequence into random blocks, except for tokens whose key is NaN; its block table."""
        size = self.spec.block_size
        table = np.array([self.free.pop() for _ in range(-(-len(k) // size))], np.int32)
        slots = table[np.arange(len(k)) // size].astype(np.int64) * size + np.arange(len(k)) % size
        self.store.write(0, k, v, slots)
        return table

    def attend(
        self, q: np.ndarray, tables: list[np.ndarray], lens: list[int], queries: list[int], **more: Any
    ) -> np.ndarray:
        """float32 results; `q` may be anything that a kernel reads."""
        padded = np.full((len(tables), max(map(len, tables)) + 1), -1, np.int32)
        for row, table in zip(padded, tables, strict=True):
            row[: len(table)] = table
        out = np.full((q.shape[0], q.shape[1], self.spec.value_head_dim), 7, more.pop("out_dtype", np.float32))
        self.store.attend(0, q, out, padded, np.array(lens), np.cumsum([0, *queries]), **more)
        return from_bits(out)


def from_bits(x: np.ndarray) -> np.ndarray:
    return (x.astype(np.uint32) << 16).view(np.float32) if x.dtype == np.uint16 else x.astype(np.float32)


def to_bits(x: np.ndarray, dtype: str) -> np.ndarray:
    """Values that `dtype` represents exactly, as a kernel takes them."""
    return (x.view(np.uint32) >> 16).astype(np.uint16) if dtype == "bfloat16" else x.astype(dtype)


def normal(rng: np.random.Generator, *shape: int, dtype: str = "float32") -> np.ndarray:
    x = rng.standard_normal(shape, np.float32)
    return x if dtype == "float32" else round_to(x, dtype)


def largest_error(out: np.ndarray, ref: np.ndarray) -> float:
    """Of any head, as a part of its largest result."""
    return float((np.abs(out - ref).max(axis=(0, 2)) / np.abs(ref).max(axis=(0, 2))).max())


def some_options(
    rng: np.random.Generator, features: str, num_queries: int, num_heads: int, context: int
) -> AttentionOptions:
    mask = normal(rng, num_queries, num_heads if features == "all" else 1, context + 3)
    mask[rng.random(mask.shape) < 0.3] = -np.inf
    every: dict[str, Any] = {
        "window": 1 + context // 3,
        "soft_cap": 3.0,
        "alibi_slopes": 2.0 ** -np.linspace(1, 8, num_heads),
        "sinks": normal(rng, num_heads),
        "mask": mask,
    }
    return AttentionOptions(**{name: value for name, value in every.items() if features in (name, "all")})


def name_of(case: dict[str, Any]) -> str:
    return "-".join(str(value).replace(" ", "") for value in case.values())
