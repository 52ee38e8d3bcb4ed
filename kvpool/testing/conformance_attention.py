"""Conformance cases about attention: shapes and strides, `AttentionOptions`, and exported scores.

A case runs where `capabilities` has what it needs (`features` options, `scores` kinds); what is not named there has to
be refused. `kvpool.testing.conformance` is the entrance, and says how cases are made.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from itertools import chain, combinations, product
from typing import Any

import numpy as np

from kvpool.config import DTYPES
from kvpool.protocol import FEATURES, SCORES, AttentionOptions, StepArrays
from kvpool.testing.dense import dense_scores
from kvpool.testing.filled import (
    SEED,
    TOLERANCE,
    Factory,
    Filled,
    attend,
    capabilities_of,
    case,
    close,
    contexts,
    everything,
    fill,
    fill_all,
    head_counts,
    mask_rows,
    need,
    random_mask,
    refused,
    same_bytes,
    slots_of,
    some_options,
    specs,
    told,
    write,
)

# ====================== shapes

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


def _head_major(backend: Any, x: np.ndarray) -> Any:
    return backend.asarray(np.ascontiguousarray(x.swapaxes(0, 1))).swapaxes(0, 1)


def _backwards(backend: Any, x: np.ndarray) -> Any:
    return backend.asarray(np.ascontiguousarray(x[::-1]))[::-1]


def _every_second(backend: Any, x: np.ndarray) -> Any:
    return backend.asarray(np.repeat(np.repeat(x, 2, axis=0), 2, axis=2))[::2, :, ::2]


_VIEWS = {"head-major": _head_major, "backward": _backwards, "spread": _every_second}

# ====================== options

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


# ---------------------------------------------------------------------- refusals


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


# ====================== scores

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


def check(
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


# ---------------------------------------------------------------------- values


@case
def scores_of_decode_equal_dense_scores(factory: Factory) -> None:
    """One query per row; every dtype, block size, head grouping, bits; contexts around block boundaries, and long."""
    for kind in _kinds(factory):
        for kv_heads, q_heads in head_counts(factory, (2, 2), (2, 8), (1, 4), (2, 6)):
            for spec in specs(
                factory, kv_heads=kv_heads, q_heads=q_heads, dtypes=tuple(DTYPES), block_sizes=(1, 3, 8, 16), layers=1
            ):
                filled = fill(factory, spec, contexts(spec.block_size))
                check(filled, [1] * len(filled.contexts), q_heads, kind)
        for spec in specs(factory, block_sizes=(16,), layouts=capabilities_of(factory).layouts, layers=1):
            check(fill(factory, spec, _SCORED), [1] * len(_SCORED), 4, kind)
        for bits in capabilities_of(factory).quant_bits:
            for spec in specs(factory, head_dims=(64, 64), block_sizes=(16,), layers=1):
                quantized = replace(spec, k_bits=bits, v_bits=bits)
                check(fill(factory, quantized, [1, 17, 60]), [1, 1, 33], 4, kind, tolerance=1e-4)


@case
def scores_of_chunks_are_of_the_newest_query(factory: Factory) -> None:
    """Rows with no query, a few and many: the newest one's scores; zeros where there is none."""
    for kind in _kinds(factory):
        for spec in specs(factory, dtypes=tuple(DTYPES), block_sizes=(16,), layers=1):
            filled = fill(factory, spec, _SCORED)
            for q_lens in (_SCORED_CHUNKS, [0, 16, 9, 1], [1, 0, 70, 0], [0] * 4):
                check(filled, q_lens, 4, kind)


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
                    check(filled, q_lens, 4, kind, options)


@case
def scores_beside_masks_of_the_float_range_are_finite(factory: Factory) -> None:
    """A mean over heads whose sum is not a float32 is one still."""
    need("mask" in capabilities_of(factory).features)
    for kind in _kinds(factory):
        for spec in specs(factory, dtypes=tuple(DTYPES), block_sizes=(16,), layers=1):
            filled = fill(factory, spec, _FAR)
            for q_lens in ([1] * len(_FAR), _FAR_CHUNKS):
                for mask in _far_masks(filled, q_lens).values():
                    check(filled, q_lens, 4, kind, AttentionOptions(mask=mask))


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


# ---------------------------------------------------------------------- the caller's memory


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


# ---------------------------------------------------------------------- refusals


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
