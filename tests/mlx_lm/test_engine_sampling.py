"""Tokens from logits: distributions, what filters leave, and that a row is on its own."""

import math

import mlx.core as mx
import numpy as np
import pytest

from kvpool.adapters.mlx_lm.sampling import Sampling, altered, sample, uniforms

RNG = np.random.default_rng(5)
LOGITS = RNG.normal(size=(64, 40)).astype(np.float32) * 2
ZEROS = np.zeros(64, np.int64)


def run(logits, settings, indices=None, positions=None):
    count = len(settings)
    indices = np.zeros(count, np.int64) if indices is None else indices
    positions = np.arange(count) if positions is None else positions
    return tuple(map(np.array, sample(mx.array(logits), settings, indices, positions)))


def probabilities(row):
    e = np.exp(row.astype(np.float64) - row.max())
    return e / e.sum()


def test_xtc_removes_the_likeliest_but_the_last_above_the_threshold_by_chance():
    row, count = LOGITS[0], 20_000
    p = probabilities(row)
    above = np.flatnonzero(p > 0.05)
    above = above[np.argsort(-p[above])]
    assert len(above) > 3
    settings = {"temperature": 1.0, "seed": 3, "xtc_threshold": 0.05, "xtc_probability": 0.3}
    spared = int(above[1])
    for special, removed in ((), above[:-1]), ((spared,), [above[0], *above[2:-1]]):
        tokens, _ = run(np.repeat(row[None], count, 0), [Sampling(xtc_special_tokens=special, **settings)] * count)
        left = np.where(np.isin(np.arange(len(p)), removed), 0, p)
        wanted = 0.7 * p + 0.3 * left / left.sum()
        counts = np.bincount(tokens, minlength=len(p))
        assert np.abs(counts - wanted * count).max() < 5 * math.sqrt(count * 0.25), special
    alone = run(row[None], [Sampling(top_k=1, **settings | {"xtc_probability": 1.0})])[0]
    assert alone.tolist() == [row.argmax()]
    everywhere = run(LOGITS, [Sampling(**settings | {"xtc_probability": 1.0, "xtc_threshold": 0.0})] * 64)[0]
    assert everywhere.tolist() == LOGITS.argmin(-1).tolist()


@pytest.mark.parametrize(
    "settings",
    [
        Sampling(temperature=0.7, seed=3),
        Sampling(temperature=1.0, top_p=0.8, seed=3),
        Sampling(temperature=1.3, top_k=5, seed=3),
        Sampling(temperature=0.9, min_p=0.2, seed=3),
    ],
    ids=str,
)
def test_frequencies_are_those_of_the_filtered_distribution(settings):
    row, count = LOGITS[0], 20_000
    tokens, _ = run(np.repeat(row[None], count, 0), [settings] * count)
    p = probabilities(row)
    ranked = np.sort(p)[::-1]
    keep = p >= settings.min_p * p.max()
    keep &= np.array([ranked[ranked > x].sum() < settings.top_p for x in p])
    if settings.top_k:
        keep &= p >= ranked[settings.top_k - 1]
    wanted = np.where(keep, p ** (1 / settings.temperature), 0)
    wanted /= wanted.sum()
    counts = np.bincount(tokens, minlength=len(p))
    assert not counts[~keep].any()
    seen = keep & (wanted * count > 5)
    chi2 = ((counts - wanted * count)[seen] ** 2 / (wanted * count)[seen]).sum()
    degrees = seen.sum()
    assert chi2 < degrees + 5 * math.sqrt(2 * degrees), (chi2, degrees)


def test_a_row_gets_the_same_token_in_any_batch():
    kinds = [Sampling(), Sampling(temperature=0.8, seed=4), Sampling(temperature=1.1, top_p=0.7, seed=9)]
    settings = [kinds[i % 3] for i in range(64)]
    indices, positions = RNG.integers(0, 4, 64), RNG.integers(0, 100, 64)
    together, _ = run(LOGITS, settings, indices, positions)
    for i in range(64):
        alone, _ = run(LOGITS[i : i + 1], settings[i : i + 1], indices[i : i + 1], positions[i : i + 1])
        assert alone[0] == together[i]
    order = RNG.permutation(64)
    mixed, _ = run(LOGITS[order], [settings[i] for i in order], indices[order], positions[order])
    assert mixed.tolist() == together[order].tolist()


def test_uniforms_are_uniform_and_independent_of_each_other():
    u = uniforms([0] * 100_000, np.zeros(100_000, np.int64), np.arange(100_000)).astype(np.float64)
    assert u.min() >= 0 and u.max() < 1
    histogram = np.histogram(u, 100, (0, 1))[0]
    assert ((histogram - 1000) ** 2 / 1000).sum() < 99 + 5 * math.sqrt(198)
    assert abs(np.corrcoef(u[:-1], u[1:])[0, 1]) < 0.02
    by_seed = uniforms(np.arange(100_000).tolist(), np.zeros(100_000, np.int64), np.zeros(100_000, np.int64))
    assert abs(np.corrcoef(by_seed[:-1], by_seed[1:])[0, 1]) < 0.02
    assert abs(by_seed.mean() - 0.5) < 0.01
    assert uniforms([2**63 - 1], np.array([2**20]), np.array([0])).shape == (1,)  # wraps, and does not warn


def test_token_that_is_certain_is_always_taken_and_a_tiny_temperature_is_as_greedy():
    certain = np.full((64, 40), -np.inf, np.float32)
    certain[:, 17] = 3.0
    for logits, how in (
        (certain, {"temperature": 5.0}),
        (certain, {"temperature": 5.0, "top_p": 0.001}),
        (LOGITS, {"temperature": 1e-300}),
        (LOGITS, {"temperature": 1e-30, "top_k": 3}),
    ):
        assert run(logits, [Sampling(seed=0, **how)] * 64)[0].tolist() == logits.argmax(-1).tolist()


def changed(row, settings, prompt, generated):
    """The logits after penalties and biases, computed token by token."""
    row = row.astype(np.float64)
    for token in range(len(row)):
        if token in generated or token in prompt:
            row[token] *= settings.repetition_penalty ** (-1 if row[token] > 0 else 1)
        row[token] -= settings.frequency_penalty * generated.count(token)
        row[token] -= settings.presence_penalty * (token in generated)
        row[token] += dict(settings.logit_bias).get(token, 0)
    return row


def test_penalties_and_biases_change_the_choice_and_no_other_row():
    rng = np.random.default_rng(9)
    settings, tokens, due = [], [], []
    for row in LOGITS:
        prompt, generated = (rng.integers(0, 40, rng.integers(0, 30)).tolist() for _ in range(2))
        chosen = rng.choice(["frequency_penalty", "presence_penalty", "repetition_penalty"], rng.integers(0, 4), False)
        penalties = {name: float(rng.uniform(0.5, 2)) for name in chosen}
        bias = {int(token): float(rng.uniform(-3, 3)) for token in rng.integers(0, 40, rng.integers(0, 9))}
        settings.append(Sampling(logit_bias=bias, **penalties))
        tokens.append((np.array(prompt, np.int32), np.array(generated, np.int32)))
        due.append(changed(row, settings[-1], prompt, generated))
    rows = [row for row, one in enumerate(settings) if one.alters]
    changes = {row: settings[row].changes(*tokens[row]) for row in rows}
    np.testing.assert_allclose(np.array(altered(mx.array(LOGITS), changes)), due, rtol=1e-5, atol=1e-5)
    found, logprobs = sample(mx.array(LOGITS), settings, ZEROS, ZEROS, changes)
    assert found.tolist() == np.argmax(due, -1).tolist() != LOGITS.argmax(-1).tolist()
    expected = [math.log(probabilities(row)[t]) for row, t in zip(LOGITS, found, strict=True)]
    np.testing.assert_allclose(logprobs, expected, rtol=1e-4)  # by the model's own probabilities


def test_sampled_tokens_follow_their_biases():
    settings = [Sampling(temperature=1, top_k=k, seed=3, logit_bias={7: 1000.0, 8: 999.0}) for k in (0, 2)] * 32
    changes = {row: one.changes(np.zeros(0, np.int32), np.zeros(0, np.int32)) for row, one in enumerate(settings)}
    tokens, _ = sample(mx.array(LOGITS), settings, ZEROS, np.arange(64), changes)
    assert set(tokens[0::2].tolist()) == set(tokens[1::2].tolist()) == {7, 8}


@pytest.mark.parametrize(
    ("options", "error", "text"),
    [
        ({"temperature": -0.1}, ValueError, "temperature is -0.1"),
        ({"temperature": math.inf}, ValueError, "temperature is inf"),
        ({"temperature": 10**400}, ValueError, "it must be 0 .. 1e30"),
        ({"temperature": np.float16(math.inf)}, ValueError, "temperature is inf"),
        ({"temperature": 1e39}, ValueError, "it must be 0 .. 1e30"),
        ({"temperature": "hot"}, TypeError, "temperature must be a number"),
        ({"temperature": True}, TypeError, "temperature must be a number"),
        ({"top_p": 0.0}, ValueError, "top_p is 0.0"),
        ({"top_p": 1.5}, ValueError, "top_p is 1.5"),
        ({"min_p": 1.5}, ValueError, "min_p is 1.5"),
        ({"top_k": -1}, ValueError, "top_k is -1"),
        ({"top_k": 2.0}, TypeError, "top_k must be an int"),
        ({"seed": -1}, ValueError, "seed is -1"),
        ({"seed": 2**63}, ValueError, "seed is 9223372036854775808"),
        ({"seed": 1.5}, TypeError, "seed must be an int"),
        ({"frequency_penalty": 101}, ValueError, "frequency_penalty is 101"),
        ({"presence_penalty": math.inf}, ValueError, "presence_penalty is inf"),
        ({"repetition_penalty": 1e-300}, ValueError, "repetition_penalty is 1e-300"),
        ({"top_logprobs": -1}, ValueError, "top_logprobs is -1"),
        ({"logit_bias": 5}, TypeError, "logit_bias must be a mapping of tokens, got 5"),
        ({"logit_bias": {-1: 5}}, ValueError, "a token of logit_bias is -1"),
        ({"logit_bias": {"a": 5}}, TypeError, "a token of logit_bias must be an int"),
        ({"logit_bias": {3: math.nan}}, ValueError, r"logit_bias\[3\] is nan"),
        ({"heat": 1}, TypeError, "heat"),
    ],
)
def test_wrong_settings_are_refused(options, error, text):
    with pytest.raises(error, match=text):
        Sampling(**options)
