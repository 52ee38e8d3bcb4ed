"""The engine under a budget: what mlx-lm's own loop says under the same policy, and what is refused.

``KVPOOL_LONG=1`` adds the kernels of Metal.
"""

import os

import mlx.core as mx
import numpy as np
import pytest
from metal_engine import StandIn
from mlx_models import on_cpu, random_prompts, solo_tokens, tiny_llama

import kvpool
import kvpool_backends.mlx
from kvpool.adapters.mlx_lm import install
from kvpool.adapters.mlx_lm.engine import Engine, RaggedForward
from kvpool.eviction import H2O, BlockEviction, SlidingWindow

CHUNK, TOKENS = 7, 40  # mlx_models.solo_tokens has prompts in chunks of seven
POLICIES = {
    "window": SlidingWindow(max_kv=20, sink=3),
    "h2o": H2O(max_kv=20, kind="raw"),
    "h2o mass": H2O(max_kv=20, kind="mass", slack=5),
    "blocks": BlockEviction(max_kv=20, recent_tokens=6),
}
PROMPTS = random_prompts([4 * CHUNK + 1, 2 * CHUNK + 1, 5, 7 * CHUNK + 1, 23])


@pytest.fixture(scope="module")
def model():
    with on_cpu():
        yield tiny_llama(head_dim=32)


def engine_of(model, num_blocks=100, **options):
    return Engine(model, num_blocks, block_size=4, **{"prefill_chunk": CHUNK, "prefix_cache": False, **options})


def assert_nothing_leaked(engine):
    engine.scheduler.check()
    stats = engine.kv.pool.stats()
    assert (stats.used, stats.sequences, stats.pending) == (0, 0, 0)


@pytest.mark.parametrize("name", POLICIES)
def test_engine_says_what_mlx_lms_own_loop_says(model, name):
    # With the prompt in the same chunks, the last token of it apart: then the same tokens leave at the same time.
    policy = POLICIES[name]
    for bits in ({}, {"kv_bits": 8, "quant_group_size": 32}):
        engine = engine_of(model, eviction=policy, **bits)
        got = [engine.generate(prompt, max_tokens=TOKENS).tokens.tolist() for prompt in PROMPTS[:2]]
        assert engine.scheduler.stats().evicted_tokens > 50
        assert_nothing_leaked(engine)
        with install(model, 100, block_size=4, eviction=policy, **bits) as kv:
            due = [solo_tokens(model, prompt, TOKENS, prompt_cache=kv.make_cache()) for prompt in PROMPTS[:2]]
        assert got == due


def test_engine_that_ignores_evictions_gives_other_tokens(model, monkeypatch):
    due = engine_of(model, eviction=POLICIES["h2o"]).generate(PROMPTS[0], max_tokens=TOKENS).tokens.tolist()
    call = RaggedForward.__call__
    monkeypatch.setattr(RaggedForward, "__call__", lambda self, *args: call(self, *args[:4]))  # positions are places
    got = engine_of(model, eviction=POLICIES["h2o"]).generate(PROMPTS[0], max_tokens=TOKENS).tokens.tolist()
    assert got != due


@pytest.mark.long
def test_gathering_engine_slides_as_the_fused_one_does(model):
    said = [
        [
            one.tokens.tolist()
            for one in engine_of(model, eviction=POLICIES["window"], fused=fused, max_running=1).batch(
                PROMPTS, max_tokens=TOKENS
            )
        ]
        for fused in (True, False)
    ]
    assert said[0] == said[1]


@pytest.mark.parametrize("policy", [H2O(max_kv=200), SlidingWindow(max_kv=200), BlockEviction(max_kv=200)])
def test_budget_that_holds_every_context_changes_no_token(model, policy):
    # 30 blocks: somebody is preempted.
    how = {"num_blocks": 30, "max_running": 5, "max_step_tokens": 17, "prefix_cache": True}
    plain, evicting = engine_of(model, **how), engine_of(model, eviction=policy, **how)
    said = [[one.tokens.tolist() for one in engine.batch(PROMPTS, max_tokens=TOKENS)] for engine in (plain, evicting)]
    assert said[0] == said[1]
    assert plain.scheduler.stats() == evicting.scheduler.stats() and plain.scheduler.stats().preemptions
    assert_nothing_leaked(evicting)


@pytest.mark.parametrize("name", POLICIES)
def test_crowd_in_a_small_pool_keeps_its_budgets(model, name):
    policy = POLICIES[name]
    options = {"max_running": 4, "max_step_tokens": 20, "prefix_cache": True}
    engine = engine_of(model, num_blocks=24, eviction=policy, **options)
    ids = [engine.submit(prompt, max_tokens=TOKENS) for prompt in PROMPTS]
    ids.append(engine.submit(PROMPTS[0], max_tokens=TOKENS, n=2, temperature=1.0, seed=3))
    done, pool = [], engine.kv.pool
    while engine.num_unfinished:
        done += engine.step()
        engine.scheduler.check()
        if len(done) == 2 and ids[-1] in engine:
            done.append(engine.cancel(ids[-1]))
        running = engine.scheduler._core.rows
        for handle in running.handle[running.handle >= 0].tolist():
            assert pool.kv_len(handle) <= policy.most + CHUNK
    assert {one.id for one in done} == set(ids)
    assert all(len(one.tokens) == TOKENS for one in done if one.id != ids[-1])
    assert_nothing_leaked(engine)


def test_prefix_of_an_evicted_prompt_is_found_again(model):
    engine = engine_of(model, eviction=POLICIES["window"], prefix_cache=True)
    first, second = (engine.generate(PROMPTS[3], max_tokens=3) for _ in range(2))
    assert [one.samples[0].output.num_cached for one in (first, second)] == [0, 16]  # below 20, in whole blocks
    assert_nothing_leaked(engine)


def test_model_that_raises_leaves_no_score(model, monkeypatch):
    engine, other = (engine_of(model, eviction=POLICIES["h2o"]) for _ in range(2))
    due = other.generate(PROMPTS[0], max_tokens=TOKENS).tokens.tolist()
    call, count = RaggedForward.__call__, [0]

    def sometimes(self, *args):
        count[0] += 1
        result = call(self, *args)
        if count[0] % 3 == 0:
            raise OSError("planted")
        return result

    monkeypatch.setattr(RaggedForward, "__call__", sometimes)
    id = engine.submit(PROMPTS[0], max_tokens=TOKENS)
    done = []
    while not done:
        try:
            done = engine.step()
        except OSError:
            engine.scheduler.check()
    assert done[0].id == id and done[0].tokens.tolist() == due
    assert_nothing_leaked(engine)


def test_engine_on_quantized_blocks_says_what_one_sequence_says(model):
    how = {"k_bits": 8, "v_bits": 4, "quant_group_size": 32}
    with install(model, 100, block_size=4, **how) as kv:
        due = [solo_tokens(model, prompt, 12, prompt_cache=kv.make_cache()) for prompt in PROMPTS]
    engine = engine_of(model, max_running=3, max_step_tokens=17, **how)
    assert [one.tokens.tolist() for one in engine.batch(PROMPTS, max_tokens=12)] == due
    assert_nothing_leaked(engine)


def test_engine_refuses_unsupported_options_when_it_is_made(model):
    before = dict(vars(model))
    for options, error, message in (
        ({"eviction": 20}, TypeError, r"\[install\] eviction must be a policy of kvpool.eviction, not int"),
        ({"eviction": POLICIES["h2o"], "fused": False}, ValueError, r"\[install\] H2O needs scores, .* is gather"),
        ({"kv_bits": 8, "v_bits": 4}, TypeError, "kv_bits is for both"),
        ({"kv_bits": 5}, ValueError, "k_bits is 5"),
        ({"kv_bits": 8, "quant_group_size": 64}, ValueError, "head_dim is 32, not a multiple of quant_group_size 64"),
    ):
        with pytest.raises(error, match=message):
            engine_of(model, **options)
        assert vars(model) == before


def test_ragged_pass_on_quantized_blocks_has_the_logits_of_the_cache(model):
    tokens = np.array(PROMPTS[4], np.int32)
    with install(model, 20, block_size=4, kv_bits=8, quant_group_size=32) as kv:
        due = model(mx.array(tokens[None]), cache=kv.make_cache())[0]
        plan, handle = kvpool.Plan(kv.pool, 2, 32, formats=kv.backend.required_formats), kv.pool.open()
        kv.pool.step(plan, [handle], len(tokens))
        got = RaggedForward(kv)(tokens, plan, np.array([len(tokens)]), np.arange(len(tokens), dtype=np.int32))
        kv.pool.done(plan)
        assert mx.abs(got - due).max() < 2e-5 * mx.abs(due).max()
        kv.pool.close(handle)


@pytest.mark.skipif(not os.environ.get("KVPOOL_LONG"), reason="most of it is the compiler that stands in for Metal's")
def test_tokens_are_the_same_by_the_kernels_of_metal(monkeypatch):
    """On a stand-in for Metal: everything is lazy there, and a chunk's queries are attended once more."""
    prompt, policy = PROMPTS[4][: 2 * CHUNK + 1], H2O(max_kv=12)
    with on_cpu():
        model = tiny_llama()
        how = {"block_size": 8, "prefill_chunk": CHUNK, "prefix_cache": False, "eviction": policy}
        due = Engine(model, 12, **how).generate(prompt, max_tokens=3)
        make, factory = kvpool_backends.mlx.MLXBackend, StandIn().factory()
        monkeypatch.setattr(
            kvpool_backends.mlx, "MLXBackend", lambda spec, blocks, **_: make(spec, blocks, metal_kernel=factory)
        )
        engine = Engine(model, 12, **how)
        assert engine.kv.backend.route == "metal"
        got = engine.generate(prompt, max_tokens=3)
        assert got.tokens.tolist() == due.tokens.tolist() and engine.scheduler.stats().evicted_tokens > 0
        np.testing.assert_allclose(got.samples[0].logprobs, due.samples[0].logprobs, atol=1e-4)
        assert_nothing_leaked(engine)
