"""Bringing a decode step's block tables to MLX: the dirty rows only, beside ``mx.array(table)``.

256 sequences of almost 4,096 tokens in blocks of 16, so a table of 256 x 256 int32. The lengths are
staggered: in each step one row in 16 takes a block. The plans of 16 steps are recorded first; one round
uploads them in order.
"""

import numpy as np
import pytest

import kvpool

mx = pytest.importorskip("mlx.core")
upload = pytest.importorskip("kvpool_backends.mlx.upload")

BLOCK_SIZE = 16
ROWS = 256
WIDTH = 256
STEPS = 16
ROUNDS = 200


def recorded_steps():
    """Return (block_tables, dirty_rows) of `STEPS` decode steps after the first one, as copies."""
    pool = kvpool.Pool(ROWS * WIDTH + 1, BLOCK_SIZE, max_seqs=ROWS, max_blocks_per_seq=WIDTH, in_order=True)
    handles = np.array([pool.open() for _ in range(ROWS)], np.int64)
    plan = kvpool.Plan(pool, ROWS, ROWS * WIDTH * BLOCK_SIZE, formats=("block_tables",))
    pool.step(plan, handles, (WIDTH * BLOCK_SIZE - 2 * STEPS + np.arange(ROWS) % STEPS).astype(np.int32))
    first = plan.block_tables.copy(), plan.dirty_rows.copy()
    steps = []
    for _ in range(STEPS):
        pool.step(plan, handles, 1)
        steps.append((plan.block_tables.copy(), plan.dirty_rows.copy()))
    return first, steps


@pytest.mark.benchmark(group="table upload")
@pytest.mark.parametrize("who", ["kvpool", "kvpool, 2 buffers", "mx.array"])
def bench_table_upload(measure, who):
    first, steps = recorded_steps()
    table_nbytes = first[0].nbytes
    assert table_nbytes == ROWS * WIDTH * 4
    handed = table_nbytes
    if who == "mx.array":

        def run():
            for table, _ in steps:
                mx.array(table)

    else:
        uploader = upload.TableUploader(2 if who.endswith("2 buffers") else 1)
        for table, dirty_rows in (first, *steps):
            on_device = uploader.upload(table, dirty_rows)
            assert np.array_equal(np.array(on_device), table)
        handed = uploader.nbytes_handed
        assert handed <= table_nbytes // 8

        def run():
            for table, dirty_rows in steps:
                uploader.upload(table, dirty_rows)

    measure(
        run,
        STEPS,
        row=f"table to MLX, {ROWS} sequences",
        who=who,
        rounds=ROUNDS,
        handed_nbytes=handed,
        table_nbytes=table_nbytes,
    )
