"""Programs at the limits of counts, of lists and of marks; blocks that come back after all that can happen to them.

A helper does to a pool what calls do not. The one of the core strains it, the one of the model gives what a pool that
bears the strain would give: so the model judges these programs.
"""

from __future__ import annotations

import contextlib
import itertools
from typing import Any

import numpy as np

from kvpool.errors import CorruptState
from proof.mutation.scenarios import FORMATS, look, tried

LIMIT = 1 << 30  # references on a block


class Strain:
    """Changes numbers of a pool as millions of calls would."""

    def refer(self, pool: Any, block: int, by: int) -> None:
        """So many more raw references on a block that has two."""
        poked(pool, "blocks.block[i].refcount", by, block)
        poked(pool, "blocks.block[i].raw", by, block)

    def own(self, pool: Any, block: int) -> None:
        """A raw reference on a block of a sequence."""
        poked(pool, "blocks.block[i].refcount", 1, block)
        poked(pool, "blocks.block[i].raw", 1, block)
        poked(pool, "blocks.num_shared", 1)

    def broken(self, pool: Any, place: str, by: int, i: int = 0) -> None:
        """A number is wrong for the time of a check, which is meant to find it."""
        poked(pool, place, by, i)
        try:
            pool.check()
        finally:
            poked(pool, place, -by, i)

    def wear(self, pool: Any, by: int) -> None:
        """So many more calls that marked blocks or sequences."""
        poked(pool, "blocks.stamp", by)
        poked(pool, "seqs.stamp", by)


class StrainOfModel:
    """The same to a model, which counts without an end."""

    def refer(self, pool: Any, block: int, by: int) -> None:
        """So many more raw references on a block that has two."""
        pool._raw[block] += by

    def own(self, pool: Any, block: int) -> None:
        """A raw reference on a block of a sequence."""
        pool._raw[block] = 1

    def broken(self, pool: Any, place: str, by: int, i: int = 0) -> None:
        """It is found."""
        raise CorruptState(place)

    def wear(self, pool: Any, by: int) -> None:
        """Nothing is marked."""


def poked(pool: Any, place: str, by: int, i: int = 0) -> None:
    """Change one number of a pool."""
    from proof.fuzz import _poke

    _poke.poke(pool, _poke.NAMES.index(f"pool.state.{place}"), i, by)


def references_to_the_last_one(Pool: Any, Plan: Any, Strain: Any) -> None:
    """A block just below, at and above the limit of references, in each place of a batch."""
    strain = Strain()
    pool = Pool(12, 4, max_seqs=4, reserved_blocks=0)
    blocks = pool.blocks
    plan, row = Plan(pool, 1, 16, formats=("block_tables",)), pool.open()
    pool.step(plan, [row], 16)
    pool.done(plan)
    ids = pool.table(row).tolist()
    taken = pool.blocks.alloc(4).tolist()
    pool.blocks.free(taken)
    for one in ids:
        strain.own(pool, one)
    pool.blocks.mark_cached(ids)
    for at, over in itertools.product(range(4), (-2, -1, 0, 1)):
        strain.refer(pool, ids[at], LIMIT + over - pool.blocks.refcount(ids[at]))
        for call in (blocks.incref, blocks.touch):
            for batch in (ids[at], ids, ids[at:], ids[: at + 1]):
                tried(call, batch)
                blocks.refcounts(ids)
        strain.refer(pool, ids[at], 5 - pool.blocks.refcount(ids[at]))
        for one in ids:
            strain.refer(pool, one, 2 - pool.blocks.refcount(one))
        look(pool)
    pool.shutdown()


def marks_that_go_round(Pool: Any, Plan: Any, Strain: Any) -> None:
    """More than 2^32 calls marked what they name: old marks mean nothing."""
    strain = Strain()
    for call in ("incref", "touch", "truncate"):
        for first in (1, 2):
            pool = Pool(12, 4, max_seqs=6, reserved_blocks=0)
            blocks = pool.blocks
            ids, rows = pool.blocks.alloc(8).tolist(), [pool.open() for _ in range(6)]

            names = rows if call == "truncate" else ids
            for last, start, end in (
                *((0, 0, 4), ((1 << 32) - 1 - first, 1, 6), (0, 0, 3), (0, 1, 2), (0x01010100 - 3, 0, 8)),
                *[(0, 0, 8)] * 4,
            ):
                if last:
                    strain.wear(pool, last)
                more = [[0] * len(names[start:end])] if call == "truncate" else []
                tried(getattr(pool if call == "truncate" else blocks, call), names[start:end], *more)
                blocks.refcounts(ids)
            pool.shutdown()


def lists_that_are_broken(Pool: Any, Plan: Any, Strain: Any) -> None:
    """A check finds a list that leads out of all blocks, and one that names a block twice."""
    strain = Strain()
    for blocks in (12, 256):  # the latter fill a page
        pool = Pool(blocks, 4, max_seqs=4, reserved_blocks=0)
        ids = pool.blocks.alloc(8).tolist()
        pool.blocks.mark_cached(ids)
        pool.blocks.free(ids)
        pool.blocks.evict(3)
        for place in ("blocks.lru.head", "blocks.lru.tail", "blocks.dropped[i]", "blocks.blank[i]"):
            for by in (1, 100, 100_000_000, -100, *range(blocks - 8, blocks + 1)):
                with contextlib.suppress(CorruptState):
                    strain.broken(pool, place, by)
        pool.shutdown()


def released_to_either_end(Pool: Any, Plan: Any) -> None:
    """Blocks go to the old end of what may be evicted, or to the new one, and leave it from everywhere."""
    for first, second in itertools.product(range(4), range(4)):
        pool = Pool(9, 4, max_seqs=2, reserved_blocks=0)
        blocks = pool.blocks
        ids, _ = blocks.take(9)
        blocks.mark_cached(ids[:7])
        for part, oldest in ((ids[:first], True), (ids[first:5], False), (ids[5 : 5 + second], True)):
            blocks.release(part[::-1] if second % 2 else part, oldest=oldest)
            blocks.free_order()
            blocks.free_order(2)
        hit = blocks.free_order().tolist()[second : second + 2]
        blocks.touch(hit)
        blocks.free_order()
        blocks.release(hit, oldest=True)
        blocks.free_order()
        blocks.uncache(blocks.free_order().tolist()[1:3])
        blocks.free_order()
        tried(blocks.take, 2)
        look(pool)
        blocks.release(blocks.take(1)[0], oldest=True)
        tried(blocks.take, len(blocks.free_order()))
        blocks.refcounts(list(range(9)))
        look(pool)
        pool.shutdown()


def blocks_that_come_back(Pool: Any, Plan: Any) -> None:
    """What waits for steps is there again when they are over; what was known before a reset is as good as new."""
    pool = Pool(14, 2, max_seqs=6, reserved_blocks=0)
    plans = [Plan(pool, 4, 20, formats=FORMATS) for _ in range(3)]
    for _ in range(4):
        rows = [pool.open(3) for _ in range(3)]
        pool.step(plans[0], rows[:1], 4)
        pool.step(plans[1], rows[1:2], 3)
        pool.close(rows[2])
        pool.rollback(plans[1])
        pool.step(plans[2], rows[1:2], 1)
        look(pool, *plans)
        pool.done(plans[0])
        for n in (14, 9, 8, 7, 6, 5, 4):
            ids = tried(pool.blocks.alloc, n)
            if ids is not None:
                pool.blocks.free(ids)
        pool.done(plans[2])
        pool.close(rows[:2])
        for _ in range(5):
            pool.blocks.free(pool.blocks.alloc(10))
        ids = pool.blocks.alloc(9)
        tried(pool.blocks.mark_cached, ids)
        pool.blocks.free(ids)
        pool.reset()
        pool.blocks.drain_evicted()
        rows = [pool.open() for _ in range(2)]
        pool.step(plans[0], rows, [3, 2])
        pool.done(plans[0])
        pool.step(plans[1], rows, 1)
        forks = pool.fork(rows[0], 2).tolist()
        tried(pool.step, plans[0], [rows[0], *forks], 1)
        tried(pool.unshare, plans[2], forks[:1], [2])
        tried(pool.evict_blocks, rows[0], [0])
        look(pool, *plans)
        pool.reset()
    pool.shutdown()
    pool = Pool(14, 2, max_seqs=6, prefix_cache=True)
    plan, other = (Plan(pool, 4, 20, formats=FORMATS) for _ in range(2))
    text = np.arange(4, dtype=np.int32)
    for closes in ((0, 1), (1, 0), (0,), ()):
        rows = [pool.open() for _ in range(2)]
        pool.step(plan, rows, 4)
        for row in rows:
            tried(pool.prefix.commit, row, text + row % 2)
        pool.step(other, rows, 1)
        for k in closes:
            pool.close(rows[k])
            look(pool)
        pool.done(plan)
        look(pool)
        pool.done(other)
        look(pool)
        pool.prefix.match(text)
        pool.close([row for row in rows if pool.is_open(row)])
        pool.blocks.evict(9)
    pool.shutdown()
    for size in (2**31 - 2, 2**31 - 1, 2**31, 2**32 - 1, 2**32):
        made = tried(Pool, 4, size)
        if made is not None:
            made.shutdown()
    pool = Pool(8, 2, max_seqs=3, reserved_blocks=3, watermark=2)
    tried(pool.blocks.alloc, out=np.zeros(3, np.int32))
    for call in (pool.blocks.incref, pool.blocks.decref, pool.blocks.free, pool.blocks.mark_cached, pool.blocks.touch):
        tried(call, [4, 2])
    tried(pool.blocks.alloc, 3)
    for n in (0, 1, 2):
        tried(pool.open, n)
    pool.shutdown()
