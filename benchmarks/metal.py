"""Decode with the Metal kernels beside MLX's attention on dense K and V: for `benchmarks.mac_report`.

A run is many layers, each with memory of its own: so neither the cost of a launch nor a cache decides.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import product

import numpy as np

from benchmarks.measure import tokens
from kvpool.config import KVSpec

BLOCK_SIZE, NUM_Q_HEADS = 16, 32
LAYERS_MIN, LAYERS_MAX = 4, 32
RUN_NBYTES = 2**28  # of K and V that the layers of a run have together, if they may be as many: more than caches hold


@dataclass(frozen=True)
class Case:
    """One size: `group` query heads per KV head, in each of `layers` layers."""

    dtype: str
    group: int
    batch: int
    context: int
    num_q_heads: int
    head_dim: int
    layers: int

    @property
    def num_kv_heads(self) -> int:
        """Heads of K and V."""
        return self.num_q_heads // self.group

    @property
    def name(self) -> str:
        """The case in words."""
        return f"{self.dtype} {self.batch} x {tokens(self.context)}, {self.group} query heads per KV head"


def cases(
    dtypes: Sequence[str],
    groups: Sequence[int],
    batches: Sequence[int],
    contexts: Sequence[int],
    head_dim: int = 128,
    num_q_heads: int = NUM_Q_HEADS,
) -> Iterator[Case]:
    """All sizes that are asked for, with as many layers as make a run long enough."""
    for dtype, group, batch, context in product(dtypes, groups, batches, contexts):
        room = -(-context // BLOCK_SIZE) * BLOCK_SIZE
        nbytes = 2 * batch * room * num_q_heads // group * head_dim * (4 if dtype == "float32" else 2)
        layers = min(LAYERS_MAX, max(LAYERS_MIN, -(-RUN_NBYTES // nbytes)))
        yield Case(dtype, group, batch, context, num_q_heads, head_dim, layers)


def metal_device() -> str:
    """Return the name of the GPU."""
    import mlx.core as mx

    return str(mx.device_info().get("device_name", "unknown"))


def seconds(case: Case) -> list[float]:
    """Return median seconds of a layer by the kernels, and by MLX on dense K and V."""
    from benchmarks import beside_dense
    from kvpool_backends.mlx import metal_kernels
    from kvpool_backends.mlx.metal import MetalBackend

    spec = KVSpec(case.layers, case.num_kv_heads, case.head_dim, case.dtype, BLOCK_SIZE)
    backend = MetalBackend(spec, case.batch * -(-case.context // BLOCK_SIZE))
    backend.part_tokens = metal_kernels.PART_TOKENS
    return [t / case.layers for t in beside_dense.seconds(backend, case.batch, case.context, 1, case.group, once=True)]


def sweep(cases: Sequence[Case]) -> dict[str, int]:
    """Return the constants of the kernels with which these cases take least, each chosen while the others stay.

    Write them to a file and name it in ``KVPOOL_METAL_SETTINGS``.
    """
    from kvpool_backends.mlx import metal_kernels

    def mean() -> float:
        return float(np.exp(np.mean(np.log([seconds(case)[0] for case in cases]))))

    before = {name: getattr(metal_kernels, name) for name in metal_kernels.CHOICES}
    best, least = dict(before), mean()
    try:
        for name, choices in metal_kernels.CHOICES.items():
            for choice in choices:
                if choice == best[name]:
                    continue
                setattr(metal_kernels, name, choice)
                found = mean()
                print(f"{name} {choice}: {found * 1e6:.1f} us, least so far {least * 1e6:.1f}", file=sys.stderr)
                if found < least:
                    best[name], least = choice, found
            setattr(metal_kernels, name, best[name])
    finally:
        for name, choice in before.items():
            setattr(metal_kernels, name, choice)
    return best
