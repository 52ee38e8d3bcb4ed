"""Family H: failures half way, and waiting for ever. See README.md."""


def test_h8_small_block_sizes_and_empty_prompts(make_pool, make_plan):
    """Documented block sizes 1 and 8 crashed, and so did max_tokens = 0."""
    for block_size in (1, 8):
        pool = make_pool(8, block_size)
        handle = pool.open(0)
        plan = make_plan(pool)
        pool.step(plan, [handle], 0)
        assert plan.seq_lens.tolist() == [0] and plan.slot_mapping.shape == (0,)
        pool.done(plan)
        pool.step(plan, [handle], 1)
        assert plan.slot_mapping.tolist() == [block_size]
