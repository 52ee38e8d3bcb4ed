"""Worked examples that others published about paged KV caches, and the faults in them, as tests of kvpool.

Sources: the MLX paged-attention plan (block manager sketch), Levanter's inference notes (page tables and
PageBatchInfo), a PagedAttention simulation with hashed blocks, an H2O eviction report for MLX, and a
continuous-batching notebook (pool, page table, scheduler). Each section follows one of them.
"""

from math import ceil

import numpy as np

from kvpool import Plan, Pool
from kvpool.adapters.block_manager import KVBlockManager
from kvpool.config import KVSpec
from kvpool.stats import PageBatchInfo
from kvpool.testing.dense import dense_attention


def used(pool):
    return pool.stats().used


# ---------------------------------------------------------------------- paged against static reservation


def test_lengths_32_128_64_256_take_30_blocks_where_static_reservation_takes_64():
    lengths = (32, 128, 64, 256)
    pool = Pool(65, 16)
    plan = Plan(pool, 4, sum(lengths))
    handles = [pool.open() for _ in lengths]
    pool.step(plan, handles, lengths)
    assert used(pool) == 2 + 8 + 4 + 16 == 30
    assert len(lengths) * ceil(max(lengths) / 16) == 64
    assert pool.stats().fragmentation == 0.0  # every length is a multiple of 16


# ---------------------------------------------------------------------- Levanter: page tables

INVALID = -1


def pool_with_pages_2_and_7():
    """Pages 0 .. 9 of 4 tokens; the sequence in slot 3 owns pages 2 and 7, as in the toy example."""
    pool = Pool(10, 4, reserved_blocks=0, max_blocks_per_seq=4)
    pool.open(8)  # slot 0: pages 0, 1
    sequences = [pool.open() for _ in range(3)]  # slots 1, 2, 3
    plan = Plan(pool, 2, 16, formats=("page_batch_info", "positions"))
    target = sequences[2]
    pool.step(plan, [target], 4)  # page 2
    pool.done(plan)
    pool.step(plan, [sequences[0]], 16)  # pages 3 .. 6
    pool.done(plan)
    return pool, plan, sequences, target


def test_token_at_position_5_of_pages_2_and_7_goes_to_slot_29():
    pool, plan, _, target = pool_with_pages_2_and_7()
    pool.step(plan, [target], 2)
    assert pool.table(target).tolist() == [2, 7]
    assert plan.positions.tolist() == [4, 5]
    assert plan.slot_mapping[1] == 7 * 4 + 1 == 29


def test_page_batch_info_of_the_toy_example_is_complete():
    pool, plan, sequences, target = pool_with_pages_2_and_7()
    pool.step(plan, [target, sequences[1]], [2, 3], pad_to=(2, 8))
    info = PageBatchInfo.of(plan)
    assert info.slot_ids.tolist() == [3, 2]
    assert info.page_indices.tolist() == [[2, 7, INVALID, INVALID], [8, INVALID, INVALID, INVALID]]
    assert info.seq_lens.tolist() == [6, 3]
    assert info.cu_q_lens.tolist() == [0, 2, 5]
    assert info.num_seqs == 2
    assert info.new_token_dests.tolist() == [28, 29, 32, 33, 34, INVALID, INVALID, INVALID]
    assert info.page_size == 4
    pages, offsets = np.divmod(info.new_token_dests[:5], info.page_size)  # its pages_and_slots()
    assert pages.tolist() == [7, 7, 8, 8, 8] and offsets.tolist() == [0, 1, 0, 1, 2]
    assert all(
        info.seq_lens[row] >= position + 1 for row, position in zip([0, 0, 1, 1, 1], plan.positions, strict=False)
    )


# ---------------------------------------------------------------------- the MLX plan: block manager sketch


def test_context_of_a_whole_number_of_blocks_sees_its_last_block():
    """A mask `position > ctx_len % block_size` hides all but one token of a full last block."""
    spec = KVSpec(1, 1, 4, "float32", 4)
    for ctx_len in (4, 8, 12):
        manager = KVBlockManager(spec, 8)
        seq_id = manager.new_sequence(ctx_len).seq_id
        k, v = np.random.default_rng(ctx_len).standard_normal((2, ctx_len, 1, 4)).astype(np.float32)
        list(manager.prefill_into_kv(seq_id, range(ctx_len), lambda c, p, k=k, v=v: ([k], [v])))
        tables, lens = manager.batch_tables([seq_id])
        q = np.ones((1, 2, 1, 4), np.float32)
        out = manager.paged_attention(q, tables, lens, 0)
        np.testing.assert_allclose(out[0, :, 0], dense_attention(q[0].swapaxes(0, 1), k, v)[0][0], atol=1e-6)
        assert tables.shape == (1, ctx_len // 4)
