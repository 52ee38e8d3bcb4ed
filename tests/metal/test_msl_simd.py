"""Operations of a simdgroup, against numpy: every function, every type, whole and partial simdgroups."""

import numpy as np
import pytest
from msl import BFLOAT16, from_bfloat16, metal_kernel, settings, to_bfloat16

LANES = np.arange(32)
TYPES = {
    "float": np.float32, "half": np.float16, "bfloat": BFLOAT16, "int": np.int32, "uint": np.uint32, "char": np.int8,
    "ushort": np.uint16,
}  # fmt: skip
INTEGERS = [name for name, dtype in TYPES.items() if np.dtype(dtype).kind in "iu"]


def launch(body, values, threads=32, **chosen):
    """Run `body` on one threadgroup with x = values; return y, of x's type, one row per statement ``PUT(...)``."""
    rows = body.count("PUT(")
    text = "uint lane = thread_index_in_simdgroup;\nT v = x[thread_position_in_grid.x];\nuint row = 0;\n" + body
    kernel = metal_kernel(
        "simd", ["x"], ["y"], text, header="#define PUT(e) y[row++ * 64 + thread_position_in_grid.x] = T(e);\n"
    )
    with settings(unwritten="allow", **chosen):
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


def fill_up(v, w, delta, modulo):
    group, at = LANES & ~(modulo - 1), LANES & (modulo - 1)
    source = group | ((at - delta) & (modulo - 1))
    return np.where(at < delta, w[source], v[source])


def fill_down(v, w, delta, modulo):
    group, at = LANES & ~(modulo - 1), LANES & (modulo - 1)
    source = group | ((at + delta) & (modulo - 1))
    return np.where(at + delta >= modulo, w[source], v[source])


def by_quad(reduce):
    return lambda v: np.repeat(reduce(v.reshape(8, 4), 1), 4)


QUAD = LANES & 3
MOVES = {  # of a whole simdgroup; w is v + 1
    "simd_broadcast(v, 7)": lambda v: np.full(32, v[7]),
    "simd_broadcast_first(v)": lambda v: np.full(32, v[0]),
    "simd_shuffle(v, (lane * 5 + 3) % 32)": lambda v: v[(LANES * 5 + 3) % 32],
    "simd_shuffle_xor(v, 13)": lambda v: v[LANES ^ 13],
    "simd_shuffle_up(v, 5)": lambda v: np.where(LANES < 5, v, v[LANES - 5]),
    "simd_shuffle_down(v, 5)": lambda v: np.where(LANES > 26, v, v[(LANES + 5) % 32]),
    "simd_shuffle_rotate_up(v, 5)": lambda v: np.roll(v, 5),
    "simd_shuffle_rotate_down(v, 5)": lambda v: np.roll(v, -5),
    "simd_shuffle_and_fill_up(v, T(v + T(1)), 3)": lambda v: fill_up(v, v + 1, 3, 32),
    "simd_shuffle_and_fill_up(v, T(v + T(1)), 3, 8)": lambda v: fill_up(v, v + 1, 3, 8),
    "simd_shuffle_and_fill_down(v, T(v + T(1)), 3)": lambda v: fill_down(v, v + 1, 3, 32),
    "simd_shuffle_and_fill_down(v, T(v + T(1)), 3, 8)": lambda v: fill_down(v, v + 1, 3, 8),
    "quad_broadcast(v, 2)": lambda v: v[(LANES & ~3) | 2],
    "quad_shuffle(v, 3 - lane % 4)": lambda v: v[LANES ^ 3],
    "quad_shuffle_xor(v, 1)": lambda v: v[LANES ^ 1],
    "quad_shuffle_up(v, 1)": lambda v: np.where(QUAD == 0, v, v[LANES - 1]),
    "quad_shuffle_down(v, 1)": lambda v: np.where(QUAD == 3, v, v[(LANES + 1) % 32]),
    "quad_sum(v)": by_quad(np.sum),
    "quad_max(v)": by_quad(np.max),
    "quad_min(v)": by_quad(np.min),
}
REDUCTIONS = {  # of the active lanes
    "simd_sum(v)": lambda v: np.full(len(v), v.sum()),
    "simd_max(v)": lambda v: np.full(len(v), v.max()),
    "simd_min(v)": lambda v: np.full(len(v), v.min()),
    "simd_prefix_inclusive_sum(v)": np.cumsum,
    "simd_prefix_exclusive_sum(v)": lambda v: np.cumsum(v) - v,
    "simd_any(v > T(2))": lambda v: np.full(len(v), (v > 2).any()),
    "simd_all(v > T(0))": lambda v: np.full(len(v), (v > 0).all()),
    "simd_is_first()": lambda v: np.arange(len(v)) == 0,
}
PRODUCTS = {
    "simd_product(v)": lambda v: np.full(len(v), v.prod()),
    "simd_prefix_inclusive_product(v)": np.cumprod,
    "simd_prefix_exclusive_product(v)": lambda v: np.concatenate([[1], np.cumprod(v)[:-1]]),
    "quad_product(v)": by_quad(np.prod),
}
BITWISE = {
    "simd_and(v)": lambda v: np.full(len(v), np.bitwise_and.reduce(v)),
    "simd_or(v)": lambda v: np.full(len(v), np.bitwise_or.reduce(v)),
    "simd_xor(v)": lambda v: np.full(len(v), np.bitwise_xor.reduce(v)),
}


def check(operations, values, threads, **chosen):
    body = "".join(f"PUT({call})\n" for call in operations)
    y = plain(launch(body, values, threads, **chosen))
    v = plain(values).astype(np.float64) if values.dtype.kind in "fV" else values.astype(np.int64)
    for row, (call, oracle) in zip(y, operations.items(), strict=True):
        for first in range(0, threads, 32):
            lanes = slice(first, min(first + 32, threads))
            np.testing.assert_array_equal(row[lanes], oracle(v[lanes]).astype(row.dtype), err_msg=call)


@pytest.mark.parametrize("name", TYPES)
def test_lanes_exchange_values(name):
    check(MOVES, values_of(name), 64, seed=3)


@pytest.mark.parametrize("threads", [64, 52], ids=["whole", "partial"])
@pytest.mark.parametrize("name", TYPES)
def test_lanes_reduce_values(name, threads):
    check(REDUCTIONS, values_of(name), threads)


@pytest.mark.parametrize("name", ["float", "half", "bfloat", "int"])
def test_lanes_multiply_values(name):
    exponents = np.random.default_rng(3).integers(0, 2, 64) * np.tile([1, -1], 32)
    values = np.ones(64) if name == "int" else 2.0**exponents
    values[::5] *= -1
    check(PRODUCTS, to_bfloat16(values) if name == "bfloat" else values.astype(TYPES[name]), 64)


@pytest.mark.parametrize("name", INTEGERS)
def test_lanes_combine_bits(name):
    info = np.iinfo(TYPES[name])
    values = np.random.default_rng(1).integers(info.min, info.max, 64, dtype=TYPES[name], endpoint=True)
    check(BITWISE, values, 64)
    check(BITWISE, values | np.array(5, values.dtype), 37)


def test_sums_of_floats_are_close_and_independent_of_the_schedule():
    values = np.random.default_rng(2).standard_normal(64).astype(np.float32)
    sums = [launch("PUT(simd_sum(v)) PUT(simd_prefix_inclusive_sum(v))", values, 64, seed=seed) for seed in range(5)]
    for y in sums:
        assert y.tobytes() == sums[0].tobytes()
    exact = values.astype(np.float64).reshape(2, 32)
    np.testing.assert_allclose(sums[0][0].reshape(2, 32)[:, 0], exact.sum(1), atol=32 * 6e-8)
    np.testing.assert_allclose(sums[0][1].reshape(2, 32), exact.cumsum(1), atol=32 * 3e-7)


def test_lanes_that_have_returned_take_no_part():
    values = values_of("int")
    body = "if (lane % 4 == 0) return;\nPUT(simd_sum(v))\nPUT(simd_broadcast_first(v))\nPUT(simd_is_first())"
    y = launch(body, values)
    left = LANES[LANES % 4 != 0]
    assert (y[0, left] == values[left].sum()).all()
    assert (y[1, left] == values[1]).all()
    assert (y[2, left] == (left == 1)).all()


def test_ballots_have_a_bit_for_every_lane():
    body = """
        simd_vote votes = simd_ballot(v > 0);
        PUT(uint(ulong(votes))) PUT(votes.any()) PUT(votes.all())
        PUT(uint(ulong(simd_active_threads_mask()))) PUT(popcount(uint(ulong(votes))))
        PUT(simd_ballot(v >= 0).all())
    """
    values = values_of("uint")
    y = launch(body, values, 52)
    for first, active in ((0, 32), (32, 20)):
        positive = values[first : first + active] > 0
        mask = int((positive << np.arange(active)).sum())
        column = y[:, first]
        assert column.tolist() == [mask, mask != 0, positive.all(), 2**active - 1, mask.bit_count(), 1]


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


def test_long_integers_are_shuffled():
    values = np.arange(64, dtype=np.int64) * 2**40 - 7
    assert (launch("PUT(simd_shuffle_xor(v, 1))", values)[0] == values[LANES ^ 1]).all()
    moved = launch("vec<T, 4> w(v); w.w = v + 1; PUT(simd_shuffle_xor(w, 1).w)", values)[0]
    assert (moved == values[LANES ^ 1] + 1).all()


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
