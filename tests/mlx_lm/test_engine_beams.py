"""Beams in the engine: small vocabularies, several ends."""

import mlx.core as mx
import numpy as np
import pytest
from mlx_models import on_cpu

from kvpool.adapters.mlx_lm import tiny
from kvpool.adapters.mlx_lm.engine import Engine

PROMPT = [1, 2, 3]


@pytest.fixture(scope="module")
def model():
    with on_cpu():
        return tiny.make()[0]


@pytest.fixture
def engine(model):
    with on_cpu(), Engine(model, 900, block_size=4, max_running=160) as one:
        yield one
        one.close()
        assert one.kv.pool.stats().used == 0


def test_beam_with_more_ends_than_its_width_still_goes_on(model, engine):
    ends = np.argsort(-np.array(model(mx.array([PROMPT]))[0, -1]))[:3].tolist()  # the likeliest all end
    answer = engine.generate(PROMPT, max_tokens=6, beam_width=1, eos=tuple(ends), length_penalty=32.0)
    assert len(answer.tokens) > 1, "the longer ones score better, and there are some that do not end at once"


def test_beam_wider_than_half_of_the_vocabulary_is_searched(engine):
    answer = engine.generate(PROMPT, max_tokens=2, beam_width=140, n=140)
    assert len(answer.samples) == 140
