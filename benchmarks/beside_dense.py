"""Attention of a backend of MLX beside MLX's own over dense K and V, through all layers of a spec at once."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import mlx.core as mx
import numpy as np

from kvpool.cli.console import CommandError
from kvpool.protocol import AttentionOptions, StepArrays

TOLERANCE = 0.03  # between results, as a share of the largest; both are rounded to 16 bits
RUNS = 12  # of both in turn; the first two are not counted


def seconds(
    backend: Any, rows: int, context: int, queries: int, group: int, window: int | None = None, *, once: bool = False
) -> list[float]:
    """Median seconds of a step in which the last `queries` tokens of each context attend: of the backend, of dense.

    Its arrays are prepared in each run, or only `once`, before. CommandError: the results differ.
    """
    spec, width = backend.spec, -(-context // backend.spec.block_size)
    heads, dim, dtype = spec.num_kv_heads, spec.head_dim, getattr(mx, spec.dtype)
    table, lengths = np.random.default_rng(0).permutation(rows * width).reshape(rows, width), np.full(rows, context)
    slots = (table[:, :, None] * spec.block_size + np.arange(spec.block_size)).reshape(rows, -1)[:, :context]
    plan, layers = StepArrays(table, lengths, queries * np.arange(rows + 1)), range(spec.num_layers)
    dense = [[mx.random.normal((rows, heads, context, dim)).astype(dtype) for _ in "kv"] for _ in layers]
    q = mx.random.normal((rows * queries, group * heads, dim)).astype(dtype)
    queries_first = q.reshape(rows, queries, -1, dim).swapaxes(1, 2)
    step = backend.prepare(StepArrays(table, lengths, np.zeros(rows + 1, int), slots.ravel()))
    for layer, kv in enumerate(dense):
        backend.write(step, layer, *(x.swapaxes(1, 2).reshape(-1, heads, dim) for x in kv))
    backend.settle()
    mx.eval(q, queries_first, dense)
    options = None if window is None else AttentionOptions(window=window)
    behind = np.arange(context - queries, context)[:, None] - np.arange(context)
    mask: Any = "causal" if queries > 1 else None
    mask = mask if window is None else mx.array((behind >= 0) & (behind < window))
    step = backend.prepare(plan) if once else None

    def ours() -> list[mx.array]:
        arrays = step or backend.prepare(plan)
        return [backend.attend(arrays, layer, q, options=options) for layer in layers]

    def theirs() -> list[mx.array]:
        attend, scale = mx.fast.scaled_dot_product_attention, dim**-0.5
        return [attend(queries_first, k, v, scale=scale, mask=mask) for k, v in dense]

    found, expected = ours()[-1].astype(mx.float32), theirs()[-1].astype(mx.float32)
    expected = expected.swapaxes(1, 2).reshape(found.shape)
    error = float(mx.abs(found - expected).max() / mx.abs(expected).max())
    if not error <= TOLERANCE:
        raise CommandError(f"a result is wrong by {error:.2g} of its size, so its time means nothing")
    times = [[timed(run) for run in (ours, theirs)] for _ in range(RUNS)]
    return np.median(times[2:], axis=0).tolist()


def timed(run: Callable[[], list[mx.array]]) -> float:
    """Seconds until all that `run` builds is there."""
    begin = time.perf_counter()
    mx.eval(run())
    return time.perf_counter() - begin
