"""Attention of a backend of MLX beside MLX's own over dense K and V, through all layers of a spec."""

from __future__ import annotations

import time
from typing import Any

import mlx.core as mx
import numpy as np

from kvpool.protocol import AttentionOptions, StepArrays


def seconds(backend: Any, rows: int, context: int, queries: int, group: int, window: int | None = None) -> list[float]:
    """Median seconds of a step in which the last `queries` tokens of each context attend: of the backend, of dense."""
    spec, width = backend.spec, context // backend.spec.block_size
    table, dtype = np.random.default_rng(0).permutation(rows * width).reshape(rows, width), getattr(mx, spec.dtype)
    plan = StepArrays(table, np.full(rows, context), queries * np.arange(rows + 1))
    shape = rows, spec.num_kv_heads, context, spec.head_dim
    dense = [[mx.random.normal(shape).astype(dtype) for _ in "kv"] for _ in range(spec.num_layers)]
    q = mx.random.normal((rows * queries, group * spec.num_kv_heads, spec.head_dim)).astype(dtype)
    queries_first = q.reshape(rows, queries, -1, spec.head_dim).swapaxes(1, 2)
    mx.eval(q, queries_first, dense)
    options = None if window is None else AttentionOptions(window=window)
    behind = np.arange(context - queries, context)[:, None] - np.arange(context)
    mask: Any = "causal" if queries > 1 else None
    mask = mask if window is None else mx.array((behind >= 0) & (behind < window))

    def ours() -> None:
        step = backend.prepare(plan)
        mx.eval([backend.attend(step, layer, q, options=options) for layer in range(spec.num_layers)])

    def theirs() -> None:
        attend, scale = mx.fast.scaled_dot_product_attention, spec.head_dim**-0.5
        mx.eval([attend(queries_first, k, v, scale=scale, mask=mask) for k, v in dense])

    return [median(run) for run in (ours, theirs)]


def median(run: Any) -> float:
    """Seconds of one of ten runs, after two that are not counted."""
    times = []
    for _ in range(12):
        begin = time.perf_counter()
        run()
        times.append(time.perf_counter() - begin)
    return float(np.median(times[2:]))
