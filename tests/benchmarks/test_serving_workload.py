"""Workloads of the serving harness: seeded, of the lengths asked for, and true to their trace."""

from __future__ import annotations

import numpy as np
import pytest

from benchmarks.replay import synthetic_trace
from benchmarks.serving.workload import Lengths, make_workload, trace_workload


def same(a, b):
    return all(np.array_equal(x, y) for x, y in zip(a.prompts, b.prompts, strict=True)) and np.array_equal(
        a.max_tokens, b.max_tokens
    )


@pytest.mark.parametrize(
    ("text", "kind", "first", "last", "sigma"),
    [
        ("64", "fixed", 64, 64, 0),
        ("uniform:3:9", "uniform", 3, 9, 0),
        ("lognormal:20:0.5", "lognormal", 20, 160, 0.5),
        ("lognormal:20:1:40", "lognormal", 20, 40, 1),
    ],
)
def test_lengths_are_read_and_drawn_within_their_limits(text, kind, first, last, sigma):
    lengths = Lengths.parse(text)
    assert (lengths.kind, lengths.first, lengths.last, lengths.sigma) == (kind, first, last, sigma)
    drawn = lengths.draw(np.random.default_rng(1), 4000)
    assert drawn.min() >= (1 if kind == "lognormal" else first)
    assert drawn.max() <= last
    if kind != "lognormal" or last == 160:
        assert drawn.mean() == pytest.approx(lengths.mean, rel=0.05)
    assert np.median(drawn) == pytest.approx((first + last) / 2 if kind == "uniform" else first, abs=1)


def test_a_target_of_tokens_takes_the_least_number_of_requests():
    output = Lengths.parse("uniform:1:30")
    for samples in (1, 3):
        work = make_workload(Lengths.parse("4"), output, tokens_target=1000, samples=samples)
        assert work.num_tokens >= 1000 > work.num_tokens - samples * work.max_tokens[-1]
        assert same(work, make_workload(Lengths.parse("4"), output, requests=len(work), samples=samples))


@pytest.mark.parametrize("scale", [1, 7])
def test_a_trace_keeps_its_times_lengths_and_shared_prefixes(scale):
    trace = synthetic_trace(seed=3, sessions=5)
    work = trace_workload(trace, scale=scale, vocab_size=300)
    assert len(work) == len(trace)
    assert np.allclose(np.diff(work.arrivals), np.diff(trace.timestamps) / 1e3)
    assert work.arrivals[0] == 0
    assert [len(p) for p in work.prompts] == [-(-n // scale) for n in trace.prompts.tolist()]
    assert work.max_tokens.tolist() == [max(1, -(-n // scale)) for n in trace.outputs.tolist()]
    assert all(p.min() >= 0 and p.max() < 300 for p in work.prompts)
    ids = [trace.ids_of(row) for row in range(len(trace))]
    for i in range(0, len(trace), 3):
        for j in range(i):
            n = min(len(ids[i]), len(ids[j]))
            differ = np.flatnonzero(ids[i][:n] != ids[j][:n])
            shared = (int(differ[0]) if len(differ) else n) * trace.block_size
            a, b = (work.prompts[k][: -(-shared // scale)] for k in (i, j))
            m = min(len(a), len(b))
            assert np.array_equal(a[:m], b[:m])
