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

ATTENTION, MATRIX, REDUCE = "paged_attention.metal", "paged_matrix.metal", "paged_reduce.metal"
HEADER, SHARED = "kv_layout.h", "paged_attention.h"
FLOATS = KVSpec(1, 2, 80, "float32", 8)


def decode(**choice):
    """Arguments of the test of one decode batch."""
    return ENGINE, {"seq_lens": (100, 17), "group": 2} | choice


def windows(features=(), group=3, head_dim=80, layout="HND"):
    return ENGINE, group, head_dim, layout, features


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
LATENT = {"head_dim": (80, 24), "group": 8, "seq_lens": (257, 17), "part_tokens": 512}
BARRIER = "threadgroup_barrier(mem_flags::mem_threadgroup);"

MUTANTS = [
    # Barriers
    Mutant(
        "no barrier before the reduction",
        ATTENTION,
        f"{BARRIER}\nfor (int i",
        "for (int i",
        DECODE,
        decode(),
    ),
    Mutant(
        "a barrier of the simdgroup only",
        ATTENTION,
        f"{BARRIER}\nfor (int i",
        "simdgroup_barrier(mem_flags::mem_threadgroup);\nfor (int i",
        DECODE,
        decode(),
    ),
    Mutant(
        "a barrier that orders other memory",
        ATTENTION,
        f"{BARRIER}\nfor (int i",
        "threadgroup_barrier(mem_flags::mem_device);\nfor (int i",
        RACES,
        (ENGINE, 64, "NHD", ()),
    ),
    # Masks
    Mutant("later tokens are visible", ATTENTION, " && my_token <= position &&", " &&", WINDOWS, SMALL),
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
        (*SMALL[:-1], ("window",)),
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
        "item.first_query * mask_strides[0] + ",
        WINDOWS,
        (*SMALL[:-1], FEATURES),
    ),
    Mutant(
        "-inf is added like any number",
        SHARED,
        "return added != -INFINITY;",
        "return true;",
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
        HEADER,
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
        STRIDED,
    ),
    Mutant("rows taken for neighbours", HEADER, "first + row * stride", "first + row * DIM", DECODE, decode()),
    # Indices
    Mutant(
        "query heads interleaved",
        ATTENTION,
        "token = r / GROUP, head = kv_head * GROUP + r % GROUP;\n  const bool",
        "token = r / GROUP, head = r % GROUP * 2 + kv_head;\n  const bool",
        DECODE,
        decode(),
    ),
    Mutant(
        "first row of the table for all",
        ATTENTION,
        "tables + item.row * tables_strides[0];",
        "tables;",
        DECODE,
        decode(),
    ),
    Mutant(
        "first half of a block only",
        HEADER,
        "plane, block, (tile.begin + t) % BLOCK_SIZE",
        "plane, block, t % 8",
        DECODE,
        decode(),
    ),
    Mutant(
        "chunks past the end of a row",
        HEADER,
        "c < CHUNKS && (ALL",
        "(ALL",
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
        "item.begin + simd",
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
    Mutant("parts of another token", REDUCE, "int row = parts[3 * token] * HEADS +", "int row =", WINDOWS, SMALL),
    Mutant(
        "sink counted by every part",
        SHARED,
        "float4(largest, sum, 0.0f",
        "float4(largest, sum + (sink == -INFINITY ? 0.0f : weight(sink, largest)), 0.0f",
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
        "exists ? sinks[head]",
        "exists ? sinks[head] * kv::LOG2E",
        DECODE,
        decode(features=("sinks",)),
    ),
    Mutant("values are not rescaled", ATTENTION, "values[r][j] *= correction;", "", DECODE, decode(seq_lens=(512,))),
    Mutant(
        "sums are not rescaled",
        ATTENTION,
        "sum = sum * correction + total;",
        "sum = sum + total;",
        DECODE,
        decode(seq_lens=(512,)),
    ),
    Mutant(
        "last simdgroup dropped",
        ATTENTION,
        "for (int s = 0; s < SIMDGROUPS; s++) {\n    const float w",
        "for (int s = 0; s < SIMDGROUPS - 1; s++) {\n    const float w",
        DECODE,
        decode(seq_lens=(512,)),
    ),
    Mutant("scale dropped", ATTENTION, "scores[r] * scale", "scores[r]", DECODE, decode()),
    Mutant("weights in the wrong base", HEADER, "(score - largest) * LOG2E", "score - largest", DECODE, decode()),
    *(
        Mutant(
            f"{kernel}: the base changed before the difference",
            HEADER,
            "(score - largest) * LOG2E",
            "score * LOG2E - largest * LOG2E",
            ENDS,
            (ENGINE, group, q_lens, 64),
        )
        for kernel, group, q_lens in (("vectors", 1, (1, 1)), ("matrices", 16, (4, 4)))
    ),
    Mutant(
        "soft cap after the bias",
        SHARED,
        "soft_cap * metal::precise::tanh",
        "metal::precise::tanh",
        DECODE,
        decode(features=("soft_cap",)),
    ),
    Mutant(
        "bias by position, not by distance",
        ATTENTION,
        "my_token - position,",
        "my_token,",
        DECODE,
        decode(features=("alibi_slopes", "sinks")),  # without a sink, what is added to all scores changes nothing
    ),
    # Ends of runs
    Mutant(
        "a later tile of one token dropped",
        ATTENTION,
        "while (tile.begin < seen_end)",
        "while (tile.begin + (tile.begin > run_begin) < seen_end)",
        LAST_TILES,
        (ENGINE, "paged_attention", 16, ()),
    ),
    Mutant(
        "a last tile of 31 tokens loses one",
        HEADER,
        "metal::min(32, seen_end - begin);",
        "metal::min(32, seen_end - begin) - (seen_end - begin == 31 ? 1 : 0);",
        LAST_TILES,
        (ENGINE, "paged_attention", 8, ()),
    ),
    Mutant(
        "a last tile is read in fours",
        HEADER,
        "metal::min(32, seen_end - begin);",
        "metal::min(32, (seen_end - begin + 3) / 4 * 4);",
        LAST_TILES,
        (ENGINE, "paged_attention", 32, ("sinks",)),
    ),
    Mutant(
        "first token of a window is not read",
        HEADER,
        "metal::max(0, seen_begin - begin)",
        "(seen_begin > begin ? seen_begin - begin + 1 : 0)",
        WINDOWS,
        windows(("window",)),
    ),
    Mutant(
        "one block for a whole tile",
        HEADER,
        "tile.block_of_lane, ushort(t % 32)",
        "tile.block_of_lane, ushort(0)",
        LAST_TILES,
        (ENGINE, "paged_attention", 8, ()),
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
        "sum = sum * correction + total;",
        "sum = float(T(sum * correction + total));",
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
        "values[r][j] += w * rows[h].floats(a, j);",
        "values[r][j] = float4(kv::Chunk<T>(values[r][j] + w * rows[h].floats(a, j)));",
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
        "s < SIMDGROUPS; s++) {\n    top",
        "s < SIMDGROUPS - 1; s++) {\n    top",
        LARGEST,
        (ENGINE, 1, 1024),
    ),
    Mutant(
        "largest score without the first simdgroup",
        ATTENTION,
        "int s = 0; s < SIMDGROUPS; s++) {\n    top",
        "int s = 1; s < SIMDGROUPS; s++) {\n    top",
        LARGEST,
        (ENGINE, 3, 1024),
    ),
    Mutant(
        "largest score without the last part",
        REDUCE,
        "i < num_items; i += 32",
        "i < num_items - 1; i += 32",
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
        "ALL || (row >= begin && row < end)",
        "ALL || row < end",
        counts.test_a_sliding_window_reads_what_it_sees,
    ),
    Mutant(
        "tokens after the last are read",
        HEADER,
        "ALL || (row >= begin && row < end)",
        "ALL || row >= begin",
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
    # Sums over lanes, and what is read early
    Mutant("halves swapped", HEADER, "(odd ? y : x) + ", "(odd ? x : y) + ", DECODE, decode()),
    Mutant(
        "a lane's own half twice",
        HEADER,
        "simd_shuffle_xor(odd ? x : y",
        "simd_shuffle_xor(odd ? y : x",
        DECODE,
        decode(),
    ),
    Mutant(
        "one step of sums too few",
        ATTENTION,
        "int distance = 2 * Keys::ACCESSES",
        "int distance = 4 * Keys::ACCESSES",
        DECODE,
        decode(),
    ),
    Mutant("keys of the next step are the same", ATTENTION, "tile, t + K_STEP + h", "tile, t + h", DECODE, decode()),
    Mutant("values of the next step are the same", ATTENTION, "tile, t + V_STEP + h", "tile, t + h", DECODE, decode()),
    Mutant(
        "full tiles begin a row early",
        HEADER,
        "} else if (begin <= 0 && end >= STEP)",
        "} else if (begin <= 1 && end >= STEP)",
        counts.test_a_sliding_window_reads_what_it_sees,
    ),
    # Matrix units
    *(
        Mutant(f"matrix: {name}", MATRIX, before, after, DECODE, decode(group=16, seq_lens=(257, 17), **choice))
        for name, before, after, choice in (
            ("scale dropped", "product * scale", "product", {}),
            ("a share of the products dropped", "s < SIMDGROUPS; s++", "s < SIMDGROUPS - 1; s++", {"head_dim": 128}),
            ("values are not rescaled", "thread_elements()[0] *= correction;", "thread_elements()[0] *= 1.0f;", {}),
            ("sums are not rescaled", "sum = sum * correction + total;", "sum = sum + total;", {}),
            ("largest of another row", "simd_shuffle(largest, ushort(i))", "simd_shuffle(largest, ushort(0))", {}),
            ("elements of a query in order", "place.row / 2 * 4 + 2 * f + place.row % 2", "place.row + 8 * f", {}),
            (
                "the first simdgroup's elements",
                "4 * UNITS * simd + place.column / 2",
                "place.column / 2",
                {"head_dim": 128},
            ),
            ("sink in the wrong base", "? sinks[head]", "? sinks[head] * kv::LOG2E", {"features": ("sinks",)}),
            (
                "last fragment of tokens dropped",
                "for (int i = 0; i < 4; i++) {\n      bool finite",
                "for (int i = 0; i < 3; i++) {\n      bool finite",
                {},
            ),
            (
                "window one too short",
                "my_token > position - window",
                "my_token > position + 1 - window",
                {"features": ("window",)},
            ),
            ("mask of another head", ": head * mask_strides[1]", ": 0", {"features": ("mask",)}),
        )
    ),
    *(
        Mutant(f"matrix: {name}", MATRIX, before, after, test, arguments)
        for name, before, after, test, arguments in (
            (
                "no barrier before weights",
                f"  {BARRIER}\n\n  const int my_token",
                "  const int my_token",
                RACES,
                CHUNKS,
            ),
            ("no barrier before values", f"  {BARRIER}\n\n  if (!is", "  if (!is", RACES, CHUNKS),
            ("no barrier before the end", f"{BARRIER}\nKV_UNROLL", "KV_UNROLL", RACES, CHUNKS),
            ("later tokens are visible", " && my_token <= position &&", " &&", WINDOWS, windows()),
            ("0 times infinity", "QUERIES == 1 && !MASK;", "true;", INFINITE, (ENGINE,)),
            ("infinity in another row", "lane_of_row(t, lane)", "lane_of_row(0, lane)", INFINITE, (ENGINE,)),
            ("queries taken for contiguous", "* q_strides[0] +", "* q_shape[1] * DIM +", STRIDED, (ENGINE,)),
            (
                "heads of the first tile",
                "% HEAD_GROUPS * HEADS;",
                "* 0;",
                attention.test_groups_of_many_heads_equal_float64,
                (ENGINE, 71),
            ),
        )
    ),
    Mutant(
        "matrix: rows of a fragment swapped",
        "kv_matrix.h",
        "(lane >> 2 & 4) | (lane >> 1 & 3)",
        "(lane >> 2 & 4) | (lane >> 1 & 3 ^ 1)",
        DECODE,
        decode(group=16),
    ),
    Mutant("matrix: tokens past the end", "kv_matrix.h", " && t < tile.num_tokens", "", DECODE, decode(group=16)),
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
    *(
        Mutant(f"matrix: {name}", MATRIX, before, after, test, arguments)
        for name, before, after, test, arguments in (
            (
                "a last tile of one token dropped",
                "begin < item.seen_end; begin",
                "begin + 1 < item.seen_end; begin",
                LAST_TILES,
                (ENGINE, "paged_matrix", 16, ()),
            ),
            (
                "weights in the pool's type",
                "shared_weights[r * WIDTH + lane] = w;",
                "shared_weights[r * WIDTH + lane] = float(T(w));",
                DECODE,
                decode(group=16, dtype="float16"),
            ),
            (
                "sums are rescaled twice",
                "sum = sum * correction + total;",
                "sum = (sum + total) * correction;",
                DECODE,
                decode(group=16),
            ),
            (
                "another row's correction",
                "shared_corrections[8 * m + place.row]",
                "shared_corrections[8 * m + place.column]",
                DECODE,
                decode(group=16),
            ),
            (
                "slope of the first head",
                "slopes + head,",
                "slopes + kv_head * GROUP,",
                DECODE,
                decode(group=16, features=("alibi_slopes",)),
            ),
            (
                "all queries stand where the first does",
                "position = item.first_position + r / HEADS;",
                "position = item.first_position;",
                WINDOWS,
                windows(),
            ),
            (
                "rows of nobody are stored",
                "c < kv::chunks_per_row<VALUE_DIM>() && (exists || !DIRECT)",
                "c < kv::chunks_per_row<VALUE_DIM>()",
                DECODE,
                (ENGINE, {"group": 9, "queries": 5, "seq_lens": (40,), "dtype": "float16"}),
            ),
            (
                "parts lie as far apart as whole matrices",
                "threadgroup_position_in_grid.x) * ROWS + r;",
                "threadgroup_position_in_grid.x) * 8 * TILES + r;",
                DECODE,
                decode(group=9, part_tokens=32),
            ),
            (
                "scores of the newest query's neighbour",
                "r / HEADS == observed_query",
                "r / HEADS == max(observed_query - 1, 0)",
                scores.test_scores_of_chunks_are_of_the_newest_query,
                (ENGINE, FEATURES, 3, "raw"),
            ),
        )
    ),
    # Latents and rotary parts
    *(
        Mutant(f"latent: {name}", file, before, after, DECODE, decode(**LATENT | choice))
        for name, file, before, after, choice in (
            (
                "queries of rotary parts begin with the query",
                MATRIX,
                "(is_rotary ? DIM - 16 * UNITS * OWNERS : 0)",
                "(is_rotary ? -16 * UNITS * OWNERS : 0)",
                {},
            ),
            ("rotary parts of queries are 0", MATRIX, "is_rotary ? DIM + ROTARY : DIM;", "DIM;", {}),
            (
                "rotary parts have the latent's chunks",
                MATRIX,
                "place.row, rotary_chunk)",
                "place.row, first_chunk)",
                {},
            ),
            (
                "rotary parts are latents",
                MATRIX,
                "(keys, v_plane, tile, place.row, r",
                "(keys, latents, tile, place.row, r",
                {},
            ),
            (
                "latents are read as rotary parts",
                "kv_matrix.h",
                "P latents_of(P latents, P)",
                "P latents_of(P, P latents)",
                {},
            ),
            ("values of one simdgroup dropped", MATRIX, "  if (!is_rotary) {", "  if (simd < OWNERS - 1) {", {}),
            (
                "values and sums have rotary simdgroups' rows",
                MATRIX,
                "const int mine = simd + SIMDGROUPS * lane;",
                "const int mine = simd + OWNERS * lane;",
                {},
            ),
        )
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


# Each of them has a sibling that the same test catches in `make test`.
SIBLINGS = {
    "a last tile is read in fours",
    "a last tile of 31 tokens loses one",
    "every part begins at 0",
    "largest score without the first simdgroup",
    "mask of another query",
    "matrix: a share of the products dropped",
    "matrix: another row's correction",
    "matrix: no barrier before the end",
    "matrix: no barrier before values",
    "matrix: slots of blocks that do not divide a tile",
    "one block for a whole tile",
    "parts are not weighted",
    "parts of the first token for all",
    "strides in 32 bits",
    "window one too long",
}


def parameter(mutant):
    marks = (pytest.mark.long,) if mutant.name in SIBLINGS else ()
    return pytest.param(mutant, id=mutant.name.replace(" ", "-"), marks=marks)


@pytest.mark.parametrize("mutant", [parameter(mutant) for mutant in MUTANTS])
def test_planted_faults_are_caught(mutant, monkeypatch):
    with planted(mutant, monkeypatch):
        convict(mutant.test, mutant.arguments)


def test_there_are_enough_faults_of_every_kind():
    assert len(MUTANTS) >= 100 and {mutant.name for mutant in MUTANTS} >= SIBLINGS
    assert len({mutant.name for mutant in MUTANTS}) == len(MUTANTS)


@pytest.mark.long
def test_without_a_fault_the_same_batches_pass():
    choices = {str(mutant.arguments[1]): mutant.arguments[1] for mutant in MUTANTS if mutant.test is DECODE}
    for choice in choices.values():
        batch = attention.batch_of(choice)
        batch.check(batch.run(ENGINE.factory(0)))
