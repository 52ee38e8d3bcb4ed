"""Faults in exported scores, planted one by one: each is caught by the case meant for it."""

from dataclasses import replace

import numpy as np
import pytest
from conformance_faults import assert_caught

from kvpool.protocol import AttentionOptions
from kvpool.testing import conformance, conformance_attention
from kvpool.testing.dense import dense_scores
from kvpool_backends.numpy import NumpyBackend
from kvpool_backends.numpy import backend as numpy_backend

pytestmark = pytest.mark.filterwarnings("ignore:invalid value:RuntimeWarning")  # a fault computes with NaN


class Scored(NumpyBackend):
    """Exports right scores from parts that a fault replaces."""

    def attend(self, step, layer, q, scale=None, *, options=None, return_attn=False, scores=None, scores_out=None):
        if scores is None or return_attn:
            more = {"return_attn": return_attn, "scores": scores, "scores_out": scores_out}
            return super().attend(step, layer, q, scale, options=options, **more)
        options = self.options(AttentionOptions() if options is None else options)
        out, s = super().attend(step, layer, q, scale, options=options, scores=scores, scores_out=scores_out)
        s[:] = self.changed(s, layer, q, step, options, scores)
        return self.result(out), s

    def options(self, options):
        return options

    def result(self, out):
        return out

    def changed(self, s, layer, q, plan, options, kind):
        return s


class OtherScores(Scored):
    """Scores of another definition, from `dense_scores`."""

    def changed(self, s, layer, q, plan, options, kind):
        s = np.zeros_like(s)
        for row, seq_len in enumerate(plan.seq_lens.tolist()):
            begin, end = plan.cu_q_lens[row : row + 2].tolist()
            if begin == end:
                continue
            table = plan.block_tables[row, : -(-seq_len // self.spec.block_size)]
            keys = self.gather(layer, table, seq_len)[0]
            s[row, :, :seq_len] = self.one(q, keys, begin, end, kind, options)
        return s

    def one(self, q, keys, begin, end, kind, options):
        return self.of(q[end - 1 : end], keys, end - 1, kind, options)

    def of(self, q, keys, token, kind, options):
        mask = options.mask if options.mask is None else options.mask[token : token + 1]
        return dense_scores(q, keys, kind, None, replace(options, mask=mask))


class ScoresOfTheOldestQuery(OtherScores):
    def one(self, q, keys, begin, end, kind, options):
        seen = len(keys) - (end - begin) + 1
        scores = np.zeros((keys.shape[1], len(keys)))
        scores[:, :seen] = self.of(q[begin : begin + 1], keys[:seen], begin, kind, options)
        return scores


class SumsTheQueriesOfAChunk(OtherScores):
    def one(self, q, keys, begin, end, kind, options):
        scores = super().one(q, keys, begin, end, kind, options)
        return scores * (end - begin)


class ScoresOfTheFirstHead(OtherScores):
    def of(self, q, keys, token, kind, options):
        return super().of(q[:, :: q.shape[1] // keys.shape[1]], keys, token, kind, _first_heads(options, q, keys))


def _first_heads(options, q, keys):
    step = q.shape[1] // keys.shape[1]
    per_head = [name for name in ("sinks", "alibi_slopes") if getattr(options, name) is not None]
    changes = {name: getattr(options, name)[::step] for name in per_head}
    if options.mask is not None and options.mask.ndim == 3 and options.mask.shape[1] > 1:
        changes["mask"] = options.mask[:, ::step]
    return replace(options, **changes)


class AddsHeadsUp(Scored):
    def changed(self, s, layer, q, plan, options, kind):
        return s * (q.shape[1] // self.spec.num_kv_heads)


class MapsHeadsRoundRobin(OtherScores):
    def of(self, q, keys, token, kind, options):
        group = q.shape[1] // keys.shape[1]
        order = [h // group + h % group * keys.shape[1] for h in range(q.shape[1])]
        return super().of(q[:, order], keys, token, kind, options)


class ForgetsTheScale(Scored):
    def changed(self, s, layer, q, plan, options, kind):
        return s * self.spec.head_dim**0.5 if kind == "raw" else s


class InBaseTwo(Scored):
    def changed(self, s, layer, q, plan, options, kind):
        return s * np.float32(np.log2(np.e)) if kind == "raw" else s


class AddsBeforeItDivides(OtherScores):
    """The sum over the heads of a group in float32, then the mean."""

    def of(self, q, keys, token, kind, options):
        group = q.shape[1] // keys.shape[1]
        with np.errstate(over="ignore"):
            return np.float32(super().of(q, keys, token, kind, options) * group) / np.float32(group)


class BeforeTheCap(OtherScores):
    def of(self, q, keys, token, kind, options):
        return super().of(q, keys, token, kind, replace(options, soft_cap=None) if kind == "raw" else options)


class WithoutTheBias(OtherScores):
    def of(self, q, keys, token, kind, options):
        return super().of(q, keys, token, kind, replace(options, alibi_slopes=None))


class WithoutTheMask(OtherScores):
    def of(self, q, keys, token, kind, options):
        return super().of(q, keys, token, kind, replace(options, mask=None))


class WithoutTheSink(OtherScores):
    def of(self, q, keys, token, kind, options):
        return super().of(q, keys, token, kind, replace(options, sinks=None))


class BehindTheWindow(OtherScores):
    def of(self, q, keys, token, kind, options):
        return super().of(q, keys, token, kind, replace(options, window=None))


class HiddenIsInfinite(Scored):
    def changed(self, s, layer, q, plan, options, kind):
        return np.where(s == 0, -np.inf, s) if options.mask is not None and kind == "raw" else s


class MassOfAPart(OtherScores):
    """Every part of 256 tokens with its own maximum and sum, as partial results have them."""

    def of(self, q, keys, token, kind, options):
        whole = super().of(q, keys, token, kind, options)
        if kind == "mass":
            for begin in range(0, len(keys), 256):
                part = whole[:, begin : begin + 256]
                part /= np.maximum(part.sum(axis=1, keepdims=True), 1e-30)
        return whole


class StopsAtAFullBlock(Scored):
    def changed(self, s, layer, q, plan, options, kind):
        s = s.copy()
        for row, seq_len in enumerate(plan.seq_lens.tolist()):
            s[row, :, seq_len // self.spec.block_size * self.spec.block_size :] = 0
        return s


class InOrderOfBlocks(Scored):
    """By block id instead of logical order."""

    def changed(self, s, layer, q, plan, options, kind):
        size, s = self.spec.block_size, s.copy()
        for row, seq_len in enumerate(plan.seq_lens.tolist()):
            full = seq_len // size
            order = np.argsort(plan.block_tables[row, :full])
            blocks = s[row, :, : full * size].reshape(len(s[row]), full, size)
            s[row, :, : full * size] = blocks[:, order].reshape(len(s[row]), -1)
        return s


class UsedSlotsLeak(Scored):
    """The slot behind the newest token has a say, weighed with 0."""

    def changed(self, s, layer, q, plan, options, kind):
        s = s.copy()
        for row, seq_len in enumerate(plan.seq_lens.tolist()):
            if seq_len % self.spec.block_size and plan.cu_q_lens[row] < plan.cu_q_lens[row + 1]:
                block = plan.block_tables[row, seq_len // self.spec.block_size]
                s[row] += 0 * self._planes[layer][0][block, seq_len % self.spec.block_size, 0, 0]
        return s


class ScoresPaddingRows(Scored):
    def changed(self, s, layer, q, plan, options, kind):
        return np.where((np.diff(plan.cu_q_lens) == 0)[:, None, None], 1.0, s)


class ScoresOfTheWords(OtherScores):
    """Quantized keys without their biases."""

    def one(self, q, keys, begin, end, kind, options):
        return super().one(q, keys - (keys.min() if self.spec.k_bits else 0), begin, end, kind, options)


class RoundsToTheLongestRow(Scored):
    """As a kernel whose order of additions follows the batch."""

    def changed(self, s, layer, q, plan, options, kind):
        return s * np.float32(1 + 2**-23 * (plan.seq_lens.max() % 7))


class ChangesTheResult(Scored):
    def result(self, out):
        return out * np.float32(1 + 2**-22)


class MassIsNormalizedOverTheSum(Scored):
    """As `return_attn` without a sink; beside weights the scores of all queries are summed up."""

    def attend(self, step, layer, q, scale=None, *, return_attn=False, scores=None, **more):
        results = super().attend(step, layer, q, scale, return_attn=return_attn, scores=scores, **more)
        return (*results[:-1], results[-1] * 2) if return_attn and scores is not None else results


class IgnoresScoresOut(Scored):
    def attend(self, step, layer, q, scale=None, *, scores_out=None, **more):
        return super().attend(step, layer, q, scale, **more)


class ZeroesAllOfScoresOut(Scored):
    def attend(self, step, layer, q, scale=None, *, scores_out=None, **more):
        if scores_out is not None:
            scores_out[:] = 0
        return super().attend(step, layer, q, scale, scores_out=scores_out, **more)


class RefusesNoKind(Scored):
    def attend(self, step, layer, q, scale=None, *, scores=None, **more):
        scores = "raw" if scores == "entropy" else scores
        return super().attend(step, layer, q, scale, scores=scores, **more)


class CastsScoresOut(Scored):
    def attend(self, step, layer, q, scale=None, *, scores_out=None, **more):
        scores_out = None if isinstance(scores_out, list) else scores_out
        return super().attend(step, layer, q, scale, scores_out=scores_out, **more)


class NamesAKindThatDoesNotExist(Scored):
    capabilities = replace(Scored.capabilities, scores=("raw", "entropy"))


class ClaimsOneKindAndServesTwo(Scored):
    capabilities = replace(Scored.capabilities, scores=("raw",))

    def attend(self, step, layer, q, scale=None, *, scores=None, **more):
        if scores == "mass":
            return NumpyBackend.attend(numpy_twin(self), layer, q, step, scale, scores=scores, **more)
        return super().attend(step, layer, q, scale, scores=scores, **more)


def numpy_twin(backend):
    twin = NumpyBackend(backend.spec, backend.num_blocks)
    twin._planes = backend._planes
    return twin


FAULTS = {
    ScoresOfTheFirstHead: "scores_of_decode_equal_dense_scores",
    AddsHeadsUp: "scores_of_decode_equal_dense_scores",
    MapsHeadsRoundRobin: "scores_of_decode_equal_dense_scores",
    ForgetsTheScale: "scores_of_decode_equal_dense_scores",
    InBaseTwo: "scores_of_decode_equal_dense_scores",
    MassOfAPart: "scores_of_decode_equal_dense_scores",
    StopsAtAFullBlock: "scores_of_decode_equal_dense_scores",
    InOrderOfBlocks: "scores_of_decode_equal_dense_scores",
    ChangesTheResult: "scores_of_decode_equal_dense_scores",
    ScoresOfTheOldestQuery: "scores_of_chunks_are_of_the_newest_query",
    SumsTheQueriesOfAChunk: "scores_of_chunks_are_of_the_newest_query",
    AddsBeforeItDivides: "scores_beside_masks_of_the_float_range_are_finite",
    BeforeTheCap: "scores_are_what_goes_into_exp",
    WithoutTheBias: "scores_are_what_goes_into_exp",
    WithoutTheMask: "scores_are_what_goes_into_exp",
    WithoutTheSink: "scores_are_what_goes_into_exp",
    BehindTheWindow: "scores_are_what_goes_into_exp",
    HiddenIsInfinite: "scores_are_what_goes_into_exp",
    UsedSlotsLeak: "scores_of_a_row_follow_from_what_it_sees",
    ScoresOfTheWords: "scores_of_decode_equal_dense_scores",
    RoundsToTheLongestRow: "scores_of_a_row_follow_from_what_it_sees",
    ScoresPaddingRows: "scores_of_padding_are_zero",
    MassIsNormalizedOverTheSum: "scores_come_after_weights",
    IgnoresScoresOut: "scores_out_is_filled_in_place",
    ZeroesAllOfScoresOut: "scores_out_is_filled_in_place",
    RefusesNoKind: "scores_that_cannot_be_served_are_refused",
    CastsScoresOut: "scores_that_cannot_be_served_are_refused",
    NamesAKindThatDoesNotExist: "scores_that_cannot_be_served_are_refused",
    ClaimsOneKindAndServesTwo: "scores_that_cannot_be_served_are_refused",
}


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.__name__)
def test_planted_fault_is_caught_by_its_case(fault):
    assert_caught(fault, FAULTS[fault])


@pytest.mark.long
@pytest.mark.parametrize("base", [Scored, OtherScores])
def test_backend_of_parts_without_a_fault_conforms(base):
    assert set(conformance.check_backend(base, conformance_attention.SCORE_CASES).values()) == {"passed"}


def test_every_case_about_scores_catches_a_fault():
    assert {case.__name__ for case in conformance_attention.SCORE_CASES} == set(FAULTS.values())


def test_backend_without_scores_refuses_every_kind():
    class Claims(NumpyBackend):
        capabilities = numpy_backend.Capabilities("none", ("NHD",), ("float32",))

    outcome = conformance.check_backend(Claims, conformance_attention.SCORE_CASES)
    assert [name for name, result in outcome.items() if result == "passed"] == [
        "scores_that_cannot_be_served_are_refused"
    ]
