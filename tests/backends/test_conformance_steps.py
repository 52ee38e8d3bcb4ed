"""Faults in steps, planted one by one: each is caught by the case meant for it."""

from dataclasses import replace

import numpy as np
import pytest

from kvpool.testing import conformance, conformance_storage
from kvpool_backends.checks import checked_step
from kvpool_backends.numpy import NumpyBackend

CASES = {case.__name__: case for case in conformance_storage.STEP_CASES}


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


class ClearsWhatItPrepares(NumpyBackend):
    def prepare(self, plan):
        step = super().prepare(plan)
        for plane in self._every_plane():
            plane[step.slot_mapping // self.spec.block_size, step.slot_mapping % self.spec.block_size] = 0
        return step


class MakesCapabilitiesAnew(NumpyBackend):
    @property
    def capabilities(self):
        return replace(NumpyBackend.capabilities)


class LeavesTheEndsOfRows(NumpyBackend):
    def read(self, step, layer):
        k, v = super().read(step, layer)
        past = np.arange(v.shape[2]) >= step.seq_lens[:, None]
        v[np.broadcast_to(past[:, None], v.shape[:3])] = np.nan
        return k, v


class KnowsRowsOfOneLengthOnly(NumpyBackend):
    def attend(self, step, layer, q, scale=None, **more):
        lens = np.full_like(step.seq_lens, step.seq_lens.max(initial=0)) if len(step.seq_lens) == len(q) else None
        return super().attend(step if lens is None else replace(step, seq_lens=lens), layer, q, scale, **more)


FAULTS = {
    KeepsOneStep: "steps_are_used_side_by_side",
    ReadsThePlanLate: "calls_do_not_depend_on_the_plan_afterwards",
    ClearsWhatItPrepares: "prepare_changes_nothing",
    MakesCapabilitiesAnew: "capabilities_are_a_constant",
    LeavesTheEndsOfRows: "contexts_are_read",
    KnowsRowsOfOneLengthOnly: "some_queries_are_attended_alone",
}


@pytest.mark.parametrize("backend", FAULTS, ids=lambda backend: backend.__name__)
def test_planted_fault_is_caught_by_its_case(backend):
    with pytest.raises(AssertionError):
        conformance.check_backend(backend, [CASES[FAULTS[backend]]])


def test_every_case_catches_a_fault():
    assert set(FAULTS.values()) == set(CASES)
