"""Layer groups by the numbers of docs/groups.md, worked out by hand. `check` runs after every call of a pool here."""

import dataclasses
import os
import sys

import numpy as np
import pytest

from kvpool import Group, Plan, Pool
from kvpool.errors import (
    CapacityExceeded,
    CorruptState,
    ForeignHandle,
    OutOfBlocks,
    OutOfSequences,
    PlanStateError,
    StaleHandle,
)
from tests.verify._hooks import corrupt

if os.environ.get("KVPOOL_CORE") == "model":
    pytest.skip("about the compiled core", allow_module_level=True)

FORMATS = ("block_tables", "seq_lens", "slot_mapping", "positions", "cu_q_lens", "slot_ids")


class Watched:
    """A pool that is checked after every call, and that no refused call changes."""

    def __init__(self, *args, **options):
        self.pool = Pool(*args, **{"max_seqs": 8, "seed": 1, **options})

    def __getattr__(self, name):
        value = getattr(self.pool, name)
        if not callable(value):
            return value

        def call(*args, **options):
            before = self.pool.fingerprint(), self.pool.digest()
            try:
                return value(*args, **options)
            except Exception:
                assert (self.pool.fingerprint(), self.pool.digest()) == before
                raise
            finally:
                self.pool.check()

        return call

    def plan(self, rows=4, tokens=64, **options):
        return Plan(self.pool, rows, tokens, **{"formats": FORMATS, "table_width": 8, **options})

    def grow(self, handles, num_new):
        plan = self.plan()
        self.step(plan, handles, num_new)
        if plan.is_pending:
            self.done(plan)

    def tables(self, handle):
        return [self.table(handle, group).tolist() for group in range(len(self.options.groups))]


def free_order(pool):
    """Ids of arena 0 in the order in which they will be taken, where the first group has it for itself."""
    other = pool.open(4 * pool.stats().free)
    found = [entry[0] for entry in pool.table(other).tolist()]
    pool.close(other)
    return found


@pytest.fixture
def full_and_window():
    """Blocks of 4 tokens; the window of 6 has two ids for each."""
    return Watched(64, 4, groups=[Group.full(), Group.window(6, columns=2)])


# ---- open, step, letting go ------------------------------------------------------------------------------------


def test_open_takes_entries_group_by_group(full_and_window):
    handle = full_and_window.open(9)
    assert full_and_window.tables(handle) == [[[1], [2], [3]], [[4, 5], [6, 7], [8, 9]]]
    assert (full_and_window.num_tokens(handle), full_and_window.capacity(handle)) == (0, 12)
    assert full_and_window.table(full_and_window.open(), 1).shape == (0, 2)


def test_step_takes_group_by_group_and_rows_in_order(full_and_window):
    pool = full_and_window
    plan = pool.plan()
    rows = [pool.open(), pool.open()]
    pool.step(plan, rows, [5, 2])
    full, window = plan.groups
    assert full.block_tables[:, :3].tolist() == [[[1], [2], [0]], [[3], [0], [0]]]
    assert window.block_tables[:, :3].tolist() == [[[4, 5], [6, 7], [0, 0]], [[8, 9], [0, 0], [0, 0]]]
    assert full.slot_mapping.tolist() == [[4, 5, 6, 7, 8, 12, 13]]
    assert window.slot_mapping.tolist() == [[16, 17, 18, 19, 24, 32, 33], [20, 21, 22, 23, 28, 36, 37]]
    assert (plan.seq_lens.tolist(), plan.positions.tolist()) == ([5, 2], [0, 1, 2, 3, 4, 0, 1])
    assert (plan.cu_q_lens.tolist(), plan.slot_ids.tolist()) == ([0, 5, 7], [0, 1])
    assert window.block_tables.shape == (2, 8, 2) and window.block_tables.dtype == "int32"
    assert full.dirty_rows.tolist() == window.dirty_rows.tolist() == [0, 1]
    assert full.kv_starts.tolist() == window.kv_starts.tolist() == [0, 0]
    pool.done(plan)
    pool.step(plan, rows, 1)  # within the blocks of both
    assert full.dirty_rows.tolist() == window.dirty_rows.tolist() == []
    assert window.slot_mapping.tolist() == [[25, 34], [29, 38]]


def test_window_lets_go_when_a_step_passes(full_and_window):
    pool = full_and_window
    plan = pool.plan()
    handle = pool.open()
    pool.step(plan, [handle], 9)
    assert pool.tables(handle)[1] == [[4, 5], [6, 7], [8, 9]]
    pool.done(plan)  # (i + 1) * 4 <= 9 - 6 + 1: entry 0
    assert pool.tables(handle) == [[[1], [2], [3]], [[0, 0], [6, 7], [8, 9]]]
    assert (pool.stats().used, pool.stats().shared) == (7, 0)
    pool.step(plan, [handle], 4)  # 5 was released last: full takes it, the window 4 and then a new one
    full, window = plan.groups
    assert full.block_tables[0, :5].tolist() == [[1], [2], [3], [5], [0]]
    assert window.block_tables[0, :5].tolist() == [[0, 0], [6, 7], [8, 9], [4, 10], [0, 0]]
    assert (full.kv_starts.tolist(), window.kv_starts.tolist()) == ([0], [4])
    assert window.slot_mapping.tolist() == [[33, 34, 35, 16], [37, 38, 39, 40]]
    pool.close(handle)  # nothing waits: the step is pending, so all of it does
    assert (pool.stats().used, pool.stats().limbo) == (0, 10)
    pool.done(plan)
    assert (pool.stats().free, pool.stats().limbo) == (63, 0)


def test_close_releases_group_by_group_the_last_first():
    pool = Watched(12, 4, groups=[Group.full(), Group.window(6, columns=2)])
    handle = pool.open(8)
    assert pool.tables(handle) == [[[1], [2]], [[3, 4], [5, 6]]]
    pool.close(handle)  # 2, 1, 6, 5, 4, 3: the last is taken first
    assert pool.tables(pool.open(12)) == [[[3], [4], [5]], [[6, 1], [2, 7], [8, 9]]]


def test_kept_tokens_stay_and_a_chunk_goes_as_a_whole():
    pool = Watched(64, 4, groups=[Group.window(6, keep=5), Group.chunk(12)])
    handle = pool.open()
    pool.grow([handle], 23)  # window: i >= 2 and (i + 1) * 4 <= 18; chunk: (i + 1) * 4 <= 12
    assert pool.tables(handle) == [[[1], [2], [0], [0], [5], [6]], [[0], [0], [0], [10], [11], [12]]]
    plan = pool.plan()
    pool.step(plan, [handle], 0)
    assert [group.kv_starts.tolist() for group in plan.groups] == [[16], [12]]
    assert plan.groups[1].block_tables[0].tolist() == [[0], [0], [0], [10], [11], [12], [0], [0]]


def test_without_reserved_blocks_holes_are_minus_one():
    pool = Watched(8, 4, reserved_blocks=0, groups=[Group.window(4)])
    handle = pool.open()
    pool.grow([handle], 9)
    assert pool.tables(handle) == [[[-1], [1], [2]]]
    plan = pool.plan(table_width=4)
    pool.step(plan, [handle], 0, pad_to=(2, 3))
    assert plan.groups[0].block_tables.tolist() == [[[-1], [1], [2], [-1]], [[-1]] * 4]
    assert (plan.groups[0].slot_mapping.tolist(), plan.groups[0].kv_starts.tolist()) == ([[-1, -1, -1]], [4, 0])


def test_lookahead_keeps_more():
    pool = Watched(8, 4, lookahead=2, groups=[Group.window(4)])
    handle = pool.open()
    pool.grow([handle], 8)  # p = 6: nothing ends at or before 3
    assert pool.tables(handle) == [[[1], [2]]]
    pool.grow([handle], 1)  # p = 7: entry 0
    assert pool.tables(handle) == [[[0], [2], [3]]]
    pool.truncate(handle, 7)
    assert pool.tables(handle) == [[[0], [2]]]


def test_larger_blocks_and_capacity():
    pool = Watched(32, 4, groups=[Group.full(block_size=8), Group.window(6, block_size=16)])
    handle = pool.open(9)
    assert pool.tables(handle) == [[[1], [2]], [[3]]]
    assert pool.capacity(handle) == 16  # of the group with the smaller blocks
    plan = pool.plan(table_width=7)
    pool.step(plan, [handle], 10)
    assert plan.groups[0].slot_mapping.tolist() == [[8, 9, 10, 11, 12, 13, 14, 15, 16, 17]]
    assert plan.groups[1].slot_mapping.tolist() == [list(range(48, 58))]
    assert [group.block_tables.shape for group in plan.groups] == [(1, 4, 1), (1, 2, 1)]
    pool.done(plan)
    pool.step(plan, [handle], 7)  # 17 tokens: both need one more
    assert pool.tables(handle) == [[[1], [2], [4]], [[3], [5]]]
    assert pool.capacity(handle) == 24
    with pytest.raises(CapacityExceeded):
        pool.step(pool.plan(table_width=5), [handle], 16)  # 33 tokens, 5 entries, of which the plan has 3


def test_late_done_lets_go_in_the_order_of_steps():
    pool = Watched(8, 4, groups=[Group.window(4)])
    handle = pool.open()
    first, second = pool.plan(), pool.plan()
    pool.step(first, [handle], 8)
    pool.step(second, [handle], 4)
    pool.done(second)
    assert pool.tables(handle) == [[[1], [2], [3]]]
    pool.done(first)  # 8 tokens: 1 waits for the second; 12 tokens: 2 goes at once, then 1 drains
    assert pool.tables(handle) == [[[0], [0], [3]]]
    assert pool.stats().limbo == 0
    assert free_order(pool) == [1, 2, 4, 5, 6, 7]


def test_what_a_window_lets_go_waits_for_later_steps():
    pool = Watched(8, 4, groups=[Group.window(4)])
    handle = pool.open()
    first, second = pool.plan(), pool.plan()
    pool.step(first, [handle], 8)
    pool.step(second, [handle], 4)
    pool.done(first)
    assert (pool.tables(handle), pool.stats().limbo) == ([[[0], [2], [3]]], 1)
    pool.rollback(second)
    assert (pool.tables(handle), pool.stats().limbo) == ([[[0], [2]]], 0)
    assert pool.num_tokens(handle) == 8


def test_closed_rows_let_nothing_go():
    pool = Watched(8, 4, groups=[Group.window(4)])
    plan = pool.plan()
    pool.step(plan, [handle := pool.open()], 8)
    pool.close(handle)
    other = pool.open(8)  # in the same slot of the pool
    pool.done(plan)
    assert pool.tables(other) == [[[3], [4]]]


# ---- fork, copies, truncate ------------------------------------------------------------------------------------


def test_fork_shares_what_is_no_hole_and_writers_copy_all_columns(full_and_window):
    pool = full_and_window
    parent = pool.open()
    pool.grow([parent], 9)
    (child,) = pool.fork(parent)
    assert pool.tables(child) == pool.tables(parent) == [[[1], [2], [3]], [[0, 0], [6, 7], [8, 9]]]
    assert pool.stats().shared == 7
    plan = pool.plan()
    pool.step(plan, [parent, child], 1)  # the parent is judged first: it moves, the child writes in place
    assert plan.groups[0].copies.tolist() == [[3, 5, 1]]
    assert plan.groups[1].copies.tolist() == [[8, 4, 1], [9, 10, 1]]
    assert pool.tables(parent) == [[[1], [2], [5]], [[0, 0], [6, 7], [4, 10]]]
    assert pool.tables(child) == [[[1], [2], [3]], [[0, 0], [6, 7], [8, 9]]]
    pool.rollback(plan)
    assert pool.tables(parent) == pool.tables(child)
    assert (pool.stats().used, pool.stats().shared) == (7, 7)
    pool.step(plan, [parent, child], 1)
    assert plan.groups[1].copies.tolist() == [[8, 4, 1], [9, 10, 1]]
    assert plan.groups[1].dirty_rows.tolist() == [0, 1]
    pool.done(plan)
    pool.close([parent, child])
    assert (pool.stats().used, pool.stats().free) == (0, 63)


def test_fork_into_no_sequences_shares_nothing(full_and_window):
    pool = full_and_window
    row = pool.open()
    pool.grow([row], 9)
    before = pool.stats()
    assert len(pool.fork(row, 0)) == 0
    assert pool.stats() == before and before.shared == 0


def test_rows_closed_during_a_step_are_skipped_by_its_rollback(full_and_window):
    pool = full_and_window
    parent = pool.open()
    pool.grow([parent], 6)
    (child,) = pool.fork(parent)
    plan = pool.plan()
    pool.step(plan, [child, parent], [3, 0])
    pool.close(int(child))
    pool.rollback(plan)
    assert pool.tables(parent) == [[[1], [2]], [[3, 4], [5, 6]]]
    assert pool.stats().used == 6


def test_truncate_refuses_what_a_window_let_go():
    pool = Watched(32, 4, groups=[Group.full(), Group.window(4, keep=3)])
    handle = pool.open()
    pool.grow([handle], 16)  # entries 1 and 2 went: (i + 1) * 4 <= 13
    assert pool.tables(handle)[1] == [[5], [0], [0], [8]]
    for length in (4, 12, 14):
        with pytest.raises(ValueError, match="15"):
            pool.truncate(handle, length)
    pool.truncate(handle, 15)
    assert pool.tables(handle) == [[[1], [2], [3], [4]], [[5], [0], [0], [8]]]
    pool.truncate(handle, 3)  # all of it is kept
    assert pool.tables(handle) == [[[1]], [[5]]]
    pool.grow([handle], 9)  # 12: entry 1 again
    assert pool.tables(handle)[1][:2] == [[5], [0]]
    with pytest.raises(ValueError, match="least length"):
        pool.truncate([handle], [4])


def test_truncate_in_a_chunk():
    pool = Watched(32, 4, groups=[Group.chunk(8)])
    handle = pool.open()
    pool.grow([handle], 13)
    assert pool.tables(handle) == [[[0], [0], [3], [4]]]
    with pytest.raises(ValueError, match="8"):
        pool.truncate(handle, 7)
    pool.truncate(handle, 8)
    assert pool.tables(handle) == [[[0], [0]]]
    pool.grow([handle], 1)
    assert pool.tables(handle) == [[[0], [0], [3]]]
    plan = pool.plan()
    pool.step(plan, [handle], 1)
    with pytest.raises(PlanStateError):
        pool.truncate(handle, 9)


def test_reserve_takes_entries_and_no_state():
    pool = Watched(32, 4, groups=[Group.full(), Group.window(4), Group.state(2)])
    handle = pool.open()
    plan = pool.plan()
    pool.reserve(plan, [handle], 5)
    assert pool.tables(handle) == [[[1], [2]], [[3], [4]], []]
    assert (plan.groups[2].state_src.tolist(), plan.groups[2].state_dst.tolist()) == ([-1], [-1])
    pool.rollback(plan)
    assert pool.tables(handle) == [[], [], []]
    pool.reserve(plan, [handle], 5)
    pool.done(plan)
    pool.step(plan, [handle], 5)
    assert pool.tables(handle) == [[[1], [2]], [[3], [4]], [0]]
    assert plan.groups[0].copies.tolist() == []


# ---- arenas ----------------------------------------------------------------------------------------------------


@pytest.fixture
def two_arenas():
    """4 blocks to be had in arena 0, 3 in arena 1."""
    return Watched(5, 4, max_blocks_per_seq=8, groups=[Group.full(), Group.window(4, arena=1, num_blocks=4)])


def test_arenas_number_their_blocks_apart(two_arenas):
    handle = two_arenas.open(5)
    assert two_arenas.tables(handle) == [[[1], [2]], [[1], [2]]]
    assert [two_arenas.stats(k).num_blocks for k in (0, 1)] == [5, 4]
    assert [(s.used, s.free, s.reserved, s.sequences) for s in map(two_arenas.stats, (0, 1))] == [
        (2, 2, 1, 1), (2, 1, 1, 1)]  # fmt: skip
    with pytest.raises(ValueError, match="2"):
        two_arenas.stats(2)


def test_out_of_blocks_names_the_lowest_arena_that_is_short(two_arenas):
    with pytest.raises(OutOfBlocks) as caught:
        two_arenas.open(16)
    assert (caught.value.arena, caught.value.needed, caught.value.short_by, caught.value.row) == (1, 4, 1, -1)
    with pytest.raises(OutOfBlocks) as caught:
        two_arenas.open(20)
    assert (caught.value.arena, caught.value.needed, caught.value.short_by) == (0, 5, 1)
    rows = [two_arenas.open() for _ in range(3)]
    plan = two_arenas.plan()
    with pytest.raises(OutOfBlocks) as caught:  # row 1 is short in arena 1, row 2 in both
        two_arenas.step(plan, rows, [8, 8, 4])
    error = caught.value
    assert (error.row, error.arena, error.needed, error.short_by, error.handle) == (1, 1, 5, 2, rows[1])
    assert "arena 1" in str(error) and error.blank == 3
    assert not two_arenas.can(rows, [8, 8, 4]) and two_arenas.can(rows, [8, 4, 0])
    two_arenas.step(plan, rows, [8, 8, 4], partial=True)
    assert plan.served.tolist() == [1, 0, 1]
    assert (plan.seq_lens.tolist(), plan.num_tokens) == ([8, 0, 4], 12)
    assert [two_arenas.tables(row) for row in rows] == [[[[1], [2]], [[1], [2]]], [[], []], [[[3]], [[3]]]]
    assert plan.groups[1].slot_mapping.tolist() == [[*range(4, 16)]]


def test_watermark_is_of_arena_0():
    pool = Watched(6, 4, watermark=2, groups=[Group.full(), Group.full(arena=1, num_blocks=4)])
    with pytest.raises(OutOfBlocks) as caught:
        pool.open(16)
    assert (caught.value.arena, caught.value.short_by) == (0, 1)
    pool.open(12)
    assert pool.stats(1).free == 0


def test_partial_undoes_a_row_in_all_groups(two_arenas):
    parent = two_arenas.open()
    two_arenas.grow([parent], 6)
    (child,) = two_arenas.fork(parent)
    other = two_arenas.open()
    plan = two_arenas.plan()
    two_arenas.step(plan, [child, parent, other], [8, 1, 1], partial=True)
    assert plan.served.tolist() == [0, 1, 0]  # 1 + 2 blocks of the 2 in arena 0; 1 of the 1 in arena 1; no more
    assert plan.groups[0].copies.tolist() == [[2, 3, 2]]
    assert plan.groups[1].copies.tolist() == [[2, 3, 2]]
    assert two_arenas.tables(child) == [[[1], [2]], [[1], [2]]]


def test_limits_are_judged_before_anything(full_and_window):
    pool = full_and_window
    rows = [pool.open(), pool.open()]
    with pytest.raises(CapacityExceeded):
        pool.step(pool.plan(tokens=8), rows, 5)
    with pytest.raises(ValueError):
        pool.step(pool.plan(), rows, [1, -1])
    with pytest.raises(ValueError):
        pool.step(pool.plan(), [rows[0], rows[0]], 1)
    with pytest.raises(CapacityExceeded):
        pool.open(64 * 4)
    pool.close(rows[0])
    with pytest.raises(StaleHandle):
        pool.step(pool.plan(), rows, 1)
    for _ in range(7):
        pool.open()
    with pytest.raises(OutOfSequences):
        pool.open()


# ---- states ----------------------------------------------------------------------------------------------------


@pytest.fixture
def with_state():
    return Watched(16, 4, groups=[Group.state(4), Group.full()])


def states(plan, group=0):
    return plan.groups[group].state_src.tolist(), plan.groups[group].state_dst.tolist()


def test_a_step_replaces_the_state(with_state):
    pool, plan = with_state, with_state.plan()
    handle = pool.open(2)
    assert pool.tables(handle) == [[], [[1]]]
    pool.step(plan, [handle], 2)
    assert (states(plan), pool.tables(handle)[0]) == (([-1], [0]), [0])
    pool.done(plan)
    pool.step(plan, [handle], 1)
    assert (states(plan), pool.stats(1).used) == (([0], [1]), 2)
    pool.rollback(plan)
    assert (pool.tables(handle)[0], pool.stats(1).used) == ([0], 1)
    pool.step(plan, [handle], 1, pad_to=(3, 2))
    assert states(plan) == ([0, -1, -1], [1, -1, -1])
    pool.done(plan)
    assert (pool.tables(handle)[0], pool.stats(1).used) == ([1], 1)
    pool.step(plan, [handle], 0)
    assert states(plan) == ([-1], [-1])
    pool.done(plan)
    pool.close(handle)
    assert (pool.stats(1).free, pool.stats(1).num_blocks, pool.stats(1).reserved) == (4, 4, 0)


def test_forks_share_a_state_until_they_step(with_state):
    pool, plan = with_state, with_state.plan()
    parent = pool.open()
    pool.grow([parent], 3)
    (child,) = pool.fork(parent)
    assert (pool.tables(child), pool.stats(1).shared) == ([[0], [[1]]], 1)
    pool.step(plan, [parent, child], 1)
    assert states(plan) == ([0, 0], [1, 2])
    assert plan.groups[1].copies.tolist() == [[1, 2, 3]]
    pool.rollback(plan)
    assert (pool.tables(parent)[0], pool.tables(child)[0], pool.stats(1).shared) == ([0], [0], 1)
    pool.step(plan, [child], 1)
    pool.done(plan)
    assert (pool.tables(parent)[0], pool.tables(child)[0]) == ([0], [1])
    pool.step(plan, [child, parent], 1)
    (grandchild,) = pool.fork(parent)  # it has the state that the pending plan writes
    assert pool.tables(grandchild)[0] == pool.tables(parent)[0]
    with pytest.raises(PlanStateError):
        pool.rollback(plan)
    pool.done(plan)
    pool.close([parent, int(child), int(grandchild)])
    assert pool.stats(1).used == pool.stats().used == 0


def test_states_in_flight_need_slots(with_state):
    pool = with_state
    handle, other = pool.open(), pool.open()
    plans = [pool.plan() for _ in range(4)]
    for plan in plans[:3]:
        pool.step(plan, [handle], 1)
    assert (states(plans[2]), pool.stats(1).free) == (([1], [2]), 1)
    with pytest.raises(OutOfBlocks) as caught:
        pool.step(plans[3], [handle, other], 1)
    assert (caught.value.arena, caught.value.row, caught.value.needed) == (1, 1, 2)
    pool.done(plans[0])  # its row had no state before
    pool.done(plans[1])
    assert pool.stats(1).limbo == 1
    pool.done(plans[2])
    assert (pool.tables(handle)[0], pool.stats(1).free) == ([2], 3)


def test_truncate_with_a_state_keeps_the_length(with_state):
    pool = with_state
    handle = pool.open()
    pool.grow([handle], 3)
    plan = pool.plan()
    pool.reserve(plan, [handle], 6)
    pool.done(plan)
    for length in (2, 0):
        with pytest.raises(ValueError, match="state"):
            pool.truncate(handle, length)
    pool.truncate(handle, 3)
    assert pool.tables(handle) == [[0], [[1]]]


def test_in_order_pools_write_states_in_place_and_let_go_at_once():
    pool = Watched(32, 4, in_order=True, groups=[Group.window(4), Group.state(4)])
    handle, plan = pool.open(), pool.plan()
    pool.step(plan, [handle], 8)
    assert plan.groups[0].block_tables[0, :3].tolist() == [[1], [2], [0]]  # what this step reads
    assert (states(plan, 1), pool.tables(handle)) == (([-1], [0]), [[[0], [2]], [0]])
    pool.step(plan, [handle], 1)
    assert plan.groups[0].block_tables[0, :3].tolist() == [[0], [2], [1]]
    assert states(plan, 1) == ([0], [0])
    (child,) = pool.fork(handle)
    pool.step(plan, [handle, child], 1)  # slot 0 has one reference then, but the first row reads it
    assert states(plan, 1) == ([0, 0], [1, 2])
    assert pool.stats(1).used == 2
    assert plan.groups[0].copies.tolist() == [[1, 3, 1]]


# ---- plans, reading, refusals ----------------------------------------------------------------------------------


def test_arrays_of_groups(full_and_window):
    plan = full_and_window.plan()
    for name in ("block_tables", "slot_mapping", "copies", "dirty_rows"):
        with pytest.raises(ValueError, match=r"plan\.groups"):
            getattr(plan, name)
    state = Watched(8, 4, groups=[Group.full(), Group.state(2)]).plan(formats=("seq_lens",)).groups
    assert [hasattr(state[1], name) for name in ("block_tables", "kv_starts", "copies", "state_src")] == [0, 0, 0, 1]
    assert [hasattr(state[0], name) for name in ("block_tables", "slot_mapping", "kv_starts")] == [0, 0, 1]
    for options in ({"formats": "csr"}, {"dtype": {"block_tables": "int64"}}):
        with pytest.raises(ValueError):
            full_and_window.plan(**options)
    assert Plan(Pool(8, 4), 1).groups is None


def test_forgotten_rows_are_dirty_in_all_groups(full_and_window):
    pool, plan = full_and_window, full_and_window.plan()
    pool.step(plan, [handle := pool.open()], 1)
    pool.done(plan)
    pool.step(plan, [handle], 1)
    assert plan.groups[1].dirty_rows.tolist() == []
    pool.done(plan)
    plan.bind()
    pool.step(plan, [handle], 1)
    assert [group.dirty_rows.tolist() for group in plan.groups] == [[0], [0]]
    pool.rollback(plan)
    pool.step(plan, [], [], pad_to=(2, 0))
    assert [group.dirty_rows.tolist() for group in plan.groups] == [[0, 1], [0, 1]]
    assert not plan.groups[1].block_tables.any()


def test_kv_starts_without_block_tables_follow_the_rows():
    pool = Watched(64, 4, groups=[Group.window(6), Group.full()])
    plan = pool.plan(formats=("seq_lens",))
    long, short = pool.open(), pool.open()
    pool.grow([long, short], [17, 2])
    for rows, starts in (([long, short], [12, 0]), ([short, long], [0, 12]), ([long], [12]), ([long, short], [12, 0])):
        pool.step(plan, rows, 0, pad_to=(3, 0))
        assert plan.groups[0].kv_starts.tolist() == [*starts, *[0] * (3 - len(starts))]
        assert plan.groups[1].kv_starts.tolist() == [0, 0, 0]
        assert plan.groups[0].dirty_rows.tolist() == []
        pool.done(plan)
    pool.step(plan, [long], 1)
    pool.done(plan)
    pool.grow([long], 3)  # 21 tokens: entries up to 16 leave
    pool.step(plan, [long], 1)
    assert plan.groups[0].kv_starts.tolist() == [16]


def test_groups_of_a_plan_are_made_by_a_plan(full_and_window):
    kind = type(full_and_window.plan().groups[0])
    for make in (kind, lambda: kind(None), lambda: kind.__new__(kind), lambda: kind(object())):
        with pytest.raises(TypeError, match="a Plan makes its groups"):
            make()


def test_group_and_arena_out_of_range_name_the_limits(full_and_window):
    handle = full_and_window.open()
    for wrong in (-1, 2, 2**40):
        for call in (full_and_window.table, full_and_window.kv_len):
            with pytest.raises(ValueError, match=rf"group is out of range \({wrong}\), it must be in 0 \.\. 1$"):
                call(handle, wrong)
    for wrong in (-1, 1, 2**40):
        with pytest.raises(ValueError, match=rf"arena is out of range \({wrong}\), it must be in 0 \.\. 0$"):
            full_and_window.stats(wrong)
    plain = Pool(8, 4)
    with pytest.raises(ValueError, match=r"must be in 0 \.\. 0$"):
        plain.table(plain.open(), 1)
    with pytest.raises(ValueError, match=r"must be in 0 \.\. 0$"):
        plain.stats(-1)


def test_truncate_names_the_first_group_that_let_go():
    pool = Watched(64, 4, groups=[Group.full(), Group.window(11), Group.window(6)])
    handle = pool.open()
    pool.grow([handle], 17)
    for length, group in ((12, 1), (15, 2)):
        with pytest.raises(ValueError, match=rf"group {group} let go .* the least length that is left is 17$"):
            pool.truncate(handle, length)


def test_options_make_another_pool_like_it(full_and_window):
    options = full_and_window.options
    assert options.groups == (Group.full(), Group.window(6, columns=2)) and options.lookahead == 0
    other = Pool(**options._asdict())
    assert other.fingerprint() == full_and_window.fingerprint()
    assert other.fingerprint() != Pool(**options._replace(groups=options.groups[::-1])._asdict()).fingerprint()


def test_equal_calls_give_equal_digests():
    pools = [Watched(32, 4, groups=[Group.full(), Group.window(4), Group.state(4)]) for _ in range(2)]
    for pool in pools:
        handle = pool.open(3)
        pool.grow([handle], 9)
        pool.grow([handle, *pool.fork(handle)], 1)
    assert pools[0].digest() == pools[1].digest() and pools[0].fingerprint() == pools[1].fingerprint()
    pools[0].close(pools[0].open())
    assert pools[0].digest() != pools[1].digest()


def test_steps_leave_no_object_behind():
    pool = Pool(256, 4, groups=[Group.full(), Group.window(8, columns=2), Group.state(9)])
    plan = Plan(pool, 2, formats=FORMATS)
    rows = np.array([pool.open(), pool.open()], np.int64)

    def decode(steps):
        for _ in range(steps):
            pool.step(plan, rows, 1)
            pool.done(plan)

    decode(20)
    before = sys.getallocatedblocks()
    decode(200)
    assert sys.getallocatedblocks() - before <= 1  # the int `before` itself


def test_reset_empties_all_arenas():
    pool = Watched(32, 4, groups=[Group.full(), Group.window(4, arena=1, num_blocks=9), Group.state(4)])
    plan = pool.plan()
    pool.step(plan, [handle := pool.open()], 9)
    pool.reset()
    assert not plan.is_pending and not pool.is_open(handle)
    assert [pool.stats(k).used for k in range(3)] == [0, 0, 0]
    pool.step(plan, [pool.open()], 9)
    assert plan.groups[0].block_tables[0, :3].tolist() == plan.groups[1].block_tables[0, :3].tolist() == [[1], [2], [3]]
    assert states(plan, 2) == ([-1], [0])
    pool.pool.shutdown()


def test_deferred_closes_release_all_groups(full_and_window):
    handle = full_and_window.open(9)
    full_and_window.defer_close(handle)
    assert full_and_window.stats().used == 0


def test_close_finished(full_and_window):
    rows = [full_and_window.open(4), full_and_window.open(4)]
    assert full_and_window.close_finished(rows, [True, False]) == 1
    assert full_and_window.stats().used == 3


@pytest.mark.parametrize("call", [
    lambda pool, plan, handle: pool.open([1, 2, 3]),
    lambda pool, plan, handle: pool.unshare(plan, [handle], 0, group=1),
    lambda pool, plan, handle: pool.compact(handle, 0, group=1),
    lambda pool, plan, handle: pool.evict_blocks(handle, [0], group=1),
    lambda pool, plan, handle: pool.table(handle, 2),
    lambda pool, plan, handle: pool.table(handle, -1),
])  # fmt: skip
def test_calls_that_know_no_groups(full_and_window, call):
    handle = full_and_window.open()
    full_and_window.grow([handle], 5)
    with pytest.raises(ValueError):
        call(full_and_window, full_and_window.plan(), handle)


def test_pools_with_groups_are_not_recorded():
    from kvpool.testing import RecordedPool

    with pytest.raises(ValueError, match="layer groups"):
        RecordedPool(16, 4, groups=[Group.full()])


@pytest.mark.parametrize("make", [
    lambda: {"groups": []},
    lambda: {"groups": [Group.full()] * 9},
    lambda: {"groups": [Group.full(block_size=12)]},
    lambda: {"groups": [Group.full(block_size=2)]},
    lambda: {"groups": [Group.full(), Group.full(arena=2, num_blocks=4)]},
    lambda: {"groups": [Group.full(arena=1, num_blocks=4)]},
    lambda: {"groups": [Group.full(arena=k, num_blocks=4 if k else None) for k in (0, 8)]},
    lambda: {"groups": [Group.full(), Group.full(arena=1)]},
    lambda: {"groups": [Group.full(num_blocks=16)]},
    lambda: {"groups": [Group.full(), *[Group.full(arena=1, num_blocks=n) for n in (4, 5)]]},
    lambda: {"groups": [Group.full(), Group.full(arena=1, num_blocks=1)]},
    lambda: {"groups": [Group.full(), Group.state(2, blocks=30)], "prefix_cache": True},
    lambda: {"groups": [Group.full()], "lookahead": -1},
    lambda: {"groups": [Group.window(4), Group.chunk(2)], "lookahead": 2},
    lambda: {"groups": [Group.window(0)]},
    lambda: {"groups": [Group.window(4, keep=4)]},
    lambda: {"groups": [Group.window(4, keep=-1)]},
    lambda: {"groups": [Group.chunk(0)]},
    lambda: {"groups": [Group.state(0)]},
    lambda: {"groups": [Group.full(columns=0)]},
    lambda: {"groups": [Group.full(columns=2)], "max_blocks_per_seq": 2**30},  # ids of a table
    lambda: {"groups": [Group.full(block_size=8)], "max_blocks_per_seq": 2**31 - 1},  # base blocks, rounded up
])  # fmt: skip
def test_pools_that_cannot_be(make):
    with pytest.raises(ValueError):
        Pool(16, 4, max_seqs=4, **make())


@pytest.mark.parametrize("call", [
    lambda pool, plan, handle: pool.step(plan, [handle], 1),
    lambda pool, plan, handle: pool.reserve(plan, [handle], 1),
    lambda pool, plan, handle: pool.can([handle], 1),
    lambda pool, plan, handle: pool.fork(handle),
    lambda pool, plan, handle: pool.truncate(handle, 0),
    lambda pool, plan, handle: pool.close(handle),
    lambda pool, plan, handle: pool.close_finished([handle], np.array([True])),
    lambda pool, plan, handle: pool.table(handle, 1),
    lambda pool, plan, handle: pool.num_tokens(handle),
    lambda pool, plan, handle: pool.capacity(handle),
])  # fmt: skip
def test_handle_of_another_pool_is_foreign(full_and_window, call):
    """The other pool has the same groups, and a sequence in the same place."""
    pool, plan = full_and_window, full_and_window.plan()
    other = Watched(64, 4, groups=pool.options.groups)
    pool.grow([pool.open()], 9)
    handle = other.open()
    other.grow([handle], 9)
    with pytest.raises(ForeignHandle):
        call(pool, plan, handle)
    assert not plan.is_pending and other.num_tokens(handle) == 9


def test_plan_of_another_pool_is_refused(full_and_window):
    pool, other = full_and_window, Watched(64, 4, groups=full_and_window.options.groups)
    plan, handle = other.plan(), pool.open()
    with pytest.raises(ValueError, match="another pool"):
        pool.step(plan, [handle], 1)
    assert not plan.is_pending and pool.num_tokens(handle) == 0


def test_plan_refuses_more_blocks_in_a_row_than_an_index_counts():
    pool = Pool(16, 4, max_seqs=4, groups=[Group.full(columns=4)])
    with pytest.raises(ValueError, match=f"a row has {2**32} block ids, the limit is {2**31 - 1}"):
        Plan(pool, 4, 4, table_width=2**30)


def test_groups_are_groups():
    for groups in ("full", [None], [(4, 1)], 7, (group for group in [Group.full()])):
        with pytest.raises(TypeError):
            Pool(16, 4, groups=groups)
    for wrong in (2.0, "2", None, True):
        with pytest.raises(TypeError):
            Group.window(wrong)
    with pytest.raises(AttributeError):
        Group.full().columns = 2
    many = Pool(16, 4, groups=[Group.full(arena=k, num_blocks=4 + k if k else None) for k in range(8)])
    assert [many.stats(k).num_blocks for k in range(8)] == [16, 5, 6, 7, 8, 9, 10, 11]
    later = Pool(16, 4, groups=[Group.full(), Group.full(arena=1, num_blocks=8), Group.full(arena=1, num_blocks=8),
                                Group.full(arena=1)])  # fmt: skip
    assert later.stats(1).num_blocks == 8


def test_check_finds_faults_in_groups(full_and_window):
    pool = full_and_window
    pool.grow([pool.open()], 9)
    for what in ("refcount", "length", "num_used", "sum_tokens"):
        other = Watched(64, 4, groups=pool.options.groups)
        other.grow([other.open()], 9)
        corrupt(other.pool, what, 0 if what == "length" else 3)
        with pytest.raises(CorruptState):
            other.pool.check()
    for what in ("table", "gone", "due"):
        other = Watched(64, 4, groups=pool.options.groups)
        other.grow([other.open()], 9)
        corrupt(other.pool, what, 0)
        with pytest.raises(CorruptState):
            other.pool.check()


@pytest.mark.parametrize(("kind", "names"), [
    ("full", ["size", "keep", "blocks"]),
    ("window", ["blocks"]),
    ("chunk", ["keep", "blocks"]),
    ("state", ["keep", "block_size", "columns", "arena", "num_blocks"]),
])  # fmt: skip
def test_group_with_what_its_kind_does_not_use_is_refused(kind, names):
    group = Group(kind, 0 if kind == "full" else 8)
    for name in ("size", "keep", "block_size", "columns", "arena", "num_blocks", "blocks"):
        if name in names:
            with pytest.raises(ValueError, match=rf"\[Group\] {name} is 3, a group of kind {kind} has no {name}"):
                dataclasses.replace(group, **{name: 3})
        else:
            assert getattr(dataclasses.replace(group, **{name: 3}), name) == 3
    with pytest.raises(ValueError, match="out of range"):
        dataclasses.replace(group, columns=1 << 20)


def test_plan_that_was_refused_half_way_forgets_nothing_in_its_finalizer():
    pool = Pool(64, 1 << 20, max_seqs=4, groups=[Group.full(), Group.full(arena=1, num_blocks=1 << 12)])

    class Forgets(Plan):
        def __del__(self):
            self.bind()

    for _ in range(20):
        with pytest.raises(ValueError, match="slots"):
            Forgets(pool, 64, 64, formats=("block_tables", "slot_mapping"), table_width=4)
    pool.check()
