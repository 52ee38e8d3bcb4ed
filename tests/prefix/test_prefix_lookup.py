"""What is found in the prefix cache, and what is not."""

from __future__ import annotations

import random

import numpy as np
import pytest
from prefixes import as_arrays, cache, compute, serve

PROMPT = list(range(100, 112))  # three blocks of four


def test_lookup_of_an_empty_cache_finds_nothing(make_pool):
    pool = make_pool(prefix_cache=True)
    assert pool.prefix.match(PROMPT) == 0
    handle = pool.open(PROMPT)
    assert pool.num_tokens(handle) == 0 and pool.table(handle).tolist() == [1, 2, 3]


def test_lookup_of_a_known_prompt_shares_its_blocks(make_pool, make_plan):
    pool = make_pool(prefix_cache=True)
    first = serve(make_plan, pool, PROMPT)
    second = pool.open([*PROMPT, 7])
    assert pool.num_tokens(second) == 12
    assert pool.table(second).tolist() == [1, 2, 3, 4]
    assert [pool.blocks.refcount(block) for block in (1, 2, 3, 4)] == [2, 2, 2, 1]
    pool.close([first, second])


@pytest.mark.parametrize(
    ("length", "cached"), [(0, 0), (1, 0), (4, 0), (5, 4), (8, 4), (9, 8), (11, 8), (12, 8), (13, 12)]
)
def test_lookup_always_leaves_the_last_token_to_compute(make_pool, make_plan, length, cached):
    pool = make_pool(prefix_cache=True)
    cache(make_plan, pool, PROMPT)
    prompt = [*PROMPT, 7][:length]
    assert pool.prefix.match(prompt) == cached
    assert pool.num_tokens(pool.open(prompt)) == cached


def test_lookup_of_a_partial_block_misses(make_pool, make_plan):
    pool = make_pool(prefix_cache=True)
    cache(make_plan, pool, PROMPT[:7])
    assert pool.prefix.match(PROMPT) == 4
    assert pool.prefix.stats().nodes == 1


def test_lookup_ends_at_the_first_different_token(make_pool, make_plan):
    pool = make_pool(prefix_cache=True)
    cache(make_plan, pool, PROMPT)
    for position in range(12):
        prompt = [*PROMPT, 7]
        prompt[position] += 1
        assert pool.prefix.match(prompt) == position // 4 * 4


def test_lookup_of_the_same_block_behind_another_prefix_misses(make_pool, make_plan):
    pool = make_pool(prefix_cache=True)
    a, b, c = PROMPT[:4], PROMPT[4:8], PROMPT[8:]
    cache(make_plan, pool, [*a, *b])
    cache(make_plan, pool, [*c, *b])
    assert pool.prefix.match([*b, 0]) == 0
    assert pool.prefix.match([*c, *a, 0]) == 4
    one, other = pool.open([*a, *b, 0]), pool.open([*c, *b, 0])
    assert not set(pool.table(one).tolist()) & set(pool.table(other).tolist())


def test_lookup_takes_every_form_of_tokens(make_pool, make_plan):
    pool = make_pool(prefix_cache=True)
    cache(make_plan, pool, PROMPT)
    for form in as_arrays([*PROMPT, 7]):
        assert pool.prefix.match(form) == 12
        handle = pool.open(form)
        assert pool.num_tokens(handle) == 12
        pool.close(handle)
    for form in as_arrays([]):
        assert pool.prefix.match(form) == 0
        assert pool.capacity(pool.open(form)) == 0


def test_lookup_knows_the_largest_token(make_pool, make_plan):
    pool = make_pool(prefix_cache=True)
    cache(make_plan, pool, [2**31 - 1] * 4)
    assert pool.prefix.match([2**31 - 1] * 5) == 4
    assert pool.prefix.match([2**31 - 2] + [2**31 - 1] * 4) == 0


def test_match_changes_nothing(make_pool, make_plan):
    pool = make_pool(prefix_cache=True, events=8)
    cache(make_plan, pool, PROMPT)
    pool.prefix.events()
    before = pool.fingerprint(), pool.digest(), pool.stats(), pool.prefix.stats()
    for prompt, namespace in ((PROMPT, b""), ([5] * 40, b""), (PROMPT, b"never seen"), ([], b"")):
        pool.prefix.match(prompt, namespace)
    assert (pool.fingerprint(), pool.digest(), pool.stats(), pool.prefix.stats()) == before
    assert pool.prefix.events() == []


def test_lookup_finds_tokens_generated_later(make_pool, make_plan):
    pool = make_pool(prefix_cache=True)
    handle = serve(make_plan, pool, PROMPT[:6])
    for token in PROMPT[6:]:
        assert pool.prefix.match([*PROMPT, 7]) == pool.num_tokens(handle) // 4 * 4
        compute(make_plan, pool, handle, 1)
        pool.prefix.commit(handle, [token])
    assert pool.prefix.match([*PROMPT, 7]) == 12


def test_lookup_finds_what_a_sequence_opened_by_count_computed(make_pool, make_plan):
    pool = make_pool(prefix_cache=True)
    for namespace in (b"", b"tenant"):
        handle = pool.open(0, namespace)
        compute(make_plan, pool, handle, 12)
        pool.prefix.commit(handle, PROMPT)
        assert pool.prefix.match([*PROMPT, 7], namespace) == 12


def test_lookup_finds_blocks_in_use_cached_and_in_limbo(make_pool, make_plan):
    pool = make_pool(prefix_cache=True)
    handle = serve(make_plan, pool, PROMPT)
    assert pool.prefix.match([*PROMPT, 7]) == 12  # in use
    other, plan = pool.open(), make_plan(pool)
    pool.step(plan, [other], 1)
    pool.close(handle)
    assert pool.stats().limbo == 3 and pool.prefix.match([*PROMPT, 7]) == 12
    found = pool.open([*PROMPT, 7])
    assert pool.stats().limbo == 0 and pool.num_tokens(found) == 12
    pool.close(found)
    pool.done(plan)
    assert pool.stats().evictable == 3 and pool.prefix.match([*PROMPT, 7]) == 12


def test_lookup_after_reset_finds_nothing(make_pool, make_plan):
    pool = make_pool(prefix_cache=True)
    cache(make_plan, pool, PROMPT)
    pool.reset()
    assert pool.prefix.match([*PROMPT, 7]) == 0
    assert pool.prefix.stats().nodes == 0
    assert cache(make_plan, pool, PROMPT) == [1, 2, 3]
    assert pool.prefix.match([*PROMPT, 7]) == 12


def test_pool_without_prefix_cache_finds_nothing(make_pool):
    pool = make_pool()
    handle = pool.open(PROMPT)
    assert pool.num_tokens(handle) == 0 and pool.capacity(handle) == 12
    assert pool.prefix is None


BY_NAME = ("take", "take_block", "touch", "release", "mark_cached", "uncache", "drain_evicted")


@pytest.mark.parametrize("call", BY_NAME)
def test_pool_with_prefix_cache_looks_after_content_itself(make_pool, refused, call):
    pool = make_pool(prefix_cache=True)
    block = pool.blocks.alloc()
    with refused(pool, ValueError, call):
        getattr(pool.blocks, call)(*([] if call == "drain_evicted" else [block]))


@pytest.mark.parametrize("bits", [0, 1, 3, 8, 64])
def test_lookup_with_hashes_that_collide_never_finds_a_wrong_block(make_pool, make_plan, bits):
    """Every hit is checked against what was written; a short hash may lose hits, a long one must not."""
    seed = random.SystemRandom().randrange(2**32)
    print(f"seed {seed}")
    rng = random.Random(seed)
    pool = make_pool(24, 2, prefix_cache=True, _hash_bits=bits)
    written: dict[int, tuple] = {}  # block -> the prefix that ends in it
    found = promised = 0
    for turn in range(150):
        prompt = [rng.choice((1, 1, 1, 2)) for _ in range(rng.randrange(1, 14))]
        namespace = rng.choice((b"", b"x"))
        handle = serve(make_plan, pool, prompt, namespace) if rng.random() < 0.9 else pool.open(prompt, namespace)
        cached = pool.prefix.match([*prompt[: len(prompt) - 1], 9], namespace)
        promised += cached
        table = pool.table(handle).tolist()
        hits = pool.prefix.pin(prompt, namespace)
        for i, block in enumerate(pool.table(hits).tolist()):
            prefix = namespace, tuple(prompt[: 2 * i + 2])
            if block in table:
                written[block] = prefix
            assert written[block] == prefix, (seed, turn)
            found += 1
        pool.close([hits, handle])
        if rng.random() < 0.3:
            pool.blocks.evict(rng.randrange(4))
    if bits == 64:
        assert found > 100 and promised > 100


def test_long_chain_is_built_found_and_torn_down_without_recursion(core):
    n = 1_000_000 if core.Pool.__module__.startswith("kvpool._") else 200
    pool = core.Pool(n + 8, 1, prefix_cache=True, max_seqs=4, max_blocks_per_seq=n + 1, seed=1)
    tokens = np.arange(n, dtype=np.int32) % 7
    plan = core.Plan(pool, 1, n, formats=("seq_lens",))
    handle = pool.open(tokens)
    pool.step(plan, [handle], n)
    pool.done(plan)
    pool.prefix.commit(handle, tokens)
    assert pool.prefix.match(np.append(tokens, 0).astype(np.int32)) == n
    pool.close(handle)
    pin = pool.prefix.pin(tokens)
    assert pool.num_tokens(pin) == n and pool.blocks.evict(n) == 0
    pool.prefix.unpin(pin)
    assert pool.blocks.evict(n // 2) == n // 2
    assert pool.prefix.match(tokens) == n - n // 2
    assert pool.prefix.flush() == n - n // 2
    pool.shutdown()
