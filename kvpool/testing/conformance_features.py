"""Conformance cases about `AttentionOptions`: window, soft cap, sinks, ALiBi, masks, one by one and together.

A case runs where `capabilities.features` names what it needs; what is not named has to be refused.
`kvpool.testing.conformance` is the entrance, and says how cases are made.
"""

from __future__ import annotations

from functools import partial
from itertools import chain, combinations, product
from typing import Any

import numpy as np

from kvpool.config import DTYPES
from kvpool.protocol import FEATURES, AttentionOptions, StepArrays
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
    contexts,
    everything,
    fill,
    head_counts,
    mask_rows,
    random_mask,
    refused,
    same_bytes,
    slots_of,
    some_options,
    specs,
    write,
)

CASES: list[Case] = []
_case = collector(CASES)

_LONG = [1, 7, 16, 300, 2049]  # of a few tokens, and of many parts where a backend cuts contexts
_LONG_CHUNKS = [1, 2, 16, 33, 4]
_SHORT = [1, 17, 40, 131]
_SHORT_CHUNKS = [1, 17, 5, 9]


def _need(factory: Factory, *features: str) -> None:
    if not set(features) <= set(capabilities_of(factory).features):
        raise NotApplicable


def _check_decode_and_chunks(
    filled: Filled, q_lens: list[int], what: str, options: AttentionOptions, scale: float | None = None
) -> None:
    for lens in ([1] * len(q_lens), q_lens):
        filled.check(lens, 4, f"{what}, {lens} queries in {filled.contexts}", scale, options)


# ---------------------------------------------------------------------- window


@_case
def window_hides_older_tokens(factory: Factory) -> None:
    """Windows of one token, around every block boundary, and wider than any context."""
    _need(factory, "window")
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


@_case
def slots_behind_the_window_never_matter(factory: Factory) -> None:
    """An engine may give blocks behind the window away: NaN there changes no bit."""
    _need(factory, "window")
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


@_case
def soft_cap_bounds_scaled_scores(factory: Factory) -> None:
    """``cap * tanh(scale * score / cap)``: of small caps, of Gemma's, and of one that changes nothing."""
    _need(factory, "soft_cap")
    for spec in specs(factory, dtypes=tuple(DTYPES)):
        filled = fill(factory, spec, _LONG)
        for cap, scale in ((0.5, None), (3.0, 1.0), (50.0, None), (1e30, None), (2, 0.1)):
            options = AttentionOptions(soft_cap=cap)
            _check_decode_and_chunks(filled, _LONG_CHUNKS, f"soft cap {cap}, scale {scale}", options, scale)


# ---------------------------------------------------------------------- sinks


@_case
def sinks_are_counted_once(factory: Factory) -> None:
    """Sinks of weight next to nothing, of 0, and as heavy as the longest context; one query or many per row."""
    _need(factory, "sinks")
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


@_case
def alibi_biases_by_distance(factory: Factory) -> None:
    """Slopes of usual sizes, steep, 0 and negative; each head its own."""
    _need(factory, "alibi_slopes")
    for spec in specs(factory, dtypes=tuple(DTYPES), block_sizes=(3, 16)):
        filled = fill(factory, spec, _LONG)
        for slopes in ([0.5, 0.25, 0.0625, 0.00390625], [0.7, 3.0, 0.0, -0.005]):
            options = AttentionOptions(alibi_slopes=np.array(slopes))
            _check_decode_and_chunks(filled, _LONG_CHUNKS, f"slopes {slopes}", options)


@_case
def alibi_distance_starts_at_the_query(factory: Factory) -> None:
    """Softmax hides a bias that all keys share; a sink tells whether distance 0 has bias 0 for each query."""
    _need(factory, "alibi_slopes", "sinks")
    for spec in specs(factory, dtypes=tuple(DTYPES)):
        slopes, sinks = np.array([0.5, 0.1, 0.01, -0.005]), np.array([0.0, 1.0, 2.0, 3.0])
        options = AttentionOptions(alibi_slopes=slopes, sinks=sinks)
        _check_decode_and_chunks(fill(factory, spec, _LONG), _LONG_CHUNKS, "slopes and sinks", options)


# ---------------------------------------------------------------------- masks


@_case
def masks_of_bools_and_floats_are_applied(factory: Factory) -> None:
    """Shared by all heads or not, wider than the contexts, contiguous or not; NaN where causality hides anyway."""
    _need(factory, "mask")
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


@_case
def masks_with_the_lowest_number_hide_like_infinity(factory: Factory) -> None:
    """Many models write the lowest float32 for "hidden"."""
    _need(factory, "mask")
    for spec in specs(factory):
        filled = fill(factory, spec, _LONG)
        mask = random_mask(filled, _LONG_CHUNKS, bool)
        mask[:, 0] = True  # every query sees something
        lowest = np.where(mask, 0, np.finfo(np.float32).min).astype(np.float32)
        q, plan = filled.queries(_LONG_CHUNKS, 4), filled.plan(_LONG_CHUNKS)
        out = attend(filled.backend, 0, q, plan, None, AttentionOptions(mask=lowest))
        expected = filled.expected(0, q, _LONG_CHUNKS, None, AttentionOptions(mask=mask))
        close(out, expected, spec, "mask of the lowest float32")


@_case
def queries_that_see_nothing_get_zero(factory: Factory) -> None:
    """All of the context masked, or all but one key, or long parts of it; per head; beside sinks or not."""
    _need(factory, "mask")
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


@_case
def features_work_together(factory: Factory) -> None:
    """Every combination that the backend has; then all of them in every layout and dtype."""
    features = [name for name in FEATURES if name in capabilities_of(factory).features]
    if len(features) < 2:
        raise NotApplicable
    spec = next(specs(factory))
    filled = fill(factory, spec, _SHORT)
    for some in chain.from_iterable(combinations(features, n) for n in range(2, len(features) + 1)):
        options = some_options(filled, _SHORT_CHUNKS, 4, some)
        _check_decode_and_chunks_of(filled, options, f"{', '.join(some)}")
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


def _check_decode_and_chunks_of(filled: Filled, options: AttentionOptions, what: str) -> None:
    """Of options whose mask is for `_SHORT_CHUNKS`: the newest query of each row alone, then all."""
    filled.check(_SHORT_CHUNKS, 4, f"{what}, chunks", options=options)
    newest = np.cumsum(_SHORT_CHUNKS) - 1
    filled.check([1] * len(_SHORT_CHUNKS), 4, f"{what}, decode", options=mask_rows(options, newest))


@_case
def padding_is_inert_under_options(factory: Factory) -> None:
    """Padding rows and tokens answer 0, whatever the mask says of them, and with sinks."""
    features = capabilities_of(factory).features
    if not features:
        raise NotApplicable
    for spec in specs(factory):
        filled = fill(factory, spec, [8, 5])
        plan, q = filled.plan([2, 1]), filled.queries([6], 4)
        padded = StepArrays(
            block_tables=np.concatenate([plan.block_tables, np.full((2, plan.block_tables.shape[1]), -1, np.int32)]),
            seq_lens=np.append(plan.seq_lens, np.zeros(2, np.int32)),
            cu_q_lens=np.append(plan.cu_q_lens, np.full(2, 3, np.int32)),
            slot_mapping=np.full(6, -1, np.int32),
        )
        options = some_options(filled, [2, 1], 4, features)
        mask = {}
        if options.mask is not None:
            mask = {"mask": np.concatenate([options.mask, np.full((3, *options.mask.shape[1:]), np.nan, np.float32)])}
        fields = {name: getattr(options, name) for name in features} | mask
        out = attend(filled.backend, 0, q, padded, None, AttentionOptions(**fields))
        close(out[:3], filled.expected(0, q[:3], [2, 1], None, options), spec, "rows before padding")
        assert not out[3:].any(), "padding tokens must answer 0"


# ---------------------------------------------------------------------- refusals


@_case
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
    fitting = {
        "window": 4,
        "soft_cap": 5.0,
        "sinks": np.zeros(4),
        "alibi_slopes": np.ones(4),
        "mask": np.ones((3, 9), bool),
    }
    wrong = [
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
            bad.append((f"{name}, which the backend lacks", ValueError, _option(name, value)))
    for name, value in wrong:
        if name in features:
            bad.append((f"{name} of shape {value.shape}", ValueError, _option(name, value)))
    return bad


def _option(name: str, value: Any) -> AttentionOptions:
    return AttentionOptions(**{name: value})
