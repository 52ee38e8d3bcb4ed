"""The numpy backend beyond the conformance kit: rounding bit by bit, exactness, own inputs, refusals."""

import numpy as np
import pytest

from kvpool.config import KVSpec
from kvpool.protocol import StepArrays
from kvpool.testing.dense import round_to
from kvpool_backends.numpy import NumpyBackend
from kvpool_backends.numpy.elements import from_bfloat16, to_bfloat16

SEED = 7


def slots(*numbers):
    return StepArrays(slot_mapping=np.array(numbers, np.int32))


# ---------------------------------------------------------------------- bfloat16


def test_to_bfloat16_rounds_random_bits_like_the_oracle():
    bits = np.random.default_rng(SEED).integers(0, 2**32, 200_000, dtype=np.uint32)
    bits[:50_000] &= 0xFFFF_8000  # ties, and what is exact
    with np.errstate(invalid="ignore"):
        x = bits.view(np.float32)
        assert np.array_equal(from_bfloat16(to_bfloat16(x)), round_to(x, "bfloat16"), equal_nan=True)
    assert to_bfloat16(np.array([1e300, -0.0, 3.3895314e38])).tolist() == [0x7F80, 0x8000, 0x7F7F]


def test_bfloat16_round_trips_all_patterns_and_keeps_nan():
    every = np.arange(2**16, dtype=np.uint16)
    values = from_bfloat16(every)
    again = to_bfloat16(values)
    nan = np.isnan(values)
    assert np.array_equal(again[~nan], every[~nan])
    assert np.isnan(from_bfloat16(again[nan])).all() and nan.sum() == 2 * 127
    assert np.array_equal(again[nan] >> 15, every[nan] >> 15)


# ---------------------------------------------------------------------- exactness


def test_results_own_their_memory():
    backend = NumpyBackend(KVSpec(1, 1, 4, "float32", 2), 3)
    plan = StepArrays(np.array([[1]]), np.array([1]), np.array([0, 1]), np.array([2]))
    ones = np.ones((1, 1, 4), np.float32)
    backend.write(backend.prepare(plan), 0, ones, ones)
    for result in (*backend.gather(0, [1]), backend.attend(backend.prepare(plan), 0, ones), backend.export_blocks([1])):
        for planes in backend._planes:
            assert not any(np.shares_memory(result, plane) for plane in planes)
    assert backend.export_blocks([]).shape == (0, backend.spec.block_nbytes)


# ---------------------------------------------------------------------- refusals


def call(name, *args):
    return lambda backend: getattr(backend, name)(*args)


def on_step(name, plan, *args):
    return lambda backend: getattr(backend, name)(backend.prepare(plan), *args)


ONE = np.ones((1, 2, 4), np.float32)
ROW = {"block_tables": np.array([[1]]), "seq_lens": np.array([1]), "cu_q_lens": np.array([0, 1])}


@pytest.mark.parametrize(
    ("misuse", "error"),
    [
        (on_step("write", slots(4), 0, ONE.astype(np.int32), ONE), TypeError),
        (on_step("write", slots(4), True, ONE, ONE), TypeError),
        (on_step("write", slots(4), 0, ONE[0], ONE), ValueError),
        (on_step("attend", StepArrays(**ROW), 0, ONE.astype(np.int64)), TypeError),
        (on_step("attend", StepArrays(**ROW), 0, ONE[:, :0]), ValueError),
        (on_step("attend", StepArrays(**ROW | {"cu_q_lens": np.array([0, 2])}), 0, ONE), ValueError),
        (on_step("attend", StepArrays(**ROW | {"cu_q_lens": np.array([1, 1])}), 0, ONE), ValueError),
        (on_step("attend", StepArrays(**ROW | {"cu_q_lens": np.array([0])}), 0, ONE), ValueError),
        (on_step("attend", StepArrays(**ROW | {"seq_lens": np.array([0])}), 0, ONE), ValueError),
        (on_step("attend", StepArrays(**ROW | {"seq_lens": np.array([5])}), 0, ONE), ValueError),
        (on_step("attend", StepArrays(**ROW | {"block_tables": np.array([[3]])}), 0, ONE), IndexError),
        (on_step("attend", StepArrays(**ROW | {"block_tables": np.zeros((0, 1))}), 0, ONE), ValueError),
        (on_step("attend", StepArrays(**ROW), 0, ONE, float("nan")), ValueError),
        (call("copy_blocks", np.zeros((2, 2), np.int32)), ValueError),
        (call("zero", [[1]]), ValueError),
        (call("gather", 0, [1], -1), ValueError),
        (call("import_blocks", [1], np.zeros((1, 128), np.int8)), TypeError),
    ],
)
def test_misuse_raises_and_changes_nothing(misuse, error):
    backend = NumpyBackend(KVSpec(1, 2, 4, "float32", 4), 3)
    before = backend.export_blocks([0, 1, 2])
    with pytest.raises(error, match=r"^\[\w+\] "):
        misuse(backend)
    assert np.array_equal(backend.export_blocks([0, 1, 2]), before)


@pytest.mark.parametrize("size", [2, 5])
def test_blocks_in_memory_of_the_caller_are_not_resized_without_more_of_it(size):
    spec = KVSpec(1, 2, 4, "float32", 4, layout="block")
    rows = np.zeros((3, spec.block_nbytes), np.uint8)
    backend = NumpyBackend(spec, 3, storage=rows)
    with pytest.raises(TypeError, match=r"\[resize\] the blocks are in `storage`"):
        backend.resize(size, [])
    assert backend.num_blocks == 3 and rows.shape == (3, spec.block_nbytes)
