"""Batches in which each row has one token: what a decode step is, served in one pass over the rows."""

import numpy as np
import pytest

import kvpool

BLOCK_SIZE = 4
ROWS = 12


def make_pool(num_blocks, *, in_order, prefix_cache=False):
    return kvpool.Pool(
        num_blocks, BLOCK_SIZE, max_seqs=ROWS + 2, max_blocks_per_seq=16, in_order=in_order, seed=3,
        prefix_cache=prefix_cache,
    )  # fmt: skip


def staggered(pool, prompt):
    """Open ROWS sequences of 0, 1, ... tokens, so that in each step some of them begin a block."""
    handles = np.array([pool.open() for _ in range(ROWS)], np.int64)
    pool.step(prompt, handles, np.arange(ROWS))
    if prompt.is_pending:
        pool.done(prompt)
    return handles


def fill_cache(pool, plan):
    """Leave committed blocks only, so that every block that a row begins is an evicted one."""
    tokens = np.arange(pool.stats().free * BLOCK_SIZE // 2, dtype=np.int32)
    for half in (tokens, tokens + len(tokens)):
        for part in np.split(half, range(16 * BLOCK_SIZE, len(half), 16 * BLOCK_SIZE)):
            handle = pool.open()
            pool.step(plan, [handle], len(part))
            if plan.is_pending:
                pool.done(plan)
            pool.prefix.commit(handle, part)
            pool.close(handle)


@pytest.mark.parametrize("prefix_cache", [False, True])
@pytest.mark.parametrize("in_order", [False, True])
def test_steady_batch_gives_what_a_mixed_batch_gives(in_order, prefix_cache):
    """A row that only reads sends the same rows down the general path."""
    seen = []
    for mixed in (False, True):
        pool = make_pool(121, in_order=in_order, prefix_cache=prefix_cache)
        plans = [kvpool.Plan(pool, ROWS + 1, 100) for _ in range(2)]
        handles = staggered(pool, plans[0])
        reader = pool.open()
        if prefix_cache:
            fill_cache(pool, plans[1])
            assert pool.stats().blank < 2 and pool.stats().evictable > 90
        batch, new = (np.append(handles, reader), [1] * ROWS + [0]) if mixed else (handles, 1)
        for k in range(20):
            plan = plans[k % 2]
            if plan.is_pending:
                pool.done(plan)
            pool.step(plan, batch, new)
            rows = plan.dirty_rows[plan.dirty_rows < ROWS]
            shown = [plan.block_tables[:ROWS], plan.seq_lens[:ROWS], plan.slot_mapping, plan.served[:ROWS], rows]
            seen.append([mixed, k, *(part.tolist() for part in shown), pool.stats().free])
            if k % 7 == 6 and not in_order:
                pool.rollback(plan)
        pool.check()
    steady, general = seen[:20], seen[20:]
    assert [row[1:-1] for row in steady] == [row[1:-1] for row in general]
    assert [row[-1] for row in steady] == [row[-1] for row in general]


@pytest.mark.parametrize("in_order", [False, True])
@pytest.mark.parametrize("fault", ["stale", "duplicate", "blocks"])
def test_steady_batch_refused_changes_nothing(fault, in_order):
    """Rows before the one that is refused have been served by then, and some have begun a block."""
    pool = make_pool(41, in_order=in_order)
    plans = [kvpool.Plan(pool, ROWS + 1, 100) for _ in range(2)]
    handles = staggered(pool, plans[0])
    gone = pool.open()
    pool.close(gone)
    pool.step(plans[0], handles, 1)
    last = {"stale": gone, "duplicate": handles[0]}
    batch = np.append(handles, last[fault]) if fault != "blocks" else handles
    error = {"stale": kvpool.StaleHandle, "duplicate": ValueError, "blocks": kvpool.OutOfBlocks}[fault]
    if fault == "blocks":
        pool.blocks.alloc(pool.stats().free - 2)  # three rows begin a block in the next step
    before, tables = pool.fingerprint(), [pool.table(handle).tolist() for handle in handles]
    with pytest.raises(error):
        pool.step(plans[1], batch, 1)
    assert pool.fingerprint() == before
    assert [pool.table(handle).tolist() for handle in handles] == tables
    pool.check()
    if fault != "blocks":
        pool.step(plans[1], handles, 1)
        assert plans[1].seq_lens.tolist() == (np.arange(ROWS) + 2).tolist()
