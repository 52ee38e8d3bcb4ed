"""Requests wait until the pool can take them: mlx-lm's engine on a pool that cannot hold them all at once."""

import copy
import gc
import random
from types import SimpleNamespace

import mlx.core as mx
import numpy as np
import pytest
from mlx_models import SMALL_STEPS, batch_tokens, on_cpu, random_prompts, solo_tokens, tiny_llama

from kvpool.adapters.mlx_lm import PagedPromptCache, install, server
from kvpool.adapters.mlx_lm.server import AdmittingGenerator, PromptCache
from kvpool.errors import OutOfBlocks
from kvpool.eviction import H2O, BlockEviction, SlidingWindow

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


def test_handed_out_caches_are_empty_after_the_next_step(model):
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


class Watched(AdmittingGenerator):
    """Looks at the begin of each step whether what running requests were promised is there."""

    def _hold_back(self, kv):
        growth = sum(kv.blocks_for(limit) - kv.blocks_for(now) for now, limit in self._running())
        assert growth <= kv.summary().blocks_free
        return super()._hold_back(kv)


def store_while_a_promise_counts_on_what_is_stored(model):
    """The first request leaves its prompt; a third one is promised these blocks; then the second one, which has
    computed that prompt too, stores it while it runs."""
    beginning = random_prompts((32,), seed=3)[0]
    ends, goes_on, waits = random_prompts((5, 40, 20), seed=4)
    prompts, limits, cuts = [beginning + ends, beginning + goes_on, waits], [1, 9, 20], [36, 64, 19]
    expected = [solo_tokens(model, prompt, limit) for prompt, limit in zip(prompts, limits, strict=True)]
    needed = [-(-(len(p) + n) // BLOCK) + 1 for p, n in zip(prompts, limits, strict=True)]
    assert needed[2] == needed[0], "the third one takes the place of the first one exactly"
    with install(model, 1 + needed[0] + needed[1] + 1, block_size=BLOCK, prefix_cache=True) as kv:
        generator = Watched(model, **(SMALL_STEPS | {"prefill_step_size": 4}))
        prompt_cache = PromptCache(SimpleNamespace(kv=kv, engine=generator, prompts=PagedPromptCache(kv)))
        tokens = {}
        for prompt, limit, cut in zip(prompts, limits, cuts, strict=True):
            caches, _ = prompt_cache.fetch_nearest_cache("m", prompt)
            tokens[generator.insert_segments([[prompt[:cut], prompt[cut:]]], [limit], [caches])[0]] = []
        del caches
        while True:
            prompt_responses, responses = generator.next()
            if not prompt_responses and not responses:
                break
            done = [one.uid for one in prompt_responses if one.end_of_segment and not one.end_of_prompt]
            for caches, key in generator.extract_cache(done).values():
                prompt_cache.insert_cache("m", key[:], caches, cache_type="user")
            for one in responses:
                tokens[one.uid].append(one.token)
                if one.finish_reason:
                    prompt_cache.insert_cache("m", one.all_tokens[:], one.prompt_cache)
        assert list(tokens.values()) == expected
        assert generator.num_waited == 1


def test_stored_prompts_take_no_blocks_promised_to_others(model):
    store_while_a_promise_counts_on_what_is_stored(model)


def test_stored_prompts_without_the_account_would_take_promised_blocks(model, monkeypatch):
    monkeypatch.setattr(AdmittingGenerator, "is_running", lambda self, caches: False)
    with pytest.raises((AssertionError, OutOfBlocks)):
        store_while_a_promise_counts_on_what_is_stored(model)


def a_running_request_and_one_that_comes_for_its_blocks(model, kv):
    """One request runs and was promised all blocks but two; another one finds its beginning in half of them."""
    stored = PagedPromptCache(kv)
    long, beginning = random_prompts((9, 29), seed=5)
    caches, rest = stored.fetch_nearest_cache("m", beginning[:-1])
    model(mx.array([rest]), cache=caches)
    stored.insert_cache("m", beginning[:-1], caches)
    del caches
    gc.collect()
    limit = (kv.summary().blocks_free - 2) * BLOCK - len(long)
    generator = Watched(model, **SMALL_STEPS)
    tokens = {generator.insert([long], [limit])[0]: []}
    generator.next()
    generator.next()
    caches, rest = stored.fetch_nearest_cache("m", beginning)
    assert len(rest) == 1
    (uid,) = generator.insert([rest], [5], [caches], [beginning[:-1]])
    del caches
    tokens[uid] = []
    while True:
        prompt_responses, responses = generator.next()
        if not prompt_responses and not responses:
            break
        for one in responses:
            tokens[one.uid].append(one.token)
    assert list(tokens.values()) == [solo_tokens(model, long, limit), solo_tokens(model, beginning, 5)]
    generator.close()


def test_waiting_request_takes_no_blocks_of_running_requests(model):
    with install(model, 1 + 14, block_size=BLOCK, prefix_cache=True) as kv:
        a_running_request_and_one_that_comes_for_its_blocks(model, kv)
        gc.collect()
        assert kv.summary().blocks_used == 0
        kv.pool.check()


def test_waiting_request_that_holds_its_hits_would_take_blocks_of_running_requests(model, monkeypatch):
    monkeypatch.setattr(server, "_without_prefix", lambda sequence: sequence)
    broken = pytest.raises((AssertionError, OutOfBlocks))
    with install(model, 1 + 14, block_size=BLOCK, prefix_cache=True) as kv, broken:
        a_running_request_and_one_that_comes_for_its_blocks(model, kv)


def test_a_request_that_waited_finds_what_was_stored_meanwhile(model):
    (prompt,) = random_prompts((30,), seed=6)
    with install(model, 1 + 14, block_size=BLOCK, prefix_cache=True) as kv:
        stored = PagedPromptCache(kv)
        generator = Watched(model, **SMALL_STEPS)
        uids = [generator.insert([prompt], [9], [stored.fetch_nearest_cache("m", prompt)[0]])[0] for _ in range(3)]
        tokens, computed = {uid: [] for uid in uids}, {}
        for _ in range(200):
            prompt_responses, responses = generator.next()
            for one in prompt_responses:
                computed[one.uid] = one.progress[1]
            for one in responses:
                tokens[one.uid].append(one.token)
                if one.finish_reason:
                    stored.insert_cache("m", one.all_tokens[:], one.prompt_cache)
        assert tokens == dict.fromkeys(uids, solo_tokens(model, prompt, 9))
        assert list(computed.values()) == [30, 2, 2], "all but the last block is there"
        generator.close()


def a_random_hour(model, kv, seed, engine=Watched):
    """Requests with common beginnings come, are cancelled and end, in any order; each step finds what was promised."""
    rng = random.Random(seed)
    generator = engine(model, **(SMALL_STEPS | {"prefill_step_size": rng.choice((4, 8, 16))}))
    prompt_cache = PromptCache(SimpleNamespace(kv=kv, engine=generator, prompts=PagedPromptCache(kv)))
    beginnings = random_prompts((24, 24, 12), seed=seed)
    asked, tokens, whole = {}, {}, []
    for step in range(400):
        if step < 60 and rng.random() < 0.4:
            prompt = rng.choice(beginnings) + [rng.randrange(50) for _ in range(rng.randrange(1, 20))]
            caches, rest = prompt_cache.fetch_nearest_cache("m", prompt)
            cut = rng.randrange(len(rest))
            limit, found = rng.randrange(1, 14), prompt[: len(prompt) - len(rest)]
            (uid,) = generator.insert_segments([[rest[:cut], rest[cut:]]], [limit], [caches], [found])
            asked[uid], tokens[uid] = (prompt, limit), []
            del caches
        prompt_responses, responses = generator.next()
        done = [one.uid for one in prompt_responses if one.end_of_segment and not one.end_of_prompt]
        for caches, key in generator.extract_cache(done).values():
            prompt_cache.insert_cache("m", key[:], caches, cache_type="user")
        for one in responses:
            tokens[one.uid].append(one.token)
            if one.finish_reason:
                prompt_cache.insert_cache("m", one.all_tokens[:], one.prompt_cache)
                whole.append(one.uid)
        going = sorted(asked.keys() - set(whole))
        if going and rng.random() < 0.08:
            uid = rng.choice(going)
            generator.remove([uid])
            del asked[uid]
        if step >= 60 and not going:
            break
    assert sorted(asked) == sorted(whole), "all that were not cancelled have ended"
    if kv.eviction is None:  # else what a request says depends on what it found, and on where its chunks end
        assert [tokens[uid] for uid in asked] == [solo_tokens(model, *one) for one in asked.values()]
    assert [len(tokens[uid]) for uid in asked] == [limit for _, limit in asked.values()]
    generator.close()
    return generator.num_waited


def test_random_requests_find_their_reserved_blocks(model):
    waited = hits = 0
    for seed in range(6):
        with install(model, 1 + 24, block_size=BLOCK, prefix_cache=True) as kv:
            waited += a_random_hour(model, kv, seed)
            hits += kv.hit_tokens
            gc.collect()
            assert kv.summary().blocks_used == 0
            kv.pool.check()
    assert waited > 20 and hits > 400, (waited, hits)


BUDGETS = (H2O(max_kv=16, slack=3), SlidingWindow(max_kv=16), BlockEviction(max_kv=16))


def hours_with_budgets(model):
    """Nobody runs out of blocks; returns (requests that waited, tokens that were found, that left)."""
    counts = np.zeros(3, int)
    for seed, policy in enumerate(BUDGETS * 3):
        with install(model, 1 + 18, block_size=BLOCK, prefix_cache=True, eviction=policy) as kv:
            waited = a_random_hour(model, kv, seed, AdmittingGenerator)
            gc.collect()
            assert kv.summary().blocks_used == 0
            kv.pool.check()
            counts += waited, kv.hit_tokens, kv.pool.stats().evicted_tokens
    return counts


def test_random_requests_within_budgets_never_run_out_of_blocks(model):
    assert (hours_with_budgets(model) > [20, 300, 1000]).all()


def test_random_requests_within_budgets_would_run_out_if_their_copies_were_not_counted(model, monkeypatch):
    monkeypatch.setattr(server, "blocks_at_most", lambda policy, tokens, chunk, size: -(-policy.max_kv // size))
    with pytest.raises(OutOfBlocks):
        hours_with_budgets(model)


def test_generator_of_a_model_without_the_hook_is_refused(model):
    """Stock caches would serve just as well, outside the pool, and nobody would know."""
    with pytest.raises(RuntimeError, match=r"\[serve\] model\.make_cache is not there, not kvpool's"):
        AdmittingGenerator(model, **SMALL_STEPS)
    model.make_cache = list
    with pytest.raises(RuntimeError, match=r"\[serve\] model\.make_cache is <class 'list'>, not kvpool's"):
        AdmittingGenerator(model, **SMALL_STEPS)


def test_request_after_the_hook_was_lost_is_refused_and_names_it(model):
    """Those that came before have their caches, and end as if nothing had been."""
    before, after = random_prompts((9, 9))
    with install(model, 40, block_size=BLOCK, prefix_cache=True) as kv:
        generator = AdmittingGenerator(model, **SMALL_STEPS)
        insert_plain(generator, before, 5)
        hook = model.make_cache
        for lose in (lambda: delattr(model, "make_cache"), lambda: setattr(model, "make_cache", list)):
            lose()
            with pytest.raises(RuntimeError, match=r"\[serve\] somebody has (deleted|set) model\.make_cache.*outside"):
                insert_plain(generator, after, 5)
            model.make_cache = hook
        tokens = []
        while sum(generator.num_requests.values()):
            tokens += [one.token for one in generator.next()[1]]
        assert tokens == solo_tokens(model, before, 5)
        generator.close()
        kv.pool.check()


@pytest.mark.parametrize("policy", BUDGETS, ids=lambda policy: type(policy).__name__)
def test_handed_out_caches_with_a_budget_are_empty_after_the_next_step(model, policy):
    (prompt,) = random_prompts((30,))
    with install(model, 40, block_size=BLOCK, prefix_cache=True, eviction=policy) as kv:
        generator = AdmittingGenerator(model, **SMALL_STEPS)
        generator.insert([prompt], [9])
        last = None
        while last is None:
            last = next((one.prompt_cache for one in generator.next()[1] if one.finish_reason), None)
        assert last[0].size() <= 16 and not last[0].is_trimmable()
        with pytest.raises(ValueError, match=r"\[truncate\]"):
            copy.deepcopy(last)[0].trim(last[0].size())
        generator.next()
        assert [cache.size() for cache in last] == [cache.offset for cache in last] == [0] * len(last)
        gc.collect()
        assert kv.summary().blocks_used == 0
        generator.close()
