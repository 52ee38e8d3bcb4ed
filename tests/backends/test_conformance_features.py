"""Faults in window, soft cap, sinks, ALiBi and masks, planted one by one: each is caught by the case meant for it."""

import numpy as np
import pytest
from conformance_faults import assert_caught
from simple_backend import Simple, Split

from kvpool.protocol import FEATURES, Capabilities
from kvpool.testing import conformance, conformance_attention
from kvpool_backends.numpy import NumpyBackend

pytestmark = pytest.mark.filterwarnings("ignore:invalid value:RuntimeWarning")  # faults compute with NaN and infinity


def with_features(backend, *features):
    """The same backend, claiming these features only."""

    class Claims(backend):
        capabilities = Capabilities(
            backend.capabilities.name, backend.capabilities.layouts, backend.capabilities.dtypes, features=features
        )

    return Claims


# ---------------------------------------------------------------------- window


class WindowEndsAtTheNewestToken(Simple):
    """One window for all queries of a chunk."""

    def oldest(self, x):
        return 0 if x.options.window is None else min(x.visible - 1, max(0, x.seq_len - x.options.window))


class WeighsSlotsBehindTheWindowWithZero(Simple):
    def one(self, x):
        scores = np.where(np.arange(x.visible) >= self.oldest(x), self.scores(x, x.k[: x.visible]), -np.inf)
        return self.mix(scores, -np.inf, x.v[: x.visible])


# ---------------------------------------------------------------------- soft cap


class CutsInsteadOfCapping(Simple):
    def scores(self, x, k):
        cap = np.inf if x.options.soft_cap is None else x.options.soft_cap
        return np.clip(k @ x.q * x.scale, -cap, cap)


class CapsAfterTheBias(Simple):
    """The cap over scores, slopes and mask."""

    def mix(self, scores, sink, v):
        return super().mix(scores if self.cap is None else self.cap * np.tanh(scores / self.cap), sink, v)

    def scores(self, x, k):
        self.cap = x.options.soft_cap
        return k @ x.q * x.scale


# ---------------------------------------------------------------------- sinks


class SinkIsCountedInEveryPart(Split):
    def merge(self, partials, sink):
        return super().merge(partials, sink + np.log(len(partials)))


# ---------------------------------------------------------------------- ALiBi


class SlopeInFloat32FromTheStart(Simple):
    """slope * c instead of slope * (c - p), rounded: far from the start no digits are left for the scores."""

    def alibi(self, x, key):
        self.start = np.float32(x.options.alibi_slopes[x.head]) * key.astype(np.float32)
        return self.start

    def mix(self, scores, sink, v):
        return super().mix(scores.astype(np.float32).astype(float), sink, v)


class DistanceToTheNewestToken(Simple):
    def alibi(self, x, key):
        return float(x.options.alibi_slopes[x.head]) * (key - (x.seq_len - 1))


# ---------------------------------------------------------------------- masks


class MaskOfTheQueryInItsRow(Simple):
    """Row j of the mask for query j of every sequence."""

    def mask(self, x):
        x.token -= x.first
        return super().mask(x)


class MaskIsReadAsIfContiguous(Simple):
    def mask(self, x):
        mask = x.options.mask
        if mask.base is not None and mask.base.size == mask.size:
            mask = mask.base.reshape(-1, order="K").reshape(mask.shape)
        mask = mask[x.token]
        return mask if mask.ndim == 1 else mask[0 if len(mask) == 1 else x.head]


class BaseChangesTheRange(Split):
    """Scores to base 2, where the largest floats are infinite; in chunks only they differ from none."""

    def mix(self, scores, sink, v):
        with np.errstate(over="ignore"):
            return super().mix(np.float32(np.float32(scores) * np.log2(np.e)) / np.log2(np.e), sink, v)


class HiddenPartIsTheMean(Split):
    def partial(self, scores, v):
        return super().partial(np.zeros_like(scores) if np.isneginf(scores).all() else scores, v)


# ---------------------------------------------------------------------- the call


class PaddingMeetsTheMask(NumpyBackend):
    def attend(self, step, layer, q, scale=None, *, options=None, return_attn=False):
        out = super().attend(step, layer, q, scale, options=options, return_attn=return_attn)
        if options is not None and options.mask is not None and not return_attn:
            padding = slice(step.cu_q_lens[-1], None)
            out[padding] += options.mask[padding].max(axis=-1)[..., None]
        return out


class WeightsLoseTheSink(NumpyBackend):
    def attend(self, step, layer, q, scale=None, *, options=None, return_attn=False):
        result = super().attend(step, layer, q, scale, options=options, return_attn=return_attn)
        if not return_attn:
            return result
        out, attn = result
        return out, attn / attn.sum(axis=-1, keepdims=True)


class WidensNarrowMasks(NumpyBackend):
    def attend(self, step, layer, q, scale=None, *, options=None, return_attn=False):
        if options is not None and options.mask is not None and options.mask.shape[-1] < max(step.seq_lens):
            options = None
        return super().attend(step, layer, q, scale, options=options, return_attn=return_attn)


FAULTS = {
    WindowEndsAtTheNewestToken: "window_hides_older_tokens",
    WeighsSlotsBehindTheWindowWithZero: "slots_behind_the_window_never_matter",
    CutsInsteadOfCapping: "soft_cap_bounds_scaled_scores",
    CapsAfterTheBias: "features_work_together",
    SinkIsCountedInEveryPart: "sinks_are_counted_once",
    SlopeInFloat32FromTheStart: "alibi_biases_by_distance",
    DistanceToTheNewestToken: "alibi_distance_starts_at_the_query",
    MaskOfTheQueryInItsRow: "masks_of_bools_and_floats_are_applied",
    MaskIsReadAsIfContiguous: "masks_of_bools_and_floats_are_applied",
    BaseChangesTheRange: "ends_of_the_float_range_are_numbers_like_others",
    HiddenPartIsTheMean: "queries_that_see_nothing_get_zero",
    PaddingMeetsTheMask: "padding_is_inert_under_options",
    WeightsLoseTheSink: "attention_weights_are_returned",
    WidensNarrowMasks: "options_that_cannot_be_served_are_refused",
}


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.__name__)
def test_planted_fault_is_caught_by_its_case(fault):
    assert_caught(fault, FAULTS[fault])


def test_every_case_about_features_catches_a_fault():
    assert {case.__name__ for case in conformance_attention.FEATURE_CASES} <= set(FAULTS.values())


def test_backend_that_cuts_contexts_conforms():
    conformance.check_backend(Split, conformance_attention.FEATURE_CASES)


@pytest.mark.parametrize(
    "feature", [FEATURES[0], *(pytest.param(name, marks=pytest.mark.long) for name in FEATURES[1:])]
)
def test_backend_with_one_feature_is_asked_for_that_one_alone(feature):
    """It passes what it claims and refuses the rest; cases about the rest do not apply."""
    outcome = conformance.check_backend(with_features(NumpyBackend, feature), conformance_attention.FEATURE_CASES)
    left_out = {name for name, result in outcome.items() if result == "not applicable"}
    others = {
        "window": {"window_hides_older_tokens", "slots_behind_the_window_never_matter"},
        "soft_cap": {"soft_cap_bounds_scaled_scores"},
        "sinks": {"sinks_are_counted_once"},
        "alibi_slopes": {"alibi_biases_by_distance"},
        "mask": {
            "masks_of_bools_and_floats_are_applied",
            "ends_of_the_float_range_are_numbers_like_others",
            "queries_that_see_nothing_get_zero",
        },
    }
    expected = set().union(*(names for name, names in others.items() if name != feature))
    assert left_out == expected | {"alibi_distance_starts_at_the_query", "features_work_together"}


def test_backend_without_features_refuses_every_option():
    outcome = conformance.check_backend(with_features(NumpyBackend), conformance_attention.FEATURE_CASES)
    assert [name for name, result in outcome.items() if result == "passed"] == [
        "options_that_cannot_be_served_are_refused"
    ]
