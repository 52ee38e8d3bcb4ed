"""Layer groups by the numbers of docs/core.md, worked out by hand; those of `make` hold for the core and its model."""

import dataclasses
from functools import partial

import numpy as np
import pytest

from kvpool import Group, Plan, Pool
from kvpool.errors import CapacityExceeded, OutOfBlocks
from kvpool.testing import ModelPlan, ModelPool

FORMATS = ("block_tables", "seq_lens", "slot_mapping", "positions")


@pytest.fixture(params=[(Pool, Plan), (ModelPool, ModelPlan)], ids=["core", "model"])
def make(request):
    """``make(num_blocks, block_size, *groups, **options)`` makes a pool and two plans; all pools are checked."""
    make_pool, make_plan = request.param
    pools = []

    def build(num_blocks, block_size, *groups, **options):
        pool = make_pool(num_blocks, block_size, groups=list(groups), **{"max_seqs": 8, **options})
        pools.append(pool)
        return pool, *(make_plan(pool, 4, 32, formats=FORMATS) for _ in range(2))

    yield build
    for pool in pools:
        pool.check()
        pool.shutdown()


def entries(pool, handle, group=0):
    """A table as a list; of ids where an entry has one."""
    table = pool.table(handle, group)
    return table[:, 0].tolist() if table.ndim == 2 and table.shape[1] == 1 else table.tolist()


def grow(pool, plan, handles, n):
    """A step that is done at once."""
    pool.step(plan, handles, n)
    pool.done(plan)


def refused(pool, call, error=ValueError, match=None):
    """A call that raises changes nothing."""
    before = pool.digest(), pool.fingerprint()
    with pytest.raises(error, match=match):
        call()
    assert (pool.digest(), pool.fingerprint()) == before


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


# ---- letting go -------------------------------------------------------------------------------------------


def test_truncate_refuses_what_a_group_let_go_and_names_the_first_of_them():
    pool = Pool(64, 4, groups=[Group.full(), Group.window(11), Group.window(6)])
    plan, handle = Plan(pool, 1, 17), pool.open()
    grow(pool, plan, [handle], 17)
    for length, group in ((12, 1), (15, 2)):
        match = rf"group {group} let go .* the least length that is left is 17$"
        refused(pool, partial(pool.truncate, handle, length), match=match)


def test_truncate_to_kept_tokens_is_accepted_and_to_those_behind_them_refused(make):
    pool, plan, _ = make(32, 4, Group.full(), Group.window(4, keep=3))
    handle = pool.open()
    grow(pool, plan, [handle], 16)  # entries 1 and 2 went: (i + 1) * 4 <= 13
    assert entries(pool, handle, 1) == [5, 0, 0, 8]
    for length in (4, 12, 14):
        refused(pool, partial(pool.truncate, handle, length), match="15")
    pool.truncate(handle, 15)
    assert (entries(pool, handle, 0), entries(pool, handle, 1)) == ([1, 2, 3, 4], [5, 0, 0, 8])
    pool.truncate(handle, 3)
    assert (entries(pool, handle, 0), entries(pool, handle, 1)) == ([1], [5])


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


# ---- state ------------------------------------------------------------------------------------------------


def test_pool_of_states_has_lengths_and_slots_and_is_short_of_slots_only(make):
    pool, plan, _ = make(2, 4, Group.state(4), Group.state(3), watermark=1)
    assert pool.options.max_blocks_per_seq == (2**31 - 1) // 4
    rows = [pool.open(), pool.open(100)]
    assert [pool.table(rows[1], group).tolist() for group in (0, 1)] == [[], []]
    assert [(pool.num_tokens(row), pool.capacity(row)) for row in rows] == [(0, 0), (0, 0)]
    grow(pool, plan, rows, [9, 0])
    assert plan.groups[0].kv_lens.tolist() == [9, 0] and plan.positions.tolist() == list(range(9))
    assert plan.groups[0].state_src.tolist() == [-1, -1]
    assert (plan.groups[0].state_dst.tolist(), plan.groups[1].state_dst.tolist()) == ([0, -1], [0, -1])
    assert [(pool.num_tokens(row), pool.capacity(row)) for row in rows] == [(9, 12), (0, 0)]
    assert [(pool.stats(arena).used, pool.stats(arena).num_blocks) for arena in (0, 1, 2)] == [(0, 2), (1, 4), (1, 3)]
    assert (pool.stats().tokens, pool.stats().capacity) == (9, 12)
    with pytest.raises(OutOfBlocks) as raised:
        pool.step(plan, [*rows, pool.open()], 10)
    assert (raised.value.arena, raised.value.row, raised.value.needed) == (2, 2, 3)
    pool.reserve(plan, rows[:1], 50)
    assert (pool.capacity(rows[0]), pool.stats(1).used) == (12, 1)
    pool.rollback(plan)
    short, plan, _ = make(2, 4, Group.state(2), max_blocks_per_seq=3)
    rows = [short.open(12)]
    refused(short, lambda: short.open(13), CapacityExceeded)
    grow(short, plan, rows, 12)
    refused(short, lambda: short.step(plan, rows, 1), CapacityExceeded)


# ---- tokens leave one group -------------------------------------------------------------------------------


def test_unshare_finds_room_for_more_copies_than_a_step_makes(make):
    pool, plan, _ = make(256, 2, Group.window(4), Group.full(columns=2))
    seq = pool.open()
    grow(pool, plan, [seq], 32)
    (child,) = map(int, pool.fork(seq))
    small = type(plan)(pool, 1, 1, formats=())
    pool.unshare(small, [child], 31, group=1)
    assert len(small.groups[1].copies) == 32 and (np.asarray(small.groups[1].copies)[:, 2] == 2).all()
    pool.done(small)
    pool.compact(child, 31, group=1)
    pool.step(small, [child], 0)
    assert not len(small.groups[1].copies)
    pool.done(small)


# ---- plans ------------------------------------------------------------------------------------------------


def test_plan_of_several_groups_names_them(make):
    pool, plan, _ = make(16, 2, Group.full(), Group.window(4))
    for name in ("block_tables", "seq_lens", "slot_mapping", "copies", "dirty_rows"):
        with pytest.raises(ValueError, match=r"plan\.groups"):
            getattr(plan, name)
    with pytest.raises(ValueError, match=r"\[table\] the pool has 2 layer groups"):
        pool.table(pool.open())
    assert len(plan.groups) == 2


def test_plan_refuses_more_blocks_in_a_row_than_an_index_counts():
    pool = Pool(16, 4, max_seqs=4, groups=[Group.full(columns=4)])
    with pytest.raises(ValueError, match=f"a row has {2**32} block ids, the limit is {2**31 - 1}"):
        Plan(pool, 4, 4, table_width=2**30)


def test_groups_of_a_plan_are_made_by_a_plan():
    pool = Pool(16, 4, groups=[Group.full(), Group.window(6)])
    kind = type(Plan(pool, 4).groups[0])
    for make in (kind, lambda: kind(None), lambda: kind.__new__(kind), lambda: kind(object())):
        with pytest.raises(TypeError, match="a Plan makes its groups"):
            make()


def test_plan_that_was_refused_half_way_forgets_nothing_in_its_finalizer():
    pool = Pool(64, 1 << 20, max_seqs=4, groups=[Group.full(), Group.full(arena=1, num_blocks=1 << 12)])

    class Forgets(Plan):
        def __del__(self):
            self.bind()

    for _ in range(20):
        with pytest.raises(ValueError, match="slots"):
            Forgets(pool, 64, 64, formats=("block_tables", "slot_mapping"), table_width=4)
    pool.check()


# ---- refusals ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("groups", "match"), [
    ([Group.full(), Group.window(4), Group.chunk(4), Group.state(4)], "group 0 is one"),
    ([Group.window(4), Group.chunk(4), Group.state(4)], "the pool has none"),
])  # fmt: skip
def test_groups_that_let_go_by_themselves_refuse_to_lose_tokens(groups, match):
    pool = Pool(64, 2, groups=groups)
    plan, seq = Plan(pool, 1, 4), pool.open()
    grow(pool, plan, [seq], 4)
    for number, group in enumerate(groups):
        for call in (
            partial(pool.compact, seq, 1, group=number),
            partial(pool.unshare, plan, [seq], 1, group=number),
            partial(pool.evict_blocks, seq, [0], group=number),
        ):
            if group.kind != "full":
                refused(pool, call, match=f"group {number} is a {group.kind}.*{match}")


@pytest.mark.parametrize("groups", [None, [Group.full()], [Group.full(), Group.window(6)]])
def test_group_and_arena_out_of_range_name_the_limits(groups):
    pool, last = Pool(16, 4, groups=groups), len(groups or [None]) - 1
    handle = pool.open()
    for wrong in (-1, last + 1, 2**40):
        limits = rf"group is out of range \({wrong}\), it must be in 0 \.\. {last}$"
        refused(pool, partial(pool.table, handle, wrong), match=limits)
        refused(pool, partial(pool.kv_len, handle, wrong), match=limits)
        refused(pool, partial(pool.compact, handle, 0, group=wrong), match=limits)
        refused(pool, partial(pool.evict_blocks, handle, [], wrong), match=limits)
    for wrong in (-1, 1, 2**40):
        with pytest.raises(ValueError, match=rf"arena is out of range \({wrong}\), it must be in 0 \.\. 0$"):
            pool.stats(wrong)


@pytest.mark.parametrize(("options", "message"), [
    ({"groups": []}, "0 groups, 1 .. 8 are allowed"),
    ({"groups": [Group.full()] * 9}, "9 groups, 1 .. 8 are allowed"),
    ({"groups": [Group.full(block_size=12)]}, "block_size of a group is 12, it must be 4 times 1, 2 or 4"),
    ({"groups": [Group.full(), Group.window(6)], "lookahead": 6}, "lookahead is 6, it must be below every .* (6)"),
    ({"groups": [Group.full(), Group.full(arena=2, num_blocks=9)]}, "arenas are 0, 2, they must be 0, 1, .."),
    ({"groups": [Group.full(), Group.full(arena=1)]}, "the first group in arena 1 must say num_blocks"),
    ({"groups": [Group.full(arena=1, num_blocks=9), Group.full(arena=1, num_blocks=8), Group.full()]},
     "arena 1 has 8 blocks, another says 9"),
    ({"groups": [Group.full(num_blocks=9)]}, "arena 0 has 9 blocks, the pool's own argument says how many"),
    ({"groups": [Group.full(), Group.full(arena=1, num_blocks=2)], "reserved_blocks": 2},
     "arena 1 has 2 blocks, of which 2 are reserved"),
    ({"groups": [Group.full(), Group.state(2, blocks=30)], "prefix_cache": True}, "blocks"),
    ({"groups": [Group.full(columns=2)], "max_blocks_per_seq": 2**30}, "ids"),
    ({"groups": [Group.full(block_size=8)], "max_blocks_per_seq": 2**31 - 1}, "blocks"),  # rounded up
])  # fmt: skip
def test_groups_that_cannot_be_are_refused_with_their_limit(options, message):
    with pytest.raises(ValueError, match=r"^\[Pool\] .*" + message.replace("(6)", r"\(6\)")):
        Pool(16, 4, max_seqs=4, **options)


def test_options_make_another_pool_like_it():
    pool = Pool(64, 4, max_seqs=8, seed=1, groups=[Group.full(), Group.window(6, columns=2)])
    options = pool.options
    assert options.groups == (Group.full(), Group.window(6, columns=2)) and options.lookahead == 0
    assert Pool(**options._asdict()).fingerprint() == pool.fingerprint()
    assert pool.fingerprint() != Pool(**options._replace(groups=options.groups[::-1])._asdict()).fingerprint()


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
