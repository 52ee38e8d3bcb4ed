"""The model, pinned to numbers worked out by hand: the judge of the core is judged here, and beside the core.

`tests/verify` holds the core and the model to the same results, so that what the contract tests say of one is true of
the other.
"""

import copy
import pickle

import pytest

from kvpool import Plan, Pool
from kvpool.errors import CorruptState
from kvpool.testing import ModelPlan, ModelPool


@pytest.mark.parametrize("kinds", [(Pool, Plan), (ModelPool, ModelPlan)], ids=["core", "model"])
def test_fork_storm_has_the_golden_numbers(kinds):
    """A prompt of 6 tokens in blocks 1 and 2, eight samples of it, five tokens each."""
    pool = kinds[0](32, 4)
    plan, parent = kinds[1](pool, 8, 64), pool.open()
    pool.step(plan, [parent], 6)
    pool.done(plan)
    batch = [parent, *pool.fork(parent, 7).tolist()]

    pool.step(plan, batch, 1)  # seven copies of the two valid tokens; the last holder keeps block 2
    assert plan.copies.tolist() == [[2, dst, 2] for dst in (3, 4, 5, 6, 7, 8, 9)]
    assert [pool.table(h).tolist() for h in batch] == [[1, b] for b in (3, 4, 5, 6, 7, 8, 9, 2)]
    pool.done(plan)
    pool.step(plan, batch, 1)  # length 8: in place
    assert len(plan.copies) == 0 and plan.slot_mapping.tolist() == [4 * b + 3 for b in (3, 4, 5, 6, 7, 8, 9, 2)]
    pool.done(plan)
    for _ in range(3):  # lengths 9, 10, 11: one new block each
        pool.step(plan, batch, 1)
        pool.done(plan)

    stats = pool.stats()
    assert (stats.allocs, stats.cow_copies, stats.cow_tokens, stats.peak_used) == (2 + 7 + 8, 7, 14, 17)
    assert (stats.used, stats.blank, stats.shared, stats.tokens, stats.capacity) == (17, 14, 1, 88, 96)
    assert stats.fragmentation == pytest.approx(1 / 12)
    assert pool.blocks.refcount_histogram().tolist() == [14, 16, 0, 0, 0, 0, 0, 0, 1]
    pool.close(batch)  # the last one, [1, 2, 17], leaves 17, 2, 1; the one before, [1, 9, 16], left 16, 9
    assert pool.blocks.alloc(6).tolist() == [1, 2, 17, 9, 16, 8]


def test_model_check_finds_a_block_in_two_places():
    pool = ModelPool(4, 4)
    pool.blocks.alloc()
    pool.arenas[0].blank.append(1)
    with pytest.raises(CorruptState):
        pool.check()


@pytest.mark.parametrize("duplicate", [copy.copy, copy.deepcopy, pickle.dumps])
def test_model_cannot_be_copied(duplicate):
    pool = ModelPool(32, 4)
    for thing in (pool, ModelPlan(pool, 8)):
        with pytest.raises(TypeError):
            duplicate(thing)
