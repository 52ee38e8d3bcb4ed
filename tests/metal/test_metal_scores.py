"""Scores exported by `paged_attention`: their values, and the stores that they cost.

``KVPOOL_METAL_LAUNCHES=2000`` asks for every pair of choices.
"""

import os

import numpy as np
import pytest
from metal_cases import FEATURES, Batch
from pairwise import pairwise

KINDS = ("raw", "mass")
TOLERANCE = 1e-5  # of scores: queries and keys are exact in every dtype
FACTORS = {
    "dtype": ("float32", "float16", "bfloat16"),
    "head_dim": (64, 80, 128, 256),
    "group": (1, 4, 6, 20),
    "block_size": (8, 16, 32),
    "seq_lens": ((1,), (33, 32, 31), (100, 1), (257,), (64, 9, 600)),
    "layout": ("NHD", "HND"),
    "features": ((), *((name,) for name in FEATURES), FEATURES),
    "part_tokens": (32, 512),
}
CHOICES = pairwise(FACTORS)
if not os.environ.get("KVPOOL_METAL_LAUNCHES"):
    CHOICES = CHOICES[::16]


def softmax_of(batch, exported):
    """What the backend makes of scores laid aside, in float64."""
    sinks = batch.options.sinks
    sink = np.full((batch.num_q_heads, 1), -np.inf) if sinks is None else sinks[:, None].astype(float)
    peak = np.maximum(exported.max(axis=-1, keepdims=True), sink)
    peak = np.where(np.isneginf(peak), 0, peak)
    weights = np.exp(exported.astype(float) - peak)
    total = weights.sum(axis=-1, keepdims=True) + np.exp(sink - peak)
    weights /= np.where(total > 0, total, 1)
    return weights.reshape(len(exported), batch.kv_heads, batch.group, -1).mean(axis=2)


def check_scores(batch, kind, factory):
    out, exported = batch.run_with_scores(factory, kind)
    batch.check(out)
    expected = batch.expected_scores(kind)
    if kind == "mass":
        exported = softmax_of(batch, exported)
    size = 1 + np.abs(expected) if kind == "raw" else 1e-3 + np.abs(expected)
    assert exported.shape == expected.shape
    error = np.abs(exported - expected) / size
    assert (error <= TOLERANCE).all(), f"{batch}, {kind}: {np.argwhere(~(error <= TOLERANCE))[:3].tolist()}"
    assert kind == "mass" or not exported[expected == 0].any()


@pytest.mark.long
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("choice", CHOICES, ids=lambda choice: "-".join(str(x) for x in choice.values()))
def test_scores_of_decode_equal_float64(engine, choice, kind):
    batch = Batch(kv_heads=1 if choice["group"] > 4 else 2, **choice)
    check_scores(batch, kind, engine.factory(engine.schedules[-1]))


@pytest.mark.long
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("features", "group"), [((), 20), (("window",), 3), (FEATURES, 3), (FEATURES, 1)])
def test_scores_of_chunks_are_of_the_newest_query(engine, features, group, kind):
    """Both kernels; several tiles of queries, several of heads; rows without any; padding."""
    batch = Batch(
        dtype="float16",
        head_dim=80,
        group=group,
        seq_lens=(90, 300, 40, 20, 5),
        q_lens=(3, 1, 8, 20, 0),
        features=features,
        part_tokens=64,
        padding=2,
        seed=2,
    )
    check_scores(batch, kind, engine.factory(0))


@pytest.mark.long
def test_the_result_has_the_same_bits_with_and_without_scores(engine):
    batch = Batch(dtype="float16", seq_lens=(300, 20), q_lens=(2, 5), features=FEATURES, part_tokens=64)
    plain = batch.run(engine.factory(0))
    for kind in KINDS:
        assert np.array_equal(batch.run_with_scores(engine.factory(0), kind)[0], plain)


@pytest.mark.long
@pytest.mark.parametrize(
    ("group", "head_dim", "part_tokens", "stored"),
    [(1, 64, 512, 1), (4, 128, 512, 1), (4, 128, 64, 1), (4, 80, 64, 1), (16, 80, 64, 16), (20, 64, 512, 20)],
)
def test_raw_scores_cost_one_store_of_four_bytes_per_position(counting_engine, group, head_dim, part_tokens, stored):
    """One for all heads of a group, or one for each where matrix units have them; MLX takes the mean of those."""
    batch = Batch(dtype="float16", head_dim=head_dim, group=group, seq_lens=(256, 256), part_tokens=part_tokens)
    runs, plain = [], []
    batch.run_with_scores(counting_engine.factory(0, runs=runs), "raw")
    batch.run(counting_engine.factory(0, runs=plain))
    stores = runs[0].writes["exported"]
    positions = batch.kv_heads * stored * sum(batch.seq_lens)
    # One lane and four bytes each: nothing is stored twice, and nothing is left for another pass.
    assert stores.bytes == stores.lane_bytes == stores.distinct_bytes == 4 * positions
    assert runs[0].reads["exported"].bytes == 0
    assert len(runs) == len(plain)
    for name in ("q", "k_pool", "v_pool", "tables"):
        assert runs[0].reads[name] == plain[0].reads[name]
    assert runs[0].writes["out"] == plain[0].writes["out"]
    assert (runs[0].threadgroup_barriers, runs[0].threadgroup_memory) == (
        plain[0].threadgroup_barriers,
        plain[0].threadgroup_memory,
    )
    assert runs[0].simd_operations == plain[0].simd_operations
    if part_tokens == 512:  # a simdgroup has 32 tokens at once: 32 lanes store one whole line
        assert stores.transactions == stores.full_transactions == 4 * positions // 128


def test_mass_lays_aside_one_score_per_query_head_and_position(counting_engine):
    runs = []
    batch = Batch(dtype="float16", head_dim=128, group=2, seq_lens=(150, 150), q_lens=(1, 2), part_tokens=64)
    batch.run_with_scores(counting_engine.factory(0, runs=runs), "mass")
    stores = runs[0].writes["exported"]
    assert stores.bytes == stores.distinct_bytes == 4 * batch.num_q_heads * sum(batch.seq_lens)
