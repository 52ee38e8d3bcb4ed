"""Family E: one too many, one too few. See README.md."""

import itertools

from prefixes import cache, compute

from kvpool.adapters.block_manager import KVBlockManager
from kvpool.config import KVSpec


def test_e1_lengths_around_a_block_boundary(make_pool, make_plan):
    """len % block_size == 0 broke chains, lookahead and tables in every engine."""
    for block_size, k, delta in itertools.product([1, 2, 3, 7, 16, 32, 256], [1, 2, 5], [-1, 0, 1]):
        length = k * block_size + delta
        pool = make_pool(8, block_size)
        handle = pool.open()
        plan = make_plan(pool, 1, 2048, formats=("csr", "slot_mapping", "seq_lens"))
        pool.step(plan, [handle], length)
        blocks = len([p for p in range(length) if p % block_size == 0])
        assert pool.table(handle).tolist() == list(range(1, blocks + 1))
        assert plan.slot_mapping.tolist() == [block_size + p for p in range(length)]
        assert plan.last_page_len.tolist() == [length - (blocks - 1) * block_size if length else 0]
        pool.done(plan)
        pool.step(plan, [handle], 1)
        assert plan.slot_mapping.tolist() == [block_size + length]
        assert len(pool.table(handle)) == blocks + (length % block_size == 0)


def test_e1_fully_cached_prompt_leaves_one_token_and_keeps_its_chain(make_pool, make_plan):
    """vllm PR11186, PR12003: the whole prompt was cached, computing its last token again broke the chain."""
    for block_size in [1, 2, 3, 4, 16]:
        pool = make_pool(16, block_size, prefix_cache=True)
        prompt = list(range(3 * block_size))
        cache(make_plan, pool, prompt)
        handle = pool.open(prompt)
        assert pool.num_tokens(handle) == 2 * block_size
        compute(make_plan, pool, handle, block_size)
        pool.prefix.commit(handle, prompt[2 * block_size :])  # a duplicate of the third block
        compute(make_plan, pool, handle, block_size)
        pool.prefix.commit(handle, [7] * block_size)
        assert pool.prefix.match([*prompt, *[7] * block_size, 8]) == 4 * block_size


def test_e2_length_of_the_cached_part_is_not_cut_twice(make_pool, make_plan):
    """vllm PR40684: the last token was subtracted by two layers, 17 tokens became 0."""
    pool = make_pool(8, 16, prefix_cache=True)
    cache(make_plan, pool, list(range(48)))
    for length, cached in [(16, 0), (17, 16), (31, 16), (32, 16), (33, 32)]:
        assert pool.prefix.match(list(range(length))) == cached


def test_e8_cached_blocks_count_once_in_the_capacity_check(make_pool, make_plan):
    """The number of touched blocks was wrong when cached blocks sat in the evictor."""
    pool = make_pool(5, 4)
    ids = pool.blocks.alloc(2)
    pool.blocks.mark_cached(ids)
    pool.blocks.free(ids)
    handle = pool.open()
    assert pool.can([handle], 16) is True
    pool.step(make_plan(pool), [handle], 16)
    assert pool.stats().evictions == 2


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
