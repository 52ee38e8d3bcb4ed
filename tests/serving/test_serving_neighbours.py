"""What a request does to others, by counters: how many run at a time, and how many steps they need."""

import pytest

from kvpool.adapters.mlx_lm import Engine, tiny

PROMPTS = [[7 * number + place for place in range(16)] for number in range(12)]
ENDS = tuple(range(33, 60))  # a third of the printable tokens: answers are short


@pytest.fixture(scope="module")
def model():
    return tiny.make()[0]


def running(model, **options):
    """Sequences that run in each step until all prompts are answered, and the answers."""
    max_tokens = options.pop("max_tokens")
    with Engine(model, 300, prefix_cache=False, **options) as engine:
        for number, prompt in enumerate(PROMPTS):
            engine.submit(prompt, max_tokens=max_tokens, eos=ENDS, temperature=1.0, seed=number, id=number)
        counts, answers = [], {}
        while engine.num_unfinished:
            answers |= {one.id: one.tokens.tolist() for one in engine.step()}
            stats = engine.scheduler.stats()
            counts.append(stats.prefilling + stats.decoding)
    return counts, answers


def test_a_large_max_tokens_changes_nothing_while_answers_are_short(model):
    few, answers = running(model, max_tokens=60)
    assert max(few) > len(PROMPTS) // 2 and max(map(len, answers.values())) < 60
    assert running(model, max_tokens=4096) == (few, answers)


def test_blocks_that_are_kept_back_show_in_the_counters(model):
    """The fault that the test above looks for: 290 of 299 blocks are reserved."""
    few, answers = running(model, max_tokens=60)
    kept, same = running(model, max_tokens=60, watermark=290)
    assert same == answers and max(kept) < max(few) and len(kept) > len(few)


def steps_of_others(model, before):
    """Steps that short requests need behind those of `before`, the first of which has run for a while."""
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
