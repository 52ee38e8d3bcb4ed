"""The prefix cache under mlx-lm: a hit changes nothing but the work, and what is stored is stored once."""

import mlx.core as mx
import pytest
from mlx_lm.generate import speculative_generate_step
from mlx_lm.models.cache import KVCache, make_prompt_cache
from mlx_models import (
    assert_all_free,
    random_prompts,
    solo_tokens,
    tiny_llama,
)

import kvpool
from kvpool.adapters.mlx_lm import PagedPromptCache, install

BLOCK = 4
ANSWER = 12


@pytest.fixture
def kv(model):
    with install(model, 200, block_size=BLOCK, prefix_cache=True) as kv:
        yield kv
    assert_all_free(kv)


def cold(model, prompt, max_tokens=ANSWER):
    """What mlx-lm generates on its own caches, whatever hook the model has."""
    return solo_tokens(model, prompt, max_tokens, prompt_cache=[KVCache() for _ in model.layers])


def cached(kv, tokens, namespace=b""):
    """How many of the tokens a request that begins with them would find; holds nothing afterwards."""
    return kv.fetch([*tokens, 0], namespace)[1]


# ------------------------------------------------------------------------------------------ hits equal cold


def test_speculative_decoding_finds_prefixes_in_both_pools(model):
    draft = tiny_llama(num_hidden_layers=1)
    prompt, question = random_prompts([26, 7])
    with (
        install(model, 60, block_size=BLOCK, prefix_cache=True) as kv,
        install(draft, 60, block_size=3, prefix_cache=True) as draft_kv,
    ):
        prompts = PagedPromptCache(kv, draft_kv)
        for least in (0, 24):
            cache, rest = prompts.fetch_nearest_cache("model", prompt)
            assert [layer.offset for layer in cache] == [len(prompt) - len(rest)] * 4
            assert len(prompt) - len(rest) >= least
            steps = speculative_generate_step(mx.array(rest), model, draft, max_tokens=ANSWER, prompt_cache=cache)
            answer = [int(token) for token, *_ in steps]
            assert answer == cold(model, prompt)
            prompts.insert_cache("model", prompt + answer, cache)
            prompt = prompt + answer + question
        with pytest.raises(ValueError, match=r"\[insert_cache\] 4 caches, 3 layers in 1 models"):
            PagedPromptCache(kv).insert_cache("model", prompt, cache)
        del cache, steps
    assert_all_free(kv)
    assert_all_free(draft_kv)


# --------------------------------------------------------------------------------------------- who shares


def test_keys_of_a_prompt_cache_are_distinguished_as_a_dict_does(model, kv):
    (prompt,) = random_prompts([17])
    prompts = PagedPromptCache(kv)
    key = ("path", None, None)
    cache, _ = prompts.fetch_nearest_cache(key, prompt)
    model(mx.array([prompt]), cache=cache)
    prompts.insert_cache(key, prompt, cache)
    rest = {
        name: len(prompts.fetch_nearest_cache(name, prompt)[1])
        for name in (("path", None, None), ("path", None), "path", str(key), 1, "1", b"")
    }
    assert rest.pop(key) == 1
    assert set(rest.values()) == {17}


def test_two_models_on_one_pool_do_not_share(model):
    """A block's id says where its KV is in either storage; the tokens are the same, the KV is not."""
    pool = kvpool.Pool(100, BLOCK, prefix_cache=True)
    other = tiny_llama(num_hidden_layers=2)
    (prompt,) = random_prompts([17])
    kvs = [install(m, pool=pool, prefix_cache=True) for m in (model, other, model)]
    caches, _ = kvs[0].fetch(prompt)
    model(mx.array([prompt]), cache=caches)
    kvs[0].commit(caches, prompt)
    assert [cached(kv, prompt) for kv in kvs] == [16, 0, 0]
    caches, num_cached = kvs[1].fetch(prompt)
    assert solo_tokens(other, prompt[num_cached:], ANSWER, prompt_cache=caches) == cold(other, prompt)
    del caches
    for kv in kvs:
        assert_all_free(kv)


# ------------------------------------------------------------------------------------------------- refusals


def test_commits_that_cannot_be_right_are_refused_and_change_nothing(model, kv):
    (prompt,) = random_prompts([10])
    caches, _ = kv.fetch(prompt)
    model(mx.array([prompt]), cache=caches)
    merged = [type(layer).merge([layer, layer]) for layer in caches]
    foreign = install(model, 20, block_size=BLOCK, prefix_cache=True).make_cache()
    for layer in foreign:
        layer.update_and_fetch(*[mx.zeros((1, 2, 10, 8))] * 2)
    before = kv.pool.fingerprint()
    for given, tokens, namespace, message in (
        (caches, prompt[4:], b"", r"6 tokens, the cache holds 10"),
        (caches[:2], prompt, b"", r"all 3 layers"),
        ([caches[0], *merged[1:]], prompt, b"", r"all 3 layers"),
        ([], prompt, b"", r"all 3 layers"),
        (foreign, prompt, b"", r"the caches of all 3 layers"),
        (merged, prompt, b"", r"holds 2 sequences"),
        (caches, prompt, kvpool.namespace(salt="x"), r"another namespace"),
        (caches, [*prompt[:9], -1], b"", r"-1"),
    ):
        with pytest.raises(ValueError, match=r"\[commit\].*" + message):
            kv.commit(given, tokens, namespace)
    assert kv.pool.fingerprint() == before
    assert kv.commit(caches, prompt) == 10


def test_row_of_a_fetched_cache_keeps_its_namespace_when_others_come(model, kv):
    (prompt,) = random_prompts([10])
    caches, _ = kv.fetch(prompt, b"tenant")
    model(mx.array([prompt, prompt]), cache=caches)
    first = [layer.extract(0) for layer in caches]
    with pytest.raises(ValueError, match="another namespace"):
        kv.commit(first, prompt)
    assert kv.commit(first, prompt, b"tenant") == 10


def test_a_pass_that_was_interrupted_is_not_committed(model, kv):
    (prompt,) = random_prompts([10])
    caches, _ = kv.fetch(prompt)
    x = mx.zeros((1, 2, 10, 8))
    caches[0].update_and_fetch(x, x)
    with pytest.raises(RuntimeError, match=r"\[commit\] 2 of 3 layers"):
        kv.commit(caches, prompt)
    assert cached(kv, prompt) == 0
    kv.recover()
    assert kv.commit(caches, prompt) == 0


def test_without_a_prefix_cache_its_calls_say_so(model):
    kv = install(model, 20, block_size=BLOCK)
    for call in (lambda: kv.fetch([1, 2]), lambda: kv.commit(kv.make_cache(), [])):
        with pytest.raises(RuntimeError, match=r"no prefix cache: install\(\.\.\., prefix_cache=True\)"):
            call()


def test_a_cache_that_was_not_fetched_belongs_to_no_key(model, kv):
    (prompt,) = random_prompts([10])
    cache = make_prompt_cache(model)
    model(mx.array([prompt]), cache=cache)
    with pytest.raises(ValueError, match="begin with fetch"):
        PagedPromptCache(kv).insert_cache("model", prompt, cache)
    assert kv.commit(cache, prompt) == 10
    assert cached(kv, prompt) == 8


# ------------------------------------------------------------------------------- mlx-lm's server, and its sizes


def test_sizes_are_those_of_the_blocks_that_no_request_uses(model, kv):
    prompts, block = PagedPromptCache(kv), kv.backend.spec.block_nbytes
    assert (len(prompts), prompts.nbytes, bool(prompts)) == (0, 0, True)
    a, b = random_prompts([17, 9])
    for prompt in (a, b):
        cache, _ = prompts.fetch_nearest_cache("model", prompt)
        model(mx.array([prompt]), cache=cache)
        prompts.insert_cache("model", prompt, cache)
        assert len(prompts) == (0 if prompt is a else 4)  # the cache still holds its own
        del cache
    assert (len(prompts), prompts.nbytes) == (6, 6 * block)
    held, _ = prompts.fetch_nearest_cache("model", b)
    assert prompts.stats_by_type() == {
        "kept": {"n_sequences": 4, "n_bytes": 4 * block},
        "running": {"n_sequences": 2, "n_bytes": 2 * block},
    }
    prompts.trim_to(n_bytes=3 * block)
    assert len(prompts) == 3
    prompts.trim_to(n_bytes=2 * block - 1)
    assert len(prompts) == 1
    prompts.trim_to(n_sequences=0)
    assert prompts.nbytes == 0
    del held
    assert len(prompts) == 2
    assert len(prompts.fetch_nearest_cache("model", a)[1]) == 17
    assert len(prompts.fetch_nearest_cache("model", b)[1]) == 1


def test_image_ids_are_exact_and_a_hit_never_ends_inside_an_image(kv):
    """mlx-lm's server puts a negative id per image in place of its tokens, and feeds whole images only."""
    prompts = PagedPromptCache(kv)
    one, two = -(2**59) - 5, -(2**59) - 6
    prompt = [1, 2, 3, one, one, one, one, one, one, 4, two, two, two, 5]

    def insert(tokens):
        cache, rest = prompts.fetch_nearest_cache("model", tokens)
        for layer in cache:
            x = mx.zeros((1, 2, len(rest), 8))
            layer.update_and_fetch(x, x)
        prompts.insert_cache("model", tokens, cache)

    def hit(tokens):
        return len(tokens) - len(prompts.fetch_nearest_cache("model", tokens)[1])

    insert(prompt)
    assert hit(prompt) == 10  # 12 is inside the second image, which begins at 10
    assert hit([*prompt[:3], *[two] * 6, 4]) == 3 // BLOCK
    assert hit([*prompt[:9], 7]) == 3  # 8 is inside the first one
    assert hit([*prompt[:9], *[7] * 3]) == 3
    insert([*prompt, 8, 9, 10])
    assert hit([*prompt, 8, 9, 10, 11]) == 16
