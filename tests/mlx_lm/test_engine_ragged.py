"""One forward pass over any mix of chunks and decodes: the logits of the stock model, for every family and route."""

import mlx.core as mx
import numpy as np
import pytest
from mlx_families import FAMILIES
from mlx_models import ROUTES, computing_on_cpu, random_prompts, tiny_llama

import kvpool
from kvpool.adapters.mlx_lm import install
from kvpool.adapters.mlx_lm.engine import FORMATS, RaggedForward

cpu = pytest.fixture(computing_on_cpu, autouse=True)
LENGTHS = (23, 1, 40, 9, 17)
BLOCK = 4


def random_steps(rng, lengths, mixed):
    """Yield (rows, new tokens per row) until every sequence is through, in random pieces."""
    done = np.zeros(len(lengths), np.int64)
    while (left := np.array(lengths) - done).any():
        rows = rng.permutation(np.flatnonzero(left))[: rng.integers(1, len(lengths) + 1)]
        new = np.minimum(left[rows], rng.choice([1, 1, 2, 5, 16], len(rows)))
        if not mixed:
            rows, new = (rows[:1], new[:1]) if rng.integers(2) else (rows, np.ones(len(rows), np.int64))
        yield rows, new
        done[rows] += new


def worst_error(model, prompts, seed, *, make=RaggedForward, **route):
    """The largest difference to the stock logits, relative to the largest of them, over all tokens of all prompts."""
    rng = np.random.default_rng(seed)
    expected = [np.array(model(mx.array([prompt]))[0].astype(mx.float32)) for prompt in prompts]  # without any cache
    worst = 0.0
    kv = install(model, 80, block_size=BLOCK, **route)
    forward = make(kv)
    plan = kvpool.Plan(kv.pool, 8, 128, formats=FORMATS)
    handles = np.array([kv.pool.open() for _ in prompts], np.int64)
    for rows, new in random_steps(rng, [len(prompt) for prompt in prompts], forward.is_ragged):
        starts = np.array([kv.pool.num_tokens(handle) for handle in handles[rows].tolist()])
        kv.pool.step(plan, handles[rows], new)
        pieces = [prompts[row][a : a + n] for row, a, n in zip(rows, starts, new, strict=True)]
        asked = rng.permutation(int(new.sum()))[: rng.integers(0, int(new.sum()) + 1)].astype(np.int32)
        tokens = np.concatenate(pieces).astype(np.int32)
        logits = np.array(forward(tokens, plan, asked))
        kv.pool.done(plan)
        wanted = np.concatenate([expected[r][a : a + n] for r, a, n in zip(rows, starts, new, strict=True)])
        if len(asked):
            worst = max(worst, float(np.abs(logits - wanted[asked]).max() / np.abs(wanted).max()))
    kv.pool.close(handles)
    assert kv.pool.stats().used == 0
    kv.pool.shutdown()
    return worst


@pytest.mark.parametrize("name", FAMILIES)
def test_a_ragged_pass_has_the_logits_of_the_stock_model(name):
    assert worst_error(FAMILIES[name](), random_prompts(LENGTHS), 1, fused=True) < 2e-5


@pytest.mark.parametrize("route", ["gathered", "plain"])
@pytest.mark.parametrize("name", ["llama", "llama, two masks", "gemma3_text"])
def test_a_gathering_pass_has_the_logits_of_the_stock_model(name, route):
    assert worst_error(FAMILIES[name](), random_prompts(LENGTHS), 2, **ROUTES[route]) < 2e-5


def test_the_model_is_untouched_after_a_pass_that_raised():
    model = tiny_llama()
    before = dict(vars(model)), dict(model)
    kv = install(model, 20, block_size=BLOCK)
    plan = kvpool.Plan(kv.pool, 2, 8, formats=FORMATS)
    handle = kv.pool.open()
    kv.pool.step(plan, [handle], 3)
    with pytest.raises(Exception, match=r"ragged|shape|reshape"):
        RaggedForward(kv)(np.zeros(5, np.int32), plan, np.array([0], np.int32))
    assert not any(site.is_active for site in kv.passes.sites)
    kv.pool.rollback(plan)
    assert kv.pool.num_tokens(handle) == 0
    assert (dict(vars(model)), dict(model)) == before
