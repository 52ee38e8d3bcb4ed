"""What a request may take, who takes the place of a block that leaves, and what a flush tells.

What leaves first, the fuzzer judges and the plain model repeats (`tests/verify`).
"""

from __future__ import annotations

from prefixes import compute

from kvpool.errors import CapacityExceeded, OutOfBlocks, OutOfSequences

A, B, C = ([n] * 4 for n in (1, 2, 3))


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


def test_flush_tells_the_same_of_a_namespace_whether_others_pushed_it_out_or_not(make_any):
    for others in (0, 3000):
        pool = make_any(events=8)
        for name in (b"mine", *(b"other %d" % i for i in range(others))):
            pool.close(pool.open(A, name))
        assert pool.prefix.flush(b"mine") == 0
        assert pool.prefix.events() == [("cleared", b"mine")]
