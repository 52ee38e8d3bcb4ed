"""Programs about memory: all of it runs out, once at each allocation; arrays are filled to their ends and no further.

Only builds that can fail on demand (`kvpool/core/memory.pxi`) run the former.
"""

from __future__ import annotations

import gc
import itertools
from collections.abc import Callable
from typing import Any

import numpy as np

from kvpool.groups import Group
from proof.mutation.scenarios import FORMATS, look, tried
from proof.mutation.tape import drop


class Memory:
    """The core's memory: what it holds more than when this object was made, and what fails."""

    def __init__(self) -> None:
        from kvpool import _core

        self._core = _core
        gc.collect()
        self._before = _core.allocations()[1]

    def fail_at(self, number: int) -> None:
        """The allocation of this number fails; 0: none."""
        self._core.fail_at(number)

    def living(self) -> int:
        """Blocks of memory taken and not given back."""
        gc.collect()
        return self._core.allocations()[1] - self._before


class Guard:
    """An array with more behind it that nobody may write to."""

    def __init__(self, size: int, dtype: str) -> None:
        self.size, self.memory = size, np.full(size + 16, 77, dtype)

    def bind(self, plan: Any, name: str) -> None:
        """Let the plan write to it."""
        plan.bind(**{name: self.memory[: self.size]})

    def behind(self) -> list[int]:
        """What stands behind its end."""
        return self.memory[self.size :].tolist()


class Beyond:
    """Steps with arrays behind whose ends stands what would be welcome, too."""

    def __init__(self, seqs: list[int]) -> None:
        self.handles = np.array(seqs, np.int64)

    def step(self, pool: Any, plan: Any, first: int, last: int, new: list[int], dtype: str) -> None:
        """Step the sequences from `first` to before `last`; those behind them would have one new token each."""
        numbers = np.array(new + [1] * len(self.handles), dtype)
        pool.step(plan, self.handles[first:last], numbers[: len(new)])


def batches_and_no_further(Pool: Any, Plan: Any, Beyond: Any) -> None:
    """Decodes and chunks of the first sequences of many."""
    pool = Pool(60, 4, max_seqs=12)
    plan = Plan(pool, 12, 60, formats=FORMATS)
    rows = [pool.open() for _ in range(12)]
    beyond = Beyond(rows)
    for turn in range(12):
        for new in ([1] * (turn + 1), [2] + [1] * turn, [1] * turn + [3]):
            for dtype in ("int32", "int64"):
                beyond.step(pool, plan, 0, len(new), new, dtype)
                look(pool, plan)
                pool.rollback(plan) if len(new) % 2 else pool.done(plan)
        pool.truncate(rows, [min(pool.num_tokens(row), 5) for row in rows])
    pool.shutdown()


def arrays_and_no_further(Pool: Any, Plan: Any, Guard: Any) -> None:
    """Plans filled to the last row and token, one format at a time behind a guard."""
    sizes = {"cu_q_lens": 5, "seq_lens": 4, "slot_mapping": 12, "positions": 12, "indptr": 5, "indices": 24}
    sizes |= {"last_page_len": 4, "kv_slots_ragged": 48, "kv_indptr": 5, "slot_ids": 4}
    for dtype in ("int32", "int64"):
        pool = Pool(40, 2, max_seqs=4, max_blocks_per_seq=6)
        plan = Plan(pool, 4, 12, formats=FORMATS, dtype=dtype)
        guards = {name: Guard(size, dtype) for name, size in sizes.items()}
        for name, guard in guards.items():
            guard.bind(plan, name)
        rows = [pool.open() for _ in range(4)]
        for new in (3, 1, [0, 2, 1, 3], 1, None, [5, 4, 3, 0], 1):
            if new is None:
                pool.truncate(rows, [0] * 4)
                continue
            pool.step(plan, rows, new)
            look(pool, plan)
            pool.done(plan)
            pool.step(plan, rows[:3], 1, pad_to=(4, 12))
            look(pool, plan)
            pool.done(plan)
            for guard in guards.values():
                guard.behind()
        pool.shutdown()


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


def events_that_are_lost(Pool: Any, Plan: Any, Memory: Any) -> None:
    """More events than there is room for, and no memory for more room: some are lost, the state is not."""
    memory = Memory()
    for k, most in itertools.product(range(5), (200, 69)):
        pool = Pool(90, 2, max_seqs=4, prefix_cache=True, events=most)
        plan = Plan(pool, 1, 140, formats=("block_tables",))
        row = pool.open()
        pool.step(plan, [row], 140)
        pool.done(plan)
        memory.fail_at(k)
        tried(pool.prefix.commit, row, np.arange(140, dtype=np.int32))
        memory.fail_at(0)
        look(pool)
        pool.prefix.events()
        pool.shutdown()
        drop(plan)
        memory.living()


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
            tried(made["pool"].prefix.commit, row, np.arange(10 * k, 10 * k + 10, dtype=np.int32))
            memory.fail_at(0)
            look(made["pool"])
            tried(made["pool"].prefix.events)
    rows = [row, *made["pool"].fork(row, 40).tolist()]
    each_failing(memory, lambda: made["pool"].step(made["plan"], rows, 1))
    look(made["pool"], made["plan"])
    made["pool"].done(made["plan"])
    made["pool"].close(rows[20:])
    drop(made["plan"])
    each_failing(memory, plan)
    each_failing(memory, lambda: made["pool"].unshare(made["plan"], rows[2:4], 30))
    each_failing(memory, lambda: made["pool"].evict_blocks(rows[5], [1, 3]))
    each_failing(memory, lambda: made["pool"].can(rows[:20], 1))
    each_failing(memory, lambda: made["pool"].can(rows[:10], [1] * 10))
    plans = [Plan(made["pool"], 2, 4) for _ in range(20)]
    for pending in plans:
        made["pool"].step(pending, rows[:1], 0)
    made["pool"].done(made["plan"])
    for pending in plans[1:]:
        made["pool"].done(pending)
    each_failing(memory, lambda: made["pool"].done(plans[0]))
    look(made["pool"], *plans[:2])
    for pending in plans:
        made["pool"].step(pending, rows[:1], 0)
    each_failing(memory, lambda: made["pool"].reset())
    look(made["pool"], *plans[:2])
    for pending in plans:
        drop(pending)
    look(made["pool"], made["plan"])
    each_failing(memory, lambda: made["pool"].defer_close(made["pool"].open()))
    if cached:
        each_failing(memory, lambda: made["pool"].open([1, 2, 3], b"new"))
        each_failing(memory, lambda: made["pool"].prefix.flush(b"nobody"))
        made["pool"].prefix.events()
    made["pool"].shutdown()
    memory.living()
    drop(made["plan"])
    memory.living()


def groups_that_run_out(Pool: Any, Plan: Any, Memory: Any) -> None:
    """The same of a pool with layer groups; what it keeps for `can` grows, or goes."""
    memory, made = Memory(), {}
    groups = [Group.full(columns=2), Group.window(4, arena=1, num_blocks=160), Group.state(90)]

    def pool() -> None:
        made["pool"] = Pool(320, 2, max_seqs=50, groups=groups)

    def plan() -> None:
        made["plan"] = Plan(made["pool"], 45, 200, formats=("block_tables", "slot_mapping", "table_updates"))

    each_failing(memory, pool)
    each_failing(memory, plan)
    row = made["pool"].open()
    made["pool"].step(made["plan"], [row], 5)
    made["pool"].done(made["plan"])
    rows = [row, *made["pool"].fork(row, 40).tolist()]
    for n in (20, 10, 30):
        each_failing(memory, lambda n=n: made["pool"].can(rows[:n], 1))
        each_failing(memory, lambda n=n: made["pool"].can(rows[:n], [1] * (n - 1) + [0]))
    each_failing(memory, lambda: made["pool"].check())
    for new in (3, 1):
        each_failing(memory, lambda new=new: made["pool"].step(made["plan"], rows, new))
        made["pool"].done(made["plan"])
        look(made["pool"])
    drop(made["plan"])
    each_failing(memory, plan)
    each_failing(memory, lambda: made["pool"].step(made["plan"], rows, 1))
    look(made["pool"])
    made["pool"].shutdown()
    memory.living()
    drop(made["plan"])
    memory.living()
