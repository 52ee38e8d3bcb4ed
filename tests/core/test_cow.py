"""Copy on write by its numbers, and reservations, which a fork may end.

Which copies a step makes, and of how many tokens, the fuzzer judges and the plain model repeats (`tests/verify`).
"""

import pytest

from kvpool.errors import OutOfBlocks


def test_writer_of_a_shared_tail_moves_to_a_copy_and_the_other_holder_writes_in_place(make_pool, make_plan, grow):
    pool = make_pool(32, 4)
    parent, first, second = pool.open(), make_plan(pool), make_plan(pool)
    grow(pool, parent, 6)
    child = int(pool.fork(parent)[0])
    pool.step(first, [child], 1)
    assert first.copies.tolist() == [[2, 3, 2]] and first.slot_mapping.tolist() == [3 * 4 + 2]
    assert [pool.table(h).tolist() for h in (parent, child)] == [[1, 2], [1, 3]]
    assert [pool.blocks.refcount(b) for b in (1, 2, 3)] == [2, 1, 1]
    pool.step(second, [parent], 1)  # offset 2 is not below the two tokens that the pending copy reads
    assert second.copies.shape == (0, 3) and second.copies.dtype == "int32"
    assert second.slot_mapping.tolist() == [2 * 4 + 2]


def test_step_inside_a_reservation_cannot_run_out_unless_a_fork_ends_it(make_any, make_plan, grow, refused):
    pool = make_any(14)
    handle = pool.open()
    grow(pool, handle, 2)
    plan = make_plan(pool)
    pool.reserve(plan, [handle], 10)
    pool.done(plan)
    pool.blocks.alloc(pool.stats().blank)
    for _ in range(9):
        pool.step(plan, [handle], 1)
        pool.done(plan)
    pool.blocks.alloc(pool.stats().blank)  # what a window let go
    child = int(pool.fork(handle)[0])
    with refused(pool, OutOfBlocks, "step", plans=[plan]):
        pool.step(plan, [handle], 1)  # the tail is shared now
    pool.close(child)
    pool.step(plan, [handle], 1)
    pool.done(plan)
    with pytest.raises(OutOfBlocks):
        pool.step(plan, [handle], 1)
