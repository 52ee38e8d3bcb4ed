"""Conformance cases about `KVBackend.compact`: tokens move to the front of their blocks, bit for bit.

A case runs where `capabilities.compacts`; elsewhere the call has to be refused. `kvpool.testing.conformance` is the
entrance, and says how cases are made.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import numpy as np

from kvpool.config import DTYPES
from kvpool.protocol import StepArrays
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
    everything,
    fill,
    refused,
    same_bytes,
    slots_of,
    specs,
    write,
)

CASES: list[Case] = []
_case = collector(CASES)


def _need(factory: Factory) -> None:
    if not capabilities_of(factory).compacts:
        raise NotApplicable


def _some(filled: Filled, row: int, n: int) -> np.ndarray:
    """Ascending places of n tokens of a row, other ones per layer and head."""
    spec, context = filled.backend.spec, filled.contexts[row]
    draws = filled.rng.random((spec.num_layers, spec.num_kv_heads, context))
    return np.sort(np.argsort(draws, axis=-1)[..., :n], axis=-1).astype(np.int32)


def _table(filled: Filled, row: int) -> np.ndarray:
    return filled.tables[row, : -(-filled.contexts[row] // filled.backend.spec.block_size)]


def _kept(tokens: np.ndarray, keep: np.ndarray) -> np.ndarray:
    """``[n, Hk, D]`` of what is kept of ``[context, Hk, D]`` by ``[Hk, n]``."""
    return np.take_along_axis(tokens, keep.T[:, :, None].astype(np.int64), 0)


@_case
def compaction_moves_what_stays_and_nothing_else(factory: Factory) -> None:
    """Every layout and dtype, other tokens per layer and head: the rest of the pool keeps its bytes."""
    _need(factory)
    layouts = capabilities_of(factory).layouts
    for spec in specs(factory, dtypes=tuple(DTYPES), layouts=layouts, block_sizes=(1, 3, 8), layers=3):
        filled = fill(factory, spec, [21, 30], poison=7.0)
        backend, table = filled.backend, _table(filled, 1)
        for n in (30, 29, 17, 8, 1, 0):
            before, keep = everything(backend), _some(filled, 1, n)
            backend.compact(table, keep)
            for layer in range(spec.num_layers):
                for kept, was in zip(backend.gather(layer, table, n), (filled.k, filled.v), strict=True):
                    was[layer][1] = _kept(was[layer][1], keep[layer])
                    got = backend.to_numpy(kept)
                    assert np.array_equal(got, was[layer][1]), f"{n} tokens, layer {layer} ({spec}, seed {SEED})"
            filled.contexts[1] = n
            others = np.setdiff1d(np.arange(backend.num_blocks), table[: -(-n // spec.block_size)])
            same_bytes(everything(backend)[others], before[others], f"blocks behind {n} tokens, and of others")


@_case
def one_list_of_places_serves_all_heads(factory: Factory) -> None:
    """``keep [n]`` is the same for every layer and head; int64 and lists will do."""
    _need(factory)
    for spec in specs(factory):
        filled, again = (fill(factory, spec, [30]) for _ in range(2))
        places = [0, 1, 5, 6, 13, 28, 29]
        filled.backend.compact(_table(filled, 0).tolist(), places)
        every = np.tile(np.array(places, np.int64), (spec.num_layers, spec.num_kv_heads, 1))
        again.backend.compact(_table(again, 0), every)
        same_bytes(everything(filled.backend), everything(again.backend), "keep [n] beside keep [L, Hk, n]")


@_case
def compacted_rows_answer_from_what_stays(factory: Factory) -> None:
    """Attention after compaction is attention over the tokens that stay; NaN in what left changes no bit."""
    _need(factory)
    for spec in specs(factory, dtypes=tuple(DTYPES), block_sizes=(8, 16)):
        filled = fill(factory, spec, [5, 45, 300])
        for row, n in ((1, 20), (2, 131)):
            keep = _some(filled, row, n)
            filled.backend.compact(_table(filled, row), keep)
            for layer in range(spec.num_layers):
                for was in (filled.k, filled.v):
                    was[layer][row] = _kept(was[layer][row], keep[layer])
            dead = slots_of(filled.tables[row], n, filled.contexts[row], spec.block_size)
            filled.contexts[row] = n
            k, v = (np.full((len(dead), spec.num_kv_heads, dim), np.nan, np.float32) for _, dim in spec.planes)
            for layer in range(spec.num_layers):
                plan = StepArrays(slot_mapping=np.array(dead, np.int32))
                write(filled.backend, plan, layer, k, v)
        for q_lens in ([1, 1, 1], [2, 7, 30]):
            for layer in range(spec.num_layers):
                q = filled.queries(q_lens, 4)
                out = attend(filled.backend, layer, q, filled.plan(q_lens))
                close(out, filled.expected(layer, q, q_lens), spec, f"compacted rows, layer {layer}")


@_case
def misplaced_tokens_are_refused_before_a_byte_changes(factory: Factory) -> None:
    """Places that do not ascend or leave the blocks, wrong shapes and ids; everything, without the capability."""
    for spec in specs(factory):
        if not capabilities_of(factory).compacts:
            backend = factory(spec, 3)
            refused(partial(backend.compact, [1], [0]), ValueError, "compact without the capability", "compact")
            continue
        filled = fill(factory, spec, [30])
        backend, table, before = filled.backend, _table(filled, 0), everything(filled.backend)
        heads = (spec.num_layers, spec.num_kv_heads)
        last = len(table) * spec.block_size
        late = np.tile(np.arange(3), (*heads, 1))
        late[-1, -1] = [0, 2, 1]  # wrong in the last head of the last layer alone
        wrong: list[tuple[type[Exception], Any, Any]] = [
            (ValueError, table, [0, 2, 2]),
            (ValueError, table, [3, 1]),
            (ValueError, table, [-1, 1]),
            (ValueError, table, [0, last]),
            (ValueError, table, late),
            (ValueError, table, np.zeros((heads[0] + 1, heads[1], 1), np.int32)),
            (ValueError, table, np.zeros((heads[0], 1), np.int32)),
            (ValueError, [], [0]),
            (ValueError, [table[0], table[0]], [0]),
            (IndexError, [backend.num_blocks], [0]),
            (IndexError, [-1], [0]),
            (TypeError, table, [0.0, 1.0]),
        ]
        for number, (error, blocks, keep) in enumerate(wrong):
            refused(partial(backend.compact, blocks, keep), error, f"compact {number}", "compact")
        same_bytes(everything(backend), before, "a refused compaction")
