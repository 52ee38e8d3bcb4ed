"""mlx-lm's LRUPromptCache and deep copies on a pool: a hit is a fork, a write to a shared tail copies it."""

import copy
import gc

import mlx.core as mx
import pytest
from mlx_lm.models.cache import LRUPromptCache, make_prompt_cache
from mlx_lm.sample_utils import make_sampler
from mlx_models import batch_tokens, random_prompts, solo_tokens, tiny_llama

from kvpool.adapters.mlx_lm import install

BLOCK = 4


@pytest.fixture(scope="module")
def model():
    return tiny_llama()


@pytest.fixture
def kv(model):
    with install(model, 200, block_size=BLOCK) as kv:
        yield kv
    gc.collect()
    summary = kv.summary()
    assert (summary.blocks_used, summary.blocks_leaked, summary.sequences) == (0, 0, 0)
    kv.pool.check()


def prefilled(model, tokens):
    cache = make_prompt_cache(model)
    model(mx.array([tokens]), cache=cache)
    return cache


@pytest.mark.parametrize(
    ("cached", "asked", "copied"),
    [
        (10, 18, 1),  # a shorter entry: go on in the middle of its third block
        (8, 18, 0),  # at a block boundary nothing is shared that is written
        (18, 10, 1),  # a longer entry, trimmed to 9 tokens
    ],
)
def test_a_prompt_cache_hit_equals_a_cold_start(model, kv, cached, asked, copied):
    (prompt,) = random_prompts([max(cached, asked)])
    prompts = LRUPromptCache()
    prompts.insert_cache("model", prompt[:cached], prefilled(model, prompt[:cached]))
    before = kv.summary()
    hit, rest = prompts.fetch_nearest_cache("model", prompt[:asked])
    assert len(rest) == max(1, asked - cached)
    assert kv.summary().blocks_used == before.blocks_used  # a fork: no block, no copy
    cold = solo_tokens(model, prompt[:asked])
    assert solo_tokens(model, rest, prompt_cache=hit) == cold
    after = kv.summary()
    assert after.cow_copies - before.cow_copies == copied
    again, rest = prompts.fetch_nearest_cache("model", prompt[:asked])  # the entry is as it was
    assert solo_tokens(model, rest, prompt_cache=again) == cold


def test_finished_requests_go_on_from_their_returned_cache(model, kv):
    """Two turns of a conversation, batched, as mlx-lm's server does it."""
    turns = random_prompts([13, 6, 21])
    finished = {}

    def collect(generator, uids):
        for uid, (cache, tokens) in generator.extract_cache(uids).items():
            finished[uid] = (cache, list(tokens))

    batch_tokens(model, turns, 6, on_step=collect)
    caches, histories = zip(*finished.values(), strict=True)
    question = random_prompts([3, 8, 1], seed=2)
    answers = batch_tokens(model, question, 10, caches=list(caches))
    assert answers == [
        solo_tokens(model, history + asked, 10) for history, asked in zip(histories, question, strict=True)
    ]


def test_caches_given_to_the_engine_stay_as_they_were(model, kv):
    (prompt,) = random_prompts([10])
    cache = prefilled(model, prompt[:-1])
    first, second = (batch_tokens(model, [prompt[-1:]], 8, caches=[cache]) for _ in range(2))
    assert first == second == [solo_tokens(model, prompt, 8)]
    assert cache[0].offset == 9


def test_clones_of_one_prompt_sample_what_stock_samples(model):
    (prompt,), clones = random_prompts([22]), 8

    def sample():
        mx.random.seed(3)
        cache = prefilled(model, prompt[:-1])
        copies = [copy.deepcopy(cache) for _ in range(clones)]
        sampler = make_sampler(temp=1.0)
        return batch_tokens(
            model,
            [prompt[-1:]] * clones,
            12,
            caches=copies,
            sampler=sampler,
            prefill_batch_size=clones,
            completion_batch_size=clones,
        )

    expected = sample()
    assert len({tuple(row) for row in expected}) == clones
    with install(model, 200, block_size=BLOCK) as kv:
        assert sample() == expected
        summary = kv.summary()
    # 21 prompt tokens: 5 full blocks are shared by all, the tail is copied for each clone
    assert summary.cow_copies == clones
    assert summary.blocks_peak <= 6 + clones * (1 + 12 // BLOCK)
    gc.collect()
    assert kv.summary().blocks_used == 0
