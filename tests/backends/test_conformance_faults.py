"""The conformance kit catches backends with one planted fault each, by the case that is meant for the fault.

`Simple` (simple_backend.py) answers like the numpy backend from small parts; a broken backend replaces one part. Of the
faults of a kind there is one here: the one that the fewest cases find.
"""

from dataclasses import replace
from unittest import mock

import numpy as np
import pytest
from simple_backend import Simple, Split, ZeroTimesWhatIsThere

from kvpool.group_storage import GroupStorage
from kvpool.protocol import AttentionOptions, StepArrays
from kvpool.testing import conformance, conformance_groups
from kvpool.testing.dense import dense_scores
from kvpool_backends.checks import checked_step
from kvpool_backends.numpy import NumpyBackend

CASES = {case.__name__: case for case in conformance.CASES}


# ---------------------------------------------------------------------- attention, writes and copies


class SeesTheNextToken(Simple):
    def visible(self, seq_len, q_len, j):
        return min(seq_len, super().visible(seq_len, q_len, j) + 1)


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


class ChecksAfterItWrote(NumpyBackend):
    def copy_blocks(self, plan):
        for copy in np.array(getattr(plan, "copies", plan)):
            super().copy_blocks(copy[None])


# ---------------------------------------------------------------------- options


class WindowEndsAtTheNewestToken(Simple):
    """One window for all queries of a chunk."""

    def oldest(self, x):
        return 0 if x.options.window is None else min(x.visible - 1, max(0, x.seq_len - x.options.window))


class CapsAfterTheBias(Simple):
    """The cap over scores, slopes and mask."""

    def mix(self, scores, sink, v):
        return super().mix(scores if self.cap is None else self.cap * np.tanh(scores / self.cap), sink, v)

    def scores(self, x, k):
        self.cap = x.options.soft_cap
        return k @ x.q * x.scale


class SinkIsCountedInEveryPart(Split):
    def merge(self, partials, sink):
        return super().merge(partials, sink + np.log(len(partials)))


class MaskOfTheQueryInItsRow(Simple):
    """Row j of the mask for query j of every sequence."""

    def mask(self, x):
        x.token -= x.first
        return super().mask(x)


class BaseChangesTheRange(Split):
    """Scores to base 2, where the largest floats are infinite; in chunks only they differ from none."""

    def mix(self, scores, sink, v):
        with np.errstate(over="ignore"):
            return super().mix(np.float32(np.float32(scores) * np.log2(np.e)) / np.log2(np.e), sink, v)


# ---------------------------------------------------------------------- shapes and batches


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


# ---------------------------------------------------------------------- scores


class OtherScores(NumpyBackend):
    """Scores of another definition, from `dense_scores`."""

    def attend(self, step, layer, q, scale=None, *, options=None, return_attn=False, scores=None, scores_out=None):
        more = {"return_attn": return_attn, "scores": scores, "scores_out": scores_out}
        options = AttentionOptions() if options is None else options
        result = super().attend(step, layer, q, scale, options=options, **more)
        if scores is None or return_attn:
            return result
        result[1][:] = 0
        for row, seq_len in enumerate(step.seq_lens.tolist()):
            begin, end = step.cu_q_lens[row : row + 2].tolist()
            if begin < end:
                table = step.block_tables[row, : -(-seq_len // self.spec.block_size)]
                keys = self.gather(layer, table, seq_len)[0]
                result[1][row, :, :seq_len] = self.one(q, keys, begin, end, scores, options)
        return result

    def one(self, q, keys, begin, end, kind, options):
        return self.of(q[end - 1 : end], keys, end - 1, kind, options)

    def of(self, q, keys, token, kind, options):
        mask = options.mask if options.mask is None else options.mask[token : token + 1]
        return dense_scores(q, keys, kind, None, replace(options, mask=mask))


class MassOfAPart(OtherScores):
    """Every part of 256 tokens with its own maximum and sum, as partial results have them."""

    def of(self, q, keys, token, kind, options):
        whole = super().of(q, keys, token, kind, options)
        if kind == "mass":
            for begin in range(0, len(keys), 256):
                part = whole[:, begin : begin + 256]
                part /= np.maximum(part.sum(axis=1, keepdims=True), 1e-30)
        return whole


# ---------------------------------------------------------------------- steps


class KeepsOneStep(NumpyBackend):
    """As if there were one plan."""

    def prepare(self, plan):
        self.step = super().prepare(plan)
        return None

    def write(self, step, layer, k, v):
        super().write(self.step, layer, k, v)

    def attend(self, step, layer, q, scale=None, **more):
        return super().attend(self.step, layer, q, scale, **more)

    def read(self, step, layer):
        return super().read(self.step, layer)


class ReadsThePlanLate(NumpyBackend):
    """Attends when somebody wants to see the result, over what the plan says then."""

    def prepare(self, plan):
        return plan

    def write(self, step, layer, k, v):
        super().write(checked_step(self, step), layer, k, v)

    def attend(self, step, layer, q, scale=None, **more):
        return lambda: NumpyBackend.attend(self, checked_step(self, step), layer, q, scale, **more)

    def read(self, step, layer):
        return super().read(checked_step(self, step), layer)

    def to_numpy(self, x):
        return super().to_numpy(x() if callable(x) else x)


# ---------------------------------------------------------------------- storage: compaction, quantized planes, groups


class MovesBeforeItLooks(NumpyBackend):
    def compact(self, blocks, keep):
        try:
            super().compact(blocks, keep)
        except ValueError:
            super().compact(blocks, [0])
            for plane in self._every_plane():
                plane[blocks[0], 0] += 1
            raise


class ScalesOfTheNextToken(NumpyBackend):
    def _context(self, plane, table, num_tokens):
        if isinstance(plane, tuple):
            words, scales, biases = plane
            plane = words, np.roll(scales, 1, axis=1), biases
        return super()._context(plane, table, num_tokens)


class ZeroesTheWholeRow(NumpyBackend):
    """And what lies behind it."""

    def __init__(self, spec, num_blocks, *, storage=None):
        super().__init__(spec, num_blocks, storage=storage)
        self.storage = storage

    def zero(self, blocks):
        super().zero(blocks)
        if self.storage is not None:
            shape = len(self.storage), self.storage.strides[0]
            np.lib.stride_tricks.as_strided(self.storage, shape, (shape[1], 1))[np.asarray(blocks)] = 0


class SharesStepsBetweenColumns(NumpyBackend):
    """The step that was prepared last answers for all."""

    def prepare(self, plan):
        self.last = super().prepare(plan)
        return self.last

    def attend(self, step, *args, **options):
        return super().attend(self.last if len(step.seq_lens) == len(self.last.seq_lens) else step, *args, **options)


class CountsTheGap(GroupStorage):
    """Tables with their holes, as they are."""

    def prepare(self, plan):
        with mock.patch.object(StepArrays, "of_group", self.whole):
            return super().prepare(plan)

    def whole(self, plan, group, column):
        arrays = plan.groups[group]
        return StepArrays(arrays.block_tables[:, :, column], plan.seq_lens, plan.cu_q_lens, arrays.slot_mapping[column])


class SavesStatesInAscendingBlocks(GroupStorage):
    def save_states(self, group, slots, blocks):
        super().save_states(group, slots, np.sort(blocks, axis=1))


FAULTS = {
    SeesTheNextToken: "ragged_chunks_equal_dense_attention",
    ZeroTimesWhatIsThere: "unused_slots_never_matter",
    CopiesKeysOnly: "copies_take_exactly_the_valid_tokens",
    WritesBeforeItCopies: "copies_writes_reads_happen_in_order",
    ChecksAfterItWrote: "misuse_is_refused_before_a_byte_changes",
    WindowEndsAtTheNewestToken: "window_hides_older_tokens",
    CapsAfterTheBias: "features_work_together",
    SinkIsCountedInEveryPart: "sinks_are_counted_once",
    MaskOfTheQueryInItsRow: "masks_of_bools_and_floats_are_applied",
    BaseChangesTheRange: "ends_of_the_float_range_are_numbers_like_others",
    CutsByTheBatch: "a_row_has_the_same_bits_in_any_batch",
    ReadsInputsAsIfContiguous: "strided_inputs_are_read_by_their_strides",
    MassOfAPart: "scores_of_decode_equal_dense_scores",
    KeepsOneStep: "steps_are_used_side_by_side",
    ReadsThePlanLate: "calls_do_not_depend_on_the_plan_afterwards",
    MovesBeforeItLooks: "misplaced_tokens_are_refused_before_a_byte_changes",
    ScalesOfTheNextToken: "quantized_contexts_equal_dense_attention",
    ZeroesTheWholeRow: "given_rows_are_used_and_nothing_between_them",
    SharesStepsBetweenColumns: "groups_equal_dense_attention",
    CountsTheGap: "gaps_in_tables_are_not_read",
    SavesStatesInAscendingBlocks: "states_travel_in_blocks",
}
pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")  # faults compute with NaN and infinity


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.__name__)
def test_planted_fault_is_caught_by_its_case(fault, monkeypatch):
    backend = fault
    if issubclass(fault, GroupStorage):
        monkeypatch.setattr(conformance_groups, "GroupStorage", fault)
        backend = NumpyBackend
    with pytest.raises(AssertionError, match="1 of 1 cases failed"):
        conformance.check_backend(backend, [CASES[FAULTS[fault]]])


def test_planted_fault_in_an_engine_is_caught_by_random_steps_alone():
    """The random engine needs no help of the other cases for a fault that corrupts sequences."""
    with pytest.raises(AssertionError):
        CASES["engine_steps_equal_dense_attention"](CopiesKeysOnly)


@pytest.mark.long
@pytest.mark.parametrize("backend", [Simple, Split, OtherScores])
def test_backends_of_parts_without_a_fault_conform(backend):
    conformance.check_backend(backend)
