"""`kv_write` and `copy_blocks`, the kernels that change a pool where it lies.

``metal_kernel`` binds no buffer for writing, so only the stand-in runs them from Python. On a Mac they are dispatched
by the extension that owns the pool, and tested with it.
"""

import numpy as np
import pytest
from metal_engine import launch_in_place

from kvpool.config import KVSpec
from kvpool.testing.dense import round_to, stored_bytes
from kvpool_backends.mlx.metal_kernels import plane_strides

LAYOUTS = ("NHD", "HND", "interleaved", "stacked")
DTYPES = ("float32", "float16", "bfloat16")
STORED = {"float32": np.uint32, "float16": np.uint16, "bfloat16": np.uint16}
NUM_BLOCKS = 6


def bits(x, dtype):
    """Values as the integers that are stored for them, rounded to nearest even."""
    return stored_bytes(round_to(x, dtype), dtype).view(STORED[dtype]).reshape(np.shape(x))


class Planes:
    """The base arrays of one layer, random bits, and the indices of their elements."""

    def __init__(self, spec, seed=0):
        self.spec = spec
        rng = np.random.default_rng(seed)
        self.layer = 1 if spec.layout == "stacked" else 0
        self.strides = plane_strides(spec, NUM_BLOCKS, self.layer)
        layouts = [spec.plane_layout(plane, NUM_BLOCKS) for plane, _ in spec.planes]
        bases = {layout.array: rng.integers(0, 2**16, layout.shape).astype(STORED[spec.dtype]) for layout in layouts}
        self.arrays = [bases[layout.array] for layout in layouts]

    def index(self, plane, block, slot):
        """Of the elements ``[n, Hk, D]`` at positions (block, slot)."""
        offset, block_stride, slot_stride, head_stride = self.strides[4 * plane : 4 * plane + 4]
        first = offset + np.asarray(block)[:, None, None] * block_stride + np.asarray(slot)[:, None, None] * slot_stride
        heads = np.arange(self.spec.num_kv_heads)[:, None] * head_stride
        return first + heads + np.arange(self.spec.planes[plane][1])


def write(planes, x_dtype, tokens, slots, strides, vectors, **how):
    """Launch kv_write on arrays of stored bits; `tokens` are flat buffers, `strides` int64 [6]."""
    spec = planes.spec
    k_pool, v_pool = planes.arrays
    return launch_in_place(
        "kv_write",
        (spec.dtype, x_dtype),
        (spec.head_dim, spec.value_head_dim, spec.block_size, int(vectors)),
        {
            "k_pool": k_pool,
            "v_pool": v_pool,
            "k": tokens[0],
            "v": tokens[1],
            "slots": np.asarray(slots, np.int64),
            "layout": planes.strides,
            "strides": np.asarray(strides, np.int64),
        },
        ("k_pool", "v_pool"),
        (max(spec.head_dim, spec.value_head_dim) // 4, spec.num_kv_heads, len(slots)),
        **how,
    )


def copy_blocks(planes, copies, **how):
    """Launch copy_blocks on the plane of the keys."""
    spec = planes.spec
    return launch_in_place(
        "copy_blocks",
        (spec.dtype,),
        (spec.block_size,),
        {"pool": planes.arrays[0], "copies": copies, "layout": planes.strides[:4]},
        ("pool",),
        (spec.head_dim // 4, spec.num_kv_heads * spec.block_size, len(copies)),
        **how,
    )


def check_write(spec, x_dtype, vectors, seed=0):
    rng = np.random.default_rng(seed)
    planes = Planes(spec, seed)
    heads = spec.num_kv_heads
    slots = rng.permutation(NUM_BLOCKS * spec.block_size)[:13].astype(np.int64)
    slots[[2, 7]] = -1, -5
    kept = np.flatnonzero(slots >= 0)
    values, buffers, strides = [], [], []
    for _, dim in spec.planes:
        x = round_to(rng.standard_normal((len(slots), heads, dim)) * 100, x_dtype)
        values.append(x)
        if vectors:  # a slice of a wider projection
            wide = np.zeros((len(slots), heads * dim + 16), STORED[x_dtype])
            wide[:, : heads * dim] = bits(x, x_dtype).reshape(len(slots), -1)
            buffers.append(wide)
            strides += [heads * dim + 16, dim, 1]
        else:  # [Hk, D, T]
            buffers.append(np.ascontiguousarray(bits(x, x_dtype).transpose(1, 2, 0)))
            strides += [1, dim * len(slots), len(slots)]
    expected = [array.copy() for array in planes.arrays]
    if planes.arrays[0] is planes.arrays[1]:
        expected[1] = expected[0]
    for plane, x in enumerate(values):
        at = planes.index(plane, slots[kept] // spec.block_size, slots[kept] % spec.block_size)
        expected[plane].reshape(-1)[at] = bits(x[kept], spec.dtype)
    before = [array.copy() for array in planes.arrays]
    for schedule in range(5):
        for array, old in zip(planes.arrays, before, strict=True):
            array[...] = old
        write(planes, x_dtype, buffers, slots, strides, vectors, schedule=schedule, instrumented=schedule == 4)
        for array, wanted in zip(planes.arrays, expected, strict=True):
            np.testing.assert_array_equal(array, wanted)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("x_dtype", DTYPES)
def test_write_rounds_to_nearest_even_and_touches_nothing_else(dtype, x_dtype):
    check_write(KVSpec(1, 2, 80, dtype, 8), x_dtype, vectors=True)


@pytest.mark.parametrize("layout", [name for name in LAYOUTS if name != "interleaved"])
@pytest.mark.parametrize("vectors", [False, True])
def test_write_serves_layouts_by_strides(layout, vectors):
    check_write(KVSpec(2, 3, 64, "float16", 16, 96, layout), "float32", vectors, seed=1)


def test_write_two_tokens_of_one_array_with_both_planes():
    spec = KVSpec(1, 2, 64, "float16", 8, layout="interleaved")
    planes = Planes(spec)
    # One buffer bound twice would be two copies here: this layout is written plane by plane.
    base = planes.arrays[0].copy()
    x = np.ones((2, 2, 64), np.float32)
    strides = [128, 64, 1] * 2
    outcome = [base.copy(), base.copy()]
    planes.arrays = outcome
    write(planes, "float32", [x.view(np.uint32), 2 * x], [3, 17], strides, True)
    for plane, value in enumerate((1, 2)):
        at = planes.index(plane, [0, 2], [3, 1])
        assert (outcome[plane].reshape(-1)[at] == bits(np.full((), value), "float16")).all()
        rest = np.delete(outcome[plane].reshape(-1), at.reshape(-1))
        np.testing.assert_array_equal(rest, np.delete(base.reshape(-1), at.reshape(-1)))


def test_slots_beyond_32_bits_are_written():
    planes = Planes(KVSpec(1, 1, 64, "float32", 16))
    planes.strides = planes.strides.copy()
    planes.strides[[1, 5]] = 0  # all blocks lie in one place
    expected = [array.copy() for array in planes.arrays]
    tokens = [np.full((2, 1, 64), n, np.uint32) for n in (7, 9)]
    for array, x in zip(expected, tokens, strict=True):
        array.reshape(-1, 64)[[5, 11]] = x[:, 0]
    write(planes, "float32", tokens, [2**31 + 5, 2**35 + 2**31 + 11], [64, 64, 1] * 2, True)
    for array, wanted in zip(planes.arrays, expected, strict=True):
        np.testing.assert_array_equal(array, wanted)


def test_write_moves_each_byte_once():
    for dtype in ("float16", "float32"):
        spec = KVSpec(1, 4, 128, dtype, 16)
        planes = Planes(spec)
        tokens = [np.zeros((32, 4, 128), STORED[dtype]) for _ in "kv"]
        run = write(planes, dtype, tokens, np.arange(32), [512, 128, 1] * 2, True, instrumented=True)
        must = 32 * 4 * 128 * STORED[dtype]().itemsize
        for read, written in (("k", "k_pool"), ("v", "v_pool")):
            assert run.reads[read].bytes == run.writes[written].bytes == must
            assert run.writes[written].full_transactions == run.writes[written].transactions == must // 128
        # With the slots; layout and strides are constant memory.
        assert 4 * must + run.reads["slots"].bytes <= 1.1 * 4 * must


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_copy_blocks_copies_leading_positions_only(layout, dtype):
    spec = KVSpec(2, 3, 80, dtype, 16, layout=layout)
    copies = np.array([[0, 3, 16], [0, 4, 5], [2, 5, 1]], np.int32)
    for schedule in range(5):
        planes = Planes(spec)
        array = planes.arrays[0]
        expected = array.copy()
        for src, dst, count in copies:
            slots = np.arange(count)
            expected.reshape(-1)[planes.index(0, [dst] * count, slots)] = array.reshape(-1)[
                planes.index(0, [src] * count, slots)
            ]
        copy_blocks(planes, copies, schedule=schedule, instrumented=schedule == 4)
        np.testing.assert_array_equal(array, expected)
