"""Layer groups by the numbers of docs/core.md, worked out by hand. `check` runs after every call of a pool here."""

import dataclasses
import os

import pytest

from kvpool import Group, Plan, Pool
from kvpool.errors import (
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


@pytest.fixture
def full_and_window():
    """Blocks of 4 tokens; the window of 6 has two ids for each."""
    return Watched(64, 4, groups=[Group.full(), Group.window(6, columns=2)])


# ---- open, step, letting go ------------------------------------------------------------------------------------


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


def states(plan, group=0):
    return plan.groups[group].state_src.tolist(), plan.groups[group].state_dst.tolist()


# ---- plans, reading, refusals ----------------------------------------------------------------------------------


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
