"""Each conformance case of `compact` catches the fault that it is meant for."""

from dataclasses import replace

import numpy as np
import pytest

from kvpool.testing import conformance, conformance_storage
from kvpool_backends.checks import checked_keep
from kvpool_backends.numpy import NumpyBackend

CASES = {case.__name__: case for case in conformance_storage.COMPACT_CASES}


class Moves(NumpyBackend):
    """Right, from parts that a test replaces."""

    def compact(self, blocks, keep):
        ids, places = checked_keep(self, blocks, keep)
        for layer, planes in enumerate(self._planes):
            for number, plane in enumerate(planes):
                self.move(plane, ids, self.places(places, layer, number))

    def places(self, places, layer, plane):
        return places[layer]

    def order(self, n):
        return range(n)

    def move(self, plane, ids, places):
        size = self.spec.block_size
        for head in range(self.spec.num_kv_heads):
            for j in self.order(places.shape[1]):
                old = places[head, j]
                plane[ids[j // size], j % size, head] = plane[ids[old // size], old % size, head]


class OneHeadForAll(Moves):
    def places(self, places, layer, plane):
        return np.repeat(places[layer, :1], self.spec.num_kv_heads, 0)


class FromTheEnd(Moves):
    """In place, an ascending move must start at the front: from the end it overwrites what it has still to read."""

    def order(self, n):
        return reversed(range(n))


class MovesBeforeItLooks(Moves):
    def compact(self, blocks, keep):
        try:
            super().compact(blocks, keep)
        except ValueError:
            super().compact(blocks, [0])
            for plane in self._every_plane():
                plane[blocks[0], 0] += 1
            raise


FAULTS = {
    OneHeadForAll: "compacted_rows_answer_from_what_stays",
    FromTheEnd: "compaction_moves_what_stays_and_nothing_else",
    MovesBeforeItLooks: "misplaced_tokens_are_refused_before_a_byte_changes",
}


def test_backend_of_parts_is_right():
    assert set(conformance.check_backend(Moves, list(CASES.values())).values()) == {"passed"}


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.__name__)
def test_planted_fault_is_caught_by_its_case(fault):
    with pytest.raises((AssertionError, ValueError)):
        CASES[FAULTS[fault]](fault)


@pytest.mark.parametrize(
    "case",
    [
        "compaction_moves_what_stays_and_nothing_else",
        "compacted_rows_answer_from_what_stays",
    ],
)
def test_cases_do_not_apply_to_a_backend_without_the_capability(case):
    class Cannot(NumpyBackend):
        capabilities = replace(NumpyBackend.capabilities, compacts=False)

        def compact(self, blocks, keep):
            raise ValueError("[compact] backend 'numpy' cannot move tokens")

    cases = [CASES[case], CASES["misplaced_tokens_are_refused_before_a_byte_changes"]]
    found = conformance.check_backend(Cannot, cases)
    assert list(found.values()) == ["not applicable", "passed"]
