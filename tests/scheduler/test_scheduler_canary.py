"""The random workloads find faults: one for each kind of workloads is planted here, and makes one of them fail.

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
from test_scheduler_drafts import drafting

from kvpool import Pool
from kvpool.errors import OutOfBlocks
from kvpool.eviction import Evictor
from kvpool.scheduler import policy
from kvpool.scheduler.needs import Needs
from kvpool.scheduler.state import Core

WORKLOADS = 100
KINDS = {
    "plain": lambda seed: Runner(draw(seed), check_every=1).run(),
    "ahead": lambda seed: Runner(draw(seed), check_every=1, ahead=True).run(),
    "drafts": lambda seed: Runner(drafting(draw(seed)), check_every=1).run(),
    "groups": lambda seed: GroupRunner(draw_groups(seed), check_every=1).run(),
    "growth": served,
    "evicting": lambda seed: EvictingRunner(*draw_evicting(seed)).run(),
    "evicting groups": lambda seed: EvictingGroupRunner(*draw_evicting_groups(seed)).run(),
}
FAULTS: dict[str, Any] = {}


def fault(kind, first=0):
    """Keep a fault by its name, with the kind of workloads that show it, and a seed that does so soon."""

    def note(plant):
        FAULTS[plant.__name__] = contextmanager(plant), KINDS[kind], first
        return plant

    return note


@fault("plain", 6)
def cancelled_request_keeps_its_blocks():
    release = Core.release

    def leak(self, sequence):
        if sequence.lane >= 0:
            self.pool.fork(int(self.rows.handle[sequence.lane]))
        return release(self, sequence)

    with mock.patch.object(Core, "release", leak):
        yield


@fault("groups", 19)
def promises_are_forgotten():
    with mock.patch.object(Core, "promised", lambda self: self.needs.nothing):
        yield


@fault("growth")
def growth_without_the_copy_of_a_tail():
    growth = Needs.growth

    def less(self, lens, limits):
        found = growth(self, lens, limits)
        return [count - columns * len(lens) for count, columns in zip(found, self._columns, strict=True)]

    with mock.patch.object(Needs, "growth", less):
        yield


@fault("ahead")
def blocks_of_a_pinned_prefix_are_counted_twice():
    fits = policy.fits_found

    def unpinned(core, *arguments):
        was, core.is_ahead = core.is_ahead, False
        try:
            return fits(core, *arguments)
        finally:
            core.is_ahead = was

    with mock.patch.object(policy, "fits_found", unpinned):
        yield


@fault("drafts")
def drafts_are_computed_without_blocks():
    has_room = Core.has_room

    def always(core, batch, new=1):
        return not isinstance(new, int) or has_room(core, batch, new)

    with mock.patch.object(Core, "has_room", always):
        yield


@fault("evicting", 6)
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


@fault("evicting groups", 48)
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
