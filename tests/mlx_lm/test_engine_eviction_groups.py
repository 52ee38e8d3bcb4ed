"""Eviction in `Engine` where layers differ: tokens leave the full layers, as with `install`."""

import pytest
from mlx_lm.models.cache import KVCache, RotatingKVCache
from mlx_models import on_cpu, solo_tokens
from sliding_cache import SlidingCache

from kvpool.adapters.mlx_lm import install, tiny
from kvpool.adapters.mlx_lm.engine import Engine, RaggedForward
from kvpool.adapters.mlx_lm.eviction import Eviction
from kvpool.eviction import H2O, BlockEviction, SlidingWindow

LONG = pytest.mark.long
CHUNK, TOKENS = 7, 40  # mlx_models.solo_tokens has prompts in chunks of seven
WINDOW = SlidingWindow(max_kv=20, sink=3)
SCORED = (H2O(max_kv=20, kind="raw"), BlockEviction(max_kv=20, recent_tokens=6))
CASES = [
    *(("gemma3_text", policy) for policy in (WINDOW, *SCORED)),
    ("qwen3_5", WINDOW),
    *(pytest.param("gemma4", policy, marks=LONG) for policy in (WINDOW, *SCORED)),
    *(pytest.param(name, WINDOW, marks=LONG) for name in ("llama4", "nemotron_h", "falcon_h1")),
]
PROMPTS = [[(7 * i * i + 3 * i + n) % 90 for i in range(n)] for n in (4 * CHUNK + 1, 2 * CHUNK + 1, 5, 7 * CHUNK + 1)]


def made(name):
    model, _ = tiny.make(name)
    return model


def engine_of(model, policy, num_blocks=100, **options):
    how = {"block_size": 4, "prefill_chunk": CHUNK, "prefix_cache": False}
    return Engine(model, num_blocks, eviction=policy, **(how | options))


def arenas_of(engine):
    layout = engine.kv.layout
    return range(len(layout.block_nbytes) + sum(group.kind == "state" for group in layout.groups))


def assert_nothing_leaked(engine):
    engine.scheduler.check()
    engine.kv.pool.check()
    assert len(engine._forward.states) == 0
    for arena in arenas_of(engine):
        stats = engine.kv.pool.stats(arena)
        assert (stats.used, stats.limbo, stats.sequences) == (0, 0, 0)


def by_install(model, policy, **how):
    with install(model, 100, block_size=4, eviction=policy, **how) as kv:
        return [solo_tokens(model, prompt, TOKENS, prompt_cache=kv.make_cache()) for prompt in PROMPTS[:2]]


@pytest.mark.parametrize(("name", "policy"), CASES)
def test_engine_says_what_install_says_under_the_same_policy(name, policy):
    with on_cpu():
        model = made(name)
        due = by_install(model, policy)
        engine = engine_of(model, policy)  # a prefix cache would end chunks elsewhere
        assert engine.kv.layout.groups
        got = [engine.generate(prompt, max_tokens=TOKENS).tokens.tolist() for prompt in PROMPTS[:2]]
        assert got == due
        assert engine.scheduler.stats().evicted_tokens > 50
        assert_nothing_leaked(engine)
        whole = engine_of(model, None)
        assert [whole.generate(prompt, max_tokens=TOKENS).tokens.tolist() for prompt in PROMPTS[:2]] != due


def test_engine_says_what_stock_says_whose_full_layers_slide():
    with on_cpu():
        model = made("gemma3_text")
        stock = [SlidingCache(WINDOW) if type(cache) is KVCache else cache for cache in model.make_cache()]
        assert {type(cache) for cache in stock} == {SlidingCache, RotatingKVCache}
        due = solo_tokens(model, PROMPTS[0], TOKENS, prompt_cache=stock)
        for fused in (True, False):
            engine = engine_of(model, WINDOW, fused=fused)
            assert engine.generate(PROMPTS[0], max_tokens=TOKENS).tokens.tolist() == due
            assert_nothing_leaked(engine)


def test_engine_whose_scores_see_all_positions_gives_other_tokens(monkeypatch):
    """The fault: a policy gets lengths that count evicted tokens."""
    with on_cpu():
        model, policy = made("gemma3_text"), SCORED[0]
        due = engine_of(model, policy).generate(PROMPTS[0], max_tokens=TOKENS).tokens.tolist()
        begin = Eviction.begin
        monkeypatch.setattr(Eviction, "begin_pass", lambda self, plan, rows, lens, new: begin(self, rows, lens, new))
        assert engine_of(model, policy).generate(PROMPTS[0], max_tokens=TOKENS).tokens.tolist() != due


@pytest.mark.parametrize(("name", "policy"), CASES)
def test_crowd_in_a_small_pool_keeps_its_budgets(name, policy):
    """Preemption, samples that fork, one request that is cancelled."""
    with on_cpu():
        engine = engine_of(made(name), policy, 26, max_running=4, max_step_tokens=20, prefix_cache=True)
        pool, group = engine.kv.pool, engine._forward.eviction.group
        ids = [engine.submit(prompt, max_tokens=TOKENS) for prompt in PROMPTS]
        ids.append(engine.submit(PROMPTS[0], max_tokens=TOKENS, n=2, temperature=1.0, seed=3))
        done = []
        while engine.num_unfinished:
            done += engine.step()
            engine.scheduler.check()
            if len(done) == 2 and ids[-1] in engine:
                done.append(engine.cancel(ids[-1]))
            for handle in engine.scheduler.handles.tolist():
                assert pool.kv_len(handle, group) <= policy.most + CHUNK
        assert {one.id for one in done} == set(ids)
        assert all(len(one.tokens) == TOKENS for one in done if one.id != ids[-1])
        assert engine.scheduler.stats().evicted_tokens > 100
        assert_nothing_leaked(engine)


@pytest.mark.long
@pytest.mark.parametrize("name", ["gemma3_text", "qwen3_5"])
def test_budget_that_holds_every_context_changes_no_token(name):
    with on_cpu():
        model, how = made(name), {"max_running": 4, "max_step_tokens": 17, "num_blocks": 30}
        plain, evicting = (engine_of(model, policy, **how) for policy in (None, SlidingWindow(max_kv=200)))
        said = [[one.tokens.tolist() for one in each.batch(PROMPTS, max_tokens=TOKENS)] for each in (plain, evicting)]
        assert said[0] == said[1]
        assert plain.scheduler.stats() == evicting.scheduler.stats() and plain.scheduler.stats().preemptions
        assert_nothing_leaked(evicting)


@pytest.mark.parametrize("name", ["gemma3_text", "qwen3_5"])
def test_prompt_is_found_again_as_far_as_its_budget(name):
    with on_cpu():
        engine = engine_of(made(name), WINDOW, prefix_cache=True)
        first, second = (engine.generate(PROMPTS[3], max_tokens=TOKENS) for _ in range(2))
        cached = [one.samples[0].output.num_cached for one in (first, second)]
        assert cached[0] == 0 < cached[1] < WINDOW.max_kv
        assert first.tokens.tolist() == second.tokens.tolist()
        assert_nothing_leaked(engine)


@pytest.mark.parametrize(("name", "words"), [("mamba2", "no layer that keeps every token"), ("openelm", "2 shapes")])
def test_model_without_one_full_group_is_refused(name, words):
    with on_cpu(), pytest.raises(ValueError, match=words):
        engine_of(made(name), WINDOW)


def test_passes_and_caches_make_their_evictor_in_one_place():
    with on_cpu():
        kv = install(made("gemma3_text"), 20, block_size=4, eviction=WINDOW)
        own, of_a_cache = RaggedForward(kv).eviction, kv.make_cache()[0].batch.eviction
        assert (own.group, own.backend) == (of_a_cache.group, of_a_cache.backend)
        assert kv.layout.groups[own.group].kind == "full"
