"""The random workloads find faults: one for each judge of workloads is planted here, and makes one of them fail.

A fault is a context manager that breaks the scheduler or the pool in one place. Workloads of a kind are drawn by seed
until one fails; a fault that survives all of them is a hole in the workloads.
"""

from __future__ import annotations

from contextlib import contextmanager
from typing import Any
from unittest import mock

import pytest
from eviction_group_workload import EvictingGroupRunner, draw_evicting_groups
from eviction_workload import EvictingRunner, draw_evicting
from group_workload import GroupRunner, draw_groups
from scheduler_workload import Runner, draw
from test_needs import served

from kvpool import Pool
from kvpool.errors import OutOfBlocks
from kvpool.eviction import Evictor
from kvpool.scheduler.needs import Needs
from kvpool.scheduler.state import Core

WORKLOADS = 100
FAULTS: dict[str, Any] = {}


def fault(run, first=0):
    """Keep a fault by its name, with what runs the workload of a seed, and a seed that shows it soon."""

    def note(plant):
        FAULTS[plant.__name__] = contextmanager(plant), run, first
        return plant

    return note


@fault(lambda seed: Runner(draw(seed), check_every=1).run(), 6)
def cancelled_request_keeps_its_blocks():
    release = Core.release

    def leak(self, sequence):
        if sequence.lane >= 0:
            self.pool.fork(int(self.rows.handle[sequence.lane]))
        return release(self, sequence)

    with mock.patch.object(Core, "release", leak):
        yield


@fault(lambda seed: GroupRunner(draw_groups(seed), check_every=1).run(), 19)
def promises_are_forgotten():
    with mock.patch.object(Core, "promised", lambda self: self.needs.nothing):
        yield


@fault(served)
def growth_without_the_copy_of_a_tail():
    growth = Needs.growth

    def less(self, lens, limits):
        found = growth(self, lens, limits)
        return [count - columns * len(lens) for count, columns in zip(found, self._columns, strict=True)]

    with mock.patch.object(Needs, "growth", less):
        yield


@fault(lambda seed: EvictingRunner(*draw_evicting(seed)).run(), 6)
def shared_blocks_are_compacted_as_they_are():
    compact = Pool.compact

    def force(self, handles, lens, first=0, group=0):
        return compact(self, handles, lens, 2**30, group)  # as if nothing had to move

    forced = type("Forced", (Pool,), {"compact": force})
    with (
        mock.patch.object(Evictor, "_unshare", lambda *_: None),
        mock.patch("eviction_workload.Pool", forced),
        mock.patch("scheduler_workload.Pool", forced),
    ):
        yield


@fault(lambda seed: EvictingGroupRunner(*draw_evicting_groups(seed)).run(), 48)
def prefix_is_found_beyond_the_budget():
    init = Core.__init__

    def without(self, *given):
        init(self, *given)
        self.findable = 2**31 - 1

    with mock.patch.object(Core, "__init__", without):
        yield


@pytest.mark.parametrize("name", FAULTS)
def test_planted_fault_is_detected(name):
    plant, run, first = FAULTS[name]
    with plant():
        for seed in range(first, first + WORKLOADS):
            try:
                run(seed)
            except (AssertionError, OutOfBlocks):
                return
    raise AssertionError(f"{name} survived {WORKLOADS} workloads")
