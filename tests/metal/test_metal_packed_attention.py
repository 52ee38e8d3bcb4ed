"""Attention over planes of 8 and 4 bits: within 1e-3 of dequantize-then-float64, the bytes of the format, the text.

``KVPOOL_METAL_LAUNCHES=2000`` asks for every pair of choices.
"""

import os

import numpy as np
import pytest
from metal_cases import BITS, FEATURES, PackedBatch, choices, shape_of
from test_metal_scores import KINDS, check_scores

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
    "layout": ("NHD", "HND"),
    "features": ((), *((name,) for name in FEATURES), FEATURES),
    "part_tokens": (32, 512),
}
CHOICES = choices(FACTORS, ("bits", "head_dim", "group", "queries", "features"))
if not os.environ.get("KVPOOL_METAL_LAUNCHES"):
    CHOICES = CHOICES[::10]


def batch_of(bits=(8, 8), **choice):
    return PackedBatch(k_bits=bits[0], v_bits=bits[1], **choice)


@pytest.mark.parametrize("features", [(), ("sinks",)])
@pytest.mark.parametrize("bits", [(8, 8), (4, 4)])
def test_decode_is_within_1e_3_from_64_to_4096_tokens(engine, bits, features):
    for context in (64, 1000, 4096):
        batch = batch_of(bits, dtype="float16", kv_heads=1, group=2, seq_lens=(context,), features=features)
        assert np.abs(batch.run(engine.factory(1)) - batch.expected).max() <= 1e-3


@pytest.mark.parametrize("kind", KINDS)
def test_scores_of_packed_keys_are_those_of_their_floats(engine, kind):
    check_scores(batch_of((4, 8), seq_lens=(70, 33), kv_heads=1), kind, engine.factory(0))


@pytest.mark.parametrize("choice", CHOICES, ids=str)
def test_every_pair_of_choices_equals_float64(engine, choice):
    choice = shape_of(choice)
    if choice.get("latent"):
        choice["bits"] = (choice["bits"][0] or 8,) * 2
    batch = batch_of(**choice)
    for schedule in engine.schedules[: None if os.environ.get("KVPOOL_METAL_SWEEP") else 2]:
        batch.check(batch.run(engine.factory(schedule)))


@pytest.mark.parametrize(
    ("bits", "size", "group", "each"),
    [((8, 8), 64, 4, 1.0625), ((4, 4), 64, 1, 0.5625), ((8, 4), 64, 8, 0.8125), ((4, 8), 128, 2, 0.78125)],
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
    batch = batch_of((8, 8), dtype="float16", head_dim=128, group=2, seq_lens=(200,))
    runs = []
    batch.run(counting_engine.factory(0, runs=runs))
    for name in ("k_pool", "v_pool"):
        read = runs[0].reads[name]
        assert read.full_transactions == read.transactions == read.bytes // 128
