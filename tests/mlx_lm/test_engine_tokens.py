"""Samples, seeds, beams and logprobs of the engine; and its tokens by the kernels of Metal.

Tokens of any family and route: `test_engine_ragged`, `test_engine_groups`; of any workload: `test_engine_workloads`.
"""

import mlx.core as mx
import numpy as np
import pytest
from metal_engine import StandIn
from mlx_models import VOCAB, assert_nothing_is_left, computing_on_cpu, random_prompts, solo_tokens, tiny_llama

import kvpool_backends.mlx
from kvpool.adapters.mlx_lm.engine import Engine

cpu = pytest.fixture(computing_on_cpu, autouse=True)
BLOCK = 4


@pytest.mark.long
def test_tokens_are_the_same_by_the_kernels_of_metal(monkeypatch):
    """On a stand-in for Metal; a chunk is longer than what the kernels take at once."""
    make = kvpool_backends.mlx.MLXBackend
    factory = StandIn().factory()
    monkeypatch.setattr(
        kvpool_backends.mlx, "MLXBackend", lambda spec, blocks, **_: make(spec, blocks, metal_kernel=factory)
    )
    model, prompts = tiny_llama(), random_prompts((40, 3, 6))
    engine = Engine(model, 40, block_size=8, max_step_tokens=60, prefill_chunk=36)
    assert engine.kv.backend.route == "metal" and engine.kv.route == "fused"
    expected = [solo_tokens(model, prompt, 4) for prompt in prompts]
    assert [one.tokens.tolist() for one in engine.batch(prompts, max_tokens=4)] == expected
    assert_nothing_is_left(engine)


def test_requests_without_a_seed_differ_unless_the_engine_has_one():
    model, (prompt,) = tiny_llama(), random_prompts([11])

    def pair(seed):
        engine = Engine(model, 40, block_size=BLOCK, seed=seed)
        return [engine.generate(prompt, temperature=1.5, max_tokens=12).tokens.tolist() for _ in range(2)]

    first, second = pair(5)
    assert first != second
    assert pair(5) == [first, second]


def test_beam_with_more_ends_than_its_width_still_goes_on():
    model, prompt = tiny_llama(), [1, 2, 3]
    ends = np.argsort(-np.array(model(mx.array([prompt]))[0, -1]))[:3].tolist()  # the likeliest all end
    how = {"max_tokens": 6, "beam_width": 1, "eos": tuple(ends), "length_penalty": 32.0}
    answer = Engine(model, 60, block_size=BLOCK).generate(prompt, **how)
    assert len(answer.tokens) > 1, "the longer ones score better, and there are some that do not end at once"


def test_beam_wider_than_half_of_the_vocabulary_is_searched():
    engine, width = Engine(tiny_llama(), 900, block_size=BLOCK, max_running=200), VOCAB // 2 + 10
    assert len(engine.generate([1, 2, 3], max_tokens=2, beam_width=width, n=width).samples) == width
    assert_nothing_is_left(engine)


@pytest.mark.parametrize("ends", [(), (0, 1, 2)])
def test_beam_that_finds_fewer_hypotheses_than_it_is_asked_for_ends_with_these(ends):
    engine = Engine(tiny_llama(vocab_size=3), 60, block_size=BLOCK)
    beam = engine.submit([0, 1], max_tokens=1 if not ends else 3, eos=ends, beam_width=4, n=4)
    found = [one for _ in range(4) for one in engine.step()]
    assert [one.id for one in found] == [beam]
    assert sorted(one.tokens.tolist() for one in found[0].samples) == [[0], [1], [2]]
    assert_nothing_is_left(engine)
