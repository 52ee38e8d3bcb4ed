"""What a request may take, what a pin holds, who takes the place of a block that leaves, and what a flush forgets.

What leaves first, the fuzzer judges and the plain model repeats (`tests/verify`).
"""

from __future__ import annotations

from prefixes import cache, compute

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
    with refused(pool, StaleHandle, "close", pins[1]):
        pool.prefix.unpin(pins[1])
    assert pool.prefix.stats()[:3] == before[:3] and pool.blocks.evict(16) == 2


def test_child_of_a_duplicate_is_found_again_when_the_duplicate_takes_its_parents_place(make_pool, make_plan):
    pool = make_pool(prefix_cache=True)
    first, second = pool.open(A), pool.open(A)
    for handle in (first, second):
        compute(make_plan, pool, handle, len(A))
    pool.prefix.commit(first, A)
    pool.prefix.commit(second, A)
    compute(make_plan, pool, second, 4)
    pool.prefix.commit(second, B)
    other = pool.open(A + B + C)
    assert pool.table(other).tolist()[:2] == [1, 3]  # found below the canonical block
    pool.close(other)
    assert pool.blocks.refcount(1) == 1  # the first sequence: a duplicate holds nothing
    pool.close(first)
    assert pool.prefix.match(A + B + C) == 8
    assert pool.blocks.evict(16) == 1  # the parent; the child is in use
    assert pool.prefix.match(A + B + C) == 0 and pool.prefix.stats().nodes == 2
    pool.close(second)  # releases 3, then 2, which takes the place
    assert pool.stats().evictable == 2
    pin = pool.prefix.pin(A + B)
    assert pool.table(pin).tolist() == [2, 3]
    pool.prefix.unpin(pin)
    assert pool.blocks.evict(1) == 1
    assert pool.prefix.match(A + B + C) == 4  # the child went first


def test_flush_forgets_one_namespace_or_all_which_then_start_anew(make_any, make_plan):
    pool = make_any()
    groups = len(pool.options.groups)
    for _ in range(2):
        for namespace in (b"", b"a", b"b"):
            cache(make_plan, pool, A + B, namespace)
        assert pool.prefix.flush(b"never seen") == 0
        assert pool.prefix.flush(b"a") == 2 * groups
        assert [pool.prefix.match(A + B + C, namespace) for namespace in (b"", b"a", b"b")] == [8, 0, 8]
        assert pool.prefix.stats().nodes == pool.stats().evictable == 4
        assert pool.prefix.flush() == 4 * groups
        assert pool.prefix.stats().nodes == pool.prefix.stats().namespaces == pool.stats().evictable == 0
    assert pool.prefix.stats().evicted == pool.stats().evictions == 0  # nobody made room


def test_flush_tells_the_same_of_a_namespace_whether_others_pushed_it_out_or_not(make_any):
    for others in (0, 3000):
        pool = make_any(events=8)
        for name in (b"mine", *(b"other %d" % i for i in range(others))):
            pool.close(pool.open(A, name))
        assert pool.prefix.flush(b"mine") == 0
        assert pool.prefix.events() == [("cleared", b"mine")]
