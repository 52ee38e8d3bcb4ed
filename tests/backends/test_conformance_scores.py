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
        options = AttentionOptions() if options is None else options
        out, s = super().attend(step, layer, q, scale, options=options, scores=scores, scores_out=scores_out)
        s[:] = self.changed(s, layer, q, step, options, scores)
        return out, s

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


class AddsBeforeItDivides(OtherScores):
    """The sum over the heads of a group in float32, then the mean."""

    def of(self, q, keys, token, kind, options):
        group = q.shape[1] // keys.shape[1]
        with np.errstate(over="ignore"):
            return np.float32(super().of(q, keys, token, kind, options) * group) / np.float32(group)


class WithoutTheSink(OtherScores):
    def of(self, q, keys, token, kind, options):
        return super().of(q, keys, token, kind, replace(options, sinks=None))


class MassOfAPart(OtherScores):
    """Every part of 256 tokens with its own maximum and sum, as partial results have them."""

    def of(self, q, keys, token, kind, options):
        whole = super().of(q, keys, token, kind, options)
        if kind == "mass":
            for begin in range(0, len(keys), 256):
                part = whole[:, begin : begin + 256]
                part /= np.maximum(part.sum(axis=1, keepdims=True), 1e-30)
        return whole


class ScoresPaddingRows(Scored):
    def changed(self, s, layer, q, plan, options, kind):
        return np.where((np.diff(plan.cu_q_lens) == 0)[:, None, None], 1.0, s)


class RoundsToTheLongestRow(Scored):
    """As a kernel whose order of additions follows the batch."""

    def changed(self, s, layer, q, plan, options, kind):
        return s * np.float32(1 + 2**-23 * (plan.seq_lens.max() % 7))


class MassIsNormalizedOverTheSum(Scored):
    """As `return_attn` without a sink; beside weights the scores of all queries are summed up."""

    def attend(self, step, layer, q, scale=None, *, return_attn=False, scores=None, **more):
        results = super().attend(step, layer, q, scale, return_attn=return_attn, scores=scores, **more)
        return (*results[:-1], results[-1] * 2) if return_attn and scores is not None else results


class ZeroesAllOfScoresOut(Scored):
    def attend(self, step, layer, q, scale=None, *, scores_out=None, **more):
        if scores_out is not None:
            scores_out[:] = 0
        return super().attend(step, layer, q, scale, scores_out=scores_out, **more)


class ClaimsOneKindAndServesTwo(Scored):
    capabilities = replace(Scored.capabilities, scores=("raw",))

    def attend(self, step, layer, q, scale=None, *, scores=None, **more):
        if scores == "mass":
            twin = NumpyBackend(self.spec, self.num_blocks)
            twin._planes = self._planes
            return twin.attend(step, layer, q, scale, scores=scores, **more)
        return super().attend(step, layer, q, scale, scores=scores, **more)


FAULTS = {
    MassOfAPart: "scores_of_decode_equal_dense_scores",
    ScoresOfTheOldestQuery: "scores_of_chunks_are_of_the_newest_query",
    AddsBeforeItDivides: "scores_beside_masks_of_the_float_range_are_finite",
    WithoutTheSink: "scores_are_what_goes_into_exp",
    RoundsToTheLongestRow: "scores_of_a_row_follow_from_what_it_sees",
    ScoresPaddingRows: "scores_of_padding_are_zero",
    MassIsNormalizedOverTheSum: "scores_come_after_weights",
    ZeroesAllOfScoresOut: "scores_out_is_filled_in_place",
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
