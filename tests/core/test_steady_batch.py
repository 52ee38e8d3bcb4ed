"""Batches in which each row has one token: what a decode step is, served in one pass over the rows."""

import numpy as np
import pytest

import kvpool
from kvpool import Group

ROWS = 12
GROUPS = {
    "full": [Group.full()],
    "full, of two columns": [Group.full(), Group.full(columns=2)],
    "full, window": [Group.full(), Group.window(6)],
    "full, state": [Group.full(), Group.state(60)],
}


@pytest.mark.parametrize("in_order", [False, True])
@pytest.mark.parametrize("fault", ["stale", "duplicate", "blocks"])
@pytest.mark.parametrize("groups", GROUPS.values(), ids=GROUPS)
def test_steady_batch_refused_changes_nothing(refused, groups, fault, in_order):
    """Rows before the one that is refused have been served by then, and some have begun a block."""
    pool = kvpool.Pool(200, 4, max_seqs=ROWS + 4, max_blocks_per_seq=16, in_order=in_order, groups=groups, seed=3)
    plan = kvpool.Plan(pool, ROWS + 1, 100)
    handles = np.array([pool.open() for _ in range(ROWS)], np.int64)
    for new in (np.arange(ROWS), 1):
        pool.step(plan, handles, new)
        if plan.is_pending:
            pool.done(plan)
    gone = pool.open()
    pool.close(gone)
    batch = {"stale": np.append(handles, gone), "duplicate": np.append(handles, handles[0]), "blocks": handles}[fault]
    error = {"stale": kvpool.StaleHandle, "duplicate": ValueError, "blocks": kvpool.OutOfBlocks}[fault]
    if fault == "blocks":
        pool.blocks.alloc(pool.stats().free - 2)  # three rows begin a block in the next step
    tables = [pool.table(handle, k).tolist() for handle in handles for k in range(len(groups))]
    with refused(pool, error, "step", plans=[plan]):
        pool.step(plan, batch, 1)
    assert [pool.table(handle, k).tolist() for handle in handles for k in range(len(groups))] == tables
    pool.check()
    if fault != "blocks":
        pool.step(plan, handles, 1)
        assert plan.groups[0].kv_lens.tolist() == (np.arange(ROWS) + 2).tolist()
