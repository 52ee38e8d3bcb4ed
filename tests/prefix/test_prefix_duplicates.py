"""Two sequences compute the same block: one copy is canonical, the other stays where it is."""

from __future__ import annotations

from prefixes import compute, serve

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


def test_duplicate_whose_canonical_block_was_computed_again_follows_the_new_one(make_pool, make_plan):
    pool = make_pool(prefix_cache=True)
    first, second = twins(pool, make_plan, A)
    pool.prefix.commit(second, A)
    pool.close(first)
    pool.blocks.evict(16)
    third = serve(make_plan, pool, A)
    compute(make_plan, pool, second, 4)
    pool.prefix.commit(second, B)
    assert pool.table(pool.open(A + B + C)).tolist()[:2] == [
        pool.table(third).tolist()[0],
        pool.table(second).tolist()[1],
    ]
    pool.close(third)
    assert pool.blocks.evict(16) == 0
    assert pool.prefix.match(A + B + C) == 8


def test_fork_that_commits_the_same_shared_block_is_no_duplicate(make_any, make_plan):
    pool = make_any()
    parent = pool.open(A)
    compute(make_plan, pool, parent, 4)
    child = int(pool.fork(parent)[0])
    pool.prefix.commit(parent, A)
    pool.prefix.commit(child, A)
    assert pool.prefix.stats().duplicates == 0 and pool.prefix.stats().nodes == 1
    compute(make_plan, pool, child, 4)
    pool.prefix.commit(child, B)
    assert pool.prefix.match(A + B + C) == 8


def test_fork_of_a_duplicate_keeps_it_a_duplicate_until_both_are_closed(make_pool, make_plan):
    pool = make_pool(prefix_cache=True)
    first, second = twins(pool, make_plan, A)
    pool.prefix.commit(second, A)
    child = int(pool.fork(second)[0])
    for handle, tokens in ((second, B), (child, C)):
        compute(make_plan, pool, handle, 4)
        pool.prefix.commit(handle, tokens)
    pool.close([first, second])
    assert pool.stats().evictable == 2 and pool.blocks.refcount(2) == 1  # 1 and 3 are idle
    assert pool.blocks.evict(16) == 2
    assert pool.prefix.match(A + C + D) == 0
    pool.close(child)
    assert pool.stats().evictable == 2 and pool.prefix.match(A + C + D) == 8
    assert pool.table(pool.prefix.pin(A + C)).tolist() == [2, 4]


def test_duplicates_in_one_batch_are_committed_in_order_of_rows(make_any, make_plan):
    pool = make_any()
    pair = [pool.open(A), pool.open(A)]
    for handle in pair:
        compute(make_plan, pool, handle, 4)
    pool.prefix.commit(pair[::-1], A + A)
    assert pool.prefix.stats().duplicates == len(pool.options.groups)
    assert pool.table(pool.open(A + B), 0).ravel().tolist()[0] == 2  # of the second, whose row came first


def unshared(pool, make_plan, handle, tokens):
    """The blocks that compaction to so many tokens would rewrite are the sequence's own."""
    plan = make_plan(pool)
    pool.unshare(plan, [handle], [tokens])
    pool.done(plan)


def test_block_behind_a_copy_of_unshare_is_not_found_below_what_its_block_was_before(make_pool, make_plan):
    """The copy lies in what was a duplicate of A. The row has published B: what comes later is found below B."""
    pool = make_pool(prefix_cache=True)
    _, second = twins(pool, make_plan, A)
    pool.prefix.commit(second, A)
    third = pool.open(B)
    compute(make_plan, pool, third, 8)
    pool.prefix.commit(third, B)
    (duplicate,) = pool.table(second).tolist()
    pool.close(second)
    unshared(pool, make_plan, third, 4)
    assert pool.table(third).tolist()[0] == duplicate
    pool.prefix.commit(third, C)
    assert (pool.prefix.match([*A, *C, 0]), pool.prefix.match([*B, *C, 0])) == (4, 8)


def test_duplicate_behind_a_copy_of_unshare_is_found_when_its_parent_was_computed_again(make_pool, make_plan):
    pool = make_pool(prefix_cache=True)
    first, second = twins(pool, make_plan, A + B)
    compute(make_plan, pool, second, 8)
    pool.prefix.commit(second, A + B)
    unshared(pool, make_plan, second, 4)
    pool.close(first)
    pool.blocks.evict(2)
    pool.prefix.commit(second, C)
    pool.prefix.commit(second, D)
    for close in (False, True):
        if close:
            pool.close(second)  # its copy of A stands for no node: it takes no place
        assert [pool.prefix.match([*text, 0]) for text in (A, A + B, A + B + C, B + C, C)] == [0] * 5
        assert pool.prefix.stats().nodes == 4  # a node stays while one below it does
    serve(make_plan, pool, A)
    assert pool.prefix.match([*A, *B, *C, *D, 0]) == 16


def test_copy_of_unshare_that_is_truncated_into_is_committed_with_its_own_tokens(make_pool, make_plan):
    pool = make_pool(prefix_cache=True)
    text = [1, 2, 3, 4, 5, 6, 7, 8]
    handle = pool.open(text)
    compute(make_plan, pool, handle, 8)
    pool.prefix.commit(handle, text)
    unshared(pool, make_plan, handle, 4)
    pool.truncate(handle, 2)
    compute(make_plan, pool, handle, 2)
    pool.prefix.commit(handle, [9, 9])
    assert pool.prefix.match([1, 2, 9, 9, 0]) == 4
