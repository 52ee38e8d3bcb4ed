"""States that no call leaves: each number of a pool is changed, and `check` must say what it finds.

`proof.mutation.poke` makes the module that changes them; the builds for mutants and for coverage have it.
"""

from __future__ import annotations

import mmap
import os
import re
import signal
import struct
from collections.abc import Iterator
from typing import Any

import numpy as np

from kvpool.groups import Group
from proof.mutation.scenarios import prompts

#: Of arrays, and of those with a number for each block: no array is shorter. Beside it is memory of others.
PLACES, OF_BLOCKS, BY = (0, 1, 2, 3), (0, 1, 2, 3, 4, 5, 6, 7, 9, 12, 15, 19, 23), (1, -1, 2)
#: A check takes the word of a plan, and of a tree how wide its arrays are: it would follow a wrong one out of its own
#: memory. Groups name the pool's sequences, which are changed as those of the pool.
TRUSTED = re.compile(
    r"\.scratch[.[]|\.groups\.seqs|\.tree\[0\]\.(?!num_nodes|needs)\w+$"
    r"|\.(?:oldest|newest)\[0\]\.(?!id$|pending$|log\[i\]\.tokens$)"
)
#: A check of a tree looks at what became idle first, and finds it by these.
FOUND_BY = re.compile(r"\.fence$|\.lru\.tail$")
SECONDS = 2.0  # for one check of a broken state: some go round in circles


class Poker:
    """Breaks a pool for the time of one check."""

    def check(self, pool: Any, which: int, i: int, by: int) -> None:
        """What `check` says."""
        from proof.fuzz import _poke

        _poke.poke(pool, which, i, by)
        try:
            pool.check()
        finally:
            _poke.poke(pool, which, i, -by)


def rich_states(Pool: Any, Plan: Any) -> Iterator[tuple[Any, list[Any]]]:
    """Pools with something of everything, and what keeps them so."""
    pool = Pool(40, 4, max_seqs=8, prefix_cache=True, events=40)
    plans = [Plan(pool, 6, 40, formats=("block_tables",)) for _ in range(3)]
    text = np.arange(14, dtype=np.int32)
    first = prompts(pool, plans[0], [text, text + 1, text[:9] + 2], keep=True)
    twins = [pool.open(), pool.open(text, b"name")]
    pool.step(plans[0], twins, 12)
    pool.done(plans[0])
    for twin in twins:
        pool.prefix.commit(twin, text[:10])
    pool.close(first[1:2])
    pool.blocks.evict(1)
    (child,) = pool.fork(first[0])
    pool.step(plans[0], [first[0], child], [3, 5])
    pool.step(plans[1], [twins[0]], 2)
    pool.unshare(plans[2], [child], 8)
    pool.close(first[2])
    pool.evict_blocks(twins[1], [0])
    yield pool, [*plans]
    pool.shutdown()
    pool = Pool(24, 4, max_seqs=6, reserved_blocks=2)
    plans = [Plan(pool, 4, 16, table_width=4) for _ in range(2)]
    parent = pool.open()
    pool.step(plans[0], [parent], 7)
    pool.done(plans[0])
    ids = pool.blocks.alloc(6).tolist()
    pool.blocks.incref(ids[:2])
    pool.blocks.mark_cached(ids[2:4])
    pool.blocks.decref(ids[2:5])
    (child,) = pool.fork(parent)
    pool.step(plans[0], [child], 1)
    pool.blocks.free(ids[5])
    pool.step(plans[1], [parent], 4)
    yield pool, [*plans]
    pool.shutdown()


def rich_groups(Pool: Any, Plan: Any) -> Iterator[tuple[Any, list[Any]]]:
    """The same with layer groups."""
    groups = [Group.chunk(6), Group.window(5, keep=2, columns=2, arena=1, num_blocks=30), Group.state(8)]
    pool = Pool(24, 2, max_seqs=4, groups=groups)
    plans = [Plan(pool, 4, 40) for _ in range(3)]
    rows = [pool.open(), pool.open(3)]
    for new in ([9, 5], [1, 3]):
        pool.step(plans[0], rows, new)
        pool.done(plans[0])
    pool.blocks.alloc(2)
    children = pool.fork(rows[0], 2)
    pool.close(rows[1])
    pool.step(plans[0], children, [1, 4])
    pool.reserve(plans[1], rows[:1], 3)
    pool.step(plans[2], rows[:1], 2)
    pool.close(children[1])
    yield pool, [*plans]
    pool.shutdown()


def rich_checkpoints(Pool: Any, Plan: Any) -> Iterator[tuple[Any, list[Any]]]:
    """The same with layer groups and a prefix cache: what is idle, then what rows and pending steps use."""
    groups = [Group.full(block_size=4, columns=2), Group.window(5, keep=2), Group.state(9, blocks=2)]
    for cut in (8, 0):
        pool = Pool(190, 2, max_seqs=6, groups=groups, prefix_cache=True, events=40)
        plans = [Plan(pool, 4, 40) for _ in range(3)]
        text = list(range(20))
        row = pool.open(text[:10], b"", cut)
        for new in (8, 2):
            pool.step(plans[0], [row], new)
            pool.done(plans[0])
            pool.prefix.commit(row, text[pool.prefix.committed(row) : pool.num_tokens(row)])
        pool.close(row)
        yield pool, [*plans]
        rows = [pool.open(text), *(pool.open([k, *text], b"", 8) for k in (31, 32, 33))]
        pool.step(plans[0], rows[1:3], 8)
        pool.done(plans[0])
        pool.prefix.commit(rows[1], [31, *text[:7]])
        pool.step(plans[1], rows[3:], 8)
        pool.step(plans[2], rows[:1], 3)
        pool.open([*text[:9], 40])
        yield pool, [*plans]
        pool.shutdown()


def every_state(Pool: Any, Plan: Any) -> Iterator[tuple[Any, list[Any]]]:
    """With and without layer groups."""
    for states in (rich_states, rich_groups, rich_checkpoints):
        yield from states(Pool, Plan)


def states_that_are_broken(Pool: Any, Plan: Any, Poker: Any, safe: list[list[tuple[int, int, int]]]) -> None:
    """Each number wrong, one after the other; `safe`: those that a check survives, by state."""
    poker = Poker()
    for (pool, _), pokes in zip(every_state(Pool, Plan), safe, strict=True):
        pool.check()
        for which, i, by in pokes:
            try:
                poker.check(pool, which, i, by)
            except Exception:  # a broken pool raises what it likes; the recording has it
                continue
        pool.check()


def safe_pokes(Pool: Any, Plan: Any) -> list[list[tuple[int, int, int]]]:
    """What a check survives, found out in children: it may read what is not there, or go round in circles."""
    from proof.fuzz import _poke

    found = []
    for pool, _ in every_state(Pool, Plan):
        has_tree = bool(pool.options.groups and pool.prefix)
        every = [
            (which, i, by)
            for which, name in enumerate(_poke.NAMES)
            if not TRUSTED.search(name)
            and (pool.options.groups or ".groups." not in name)
            and not (has_tree and FOUND_BY.search(name))
            for by in BY
            for i in (PLACES[:1] if "[i]" not in name else OF_BLOCKS if ".blocks." in name else PLACES)
        ]
        died, at, shared = set(), 0, mmap.mmap(-1, 8)
        while at < len(every):
            pid = os.fork()
            if pid == 0:
                for k in range(at, len(every)):
                    struct.pack_into("q", shared, 0, k)
                    signal.setitimer(signal.ITIMER_REAL, SECONDS)
                    try:
                        Poker().check(pool, *every[k])
                    except Exception:  # it survived, which is what is asked
                        continue
                os._exit(0)
            _, status = os.waitpid(pid, 0)
            if status == 0:
                break
            (at,) = struct.unpack_from("q", shared, 0)
            which = every[at][0]
            while at < len(every) and every[at][0] == which:  # nor the rest of what is beside it
                died.add(every[at])
                at += 1
        found.append([poke for poke in every if poke not in died])
    return found
