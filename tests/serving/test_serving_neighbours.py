"""What a request does to others: how many steps they need beside it."""

from kvpool.adapters.mlx_lm import Engine, tiny


def steps_of_others(*before):
    """Steps that short requests need behind those of `before`, which have run for a while."""
    with Engine(tiny.make()[0], 600, max_running=16) as engine:
        for options in before:
            engine.submit([40] * 16, **options)
            for _ in range(3):
                engine.step()
        prompts = [[7 * number + place for place in range(16)] for number in range(12)]
        others, steps = {engine.submit(prompt, max_tokens=20) for prompt in prompts}, 0
        while others:
            others -= {one.id for one in engine.step()}
            steps += 1
            assert steps < 2000
    return steps


def test_others_need_as_many_steps_beside_a_long_request_with_a_seed():
    long = {"max_tokens": 1500, "seed": 3, "temperature": 1.0}
    assert steps_of_others(long) <= 1.2 * steps_of_others()
