"""The conformance kit catches backends with one planted fault each, by the case that is meant for the fault.

One for each part of the kit.
"""

from unittest import mock

import numpy as np
import pytest

from kvpool.group_storage import GroupStorage
from kvpool.protocol import StepArrays
from kvpool.testing import conformance, conformance_engines
from kvpool_backends.checks import checked_step
from kvpool_backends.numpy import NumpyBackend

CASES = {case.__name__: case for case in conformance.CASES}


# ---------------------------------------------------------------------- attention, writes and copies


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


class ZeroTimesWhatIsThere(NumpyBackend):
    """What no query sees of a row's last block takes part with weights of 0, and 0 * NaN is NaN."""

    def attend(self, step, layer, q, scale=None, **more):
        out = super().attend(step, layer, q, scale, **more)
        size = self.spec.block_size
        for row, length in enumerate(step.seq_lens.tolist()):
            behind = self._context(self._layer(layer)[1], step.block_tables[row], -(-length // size) * size)[length:]
            out[slice(*step.cu_q_lens[row : row + 2])] += 0 * behind.sum()
        return out


# ---------------------------------------------------------------------- scores and steps


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


class CountsTheGap(GroupStorage):
    """Tables with their holes, as they are."""

    def prepare(self, plan):
        with mock.patch.object(StepArrays, "of_group", self.whole):
            return super().prepare(plan)

    def whole(self, plan, group, column):
        arrays = plan.groups[group]
        return StepArrays(arrays.block_tables[:, :, column], plan.seq_lens, plan.cu_q_lens, arrays.slot_mapping[column])


# ---------------------------------------------------------------------- other numbers of blocks


class ForgetsAMove(NumpyBackend):
    def resize(self, num_blocks, moves, **more):
        super().resize(num_blocks, moves[1:], **more)


FAULTS = {
    ForgetsAMove: "resized_pools_keep_what_stays",
    WritesBeforeItCopies: "copies_writes_reads_happen_in_order",
    ZeroTimesWhatIsThere: "unused_slots_never_matter",
    ReadsThePlanLate: "calls_do_not_depend_on_the_plan_afterwards",
    ZeroesTheWholeRow: "given_rows_are_used_and_nothing_between_them",
    CountsTheGap: "gaps_in_tables_are_not_read",
}
pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")  # faults compute with NaN and infinity


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.__name__)
def test_planted_fault_is_caught_by_its_case(fault, monkeypatch):
    backend = fault
    if issubclass(fault, GroupStorage):
        monkeypatch.setattr(conformance_engines, "GroupStorage", fault)
        backend = NumpyBackend
    with pytest.raises(AssertionError, match="1 of 1 cases failed"):
        conformance.check_backend(backend, [CASES[FAULTS[fault]]])
