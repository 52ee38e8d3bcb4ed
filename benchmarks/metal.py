"""Decode with the Metal kernels beside MLX's attention on dense K and V: for `benchmarks.mac_report`.

A run is many layers, each with memory of its own, built lazily and evaluated at once, as a model does it: so neither
the cost of a launch nor a cache decides.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import product
from typing import Any

import numpy as np

from benchmarks.measure import Contestant, race, tokens
from kvpool.cli.console import CommandError
from kvpool.config import KVSpec

BLOCK_SIZE, NUM_Q_HEADS = 16, 32
LAYERS_MIN, LAYERS_MAX = 4, 32
RUN_NBYTES = 2**28  # of K and V that the layers of a run have together, if they may be as many: more than caches hold
TOLERANCE = 0.02  # between results, as a share of the largest; both are rounded to 16 bits
SEED = 1  # of tables and contents


@dataclass(frozen=True)
class Case:
    """One size: `nbytes` of K and V in each of `layers` layers; `group` query heads per KV head."""

    dtype: str
    group: int
    batch: int
    context: int
    num_q_heads: int
    head_dim: int
    nbytes: int
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
        yield Case(dtype, group, batch, context, num_q_heads, head_dim, nbytes, layers)


def metal_device() -> str:
    """Return the name of the GPU."""
    import mlx.core as mx

    return str(mx.device_info().get("device_name", "unknown"))


def seconds(case: Case, repetitions: int) -> tuple[float, float]:
    """Return median seconds of a layer by the kernels, and by MLX on dense K and V. Both read the same memory."""
    import mlx.core as mx

    from kvpool_backends.mlx.base import DTYPES as ELEMENTS

    mx.random.seed(SEED)
    dtype, dim = ELEMENTS[case.dtype], case.head_dim
    count = case.nbytes // 2 // dtype.size
    layers = [[mx.random.normal((count,)).astype(dtype) for _ in "kv"] for _ in range(case.layers)]
    queries = [mx.random.normal((case.batch, case.num_q_heads, dim)).astype(dtype) for _ in layers]
    mx.eval(layers, queries)

    def dense() -> list[Any]:
        shape = (case.batch, case.num_kv_heads, -1, dim)
        contexts = [[x.reshape(shape)[:, :, : case.context] for x in planes] for planes in layers]
        return [attention(q, k, v) for q, (k, v) in zip(queries, contexts, strict=True)]

    paged = Paged(case)
    check(paged, queries[0], layers[0])
    ours = contestant("paged", lambda: map(paged.attend, queries, layers), case.layers)
    result = race(contestant("dense", dense, case.layers), [ours], repetitions)
    return result.timings["paged"].median, result.yardstick.median


def sweep(cases: Sequence[Case]) -> dict[str, int]:
    """Return the constants of the kernels with which these cases take least, each chosen while the others stay.

    Write them to a file and name it in ``KVPOOL_METAL_SETTINGS``.
    """
    from kvpool_backends.mlx import metal_kernels

    def mean() -> float:
        return float(np.exp(np.mean(np.log([seconds(case, 3)[0] for case in cases]))))

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


def contestant(name: str, build: Callable[[], Any], layers: int) -> Contestant:
    """A contestant that evaluates all that `build` makes, at once."""
    import mlx.core as mx

    return Contestant(name, lambda: mx.eval(list(build())), calls=layers)


def attention(q: Any, k: Any, v: Any) -> Any:
    """MLX's own attention for q ``[B, Hq, D]``, k and v ``[B, Hk, C, D]``."""
    import mlx.core as mx

    return mx.fast.scaled_dot_product_attention(q[:, :, None], k, v, scale=q.shape[-1] ** -0.5)[:, :, 0]


class Paged:
    """The kernels on contexts whose blocks lie at random in memory that they fill."""

    def __init__(self, case: Case) -> None:
        import mlx.core as mx

        from kvpool_backends.mlx import metal_kernels
        from kvpool_backends.mlx.metal_kernels import MetalKernels, attention_step, head_tiles, parts_of, plan_attention

        metal_kernel: Any = mx.fast.metal_kernel
        spec = KVSpec(1, case.num_kv_heads, case.head_dim, case.dtype, BLOCK_SIZE)
        self.context = case.context
        width = -(-case.context // BLOCK_SIZE)
        num_blocks = case.batch * width
        self.kernels = MetalKernels(spec, num_blocks, metal_kernel)
        blocks = np.random.default_rng(SEED).permutation(num_blocks)
        self.tables = mx.array(blocks.astype(np.int32).reshape(case.batch, width))
        lengths = np.full(case.batch, case.context)
        self.seq_lens = mx.array(lengths.astype(np.int32))
        tiles = head_tiles(spec, case.group, 1)
        parts = parts_of(spec, tiles, metal_kernels.PART_TOKENS)
        work = plan_attention(lengths, np.arange(case.batch + 1), case.batch, tiles=tiles, **parts)
        self.step = attention_step(work, self.tables, case.head_dim**-0.5)

    def attend(self, q: Any, planes: Any) -> Any:
        """Attention of the kernels, which read the pool itself: bound by its first elements, as the backend does it."""
        return self.kernels.attend(0, q, *(x[:8] for x in planes), self.step)[0]

    def gather_and_attend(self, q: Any, planes: Any) -> Any:
        """MLX's attention on contexts that were gathered."""
        k, v = (
            self.kernels.gather(0, plane, pool[:8], self.tables, self.seq_lens, self.context)
            for plane, pool in zip("kv", planes, strict=True)
        )
        return attention(q, k, v)


def check(paged: Paged, q: Any, planes: Any) -> None:
    """Refuse times of kernels that compute something else than MLX does on the same blocks."""
    import mlx.core as mx

    ours, theirs = paged.attend(q, planes).astype(mx.float32), paged.gather_and_attend(q, planes).astype(mx.float32)
    error = float(mx.abs(ours - theirs).max() / mx.abs(theirs).max())
    if not error <= TOLERANCE:
        raise CommandError(f"a result is wrong by {error:.2g} of its size, so its time means nothing")
