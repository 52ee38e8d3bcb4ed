"""Conformance cases about shapes: long contexts, head dimensions, lengths of chunks, batches, strides of inputs.

`kvpool.testing.conformance` is the entrance, and says how cases are made.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np

from kvpool.config import DTYPES
from kvpool.protocol import AttentionOptions, StepArrays
from kvpool.testing.filled import (
    SEED,
    Case,
    Factory,
    Filled,
    NotApplicable,
    attend,
    capabilities_of,
    close,
    collector,
    fill,
    fill_all,
    head_counts,
    mask_rows,
    some_options,
    specs,
    told,
    write,
)

CASES: list[Case] = []
_case = collector(CASES)

# Around powers of two and multiples of them: where kernels cut a context into parts.
LONG_CONTEXTS = [2047, 300, 1, 1025, 640, 2049]
HEAD_DIMS = ((64, 64), (80, 80), (96, 96), (128, 128), (192, 128), (256, 256), (7, 7), (13, 34))


@_case
def long_contexts_equal_dense_attention(factory: Factory) -> None:
    """Contexts of many parts, in which the largest score is anywhere; decode and chunks."""
    for kv_heads, q_heads in head_counts(factory, (2, 2), (1, 4), (1, 8)):
        sizes = (1, 16) if q_heads == 4 else (16,)
        for spec in specs(
            factory, layers=1, kv_heads=kv_heads, q_heads=q_heads, dtypes=tuple(DTYPES), block_sizes=sizes
        ):
            filled, steep = fill(factory, spec, LONG_CONTEXTS), 1.5 * spec.head_dim**-0.5
            for q_lens, scale in (([1] * 6, None), ([1] * 6, steep), ([2, 40, 1, 8, 130, 3], None)):
                filled.check(q_lens, q_heads, f"queries {q_lens} in contexts {LONG_CONTEXTS}, scale {scale}", scale)


@_case
def huge_scores_stay_finite(factory: Factory) -> None:
    """Scores of a hundred thousand, exact in float32: the mean of the values whose keys score highest."""
    for spec in specs(factory, dtypes=tuple(DTYPES)):
        filled = fill(factory, spec, [7, 530, 1300])
        backend, q_lens = filled.backend, [1, 3, 9]
        plan = filled.plan(filled.contexts)
        for layer in range(spec.num_layers):
            for row, context in enumerate(filled.contexts):
                level = filled.rng.integers(-3, 4, (context, spec.num_kv_heads, 1))
                filled.k[layer][row] = np.broadcast_to(level, (*level.shape[:2], spec.head_dim)).astype(np.float32)
            k, v = (np.concatenate(plane[layer]) for plane in (filled.k, filled.v))
            write(backend, plan, layer, k, v)
            for sign in (1.0, -1.0):
                q = np.full((sum(q_lens), 4, spec.head_dim), sign, np.float32)
                out = attend(backend, layer, q, filled.plan(q_lens), 4096.0)
                close(out, filled.expected(layer, q, q_lens, 4096.0), spec, f"scores up to {3 * 4096 * spec.head_dim}")


@_case
def head_dims_of_models_equal_dense_attention(factory: Factory) -> None:
    """64, 80, 96, 128, 256, keys of 192 with values of 128, and dimensions that fill no vector."""
    can, tried = capabilities_of(factory), 0
    lengths, q_lens = [1, 16, 37, 130], [1, 3, 1, 10]
    for common in specs(factory, dtypes=tuple(DTYPES), block_sizes=(16,), head_dims=(8, 8)):
        for dim, v_dim in HEAD_DIMS:
            spec = replace(common, head_dim=dim, v_head_dim=v_dim)
            if can.refusal(spec, 4) is None:
                tried += 1
                filled = fill(factory, spec, lengths)
                filled.check([1] * len(lengths), 4, f"decode, head dims {dim} and {v_dim}")
                filled.check(q_lens, 4, f"chunks, head dims {dim} and {v_dim}")
    if not tried:
        raise NotApplicable


@_case
def chunks_of_any_length_share_a_batch(factory: Factory) -> None:
    """1 to 8 queries and more, of a new row and of one with a past."""
    q_lens = [1, 2, 3, 4, 5, 6, 7, 8, 9, 17, 33, 130]
    for kv_heads, q_heads in head_counts(factory, (2, 4), (3, 3), (1, 7), (1, 8)):
        for spec in specs(factory, layers=1, kv_heads=kv_heads, q_heads=q_heads, block_sizes=(3, 16)):
            for past in (0, 1, 45):
                lengths = [n + past for n in q_lens]
                fill(factory, spec, lengths).check(q_lens, q_heads, f"chunks of {q_lens} after {past} tokens")


# ---------------------------------------------------------------------- batches


@_case
def a_row_has_the_same_bits_in_any_batch(factory: Factory) -> None:
    """Alone, in a batch, in the reversed batch, in other blocks: for backends that say so."""
    can = capabilities_of(factory)
    if not can.batch_invariant:
        raise NotApplicable
    lengths, q_lens, q_heads = [1, 1500, 17, 300, 64, 2049], [1, 1, 5, 4, 64, 1], 4
    for spec in specs(factory, q_heads=q_heads, dtypes=tuple(DTYPES), block_sizes=(16,)):
        filled, elsewhere = (fill(factory, spec, lengths, pad=pad, shift=pad + 1) for pad in (-1, 0))
        q = filled.queries(q_lens, q_heads)
        every = some_options(filled, q_lens, q_heads, can.features)
        for options in (None, every) if can.features else (None,):
            batched = attend(filled.backend, 0, q, filled.plan(q_lens), None, options)
            moved = attend(elsewhere.backend, 0, q, elsewhere.plan(q_lens), None, options)
            what = f"({told(options)}, {spec.dtype}, seed {SEED})"
            assert np.array_equal(moved, batched), f"the result depends on the blocks {what}"
            for rows in ([0], [1], [2], [3], [4], [5], [5, 4, 3, 2, 1, 0], [3, 1]):
                alone = _attend_rows(filled, q, q_lens, rows, options)
                tokens = _tokens_of(q_lens, rows)
                assert np.array_equal(alone, batched[tokens]), f"rows {rows} alone differ from the batch {what}"


def _tokens_of(q_lens: list[int], rows: list[int]) -> np.ndarray:
    begin = np.cumsum([0, *q_lens])
    return np.concatenate([np.arange(begin[row], begin[row + 1]) for row in rows])


def _attend_rows(
    filled: Filled, q: np.ndarray, q_lens: list[int], rows: list[int], options: AttentionOptions | None
) -> np.ndarray:
    """Attention of some rows of the batch, in this order, as a batch of their own."""
    plan, tokens = filled.plan(q_lens), _tokens_of(q_lens, rows)
    part = StepArrays(
        block_tables=plan.block_tables[rows],
        seq_lens=plan.seq_lens[rows],
        cu_q_lens=np.cumsum([0, *(q_lens[row] for row in rows)], dtype=np.int32),
        slot_mapping=plan.slot_mapping[tokens],
    )
    return attend(filled.backend, 0, q[tokens], part, None, mask_rows(options, tokens))


# ---------------------------------------------------------------------- strides


@_case
def strided_inputs_are_read_by_their_strides(factory: Factory) -> None:
    """Keys, values and queries that are views: head-major, backwards, every second element."""
    for spec in specs(factory):
        filled = fill(factory, spec, [3, 40, 9])
        backend, q_lens = filled.backend, [1, 4, 9]
        if not hasattr(backend.asarray(np.zeros((1, 1, 1), np.float32)), "swapaxes"):
            raise NotApplicable
        plan = filled.plan(filled.contexts)
        q = filled.queries(q_lens, 4)
        for name, view in _VIEWS.items():
            fill_all(backend, np.nan)
            for layer in range(spec.num_layers):
                k, v = (np.concatenate(plane[layer]) for plane in (filled.k, filled.v))
                backend.write(backend.prepare(plan), layer, view(backend, k), view(backend, v))
                out = backend.to_numpy(backend.attend(backend.prepare(filled.plan(q_lens)), layer, view(backend, q)))
                close(out, filled.expected(layer, q, q_lens), spec, f"{name} inputs, layer {layer}")


def _head_major(backend: Any, x: np.ndarray) -> Any:
    return backend.asarray(np.ascontiguousarray(x.swapaxes(0, 1))).swapaxes(0, 1)


def _backwards(backend: Any, x: np.ndarray) -> Any:
    return backend.asarray(np.ascontiguousarray(x[::-1]))[::-1]


def _every_second(backend: Any, x: np.ndarray) -> Any:
    return backend.asarray(np.repeat(np.repeat(x, 2, axis=0), 2, axis=2))[::2, :, ::2]


_VIEWS = {"head-major": _head_major, "backward": _backwards, "spread": _every_second}
