"""Faults planted into the shipped kernels, one for each kind of test, each caught by the test that is named with it.

A fault that its test does not notice fails here: the tests of the kernels are tested. The other tests here are those
of the kernels that `make test` has.
"""

import os
from contextlib import contextmanager
from typing import NamedTuple

import metal_cases
import pytest
import test_metal_attention as attention
import test_metal_bytes as counts
import test_metal_moves as moves
import test_metal_packed_attention as packed_attention
import test_metal_scores as scores
from metal_cases import FEATURES, Batch
from metal_engine import ENGINES
from msl import MetalError

from kvpool.config import KVSpec
from kvpool_backends.mlx import metal_kernels
from kvpool_backends.mlx.metal_kernels import HeadTiles

ENGINE = ENGINES[os.environ.get("KVPOOL_METAL_ENGINE", "stand-in")]()


class Mutant(NamedTuple):
    name: str
    file: str
    before: str
    after: str
    test: object
    arguments: tuple = (ENGINE,)


def check_that_it_fails(test, arguments):
    """With a wrong result, a wrong count or an error of the launch; a text that does not compile counts as nothing."""
    with pytest.raises((AssertionError, MetalError)) as caught:
        test(*arguments)
    assert "the compiler refused" not in str(caught.value)


@contextmanager
def planted(mutant, monkeypatch):
    """The text of a file is another one, which is what all kernels are made of."""
    real = metal_kernels._file_text
    assert real(mutant.file).count(mutant.before) == 1, "the shipped text has changed: say again where the fault goes"
    changed = real(mutant.file).replace(mutant.before, mutant.after)
    monkeypatch.setattr(metal_kernels, "_file_text", lambda name: changed if name == mutant.file else real(name))
    metal_kernels.source_text.cache_clear()
    try:
        yield
    finally:
        metal_kernels.source_text.cache_clear()


VECTORS, REDUCE, PACKED = "paged_attention.metal", "paged_reduce.metal", "kv_packed.h"
BARRIER = "threadgroup_barrier(mem_flags::mem_threadgroup);"
SHUFFLE = "    bad |= metal::simd_shuffle_xor(bad, ushort(distance));\n"


def packed_decode():
    """One batch over planes of 8 and 4 bits, with values of other dimensions."""
    batch = packed_attention.batch_of((8, 4), head_dim=64, v_head_dim=128, size=32, seq_lens=(42,), group=2)
    batch.check(batch.run(ENGINE.factory(0)))


def races(features):
    counts.test_no_race_in_any_schedule(ENGINE, Batch, {"head_dim": 64, "group": 4, "features": features})


def windows():
    attention.test_windows_and_chunks_equal_float64(ENGINE, 1, 64, "NHD", ("window",))


MUTANTS = [
    Mutant(
        "a barrier that orders other memory", VECTORS, BARRIER, BARRIER.replace("threadgroup)", "device)"), races, ((),)
    ),
    Mutant("window one too long", VECTORS, "> position - window_tokens", ">= position - window_tokens", windows, ()),
    Mutant(
        "last part dropped",
        REDUCE,
        "parts[3 * token + 2]",
        "parts[3 * token + 2] - 1",
        attention.test_any_number_of_parts_agrees,
        (ENGINE, ()),
    ),
    Mutant(
        "raw: the row of the first sequence",
        VECTORS,
        "int64_t(item.row) * threadgroups_per_grid.x",
        "int64_t(0)",
        scores.test_scores_of_chunks_are_of_the_newest_query,
        (ENGINE, FEATURES, 1, "raw"),
    ),
    Mutant(
        "packed: NaN in one lane alone",
        PACKED,
        SHUFFLE,
        "",
        moves.test_a_group_that_is_not_finite_is_nan_and_its_neighbours_are_not,
        (float("nan"),),
    ),
]


@pytest.mark.long
@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.name.replace(" ", "-"))
def test_planted_faults_are_caught(mutant, monkeypatch):
    with planted(mutant, monkeypatch):
        check_that_it_fails(mutant.test, mutant.arguments)


@pytest.mark.long
def test_a_query_head_that_reads_for_itself_is_caught(monkeypatch):
    monkeypatch.setattr(metal_cases, "head_tiles", lambda spec, group, queries: HeadTiles(1, group, 1))
    check_that_it_fails(packed_attention.test_decode_reads_the_bytes_of_the_format, (ENGINE, (4, 4), 64, 4, 0.5625))


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
