"""The Metal kernels that move tokens: what is written, packed, copied and gathered, bit for bit, in every layout.

``metal_kernel`` binds no buffer for writing, so only the stand-in runs from Python what changes a pool where it lies.
On a Mac these kernels are dispatched by the extension that owns the pool, and tested with it.
"""

import mlx.core as mx
import numpy as np
import pytest
from metal_cases import STORED, Batch, PackedBatch, bits_of, packed, rows_at
from metal_engine import launch_in_place
from quantized_rows import near_ties

from kvpool.config import KVSpec
from kvpool.testing.dense import quantized, round_to, stored_bytes
from kvpool_backends.mlx.metal_kernels import DTYPES, MetalKernels, plane_strides

LAYOUTS = ("NHD", "HND")
NUM_BLOCKS = 6
SEED = 8_204


def bits(x, dtype):
    """Values as the integers that are stored for them, rounded to nearest even."""
    return stored_bytes(round_to(x, dtype), dtype).view(STORED[dtype]).reshape(np.shape(x))


class Planes:
    """The stored planes of one layer by name, random bits, and the indices of their elements."""

    def __init__(self, spec):
        rng, bases = np.random.default_rng(SEED), {}
        self.spec = spec
        self.strides = plane_strides(spec, NUM_BLOCKS, 0)
        self.stored = {plane.name: plane for plane in spec.stored_planes}
        for name, plane in self.stored.items():
            layout = spec.plane_layout(name, NUM_BLOCKS)
            if layout.array not in bases:
                bases[layout.array] = rng.integers(0, 2**16, layout.shape).astype(STORED[plane.dtype])
        self.arrays = {name: bases[spec.plane_layout(name, NUM_BLOCKS).array] for name in self.stored}

    def put(self, name, block, slot, values):
        self.arrays[name].reshape(-1)[self.at(name, block, slot)] = values

    def at(self, name, block, slot):
        return rows_at(self.spec, name, NUM_BLOCKS, block, slot)

    def check(self, expected):
        for name, array in self.arrays.items():
            np.testing.assert_array_equal(array, expected.arrays[name], err_msg=f"{name}, {self.spec}")


def laid_out(x, dtype, vectors):
    """Tokens ``[T, Hk, D]`` as a slice of a wider projection, or as ``[Hk, D, T]``; and their strides."""
    stored, (count, heads, dim) = bits(x, dtype), x.shape
    if not vectors:
        return np.ascontiguousarray(stored.transpose(1, 2, 0)), [1, dim * count, count]
    wide = np.zeros((count, heads * dim + 16), stored.dtype)
    wide[:, : heads * dim] = stored.reshape(count, -1)
    return wide, [wide.shape[1], dim, 1]


def write(planes, tokens, x_dtype, slots, vectors=True, **how):
    """Launch what writes K and V: kv_write, or kv_write_packed for each plane of 8 or 4 bits; returns the runs."""
    spec, slots, runs = planes.spec, np.asarray(slots, np.int64), []
    given, strides = zip(*(laid_out(x, x_dtype, vectors) for x in tokens), strict=True)
    if spec.bits == (None, None):
        buffers = {"k_pool": planes.arrays["k"], "v_pool": planes.arrays["v"], "k": given[0], "v": given[1]}
        buffers |= {"slots": slots, "layout": planes.strides, "strides": np.array([*strides[0], *strides[1]])}
        numbers = spec.head_dim, spec.value_head_dim, spec.block_size, int(vectors)
        grid = max(spec.head_dim, spec.value_head_dim) // 4, spec.num_kv_heads, len(slots)
        types, written = (spec.dtype, x_dtype), ("k_pool", "v_pool")
        return [launch_in_place("kv_write", types, numbers, buffers, written, grid, **how)]
    for at, ((plane, dim), number) in enumerate(zip(spec.planes, spec.bits, strict=True)):
        if number is not None:
            names = {"words": plane, "scales": f"{plane}_scales", "biases": f"{plane}_biases"}
            buffers = {name: planes.arrays[stored] for name, stored in names.items()}
            layout = np.ascontiguousarray(planes.strides.reshape(2, 2, 4)[:, at]).reshape(-1)
            buffers |= {"x": given[at], "slots": slots, "layout": layout, "strides": np.array(strides[at])}
            numbers = dim, spec.block_size, int(vectors), number, spec.quant_group_size
            types, grid = (spec.dtype, x_dtype), (dim // 4, spec.num_kv_heads, len(slots))
            runs.append(launch_in_place("kv_write_packed", types, numbers, buffers, tuple(names), grid, **how))
    return runs


def copy_blocks(planes, name, copies, **how):
    """Launch copy_blocks on one plane of the keys."""
    spec, stored, width = planes.spec, planes.stored[name], 1 if "_" in name else 4
    layout = np.ascontiguousarray(planes.strides.reshape(-1, 4)[0 if width == 4 else 2])
    buffers = {"pool": planes.arrays[name], "copies": np.array(copies, np.int32), "layout": layout}
    numbers = (spec.block_size,) if width == 4 else (spec.block_size, width)
    grid = stored.dim // width, spec.num_kv_heads * spec.block_size, len(copies)
    launch_in_place("copy_blocks", (stored.dtype,), numbers, buffers, ("pool",), grid, **how)


def tokens_of(rng, shape):
    """Groups of every kind: one sign, one value, zeros, ties, tiny and large."""
    x = rng.standard_normal(shape).astype(np.float32)
    changes = (np.abs, lambda x: -np.abs(x), lambda x: 0 * x + 0.37, lambda x: 0 * x, np.rint, lambda x: x * 1e-6)
    for i, change in enumerate(changes):
        x[i::8] = change(x[i::8])
    x[6::8] *= 1e3
    return x


def check_write(spec, x_dtype="float32", vectors=True, x=None, schedules=range(5)):
    """Floats rounded, or the bits of `mx.quantize`, and nothing else touched."""
    rng = np.random.default_rng(SEED)
    slots = rng.permutation(NUM_BLOCKS * spec.block_size)[:16].astype(np.int64)
    slots[[2, 7]] = -1, -5
    kept = np.flatnonzero(slots >= 0)
    shapes = [(16, spec.num_kv_heads, dim) for _, dim in spec.planes]
    tokens = [round_to(tokens_of(rng, shape) if x is None else x, x_dtype) for shape in shapes]
    expected = Planes(spec)
    for (plane, _), given, number in zip(spec.planes, tokens, spec.bits, strict=True):
        parts = {plane: bits(given, spec.dtype)} if spec.bits == (None, None) else {}
        if number is not None:
            made = map(bits_of, packed(given, spec.dtype, number, spec.quant_group_size))
            parts = dict(zip((plane, f"{plane}_scales", f"{plane}_biases"), made, strict=True))
        for name, part in parts.items():
            expected.put(name, *np.divmod(slots[kept], spec.block_size), part[kept])
    for schedule in schedules:
        planes = Planes(spec)
        write(planes, tokens, x_dtype, slots, vectors, schedule=schedule, instrumented=schedule == 4)
        planes.check(expected)


# ---------------------------------------------------------------------------------------------- writes


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("x_dtype", DTYPES)
def test_write_rounds_to_nearest_even_and_touches_nothing_else(dtype, x_dtype):
    check_write(KVSpec(1, 2, 80, dtype, 8), x_dtype)


@pytest.mark.parametrize(
    ("k_bits", "v_bits", "size", "dtype", "x_dtype"),
    [(8, 4, 64, "float16", "float16"), (4, 8, 32, "bfloat16", "float32"), (8, 4, 128, "float32", "bfloat16")],
)
def test_write_stores_the_bits_of_mx_quantize(k_bits, v_bits, size, dtype, x_dtype):
    check_write(KVSpec(1, 3, 128, dtype, 8, None, "NHD", k_bits, v_bits, size), x_dtype)


@pytest.mark.parametrize("vectors", [False, True])
@pytest.mark.parametrize("packing", [(), (8, 8, 32)], ids=["floats", "packed"])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_write_serves_layouts_by_strides(layout, packing, vectors):
    # 96: groups do not fill a simdgroup, rows end inside of one
    check_write(KVSpec(2, 3, 64, "float16", 16, 96, layout, *packing), "float32", vectors, schedules=(0, 4))


def test_slots_beyond_32_bits_are_written():
    planes, expected = (Planes(KVSpec(1, 1, 64, "float32", 16)) for _ in range(2))
    planes.strides = planes.strides.copy()
    planes.strides[[1, 5]] = 0  # all blocks lie in one place
    tokens = [np.full((2, 1, 64), n, np.float32) for n in (7, 9)]
    for name, x in zip("kv", tokens, strict=True):
        expected.arrays[name].reshape(-1, 64)[[5, 11]] = bits(x, "float32")[:, 0]
    write(planes, tokens, "float32", [2**31 + 5, 2**35 + 2**31 + 11])
    planes.check(expected)


@pytest.mark.parametrize("bits", [4, 8])
def test_write_near_ties_rounds_as_a_division_does(bits):
    for seed in range(4):
        x = near_ties(np.random.default_rng(seed), 16, bits)
        check_write(KVSpec(1, 1, 64, "float32", 8, k_bits=bits), x=x, schedules=(0,))


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_a_group_that_is_not_finite_is_nan_and_its_neighbours_are_not(bad):
    planes = Planes(KVSpec(1, 1, 64, "float16", 8, k_bits=8, quant_group_size=32))
    x = np.ones((1, 1, 64), np.float32)
    x[0, 0, 40] = bad
    write(planes, [x, x], "float32", [11])
    expected, _ = quantized(x, planes.spec, 8)
    for name, part in zip(("k", "k_scales", "k_biases"), expected, strict=True):
        assert np.array_equal(planes.arrays[name][1, 3].view(np.uint8).reshape(-1), part.reshape(-1))
    assert np.isnan(planes.arrays["k_scales"][1, 3].view(np.float16)).tolist() == [[False, True]]


@pytest.mark.parametrize(("dtype", "number"), [("float16", None), ("float32", None), ("float16", 4), ("float16", 8)])
def test_a_write_moves_each_byte_once(dtype, number):
    planes = Planes(KVSpec(1, 4, 128, dtype, 16, k_bits=number, v_bits=number))
    x = np.random.default_rng(SEED).standard_normal((32, 4, 128))
    runs = write(planes, [x, x], dtype, np.arange(32), instrumented=True)
    written = [traffic for run in runs for traffic in run.writes.values()]
    given = 2 * x.size * STORED[dtype]().itemsize
    assert sum(run.reads[name].bytes for run in runs for name in {"k", "v", "x"} & set(run.reads)) == given
    assert sum(traffic.bytes for traffic in written) == 32 * planes.spec.token_nbytes
    if number is None:  # with the slots; layout and strides are constant memory
        assert all(traffic.full_transactions == traffic.transactions for traffic in written)
        assert runs[0].reads["slots"].bytes <= 0.2 * given


@pytest.mark.parametrize(("bits", "size", "dtype"), [(8, 64, "float16"), (4, 32, "bfloat16"), (4, 128, "float32")])
def test_packed_tokens_are_those_of_mx_quantize(engine, bits, size, dtype):
    spec = KVSpec(1, 3, 128, dtype, 8, k_bits=bits, quant_group_size=size)
    x = round_to(tokens_of(np.random.default_rng(SEED), (16, 3, 128)), dtype)
    given = mx.array(np.ascontiguousarray(x.swapaxes(0, 1))).astype(DTYPES[dtype]).swapaxes(0, 1)  # by strides
    for schedule in engine.schedules:
        made = MetalKernels(spec, NUM_BLOCKS, engine.factory(schedule)).packed("k", given)
        for part, expected in zip(made, packed(x, dtype, bits, size), strict=True):
            assert part.dtype == expected.dtype
            np.testing.assert_array_equal(bits_of(part), bits_of(expected))


# ------------------------------------------------------------------------------------- copies and gather


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("name", ["float32", "float16", "bfloat16", "k", "k_scales", "k_biases"])
def test_copy_blocks_copies_leading_positions_only(layout, name):
    """Of floats of each type, and of each plane of 4 bits."""
    spec = KVSpec(2, 3, 96, "float16", 16, None, layout, 4, 4, 32)
    if name in DTYPES:
        name, spec = "k", KVSpec(2, 3, 80, name, 16, layout=layout)
    copies = [[0, 3, 16], [0, 4, 5], [2, 5, 1]]
    for schedule in range(5):
        planes, expected = Planes(spec), Planes(spec)
        for src, dst, count in copies:
            slots = np.arange(count)
            values = planes.arrays[name].reshape(-1)[planes.at(name, [src] * count, slots)]
            expected.put(name, [dst] * count, slots, values)
        copy_blocks(planes, name, copies, schedule=schedule, instrumented=schedule == 4)
        planes.check(expected)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize(
    ("kind", "dtype", "head_dim", "block_size", "room"),
    [
        (Batch, "float32", 80, 8, 0),
        (Batch, "float16", 128, 16, 0),
        (Batch, "bfloat16", 256, 32, 0),
        (PackedBatch, "float16", 64, 16, 2.0**-10),  # rounded to the dtype; a fused product to less
        (PackedBatch, "float32", 128, 8, 0),
    ],
)
def test_gather_equals_what_was_stored(engine, layout, kind, dtype, head_dim, block_size, room):
    batch = kind(dtype=dtype, head_dim=head_dim, block_size=block_size, layout=layout, seq_lens=(45, 1, 32), kv_heads=3)
    tables, seq_lens = mx.array(batch.tables), mx.array(batch.seq_lens, mx.int32)
    for schedule in engine.schedules:
        kernels = MetalKernels(batch.spec, batch.num_blocks, engine.factory(schedule))
        for at, (plane, dim) in enumerate(batch.spec.planes):
            out = np.array(kernels.gather(0, plane, batch.pools[at], tables, seq_lens, 45).astype(mx.float32))
            assert out.shape == (3, 3, 45, dim)
            for row, length in enumerate(batch.seq_lens):
                wanted = batch.content[row][at].swapaxes(0, 1)
                np.testing.assert_allclose(out[row, :, :length], wanted, room, 0 if kind is Batch else 1e-6)
                assert (out[row, :, length:] == 0).all()


@pytest.mark.parametrize(("batch", "each"), [(Batch, 2), (PackedBatch, 0.5625)])
def test_gather_moves_each_byte_once(counting_engine, batch, each):
    batch = batch(dtype="float16", head_dim=128, seq_lens=(64, 40), **({"k_bits": 4} if each < 1 else {}))
    runs = []
    kernels = MetalKernels(batch.spec, batch.num_blocks, counting_engine.factory(0, runs=runs))
    kernels.gather(0, "k", batch.pools[0], mx.array(batch.tables), mx.array(batch.seq_lens, mx.int32), 64)
    read = [runs[0].reads[name] for name in {"pool", "words", "scales", "biases"} & set(runs[0].reads)]
    written = runs[0].writes["out"]
    assert sum(traffic.bytes for traffic in read) == (64 + 40) * 2 * 128 * each
    assert written.bytes == 2 * 64 * 2 * 128 * 2
    if len(read) == 1:
        assert all(traffic.full_transactions == traffic.transactions for traffic in (*read, written))
