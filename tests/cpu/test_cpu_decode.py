"""Decode and short windows of queries on the CPU kernels, against dense attention in float64, in every instruction set.

A context goes by in parts of 512 tokens and tiles of 32, in steps of 2 to 4; the lengths lie around those borders.
Slots that no query sees hold NaN throughout.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from cpu_attention import FACTORS, ISAS, SEED, Pool, largest_error, name_of, normal, some_options, to_bits
from pairwise import pairwise

from kvpool.config import KVSpec
from kvpool.protocol import AttentionOptions
from kvpool.testing.dense import dense_attention, round_to

TOLERANCE = 2e-6  # for every dtype: K, V and q are exact, results come in float32
DECODE: dict[str, tuple[Any, ...]] = FACTORS | {
    "block_size": (1, 3, 8, 16, 32, 64),
    "dims": ((128, 128), (64, 64), (80, 80), (96, 96), (192, 128), (256, 256), (112, 33), (3, 256), (1, 24), (30, 30)),
    "group": (1, 2, 3, 4, 5, 8),
    "queries": (1, 2, 5, 8),
    "prior": (0, 1, 30, 31, 32, 130, 511, 512, 700),
}


@pytest.mark.parametrize("case", pairwise(DECODE), ids=name_of)
def test_decode_equals_dense_attention(case: dict[str, Any]) -> None:
    rng = np.random.default_rng(SEED)
    (dim, v_dim), queries, context = case["dims"], case["queries"], case["prior"] + case["queries"]
    spec = KVSpec(2, 2, dim, case["dtype"], case["block_size"], v_dim, case["layout"])
    pool, heads = Pool(spec, case["isa"]), 2 * case["group"]
    k, v = normal(rng, context, 2, dim, dtype=case["dtype"]), normal(rng, context, 2, v_dim, dtype=case["dtype"])
    q = normal(rng, queries, heads, dim, dtype=case["tokens"])
    options = None if case["features"] == "none" else some_options(rng, case["features"], queries, heads, context)
    stored_k, stored_v = k.copy(), v.copy()
    if options is not None and options.window is not None:  # what the window has left behind was never written
        unseen = max(0, context - queries + 1 - options.window)
        stored_k[:unseen], stored_v[:unseen] = np.nan, np.nan
    out = pool.attend(to_bits(q, case["tokens"]), [pool.add(stored_k, stored_v)], [context], [queries], options=options)
    reference = dense_attention(q, k, v, None, options)[0]
    seen = np.abs(reference).max(axis=(0, 2)) > 0  # a head that sees nothing must be exactly 0
    assert np.array_equal(out[:, ~seen], np.zeros_like(out[:, ~seen]))
    if seen.any():
        assert largest_error(out[:, seen], reference[:, seen]) <= TOLERANCE


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
def test_decode_over_64k_tokens_keeps_its_digits(dtype: str, isa: str) -> None:
    rng = np.random.default_rng(SEED)
    context = 65536
    pool = Pool(KVSpec(1, 1, 64, dtype, 128), isa)
    k, v = normal(rng, context, 1, 64, dtype=dtype), normal(rng, context, 1, 64, dtype=dtype)
    q = normal(rng, 1, 4, 64)
    out = pool.attend(q, [pool.add(k, v)], [context], [1])
    assert largest_error(out, dense_attention(q, k, v)[0]) <= TOLERANCE


@pytest.mark.parametrize("out_dtype", ["float16", "bfloat16"])
@pytest.mark.parametrize("isa", ISAS)
def test_decode_rounds_results_to_nearest(isa: str, out_dtype: str) -> None:
    rng = np.random.default_rng(SEED)
    pool = Pool(KVSpec(1, 2, 80, "bfloat16", 16), isa)
    k, v, q = normal(rng, 600, 2, 80), normal(rng, 600, 2, 80), normal(rng, 2, 6, 80)
    table = pool.add(k, v)
    exact = pool.attend(q, [table], [600], [2])
    rounded = pool.attend(q, [table], [600], [2], out_dtype=np.uint16 if out_dtype == "bfloat16" else np.float16)
    assert np.array_equal(rounded, round_to(exact, out_dtype))


@pytest.mark.parametrize("isa", ISAS)
def test_decode_of_a_row_depends_on_nothing_but_the_row(isa: str) -> None:
    """Bit for bit: alone or in a batch, in whatever place and blocks, on one thread or two."""
    rng = np.random.default_rng(SEED)
    spec = KVSpec(1, 2, 64, "bfloat16", 16)
    lens, queries = [1, 31, 513, 1600, 700], [1, 1, 3, 1, 8]
    rows = [
        (normal(rng, n, 2, 64), normal(rng, n, 2, 64), normal(rng, m, 8, 64))
        for n, m in zip(lens, queries, strict=True)
    ]
    alone = []
    for (k, v, q), n, m in zip(rows, lens, queries, strict=True):
        pool = Pool(spec, isa, num_threads=1)
        alone.append(pool.attend(q, [pool.add(k, v)], [n], [m]))
    for order in ([0, 1, 2, 3, 4], [4, 2, 0, 3, 1]):
        for threads in (1, 2, 3):
            pool = Pool(spec, isa, num_threads=threads)
            tables = [pool.add(*rows[i][:2]) for i in order]
            q = np.concatenate([rows[i][2] for i in order])
            together = pool.attend(q, tables, [lens[i] for i in order], [queries[i] for i in order])
            assert np.array_equal(together, np.concatenate([alone[i] for i in order]))


@pytest.mark.parametrize("isa", ISAS)
def test_decode_never_reads_what_a_mask_hides_from_all(isa: str) -> None:
    """Hidden keys and values may be NaN; a query that sees nothing gets 0, also with every part empty."""
    rng = np.random.default_rng(SEED)
    pool = Pool(KVSpec(1, 2, 64, "float32", 16), isa)
    k, v, q = normal(rng, 1200, 2, 64), normal(rng, 1200, 2, 64), normal(rng, 2, 4, 64)
    mask = rng.random((2, 1200)) < 0.5
    mask[:, rng.random(1200) < 0.4] = False
    mask[:, 512:1024] = False  # a whole part
    mask[1] = False
    hidden = ~mask.any(axis=0)
    stored_k, stored_v = k.copy(), v.copy()
    stored_k[hidden], stored_v[hidden] = np.nan, np.nan
    options = AttentionOptions(mask=mask)
    out = pool.attend(q, [pool.add(stored_k, stored_v)], [1200], [2], options=options)
    assert np.array_equal(out[1], np.zeros_like(out[1]))
    assert largest_error(out[:1], dense_attention(q, k, v, None, options)[0][:1]) <= TOLERANCE


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("context", [512, 1200])
def test_decode_shows_a_nan_of_the_mask_where_it_is_visible(isa: str, context: int) -> None:
    """Also when it fills all of a part, which then has no largest score; the other query and head keep their digits."""
    rng = np.random.default_rng(SEED)
    pool = Pool(KVSpec(1, 1, 64, "float32", 16), isa)
    k, v, q = normal(rng, context, 1, 64), normal(rng, context, 1, 64), normal(rng, 2, 2, 64)
    mask = np.zeros((2, 2, context), np.float32)
    reference = dense_attention(q, k, v)[0]
    mask[1, 0, :512] = np.nan
    out = pool.attend(q, [pool.add(k, v)], [context], [2], options=AttentionOptions(mask=mask))
    assert np.isnan(out[1, 0]).all()
    out[1, 0] = reference[1, 0]
    assert largest_error(out, reference) <= TOLERANCE


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("window", [None, 4, 40])
@pytest.mark.parametrize("is_masked", [False, True])
def test_decode_of_a_query_takes_nothing_from_tokens_it_does_not_see(
    isa: str, dtype: str, window: int | None, is_masked: bool
) -> None:
    """An infinite value or a NaN reaches the queries and heads that see its token, and changes no bit of the others."""
    rng, context, queries, heads = np.random.default_rng(SEED), 100, 5, 4
    k, v, q = normal(rng, context, 2, 64, dtype=dtype), normal(rng, context, 2, 64, dtype=dtype), normal(rng, 5, 4, 64)
    mask = rng.random((queries, heads, context)) < 0.5 if is_masked else None
    options = AttentionOptions(window=window, mask=mask)
    positions, tokens = np.arange(context - queries, context)[:, None], np.arange(context)
    seen = (tokens <= positions) & (tokens > positions - (window or context))
    sees = np.repeat(seen[:, None], heads, 1) if mask is None else seen[:, None] & mask
    results = []
    for bad in (None, (range(60, 64), np.inf), (range(95, 100), np.nan), (range(98, 100), np.inf)):
        stored = v.copy()
        if bad is not None:
            stored[bad[0]] = bad[1]
        pool = Pool(KVSpec(1, 2, 64, dtype, 8), isa)
        results.append(pool.attend(q, [pool.add(k, stored)], [context], [queries], options=options))
        if bad is not None:
            reached = sees[:, :, bad[0]].any(-1)
            assert np.array_equal(results[-1][~reached], results[0][~reached])
            assert not np.isfinite(results[-1][reached]).any()
