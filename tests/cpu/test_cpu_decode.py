"""Attention of the CPU kernels, by decode and by chunks, against dense attention in float64, in each instruction set.

Decode and short windows of queries: a context goes by in parts of 512 tokens and tiles of 32. A chunk goes by in tiles
of queries (512 rows: queries times query heads of a group) and of keys (128), in panels of up to three vectors of rows.
The lengths here lie around those borders. Slots that no query sees hold NaN throughout.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from cpu_attention import FACTORS, ISAS, SEED, Pool, largest_error, name_of, normal, some_options, to_bits
from pairwise import pairwise

from kvpool.config import KVSpec
from kvpool.protocol import AttentionOptions
from kvpool.testing.dense import dense_attention

TOLERANCE = 2e-6  # of float32 results: K, V and q are exact in each dtype
ROUNDED = {"float32": TOLERANCE, "float16": 2e-3, "bfloat16": 1e-2}
DECODE: dict[str, tuple[Any, ...]] = FACTORS | {
    "block_size": (1, 3, 8, 16, 32, 64),
    "dims": ((128, 128), (64, 64), (80, 80), (96, 96), (192, 128), (256, 256), (112, 33), (3, 256), (1, 24), (30, 30)),
    "group": (1, 2, 3, 4, 5, 8),
    "queries": (1, 2, 5, 8),
    "prior": (0, 1, 30, 31, 32, 130, 511, 512, 700),
}
CHUNKS = pairwise(FACTORS)
NUM_QUERIES = pytest.mark.parametrize("num_queries", [2, 50], ids=["decode", "chunk"])


@pytest.mark.parametrize(
    "case",
    [*pairwise(DECODE), CHUNKS[0], *(pytest.param(case, marks=pytest.mark.long) for case in CHUNKS[1:])],
    ids=name_of,
)
def test_attention_of_any_shape_equals_float64(case: dict[str, Any]) -> None:
    rng = np.random.default_rng(SEED)
    (dim, v_dim), queries, context = case["dims"], case["queries"], case["prior"] + case["queries"]
    heads, options = 2 * case["group"], some_options(rng, case["features"], case["queries"], 2 * case["group"], context)
    k, v = normal(rng, context, 2, dim, dtype=case["dtype"]), normal(rng, context, 2, v_dim, dtype=case["dtype"])
    q = normal(rng, queries, heads, dim, dtype=case["tokens"])
    stored_k, stored_v = k.copy(), v.copy()
    if options.window is not None:  # what fell out of the window may be gone
        unseen = max(0, case["prior"] - options.window + 1)
        stored_k[:unseen] = stored_v[:unseen] = np.nan
    pool = Pool(KVSpec(2, 2, dim, case["dtype"], case["block_size"], v_dim, case["layout"]), case["isa"])
    table = pool.add(stored_k, stored_v)
    given = np.moveaxis(np.ascontiguousarray(np.moveaxis(to_bits(q, case["tokens"]), 0, 2)), 2, 0)  # strided
    reference = dense_attention(q, k, v, None, options)[0]
    seen = np.abs(reference).max(axis=(0, 2)) > 0  # a head that sees nothing must be exactly 0
    for dtype, room in ((np.float32, TOLERANCE), (given.dtype, ROUNDED[case["tokens"]])):
        out = pool.attend(given, [table], [context], [queries], options=options, out_dtype=dtype)
        assert not out[:, ~seen].any()
        if seen.any():
            assert largest_error(out[:, seen], reference[:, seen]) <= room


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("group, num_queries", [(1, 511), (1, 512), (1, 513), (4, 127), (4, 257), (7, 74), (600, 9)])
def test_chunk_around_tiles_of_queries_equals_float64(isa: str, group: int, num_queries: int) -> None:
    rng = np.random.default_rng(SEED)
    context = num_queries + 140
    pool = Pool(KVSpec(1, 1, 32, "float32", 16), isa)
    k, v, q = normal(rng, context, 1, 32), normal(rng, context, 1, 32), normal(rng, num_queries, group, 32)
    result = pool.attend(q, [pool.add(k, v)], [context], [num_queries])
    assert largest_error(result, dense_attention(q, k, v)[0]) <= TOLERANCE


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize(("dtype", "num_queries"), [("float32", 1), ("float16", 1), ("bfloat16", 1), ("float32", 12)])
def test_attention_over_64k_tokens_keeps_its_digits(dtype: str, num_queries: int, isa: str) -> None:
    rng, context = np.random.default_rng(SEED), 65_536
    pool = Pool(KVSpec(1, 1, 64, dtype, 128), isa)
    k, v = normal(rng, context, 1, 64, dtype=dtype), normal(rng, context, 1, 64, dtype=dtype)
    q = normal(rng, num_queries, 4, 64)
    out = pool.attend(q, [pool.add(k, v)], [context], [num_queries])
    assert largest_error(out, dense_attention(q, k, v)[0]) <= TOLERANCE


def scored(pool: Pool, kind: str, q: np.ndarray, tables: list[np.ndarray], lens: list[int], queries: list[int],
           options: AttentionOptions) -> tuple[np.ndarray, np.ndarray]:  # fmt: skip
    """Results and scores ``[B, Hk, C]``."""
    scores = np.full((len(lens), pool.spec.num_kv_heads, max(lens)), 7, np.float32)
    return pool.attend(q, tables, lens, queries, options=options, scores=kind, scores_out=scores), scores


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("kind", ["raw", "mass"])
@pytest.mark.parametrize("features", ["none", "all"])
def test_row_gets_the_same_bits_alone_and_in_any_batch(isa: str, features: str, kind: str) -> None:
    """Results and scores, in whatever place and blocks, on one thread or more; results without scores, too."""
    rng = np.random.default_rng(SEED)
    spec, lens, queries = KVSpec(1, 2, 48, "bfloat16", 16), [330, 1, 513, 1600, 700, 130], [200, 1, 1, 3, 8, 130]
    sizes = zip(lens, queries, strict=True)
    rows = [(normal(rng, n, 2, 48), normal(rng, n, 2, 48), normal(rng, m, 4, 48)) for n, m in sizes]
    whole = some_options(rng, features, sum(queries), 4, max(lens))
    masks = [None] * 6 if whole.mask is None else np.split(whole.mask, np.cumsum(queries)[:-1])

    def with_mask(mask: np.ndarray | None) -> AttentionOptions:
        others = {name: getattr(whole, name) for name in whole.features if name != "mask"}
        return AttentionOptions(**others, mask=mask)

    alone, scores = [], []
    for (k, v, q), n, m, mask in zip(rows, lens, queries, masks, strict=True):
        pool = Pool(spec, isa, num_threads=1)
        tables = [pool.add(k, v)]
        alone.append(pool.attend(q, tables, [n], [m], options=with_mask(mask)))
        one, seen = scored(pool, kind, q, tables, [n], [m], with_mask(mask))
        scores.append(np.pad(seen[0], [(0, 0), (0, max(lens) - n)]))
        np.testing.assert_array_equal(one, alone[-1])
    for order, threads in (([0, 1, 2, 3, 4, 5], 1), ([5, 4, 2, 0, 3, 1], 2), ([3, 1, 0, 5, 2, 4], 3)):
        pool = Pool(spec, isa, num_threads=threads)
        tables = [pool.add(*rows[i][:2]) for i in order]
        options = with_mask(None if whole.mask is None else np.concatenate([masks[i] for i in order]))
        q = np.concatenate([rows[i][2] for i in order])
        together, seen = scored(pool, kind, q, tables, [lens[i] for i in order], [queries[i] for i in order], options)
        np.testing.assert_array_equal(together, np.concatenate([alone[i] for i in order]))
        np.testing.assert_array_equal(seen, [scores[i] for i in order])


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("window", [None, 150])
def test_chunk_cut_in_two_gets_the_same_bits(isa: str, window: int | None) -> None:
    rng = np.random.default_rng(SEED)
    pool, options = Pool(KVSpec(1, 1, 40, "float32", 16), isa), AttentionOptions(window=window)
    k, v, q = normal(rng, 500, 1, 40), normal(rng, 500, 1, 40), normal(rng, 400, 3, 40)
    table = pool.add(k, v)
    whole = pool.attend(q, [table], [500], [400], options=options)
    for cut in (9, 128, 171, 390):
        head = pool.attend(q[:cut], [table], [100 + cut], [cut], options=options)
        rest = pool.attend(q[cut:], [table], [500], [400 - cut], options=options)
        np.testing.assert_array_equal(np.concatenate([head, rest]), whole, strict=True)


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("poison", [np.nan, np.inf, -np.inf])
@NUM_QUERIES
def test_tokens_that_a_mask_hides_from_all_never_matter(num_queries: int, poison: float, isa: str) -> None:
    """A query that sees nothing gets 0, also with every part empty."""
    rng = np.random.default_rng(SEED)
    pool = Pool(KVSpec(1, 2, 64, "float32", 16, v_head_dim=20), isa)
    k, v, q = normal(rng, 1200, 2, 64), normal(rng, 1200, 2, 20), normal(rng, num_queries, 4, 64)
    mask = rng.random((num_queries, 1200)) < 0.5
    mask[:, rng.random(1200) < 0.4] = False
    mask[:, 512:1024] = False  # a whole part
    mask[1] = False
    hidden, options = ~mask.any(axis=0), AttentionOptions(mask=mask)
    reference = dense_attention(q, k, v, None, options)[0]
    k[hidden], v[hidden] = poison, poison
    out = pool.attend(q, [pool.add(k, v)], [1200], [num_queries], options=options)
    assert not out[1].any()
    assert largest_error(out, reference) <= TOLERANCE


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("context", [512, 1200])
@NUM_QUERIES
def test_nan_of_the_mask_shows_where_it_is_visible(num_queries: int, context: int, isa: str) -> None:
    """Also when it fills all of a part, which then has no largest score; other queries and heads keep their digits."""
    rng = np.random.default_rng(SEED)
    pool = Pool(KVSpec(1, 1, 64, "float32", 16), isa)
    k, v, q = normal(rng, context, 1, 64), normal(rng, context, 1, 64), normal(rng, num_queries, 2, 64)
    mask = np.zeros((num_queries, 2, context), np.float32)
    reference = dense_attention(q, k, v)[0]
    mask[1, 0, :400] = np.nan
    out = pool.attend(q, [pool.add(k, v)], [context], [num_queries], options=AttentionOptions(mask=mask))
    assert np.isnan(out[1, 0]).all()
    out[1, 0] = reference[1, 0]
    assert largest_error(out, reference) <= TOLERANCE


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("window", [None, 4, 40])
@pytest.mark.parametrize("is_masked", [False, True])
@pytest.mark.parametrize("queries", [5, 40])
def test_query_takes_nothing_from_tokens_that_it_does_not_see(
    isa: str, dtype: str, window: int | None, is_masked: bool, queries: int
) -> None:
    """An infinite value or a NaN reaches the queries and heads that see its token, and changes no bit of the others."""
    rng, context, heads = np.random.default_rng(SEED), 100, 4
    k, v = normal(rng, context, 2, 64, dtype=dtype), normal(rng, context, 2, 64, dtype=dtype)
    q, mask = normal(rng, queries, 4, 64), rng.random((queries, heads, context)) < 0.5 if is_masked else None
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
