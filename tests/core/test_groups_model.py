"""Layer groups, worked out by hand from docs/core.md; every number holds for the model and for the core."""

import numpy as np
import pytest
from both_pools import pools_of

from kvpool.errors import CapacityExceeded, OutOfBlocks, PlanStateError
from kvpool.groups import Group


@pytest.fixture(params=["model", "core"])
def make(request):
    """``make(num_blocks, block_size, *groups, **options)`` makes a pool and two plans."""
    yield from pools_of(request.param, ("block_tables", "seq_lens", "slot_mapping", "positions"))


def entries(pool, handle, group=0):
    """A table as a list; of ids where an entry has one."""
    table = pool.table(handle, group)
    return table[:, 0].tolist() if table.ndim == 2 and table.shape[1] == 1 else table.tolist()


def grow(pool, plan, handles, n):
    """A step that is done at once."""
    pool.step(plan, handles, n)
    pool.done(plan)


# ---- tables -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("asked", [100, list(range(100))], ids=["count", "prompt"])
def test_open_takes_group_by_group(make, asked):
    pool, _, _ = make(
        4096, 16, Group.full(block_size=32), Group.window(1024, keep=4, columns=5), Group.state(64), lookahead=0
    )
    seq = pool.open(asked)
    assert entries(pool, seq, 0) == [1, 2, 3, 4]
    assert pool.table(seq, 1).tolist() == [list(range(k, k + 5)) for k in range(5, 40, 5)]
    assert pool.table(seq, 2).tolist() == [] and pool.table(seq, 2).dtype == np.int32
    assert (pool.stats().used, pool.stats(1).used) == (39, 0)
    assert (pool.stats(1).num_blocks, pool.stats(1).reserved, pool.stats(1).blank) == (64, 0, 64)
    assert pool.options.groups[0] == Group.full(block_size=32) and pool.options.lookahead == 0
    assert pool.num_tokens(seq) == pool.capacity(pool.open(list(range(100)), reserve=False)) == 0


def test_close_releases_group_by_group_from_the_last_entry(make):
    pool, _, _ = make(16, 2, Group.full(), Group.window(8, columns=2))
    pool.close(pool.open(4))  # group 0 has 1 2; group 1 has 3 4, 5 6: released are 2 1, 6 5 4 3
    seq = pool.open(4)
    assert entries(pool, seq, 0) == [3, 4]
    assert pool.table(seq, 1).tolist() == [[5, 6], [1, 2]]


def test_fork_shares_what_is_written_and_no_holes(make):
    pool, plan, _ = make(32, 2, Group.full(), Group.window(2), Group.state(8))
    seq = pool.open(20)
    grow(pool, plan, [seq], 5)
    (child,) = pool.fork(seq)
    assert entries(pool, seq, 1)[:3] == [0, 0, 13]  # 11 and 12 were let go
    assert entries(pool, child, 0) == [1, 2, 3] and entries(pool, child, 1) == [0, 0, 13]
    assert pool.table(child, 2).tolist() == pool.table(seq, 2).tolist() == [0]
    assert pool.stats().shared == 4 and pool.stats(1).shared == 1


def test_hole_is_minus_one_without_reserved_blocks(make):
    pool, plan, other = make(16, 2, Group.window(2), reserved_blocks=0)
    seq = pool.open()
    grow(pool, plan, [seq], 4)
    pool.step(other, [seq], 1)
    assert entries(pool, seq) == [-1, 1, 0]  # block 0 was let go and is taken again
    pool.done(other)
    assert entries(pool, seq) == [-1, -1, 0]


# ---- letting go -------------------------------------------------------------------------------------------


def test_window_lets_go_when_the_step_passes(make):
    pool, plan, other = make(16, 2, Group.window(4))
    seq = pool.open()
    pool.step(plan, [seq], 5)
    assert entries(pool, seq) == [1, 2, 3]
    assert plan.groups[0].kv_starts.tolist() == [0]
    pool.done(plan)  # p = 5: entries that end at 5 - 4 + 1 = 2
    assert entries(pool, seq) == [0, 2, 3]
    pool.step(other, [seq], 2)
    assert entries(pool, seq) == [0, 2, 3, 1]
    assert other.groups[0].kv_starts.tolist() == [2]
    assert other.groups[0].slot_mapping.tolist() == [[7, 2]]
    pool.done(other)  # p = 7: entries that end at 4
    assert entries(pool, seq) == [0, 0, 3, 1]


@pytest.mark.parametrize(
    ("keep", "left"), [(0, [0, 0, 0, 4, 2]), (1, [1, 0, 0, 4, 2]), (2, [1, 0, 0, 4, 2]), (3, [1, 2, 0, 4, 5])]
)
def test_window_keeps_whole_blocks(make, keep, left):
    pool, plan, _ = make(16, 2, Group.window(4, keep=keep))
    seq = pool.open()
    grow(pool, plan, [seq], 4)  # p = 4: entries that end at 1
    assert entries(pool, seq) == [1, 2]
    grow(pool, plan, [seq], 4)  # p = 8: entries that end at 5 are 0 and 1
    grow(pool, plan, [seq], 1)  # takes the block that was released last; p = 9: entry 2 ends at 6
    assert entries(pool, seq) == left
    pool.step(plan, [seq], 1)
    assert plan.groups[0].kv_starts.tolist() == [6]
    pool.done(plan)


@pytest.mark.parametrize(("length", "left"), [(3, [1, 2]), (4, [0, 0]), (5, [0, 0, 3]), (7, [0, 0, 3, 4])])
def test_chunk_lets_go_of_the_chunks_before(make, length, left):
    pool, plan, _ = make(16, 2, Group.chunk(4))
    seq = pool.open()
    grow(pool, plan, [seq], length)
    assert entries(pool, seq) == left


def test_lookahead_keeps_what_a_shorter_sequence_reads(make):
    pool, plan, _ = make(16, 2, Group.window(4), lookahead=2)
    seq = pool.open()
    grow(pool, plan, [seq], 5)
    assert entries(pool, seq) == [1, 2, 3]  # p = 3
    grow(pool, plan, [seq], 2)
    assert entries(pool, seq) == [0, 2, 3, 4]  # p = 5
    with pytest.raises(ValueError, match="5"):
        pool.truncate(seq, 4)
    pool.truncate(seq, 5)
    assert entries(pool, seq) == [0, 2, 3]


def test_blocks_that_were_let_go_pass_limbo(make):
    pool, plan, other = make(16, 2, Group.window(2))
    seq = pool.open()
    pool.step(plan, [seq], 4)
    pool.step(other, [seq], 2)
    pool.done(plan)  # by the length of this step: 4
    assert entries(pool, seq) == [0, 2, 3] and pool.stats().limbo == 1
    pool.done(other)
    assert entries(pool, seq) == [0, 0, 3] and pool.stats().limbo == 0


def test_in_order_lets_go_at_once_and_the_plan_shows_what_was_read(make):
    pool, plan, _ = make(16, 2, Group.window(2), in_order=True)
    seq = pool.open()
    pool.step(plan, [seq], 4)
    assert plan.groups[0].block_tables[0, :2, 0].tolist() == [1, 2] and plan.groups[0].kv_starts.tolist() == [0]
    assert entries(pool, seq) == [0, 2]
    pool.step(plan, [seq], 1)
    assert plan.groups[0].dirty_rows.tolist() == [0]
    assert plan.groups[0].block_tables[0, :3, 0].tolist() == [0, 2, 1]


# ---- steps ------------------------------------------------------------------------------------------------


def test_blocks_are_taken_group_by_group_and_entries_replaced_as_a_whole(make):
    pool, plan, _ = make(32, 2, Group.full(columns=2), Group.full())
    seq = pool.open()
    grow(pool, plan, [seq], 3)  # group 0: 1 2, 3 4; group 1: 5, 6
    child = int(pool.fork(seq)[0])
    pool.step(plan, [seq, child], [1, 2])
    # group 0: the first row replaces 3 4 by 7 8, the second one writes 3 4 in place and appends 9 10; group 1: 11, 12
    assert pool.table(seq, 0).tolist() == [[1, 2], [7, 8]]
    assert pool.table(child, 0).tolist() == [[1, 2], [3, 4], [9, 10]]
    assert entries(pool, seq, 1) == [5, 11] and entries(pool, child, 1) == [5, 6, 12]
    assert plan.groups[0].copies.tolist() == [[3, 7, 1], [4, 8, 1]]
    assert plan.groups[1].copies.tolist() == [[6, 11, 1]]
    assert plan.groups[0].slot_mapping.tolist() == [[15, 7, 18], [17, 9, 20]]
    assert plan.positions.tolist() == [3, 3, 4] and plan.groups[1].kv_lens.tolist() == [4, 5]
    assert pool.stats().cow_copies == 3
    pool.rollback(plan)
    assert pool.table(seq, 0).tolist() == pool.table(child, 0).tolist() == [[1, 2], [3, 4]]
    assert entries(pool, pool.open(2), 1) == [9]  # the stack is as before: 7 8, 9


def test_block_sizes_differ(make):
    pool, plan, _ = make(32, 2, Group.full(block_size=8), Group.full(), Group.full(block_size=4))
    seq = pool.open()
    grow(pool, plan, [seq], 5)
    assert [entries(pool, seq, g) for g in range(3)] == [[1], [2, 3, 4], [5, 6]]
    assert [g.slot_mapping.tolist() for g in plan.groups] == [
        [[8, 9, 10, 11, 12]], [[4, 5, 6, 7, 8]], [[20, 21, 22, 23, 24]]
    ]  # fmt: skip
    assert pool.capacity(seq) == 6


def test_short_arena_is_named_with_what_all_rows_need(make):
    pool, plan, _ = make(32, 2, Group.full(), Group.full(arena=1, num_blocks=5), Group.state(2))
    first, second = pool.open(), pool.open()
    with pytest.raises(OutOfBlocks) as short:
        pool.step(plan, [first, second], [6, 4])
    error = short.value
    assert (error.arena, error.row, error.handle) == (1, 1, second)
    assert (error.needed, error.short_by, error.blank) == (5, 1, 4)
    assert not pool.can([first, second], [6, 4]) and pool.can([first, second], [4, 4])
    pool.step(plan, [first, second], [6, 4], partial=True)
    assert plan.served.tolist() == [1, 0] and plan.num_tokens == 6
    assert plan.groups[2].state_dst.tolist() == [0, -1]
    assert entries(pool, second, 0) == []


def test_open_names_the_lowest_arena_and_the_watermark_is_of_arena_0(make):
    pool, _, _ = make(6, 2, Group.full(), Group.full(columns=2, arena=1, num_blocks=7), watermark=1)
    pool.open(6)  # 3 of 5 and 6 of 6
    with pytest.raises(OutOfBlocks) as short:
        pool.open(4)
    assert (short.value.arena, short.value.needed, short.value.short_by) == (0, 2, 1)
    with pytest.raises(OutOfBlocks) as short:
        pool.open(2)
    assert (short.value.arena, short.value.needed, short.value.short_by) == (1, 2, 2)


def test_reserve_takes_no_state(make):
    pool, plan, _ = make(16, 2, Group.full(), Group.state(2))
    seq = pool.open()
    pool.reserve(plan, [seq], 3)
    assert entries(pool, seq) == [1, 2] and pool.table(seq, 1).tolist() == []
    assert plan.groups[1].state_src.tolist() == plan.groups[1].state_dst.tolist() == [-1]
    pool.done(plan)


# ---- state ------------------------------------------------------------------------------------------------


def test_state_moves_to_a_new_slot_in_every_step(make):
    pool, plan, other = make(16, 2, Group.full(), Group.state(4))
    seq = pool.open()
    pool.step(plan, [seq], 3)
    assert (plan.groups[1].state_src.tolist(), plan.groups[1].state_dst.tolist()) == ([-1], [0])
    pool.step(other, [seq], 1)
    assert (other.groups[1].state_src.tolist(), other.groups[1].state_dst.tolist()) == ([0], [1])
    pool.done(plan)
    assert pool.stats(1).used == 2  # the slot that is read is held
    pool.done(other)
    assert pool.stats(1).used == 1
    pool.step(plan, [seq], 1)
    assert (plan.groups[1].state_src.tolist(), plan.groups[1].state_dst.tolist()) == ([1], [0])
    pool.rollback(plan)
    assert pool.table(seq, 1).tolist() == [1] and pool.stats(1).used == 1


def test_in_order_writes_a_state_in_place(make):
    pool, plan, _ = make(16, 2, Group.full(), Group.state(4), in_order=True)
    seq = pool.open()
    pool.step(plan, [seq], 2)
    pool.step(plan, [seq], 2)
    assert (plan.groups[1].state_src.tolist(), plan.groups[1].state_dst.tolist()) == ([0], [0])
    child = int(pool.fork(seq)[0])
    pool.step(plan, [seq, child], 1)  # slot 0 has one reference then, but the first row reads it
    assert (plan.groups[1].state_src.tolist(), plan.groups[1].state_dst.tolist()) == ([0, 0], [1, 2])


def test_state_is_left_at_its_length_only(make):
    pool, plan, _ = make(16, 2, Group.full(), Group.state(4))
    seq = pool.open()
    grow(pool, plan, [seq], 5)
    pool.truncate(seq, 5)
    for length in (0, 4, 6):
        with pytest.raises(ValueError, match=r"\[truncate\]"):
            pool.truncate(seq, length)


# ---- plans ------------------------------------------------------------------------------------------------


def test_plan_of_several_groups_names_them(make):
    pool, plan, _ = make(16, 2, Group.full(), Group.window(4))
    for name in ("block_tables", "seq_lens", "slot_mapping", "copies", "dirty_rows"):
        with pytest.raises(ValueError, match=r"plan\.groups"):
            getattr(plan, name)
    with pytest.raises(ValueError, match=r"\[table\] the pool has 2 layer groups"):
        pool.table(pool.open())
    assert len(plan.groups) == 2


def test_plan_of_one_group_shows_its_arrays_without_groups(make):
    pool, plan, _ = make(16, 2, Group.full(block_size=4, columns=2))
    seq = pool.open()
    pool.step(plan, [seq], 5)
    (part,) = plan.groups
    assert plan.block_tables[0, :2].tolist() == pool.table(seq).tolist() == [[1, 2], [3, 4]]
    assert plan.slot_mapping.tolist() == [[4, 5, 6, 7, 12], [8, 9, 10, 11, 16]]
    assert plan.seq_lens.tolist() == part.kv_lens.tolist() == [5] and part.kv_starts.tolist() == [0]
    assert plan.dirty_rows.tolist() == [0] and plan.copies.shape == (0, 3)


def test_csr_has_the_filled_entries_that_are_no_holes(make):
    pool, plan, _ = make(32, 2, Group.full(), Group.window(4, keep=1, columns=2), Group.state(4))
    plan = type(plan)(pool, 4, 32, formats=("csr", "seq_lens"))
    rows = [pool.open(), pool.open(8)]
    grow(pool, plan, rows, [9, 3])  # the window of the first one: entry 0 is kept, those that end at 6 are let go
    pool.step(plan, rows, [0, 1])
    full, window, state = plan.groups
    assert full.indptr.tolist() == [0, 5, 7] and full.last_page_len.tolist() == [1, 2]
    assert full.indices[:, 0].tolist() == [*entries(pool, rows[0]), *entries(pool, rows[1])[:2]]
    tables = [pool.table(row, 1).tolist() for row in rows]
    assert [entry[0] for entry in tables[0][1:3]] == [0, 0] and window.indptr.tolist() == [0, 3, 5]
    assert window.indices.tolist() == [tables[0][0], *tables[0][3:5], *tables[1][:2]]
    assert window.last_page_len.tolist() == [1, 2] and state.kv_lens.tolist() == [9, 4]


def test_padded_rows_show_holes(make):
    pool, plan, _ = make(9, 2, Group.full(columns=2, block_size=4), Group.state(3))
    seq = pool.open()
    pool.step(plan, [seq], 3, pad_to=(3, 4))
    tables = plan.groups[0].block_tables
    assert tables.dtype == np.int32 and tables.shape == (3, 4, 2)  # 8 blocks of 2 tokens are 4 of 4
    assert tables[0].tolist() == [[1, 2], [0, 0], [0, 0], [0, 0]] and not tables[1:].any()
    assert plan.groups[0].slot_mapping.tolist() == [[4, 5, 6, -1], [8, 9, 10, -1]]
    assert plan.groups[0].kv_starts.tolist() == [0, 0, 0]
    assert plan.groups[1].state_dst.tolist() == [0, -1, -1]
    assert plan.groups[0].dirty_rows.tolist() == [0, 1, 2]
    pool.done(plan)
    pool.step(plan, [seq], 1, pad_to=(3, 4))
    assert plan.groups[0].dirty_rows.tolist() == []
    pool.done(plan)


# ---- refusals ---------------------------------------------------------------------------------------------


def test_calls_that_groups_refuse(make):
    pool, plan, _ = make(16, 2, Group.full(), Group.window(4))
    seq = pool.open()
    for call in (
        lambda: pool.open([1, 2, 3], load=True),
        lambda: pool.unshare(plan, [seq], 0, group=1),
        lambda: pool.compact(seq, 0, group=1),
        lambda: pool.evict_blocks(seq, [], 1),
        lambda: pool.evict_blocks(seq, [], 2),
        lambda: pool.kv_len(seq, -1),
    ):
        with pytest.raises(ValueError):
            call()
    for tokens in (15 * 2 + 1, [1] * 31):
        with pytest.raises(CapacityExceeded):
            pool.open(tokens)
    assert entries(pool, pool.open([1, 2, 3])) == [1, 2]  # a prompt that nobody looks up takes blocks
    pool.step(plan, [seq], 1)
    with pytest.raises(PlanStateError):
        pool.truncate(seq, 1)
    pool.done(plan)


# ---- only states ------------------------------------------------------------------------------------------


def test_pool_of_states_has_lengths_and_slots(make):
    pool, plan, _ = make(8, 4, Group.state(4), Group.state(3))
    rows = [pool.open(), pool.open(100)]
    assert [pool.table(rows[1], group).tolist() for group in (0, 1)] == [[], []]
    assert [(pool.num_tokens(row), pool.capacity(row)) for row in rows] == [(0, 0), (0, 0)]
    grow(pool, plan, rows, [9, 0])
    assert plan.groups[0].kv_lens.tolist() == [9, 0] and plan.positions.tolist() == list(range(9))
    assert plan.groups[0].state_src.tolist() == [-1, -1]
    assert (plan.groups[0].state_dst.tolist(), plan.groups[1].state_dst.tolist()) == ([0, -1], [0, -1])
    assert [(pool.num_tokens(row), pool.capacity(row)) for row in rows] == [(9, 12), (0, 0)]
    assert [(pool.stats(arena).used, pool.stats(arena).num_blocks) for arena in (0, 1, 2)] == [(0, 8), (1, 4), (1, 3)]
    assert (pool.stats().tokens, pool.stats().capacity) == (9, 12)
    pool.close(rows)
    assert [pool.stats(arena).free for arena in (0, 1, 2)] == [7, 4, 3]


def test_pool_of_states_is_short_of_slots_only(make):
    pool, plan, _ = make(2, 4, Group.state(2), watermark=1)
    assert pool.options.max_blocks_per_seq == (2**31 - 1) // 4
    rows = [pool.open(1000) for _ in range(3)]
    with pytest.raises(OutOfBlocks) as raised:
        pool.step(plan, rows, 10)
    assert (raised.value.arena, raised.value.row, raised.value.needed) == (1, 2, 3)
    grow(pool, plan, rows[:1], 32)
    with pytest.raises(ValueError, match=r"\[truncate\]"):
        pool.truncate(rows[0], 31)
    pool.reserve(plan, rows[:1], 50)
    assert (pool.capacity(rows[0]), pool.stats(1).used) == (32, 1)
    pool.rollback(plan)
    pool.step(plan, rows[:1], 32)
    pool.rollback(plan)
    assert (pool.num_tokens(rows[0]), pool.capacity(rows[0]), pool.table(rows[0]).tolist()) == (32, 32, [0])
    short, plan, _ = make(2, 4, Group.state(2), max_blocks_per_seq=3)
    rows = [short.open(12)]
    with pytest.raises(CapacityExceeded):
        short.open(13)
    grow(short, plan, rows, 12)
    with pytest.raises(CapacityExceeded):
        short.step(plan, rows, 1)
