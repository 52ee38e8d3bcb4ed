"""Faults of the prefix cache with layer groups are seen, in what steps read or beside the core."""

import pytest
from checkpoint_faults import WRONG_CHOICE, WRONG_CONTENT

from kvpool import Plan, Pool
from kvpool.testing.model import ModelPlan
from proof.machine.checkpoints import Program, WrongContent, agree

CALLS, MOST = 150, 300_000


def _plan(pool, rows, tokens):
    return (Plan if isinstance(pool, Pool) else ModelPlan)(pool, rows, tokens)


def first_seed(play, kind):
    """The first program that shows a fault."""
    for seed in range(MOST // CALLS):
        try:
            play(seed)
        except kind as finding:
            print("seed", seed, repr(finding)[:200])
            return
    raise AssertionError("no program shows it")


@pytest.mark.parametrize("fault", WRONG_CONTENT)
def test_planted_fault_shows_in_what_steps_read(fault):
    def play(seed):
        for _ in Program(seed, lambda *a, **o: [fault(*a, **o)], ModelPlan).run(CALLS):
            pass

    first_seed(play, WrongContent)


@pytest.mark.parametrize("fault", WRONG_CHOICE)
def test_planted_fault_shows_beside_the_core(fault):
    first_seed(lambda seed: agree(seed, lambda *a, **o: [Pool(*a, **o), fault(*a, **o)], _plan, CALLS), AssertionError)
