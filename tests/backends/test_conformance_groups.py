"""The conformance cases of layer groups: each passes, and catches the faults that it is meant for.

Some faults are in a backend, others in `GroupStorage`, which puts backends together.
"""

from dataclasses import replace
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


class TakesMemoryOfItsOwn(NumpyBackend):
    def __init__(self, spec, num_blocks, *, storage=None):
        super().__init__(spec, num_blocks)


class TakesRowsForContiguous(NumpyBackend):
    """The row of block b begins at b times the bytes of a block of the spec, whatever lies between two rows."""

    def __init__(self, spec, num_blocks, *, storage=None):
        if storage is not None and storage.base is not None:
            whole = np.lib.stride_tricks.as_strided(storage, (storage.nbytes,), (1,))
            storage = whole.reshape(num_blocks, -1)
        super().__init__(spec, num_blocks, storage=storage)


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


class ReadsTheGapWithWeightZero(Simple):
    """The whole context takes part; a window sets the weights of the others to 0, and 0 * NaN is NaN."""

    def one(self, x):
        scores = self.scores(x, x.k)
        hidden = np.arange(len(x.k)) >= x.visible
        hidden |= np.arange(len(x.k)) < self.oldest(x)
        if x.options.mask is not None:
            scores = scores + self.bias(self.mask(x)[: len(scores)])
        return self.mix(np.where(hidden, -np.inf, scores), -np.inf, x.v)


class CopiesTheFirstColumn(NumpyBackend):
    """Copies of a plan come column after column; only the first one of two is made."""

    def copy_blocks(self, plan):
        copies = np.asarray(getattr(plan, "copies", plan))
        super().copy_blocks(copies[::2])


class SwapsLatentAndRotaryPart(NumpyBackend):
    def read(self, step, layer):
        k, v = super().read(step, layer)
        return (v, k) if self.spec.latent else (k, v)


class AttendsToLatentsThatItRefuses(NumpyBackend):
    capabilities = replace(NumpyBackend.capabilities, latent=False)

    def attend(self, step, layer, q, *args, **options):
        if self.spec.latent:
            return np.zeros((*q.shape[:2], self.spec.result_dim))
        return super().attend(step, layer, q, *args, **options)


class ForgetsRotaryParts(NumpyBackend):
    def attend(self, step, layer, q, *args, **options):
        if self.spec.latent:
            q = np.where(np.arange(q.shape[2]) < self.spec.head_dim, q, 0)
        return super().attend(step, layer, q, *args, **options)


class RoundsWhatItImports(NumpyBackend):
    """NaN of other bits becomes the usual one, as if the bytes were numbers."""

    def import_blocks(self, blocks, data):
        super().import_blocks(blocks, data)
        for plane in self._every_plane():
            if plane.dtype.kind == "f":
                plane[np.isnan(plane)] = np.nan


class SharesStepsBetweenColumns(NumpyBackend):
    """The step that was prepared last answers for all."""

    def prepare(self, plan):
        self.last = super().prepare(plan)
        return self.last

    def attend(self, step, *args, **options):
        return super().attend(self.last if len(step.seq_lens) == len(self.last.seq_lens) else step, *args, **options)


BACKEND_FAULTS = {
    TakesMemoryOfItsOwn: "given_rows_are_used_and_nothing_between_them",
    TakesRowsForContiguous: "given_rows_are_used_and_nothing_between_them",
    ZeroesTheWholeRow: "given_rows_are_used_and_nothing_between_them",
    ReadsTheGapWithWeightZero: "groups_equal_dense_attention",
    CopiesTheFirstColumn: "groups_equal_dense_attention",
    SwapsLatentAndRotaryPart: "latents_are_stored_and_read",
    AttendsToLatentsThatItRefuses: "latents_are_stored_and_read",
    ForgetsRotaryParts: "latents_are_stored_and_read",
    RoundsWhatItImports: "states_travel_in_blocks",
    SharesStepsBetweenColumns: "groups_equal_dense_attention",
}


@pytest.mark.filterwarnings("ignore:invalid value:RuntimeWarning")
@pytest.mark.parametrize("fault", BACKEND_FAULTS, ids=lambda fault: fault.__name__)
def test_planted_fault_of_a_backend_is_caught_by_its_case(fault):
    assert_caught(fault, BACKEND_FAULTS[fault])


# ---------------------------------------------------------------------- planted faults in the storage


class SecondColumnIsTheFirst(GroupStorage):
    def _place(self, group, index):
        return super()._place(group, index)._replace(column=0)


class CutsAnywhere(GroupStorage):
    """Cuts tables at the positions that `starts` gives for ``kv_starts``, and keeps nothing before them."""

    def prepare(self, plan):
        with mock.patch.object(StepArrays, "of_group", self.cut):
            return super().prepare(plan)

    def cut(self, plan, group, column):
        arrays, size = plan.groups[group], self.groups[group].block_size or plan.pool.block_size
        starts = self.starts(np.asarray(arrays.kv_starts))
        lens = np.asarray(plan.seq_lens) - starts
        entries = np.arange(-(-int(lens.max(initial=0)) // size)) + starts[:, None] // size
        entries = np.minimum(entries, arrays.block_tables.shape[1] - 1)
        tables = np.take_along_axis(arrays.block_tables[:, :, column], entries, axis=1)
        return StepArrays(tables, lens, plan.cu_q_lens, arrays.slot_mapping[column])


class IgnoresWhatAWindowKeeps(CutsAnywhere):
    def starts(self, starts):
        return starts


class CountsTheGap(CutsAnywhere):
    """The table with its holes, as it is."""

    def starts(self, starts):
        return 0 * starts


class ForgetsTheWindow(GroupStorage):
    def _options(self, step, number, num_tokens, options):
        is_window = self.groups[number].kind == "window"
        return options if is_window else super()._options(step, number, num_tokens, options)


class ForgetsTheChunk(GroupStorage):
    def _options(self, step, number, num_tokens, options):
        is_chunk = self.groups[number].kind == "chunk"
        return options if is_chunk else super()._options(step, number, num_tokens, options)


class CopiesOneGroup(GroupStorage):
    def copy_blocks(self, plan):
        held, self._held = self._held, dict(list(self._held.items())[:1])
        super().copy_blocks(plan)
        self._held = held


class LayersOfAColumnAreOneLayer(GroupStorage):
    def _place(self, group, index):
        return super()._place(group, index)._replace(layer=0)


class CompactsOneColumnOnly(GroupStorage):
    def compact(self, group, table, keep):
        super().compact(group, np.repeat(table[:, :1], table.shape[1], axis=1), keep)


class CountsWhatWasEvicted(GroupStorage):
    def prepare(self, plan):
        step = super().prepare(plan)
        return replace(step, cuts={number: cut._replace(evicted=0 * cut.evicted) for number, cut in step.cuts.items()})


class SavesStatesInAscendingBlocks(GroupStorage):
    def save_states(self, group, slots, blocks):
        super().save_states(group, slots, np.sort(blocks, axis=1))


class DropsTheLastBlockOfABundle(GroupStorage):
    def import_blocks(self, blocks, data, arena=0):
        kept = slice(None) if len(blocks) != 6 else slice(-1)
        super().import_blocks(blocks[kept], data[kept], arena)


STORAGE_FAULTS = {
    SecondColumnIsTheFirst: "groups_equal_dense_attention",
    CompactsOneColumnOnly: "groups_equal_dense_attention",
    CountsWhatWasEvicted: "groups_equal_dense_attention",
    IgnoresWhatAWindowKeeps: "groups_equal_dense_attention",
    CountsTheGap: "gaps_in_tables_are_not_read",
    ForgetsTheWindow: "gaps_in_tables_are_not_read",
    ForgetsTheChunk: "groups_equal_dense_attention",
    CopiesOneGroup: "shapes_in_one_arena_equal_dense_attention",
    LayersOfAColumnAreOneLayer: "shapes_in_one_arena_equal_dense_attention",
    SavesStatesInAscendingBlocks: "states_travel_in_blocks",
    DropsTheLastBlockOfABundle: "states_travel_in_blocks",
}


@pytest.mark.filterwarnings("ignore:invalid value:RuntimeWarning")
@pytest.mark.parametrize("fault", STORAGE_FAULTS, ids=lambda fault: fault.__name__)
def test_planted_fault_of_the_storage_is_caught_by_its_case(fault, monkeypatch):
    monkeypatch.setattr(conformance_groups, "GroupStorage", fault)
    assert_caught(NumpyBackend, STORAGE_FAULTS[fault])
