"""Scores of the CPU kernels beyond the conformance kit. That they depend on the row alone: test_cpu_decode.py."""

import numpy as np
import pytest
from cpu_attention import Pool, normal

from kvpool.config import KVSpec
from kvpool.protocol import AttentionOptions, StepArrays
from kvpool.testing.dense import dense_scores
from kvpool_backends.cpu import CPUBackend, isas

KINDS = ("raw", "mass")
LENS, QUERIES = [1, 700, 45, 2100, 600], [1, 8, 9, 3, 130]  # decode, a window, chunks; some in many parts


def scores_of(pool, q, tables, lens, queries, kind, out=None, **more):
    out = np.full((len(lens), 2, max(lens)), 7, np.float32) if out is None else out
    pool.attend(q, tables, lens, queries, scores=kind, scores_out=out, **more)
    return out


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
    rng = np.random.default_rng(7)
    pool = Pool(KVSpec(1, 2, 33, "float32", 5), isas()[-1], num_blocks=720)
    tables = [pool.add(*(normal(rng, n, 2, 33) for _ in "kv")) for n in LENS]
    q, mask = normal(rng, sum(QUERIES), 6, 33), np.zeros((sum(QUERIES), max(LENS)), np.float32)
    mask[sum(QUERIES[:2]) - 1, 5] = np.nan
    for kind in KINDS:
        got = scores_of(pool, q, tables, LENS, QUERIES, kind, options=AttentionOptions(mask=mask))
        assert np.isnan(got[1, :, 5]).all()
        assert not np.isnan(np.delete(got, 1, axis=0)).any()


def test_raw_scores_take_no_scratch_and_mass_four_bytes_per_query_head_and_token():
    plan, q = StepArrays(np.ones((1, 8192), int), np.array([65_536]), np.array([0, 1])), np.ones((1, 4, 16), np.float32)
    taken = {}
    for kind in (None, *KINDS):
        backend = CPUBackend(KVSpec(1, 2, 16, "float32", 8), 2)
        backend.attend(backend.prepare(plan), 0, q, scores=kind)
        taken[kind] = backend.store.scratch_nbytes
    assert taken["raw"] - taken[None] <= 4096  # a page, to which scratch is rounded
    assert 0 <= taken["mass"] - taken[None] - 4 * 4 * 65_536 <= 8192
