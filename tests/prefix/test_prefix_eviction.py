"""Which cached block leaves first, what a request may take, and what a pin holds."""

from __future__ import annotations

from prefixes import cache

from kvpool.errors import CapacityExceeded, OutOfBlocks, OutOfSequences, StaleHandle

A, B, C, D = ([n] * 4 for n in (1, 2, 3, 4))


def test_open_refuses_in_order_of_capacity_blocks_and_slots(make_pool, make_plan, refused):
    pool = make_pool(6, prefix_cache=True, max_blocks_per_seq=2, max_seqs=1)
    with refused(pool, CapacityExceeded, "open"):
        pool.open(A + B + C)
    pool.open()
    pool.blocks.alloc(5)
    with refused(pool, OutOfBlocks, "open"):
        pool.open(A)
    pool.blocks.free(5)
    with refused(pool, OutOfSequences, "open"):
        pool.open(A)
    assert pool.prefix.stats().queries == 0


def _is_core(pool):
    return type(pool).__module__.startswith("kvpool._")


def test_pin_holds_a_whole_prefix_of_its_namespace_and_is_no_query(make_any, make_plan, refused):
    pool = make_any()
    cache(make_plan, pool, A + B + C, b"a")
    before = pool.prefix.stats()
    nothing = pool.prefix.pin(A + B)  # of another namespace
    assert pool.num_tokens(nothing) == pool.capacity(nothing) == pool.stats().used == 0
    pins = [pool.prefix.pin(A + B, b"a") for _ in range(2)]
    for pin in pins:
        assert pool.table(pin, 0).ravel().tolist() == [1, 2] and pool.num_tokens(pin) == pool.capacity(pin) == 8
    assert pool.prefix.match(A + B, b"a") == 4  # a lookup ends before the last token
    assert pool.blocks.evict(16) == 1 and pool.blocks.evict(16) == 0
    for pin in pins:
        assert pool.prefix.match(A + B + C, b"a") == 8
        assert pool.blocks.evict(16) == 0
        pool.prefix.unpin(pin)
    with refused(pool, StaleHandle, "close" if _is_core(pool) else "unpin", pins[1]):
        pool.prefix.unpin(pins[1])
    assert pool.prefix.stats()[:3] == before[:3] and pool.blocks.evict(16) == 2
