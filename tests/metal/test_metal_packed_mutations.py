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


MUTANTS = [
    # Quantization
    Mutant("the bias of a group at 0", HEADER, "whole == 0.0f ? 0.0f : edge", "edge", planes.check_write, write()),
    Mutant(
        "times the inverse",
        HEADER,
        "(x[e] - result.bias) / result.scale)",
        "(x[e] - result.bias) * (1.0f / result.scale))",
        near_ties,
        (8,),
    ),
    Mutant(
        "NaN in one lane alone",
        HEADER,
        "    bad |= metal::simd_shuffle_xor(bad, ushort(distance));\n",
        "",
        planes.test_a_group_that_is_not_finite_is_nan_and_its_neighbours_are_not,
        (float("nan"),),
    ),
    # Where it goes
    Mutant(
        "every lane stores the scale",
        WRITE,
        "if (4 * c % SIZE == 0)",
        "if (true)",
        planes.test_a_write_moves_each_byte_once,
        (4,),
    ),
    # Reads
    Mutant(
        "the layout of the keys' scales for values",
        ATTENTION,
        "const auto v_plane = kv::plane_of(v_pool, v_scales, v_biases, layout + 4, kv_head);",
        "auto v_plane = kv::plane_of(v_pool, v_scales, v_biases, layout + 4, kv_head);"
        "v_plane.factors = k_plane.factors;",
        unequal_decode,
        (),
    ),
    Mutant("the sum of another query", ATTENTION, "sum_of_query[r][j]);", "sum_of_query[0][j]);", decode, ()),
]


@pytest.mark.long
@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.name.replace(" ", "-"))
def test_planted_faults_are_caught(mutant, monkeypatch):
    with planted(mutant, monkeypatch):
        convict(mutant.test, mutant.arguments)


@pytest.mark.long
def test_a_query_head_that_reads_for_itself_is_caught(monkeypatch):
    monkeypatch.setattr(metal_cases, "head_tiles", lambda spec, group, queries: HeadTiles(1, group, 1))
    convict(attention.test_decode_reads_the_bytes_of_the_format, (ENGINE, (4, 4), 64, 4, 0.5625))


def test_without_a_fault_the_same_batches_pass():
    batches = (decode, unequal_decode, planes.check_write)
    calls = {str((mutant.test, mutant.arguments)): mutant for mutant in MUTANTS if mutant.test in batches}
    for mutant in calls.values():  # each once, however many faults it catches
        mutant.test(*mutant.arguments)
    assert len({mutant.name for mutant in MUTANTS}) == len(MUTANTS)
