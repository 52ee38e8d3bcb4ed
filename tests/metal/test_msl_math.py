"""Vectors and the functions of Metal's standard library, against numpy in float64."""

import numpy as np
import pytest
from msl import BFLOAT16, from_bfloat16, to_bfloat16
from test_msl_scalar import elementwise

# Name: oracle and range of the arguments.
FUNCTIONS = {"exp": (np.exp, -9, 9), "exp2": (np.exp2, -9, 9), "rint": (np.rint, -9, 9), "tanh": (np.tanh, -5, 5)}
TOLERANCE = {"float32": 2e-6, "float16": 1e-3, "bfloat16": 8e-3}


def draw(dtype, low, high, count=257, seed=0):
    values = np.random.default_rng(seed).uniform(low, high, count)
    return to_bfloat16(values) if dtype == BFLOAT16 else values.astype(dtype)


def exact(array):
    return (from_bfloat16(array) if array.dtype == BFLOAT16 else array).astype(np.float64)


def close(got, expected, dtype):
    tolerance = TOLERANCE["bfloat16" if dtype == BFLOAT16 else np.dtype(dtype).name]
    np.testing.assert_allclose(exact(got), expected, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("dtype", [np.float32, np.float16, BFLOAT16], ids=["float", "half", "bfloat"])
def test_functions_of_floats(dtype):
    values = [draw(dtype, low, high) for _, low, high in FUNCTIONS.values()]
    names = [f"{namespace}{name}" for namespace in ("", "fast::", "precise::") for name in FUNCTIONS]
    cases = "".join(f"case {row}: y[i] = {name}(a); break;\n" for row, name in enumerate(names))
    got = elementwise(f"a; switch (i / 257) {{ {cases} }}", dtype, np.concatenate(values * 3))
    for variant in got.reshape(3, len(FUNCTIONS), 257):
        for row, value, (oracle, _, _) in zip(variant, values, FUNCTIONS.values(), strict=True):
            close(row, oracle(exact(value)), dtype)
    a, b = (draw(dtype, -9, 9, seed=seed) for seed in range(2))
    for call, expected in (
        ("max(a, b)", np.maximum(exact(a), exact(b))),
        ("min(a, b)", np.minimum(exact(a), exact(b))),
        ("abs(a)", np.abs(exact(a))),
    ):
        close(elementwise(call, dtype, a, b), expected, dtype)


def test_products_and_sums_are_not_contracted():
    a, b, c = (draw(np.float32, -9, 9, seed=seed) for seed in range(3))
    assert (elementwise("a * b + c", np.float32, a, b, c) == a * b + c).all()


def test_numbers_win_over_nan():
    a, b = np.float32([np.nan, 1, np.nan, np.inf]), np.float32([1, np.nan, np.nan, -np.inf])
    np.testing.assert_array_equal(elementwise("max(a, b)", np.float32, a, b), np.float32([1, 1, np.nan, np.inf]))
    np.testing.assert_array_equal(elementwise("min(a, b)", np.float32, a, b), np.float32([1, 1, np.nan, -np.inf]))
    assert (elementwise("exp(-INFINITY * a) + fast::exp(-INFINITY)", np.float32, np.float32([2])) == 0).all()


def test_sizes_and_alignments_are_those_of_metal():
    types = {
        "float2": (8, 8), "float3": (16, 16), "float4": (16, 16), "half2": (4, 4), "half3": (8, 8), "half4": (8, 8),
        "bfloat4": (8, 8), "uchar4": (4, 4), "long4": (32, 32), "bool": (1, 1), "long": (8, 8), "size_t": (8, 8),
        "half": (2, 2), "bfloat": (2, 2), "simdgroup_float8x8": (8, 8),
    }  # fmt: skip
    checks = "".join(f"case {i}: y[i] = 100 * sizeof({t}) + alignof({t}); break;" for i, t in enumerate(types))
    got = elementwise(f"0; switch (i) {{ {checks} }}", np.int32, np.zeros(len(types), np.int32))
    assert dict(zip(types, got.tolist(), strict=True)) == {t: 100 * size + align for t, (size, align) in types.items()}
