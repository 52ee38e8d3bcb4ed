"""Planes of 8 and 4 bits in the Metal kernels: what is written, copied and gathered, bit for bit as MLX has it."""

import mlx.core as mx
import numpy as np
import pytest
from metal_engine import launch_in_place
from metal_packed import STORED, PackedBatch, bits_of, packed, rows_at
from quantized_rows import near_ties

from kvpool.config import KVSpec
from kvpool.testing.dense import quantized, round_to, stored_bytes
from kvpool_backends.mlx.metal_kernels import DTYPES, MetalKernels, plane_strides

LAYOUTS = ("NHD", "HND", "interleaved", "stacked")
NUM_BLOCKS = 5
SEED = 8_204


def tokens(rng, shape):
    """Groups of every kind: one sign, one value, zeros, ties, tiny and large."""
    x = rng.standard_normal(shape).astype(np.float32)
    for i, change in enumerate(
        (np.abs, lambda x: -np.abs(x), lambda x: 0 * x + 0.37, lambda x: 0 * x, np.rint, lambda x: x * 1e-6)
    ):
        x[i::8] = change(x[i::8])
    x[6::8] *= 1e3
    return x


def write(spec, plane, x, x_dtype, slots, vectors, **how):
    """Launch kv_write_packed on planes full of ones; returns them and the run."""
    bits = dict(zip("kv", spec.bits, strict=True))[plane]
    dim = dict(spec.planes)[plane]
    layer = 1 if spec.layout == "stacked" else 0
    names = [stored for stored in spec.stored_planes if stored.name.split("_")[0] == plane]
    arrays = {}
    for stored in names:
        shape, dtype = spec.plane_layout(stored.name, NUM_BLOCKS).shape, STORED[stored.dtype]
        arrays[stored.name[2:] or "words"] = np.full(shape, np.iinfo(dtype).max, dtype)
    stored_x = stored_bytes(x, x_dtype).view(STORED[x_dtype]).reshape(x.shape)
    if vectors:  # a slice of a wider projection
        wide = np.zeros((len(x), x[0].size + 16), stored_x.dtype)
        wide[:, : x[0].size] = stored_x.reshape(len(x), -1)
        buffer, strides = wide, [wide.shape[1], dim, 1]
    else:  # [Hk, D, T]
        buffer, strides = np.ascontiguousarray(stored_x.transpose(1, 2, 0)), [1, dim * len(x), len(x)]
    numbers = plane_strides(spec, NUM_BLOCKS, layer).reshape(2, 2, 4)[:, "kv".index(plane)]
    run = launch_in_place(
        "kv_write_packed",
        (spec.dtype, x_dtype),
        (dim, spec.block_size, int(vectors), bits, spec.quant_group_size),
        arrays
        | {
            "x": buffer,
            "slots": np.asarray(slots, np.int64),
            "layout": np.ascontiguousarray(numbers).reshape(-1),
            "strides": np.array(strides, np.int64),
        },
        ("words", "scales", "biases"),
        (dim // 4, spec.num_kv_heads, len(slots)),
        **how,
    )
    return list(zip([stored.name for stored in names], arrays.values(), strict=True)), run


def check_write(spec, x_dtype="float32", vectors=True, x=None, schedules=range(5)):
    """Every plane that is packed: the bits of `mx.quantize`, and nothing else touched."""
    rng = np.random.default_rng(SEED)
    slots = rng.permutation(NUM_BLOCKS * spec.block_size)[:16].astype(np.int64)
    slots[[2, 7]] = -1, -5
    kept = np.flatnonzero(slots >= 0)
    layer = 1 if spec.layout == "stacked" else 0
    for (plane, dim), bits in zip(spec.planes, spec.bits, strict=True):
        if bits is None:
            continue
        given = round_to(tokens(rng, (16, spec.num_kv_heads, dim)) if x is None else x, x_dtype)
        wanted = packed(given, spec.dtype, bits, spec.quant_group_size)
        for schedule in schedules:
            how = {"schedule": schedule, "instrumented": schedule == 4}
            arrays, _ = write(spec, plane, given, x_dtype, slots, vectors, **how)
            for (name, array), part in zip(arrays, wanted, strict=True):
                expected = np.full_like(array, np.iinfo(array.dtype).max)
                blocks, places = slots[kept] // spec.block_size, slots[kept] % spec.block_size
                at = rows_at(spec, name, NUM_BLOCKS, layer, blocks, places)
                expected.reshape(-1)[at] = bits_of(part)[kept]
                np.testing.assert_array_equal(array, expected, err_msg=f"{name}, {spec.storage}, schedule {schedule}")


# ---------------------------------------------------------------------------------------------- writes


@pytest.mark.parametrize(
    ("k_bits", "v_bits", "size", "dtype", "x_dtype"),
    [
        (8, 4, 64, "float16", "float16"),
        (4, 8, 32, "bfloat16", "float32"),
        (8, 4, 128, "float32", "float32"),
        (4, 8, 32, "float16", "bfloat16"),
    ],
)
def test_write_stores_the_bits_of_mx_quantize(k_bits, v_bits, size, dtype, x_dtype):
    check_write(KVSpec(1, 3, 128, dtype, 8, k_bits=k_bits, v_bits=v_bits, quant_group_size=size), x_dtype)


@pytest.mark.parametrize(("layout", "vectors"), [("HND", False), ("interleaved", True), ("stacked", False)])
def test_write_serves_layouts_by_strides(layout, vectors):
    v_dim = 96 if layout != "interleaved" else 64  # 96: groups do not fill a simdgroup, rows end inside of one
    spec = KVSpec(2, 3, 64, "float16", 16, v_dim, layout, 8, 8, 32)
    check_write(spec, "float32", vectors, schedules=(0, 4))


@pytest.mark.parametrize("bits", [4, 8])
def test_write_near_ties_rounds_as_a_division_does(bits):
    spec = KVSpec(1, 1, 64, "float32", 8, k_bits=bits)
    for seed in range(4):
        x = near_ties(np.random.default_rng(seed), 16, bits)
        check_write(spec, x=x, schedules=(0,))


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_a_group_that_is_not_finite_is_nan_and_its_neighbours_are_not(bad):
    spec = KVSpec(1, 1, 64, "float16", 8, k_bits=8, quant_group_size=32)
    x = np.ones((1, 1, 64), np.float32)
    x[0, 0, 40] = bad
    (words, scales, biases), _ = write(spec, "k", x, "float32", [11], True)
    expected, _ = quantized(x, spec, 8)
    for (_, array), part in zip((words, scales, biases), expected, strict=True):
        assert np.array_equal(array[1, 3].view(np.uint8).reshape(-1), part.reshape(-1))
    assert np.isnan(scales[1][1, 3].view(np.float16)).tolist() == [[False, True]]


@pytest.mark.parametrize("bits", [4, 8])
def test_a_write_moves_each_byte_once(bits):
    spec = KVSpec(1, 4, 128, "float16", 16, k_bits=bits)
    x = np.random.default_rng(SEED).standard_normal((32, 4, 128)).astype(np.float32)
    _, run = write(spec, "k", round_to(x, "float16"), "float16", np.arange(32), True, instrumented=True)
    assert run.reads["x"].bytes == 32 * 4 * 128 * 2
    stored = sum(run.writes[name].bytes for name in ("words", "scales", "biases"))
    assert stored == 32 * 4 * 128 * (bits / 8 + 4 / 64)


@pytest.mark.parametrize(("bits", "size", "dtype"), [(8, 64, "float16"), (4, 32, "bfloat16"), (4, 128, "float32")])
def test_packed_tokens_are_those_of_mx_quantize(engine, bits, size, dtype):
    spec = KVSpec(1, 3, 128, dtype, 8, k_bits=bits, quant_group_size=size)
    x = round_to(tokens(np.random.default_rng(SEED), (16, 3, 128)), dtype)
    given = mx.array(np.ascontiguousarray(x.swapaxes(0, 1))).astype(DTYPES[dtype]).swapaxes(0, 1)  # by strides
    for schedule in engine.schedules:
        made = MetalKernels(spec, NUM_BLOCKS, engine.factory(schedule)).packed("k", given)
        for part, expected in zip(made, packed(x, dtype, bits, size), strict=True):
            assert part.dtype == expected.dtype
            np.testing.assert_array_equal(bits_of(part), bits_of(expected))


# ------------------------------------------------------------------------------------- gather and copies


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize(("k_bits", "v_bits", "size", "dtype"), [(8, 8, 64, "float16"), (4, 4, 32, "float32")])
def test_gather_equals_what_mx_dequantize_gives(engine, layout, k_bits, v_bits, size, dtype):
    batch = PackedBatch(
        k_bits=k_bits, v_bits=v_bits, size=size, dtype=dtype, head_dim=64, layout=layout, seq_lens=(45, 1, 32)
    )
    tables, seq_lens = mx.array(batch.tables), mx.array(batch.seq_lens, mx.int32)
    for schedule in engine.schedules[:2]:
        kernels = MetalKernels(batch.spec, batch.num_blocks, engine.factory(schedule))
        for at, (plane, _) in enumerate(batch.spec.planes):
            out = np.array(kernels.gather(batch.layer, plane, batch.pools[at], tables, seq_lens, 45).astype(mx.float32))
            for row, length in enumerate(batch.seq_lens):
                wanted = batch.content[row][at].swapaxes(0, 1)
                room = 2.0**-10 * np.abs(wanted) + 1e-6  # rounded to the dtype; a fused product to less
                assert (np.abs(out[row, :, :length] - wanted) <= (room if dtype == "float16" else 1e-6)).all()
                assert (out[row, :, length:] == 0).all()


def test_gather_reads_packed_bytes(counting_engine):
    batch = PackedBatch(dtype="float16", head_dim=128, seq_lens=(64, 40), kv_heads=2, k_bits=4)
    runs = []
    kernels = MetalKernels(batch.spec, batch.num_blocks, counting_engine.factory(0, runs=runs))
    kernels.gather(0, "k", batch.pools[0], mx.array(batch.tables), mx.array(batch.seq_lens, mx.int32), 64)
    read = sum(runs[0].reads[name].bytes for name in ("words", "scales", "biases"))
    assert read == (64 + 40) * 2 * 128 * 0.5625
    assert runs[0].writes["out"].bytes == 2 * 64 * 2 * 128 * 2


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize(("plane", "width"), [("k", 4), ("k_scales", 1), ("k_biases", 1)])
def test_copy_blocks_copies_every_plane(layout, plane, width):
    spec = KVSpec(2, 3, 96, "float16", 16, layout=layout, k_bits=4, v_bits=4, quant_group_size=32)
    (stored,) = [stored for stored in spec.stored_planes if stored.name == plane]
    layer = 1 if layout == "stacked" else 0
    copies = np.array([[0, 3, 16], [0, 4, 5], [2, 1, 1]], np.int32)
    shape = spec.plane_layout(plane, NUM_BLOCKS).shape
    rng = np.random.default_rng(SEED)
    strides = plane_strides(spec, NUM_BLOCKS, layer).reshape(4, 4)[0 if width == 4 else 2]
    for schedule in (0, 1, 4):
        array = rng.integers(0, 2**16, shape).astype(STORED[stored.dtype])
        expected = array.copy()
        for src, dst, count in copies:
            slots = np.arange(count)
            to, at = (rows_at(spec, plane, NUM_BLOCKS, layer, [b] * count, slots) for b in (dst, src))
            expected.reshape(-1)[to] = array.reshape(-1)[at]
        launch_in_place(
            "copy_blocks",
            (stored.dtype,),
            (spec.block_size,) if width == 4 else (spec.block_size, width),
            {"pool": array, "copies": copies, "layout": np.ascontiguousarray(strides)},
            ("pool",),
            (stored.dim // width, spec.num_kv_heads * spec.block_size, len(copies)),
            schedule=schedule,
            instrumented=schedule == 4,
        )
        np.testing.assert_array_equal(array, expected)
