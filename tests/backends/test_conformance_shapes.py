"""Faults in long contexts, head dims, chunks, batches and strides: each is caught by the case meant for it."""

from dataclasses import replace

import numpy as np
import pytest
from conformance_faults import assert_caught
from simple_backend import Simple, Split

from kvpool.testing import conformance, conformance_attention
from kvpool_backends.numpy import NumpyBackend

pytestmark = [
    pytest.mark.filterwarnings("ignore:invalid value:RuntimeWarning"),  # faults compute with NaN and infinity
    pytest.mark.filterwarnings("ignore:overflow:RuntimeWarning"),
]


class MeansOfParts(Split):
    """Parts of different length weigh the same."""

    def merge(self, partials, sink):
        return np.mean([values / total for _, total, values in partials], axis=0)


class RoundsScores(Simple):
    """Scores in float16: infinite where they are huge."""

    def scores(self, x, k):
        return super().scores(x, k).astype(np.float16).astype(float)


class SizesValuesLikeKeys(Simple):
    """The rest of a value wider than the key stays 0."""

    def one(self, x):
        result = super().one(x)
        result[self.spec.head_dim :] = 0
        return result


class ServesAtMost32Queries(Simple):
    def visible(self, seq_len, q_len, j):
        return super().visible(seq_len, q_len, min(j, 31))


class CutsByTheBatch(Split):
    """Parts as many as the batch leaves workers idle: sums are rounded differently, here in float32."""

    def attend(self, step, layer, q, scale=None, *, options=None, return_attn=False):
        self.part = 64 * len(step.seq_lens)
        return super().attend(step, layer, q, scale, options=options, return_attn=return_attn)

    def partial(self, scores, v):
        peak, total, values = super().partial(scores, v)
        return peak, np.float32(total), values.astype(np.float32)


class ReadsInputsAsIfContiguous(NumpyBackend):
    @staticmethod
    def flat(x):
        if x.base is None:
            return x
        return x.base.reshape(-1)[: x.size].reshape(x.shape)

    def attend(self, step, layer, q, scale=None, *, options=None, return_attn=False):
        return super().attend(step, layer, self.flat(q), scale, options=options, return_attn=return_attn)


FAULTS = {
    MeansOfParts: "long_contexts_equal_dense_attention",
    RoundsScores: "huge_scores_stay_finite",
    SizesValuesLikeKeys: "head_dims_of_models_equal_dense_attention",
    ServesAtMost32Queries: "chunks_of_any_length_share_a_batch",
    CutsByTheBatch: "a_row_has_the_same_bits_in_any_batch",
    ReadsInputsAsIfContiguous: "strided_inputs_are_read_by_their_strides",
}


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.__name__)
def test_planted_fault_is_caught_by_its_case(fault):
    assert_caught(fault, FAULTS[fault])


def test_every_case_about_shapes_catches_a_fault():
    assert {case.__name__ for case in conformance_attention.SHAPE_CASES} == set(FAULTS.values())


def test_backend_that_cuts_contexts_conforms():
    conformance.check_backend(Split, conformance_attention.SHAPE_CASES)


def test_backend_that_does_not_claim_batch_invariance_is_not_asked():
    class Claims(CutsByTheBatch):
        capabilities = replace(NumpyBackend.capabilities, batch_invariant=False)

    name = "a_row_has_the_same_bits_in_any_batch"
    cases = [case for case in conformance_attention.SHAPE_CASES if case.__name__ == name]
    assert conformance.check_backend(Claims, cases) == {name: "not applicable"}
