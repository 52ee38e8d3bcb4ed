"""Is this a correct backend? A list of cases that every `kvpool.protocol.KVBackend` has to pass.

``check_backend(MyBackend)`` runs all; a test can take them one by one (docs/backends.md). A case takes a factory
``factory(spec, num_blocks)``.

Every pool is filled with NaN first, in every slot of every block, the reserved block 0 included; known tokens
are then written into randomly chosen blocks, and what comes out is compared with dense float64 attention
(`kvpool.testing.dense`) over the values as the dtype rounds them. So a backend that reads one slot too many
answers NaN. How large an error may be: `kvpool.testing.filled.TOLERANCE`. Cases try only what `capabilities`
claims; a case for which nothing is left raises `NotApplicable`. Those about layer groups are in
`conformance_engines`; `CASES` has all.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from dataclasses import fields, replace
from functools import partial
from itertools import chain, combinations, product
from typing import Any

import numpy as np

from kvpool import Plan, Pool
from kvpool.protocol import FEATURES, SCORES, AttentionOptions, BatchShape, KVBackend, StepArrays
from kvpool.spec import DTYPES, LAYOUTS, QUANT_BITS, KVSpec
from kvpool.testing.conformance_engines import RandomEngine
from kvpool.testing.dense import (
    dense_attention,
    dense_attention_and_size,
    dense_scores,
    quantized,
    round_to,
    stored_bytes,
)
from kvpool.testing.filled import (
    CASES,
    SEED,
    TOLERANCE,
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
    head_counts,
    int32,
    mask_rows,
    need,
    quantized_specs,
    random_mask,
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


# ---------------------------------------------------------------------- shapes

# Around powers of two and multiples of them: where kernels cut a context into parts.
LONG_CONTEXTS = [2047, 300, 1, 1025, 640, 2049]
HEAD_DIMS = ((64, 64), (80, 80), (96, 96), (128, 128), (192, 128), (256, 256), (7, 7), (13, 34))


@case
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


@case
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


@case
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
    need(tried)


@case
def chunks_of_any_length_share_a_batch(factory: Factory) -> None:
    """1 to 8 queries and more, of a new row and of one with a past."""
    q_lens = [1, 2, 3, 4, 5, 6, 7, 8, 9, 17, 33, 130]
    for kv_heads, q_heads in head_counts(factory, (2, 4), (3, 3), (1, 7), (1, 8), (4, 16)):
        for spec in specs(factory, layers=1, kv_heads=kv_heads, q_heads=q_heads, block_sizes=(3, 16)):
            for past in (0, 1, 45):
                lengths = [n + past for n in q_lens]
                fill(factory, spec, lengths).check(q_lens, q_heads, f"chunks of {q_lens} after {past} tokens")


# ---------------------------------------------------------------------- batches


@case
def a_row_has_the_same_bits_in_any_batch(factory: Factory) -> None:
    """Alone, in a batch, in the reversed batch, in other blocks: for backends that say so."""
    can = capabilities_of(factory)
    need(can.batch_invariant)
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


@case
def strided_inputs_are_read_by_their_strides(factory: Factory) -> None:
    """Keys, values and queries that are views: head-major, backwards, every second element."""
    for spec in specs(factory):
        filled = fill(factory, spec, [3, 40, 9])
        backend, q_lens = filled.backend, [1, 4, 9]
        need(hasattr(backend.asarray(np.zeros((1, 1, 1), np.float32)), "swapaxes"))
        plan = filled.plan(filled.contexts)
        q = filled.queries(q_lens, 4)
        for name, view in _VIEWS.items():
            fill_all(backend, np.nan)
            for layer in range(spec.num_layers):
                k, v = (np.concatenate(plane[layer]) for plane in (filled.k, filled.v))
                backend.write(backend.prepare(plan), layer, view(backend, k), view(backend, v))
                out = backend.to_numpy(backend.attend(backend.prepare(filled.plan(q_lens)), layer, view(backend, q)))
                close(out, filled.expected(layer, q, q_lens), spec, f"{name} inputs, layer {layer}")


_VIEWS: dict[str, Callable[[Any, np.ndarray], Any]] = {
    "head-major": lambda backend, x: backend.asarray(np.ascontiguousarray(x.swapaxes(0, 1))).swapaxes(0, 1),
    "backward": lambda backend, x: backend.asarray(np.ascontiguousarray(x[::-1]))[::-1],
    "spread": lambda backend, x: backend.asarray(np.repeat(np.repeat(x, 2, axis=0), 2, axis=2))[::2, :, ::2],
}

# ---------------------------------------------------------------------- options

_LONG = [1, 7, 16, 300, 2049]  # of a few tokens, and of many parts where a backend cuts contexts
_LONG_CHUNKS = [1, 2, 16, 33, 4]
_SHORT = [1, 17, 40, 131]
_SHORT_CHUNKS = [1, 17, 5, 9]


def _check_decode_and_chunks(
    filled: Filled, q_lens: list[int], what: str, options: AttentionOptions, scale: float | None = None
) -> None:
    for lens in ([1] * len(q_lens), q_lens):
        filled.check(lens, 4, f"{what}, {lens} queries in {filled.contexts}", scale, options)


# ---------------------------------------------------------------------- window


@case
def window_hides_older_tokens(factory: Factory) -> None:
    """Windows of one token, around every block boundary, and wider than any context."""
    need("window" in capabilities_of(factory).features)
    for spec in specs(factory, block_sizes=(1, 3, 8, 16)):
        size = spec.block_size
        lengths = contexts(size)
        filled = fill(factory, spec, lengths)
        for window in sorted({1, 2, max(1, size - 1), size, size + 1, 2 * size + 1, 10**12, 2**63 - 1}):
            _check_decode_and_chunks(filled, lengths, f"window {window}", AttentionOptions(window=window))
    for spec in specs(factory, dtypes=tuple(DTYPES), block_sizes=(16,)):
        filled = fill(factory, spec, _LONG)
        for window in (1, 100, 512, 1025, 2048, 2049):
            _check_decode_and_chunks(filled, _LONG_CHUNKS, f"window {window}", AttentionOptions(window=window))


@case
def slots_behind_the_window_never_matter(factory: Factory) -> None:
    """An engine may give blocks behind the window away: NaN there changes no bit."""
    need("window" in capabilities_of(factory).features)
    lengths, q_lens, window = [5, 40, 300, 1111], [2, 6, 1, 3], 21
    options = AttentionOptions(window=window)
    for spec in specs(factory, dtypes=tuple(DTYPES), block_sizes=(8, 16)):
        filled = fill(factory, spec, lengths)
        backend, q = filled.backend, filled.queries(q_lens, 4)
        before = attend(backend, 0, q, filled.plan(q_lens), None, options)
        dead: list[int] = []
        for table, context, n in zip(filled.tables, lengths, q_lens, strict=True):
            dead += slots_of(table, 0, max(0, context - n + 1 - window), spec.block_size)
        k, v = (np.full((len(dead), spec.num_kv_heads, dim), np.nan, np.float32) for _, dim in spec.planes)
        plan = StepArrays(slot_mapping=np.array(dead, np.int32))
        write(backend, plan, 0, k, v)
        after = attend(backend, 0, q, filled.plan(q_lens), None, options)
        assert np.array_equal(after, before), f"a slot behind the window matters ({spec}, seed {SEED})"


# ---------------------------------------------------------------------- soft cap


@case
def soft_cap_bounds_scaled_scores(factory: Factory) -> None:
    """``cap * tanh(scale * score / cap)``: of small caps, of Gemma's, and of one that changes nothing."""
    need("soft_cap" in capabilities_of(factory).features)
    for spec in specs(factory, dtypes=tuple(DTYPES)):
        filled = fill(factory, spec, _LONG)
        for cap, scale in ((0.5, None), (3.0, 1.0), (50.0, None), (1e30, None), (2, 0.1)):
            options = AttentionOptions(soft_cap=cap)
            _check_decode_and_chunks(filled, _LONG_CHUNKS, f"soft cap {cap}, scale {scale}", options, scale)


# ---------------------------------------------------------------------- sinks


@case
def sinks_are_counted_once(factory: Factory) -> None:
    """Sinks of weight next to nothing, of 0, and as heavy as the longest context; one query or many per row."""
    need("sinks" in capabilities_of(factory).features)
    sinks = ([0.0] * 4, [-3.0, 1.0, 5.0, 8.0], [-100.0, 100.0, 7.0, 2.0])
    for spec in specs(factory, dtypes=tuple(DTYPES), block_sizes=(1, 16)):
        filled = fill(factory, spec, _LONG)
        for logits, scale in product(sinks, (None, 0.1)):
            options = AttentionOptions(sinks=np.array(logits))
            _check_decode_and_chunks(filled, _LONG_CHUNKS, f"sinks {logits}, scale {scale}", options, scale)
    for kv_heads, q_heads in head_counts(factory, (4, 16), (2, 16)):
        for spec in specs(factory, kv_heads=kv_heads, q_heads=q_heads):
            options = AttentionOptions(sinks=np.linspace(-2, 6, q_heads))
            what = f"sinks of {q_heads} over {kv_heads} heads"
            fill(factory, spec, _SHORT).check(_SHORT_CHUNKS, q_heads, what, options=options)


# ---------------------------------------------------------------------- ALiBi


@case
def alibi_biases_by_distance(factory: Factory) -> None:
    """Slopes of usual sizes, steep, 0 and negative; each head its own.

    Softmax hides a bias that all keys share; a sink tells whether distance 0 has bias 0 for each query.
    """
    need("alibi_slopes" in capabilities_of(factory).features)
    sinks = [None] + [np.arange(4.0)] * ("sinks" in capabilities_of(factory).features)
    for spec in specs(factory, dtypes=tuple(DTYPES), block_sizes=(3, 16)):
        filled = fill(factory, spec, _LONG)
        for slopes, logits in product(([0.5, 0.25, 0.0625, 0.00390625], [0.7, 3.0, 0.0, -0.005]), sinks):
            options = AttentionOptions(alibi_slopes=np.array(slopes), sinks=logits)
            _check_decode_and_chunks(filled, _LONG_CHUNKS, f"slopes {slopes}, sinks {logits}", options)


# ---------------------------------------------------------------------- masks


@case
def masks_of_bools_and_floats_are_applied(factory: Factory) -> None:
    """Shared by all heads or not, wider than the contexts, contiguous or not; NaN where causality hides anyway."""
    need("mask" in capabilities_of(factory).features)
    for spec in specs(factory, dtypes=tuple(DTYPES), block_sizes=(3, 16)):
        filled = fill(factory, spec, _SHORT)
        for q_lens, kind, heads in product(([1] * 4, _SHORT_CHUNKS), (bool, float), (None, 1, 4)):
            options = AttentionOptions(mask=random_mask(filled, q_lens, kind, heads))
            filled.check(q_lens, 4, f"{kind.__name__} mask, heads {heads}, {q_lens} queries", options=options)
    for spec in specs(factory):
        filled = fill(factory, spec, _LONG)
        one = random_mask(filled, _LONG_CHUNKS, float, 1)
        views = {
            "broadcast": np.broadcast_to(one, (len(one), 4, one.shape[2])),
            "Fortran order": np.asfortranarray(random_mask(filled, _LONG_CHUNKS, bool, 4)),
            "backward": one[::-1, 0].copy()[::-1],
            "float16": np.where(one < -1e4, -np.inf, one).astype(np.float16),
        }
        for name, mask in views.items():
            filled.check(_LONG_CHUNKS, 4, f"{name} mask", options=AttentionOptions(mask=mask))


@case
def ends_of_the_float_range_are_numbers_like_others(factory: Factory) -> None:
    """Masks and sinks up to the largest float32 of both signs. Many models write the lowest for "hidden"."""
    need("mask" in capabilities_of(factory).features)
    some_sinks = [None, np.array([_FLOATS.max, _FLOATS.min, -3e38, 1.0])]
    for spec in specs(factory, dtypes=tuple(DTYPES), block_sizes=(16,), layers=1):
        filled = fill(factory, spec, _FAR)
        for q_lens in ([1] * len(_FAR), _FAR_CHUNKS):
            masks = {"zeros": None} | _far_masks(filled, q_lens)
            for (name, mask), sinks in product(masks.items(), some_sinks):
                if sinks is None or "sinks" in capabilities_of(factory).features:
                    what = f"mask of {name}, sinks {sinks}, {q_lens} queries"
                    filled.check(q_lens, 4, what, options=AttentionOptions(mask=mask, sinks=sinks))


_FLOATS = np.finfo(np.float32)
_FAR = [7, 40, 600]
_FAR_CHUNKS = [2, 33, 9]


def _far_masks(filled: Filled, q_lens: Sequence[int]) -> dict[str, np.ndarray]:
    """Masks float32 ``[T, 4, C']`` with numbers from the ends of the range, by name."""
    shape = sum(q_lens), 4, max(filled.contexts)
    ends = np.array([_FLOATS.min, _FLOATS.max, -3e38, 3e38, 0.0, -0.0, -np.inf], np.float32)
    draw = filled.rng.random(shape)
    of_each_query = ends[np.arange(shape[0]) % len(ends)]
    return {
        "the lowest float32 or 0": np.where(draw < 0.5, _FLOATS.min, 0).astype(np.float32),
        "one number for each query": np.broadcast_to(of_each_query[:, None, None], shape),
        "any number, the lowest more often": ends[np.minimum(draw**4 * len(ends), len(ends) - 1).astype(int)],
        "low numbers": ends[np.where(draw < 0.9, 0, 2)],
    }


@case
def queries_that_see_nothing_get_zero(factory: Factory) -> None:
    """All of the context masked, or all but one key, or long parts of it; per head; beside sinks or not."""
    need("mask" in capabilities_of(factory).features)
    with_sinks = "sinks" in capabilities_of(factory).features
    for spec in specs(factory, dtypes=tuple(DTYPES)):
        filled = fill(factory, spec, _LONG)
        q, plan = filled.queries(_LONG_CHUNKS, 4), filled.plan(_LONG_CHUNKS)
        for name, mask in _mostly_hidden(len(q), max(_LONG)).items():
            for sinks, kind in product((None, np.zeros(4)) if with_sinks else (None,), (bool, float)):
                given = mask if kind is bool else np.where(mask, 0, -np.inf).astype(np.float32)
                options = AttentionOptions(mask=given, sinks=sinks)
                out = attend(filled.backend, 0, q, plan, None, options)
                what = f"{kind.__name__} mask: {name}, sinks {sinks}"
                expected = filled.expected(0, q, _LONG_CHUNKS, None, options)
                close(out, expected, spec, what)
                assert not out[expected.size[..., 0] == 0].any(), f"{what}: a query that sees nothing must get 0"


def _mostly_hidden(num_tokens: int, width: int) -> dict[str, np.ndarray]:
    """Masks ``[T, 4, width]`` by the name of what they hide."""

    def seen(*keys: slice | int, heads: slice = slice(None)) -> np.ndarray:
        mask = np.zeros((num_tokens, 4, width), bool)
        for key in keys:
            mask[:, heads, key] = True
        return mask

    return {
        "everything": seen(),
        "everything for one head": seen(slice(None), heads=slice(1, None)),
        "all but the oldest": seen(0),
        "all but the newest": seen(-1),
        "the older part": seen(slice(1500, None)),
        "the newer part": seen(slice(None, 40)),
        "the middle": seen(slice(None, 20), slice(-20, None)),
        "both ends": seen(slice(700, 900)),
    }


# ---------------------------------------------------------------------- together


@case
def features_work_together(factory: Factory) -> None:
    """Every combination that the backend has; then all of them in every layout and dtype."""
    features = [name for name in FEATURES if name in capabilities_of(factory).features]
    need(len(features) > 1)
    spec = next(specs(factory))
    filled = fill(factory, spec, _SHORT)
    for some in chain.from_iterable(combinations(features, n) for n in range(2, len(features) + 1)):
        options, newest = some_options(filled, _SHORT_CHUNKS, 4, some), np.cumsum(_SHORT_CHUNKS) - 1
        filled.check(_SHORT_CHUNKS, 4, f"{', '.join(some)}, chunks", options=options)
        filled.check([1] * len(newest), 4, f"{', '.join(some)}, decode", options=mask_rows(options, newest))
    layouts = capabilities_of(factory).layouts
    for q_heads, kv_heads in ((4, 2), (3, 1)):
        for spec in specs(
            factory,
            kv_heads=kv_heads,
            q_heads=q_heads,
            layouts=layouts,
            dtypes=tuple(DTYPES),
            block_sizes=(3, 16),
            layers=1,
        ):
            filled = fill(factory, spec, [*_SHORT, 1300])
            for kind in (bool, float):
                q_lens = [*_SHORT_CHUNKS, 2]
                options = some_options(filled, q_lens, q_heads, features, kind)
                filled.check(q_lens, q_heads, f"all features, {q_heads} over {kv_heads} heads", 0.3, options)


# ---------------------------------------------------------------------- options that are refused


@case
def options_that_cannot_be_served_are_refused(factory: Factory) -> None:
    """A feature that the backend lacks, an array that does not fit the batch, another type: before a byte changes."""
    features = capabilities_of(factory).features
    unknown = set(features) - set(FEATURES)
    assert not unknown, f"capabilities name features that do not exist: {sorted(unknown)}"
    for spec in specs(factory):
        filled = fill(factory, spec, [9, 4])
        backend, before = filled.backend, everything(filled.backend)
        q, plan = backend.asarray(filled.queries([2, 1], 4)), filled.plan([2, 1])
        for what, expected, options in _bad_options(features):
            refused(partial(backend.attend, backend.prepare(plan), 0, q, options=options), expected, what)
        same_bytes(everything(backend), before, "refused options")


def _bad_options(features: tuple[str, ...]) -> list[tuple[str, type[Exception], Any]]:
    """For 3 tokens of 4 heads and contexts of up to 9."""
    fitting: dict[str, Any] = {
        "window": 4,
        "soft_cap": 5.0,
        "sinks": np.zeros(4),
        "alibi_slopes": np.ones(4),
        "mask": np.ones((3, 9), bool),
    }
    wrong: list[tuple[str, Any]] = [
        ("sinks", np.zeros(2)),
        ("alibi_slopes", np.zeros(5)),
        ("mask", np.ones((2, 9), bool)),
        ("mask", np.ones((3, 8), np.float32)),
        ("mask", np.ones((3, 2, 9), bool)),
        ("mask", np.ones((1, 4, 9), bool)),
    ]
    bad: list[tuple[str, type[Exception], Any]] = [("a dict of options", TypeError, {"window": 4})]
    for name, value in fitting.items():
        if name not in features:
            bad.append((f"{name}, which the backend lacks", ValueError, AttentionOptions(**{name: value})))
    for name, value in wrong:
        if name in features:
            bad.append((f"{name} of shape {value.shape}", ValueError, AttentionOptions(**{name: value})))
    return bad


# ---------------------------------------------------------------------- scores

_SCORED = [1, 16, 300, 2049]  # of a few tokens, and of many parts where a backend cuts contexts
_SCORED_CHUNKS = [1, 3, 33, 8]


def _kinds(factory: Factory) -> tuple[str, ...]:
    kinds = capabilities_of(factory).scores
    need(kinds)
    return kinds


def exported(
    filled: Filled, q: np.ndarray, plan: StepArrays, kind: str, options: AttentionOptions | None = None, **more: Any
) -> tuple[np.ndarray, np.ndarray]:
    """Result and scores ``[B, Hk, C]`` of layer 0."""
    backend = filled.backend
    out, s = backend.attend(backend.prepare(plan), 0, backend.asarray(q), options=options, scores=kind, **more)
    return backend.to_numpy(out), backend.to_numpy(s)


def check_scores(
    filled: Filled,
    q_lens: Sequence[int],
    q_heads: int,
    kind: str,
    options: AttentionOptions | None = None,
    tolerance: float = 0.0,
) -> None:
    """Scores are right, within `tolerance` where that is more than usual; the result has the bits of one without."""
    q, plan, spec = filled.queries(q_lens, q_heads), filled.plan(q_lens), filled.backend.spec
    what = f"{kind} scores, {list(q_lens)} queries in {filled.contexts}, {told(options)} ({spec}, seed {SEED})"
    out, scores = exported(filled, q, plan, kind, options)
    same = np.array_equal(out, attend(filled.backend, 0, q, plan, None, options), equal_nan=True)
    assert same, f"{what}: the result beside scores is another one"
    right = np.zeros((len(q_lens), spec.num_kv_heads, max(filled.contexts)))
    for row, (n, end) in enumerate(zip(q_lens, np.cumsum(q_lens), strict=True)):
        if n:
            newest = slice(end - 1, end)
            one = dense_scores(q[newest], filled.k[0][row], kind, None, mask_rows(options, newest))
            right[row, :, : one.shape[-1]] = one
    assert scores.shape == right.shape, f"{what}: shape {scores.shape}, expected {right.shape}"
    # A raw score's rounding is in proportion to what was added up, a weight's to itself and to its score.
    size = 1 + np.abs(right) if kind == "raw" else np.abs(right) * 10 + 1e-6
    wrong = ~(np.abs(scores - right) <= max(TOLERANCE[spec.dtype] * 4, tolerance) * size)  # NaN counts as wrong
    if wrong.any():
        row, head, c = np.argwhere(wrong)[0]
        raise AssertionError(
            f"{what}: row {row}, head {head}, position {c} is {scores[row, head, c]}, expected {right[row, head, c]}"
        )
    assert not scores[right == 0].any() or kind == "raw", f"{what}: what nobody sees must score 0"


# ---------------------------------------------------------------------- values of scores


@case
def scores_of_decode_equal_dense_scores(factory: Factory) -> None:
    """One query per row; every dtype, block size, head grouping, bits; contexts around block boundaries, and long."""
    for kind in _kinds(factory):
        for kv_heads, q_heads in head_counts(factory, (2, 2), (2, 8), (1, 4), (2, 6)):
            for spec in specs(
                factory, kv_heads=kv_heads, q_heads=q_heads, dtypes=tuple(DTYPES), block_sizes=(1, 3, 8, 16), layers=1
            ):
                filled = fill(factory, spec, contexts(spec.block_size))
                check_scores(filled, [1] * len(filled.contexts), q_heads, kind)
        for spec in specs(factory, block_sizes=(16,), layouts=capabilities_of(factory).layouts, layers=1):
            check_scores(fill(factory, spec, _SCORED), [1] * len(_SCORED), 4, kind)
        for bits in capabilities_of(factory).quant_bits:
            for spec in specs(factory, head_dims=(64, 64), block_sizes=(16,), layers=1):
                quantized = replace(spec, k_bits=bits, v_bits=bits)
                check_scores(fill(factory, quantized, [1, 17, 60]), [1, 1, 33], 4, kind, tolerance=1e-4)


@case
def scores_of_chunks_are_of_the_newest_query(factory: Factory) -> None:
    """Rows with no query, a few and many: the newest one's scores; zeros where there is none."""
    for kind in _kinds(factory):
        for spec in specs(factory, dtypes=tuple(DTYPES), block_sizes=(16,), layers=1):
            filled = fill(factory, spec, _SCORED)
            for q_lens in (_SCORED_CHUNKS, [0, 16, 9, 1], [1, 0, 70, 0], [0] * 4):
                check_scores(filled, q_lens, 4, kind)


@case
def scores_are_what_goes_into_exp(factory: Factory) -> None:
    """Each option alone, and all of them: capped, biased, masked; hidden positions score 0; sinks take their share."""
    features = capabilities_of(factory).features
    for kind in _kinds(factory):
        for spec in specs(factory, dtypes=tuple(DTYPES), block_sizes=(16,), layers=1):
            filled = fill(factory, spec, _SCORED)
            each = [(name,) for name in features] if spec.dtype == "float32" else []
            for q_lens in ([1] * 4, _SCORED_CHUNKS):
                for some in (*each, features):
                    options = some_options(filled, q_lens, 4, some)
                    check_scores(filled, q_lens, 4, kind, options)


@case
def scores_beside_masks_of_the_float_range_are_finite(factory: Factory) -> None:
    """A mean over heads whose sum is not a float32 is one still."""
    need("mask" in capabilities_of(factory).features)
    for kind in _kinds(factory):
        for spec in specs(factory, dtypes=tuple(DTYPES), block_sizes=(16,), layers=1):
            filled = fill(factory, spec, _FAR)
            for q_lens in ([1] * len(_FAR), _FAR_CHUNKS):
                for mask in _far_masks(filled, q_lens).values():
                    check_scores(filled, q_lens, 4, kind, AttentionOptions(mask=mask))


@case
def scores_of_a_row_follow_from_what_it_sees(factory: Factory) -> None:
    """Whatever other slots hold, NaN included, wherever the blocks are, and, if a backend says so, alone or in a batch:
    the same scores, bit for bit.
    """
    for kind in _kinds(factory):
        for spec in specs(factory, block_sizes=(8, 16)):
            results, q_lens = [], [1, 0, 5, 1]
            for poison, pad, shift in ((0.0, 0, 0), (np.nan, -1, 0), (np.inf, 1, 1)):
                filled = fill(factory, spec, [1, 8, 13, 600], poison=poison, pad=pad, shift=shift)
                q, plan = filled.queries(q_lens, 4), filled.plan(q_lens)
                results.append(exported(filled, q, plan, kind)[1])
            for result in results[1:]:
                assert np.array_equal(result, results[0]), f"a slot out of sight matters ({spec}, seed {SEED})"
            for row in range(4) if capabilities_of(factory).batch_invariant else ():
                mine, tokens = slice(row, row + 1), slice(*plan.cu_q_lens[row : row + 2])
                own = StepArrays(plan.block_tables[mine], plan.seq_lens[mine], np.array([0, q_lens[row]], np.int32))
                alone = exported(filled, q[tokens], own, kind)[1][0]
                assert np.array_equal(result[row, :, : filled.contexts[row]], alone), f"other rows matter ({spec})"


@case
def scores_come_after_weights(factory: Factory) -> None:
    """With `return_attn` there are three results; "mass" is the mean of the weights of the newest query."""
    need("mass" in _kinds(factory) and capabilities_of(factory).return_attn)
    for spec in specs(factory):
        filled, q_lens = fill(factory, spec, [3, 16, 9]), [2, 1, 9]
        q, plan, backend = filled.queries(q_lens, 4), filled.plan(q_lens), filled.backend
        step = backend.prepare(plan)
        out, attn, scores = backend.attend(step, 0, backend.asarray(q), return_attn=True, scores="mass")
        assert backend.to_numpy(out).shape == (*q.shape[:2], spec.value_head_dim)
        newest = backend.to_numpy(attn)[np.cumsum(q_lens) - 1].reshape(3, spec.num_kv_heads, -1, 16).mean(axis=2)
        assert np.allclose(backend.to_numpy(scores), newest, atol=1e-5), "mass is not the mean of the weights"


# ---------------------------------------------------------------------- scores in the caller's memory


@case
def scores_out_is_filled_in_place(factory: Factory) -> None:
    """A larger array of any row and head strides: the corner of this batch is written, nothing else is."""
    need(capabilities_of(factory).scores_out)
    for kind in _kinds(factory):
        for spec in specs(factory):
            filled, q_lens = fill(factory, spec, [3, 16, 9, 4]), [2, 1, 9, 0]
            q, plan = filled.queries(q_lens, 4), filled.plan(q_lens)
            right = exported(filled, q, plan, kind)[1]
            memory = np.full((6, 2 * spec.num_kv_heads, 40), 7.0, np.float32)
            for array in (memory[:, ::2], memory[::-1, : spec.num_kv_heads, 1:21], memory[1:5, 1::2, 3:19]):
                memory[:] = 7.0
                backend = filled.backend
                step = backend.prepare(plan)
                got = backend.attend(step, 0, backend.asarray(q), scores=kind, scores_out=array)[1]
                assert np.shares_memory(got, memory), "scores_out was not used"
                assert np.array_equal(got, right), f"{kind} scores in place are others"
                assert np.array_equal(array[:4, :, :16], right), f"{kind} scores are not in scores_out"
                array[:4, :, :16] = 7.0
                assert (memory == 7.0).all(), "more than the corner of the batch was written"


# ---------------------------------------------------------------------- scores that are refused


@case
def scores_that_cannot_be_served_are_refused(factory: Factory) -> None:
    """A kind that does not exist or that the backend lacks, an array that does not fit: before a byte changes."""
    can = capabilities_of(factory)
    unknown = set(can.scores) - set(SCORES)
    assert not unknown, f"capabilities name scores that do not exist: {sorted(unknown)}"
    for spec in specs(factory):
        filled = fill(factory, spec, [9, 4])
        backend, before = filled.backend, everything(filled.backend)
        q, plan = backend.asarray(filled.queries([2, 1], 4)), filled.plan([2, 1])
        fits = np.full((2, spec.num_kv_heads, 9), 7.0, np.float32)
        bad: list[tuple[str, type[Exception], dict[str, Any]]] = [
            ("scores of an unknown kind", ValueError, {"scores": "entropy"}),
            ("scores=True", TypeError, {"scores": True}),
            ("scores_out without scores", ValueError, {"scores_out": fits}),
        ]
        bad += [
            (f"{kind!r}, which the backend lacks", ValueError, {"scores": kind})
            for kind in SCORES
            if kind not in can.scores
        ]
        for what, error, array in _bad_arrays(spec.num_kv_heads, can.scores_out, fits) if can.scores else ():
            bad.append((what, error, {"scores": can.scores[0], "scores_out": array}))
        for what, error, arguments in bad:
            refused(partial(backend.attend, backend.prepare(plan), 0, q, **arguments), error, what)
        same_bytes(everything(backend), before, "refused scores")
        assert (fits == 7.0).all(), "a refused call wrote to scores_out"


def _bad_arrays(heads: int, in_place: bool, fits: np.ndarray) -> list[tuple[str, type[Exception], Any]]:
    """For 2 rows of contexts up to 9."""
    if not in_place:
        return [("scores_out, which the backend does not fill", ValueError, fits)]
    read_only = fits.copy()
    read_only.flags.writeable = False
    return [
        ("scores_out of one row", ValueError, fits[:1]),
        ("scores_out of another number of heads", ValueError, np.zeros((2, heads + 1, 9), np.float32)),
        ("scores_out that is too narrow", ValueError, fits[..., :8]),
        ("scores_out of two dimensions", ValueError, fits[0]),
        ("scores_out of float64", TypeError, np.zeros((2, heads, 9))),
        ("scores_out of float16", TypeError, np.zeros((2, heads, 9), np.float16)),
        ("a list as scores_out", TypeError, fits.tolist()),
        ("scores_out with gaps between positions", ValueError, np.zeros((2, heads, 18), np.float32)[..., ::2]),
        ("scores_out backward", ValueError, fits[..., ::-1]),
        ("scores_out that is read-only", ValueError, read_only),
    ]


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
    text = inspect.getsource(call).strip().partition("lambda: ")[2].rstrip(",").removesuffix(")")  # of `_misuses`
    return f"{text} {answer}, {expected.__name__} is documented"


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
