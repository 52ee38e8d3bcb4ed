"""Programs in which memory runs out: every allocation of a pool, a plan and their calls fails once.

Only builds that can fail on demand (`kvpool._memory`) run them.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import numpy as np

from proof.mutation.scenarios import FORMATS, look
from proof.mutation.tape import drop


class Memory:
    """The core's memory: what it holds more than when this object was made, and what fails."""

    def __init__(self) -> None:
        from kvpool import _memory

        self._memory = _memory
        self._before = _memory.allocations()[1]

    def fail_at(self, number: int) -> None:
        """The allocation of this number fails; 0: none."""
        self._memory.fail_at(number)

    def living(self) -> int:
        """Blocks of memory taken and not given back."""
        return self._memory.allocations()[1] - self._before


def each_failing(memory: Any, call: Callable[[], None]) -> None:
    """Make the call with its first allocation failing, with its second, until it succeeds."""
    for k in itertools.count(1):
        memory.fail_at(k)
        try:
            call()
        except MemoryError:
            continue
        finally:
            memory.fail_at(0)
            memory.living()
        return


def memory_that_runs_out(Pool: Any, Plan: Any, Memory: Any, cached: bool) -> None:
    """A pool, a plan, a step that replaces 40 blocks; with a cache, commits that note events."""
    memory, made = Memory(), {}

    def pool() -> None:
        made["pool"] = Pool(90, 2, max_seqs=50, prefix_cache=cached, events=200 * cached)

    def plan() -> None:
        made["plan"] = Plan(made["pool"], 45, 200, formats=FORMATS)

    each_failing(memory, pool)
    each_failing(memory, plan)
    row = made["pool"].open()
    made["pool"].step(made["plan"], [row], 41)
    made["pool"].done(made["plan"])
    if cached:  # an event may be lost, not the state
        for k in range(4):
            memory.fail_at(k)
            made["pool"].commit(row, np.arange(10 * k, 10 * k + 10, dtype=np.int32))
            memory.fail_at(0)
            look(made["pool"])
            made["pool"].drain_events()
    rows = [row, *made["pool"].fork(row, 40).tolist()]
    each_failing(memory, lambda: made["pool"].step(made["plan"], rows, 1))
    look(made["pool"], made["plan"])
    made["pool"].shutdown()
    memory.living()
    drop(made["plan"])
    memory.living()
