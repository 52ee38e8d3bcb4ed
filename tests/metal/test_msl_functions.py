"""Metal on the CPU, where a wrong kernel could pass: roundings, NaN, lanes that have returned, places in matrices.

Functions, moves between lanes and products of matrices are right where the kernels that take them are.
"""

import mlx.core as mx
import numpy as np
import pytest
from msl import BFLOAT16, Bound, Kernel, MetalError, from_bfloat16, metal_kernel, settings, to_bfloat16

TYPES = {"half": np.float16, "bfloat": BFLOAT16}
ALL_16_BITS = np.arange(65536, dtype=np.uint32).astype(np.uint16)
LANES = np.arange(32)


def narrow(values, name):
    return to_bfloat16(values) if name == "bfloat" else np.asarray(values).astype(TYPES[name])


def wide(array, dtype=np.float64):
    return (from_bfloat16(array) if array.dtype == BFLOAT16 else array).astype(dtype)


def launch(body, inputs, shape, dtype, threads, group=256):
    """Run a body with the inputs in_a, in_b, ... and the output y; i is the thread."""
    names = [f"in_{name}" for name in "abcdefg"[: len(inputs)]]
    kernel = metal_kernel("launched", names, ["y"], f"uint i = thread_position_in_grid.x; {body}")
    arguments = {"inputs": inputs, "output_shapes": [shape], "output_dtypes": [dtype]}
    with settings(allow_unwritten=True):  # of half, one result has the bits of the poison
        return kernel(**arguments, grid=(threads, 1, 1), threadgroup=(group, 1, 1))[0]


def elementwise(expression, dtype, *inputs):
    """Evaluate an expression of a, b, c, ... for every element."""
    loads = "".join(f"auto {name} = in_{name}[i]; " for name in "abcdefg"[: len(inputs)])
    return launch(f"{loads} y[i] = {expression};", inputs, inputs[0].shape, dtype, inputs[0].size)


def same_bits(got, expected):
    """Equal bits, NaN for NaN whatever its payload."""
    assert got.dtype == expected.dtype
    is_nan = np.isnan(wide(expected))
    assert (np.isnan(wide(got)) == is_nan).all()
    bits = f"u{got.itemsize}"
    np.testing.assert_array_equal(got.view(bits)[~is_nan], expected.view(bits)[~is_nan])


@pytest.fixture(autouse=True)
def _quiet():
    with np.errstate(all="ignore"):
        yield


# --------------------------------------------------------------------------------------------- scalars


def rounding_cases(values):
    """float32 values around the finite values of a narrower type: exact, ties, and a bit off the ties."""
    values = np.unique(values[np.isfinite(values)].astype(np.float64))
    ties = ((values[1:] + values[:-1]) / 2).astype(np.float32)
    top = values[-1] + (values[-1] - values[-2]) / 2  # from here on: infinity
    edges = np.array([top, -top, np.inf, -np.inf, np.nan, 0.0, -0.0, 3.4e38, 1e-45], np.float64).astype(np.float32)
    beside = [np.nextafter([*ties, *edges[:2]], np.float32(away), dtype=np.float32) for away in (-np.inf, np.inf)]
    random_bits = np.random.default_rng(5).integers(0, 2**32, 100_000, dtype=np.uint32)
    return np.concatenate([values.astype(np.float32), ties, edges, *beside, random_bits.view(np.float32)])


@pytest.mark.parametrize("name", ["half", "bfloat"])
def test_16_bits_convert_to_float_and_back_and_floats_round_to_the_nearest(name):
    values = ALL_16_BITS.view(TYPES[name])
    same_bits(elementwise("a", np.float32, values), wide(values, np.float32))
    same_bits(elementwise(f"{name}(float(a))", TYPES[name], values), values)
    cases = rounding_cases(wide(values, np.float32))
    got = elementwise(f"{name}(a)", TYPES[name], cases)
    same_bits(got, narrow(cases, name))
    if name == "bfloat":
        by_mlx = np.array(mx.array(cases).astype(mx.bfloat16).view(mx.uint16)).view(BFLOAT16)
        normal = np.abs(cases) > 1.2e-38  # MLX's CPU may flush the others
        same_bits(got[normal], by_mlx[normal])


def test_a_half_between_two_vectors_of_floats_rounds():
    x = np.random.default_rng(5).standard_normal(64).astype(np.float32) * 1e-3
    body = "((device float4*)y)[i] = float4(half4(((const device float4*)in_a)[i]));"
    same_bits(launch(body, [x], x.shape, np.float32, 16), x.astype(np.float16).astype(np.float32))


@pytest.mark.parametrize("operator", ["+", "-", "*", "/"])
@pytest.mark.parametrize("name", ["half", "bfloat"])
def test_arithmetic_rounds_every_operation(name, operator):
    """Close and far exponents, subnormals, equal numbers."""
    bits = np.random.default_rng(11).integers(0, 65536, (2, 100_000)).astype(np.uint16)
    bits[1, ::4] = bits[0, ::4] ^ bits[1, ::4] % 64  # neighbours: cancellation
    bits[0, ::7] &= 0x83FF  # subnormals of half
    a, b = bits.view(TYPES[name])
    operate = {"+": np.add, "-": np.subtract, "*": np.multiply, "/": np.divide}[operator]
    once = narrow(operate(wide(a, np.float32), wide(b, np.float32)), name)  # exact enough: rounded again, it is right
    twice = narrow(operate(wide(once, np.float32), wide(b, np.float32)), name)
    same_bits(elementwise(f"a {operator} b", TYPES[name], a, b), once)
    same_bits(elementwise(f"a {operator} b {operator} b", TYPES[name], a, b), twice)
    same_bits(elementwise(f"a; y[i] {operator}= b", TYPES[name], a, b), once)


def test_products_and_sums_are_not_contracted_and_as_type_keeps_the_bits():
    a, b, c = np.random.default_rng(0).uniform(-9, 9, (3, 257)).astype(np.float32)
    assert (elementwise("a * b + c", np.float32, a, b, c) == a * b + c).all()
    assert (elementwise("as_type<uint>(as_type<float>(a))", np.uint32, a.view(np.uint32)) == a.view(np.uint32)).all()


def test_numbers_win_over_nan():
    a, b = np.float32([np.nan, 1, np.nan, np.inf]), np.float32([1, np.nan, np.nan, -np.inf])
    np.testing.assert_array_equal(elementwise("max(a, b)", np.float32, a, b), np.float32([1, 1, np.nan, np.inf]))
    np.testing.assert_array_equal(elementwise("min(a, b)", np.float32, a, b), np.float32([1, 1, np.nan, -np.inf]))
    assert (elementwise("exp(-INFINITY * a) + fast::exp(-INFINITY)", np.float32, np.float32([2])) == 0).all()


# ------------------------------------------------------------------------------------------ simdgroups


def test_lanes_that_have_returned_take_no_part():
    values, left = np.random.default_rng(7).integers(-3, 4, 32).astype(np.int32), LANES[LANES % 4 != 0]
    y = launch("if (i % 4 == 0) return;\ny[i] = simd_sum(in_a[i]);", [values], (32,), np.int32, 32)
    assert (y[left] == values[left].sum()).all()


def test_lanes_hold_the_pairs_of_a_matrix_that_they_hold_on_a_gpu():
    body = """
        simdgroup_float8x8 all = make_filled_simdgroup_matrix<float, 8, 8>(2.0f);
        all.thread_elements()[1] += thread_index_in_simdgroup;
        simdgroup_store(all, y);
    """
    y = launch(body, [], (8, 8), np.float32, 32, 32)
    lanes = [[0, 1, 8, 9], [2, 3, 10, 11], [4, 5, 12, 13], [6, 7, 14, 15]]
    assert (y[:, ::2] == 2).all()
    assert (y[:, 1::2] - 2).tolist() == [*lanes, *([lane + 16 for lane in row] for row in lanes)]


# ------------------------------------------------------------------------------------------- compiling


def test_kernels_of_the_same_name_keep_their_own_threadgroup_memory():
    """Two shared objects with the same variables in them: the sizes must not be confused."""
    text = """
        kernel void same(device float* y, uint i [[thread_index_in_threadgroup]]) {{
          threadgroup float s[{size}];
          s[i] = i;
          metal::threadgroup_barrier(metal::mem_flags::mem_threadgroup);
          y[i] = s[{size} - 1 - i];
        }}
    """
    for size in (8, 32, 16):
        y = np.zeros(size, np.float32)
        with settings() as runs:
            Kernel(text.format(size=size), "same").launch({0: Bound(y, "output", "y")}, (size, 1, 1), (size, 1, 1))
        assert runs[0].threadgroup_memory == 4 * size and y.tolist() == list(range(size))[::-1]


def test_the_compiler_s_message_is_passed_on():
    with pytest.raises(MetalError, match=r"(?s)the compiler refused this:.*f\.metal:2:.*undeclared_name"):
        Kernel("kernel void f(device int* y) {\n y[0] = undeclared_name; }", "f").launch({}, (1, 1, 1), (1, 1, 1))
