"""Forgetting what is cached, in one namespace or in all."""

from __future__ import annotations

from prefixes import cache, compute, serve

A, B, C = ([n] * 4 for n in (1, 2, 3))


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


def test_flush_leaves_blocks_in_use_to_their_sequence(make_any, make_plan):
    pool = make_any()
    handle = serve(make_plan, pool, A + B)
    assert pool.prefix.flush() == 0
    assert pool.prefix.match(A + B + C) == 0 and pool.num_tokens(handle) == 8
    pool.close(handle)
    assert pool.stats().evictable == 0  # blank, not cached
    assert pool.blocks.alloc(2).tolist() == [1, 2]


def test_flushed_content_does_not_come_back_with_an_older_sequence(make_any, make_plan):
    # New weights: what was computed with the old ones must not be found, whoever commits it.
    pool = make_any()
    known, blank = serve(make_plan, pool, A), pool.open()
    compute(make_plan, pool, known, 4)
    compute(make_plan, pool, blank, 8)
    pool.prefix.flush()
    pool.prefix.commit([known, blank], B + A + B, [4, 8])
    assert pool.prefix.match(A + B + C) == pool.prefix.stats().nodes == 0
    child = int(pool.fork(known)[0])
    compute(make_plan, pool, child, 4)
    pool.prefix.commit(child, C)
    assert pool.prefix.stats().nodes == 0
    cache(make_plan, pool, A + B)
    assert pool.prefix.match(A + B + C) == 8


def test_flush_tells_the_same_of_a_namespace_whether_others_pushed_it_out_or_not(make_any):
    for others in (0, 3000):
        pool = make_any(events=8)
        for name in (b"mine", *(b"other %d" % i for i in range(others))):
            pool.close(pool.open(A, name))
        assert pool.prefix.flush(b"mine") == 0
        assert pool.prefix.events() == [("cleared", b"mine")]
