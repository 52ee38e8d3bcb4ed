"""Conformance cases about exported scores: what a policy that evicts reads beside the result of `attend`.

A case runs where `capabilities.scores` names a kind; what is not named has to be refused.
`kvpool.testing.conformance` is the entrance, and says how cases are made.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np

from kvpool.config import DTYPES
from kvpool.protocol import SCORES, AttentionOptions, StepArrays
from kvpool.testing.dense import dense_scores
from kvpool.testing.filled import (
    SEED,
    TOLERANCE,
    Case,
    Factory,
    Filled,
    NotApplicable,
    attend,
    capabilities_of,
    collector,
    contexts,
    everything,
    fill,
    head_counts,
    mask_rows,
    refused,
    same_bytes,
    some_options,
    specs,
    told,
)

CASES: list[Case] = []
_case = collector(CASES)

_LONG = [1, 16, 300, 2049]  # of a few tokens, and of many parts where a backend cuts contexts
_LONG_CHUNKS = [1, 3, 33, 8]


def _kinds(factory: Factory) -> tuple[str, ...]:
    kinds = capabilities_of(factory).scores
    if not kinds:
        raise NotApplicable
    return kinds


def exported(
    filled: Filled, q: np.ndarray, plan: StepArrays, kind: str, options: AttentionOptions | None = None, **more: Any
) -> tuple[np.ndarray, np.ndarray]:
    """Result and scores ``[B, Hk, C]`` of layer 0."""
    backend = filled.backend
    out, s = backend.attend(backend.prepare(plan), 0, backend.asarray(q), options=options, scores=kind, **more)
    return backend.to_numpy(out), backend.to_numpy(s)


def expected(
    filled: Filled, q: np.ndarray, q_lens: Sequence[int], kind: str, options: AttentionOptions | None = None
) -> np.ndarray:
    """Dense scores of every row, ``[B, Hk, C]`` in float64."""
    scores = np.zeros((len(q_lens), filled.backend.spec.num_kv_heads, max(filled.contexts)))
    ends = np.cumsum(q_lens)
    for row, n in enumerate(q_lens):
        if n:
            newest = slice(ends[row] - 1, ends[row])
            one = dense_scores(q[newest], filled.k[0][row], kind, None, mask_rows(options, newest))
            scores[row, :, : one.shape[-1]] = one
    return scores


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
    right = expected(filled, q, q_lens, kind, options)
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


@_case
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
            check(fill(factory, spec, _LONG), [1] * len(_LONG), 4, kind)
        for bits in capabilities_of(factory).quant_bits:
            for spec in specs(factory, head_dims=(64, 64), block_sizes=(16,), layers=1):
                quantized = replace(spec, k_bits=bits, v_bits=bits)
                check(fill(factory, quantized, [1, 17, 60]), [1, 1, 33], 4, kind, tolerance=1e-4)


@_case
def scores_of_chunks_are_of_the_newest_query(factory: Factory) -> None:
    """Rows with no query, a few and many: the newest one's scores; zeros where there is none."""
    for kind in _kinds(factory):
        for spec in specs(factory, dtypes=tuple(DTYPES), block_sizes=(16,), layers=1):
            filled = fill(factory, spec, _LONG)
            for q_lens in (_LONG_CHUNKS, [0, 16, 9, 1], [1, 0, 70, 0], [0] * 4):
                check(filled, q_lens, 4, kind)


@_case
def scores_are_what_goes_into_exp(factory: Factory) -> None:
    """Each option alone, and all of them: capped, biased, masked; hidden positions score 0; sinks take their share."""
    features = capabilities_of(factory).features
    for kind in _kinds(factory):
        for spec in specs(factory, dtypes=tuple(DTYPES), block_sizes=(16,), layers=1):
            filled = fill(factory, spec, _LONG)
            each = [(name,) for name in features] if spec.dtype == "float32" else []
            for q_lens in ([1] * 4, _LONG_CHUNKS):
                for some in (*each, features):
                    options = some_options(filled, q_lens, 4, some)
                    check(filled, q_lens, 4, kind, options)


@_case
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


@_case
def scores_of_padding_are_zero(factory: Factory) -> None:
    """Rows of length 0 and an empty batch."""
    for kind in _kinds(factory):
        for spec in specs(factory):
            filled = fill(factory, spec, [8, 5])
            plan, q = filled.plan([2, 1]), filled.queries([6], 4)
            padded = replace(
                plan,
                block_tables=np.concatenate([plan.block_tables, np.zeros((2, plan.block_tables.shape[1]), np.int32)]),
                seq_lens=np.append(plan.seq_lens, np.zeros(2, np.int32)),
                cu_q_lens=np.append(plan.cu_q_lens, np.full(2, 3, np.int32)),
            )
            alone, scores = exported(filled, q[:3], plan, kind)[1], exported(filled, q, padded, kind)[1]
            assert scores.shape == (4, spec.num_kv_heads, 8) and not scores[2:].any(), "padding rows must score 0"
            assert np.array_equal(scores[:2], alone), "padding rows change the scores of others"
            empty = StepArrays(block_tables=np.zeros((0, 1), np.int32))
            assert exported(filled, q[:0], empty, kind)[1].shape == (0, spec.num_kv_heads, 0)


@_case
def scores_come_after_weights(factory: Factory) -> None:
    """With `return_attn` there are three results; "mass" is the mean of the weights of the newest query."""
    if "mass" not in _kinds(factory) or not capabilities_of(factory).return_attn:
        raise NotApplicable
    for spec in specs(factory):
        filled, q_lens = fill(factory, spec, [3, 16, 9]), [2, 1, 9]
        q, plan, backend = filled.queries(q_lens, 4), filled.plan(q_lens), filled.backend
        step = backend.prepare(plan)
        out, attn, scores = backend.attend(step, 0, backend.asarray(q), return_attn=True, scores="mass")
        assert backend.to_numpy(out).shape == (*q.shape[:2], spec.value_head_dim)
        newest = backend.to_numpy(attn)[np.cumsum(q_lens) - 1].reshape(3, spec.num_kv_heads, -1, 16).mean(axis=2)
        assert np.allclose(backend.to_numpy(scores), newest, atol=1e-5), "mass is not the mean of the weights"


# ---------------------------------------------------------------------- the caller's memory


@_case
def scores_out_is_filled_in_place(factory: Factory) -> None:
    """A larger array of any row and head strides: the corner of this batch is written, nothing else is."""
    if not capabilities_of(factory).scores_out:
        raise NotApplicable
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


@_case
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
