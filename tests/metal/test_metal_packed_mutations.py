"""Faults planted into what the kernels have for planes of 8 and 4 bits, each caught by the test named with it.

What counts is said in metal_mutants.py.
"""

import metal_cases
import pytest
import test_metal_packed as planes
import test_metal_packed_attention as attention
from metal_mutants import ENGINE, Mutant, convict, planted

from kvpool.config import KVSpec
from kvpool_backends.mlx.metal_kernels import HeadTiles

HEADER, ATTENTION = "kv_packed.h", "paged_attention.metal"
WRITE, GATHER, TOKENS, COPY = "kv_write_packed.metal", "gather_packed.metal", "packed_tokens.metal", "copy_blocks.metal"
SPEC = KVSpec(1, 3, 128, "float16", 8, k_bits=8, quant_group_size=32)


def write(spec=SPEC, x_dtype="float16", vectors=True):
    return spec, x_dtype, vectors, None, (0,)


def decode(bits=(8, 4), contexts=(42,), features=(), **choice):
    """One batch, without the schedules of the test itself."""
    choice = {"head_dim": 64, "size": 32, "seq_lens": contexts, "group": 2, "features": features} | choice
    batch = attention.batch_of(bits, **choice)
    batch.check(batch.run(ENGINE.factory(0)))


def unequal_decode():
    decode(v_head_dim=128)


def near_ties(bits=8):
    planes.test_write_near_ties_rounds_as_a_division_does(bits)


GATHERED = planes.test_gather_equals_what_mx_dequantize_gives
COPIED = planes.test_copy_blocks_copies_every_plane
MUTANTS = [
    # Quantization
    Mutant(
        "one step less", HEADER, "BITS == 8 ? 255.0f : 15.0f", "BITS == 8 ? 254.0f : 14.0f", planes.check_write, write()
    ),
    Mutant(
        "half a group", HEADER, "int distance = SIZE / 8;", "int distance = SIZE / 16;", planes.check_write, write()
    ),
    Mutant("the sign of the scale", HEADER, "below ? step : -step", "step", planes.check_write, write()),
    Mutant(
        "0 is no step", HEADER, "whole == 0.0f ? signed_step : edge / whole", "signed_step", planes.check_write, write()
    ),
    Mutant("the bias of a group at 0", HEADER, "whole == 0.0f ? 0.0f : edge", "edge", planes.check_write, write()),
    Mutant("the edge is the least", HEADER, "edge = below ? low : high", "edge = low", planes.check_write, write()),
    Mutant("the least scale is another", HEADER, "1e-7f", "1e-6f", planes.check_write, write()),
    Mutant(
        "times the inverse",
        HEADER,
        "(x[e] - result.bias) / result.scale)",
        "(x[e] - result.bias) * (1.0f / result.scale))",
        near_ties,
        (8,),
    ),
    Mutant(
        "ties away from zero",
        HEADER,
        "metal::rint((x[e] - result.bias) / result.scale)",
        "metal::floor((x[e] - result.bias) / result.scale + 0.5f)",
        planes.check_write,
        write(),
    ),
    Mutant(
        "infinity is finite",
        "kv_layout.h",
        "& 0x7f800000u) == 0x7f800000u",
        "& 0x7fffffffu) > 0x7f800000u",
        planes.test_a_group_that_is_not_finite_is_nan_and_its_neighbours_are_not,
        (float("inf"),),
    ),
    Mutant(
        "NaN in one lane alone",
        HEADER,
        "    bad |= metal::simd_shuffle_xor(bad, ushort(distance));\n",
        "",
        planes.test_a_group_that_is_not_finite_is_nan_and_its_neighbours_are_not,
        (float("nan"),),
    ),
    Mutant(
        "the first element highest",
        HEADER,
        "uchar(int(x[0]) | int(x[1]) << 4)",
        "uchar(int(x[1]) | int(x[0]) << 4)",
        planes.check_write,
        write(KVSpec(1, 3, 128, "float16", 8, v_bits=4)),
    ),
    Mutant(
        "not rounded to the dtype",
        WRITE,
        "float4(kv::Chunk<T>(float4(chunk)))",
        "float4(chunk)",
        planes.check_write,
        write(x_dtype="float32"),
    ),
    # Where it goes
    Mutant("negative slots are written", WRITE, "if (slot < 0)", "if (false)", planes.check_write, write()),
    Mutant("the element stride forgotten", WRITE, "* strides[2]", "", planes.check_write, write(vectors=False)),
    Mutant(
        "the layout of the words for scales",
        WRITE,
        "head_of(layout + 4, head)",
        "head_of(layout, head)",
        planes.check_write,
        write(),
    ),
    Mutant(
        "every lane stores the scale",
        WRITE,
        "if (4 * c % SIZE == 0)",
        "if (true)",
        planes.test_a_write_moves_each_byte_once,
        (4,),
    ),
    Mutant(
        "scale and bias swapped",
        WRITE,
        "scales[factor] = T(made.scale)",
        "scales[factor] = T(made.bias)",
        planes.check_write,
        write(),
    ),
    Mutant(
        "strides of tokens forgotten",
        TOKENS,
        "token * x_strides[0] + head * x_strides[1]",
        "(token * threads_per_grid.y + head) * DIM",
        planes.test_packed_tokens_are_those_of_mx_quantize,
        (ENGINE, 8, 64, "float16"),
    ),
    Mutant(
        "four elements of a plane that has one", COPY, "if (WIDTH == 1)", "if (false)", COPIED, ("NHD", "k_scales", 1)
    ),
    # Reads
    Mutant(
        "nibbles swapped", HEADER, "bytes[0] & 15, bytes[0] >> 4,", "bytes[0] >> 4, bytes[0] & 15,", decode, ((4, 4),)
    ),
    Mutant(
        "the scale of the first group",
        HEADER,
        "plane.scales[group]",
        "plane.scales[group - 4 * c / SIZE]",
        decode,
        (),
    ),
    Mutant(
        "the bias of the next token",
        HEADER,
        "plane.biases[group]",
        "plane.biases[group + plane.factors.slot_stride]",
        decode,
        (),
    ),
    Mutant("the bias once per element", HEADER, "bias[a][j] * sum_of_other", "bias[a][j]", decode, ()),
    Mutant(
        "the bias of values forgotten",
        HEADER,
        "numbers(chunk[a][j]) + bias[a][j];",
        "numbers(chunk[a][j]);",
        decode,
        (),
    ),
    Mutant("rows nobody has are read", HEADER, "ALL || (row >= begin && row < end)", "true", decode, ()),
    Mutant(
        "the layout of the keys' scales for values",
        ATTENTION,
        "const auto v_plane = kv::plane_of(v_pool, v_scales, v_biases, layout + 4, kv_head);",
        "auto v_plane = kv::plane_of(v_pool, v_scales, v_biases, layout + 4, kv_head);"
        "v_plane.factors = k_plane.factors;",
        unequal_decode,
        (),
    ),
    Mutant("the scales of the keys for values", ATTENTION, "v_pool, v_scales", "v_pool, k_scales", decode, ()),
    Mutant("the sum of another query", ATTENTION, "sum_of_query[r][j]);", "sum_of_query[0][j]);", decode, ()),
    Mutant(
        "gathered past the end",
        GATHER,
        "token < seq_lens[batch_row]",
        "true",
        GATHERED,
        (ENGINE, "NHD", 8, 8, 64, "float16"),
    ),
    Mutant(
        "gathered with the layout of the words",
        GATHER,
        "layout + 4",
        "layout",
        GATHERED,
        (ENGINE, "HND", 8, 8, 64, "float16"),
    ),
    Mutant(
        "gathered with another group's scale",
        GATHER,
        "+ 4 * c / SIZE",
        "+ 0 * c / SIZE",
        GATHERED,
        (ENGINE, "NHD", 4, 4, 32, "float32"),
    ),
]


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.name.replace(" ", "-"))
def test_planted_faults_are_caught(mutant, monkeypatch):
    with planted(mutant, monkeypatch):
        convict(mutant.test, mutant.arguments)


def test_a_query_head_that_reads_for_itself_is_caught(monkeypatch):
    monkeypatch.setattr(metal_cases, "head_tiles", lambda spec, group, queries: HeadTiles(1, group, 1))
    convict(attention.test_decode_reads_the_bytes_of_the_format, (ENGINE, (4, 4), 64, 4, 0.5625))


def test_without_a_fault_the_same_batches_pass():
    batches = (decode, unequal_decode, planes.check_write)
    calls = {str((mutant.test, mutant.arguments)): mutant for mutant in MUTANTS if mutant.test in batches}
    for mutant in calls.values():  # each once, however many faults it catches
        mutant.test(*mutant.arguments)
    assert len({mutant.name for mutant in MUTANTS}) == len(MUTANTS)
