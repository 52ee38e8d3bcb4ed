"""Attention over planes of 8 and 4 bits: within 1e-3 of dequantize-then-float64, the bytes of the format, the text.

``KVPOOL_METAL_LAUNCHES=2000`` asks for every pair of choices.
"""

import dataclasses
import os

import numpy as np
import pytest
from metal_cases import FEATURES, choices, shape_of
from metal_packed import BITS, PackedBatch

from kvpool_backends.mlx.metal_kernels import INPUTS, attention_name

FACTORS = {
    "bits": BITS,
    "size": (32, 64),
    "dtype": ("float32", "float16", "bfloat16"),
    "head_dim": (64, 128, 192, 256, (512, 64)),
    "v_head_dim": (None, 64),
    "group": (1, 4, 5, 8, 12, 16, 32, 64),
    "queries": (1, 12),
    "block_size": (8, 16, 32),
    "seq_lens": ((1,), (33, 32, 31), (100, 1), (257,), (64, 9, 600)),
    "layout": ("NHD", "HND", "stacked"),
    "features": ((), *((name,) for name in FEATURES), FEATURES),
    "part_tokens": (32, 512),
}
CHOICES = choices(FACTORS, ("bits", "head_dim", "group", "queries", "features"))
if not os.environ.get("KVPOOL_METAL_LAUNCHES"):
    CHOICES = CHOICES[::10]
CONTEXTS = (64, 1000, 4096)
EXACT = 2e-5  # of float32 results: scale * sum(q n) and bias * sum(q) cancel


def batch_of(bits=(8, 8), **choice):
    return PackedBatch(k_bits=bits[0], v_bits=bits[1], **choice)


def error(batch, out):
    """The largest absolute error, of unit-variance tokens and queries."""
    assert np.isfinite(out).all()
    return np.abs(out - batch.expected).max()


def check_decode(factory, bits=(8, 4), contexts=CONTEXTS, features=(), dtype="float32", **choice):
    for context in contexts:
        choice = {"head_dim": 64, "kv_heads": 1, "group": 2, "features": features, "dtype": dtype} | choice
        batch = batch_of(bits, seq_lens=(context,), **choice)
        found = error(batch, batch.run(factory))
        assert found <= (EXACT if dtype == "float32" else 1e-3), f"{batch}: {found:.2g}"


# --------------------------------------------------------------------------------------------- results


@pytest.mark.parametrize("features", [(), ("sinks",)])
@pytest.mark.parametrize("bits", [(8, 8), (4, 4)])
def test_decode_is_within_1e_3_from_64_to_4096_tokens(engine, bits, features):
    check_decode(engine.factory(1), bits, features=features, dtype="float16")


@pytest.mark.parametrize("choice", CHOICES, ids=str)
def test_every_pair_of_choices_equals_float64(engine, choice):
    choice = shape_of(choice)
    if choice.get("latent"):
        choice["bits"] = (choice["bits"][0] or 8,) * 2
    batch = batch_of(**choice)
    for schedule in engine.schedules[: None if os.environ.get("KVPOOL_METAL_SWEEP") else 2]:
        batch.check(batch.run(engine.factory(schedule)))


def test_a_row_gets_the_same_bits_in_any_batch(engine):
    batch = batch_of((8, 4), dtype="float16", seq_lens=(257, 40, 1), part_tokens=64)
    together = batch.run(engine.factory(0))
    for seed in (1, 2):
        # Other schedules; rows after it that are longer and shorter.
        assert np.array_equal(batch.run(engine.factory(seed)), together)
    first = dataclasses.replace(batch, seq_lens=(257,))
    kept = [(batch.parts[0], batch.content[0])]
    first.__dict__["parts"], first.__dict__["content"] = ([row] for row in kept[0])
    first.__dict__["q"] = batch.q[:1]
    assert np.array_equal(first.run(engine.factory(0)), together[:1])


@pytest.mark.parametrize("kind", ["raw", "mass"])
def test_scores_of_packed_keys_are_those_of_their_floats(engine, kind):
    batch = batch_of((4, 8), seq_lens=(70, 33), kv_heads=1)
    out, exported = batch.run_with_scores(engine.factory(0), kind)
    assert error(batch, out) <= EXACT
    if kind == "raw":
        np.testing.assert_allclose(exported, batch.expected_scores("raw"), atol=EXACT)
    else:
        weights = np.exp(exported.astype(float) - exported.max(axis=-1, keepdims=True))
        weights /= weights.sum(axis=-1, keepdims=True)
        np.testing.assert_allclose(weights.mean(axis=1, keepdims=True), batch.expected_scores("mass"), atol=EXACT)


# ---------------------------------------------------------------------------------------------- counts


@pytest.mark.parametrize(
    ("bits", "size", "group", "each"),
    [((8, 8), 64, 4, 1.0625), ((4, 4), 64, 1, 0.5625), ((8, 4), 64, 8, 0.8125), ((4, 8), 128, 4, 0.78125)],
)
def test_decode_reads_the_bytes_of_the_format(counting_engine, bits, size, group, each):
    runs = []
    batch = batch_of(bits, size=size, dtype="float16", head_dim=128, group=group, kv_heads=2, seq_lens=(490,))
    batch.check(batch.run(counting_engine.factory(0, runs=runs)))
    (run,) = runs
    format_nbytes = 490 * 2 * 2 * 128 * each
    assert format_nbytes == 490 * batch.spec.token_nbytes / batch.spec.num_layers
    planes = {name: run.reads[name].bytes for name in INPUTS[attention_name(batch.spec)] if name[:2] in ("k_", "v_")}
    assert len(planes) == 6
    assert sum(planes.values()) == format_nbytes  # each plane once, for all query heads of a group
    # With queries, tables and the work list, which the simdgroups of a threadgroup read again from a cache.
    assert sum(traffic.distinct_bytes for traffic in run.reads.values()) <= 1.05 * format_nbytes


def test_words_of_8_bits_are_read_in_whole_lines(counting_engine):
    batch = batch_of((8, 8), dtype="float16", head_dim=128, seq_lens=(200,))
    runs = []
    batch.run(counting_engine.factory(0, runs=runs))
    for name in ("k_pool", "v_pool"):
        read = runs[0].reads[name]
        assert read.full_transactions == read.transactions == read.bytes // 128


def test_barriers_and_races_are_those_of_the_dense_kernel(counting_engine):
    batch = batch_of((8, 4), dtype="float16", seq_lens=(40, 90), q_lens=(2, 3), kv_heads=1, group=1, part_tokens=32)
    runs = []
    for schedule in counting_engine.schedules[:3]:
        batch.check(batch.run(counting_engine.factory(schedule, runs=runs)))
    dense = []
    batch_dense = dataclasses.replace(batch, k_bits=None, v_bits=None)
    batch_dense.check(batch_dense.run(counting_engine.factory(0, runs=dense)))
    assert runs[0].threadgroup_barriers == dense[0].threadgroup_barriers
    assert runs[0].threadgroup_memory == dense[0].threadgroup_memory


# ------------------------------------------------------------------------------------------------ text


def test_metal_would_take_the_texts(engine):
    from metal_engine import StandIn

    for bits in ((8, 4), (4, None), (None, 8)):
        batch = batch_of(bits, dtype="bfloat16", seq_lens=(70,), features=("sinks",))
        batch.check(batch.run(StandIn().factory(0, lint=True)))
