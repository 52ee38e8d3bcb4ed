"""Faults planted into the shipped kernels, each caught by the test that is named with it.

A fault that its test does not notice fails here: the tests of the kernels are tested. The other tests here are those
of the kernels that `make test` has.
"""

import metal_cases
import pytest
import test_metal_attention as attention
import test_metal_bytes as counts
import test_metal_gather as gather
import test_metal_in_place as in_place
import test_metal_packed as packed
import test_metal_packed_attention as packed_attention
import test_metal_scores as scores
import test_metal_text as text
from metal_cases import FEATURES
from metal_mutants import ENGINE, Mutant, convict, planted

from kvpool.config import KVSpec
from kvpool_backends.mlx.metal_kernels import HeadTiles

VECTORS, MATRIX, REDUCE = "paged_attention.metal", "paged_matrix.metal", "paged_reduce.metal"
HEADER, SHARED, PACKED = "kv_layout.h", "paged_attention.h", "kv_packed.h"
PACKED_SPEC = KVSpec(1, 3, 128, "float16", 8, k_bits=8, quant_group_size=32)


def decode(**choice):
    """Arguments of the test of one decode batch."""
    return ENGINE, {"seq_lens": (100, 17), "group": 2} | choice


def packed_decode(**choice):
    """One batch over planes of 8 and 4 bits."""
    choice = {"head_dim": 64, "size": 32, "seq_lens": (42,), "group": 2} | choice
    batch = packed_attention.batch_of((8, 4), **choice)
    batch.check(batch.run(ENGINE.factory(0)))


def packed_decode_of_other_values():
    packed_decode(v_head_dim=128)


DECODE = attention.test_every_pair_of_choices_equals_float64
WINDOWS = attention.test_windows_and_chunks_equal_float64
SUMS = attention.test_sums_over_16_bits_are_those_of_float32
LAST_TILES = attention.test_last_tiles_of_any_length_equal_float64
RACES = counts.test_no_race_in_any_schedule
SMALL = (ENGINE, 1, 64, "NHD", ())  # rows of several queries for paged_attention
CHUNKS = (ENGINE, 64, "NHD", FEATURES)
BARRIER = "threadgroup_barrier(mem_flags::mem_threadgroup);"

MUTANTS = [
    # Barriers and masks
    Mutant(
        "a barrier that orders other memory",
        VECTORS,
        f"{BARRIER}\nfor (int i",
        "threadgroup_barrier(mem_flags::mem_device);\nfor (int i",
        RACES,
        (ENGINE, 64, "NHD", ()),
    ),
    Mutant(
        "window one too long",
        VECTORS,
        "my_token > position - window_tokens",
        "my_token >= position - window_tokens",
        WINDOWS,
        (*SMALL[:-1], ("window",)),
    ),
    Mutant(
        "nothing seen is not a case of its own",
        HEADER,
        "largest == -INFINITY ? 0.0f : ",
        "",
        attention.test_a_query_that_sees_nothing_gets_zero,
        (ENGINE, 512),
    ),
    # Strides and indices
    Mutant(
        "offsets in 32 bits",
        HEADER,
        "return first + block * block_stride",
        "return first + int(block * block_stride)",
        text.test_offsets_are_64_bit,
        (ENGINE, 4),
    ),
    # Parts and softmax
    Mutant(
        "last part dropped",
        REDUCE,
        "num_items = parts[3 * token + 2]",
        "num_items = parts[3 * token + 2] - 1",
        attention.test_any_number_of_parts_agrees,
        (ENGINE, ()),
    ),
    Mutant(
        "sink counted by every part",
        SHARED,
        "float4(largest, sum, 0.0f",
        "float4(largest, sum + (sink == -INFINITY ? 0.0f : weight(sink, largest)), 0.0f",
        attention.test_any_number_of_parts_agrees,
        (ENGINE, ("sinks",)),
    ),
    Mutant(
        "sums are not rescaled",
        VECTORS,
        "sum = sum * correction + total;",
        "sum = sum + total;",
        DECODE,
        decode(seq_lens=(512,)),
    ),
    Mutant(
        "sums of weights in the pool's type",
        VECTORS,
        "sum = sum * correction + total;",
        "sum = float(T(sum * correction + total));",
        SUMS,
        (ENGINE, "bfloat16", 512),
    ),
    # Ends of runs, what is read, sums over lanes
    Mutant(
        "a last tile of 31 tokens loses one",
        HEADER,
        "metal::min(32, seen_end - begin);",
        "metal::min(32, seen_end - begin) - (seen_end - begin == 31 ? 1 : 0);",
        LAST_TILES,
        (ENGINE, "paged_attention", 8, ()),
    ),
    # Matrix units
    Mutant("matrix: no barrier before the end", MATRIX, f"{BARRIER}\nKV_UNROLL", "KV_UNROLL", RACES, CHUNKS),
    Mutant(
        "matrix: heads of the first tile",
        MATRIX,
        "% HEAD_GROUPS * HEADS;",
        "* 0;",
        attention.test_shapes_at_the_ends_equal_float64,
        (ENGINE, {"group": 71, "kv_heads": 1, "seq_lens": (40, 3)}),
    ),
    # Scores
    Mutant(
        "raw: the row of the first sequence",
        VECTORS,
        "int64_t(item.row) * threadgroups_per_grid.x",
        "int64_t(0)",
        scores.test_scores_of_chunks_are_of_the_newest_query,
        (ENGINE, FEATURES, 1, "raw"),
    ),
    Mutant(
        "mass: hidden positions are laid aside",
        VECTORS,
        "my_token, visible ? score : -INFINITY",
        "my_token, score",
        scores.test_scores_of_chunks_are_of_the_newest_query,
        (ENGINE, ("window",), 2, "mass"),
    ),
    # Writes and copies
    Mutant(
        "slots in 32 bits",
        "kv_write.metal",
        "const int64_t slot = slots[token];",
        "const int slot = slots[token];",
        in_place.test_slots_beyond_32_bits_are_written,
        (),
    ),
    Mutant(
        "positions past the end are gathered",
        "gather_blocks.metal",
        "token < seq_lens[batch_row]",
        "true",
        gather.test_gather_equals_what_was_stored,
        (ENGINE, "NHD", "float32", 80, 8),
    ),
    # Planes of 8 and 4 bits
    Mutant(
        "packed: times the inverse",
        PACKED,
        "(x[e] - result.bias) / result.scale)",
        "(x[e] - result.bias) * (1.0f / result.scale))",
        packed.test_write_near_ties_rounds_as_a_division_does,
        (8,),
    ),
    Mutant(
        "packed: NaN in one lane alone",
        PACKED,
        "    bad |= metal::simd_shuffle_xor(bad, ushort(distance));\n",
        "",
        packed.test_a_group_that_is_not_finite_is_nan_and_its_neighbours_are_not,
        (float("nan"),),
    ),
    Mutant(
        "packed: every lane stores the scale",
        "kv_write_packed.metal",
        "if (4 * c % SIZE == 0)",
        "if (true)",
        packed.test_a_write_moves_each_byte_once,
        (4,),
    ),
    Mutant(
        "packed: the layout of the keys' scales for values",
        VECTORS,
        "const auto v_plane = kv::plane_of(v_pool, v_scales, v_biases, layout + 4, kv_head);",
        "auto v_plane = kv::plane_of(v_pool, v_scales, v_biases, layout + 4, kv_head);"
        "v_plane.factors = k_plane.factors;",
        packed_decode_of_other_values,
        (),
    ),
    Mutant(
        "packed: the sum of another query", VECTORS, "sum_of_query[r][j]);", "sum_of_query[0][j]);", packed_decode, ()
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
    packed_decode_of_other_values()
    packed.check_write(PACKED_SPEC, "float16", schedules=(0,))
