"""Programs at the ends of arrays: where one is used to its last place, what lies beside it is out of reach.

The build of the mutants has pages beside each array that nobody may touch (guarded.h): a mutant that goes on reading
dies. An array of whole pages is guarded before its first place too, so sizes here are such that arrays fill pages.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from proof.mutation.scenarios import CORE_ONLY, FORMATS, SCENARIOS, core_only, grown, look, prompts, scenario, tried

__all__ = ["CORE_ONLY", "SCENARIOS"]  # with the programs of this module on them

PAGE = 4096 // 4  # int32 in a page


@scenario
def every_cached_block_taken_in_one_call(Pool: Any, Plan: Any) -> None:
    """All nodes are forgotten at once: the list of them is full, and shorter or longer than what is fetched ahead."""
    for blocks in (1, 7, 8, 9, 15, 16, 17, 40, PAGE):
        pool = Pool(blocks, 1, max_seqs=2, prefix_cache=True, reserved_blocks=0)
        plan = Plan(pool, 1, blocks, formats=("block_tables",))
        text = np.arange(blocks, dtype=np.int32)
        for turn in range(2):
            prompts(pool, plan, [text + turn])
        pool.prefix.match(text)
        pool.prefix.stats()
        look(pool)
        pool.shutdown()


@scenario
def sequences_as_long_as_they_may_be(Pool: Any, Plan: Any) -> None:
    """Tables filled to their ends, those of the first and of the last sequence too, block by block."""
    for seqs, blocks, size in ((1, 8, 2), (8, PAGE // 8, 1), (2, 6, 4)):
        pool = Pool(seqs * blocks + 1, size, max_seqs=seqs, max_blocks_per_seq=blocks, prefix_cache=True)
        plan = Plan(pool, seqs, seqs * blocks * size, formats=FORMATS)
        text = np.arange(blocks * size, dtype=np.int32)
        rows = [pool.open(text + 7 * row) for row in range(seqs)]
        for first, last in ((0, 1), (1, size), (size, 2 * size), (2 * size, blocks * size)):
            if first == last:
                continue
            grown(pool, plan, rows, last - first)
            for at, row in enumerate(rows):
                pool.prefix.commit(row, text[first:last] + 7 * at)
                look(pool)
        tried(pool.step, plan, rows, 1)
        tried(pool.reserve, plan, rows, 1)
        for row in rows:
            tried(pool.step, plan, [row], [1])
        pool.truncate(rows, [0, blocks * size - 1][:seqs] + [size] * (seqs - 2))
        grown(pool, plan, rows[1:2], 1)
        pool.close(rows)
        look(pool)
        pool.shutdown()


@scenario
def forks_of_a_block_that_is_half_known(Pool: Any, Plan: Any) -> None:
    """A fork goes on where its parent's commit ended, within a block."""
    for known in range(9):
        pool = Pool(20, 8, max_seqs=6, prefix_cache=True)
        plan = Plan(pool, 4, 40, formats=("block_tables",))
        text = np.arange(40, 57, dtype=np.int32)
        if known % 2:
            pool.open()
        row = pool.open()
        grown(pool, plan, [row], 8)
        pool.prefix.commit(row, text[:known])
        rows = [row, *pool.fork(row, 2).tolist()]
        grown(pool, plan, rows, 8)
        for at, fork in enumerate(rows):
            pool.prefix.commit(fork, np.concatenate([text[known:9], text[9:16] + at]))
            look(pool)
        pool.prefix.match(text)
        pool.close(rows)
        pool.prefix.match(text)
        pool.blocks.evict(3)
        pool.prefix.match(text)
        look(pool)
        pool.shutdown()


@scenario
def reset_of_high_blocks(Pool: Any, Plan: Any) -> None:
    """What pending steps hold back on blocks of high numbers is gone, as that on low ones."""
    pool = Pool(90, 4, max_seqs=10)
    plan, other = (Plan(pool, 9, 60, formats=("block_tables",)) for _ in range(2))
    for _ in range(2):
        pool.blocks.alloc(70)
        rows = [pool.open() for _ in range(2)]
        grown(pool, plan, rows, 3)
        forks = [*pool.fork(rows[0], 2).tolist(), *pool.fork(rows[1], 2).tolist()]
        pool.step(plan, [*rows, *forks], 1)
        pool.step(other, forks, 2)
        pool.reset()
        look(pool)
    pool.shutdown()


@scenario
def rows_that_show_what_is_no_more(Pool: Any, Plan: Any) -> None:
    """A row is shown again after its growth was rolled back, and after its plan forgot it, with no new token."""
    for kv in (None, 16):
        pool = Pool(30, 2, max_seqs=4)
        plan, other = (Plan(pool, 4, 20, formats=FORMATS, kv_width=kv) for _ in range(2))
        rows = [pool.open() for _ in range(3)]
        for new in (0, 3, 1):
            for _ in range(2):
                grown(pool, plan, rows, new if _ == 0 else 0)
                plan.bind()
        for first in (plan, other):
            for new in (5, [0, 4, 1], [1, 2, 6]):
                pool.step(first, rows, new)
                look(pool, first)
                pool.rollback(first)
                look(pool, first)
                grown(pool, plan, rows, 0)
                grown(pool, other, rows[::-1], 0)
        twins = pool.fork(rows[0], 1).tolist()
        for new in (1, 3):
            pool.step(plan, [rows[0], *twins], new)
            look(pool, plan)
            pool.rollback(plan)
            grown(pool, plan, [rows[0], *twins], 0)
        pool.shutdown()


@scenario
def formats_alone(Pool: Any, Plan: Any) -> None:
    """Plans with one format each, and with all but one."""
    for formats in [(name,) for name in FORMATS] + [tuple(set(FORMATS) - {name}) for name in FORMATS]:
        pool = Pool(60, 2, max_seqs=5)
        plan = Plan(pool, 4, 20, formats=sorted(formats, key=FORMATS.index))
        rows = [pool.open() for _ in range(4)]
        for new in (1, [0, 2, 0, 3], 1, 0):
            grown(pool, plan, rows, new)
        pool.step(plan, rows[:2], 1, pad_to=(4, 20))
        look(pool, plan)
        pool.rollback(plan)
        grown(pool, plan, rows[1:], 0)
        pool.shutdown()


@scenario
def fewer_rows_with_several_tokens(Pool: Any, Plan: Any) -> None:
    """What a plan noted of its last step stands behind what it notes of this one."""
    pool = Pool(20, 16, max_seqs=3)
    plan = Plan(pool, 3, 30, formats=FORMATS)
    rows = [pool.open() for _ in range(3)]
    for new in ([3, 3, 3], [3, 1, 1], [0, 0, 2], [2, 1, 1], [1, 3, 1], [0, 2, 0], [0, 1, 1]):
        grown(pool, plan, rows, new)
    pool.shutdown()


@core_only
def calls_without_rows(Pool: Any, Plan: Any) -> None:
    """A step of no sequence is a call all the same; a batch of none says so."""
    pool = Pool(40, 2, max_seqs=6)
    plan = Plan(pool, 4, 20, formats=("block_tables",))
    for new in ([], 0, 1):
        tried(pool.step, plan, [], new)
        if plan.is_pending:
            pool.done(plan)
        row = pool.open()
        grown(pool, plan, [row], 3)
        tried(pool.truncate, [], new)
        pool.close_finished([row], [False])
        pool.close([])
        pool.blocks.incref(np.empty(0, np.int32))
    pool.shutdown()


@core_only
def calls_with_many_rows(Pool: Any, Plan: Any) -> None:
    """Steps, shortenings and ends of few and of many rows, from one reset to the next."""
    pool = Pool(300, 2, max_seqs=70)
    plan = Plan(pool, 70, 200, formats=("block_tables",))
    rows = pool.blocks.alloc(70)
    for n in (1, 3, 1, 2, 66):
        handles = [pool.open(size) for size in (0, 3, 150)[: 1 + n % 3]] + pool.fork(pool.open(2), n).tolist()
        for new in (1, [1] * (len(handles) - 1) + [2], 1, 0):
            pool.step(plan, handles, new)
            pool.done(plan)
        pool.truncate(handles, [0] * len(handles))
        pool.close(handles)
        pool.close_finished([pool.open(1), pool.open(5)], [True, False])
        pool.blocks.incref(rows[:n])
        pool.blocks.decref(rows[:n])
        pool.blocks.incref(int(rows[0]))
        pool.reset()
        rows = pool.blocks.alloc(70)
    pool.shutdown()


@scenario
def arguments_at_their_ends(Pool: Any, Plan: Any) -> None:
    """The largest and the smallest that a call takes, and those one beyond."""
    pool = Pool(6, 4, max_seqs=3, reserved_blocks=0)
    ids = pool.blocks.alloc(6)
    look(pool)
    tried(pool.blocks.decref, ids[:4][::2])
    tried(pool.blocks.decref, [5, -1])
    pool.blocks.decref(ids)
    look(pool)
    for count in (6, 7, 2**63 - 2, 2**63 - 1):
        tried(pool.blocks.free_order, count)
        taken = tried(pool.blocks.take, count)
        if taken is not None:
            pool.blocks.decref(taken[0])
        look(pool)
    for wrong in (-(2**63), 2**63 - 1):
        tried(pool.close, [np.int64(wrong)])
    pool.shutdown()
    pool = Pool(6, 4, max_seqs=3, prefix_cache=True)
    plan = Plan(pool, 2, 8)
    row = pool.open()
    grown(pool, plan, [row], 4)
    for tokens in ([0x7FFFFFFF, -1], [0x7FFFFFFF, 1 << 31], [-1, 0x7FFFFFFF]):
        tried(pool.prefix.commit, row, tokens)
    pool.prefix.commit(row, [0x7FFFFFFF, 0, 1, 2])
    look(pool)
    pool.shutdown()


@scenario
def all_blocks_of_a_pool(Pool: Any, Plan: Any) -> None:
    """The first of all is taken by itself; later all of them lost what they held, and nobody was told."""
    pool = Pool(4, 4, max_seqs=2, reserved_blocks=0)
    blocks = pool.blocks
    for _ in range(4):
        blocks.alloc()
        look(pool)
    tried(blocks.alloc)
    for _ in range(2):
        blocks.mark_cached([0, 1, 2, 3])
        blocks.free([0, 1, 2, 3])
        blocks.alloc(4)
        look(pool)
        blocks.drain_evicted()
        tried(blocks.refcounts, [99])
        tried(blocks.refcounts, [])
    pool.shutdown()


@scenario
def lengths_that_pass_a_plan_in_low_slots(Pool: Any, Plan: Any) -> None:
    """A sequence that is too long for a plan is so where its last block is one of the first, too."""
    pool = Pool(12, 4, max_seqs=3)
    low, row = (pool.open() for _ in range(2))
    plan, narrow = Plan(pool, 2, 12), Plan(pool, 2, 8, formats=("kv_slots",), kv_width=9)
    grown(pool, plan, [low, row], [3, 8])
    pool.close(low)
    for _ in range(3):
        tried(pool.step, narrow, [row], 1)
        look(pool, narrow)
        if narrow.is_pending:
            pool.done(narrow)
    tried(pool.can, [row, row], [2**40, -1])
    tried(pool.can, [row, pool.open()], [2**40, -1])
    for tokens, padded in ((11, 12), (12, 11), (13, 11)):
        tried(pool.step, plan, [pool.open()], tokens, pad_to=(2, padded))
        if plan.is_pending:
            pool.rollback(plan)
        pool.reset()
    pool.shutdown()


@scenario
def oldest_blocks_named_wrongly_while_a_step_is_pending(Pool: Any, Plan: Any) -> None:
    """What is wrong with the first block is said before what is wrong with the moment."""
    pool = Pool(12, 4, max_seqs=3)
    plan = Plan(pool, 2, 8)
    mine = pool.blocks.alloc(3)
    row = pool.open()
    pool.step(plan, [row], 3)
    for ids in ([99, mine[0]], [mine[0], 99], [mine[1]], [-1], mine):
        tried(pool.blocks.release, ids, oldest=True)
        look(pool)
    pool.done(plan)
    tried(pool.blocks.release, mine, oldest=True)
    look(pool)
    pool.shutdown()


@core_only
def what_only_the_core_has_at_its_ends(Pool: Any, Plan: Any) -> None:
    """Arrays that no memory holds, slots that are open, the index's bytes with events."""
    pool = Pool(6, 4, max_seqs=3, prefix_cache=True, events=5)
    pool.prefix.stats()
    for width in (1 << 40, (1 << 40) - 1):
        tried(Plan, pool, 1 << 20, kv_width=width, dtype="int64", formats=("kv_slots",))
    pool.open()
    for slot in (0, 1, 3):
        tried(pool._set_generation, slot, 7)
        look(pool)
    pool.shutdown()
