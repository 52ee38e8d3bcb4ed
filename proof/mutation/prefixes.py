"""Programs about prompts: commits in all their forms, namespaces, cut-off sequences, slots that go round.

They are scenarios as those of `proof.mutation.scenarios`.
"""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np

from proof.mutation.evictions import CORE_ONLY, SCENARIOS
from proof.mutation.scenarios import core_only, grown, look, scenario, tried
from proof.mutation.tape import drop

__all__ = ["CORE_ONLY", "SCENARIOS"]  # with the programs of this module on them


def told(pool: Any, handles: list[int], *texts: Any) -> None:
    """Read what calls say about sequences, and how much of some prompts is known."""
    for handle in handles:
        for name in ("num_tokens", "kv_len", "capacity", "table", "is_open"):
            tried(getattr(pool, name), handle)
        if pool.prefix is not None:
            tried(pool.prefix.committed, handle)
    for text in texts:
        pool.prefix.match(text)
    look(pool)


@scenario
def commits_of_every_form(Pool: Any, Plan: Any) -> None:
    """With counts and without, too many tokens and too few, of rows that share blocks and contradict each other."""
    forms: tuple[tuple[Any, int], ...] = (
        *((None, n) for n in (0, 3, 4, 5)),
        *(([1, 1, 1], n) for n in (2, 3, 4)),
        *(([1, 0, 2], 3), ([1, 1], 2), ([-1, 2, 2], 3), (1, 3), (1, 2), (2, 6), (0, 0), (-1, 0), ([0, 0, 40], 40)),
    )
    for size in (1, 2, 3, 4):
        pool = Pool(90, size, max_seqs=9, prefix_cache=True)
        plan = Plan(pool, 6, 90, formats=("block_tables",))
        rows = [pool.open() for _ in range(3)]
        grown(pool, plan, rows, [6 * size, 5 * size + 1, 4 * size])
        at = 0
        for counts, n in forms:
            tried(pool.prefix.commit, rows, np.arange(at, at + n, dtype=np.int32) % 7, counts)
            told(pool, rows)
            at += n
        tried(pool.prefix.commit, [], np.empty(0, np.int32))
        tried(pool.prefix.commit, [], np.empty(0, np.int32), [])
        tried(pool.prefix.commit, [], np.zeros(2, np.int32))
        tried(pool.prefix.commit, rows[:1] * 2, np.zeros(2, np.int32))
        for handle in rows:
            pool.close(handle)
        pool.prefix.flush()
        for shared, known, other in itertools.product((1, 2 * size, 2 * size + 1), (0, 1, size), range(2 * size + 1)):
            rows = [pool.open()]
            grown(pool, plan, rows, shared + size)
            tried(pool.prefix.commit, rows[0], np.full(min(known, shared), 3, np.int32))
            rows += pool.fork(rows[0], 1 + other % 2).tolist()
            first = np.full(shared + size - min(known, shared), 3, np.int32)
            second = first.copy()
            second[other % len(second)] += 1
            tried(pool.prefix.commit, rows[:2], np.concatenate((first, second)))
            told(pool, rows, first)
            half = len(second) // 2
            tried(pool.prefix.commit, rows[1:], np.concatenate((first[:-1], second[:half])), [len(first) - 1, half])
            tried(pool.prefix.commit, rows, np.concatenate([first] * len(rows)))
            told(pool, rows, first, second)
            pool.close(rows)
            pool.prefix.flush()
        pool.shutdown()


@scenario
def namespaces_come_and_go(Pool: Any, Plan: Any) -> None:
    """More namespaces than are kept without looking which are in use: cached, open, forgotten, flushed."""
    pool = Pool(70, 1, max_seqs=40, prefix_cache=True)
    plan = Plan(pool, 4, 8, formats=("block_tables",))
    text = np.array([5, 6], np.int32)
    kept: list[int] = []
    for number in range(3400):
        name = b"tenant %d" % number
        handle = tried(pool.open, text, name)
        if handle is None:
            pool.close(kept.pop(0))
            continue
        if number % 40 == 3:
            kept.append(handle)
            continue
        if number % 25 == 7:
            grown(pool, plan, [handle], 2)
            pool.prefix.commit(handle, text)
        pool.close(handle)
        if number % 97 == 5:
            pool.prefix.flush(b"tenant %d" % (number - 20))
        if number % 300 == 299:
            pool.prefix.stats()
            for other in range(0, number, 57):
                pool.prefix.match(text, b"tenant %d" % other)
            look(pool)
    for handle in kept:
        tried(pool.step, plan, [handle], 2)
        if plan.is_pending:
            pool.done(plan)
            pool.prefix.commit(handle, text[: pool.num_tokens(handle)])
        told(pool, [handle])
    for number in range(3400):
        if number % 40 == 3 or number % 25 == 7:
            pool.prefix.match(text, b"tenant %d" % number)
    pool.prefix.stats()
    look(pool)
    pool.prefix.flush()
    told(pool, kept, text)
    pool.shutdown()


@scenario
def sequences_cut_off_by_a_flush(Pool: Any, Plan: Any) -> None:
    """Opened before a flush, committed behind it; children and namesakes of such a sequence."""
    for size, when, name in itertools.product((1, 3), range(4), (None, b"", b"a")):
        pool = Pool(60, size, max_seqs=9, prefix_cache=True)
        plan = Plan(pool, 4, 60, formats=("block_tables",))
        text = np.arange(6 * size, dtype=np.int32)
        row = pool.open(text, b"a")
        for turn in range(4):
            if turn == when:
                pool.prefix.flush(name)
            grown(pool, plan, [row], size + (turn == 3))
            pool.prefix.commit(row, text[turn * size : (turn + 1) * size])
            told(pool, [row], text)
            pool.prefix.match(text, b"a")
        (child,) = pool.fork(row).tolist()
        fresh = pool.open(text, b"a")
        grown(pool, plan, [child, fresh], size)
        tried(pool.prefix.commit, fresh, text[pool.prefix.committed(fresh) : pool.num_tokens(fresh)])
        tried(pool.prefix.commit, child, text[4 * size : 5 * size])
        pool.prefix.match(text, b"a")
        told(pool, [row, child, fresh], text)
        pool.truncate([row, child], [size, 2 * size + 1])
        told(pool, [row, child, fresh])
        grown(pool, plan, [child], size)
        tried(pool.prefix.commit, child, text[pool.prefix.committed(child) : pool.num_tokens(child)])
        pool.close([row, child])
        pool.prefix.match(text, b"a")
        pool.blocks.evict(3)
        told(pool, [fresh], text)
        pool.prefix.match(text, b"a")
        pool.close(fresh)
        for other in (b"", b"b", b"a", b"", None):
            pool.prefix.flush(other)
            told(pool, [], text)
        pool.shutdown()


@scenario
def tails_that_are_cut_and_told_again(Pool: Any, Plan: Any) -> None:
    """Truncated into full and half-known blocks, with children before and after; then other tokens."""
    for size in (2, 4):
        text = np.arange(5 * size, dtype=np.int32)
        for known, length, forked in itertools.product(
            (size - 1, 2 * size, 3 * size - 1, 3 * size + 1),
            (0, 1, size, 2 * size - 1, 2 * size, 3 * size - 2, 3 * size),
            (0, 1, 2),
        ):
            pool = Pool(40, size, max_seqs=6, prefix_cache=True)
            plan, late = (Plan(pool, 4, 40, formats=("block_tables", "slot_mapping")) for _ in range(2))
            rows = [pool.open()]
            grown(pool, plan, rows, 4 * size - 1)
            pool.prefix.commit(rows[0], text[:known])
            if forked == 1:
                rows += pool.fork(rows[0]).tolist()
            tried(pool.truncate, rows[0], length)
            if forked == 2:
                rows += pool.fork(rows[0]).tolist()
            told(pool, rows, text)
            pool.step(late, rows, size)
            for row in rows:
                start = pool.prefix.committed(row)
                tried(pool.prefix.commit, row, text[start : start + size] + 1)
                told(pool, [row])
            pool.done(late)
            look(pool, late)
            for row in rows:
                start = pool.prefix.committed(row)
                tried(pool.prefix.commit, row, text[start : pool.num_tokens(row)] + (row == rows[0]))
            told(pool, rows, text, text + 1)
            pool.close(rows)
            told(pool, rows, text, text + 1)
            pool.shutdown()


@scenario
def prompts_that_do_not_fit(Pool: Any, Plan: Any) -> None:
    """Refused, whatever of them is cached: the refusal says what is free, and what could be evicted besides."""
    for size, cached, held in itertools.product((1, 3), (0, 1, 4), (0, 1, 3)):
        pool = Pool(9, size, max_seqs=4, prefix_cache=True, watermark=1)
        plan = Plan(pool, 2, 9 * size, formats=("block_tables",))
        text = np.arange(8 * size, dtype=np.int32)
        row = pool.open(4 * size)
        grown(pool, plan, [row], 4 * size)
        pool.prefix.commit(row, text[: 4 * size])
        pool.close(row)
        other = pool.open(held * size)
        for length in range(4 * size, 8 * size + 1):
            prompt = text[:length].copy()
            prompt[cached * size :] += 1
            for call in (pool.open, pool.prefix.pin):
                handle = tried(call, prompt)
                if handle is not None:
                    pool.close(handle)
                look(pool)
        while tried(pool.open, text[:size]) is not None:
            look(pool)
        tried(pool.open, text)
        told(pool, [other], text)
        pool.shutdown()


@scenario
def closed_later_than_asked(Pool: Any, Plan: Any) -> None:
    """Many closes that wait for the next call, and are told to all kinds of calls."""
    for n, cached in itertools.product((1, 15, 16, 17, 40), (False, True)):
        pool = Pool(100, 2, max_seqs=50, prefix_cache=cached)
        plan = Plan(pool, 4, 20, formats=("block_tables",))
        for call in (
            pool.stats,
            pool.blocks.drain_evicted,
            lambda p=pool: p.open(3),
            lambda p=pool: p.blocks.evict(1),
            pool.reset,
        ):
            rows = [pool.open(1 + k % 3) for k in range(n)]
            grown(pool, plan, rows[:3], 1)
            for row in rows[::-1]:
                tried(pool.defer_close, row)
                tried(pool.defer_close, row)
            tried(call)
            told(pool, rows[:4])
            more = [tried(pool.open) for _ in range(5)]
            told(pool, more)
            tried(pool.close, [row for row in more if row is not None])
            look(pool)
        pool.shutdown()


@scenario
def pools_that_nobody_shuts_down(Pool: Any, Plan: Any) -> None:
    """What they hold goes with them: tables, an index with events, a ring of calls, closes that wait."""
    for cached, pending in itertools.product((False, True), (False, True)):
        pool = Pool(20, 2, max_seqs=5, prefix_cache=cached, events=9 * cached)
        plan = Plan(pool, 2, 9)
        rows = [pool.open(3, b"a" * cached), pool.open(1)]
        grown(pool, plan, rows, 2)
        if cached:
            pool.prefix.commit(rows, np.arange(4, dtype=np.int32))
        pool.step(plan, rows, 1) if pending else pool.defer_close(rows[0])
        drop(plan)
        drop(pool)


@core_only
def numbers_of_nodes(Pool: Any, Plan: Any) -> None:
    """Near the last number that a node may have."""
    pool = Pool(20, 2, max_seqs=5, prefix_cache=True, events=9)
    plan = Plan(pool, 2, 9)
    for uid in (7, 1, -1, 2**32 + 5, 2**63 - 9, 2**63):
        tried(pool.prefix._set_next_uid, uid)
        row = pool.open(np.arange(5, dtype=np.int32), b"%d" % (uid & 3))
        grown(pool, plan, [row], 5 - pool.num_tokens(row))
        pool.prefix.commit(row, np.arange(pool.prefix.committed(row), 5, dtype=np.int32))
        pool.close(row)
        told(pool, [], np.arange(5, dtype=np.int32))
        pool.prefix.events()
    pool.shutdown()


@core_only
def prompts_in_turn(Pool: Any, Plan: Any) -> None:
    """Opened, pinned, matched, committed, flushed: in rings that hold all of it, or the last half, or nothing."""
    pool = Pool(60, 2, max_seqs=12, prefix_cache=True)
    plan = Plan(pool, 4, 60, formats=("block_tables",))
    for n, name in itertools.product((0, 1, 7, 20), (b"", b"abc", b"a longer name")):
        text = np.arange(n, dtype=np.int32) * 3
        row = pool.open(text, name)
        if n:
            grown(pool, plan, [row], n - pool.num_tokens(row))
            pool.prefix.commit(row, text[pool.prefix.committed(row) :])
        pins = [tried(pool.prefix.pin, text, name), tried(pool.open, 3)]
        pool.prefix.match(text, name)
        rows = [row, *pool.fork(row, 2).tolist()]
        grown(pool, plan, rows, 3)
        pool.prefix.commit(rows, np.arange(9, dtype=np.int32), None if n % 2 else [3, 3, 3])
        for handle in rows:
            pool.defer_close(handle)
        pool.prefix.flush(name) if n % 2 else None
        pool.close([handle for handle in pins if handle is not None])
        pool.blocks.evict(3)
    pool.prefix.flush()
    pool.prefix.flush(b"nobody")
    pool.shutdown()
