"""Single operations of a pool, each with what takes it back: what `test_complexity` counts under callgrind.

Before each run everything is as it was before the one that came first, and so is the number of blocks of each
sequence, whatever the size of the pool. ``python -m tests.verify.slow.singles "[SIZES, CARELESS]"`` runs them.
"""

from __future__ import annotations

import gc
import json
import sys
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from itertools import repeat
from typing import Any

import numpy as np

import kvpool
from benchmarks import callgrind

BATCH = 16  # single operations of one run
RUNS, WARM_UPS = 7, 4  # Python rewrites the code of a function in its first runs
SMALL_INTS = 257  # Python keeps the ints below: ids behind them all cost the same
BLOCK_SIZE = 16
PROMPT = 8 * BLOCK_SIZE
GROUP_COUNTS = (1, 2, 4, 8)
GROUP_CALLS = ("decode", "fork", "rollback")


def nothing() -> None:
    """What most operations need before and after."""


@dataclass(frozen=True)
class Operation:
    """A batch of single operations, and what has to be around it."""

    run: Callable[[], Any]
    undo: Callable[[], Any] = nothing
    enter: Callable[[], Any] = nothing  # before the first run
    leave: Callable[[], Any] = nothing  # after the last undo


def operations(num_blocks: int, careless: bool = False, batch: int = BATCH) -> dict[str, Operation]:
    """Name -> `batch` single operations; `careless`: the two that look at the whole pool then, alone."""
    if careless:
        return {name: one for name, one in singles(num_blocks, batch, True).items() if name in ("alloc", "step")}
    found = singles(num_blocks, batch, False) | late_singles(num_blocks, batch)
    for n in GROUP_COUNTS:
        found |= {name_of(call, n): one for call, one in group_singles(num_blocks, batch, n).items()}
    return found


def name_of(call: str, num_groups: int) -> str:
    """The name of an operation on a pool with so many layer groups."""
    return f"{call}, groups: {num_groups}"


def each(batch: int, single: Callable[[int], Any]) -> Callable[[], Any]:
    """A batch of single operations; each is given its number. The loop is C: Python adapts its own to what it calls."""
    return lambda: deque(map(single, range(batch)), 0)


def both(*calls: Callable[[], Any]) -> Callable[[], None]:
    """One after the other."""

    def run() -> None:
        for call in calls:
            call()

    return run


class InOrder:
    """A pool in which every step is done when it returns, a sequence that is cached and one that grows and shrinks."""

    def __init__(self, num_blocks: int, batch: int) -> None:
        options: dict[str, Any] = {"max_seqs": 64, "max_blocks_per_seq": 64, "in_order": True, "prefix_cache": True}
        self.pool = pool = kvpool.Pool(num_blocks, BLOCK_SIZE, seed=1, **options)
        pool.blocks.alloc(SMALL_INTS)
        self.batch, self.made = batch, [0] * batch
        self.plan, self.wide = kvpool.Plan(pool, 1), kvpool.Plan(pool, 1, max(PROMPT, (batch + 1) * BLOCK_SIZE))
        self.tokens = np.arange(PROMPT + 1, dtype=np.int32)
        self.parent, writer = pool.open(), pool.open()
        for handle in (self.parent, writer):
            pool.step(self.wide, [handle], PROMPT)
        pool.prefix.commit(self.parent, self.tokens[:PROMPT])
        self.rows = np.array([writer])
        self.close = each(batch, lambda n: pool.close(self.made[n]))
        self.cut = partial(pool.truncate, writer, PROMPT)


def singles(num_blocks: int, batch: int, careless: bool) -> dict[str, Operation]:
    """Operations of a pool in which every step is done when it returns."""
    state = InOrder(num_blocks, batch)
    return plain_singles(state, state.pool.fingerprint if careless else nothing) | cached_singles(state)


def plain_singles(state: InOrder, look: Callable[[], Any]) -> dict[str, Operation]:
    """Of blocks and sequences; `look` after some."""
    pool, plan, wide, rows, made, batch = state.pool, state.plan, state.wide, state.rows, state.made, state.batch
    close, cut, long, writer = state.close, state.cut, [-1], int(state.rows[0])

    def alloc_one(n: int) -> None:
        made[n] = pool.blocks.alloc()
        look()

    def fork_one(n: int) -> None:
        made[n] = int(pool.fork(state.parent)[0])

    def step(n: int) -> None:
        pool.step(plan, rows, 1)
        look()

    def open_long() -> None:
        long[0] = pool.open()
        pool.step(wide, long, (batch + 1) * BLOCK_SIZE)

    def close_long() -> None:
        pool.close(long[0])

    def unshare(n: int) -> None:
        pool.unshare(plan, made[n : n + 1], PROMPT - 1, PROMPT - BLOCK_SIZE)

    alloc, free = each(batch, alloc_one), each(batch, lambda n: pool.blocks.free(made[n]))
    fork, again = each(batch, fork_one), both(close_long, open_long)
    lengthen = partial(pool.step, wide, rows, batch * BLOCK_SIZE)
    lengths = [PROMPT + (batch - 1 - n) * BLOCK_SIZE for n in range(batch)]
    compact = each(batch, lambda n: pool.compact(long[0], (batch - n) * BLOCK_SIZE))
    return {
        "alloc": Operation(alloc, free),
        "free": Operation(free, alloc, alloc, free),
        "fork": Operation(fork, close),
        "close": Operation(close, fork, fork, close),
        "step": Operation(each(batch, step), cut),
        "reserve": Operation(each(batch, lambda n: pool.reserve(plan, rows, (n + 1) * BLOCK_SIZE)), cut),
        "truncate": Operation(each(batch, lambda n: pool.truncate(writer, lengths[n])), lengthen, lengthen, cut),
        "unshare": Operation(each(batch, unshare), both(close, fork), fork, close),
        "compact": Operation(compact, again, open_long, close_long),
        "evict_blocks": Operation(
            each(batch, lambda n: pool.evict_blocks(long[0], [0])), again, open_long, close_long
        ),
    }  # fmt: skip


def cached_singles(state: InOrder) -> dict[str, Operation]:
    """Of the prefix cache."""
    pool, wide, made, batch, close = state.pool, state.wide, state.made, state.batch, state.close
    tokens, fresh = state.tokens, [state.tokens[:BLOCK_SIZE] + 7 + n for n in range(batch)]
    taken = [np.zeros(0, np.int32)]

    def hit(n: int) -> None:
        made[n] = pool.open(tokens)

    def write_one(n: int) -> None:
        """A sequence of one block."""
        made[n] = pool.open()
        pool.step(wide, made[n : n + 1], BLOCK_SIZE)

    def take() -> None:
        """Every block is taken or cached then."""
        if pool.stats().blank:
            taken[0] = pool.blocks.alloc(pool.stats().blank)

    write, insert = each(batch, write_one), each(batch, lambda n: pool.prefix.commit(made[n], fresh[n]))
    evict = each(batch, lambda n: pool.blocks.evict(1))
    cache = both(write, insert, close)  # blocks that nobody refers to, as many as a run evicts
    fill, empty = both(state.cut, cache, take), both(lambda: pool.blocks.free(taken[0]), evict)
    return {
        "match": Operation(each(batch, lambda n: pool.prefix.match(tokens))),
        "hit": Operation(each(batch, hit), close),
        "insert": Operation(insert, both(close, evict, write), write, close),
        "evict": Operation(evict, cache, cache, evict),
        "step that evicts": Operation(
            each(batch, lambda n: pool.step(wide, state.rows, BLOCK_SIZE)), fill, fill, empty
        ),
    }


class Late:
    """A pool whose steps are pending until they are done."""

    def __init__(self, num_blocks: int, batch: int, groups: list[kvpool.Group] | None = None) -> None:
        options: dict[str, Any] = {"max_seqs": 64, "max_blocks_per_seq": 2048 if groups else 64, "groups": groups}
        self.pool = kvpool.Pool(num_blocks, BLOCK_SIZE, seed=1, **options)
        self.pool.blocks.alloc(SMALL_INTS)
        self.plans = [kvpool.Plan(self.pool, 1, PROMPT) for _ in range(batch)]

    def open(self) -> int:
        """A sequence with a prompt."""
        handle = self.pool.open()
        self.pool.step(self.plans[0], [handle], PROMPT)
        self.pool.done(self.plans[0])
        return handle

    def step_and_done(self, rows: np.ndarray, num_new: int) -> None:
        for plan in self.plans:
            self.pool.step(plan, rows, num_new)
            self.pool.done(plan)

    def begin_and_close(self) -> None:
        """Steps that are pending, each with a block in limbo behind it."""
        for plan in self.plans:
            handle = self.pool.open()
            self.pool.step(plan, [handle], BLOCK_SIZE)
            self.pool.close(handle)

    def done(self) -> None:
        for plan in self.plans:
            self.pool.done(plan)

    def rollback_of(self, rows: np.ndarray) -> Operation:
        """Steps are taken back, the newest first."""

        def begin() -> None:
            for plan in self.plans:
                self.pool.step(plan, rows, BLOCK_SIZE)

        def rollback() -> None:
            for plan in reversed(self.plans):
                self.pool.rollback(plan)

        return Operation(rollback, begin, begin, rollback)


def late_singles(num_blocks: int, batch: int) -> dict[str, Operation]:
    """Operations of a pool whose steps are pending."""
    late = Late(num_blocks, batch)
    rows = np.array([late.open()])
    return {
        "step and done": Operation(partial(late.step_and_done, rows, 1), lambda: late.pool.truncate(rows, [PROMPT])),
        "done with limbo": Operation(late.done, late.begin_and_close, late.begin_and_close, late.done),
        "rollback": late.rollback_of(rows),
    }


def group_singles(num_blocks: int, batch: int, num_groups: int) -> dict[str, Operation]:
    """`GROUP_CALLS` on equal layer groups, windows of four blocks. Every run of "decode" takes and lets go a block."""
    late = Late(num_blocks, batch, [kvpool.Group.window(4 * BLOCK_SIZE)] * num_groups)
    made, parent, grower = [0] * batch, late.open(), np.array([late.open()])
    writer = np.array([late.open()])
    late.pool.close(late.pool.fork(parent, 61))  # the tables of all 64 sequences are in memory from now on

    def fork(n: int) -> None:
        made[n] = int(late.pool.fork(parent)[0])

    decode = Operation(partial(late.step_and_done, grower, BLOCK_SIZE // batch))
    forks = Operation(each(batch, fork), each(batch, lambda n: late.pool.close(made[n])))
    return dict(zip(GROUP_CALLS, (decode, forks, late.rollback_of(writer)), strict=True))


def count(sizes: tuple[int, ...], careless: bool) -> None:
    """Under callgrind: dump the instructions of each operation at each size, and of nothing at size 0."""
    marks = callgrind.marks()
    marks.count_prepare()
    gc.disable()
    for size in (0, *sizes):
        found = operations(size, careless) if size else {"nothing": Operation(each(BATCH, lambda n: None))}
        for name, it in found.items():
            it.enter()
            for _ in repeat(None, WARM_UPS):
                it.run()
                it.undo()
            mark = f"{name}|{size}".encode()
            for _ in repeat(None, RUNS):
                marks.count_toggle()
                it.run()
                marks.count_toggle()
                marks.count_dump(mark)
                it.undo()
            it.leave()


if __name__ == "__main__":
    sizes_, careless_ = json.loads(sys.argv[1])
    count(tuple(sizes_), careless_)
