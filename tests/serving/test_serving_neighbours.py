"""What a request does to others: how many steps they need beside it."""

import pytest

from kvpool.adapters.mlx_lm import Engine, tiny

PROMPTS = [[7 * number + place for place in range(16)] for number in range(12)]


@pytest.fixture(scope="module")
def model():
    return tiny.make()[0]


def steps_of_others(model, before):
    """Steps that short requests need behind those of `before`, which have run for a while."""
    with Engine(model, 600, max_running=16) as engine:
        for options in before:
            engine.submit([40] * 16, **options)
            for _ in range(3):
                engine.step()
        others = {engine.submit(prompt, max_tokens=20) for prompt in PROMPTS}
        steps = 0
        while others:
            others -= {one.id for one in engine.step()}
            steps += 1
            assert steps < 2000
    return steps


LONG = {"max_tokens": 1500, "seed": 3, "temperature": 1.0}


def test_others_need_as_many_steps_beside_a_long_request_with_a_seed(model):
    assert steps_of_others(model, [LONG]) <= 1.2 * steps_of_others(model, [])
