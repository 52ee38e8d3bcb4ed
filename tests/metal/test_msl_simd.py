"""Operations of a simdgroup, against numpy: every function, every type, whole and partial simdgroups."""

import numpy as np
import pytest
from msl import BFLOAT16, from_bfloat16, metal_kernel, settings, to_bfloat16

LANES = np.arange(32)
TYPES = {
    "float": np.float32, "half": np.float16, "bfloat": BFLOAT16, "int": np.int32, "uint": np.uint32, "char": np.int8,
    "ushort": np.uint16,
}  # fmt: skip


def launch(body, values, threads=32, **chosen):
    """Run `body` on one threadgroup with x = values; return y, of x's type, one row per statement ``PUT(...)``."""
    rows = body.count("PUT(")
    text = "uint lane = thread_index_in_simdgroup;\nT v = x[thread_position_in_grid.x];\nuint row = 0;\n" + body
    kernel = metal_kernel(
        "simd", ["x"], ["y"], text, header="#define PUT(e) y[row++ * 64 + thread_position_in_grid.x] = T(e);\n"
    )
    with settings(allow_unwritten=True, **chosen):
        y = kernel(
            inputs=[values], output_shapes=[(rows, 64)], output_dtypes=[values.dtype], template=[("T", values.dtype)],
            grid=(threads, 1, 1), threadgroup=(64, 1, 1),
        )[0]  # fmt: skip
    return y[:, :threads]


def values_of(name, low=-3, high=3, count=64):
    """Small whole numbers: their sums are exact in every type."""
    dtype = TYPES[name]
    if np.dtype(dtype).kind == "u":
        low = 0
    numbers = np.random.default_rng(7).integers(low, high + 1, count)
    return to_bfloat16(numbers) if dtype == BFLOAT16 else numbers.astype(dtype)


def plain(array):
    return from_bfloat16(array) if array.dtype == BFLOAT16 else array


MOVES = {
    "simd_shuffle(v, (lane * 5 + 3) % 32)": lambda v: v[(LANES * 5 + 3) % 32],
    "simd_shuffle_xor(v, 13)": lambda v: v[LANES ^ 13],
}
REDUCTIONS = {  # of the active lanes
    "simd_sum(v)": lambda v: np.full(len(v), v.sum()),
    "simd_max(v)": lambda v: np.full(len(v), v.max()),
    "simd_all(v > T(0))": lambda v: np.full(len(v), (v > 0).all()),
}


@pytest.mark.parametrize("threads", [64, 52], ids=["whole", "partial"])
@pytest.mark.parametrize("name", TYPES)
def test_lanes_move_and_reduce_values(name, threads):
    values = values_of(name)
    operations = REDUCTIONS | (MOVES if threads == 64 else {})
    y = plain(launch("".join(f"PUT({call})\n" for call in operations), values, threads, seed=3))
    v = plain(values).astype(np.float64)
    for row, (call, oracle) in zip(y, operations.items(), strict=True):
        for first in range(0, threads, 32):
            lanes = slice(first, min(first + 32, threads))
            np.testing.assert_array_equal(row[lanes], oracle(v[lanes]).astype(row.dtype), err_msg=call)


def test_lanes_that_have_returned_take_no_part():
    values = values_of("int")
    y = launch("if (lane % 4 == 0) return;\nPUT(simd_sum(v))", values)
    left = LANES[LANES % 4 != 0]
    assert (y[0, left] == values[left].sum()).all()


@pytest.mark.parametrize("instrumented", [False, True])
@pytest.mark.parametrize("width", [2, 3, 4])
def test_vectors_are_exchanged_whole(width, instrumented):
    body = f"""
        vec<T, {width}> w(v);
        w[{width - 1}] = v * 2;
        vec<T, {width}> sum = simd_sum(w), moved = simd_shuffle_xor(w, 3);
        PUT(sum[0]) PUT(sum[{width - 1}]) PUT(moved[0]) PUT(moved[{width - 1}])
    """
    values = values_of("float")
    y, v = launch(body, values, instrumented=instrumented), values[:32]
    for row, expected in zip(y, (v.sum(), 2 * v.sum(), v[LANES ^ 3], 2 * v[LANES ^ 3]), strict=True):
        assert (row == expected).all()


def test_operations_are_counted_once_per_simdgroup():
    body = """
        int v = simd_sum(x[thread_index_in_simdgroup]);
        simdgroup_barrier(mem_flags::mem_none);
        for (int i = 0; i < 3; i++) v = simd_max(v);
        y[0] = v;
    """
    kernel = metal_kernel("operations", ["x"], ["y"], body)
    with settings() as runs:
        kernel(
            inputs=[values_of("int")], output_shapes=[(1,)], output_dtypes=[np.int32], grid=(192, 2, 1),
            threadgroup=(96, 1, 1),
        )  # fmt: skip
    assert (runs[0].threadgroups, runs[0].simd_operations, runs[0].simdgroup_barriers) == (4, 4 * 3 * 4, 4 * 3)
