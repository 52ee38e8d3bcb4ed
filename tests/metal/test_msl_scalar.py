"""half and bfloat: every value there and back, every rounding that matters, arithmetic rounded once per operation."""

import mlx.core as mx
import numpy as np
import pytest
from msl import BFLOAT16, from_bfloat16, metal_kernel, settings, to_bfloat16

TYPES = {"half": np.float16, "bfloat": BFLOAT16}
ALL_16_BITS = np.arange(65536, dtype=np.uint32).astype(np.uint16)


def elementwise(expression, dtype, *inputs):
    """Evaluate an expression of a, b, c, ... for every element."""
    names = "abcdefg"[: len(inputs)]
    loads = "".join(f"auto {name} = in_{name}[i]; " for name in names)
    kernel = metal_kernel(
        "elementwise", [f"in_{name}" for name in names], ["y"],
        f"uint i = thread_position_in_grid.x; {loads} y[i] = {expression};",
    )  # fmt: skip
    size = inputs[0].size
    with settings(allow_unwritten=True):  # of half, one result has the bits of the poison
        return kernel(
            inputs=inputs, output_shapes=[(size,)], output_dtypes=[dtype], grid=(size, 1, 1), threadgroup=(256, 1, 1)
        )[0]


def same_bits(got, expected):
    """Equal bits, NaN for NaN whatever its payload."""
    assert got.dtype == expected.dtype
    floats = got if got.dtype.kind == "f" else from_bfloat16(got)
    expected_floats = expected if expected.dtype.kind == "f" else from_bfloat16(expected)
    is_nan = np.isnan(expected_floats)
    assert (np.isnan(floats) == is_nan).all()
    bits = f"u{got.itemsize}"
    np.testing.assert_array_equal(got.view(bits)[~is_nan], expected.view(bits)[~is_nan])


def rounding_cases(values):
    """float32 values around the (sorted, finite) values of a narrower type: exact, ties, and a bit off the ties."""
    values = np.unique(values.astype(np.float64))
    ties = ((values[1:] + values[:-1]) / 2).astype(np.float32)
    top = values[-1] + (values[-1] - values[-2]) / 2  # from here on: infinity
    edges = np.array([top, -top, np.inf, -np.inf, np.nan, 0.0, -0.0, 3.4e38, -3.4e38, 1e-45, -1e-45], np.float64)
    cases = [values.astype(np.float32), ties, edges.astype(np.float32)]
    for away in (-np.inf, np.inf):
        cases += [np.nextafter(ties, np.float32(away)), np.nextafter(edges[:2].astype(np.float32), np.float32(away))]
    random_bits = np.random.default_rng(5).integers(0, 2**32, 100_000, dtype=np.uint32)
    return np.concatenate([*cases, random_bits.view(np.float32)])


@pytest.fixture(autouse=True)
def _quiet():
    with np.errstate(all="ignore"):
        yield


@pytest.mark.parametrize("name", ["half", "bfloat"])
def test_every_value_of_16_bits_converts_to_float_and_back(name):
    values = ALL_16_BITS.view(TYPES[name])
    wide = values.astype(np.float32) if name == "half" else (ALL_16_BITS.astype(np.uint32) << 16).view(np.float32)
    same_bits(elementwise("float(a)", np.float32, values), wide)
    same_bits(elementwise("a", np.float32, values), wide)
    same_bits(elementwise(f"{name}(float(a))", TYPES[name], values), values)


def test_floats_round_to_the_nearest_half_and_bfloat():
    halves = ALL_16_BITS.view(np.float16)
    cases = rounding_cases(halves[np.isfinite(halves)])
    for expression in ("half(a)", "a"):  # implicit, as in Metal
        same_bits(elementwise(expression, np.float16, cases), cases.astype(np.float16))
    finite = (ALL_16_BITS.astype(np.uint32) << 16).view(np.float32)
    cases = rounding_cases(finite[np.isfinite(finite)])
    got = elementwise("bfloat(a)", BFLOAT16, cases)
    same_bits(got, to_bfloat16(cases))
    by_mlx = np.array(mx.array(cases).astype(mx.bfloat16).view(mx.uint16)).view(BFLOAT16)
    normal = np.abs(cases) > 1.2e-38  # MLX's CPU may flush the others
    same_bits(got[normal], by_mlx[normal])


def test_a_half_between_two_vectors_of_floats_rounds():
    x = np.random.default_rng(5).standard_normal(64).astype(np.float32) * 1e-3
    body = """
        const device float4* from = reinterpret_cast<const device float4*>(x);
        reinterpret_cast<device float4*>(y)[thread_position_in_grid.x] = float4(half4(from[thread_position_in_grid.x]));
    """
    (y,) = metal_kernel("rounded", ["x"], ["y"], body)(
        inputs=[x], output_shapes=[x.shape], output_dtypes=[np.float32], grid=(16, 1, 1), threadgroup=(16, 1, 1)
    )
    same_bits(y, x.astype(np.float16).astype(np.float32))


def pairs(dtype):
    """Pairs of finite values of a 16-bit type: close and far exponents, subnormals, equal ones."""
    bits = np.random.default_rng(11).integers(0, 65536, (2, 100_000)).astype(np.uint16)
    bits[1, ::4] = bits[0, ::4] ^ bits[1, ::4] % 64  # neighbours: cancellation
    bits[0, ::7] &= 0x83FF  # subnormals of half
    return bits[0].view(dtype), bits[1].view(dtype)


@pytest.mark.parametrize("operator", ["+", "-", "*", "/"])
@pytest.mark.parametrize("name", ["half", "bfloat"])
def test_arithmetic_rounds_every_operation(name, operator):
    a, b = pairs(TYPES[name])
    operate = {"+": np.add, "-": np.subtract, "*": np.multiply, "/": np.divide}[operator]
    wide = from_bfloat16 if name == "bfloat" else lambda x: x.astype(np.float32)
    narrow = to_bfloat16 if name == "bfloat" else lambda x: x.astype(np.float16)
    once = narrow(operate(wide(a), wide(b)))  # float32 is exact enough: rounded again, it is the right result
    same_bits(elementwise(f"a {operator} b", TYPES[name], a, b), once)
    same_bits(elementwise(f"a {operator} b {operator} b", TYPES[name], a, b), narrow(operate(wide(once), wide(b))))
    same_bits(elementwise(f"a; y[i] {operator}= b", TYPES[name], a, b), once)


def test_as_type_keeps_the_bits():
    bits = np.random.default_rng(4).integers(0, 2**32, 1000, dtype=np.uint32)
    assert (elementwise("as_type<uint>(as_type<float>(a))", np.uint32, bits) == bits).all()
    assert (elementwise("as_type<ushort2>(a).x", np.uint32, bits) == bits & 0xFFFF).all()
