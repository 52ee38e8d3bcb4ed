"""Family E: one too many, one too few. See README.md."""

from kvpool.adapters.block_manager import KVBlockManager
from kvpool.config import KVSpec


def test_e10_cut_behind_an_eviction_is_by_the_logical_length(make_pool, make_plan, refused):
    """A ring was cut by its logical length, and its step taken for its offset: two numbers once tokens have left."""
    pool = make_pool()
    plan = make_plan(pool, formats=("seq_lens", "positions", "slot_mapping"))
    handle = pool.open()
    pool.step(plan, [handle], 12)
    pool.done(plan)
    pool.compact(handle, 6)
    pool.step(plan, [handle], 5)
    assert plan.positions.tolist() == [12, 13, 14, 15, 16] and plan.seq_lens.tolist() == [11]
    pool.done(plan)
    table = pool.table(handle).tolist()
    for length in (11, 18):  # tokens that have a slot; one more than there ever were
        with refused(pool, ValueError, "truncate", length):
            pool.truncate(handle, length)
    pool.truncate(handle, 14)  # 16 positions are covered, of which a block and a half are gone
    assert (pool.num_tokens(handle), pool.kv_len(handle), pool.table(handle).tolist()) == (14, 8, table[:3])
    pool.step(plan, [handle], 1)
    assert plan.positions.tolist() == [14] and plan.seq_lens.tolist() == [9]
    assert plan.slot_mapping.tolist() == [4 * int(pool.table(handle)[2])]


def test_e12_storage_has_as_many_blocks_as_its_pool():
    """The same, where one object owns both."""
    manager = KVBlockManager(KVSpec(1, 1, 8, "float32", 4), num_blocks=8)
    assert manager.backend.num_blocks == manager.pool.stats().num_blocks
