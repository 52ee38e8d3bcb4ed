"""The numpy backend passes the conformance kit, and the kit catches backends with one planted fault each.

`Simple` (simple_backend.py) answers like the numpy backend from small parts; every broken backend replaces one part. A
fault must be caught by the case that is meant for it, not only by some accident. Faults of `AttentionOptions` and of
shapes are in test_conformance_features.py and test_conformance_shapes.py.
"""

import numpy as np
import pytest
from conformance_faults import assert_caught
from simple_backend import Simple

from kvpool.protocol import FEATURES, StepArrays
from kvpool.testing import conformance, conformance_storage
from kvpool_backends.numpy import NumpyBackend
from kvpool_backends.numpy import backend as numpy_backend

QUANTIZED = {case.__name__ for case in conformance_storage.QUANTIZED_CASES} - {"other_bits_and_groups_are_refused"}


@pytest.mark.parametrize("case", conformance.CASES, ids=lambda case: case.__name__)
def test_numpy_backend_conforms(case):
    """It refuses no spec; every other case applies."""
    left_out = case.__name__ in ("refused_specs_raise", "other_bits_and_groups_are_refused")
    expected = "not applicable" if left_out else "passed"
    assert conformance.check_backend(NumpyBackend, [case]) == {case.__name__: expected}


# ---------------------------------------------------------------------- planted faults


class SeesTheNextToken(Simple):
    def visible(self, seq_len, q_len, j):
        return min(seq_len, super().visible(seq_len, q_len, j) + 1)


class WeighsUnusedSlotsWithZero(Simple):
    """The whole last block takes part; a mask sets its weights to 0, and 0 * NaN is NaN."""

    def context(self, plane, table, seq_len):
        blocks = -(-seq_len // self.spec.block_size)
        return self._context(plane, table[:blocks], blocks * self.spec.block_size)

    def one(self, x):
        scores = np.where(np.arange(len(x.k)) < x.visible, self.scores(x, x.k), -np.inf)
        return self.mix(scores, -np.inf, x.v)


class ForgetsAFullLastBlock(Simple):
    """seq_len % block_size as the number of tokens in the last block: 0 when it is full."""

    def visible(self, seq_len, q_len, j):
        visible, size = super().visible(seq_len, q_len, j), self.spec.block_size
        return visible if visible % size else max(1, visible - size)


class IgnoresTheTable(Simple):
    def context(self, plane, table, seq_len):
        return super().context(plane, np.arange(1, len(table) + 1), seq_len)


class IgnoresScale(Simple):
    def attend(self, step, layer, q, scale=None, *, options=None, return_attn=False):
        return super().attend(step, layer, q, None, options=options, return_attn=return_attn)


class AnswersPaddingWithOnes(NumpyBackend):
    def attend(self, step, layer, q, scale=None, *, options=None, return_attn=False):
        out = super().attend(step, layer, q, scale, options=options)
        out[step.cu_q_lens[-1] :] = 1
        return out


class WritesNegativeSlots(NumpyBackend):
    """As array indexing does: slot -1 is the last slot of the pool."""

    def write(self, step, layer, k, v):
        slots = step.slot_mapping % (self.num_blocks * self.spec.block_size)
        super().write(StepArrays(slot_mapping=slots), layer, k, v)


class CopiesKeysOnly(NumpyBackend):
    def copy_blocks(self, plan):
        planes, self._planes = self._planes, [(k, k) for k, _ in self._planes]
        super().copy_blocks(plan)
        self._planes = planes


class WritesBeforeItCopies(NumpyBackend):
    """Copies wait in a queue until the first read."""

    def __init__(self, spec, num_blocks):
        super().__init__(spec, num_blocks)
        self.queue = []

    def copy_blocks(self, plan):
        self.queue.append(np.array(getattr(plan, "copies", plan)))

    def attend(self, step, layer, q, scale=None, *, options=None, return_attn=False):
        for copies in self.queue:
            super().copy_blocks(copies)
        self.queue.clear()
        return super().attend(step, layer, q, scale, options=options, return_attn=return_attn)


class TruncatesBfloat16(NumpyBackend):
    def _to_stored(self, name, x):
        if self.spec.dtype == "bfloat16":
            return (np.ascontiguousarray(x, np.float32).view(np.uint32) >> 16).astype(np.uint16)
        return super()._to_stored(name, x)


class HandsOutItsStorage(NumpyBackend):
    def gather(self, layer, blocks, num_tokens=None):
        if len(blocks) == 1 and self.spec.dtype == "float32" and self.spec.layout == "NHD":
            return tuple(plane[blocks[0]][:num_tokens] for plane in self._planes[layer])
        return super().gather(layer, blocks, num_tokens)


class ExportsValuesFirst(NumpyBackend):
    def _plane_columns(self):
        self._planes = [planes[::-1] for planes in self._planes]
        yield from super()._plane_columns()
        self._planes = [planes[::-1] for planes in self._planes]


class ZeroesTheNeighbourToo(NumpyBackend):
    def zero(self, blocks):
        ids = self._block_ids("zero", blocks)
        super().zero(np.union1d(ids, (ids + 1) % self.num_blocks))


class ChecksAfterItWrote(NumpyBackend):
    def copy_blocks(self, plan):
        for copy in np.array(getattr(plan, "copies", plan)):
            super().copy_blocks(copy[None])


FAULTS = {
    SeesTheNextToken: "ragged_chunks_equal_dense_attention",
    WeighsUnusedSlotsWithZero: "unused_slots_never_matter",
    ForgetsAFullLastBlock: "decode_equals_dense_attention",
    IgnoresTheTable: "placement_changes_nothing",
    IgnoresScale: "scale_is_applied",
    AnswersPaddingWithOnes: "padding_is_inert",
    WritesNegativeSlots: "padding_is_inert",
    CopiesKeysOnly: "copies_take_exactly_the_valid_tokens",
    WritesBeforeItCopies: "copies_writes_reads_happen_in_order",
    TruncatesBfloat16: "written_values_are_rounded_to_nearest_even",
    HandsOutItsStorage: "gather_copies_tokens_in_logical_order",
    ExportsValuesFirst: "exported_blocks_hold_the_documented_bytes",
    ZeroesTheNeighbourToo: "zero_clears_only_what_it_names",
    ChecksAfterItWrote: "misuse_is_refused_before_a_byte_changes",
}


@pytest.mark.long
def test_simple_backend_without_a_fault_conforms():
    conformance.check_backend(Simple)


@pytest.mark.filterwarnings("ignore:invalid value:RuntimeWarning")  # faults compute with NaN
@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.__name__)
def test_planted_fault_is_caught_by_its_case(fault):
    assert_caught(fault, FAULTS[fault])


def test_planted_fault_in_an_engine_is_caught_by_random_steps_alone():
    """The random engine needs no help of the other cases for a fault that corrupts sequences."""
    assert_caught(CopiesKeysOnly, "engine_steps_equal_dense_attention")


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


def test_warmup_that_takes_no_scores_or_needs_shapes_is_caught():
    class TakesNoScores(NumpyBackend):
        def warmup(self, shapes):
            pass

    class NeedsShapes(NumpyBackend):
        def warmup(self, shapes, *, scores=None):
            shapes[0]

    for fault in (TakesNoScores, NeedsShapes):
        assert_caught(fault, "warmup_changes_nothing")


def test_capabilities_narrow_what_the_kit_tries():
    class Narrow(NumpyBackend):
        capabilities = numpy_backend.Capabilities(
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

    outcome = conformance.check_backend(Narrow)
    left_out = {name for name, result in outcome.items() if result == "not applicable"}
    assert left_out == {
        "value_heads_may_have_another_dim",
        "attention_weights_are_returned",
        *QUANTIZED,
        "a_row_has_the_same_bits_in_any_batch",
        "scores_come_after_weights",
        "scores_out_is_filled_in_place",
        "shapes_in_one_arena_equal_dense_attention",
        "layers_of_one_group_may_differ",
        "given_rows_are_used_and_nothing_between_them",
    }


def test_finding_names_the_misuse():
    class AcceptsAnyGather(NumpyBackend):
        def gather(self, layer, blocks, num_tokens=None):
            return super().gather(layer, [1], 1)

    case = {case.__name__: case for case in conformance.CASES}["misuse_is_refused_before_a_byte_changes"]
    with pytest.raises(AssertionError, match=r"backend\.gather\(0, \[-1\]\) was accepted, IndexError is documented"):
        case(AcceptsAnyGather)
