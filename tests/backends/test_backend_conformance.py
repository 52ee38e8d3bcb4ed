"""The numpy backend passes the conformance kit; what the kit says, and what it leaves out by capabilities.

That it catches faults is in test_conformance_faults.py.
"""

from dataclasses import replace

import pytest

from kvpool.protocol import FEATURES, Capabilities
from kvpool.testing import conformance
from kvpool_backends.numpy import NumpyBackend

QUANTIZED = {"groups_of_every_kind_are_stored_by_the_formula", "quantized_contexts_equal_dense_attention"}
PLAIN = Capabilities("plain", NumpyBackend.capabilities.layouts, NumpyBackend.capabilities.dtypes)


def outcome(capabilities, cases=conformance.CASES):
    """What the kit says of the numpy backend with these capabilities: names that passed, and that do not apply."""

    class Claims(NumpyBackend):
        pass

    Claims.capabilities = capabilities
    found = conformance.check_backend(Claims, cases)
    return [{name for name, result in found.items() if result == said} for said in ("passed", "not applicable")]


@pytest.mark.parametrize("case", conformance.CASES, ids=lambda case: case.__name__)
def test_numpy_backend_conforms(case):
    """It refuses no spec; every other case applies."""
    expected = "not applicable" if case.__name__ == "refused_specs_raise" else "passed"
    assert conformance.check_backend(NumpyBackend, [case]) == {case.__name__: expected}


def test_check_backend_names_every_failed_case_and_chains_the_first():
    class Broken(NumpyBackend):
        def zero(self, blocks):
            raise RuntimeError("no such kernel")

    named = ("zero_clears_only_what_it_names", "warmup_changes_nothing", "import_restores_what_export_took")
    cases = [case for case in conformance.CASES if case.__name__ in named]
    with pytest.raises(AssertionError, match=r"2 of 3 cases failed(.|\n)*zero_clears.*no such kernel") as caught:
        conformance.check_backend(Broken, cases)
    assert caught.value.__cause__ is not None
    assert "import_restores_what_export_took" in str(caught.value)


def test_capabilities_narrow_what_the_kit_tries():
    narrow = Capabilities(
        name="narrow",
        layouts=("HND",),
        dtypes=("float16",),
        head_dims=(64,),
        block_sizes=(16,),
        max_q_heads_per_kv_head=4,
        mixed_head_dims=False,
        return_attn=False,
        features=FEATURES,
        compacts=True,
        scores=("raw",),
    )
    assert outcome(narrow)[1] == {
        "attention_weights_are_returned",
        *QUANTIZED,
        "a_row_has_the_same_bits_in_any_batch",
        "scores_come_after_weights",
        "scores_out_is_filled_in_place",
        "shapes_in_one_arena_equal_dense_attention",
        "layers_of_one_group_may_differ",
        "given_rows_are_used_and_nothing_between_them",
    }


@pytest.mark.parametrize(
    "feature", [FEATURES[0], *(pytest.param(name, marks=pytest.mark.long) for name in FEATURES[1:])]
)
def test_backend_with_one_feature_is_asked_for_that_one_alone(feature):
    """It passes what it claims and refuses the rest; cases about the rest do not apply."""
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
    expected = set().union(*(names for name, names in others.items() if name != feature)) | {"features_work_together"}
    named = expected | others[feature] | {"options_that_cannot_be_served_are_refused"}
    cases = [case for case in conformance.CASES if case.__name__ in named]
    assert outcome(replace(PLAIN, features=(feature,)), cases)[1] == expected
