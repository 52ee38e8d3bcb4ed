"""The life of a pool: deferred closes, reset, shutdown."""

import gc

import pytest
from conftest import ONE_HANDLE_CALLS

from kvpool.errors import KVPoolError, PlanStateError, PoolClosed, StaleHandle

# --- deferred close ---------------------------------------------------------------------------------------


def test_defer_close_takes_effect_in_the_next_call(make_pool):
    pool = make_pool()
    handle = pool.open(8)
    pool.defer_close(handle)
    assert pool.is_open(handle) is False  # this call drained the list first
    assert pool.stats().used == 0


SEES_THE_CLOSE = {  # each call answers as if the sequence (all blocks, the only slot) was closed before it
    "stats": lambda pool, plan, h: pool.stats().used == 0,
    "refcount": lambda pool, plan, h: pool.blocks.refcount(1) == 0,
    "refcount_histogram": lambda pool, plan, h: pool.blocks.refcount_histogram().tolist() == [3],
    "alloc": lambda pool, plan, h: len(pool.blocks.alloc(3)) == 3,
    "open": lambda pool, plan, h: pool.num_tokens(pool.open(12)) == 0,
    "is_open": lambda pool, plan, h: not pool.is_open(h),
    "reset": lambda pool, plan, h: pool.reset() is None,
}


@pytest.mark.parametrize("call", SEES_THE_CLOSE)
def test_defer_close_is_drained_before_the_next_call(make_pool, make_plan, call):
    pool = make_pool(4, max_seqs=1)
    handle = pool.open(12)
    pool.defer_close(handle)
    assert SEES_THE_CLOSE[call](pool, make_plan(pool), handle)


@pytest.mark.parametrize("call", ["table", "num_tokens", "capacity", "close", "fork"])
def test_defer_close_makes_the_handle_stale_for_the_next_call(make_pool, call):
    pool = make_pool()
    handle = pool.open(8)
    pool.defer_close(handle)
    with pytest.raises(StaleHandle):
        getattr(pool, call)(handle)
    assert pool.stats().used == 0  # closed, although the call itself was refused


def test_deferred_closes_are_calls_of_their_own(make_pool):
    deferred, explicit = make_pool(), make_pool()
    for pool in (deferred, explicit):
        first, second = pool.open(8), pool.open(4)
        if pool is deferred:
            pool.defer_close(second)
            pool.defer_close(first)
        else:
            pool.close(second)
            pool.close(first)
    assert deferred.digest() == explicit.digest()
    assert deferred.fingerprint() == explicit.fingerprint()


def test_defer_close_of_dead_handles_is_skipped(make_pool):
    pool, other = make_pool(), make_pool()
    live, dead = pool.open(4), pool.open(4)
    pool.close(dead)
    before = pool.fingerprint(), pool.digest()
    for handle in (dead, dead, other.open()):
        pool.defer_close(handle)
    assert (pool.fingerprint(), pool.digest()) == before
    assert pool.is_open(live)


def test_defer_close_twice_closes_once(make_pool):
    pool = make_pool(max_seqs=1)
    handle = pool.open(4)
    pool.defer_close(handle)
    pool.defer_close(handle)
    assert pool.stats().sequences == 0
    assert pool.open() == handle + (1 << 20)  # one generation later


def test_defer_close_then_close_leaves_the_slots_next_owner_alone(make_pool):
    pool = make_pool(max_seqs=1)
    handle = pool.open(4)
    pool.close(handle)
    owner = pool.open(8)
    pool.defer_close(handle)
    assert pool.is_open(owner) and len(pool.table(owner)) == 2


def test_defer_close_takes_more_handles_than_there_are_sequences(make_pool):
    pool = make_pool(max_seqs=2)
    handle = pool.open(4)
    for _ in range(10_000):
        pool.defer_close(handle)
    assert pool.stats().sequences == 0


def test_defer_close_from_a_finalizer(make_pool):
    pool = make_pool(64, max_seqs=64)

    class Owner:
        def __init__(self):
            self.handle = pool.open(4)
            self.cycle = self

        def __del__(self):
            pool.defer_close(self.handle)

    owners = [Owner() for _ in range(50)]
    assert pool.stats().sequences == 50
    del owners
    gc.collect()
    assert pool.stats().sequences == 0


# --- reset and shutdown -----------------------------------------------------------------------------------


def test_reset_makes_every_handle_stale_and_every_block_free(make_pool, make_plan, grow):
    pool = make_pool(max_seqs=4)
    plan = make_plan(pool)
    handles = [pool.open(4) for _ in range(3)]
    pool.close(handles[1])
    pool.blocks.alloc(3)
    pool.step(plan, [handles[2]], 9)
    pool.reset()
    assert not any(pool.is_open(h) for h in handles)
    stats = pool.stats()
    assert (stats.blank, stats.used, stats.limbo, stats.sequences, stats.pending) == (15, 0, 0, 0, 0)
    assert not plan.is_pending
    fresh = [pool.open(4) for _ in range(4)]
    assert [h & 0xFFFFF for h in fresh] == [0, 1, 2, 3]
    assert [pool.table(h).tolist() for h in fresh] == [[1], [2], [3], [4]]
    assert not set(fresh) & set(handles)


def test_reset_forgets_a_pending_plan_which_can_then_step_again(make_pool, make_plan):
    pool = make_pool()
    plan = make_plan(pool)
    pool.step(plan, [pool.open()], 5)
    pool.reset()
    with pytest.raises(PlanStateError):
        pool.done(plan)
    handle = pool.open()
    pool.step(plan, [handle], 5)
    assert plan.dirty_rows.tolist() == [0]
    assert plan.block_tables.tolist()[0][:2] == [1, 2]


def test_shutdown_twice_is_legal_and_every_call_afterwards_is_pool_closed(make_pool, make_plan):
    pool = make_pool()
    plan = make_plan(pool)
    handle = pool.open(4)
    pool.shutdown()
    pool.shutdown()
    calls = {
        **ONE_HANDLE_CALLS,
        "open": lambda pool, plan, h: pool.open(),
        "alloc": lambda pool, plan, h: pool.blocks.alloc(),
        "incref": lambda pool, plan, h: pool.blocks.incref(1),
        "decref": lambda pool, plan, h: pool.blocks.decref(1),
        "free": lambda pool, plan, h: pool.blocks.free(1),
        "mark_cached": lambda pool, plan, h: pool.blocks.mark_cached(1),
        "touch": lambda pool, plan, h: pool.blocks.touch(1),
        "evict": lambda pool, plan, h: pool.blocks.evict(1),
        "drain_evicted": lambda pool, plan, h: pool.blocks.drain_evicted(),
        "refcount": lambda pool, plan, h: pool.blocks.refcount(1),
        "is_open": lambda pool, plan, h: pool.is_open(h),
        "done": lambda pool, plan, h: pool.done(plan),
        "rollback": lambda pool, plan, h: pool.rollback(plan),
        "reset": lambda pool, plan, h: pool.reset(),
        "stats": lambda pool, plan, h: pool.stats(),
        "refcount_histogram": lambda pool, plan, h: pool.blocks.refcount_histogram(),
        "digest": lambda pool, plan, h: pool.digest(),
        "fingerprint": lambda pool, plan, h: pool.fingerprint(),
        "check": lambda pool, plan, h: pool.check(),
        "Plan": lambda pool, plan, h: type(plan)(pool, 1),
    }
    for name, call in calls.items():
        with pytest.raises(PoolClosed) as caught:
            call(pool, plan, handle)
        assert str(caught.value).startswith(f"[{name}] "), str(caught.value)


def test_shutdown_with_open_sequences_and_pending_plans(make_pool, make_plan):
    pool = make_pool()
    plan = make_plan(pool)
    pool.step(plan, [pool.open()], 5)
    pool.shutdown()
    with pytest.raises(PoolClosed):
        pool.done(plan)


def test_pool_is_a_context_manager(core):
    with core.Pool(4, 4) as pool:
        pool.open(4)
    with pytest.raises(PoolClosed):
        pool.stats()


def test_pool_as_context_manager_lets_exceptions_pass(core):
    with pytest.raises(KVPoolError, match="row"), core.Pool(4, 4) as pool:
        raise KVPoolError("row")
    with pytest.raises(PoolClosed):
        pool.open()


def test_defer_close_after_shutdown_does_not_raise(make_pool):
    pool = make_pool()
    handle = pool.open()
    pool.shutdown()
    pool.defer_close(handle)  # called by finalizers at interpreter exit
