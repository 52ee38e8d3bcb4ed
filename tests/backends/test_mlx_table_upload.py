"""`TableUploader`: MLX's copy equals the plan's tables after every step, for the price of the dirty rows."""

import mlx.core as mx
import numpy as np
import pytest

from kvpool import Plan, Pool
from kvpool_backends.mlx import TableUploader


@pytest.mark.parametrize("num_buffers", [1, 2, 3])
@pytest.mark.parametrize("seed", range(3))
def test_uploaded_tables_equal_the_plan_after_any_history(num_buffers, seed):
    print(f"seed {seed}")
    rng = np.random.default_rng(seed)
    pool = Pool(400, 4, max_seqs=64, in_order=True)
    plan = Plan(pool, 16, 64, formats=("block_tables",), table_width=32)
    uploader = TableUploader(num_buffers)
    running = [pool.open() for _ in range(3)]
    for _ in range(60):
        match rng.integers(6):
            case 0 if len(running) < 16:
                running.append(pool.open())
            case 1 if len(running) < 16:
                running.append(int(pool.fork(running[0])[0]))
            case 2 if len(running) > 1:
                pool.close(running.pop(rng.integers(len(running))))
            case 3:
                rng.shuffle(running)
            case 4:
                pool.truncate(running[0], pool.num_tokens(running[0]) // 2)
        served = running[: rng.integers(1, len(running) + 1)]
        pool.step(plan, served, rng.integers(0, 3, len(served)).astype(np.int32))
        tables = uploader.upload(plan.block_tables, plan.dirty_rows)
        used = -(-max(map(pool.num_tokens, served)) // 4)
        assert np.array_equal(np.array(tables)[: len(served), :used], plan.block_tables[:, :used])


def steady(rows, num_buffers):
    """A pool in steady decode, lengths staggered over a block; returns a function that takes one step."""
    pool = Pool(rows * 20, 16, max_seqs=rows, in_order=True)
    handles = np.array([pool.open() for _ in range(rows)], np.int64)
    plan = Plan(pool, rows, 256 * rows, formats=("block_tables",), table_width=16)
    uploader = TableUploader(num_buffers)

    def step(num_new=1):
        pool.step(plan, handles, num_new)
        uploader.upload(plan.block_tables, plan.dirty_rows)
        return uploader, plan

    step((128 + np.arange(rows) % 16).astype(np.int32))
    return step


@pytest.mark.parametrize("num_buffers", [1, 2])
def test_steady_decode_hands_over_an_eighth_of_the_table_at_most(num_buffers):
    step = steady(32, num_buffers)
    for _ in range(2 * num_buffers):
        step()
    for _ in range(20):
        uploader, plan = step()
        assert 0 < uploader.nbytes_handed <= plan.block_tables.nbytes // 8


def test_a_step_that_changes_no_table_hands_over_nothing():
    step = steady(4, 1)
    step(16)
    total = step(0)[0].nbytes_total
    uploader, _ = step(0)
    assert uploader.nbytes_handed == 0 and uploader.nbytes_total == total


def test_two_buffers_leave_the_previous_tables_alone():
    uploader = TableUploader(2)
    tables = np.zeros((4, 8), np.int32)
    none, all_rows = np.zeros(0, np.int32), np.arange(4, dtype=np.int32)
    uploader.upload(tables, all_rows)
    previous = uploader.upload(tables, none)
    gathered = mx.arange(100)[previous]  # built on the previous tables, runs after the next upload
    current = uploader.upload(tables + 7, all_rows)
    assert not np.array(gathered).any()
    assert (np.array(current) == 7).all()


def test_num_buffers_must_be_positive():
    with pytest.raises(ValueError, match=r"\[TableUploader\]"):
        TableUploader(0)
    with pytest.raises(TypeError, match=r"\[TableUploader\]"):
        TableUploader(1.0)


def test_tables_of_another_dtype_are_refused():
    with pytest.raises(TypeError, match=r"\[upload\] .*int64"):
        TableUploader().upload(np.zeros((2, 2), np.int64), np.arange(2, dtype=np.int32))
