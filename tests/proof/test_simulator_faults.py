"""Planted faults that the simulator must find."""

import pytest

from kvpool.testing import ModelPlan, ModelPool
from proof.simulation.faults import FAULTS, convict
from proof.simulation.host import Kit
from proof.simulation.simulator import simulate


@pytest.mark.parametrize("name", FAULTS)
def test_planted_fault_is_found(name):
    assert convict(name) is not None


@pytest.mark.parametrize("name", ["no fence", "close without fence", "any done frees all", "limbo skipped"])
def test_removed_fence_is_a_stale_read_for_any_seed(name):
    """From wherever the seeds begin, within five worlds."""
    for seed in (1, 1000, 2000):
        failure = convict(name, seed, 5)
        assert failure is not None and "stale read" in str(failure.error)


@pytest.mark.parametrize("name", [name for name, kit in FAULTS.items() if kit.shape])
def test_same_seeds_without_the_fault_pass(name):
    """What convicts is the fault, not the shape that it needs."""
    simulate(1, 500, Kit(shape=FAULTS[name].shape))


@pytest.mark.long
def test_model_passes_too():
    simulate(1, 500, Kit(Pool=ModelPool, Plan=ModelPlan))
