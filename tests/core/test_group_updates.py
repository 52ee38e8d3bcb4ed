"""Updates of a mirror, and pools of states only; every number holds for the model and for the core."""

import pytest
from both_pools import pools_of

import kvpool
from kvpool.errors import CapacityExceeded, OutOfBlocks
from kvpool.groups import Group
from kvpool.testing import ModelPlan
from proof.plain import plain_pool


@pytest.fixture(params=["model", "core"])
def make(request):
    """``make(num_blocks, block_size, *groups, **options)`` makes a pool and two plans."""
    yield from pools_of(request.param, ("block_tables", "seq_lens", "slot_mapping", "positions"))


def grow(pool, plan, handles, n):
    """A step that is done at once."""
    pool.step(plan, handles, n)
    pool.done(plan)


# ---- updates of a mirror ----------------------------------------------------------------------------------


def updates_of(pool, make_plan):
    """A plan whose updates are read, and the rows of its last step as (row, group, index, column, block)."""
    plan = make_plan(pool, 4, 32, formats=("table_updates", "block_tables"))
    return plan, lambda: [tuple(update) for update in plan.table_updates.tolist()]


def test_updates_tell_what_is_new_and_what_became_a_hole(make):
    pool, other, _ = make(32, 2, Group.full(), Group.window(3, columns=2), Group.state(8))
    plan, told = updates_of(pool, type(other))
    first, row = pool.open(), pool.open(3)
    pool.step(plan, [row], 1)  # what open took is told too
    full, window = [(1, 0, 0, 0, 1), (1, 0, 1, 0, 2)], [(1, 1, i, c, 3 + 2 * i + c) for i in (0, 1) for c in (0, 1)]
    assert told() == full + window
    pool.done(plan)
    pool.step(plan, [row], 2)
    assert told() == []
    pool.done(plan)
    pool.step(other, [row], 2)  # by a plan that tells nothing; entry 0 leaves the window
    pool.done(other)
    pool.step(plan, [first, row], [1, 1])
    assert plan.groups[1].block_tables[1, :3].tolist() == [[0, 0], [5, 6], [8, 9]]
    assert told()[:3] == [(0, 0, 0, 0, 4), (0, 1, 0, 0, 3), (0, 1, 0, 1, 10)]
    assert told()[3:] == [(1, 0, 2, 0, 7), (1, 1, 0, 0, 0), (1, 1, 0, 1, 0), (1, 1, 2, 0, 8), (1, 1, 2, 1, 9)]
    pool.done(plan)


def test_updates_tell_copies_cuts_and_rolled_back_rows_again(make):
    pool, other, _ = make(32, 2, Group.full())
    plan, told = updates_of(pool, type(other))
    row = pool.open()
    pool.step(plan, [row], 5)
    assert told() == [(0, 0, 0, 0, 1), (0, 0, 1, 0, 2), (0, 0, 2, 0, 3)]
    pool.done(plan)
    (child,) = (int(handle) for handle in pool.fork(row))
    pool.step(plan, [row, child], 1)  # the first writer takes a copy, the last one writes in place
    assert told() == [(0, 0, 2, 0, 4), (1, 0, 0, 0, 1), (1, 0, 1, 0, 2), (1, 0, 2, 0, 3)]
    pool.rollback(plan)
    pool.step(plan, [row, child], 0)
    assert told() == [(slot, 0, i, 0, i + 1) for slot in (0, 1) for i in range(3)]
    pool.done(plan)
    pool.truncate(row, 2)
    pool.step(plan, [row, child], [1, 0])
    assert told() == [(0, 0, 1, 0, pool.table(row)[1, 0])]
    pool.done(plan)
    pool.step(plan, [row, child], 0)
    assert told() == [] and plan.table_updates.shape == (0, 5)
    pool.done(plan)


def test_updates_are_for_pools_with_groups(make):
    pool, other, _ = make(8, 4, Group.state(4))
    plan, told = updates_of(pool, type(other))
    grow(pool, plan, [pool.open()], 3)
    assert told() == []
    make_pool, make_plan = (kvpool.Pool, kvpool.Plan) if isinstance(pool, kvpool.Pool) else (plain_pool, ModelPlan)
    with pytest.raises(ValueError):
        make_plan(make_pool(8, 4), 4, 32, formats=("table_updates",))


# ---- only states ------------------------------------------------------------------------------------------


def test_pool_of_states_has_lengths_and_slots(make):
    pool, plan, _ = make(8, 4, Group.state(4), Group.state(3))
    rows = [pool.open(), pool.open(100)]
    assert [pool.table(rows[1], group).tolist() for group in (0, 1)] == [[], []]
    assert [(pool.num_tokens(row), pool.capacity(row)) for row in rows] == [(0, 0), (0, 0)]
    grow(pool, plan, rows, [9, 0])
    assert plan.seq_lens.tolist() == [9, 0] and plan.positions.tolist() == list(range(9))
    assert plan.groups[0].state_src.tolist() == [-1, -1]
    assert (plan.groups[0].state_dst.tolist(), plan.groups[1].state_dst.tolist()) == ([0, -1], [0, -1])
    assert [(pool.num_tokens(row), pool.capacity(row)) for row in rows] == [(9, 12), (0, 0)]
    assert [(pool.stats(arena).used, pool.stats(arena).num_blocks) for arena in (0, 1, 2)] == [(0, 8), (1, 4), (1, 3)]
    assert (pool.stats().tokens, pool.stats().capacity) == (9, 12)
    pool.close(rows)
    assert [pool.stats(arena).free for arena in (0, 1, 2)] == [7, 4, 3]


def test_pool_of_states_reserves_nothing_and_keeps_its_length(make):
    pool, plan, _ = make(8, 4, Group.state(2))
    (row,) = rows = [pool.open()]
    grow(pool, plan, rows, 3)
    pool.reserve(plan, rows, 50)
    assert pool.capacity(row) == 4 and pool.stats(1).used == 1
    pool.rollback(plan)
    pool.truncate(row, 3)
    with pytest.raises(ValueError):
        pool.truncate(row, 2)
    pool.step(plan, rows, 6)
    assert (pool.num_tokens(row), pool.capacity(row)) == (9, 12)
    pool.rollback(plan)
    assert (pool.num_tokens(row), pool.capacity(row), pool.table(row).tolist()) == (3, 4, [0])


def test_pool_of_states_is_short_of_slots_only(make):
    pool, plan, _ = make(2, 4, Group.state(2), watermark=1)
    assert pool.options.max_blocks_per_seq == (2**31 - 1) // 4
    rows = [pool.open(1000) for _ in range(3)]
    with pytest.raises(OutOfBlocks) as raised:
        pool.step(plan, rows, 10)
    assert (raised.value.arena, raised.value.row, raised.value.needed) == (1, 2, 3)
    grow(pool, plan, rows[:1], 32)
    grow(pool, plan, rows[:1], 32)
    assert pool.num_tokens(rows[0]) == 64


def test_pool_of_states_limits_the_length_where_it_is_told(make):
    pool, plan, _ = make(2, 4, Group.state(2), max_blocks_per_seq=3)
    row = pool.open(12)
    with pytest.raises(CapacityExceeded):
        pool.open(13)
    grow(pool, plan, [row], 12)
    with pytest.raises(CapacityExceeded):
        pool.step(plan, [row], 1)
