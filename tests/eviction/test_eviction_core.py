"""Sequences that lose tokens and go on, where numbers are large or tables are full.

Random programs hold `compact`, `unshare` and `evict_blocks` to the plain model (tests/verify/test_twin.py).
"""

import pytest

from kvpool import Group, Plan, Pool
from kvpool.errors import CapacityExceeded


def step(pool, plan, handles, new):
    pool.step(plan, handles, new)
    if not pool.options.in_order:
        pool.done(plan)


def lengths(pool, handle):
    return pool.num_tokens(handle), pool.kv_len(handle)


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
