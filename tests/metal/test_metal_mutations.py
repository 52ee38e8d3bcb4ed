"""Faults planted into the shipped kernels, each caught by the test that is named with it.

A fault that its test does not notice fails here: the tests of the kernels are tested.
"""

import pytest
import test_metal_attention as attention
import test_metal_bytes as counts
import test_metal_gather as gather
import test_metal_in_place as in_place
import test_metal_text as text
from metal_cases import Batch
from metal_mutants import ENGINE, Mutant, convict, planted

from kvpool.config import KVSpec

ATTENTION, REDUCE, HEADER = "paged_attention.metal", "paged_reduce.metal", "kv_layout.h"
FLOATS = KVSpec(1, 2, 80, "float32", 8)


def decode(**choice):
    """Arguments of the test of one decode batch."""
    return ENGINE, {"seq_lens": (100, 17), "group": 2} | choice


def windows(features=(), group=3, head_dim=80, layout="HND"):
    return ENGINE, group, head_dim, layout, features


DECODE = attention.test_decode_every_pair_of_choices_equals_float64
WINDOWS = attention.test_windows_and_chunks_equal_float64
SUMS = attention.test_sums_over_16_bits_are_those_of_float32
LAST_TILES = attention.test_last_tiles_of_any_length_equal_float64
LARGEST = attention.test_the_largest_score_may_lie_in_any_part_and_simdgroup
RACES = counts.test_no_race_in_any_schedule
BARRIER = "threadgroup_barrier(mem_flags::mem_threadgroup);"
LAST_BARRIER = f"  {BARRIER}\n}}\n"

MUTANTS = [
    # Barriers
    Mutant(
        "no barrier before the reduction",
        ATTENTION,
        f"  {BARRIER}\n  const int num_chunks",
        "  const int num_chunks",
        DECODE,
        decode(),
    ),
    Mutant("no barrier before memory is used again", ATTENTION, LAST_BARRIER, "}\n", RACES, (ENGINE, 256, "NHD", ())),
    Mutant(
        "a barrier of the simdgroup only",
        ATTENTION,
        f"  {BARRIER}\n  const int num_chunks",
        "  simdgroup_barrier(mem_flags::mem_threadgroup);\n  const int num_chunks",
        DECODE,
        decode(),
    ),
    Mutant(
        "a barrier that orders other memory",
        ATTENTION,
        f"  {BARRIER}\n  const int num_chunks",
        "  threadgroup_barrier(mem_flags::mem_device);\n  const int num_chunks",
        RACES,
        (ENGINE, 64, "NHD", ()),
    ),
    # Masks
    Mutant("later tokens are visible", ATTENTION, " && my_token <= position &&", " &&", WINDOWS, windows()),
    Mutant(
        "window one too short",
        ATTENTION,
        "my_token > position - window_tokens",
        "my_token > position + 1 - window_tokens",
        DECODE,
        decode(features=("window",)),
    ),
    Mutant(
        "window one too long",
        ATTENTION,
        "my_token > position - window_tokens",
        "my_token >= position - window_tokens",
        WINDOWS,
        windows(("window",)),
    ),
    Mutant(
        "mask of another head",
        ATTENTION,
        "(mask_shape[1] == 1 ? 0 : head * mask_strides[1])",
        "0",
        DECODE,
        decode(features=("mask",)),
    ),
    Mutant(
        "mask of another query",
        ATTENTION,
        "token * mask_strides[0] + ",
        "first_query * mask_strides[0] + ",
        WINDOWS,
        windows(("window", "soft_cap", "sinks", "alibi_slopes", "mask")),
    ),
    Mutant(
        "-inf is added like any number",
        ATTENTION,
        "visible = added != -INFINITY;",
        "",
        attention.test_masked_tokens_may_hold_anything,
    ),
    Mutant(
        "nothing seen is not a case of its own",
        HEADER,
        "largest == -INFINITY ? 0.0f : ",
        "",
        attention.test_a_query_that_sees_nothing_gets_zero,
        (ENGINE, 512),
    ),
    Mutant(
        "0 times infinity",
        ATTENTION,
        "QUERIES == 1 && !MASK;",
        "true;",
        attention.test_an_infinite_value_stays_with_the_queries_that_see_it,
    ),
    Mutant(
        "unowned table entries are read",
        ATTENTION,
        " && lane < num_tokens;",
        ";",
        counts.test_everything_else_that_decode_reads_is_small,
    ),
    # Strides
    Mutant("block stride for slot stride", HEADER, "slot * slot_stride;", "slot * block_stride;", DECODE, decode()),
    Mutant(
        "strides of K for V",
        ATTENTION,
        "layout + 4, kv_head)",
        "layout, kv_head)",
        attention.test_values_of_another_dimension_equal_float64,
        (ENGINE, 128, 64, "NHD"),
    ),
    Mutant("head stride forgotten", HEADER, "layout[0] + head * layout[3]", "layout[0]", DECODE, decode()),
    Mutant(
        "offset of the plane forgotten",
        HEADER,
        "layout[0] + head * layout[3]",
        "head * layout[3]",
        DECODE,
        decode(layout="interleaved"),
    ),
    Mutant(
        "queries taken for contiguous",
        ATTENTION,
        "* q_strides[0] +",
        "* q_shape[1] * DIM +",
        attention.test_strided_queries_are_read_where_they_are,
    ),
    Mutant("rows taken for neighbours", HEADER, "first + row * stride", "first + row * DIM", DECODE, decode()),
    # Indices
    Mutant(
        "query heads interleaved",
        ATTENTION,
        "int64_t(kv_head * GROUP + head)",
        "int64_t(head * 2 + kv_head)",
        DECODE,
        decode(),
    ),
    Mutant(
        "first row of the table for all",
        ATTENTION,
        "tables[batch_row * tables_strides[0] + ",
        "tables[",
        DECODE,
        decode(),
    ),
    Mutant(
        "first half of a block only",
        ATTENTION,
        "k_plane, block, (tile + t) % BLOCK_SIZE",
        "k_plane, block, t % 8",
        DECODE,
        decode(),
    ),
    Mutant(
        "chunks past the end of a row",
        HEADER,
        "c < CHUNKS && row >= begin",
        "row >= begin",
        DECODE,
        decode(head_dim=80),
    ),
    Mutant(
        "run of rows shuffled wrongly",
        HEADER,
        "ushort((cut + lane) % 32)",
        "ushort(lane)",
        DECODE,
        decode(head_dim=80, layout="HND"),
    ),
    Mutant(
        "run of rows cut at the wrong lane",
        HEADER,
        "lane >= cut",
        "lane > cut",
        DECODE,
        decode(head_dim=112, layout="HND"),
    ),
    Mutant(
        "weights from the wrong lane",
        ATTENTION,
        "token % Keys::ROWS * Keys::LANES + token / Keys::ROWS",
        "token",
        DECODE,
        decode(),
    ),
    Mutant(
        "second half of the lanes dropped",
        ATTENTION,
        "mine += simd_shuffle_xor(mine, ushort(Values::LANES));",
        "",
        DECODE,
        decode(),
    ),
    Mutant(
        "offsets in 32 bits",
        HEADER,
        "return first + block * block_stride",
        "return first + int(block * block_stride)",
        text.test_offsets_are_64_bit,
        (ENGINE, 4),
    ),
    Mutant(
        "strides in 32 bits",
        HEADER,
        "int64_t first, block_stride, slot_stride;",
        "int first, block_stride, slot_stride;",
        text.test_offsets_are_64_bit,
        (ENGINE, 8),
    ),
    # Parts and softmax
    Mutant(
        "every part begins at 0",
        ATTENTION,
        "work[8 * item + 4] + simd",
        "simd",
        attention.test_any_number_of_parts_agrees,
        (ENGINE, ()),
    ),
    Mutant(
        "last part dropped",
        REDUCE,
        "num_items = parts[3 * token + 2]",
        "num_items = parts[3 * token + 2] - 1",
        attention.test_any_number_of_parts_agrees,
        (ENGINE, ()),
    ),
    Mutant(
        "parts are not weighted",
        REDUCE,
        "total += w * end[1]",
        "total += end[1]",
        attention.test_any_number_of_parts_agrees,
        (ENGINE, ()),
    ),
    Mutant("parts of another token", REDUCE, "int row = parts[3 * token] * HEADS +", "int row =", WINDOWS, windows()),
    Mutant(
        "sink counted by every part",
        ATTENTION,
        "partial[Values::CHUNKS] = float4(top, total,",
        "const int h = kv_head * GROUP + first_head + r % HEADS;\n"
        "partial[Values::CHUNKS] = float4(top, total + (SINKS ? kv::weight(sinks[h] * kv::LOG2E, top) : 0.0f),",
        attention.test_any_number_of_parts_agrees,
        (ENGINE, ("sinks",)),
    ),
    Mutant(
        "sink counted by every simdgroup",
        ATTENTION,
        "total += w * shared_sum[r * SIMDGROUPS + s];",
        "total += w * shared_sum[r * SIMDGROUPS + s] + (SINKS ? 0.125f : 0.0f);",
        DECODE,
        decode(features=("sinks",)),
    ),
    Mutant(
        "sink in the wrong base",
        ATTENTION,
        "sinks[head] * kv::LOG2E",
        "sinks[head]",
        DECODE,
        decode(features=("sinks",)),
    ),
    Mutant("values are not rescaled", ATTENTION, "values[r][j] *= correction;", "", DECODE, decode(seq_lens=(512,))),
    Mutant(
        "sums are not rescaled",
        ATTENTION,
        "sum[r] = sum[r] * correction + scores[r];",
        "sum[r] = sum[r] + scores[r];",
        DECODE,
        decode(seq_lens=(512,)),
    ),
    Mutant(
        "last simdgroup dropped",
        ATTENTION,
        "for (int s = 0; s < SIMDGROUPS; s++) {\n      const float w",
        "for (int s = 0; s < SIMDGROUPS - 1; s++) {\n      const float w",
        DECODE,
        decode(seq_lens=(512,)),
    ),
    Mutant("scale dropped", ATTENTION, "scores[r] * scale", "scores[r]", DECODE, decode()),
    Mutant("weights in the wrong base", ATTENTION, "score * kv::LOG2E", "score", DECODE, decode()),
    Mutant(
        "soft cap after the bias",
        ATTENTION,
        "soft_cap * precise::tanh",
        "precise::tanh",
        DECODE,
        decode(features=("soft_cap",)),
    ),
    Mutant(
        "bias by position, not by distance",
        ATTENTION,
        "float(my_token - position)",
        "float(my_token - num_tokens)",
        DECODE,
        decode(features=("alibi_slopes",), seq_lens=(512,)),
    ),
    # Ends of runs
    Mutant(
        "a later tile of one token dropped",
        ATTENTION,
        "tile < seen_end; tile += 32",
        "tile + (tile > run_begin) < seen_end; tile += 32",
        LAST_TILES,
        (ENGINE, 16, ()),
    ),
    Mutant(
        "a last tile of 31 tokens loses one",
        ATTENTION,
        "min(32, seen_end - tile);",
        "seen_end - tile == 31 && tile > run_begin ? 30 : min(32, seen_end - tile);",
        LAST_TILES,
        (ENGINE, 8, ()),
    ),
    Mutant(
        "a last tile is read in fours",
        ATTENTION,
        "min(32, seen_end - tile);",
        "min(32, (seen_end - tile + 3) / 4 * 4);",
        LAST_TILES,
        (ENGINE, 32, ("sinks",)),
    ),
    Mutant(
        "first token of a window is not read",
        ATTENTION,
        "max(0, seen_begin - tile);",
        "seen_begin > tile ? seen_begin - tile + 1 : 0;",
        WINDOWS,
        windows(("window",)),
    ),
    Mutant(
        "one block for a whole tile",
        ATTENTION,
        "block_of_lane, ushort(t));\n    Values",
        "block_of_lane, ushort(0));\n    Values",
        LAST_TILES,
        (ENGINE, 8, ()),
    ),
    # Sums in 16 bits
    Mutant(
        "products in the pool's type",
        HEADER,
        "metal::dot(float4(other), float4(chunk[a][j]))",
        "float(metal::dot(Chunk<T>(float4(other)), chunk[a][j]))",
        DECODE,
        decode(dtype="float16"),
    ),
    Mutant(
        "sums of weights in the pool's type",
        ATTENTION,
        "sum[r] = sum[r] * correction + scores[r];",
        "sum[r] = float(T(sum[r] * correction + scores[r]));",
        SUMS,
        (ENGINE, "bfloat16", 512),
    ),
    Mutant(
        "weights in the pool's type",
        ATTENTION,
        "scores[r] = kv::weight(score, top);",
        "scores[r] = float(T(kv::weight(score, top)));",
        DECODE,
        decode(dtype="float16"),
    ),
    Mutant(
        "sums of values in the pool's type",
        ATTENTION,
        "values[r][j] += w * rows.floats(a, j);",
        "values[r][j] = float4(kv::Chunk<T>(values[r][j] + w * rows.floats(a, j)));",
        DECODE,
        decode(dtype="bfloat16"),
    ),
    Mutant(
        "parts are added up in the result's type",
        REDUCE,
        "total += w * end[1];",
        "total = float(Q(total + w * end[1]));",
        DECODE,
        decode(dtype="float16", part_tokens=32),
    ),
    # Merges
    Mutant(
        "largest score without the last simdgroup",
        ATTENTION,
        "s < SIMDGROUPS; s++) {\n      top",
        "s < SIMDGROUPS - 1; s++) {\n      top",
        LARGEST,
        (ENGINE, 1, 1024),
    ),
    Mutant(
        "largest score without the first simdgroup",
        ATTENTION,
        "int s = 0; s < SIMDGROUPS; s++) {\n      top",
        "int s = 1; s < SIMDGROUPS; s++) {\n      top",
        LARGEST,
        (ENGINE, 3, 1024),
    ),
    Mutant(
        "largest score without the last part",
        REDUCE,
        "i < num_items; i++) {\n  top",
        "i < num_items - 1; i++) {\n  top",
        LARGEST,
        (ENGINE, 1, 32),
    ),
    Mutant(
        "parts of the first token for all",
        REDUCE,
        "first_item = parts[3 * token + 1]",
        "first_item = parts[1]",
        LARGEST,
        (ENGINE, 1, 32),
    ),
    # Bytes
    Mutant(
        "tokens before the window are read",
        HEADER,
        "c < CHUNKS && row >= begin &&",
        "c < CHUNKS &&",
        counts.test_a_sliding_window_reads_what_it_sees,
    ),
    Mutant(
        "tokens after the last are read",
        HEADER,
        "c < CHUNKS && row >= begin && row < end",
        "c < CHUNKS && row >= begin",
        counts.test_decode_reads_once_per_group_of_query_heads,
        (ENGINE, 1, 128),
    ),
    Mutant(
        "a whole row by half of the lanes",
        HEADER,
        "chunks_per_row<DIM>() <= 16 ? 16 : 32",
        "16",
        DECODE,
        decode(head_dim=80),
    ),
    # Writes and copies
    Mutant(
        "negative slots are written",
        "kv_write.metal",
        "if (slot < 0)",
        "if (false)",
        in_place.check_write,
        (FLOATS, "float32", True),
    ),
    Mutant(
        "block and position swapped",
        "kv_write.metal",
        "block = slot / BLOCK_SIZE, position = slot % BLOCK_SIZE",
        "block = slot % BLOCK_SIZE, position = slot / BLOCK_SIZE",
        in_place.check_write,
        (FLOATS, "float32", True),
    ),
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
        "element stride forgotten",
        "kv_write.metal",
        "(4 * c + e) * element_stride",
        "(4 * c + e)",
        in_place.check_write,
        (FLOATS, "float32", False),
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


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.name.replace(" ", "-"))
def test_planted_faults_are_caught(mutant, monkeypatch):
    with planted(mutant, monkeypatch):
        convict(mutant.test, mutant.arguments)


def test_there_are_enough_faults_of_every_kind():
    assert len(MUTANTS) >= 60
    assert len({mutant.name for mutant in MUTANTS}) == len(MUTANTS)


def test_without_a_fault_the_same_batches_pass():
    for mutant in MUTANTS:
        if mutant.test is DECODE:
            batch = Batch(kv_heads=2, **mutant.arguments[1])
            batch.check(batch.run(ENGINE.factory(0)))
