"""Family B: blocks that nobody gives back. See README.md."""

import gc

import pytest
from catalogue import idle

from kvpool import Plan, Pool
from kvpool.adapters.block_manager import KVBlockManager
from kvpool.config import KVSpec


def test_b10_pools_and_plans_that_nobody_holds_are_freed():
    """A block and a node of the tree referred to each other: 564,624 bytes leaked. Here: tags of pools come back."""
    for turn in range(3000):  # more than there are tags
        pool = Pool(4, 4, prefix_cache=True)
        plan = Plan(pool, 1)
        pool.step(plan, [pool.open()], 1)
        del pool, plan
        if turn % 500 == 0:
            gc.collect()


def test_b13_copy_that_fails_counts_for_nothing(monkeypatch):
    """A counter moved before the data was copied, and a buffer was not freed when there was no page."""
    manager = KVBlockManager(KVSpec(1, 1, 8, "float32", 4), num_blocks=8)
    parent = manager.new_sequence(0).seq_id
    manager.step([parent], 6)
    child = manager.fork(parent).seq_id

    def fail(plan):
        raise RuntimeError("the device is gone")

    with monkeypatch.context() as patch, pytest.raises(RuntimeError):
        patch.setattr(manager.backend, "copy_blocks", fail)
        manager.step([child], 1)
    assert manager.pool.num_tokens(child) == 6 and manager.pool.table(child).tolist() == [1, 2]
    manager.free(parent)
    manager.free(child)
    assert idle(manager.pool)
