"""The engine under a budget: what mlx-lm's own loop says under the same policy, and what is refused.

Tokens leave the layers that keep every token; windows and states of other layers are as ever. Under a window the
tokens are those of stock under its mask, whatever else runs. ``KVPOOL_LONG=1`` adds the kernels of Metal.
"""

import numpy as np
import pytest
from mlx_models import assert_nothing_is_left, computing_on_cpu, ended_with_failures, logprobs_of, solo_tokens
from sliding_cache import sliding

from benchmarks import tiny_families
from kvpool.adapters.mlx_lm import install, tiny
from kvpool.adapters.mlx_lm.engine import Engine, RaggedForward
from kvpool.eviction import H2O, BlockEviction, SlidingWindow

cpu = pytest.fixture(computing_on_cpu, autouse=True)
CHUNK, TOKENS = 7, 40  # mlx_models.solo_tokens has prompts in chunks of seven
WINDOW, WHOLE = SlidingWindow(max_kv=20, sink=3), BlockEviction(max_kv=20, recent_tokens=6)
RAW, MASS = H2O(max_kv=20, kind="raw"), H2O(max_kv=20, kind="mass", slack=5)
CASES = [  # architecture, policy; None: one table, as llama
    *((None, policy) for policy in (RAW, MASS, WHOLE)),
    *((name, policy) for name in ("gemma3_text", "gemma4") for policy in (RAW, WHOLE)),
]
FAMILIES = (None, "gemma3_text", "qwen3_5", "gemma4", "llama4", "nemotron_h", "falcon_h1")
PROMPTS = [[(7 * i * i + 3 * i + n) % 90 for i in range(n)] for n in (4 * CHUNK + 1, 2 * CHUNK + 1, 5, 7 * CHUNK + 1)]


def made(name=None):
    model, _ = tiny.make() if name is None else tiny_families.make(name)
    return model


def engine_of(model, policy, num_blocks=100, **options):
    how = {"block_size": 4, "prefill_chunk": CHUNK, "prefix_cache": False}
    return Engine(model, num_blocks, eviction=policy, **(how | options))


def told(engine, prompts=PROMPTS[:2]):
    return [engine.generate(prompt, max_tokens=TOKENS).tokens.tolist() for prompt in prompts]


def check_same_as_install(model, policy, **bits):
    # With the prompt in the same chunks, the last token of it apart: then the same tokens leave at the same time.
    with install(model, 100, block_size=4, eviction=policy, **bits) as kv:
        due = [solo_tokens(model, prompt, TOKENS, prompt_cache=kv.make_cache()) for prompt in PROMPTS[:2]]
    engine = engine_of(model, policy, **bits)  # a prefix cache would end chunks elsewhere
    assert told(engine) == due
    assert engine.scheduler.stats().evicted_tokens > 50
    assert_nothing_is_left(engine)
    assert told(engine_of(model, None)) != due


@pytest.mark.parametrize(("name", "policy"), CASES)
def test_engine_says_what_mlx_lms_own_loop_says_under_the_same_policy(name, policy):
    check_same_as_install(made(name), policy)


@pytest.mark.parametrize(("name", "policy"), CASES)
def test_crowd_in_a_small_pool_keeps_its_budgets(name, policy):
    """Preemption, samples that fork, one request that is cancelled."""
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
    assert_nothing_is_left(engine)


@pytest.mark.parametrize("name", FAMILIES)
def test_crowd_under_a_window_says_what_stock_says_under_its_mask(name):
    """A small pool, so that requests are preempted; hits; samples that fork; drafts."""
    model = made(name)
    due = [solo_tokens(model, prompt, TOKENS, prompt_cache=sliding(model, WINDOW)) for prompt in PROMPTS]
    assert due[0] != solo_tokens(model, PROMPTS[0], TOKENS)

    def drafted(rows):
        """Three right tokens and a wrong one."""
        known = {tuple(prompt): tokens for prompt, tokens in zip(PROMPTS, due, strict=True)}
        tokens = [known[tuple(row.request.prompt.tolist())][len(row.generated) :][:3] for row in rows]
        return [[*right, 1] for right in tokens]

    drafts = {} if name in ("qwen3_5", "nemotron_h", "falcon_h1") else {"speculate": drafted}  # states take none back
    engine = engine_of(model, WINDOW, 60, max_running=4, max_step_tokens=20, prefix_cache=True, **drafts)
    for _ in range(2):
        engine.submit(PROMPTS[0], max_tokens=TOKENS, n=2, temperature=1.0, seed=3)
        assert [one.tokens.tolist() for one in engine.batch(PROMPTS, max_tokens=TOKENS)] == due
        engine.scheduler.check()
        while engine.num_unfinished:
            engine.step()
    counts = engine.scheduler.stats()
    assert counts.hit_tokens and counts.evicted_tokens == 0 and bool(counts.accepted_tokens) == bool(drafts)
    assert_nothing_is_left(engine)


def test_beams_under_a_window_have_the_logprobs_of_stock_under_its_mask():
    model, prompt = made(), PROMPTS[0]
    for beam in engine_of(model, WINDOW).generate(prompt, max_tokens=12, beam_width=3).samples:
        due = logprobs_of(model, prompt, beam.tokens.tolist(), sliding(model, WINDOW))
        np.testing.assert_allclose(beam.output.score, due.mean(), rtol=1e-4)


def test_model_that_raises_leaves_no_score():
    engine = engine_of(made(), RAW)
    (due,) = told(engine_of(made(), RAW), PROMPTS[:1])
    id = engine.submit(PROMPTS[0], max_tokens=TOKENS)
    assert ended_with_failures(engine, RaggedForward, "__call__")[id].tokens.tolist() == due
    assert_nothing_is_left(engine)


def test_engine_on_quantized_blocks_says_what_one_sequence_says():
    model, how = made(), {"k_bits": 8, "v_bits": 4, "quant_group_size": 32}
    check_same_as_install(model, RAW, **how)
    with install(model, 100, block_size=4, **how) as kv:
        due = [solo_tokens(model, prompt, 12, prompt_cache=kv.make_cache()) for prompt in PROMPTS]
    engine = engine_of(model, None, max_running=3, max_step_tokens=17, **how)
    assert [one.tokens.tolist() for one in engine.batch(PROMPTS, max_tokens=12)] == due
    assert_nothing_is_left(engine)
