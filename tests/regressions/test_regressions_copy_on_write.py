"""Family D: copy on write, forks, aliases. See README.md."""


def test_d2_reset_leaves_no_source_behind(make_pool, make_plan, grow):
    """Reset kept stale source blocks of beams."""
    pool = make_pool()
    plan = make_plan(pool)
    parent = pool.open()
    grow(pool, parent, 6)
    pool.step(plan, [parent, *pool.fork(parent, 2).tolist()], 1)
    assert len(plan.copies) == 2
    pool.reset()
    assert (pool.stats().used, pool.stats().blank) == (0, 15)
    handle = pool.open()
    pool.step(plan, [handle], 3)
    assert plan.copies.shape == (0, 3) and pool.table(handle).tolist() == [1]


def test_d5_arrays_that_the_pool_returned_do_not_change_under_the_caller(make_pool, grow):
    """An offset array was changed in place; the caller's reference changed with it."""
    pool = make_pool()
    handle = pool.open()
    grow(pool, handle, 6)
    table, ids = pool.table(handle), pool.blocks.alloc(2)
    pool.truncate(handle, 0)
    pool.blocks.free(ids)
    pool.blocks.alloc(5)
    assert table.tolist() == [1, 2] and ids.tolist() == [3, 4]
