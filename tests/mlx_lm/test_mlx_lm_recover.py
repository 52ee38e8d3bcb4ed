"""A forward pass that fails: a cache fed by hand goes on exactly, an engine says that it cannot."""

import mlx.core as mx
import pytest
from mlx_lm.generate import BatchGenerator
from mlx_models import PROMPTS, SMALL_STEPS, batch_tokens, random_prompts, tiny_llama

from kvpool.adapters.mlx_lm import EngineStopped, PagedKVCache, install
from kvpool.errors import OutOfBlocks


class Fault(Exception):
    pass


@pytest.fixture(scope="module")
def prompts():
    return random_prompts(PROMPTS)


@pytest.fixture
def model():
    return tiny_llama()


def fail_once(model, monkeypatch, number):
    """Let call `number` of the second layer's attention raise, when the first layer has run."""
    attention, calls = model.layers[1].self_attn, []

    def fail(*arguments, **options):
        calls.append(1)
        if len(calls) == number:
            raise Fault
        return attention(*arguments, **options)

    monkeypatch.setattr(model.layers[1], "self_attn", fail)
    return calls


def grown(kv, model, tokens):
    cache = kv.make_cache()
    mx.eval(model(tokens, cache=cache))
    return cache


@pytest.mark.parametrize("number", [1, 2, 3, 6, 10, 20, 40])
def test_an_engine_stopped_in_a_pass_refuses_to_go_on(model, prompts, monkeypatch, number):
    """Prefill and decode alike: what mlx-lm took out of its queues before the pass does not come back."""
    expected = batch_tokens(model, prompts)
    with install(model, 400, block_size=4) as kv:
        calls = fail_once(model, monkeypatch, number)
        generator = BatchGenerator(model, **SMALL_STEPS)
        generator.insert(prompts, [16] * len(prompts))
        with pytest.raises(Fault):
            while True:
                generator.next()
        assert len(calls) == number
        assert kv.recover() and kv.pool.stats().pending == 0
        if number not in (1, 2):  # then a batch is left that could go on
            for _ in range(2):
                with pytest.raises(EngineStopped, match=r"discard it, make a new one"):
                    while any(generator.next()):
                        pass
        del generator
        assert batch_tokens(model, prompts) == expected, "a new engine starts afresh"
    assert kv.summary().blocks_used == kv.summary().blocks_leaked == 0


def test_an_engine_that_ran_out_of_blocks_refuses_to_go_on(model, prompts):
    with install(model, 12, block_size=4) as kv:
        generator = BatchGenerator(model, **SMALL_STEPS)
        generator.insert(prompts, [16] * len(prompts))
        with pytest.raises(OutOfBlocks):
            while True:
                generator.next()
        with pytest.raises(EngineStopped):
            while True:
                generator.next()
        kv.pool.check()


def test_a_stopped_batch_refuses_every_use_and_the_cache_it_came_from_none(model):
    kv = install(model, 50, block_size=4)
    single = grown(kv, model, mx.array([[1, 2, 3]]))
    merged = [PagedKVCache.merge([layer]) for layer in single]
    x = mx.ones((1, 2, 1, 8))
    merged[0].update_and_fetch(x, x)
    assert kv.recover()
    for call in (lambda c: c.extract(0), lambda c: c.filter([0]), lambda c: c.trim(1), single[0].extend):
        with pytest.raises(EngineStopped):
            call(merged[0])
    assert model(mx.array([[4]]), cache=single).shape[1] == 1
    assert single[0].offset == 4
