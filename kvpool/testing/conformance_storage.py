"""Conformance cases about what is stored, and about steps: `compact`, quantized planes, and what `prepare` makes.

A case runs where `capabilities` has what it needs (`compacts`, `quant_bits`); what is not named there has to be
refused. `kvpool.testing.conformance` is the entrance, and says how cases are made.
"""

from __future__ import annotations

from dataclasses import fields
from functools import partial
from typing import Any

import numpy as np

from kvpool.config import DTYPES, KVSpec
from kvpool.protocol import AttentionOptions, StepArrays
from kvpool.testing.dense import quantized
from kvpool.testing.filled import (
    SEED,
    Factory,
    Filled,
    attend,
    capabilities_of,
    case,
    close,
    everything,
    fill,
    need,
    quantized_specs,
    refused,
    same_bytes,
    slots_of,
    specs,
    values,
    write,
)

# ====================== other numbers of blocks


def _resized(filled: Filled, num_blocks: int, moves: np.ndarray) -> None:
    """Resize, and compare all bytes and the attention of the rows with those of before."""
    backend, count = filled.backend, min(num_blocks, filled.backend.num_blocks)
    due = everything(backend)
    due[moves[:, 1]] = due[moves[:, 0]]
    backend.resize(num_blocks, moves)
    assert backend.num_blocks == num_blocks, f"num_blocks is {backend.num_blocks}, it was resized to {num_blocks}"
    same_bytes(backend.export_blocks(np.arange(count)), due[:count], f"blocks of a pool of {num_blocks}")
    where = dict(moves.tolist())
    filled.tables[:] = [[where.get(block, block) for block in row] for row in filled.tables.tolist()]
    backend.settle()


@case
def resized_pools_keep_what_stays(factory: Factory) -> None:
    """Every layout and dtype: blocks move to the front, what others had is theirs, and the rows answer as before."""
    layouts = capabilities_of(factory).layouts
    for spec in specs(factory, dtypes=tuple(DTYPES), layouts=layouts, block_sizes=(1, 3, 8), layers=3):
        filled = fill(factory, spec, [21, 30])
        backend, size = filled.backend, filled.backend.num_blocks
        for grown in (size + 1, 3 * size):
            _resized(filled, grown, np.zeros((0, 2), np.int64))
        backend.import_blocks([3 * size - 1], np.full((1, spec.block_nbytes), 1, np.uint8))
        used = np.unique(np.concatenate([_table(filled, row) for row in range(len(filled.contexts))]))
        end = max(len(used) + 1, 2)
        targets = np.setdiff1d(np.arange(end), used)[::-1]
        sources = used[used >= end]
        _resized(filled, end, np.stack([sources, targets[: len(sources)]], axis=1))
        _resized(filled, size, np.zeros((0, 2), np.int64))
        for row, context in enumerate(filled.contexts):
            for layer in range(spec.num_layers):
                found = backend.gather(layer, _table(filled, row), context)
                for got, was in zip(found, (filled.k, filled.v), strict=True):
                    same = np.array_equal(backend.to_numpy(got), was[layer][row])
                    assert same, f"row {row}, layer {layer} ({spec}, seed {SEED})"


@case
def wrong_resizes_are_refused_before_a_byte_changes(factory: Factory) -> None:
    """No blocks, a source that stays, a target that leaves, one block twice."""
    for spec in specs(factory):
        backend = fill(factory, spec, [21, 30]).backend
        size, before = backend.num_blocks, everything(backend)
        for error, num_blocks, moves in (
            (ValueError, 0, []),
            (IndexError, size - 2, [[0, 1]]),
            (IndexError, size - 2, [[size, 1]]),
            (IndexError, size - 2, [[size - 1, size - 2]]),
            (ValueError, size - 2, [[size - 1, 0], [size - 2, 0]]),
            (ValueError, size - 2, [[size - 1, 0], [size - 1, 1]]),
            (ValueError, size - 2, [[size - 1, 0, 1]]),
        ):
            refused(partial(backend.resize, num_blocks, moves), error, f"{num_blocks}, {moves}", "resize")
        assert backend.num_blocks == size
        same_bytes(everything(backend), before, "a refused resize")


# ====================== compaction


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


@case
def compaction_moves_what_stays_and_nothing_else(factory: Factory) -> None:
    """Every layout and dtype, other tokens per layer and head: the rest of the pool keeps its bytes.

    Quantized tokens move as they are.
    """
    need(capabilities_of(factory).compacts)
    layouts = capabilities_of(factory).layouts
    for spec in specs(factory, dtypes=tuple(DTYPES), layouts=layouts, block_sizes=(1, 3, 8), layers=3, packed=True):
        filled = fill(factory, spec, [21, 30], poison=7.0)
        backend, table = filled.backend, _table(filled, 1)
        for n in (30, 29, 17, 8, 1, 0):
            before, keep = everything(backend), _some(filled, 1, n)
            gathered = [backend.gather(layer, table, filled.contexts[1]) for layer in range(spec.num_layers)]
            held = [[backend.to_numpy(x) for x in planes] for planes in gathered]
            backend.compact(table, keep)
            for layer, planes in enumerate(held):
                for kept, was in zip(backend.gather(layer, table, n), planes, strict=True):
                    same = np.array_equal(backend.to_numpy(kept), _kept(was, keep[layer]))
                    assert same, f"{n} tokens, layer {layer} ({spec}, seed {SEED})"
            filled.contexts[1] = n
            others = np.setdiff1d(np.arange(backend.num_blocks), table[: -(-n // spec.block_size)])
            same_bytes(everything(backend)[others], before[others], f"blocks behind {n} tokens, and of others")


@case
def one_list_of_places_serves_all_heads(factory: Factory) -> None:
    """``keep [n]`` is the same for every layer and head; int64 and lists will do."""
    need(capabilities_of(factory).compacts)
    for spec in specs(factory):
        filled, again = (fill(factory, spec, [30]) for _ in range(2))
        places = [0, 1, 5, 6, 13, 28, 29]
        filled.backend.compact(_table(filled, 0).tolist(), places)
        every = np.tile(np.array(places, np.int64), (spec.num_layers, spec.num_kv_heads, 1))
        again.backend.compact(_table(again, 0), every)
        same_bytes(everything(filled.backend), everything(again.backend), "keep [n] beside keep [L, Hk, n]")


@case
def compacted_rows_answer_from_what_stays(factory: Factory) -> None:
    """Attention after compaction is attention over the tokens that stay; NaN in what left changes no bit."""
    need(capabilities_of(factory).compacts)
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


@case
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


# ====================== quantized planes

_CONTEXTS = [1, 17, 99]
_TOLERANCE = 2e-5  # of float32 results: scale * sum(q n) and bias * sum(q) cancel to a few of 255 steps


def _quantized_specs(factory: Factory, *, layouts: bool = False) -> list[KVSpec]:
    """Quantized specs in every dtype; or in every layout."""
    can = capabilities_of(factory)
    dtypes = can.dtypes[:1] if layouts else can.dtypes
    found = list(quantized_specs(factory, 1, can.layouts if layouts else can.layouts[:1], dtypes))
    need(found)
    return found


@case
def groups_of_every_kind_are_stored_by_the_formula(factory: Factory) -> None:
    """One sign, one value, zeros, ties, tiny and large; one that is not finite becomes NaN, its neighbours do not."""
    for spec in _quantized_specs(factory):
        rng, n = np.random.default_rng(SEED), spec.block_size
        backend = factory(spec, 3)
        given = []
        for _, dim in spec.planes:
            x = rng.standard_normal((n, 2, dim)).astype(np.float32)
            x[1], x[2], x[3], x[4] = np.abs(x[1]), -np.abs(x[2]), 0.37, 0.0
            x[5], x[6], x[7] = rng.integers(-4, 5, x[5].shape), x[6] * 1e-6, x[7] * 1e3
            x[8, 0, 3], x[9, 1, dim - 1], x[10, 0, 0] = np.nan, np.inf, -np.inf
            given.append(x)
        k, v = map(backend.asarray, given)
        for slots in (np.arange(n, 2 * n), np.full(n, -1)):  # padding alone is no token
            backend.write(backend.prepare(StepArrays(slot_mapping=slots.astype(np.int32))), 0, k, v)
        got = [backend.to_numpy(x) for x in backend.gather(0, [1])]
        for x, bits, back in zip(given, spec.bits, got, strict=True):
            if bits is not None:
                expected = quantized(x, spec, bits)[1]
                room = 2 * np.finfo(np.float32).eps * np.abs(np.nan_to_num(expected)).max(axis=-1, keepdims=True)
                room = room + {"float32": 0.0, "float16": 2.0**-11, "bfloat16": 2.0**-8}[spec.dtype] * np.abs(expected)
                wrong = ~((np.abs(back - expected) <= room) | (np.isnan(back) & np.isnan(expected)))
                assert not wrong.any(), f"{spec.storage}: tokens {np.unique(np.argwhere(wrong)[:, 0])} come back wrong"


@case
def quantized_contexts_equal_dense_attention(factory: Factory) -> None:
    """Decode and chunks, slots that nobody sees full of NaN, with options where the backend has them."""
    features = capabilities_of(factory).features
    for spec in _quantized_specs(factory, layouts=True) + _quantized_specs(factory):
        filled = fill(factory, spec, _CONTEXTS)
        for q_lens in ([1, 1, 1], [1, 5, 70]):
            filled.check(q_lens, 4, f"{spec.storage}, {q_lens} queries", tolerance=_TOLERANCE)
        if "sinks" in features and "window" in features:
            options = AttentionOptions(sinks=np.linspace(-1, 2, 4), window=30)
            filled.check([1, 2, 3], 4, f"{spec.storage}, sinks and window", options=options, tolerance=_TOLERANCE)


# ====================== steps


@case
def capabilities_are_a_constant(factory: Factory) -> None:
    """One object, made once; what a backend queues is there to be evaluated, and `settle` waits for it."""
    for spec in specs(factory):
        backend = factory(spec, 3)
        can = backend.capabilities
        assert can is backend.capabilities and can == factory(spec, 3).capabilities, "capabilities are made anew"
        assert can.lazy or not len(backend.queued(0)), "something is queued, but the backend is not lazy"
        assert isinstance(backend.settle(), int), "settle returns how many arrays moved"


@case
def prepare_changes_nothing(factory: Factory) -> None:
    """A plan may be prepared early, twice, and for nothing."""
    for spec in specs(factory):
        filled, q_lens = fill(factory, spec, [9, 4]), [2, 1]
        plan, before = filled.plan(q_lens), everything(filled.backend)
        steps = [filled.backend.prepare(plan) for _ in range(2)]
        same_bytes(everything(filled.backend), before, "prepare")
        q = filled.queries(q_lens, 4)
        for step in steps:
            out = filled.backend.to_numpy(filled.backend.attend(step, 1, filled.backend.asarray(q)))
            close(out, filled.expected(1, q, q_lens), spec, "a plan that was prepared twice")


@case
def steps_are_used_side_by_side(factory: Factory) -> None:
    """Two plans in turn, each prepared before the other one's writes and reads."""
    for spec in specs(factory):
        filled, lens = fill(factory, spec, [9, 12]), [(3, 0), (0, 5)]
        backend, plans = filled.backend, [filled.plan(q_lens) for q_lens in lens]
        steps = [backend.prepare(plan) for plan in plans]
        for layer in range(spec.num_layers):
            for row, (step, q_lens) in enumerate(zip(steps, lens, strict=True)):
                k, v = (x[layer][row][-sum(q_lens) :] for x in (filled.given_k, filled.given_v))
                backend.write(step, layer, backend.asarray(k), backend.asarray(v))
                q = filled.queries(q_lens, 4)
                out = backend.to_numpy(backend.attend(step, layer, backend.asarray(q)))
                close(out, filled.expected(layer, q, q_lens), spec, f"step {row} of two")


@case
def calls_do_not_depend_on_the_plan_afterwards(factory: Factory) -> None:
    """The arrays of a plan are those of its next step when what was queued runs."""
    for spec in specs(factory):
        filled, q_lens = fill(factory, spec, [9, 12]), [2, 3]
        backend, given = filled.backend, filled.plan(q_lens)
        plan = StepArrays(*(np.array(getattr(given, field.name)) for field in fields(given)))
        step, q = backend.prepare(plan), filled.queries(q_lens, 4)
        k, v = (
            np.concatenate([values(filled.rng, (n, spec.num_kv_heads, dim), spec.dtype) for n in q_lens])
            for _, dim in spec.planes
        )
        backend.write(step, 0, backend.asarray(k), backend.asarray(v))
        out = backend.attend(step, 0, backend.asarray(q))
        for array in (plan.block_tables, plan.seq_lens, plan.cu_q_lens, plan.slot_mapping):
            array[:] = 0
        for kept, new in ((filled.k, k), (filled.v, v)):
            kept[0] = [np.concatenate([kept[0][0][:-2], new[:2]]), np.concatenate([kept[0][1][:-3], new[2:]])]
        close(backend.to_numpy(out), filled.expected(0, q, q_lens), spec, "a plan that went on")


@case
def contexts_are_read(factory: Factory) -> None:
    """`read`: keys and values of all rows in logical order; values past the end of a row are 0."""
    for spec in specs(factory, block_sizes=(3, 8)):
        filled = fill(factory, spec, [1, 8, 13])
        step = filled.backend.prepare(filled.plan([1, 0, 2]))
        for layer in range(spec.num_layers):
            k, v = map(filled.backend.to_numpy, filled.backend.read(step, layer))
            assert k.shape == (3, spec.num_kv_heads, 13, spec.head_dim), f"keys have the shape {k.shape}"
            for row, n in enumerate(filled.contexts):
                for x, stored in ((k, filled.k), (v, filled.v)):
                    assert np.array_equal(x[row, :, :n].swapaxes(0, 1), stored[layer][row]), f"row {row} is another"
                assert not v[row, :, n:].any(), f"values past the end of row {row} are not 0"


@case
def some_queries_are_attended_alone(factory: Factory) -> None:
    """`StepArrays.of_queries`: each query is a row of its own, and gets what it got among the others."""
    for spec in specs(factory):
        filled, q_lens = fill(factory, spec, [5, 16, 9]), [2, 0, 9]
        q, plan, tokens = filled.queries(q_lens, 4), filled.plan(q_lens), np.array([1, 2, 10])
        out = attend(filled.backend, 0, q[tokens], StepArrays.of_queries(plan, tokens))
        expected = filled.expected(0, q, q_lens)
        close(out, type(expected)(*(x[tokens] for x in expected)), spec, "some queries")
