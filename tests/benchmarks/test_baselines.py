"""The baselines of the benchmarks do the work that kvpool does: the same slots, step for step."""

import numpy as np

import kvpool
from benchmarks.baselines import Floor
from kvpool.cli.bench import PlainAllocator

ROWS = 5
STEPS = 40
LENGTHS = [33, 16, 47, 1, 20]


def test_baselines_and_kvpool_give_the_same_slots():
    floor, slots = Floor(64, rows=ROWS, width=8), np.empty(ROWS, np.int32)
    floor.set_lengths(LENGTHS)
    floor_step = floor.steps(np.arange(ROWS, dtype=np.int32), slots, 1, 1)

    python = PlainAllocator(64)
    ids = [python.open() for _ in range(ROWS)]
    pool = kvpool.Pool(64, 16, max_blocks_per_seq=8, reserved_blocks=0, in_order=True)
    handles = [pool.open() for _ in range(ROWS)]
    plan, prompt = kvpool.Plan(pool, ROWS), kvpool.Plan(pool, 1, 64)
    for handle, seq_id, length in zip(handles, ids, LENGTHS, strict=True):
        pool.step(prompt, [handle], length)
        python.step([seq_id], length)

    for _ in range(STEPS):
        pool.step(plan, handles)
        floor_step()
        _, seq_lens, slot_mapping = python.step(ids)
        assert plan.slot_mapping.tolist() == slots.tolist() == slot_mapping.tolist()
        assert plan.seq_lens.tolist() == seq_lens.tolist()
    assert [pool.table(handle).tolist() for handle in handles] == [python.tables[seq_id] for seq_id in ids]
