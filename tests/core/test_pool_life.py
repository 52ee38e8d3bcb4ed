"""The life of a pool: deferred closes, reset, shutdown."""

import gc

import pytest

from kvpool.errors import KVPoolError, PlanStateError, PoolClosed, StaleHandle
from kvpool.retention import Keep
from tests.conftest import ONE_HANDLE_CALLS

# --- deferred close ---------------------------------------------------------------------------------------


SEES_THE_CLOSE = {  # each call answers as if the sequence (all blocks, the only slot) was closed before it
    "stats": lambda pool, plan, h: pool.stats().used == 0,
    "refcount": lambda pool, plan, h: pool.blocks.refcount(1) == 0,
    "refcount_histogram": lambda pool, plan, h: pool.blocks.refcount_histogram().tolist() == [6],
    "alloc": lambda pool, plan, h: len(pool.blocks.alloc(6)) == 6,
    "open": lambda pool, plan, h: pool.num_tokens(pool.open(12)) == 0,
    "is_open": lambda pool, plan, h: not pool.is_open(h),
    "reset": lambda pool, plan, h: pool.reset() is None,
}


@pytest.mark.parametrize("call", [*SEES_THE_CLOSE, "table", "num_tokens", "capacity", "close", "fork"])
def test_defer_close_is_drained_before_the_next_call(make_any, make_plan, call):
    pool = make_any(7, max_seqs=1)
    handle = pool.open(12)
    pool.defer_close(handle)
    if call in SEES_THE_CLOSE:
        assert SEES_THE_CLOSE[call](pool, make_plan(pool), handle)
        return
    with pytest.raises(StaleHandle):
        getattr(pool, call)(handle)
    assert pool.stats().used == 0  # closed, although the call itself was refused


def test_deferred_closes_are_calls_of_their_own(make_any):
    deferred, explicit = make_any(), make_any()
    for pool in (deferred, explicit):
        first, second = pool.open(8), pool.open(4)
        for handle in (second, first):
            (pool.defer_close if pool is deferred else pool.close)(handle)
    assert deferred.digest() == explicit.digest()
    assert deferred.fingerprint() == explicit.fingerprint()


def test_defer_close_of_dead_handles_is_skipped_however_many_there_are(make_any):
    pool, other = make_any(max_seqs=2), make_any()
    dead = pool.open(4)
    pool.close(dead)
    live, owner = pool.open(4), pool.open(8)  # one of them in the slot of the dead one
    before = pool.fingerprint(), pool.digest()
    for handle in (dead, dead, other.open()):
        pool.defer_close(handle)
    assert (pool.fingerprint(), pool.digest()) == before
    assert pool.is_open(live) and len(pool.table(owner, 0).ravel()) == 2
    for _ in range(10_000):
        pool.defer_close(live)
    assert pool.stats().sequences == 1
    assert pool.open() == live + (1 << 20)  # one generation later


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


def test_reset_makes_every_handle_stale_and_every_block_free(make_any, make_plan):
    pool = make_any(32, max_seqs=4)
    plan = make_plan(pool)
    handles = [pool.open(4) for _ in range(3)]
    pool.close(handles[1])
    pool.blocks.alloc(3)
    pool.step(plan, [handles[2]], 9)
    pool.reset()
    assert not any(pool.is_open(h) for h in handles)
    stats = pool.stats()
    assert (stats.blank, stats.used, stats.limbo, stats.sequences, stats.pending) == (31, 0, 0, 0, 0)
    assert not plan.is_pending
    with pytest.raises(PlanStateError):
        pool.done(plan)
    fresh = [pool.open() for _ in range(4)]
    assert [h & 0xFFFFF for h in fresh] == [0, 1, 2, 3] and not set(fresh) & set(handles)
    pool.step(plan, fresh, 5)
    assert plan.groups[0].dirty_rows.tolist() == [0, 1, 2, 3]
    assert [pool.table(h, 0).ravel().tolist() for h in fresh] == [[1, 2], [3, 4], [5, 6], [7, 8]]


def test_shutdown_twice_is_legal_and_every_call_afterwards_is_pool_closed(make_any, make_plan):
    pool = make_any()
    plan = make_plan(pool)
    handle = pool.open(4)
    pool.step(plan, [handle], 5)
    pool.shutdown()
    pool.shutdown()
    pool.defer_close(handle)  # called by finalizers at interpreter exit
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
    assert pool.prefix is None or pool.prefix.nbytes == 0
    for name, call in calls.items():
        with pytest.raises(PoolClosed) as caught:
            call(pool, plan, handle)
        assert str(caught.value).startswith(f"[{name}] "), str(caught.value)
    for told in ({"cut": 0}, {"keep": Keep(1, 9)}):
        with pytest.raises(PoolClosed, match=r"^\[open\] "):
            pool.open([1], **told)


def test_pool_as_context_manager_is_shut_down_and_lets_exceptions_pass(core):
    with core.Pool(4, 4) as pool:
        pool.open(4)
    with pytest.raises(KVPoolError, match="row"), core.Pool(4, 4) as other:
        raise KVPoolError("row")
    for closed in (pool, other):
        with pytest.raises(PoolClosed):
            closed.stats()
