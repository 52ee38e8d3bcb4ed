"""Programs about steps that are pending: how many of them end, what is known of their copies, who binds arrays then.

Each goes on after what it is about: sequences are truncated, committed and looked for, so that what was lost is missed.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import numpy as np

from proof.mutation.evictions import ended, measured
from proof.mutation.prefixes import CORE_ONLY, SCENARIOS
from proof.mutation.scenarios import FORMATS, core_only, grown, look, prompts, scenario, tried

__all__ = ["CORE_ONLY", "SCENARIOS"]  # with the programs of this module on them


def told_again(pool: Any, plan: Any, row: int, text: np.ndarray, cut: int, step: bool = True) -> None:
    """Truncate a sequence into a block that was replaced, compute the rest of it anew, and tell that."""
    tried(pool.truncate, row, cut)
    if tried(pool.prefix.committed, row) is None or pool.prefix.committed(row) > cut:
        return
    tried(pool.step, plan, [row], len(text) - pool.num_tokens(row))
    ended(pool, plan, "done")
    tried(pool.prefix.commit, row, text[pool.prefix.committed(row) :])
    look(pool)


def hits(pool: Any, texts: list[np.ndarray]) -> None:
    """How much of each text is found, with each beginning of one and rest of another."""
    for text, other in itertools.product(texts, repeat=2):
        for cut in range(0, len(text) + 1, 3):
            pool.prefix.match(np.concatenate([text[:cut], other[cut:], text[:1]]))


@scenario
def known_tokens_of_copies_taken_back(Pool: Any, Plan: Any) -> None:
    """Copies are told what their sources were not, and rolled back: the sources know it, as far as they may.

    The first sequence, the last, or several get copies; their parent is told the same before, afterwards or never.
    """
    for who, first, told, how in itertools.product(
        ([0], [2], [0, 1], [1, 0, 2]), (0, 1, 2), ("before", "after", "never"), ("rollback", "done", "closed", "young")
    ):
        copies_told(Pool, Plan, who, first, told, how)


@scenario
def known_tokens_of_copies_against_their_sources(Pool: Any, Plan: Any) -> None:
    """A copy is told other tokens than its source, which is committed: the source keeps its own."""
    for who, first in itertools.product(([0], [2], [1, 0, 2]), (0, 1, 2)):
        copies_told(Pool, Plan, who, first, "against", "rollback")


def copies_told(Pool: Any, Plan: Any, who: list[int], first: int, told: str, how: str) -> None:
    """The sequences `who` of four get copies behind `first` blocks, which are told tokens while they are pending."""
    size = 4
    text = np.arange(30, 30 + 3 * size + 2, dtype=np.int32)
    other = text + np.where(np.arange(len(text)) >= size + 1, 40, 0).astype(np.int32)
    said = other if told == "against" else text
    pool = Pool(80, size, max_seqs=8, prefix_cache=True, events=200)
    plan, side = Plan(pool, 6, 60, formats=("block_tables",)), Plan(pool, 6, 60, formats=("block_tables",))
    parent = pool.open()
    grown(pool, plan, [parent], len(text))
    rows = [parent, *pool.fork(parent, 3).tolist()]
    if told in ("before", "against"):
        pool.prefix.commit(rows[3], text[: (first + 1) * size])
    batch = [rows[k] for k in who]
    tried(pool.unshare, plan, batch, 3 * size, first * size)
    look(pool, plan)
    for row in batch:
        tried(pool.prefix.commit, row, said[pool.prefix.committed(row) : 3 * size + 1])
        look(pool)
    if how == "closed":
        pool.close(batch[:1])
    if how == "young":
        young = pool.fork(batch[0], 1).tolist()
        tried(pool.rollback, plan)
        pool.close(young)
    ended(pool, plan, "done" if how == "done" else "rollback")
    measured(pool, rows)
    for at, row in enumerate(batch):
        told_again(pool, side, row, (text, other, text)[at], first * size + 1 + at)
    if told == "after":
        tried(pool.prefix.commit, rows[3], text[: 3 * size])
    hits(pool, [text, other])
    for at, row in enumerate(batch):
        told_again(pool, side, row, text, size * 2 + 3)
        told_again(pool, side, row, (other, text, other)[at], 2 + at)
    for row in rows:
        tried(pool.close, row)
    hits(pool, [text, other])
    prompts(pool, side, [text, other])
    pool.prefix.events()
    pool.shutdown()


@scenario
def known_tokens_of_copies(Pool: Any, Plan: Any) -> None:
    """Known blocks are copied, for one row and for several; a copy is truncated, and told how it goes on."""
    for size, first, in_order in itertools.product((2, 4), (0, 1, 2), (False, True)):
        text = np.arange(9, 9 + 4 * size + 1, dtype=np.int32)
        other = text[::-1].copy()
        pool = Pool(90, size, max_seqs=8, prefix_cache=True, in_order=in_order)
        plan, side = Plan(pool, 6, 80, formats=("block_tables",)), Plan(pool, 6, 80, formats=("block_tables",))
        rows = []
        for of in (text, other):
            row = pool.open()
            pool.step(side, [row], len(of))
            ended(pool, side, "done")
            pool.prefix.commit(row, of)
            rows += [row, *pool.fork(row, 2).tolist()]
        for batch, keep in (([rows[1]], 2 * size + 1), ([rows[5], rows[2], rows[4]], 4 * size)):
            tried(pool.unshare, plan, batch, keep, first * size)
            look(pool, plan)
            ended(pool, plan, "done")
        for cut in (first * size + size - 1, first * size + 1):
            for at, of in ((1, text), (5, other), (2, text), (4, other)):
                given = of.copy()
                given[cut:] += 7 + at
                told_again(pool, side, rows[at], given, cut)
                hits(pool, [text, other, given])
        pool.close(rows)
        hits(pool, [text, other])
        pool.shutdown()


@scenario
def many_plans_that_pass_at_once(Pool: Any, Plan: Any) -> None:
    """All wait for the oldest; then all are pending again when the pool is reset, and when it ends."""
    for count in (2, 7, 8, 9, 16, 17, 40):
        pool = Pool(200, 2, max_seqs=12)
        plans = [Plan(pool, 3, 6, formats=("block_tables", "seq_lens")) for _ in range(count)]
        rows = [pool.open() for _ in range(3)]
        for turn in range(2):
            for at, plan in enumerate(plans):
                pool.step(plan, rows, [at % 2, 1, 0])
            pool.close(pool.fork(rows[0], 2).tolist())
            for plan in plans[:0:-1]:
                pool.done(plan)
                tried(pool.done, plan)
                tried(pool.rollback, plan)
            look(pool, *plans)
            if turn:
                late = Plan(pool, 3, 6)
                pool.step(late, rows[:1], 1)
                tried(pool.done, plans[1])
                pool.rollback(late)
            pool.done(plans[0])
            look(pool, *plans)
            tried(pool.done, plans[0])
            tried(pool.rollback, plans[-1])
        for plan in plans:
            pool.step(plan, rows, 0)
        for plan in plans[-2:]:
            tried(pool.rollback, plan)
        pool.step(plans[0] if not plans[0].is_pending else plans[-1], rows, 1)
        pool.reset()
        look(pool, *plans)
        fresh = [pool.open(7), pool.open(5)]
        pool.close(fresh[0])
        whole = pool.open(2 * (199 - 3))
        pool.table(whole)
        tried(pool.open, 1)
        pool.close([fresh[1], whole])
        rows = [pool.open(1) for _ in range(3)]
        for plan in plans:
            pool.step(plan, rows[:2], 1, pad_to=(3, 3))
            look(pool, plan)
        pool.reset()
        rows = [pool.open(1) for _ in range(3)]
        for plan in plans[:3]:
            pool.step(plan, rows[:1], 1, pad_to=(3, 3))
            look(pool, plan)
        pool.close(rows)
        pool.shutdown()
        for plan in plans:
            _ = plan.is_pending
            tried(pool.done, plan)


def every_call(pool: Any, plan: Any, row: int, side: int) -> list[Callable[[], Any]]:
    """Calls about two sequences, or about all."""
    text = np.arange(5, dtype=np.int32)
    calls: list[Callable[[], Any]] = [
        lambda: pool.can([row], 1),
        lambda: pool.can([side, row], [60, 1]),
        lambda: pool.can([side], 110),
        lambda: pool.step(plan, [row], 1),
        lambda: pool.step(plan, [side], 100),
        lambda: pool.reserve(plan, [row], [1]),
        lambda: pool.unshare(plan, [row], 1),
        lambda: pool.compact(row, 1),
        lambda: pool.evict_blocks(row, [0]),
        lambda: pool.truncate(row, 1),
        lambda: pool.fork(row, 1),
        lambda: pool.close(row),
        lambda: pool.close_finished([row], np.ones(1, np.bool_)),
        lambda: pool.table(row),
        lambda: pool.num_tokens(row),
        lambda: pool.kv_len(row),
        lambda: pool.capacity(row),
        lambda: pool.is_open(row),
        lambda: pool.open(110),
        lambda: pool.open(text),
        lambda: pool.blocks.evict(1),
        lambda: pool.reset(),
        lambda: pool.blocks.refcount(1),
        lambda: pool.blocks.alloc(59),
        lambda: pool.blocks.num_blank,
        lambda: pool.stats(),
        lambda: pool.blocks.refcount_histogram(),
        lambda: pool.digest(),
        lambda: pool.fingerprint(),
        lambda: pool.check(),
    ]
    if pool.prefix is None:
        return calls
    return [
        *calls,
        lambda: pool.prefix.commit(row, text[:1]),
        lambda: pool.prefix.committed(row),
        lambda: pool.prefix.pin(text),
        lambda: pool.prefix.match(text),
        lambda: pool.prefix.flush(),
        lambda: pool.prefix.stats(),
        lambda: pool.prefix.events(),
    ]


@scenario
def calls_behind_a_deferred_close(Pool: Any, Plan: Any) -> None:
    """The sequence is closed at the beginning of whatever call comes next, which judges what is left."""
    for cached in (False, True):
        pool = Pool(60, 2, max_seqs=6, prefix_cache=cached)
        plan, spare = Plan(pool, 3, 20), Plan(pool, 3, 20)
        for number in range(37 if cached else 30):
            pool.reset()
            row, side = pool.open(5), pool.open(3)
            pool.step(spare, [row, side], 5)
            pool.done(spare)
            pool.defer_close(row)
            tried(every_call(pool, plan, row, side)[number])
            if plan.is_pending:
                look(pool, plan)
                pool.rollback(plan)
            look(pool)
            tried(pool.table, side)
            tried(pool.open, 90)
        for how in ("done", "rollback"):
            pool.reset()
            row = pool.open(5)
            pool.step(spare, [row], 3)
            pool.defer_close(row)
            getattr(pool, how)(spare)
            look(pool)
            tried(pool.open, 110)
        pool.defer_close(pool.open(3))
        pool.shutdown()


@scenario
def batches_with_memory_of_their_own(Pool: Any, Plan: Any) -> None:
    """More rows than arguments hold without memory of their own: each call that takes a batch, right and refused."""
    pool = Pool(900, 2, max_seqs=40, prefix_cache=True)
    plan, other = Plan(pool, 30, 90, formats=("block_tables",)), Plan(pool, 30, 300, formats=("seq_lens",))
    rows = [pool.open() for _ in range(30)]
    ones, text = [1] * 30, np.arange(90, dtype=np.int32)
    for new in ([3] * 30, ones, [*ones[:-1], -1], [*ones[:-1], 1 << 40]):
        tried(pool.can, rows, new)
        tried(pool.step, plan, rows, new)
        ended(pool, plan, "done")
        tried(pool.reserve, other, rows, new)
        ended(pool, other, "rollback")
    tried(pool.can, [*rows, rows[0]], 1)
    tried(pool.prefix.commit, rows, text, [3] * 30)
    tried(pool.prefix.commit, rows, text[:60], [2] * 30)
    tried(pool.prefix.commit, rows, text[:30])
    for lens in ([1] * 30, [2] * 29, [2] * 29 + [9]):
        tried(pool.unshare, plan, rows, lens)
        ended(pool, plan, "done")
        tried(pool.truncate, rows, lens)
        tried(pool.compact, rows, lens)
    tried(pool.step, plan, [*rows, 3], 1)
    tried(pool.close_finished, rows, np.arange(30) < 29)
    tried(pool.close, rows)
    tried(pool.close, rows[29:])
    tried(pool.step, plan, [3] * 31, 1)
    long = pool.open(text)
    tried(pool.step, other, [long], 90)
    ended(pool, other, "done")
    tried(pool.prefix.commit, long, text)
    pool.prefix.match(text)
    pool.close(pool.prefix.pin(text))
    tried(pool.evict_blocks, long, list(range(40)))
    tried(pool.evict_blocks, long, list(range(40, -1, -1)))
    look(pool, plan, other)
    pool.shutdown()


@scenario
def copies_of_nothing(Pool: Any, Plan: Any) -> None:
    """Blocks that were reserved are shared by forks: a row that gets there takes new ones, and copies only tokens."""
    for size, how, many in itertools.product((1, 4), ("done", "rollback"), (1, 3)):
        pool = Pool(60, size, max_seqs=8)
        plan, other = (Plan(pool, 6, 60, formats=FORMATS) for _ in range(2))
        parent = pool.open(5 * size)
        grown(pool, plan, [parent], size + (size > 1))
        children = pool.fork(parent, many).tolist()
        pool.blocks.mark_cached(pool.table(parent)[3:])  # an engine may say so of what it has not filled
        pool.step(plan, children, 2 * size + 1)
        look(pool, plan)
        pool.fingerprint()
        pool.reserve(other, [parent], 3 * size)
        look(pool, other)
        pool.fingerprint()
        pool.blocks.mark_cached(pool.table(parent)[1:4])  # copies of a step that may be taken back
        pool.blocks.drain_evicted()
        pool.close(children[1:])
        look(pool)
        ended(pool, other, how)
        ended(pool, plan, how)
        look(pool)
        for row in (parent, children[0]):
            grown(pool, plan, [row], 3)
        pool.check()
        pool.blocks.drain_evicted()
        pool.close([parent, children[0]])
        pool.blocks.drain_evicted()
        look(pool)
        pool.blocks.alloc(59)
        pool.shutdown()


@scenario
def copies_given_up_that_somebody_holds(Pool: Any, Plan: Any) -> None:
    """A step is rolled back whose copy somebody refers to: nothing will write the block any more."""
    for cached, closed in itertools.product((False, True), (False, True)):
        pool = Pool(20, 4, max_seqs=4, prefix_cache=cached)
        first, plan = (Plan(pool, 2, 8, formats=("block_tables",)) for _ in range(2))
        row = pool.open()
        pool.step(first, [row], 3)
        (child,) = pool.fork(row, 1).tolist()
        pool.step(plan, [child], 1)
        copy = int(pool.table(child)[0])
        pool.blocks.incref(copy)
        if closed:
            pool.close(child)
        pool.rollback(plan)
        look(pool, plan)
        pool.blocks.decref(copy)
        look(pool)
        pool.done(first)
        look(pool)
        pool.shutdown()


@scenario
def two_arguments_wrong(Pool: Any, Plan: Any) -> None:
    """Handles are read before counts, and what kind they are before how many there are."""
    pool = Pool(40, 2, max_seqs=8, prefix_cache=True)
    plan = Plan(pool, 3, 9)
    row = pool.open()
    grown(pool, plan, [row], 3)
    for handles, new in itertools.product(([row], [1.5], [2**64]), ([1], [1.5], [2**64], [1, 1])):
        for call in (pool.step, pool.reserve, pool.unshare):
            tried(call, plan, handles, new)
            ended(pool, plan, "rollback")
        for call in (pool.can, pool.truncate, pool.compact):
            tried(call, handles, new)
        tried(pool.prefix.commit, handles, new)
        tried(pool.prefix.commit, handles, [3], new)
    pool.shutdown()


@scenario
def rows_as_many_as_fill_pages(Pool: Any, Plan: Any) -> None:
    """Batches whose memory ends where a page ends; each row has one new token, or all but the last."""
    pool = Pool(1100, 2, max_seqs=1030)
    plan = Plan(pool, 1024, 2048, formats=("seq_lens", "slot_mapping"))
    rows = [pool.open() for _ in range(1024)]
    for n, kind in ((510, np.int64), (512, np.int64), (1020, np.int32), (1024, np.int32), (510, list)):
        for last in (1, 0):
            new = [*[1] * (n - 1), last]
            pool.step(plan, rows[:n], new if kind is list else np.array(new, kind))
            _ = plan.seq_lens, plan.slot_mapping
            pool.rollback(plan)
            tried(pool.can, rows[:n], new if kind is list else np.array(new, kind))
    pool.shutdown()


@scenario
def slots_to_the_last_of_32_bits(Pool: Any, Plan: Any) -> None:
    """int32 holds the slots of a pool of 2^31 - 1 tokens, not of one more."""
    for blocks, size in ((1, 2**31 - 1), (1, 2**31), (2, 2**30)):
        pool = tried(Pool, blocks, size, max_seqs=2, reserved_blocks=0)
        if pool is None:
            continue
        for name in ("slot_mapping", "seq_lens", "positions", "cu_q_lens"):
            plan = tried(Plan, pool, 1, 4, formats=(name,))
            if plan is not None:
                row = pool.open()
                grown(pool, plan, [row], 4)
                pool.close(row)
        pool.shutdown()


@core_only
def steps_on_the_same_rows(Pool: Any, Plan: Any) -> None:
    """Reservations, partial and padded steps, ends of each kind; the same rows again, and others."""
    pool = Pool(24, 2, max_seqs=8, prefix_cache=True)
    plan, other = Plan(pool, 6, 60, formats=("block_tables",)), Plan(pool, 6, 60, formats=("block_tables",))
    for turn in range(3):
        rows = [pool.open() for _ in range(5)]
        for new in (1, 2, [1, 1, 1, 1, 1], [1, 1, 1, 1, 30], 1):
            for batch in (rows, rows, rows[:1], rows[:1], rows[1:2], rows[:2], rows[:3:2], rows[::-1]):
                given = new if isinstance(new, int) else new[: len(batch)]
                for how in ("done", "rollback"):
                    tried(pool.reserve, other, batch, given)
                    tried(pool.step, plan, batch, given, partial=how == "done")
                    for every in (plan, other):
                        ended(pool, every, how)
        pool.step(plan, rows[:1], 0)
        tried(pool.unshare, other, rows[:2], [1, 0], turn)
        ended(pool, other, "rollback")
        for places in ([0], [0, 2], [0]):
            tried(pool.evict_blocks, rows[4], places)
        if turn:
            pool.close(rows)
        pool.reset()
    pool.shutdown()


@scenario
def floors_of_several_copies(Pool: Any, Plan: Any) -> None:
    """Copies of one block with as many tokens as its owner had then; who writes to it next has to know the longest."""
    for lengths in itertools.permutations((1, 2, 3)):
        for ends in itertools.product(("done", "rollback", ""), repeat=2):
            pool = Pool(60, 4, max_seqs=8)
            plans = [Plan(pool, 2, 20) for _ in range(4)]
            parent = pool.open()
            grown(pool, plans[3], [parent], 7)
            for plan, length in zip(plans, lengths, strict=False):
                tried(pool.truncate, parent, 4 + length)
                (child,) = pool.fork(parent, 1).tolist()
                pool.step(plan, [child], 1)
                look(pool, plan)
            for how, plan in zip(ends, (plans[2], plans[0]), strict=True):
                if how:
                    tried(getattr(pool, how), plan)
            pool.step(plans[3], [parent], 2)
            look(pool, plans[3])
            tried(pool.table, parent)
            pool.shutdown()


@scenario
def floors_where_nothing_is_pending(Pool: Any, Plan: Any) -> None:
    """Steps count as done at once: what an earlier copy read holds no later write back."""
    pool = Pool(60, 4, max_seqs=12, in_order=True)
    plan = Plan(pool, 4, 20)
    parent = pool.open()
    pool.step(plan, [parent], 7)
    for length in (7, 5, 6, 4):
        pool.step(plan, pool.fork(parent, 1), 1)
        look(pool, plan)
        tried(pool.truncate, parent, length)
        (twin,) = pool.fork(parent, 1).tolist()
        pool.step(plan, [twin, parent], 1)
        look(pool, plan)
        tried(pool.table, parent)
    pool.shutdown()


@scenario
def narrow_plans(Pool: Any, Plan: Any) -> None:
    """Contexts of one token; a width of contexts that no array has; handles of slots that are far away."""
    pool = Pool(40, 4, max_seqs=6, max_blocks_per_seq=6)
    rows = [pool.open() for _ in range(3)]
    for formats, kv in ((("seq_lens",), 1), (("kv_slots",), 1), (("kv_slots_ragged",), 2), (("slot_mapping",), 2)):
        plan = Plan(pool, 3, 12, formats=formats, kv_width=kv)
        _ = plan.limits
        for new in (1, [0, 2, 1], 3):
            tried(pool.step, plan, rows, new)
            look(pool, plan)
            if plan.is_pending:
                pool.rollback(plan)
    for bit in (3, 5, 8, 12, 16, 19):
        for wrong in (rows[0] ^ 1 << bit, rows[1] | 0xFFFFF):
            tried(pool.step, plan, [rows[2], wrong], 1)
            tried(pool.can, [rows[2], wrong], 1)
    grown(pool, plan, rows, 3)
    (child,) = pool.fork(rows[0], 1).tolist()
    for first in (2**63 - 1, 2**63 - 2):
        tried(pool.unshare, plan, [child, rows[0]], [3, 3], first)
        ended(pool, plan, "rollback")
        tried(pool.unshare, plan, [child], 1, first)
        ended(pool, plan, "done")
        tried(pool.compact, child, 3, first)
        tried(pool.compact, child, pool.kv_len(child) - 1, first)
    pool.shutdown()


#: What `_corrupt` can break, and one thing that it cannot.
BREAKABLE = (
    *("refcount", "raw", "hold", "floor", "blank", "next", "prev", "num_blank", "num_used", "num_shared", "lru"),
    *("limbo", "num_dropped", "table", "blocks", "length", "next_slot", "sum_tokens", "sum_blocks", "tail"),
    *("stop_slot", "num_open", "free_slot", "no such"),
)


@core_only
def states_that_are_broken_on_purpose(Pool: Any, Plan: Any) -> None:
    """Each number that can be broken, in each place; the check says what is wrong."""
    for what in BREAKABLE:
        for index in (0, 1, 2, 3, 4, 11, 12, -1):
            pool = Pool(12, 2, max_seqs=4)
            plan = Plan(pool, 3, 12, formats=("block_tables",))
            rows = [pool.open(3) for _ in range(2)]
            grown(pool, plan, rows, 1)
            pool.blocks.alloc(1)
            pool.step(plan, pool.fork(rows[0], 1), 1)
            try:
                pool._corrupt(what, index)
            except Exception:  # some of them do not exist in this pool; the recording has what was said
                pool.shutdown()
                continue
            try:
                pool.check()
            except Exception:  # a mutant may raise anything; the recording has it
                pool.shutdown()
                continue
            pool.shutdown()
