"""Programs in which tokens leave sequences that go on: compaction, whole blocks, blocks of their own before that.

What follows an eviction is what shows it: positions of the next tokens, rows that are rewritten, truncations that are
refused, forks that inherit both lengths.
"""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np

from proof.mutation.edges import CORE_ONLY, SCENARIOS
from proof.mutation.scenarios import FORMATS, core_only, grown, look, prompts, scenario, tried

__all__ = ["CORE_ONLY", "SCENARIOS"]  # with the programs of this module on them


def measured(pool: Any, handles: list[int], *plans: Any) -> None:
    """Read both lengths, and everything else."""
    for handle in handles:
        tried(pool.kv_len, handle)
        tried(pool.num_tokens, handle)
        tried(pool.table, handle)
    look(pool, *plans)


def ended(pool: Any, plan: Any, how: str) -> None:
    """End a step, if there is one; by `done` where it may not be rolled back."""
    if plan.is_pending:
        look(pool, plan)
        tried(getattr(pool, how), plan)
    if plan.is_pending:
        tried(pool.done, plan)


@scenario
def compactions_to_every_length(Pool: Any, Plan: Any) -> None:
    """Sequences alone and shared, kept from nothing to all, with leading tokens that stay where they are."""
    for size, first, shared in itertools.product((1, 3), (0, 4, 20), (False, True)):
        for keep in (0, 2, 3, 4, 7):
            pool = Pool(60, size, max_seqs=8, max_blocks_per_seq=16)
            plan, other = (Plan(pool, 6, 40, formats=FORMATS) for _ in range(2))
            rows = [pool.open() for _ in range(2)]
            grown(pool, plan, rows, [7, 8])
            if shared:
                rows += pool.fork(rows[0], 1).tolist()
            tried(pool.compact, rows[0], keep, first)
            tried(pool.unshare, other, rows[:1], keep, first)
            ended(pool, other, "done")
            tried(pool.compact, rows[:2], [keep, min(8, keep + 1)], first)
            measured(pool, rows, plan)
            grown(pool, plan, rows, 0)
            grown(pool, plan, rows, 1)
            grown(pool, other, rows, [2, *[1] * (len(rows) - 1)])
            rows += pool.fork(rows[0], 1).tolist()
            grown(pool, plan, rows, 1)
            for length in (6, 7, 8, 9, 10, 11):
                tried(pool.truncate, rows[0], length)
                tried(pool.truncate, rows[-1], 17 - length)
            measured(pool, rows)
            grown(pool, plan, rows, [1, 0, *[3] * (len(rows) - 2)])
            pool.close(rows[1:])
            measured(pool, rows[:1])
            pool.shutdown()


@scenario
def blocks_that_leave(Pool: Any, Plan: Any) -> None:
    """Every choice of the full blocks of a sequence, which shares them or not; then what it goes on with."""
    places = (0, 1, 2, 3)
    choices = [c for n in range(5) for c in itertools.combinations(places, n)]
    for size, shared, tail in itertools.product((1, 2), (False, True), (0, 1)):
        pool = Pool(80, size, max_seqs=8, max_blocks_per_seq=9)
        plan, other = (Plan(pool, 6, 60, formats=FORMATS) for _ in range(2))
        for number, choice in enumerate(choices):
            row, side = pool.open(), pool.open()
            grown(pool, plan, [row, side], [4 * size + tail * (size - 1), 3])
            rows = [row, *(pool.fork(row, 1).tolist() if shared else [])]
            if number % 2:
                pool.step(other, [side], 1)
            for wrong in () if number else ([1, 0], [1, 1], [-1], [4], [0, 4], [2**31], [4 * size + 1]):
                tried(pool.evict_blocks, row, wrong)
            pool.evict_blocks(row, list(choice))
            measured(pool, [*rows, side], plan)
            ended(pool, other, "rollback" if number % 3 else "done")
            grown(pool, plan, rows, 0)
            measured(pool, rows)
            grown(pool, plan, [*rows, side], 1)
            grown(pool, plan, rows, [2 * size + 1, *[0] * (len(rows) - 1)])
            for length in (4 * size - 1, 4 * size, 4 * size + 1):
                for handle in rows:
                    tried(pool.truncate, handle, length)
            measured(pool, rows)
            tried(pool.evict_blocks, row, [0])
            measured(pool, rows, plan)
            grown(pool, plan, [*rows, side], 1)
            pool.close([*rows, side])
            measured(pool, rows)
        pool.reset()
        again = pool.open()
        grown(pool, plan, [again], 2)
        pool.shutdown()


@scenario
def blocks_of_many_made_their_own(Pool: Any, Plan: Any) -> None:
    """A family shares full blocks and a tail; all of it gets copies at once, of some blocks, with too few there."""
    for size, first, blocks in ((1, 0, 300), (4, 5, 90), (4, 0, 300), (1, 0, 47)):
        pool = Pool(blocks, size, max_seqs=60)
        plan, other = (Plan(pool, 50, 60, formats=FORMATS) for _ in range(2))
        length = 3 * size + 1 - size // 2  # a tail that is not full, where blocks have room for one
        parent = pool.open()
        grown(pool, plan, [parent], length)
        family = [parent, *pool.fork(parent, 40).tolist()]
        for keep in (0, 1, size, size + 1, 2 * size, length - 1, length):
            for batch in (family[:1], family[1:3], family[3:21], family):
                tried(pool.unshare, plan, batch, keep, first)
                measured(pool, batch[:2], plan)
                tried(pool.compact, batch[-2:], keep, first)
                ended(pool, plan, "rollback")
                measured(pool, batch[:2])
        tried(pool.unshare, plan, family[2:20], [size] * 18)
        tried(pool.compact, family[20:22], [size] * 2)
        young = tried(pool.fork, family[3], 2)
        pool.close(family[4:8])
        ended(pool, plan, "rollback")
        tried(pool.unshare, plan, [*family[8:12], parent], [1] * 5, first)
        tried(pool.step, other, family[20:23], 1)
        ended(pool, plan, "done")
        tried(pool.compact, [*family[8:12], parent], 1, first)
        measured(pool, family[8:12])
        ended(pool, other, "done")
        for row in family[8:24]:
            tried(pool.compact, row, 1, first)
        measured(pool, [*family[8:24], *([] if young is None else young.tolist())], plan, other)
        grown(pool, plan, family[8:12], 1)
        pool.close(family[:4] + family[8:])
        look(pool)
        pool.shutdown()


@scenario
def blocks_of_their_own_for_some(Pool: Any, Plan: Any) -> None:
    """One block more is there each time, until all rows of a batch get theirs; and tables with reserved blocks."""
    for free in range(8):
        pool = Pool(14 + free, 2, max_seqs=6, reserved_blocks=0)
        plan, narrow = Plan(pool, 4, 40, formats=FORMATS), Plan(pool, 4, 40, formats=FORMATS, table_width=4)
        parent = pool.open()
        grown(pool, plan, [parent], 6)
        rows = [parent, *pool.fork(parent, 2).tolist()]
        pool.blocks.alloc(11)
        for keep in ([4, 4, 4], [0, 5, 5], [5, 0, 2], 5):
            tried(pool.unshare, plan, rows, keep)
            ended(pool, plan, "rollback")
        pool.close(rows[1:])
        for new in (2, 3, 4, 6):
            tried(pool.reserve, plan, rows[:1], new)
            ended(pool, plan, "done")
            tried(pool.unshare, narrow, rows[:1], 3)
            ended(pool, narrow, "rollback")
        measured(pool, rows[:1])
        pool.shutdown()


@scenario
def blocks_of_their_own_refused(Pool: Any, Plan: Any) -> None:
    """Each thing that may be wrong with a batch, in each place of it, against the limits of narrow plans."""
    for width, kv in ((2, None), (3, None), (4, 9), (4, 10), (6, None)):
        pool = Pool(40, 4, max_seqs=8, max_blocks_per_seq=6)
        plan = Plan(pool, 4, 40, formats=FORMATS, table_width=width, kv_width=kv)
        wide = Plan(pool, 6, 60, formats=("block_tables",))
        rows = [pool.open() for _ in range(3)]
        grown(pool, wide, rows, [9, 8, 13])
        rows += pool.fork(rows[0], 2).tolist()
        dead = pool.open()
        pool.close(dead)
        wrongs = (dead, rows[0], rows[1], rows[0] ^ 1 << 20, 0, -1) if width == 6 else ()  # one thing wrong at a time
        for at, wrong in itertools.product(range(3), wrongs):
            batch = [rows[0], rows[1]]
            tried(pool.unshare, plan, [*batch[:at], wrong, *batch[at:]], 1)
            look(pool, plan)
            ended(pool, plan, "rollback")
            tried(pool.compact, [*batch[:at], wrong, *batch[at:]], 8)
        for lens in (-1, 0, 8, 9, 10, 13, 14, 2**31, [9, 8], [9, 9], [1, -1], [1], [9, 8, 1], -(2**63), 2**63 - 1):
            tried(pool.unshare, plan, rows[:2], lens)
            ended(pool, plan, "rollback")
            tried(pool.compact, rows[1:3], lens)
            measured(pool, rows, plan)
        for batch in (rows, rows[:4], [rows[2]], [rows[0]], [rows[1]], []):
            tried(pool.unshare, plan, batch, 0)
            measured(pool, rows, plan)
            tried(pool.unshare, plan, batch, 0)
            tried(pool.compact, batch, 0)
            ended(pool, plan, "done")
        for first in (-1, 3, 4, 2**63 - 1, 2**63):
            tried(pool.unshare, plan, rows[:2], 5, first)
            ended(pool, plan, "rollback")
        pool.shutdown()


@scenario
def copies_that_are_still_read(Pool: Any, Plan: Any) -> None:
    """Blocks that nobody else refers to, and that a pending copy reads: no compaction rewrites them yet."""
    for size, how, keep in itertools.product((2, 4), ("done", "rollback"), (1, 2, 5)):
        pool = Pool(60, size, max_seqs=12)
        plan, other = (Plan(pool, 8, 40, formats=FORMATS) for _ in range(2))
        parent = pool.open()
        grown(pool, plan, [parent], 2 * size + 1)
        children = pool.fork(parent, 2).tolist()
        pool.step(plan, children, 1)
        tried(pool.compact, parent, keep)
        tried(pool.compact, parent, keep, 2 * size)
        measured(pool, [parent, *children], plan)
        tried(pool.evict_blocks, children[0], [0])
        tried(pool.unshare, other, [parent], keep)
        ended(pool, other, "rollback")
        pool.close(children[0])
        getattr(pool, how)(plan)
        tried(pool.compact, parent, keep)
        pool.unshare(plan, [children[1], parent], [keep, min(keep, pool.kv_len(parent))])
        pool.step(other, [parent], 3)
        tried(pool.compact, [parent, children[1]], keep)
        measured(pool, [parent, children[1]], plan, other)
        ended(pool, other, how)
        ended(pool, plan, "done")
        for row in (parent, children[1]):
            tried(pool.compact, row, min(keep, pool.kv_len(row)))
        measured(pool, [parent, children[1]])
        grown(pool, plan, [parent, children[1]], 2)
        grown(pool, other, [children[1], parent], [1, 4])
        pool.shutdown()


@scenario
def evictions_from_what_is_known(Pool: Any, Plan: Any) -> None:
    """Committed blocks stay what they are: compaction is refused, a copy is rewritten, the cache forgets the row."""
    for size, how in itertools.product((1, 2, 4), ("compact", "unshare", "blocks", "empty")):
        pool = Pool(60, size, max_seqs=12, prefix_cache=True)
        plan = Plan(pool, 8, 60, formats=FORMATS)
        text = np.arange(5 * size + 1, dtype=np.int32)
        rows = prompts(pool, plan, [text, text + 1], keep=True)
        rows += pool.fork(rows[0], 1).tolist()
        keep = {"compact": 5 * size, "unshare": size + 1, "blocks": 0, "empty": 0}[how]
        if how == "blocks":
            for row, places in zip(rows, ([0, 2], [4], [0, 1, 2, 3, 4]), strict=True):
                pool.evict_blocks(row, places)
                measured(pool, rows)
        else:
            tried(pool.compact, rows[0], keep)
            tried(pool.compact, rows[0], keep, 5 * size)
            if how == "unshare":
                pool.unshare(plan, rows, keep)
                ended(pool, plan, "done")
            tried(pool.compact, rows, keep)
            tried(pool.compact, rows[1], keep, 5 * size)
        measured(pool, rows, plan)
        pool.prefix.match(text)
        grown(pool, plan, rows, 2 * size)
        children = pool.fork(rows[1], 2).tolist()
        for row in [*rows, *children]:
            tried(pool.prefix.commit, row, text[-1:])
            tried(pool.prefix.commit, row, text[:0])
        grown(pool, plan, children, [1, 2])
        (fresh,) = prompts(pool, plan, [text[: 3 * size + 1]], keep=True)
        measured(pool, [*rows, *children, fresh])
        for row in (*rows, fresh):
            tried(pool.truncate, row, 4 * size)
        grown(pool, plan, [*rows, fresh], 1)
        pool.close([*rows, *children])
        pool.prefix.match(text)
        pool.blocks.evict(30)
        pool.prefix.match(text)
        look(pool)
        pool.shutdown()


@scenario
def rows_shown_after_an_eviction(Pool: Any, Plan: Any) -> None:
    """Static shapes: plans that showed a sequence before, alone, one token each, padded, forgotten, in two dtypes."""
    for dtype, kv, size in (("int32", None, 1), ("int64", 40, 4), ("int32", 40, 4)):
        pool = Pool(200, size, max_seqs=8, max_blocks_per_seq=40)
        plan, other = (Plan(pool, 4, 60, formats=FORMATS, dtype=dtype, kv_width=kv) for _ in range(2))
        alone = [Plan(pool, 4, 60, formats=(name,), dtype=dtype, kv_width=kv) for name in FORMATS]
        rows = [pool.open() for _ in range(4)]
        for every in (plan, other, *alone):
            grown(pool, every, rows, [3, 1, 2, 0] if every is plan else 0)
        grown(pool, plan, rows, [9, 10, 11, 12])
        for turn in range(6):
            row = rows[turn % 3]
            pool.compact(row, pool.kv_len(row) - turn) if turn % 2 else pool.evict_blocks(row, [0])
            pool.step(plan, rows[:2], 0, pad_to=(4, 60))
            ended(pool, plan, "rollback" if turn % 3 else "done")
            for every in (plan, other, *alone):
                grown(pool, every, rows, 0)
            grown(pool, plan, rows[::-1], 1)
            grown(pool, other, rows, [1, 0, 2, 1])
            grown(pool, alone[turn], rows, 1)
            grown(pool, alone[3], rows, 1)
            if turn == 4:
                pool.close(rows[0])
                rows[0] = pool.open()
                grown(pool, plan, rows, 1)
        pool.shutdown()


@scenario
def commits_behind_copies(Pool: Any, Plan: Any) -> None:
    """A sequence commits on after some of its blocks were replaced; what their copies were before counts no more."""
    text = [np.arange(9, dtype=np.int32) + 20 * k for k in range(3)]
    for size, first, gone in itertools.product((1, 2), (0, 1, 2), (0, 1, 9)):
        pool = Pool(40, size, max_seqs=8, prefix_cache=True, events=200)
        plan = Plan(pool, 4, 60, formats=("block_tables",))
        twins = [pool.open(text[0]) for _ in range(3)]
        grown(pool, plan, twins, 9)
        for twin in twins:
            pool.prefix.commit(twin, text[0][:6])
        other = pool.open(text[1])
        grown(pool, plan, [other], 9)
        pool.prefix.commit(other, text[1][:4])
        pool.close(twins[2])
        for row, given in ((twins[1], text[0][6:]), (other, text[1][4:])):
            tried(pool.unshare, plan, [row], 2 + first, first)
            ended(pool, plan, "done")
            if (row == other) == (gone < 9):
                pool.close(twins[0])
                pool.blocks.evict(gone)
            pool.prefix.commit(row, given[:2])
            look(pool)
            pool.prefix.commit(row, given[2:])
            look(pool)
        for a, b in itertools.product(text, repeat=2):
            for k in range(9):
                pool.prefix.match(np.concatenate([a[:k], b[k:]]))
        pool.close([twins[1], other])
        pool.prefix.events()
        look(pool)
        pool.shutdown()


@core_only
def evictions_in_turn(Pool: Any, Plan: Any) -> None:
    """Rings that hold all calls, or those of the last half, or not one."""
    pool = Pool(300, 2, max_seqs=70)
    plan = Plan(pool, 70, 200, formats=("block_tables",))
    for n in (1, 2, 40):
        row = pool.open()
        grown(pool, plan, [row], 9)
        family = [row, *pool.fork(row, n).tolist()]
        for lens, first in ((3, 0), ([3] * (n + 1), 4), (9, 2)):
            tried(pool.unshare, plan, family, lens, first)
            ended(pool, plan, "done")
            tried(pool.compact, family, lens, first)
        for places in ([], [0], [0, 1, 2]):
            tried(pool.evict_blocks, family[-1], places)
        grown(pool, plan, family, 1)
        pool.close(family)
    pool.shutdown()


@core_only
def positions_to_the_last_one(Pool: Any, Plan: Any) -> None:
    """A sequence that loses tokens until its positions come to 2^31 - 1."""
    for size, whole in itertools.product((1 << 22, (1 << 22) - 1), (False, True)):
        pool = Pool(90, size, max_seqs=4, max_blocks_per_seq=40)
        plan = Plan(pool, 2, 40 * size, formats=("block_tables", "seq_lens", "cu_q_lens"))
        small = Plan(pool, 2, 4, formats=("slot_mapping", "positions"))
        row, side = pool.open(), pool.open()
        for _ in range(13):
            for leaving in (39, 3, 1):
                tried(pool.step, plan, [row], leaving * size)
                ended(pool, plan, "done")
                tried(pool.evict_blocks, row, list(range(leaving))) if whole else tried(pool.compact, row, 0)
                measured(pool, [row])
                tried(pool.truncate, row, pool.num_tokens(row) - pool.kv_len(row))
            for new in (1, [1, 2], [3, 1]):
                tried(pool.step, small, [row, side], new)
                ended(pool, small, "done")
            tried(pool.compact, row, pool.kv_len(row) - 1)
        pool.shutdown()
