"""Faults planted into the shipped kernels, one of a kind, each caught by the test that is named with it.

A fault that its test does not notice fails here: the tests of the kernels are tested. The other tests here are those
of the kernels that `make test` has.
"""

import metal_cases
import pytest
import test_metal_attention as attention
import test_metal_bytes as counts
import test_metal_moves as moves
import test_metal_packed_attention as packed_attention
import test_metal_scores as scores
import test_metal_text as text
from metal_cases import FEATURES, Batch
from metal_mutants import ENGINE, Mutant, convict, planted

from kvpool.config import KVSpec
from kvpool_backends.mlx.metal_kernels import HeadTiles

VECTORS, MATRIX, REDUCE = "paged_attention.metal", "paged_matrix.metal", "paged_reduce.metal"
HEADER, PACKED, GATHER = "kv_layout.h", "kv_packed.h", "gather_blocks.metal"
BARRIER = "threadgroup_barrier(mem_flags::mem_threadgroup);"
SUM = "sum = sum * correction + total;"
SHUFFLE = "    bad |= metal::simd_shuffle_xor(bad, ushort(distance));\n"
PLANE = "auto v_plane = kv::plane_of(v_pool, v_scales, v_biases, layout + 4, kv_head);"


def packed_decode():
    """One batch over planes of 8 and 4 bits, with values of other dimensions."""
    batch = packed_attention.batch_of((8, 4), head_dim=64, v_head_dim=128, size=32, seq_lens=(42,), group=2)
    batch.check(batch.run(ENGINE.factory(0)))


def races(features):
    counts.test_no_race_in_any_schedule(ENGINE, Batch, {"head_dim": 64, "group": 8, "features": features})


def windows():
    attention.test_windows_and_chunks_equal_float64(ENGINE, 1, 64, "NHD", ("window",))


def heads():
    attention.test_shapes_at_the_ends_equal_float64(ENGINE, {"group": 71, "kv_heads": 1, "seq_lens": (40, 3)})


MUTANTS = [
    Mutant(
        "a barrier that orders other memory", VECTORS, BARRIER, BARRIER.replace("threadgroup)", "device)"), races, ((),)
    ),
    Mutant("matrix: no barrier before the end", MATRIX, f"{BARRIER}\nKV_UNROLL", "KV_UNROLL", races, (FEATURES,)),
    Mutant("window one too long", VECTORS, "> position - window_tokens", ">= position - window_tokens", windows, ()),
    Mutant(
        "offsets in 32 bits",
        HEADER,
        "return first + block * block_stride",
        "return first + int(block * block_stride)",
        text.test_offsets_are_64_bit,
        (ENGINE, 4),
    ),
    Mutant(
        "last part dropped",
        REDUCE,
        "parts[3 * token + 2]",
        "parts[3 * token + 2] - 1",
        attention.test_any_number_of_parts_agrees,
        (ENGINE, ()),
    ),
    Mutant(
        "sink counted by every part",
        "paged_attention.h",
        "float4(largest, sum, 0.0f",
        "float4(largest, sum + (sink == -INFINITY ? 0.0f : weight(sink, largest)), 0.0f",
        attention.test_any_number_of_parts_agrees,
        (ENGINE, ("sinks",)),
    ),
    Mutant(
        "sums of weights in the pool's type",
        VECTORS,
        SUM,
        "sum = float(T(sum * correction + total));",
        attention.test_sums_over_16_bits_are_those_of_float32,
        (ENGINE, "bfloat16", 512),
    ),
    Mutant(
        "a last tile of 31 tokens loses one",
        HEADER,
        "metal::min(32, seen_end - begin);",
        "metal::min(32, seen_end - begin) - (seen_end - begin == 31 ? 1 : 0);",
        attention.test_last_tiles_of_any_length_equal_float64,
        (ENGINE, "paged_attention", 8, ()),
    ),
    Mutant("matrix: heads of the first tile", MATRIX, "% HEAD_GROUPS * HEADS;", "* 0;", heads, ()),
    Mutant(
        "raw: the row of the first sequence",
        VECTORS,
        "int64_t(item.row) * threadgroups_per_grid.x",
        "int64_t(0)",
        scores.test_scores_of_chunks_are_of_the_newest_query,
        (ENGINE, FEATURES, 1, "raw"),
    ),
    Mutant(
        "positions past the end are gathered",
        GATHER,
        "token < seq_lens[batch_row]",
        "true",
        moves.test_gather_equals_what_was_stored,
        (ENGINE, "NHD", Batch, "float32", 80, 8, 0),
    ),
    Mutant(
        "packed: times the inverse",
        PACKED,
        "(x[e] - result.bias) / result.scale)",
        "(x[e] - result.bias) * (1.0f / result.scale))",
        moves.test_write_near_ties_rounds_as_a_division_does,
        (8,),
    ),
    Mutant(
        "packed: NaN in one lane alone",
        PACKED,
        SHUFFLE,
        "",
        moves.test_a_group_that_is_not_finite_is_nan_and_its_neighbours_are_not,
        (float("nan"),),
    ),
    Mutant(
        "packed: the layout of the keys' scales for values",
        VECTORS,
        f"const {PLANE}",
        f"{PLANE} v_plane.factors = k_plane.factors;",
        packed_decode,
        (),
    ),
]


@pytest.mark.long
@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.name.replace(" ", "-"))
def test_planted_faults_are_caught(mutant, monkeypatch):
    with planted(mutant, monkeypatch):
        convict(mutant.test, mutant.arguments)


@pytest.mark.long
def test_a_query_head_that_reads_for_itself_is_caught(monkeypatch):
    monkeypatch.setattr(metal_cases, "head_tiles", lambda spec, group, queries: HeadTiles(1, group, 1))
    convict(packed_attention.test_decode_reads_the_bytes_of_the_format, (ENGINE, (4, 4), 64, 4, 0.5625))


#: One launch of each kernel and feature, for `make test`; pairs of them are in test_metal_attention.py.
LAUNCHES = [
    *({"features": (feature,)} for feature in FEATURES),
    {"seq_lens": (257, 17), "part_tokens": 32},  # and `paged_reduce`
    {"group": 16, "dtype": "float16", "features": FEATURES},
    {"group": 8, "head_dim": (80, 24)},
]


@pytest.mark.parametrize("choice", LAUNCHES, ids=str)
def test_launch_of_each_kernel_and_feature_equals_float64(choice):
    batch = attention.batch_of({"seq_lens": (40, 17), "group": 2} | choice)
    batch.check(batch.run(ENGINE.factory(0)))


def test_launch_of_each_packed_kernel_is_right():
    packed_decode()
    moves.check_write(KVSpec(1, 3, 128, "float16", 8, k_bits=8, quant_group_size=32), "float16", schedules=(0,))
