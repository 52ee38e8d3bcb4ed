"""Scores of the CPU kernels beyond the conformance kit: the same bits everywhere, memory told."""

import numpy as np
import pytest
from cpu_attention import ISAS, Pool, normal, some_options

from kvpool.config import KVSpec
from kvpool.protocol import AttentionOptions, StepArrays
from kvpool.testing.dense import dense_scores
from kvpool_backends.cpu import CPUBackend, isas

KINDS = ("raw", "mass")
LENS, QUERIES = [1, 700, 45, 2100, 600], [1, 8, 9, 3, 130]  # decode, a window, chunks; some in many parts


def rows_of(isa, dtype="float32", group=3, num_threads=2):
    """A pool with one sequence per entry of `LENS`, queries, and the arguments that attend to all of them."""
    rng = np.random.default_rng(7)
    pool = Pool(KVSpec(1, 2, 33, dtype, 5), isa, num_threads, num_blocks=720)
    tables = [pool.add(*(normal(rng, n, 2, 33, dtype=dtype) for _ in "kv")) for n in LENS]
    return pool, tables, normal(rng, sum(QUERIES), 2 * group, 33, dtype=dtype)


def scores_of(pool, q, tables, lens, queries, kind, out=None, **more):
    out = np.full((len(lens), 2, max(lens)), 7, np.float32) if out is None else out
    pool.attend(q, tables, lens, queries, scores=kind, scores_out=out, **more)
    return out


def newest_of(queries):
    return np.cumsum(queries) - 1


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("features", ["none", "all"])
@pytest.mark.parametrize("isa", ISAS)
def test_scores_of_a_row_depend_on_nothing_but_the_row(isa, features, kind):
    pool, tables, q = rows_of(isa)
    options = some_options(np.random.default_rng(1), features, len(q), 6, max(LENS))
    together = scores_of(pool, q, tables, LENS, QUERIES, kind, options=options)
    again = scores_of(rows_of(isa, num_threads=1)[0], q, tables, LENS, QUERIES, kind, options=options)
    assert np.array_equal(together, again)
    begin = 0
    for row, (table, length, n) in enumerate(zip(tables, LENS, QUERIES, strict=True)):
        mine = slice(begin, begin + n)
        own = options
        if options.mask is not None:
            own = AttentionOptions(
                options.window, options.soft_cap, options.sinks, options.alibi_slopes, options.mask[mine]
            )
        alone = scores_of(pool, q[mine], [table], [length], [n], kind, options=own)
        assert np.array_equal(together[row, :, :length], alone[0])
        assert not together[row, :, length:].any()
        begin += n


@pytest.mark.parametrize("kind", KINDS)
def test_scores_over_64k_tokens_keep_their_digits(kind):
    rng, length = np.random.default_rng(2), 65_536
    for isa in isas():
        pool = Pool(KVSpec(1, 2, 16, "float32", 128), isa, num_blocks=513)
        k = normal(rng, length, 2, 16)
        table, q = pool.add(k, normal(rng, length, 2, 16)), normal(rng, 1, 4, 16)
        got = scores_of(pool, q, [table], [length], [1], kind)[0]
        right = dense_scores(q, k, kind)
        assert np.abs(got - right).max() <= (2e-6 if kind == "raw" else 4e-6 * right.max())


def test_a_nan_of_the_mask_is_in_the_score_where_it_is_visible():
    pool, tables, q = rows_of(isas()[-1])
    mask = np.zeros((len(q), max(LENS)), np.float32)
    mask[newest_of(QUERIES)[1], 5] = np.nan
    for kind in KINDS:
        got = scores_of(pool, q, tables, LENS, QUERIES, kind, options=AttentionOptions(mask=mask))
        assert np.isnan(got[1, :, 5]).all()
        assert not np.isnan(np.delete(got, 1, axis=0)).any()


def test_memory_of_scores_is_reported():
    """Raw needs nothing but the array; mass four bytes per query head and token, and two per row and head."""
    backend = CPUBackend(KVSpec(1, 2, 16, "float32", 8), 40)
    q = np.ones((2, 4, 16), np.float32)
    plan = StepArrays(np.arange(1, 37).reshape(2, 18), np.array([130, 64]), np.array([0, 1, 2]))
    assert backend.memory().scores_nbytes == 0
    _, s = backend.attend(backend.prepare(plan), 0, q, scores="raw")
    assert backend.memory().scores_nbytes == 0 and s.nbytes == 2 * 2 * 130 * 4
    backend.attend(backend.prepare(plan), 0, q, scores="mass")
    laid_aside = 4 * 4 * (144 + 64)  # rows begin at cache lines
    assert laid_aside < backend.memory().scores_nbytes <= laid_aside + 2 * (2 * 4 * 4 + 8)
    memory = backend.memory()
    assert memory.pool_nbytes == backend.spec.pool_nbytes(40)
    assert memory.scratch_nbytes == backend.store.scratch_nbytes >= memory.scores_nbytes
