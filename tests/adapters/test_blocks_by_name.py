"""`Pool.blocks`: take, touch, release, mark_cached and uncache by name; what is taken next; what is refused."""

import subprocess
import sys

import numpy as np
import pytest

from kvpool import Group, Pool
from kvpool.errors import DoubleFree, OutOfBlocks, PoolClosed


def order(pool):
    return pool.blocks.free_order().tolist()


def cached(pool, ids):
    """These blocks cached and free, in this order of eviction."""
    pool.blocks.take(max(ids))
    pool.blocks.mark_cached(ids)
    pool.blocks.release([block for block in range(1, max(ids) + 1) if block not in ids])
    pool.blocks.release(ids)


def test_decode_rows_get_the_blocks_that_take_would_give(make_pool, make_plan):
    pool = make_pool(7)
    rows, plan = [pool.open() for _ in range(4)], make_plan(pool)
    cached(pool, [3, 1, 6])
    pool.blocks.take(2)
    due = order(pool)
    pool.step(plan, rows, 1)  # one token each: a steady batch
    assert due == [5, 3, 1, 6] and pool.stats().evictions == 3
    assert [pool.table(row).tolist() for row in rows] == [[block] for block in due]


def test_mark_of_an_evicted_block_is_refused_until_its_eviction_was_drained(make_pool, refused):
    pool = make_pool(3)
    cached(pool, [1, 2])
    pool.blocks.alloc(1)
    with refused(pool, ValueError, "mark_cached"):
        pool.blocks.mark_cached([1])
    pool.blocks.drain_evicted()
    pool.blocks.mark_cached([1])
    indexed = make_pool(7, prefix_cache=True)
    with refused(indexed, ValueError, "is_cached"):
        indexed.blocks.is_cached([1])


def test_block_uncached_in_place_is_given_to_a_sequence_and_not_told_again(make_pool, grow):
    pool = make_pool(4)
    cached(pool, [3, 1, 2])
    pool.blocks.uncache([3, 2], keep_place=True)
    handle = pool.open()
    grow(pool, handle, 9)
    assert pool.table(handle).tolist() == [3, 1, 2]
    assert pool.blocks.drain_evicted().tolist() == [1]  # the others were named by the caller
    pool.reset()
    assert pool.blocks.drain_evicted().tolist() == []


def test_evict_clears_a_block_uncached_in_place_without_a_note(make_pool):
    pool = make_pool(5)
    cached(pool, [1, 2])
    pool.blocks.uncache(1, keep_place=True)
    assert pool.blocks.evict(2) == 2 and order(pool) == [2, 1, 3, 4]
    assert pool.blocks.drain_evicted().tolist() == [2]


def test_uncache_in_place_of_held_blocks_and_of_those_in_limbo_makes_them_blank(make_pool, make_plan):
    pool = make_pool(6)
    plan = make_plan(pool)
    handle = pool.open()
    pool.blocks.take(3)
    pool.blocks.mark_cached([1, 2, 3])
    pool.step(plan, handle, 1)
    pool.blocks.release([1])
    pool.blocks.uncache([1, 2], keep_place=True)
    pool.blocks.release([2, 3])
    pool.done(plan)
    assert order(pool) == [2, 1, 5, 3]


def test_touch_of_blank_blocks_takes_none_that_a_pending_step_may_write(make_pool, make_plan, refused):
    pool = make_pool(6)
    plan = make_plan(pool)
    pool.blocks.take(2)
    handle = pool.open()
    pool.step(plan, handle, 1)
    pool.blocks.release([1])
    with refused(pool, ValueError, "touch", 1):
        pool.blocks.touch([4, 1], blank=True)
    pool.done(plan)
    pool.blocks.touch([4, 1], blank=True)


#: Prints the CPU seconds of 2,000 readings of `Pool.blocks.references`, and of an attribute of objects with slots.
READINGS = """
import gc, time
from kvpool import Group, Pool

class Block:
    __slots__ = ("refcount",)

    def __init__(self):
        self.refcount = 1

pool, n = Pool(2001, 1), 2000
ids, objects, references = pool.blocks.take(n)[0], [Block() for _ in range(n + 1)], pool.blocks.references

def of_the_pool():
    for block in ids:
        references[block]

def of_an_object():
    for block in ids:
        objects[block].refcount

best = {of_the_pool: 1e9, of_an_object: 1e9}
gc.disable()
for _ in range(600):  # in turn, for a CPU may slow down in between
    for call in best:
        start = time.process_time()
        call()
        best[call] = min(best[call], time.process_time() - start)
print(*best.values())
"""


def test_reading_one_reference_costs_what_an_attribute_of_a_block_costs():
    ratios = []
    for _ in range(8):  # where a process has its code and its objects costs up to a third: the best of several
        said = subprocess.run([sys.executable, "-c", READINGS], capture_output=True, text=True, check=True).stdout
        pool, block = map(float, said.split())
        ratios.append(pool / block)
        if ratios[-1] <= 1.3:
            break
    assert min(ratios) <= 1.3, ratios


def no_block(call):
    """What is no block, for a call with ids."""
    return [
        *((call, [1, stranger], {}, IndexError) for stranger in (-1, 7, 1 << 40)),
        *((call, nothing, {}, TypeError) for nothing in (1.5, None, "1", True, [1, 2.0])),
    ]


#: Of six blocks 1 is cached and in use, 2 and 3 are in use, 4 is blank, 5 is of a sequence, 6 is cached and free.
REFUSED = [
    *(row for call in ("touch", "mark_cached", "uncache", "release", "is_cached") for row in no_block(call)),
    *((call, [1, 2, 1], {}, ValueError) for call in ("touch", "mark_cached", "uncache")),  # stands twice
    *((call, [2, 4], {}, DoubleFree) for call in ("release", "mark_cached")),
    *(("release", [1, 2, 1], {}, DoubleFree), ("release", 5, {}, DoubleFree), ("mark_cached", 1, {}, ValueError)),
    *(("touch", ids, {}, IndexError) for ids in ([4, 99], [99, 4], np.array([4, 1, 7], np.int32))),
    ("touch", [1, 4], {}, ValueError),
    ("take", 2, {}, OutOfBlocks),
    *(
        (call, [1], {option: value}, TypeError)
        for call, option in (("touch", "blank"), ("uncache", "keep_place"))
        for value in (1, None, "yes")
    ),
]


@pytest.mark.parametrize(("call", "ids", "options", "error"), REFUSED)
def test_call_by_name_that_cannot_be_is_refused_and_changes_nothing(make_pool, refused, call, ids, options, error):
    pool = make_pool(7)
    pool.blocks.take(4)
    pool.open(4)
    pool.blocks.take(1)
    pool.blocks.mark_cached([1, 6])
    pool.blocks.release([4, 6])
    pool.blocks.uncache([4])  # a blank block holds nothing as it is
    if call == "take":
        pool.blocks.take(1)
    with refused(pool, error, call):
        getattr(pool.blocks, call)(ids, **options)


def test_refusal_names_the_row_of_the_caller_among_reserved_ids(make_pool, refused):
    pool = make_pool(6)
    pool.blocks.take(2)
    with refused(pool, ValueError, "touch", 2) as caught:
        pool.blocks.touch([0, 1, 0, 2, 2])
    assert "ids[4]" in str(caught.value)
    for call in (pool.blocks.touch, pool.blocks.mark_cached, pool.blocks.uncache, pool.blocks.release):
        call([0, 2, 1])
    assert [pool.blocks.references[block] for block in range(3)] == [0, 1, 1]


def test_references_are_those_of_now_and_refuse_what_is_no_block(make_pool, refused):
    pool = make_pool(6, reserved_blocks=2, groups=[Group.full(), Group.full(arena=1, num_blocks=9)])
    references = pool.blocks.references
    pool.blocks.take(2)
    pool.blocks.touch([2])
    handle = pool.open(4)
    assert [references[block] for block in range(6)] == [0, 0, 2, 1, 1, 0]
    assert references[np.int32(2)] == 2 and pool.blocks.arena(1).references[2] == 1
    pool.defer_close(handle)
    assert references[4] == 0
    for stranger in (-1, 6, 1 << 40, 1 << 70):
        with refused(pool, IndexError, "references"):
            references[stranger]
    for nothing in (1.5, None, "1", True, [1]):
        with refused(pool, TypeError, "references"):
            references[nothing]


def test_pending_step_keeps_released_blocks_in_limbo_in_the_order_named(make_pool, make_plan, refused):
    pool = make_pool(8)
    plan = make_plan(pool, 2, 8)
    handle = pool.open()
    pool.blocks.take(5)
    pool.blocks.mark_cached([1, 4, 5])
    pool.step(plan, [handle], 1)
    pool.blocks.release([4, 2, 1, 3, 5])
    assert order(pool) == [7]
    pool.blocks.uncache([5])
    pool.blocks.touch([4])  # out of limbo
    pool.done(plan)
    assert order(pool) == [5, 2, 3, 7, 1]


def test_pool_that_was_shut_down_refuses_every_call():
    pool = Pool(6, 1)
    blocks = pool.blocks
    pool.shutdown()
    calls = [lambda: blocks.take(1), lambda: blocks.free_order(), lambda: blocks.usage]
    calls += [lambda c=call: c([1]) for call in (blocks.touch, blocks.release, blocks.mark_cached, blocks.uncache)]
    calls += [lambda: blocks.num_free, lambda: blocks.num_blank]
    calls += [lambda: blocks.is_cached([1]), lambda: blocks.references[1]]
    for call in calls:
        with pytest.raises(PoolClosed):
            call()


def test_calls_by_name_are_in_the_digest_with_what_they_name():
    def life(*calls, **options):
        pool = Pool(24, 1, seed=1)
        pool.blocks.take(20)
        pool.blocks.mark_cached(list(range(1, 11)))
        for call, *arguments in calls:
            getattr(pool.blocks, call)(*arguments, **options)
        return pool.digest()

    ids = [3, 1, 2, 5, 4, 7]
    lives = [life(), life(("touch", ids)), life(("release", ids)), life(("uncache", ids)), life(("take", 2))]
    lives += [life(("touch", ids[::-1])), life(("touch", [*ids[:-1], 8]))]
    lives += [life(("touch", ids[:k])) for k in range(1, 6)]
    lives += [life(("touch", ids), blank=True), life(("uncache", ids), keep_place=True)]
    assert len(set(lives)) == len(lives)
    assert life(("touch", ids)) == lives[1]
