"""Family D: copy on write, forks, aliases. See README.md."""


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
