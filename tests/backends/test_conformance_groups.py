"""The conformance cases of layer groups: each passes, and catches the faults that it is meant for.

Some faults are in a backend, others in `GroupStorage`, which puts backends together.
"""

from unittest import mock

import numpy as np
import pytest
from conformance_faults import assert_caught
from simple_backend import Simple

from kvpool.group_storage import GroupStorage
from kvpool.protocol import StepArrays
from kvpool.testing import conformance, conformance_groups
from kvpool_backends.numpy import NumpyBackend

CASES = {case.__name__: case for case in conformance_groups.GROUP_CASES}


@pytest.mark.parametrize("case", CASES.values(), ids=lambda case: case.__name__)
def test_backend_of_parts_holds_groups(case):
    case(Simple)


def test_backend_without_options_and_layout_block_holds_full_groups_and_states():
    class Plain(NumpyBackend):
        capabilities = conformance_groups.replace(NumpyBackend.capabilities, layouts=("NHD",), features=())

    outcome = conformance.check_backend(Plain, conformance_groups.GROUP_CASES)
    assert {name for name, result in outcome.items() if result != "passed"} == {
        "shapes_in_one_arena_equal_dense_attention",
        "layers_of_one_group_may_differ",
        "given_rows_are_used_and_nothing_between_them",
        "gaps_in_tables_are_not_read",
    }


# ---------------------------------------------------------------------- planted faults in a backend


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


class ForgetsRotaryParts(NumpyBackend):
    def attend(self, step, layer, q, *args, **options):
        if self.spec.latent:
            q = np.where(np.arange(q.shape[2]) < self.spec.head_dim, q, 0)
        return super().attend(step, layer, q, *args, **options)


class SharesStepsBetweenColumns(NumpyBackend):
    """The step that was prepared last answers for all."""

    def prepare(self, plan):
        self.last = super().prepare(plan)
        return self.last

    def attend(self, step, *args, **options):
        return super().attend(self.last if len(step.seq_lens) == len(self.last.seq_lens) else step, *args, **options)


BACKEND_FAULTS = {
    ZeroesTheWholeRow: "given_rows_are_used_and_nothing_between_them",
    ForgetsRotaryParts: "latents_are_stored_and_read",
    SharesStepsBetweenColumns: "groups_equal_dense_attention",
}


@pytest.mark.filterwarnings("ignore:invalid value:RuntimeWarning")
@pytest.mark.parametrize("fault", BACKEND_FAULTS, ids=lambda fault: fault.__name__)
def test_planted_fault_of_a_backend_is_caught_by_its_case(fault):
    assert_caught(fault, BACKEND_FAULTS[fault])


# ---------------------------------------------------------------------- planted faults in the storage


class CountsTheGap(GroupStorage):
    """Tables with their holes, as they are."""

    def prepare(self, plan):
        with mock.patch.object(StepArrays, "of_group", self.whole):
            return super().prepare(plan)

    def whole(self, plan, group, column):
        arrays = plan.groups[group]
        return StepArrays(arrays.block_tables[:, :, column], plan.seq_lens, plan.cu_q_lens, arrays.slot_mapping[column])


class CopiesOneGroup(GroupStorage):
    def copy_blocks(self, plan):
        held, self._held = self._held, dict(list(self._held.items())[:1])
        super().copy_blocks(plan)
        self._held = held


class CompactsOneColumnOnly(GroupStorage):
    def compact(self, group, table, keep):
        super().compact(group, np.repeat(table[:, :1], table.shape[1], axis=1), keep)


class SavesStatesInAscendingBlocks(GroupStorage):
    def save_states(self, group, slots, blocks):
        super().save_states(group, slots, np.sort(blocks, axis=1))


STORAGE_FAULTS = {
    CompactsOneColumnOnly: "groups_equal_dense_attention",
    CountsTheGap: "gaps_in_tables_are_not_read",
    CopiesOneGroup: "shapes_in_one_arena_equal_dense_attention",
    SavesStatesInAscendingBlocks: "states_travel_in_blocks",
}


@pytest.mark.filterwarnings("ignore:invalid value:RuntimeWarning")
@pytest.mark.parametrize("fault", STORAGE_FAULTS, ids=lambda fault: fault.__name__)
def test_planted_fault_of_the_storage_is_caught_by_its_case(fault, monkeypatch):
    monkeypatch.setattr(conformance_groups, "GroupStorage", fault)
    assert_caught(NumpyBackend, STORAGE_FAULTS[fault])
