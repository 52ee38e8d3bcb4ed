"""Which cached block leaves first, what a request may take, and what a pin holds."""

from __future__ import annotations

from prefixes import cache, serve

from kvpool.errors import CapacityExceeded, OutOfBlocks, OutOfSequences, StaleHandle

A, B, C, D = ([n] * 4 for n in (1, 2, 3, 4))


def leaving(pool):
    """The cached blocks in the order in which they leave. `alloc` takes blank ones only, the last one to become so."""
    pool.blocks.alloc(pool.blocks.num_blank)
    found = []
    while pool.blocks.evict(1):
        found.append(pool.blocks.alloc())
    return found


def test_eviction_takes_blank_blocks_and_then_the_tail_of_a_prefix_before_its_head(make_any, make_plan):
    pool = make_any(8)  # blocks 1 .. 7
    cache(make_plan, pool, A + B + C)
    assert pool.blocks.alloc(4).tolist() == [4, 5, 6, 7]
    assert pool.prefix.match(A + B + C + D) == 12 and pool.prefix.stats().evicted == 0
    for left in (8, 4, 0):
        assert pool.blocks.evict(1) == 1
        assert pool.prefix.match(A + B + C + D) == left
    assert pool.prefix.stats().evicted == 3 * len(pool.options.groups)


def test_eviction_takes_the_least_recently_released_prefix_first_and_no_hit_in_use(make_pool, make_plan):
    pool = make_pool(8, prefix_cache=True)
    for tokens in (A, B, C):
        cache(make_plan, pool, tokens)  # blocks 1, 2, 3
    pool.close(pool.open(A + D))  # a hit: A is the newest now; its second block goes back to the blanks
    assert pool.stats().evictable == 3
    held = pool.open(C + D)
    assert leaving(pool) == [2, 1]
    assert pool.num_tokens(held) == pool.prefix.match(C + D) == 4
    assert pool.prefix.match(A + D) == pool.prefix.match(B + D) == 0


def test_open_does_not_count_its_own_hits_as_blocks_to_take(make_pool, make_plan, refused):
    pool = make_pool(5, prefix_cache=True)
    cache(make_plan, pool, A + B)
    pool.blocks.free(pool.blocks.alloc(2)[:1])
    # 1 blank, 2 cached, 1 in use
    stats = pool.prefix.stats()
    with refused(pool, OutOfBlocks, "open") as caught:
        pool.open(A + B + C + D)
    error = caught.value
    assert (error.needed, error.short_by, error.blank, error.evictable, error.limbo) == (2, 1, 1, 0, 0)
    assert pool.prefix.stats() == stats
    assert pool.table(pool.open(A + B + C)).tolist() == [1, 2, 3]


def test_open_may_evict_what_it_did_not_hit(make_pool, make_plan):
    pool = make_pool(4, prefix_cache=True)
    cache(make_plan, pool, A)
    cache(make_plan, pool, B)
    cache(make_plan, pool, C)
    # B is held; A and C make room before a block is taken, and lie on the blank stack with C on top.
    assert pool.table(pool.open(B + C + D)).tolist() == [2, 3, 1]


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


def test_hit_in_limbo_leaves_it_and_needs_no_block(make_pool, make_plan):
    pool = make_pool(4, prefix_cache=True)
    handle, other, plan = serve(make_plan, pool, A), pool.open(), make_plan(pool)
    pool.step(plan, [other], 1)
    pool.close(handle)
    assert (pool.stats().blank, pool.stats().limbo) == (1, 1)
    found = pool.open(A + B)
    assert pool.table(found).tolist() == [1, 3] and pool.stats().limbo == 0
    pool.done(plan)


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
