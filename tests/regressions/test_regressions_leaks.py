"""Family B: blocks that nobody gives back. See README.md."""

import gc

import pytest
from catalogue import idle
from prefixes import cache

from kvpool import Plan, Pool
from kvpool.adapters.block_manager import KVBlockManager
from kvpool.config import KVSpec


def test_b3_shared_block_is_evictable_once(make_pool, grow):
    """The evictable size counted shared pages twice."""
    pool = make_pool()
    parent = pool.open()
    grow(pool, parent, 8)
    handles = [parent, *pool.fork(parent, 3).tolist()]
    pool.blocks.mark_cached([1, 2])
    pool.close(handles[:3])
    assert pool.stats().evictable == 0
    pool.close(handles[3])
    assert pool.stats().evictable == 2


def test_b4_abort_in_any_state_returns_everything(make_pool, make_plan):
    """An aborted request in an odd state was never given back."""
    for state in ("new", "reserved", "stepped", "forked", "done", "rolled back", "skipped"):
        pool = make_pool(8, 4)
        plan = make_plan(pool)
        handle = pool.open(8)
        if state == "reserved":
            pool.reserve(plan, [handle], 12)
        if state in ("stepped", "forked", "done", "rolled back"):
            pool.step(plan, [handle], 9)
        if state == "forked":
            pool.close(pool.fork(handle, 2))
        if state == "done":
            pool.done(plan)
        if state == "rolled back":
            pool.rollback(plan)
        if state == "skipped":
            raw = pool.blocks.alloc(5)
            pool.step(plan, [handle], 12, partial=True)
            assert plan.served.tolist() == [0]
            pool.blocks.free(raw)
        pool.close(handle)
        if plan.is_pending:
            pool.done(plan)
        assert idle(pool)


def test_b5_step_of_an_aborted_request_completes_all_the_same(make_pool, make_plan):
    """An abort took the id off a list, the completion was filtered by that list, and the blocks were held for ever."""
    pool = make_pool()
    plan = make_plan(pool)
    handle = pool.open()
    pool.step(plan, [handle], 9)
    pool.close(handle)
    assert pool.stats().limbo == 3
    pool.done(plan)
    assert idle(pool)


def test_b6_close_does_not_wait_for_a_signal_of_its_own(make_pool, make_plan):
    """A delayed free waited for a signal that a dead peer never sent: any later done lets the blocks go."""
    pool = make_pool()
    lost, later = make_plan(pool), make_plan(pool)
    handle = pool.open(8)
    pool.step(lost, [handle], 8)
    pool.close(handle)
    pool.rollback(lost)  # the peer is dead
    assert idle(pool)
    pool.step(later, [], 0)
    pool.done(later)


def test_b7_abort_and_completion_come_in_any_order(make_pool, make_plan):
    """An abort raced with a completion that had arrived already: nothing was ever freed."""
    pool = make_pool()
    older, newer = make_plan(pool), make_plan(pool)
    first, second = pool.open(), pool.open()
    pool.step(older, [first], 8)
    pool.step(newer, [second], 8)
    pool.done(newer)  # arrives first, waits for the older one
    pool.close([second, first])
    pool.done(older)
    assert idle(pool)


def test_b10_pools_and_plans_that_nobody_holds_are_freed():
    """A block and a node of the tree referred to each other: 564,624 bytes leaked. Here: tags of pools come back."""
    for turn in range(3000):  # more than there are tags
        pool = Pool(4, 4, prefix_cache=True)
        plan = Plan(pool, 1)
        pool.step(plan, [pool.open()], 1)
        del pool, plan
        if turn % 500 == 0:
            gc.collect()


def test_b11_finish_drops_the_references_not_only_the_table(make_pool, grow):
    """Finish removed the table but never decremented: evictions 0 at 100 % use."""
    pool = make_pool(5, 4)
    for _ in range(20):
        handle = pool.open()
        grow(pool, handle, 16)
        pool.blocks.drain_evicted()
        pool.blocks.mark_cached(pool.table(handle))
        pool.close(handle)
    stats = pool.stats()
    assert (stats.used, stats.evictable, stats.evictions) == (0, 4, 76)


def test_b12_every_pin_ends_with_its_unpin(make_pool, make_plan):
    """A lookup pinned, the retrieval never came; an unpin after the last reference freed nothing."""
    pool = make_pool(prefix_cache=True)
    prompt = [1] * 4 + [2] * 4
    cache(make_plan, pool, prompt)
    for hit in (prompt, prompt[:4], [9] * 8):
        pins = [pool.prefix.pin(hit) for _ in range(3)]
        pool.prefix.unpin(pins.pop(0))
        assert pool.stats().used == pool.num_tokens(pins[0]) // 4
        for pin in pins:
            pool.prefix.unpin(pin)
        assert idle(pool) and pool.stats().evictable == 2


def test_b13_copy_that_fails_counts_for_nothing(monkeypatch):
    """A counter moved before the data was copied, and a buffer was not freed when there was no page."""
    manager = KVBlockManager(KVSpec(1, 1, 8, "float32", 4), num_blocks=8)
    parent = manager.new_sequence(0).seq_id
    manager.step([parent], 6)
    child = manager.fork(parent).seq_id

    def fail(plan):
        raise RuntimeError("the device is gone")

    with monkeypatch.context() as patch, pytest.raises(RuntimeError):
        patch.setattr(manager.backend, "copy_blocks", fail)
        manager.step([child], 1)
    assert manager.pool.num_tokens(child) == 6 and manager.pool.table(child).tolist() == [1, 2]
    manager.free(parent)
    manager.free(child)
    assert idle(manager.pool)
