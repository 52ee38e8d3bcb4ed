"""Faults planted into the shipped kernels, each caught by the test that is named with it.

A fault that its test does not notice fails here: the tests of the kernels are tested.
"""

import pytest
import test_metal_attention as attention
import test_metal_bytes as counts
import test_metal_gather as gather
import test_metal_in_place as in_place
import test_metal_scores as scores
import test_metal_text as text
from metal_cases import FEATURES
from metal_mutants import ENGINE, Mutant, convict, planted

from kvpool.config import KVSpec

VECTORS, MATRIX, REDUCE = "paged_attention.metal", "paged_matrix.metal", "paged_reduce.metal"
HEADER, SHARED = "kv_layout.h", "paged_attention.h"


def decode(**choice):
    """Arguments of the test of one decode batch."""
    return ENGINE, {"seq_lens": (100, 17), "group": 2} | choice


DECODE = attention.test_every_pair_of_choices_equals_float64
WINDOWS = attention.test_windows_and_chunks_equal_float64
SUMS = attention.test_sums_over_16_bits_are_those_of_float32
LAST_TILES = attention.test_last_tiles_of_any_length_equal_float64
ENDS = attention.test_masks_and_sinks_at_the_ends_of_the_float_range_equal_float64
LARGEST = attention.test_the_largest_score_may_lie_in_any_part_and_simdgroup
RACES = counts.test_no_race_in_any_schedule
INFINITE = attention.test_an_infinite_value_stays_with_the_queries_that_see_it
SMALL = (ENGINE, 1, 64, "NHD", ())  # rows of several queries for paged_attention
STRIDED = attention.test_strided_queries_are_read_where_they_are
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
        "mask of another query",
        VECTORS,
        "token * mask_strides[0] + ",
        "item.first_query * mask_strides[0] + ",
        WINDOWS,
        (*SMALL[:-1], FEATURES),
    ),
    Mutant(
        "nothing seen is not a case of its own",
        HEADER,
        "largest == -INFINITY ? 0.0f : ",
        "",
        attention.test_a_query_that_sees_nothing_gets_zero,
        (ENGINE, 512),
    ),
    Mutant("0 times infinity", VECTORS, "QUERIES == 1 && !MASK;", "true;", INFINITE),
    # Strides and indices
    Mutant("queries taken for contiguous", VECTORS, "* q_strides[0] +", "* q_shape[1] * DIM +", STRIDED),
    Mutant(
        "run of rows cut at the wrong lane",
        HEADER,
        "lane >= cut",
        "lane > cut",
        DECODE,
        decode(head_dim=112, layout="HND"),
    ),
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
        "the base changed before the difference",
        HEADER,
        "(score - largest) * LOG2E",
        "score * LOG2E - largest * LOG2E",
        ENDS,
        (ENGINE, 1, (1, 1), 64),
    ),
    Mutant(
        "bias by position, not by distance",
        VECTORS,
        "my_token - position,",
        "my_token,",
        DECODE,
        decode(features=("alibi_slopes", "sinks")),  # without a sink, what is added to all scores changes nothing
    ),
    Mutant(
        "sums of weights in the pool's type",
        VECTORS,
        "sum = sum * correction + total;",
        "sum = float(T(sum * correction + total));",
        SUMS,
        (ENGINE, "bfloat16", 512),
    ),
    Mutant(
        "largest score without the first simdgroup",
        VECTORS,
        "int s = 0; s < SIMDGROUPS; s++) {\n    top",
        "int s = 1; s < SIMDGROUPS; s++) {\n    top",
        LARGEST,
        (ENGINE, 3, 1024),
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
    Mutant(
        "full tiles begin a row early",
        HEADER,
        "} else if (begin <= 0 && end >= STEP)",
        "} else if (begin <= 1 && end >= STEP)",
        counts.test_a_sliding_window_reads_what_it_sees,
    ),
    Mutant(
        "one step of sums too few",
        VECTORS,
        "int distance = 2 * Keys::ACCESSES",
        "int distance = 4 * Keys::ACCESSES",
        DECODE,
        decode(),
    ),
    # Matrix units
    Mutant("matrix: no barrier before the end", MATRIX, f"{BARRIER}\nKV_UNROLL", "KV_UNROLL", RACES, CHUNKS),
    Mutant("matrix: infinity in another row", MATRIX, "lane_of_row(t, lane)", "lane_of_row(0, lane)", INFINITE),
    Mutant(
        "matrix: a share of the products dropped",
        MATRIX,
        "s < SIMDGROUPS; s++",
        "s < SIMDGROUPS - 1; s++",
        DECODE,
        decode(group=16, seq_lens=(257, 17), head_dim=128),
    ),
    Mutant(
        "matrix: another row's correction",
        MATRIX,
        "shared_corrections[8 * m + place.row]",
        "shared_corrections[8 * m + place.column]",
        DECODE,
        decode(group=16),
    ),
    Mutant(
        "matrix: heads of the first tile",
        MATRIX,
        "% HEAD_GROUPS * HEADS;",
        "* 0;",
        attention.test_groups_of_many_heads_equal_float64,
        (ENGINE, 71),
    ),
    Mutant(
        "matrix: slots of blocks that do not divide a tile",
        "kv_matrix.h",
        "(tile.begin + t) % BLOCK_SIZE",
        "t % BLOCK_SIZE",
        LAST_TILES,
        (ENGINE, "paged_matrix", 24, ()),
    ),
    Mutant(
        "matrix: products in 16 bits",
        "kv_matrix.h",
        "= scores[m].thread_elements()[e];",
        "= float(half(scores[m].thread_elements()[e]));",
        DECODE,
        decode(group=16, dtype="float16"),
    ),
    Mutant(
        "matrix: rows of nobody are stored",
        MATRIX,
        "c < kv::chunks_per_row<VALUE_DIM>() && (exists || !DIRECT)",
        "c < kv::chunks_per_row<VALUE_DIM>()",
        DECODE,
        (ENGINE, {"group": 9, "queries": 5, "seq_lens": (40,), "dtype": "float16"}),
    ),
    Mutant(
        "matrix: scores of the newest query's neighbour",
        MATRIX,
        "r / HEADS == observed_query",
        "r / HEADS == max(observed_query - 1, 0)",
        scores.test_scores_of_chunks_are_of_the_newest_query,
        (ENGINE, FEATURES, 3, "raw"),
    ),
    Mutant(
        "latent: values and sums have rotary simdgroups' rows",
        MATRIX,
        "const int mine = simd + SIMDGROUPS * lane;",
        "const int mine = simd + OWNERS * lane;",
        DECODE,
        decode(head_dim=(80, 24), group=8, seq_lens=(257, 17), part_tokens=512),
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
    Mutant(
        "mass: laid aside for every query",
        VECTORS,
        "MASS && is_observed && exists",
        "MASS && exists",
        scores.test_mass_lays_aside_one_score_per_query_head_and_position,
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
        "strides of new keys for values",
        "kv_write.metal",
        "token * strides[3] + head * strides[4]",
        "token * strides[0] + head * strides[1]",
        in_place.check_write,
        (KVSpec(1, 2, 64, "float16", 16, 96), "float32", True),
    ),
    Mutant(
        "one position too many",
        "copy_blocks.metal",
        "slot >= copy[2]",
        "slot > copy[2]",
        in_place.test_copy_blocks_copies_leading_positions_only,
        ("NHD", "float32"),
    ),
    Mutant(
        "positions past the end are gathered",
        "gather_blocks.metal",
        "token < seq_lens[batch_row]",
        "true",
        gather.test_gather_equals_what_was_stored,
        (ENGINE, "NHD", "float32", 80, 8),
    ),
]


@pytest.mark.long
@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.name.replace(" ", "-"))
def test_planted_faults_are_caught(mutant, monkeypatch):
    with planted(mutant, monkeypatch):
        convict(mutant.test, mutant.arguments)


def test_without_a_fault_the_same_batches_pass():
    choices = {str(mutant.arguments[1]): mutant.arguments[1] for mutant in MUTANTS if mutant.test is DECODE}
    for choice in choices.values():
        batch = attention.batch_of(choice)
        batch.check(batch.run(ENGINE.factory(0)))
