"""Is this a correct backend? A list of cases that every `kvpool.protocol.KVBackend` has to pass.

``check_backend(MyBackend)`` runs all; a test can take them one by one (docs/backends.md). A case takes a factory
``factory(spec, num_blocks)``.

Every pool is filled with NaN first, in every slot of every block, the reserved block 0 included; known tokens
are then written into randomly chosen blocks, and what comes out is compared with dense float64 attention
(`kvpool.testing.dense`) over the values as the dtype rounds them. So a backend that reads one slot too many
answers NaN. How large an error may be: `kvpool.testing.filled.TOLERANCE`. Cases try only what `capabilities`
claims; a case for which nothing is left raises `NotApplicable`. More of them are in `conformance_attention`
and `conformance_engines`; `CASES` has all.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from dataclasses import fields, replace
from functools import partial
from itertools import chain
from typing import Any

import numpy as np

from kvpool import Plan, Pool
from kvpool.protocol import AttentionOptions, BatchShape, KVBackend, StepArrays
from kvpool.spec import DTYPES, LAYOUTS, QUANT_BITS, KVSpec
from kvpool.testing.conformance_attention import exported
from kvpool.testing.conformance_engines import RandomEngine
from kvpool.testing.dense import dense_attention, dense_attention_and_size, quantized, round_to, stored_bytes
from kvpool.testing.filled import (
    CASES,
    SEED,
    Case,
    Expected,
    Factory,
    Filled,
    NotApplicable,
    attend,
    capabilities_of,
    case,
    close,
    contexts,
    everything,
    fill,
    fill_all,
    int32,
    mask_rows,
    need,
    quantized_specs,
    refused,
    run_cases,
    same_bytes,
    slots_of,
    some_options,
    specs,
    token_columns,
    told,
    values,
    write,
)

__all__ = ["CASES", "NotApplicable", "check_backend"]

BLOCK_SIZES = (1, 3, 8, 16, 32)


def check_backend(factory: Factory, cases: Sequence[Case] | None = None) -> dict[str, str]:
    """Run all cases, or those given.

    Returns
    -------
    dict
        Case name to "passed" or "not applicable".

    Raises
    ------
    AssertionError
        Some case failed. The message names every case that did, and how; the first failure is chained.
    """
    return run_cases(CASES if cases is None else cases, lambda case: case(factory))


# ---------------------------------------------------------------------- attention


@case
def protocol_is_implemented(factory: Factory) -> None:
    """All methods are there, the formats are known, capabilities are what the spec says."""
    spec = next(specs(factory))
    backend = factory(spec, 3)
    assert isinstance(backend, KVBackend), "a method or attribute of KVBackend is missing"
    assert backend.spec == spec and backend.num_blocks == 3
    assert backend.capabilities.refusal(spec) is None, "the backend serves what its capabilities refuse"
    with Pool(4, 8) as pool:
        Plan(pool, 1, formats=tuple(backend.required_formats))


@case
def decode_equals_dense_attention(factory: Factory) -> None:
    """One query per row; every dtype, block size and head grouping; contexts around every block boundary."""
    for kv_heads, q_heads in ((2, 2), (2, 8), (1, 4)):
        for spec in specs(factory, kv_heads=kv_heads, q_heads=q_heads, dtypes=tuple(DTYPES), block_sizes=BLOCK_SIZES):
            filled = fill(factory, spec, contexts(spec.block_size))
            filled.check([1] * len(filled.contexts), q_heads, f"decode, {q_heads} over {kv_heads} heads")


@case
def ragged_chunks_equal_dense_attention(factory: Factory) -> None:
    """Rows with no query, one, some and all of their tokens as queries, in one batch."""
    for kv_heads, q_heads in ((2, 4), (1, 3)):
        for spec in specs(factory, kv_heads=kv_heads, q_heads=q_heads, dtypes=tuple(DTYPES), block_sizes=BLOCK_SIZES):
            lengths = contexts(spec.block_size)
            filled = fill(factory, spec, lengths)
            some = [min(length, (0, 1, 2, 5)[i % 4]) for i, length in enumerate(lengths)]
            for q_lens in (lengths, some, [0] * len(lengths)):
                filled.check(q_lens, q_heads, f"chunks of {q_lens} in {lengths}")


@case
def plans_of_int64_are_read_like_int32(factory: Factory) -> None:
    """Engines with large pools ask for int64 plans."""
    for spec in specs(factory):
        filled, q_lens = fill(factory, spec, [3, 16, 9]), [2, 1, 9]
        plan = filled.plan(q_lens)
        wide = StepArrays(*(getattr(plan, field.name).astype(np.int64) for field in fields(plan)))
        k, v = (np.concatenate([x[0][i][-n:] for i, n in enumerate(q_lens)]) for x in (filled.k, filled.v))
        write(filled.backend, wide, 0, k, v)
        q = filled.queries(q_lens, 4)
        close(attend(filled.backend, 0, q, wide), filled.expected(0, q, q_lens), spec, "int64 plan")


@case
def layouts_are_strides_only(factory: Factory) -> None:
    """Every layout answers the same, and exports the same bytes, also where keys and values differ in dimension."""
    exported: dict[int, np.ndarray] = {}
    can = capabilities_of(factory)
    dims = (8, 12) if can.mixed_head_dims else (8, 8)
    for spec in specs(factory, layers=3, layouts=can.layouts, block_sizes=(3, 8), head_dims=dims):
        filled = fill(factory, spec, [1, 7, 24])
        filled.check([1, 7, 2], 4, "strided layout")
        data = everything(filled.backend)
        same_bytes(data, exported.setdefault(spec.block_size, data), f"export from layout {spec.layout}")


@case
def attention_weights_are_returned(factory: Factory) -> None:
    """`return_attn`: the weights in logical token order, 0 where nothing is visible; a sink's share is missing."""
    can = capabilities_of(factory)
    need(can.return_attn)
    for spec in specs(factory):
        filled, q_lens = fill(factory, spec, [3, 16, 9]), [2, 1, 9]
        q, plan, backend = filled.queries(q_lens, 4), filled.plan(q_lens), filled.backend
        for options in (None, some_options(filled, q_lens, 4, can.features)):
            out, attn = backend.attend(backend.prepare(plan), 1, backend.asarray(q), options=options, return_attn=True)
            result = filled.expected(1, q, q_lens, None, options)
            close(backend.to_numpy(out), result, spec, "result beside the weights")
            expected, begin = np.zeros((12, 4, 16)), 0
            for row, n in enumerate(q_lens):
                mine, k, v = slice(begin, begin + n), filled.k[1][row], filled.v[1][row]
                expected[mine, :, : len(k)] = dense_attention(q[mine], k, v, None, mask_rows(options, mine))[1]
                begin += n
            largest = expected.max(axis=-1, keepdims=True)
            close(backend.to_numpy(attn), Expected(expected, largest), spec, f"weights, {told(options)}")


@case
def unused_slots_never_matter(factory: Factory) -> None:
    """Whatever other slots hold and table padding names, NaN included, and in whatever blocks the tokens are: the same
    result, bit for bit.
    """
    for spec in specs(factory, dtypes=tuple(DTYPES), block_sizes=(1, 3, 8, 16)):
        results = []
        for shift, poison, pad in ((0, 0.0, 0), (1, np.nan, 0), (2, np.nan, -1), (3, np.inf, 1), (0, -np.inf, 0)):
            filled, q_lens = fill(factory, spec, [1, 8, 13, 32], poison=poison, pad=pad, shift=shift), [1, 0, 5, 3]
            q = filled.queries(q_lens, 4)
            results.append(attend(filled.backend, 1, q, filled.plan(q_lens)))
        for result in results[1:]:
            assert np.array_equal(result, results[0]), f"a slot out of sight matters ({spec}, seed {SEED})"


@case
def padding_is_inert(factory: Factory) -> None:
    """Padding (rows of length 0, flat cu_q_lens, slots -1) writes nothing, answers 0 and scores 0, with any options."""
    can = capabilities_of(factory)
    for spec in specs(factory):
        filled = fill(factory, spec, [8, 5])
        padded, backend = filled.padded([2, 1]), filled.backend
        before = everything(backend)
        k, v = (np.ones((6, spec.num_kv_heads, dim), np.float32) for _, dim in spec.planes)
        write(backend, padded, 0, k, v)
        same_bytes(everything(backend), before, "a write to slots -1")
        q = filled.queries([6], 4)
        every = given = some_options(filled, [2, 1], 4, can.features)
        if every.mask is not None:
            nan = np.full((3, *every.mask.shape[1:]), np.nan, np.float32)
            given = replace(every, mask=np.concatenate([every.mask, nan]))
        for plan, options, due in ((padded, None, None), (filled.padded([2, 1], pad=-1), given, every)):
            out = attend(backend, 0, q, plan, None, options)
            close(out[:3], filled.expected(0, q[:3], [2, 1], None, due), spec, f"rows before padding, {told(due)}")
            assert out.shape[0] == 6 and not out[3:].any(), "padding tokens must answer 0"
        empty = StepArrays(block_tables=np.zeros((0, 1), np.int32))
        backend.copy_blocks(empty)
        write(backend, empty, 0, k[:0], v[:0])
        assert attend(backend, 0, q[:0], empty).shape == (0, 4, spec.value_head_dim)
        for kind in can.scores:
            alone, scores = exported(filled, q[:3], filled.plan([2, 1]), kind)[1], exported(filled, q, padded, kind)[1]
            assert scores.shape == (4, spec.num_kv_heads, 8) and not scores[2:].any(), "padding rows must score 0"
            assert np.array_equal(scores[:2], alone), "padding rows change the scores of others"
            assert exported(filled, q[:0], empty, kind)[1].shape == (0, spec.num_kv_heads, 0)
        same_bytes(everything(backend), before, "an empty batch")


# ---------------------------------------------------------------------- bytes in blocks


@case
def written_values_are_rounded_to_nearest_even(factory: Factory) -> None:
    """The stored bits of ties, huge values, infinities and NaN."""
    tie = 1 + 2.0**-8, 1 + 3 * 2.0**-8, 1 + 2.0**-11, 1 + 3 * 2.0**-11
    special = [*tie, 1 / 3, -2 / 3, 65519.0, 65520.0, 1e30, np.inf, -np.inf, 0.0]
    for spec in specs(factory, dtypes=tuple(DTYPES), layers=1, kv_heads=1, block_sizes=(16, 8, 32)):
        backend = factory(spec, 2)
        heads_k, heads_v = (np.resize(np.array(special, np.float32), (1, 1, dim)) for _, dim in spec.planes)
        write(backend, StepArrays(slot_mapping=int32([spec.block_size])), 0, heads_k, heads_v)
        got = np.asarray(backend.export_blocks([1]))[0][: spec.head_dim * spec.itemsize_nbytes]
        expected = stored_bytes(round_to(heads_k, spec.dtype), spec.dtype)
        assert np.array_equal(got, expected), f"values are not rounded to nearest even ({spec.dtype})"


@case
def copies_take_exactly_the_valid_tokens(factory: Factory) -> None:
    """Copy-on-write moves the first tokens of a block in all layers and planes; the rest of dst stays."""
    for spec in specs(
        factory,
        layers=3,
        layouts=capabilities_of(factory).layouts,
        block_sizes=(1, 3, 8),
        dtypes=tuple(DTYPES),
        packed=True,
    ):
        backend, rng = factory(spec, 7), np.random.default_rng(SEED)
        fill_all(backend, rng)
        before = everything(backend)
        copies = np.array([[3, 5, max(1, spec.block_size - 1)], [3, 1, 1], [2, 6, spec.block_size]], np.int32)
        backend.copy_blocks(StepArrays(copies=copies))
        expected = before.copy()
        for src, dst, num_tokens in copies:
            for columns in token_columns(spec, num_tokens):
                expected[dst, columns] = before[src, columns]
        same_bytes(everything(backend), expected, f"copies {copies.tolist()} ({spec.layout})")
        backend.copy_blocks(copies[:0])
        backend.copy_blocks(np.array([[6, 4, 1]], np.int32))
        for columns in token_columns(spec, 1):
            expected[4, columns] = expected[6, columns]
        same_bytes(everything(backend), expected, "copies given as an array")


@case
def copies_writes_reads_happen_in_order(factory: Factory) -> None:
    """A copy sees the writes before it and none after it; a read sees all of them."""
    for spec in specs(factory, block_sizes=(8, 16)):
        backend, rng = factory(spec, 4), np.random.default_rng(SEED)
        fill_all(backend, np.nan)
        writes = StepArrays(slot_mapping=np.arange(spec.block_size, spec.block_size + 5, dtype=np.int32))
        reads = StepArrays(int32([[2], [1]]), int32([4, 5]), int32([0, 1, 2]), int32([-1, -1]))
        copies = int32([[1, 2, 4]])
        for _ in range(2):
            # Block 1 is written, copied to block 2, and overwritten: 2 keeps what 1 held in between.
            old, new = ([values(rng, (5, spec.num_kv_heads, d), spec.dtype) for _, d in spec.planes] for _ in "on")
            for layer in range(spec.num_layers):
                write(backend, writes, layer, old[0], old[1])
            backend.copy_blocks(StepArrays(copies=copies))
            for layer in range(spec.num_layers):
                write(backend, writes, layer, new[0], new[1])
                q = values(rng, (2, 4, spec.head_dim), spec.dtype)
                copied = dense_attention_and_size(q[:1], old[0][:4], old[1][:4])
                overwritten = dense_attention_and_size(q[1:], new[0], new[1])
                expected = Expected(*map(np.concatenate, zip(copied, overwritten, strict=True)))
                close(attend(backend, layer, q, reads), expected, spec, "write, copy, write, read")


@case
def gather_copies_tokens_in_logical_order(factory: Factory) -> None:
    """`gather` gives the written tokens, and what it gave does not change when the pool does."""
    layouts = capabilities_of(factory).layouts
    for spec in specs(factory, layouts=layouts, block_sizes=(1, 8), dtypes=tuple(DTYPES)):
        filled = fill(factory, spec, [19])
        backend, table = filled.backend, filled.tables[0, : -(-19 // spec.block_size)]
        k, v = (backend.to_numpy(x) for x in backend.gather(1, table, 19))
        whole_block = backend.gather(1, table[:1].tolist())
        no_block = backend.gather(1, table[:0])
        fill_all(backend, np.nan)
        assert np.array_equal(k, filled.k[1][0]) and np.array_equal(v, filled.v[1][0]), f"gather differs ({spec})"
        first = backend.to_numpy(whole_block[0])
        assert np.array_equal(first, filled.k[1][0][: spec.block_size]), "gather must hand out copies"
        assert backend.to_numpy(no_block[1]).shape == (0, spec.num_kv_heads, spec.value_head_dim)


@case
def exported_blocks_hold_the_documented_bytes(factory: Factory) -> None:
    """Layer, plane, position, head, element: known tokens appear where they belong, quantized ones by the formula."""
    can = capabilities_of(factory)
    dense = specs(factory, layouts=can.layouts, dtypes=tuple(DTYPES), layers=3, packed=True)
    for spec in chain(dense, quantized_specs(factory, 1, can.layouts[:1], can.dtypes[1:])):
        filled = fill(factory, spec, [spec.block_size])
        data = np.asarray(filled.backend.export_blocks([int(filled.tables[0, 0])]))
        assert data.dtype == np.uint8 and data.shape == (1, spec.block_nbytes), "export is uint8 [n, block_nbytes]"
        expected = [
            part.ravel()
            for layer in range(spec.num_layers)
            for given, bits in zip((filled.given_k, filled.given_v), spec.bits, strict=True)
            for part in filled.stored(given[layer][0], bits)
        ]
        same_bytes(data, np.concatenate(expected)[None], f"export of {spec.storage} from layout {spec.layout}")


@case
def import_restores_what_export_took(factory: Factory) -> None:
    """Into the same blocks, into others, and into another backend; no other block changes."""
    layouts = capabilities_of(factory).layouts
    for spec in specs(factory, layouts=layouts, dtypes=tuple(DTYPES), block_sizes=(3, 8), packed=True):
        backend, other = factory(spec, 6), factory(spec, 9)
        fill_all(backend, np.random.default_rng(SEED))
        fill_all(other, np.random.default_rng(SEED + 1))
        data, before = np.asarray(backend.export_blocks([4, 1])).copy(), everything(other)
        same_bytes(data, everything(backend)[[4, 1]], "export in the order of the ids")
        other.import_blocks(np.array([2, 8], np.int32), data)
        before[[2, 8]] = data
        same_bytes(everything(other), before, "import into another backend")
        backend.zero([4, 1])
        backend.import_blocks([4, 1], data)
        same_bytes(np.asarray(backend.export_blocks([4, 1])), data, "import into the same blocks")


@case
def zero_clears_only_what_it_names(factory: Factory) -> None:
    """All layers and planes of these blocks are 0, everything else stays."""
    for spec in specs(factory, layouts=capabilities_of(factory).layouts, layers=3, packed=True):
        backend = factory(spec, 6)
        fill_all(backend, np.random.default_rng(SEED))
        expected = everything(backend)
        backend.zero(np.array([5, 2], np.int32))
        backend.zero([])
        expected[[5, 2]] = 0
        same_bytes(everything(backend), expected, "zero")


@case
def warmup_changes_nothing(factory: Factory) -> None:
    """Shapes may be warmed up at any time."""
    for spec in specs(factory):
        filled = fill(factory, spec, [9])
        before = everything(filled.backend)
        for scores in (None, *filled.backend.capabilities.scores):
            filled.backend.warmup([BatchShape(1, 1, 4, 4), BatchShape(3, 8, 2, 4)], scores=scores)
            filled.backend.warmup((), scores=scores)
        same_bytes(everything(filled.backend), before, "warmup")


# ---------------------------------------------------------------------- with a real pool


@case
def engine_steps_equal_dense_attention(factory: Factory) -> None:
    """A random engine on a tight pool: forks, copy-on-write, truncation, reservation, padding, closing."""
    for spec in specs(factory, block_sizes=BLOCK_SIZES):
        RandomEngine(factory, spec, SEED).play(range(150))


@case
def rollback_forgets_a_step_that_failed_half_way(factory: Factory) -> None:
    """The backend raises after copies and half of the writes; the same step after a rollback is right."""
    for spec in specs(factory, block_sizes=(3, 8), layouts=capabilities_of(factory).layouts):
        RandomEngine(factory, spec, SEED + 1, fail_every=2).play(range(100))


# ---------------------------------------------------------------------- other numbers of blocks


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


# ---------------------------------------------------------------------- compaction


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


# ---------------------------------------------------------------------- quantized planes

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


# ---------------------------------------------------------------------- steps


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


# ---------------------------------------------------------------------- misuse


@case
def misuse_is_refused_before_a_byte_changes(factory: Factory) -> None:
    """Wrong layers, shapes and ids: the documented exception, the storage as it was."""
    for spec in specs(factory):
        filled = fill(factory, spec, [9, 4])
        before = everything(filled.backend)
        wrong = [text for expected, call in _misuses(filled) if (text := _misuse_finding(expected, call))]
        assert not wrong, "\n".join(wrong)
        same_bytes(everything(filled.backend), before, "misuse")


def _misuse_finding(expected: type[Exception], call: Callable[[], Any]) -> str:
    """The fault in the answer of a backend to a misuse; "" if there is none."""
    try:
        call()
        answer = "was accepted"
    except expected:
        return ""
    except Exception as error:
        answer = f"raised {error!r}"
    return f"{_source(call)} {answer}, {expected.__name__} is documented"


def _source(call: Callable[[], Any]) -> str:
    """The text of a lambda of `_misuses`."""
    lines = inspect.getsource(call).strip()
    return lines.partition("lambda: ")[2].rstrip(",").removesuffix(")")


def _misuses(filled: Filled) -> list[tuple[type[Exception], Callable[[], Any]]]:
    backend, spec, plan = filled.backend, filled.backend.spec, filled.plan([1, 1])
    layers, blocks, size = spec.num_layers, backend.num_blocks, spec.block_size
    heads, dim = spec.num_kv_heads, spec.head_dim

    def array(*shape: int) -> Any:
        return backend.asarray(np.ones(shape, np.float32))

    k, v, q = array(2, heads, dim), array(2, heads, spec.value_head_dim), array(2, 2 * heads, dim)
    beyond = StepArrays(slot_mapping=int32([0, blocks * size]))
    row = np.zeros((1, spec.block_nbytes), np.uint8)
    return [
        (IndexError, lambda: backend.write(backend.prepare(plan), layers, k, v)),
        (IndexError, lambda: backend.write(backend.prepare(plan), -1, k, v)),
        (IndexError, lambda: backend.attend(backend.prepare(plan), layers, q)),
        (IndexError, lambda: backend.write(backend.prepare(beyond), 0, k, v)),
        (ValueError, lambda: backend.write(backend.prepare(plan), 0, array(2, heads + 1, dim), v)),
        (ValueError, lambda: backend.write(backend.prepare(plan), 0, k, array(2, heads, spec.value_head_dim + 1))),
        (ValueError, lambda: backend.write(backend.prepare(plan), 0, k[:1], v[:1])),
        (ValueError, lambda: backend.attend(backend.prepare(plan), 0, array(2, 2 * heads + 1, dim))),
        (ValueError, lambda: backend.attend(backend.prepare(plan), 0, array(2, 2 * heads, dim - 1))),
        (IndexError, lambda: backend.copy_blocks(int32([[1, blocks, 1]]))),
        (IndexError, lambda: backend.copy_blocks(int32([[-1, 1, 1]]))),
        (ValueError, lambda: backend.copy_blocks(int32([[1, 2, 1], [1, 3, size + 1]]))),
        (ValueError, lambda: backend.copy_blocks(int32([[1, 2, 1], [1, 3, 0]]))),
        (IndexError, lambda: backend.zero([1, blocks])),
        (TypeError, lambda: backend.zero(np.array([1.5]))),
        (IndexError, lambda: backend.gather(0, [-1])),
        (ValueError, lambda: backend.gather(0, [1], size + 1)),
        (IndexError, lambda: backend.export_blocks([blocks])),
        (IndexError, lambda: backend.import_blocks([blocks], row)),
        (ValueError, lambda: backend.import_blocks([1], row[:, :-1])),
        (ValueError, lambda: backend.import_blocks([1, 1], np.concatenate([row, row]))),
    ]


@case
def refused_specs_raise(factory: Factory) -> None:
    """What `capabilities` does not list, the factory refuses with a ValueError."""
    spec, can = next(specs(factory)), capabilities_of(factory)
    others = [replace(spec, dtype=dtype) for dtype in DTYPES]
    others += [replace(spec, layout=layout) for layout in LAYOUTS]
    others += [replace(spec, block_size=7), replace(spec, head_dim=7), replace(spec, v_head_dim=spec.head_dim + 1)]
    dim = max(can.head_dims or (128,))
    wide = replace(spec, head_dim=dim, v_head_dim=dim, quant_group_size=32)
    others += [replace(wide, k_bits=bits, v_bits=bits) for bits in QUANT_BITS if dim % 32 == 0]
    wrong = [(spec, reason) for spec in others if (reason := can.refusal(spec))]
    for spec, reason in wrong:
        try:
            factory(spec, 2)
        except ValueError:
            continue
        raise AssertionError(f"{spec} was accepted, although {reason}")
    need(wrong)
