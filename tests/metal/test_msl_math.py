"""Vectors and the functions of Metal's standard library, against numpy in float64."""

import math

import numpy as np
import pytest
from msl import BFLOAT16, from_bfloat16, to_bfloat16
from test_msl_scalar import elementwise

# Name: oracle and range of the arguments.
ONE_ARGUMENT = {
    "acos": (np.arccos, -1, 1), "acosh": (np.arccosh, 1, 50), "asin": (np.arcsin, -1, 1),
    "asinh": (np.arcsinh, -50, 50), "atan": (np.arctan, -50, 50), "atanh": (np.arctanh, -0.99, 0.99),
    "ceil": (np.ceil, -9, 9), "cos": (np.cos, -6, 6), "cosh": (np.cosh, -5, 5), "exp": (np.exp, -9, 9),
    "exp10": (lambda x: 10.0**x, -4, 4), "exp2": (np.exp2, -9, 9), "fabs": (np.abs, -9, 9), "floor": (np.floor, -9, 9),
    "fract": (lambda x: x - np.floor(x), -9, 9), "log": (np.log, 0.01, 99), "log10": (np.log10, 0.01, 99),
    "log2": (np.log2, 0.01, 99), "rint": (np.rint, -9, 9), "rsqrt": (lambda x: x**-0.5, 0.01, 99),
    "saturate": (lambda x: np.clip(x, 0, 1), -3, 3), "sign": (np.sign, -3, 3), "sin": (np.sin, -6, 6),
    "sinh": (np.sinh, -5, 5), "sqrt": (np.sqrt, 0, 99), "tan": (np.tan, -1.5, 1.5), "tanh": (np.tanh, -5, 5),
    "trunc": (np.trunc, -9, 9),
}  # fmt: skip
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
def test_functions_of_one_argument(dtype):
    rows = len(ONE_ARGUMENT)
    values = [draw(dtype, low, high) for _, low, high in ONE_ARGUMENT.values()]
    cases = "".join(
        f"case {row}: y[i] = {namespace}{name}(a); break;\n"
        for row, (name, namespace) in enumerate((n, s) for s in ("", "fast::", "precise::") for n in ONE_ARGUMENT)
    )
    x = np.concatenate(values * 3)
    got = elementwise(f"a; switch (i / 257) {{ {cases} }}", dtype, x).reshape(3, rows, 257)
    for variant in got:
        for row, value, (oracle, _, _) in zip(variant, values, ONE_ARGUMENT.values(), strict=True):
            close(row, oracle(exact(value)), dtype)


TWO_ARGUMENTS = {
    "atan2": np.arctan2, "copysign": np.copysign, "fdim": lambda a, b: np.maximum(a - b, 0), "fmax": np.maximum,
    "fmin": np.minimum, "fmod": np.fmod, "max": np.maximum, "min": np.minimum,
    "step": lambda a, b: (b >= a).astype(float),
}  # fmt: skip


@pytest.mark.parametrize("dtype", [np.float32, np.float16, BFLOAT16], ids=["float", "half", "bfloat"])
def test_functions_of_two_and_three_arguments(dtype):
    a, b, c = (draw(dtype, -9, 9, seed=seed) for seed in range(3))
    for name, oracle in TWO_ARGUMENTS.items():
        close(elementwise(f"{name}(a, b)", dtype, a, b), oracle(exact(a), exact(b)), dtype)
    x, y, z = exact(a), exact(b), exact(c)
    positive = draw(dtype, 0.1, 4)
    close(elementwise("pow(a, b)", dtype, positive, positive), exact(positive) ** exact(positive), dtype)
    clamped = np.clip(x, np.minimum(y, z), np.maximum(y, z))
    close(elementwise("clamp(a, min(b, c), max(b, c))", dtype, a, b, c), clamped, dtype)
    assert np.abs(exact(elementwise("fma(a, b, c)", dtype, a, b, c)) - (x * y + z)).max() < 100 * TOLERANCE["bfloat16"]
    close(elementwise("select(a, b, a < b)", dtype, a, b), np.maximum(x, y), dtype)
    close(elementwise("abs(a)", dtype, a), np.abs(x), dtype)
    close(elementwise("ldexp(a, 3)", dtype, a), 8 * x, dtype)


def test_fma_rounds_once():
    a, b, c = (draw(np.float32, -9, 9, seed=seed) for seed in range(3))
    expected = np.array([math.fsum([float(p) * float(q), float(r)]) for p, q, r in zip(a, b, c, strict=True)])
    assert (elementwise("fma(a, b, c)", np.float32, a, b, c) == expected.astype(np.float32)).all()
    assert (elementwise("a * b + c", np.float32, a, b, c) == a * b + c).all(), "no contraction: two roundings"


def test_comparisons_with_nan():
    a, b = np.float32([np.nan, 1, np.nan, np.inf]), np.float32([1, np.nan, np.nan, -np.inf])
    np.testing.assert_array_equal(elementwise("max(a, b)", np.float32, a, b), np.float32([1, 1, np.nan, np.inf]))
    np.testing.assert_array_equal(elementwise("fmin(a, b)", np.float32, a, b), np.float32([1, 1, np.nan, -np.inf]))
    for name, oracle in (("isnan", np.isnan), ("isinf", np.isinf), ("isfinite", np.isfinite)):
        assert (elementwise(f"{name}(a)", np.bool_, a) == oracle(a)).all()
    assert (elementwise("exp(-INFINITY * a) + fast::exp(-INFINITY)", np.float32, np.float32([2])) == 0).all()


def test_integer_functions():
    x = np.random.default_rng(8).integers(0, 2**32, 300, dtype=np.uint32)
    x[:3] = 0, 1, 2**32 - 1
    as_int = x.view(np.int32)
    by_hand = {
        "popcount(a)": [v.bit_count() for v in x.tolist()],
        "clz(a)": [32 - v.bit_length() for v in x.tolist()],
        "ctz(a)": [(v & -v).bit_length() - 1 if v else 32 for v in x.tolist()],
        "reverse_bits(a)": [int(f"{v:032b}"[::-1], 2) for v in x.tolist()],
        "rotate(a, 7u)": [(v << 7 | v >> 25) & 0xFFFFFFFF for v in x.tolist()],
        "mulhi(a, 0xfffffff0u)": [v * 0xFFFFFFF0 >> 32 for v in x.tolist()],
        "extract_bits(a, 5, 9)": [v >> 5 & 0x1FF for v in x.tolist()],
        "insert_bits(a, 0x155u, 5, 9)": [v & ~(0x1FF << 5) | 0x155 << 5 for v in x.tolist()],
        "absdiff(a, 77u)": [abs(v - 77) for v in x.tolist()],
        "min(a, 1000u)": [min(v, 1000) for v in x.tolist()],
        "clamp(a, 5u, 1000u)": [min(max(v, 5), 1000) for v in x.tolist()],
    }
    for expression, expected in by_hand.items():
        assert elementwise(expression, np.uint32, x).tolist() == expected, expression
    signed = {
        "abs(a)": [abs(v) for v in as_int.tolist()],
        "extract_bits(a, 5, 9)": [(v >> 5 & 0x1FF) - (v >> 5 & 0x100) * 2 for v in as_int.tolist()],
        "mulhi(a, -7)": [v * -7 >> 32 for v in as_int.tolist()],
        "a / 3 + a % 3": [int(v / 3) + int(math.fmod(v, 3)) for v in as_int.tolist()],
    }
    for expression, expected in signed.items():
        assert elementwise(expression, np.int32, as_int).tolist() == expected, expression


VECTORS = {  # of float4 v(a, b, a + b, a - b), as sums that tell the elements apart
    "v.x + 10 * v.y + 100 * v.z + 1000 * v.w": lambda v: v @ [1, 10, 100, 1000],
    "dot(v.wzyx, float4(1, 10, 100, 1000))": lambda v: v[:, ::-1] @ [1, 10, 100, 1000],
    "dot(v.xy, v.zw)": lambda v: v[:, 0] * v[:, 2] + v[:, 1] * v[:, 3],
    "dot(v.lo * 2 + v.hi, v.odd - v.even)": lambda v: ((2 * v[:, :2] + v[:, 2:]) * (v[:, 1::2] - v[:, ::2])).sum(1),
    "dot(v.yzw, float3(v.x, v.xy))": lambda v: (v[:, 1:] * v[:, [0, 0, 1]]).sum(1),
    "w.xy = v.zw; w.zw = w.yx; dot(w, v)": lambda v: (v * v[:, [2, 3, 3, 2]]).sum(1),
    "w = v; w.xz = w.zx; w -= 1.0f; w *= v; dot(w, float4(1))": lambda v: ((v[:, [2, 1, 0, 3]] - 1) * v).sum(1),
    "select(w, v, v > 0.0f).x + float(any(v > 8.0f)) + float(all(v < 9.0f))": lambda v: (
        np.maximum(v[:, 0], 0) + (v > 8).any(1) + (v < 9).all(1)
    ),
    "dot(max(v, 0.5f) + abs(v) - min(v, w), float4(1))": lambda v: (
        np.maximum(v, 0.5) + np.abs(v) - np.minimum(v, 0)
    ).sum(1),
    "dot(float4(int4(v)) + float4(packed_float4(v)), float4(1))": lambda v: (np.trunc(v) + v).sum(1),
    "length(v) + dot(normalize(v), v)": lambda v: 2 * np.sqrt((v * v).sum(1)),
    "dot(exp(-v * v), mix(v, w, 0.25f))": lambda v: (np.exp(-v * v) * v * 0.75).sum(1),
    "v[int(b * b) % 4]": lambda v: v[np.arange(len(v)), (v[:, 1].astype(np.float32) ** 2).astype(int) % 4],
}


@pytest.mark.parametrize("expression", VECTORS)
def test_vectors(expression):
    a, b = (draw(np.float32, -4, 4, seed=seed) for seed in (1, 2))
    v = np.stack([a, b, a + b, a - b], 1).astype(np.float64)
    *statements, last = expression.split("; ")
    body = f"0; float4 v(a, b, a + b, a - b), w(0.0f); {''.join(f'{s}; ' for s in statements)} y[i] = {last}"
    got = elementwise(body, np.float32, a, b)
    np.testing.assert_allclose(got, VECTORS[expression](v), rtol=2e-5, atol=2e-5)


def test_sizes_and_alignments_are_those_of_metal():
    types = {
        "float2": (8, 8), "float3": (16, 16), "float4": (16, 16), "half2": (4, 4), "half3": (8, 8), "half4": (8, 8),
        "bfloat4": (8, 8), "uchar4": (4, 4), "bool2": (2, 2), "long4": (32, 32), "packed_float3": (12, 4),
        "packed_half4": (8, 2), "packed_uchar3": (3, 1), "bool": (1, 1), "long": (8, 8), "size_t": (8, 8),
        "half": (2, 2), "bfloat": (2, 2), "simdgroup_float8x8": (8, 8),
    }  # fmt: skip
    checks = "".join(f"case {i}: y[i] = 100 * sizeof({t}) + alignof({t}); break;" for i, t in enumerate(types))
    got = elementwise(f"0; switch (i) {{ {checks} }}", np.int32, np.zeros(len(types), np.int32))
    assert dict(zip(types, got.tolist(), strict=True)) == {t: 100 * size + align for t, (size, align) in types.items()}
