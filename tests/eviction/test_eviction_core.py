"""Tokens that leave a sequence which goes on: compaction, whole blocks, blocks of one's own, and two lengths."""

import numpy as np
import pytest

from kvpool import Group, Plan, Pool
from kvpool.errors import CapacityExceeded, OutOfBlocks, PlanStateError


@pytest.fixture
def grown(make_pool, make_plan):
    """``grown(14)``: a pool, a plan, and a sequence of so many tokens that are done."""

    def make(tokens, num_blocks=32, **options):
        pool = make_pool(num_blocks, 4, **options)
        plan = make_plan(pool, formats=("block_tables", "seq_lens", "slot_mapping", "positions"))
        handle = pool.open()
        step(pool, plan, [handle], tokens)
        return pool, plan, handle

    return make


def step(pool, plan, handles, new):
    pool.step(plan, handles, new)
    if not pool.options.in_order:
        pool.done(plan)


def lengths(pool, handle):
    return pool.num_tokens(handle), pool.kv_len(handle)


# --- compact ----------------------------------------------------------------------------------------------


def test_compact_keeps_positions_and_gives_back_the_youngest_blocks(grown):
    pool, _plan, h = grown(14)
    pool.compact(h, 5)
    # Capacity counts positions, so it stays 16: 4 blocks, less 9 // 4 that the table does not need any more.
    assert lengths(pool, h) == (14, 5) and pool.table(h).tolist() == [1, 2] and pool.capacity(h) == 16
    assert pool.blocks.alloc(2).tolist() == [3, 4]  # released youngest first: 4, then 3 on top
    assert pool.stats().evicted_tokens == 9 and pool.stats().tokens == 14
    pool.check()


def test_step_after_compaction_goes_on_with_positions_and_writes_behind_what_stayed(grown):
    pool, plan, h = grown(14)
    other = pool.open()
    pool.compact(h, 5)
    step(pool, plan, [h, other], [4, 2])
    assert plan.positions.tolist() == [14, 15, 16, 17, 0, 1]
    assert plan.seq_lens.tolist() == [9, 2]
    assert plan.slot_mapping.tolist() == [9, 10, 11, 12, 16, 17]
    assert 0 in plan.dirty_rows.tolist()
    step(pool, plan, [h, other], 1)  # every row one token: the other way of filling
    assert plan.positions.tolist() == [18, 2] and plan.seq_lens.tolist() == [10, 3]
    pool.compact(h, 0)
    assert lengths(pool, h) == (19, 0) and pool.table(h).tolist() == [1]  # 5 - 19 // 4 blocks: position 19 has room
    step(pool, plan, [h], 2)
    assert plan.positions.tolist() == [19, 20] and plan.seq_lens.tolist() == [2]
    assert plan.slot_mapping.tolist() == [4, 5]


def test_compact_to_the_length_there_is_leaves_the_sequence_alone(grown):
    pool, _plan, h = grown(8, prefix_cache=True)
    child = int(pool.fork(h)[0])
    before = pool.fingerprint()
    pool.compact([h, child], 8)  # shared, but nothing moves
    assert pool.fingerprint() == before and lengths(pool, h) == (8, 8)
    pool.prefix.commit(h, list(range(8)))
    pool.truncate(h, 0)


@pytest.mark.parametrize("why", ["fork", "raw reference", "committed"])
def test_compact_refuses_to_rewrite_what_others_read(grown, refused, why):
    pool, _plan, h = grown(14, prefix_cache=why == "committed")
    if why == "fork":
        pool.fork(h)
    elif why == "committed":
        pool.prefix.commit(h, list(range(8)))
    else:
        pool.blocks.incref([2])
    with refused(pool, ValueError, "compact", 2 if why == "raw reference" else 1):
        pool.compact(h, 7)
    pool.compact(h, 7, first=8)  # blocks 1 and 2 stay as they are: the tail leaves
    assert lengths(pool, h) == (14, 7)


def test_compact_refuses_a_block_that_a_pending_copy_reads(grown, refused, make_plan):
    pool, plan, h = grown(6)
    child = int(pool.fork(h)[0])
    pool.step(plan, [child], 1)  # copies block 2, which is h's alone from now on
    assert pool.blocks.refcount(2) == 1
    with refused(pool, ValueError, "compact", 2):
        pool.compact(h, 5, first=4)
    pool.done(plan)
    pool.compact(h, 5, first=4)


def test_compact_refuses_rows_of_pending_plans(grown, refused):
    pool, plan, h = grown(9)
    pool.step(plan, [h], 1)
    with refused(pool, PlanStateError, "compact", None):
        pool.compact(h, 3)
    with refused(pool, PlanStateError, "evict_blocks", None):
        pool.evict_blocks(h, [0])
    pool.rollback(plan)
    other = pool.open()
    pool.step(plan, [other], 1)
    pool.compact(h, 3)
    assert pool.stats().limbo == 1  # what leaves waits for pending steps: of 3 blocks 6 // 4
    pool.done(plan)
    assert pool.stats().limbo == 0


def test_compact_is_all_or_nothing_over_a_batch(grown, refused):
    pool, plan, h = grown(12)
    two = pool.open()
    step(pool, plan, [two], 12)
    pool.fork(two)
    with refused(pool, ValueError, "compact", None):
        pool.compact([h, two], [3, 3])
    pool.compact([h, two], np.array([3, 12], np.int32))
    assert lengths(pool, h) == (12, 3) and lengths(pool, two) == (12, 12)


@pytest.mark.parametrize("length", [-1, 13, 2**40])
def test_compact_refuses_lengths_out_of_range(grown, refused, length):
    pool, plan, h = grown(12)
    with refused(pool, ValueError, "compact", length):
        pool.compact(h, length)
    with refused(pool, ValueError, "unshare", length):
        pool.unshare(plan, [h], length)


GROUPS = pytest.mark.parametrize("groups", [[Group.full()], [Group.full(), Group.full(block_size=8)]], ids=len)


@GROUPS
def test_stream_that_evicts_holds_what_max_blocks_per_seq_says_and_never_ends(make_pool, make_plan, refused, groups):
    pool = make_pool(32, 4, max_blocks_per_seq=4, groups=groups)
    plan, h = make_plan(pool, 1, 16, formats=("positions", "seq_lens"), table_width=5), pool.open()
    held, length = [0] * len(groups), 0
    for turn in range(1000):
        new = 16 - max(held)
        length, held = length + new, [n + new for n in held]
        step(pool, plan, [h], new)
        assert plan.positions.tolist() == list(range(length - new, length))
        assert [part.kv_lens.tolist() for part in plan.groups] == [[n] for n in held]
        with refused(pool, CapacityExceeded, "step", "17 tokens, the limit is 16", plans=[plan]):
            pool.step(plan, [h], 1)
        assert not pool.can([h], 1)
        for k, group in enumerate(groups):
            if turn % 3:
                left = turn * 7 % 17 % (held[k] + 1)
                pool.compact(h, left, group=k)
            else:
                size = group.block_size or 4
                pool.evict_blocks(h, [turn % (held[k] // size)] if held[k] >= size else [], group=k)
                left = held[k] - size if held[k] >= size else held[k]
            held[k] = left
        assert lengths(pool, h) == (length, held[0])
    assert length > 5000


@GROUPS
@pytest.mark.parametrize("most", [15, 16, 31, 32, 47, 48])
def test_row_that_lost_a_part_of_a_block_leaves_the_row_behind_it_alone(make_pool, make_plan, refused, most, groups):
    """Entries are counted by positions: 4 * most tokens behind one that is gone lie in one block more."""
    pool = make_pool(256, 4, max_blocks_per_seq=most, groups=groups)
    narrow, plan = (make_plan(pool, 1, 4 * most, table_width=width) for width in (most, most + 20))
    h, behind = pool.open(), pool.open(4 * most)
    before = [pool.table(behind, k).tolist() for k in range(len(groups))]
    step(pool, plan, [h], 4 * most)
    for k in range(len(groups)):
        pool.compact(h, 4 * most - 1, group=k)
    with refused(pool, CapacityExceeded, "step", most, plans=[narrow]):
        pool.step(narrow, [h], 1)
    step(pool, plan, [h], 1)
    assert len(pool.table(h, 0)) == most + 1
    assert [pool.table(behind, k).tolist() for k in range(len(groups))] == before
    pool.check()


def test_stream_goes_on_beyond_int32_by_a_plan_whose_positions_are_int64(refused):
    pool = Pool(8, 2**27, max_blocks_per_seq=4, in_order=True)  # the model has no room for so many tokens
    plan = Plan(pool, 1, 2**31 - 1, formats=("seq_lens",))
    h = pool.open()
    for tokens in (2**29, 2**29, 2**29, 2**29 - 1):
        pool.step(plan, [h], tokens)
        pool.compact(h, 0)
    assert lengths(pool, h) == (2**31 - 1, 0)
    with refused(pool, CapacityExceeded, "step", 2**31, plans=[plan]):
        pool.step(plan, [h], 1)
    wide = Plan(pool, 1, 1, formats=("seq_lens", "positions"), dtype="int64")
    pool.step(wide, [h], 1)
    assert (wide.positions.tolist(), wide.seq_lens.tolist()) == ([2**31 - 1], [1])


# --- unshare ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("tokens", "left", "first", "copies", "table"),
    [
        (14, 5, 0, [[1, 5, 4], [2, 6, 4]], [5, 6]),
        (14, 9, 7, [[2, 5, 4], [3, 6, 4]], [1, 5, 6]),  # leading blocks stay
        (6, 5, 0, [[1, 3, 4], [2, 4, 2]], [3, 4]),  # the filled part of a tail
    ],
)
def test_unshare_copies_what_compaction_rewrites_and_nothing_else(grown, tokens, left, first, copies, table):
    pool, plan, h = grown(tokens)
    child = int(pool.fork(h)[0])
    shared = pool.table(child).tolist()
    pool.unshare(plan, [h], left, first)
    assert plan.copies.tolist() == copies and plan.num_tokens == 0
    pool.done(plan)
    pool.compact(h, left, first)
    assert pool.table(h).tolist() == table and pool.table(child).tolist() == shared


def test_unshare_takes_committed_blocks_along(grown):
    pool, plan, h = grown(8, prefix_cache=True)
    pool.prefix.commit(h, list(range(8)))
    pool.unshare(plan, [h], 4)
    pool.done(plan)
    pool.compact(h, 4)
    assert pool.prefix.match([*range(8), 9]) == 8  # the cache keeps what it had


def test_unshare_of_a_batch_copies_for_each_that_shares(grown):
    pool, plan, h = grown(8)
    rows = [h, *pool.fork(h, 2).tolist()]
    pool.unshare(plan, rows, 7)
    assert len(plan.copies) == 6  # the last one too: its blocks are read by the copies of the others
    pool.done(plan)
    pool.compact(rows, 7)
    assert pool.stats().used == 6


def test_unshare_makes_room_for_more_copies_than_the_plan_has_rows(make_pool, make_plan):
    pool = make_pool(3000, 4, max_blocks_per_seq=1000)
    plan, h = make_plan(pool, 1, 4000), pool.open()
    step(pool, plan, [h], 4000)
    child = pool.fork(h)[0]
    old, shown = pool.table(child).tolist(), plan.copies
    for end in (pool.rollback, pool.done):
        pool.unshare(plan, [child], 3999)
        new = pool.table(child).tolist()
        assert plan.copies.tolist() == [[a, b, 4] for a, b in zip(old, new, strict=True)]
        assert len(shown) == 0 and not plan.copies.flags.writeable
        end(plan)
    pool.compact(child, 3996)
    step(pool, plan, [child], 1)
    assert plan.copies.shape == (0, 3)
    pool.unshare(plan, [h], 5)
    assert len(plan.copies) == 0  # the copies are the child's: nobody shares


def test_unshare_without_blocks_changes_nothing(grown, refused):
    pool, plan, h = grown(12, num_blocks=6)
    pool.fork(h)
    with refused(pool, OutOfBlocks, "unshare", None) as caught:
        pool.unshare(plan, [h], 11)
    assert (caught.value.needed, caught.value.short_by, caught.value.row) == (3, 1, 0)


# --- blocks -----------------------------------------------------------------------------------------------


def test_evict_blocks_takes_whole_blocks_out_of_the_table(grown):
    pool, plan, h = grown(18)
    child = int(pool.fork(h)[0])
    pool.evict_blocks(h, [1, 3])
    assert lengths(pool, h) == (18, 10) and pool.table(h).tolist() == [1, 3, 5]
    assert pool.table(child).tolist() == [1, 2, 3, 4, 5]  # others go on reading them
    pool.close(child)
    step(pool, plan, [h], 3)
    assert plan.positions.tolist() == [18, 19, 20] and plan.slot_mapping.tolist() == [22, 23, 8]


@pytest.mark.parametrize("indices", [[4], [-1], [1, 1], [2, 1], [2**40]])
def test_evict_blocks_refuses_the_tail_and_disorder(grown, refused, indices):
    pool, _plan, h = grown(18)
    with refused(pool, ValueError, "evict_blocks", None):
        pool.evict_blocks(h, indices)


def test_evict_blocks_leaves_cached_ones_to_the_prefix_cache(grown):
    pool, _plan, h = grown(9, prefix_cache=True)
    pool.prefix.commit(h, list(range(9)))
    before = pool.fingerprint()
    pool.evict_blocks(h, [])
    assert pool.fingerprint() == before
    pool.evict_blocks(h, [0])
    assert pool.stats().evictable == 1 and pool.prefix.match([*range(9), 9]) == 8


# --- with everything else ---------------------------------------------------------------------------------


@pytest.mark.parametrize("how", ["compact", "blocks"])
def test_evicted_sequence_commits_no_more(grown, refused, how):
    pool, _plan, h = grown(14, prefix_cache=True)
    pool.compact(h, 8) if how == "compact" else pool.evict_blocks(h, [0])
    with refused(pool, ValueError, "commit", None):
        pool.prefix.commit(h, [1, 2, 3, 4])
    pool.prefix.commit(h, [])
    child = int(pool.fork(h)[0])
    with refused(pool, ValueError, "commit", None):
        pool.prefix.commit(child, [1])


@pytest.mark.parametrize("how", ["compact", "blocks"])
def test_truncate_stops_at_the_point_of_eviction(grown, refused, how):
    pool, plan, h = grown(14)
    pool.compact(h, 6) if how == "compact" else pool.evict_blocks(h, [0, 1])
    step(pool, plan, [h], 5)
    with refused(pool, ValueError, "truncate", 13):
        pool.truncate(h, 13)
    with refused(pool, ValueError, "truncate", 20):
        pool.truncate(h, 20)
    pool.truncate(h, 15)
    assert lengths(pool, h) == (15, 7)
    pool.truncate(h, 14)
    assert lengths(pool, h) == (14, 6)


def test_fork_of_an_evicted_sequence_has_both_lengths_and_its_slot_starts_anew(grown, refused):
    pool, plan, h = grown(14, max_seqs=2)
    pool.compact(h, 6)
    child = int(pool.fork(h)[0])
    step(pool, plan, [h, child], 1)
    assert plan.positions.tolist() == [14, 14] and plan.seq_lens.tolist() == [7, 7]
    with refused(pool, ValueError, "truncate", 13):
        pool.truncate(child, 13)
    pool.close(h)
    assert lengths(pool, child) == (15, 7)
    h = pool.open()  # in the slot of one that lost tokens
    step(pool, plan, [h], 3)
    assert lengths(pool, h) == (3, 3) and plan.positions.tolist() == [0, 1, 2]
    pool.truncate(h, 0)
