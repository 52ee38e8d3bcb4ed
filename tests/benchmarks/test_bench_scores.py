"""The part "scores" of ``python -m benchmarks.attention``: what it compares, and that faults are seen."""

from dataclasses import replace

import numpy as np
import pytest
from test_bench_attention import SMALL, NumpyKernels

from benchmarks.attention import scores
from benchmarks.attention.bench import Bench
from benchmarks.attention.cache import WrongResult

SETTINGS = replace(SMALL, parts=("scores",), threads=(1,))


@pytest.fixture(autouse=True)
def small(monkeypatch):
    monkeypatch.setattr(scores, "RUN_NBYTES", 1)


def test_every_case_has_a_row_per_kind():
    rows = list(scores.rows(Bench(NumpyKernels(), SETTINGS)))
    assert [(row.batch, row.part) for row in rows] == [(b, kind) for b in (1, 3) for kind in ("raw", "mass")]
    assert all(row.yardstick == "decode" and row.block_size == 16 for row in rows)
    assert [row.scores_nbytes for row in rows] == [b * 2 * 40 * 4 for b in (1, 1, 3, 3)]


def test_scratch_of_mass_is_counted():
    from kvpool_backends.cpu import _kernels

    raw, mass = list(scores.rows(Bench(_kernels, replace(SETTINGS, batches=(1,)))))
    assert raw.scores_nbytes == 2 * 40 * 4
    assert mass.scores_nbytes == raw.scores_nbytes + 4 * 48 * 4 + 2 * 4 * 4 + 8


@pytest.mark.parametrize("kind", scores.KINDS)
@pytest.mark.parametrize("layout", ["NHD", "HND"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_wrong_scores_are_refused(kind, layout, dtype):
    kernels = NumpyKernels()
    bench = Bench(kernels, replace(SMALL, layout=layout))
    rng = np.random.default_rng(1)
    spec = bench.spec(dtype, 16)
    planes = tuple(scores.random_elements(rng, 3 * 48 * 2 * 8, dtype) for _ in "kv")
    call = bench.call(spec, planes, batch=3, context=43, num_threads=1, rng=rng)
    scores.Scores(call, kind).check(rng)
    kernels.wrong = 0.001
    with pytest.raises(WrongResult, match=f"{kind} scores"):
        scores.Scores(call, kind).check(rng)
