"""Instructions of single operations, counted by callgrind: a pool of a million blocks takes those of a small one.

Counts do not depend on caches, clocks or neighbours.
"""

import json
import statistics

import pytest

from benchmarks import callgrind
from tests.verify.slow.singles import BATCH, GROUP_CALLS, GROUP_COUNTS, name_of, operations

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not callgrind.is_here(), reason="valgrind counts the instructions, and is not here"),
]
SIZES, FEW_SIZES = (1_000, 10_000, 100_000, 1_000_000), (1_000, 20_000)
WITHIN = 0.05


def counted(sizes, careless=False):
    """Operation -> blocks -> median of instructions, what an empty operation costs taken off."""
    command = ("-m", "tests.verify.slow.singles", json.dumps([sizes, careless]))
    runs = {}
    for mark, counts in callgrind.counted(*command, PYTHONHASHSEED="0").items():
        name, _, size = mark.rpartition("|")
        runs.setdefault(name, {})[int(size)] = statistics.median(counts)
    nothing = runs.pop("nothing")[0]
    return {name: {size: (by[size] - nothing) / BATCH for size in sorted(by)} for name, by in sorted(runs.items())}


def grown(counts):
    """Operation -> how much more it takes where it takes most."""
    return {name: max(by.values()) / min(by.values()) - 1 for name, by in counts.items()}


def bent(counts):
    """Call -> what a group adds behind half of the groups, over what one adds up to there; 1: linear."""
    few, half, many = GROUP_COUNTS[0], GROUP_COUNTS[-2], GROUP_COUNTS[-1]
    found = {}
    for call in GROUP_CALLS:
        cost = {n: min(counts[name_of(call, n)].values()) for n in GROUP_COUNTS}
        found[call] = (cost[many] - cost[half]) / (many - half) / ((cost[half] - cost[few]) / (half - few))
    return found


def test_operation_takes_the_same_at_every_size_and_a_group_the_same_as_another():
    counts = counted(SIZES)
    assert set(counts) == set(operations(SIZES[0]))
    for name, by in counts.items():
        print(f"{name}: {', '.join(f'{n:,.0f}' for n in by.values())} instructions")
    assert not {name: more for name, more in grown(counts).items() if more > WITHIN}
    assert not {call: ratio for call, ratio in bent(counts).items() if ratio > 1 + WITHIN}


def test_operations_that_look_at_the_whole_pool_are_detected():
    assert all(more > WITHIN for more in grown(counted(FEW_SIZES, careless=True)).values())
