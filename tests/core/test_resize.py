"""`Pool.resize`: a pool goes on with another number of blocks.

That every row reads what it wrote, the fuzzer judges (`tests/verify`).
"""

from functools import partial

import pytest

from kvpool import Group, Plan, Pool
from kvpool.errors import CapacityExceeded, OutOfBlocks, PlanStateError

BLOCK = 4


def test_larger_pool_takes_its_fresh_blocks_last_and_moves_nothing():
    pool = Pool(6, BLOCK, max_blocks_per_seq=8)
    assert pool.resize(9).tolist() == [] and pool.num_blocks == 9
    assert pool.table(pool.open(8 * BLOCK)).tolist() == [1, 2, 3, 4, 5, 6, 7, 8]


def test_smaller_pool_keeps_the_prefixes_that_were_used_last():
    pool = Pool(9, BLOCK, prefix_cache=True)
    plan = Plan(pool, max_rows=1, max_tokens=16)
    for first in (1, 2):
        tokens = [first] * 16
        handle = pool.open(tokens)
        pool.step(plan, [handle], 16)
        pool.done(plan)
        pool.prefix.commit([handle], tokens)
        pool.close([handle])
    assert len(pool.resize(6)) == 3  # the blocks of the second prompt are 5 .. 8
    assert pool.prefix.match([2] * 17) == 16 and pool.prefix.match([1] * 17) == 4


def test_states_of_a_checkpoint_move_with_its_blocks():
    pool = Pool(40, BLOCK, groups=[Group.full(), Group.state(6, blocks=2)], prefix_cache=True, max_seqs=2)
    plan, below = Plan(pool, max_rows=1, max_tokens=8), pool.blocks.alloc(20)
    row = pool.open([1] * 9, b"", 8)
    pool.step(plan, [row], 8)
    pool.done(plan)
    pool.prefix.commit([row], [1] * 8)
    pool.close([row])
    pool.blocks.free(below)
    row = pool.open([1] * 9)
    saved = pool.prefix.bundle(row, 1).tolist()
    moved = dict(pool.resize(12).tolist())
    assert len(saved) == 2 and pool.prefix.bundle(row, 1).tolist() == [moved[block] for block in saved]
    pool.check()


def test_smaller_pool_keeps_the_blocks_by_id_that_were_cached_last_in_their_order():
    pool = Pool(12, BLOCK)
    ids = pool.blocks.alloc(11)
    pool.blocks.mark_cached(ids)
    for block in (11, 3, 10, 1, 9, 8, 2, 4, 7, 5, 6):  # from the one that leaves first
        pool.blocks.free(block)
    pool.blocks.evict(4)
    assert pool.resize(9).tolist() == [[9, 1]] and pool.blocks.drain_evicted().tolist() == [3]  # 1 has something new
    assert pool.resize(5).tolist() == [[5, 2], [6, 1], [7, 3]]  # 1, 8 and 2 left, for as many are blank as go
    pool.check()
    for block in (4, 3, 2, 1):
        assert pool.blocks.evict(1) == 1 and pool.blocks.drain_evicted().tolist() == [block]


def test_several_arenas_are_resized_all_or_none():
    groups = [Group.full(), Group.full(arena=1, num_blocks=20), Group.state(4)]
    pool = Pool(20, BLOCK, groups=groups)
    pool.open(16 * BLOCK)
    state = pool.fingerprint()
    with pytest.raises(OutOfBlocks, match=r"\[resize\] 16 blocks are in use, 1 more than would be there in arena 1"):
        pool.resize({0: 30, 1: 16})
    assert pool.fingerprint() == state
    moves = pool.resize({0: 30, 1: 17, 2: 2})
    assert {arena: len(found) for arena, found in moves.items()} == {0: 0, 1: 0, 2: 0}
    assert [pool.stats(arena).num_blocks for arena in range(3)] == [30, 17, 2]
    assert (pool.options.groups[1].num_blocks, pool.options.groups[2].size) == (17, 2)
    again = Pool(**pool.options._asdict())
    assert again.options == pool.options


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"watermark": 3},
        {"groups": [Group.full(columns=3)]},
        {"groups": [Group.full(), Group.state(6, blocks=2)], "prefix_cache": True},
    ],
    ids=["full", "watermark", "columns", "states"],
)
def test_resize_takes_the_sizes_that_a_new_pool_takes(options):
    """The least is what is reserved and one block, the watermark, or a checkpoint."""

    def is_taken(call):
        try:
            call()
        except ValueError:
            return False
        return True

    sizes, make = range(12), partial(Pool, block_size=4, max_seqs=2, **options)
    taken = [is_taken(partial(make, size)) for size in sizes]
    assert [is_taken(partial(make(40).resize, size)) for size in sizes] == taken
    assert not all(taken[:3]) and all(taken[4:])


def pending(pool):
    pool.step(Plan(pool, max_rows=1), [pool.open()])


@pytest.mark.parametrize(
    ("prepare", "size", "arena", "error", "message"),
    [
        (pending, 30, 0, PlanStateError, "step 1 is pending"),
        (lambda pool: pool.open([1] * 8, load=True), 30, 0, PlanStateError, "is being loaded"),
        (lambda pool: pool.open(12 * BLOCK), 12, 0, OutOfBlocks, "12 blocks are in use, 1 more than would be there"),
        (lambda pool: pool.blocks.alloc(12), 16, 0, None, None),
        (
            lambda pool: [pool.blocks.alloc(12), pool.blocks.free([*range(1, 12)])],
            12,
            0,
            ValueError,
            "block 12 has 1 ref",
        ),
        (None, 1, 0, ValueError, "arena 0 would have 1 blocks, the least is 5"),
        (None, 1 << 30, 0, CapacityExceeded, "a plan that has int32 slots can name 536870911"),
        (None, 0, 0, ValueError, "num_blocks is out of range"),
        (None, 20, 1, ValueError, "arena is out of range"),
        (None, 2.5, 0, TypeError, "num_blocks must be an int"),
    ],
)
def test_resize_that_cannot_be_is_refused_and_changes_nothing(prepare, size, arena, error, message):
    pool = Pool(20, BLOCK, watermark=4, prefix_cache=True)
    if prepare:
        prepare(pool)
    state = pool.fingerprint(), pool.digest()
    if error is None:
        assert pool.resize(size, arena).tolist() == []
        return
    with pytest.raises(error, match=message):
        pool.resize(size, arena)
    assert (pool.fingerprint(), pool.digest()) == state and pool.num_blocks == 20
