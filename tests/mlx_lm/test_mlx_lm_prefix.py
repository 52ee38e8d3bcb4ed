"""The prefix cache under mlx-lm: a hit changes nothing but the work, and what is stored is stored once."""

import copy

import mlx.core as mx
import pytest
from mlx_lm.generate import BatchGenerator, speculative_generate_step
from mlx_lm.models.cache import KVCache, make_prompt_cache, trim_prompt_cache
from mlx_models import (
    SMALL_STEPS,
    assert_all_free,
    batch_tokens,
    random_prompts,
    solo_tokens,
    tiny_gpt_oss,
    tiny_llama,
    tiny_sliding_llama,
)

import kvpool
from kvpool.adapters.mlx_lm import PagedPromptCache, install

BLOCK = 4
ANSWER = 12


@pytest.fixture(scope="module")
def model():
    return tiny_llama()


@pytest.fixture
def kv(model):
    with install(model, 200, block_size=BLOCK, prefix_cache=True) as kv:
        yield kv
    assert_all_free(kv)


def whole_blocks(num_tokens):
    """Tokens in the whole blocks of so many."""
    return num_tokens // BLOCK * BLOCK


def cold(model, prompt, max_tokens=ANSWER):
    """What mlx-lm generates on its own caches, whatever hook the model has."""
    return solo_tokens(model, prompt, max_tokens, prompt_cache=[KVCache() for _ in model.layers])


def store(model, kv, tokens, namespace=b"", cut=None):
    """Compute tokens and commit them."""
    caches, num_cached = kv.fetch(tokens, namespace, cut)
    model(mx.array([tokens[num_cached:]]), cache=caches)
    return kv.commit(caches, tokens, namespace)


def cached(kv, tokens, namespace=b""):
    """How many of the tokens a request that begins with them would find; holds nothing afterwards."""
    return kv.fetch([*tokens, 0], namespace)[1]


# ------------------------------------------------------------------------------------------ hits equal cold


@pytest.mark.parametrize("prompt_len", [1, 3, 4, 5, 8, 9, 30])
def test_generate_step_after_a_hit_equals_a_cold_start(model, kv, prompt_len):
    (prompt,) = random_prompts([prompt_len])
    expected = cold(model, prompt)
    for asked in (0, whole_blocks(prompt_len - 1)):
        caches, num_cached = kv.fetch(prompt)
        assert num_cached == asked == caches[0].offset
        assert solo_tokens(model, prompt[num_cached:], ANSWER, prompt_cache=caches) == expected
        kv.commit(caches, prompt + expected)


@pytest.mark.parametrize("make", [tiny_sliding_llama, tiny_gpt_oss])
def test_a_hit_equals_a_cold_start_with_sliding_windows(make):
    model = make()
    prompts = random_prompts([30, 22])
    prompts[1][:20] = prompts[0][:20]
    expected = [solo_tokens(model, prompt, ANSWER) for prompt in prompts]
    with install(model, 64, block_size=BLOCK, prefix_cache=True) as kv:
        store(model, kv, prompts[0], cut=21)
        for prompt, tokens in zip(prompts, expected, strict=True):
            caches, num_cached = kv.fetch(prompt)
            assert num_cached == 20
            assert solo_tokens(model, prompt[num_cached:], ANSWER, prompt_cache=caches) == tokens
        del caches
    assert_all_free(kv)


def test_requests_with_one_system_prompt_share_its_blocks(model):
    system, *tails = random_prompts([41, 3, 9, 1, 17, 6, 2, 30, 5])
    prompts = [system + tail for tail in tails]
    expected = [cold(model, prompt) for prompt in prompts]
    shared = whole_blocks(len(system)) // BLOCK
    with install(model, 200, block_size=BLOCK, prefix_cache=True) as kv:
        store(model, kv, system)
        found = [kv.fetch(prompt) for prompt in prompts]
        assert [num_cached for _, num_cached in found] == [shared * BLOCK] * len(prompts)
        assert kv.summary().blocks_used == shared  # held by all requests, once
        caches = [caches for caches, _ in found]
        rest = [prompt[num_cached:] for prompt, (_, num_cached) in zip(prompts, found, strict=True)]
        del found
        assert batch_tokens(model, rest, ANSWER, caches=caches) == expected
        own = sum(-(-(len(prompt) + ANSWER) // BLOCK) - shared for prompt in prompts)
        assert kv.summary().blocks_peak <= shared + own
        assert kv.summary().cow_copies == 0
        del caches
    assert_all_free(kv)


def test_answers_are_found_in_the_next_turn(model, kv):
    """A conversation of three turns: each finds everything before it, the answers included."""
    prompts = PagedPromptCache(kv)
    history = []
    for question in random_prompts([13, 6, 9]):
        history += question
        cache, rest = prompts.fetch_nearest_cache("model", history)
        assert len(history) - len(rest) == whole_blocks(max(0, len(history) - len(question)))
        generator = BatchGenerator(model, **SMALL_STEPS)
        generator.insert([rest], [ANSWER], [cache], [history[: len(history) - len(rest)]])
        del cache
        answer, last = [], None
        while last is None or last.finish_reason is None:
            for last in generator.next()[1]:
                answer.append(last.token)
        assert answer == cold(model, history)
        assert last.all_tokens == history + answer
        prompts.insert_cache("model", last.all_tokens, last.prompt_cache)
        history += answer
        del last


def test_a_running_request_can_be_committed_and_found(model, kv):
    system, first_tail, second_tail = random_prompts([20, 5, 7])
    first, second = system + first_tail, system + second_tail
    generator = BatchGenerator(model, **SMALL_STEPS)
    (uid,) = generator.insert([first], [ANSWER])
    tokens = {uid: []}
    while True:
        responses = generator.next()
        for response in responses[1]:
            tokens[response.uid].append(response.token)
        if responses == ([], []):
            break
        if len(tokens) == 1 and len(tokens[uid]) == 3:
            ((cache, known),) = generator.extract_cache([uid]).values()
            assert kv.commit(cache, known) == len(known) == len(first) + 3
            caches, num_cached = kv.fetch(second)
            assert num_cached == len(system)
            (other,) = generator.insert([second[num_cached:]], [ANSWER], [caches])
            tokens[other] = []
            del cache, caches
    assert list(tokens.values()) == [cold(model, first), cold(model, second)]
    assert cached(kv, first + tokens[uid][:3]) == whole_blocks(len(first) + 3)
    del generator, response, responses


def test_a_hit_is_held_while_its_request_waits(model, kv):
    first, *others = random_prompts([33, *[60] * 14])
    expected = cold(model, first)
    store(model, kv, first)
    caches, num_cached = kv.fetch(first)
    for other in others:  # 210 blocks, of 199
        store(model, kv, other)
    assert (cached(kv, others[0]), cached(kv, others[-1]), cached(kv, first)) == (0, 60, 32)
    assert solo_tokens(model, first[num_cached:], ANSWER, prompt_cache=caches) == expected


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


# ------------------------------------------------------------------------------- what is stored, and how long


def test_only_computed_positions_are_found(model, kv):
    (prompt,) = random_prompts([22])
    caches, _ = kv.fetch(prompt)
    assert kv.commit(caches, prompt) == 0
    assert cached(kv, prompt) == 0
    model(mx.array([prompt[:10]]), cache=caches)
    assert kv.commit(caches, prompt) == 10
    assert cached(kv, prompt) == 8
    model(mx.array([prompt[10:]]), cache=caches)
    assert cached(kv, prompt) == 8  # nobody said so
    assert kv.commit(caches, prompt) == 12
    assert cached(kv, prompt) == 20
    assert kv.commit(caches, prompt) == 0


def test_two_that_computed_the_same_store_it_once(model, kv):
    (prompt,) = random_prompts([16])
    both = [kv.fetch(prompt)[0] for _ in range(2)]
    for caches in both:
        model(mx.array([prompt]), cache=caches)
        kv.commit(caches, prompt)
    stats = kv.pool.prefix.stats()
    assert (stats.nodes, stats.duplicates) == (4, 4)
    del caches, both
    assert kv.summary().blocks_cached == 4


def test_canonical_block_kept_by_a_duplicate_is_not_a_leak(model, kv):
    (prompt,) = random_prompts([12])
    first, second = (kv.fetch(prompt)[0] for _ in range(2))
    for caches in (first, second):
        model(mx.array([prompt[:8]]), cache=caches)
        kv.commit(caches, prompt[:8])
    model(mx.array([prompt[8:]]), cache=second)
    kv.commit(second, prompt)
    del first, caches
    summary = kv.summary()
    assert (summary.blocks_used, summary.blocks_leaked) == (5, 0)  # two of the first, three of the second
    stray = kv.pool.open(BLOCK)
    assert kv.summary().blocks_leaked > 0
    kv.pool.close(stray)
    del second
    assert kv.summary().blocks_cached == 3


def test_forks_of_a_hit_go_on_from_what_is_known(model, kv):
    """Merging, splitting and deep copies keep in mind what is committed of each row."""
    system, left, right = random_prompts([9, 8, 11])
    store(model, kv, system)
    caches, num_cached = kv.fetch(system)
    clone = copy.deepcopy(caches)
    for rows, tail in ((caches, left), (clone, right)):
        model(mx.array([system[num_cached:] + tail]), cache=rows)
        assert kv.commit(rows, system + tail) == len(system) - num_cached + len(tail)
    assert cached(kv, system + left) == 16 and cached(kv, system + right) == 20
    merged = [type(layer).merge([a, b]) for layer, a, b in zip(caches, caches, clone, strict=True)]
    for layer in merged:
        layer.filter([1])
    model(mx.array([[5, 6, 7, 8]]), cache=merged)
    assert kv.commit(merged, [*system, *right, 5, 6, 7, 8]) == 4
    assert cached(kv, [*system, *right, 5, 6, 7, 8]) == 24


def test_a_trimmed_cache_takes_other_tokens(model, kv):
    """Committed blocks are shared from then on: going back and on differently leaves them as they are."""
    first, other = random_prompts([18, 11])
    second = first[:7] + other
    caches, _ = kv.fetch(first)
    model(mx.array([first]), cache=caches)
    kv.commit(caches, first)
    trim_prompt_cache(caches, 11)
    model(mx.array([other]), cache=caches)
    assert kv.commit(caches, second) == len(other)
    del caches
    for prompt in (first, second):
        caches, num_cached = kv.fetch(prompt)
        assert num_cached == 16
        assert solo_tokens(model, prompt[num_cached:], ANSWER, prompt_cache=caches) == cold(model, prompt)


def test_the_least_recently_used_prompt_leaves_first_and_its_end_before_its_beginning(model):
    a, b, c, d = random_prompts([16, 16, 16, 9])
    with install(model, 13, block_size=BLOCK, prefix_cache=True) as kv:  # 12 usable: three prompts
        for prompt in (a, b, c):
            store(model, kv, prompt)
        assert cached(kv, a) == 16  # used again: b is the oldest now
        store(model, kv, d)  # 3 blocks
        assert cached(kv, b) == 4
        assert (cached(kv, a), cached(kv, c), cached(kv, d)) == (16, 16, 8)
    assert_all_free(kv)


@pytest.mark.parametrize("seed", range(3))
def test_a_pool_under_pressure_evicts_and_stays_exact(model, seed):
    """Prompts from a small tree, far more than the pool can keep, batched four at a time."""
    stem, other_stem, *tails = random_prompts([12, 20, *[11] * 12], seed)
    every = [(other_stem if k % 2 else stem) + tail for k, tail in enumerate(tails)]
    expected = [cold(model, prompt, 6) for prompt in every]
    order = [(5 * i + seed) % 12 for i in range(24)]
    prompts = [every[k] for k in order]
    with install(model, 45, block_size=BLOCK, prefix_cache=True) as kv:
        store_of = PagedPromptCache(kv)
        for start in range(0, len(prompts), 4):
            batch = prompts[start : start + 4]
            found = [store_of.fetch_nearest_cache("model", prompt) for prompt in batch]
            caches, rest = [cache for cache, _ in found], [tokens for _, tokens in found]
            answers = []

            def keep(generator, uids, batch=batch, answers=answers):
                for uid, (cache, tokens) in generator.extract_cache(uids).items():
                    if len(tokens) > len(batch[uids.index(uid)]):
                        store_of.insert_cache("model", tokens, cache)

            known = [prompt[: len(prompt) - len(tail)] for prompt, tail in zip(batch, rest, strict=True)]
            answers = batch_tokens(model, rest, 6, caches=caches, known=known, on_step=keep)
            assert answers == [expected[k] for k in order[start : start + 4]]
            del found, caches
            kv.pool.check()
        assert kv.pool.prefix.stats().evicted > 0 and kv.hit_tokens > 0
        del keep
    assert_all_free(kv)


# --------------------------------------------------------------------------------------------- who shares


def test_equal_namespaces_hit_and_different_ones_miss(model, kv):
    (prompt,) = random_prompts([17])
    mine, other = kvpool.namespace(salt="mine"), kvpool.namespace(salt="other")
    store(model, kv, prompt, mine)
    assert cached(kv, prompt, mine) == 16
    assert cached(kv, prompt, other) == cached(kv, prompt) == 0
    store(model, kv, prompt, other)
    assert cached(kv, prompt, other) == 16
    assert kv.pool.prefix.stats().nodes == 8


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
    store(model, kvs[0], prompt)
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
    before = kv.pool.fingerprint()
    for given, tokens, namespace, message in (
        (caches, prompt[4:], b"", r"6 tokens, the cache holds 10"),
        (caches[:2], prompt, b"", r"all 3 layers"),
        ([caches[0], *merged[1:]], prompt, b"", r"all 3 layers"),
        ([], prompt, b"", r"all 3 layers"),
        (merged, prompt, b"", r"holds 2 sequences"),
        (caches, prompt, kvpool.namespace(salt="x"), r"another namespace"),
        (caches, [*prompt[:9], -1], b"", r"-1"),
    ):
        with pytest.raises(ValueError, match=r"\[commit\].*" + message):
            kv.commit(given, tokens, namespace)
    assert kv.pool.fingerprint() == before
    assert kv.commit(caches, prompt) == 10


def test_a_cache_of_another_pool_is_not_committed(model, kv):
    (prompt,) = random_prompts([10])
    other = tiny_llama()
    caches = install(other, 20, block_size=BLOCK, prefix_cache=True).make_cache()
    other(mx.array([prompt]), cache=caches)
    with pytest.raises(ValueError, match=r"\[commit\] the caches of all 3 layers"):
        kv.commit(caches, prompt)


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


def test_segments_are_stored_as_mlx_lms_server_does_it(model, kv):
    """Prompts of two segments; after the first one and at the end the server stores the cache."""
    system, *questions = random_prompts([18, 9, 6, 11])
    prompts, answers, hits = PagedPromptCache(kv), [], []
    key = ("model", None, None)
    for question in questions:
        prompt = system + question
        cache, rest = prompts.fetch_nearest_cache(key, prompt)
        hits.append(len(prompt) - len(rest))
        segments = [system[hits[-1] :], question]
        generator = BatchGenerator(model, **SMALL_STEPS)
        generator.insert_segments([segments], [ANSWER], [cache], [prompt[: hits[-1]]])
        del cache
        answer, busy = [], True
        while busy:
            prompt_responses, responses = generator.next()
            busy = bool(prompt_responses or responses)
            ends = [r.uid for r in prompt_responses if r.end_of_segment and not r.end_of_prompt]
            for cache, tokens in generator.extract_cache(ends).values():
                prompts.insert_cache(key, tokens[:], cache, cache_type="system")
                del cache
            for r in responses:
                answer.append(r.token)
                if r.finish_reason is not None:
                    assert r.all_tokens == prompt + answer
                    prompts.insert_cache(key, r.all_tokens[:], r.prompt_cache, cache_type="assistant")
                del r
            prompts.trim_to(n_bytes=2**40 - generator.prompt_cache_nbytes)
        answers.append(answer)
    assert hits == [0, 16, 16]
    assert answers == [cold(model, system + question) for question in questions]


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


def test_the_summary_tells_what_was_found(model, kv):
    (prompt,) = random_prompts([17])
    store(model, kv, prompt)
    store(model, kv, prompt)
    summary = kv.summary()
    assert (summary.query_tokens, summary.hit_tokens, summary.blocks_cached) == (34, 16, 4)
    assert "(4 cached)" in str(summary)
