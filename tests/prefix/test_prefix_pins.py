"""Pins with a ttl: who holds cached blocks for a while need not come back to let go of them."""

from __future__ import annotations

import random

import pytest
from prefixes import cache, compute

from kvpool.errors import OutOfSequences, StaleHandle
from kvpool.retention import Keep

A, B = [1] * 4, [2] * 4
LATER = [9]
MOST = 2**62 - 1


def is_found(pool, prompt):
    return pool.prefix.match(prompt + LATER) == len(prompt)


def row_of(handle):
    return int(handle) & 0xFFFFF


def test_pin_without_ttl_is_held_for_ever(make_any, make_plan):
    pool = make_any()
    cache(make_plan, pool, A)
    pin, other = pool.prefix.pin(A), pool.prefix.pin(A, b"", ttl=1)
    pool.prefix.tick(MOST)
    assert pool.is_open(pin) and not pool.is_open(other)
    late = pool.prefix.pin(A, ttl=MOST)  # no clock gets there
    pool.prefix.tick(MOST)
    pool.check()
    assert pool.is_open(late)


def test_handle_of_a_pin_that_ended_is_stale_like_any_that_was_closed(make_any):
    pool = make_any()
    pin = pool.prefix.pin(A, ttl=1)
    pool.defer_close(pin)  # the next call closes it, which is the tick itself
    pool.prefix.tick(1)
    pin = pool.prefix.pin(A, ttl=1)
    pool.prefix.tick(2)
    for call in (pool.prefix.unpin, pool.close, pool.num_tokens, pool.fork, lambda handle: pool.truncate(handle, 0)):
        with pytest.raises(StaleHandle):
            call(pin)
    pool.defer_close(pin)
    assert pool.stats().sequences == 0


def test_pin_that_ends_while_a_plan_is_pending_is_closed_as_by_a_call(make_any, make_plan):
    pool = make_any()
    cache(make_plan, pool, A)
    pin, plan = pool.prefix.pin(A, ttl=1), make_plan(pool, 1, 8)
    pool.step(plan, [pin], 2)
    pool.prefix.tick(1)
    assert not pool.is_open(pin) and pool.stats().limbo == 2 and pool.blocks.evict(4) == 0
    pool.check()
    pool.done(plan)
    assert pool.stats().limbo == 0 and is_found(pool, A)
    pool.check()


def test_pins_end_in_the_order_of_their_ends_and_of_equal_ones_the_earlier_first(make_any):
    pool = make_any(max_seqs=6)
    pool.prefix.tick(7)
    ttls = (9, 2, 9, 1, 2, 9)
    pins = [pool.prefix.pin(A, ttl=ttl) for ttl in ttls]
    pool.prefix.tick(20)
    due = [row_of(pin) for _, pin in sorted(zip(ttls, pins, strict=True))]
    assert [row_of(pool.open()) for _ in pins] == due != sorted(due)  # the row that is free for longest comes first


def test_reset_ends_every_pin(make_any):
    pool = make_any(max_seqs=2)
    pool.prefix.pin(A, ttl=3)
    pool.reset()
    rows = [pool.open(), pool.open()]
    pool.prefix.tick(3)
    assert all(map(pool.is_open, rows))
    pool.check()


@pytest.mark.parametrize(("ttl", "error", "text"), [
    (0, ValueError, r"\[pin\] ttl is out of range \(0\)"),
    (2**62, ValueError, r"\[pin\] ttl is out of range"),
    (2**70, ValueError, r"\[pin\] ttl is out of range"),
    (1.5, TypeError, r"\[pin\] ttl "),
    (True, TypeError, r"\[pin\] ttl "),
])  # fmt: skip
def test_pin_with_a_ttl_that_is_none_is_refused(make_any, ttl, error, text):
    pool = make_any()
    before = pool.fingerprint(), pool.digest(), pool.stats()
    with pytest.raises(error, match=text):
        pool.prefix.pin(A, ttl=ttl)
    assert (pool.fingerprint(), pool.digest(), pool.stats()) == before


def test_pin_that_is_refused_takes_no_memory_for_its_ttl(make_pool):
    pool = make_pool(16, 4, prefix_cache=True, max_seqs=1)
    row, before = pool.open(), pool.prefix.nbytes
    with pytest.raises(OutOfSequences, match=r"\[pin\]"):
        pool.prefix.pin(A, ttl=1)
    assert pool.prefix.nbytes == before
    pool.close(row)
    for now in range(1, 50):
        pool.prefix.pin(A, ttl=1)
        pool.prefix.tick(now)
    assert pool.prefix.nbytes == before + 16  # a row


def test_ttl_is_a_part_of_digest_and_fingerprint(make_pool):
    pools = [make_pool(16, 4, prefix_cache=True, seed=1) for _ in range(4)]
    for pool, ttls in zip(pools, ((None, None), (1, 2), (2, 1), (2, 2)), strict=True):
        for ttl in ttls:
            pool.prefix.pin(A, ttl=ttl)
    assert len({pool.digest() for pool in pools}) == len({pool.fingerprint() for pool in pools}) == len(pools)
    for pool in pools:
        pool.prefix.tick(2)
    assert len({pool.digest() for pool in pools}) == len(pools)


@pytest.mark.parametrize("seed", range(4))
def test_one_tick_does_what_all_ticks_up_to_it_do(make_pool, make_plan, seed):
    """Directives and pins that end between two ticks end in the order of their times."""
    left = []
    for step in (1, 40):
        rng, pool = random.Random(seed), make_pool(32, 4, prefix_cache=True, max_seqs=12, seed=1)
        for _ in range(10):
            prompt = [rng.choice((1, 2)) for _ in range(4)] + [rng.choice((3, 4)) for _ in range(4)]
            row = pool.open(prompt + LATER, keep=rng.choice((None, Keep(rng.randrange(1, 8), rng.randrange(1, 40)))))
            compute(make_plan, pool, row, 9 - pool.num_tokens(row))
            pool.prefix.commit(row, (prompt + LATER)[pool.prefix.committed(row) :])
            pool.close(row)
            pool.prefix.pin(prompt, ttl=rng.randrange(1, 50))
        pool.blocks.evict(3)  # what is kept is set aside
        for now in range(step, 41, step):
            pool.prefix.tick(now)
        pool.check()
        left.append((pool.fingerprint(), pool.stats(), pool.prefix.stats(), [row_of(pool.open()) for _ in range(3)]))
    assert left[0] == left[1] and 0 < left[0][1].sequences < 10
