"""Two sequences compute the same block: one copy is canonical, the other stays where it is."""

from __future__ import annotations

from prefixes import compute

A, B, C, D = ([n] * 4 for n in (1, 2, 3, 4))


def twins(pool, make_plan, tokens):
    """Two sequences that computed the same tokens; only the first has committed them."""
    pair = [pool.open(tokens), pool.open(tokens)]
    for handle in pair:
        compute(make_plan, pool, handle, len(tokens))
    pool.prefix.commit(pair[0], tokens)
    return pair


def test_duplicate_stays_in_its_table_is_never_found_nor_written_and_goes_blank(make_pool, make_plan):
    pool = make_pool(prefix_cache=True)
    first, second = twins(pool, make_plan, A + B)
    pool.prefix.commit(second, A + B)
    assert pool.table(first).tolist() == [1, 2] and pool.table(second).tolist() == [3, 4]
    assert pool.prefix.stats().duplicates == 2 and pool.prefix.stats().nodes == 2
    other = pool.open(A + B + C)
    assert pool.table(other).tolist()[:2] == [1, 2]
    pool.close(other)
    pool.truncate(second, 7)
    compute(make_plan, pool, second, 1)
    assert pool.table(second).tolist() == [3, 5]  # not in place
    pool.close(second)
    assert pool.stats().evictable == 0
    assert sorted(pool.blocks.alloc(3).tolist()) == [3, 4, 5]
    pool.close(first)
    assert pool.stats().evictable == 2


def test_child_of_a_duplicate_is_found_again_when_the_duplicate_takes_its_parents_place(make_pool, make_plan):
    pool = make_pool(prefix_cache=True)
    first, second = twins(pool, make_plan, A)
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


def test_duplicate_takes_the_place_of_a_canonical_block_that_is_gone(make_pool, make_plan):
    pool = make_pool(prefix_cache=True)
    first, second = twins(pool, make_plan, A + B)
    pool.prefix.commit(second, A + B)
    pool.close(first)
    assert pool.blocks.evict(16) == 2  # nothing of the duplicates holds them; block 1 is blank last, and taken first
    assert pool.prefix.match(A + B + C) == 0
    compute(make_plan, pool, second, 4)
    pool.prefix.commit(second, C)
    assert pool.prefix.match(A + B + C + D) == 0  # in use they stay duplicates
    pool.close(second)
    assert pool.table(pool.open(A + B + C + D)).tolist()[:3] == [3, 4, 1]
    assert pool.prefix.stats().inserted == pool.prefix.stats().nodes == 3  # the nodes of A and B stayed
