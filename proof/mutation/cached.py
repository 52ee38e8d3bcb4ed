"""Programs on pools with layer groups and a prefix cache, for what random ones rarely come by.

Rows save states and do not publish them, load states and do not use them, are told tokens again, find no room.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from kvpool.groups import Group
from proof.mutation.scenarios import tried
from proof.mutation.tape import drop

SIZE = 2
POOLS: tuple[dict[str, Any], ...] = (
    {"groups": [Group.full(), Group.state(14, blocks=1)], "two_classes": True},
    {"groups": [Group.full(columns=2), Group.window(5, keep=2), Group.state(14, blocks=2), Group.state(12, blocks=1)]},
    {
        "groups": [Group.full(block_size=4), Group.full(arena=1), Group.chunk(6, columns=2)],
        "two_classes": True,
    },
    {"groups": [Group.window(7, keep=3, block_size=4), Group.full(arena=1, columns=3)]},
    {"groups": [Group.state(14, blocks=3), Group.state(12, blocks=1)], "events": 900},
    {"groups": [Group.full(block_size=8), Group.full(), Group.window(4, arena=1)], "watermark": 2},
    {"groups": [Group.full(), Group.full(block_size=4, columns=2)], "reserved_blocks": 0, "events": 900},
    {"groups": [Group.full(), Group.state(14)], "in_order": True},
    {"groups": [Group.full(), Group.window(5)], "max_blocks_per_seq": 40},
    {"groups": [Group.full(), Group.state(14, blocks=2), Group.window(9)], "in_order": True, "two_classes": True},
)
BASE = [n * n % 7 for n in range(48)]


class Arenas:
    """Blocks of any arena of a pool, and its events in an order of their own: that within a call is not promised."""

    def evict(self, pool: Any, arena: int, n: int) -> int:
        """Make blocks blank, none of an arena that has none."""
        return pool.blocks.arena(arena).evict(n) if arena <= max(g.arena for g in pool.options.groups) else 0

    def events(self, pool: Any) -> list[Any]:
        """What was told since the last time."""
        return sorted(pool.prefix.events(), key=repr)


def pools(Pool: Any, Plan: Any, num_blocks: int, max_seqs: int = 6) -> Iterator[tuple[Any, list[Any]]]:
    """Pools of all kinds, each with three plans; a second arena has half as many blocks."""
    for options in POOLS:
        groups = [replace(group, num_blocks=num_blocks // 2 if group.arena else None) for group in options["groups"]]
        pool = Pool(num_blocks, SIZE, **options | {"groups": groups, "max_seqs": max_seqs, "prefix_cache": True})
        plans = [Plan(pool, 6, 200) for _ in range(3)]
        yield pool, plans
        pool.shutdown()
        for thing in (*plans, pool):
            drop(thing)


def told(pool: Any, rows: list[Any], *texts: list[int]) -> None:
    """Read what calls say of rows, and how much of each beginning of some texts is found."""
    for row in rows:
        for name in ("num_tokens", "capacity"):
            tried(getattr(pool, name), row)
        tried(pool.prefix.committed, row)
        tried(pool.prefix.wanted, [row])
    for text in texts:
        for n in range(2 * SIZE, len(text) + 1, 2 * SIZE):
            pool.prefix.match([*text[:n], 99])
    pool.stats()
    pool.prefix.stats()
    pool.check()


def ended(pool: Any, plans: list[Any]) -> None:
    """What is pending is done, oldest first."""
    for plan in sorted((plan for plan in plans if plan.is_pending), key=lambda plan: plan.step_id):
        pool.done(plan)


def computed(pool: Any, plans: list[Any], row: int, text: list[int], commit: bool = True) -> None:
    """Take a row to the end of a text, in steps that end where the pool wants; each is done."""
    while (length := pool.num_tokens(row)) < len(text):
        (place,) = pool.prefix.wanted([row]).tolist()
        if tried(pool.step, plans[0], [row], (place if length < place <= len(text) else len(text)) - length) is None:
            ended(pool, plans)
        if pool.num_tokens(row) == length:
            return
        if commit:
            tried(pool.prefix.commit, row, text[pool.prefix.committed(row) : pool.num_tokens(row)])


def served(pool: Any, plans: list[Any], text: list[int], cut: int | None = None) -> None:
    """Open a prompt, compute it, close it."""
    row = tried(pool.open, text, b"", cut)
    if row is not None:
        computed(pool, plans, row, text)
        pool.close(row)


def emptied(pool: Any, arenas: Any, *texts: list[int]) -> None:
    """Blocks leave one after the other, of each arena in turn."""
    while any([arenas.evict(pool, k, 1) for k in range(2)]):
        told(pool, [], *texts)


def prompts_that_grow(Pool: Any, Plan: Any, Arenas: Any) -> None:
    """Conversations whose beginnings are shared, with cuts of all kinds; then all that is kept leaves."""
    arenas = Arenas()
    other = [*BASE[:15], *(n % 3 for n in range(25))]
    for cuts in ((None,), (18, 23, 30, 36, 40), (40, 8, 12, 0)):
        for pool, plans in pools(Pool, Plan, 120):
            for turn, length in enumerate((20, 28, 24, 36, 40, 12, 40)):
                text = (BASE if turn % 3 else other)[:length]
                served(pool, plans, text, cuts[turn % len(cuts)] and min(cuts[turn % len(cuts)], length))
                told(pool, [], BASE, other)
            pins = [tried(pool.prefix.pin, BASE[:n]) for n in (24, 40)]
            arenas.events(pool)
            emptied(pool, arenas, BASE, other)
            tried(pool.close, [row for row in pins if row is not None])
            emptied(pool, arenas, BASE, other)
            arenas.events(pool)


def saves_for_nothing(Pool: Any, Plan: Any, Arenas: Any) -> None:
    """States are saved; then the step is rolled back, or the row is closed, cut, flushed, or saves too many."""
    arenas = Arenas()
    ways = ("rollback", "close", "truncate", "flush", "fork", "commit", "many")
    for how, late in itertools.product(ways, (False, True)):
        for pool, plans in pools(Pool, Plan, 220):
            served(pool, plans, BASE[:12], 12)
            row = pool.open(BASE, b"", 32)
            rows = [row]
            for turn in range(4 if how == "many" else 2):
                (place,) = pool.prefix.wanted([row]).tolist()
                length = pool.num_tokens(row)
                tried(pool.step, plans[turn % 3], rows, (place if place > 0 else length + 5) - length)
                told(pool, rows)
                if late or turn == 0 or how == "many":
                    ended(pool, plans)
            if how == "rollback":
                tried(pool.rollback, plans[1])
            elif how == "close":
                pool.close(row)
            elif how == "truncate":
                for length in range(pool.num_tokens(row), 7, -1):
                    tried(pool.truncate, row, length)
            elif how == "flush":
                pool.prefix.flush()
            elif how == "fork":
                rows += pool.fork(row, 2).tolist()
            told(pool, rows, BASE)
            emptied(pool, arenas)
            for turn in range(3):
                tried(pool.step, plans[2], rows, 1 + turn)
                ended(pool, plans)
                for one in rows if turn else ():
                    if tried(pool.prefix.committed, one) is not None:
                        tried(pool.prefix.commit, one, BASE[pool.prefix.committed(one) : pool.num_tokens(one)])
                told(pool, rows, BASE)
            served(pool, plans, BASE, 40)
            for one in rows:
                tried(pool.close, one)
            emptied(pool, arenas, BASE)


def loads_in_every_order(Pool: Any, Plan: Any, Arenas: Any) -> None:
    """Several rows load a checkpoint; they are rolled back, forked, closed, cut and flushed before or meanwhile."""
    arenas = Arenas()
    for how, when in itertools.product(("rollback", "close", "fork", "flush", "evict", "truncate"), (0, 1, 2)):
        for pool, plans in pools(Pool, Plan, 220):
            served(pool, plans, BASE[:24], 24)
            rows = [tried(pool.open, BASE[:n], b"", 30) for n in (30, 40)]
            rows = [row for row in rows if row is not None]
            for turn in range(3):
                if turn == when and how == "rollback":
                    pending = [plan for plan in plans if plan.is_pending]
                    for plan in sorted(pending, key=lambda plan: -plan.step_id):
                        pool.rollback(plan)
                elif turn == when and how == "close":
                    tried(pool.close, rows.pop(0)) if rows else None
                elif turn == when and how == "fork":
                    rows += pool.fork(rows[0], 2).tolist()
                    tried(pool.close, rows.pop(0))
                elif turn == when and how == "flush":
                    pool.prefix.flush((None, b"", b"x")[turn])
                elif turn == when and how == "evict":
                    emptied(pool, arenas)
                elif turn == when:
                    tried(pool.truncate, rows[0], pool.num_tokens(rows[0]) - 1)
                told(pool, rows, BASE)
                tried(pool.step, plans[turn], rows[turn % 2 :], 1 if turn else [0, 2][: len(rows)])
                told(pool, rows, BASE)
            ended(pool, plans)
            told(pool, rows, BASE)
            emptied(pool, arenas, BASE)
            for row in rows:
                computed(pool, plans, row, BASE[:30])
                tried(pool.close, row)
            told(pool, rows, BASE)
            emptied(pool, arenas, BASE)


def tokens_told_again(Pool: Any, Plan: Any, Arenas: Any) -> None:
    """Rows are cut into what they have committed, and told other tokens; rows that share entries contradict."""
    arenas = Arenas()
    for length, other in itertools.product(range(7, 17), (0, 9)):
        for pool, plans in pools(Pool, Plan, 220):
            row = pool.open(BASE[:20], b"", 16)
            computed(pool, plans, row, BASE[:17])
            tried(pool.truncate, row, length)
            told(pool, [row], BASE)
            rows = [row, *pool.fork(row, 1).tolist()]
            tried(pool.step, plans[0], rows, 17 - min(length, 16))
            ended(pool, plans)
            for one in rows:
                start, end = pool.prefix.committed(one), pool.num_tokens(one)
                tried(pool.prefix.commit, one, [(token + other) % 11 for token in BASE[start:end]])
                told(pool, rows, BASE)
            pool.close(rows)
            served(pool, plans, BASE[:20], 20)
            told(pool, [], BASE, [*BASE[:length], *((token + 9) % 11 for token in BASE[length:20])])
            arenas.events(pool)


def shared_rows_told_at_once(Pool: Any, Plan: Any, Arenas: Any) -> None:
    """Forks share entries that nobody has committed, and one call says what they hold: one token differs, or none."""
    arenas = Arenas()
    for known, wrong in itertools.product((0, 3, 8), (None, 0, 1, 3, 4, 7, 9, 12, 13, 15)):
        for pool, plans in pools(Pool, Plan, 220):
            row = pool.open(BASE[:20], b"", 16)
            tried(pool.step, plans[0], [row], 14)
            ended(pool, plans)
            (child,) = pool.fork(row).tolist()
            tried(pool.prefix.commit, row, BASE[:known])
            tried(pool.prefix.commit, child, BASE[: 2 * (known == 3)])
            rows = [row, child]
            tried(pool.step, plans[0], rows, [2, 3])
            ended(pool, plans)
            texts = [BASE[pool.prefix.committed(one) : pool.num_tokens(one)] for one in rows]
            start = pool.prefix.committed(child)
            if wrong is not None and start <= wrong:
                texts[1][wrong - start] += 20
            tried(pool.prefix.commit, rows, [*texts[0], *texts[1]], [len(text) for text in texts])
            told(pool, rows, BASE, [*BASE[:start], *texts[1]])
            tried(pool.prefix.commit, rows[::-1], [*texts[1], *texts[0]], [len(text) for text in texts[::-1]])
            told(pool, rows, BASE, [*BASE[:start], *texts[1]])
            for one in rows:
                pool.close(one)
            emptied(pool, arenas, BASE)


def prompts_without_room(Pool: Any, Plan: Any, Arenas: Any) -> None:
    """Pools so small that nodes, checkpoints, bundles and blocks run out, with rows that stay open and blocks held."""
    arenas = Arenas()
    for num_blocks, max_seqs, held in itertools.product((14, 22, 34), (1, 4), (0, 5)):
        for pool, plans in pools(Pool, Plan, num_blocks, max_seqs=max_seqs):
            taken = tried(pool.blocks.alloc, held) if held else None
            kept: list[int] = []
            for turn, (length, first) in enumerate(itertools.product((9, 14, 18, 26, 34), (0, 0, 3, 5))):
                text = [first, *BASE[1:length]]
                row = tried(pool.open, text, b"", (None, length)[turn % 2], reserve=turn % 3 > 0)
                if row is not None:
                    computed(pool, plans, row, text, commit=turn % 7 != 3)
                    kept.append(row)
                told(pool, kept, BASE, [5, *BASE[1:]])
                while kept and (row is None or len(kept) == max_seqs or turn % 3 == 0):
                    pool.close(kept.pop(0))
                if turn % 6 == 5:
                    arenas.evict(pool, 1, 2)
                if turn == 13:
                    pool.prefix.flush()
            for row in kept:
                pool.close(row)
            if taken is not None:
                pool.blocks.decref(taken)
            emptied(pool, arenas, BASE)


PROGRAMS = (
    *(prompts_that_grow, saves_for_nothing, loads_in_every_order),
    *(tokens_told_again, shared_rows_told_at_once, prompts_without_room),
)
