"""Tokens that leave a sequence which goes on: compaction, whole blocks, blocks of one's own, and two lengths."""

from functools import partial

import numpy as np
import pytest

from kvpool import Group, Plan, Pool
from kvpool.errors import CapacityExceeded, OutOfBlocks, PlanStateError


@pytest.fixture(params=[None, [Group.full()]], ids=["one table", "full"])
def make_any(make_pool, request):
    """As `make_pool`, for a pool of one table and of a full group, whose ids are the same."""
    return partial(make_pool, groups=request.param)


#: Of layer groups other tokens and blocks are counted.
ONE_TABLE = pytest.mark.parametrize("make_any", [None], ids=["one table"], indirect=True)


@pytest.fixture
def grown(make_any, make_plan):
    """``grown(14)``: a pool, a plan, and a sequence of so many tokens that are done."""

    def make(tokens, num_blocks=32, **options):
        pool = make_any(num_blocks, 4, **options)
        plan = make_plan(pool, formats=("block_tables", "seq_lens", "slot_mapping", "positions"))
        handle = pool.open()
        step(pool, plan, [handle], tokens)
        return pool, plan, handle

    return make


def part(plan):
    """What a plan shows of the group."""
    return (plan.groups or [plan])[0]


def held(plan):
    """How many tokens the rows of a plan hold."""
    return (plan.groups[0].kv_lens if plan.groups else plan.seq_lens).tolist()


def step(pool, plan, handles, new):
    pool.step(plan, handles, new)
    if not pool.options.in_order:
        pool.done(plan)


def lengths(pool, handle):
    return pool.num_tokens(handle), pool.kv_len(handle)


# --- compact ----------------------------------------------------------------------------------------------


@ONE_TABLE
def test_compact_keeps_positions_and_gives_back_the_youngest_blocks(grown):
    pool, _plan, h = grown(14)
    pool.compact(h, 5)
    assert lengths(pool, h) == (14, 5) and pool.table(h).ravel().tolist() == [1, 2] and pool.capacity(h) == 8
    assert pool.blocks.alloc(2).tolist() == [3, 4]  # released youngest first: 4, then 3 on top
    assert pool.stats().evicted_tokens == 9 and pool.stats().tokens == 5
    pool.check()


@ONE_TABLE
def test_step_after_compaction_goes_on_with_positions_and_writes_behind_what_stayed(grown):
    pool, plan, h = grown(14)
    other = pool.open()
    pool.compact(h, 5)
    step(pool, plan, [h, other], [4, 2])
    assert plan.positions.tolist() == [14, 15, 16, 17, 0, 1]
    assert held(plan) == [9, 2]
    assert part(plan).slot_mapping.ravel().tolist() == [9, 10, 11, 12, 16, 17]
    assert 0 in part(plan).dirty_rows.tolist()
    step(pool, plan, [h, other], 1)  # every row one token: the other way of filling
    assert plan.positions.tolist() == [18, 2] and held(plan) == [10, 3]
    pool.compact(h, 0)
    assert lengths(pool, h) == (19, 0) and pool.table(h).ravel().tolist() == []
    step(pool, plan, [h], 2)
    assert plan.positions.tolist() == [19, 20] and held(plan) == [2]


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


@ONE_TABLE
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
    assert pool.stats().limbo == 2  # what leaves waits for pending steps
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


def test_eviction_stops_where_positions_would_pass_int32(refused):
    pool = Pool(8, 2**27, max_blocks_per_seq=4, in_order=True)  # the model has no room for so many tokens
    plan = Plan(pool, 1, 2**31 - 1, formats=("seq_lens",))
    h = pool.open()
    for tokens in (2**29, 2**29, 2**29 - 1):
        pool.step(plan, [h], tokens)
        pool.compact(h, 0)
    pool.step(plan, [h], 2**29)
    with refused(pool, CapacityExceeded, "compact", None):
        pool.compact(h, 0)
    assert pool.num_tokens(h) == 2**31 - 1


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
    shared = pool.table(child).ravel().tolist()
    pool.unshare(plan, [h], left, first)
    assert part(plan).copies.tolist() == copies and plan.num_tokens == 0
    pool.done(plan)
    pool.compact(h, left, first)
    assert pool.table(h).ravel().tolist() == table and pool.table(child).ravel().tolist() == shared


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
    assert len(part(plan).copies) == 6  # the last one too: its blocks are read by the copies of the others
    pool.done(plan)
    pool.compact(rows, 7)
    assert pool.stats().used == 6


@ONE_TABLE
def test_unshare_makes_room_for_more_copies_than_the_plan_has_rows(make_any, make_plan):
    pool = make_any(3000, 4, max_blocks_per_seq=1000)
    plan, h = make_plan(pool, 1, 4000), pool.open()
    step(pool, plan, [h], 4000)
    child = pool.fork(h)[0]
    old, shown = pool.table(child).ravel().tolist(), part(plan).copies
    for end in (pool.rollback, pool.done):
        pool.unshare(plan, [child], 3999)
        new = pool.table(child).ravel().tolist()
        assert part(plan).copies.tolist() == [[a, b, 4] for a, b in zip(old, new, strict=True)]
        assert len(shown) == 0 and not part(plan).copies.flags.writeable
        end(plan)
    pool.compact(child, 3999)
    step(pool, plan, [child], 1)
    assert part(plan).copies.shape == (0, 3)
    pool.unshare(plan, [h], 5)
    assert len(part(plan).copies) == 0  # the copies are the child's: nobody shares


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
    assert lengths(pool, h) == (18, 10) and pool.table(h).ravel().tolist() == [1, 3, 5]
    assert pool.table(child).ravel().tolist() == [1, 2, 3, 4, 5]  # others go on reading them
    pool.close(child)
    step(pool, plan, [h], 3)
    assert plan.positions.tolist() == [18, 19, 20] and part(plan).slot_mapping.ravel().tolist() == [22, 23, 8]


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
    assert plan.positions.tolist() == [14, 14] and held(plan) == [7, 7]
    with refused(pool, ValueError, "truncate", 13):
        pool.truncate(child, 13)
    pool.close(h)
    assert lengths(pool, child) == (15, 7)
    h = pool.open()  # in the slot of one that lost tokens
    step(pool, plan, [h], 3)
    assert lengths(pool, h) == (3, 3) and plan.positions.tolist() == [0, 1, 2]
    pool.truncate(h, 0)
