"""Batches in which each row has one token: what a decode step is, served in one pass over the rows."""

import numpy as np
import pytest

import kvpool
from kvpool import Group

BLOCK_SIZE = 4
ROWS = 12


GROUPS = {
    "full": [Group.full()],
    "full, of two columns": [Group.full(), Group.full(columns=2)],
    "full, window": [Group.full(), Group.window(6)],
    "full, state": [Group.full(), Group.state(60)],
}


def make_pool(num_blocks, groups, *, in_order, prefix_cache=False):
    return kvpool.Pool(
        num_blocks, BLOCK_SIZE, max_seqs=ROWS + 4, max_blocks_per_seq=16, in_order=in_order, seed=3,
        prefix_cache=prefix_cache, groups=groups,
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


def shown(plan):
    """What a plan shows of the rows, in each group."""
    found = [plan.served[:ROWS].tolist(), plan.positions.tolist()]
    for part in plan.groups:
        found.append(part.kv_lens[:ROWS].tolist())
        if hasattr(part, "block_tables"):
            rows = part.dirty_rows[part.dirty_rows < ROWS]
            arrays = part.block_tables[:ROWS], part.slot_mapping, part.kv_starts[:ROWS], part.copies, rows
            found += [array.tolist() for array in arrays]
    return found


@pytest.mark.parametrize("in_order", [False, True])
@pytest.mark.parametrize("kind", [*GROUPS, "cache"])
def test_steady_batch_gives_what_a_mixed_batch_gives(kind, in_order):
    """A row that only reads sends the same rows down the general path."""
    seen = []
    for mixed in (False, True):
        cached = kind == "cache"
        pool = make_pool(121 if cached else 400, GROUPS.get(kind), in_order=in_order, prefix_cache=cached)
        formats = ("block_tables", "seq_lens", "slot_mapping", "positions")
        plans = [kvpool.Plan(pool, ROWS + 1, 100, formats=formats) for _ in range(2)]
        handles = staggered(pool, plans[0])
        reader = pool.open()
        if cached:
            fill_cache(pool, plans[1])
            assert pool.stats().blank < 2 and pool.stats().evictable > 90
        batch, new = (np.append(handles, reader), [1] * ROWS + [0]) if mixed else (handles, 1)
        for k in range(20):
            plan = plans[k % 2]
            if plan.is_pending:
                pool.done(plan)
            pool.step(plan, batch, new)
            seen.append([k, *shown(plan), pool.stats().free])
            if k % 7 == 6 and not in_order:
                pool.rollback(plan)
        pool.check()
    assert seen[:20] == seen[20:]


@pytest.mark.parametrize("in_order", [False, True])
@pytest.mark.parametrize("fault", ["stale", "duplicate", "blocks"])
@pytest.mark.parametrize("groups", GROUPS.values(), ids=GROUPS)
def test_steady_batch_refused_changes_nothing(refused, groups, fault, in_order):
    """Rows before the one that is refused have been served by then, and some have begun a block."""
    pool = make_pool(200, groups, in_order=in_order)
    plans = [kvpool.Plan(pool, ROWS + 1, 100) for _ in range(2)]
    handles = staggered(pool, plans[0])
    gone, copied = pool.open(), pool.fork(handles[1])[0]
    pool.step(plans[1], [copied], 1)
    if not in_order:
        pool.done(plans[1])
    assert all(len(part.copies) == part.block_tables.shape[2] for part in plans[1].groups if hasattr(part, "copies"))
    pool.close([gone, copied])
    pool.step(plans[0], handles, 1)
    last = {"stale": gone, "duplicate": handles[0]}
    batch = np.append(handles, last[fault]) if fault != "blocks" else handles
    error = {"stale": kvpool.StaleHandle, "duplicate": ValueError, "blocks": kvpool.OutOfBlocks}[fault]
    if fault == "blocks":
        pool.blocks.alloc(pool.stats().free - 2)  # three rows begin a block in the next step
    tables = [pool.table(handle, k).tolist() for handle in handles for k in range(len(groups))]
    with refused(pool, error, "step", plans=plans[1:]):
        pool.step(plans[1], batch, 1)
    assert [pool.table(handle, k).tolist() for handle in handles for k in range(len(groups))] == tables
    pool.check()
    if fault != "blocks":
        pool.step(plans[1], handles, 1)
        assert plans[1].groups[0].kv_lens.tolist() == (np.arange(ROWS) + 2).tolist()
