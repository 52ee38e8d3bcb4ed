"""Long chunks of queries on the CPU kernels, against dense attention in float64, in every instruction set.

A chunk goes by in tiles of queries (512 rows: queries times query heads of a group) and of keys (128), in panels of up
to three vectors of rows; the lengths here lie around those borders. Slots that no query sees hold NaN throughout.
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

TOLERANCE = {"float32": 2e-6, "float16": 2e-3, "bfloat16": 1e-2}


@pytest.mark.parametrize("case", pairwise(FACTORS), ids=name_of)
def test_chunk_any_shape_matches_float64(case: dict[str, Any]) -> None:
    rng = np.random.default_rng(SEED)
    dim, v_dim = case["dims"]
    num_kv_heads, num_queries, context = 2, case["queries"], case["queries"] + case["prior"]
    num_heads = num_kv_heads * case["group"]
    spec = KVSpec(1, num_kv_heads, dim, case["dtype"], case["block_size"], v_head_dim=v_dim, layout=case["layout"])
    options = some_options(rng, case["features"], num_queries, num_heads, context)
    k, v = normal(rng, context, 2, dim, dtype=spec.dtype), normal(rng, context, 2, v_dim, dtype=spec.dtype)
    q = normal(rng, num_queries, num_heads, dim, dtype=case["tokens"])
    if options.window is not None:  # what fell out of the window may be gone
        unseen = max(0, case["prior"] - options.window + 1)
        kept_k, kept_v = k.copy(), v.copy()
        kept_k[:unseen] = kept_v[:unseen] = np.nan
    else:
        kept_k, kept_v = k, v

    pool = Pool(spec, case["isa"])
    table = pool.add(kept_k, kept_v)
    strided = np.moveaxis(np.ascontiguousarray(np.moveaxis(to_bits(q, case["tokens"]), 0, 2)), 2, 0)
    result = pool.attend(strided, [table], [context], [num_queries], options=options, out_dtype=strided.dtype)
    ref, _ = dense_attention(q, k, v, options=options)

    assert largest_error(result, ref) <= max(TOLERANCE[case["tokens"]], 2e-6)


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("group, num_queries", [(1, 511), (1, 512), (1, 513), (4, 127), (4, 257), (7, 74), (600, 9)])
def test_chunk_around_tiles_of_queries_matches_float64(isa: str, group: int, num_queries: int) -> None:
    rng = np.random.default_rng(SEED)
    context = num_queries + 140
    pool = Pool(KVSpec(1, 1, 32, "float32", 16), isa)
    k, v, q = normal(rng, context, 1, 32), normal(rng, context, 1, 32), normal(rng, num_queries, group, 32)

    result = pool.attend(q, [pool.add(k, v)], [context], [num_queries])

    assert largest_error(result, dense_attention(q, k, v)[0]) <= TOLERANCE["float32"]


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("features", ["none", "all"])
def test_chunk_in_a_batch_gets_the_same_bits_as_alone(isa: str, features: str) -> None:
    rng = np.random.default_rng(SEED)
    queries, lens = [200, 1, 33, 9, 130], [330, 700, 33, 400, 130]
    options = some_options(rng, features, sum(queries), 4, max(lens))
    spec = KVSpec(1, 2, 48, "bfloat16", 16)
    pool, alone = Pool(spec, isa), Pool(spec, isa, num_threads=1)
    tokens = [(normal(rng, n, 2, 48), normal(rng, n, 2, 48)) for n in lens]
    q = normal(rng, sum(queries), 4, 48)

    batched = pool.attend(q, [pool.add(k, v) for k, v in tokens], lens, queries, options=options)

    for row in reversed(range(len(lens))):  # so that its blocks are others
        own = slice(sum(queries[:row]), sum(queries[: row + 1]))
        mine = AttentionOptions(**{name: getattr(options, name) for name in options.features if name != "mask"})
        if options.mask is not None:
            mine = AttentionOptions(**{name: getattr(mine, name) for name in mine.features}, mask=options.mask[own])
        solo = alone.attend(q[own], [alone.add(*tokens[row])], [lens[row]], [queries[row]], options=mine)
        np.testing.assert_array_equal(batched[own], solo, strict=True)


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
def test_chunk_keys_behind_the_mask_never_matter(isa: str, poison: float) -> None:
    rng = np.random.default_rng(SEED)
    k, v, q = normal(rng, 300, 1, 24), normal(rng, 300, 1, 20), normal(rng, 50, 4, 24)
    mask = rng.random((50, 300)) < 0.7
    hidden = rng.random(300) < 0.2
    mask[:, hidden] = False
    ref, _ = dense_attention(q, k, v, options=AttentionOptions(mask=mask))
    k[hidden] = v[hidden] = poison
    pool = Pool(KVSpec(1, 1, 24, "float32", 16, v_head_dim=20), isa)

    result = pool.attend(q, [pool.add(k, v)], [300], [50], options=AttentionOptions(mask=mask))

    assert largest_error(result, ref) <= TOLERANCE["float32"]


@pytest.mark.parametrize("isa", ISAS)
def test_chunk_value_that_only_later_queries_see_stays_theirs(isa: str) -> None:
    rng = np.random.default_rng(SEED)
    k, v, q = normal(rng, 40, 1, 16), normal(rng, 40, 1, 16), normal(rng, 40, 2, 16)
    ref, _ = dense_attention(q, k, v)
    v[30, 0, 3] = np.nan
    pool = Pool(KVSpec(1, 1, 16, "float32", 16), isa)

    result = pool.attend(q, [pool.add(k, v)], [40], [40])

    assert largest_error(result[:30], ref[:30]) <= TOLERANCE["float32"]
    assert np.isnan(result[30:, :, 3]).all()


@pytest.mark.parametrize("isa", ISAS)
def test_chunk_shows_a_nan_of_the_mask_where_it_is_visible(isa: str) -> None:
    rng = np.random.default_rng(SEED)
    k, v, q = normal(rng, 150, 1, 16), normal(rng, 150, 1, 16), normal(rng, 20, 2, 16)
    mask = np.zeros((20, 2, 150), np.float32)
    mask[5, 1, 3] = np.nan
    pool = Pool(KVSpec(1, 1, 16, "float32", 16), isa)

    result = pool.attend(q, [pool.add(k, v)], [150], [20], options=AttentionOptions(mask=mask))

    assert np.isnan(result[5, 1]).all()
    result[5, 1] = dense_attention(q, k, v)[0][5, 1]
    assert largest_error(result, dense_attention(q, k, v)[0]) <= TOLERANCE["float32"]
