"""Eviction in models with windows and states: tokens leave the full layers, the others let go by themselves."""

import mlx.core as mx
import pytest
from mlx_lm.models.cache import KVCache, RotatingKVCache
from mlx_models import (
    VOCAB,
    assert_all_free,
    batch_tokens,
    on_cpu,
    random_prompts,
    solo_tokens,
    tiny_gemma3,
    tiny_gpt_oss,
    tiny_sliding_llama,
)
from sliding_cache import SlidingCache

from kvpool.adapters.mlx_lm import EngineStopped, install, tiny_families
from kvpool.eviction import H2O, BlockEviction, SlidingWindow

LONG = pytest.mark.long
MAKERS = {"gemma3": tiny_gemma3, "gpt_oss": tiny_gpt_oss, "sliding llama": tiny_sliding_llama}
POLICIES = {
    "window": SlidingWindow(max_kv=24, sink=3),
    "h2o": H2O(max_kv=24, kind="raw"),
    "h2o mass": H2O(max_kv=24, kind="mass", slack=5),
    "blocks": BlockEviction(max_kv=24, recent_tokens=6),
}
PROMPT = random_prompts([37])[0]
TOKENS = 50


@pytest.fixture(autouse=True)
def cpu():
    with on_cpu():
        yield


@pytest.fixture(scope="module", params=["gemma3", *(pytest.param(name, marks=LONG) for name in list(MAKERS)[1:])])
def model(request):
    return MAKERS[request.param]()


@pytest.fixture(params=["window", "h2o", *(pytest.param(name, marks=LONG) for name in list(POLICIES)[2:])])
def policy(request):
    return POLICIES[request.param]


def tiny(name):
    model = tiny_families.build(name, tiny_families.config_of(name, VOCAB))
    tiny_families.randomize(model)
    model.eval()
    mx.eval(model.parameters())
    return model


def group_of(kv):
    """The number of the full group."""
    return [group.kind for group in kv.layout.groups].index("full")


@pytest.mark.long
@pytest.mark.parametrize("fused", [True, False])
def test_window_model_says_what_stock_says_whose_full_layers_slide(model, fused):
    stock = [SlidingCache(POLICIES["window"]) if type(cache) is KVCache else cache for cache in model.make_cache()]
    assert {type(cache) for cache in stock} == {SlidingCache, RotatingKVCache}
    due = solo_tokens(model, PROMPT, TOKENS, prompt_cache=stock)
    whole = solo_tokens(model, PROMPT, TOKENS)
    with install(model, 200, block_size=4, fused=fused, eviction=POLICIES["window"]) as kv:
        caches = kv.make_cache()
        assert solo_tokens(model, PROMPT, TOKENS, prompt_cache=caches) == due != whole
        assert solo_tokens(model, PROMPT, TOKENS, prompt_cache=kv.make_cache(SlidingWindow(max_kv=999))) == whole
        del caches
        assert_all_free(kv)


def test_budget_holds_in_the_full_layers_alone(model, policy):
    with install(model, 40, block_size=4, eviction=policy) as kv:
        full, caches = group_of(kv), kv.make_cache()
        solo_tokens(model, PROMPT, 160, prompt_cache=caches)  # more than the pool has room for
        (handle,) = caches[0].batch.handles
        assert caches[0].offset == kv.pool.num_tokens(handle) == len(PROMPT) + 160 > 40 * 4
        assert kv.pool.kv_len(handle, full) <= policy.max_kv
        for g, group in enumerate(kv.layout.groups):
            held = (kv.pool.table(handle, g) > 0).all(axis=1).sum()
            assert held <= -(-(policy.max_kv if g == full else group.size + kv.pool.options.lookahead) // 4) + 2
            assert g == full or kv.pool.kv_len(handle, g) == caches[0].offset
        assert not caches[0].is_trimmable()
        with pytest.raises(ValueError, match=r"\[truncate\]"):
            caches[0].trim(30)


def test_rows_of_a_batch_say_what_each_says_alone(model, policy):
    prompts = random_prompts((33, 5, 21), seed=3)
    limits = [20, 40, 8]
    with install(model, 400, block_size=4, eviction=policy) as kv:
        alone = [batch_tokens(model, [prompt], n)[0] for prompt, n in zip(prompts, limits, strict=True)]
        assert batch_tokens(model, prompts, limits, prefill_batch_size=1) == alone
        kv.eviction = None
        assert batch_tokens(model, prompts, limits) != alone
        assert_all_free(kv)


def test_eviction_that_fails_half_way_stops_the_cache(model, monkeypatch):
    with install(model, 400, block_size=4, eviction=POLICIES["window"]) as kv:
        caches = kv.make_cache()
        solo_tokens(model, PROMPT, 1, prompt_cache=caches)
        backend = kv.backends[kv.layout.groups[group_of(kv)].arena]

        def broken(*args):
            raise RuntimeError("broken")

        with monkeypatch.context() as patched:
            patched.setattr(backend, "compact", broken)
            with pytest.raises(RuntimeError, match="broken"):
                model(mx.array([[1]]), cache=caches)
        with pytest.raises(EngineStopped, match="an eviction failed"):
            model(mx.array([[1]]), cache=caches)


@pytest.mark.parametrize("name", ["qwen3_5", pytest.param("llama4", marks=LONG)])
def test_models_with_states_and_chunks_evict_without_scores(name):
    model = tiny(name)
    prompts = random_prompts((37, 9), seed=6)
    policy = POLICIES["window"]
    with install(model, 400, block_size=4, eviction=policy) as kv:
        alone = [batch_tokens(model, [prompt], 40)[0] for prompt in prompts]
        assert batch_tokens(model, prompts, 40, prefill_batch_size=1) == alone
        kv.eviction = None
        assert batch_tokens(model, prompts, 40) != alone
        assert_all_free(kv)
    with pytest.raises(ValueError, match="needs scores of all rows in one pass"):
        install(model, 400, block_size=4, eviction=POLICIES["h2o"])


@pytest.mark.parametrize("name", ["gemma3_text", "qwen3_5", pytest.param("llama4", marks=LONG)])
def test_prefix_above_the_budget_is_found_and_then_slides(name):
    policy, prompt = POLICIES["window"], [token % VOCAB for token in random_prompts([61], seed=4)[0]]
    model = tiny(name)
    stock = [SlidingCache(policy) if type(cache) is KVCache else cache for cache in model.make_cache()]
    with install(model, 400, block_size=4, prefix_cache=True, eviction=policy) as kv:
        kv.eviction = None  # the first sequence keeps all
        caches, _ = kv.fetch(prompt)
        solo_tokens(model, prompt, 1, prompt_cache=caches)
        kv.eviction = policy
        caches, found = kv.fetch(prompt)
        assert policy.max_kv < found < len(prompt)
        model(mx.array([prompt[:found]]), cache=stock)
        due = solo_tokens(model, prompt[found:], TOKENS, prompt_cache=stock)
        assert solo_tokens(model, prompt[found:], TOKENS, prompt_cache=caches) == due
        (handle,) = caches[0].batch.handles
        assert kv.pool.kv_len(handle, group_of(kv)) <= policy.max_kv < kv.pool.num_tokens(handle)
        assert kv.commit(caches, [*prompt, *due]) == 0  # a sequence that lost tokens is indexed no more
        assert kv.fetch(prompt)[1] == found  # what others have committed stays
        kv.pool.check()


@pytest.mark.parametrize(("name", "words"), [("mamba2", "no layer that keeps every token"), ("openelm", "2 shapes")])
def test_models_without_one_full_group_are_refused(name, words):
    with pytest.raises(ValueError, match=words):
        install(tiny(name), 40, block_size=4, eviction=POLICIES["window"])
