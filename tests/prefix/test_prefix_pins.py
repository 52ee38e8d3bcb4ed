"""Holding a prefix against eviction."""

from __future__ import annotations

from prefixes import cache, compute, serve

from kvpool.errors import OutOfSequences, StaleHandle

A, B, C = ([n] * 4 for n in (1, 2, 3))


def test_pin_holds_a_whole_prefix_from_its_root(make_pool, make_plan):
    pool = make_pool(prefix_cache=True)
    cache(make_plan, pool, A + B + C)
    pin = pool.prefix.pin(A + B)
    assert pool.table(pin).tolist() == [1, 2] and pool.num_tokens(pin) == pool.capacity(pin) == 8
    assert pool.blocks.evict(16) == 1
    assert pool.prefix.match(A + B + C) == 8


def test_pin_is_not_capped_at_the_last_token(make_pool, make_plan):
    pool = make_pool(prefix_cache=True)
    cache(make_plan, pool, A)
    assert pool.num_tokens(pool.prefix.pin(A)) == 4
    assert pool.prefix.match(A) == 0


def test_pin_of_an_unknown_prefix_is_empty_and_takes_no_blocks(make_pool):
    pool = make_pool(prefix_cache=True)
    pin = pool.prefix.pin(A + B)
    assert pool.num_tokens(pin) == pool.capacity(pin) == 0
    assert pool.stats().used == pool.stats().allocs == 0


def test_pin_is_no_query(make_pool, make_plan):
    pool = make_pool(prefix_cache=True)
    cache(make_plan, pool, A)
    before = pool.prefix.stats()
    pool.prefix.unpin(pool.prefix.pin(A))
    assert pool.prefix.stats()[:3] == before[:3]


def test_pin_of_another_namespace_holds_nothing(make_pool, make_plan):
    pool = make_pool(prefix_cache=True)
    cache(make_plan, pool, A, b"a")
    assert pool.num_tokens(pool.prefix.pin(A, b"b")) == 0
    assert pool.num_tokens(pool.prefix.pin(A, b"a")) == 4


def test_unpin_lets_go(make_pool, make_plan, refused):
    pool = make_pool(prefix_cache=True)
    cache(make_plan, pool, A + B)
    pin = pool.prefix.pin(A + B)
    pool.prefix.unpin(pin)
    with refused(pool, StaleHandle, "close" if _is_core(pool) else "unpin", pin):
        pool.prefix.unpin(pin)
    assert pool.blocks.evict(16) == 2


def _is_core(pool):
    return type(pool).__module__.startswith("kvpool._")


def test_two_pins_of_one_prefix_are_two(make_pool, make_plan):
    pool = make_pool(prefix_cache=True)
    cache(make_plan, pool, A)
    first, second = pool.prefix.pin(A), pool.prefix.pin(A)
    pool.prefix.unpin(first)
    assert pool.blocks.evict(16) == 0
    pool.prefix.unpin(second)
    assert pool.blocks.evict(16) == 1


def test_pin_can_be_forked_and_goes_on_as_a_prompt(make_pool, make_plan):
    pool = make_pool(prefix_cache=True)
    cache(make_plan, pool, A)
    pin = pool.prefix.pin(A)
    child = int(pool.fork(pin)[0])
    compute(make_plan, pool, child, 4)
    pool.prefix.commit(child, B)
    assert pool.prefix.match(A + B + C) == 8


def test_pin_without_a_free_slot_is_refused(make_pool, make_plan, refused):
    pool = make_pool(prefix_cache=True, max_seqs=1)
    serve(make_plan, pool, A)
    with refused(pool, OutOfSequences, "pin"):
        pool.prefix.pin(A)


def test_pin_moves_a_prefix_to_the_new_end(make_pool, make_plan):
    pool = make_pool(prefix_cache=True)
    cache(make_plan, pool, A)
    cache(make_plan, pool, B)
    pool.prefix.unpin(pool.prefix.pin(A))
    pool.blocks.evict(1)
    assert (pool.prefix.match(A + C), pool.prefix.match(B + C)) == (4, 0)
