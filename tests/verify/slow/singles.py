"""Single operations of a pool, each with what takes it back: what `test_complexity` counts under callgrind.

Before each run everything is as it was before the one that came first, and so is the number of blocks of each
sequence, whatever the size of the pool. ``python -m tests.verify.slow.singles "[SIZES, CARELESS]"`` runs them.
"""

from __future__ import annotations

import gc
import json
import sys
from collections.abc import Callable
from dataclasses import dataclass
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
    now = Singles(num_blocks, batch, careless)
    late = LateSingles(num_blocks, batch)
    found = {
        "alloc": Operation(now.alloc, now.free),
        "free": Operation(now.free, now.alloc, now.alloc, now.free),
        "fork": Operation(now.fork, now.close),
        "close": Operation(now.close, now.fork, now.fork, now.close),
        "step": Operation(now.step, now.cut),
        "reserve": Operation(now.reserve, now.cut),
        "truncate": Operation(now.truncate, now.lengthen, now.lengthen, now.cut),
        "match": Operation(now.match),
        "hit": Operation(now.hit, now.close),
        "insert": Operation(now.insert, now.forget, now.write, now.close),
        "evict": Operation(now.evict, now.cache, now.cache, now.evict),
        "step that evicts": Operation(now.step_into_cached, now.take_and_cache, now.take_and_cache, now.give_back),
        "unshare": Operation(now.unshare, now.fork_again, now.fork, now.close),
        "compact": Operation(now.compact, now.open_again, now.open_long, now.close_long),
        "evict_blocks": Operation(now.evict_blocks, now.open_again, now.open_long, now.close_long),
        "step and done": Operation(late.step_and_done, late.cut),
        "done with limbo": Operation(late.done, late.begin_and_close, late.begin_and_close, late.done),
        "rollback": Operation(late.rollback, late.begin, late.begin, late.rollback),
    }
    if careless:
        return {name: found[name] for name in ("alloc", "step")}
    return found | {
        name_of(call, n): operation
        for n in GROUP_COUNTS
        for call, operation in GroupSingles(num_blocks, batch, n).operations().items()
    }


def name_of(call: str, num_groups: int) -> str:
    """The name of an operation on a pool with so many layer groups."""
    return f"{call}, groups: {num_groups}"


class Singles:
    """Operations of a pool in which every step is done when it returns."""

    def __init__(self, num_blocks: int, batch: int, careless: bool) -> None:
        self.pool = pool = kvpool.Pool(
            num_blocks, BLOCK_SIZE, max_seqs=64, max_blocks_per_seq=64, in_order=True, seed=1, prefix_cache=True
        )
        pool.blocks.alloc(SMALL_INTS)
        self.batch, self.made, self.look = batch, [0] * batch, pool.fingerprint if careless else nothing
        self.long_tokens = (batch + 1) * BLOCK_SIZE
        self.plan, self.wide = kvpool.Plan(pool, 1), kvpool.Plan(pool, 1, max(PROMPT, self.long_tokens))
        self.tokens = np.arange(PROMPT + 1, dtype=np.int32)
        self.fresh = [self.tokens[:BLOCK_SIZE] + 7 + n for n in range(batch)]
        self.parent, self.writer = pool.open(), pool.open()
        for handle in (self.parent, self.writer):
            pool.step(self.wide, [handle], PROMPT)
        pool.prefix.commit(self.parent, self.tokens[:PROMPT])
        self.rows = np.array([self.writer])
        self.long = -1
        self.taken = np.zeros(0, np.int32)

    # -- blocks and sequences

    def alloc(self) -> None:
        for n in range(self.batch):
            self.made[n] = self.pool.blocks.alloc()
            self.look()

    def free(self) -> None:
        for n in range(self.batch):
            self.pool.blocks.free(self.made[n])

    def fork(self) -> None:
        for n in range(self.batch):
            self.made[n] = int(self.pool.fork(self.parent)[0])

    def close(self) -> None:
        for n in range(self.batch):
            self.pool.close(self.made[n])

    def fork_again(self) -> None:
        self.close()
        self.fork()

    # -- one sequence grows and shrinks

    def step(self) -> None:
        for _ in repeat(None, self.batch):
            self.pool.step(self.plan, self.rows, 1)
            self.look()

    def reserve(self) -> None:
        """One block more each time."""
        for n in range(self.batch):
            self.pool.reserve(self.plan, self.rows, (n + 1) * BLOCK_SIZE)

    def lengthen(self) -> None:
        self.pool.step(self.wide, self.rows, self.batch * BLOCK_SIZE)

    def truncate(self) -> None:
        """One block less each time."""
        for n in range(self.batch):
            self.pool.truncate(self.writer, PROMPT + (self.batch - 1 - n) * BLOCK_SIZE)

    def cut(self) -> None:
        self.pool.truncate(self.writer, PROMPT)

    # -- prefix cache

    def match(self) -> None:
        for _ in repeat(None, self.batch):
            self.pool.prefix.match(self.tokens)

    def hit(self) -> None:
        for n in range(self.batch):
            self.made[n] = self.pool.open(self.tokens)

    def write(self) -> None:
        """Sequences of one block each."""
        for n in range(self.batch):
            self.made[n] = self.pool.open()
            self.pool.step(self.wide, self.made[n : n + 1], BLOCK_SIZE)

    def insert(self) -> None:
        for n in range(self.batch):
            self.pool.prefix.commit(self.made[n], self.fresh[n])

    def forget(self) -> None:
        self.close()
        self.pool.blocks.evict(self.batch)
        self.write()

    def cache(self) -> None:
        """Blocks that nobody refers to, as many as a run evicts."""
        self.write()
        self.insert()
        self.close()

    def evict(self) -> None:
        for _ in repeat(None, self.batch):
            self.pool.blocks.evict(1)

    def step_into_cached(self) -> None:
        for _ in repeat(None, self.batch):
            self.pool.step(self.wide, self.rows, BLOCK_SIZE)

    def take_and_cache(self) -> None:
        """Every block is taken or cached."""
        self.cut()
        self.cache()
        if self.pool.stats().blank:
            self.taken = self.pool.blocks.alloc(self.pool.stats().blank)

    def give_back(self) -> None:
        self.pool.blocks.free(self.taken)
        self.evict()

    # -- tokens leave

    def unshare(self) -> None:
        """One block each."""
        for n in range(self.batch):
            self.pool.unshare(self.plan, self.made[n : n + 1], PROMPT - 1, PROMPT - BLOCK_SIZE)

    def open_long(self) -> None:
        self.long = self.pool.open()
        self.pool.step(self.wide, [self.long], self.long_tokens)

    def close_long(self) -> None:
        self.pool.close(self.long)

    def open_again(self) -> None:
        self.close_long()
        self.open_long()

    def compact(self) -> None:
        for n in range(self.batch):
            self.pool.compact(self.long, (self.batch - n) * BLOCK_SIZE)

    def evict_blocks(self) -> None:
        for _ in repeat(None, self.batch):
            self.pool.evict_blocks(self.long, [0])


class LateSingles:
    """Operations of a pool whose steps are pending until they are done."""

    def __init__(self, num_blocks: int, batch: int, groups: list[kvpool.Group] | None = None) -> None:
        longest = 2048 if groups else 64
        self.pool = pool = kvpool.Pool(
            num_blocks, BLOCK_SIZE, max_seqs=64, max_blocks_per_seq=longest, seed=1, groups=groups
        )
        pool.blocks.alloc(SMALL_INTS)
        self.plans = [kvpool.Plan(pool, 1, PROMPT) for _ in range(batch)]
        self.writer = self.open()
        self.rows = np.array([self.writer])

    def open(self) -> int:
        """A sequence with a prompt."""
        handle = self.pool.open()
        self.pool.step(self.plans[0], [handle], PROMPT)
        self.pool.done(self.plans[0])
        return handle

    def step_and_done(self) -> None:
        for plan in self.plans:
            self.pool.step(plan, self.rows, 1)
            self.pool.done(plan)

    def cut(self) -> None:
        self.pool.truncate(self.writer, PROMPT)

    def begin_and_close(self) -> None:
        """Steps that are pending, each with a block in limbo behind it."""
        for plan in self.plans:
            handle = self.pool.open()
            self.pool.step(plan, [handle], BLOCK_SIZE)
            self.pool.close(handle)

    def done(self) -> None:
        for plan in self.plans:
            self.pool.done(plan)

    def begin(self) -> None:
        for plan in self.plans:
            self.pool.step(plan, self.rows, BLOCK_SIZE)

    def rollback(self) -> None:
        for plan in reversed(self.plans):
            self.pool.rollback(plan)


class GroupSingles:
    """Operations of a pool with equal layer groups, windows of four blocks."""

    def __init__(self, num_blocks: int, batch: int, num_groups: int) -> None:
        self.late = late = LateSingles(num_blocks, batch, [kvpool.Group.window(4 * BLOCK_SIZE)] * num_groups)
        self.made = [0] * batch
        self.parent, self.grower = late.open(), np.array([late.open()])
        late.pool.close(late.pool.fork(self.parent, 61))  # the tables of all 64 sequences are in memory from now on

    def operations(self) -> dict[str, Operation]:
        """By name. Every run of `decode` takes a block in each group, and lets one go."""
        late = self.late
        found = (
            Operation(self.decode),
            Operation(self.fork, self.close),
            Operation(late.rollback, late.begin, late.begin, late.rollback),
        )
        return dict(zip(GROUP_CALLS, found, strict=True))

    def decode(self) -> None:
        for plan in self.late.plans:
            self.late.pool.step(plan, self.grower, BLOCK_SIZE // len(self.made))
            self.late.pool.done(plan)

    def fork(self) -> None:
        for n in range(len(self.made)):
            self.made[n] = int(self.late.pool.fork(self.parent)[0])

    def close(self) -> None:
        for n in range(len(self.made)):
            self.late.pool.close(self.made[n])


def count(sizes: tuple[int, ...], careless: bool) -> None:
    """Under callgrind: dump the instructions of each operation at each size, and of nothing at size 0."""
    marks = callgrind.marks()
    marks.count_prepare()
    gc.disable()
    for size in (0, *sizes):
        found = operations(size, careless) if size else {"nothing": Operation(nothing)}
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
