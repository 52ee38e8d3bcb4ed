"""The published notebook once more, as it was written: on a small random Llama of its size, greedy, through the engine.

Its model has 4 layers of width 128, 8 query heads over 2 KV heads, 320 tokens. Requests, arrivals, pool sizes and
exercises are those of test_published_notebook; the reference is the model alone, by mlx-lm.
"""

import mlx.core as mx
import numpy as np
import pytest
from mlx_models import on_cpu, solo_tokens, tiny_llama
from test_published_notebook import ARRIVALS, BLOCK_SIZE, MAX_TOKENS, NOTEBOOK_PLENTY, NOTEBOOK_TIGHT, POLICIES, PROMPTS

from kvpool import Pool
from kvpool.adapters.mlx_lm.engine import Engine

NOTEBOOK = {
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_hidden_layers": 4,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 512,
}


@pytest.fixture(scope="module")
def model():
    with on_cpu():
        yield tiny_llama(**NOTEBOOK)


def serve(model, prompts, limits, arrivals, num_blocks, max_batch=8, prefix_cache=False, eos=None, **options):
    """Run to the end: {id: tokens}, iterations, peak of blocks. Every answer is checked beside the model alone."""
    pool = Pool(num_blocks + 1, BLOCK_SIZE, prefix_cache=prefix_cache)  # block 0 is for padding
    engine = Engine(model, pool=pool, prefix_cache=prefix_cache, max_running=max_batch, watermark=0, **options)
    waiting = sorted(range(len(prompts)), key=lambda i: arrivals[i])
    done, iteration, used = {}, 0, []
    while waiting or engine.num_unfinished:
        while waiting and arrivals[waiting[0]] <= iteration:
            i = waiting.pop(0)
            engine.submit(prompts[i], id=i, max_tokens=limits[i], eos=() if eos is None else (eos,))
        done |= {one.id: one for one in engine.step()}
        used.append(pool.stats().peak_used)
        iteration += 1
    for i, (prompt, limit) in enumerate(zip(prompts, limits, strict=True)):
        alone = solo_tokens(model, prompt, limit)
        if eos in alone:
            alone = alone[: alone.index(eos) + 1]
        assert done[i].tokens.tolist() == alone
    pool.check()
    assert pool.stats().used == 0, "all blocks must be returned to the pool at the end"
    return done, iteration, pool.stats().peak_used, engine.scheduler.stats()


def four(model, num_blocks, **options):
    return serve(model, [list(p) for p in PROMPTS], MAX_TOKENS, ARRIVALS, num_blocks, **options)


def test_four_requests_match_solo_greedy_in_the_notebooks_iterations(model):
    _, iterations, peak, stats = four(model, 64)
    assert iterations == NOTEBOOK_PLENTY.iterations
    assert peak <= NOTEBOOK_PLENTY.peak
    assert stats.preemptions == 0


@pytest.mark.parametrize("policy", POLICIES)
def test_tight_pool_of_eight_blocks_matches_solo_greedy(model, policy):
    done, iterations, peak, stats = four(model, 8, preempt=policy)
    assert len(done) == 4 and peak <= 8
    assert iterations <= NOTEBOOK_TIGHT.iterations
    assert stats.preemptions <= NOTEBOOK_TIGHT.preemptions


def test_common_prefix_is_computed_once(model):
    rng = np.random.default_rng(3)
    common = rng.integers(320, size=20).tolist()
    prompts = [[*common, i, i + 1] for i in range(4)]
    done, _, apart, _ = serve(model, prompts, (6,) * 4, (0, 1, 2, 3), 64)
    done, _, shared, stats = serve(model, prompts, (6,) * 4, (0, 1, 2, 3), 64, prefix_cache=True)
    assert apart - shared == 15
    assert stats.prefill_tokens == 22 + 3 * 2
    assert [done[i].samples[0].output.num_cached for i in range(4)] == [0, 20, 20, 20]


def test_sixteen_random_requests_match_solo_greedy_in_few_blocks(model):
    rng = np.random.default_rng(16)
    prompts = [rng.integers(320, size=rng.integers(2, 16)).tolist() for _ in range(16)]
    limits = rng.integers(4, 33, size=16).tolist()
    done, _, peak, stats = serve(model, prompts, limits, np.sort(rng.integers(0, 40, size=16)).tolist(), 14)
    static = 8 * max(-(-(len(p) + n) // BLOCK_SIZE) for p, n in zip(prompts, limits, strict=True))
    assert len(done) == 16 and peak < static
    assert stats.preemptions > 0


def test_real_eos_ends_sequences_early(model):
    plain, iterations, _, _ = four(model, 64)
    eos = int(plain[1].tokens[5])
    done, sooner, _, _ = four(model, 64, eos=eos)
    assert done[1].samples[0].finish_reason == "eos"
    assert len(done[1].tokens) <= 6 and sooner < iterations


def test_model_has_the_notebooks_shape(model):
    assert model(mx.zeros((1, 1), mx.int32)).shape == (1, 1, 320)
    assert (len(model.layers), model.args.num_key_value_heads, model.args.head_dim) == (4, 2, 16)
