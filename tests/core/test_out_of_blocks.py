"""All or nothing: a call that does not find its blocks changes nothing, at every level of what is free."""

import pytest

from kvpool.errors import OutOfBlocks

LARGEST = 64


def leave(pool, blanks, cached=0):
    """Raw-allocate until exactly this many blank and this many cached blocks are left."""
    if cached:
        ids = pool.blocks.alloc(cached)
        pool.blocks.mark_cached(ids)
        pool.blocks.free(ids)
    surplus = pool.stats().blank - blanks
    if surplus:
        pool.blocks.alloc(surplus)
    stats = pool.stats()
    assert (stats.blank, stats.evictable) == (blanks, cached)


def assert_unchanged_when_short(pool, call, plan, *args, need, free, **options):
    before = pool.fingerprint(), pool.digest()
    with pytest.raises(OutOfBlocks) as caught:
        getattr(pool, call)(plan, *args, **options)
    error = caught.value
    assert str(error).startswith(f"[{call}] ")
    assert (error.needed, error.short_by) == (need, need - free)
    assert error.blank + error.evictable == free
    assert (pool.fingerprint(), pool.digest()) == before
    assert not plan.is_pending
    return error


@pytest.mark.parametrize("call", ["step", "reserve"])
@pytest.mark.parametrize("block", range(1, LARGEST + 1, 8))
def test_one_row_at_every_free_level(make_pool, make_plan, call, block):
    for need in range(block, block + 8):
        pool = make_pool(1 + need, 2)
        plan = make_plan(pool, 1, 2 * need, formats=("seq_lens",))
        handle = pool.open()
        raw = pool.blocks.alloc(need)
        for free in range(need):
            error = assert_unchanged_when_short(pool, call, plan, [handle], 2 * need, need=need, free=free)
            assert (error.row, error.handle) == (0, handle)
            pool.blocks.free(raw[free])
        getattr(pool, call)(plan, [handle], 2 * need)
        assert len(pool.table(handle)) == need


@pytest.mark.parametrize("block", range(1, LARGEST + 1, 8))
def test_one_block_per_row_at_every_free_level(make_pool, make_plan, block):
    """The row in the error is the first one that did not fit: as many as were free did fit."""
    for need in range(block, block + 8):
        pool = make_pool(1 + need, 2)
        plan = make_plan(pool, need, need, formats=("block_tables",), table_width=1)
        handles = [pool.open() for _ in range(need)]
        raw = pool.blocks.alloc(need)
        for free in range(need):
            error = assert_unchanged_when_short(pool, "step", plan, handles, 1, need=need, free=free)
            assert (error.row, error.handle) == (free, handles[free])
            pool.blocks.free(raw[free])
        pool.step(plan, handles, 1)


@pytest.mark.parametrize("need", [1, 2, 3, 17, 64])
def test_alloc_and_open_at_every_free_level(make_pool, need):
    pool = make_pool(1 + need, 2)
    raw = pool.blocks.alloc(need)
    for free in range(need):
        before = pool.fingerprint()
        for call, n in (("alloc", need), ("open", 2 * need)):
            with pytest.raises(OutOfBlocks) as caught:
                getattr(pool.blocks if call == "alloc" else pool, call)(n)
            error = caught.value
            assert (error.needed, error.short_by, error.blank) == (need, need - free, free)
            assert (error.row, error.handle) == (-1, -1)
            assert pool.fingerprint() == before
        pool.blocks.free(raw[free])
    pool.close(pool.open(2 * need))
    assert len(pool.blocks.alloc(need)) == need


@pytest.mark.parametrize("cached", range(5))
@pytest.mark.parametrize("blanks", range(5))
def test_copy_on_write_at_every_mix_of_blank_and_cached_blocks(make_pool, make_plan, grow, blanks, cached):
    """Three holders of one tail, each also appending a block: 2 copies + 3 appends = 5 blocks."""
    pool = make_pool(32, 4)
    parent = pool.open()
    grow(pool, parent, 6)
    rows = [parent, *map(int, pool.fork(parent, 2))]
    leave(pool, blanks, cached)
    plan = make_plan(pool, 4, 16)
    cumulative = [2, 4, 5]
    if blanks + cached < 5:
        error = assert_unchanged_when_short(pool, "step", plan, rows, 4, need=5, free=blanks + cached)
        assert (error.blank, error.evictable) == (blanks, cached)
        assert error.row == next(i for i, c in enumerate(cumulative) if c > blanks + cached)
        assert error.handle == rows[error.row]
        assert pool.blocks.drain_evicted().shape == (0,)  # nothing was evicted in vain
    else:
        pool.step(plan, rows, 4)
        assert len(plan.copies) == 2
        assert len(pool.blocks.drain_evicted()) == 5 - blanks


def test_error_counts_limbo_apart(make_pool, make_plan):
    pool = make_pool(8, 4)
    row, old = pool.open(), pool.open(12)
    first, second = make_plan(pool), make_plan(pool)
    pool.step(first, [row], 4)
    pool.close(old)
    leave(pool, 1)
    error = assert_unchanged_when_short(pool, "step", second, [row], 12, need=3, free=1)
    assert error.limbo == 3
    pool.done(first)
    pool.step(second, [row], 12)


def test_out_of_blocks_is_a_memory_error_with_a_readable_message(make_pool):
    pool = make_pool(4, 4)
    with pytest.raises(MemoryError) as caught:
        pool.blocks.alloc(9)
    assert "9" in str(caught.value) and "3" in str(caught.value)


def test_request_larger_than_the_pool_is_refused_not_waited_for(make_pool, make_plan):
    pool = make_pool(4, 4, max_blocks_per_seq=64)
    plan = make_plan(pool, 1, 256)
    handle = pool.open()
    assert_unchanged_when_short(pool, "step", plan, [handle], 100, need=25, free=3)


def test_step_that_needs_no_block_works_in_a_full_pool(make_pool, make_plan):
    pool = make_pool(2, 4)
    plan = make_plan(pool)
    handle = pool.open(4)
    for _ in range(4):
        pool.step(plan, [handle], 1)
        pool.done(plan)
    assert pool.num_tokens(handle) == 4


# --- partial ----------------------------------------------------------------------------------------------


def test_partial_skips_the_row_that_does_not_fit_and_tries_the_next(make_pool, make_plan):
    pool = make_pool(5, 4)  # four blocks
    a, b, c, d = (pool.open() for _ in range(4))
    plan = make_plan(
        pool, formats=("block_tables", "seq_lens", "slot_mapping", "positions", "cu_q_lens"), table_width=3
    )
    pool.step(plan, [a, b, c, d], [5, 12, 3, 4], partial=True)  # needs 2, 3, 1, 1
    assert plan.served.tolist() == [1, 0, 1, 1]
    assert plan.seq_lens.tolist() == [5, 0, 3, 4]
    assert plan.cu_q_lens.tolist() == [0, 5, 5, 8, 12]
    assert (len(plan.handles), plan.num_tokens) == (4, 12)
    assert plan.block_tables.tolist() == [[1, 2, 0], [0, 0, 0], [3, 0, 0], [4, 0, 0]]
    assert plan.slot_mapping.tolist() == [4, 5, 6, 7, 8, 12, 13, 14, 16, 17, 18, 19]
    assert plan.positions.tolist() == [0, 1, 2, 3, 4, 0, 1, 2, 0, 1, 2, 3]
    assert [pool.num_tokens(h) for h in (a, b, c, d)] == [5, 0, 3, 4]


def test_partial_with_nothing_served_is_legal(make_pool, make_plan):
    pool = make_pool(3, 4)
    a, b = pool.open(), pool.open()
    pool.blocks.alloc(2)
    plan = make_plan(pool)
    pool.step(plan, [a, b], 1, partial=True)
    assert plan.served.tolist() == [0, 0] and plan.num_tokens == 0 and plan.is_pending
    pool.done(plan)


def test_partial_with_room_for_all_serves_all(make_pool, make_plan):
    pool = make_pool()
    plan = make_plan(pool)
    pool.step(plan, [pool.open(), pool.open()], 3, partial=True)
    assert plan.served.tolist() == [1, 1]


def test_partial_row_without_tokens_counts_as_served(make_pool, make_plan):
    pool = make_pool(2, 4)
    a, b = pool.open(), pool.open(4)
    plan = make_plan(pool)
    pool.step(plan, [a, b], [1, 0], partial=True)
    assert plan.served.tolist() == [0, 1]


@pytest.mark.parametrize("free", range(8))
def test_partial_serves_greedily_in_the_order_given(make_pool, make_plan, free):
    needs = [3, 1, 2, 1]
    pool = make_pool(16, 4)
    handles = [pool.open() for _ in needs]
    leave(pool, free)
    plan = make_plan(pool)
    pool.step(plan, handles, [4 * n for n in needs], partial=True)
    served, left = [], free
    for need in needs:
        served.append(int(need <= left))
        left -= need * served[-1]
    assert plan.served.tolist() == served
    assert pool.stats().blank == left


def test_partial_skipped_holder_keeps_sharing_the_tail(make_pool, make_plan, grow):
    pool = make_pool(16, 4)
    parent = pool.open()
    grow(pool, parent, 6)
    rows = [parent, *map(int, pool.fork(parent, 2))]
    leave(pool, 1)
    plan = make_plan(pool)
    pool.step(plan, rows, 1, partial=True)  # needs 1, 1 and, were both served, 0
    assert plan.served.tolist() == [1, 0, 0]
    assert [pool.table(h).tolist() for h in rows] == [[1, 15], [1, 2], [1, 2]]
    assert pool.blocks.refcount(2) == 2


def test_reserve_takes_blocks_for_each_row(make_pool, make_plan):
    pool = make_pool(4, 4)
    handles = [pool.open() for _ in range(3)]
    plan = make_plan(pool)
    pool.reserve(plan, handles[:2], [8, 4])
    assert [pool.capacity(h) for h in handles] == [8, 4, 0]
    assert plan.served.tolist() == [1, 1]


# --- can --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("free", range(7))
def test_can_answers_what_step_would_do(make_pool, make_plan, grow, free):
    pool = make_pool(16, 4)
    parent = pool.open()
    grow(pool, parent, 6)
    rows = [parent, int(pool.fork(parent)[0]), pool.open()]
    leave(pool, free)
    plan = make_plan(pool)
    before = pool.fingerprint()
    for new in (0, 1, 2, 3, [0, 0, 9], [7, 0, 0], [1, 1, 0]):
        answer = pool.can(rows, new)
        assert answer in (True, False) and pool.fingerprint() == before
        try:
            pool.step(plan, rows, new)
        except OutOfBlocks:
            assert not answer
        else:
            assert answer
            pool.rollback(plan)
            before = pool.fingerprint()


# --- watermark --------------------------------------------------------------------------------------------


def test_watermark_holds_back_open_but_never_growth(make_pool, make_plan, refused):
    pool = make_pool(9, 4, watermark=3)  # eight blocks
    handle = pool.open(20)  # 5 + 3
    with refused(pool, OutOfBlocks, "open") as caught:
        pool.open(1)
    error = caught.value
    assert (error.needed, error.short_by, error.blank) == (1, 1, 3)
    plan = make_plan(pool)
    pool.step(plan, [handle], 32)  # growth takes the last block
    assert pool.stats().blank == 0


def test_watermark_counts_cached_blocks_as_available(make_pool):
    pool = make_pool(9, 4, watermark=3)
    leave(pool, 2, 4)
    pool.open(12)


def test_watermark_never_holds_back_an_open_without_blocks(make_pool):
    pool = make_pool(9, 4, watermark=8)
    pool.open()
    pool.open(0)


def test_watermark_does_not_hold_back_alloc(make_pool):
    pool = make_pool(9, 4, watermark=8)
    assert len(pool.blocks.alloc(8)) == 8


@pytest.mark.parametrize(
    "need, watermark, fits", [(5, 3, True), (6, 3, False), (8, 0, True), (9, 0, False), (1, 7, True)]
)
def test_watermark_at_the_border(make_pool, need, watermark, fits):
    pool = make_pool(9, 4, watermark=watermark, max_blocks_per_seq=16)
    if fits:
        assert len(pool.table(pool.open(4 * need))) == need
    else:
        with pytest.raises(OutOfBlocks) as caught:
            pool.open(4 * need)
        assert (caught.value.needed, caught.value.short_by) == (need, need + watermark - 8)
