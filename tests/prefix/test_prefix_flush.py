"""Forgetting what is cached, in one namespace or in all."""

from __future__ import annotations

from prefixes import cache

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


def test_flush_tells_the_same_of_a_namespace_whether_others_pushed_it_out_or_not(make_any):
    for others in (0, 3000):
        pool = make_any(events=8)
        for name in (b"mine", *(b"other %d" % i for i in range(others))):
            pool.close(pool.open(A, name))
        assert pool.prefix.flush(b"mine") == 0
        assert pool.prefix.events() == [("cleared", b"mine")]
