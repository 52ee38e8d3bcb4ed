"""Storage in float8 e4m3: bytes by a table of its values, on the reference and on every instruction set."""

import numpy as np
import pytest

from kvpool.config import KVSpec
from kvpool.protocol import StepArrays
from kvpool.testing.dense import FLOAT8_E4M3, round_to, stored_bytes
from kvpool_backends.cpu import CPUBackend, isas
from kvpool_backends.numpy import NumpyBackend
from kvpool_backends.numpy.elements import from_bfloat16, from_float8, to_bfloat16, to_float8

SEED = 8_108
SPEC = KVSpec(1, 2, 64, "float8_e4m3", 16)


def all_kinds() -> np.ndarray:
    """float32 ``[T, 2, 64]``: any bits, ordinary sizes, every middle between two values and its neighbours."""
    rng = np.random.default_rng(SEED)
    middles = ((FLOAT8_E4M3[1:] + FLOAT8_E4M3[:-1]) / 2).astype(np.float32)
    near = [(middles.view(np.int32) + k).view(np.float32) for k in (-1, 0, 1)]
    any_bits = rng.integers(0, 2**32, 30_000, np.uint32).view(np.float32)
    x = np.concatenate([
        np.where(np.isnan(any_bits), np.float32(np.nan), any_bits),
        rng.standard_normal(30_000, np.float32) * np.float32(10.0) ** rng.integers(-4, 4, 30_000),
        *near, *np.negative(near), FLOAT8_E4M3, -FLOAT8_E4M3, [np.nan, -np.nan, np.inf, -np.inf, 448, 464, 1e30, -0.0],
    ]).astype(np.float32)  # fmt: skip
    return np.resize(x, (-(-x.size // 128), 2, 64))


def test_numpy_rounds_as_the_table_of_values_says():
    x = all_kinds()
    assert np.array_equal(to_float8(x).ravel(), stored_bytes(x, "float8_e4m3"))
    assert np.array_equal(from_float8(to_float8(x)), round_to(x, "float8_e4m3"), equal_nan=True)
    assert np.array_equal(from_float8(np.arange(127)), FLOAT8_E4M3)
    assert np.isnan(from_float8(np.array([127, 255]))).all()


def test_the_table_has_the_ends_that_the_format_is_known_for():
    assert FLOAT8_E4M3.size == 127 and (np.diff(FLOAT8_E4M3) > 0).all()
    assert FLOAT8_E4M3[[0, 1, 8, 126]].tolist() == [0, 2.0**-9, 2.0**-6, 448]
    given, stored = [0.0, -0.0, 1e-4, 17, 18, 19, 1e9, -np.inf], [0, -0.0, 0, 16, 18, 20, 448, -448]
    assert round_to(np.array(given), "float8_e4m3").tolist() == stored  # 17 and 19 are ties


@pytest.mark.parametrize("given", ["float32", "float16", "bfloat16"])
@pytest.mark.parametrize("isa", isas())
def test_cpu_stores_and_gathers_the_bytes_of_the_table(isa, given):
    x = all_kinds()
    if given == "float16":
        with np.errstate(over="ignore"):
            k = x.astype(np.float16)
        x = k.astype(np.float32)
    elif given == "bfloat16":
        k = to_bfloat16(x)
        x = from_bfloat16(k)
    else:
        k = x
    backend = CPUBackend(SPEC, -(-len(x) // 16), isa=isa)
    backend.write(backend.prepare(StepArrays(slot_mapping=np.arange(len(x)))), 0, k, k[::-1])
    got = backend.gather(0, np.arange(backend.num_blocks), len(x))
    for expected, back in zip((x, x[::-1]), got, strict=True):
        rounded = round_to(expected, "float8_e4m3")
        assert back.dtype == np.float32 and np.array_equal(back, rounded, equal_nan=True)
    reference = NumpyBackend(SPEC, backend.num_blocks)
    reference.write(reference.prepare(StepArrays(slot_mapping=np.arange(len(x)))), 0, x, x[::-1])
    ids = np.arange(backend.num_blocks)
    assert np.array_equal(backend.export_blocks(ids), reference.export_blocks(ids))
