"""Faults of the prefix cache with layer groups are convicted by random programs."""

import pytest
from checkpoint_faults import WRONG_CHOICE, WRONG_CONTENT, WRONG_ORDER

from kvpool import Plan, Pool
from kvpool.testing.fuzz_groups import GroupRun, options_of
from kvpool.testing.fuzz_target import TargetFinding
from kvpool.testing.model import ModelPlan

MOST = 300_000
#: Where to begin with faults that few programs show.
FIRST = {"StaleStates": 22, "OutlivesItsKeys": 21, "WholePathRefreshed": 121}
FIRST_READ = {"HitWithoutState": 11, "ShortWindow": 15, "KeptTokensDropped": 21, "OtherNamespaces": 6}


def convict(fault, oracle, first, counters=True):
    """Play programs from a seed on until one fails; returns what is wrong."""
    calls, seed = 0, first
    while calls < MOST:
        run = GroupRun(options_of(seed, prefix_cache=True), seed, (fault, ModelPlan), oracle, counters)
        try:
            calls += run.play(run.words())
        except TargetFinding as finding:
            print(f"{fault.__name__}: seed {seed}, {calls} calls before: {finding}")
            return finding
        seed += 1
    raise AssertionError(f"{MOST} calls from seed {first} on do not show {fault.__name__}")


@pytest.mark.parametrize("fault", [*WRONG_CONTENT, *WRONG_CHOICE, *WRONG_ORDER], ids=lambda fault: fault.__name__)
@pytest.mark.parametrize("first", [None, pytest.param(1, marks=pytest.mark.long)])
def test_planted_fault_differs_from_the_core(fault, first):
    convict(fault, (Pool, Plan), first or FIRST.get(fault.__name__, 1))


@pytest.mark.parametrize("fault", WRONG_CONTENT, ids=lambda fault: fault.__name__)
def test_planted_fault_is_seen_in_what_steps_read(fault):
    assert convict(fault, (fault, ModelPlan), FIRST_READ[fault.__name__], counters=False).kind == "content"
