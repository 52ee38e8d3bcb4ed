"""Requests wait until the pool can take them: mlx-lm's engine on a pool that cannot hold them all at once."""

import gc
from types import SimpleNamespace

import mlx.core as mx
import pytest
from mlx_models import SMALL_STEPS, batch_tokens, on_cpu, random_prompts, solo_tokens, tiny_llama

from kvpool.adapters.mlx_lm import PagedPromptCache, install
from kvpool.adapters.mlx_lm.serving import AdmittingGenerator, PromptCache
from kvpool.errors import OutOfBlocks

BLOCK = 4
TOKENS = 12
PROMPTS = (17, 30, 9, 25, 1, 30, 22, 14)


def insert_plain(generator, prompt, limit):
    return generator.insert([prompt], [limit])


def run(model, prompts, limits, insert=insert_plain, on_step=lambda generator: None):
    """Tokens per prompt; everything is inserted at once."""
    generator = AdmittingGenerator(model, **SMALL_STEPS)
    uids = [insert(generator, prompt, limit)[0] for prompt, limit in zip(prompts, limits, strict=True)]
    tokens = {uid: [] for uid in uids}
    for _ in range(1000):
        prompt_responses, responses = generator.next()
        for one in responses:
            tokens[one.uid].append(one.token)
        on_step(generator)
        if not prompt_responses and not responses:
            break
    generator.close()
    return [tokens[uid] for uid in uids]


@pytest.fixture
def model():
    with on_cpu():
        yield tiny_llama()


def test_requests_that_do_not_fit_together_wait_for_each_other(model):
    prompts = random_prompts(PROMPTS)
    limits = [TOKENS + i for i in range(len(prompts))]
    expected = [solo_tokens(model, prompt, limit) for prompt, limit in zip(prompts, limits, strict=True)]
    waiting, used = [], []
    with install(model, 1 + 16, block_size=BLOCK) as kv:
        largest = max(kv.blocks_for(len(p) + n) for p, n in zip(prompts, limits, strict=True)) + 2
        assert largest <= 16 < sum(kv.blocks_for(len(p) + n) for p, n in zip(prompts, limits, strict=True))

        def on_step(generator):
            waiting.append(generator.num_requests["waiting"])
            used.append(kv.summary().blocks_used)

        assert run(model, prompts, limits, on_step=on_step) == expected
        gc.collect()
        assert kv.summary().blocks_used == 0
    assert max(waiting) > 0 and max(used) > 8


def test_without_admission_the_same_requests_break_the_engine(model):
    prompts = random_prompts(PROMPTS)
    with install(model, 1 + 16, block_size=BLOCK), pytest.raises(OutOfBlocks):
        batch_tokens(model, prompts, TOKENS)


def test_beginnings_that_waiting_requests_hold_are_given_back_when_they_are_in_the_way(model):
    """Each of them has found half of the pool: together they hold more than the first of them can spare."""
    prompts = random_prompts((24, 24, 24))
    expected = [solo_tokens(model, prompt, 9) for prompt in prompts]
    with install(model, 1 + 18, block_size=BLOCK, prefix_cache=True) as kv:
        stored = PagedPromptCache(kv)
        for prompt in prompts:
            caches, rest = stored.fetch_nearest_cache("m", prompt[:-1])
            model(mx.array([rest]), cache=caches)
            stored.insert_cache("m", prompt[:-1], caches)
            del caches
        gc.collect()
        assert kv.summary().blocks_cached == 15

        def insert(generator, prompt, limit):
            caches, rest = stored.fetch_nearest_cache("m", prompt)
            return generator.insert([rest], [limit], [caches], [prompt[: len(prompt) - len(rest)]])

        assert run(model, prompts, [9] * 3, insert) == expected
        assert kv.hit_tokens >= 60
        gc.collect()
        assert kv.summary().blocks_used == 0
        kv.pool.check()


def test_what_was_handed_out_is_empty_after_the_next_step(model):
    (prompt,) = random_prompts((9,))
    with install(model, 40, block_size=BLOCK, prefix_cache=True) as kv:
        generator = AdmittingGenerator(model, **SMALL_STEPS)
        (uid,) = generator.insert([prompt], [3])
        generator.next()
        caches = generator.extract_cache([uid])[uid][0]
        held = caches[0].size()
        assert 0 < held <= len(prompt) and caches[0].size() == held
        last = None
        while last is None:
            _, responses = generator.next()
            assert caches[0].size() == 0
            last = next((one.prompt_cache for one in responses if one.finish_reason), None)
        assert last[0].size() > len(prompt)
        generator.next()
        assert last[0].size() == 0
        gc.collect()
        assert kv.summary().blocks_used == 0
        generator.close()


def test_what_running_requests_store_never_takes_blocks_that_others_were_promised(model):
    """The first one ends and leaves its prompt; the others, who have computed it too, store it while they run."""
    beginning = random_prompts((16,), seed=3)[0]
    prompts = [beginning + one for one in random_prompts((5, 40, 40))]
    limits = [1, 9, 9]
    expected = [solo_tokens(model, prompt, limit) for prompt, limit in zip(prompts, limits, strict=True)]
    needed = sum(-(-(len(p) + n) // BLOCK) + 1 for p, n in zip(prompts, limits, strict=True))
    with install(model, 1 + needed + 1, block_size=BLOCK, prefix_cache=True) as kv:
        generator = AdmittingGenerator(model, **(SMALL_STEPS | {"prefill_step_size": 4}))
        prompt_cache = PromptCache(SimpleNamespace(kv=kv, engine=generator, prompts=PagedPromptCache(kv)))
        uids, tokens = [], {}
        for prompt, limit in zip(prompts, limits, strict=True):
            caches, _ = prompt_cache.fetch_nearest_cache("m", prompt)
            uids += generator.insert_segments([[prompt[:40], prompt[40:]]], [limit], [caches])
            tokens[uids[-1]] = []
        del caches
        promised = []
        while True:
            prompt_responses, responses = generator.next()
            if not prompt_responses and not responses:
                break
            ends = [one.uid for one in prompt_responses if one.end_of_segment and not one.end_of_prompt]
            for caches, key in generator.extract_cache(ends).values():
                prompt_cache.insert_cache("m", key[:], caches, cache_type="user")
            for one in responses:
                tokens[one.uid].append(one.token)
                if one.finish_reason:
                    prompt_cache.insert_cache("m", one.all_tokens[:], one.prompt_cache)
            stats = kv.pool.stats()
            growth = sum(kv.blocks_for(limit) - kv.blocks_for(now) for now, limit in generator._running())
            promised.append((growth, stats.free + stats.evictable))
        assert [tokens[uid] for uid in uids] == expected
        assert all(growth <= available for growth, available in promised), promised


def test_models_without_a_pool_are_served_as_ever(model):
    prompts = random_prompts((9, 5))
    assert run(model, prompts, [6, 6]) == [solo_tokens(model, prompt, 6) for prompt in prompts]
