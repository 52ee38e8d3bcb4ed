"""Layer groups by the numbers of docs/core.md, worked out by hand. `check` runs after every call of a pool here."""

import dataclasses
import os

import pytest

from kvpool import Group, Plan, Pool
from kvpool.errors import (
    CapacityExceeded,
    OutOfBlocks,
    PlanStateError,
)

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
    found = [entry[0] for entry in pool.table(other, 0).tolist()]
    pool.close(other)
    return found


@pytest.fixture
def full_and_window():
    """Blocks of 4 tokens; the window of 6 has two ids for each."""
    return Watched(64, 4, groups=[Group.full(), Group.window(6, columns=2)])


# ---- open, step, letting go ------------------------------------------------------------------------------------


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
    assert full.kv_lens.tolist() == window.kv_lens.tolist() == [5, 2]
    assert plan.positions.tolist() == [0, 1, 2, 3, 4, 0, 1]
    assert (plan.cu_q_lens.tolist(), plan.slot_ids.tolist()) == ([0, 5, 7], [0, 1])
    assert window.block_tables.shape == (2, 8, 2) and window.block_tables.dtype == "int32"
    assert full.dirty_rows.tolist() == window.dirty_rows.tolist() == [0, 1]
    assert full.kv_starts.tolist() == window.kv_starts.tolist() == [0, 0]
    pool.done(plan)
    pool.step(plan, rows, 1)  # within the blocks of both
    assert full.dirty_rows.tolist() == window.dirty_rows.tolist() == []
    assert window.slot_mapping.tolist() == [[25, 34], [29, 38]]


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


def test_closed_rows_let_nothing_go():
    pool = Watched(8, 4, groups=[Group.window(4)])
    plan = pool.plan()
    pool.step(plan, [handle := pool.open()], 8)
    pool.close(handle)
    other = pool.open(8)  # in the same slot of the pool
    pool.done(plan)
    assert pool.tables(other) == [[[3], [4]]]


# ---- fork, copies, truncate ------------------------------------------------------------------------------------


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
    with pytest.raises(OutOfBlocks, match="arena 1"):
        two_arenas.step(two_arenas.plan(), [two_arenas.open()], 8)


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


# ---- states ----------------------------------------------------------------------------------------------------


@pytest.fixture
def with_state():
    return Watched(16, 4, groups=[Group.state(4), Group.full()])


def states(plan, group=0):
    return plan.groups[group].state_src.tolist(), plan.groups[group].state_dst.tolist()


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


# ---- plans, reading, refusals ----------------------------------------------------------------------------------


def test_arrays_of_groups(full_and_window):
    plan = full_and_window.plan()
    for name in ("block_tables", "seq_lens", "slot_mapping", "copies", "dirty_rows", "indptr"):
        with pytest.raises(ValueError, match=r"plan\.groups"):
            getattr(plan, name)
    state = Watched(8, 4, groups=[Group.full(), Group.state(2)]).plan(formats=("seq_lens",)).groups
    assert [hasattr(state[1], name) for name in ("block_tables", "kv_starts", "copies", "state_src")] == [0, 0, 0, 1]
    assert [hasattr(state[0], name) for name in ("block_tables", "slot_mapping", "kv_starts")] == [0, 0, 1]
    assert len(Plan(Pool(8, 4), 1).groups) == 1


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
