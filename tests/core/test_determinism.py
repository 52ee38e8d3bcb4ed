"""Same calls, same blocks, same digest; another call, another digest. `tests/verify` compares processes and builds."""

import pytest

from kvpool import Group, Plan, Pool

ONE_MORE_CALL = {
    "nothing": lambda pool, h, plan: None,
    "alloc": lambda pool, h, plan: pool.blocks.alloc(),
    "alloc 2": lambda pool, h, plan: pool.blocks.alloc(2),
    "incref": lambda pool, h, plan: pool.blocks.incref(5),
    "incref of another": lambda pool, h, plan: pool.blocks.incref(6),
    "decref": lambda pool, h, plan: pool.blocks.decref(5),
    "decref of another": lambda pool, h, plan: pool.blocks.decref(6),
    "decref of both": lambda pool, h, plan: pool.blocks.decref([5, 6]),
    "decref of both, other order": lambda pool, h, plan: pool.blocks.decref([6, 5]),
    "mark_cached": lambda pool, h, plan: pool.blocks.mark_cached(5),
    "open": lambda pool, h, plan: pool.open(),
    "open 4": lambda pool, h, plan: pool.open(4),
    "open 8": lambda pool, h, plan: pool.open(8),
    "fork": lambda pool, h, plan: pool.fork(h[0]),
    "fork of another": lambda pool, h, plan: pool.fork(h[1]),
    "fork 2": lambda pool, h, plan: pool.fork(h[0], 2),
    "truncate": lambda pool, h, plan: pool.truncate(h[0], 5),
    "truncate more": lambda pool, h, plan: pool.truncate(h[0], 4),
    "truncate of another": lambda pool, h, plan: pool.truncate(h[1], 5),
    "close": lambda pool, h, plan: pool.close(h[0]),
    "close both": lambda pool, h, plan: pool.close(h),
    "close both, other order": lambda pool, h, plan: pool.close(h[::-1]),
    "step": lambda pool, h, plan: pool.step(plan, h, 1),
    "step, other order": lambda pool, h, plan: pool.step(plan, h[::-1], 1),
    "step of one": lambda pool, h, plan: pool.step(plan, h[:1], 1),
    "step 2": lambda pool, h, plan: pool.step(plan, h, 2),
    "step 1 and 2": lambda pool, h, plan: pool.step(plan, h, [1, 2]),
    "step of nobody": lambda pool, h, plan: pool.step(plan, [], 1),
    "reserve": lambda pool, h, plan: pool.reserve(plan, h, 1),
    "reserve 8": lambda pool, h, plan: pool.reserve(plan, h, 8),
    "step and done": lambda pool, h, plan: (pool.step(plan, h, 1), pool.done(plan)),
    "step and rollback": lambda pool, h, plan: (pool.step(plan, h, 1), pool.rollback(plan)),
    "reset": lambda pool, h, plan: pool.reset(),
}


def test_one_different_call_changes_digest_and_fingerprint(make_pool, make_plan, grow):
    digests, prints = {}, {}
    for name, call in ONE_MORE_CALL.items():
        pool = make_pool()
        handles = [pool.open(), pool.open()]
        for handle in handles:
            grow(pool, handle, 6)
        assert pool.blocks.alloc(2).tolist() == [5, 6]
        call(pool, handles, make_plan(pool))
        for value in (pool.digest(), pool.fingerprint()):
            assert type(value) is int and 0 <= value < 2**64
        other = digests.setdefault(pool.digest(), name)
        assert other == name, f"{name} and {other} have the same digest"
        if name != "step and rollback":  # equal to "nothing", see below
            other = prints.setdefault(pool.fingerprint(), name)
            assert other == name, f"{name} and {other} have the same fingerprint"


def test_rollback_that_moved_no_block_restores_the_fingerprint(make_any, make_plan, grow):
    pool = make_any()
    handle = pool.open()
    grow(pool, handle, 6)
    plan, before = make_plan(pool), pool.fingerprint()
    pool.step(plan, [handle], 2)
    assert pool.fingerprint() != before
    pool.rollback(plan)
    assert pool.fingerprint() == before


def test_reading_calls_leave_the_digest_alone(make_any, make_plan, grow):
    pool = make_any()
    handle = pool.open()
    grow(pool, handle, 6)
    before = pool.digest(), pool.fingerprint()
    pool.table(handle, 0).ravel(), pool.num_tokens(handle), pool.capacity(handle), pool.is_open(handle)
    pool.blocks.refcount(1), pool.stats(), pool.blocks.refcount_histogram(), pool.check(), pool.can([handle], 3)
    make_plan(pool)
    assert (pool.digest(), pool.fingerprint()) == before


@pytest.mark.parametrize("place", ["blank stack", "LRU list", "limbo"])
def test_fingerprint_sees_the_order_of_lists(make_any, make_plan, place):
    prints = set()
    for order in ([1, 2, 3], [3, 2, 1], [2, 1, 3], [1, 3, 2]):
        pool = make_any()
        pool.blocks.alloc(3)
        if place == "LRU list":
            pool.blocks.mark_cached([1, 2, 3])
        elif place == "limbo":
            pool.step(make_plan(pool), [], 0)
        pool.blocks.free(order)
        prints.add((pool.fingerprint(), pool.stats()))
    assert len(prints) == 4 and len({stats for _, stats in prints}) == 1


def test_fingerprint_sees_generations(make_any):
    pool, other = make_any(max_seqs=1), make_any(max_seqs=1)
    pool.close(pool.open())
    assert pool.stats() == other.stats()
    assert pool.fingerprint() != other.fingerprint()


def test_digest_sees_the_arena_of_a_call():
    digests = set()
    for arena in (0, 1, 2):
        pool = Pool(12, 4, groups=[Group.full(), Group.window(6, arena=1, num_blocks=9), Group.state(7)])
        pool.blocks.arena(arena).alloc(2)
        digests.add(pool.digest())
    assert len(digests) == 3


def test_fingerprint_sees_which_step_a_released_block_waits_for():
    def ended(first):
        pool = Pool(20, 4, max_seqs=4, seed=1)
        row, other = pool.open(), pool.open(4)
        for number in range(2):
            if number == first:
                pool.close(other)
            pool.step(Plan(pool, max_rows=1), [row])
        if first == 2:
            pool.close(other)
        return pool.fingerprint()

    assert ended(1) != ended(2)
