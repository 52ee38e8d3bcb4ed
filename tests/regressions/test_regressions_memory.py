"""Families B, F and G: leaks, the null block and memory nobody has written, products that do not fit. See README.md."""

import gc

import numpy as np
import pytest
from catalogue import idle

from kvpool import Plan, Pool
from kvpool.adapters.block_manager import KVBlockManager
from kvpool.config import KVSpec
from kvpool_backends.cpu import BlockStore
from kvpool_backends.numpy import NumpyBackend


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


@pytest.mark.filterwarnings("ignore:invalid value:RuntimeWarning")
def test_f4_recycled_block_is_read_as_far_as_it_is_written(make_pool, make_plan):
    """A recycled block kept the bits of its last owner, which were NaN in the new dtype."""
    pool, spec = make_pool(2, 4), KVSpec(1, 1, 16, "float32", 4)
    backend = NumpyBackend(spec, 2)
    plan = make_plan(pool, formats=("block_tables", "seq_lens", "slot_mapping", "cu_q_lens"))
    for tokens, value in ((4, np.nan), (2, 0.5)):
        handle = pool.open()
        pool.step(plan, [handle], tokens)
        x = np.full((tokens, 1, 16), value, np.float32)
        backend.write(backend.prepare(plan), 0, x, x)
        answer = backend.attend(backend.prepare(plan), 0, x)
        pool.done(plan)
        pool.close(handle)
    np.testing.assert_allclose(answer, 0.5, rtol=1e-6)


def test_f5_padding_is_the_null_block_and_no_slot(make_pool, make_plan, core):
    """Padding rows that named real blocks changed results."""
    pool = make_pool()
    plan = make_plan(pool, 3, 4, formats=core.all_formats, table_width=2)
    pool.step(plan, [pool.open()], 2, pad_to=(3, 4))
    assert plan.block_tables.tolist() == [[1, 0], [0, 0], [0, 0]]
    assert plan.slot_mapping.tolist() == [4, 5, -1, -1]
    assert plan.cu_q_lens.tolist() == [0, 2, 2, 2]
    assert plan.slot_ids.tolist() == [0, -1, -1]


def test_g3_bytes_of_a_huge_pool_are_exact():
    """8,388,608 pages: strides were 32-bit, and the output was all zeros."""
    spec = KVSpec(1, 8, 128, "float16", 16)
    for num_blocks in (2**16 - 1, 2**16, 2**17, 8_388_608, 2**31 - 1):
        assert spec.pool_nbytes(num_blocks) == num_blocks * 16 * 8 * 128 * 2 * 2


def test_g4_slots_beyond_two_to_the_31_elements_hold_their_tokens():
    """slot * 576 overflowed at 3.7 million slots; memory that is never touched costs nothing."""
    spec, num_blocks = KVSpec(1, 1, 576, "float16", 16, v_head_dim=8), 234_000
    store = BlockStore(spec, num_blocks, [np.zeros(shape, np.float16) for shape, _, _ in spec.base_arrays(num_blocks)])
    slots = np.array([0, 2**31 // 576 - 1, 2**31 // 576 + 1, num_blocks * 16 - 1], np.int64)
    k = np.arange(1, 5, dtype=np.float16)[:, None, None] * np.ones((4, 1, 576), np.float16)
    store.write(0, k, k[:, :, :8], slots)
    found = np.empty((4 * 16, 1, 576), np.float16)
    store.gather(0, (slots // 16).astype(np.int32), found, np.empty((4 * 16, 1, 8), np.float16))
    assert found[np.arange(4) * 16 + slots % 16, 0, 0].tolist() == [1, 2, 3, 4]


def test_g5_capacity_is_computed_in_64_bits(make_pool):
    """A 32-bit product was widened after it had overflowed."""
    pool = make_pool(40, 2**28)
    handle = pool.open(2**31 + 5)
    assert (len(pool.table(handle)), pool.capacity(handle)) == (9, 9 * 2**28)
