"""Tokens leave one layer group of a sequence, worked out by hand; every number holds for the model and for the core."""

from functools import partial

import numpy as np
import pytest
from both_pools import pools_of

import kvpool
from kvpool.errors import OutOfBlocks, PlanStateError, StaleHandle
from kvpool.groups import Group

FORMATS = ("block_tables", "seq_lens", "slot_mapping", "positions")


@pytest.fixture(params=["model", "core"])
def make(request):
    """``make(num_blocks, block_size, *groups, **options)`` makes a pool and two plans."""
    yield from pools_of(request.param, FORMATS)


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


def test_compact_takes_tokens_out_of_one_group_only(make):
    pool, plan, _ = make(64, 2, Group.window(4), Group.full(columns=2), Group.state(6))
    seq = pool.open()
    grow(pool, plan, [seq], 9)
    window, full = pool.table(seq, 0).tolist(), pool.table(seq, 1).tolist()
    used = pool.stats().used
    pool.compact(seq, 4, group=1)
    assert pool.num_tokens(seq) == 9 and [pool.kv_len(seq, g) for g in range(3)] == [9, 4, 9]
    assert pool.table(seq, 1).tolist() == full[:3] and pool.capacity(seq) == 10  # room for 10 less 5 that are gone
    assert pool.stats().used == used - 4 and pool.stats().evicted_tokens == 5
    assert pool.table(seq, 0).tolist() == window
    pool.step(plan, [seq], 1)
    assert plan.positions.tolist() == [9]
    assert [plan.groups[g].kv_lens.tolist() for g in (0, 1)] == [[10], [5]]
    assert plan.groups[1].slot_mapping.tolist() == [[2 * block] for block in full[2]]
    pool.done(plan)


def test_steps_after_an_eviction_take_entries_for_what_is_held(make):
    pool, plan, _ = make(64, 2, Group.full(block_size=4), Group.window(6))
    seq = pool.open()
    grow(pool, plan, [seq], 6)  # 2 entries of 4 and 3 of 2: room for 6
    pool.compact(seq, 1)
    assert len(pool.table(seq, 0)) == 1 and pool.capacity(seq) == 6
    grow(pool, plan, [seq], 3)  # 9 of 10; held are 4
    assert len(pool.table(seq, 0)) == 2 and pool.capacity(seq) == 10
    grow(pool, plan, [seq], 4)
    assert pool.kv_len(seq) == 8 and len(pool.table(seq, 0)) == 3
    assert (pool.num_tokens(seq), pool.capacity(seq), len(pool.table(seq, 1))) == (13, 14, 7)


def test_evicted_blocks_leave_and_later_ones_move_up(make):
    pool, plan, _ = make(64, 2, Group.full(columns=2), Group.window(2))
    seq = pool.open()
    grow(pool, plan, [seq], 9)
    entries = pool.table(seq, 0).tolist()
    pool.evict_blocks(seq, [0, 2])
    assert pool.table(seq, 0).tolist() == [entries[1], *entries[3:]] and pool.kv_len(seq) == 5
    pool.step(plan, [seq], 1)
    assert plan.groups[0].block_tables[0, :3].tolist() == [entries[1], *entries[3:]]
    pool.done(plan)
    refused(pool, lambda: pool.evict_blocks(seq, [3]))  # six tokens are three full entries
    refused(pool, lambda: pool.evict_blocks(seq, [1, 1]))


@pytest.mark.parametrize(("group", "kind"), [(1, "window"), (2, "chunk"), (3, "state")])
def test_groups_that_let_go_by_themselves_refuse(make, group, kind):
    pool, plan, _ = make(64, 2, Group.full(), Group.window(4), Group.chunk(4), Group.state(4))
    seq = pool.open()
    grow(pool, plan, [seq], 4)
    for call in (
        lambda: pool.compact(seq, 1, group=group),
        lambda: pool.unshare(plan, [seq], 1, group=group),
        lambda: pool.evict_blocks(seq, [0], group=group),
    ):
        refused(pool, call, match=f"group {group} is a {kind}")
    for number in (4, -1):
        refused(pool, partial(pool.compact, seq, 1, group=number), match="group")
        refused(pool, partial(pool.kv_len, seq, number), match="group")


def test_pool_without_a_full_group_says_so():
    with kvpool.Pool(16, 2, groups=[Group.window(4), Group.state(4)]) as pool:
        seq = pool.open()
        refused(pool, lambda: pool.compact(seq, 0), match="group 0 is a window.* and the pool has none")
        refused(pool, lambda: pool.evict_blocks(seq, [], 1), match="group 1 is a state.* and the pool has none")


def test_pool_of_one_table_has_group_0_only():
    with kvpool.Pool(16, 2) as pool:
        seq = pool.open(4)
        pool.compact(seq, 0, group=0)
        assert pool.kv_len(seq, 0) == 0
        refused(pool, lambda: pool.compact(seq, 0, group=1), match="group is out of range")
        refused(pool, lambda: pool.kv_len(seq, 1), match="group is out of range")


def test_lost_tokens_bound_truncate_in_all_groups(make):
    pool, plan, _ = make(64, 2, Group.full(), Group.full(block_size=4))
    seq = pool.open()
    grow(pool, plan, [seq], 8)
    pool.compact(seq, 3)
    grow(pool, plan, [seq], 4)
    refused(pool, lambda: pool.truncate(seq, 7), match="7")
    pool.truncate(seq, 8)
    assert [pool.kv_len(seq, g) for g in (0, 1)] == [3, 8] and len(pool.table(seq, 0)) == 2
    (child,) = pool.fork(seq)
    refused(pool, lambda: pool.truncate(int(child), 7), match="7")
    assert pool.kv_len(int(child)) == 3


def test_unshare_copies_the_entries_of_one_group(make):
    pool, plan, other = make(64, 2, Group.full(columns=3), Group.window(4))
    seq = pool.open()
    grow(pool, plan, [seq], 11)
    (child,) = map(int, pool.fork(seq))
    entries, window = pool.table(seq, 0).tolist(), pool.table(seq, 1).tolist()
    refused(pool, lambda: pool.compact(seq, 9), match="unshare")
    before = pool.fingerprint()
    pool.unshare(other, [seq], 9, first=2)
    fresh = pool.table(seq, 0).tolist()
    copies = other.groups[0].copies.tolist()
    assert copies == [[a, b, 2] for i in range(1, 5) for a, b in zip(entries[i], fresh[i], strict=True)]
    assert len(copies) > 4 * 3 - 1 and not len(other.groups[1].copies)
    assert pool.table(child, 0).tolist() == entries and pool.table(seq, 1).tolist() == window
    refused(pool, lambda: pool.compact(seq, 9, first=2), error=PlanStateError)
    pool.rollback(other)
    assert pool.table(seq, 0).tolist() == entries and pool.fingerprint() != before  # epochs moved
    pool.unshare(other, [seq], 9, first=2)
    pool.done(other)
    pool.compact(seq, 9, first=2)
    assert pool.kv_len(seq) == 9 and pool.kv_len(child) == 11


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


@pytest.mark.parametrize(("rows", "lens", "error", "match"), [
    ([0], [12], ValueError, "12"),
    ([1, 0], [5, -1], ValueError, "-1"),
    ([0, 1, 0], [5, 5, 5], ValueError, "unshare"),
    ([0, 2], [5, 0], StaleHandle, "unshare"),
])  # fmt: skip
def test_unshare_that_is_refused_for_one_row_copies_nothing(make, rows, lens, error, match):
    pool, plan, other = make(64, 2, Group.full(columns=2), Group.window(4))
    seq = pool.open()
    grow(pool, plan, [seq], 11)
    handles = [seq, *map(int, pool.fork(seq, 2))]
    pool.close(handles[2])
    refused(pool, lambda: pool.unshare(other, [handles[row] for row in rows], lens), error=error, match=match)
    assert not other.is_pending
    pool.unshare(other, handles[:2], 5)
    pool.done(other)


def test_unshare_without_blocks_is_out_of_blocks(make):
    pool, plan, _ = make(11, 2, Group.full(columns=2))
    seq = pool.open()
    grow(pool, plan, [seq], 6)
    pool.fork(seq)
    with pytest.raises(OutOfBlocks) as caught:
        pool.unshare(plan, [seq], 5)
    assert (caught.value.needed, caught.value.short_by, caught.value.row, caught.value.arena) == (6, 2, 0, 0)
    assert not plan.is_pending and pool.stats().shared == 6
