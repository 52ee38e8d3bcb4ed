"""Bytes in and out of blocks against a model in numpy: every layout, dtype, stride and conversion."""

import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvpool.config import LAYOUTS, KVSpec
from kvpool.testing.dense import round_to, stored_bytes
from kvpool_backends.cpu import BlockStore, isas

NUMPY = {"float32": np.float32, "float16": np.float16, "bfloat16": np.uint16}
SPECS = [
    KVSpec(layers, heads, dim, dtype, size, v_dim, layout)
    for layout, dtype, (layers, heads, dim, v_dim, size) in itertools.product(
        LAYOUTS, NUMPY, [(2, 2, 8, 8, 4), (1, 3, 5, 7, 3), (3, 1, 16, 16, 1)]
    )
]
LARGE = [KVSpec(2, 8, 64, "bfloat16", 16, layout=layout) for layout in LAYOUTS]  # calls are divided among threads


class Model:
    """Blocks as bit patterns ``[block, layer, plane][position, head, element]``, in no memory layout at all."""

    def __init__(self, spec, num_blocks, seed=0):
        self.spec, self.rng = spec, np.random.default_rng(seed)
        self.bits = NUMPY["bfloat16"] if spec.itemsize_nbytes == 2 else np.uint32
        self.blocks = [[self.planes() for _ in range(spec.num_layers)] for _ in range(num_blocks)]

    def planes(self):
        return [self.noise((self.spec.block_size, self.spec.num_kv_heads, dim)) for _, dim in self.spec.planes]

    def noise(self, shape):
        return self.rng.integers(0, 2 ** (8 * self.spec.itemsize_nbytes), shape).astype(self.bits)

    def row(self, block):
        return np.concatenate([plane.reshape(-1).view(np.uint8) for planes in self.blocks[block] for plane in planes])

    def rows(self, blocks):
        return np.stack([self.row(block) for block in blocks])


def make(spec, num_blocks, **options):
    arrays = [np.zeros(shape, NUMPY[spec.dtype]) for shape, _, _ in spec.base_arrays(num_blocks)]
    if spec.layout == "block":  # rows apart, as those that several specs share
        arrays = [np.zeros((num_blocks, spec.block_nbytes + 32), np.uint8)[:, 16:-16]]
    return BlockStore(spec, num_blocks, arrays, **options)


def exported(store, blocks):
    out = np.empty((len(blocks), store.spec.block_nbytes), np.uint8)
    store.export_blocks(np.array(blocks, np.int32), out)
    return out


def filled(spec, num_blocks, seed=0, **options):
    store, model = make(spec, num_blocks, **options), Model(spec, num_blocks, seed)
    store.import_blocks(np.arange(num_blocks), model.rows(range(num_blocks)))
    return store, model


def assert_same(store, model):
    everything = range(store.num_blocks)
    np.testing.assert_array_equal(exported(store, everything), model.rows(everything))


def strided(x, how):
    """The same numbers, laid out another way: contiguous, head-major, backwards, or with gaps everywhere."""
    if how == "head-major":
        return np.ascontiguousarray(x.swapaxes(0, 1)).swapaxes(0, 1)
    if how == "backwards":
        return np.ascontiguousarray(x[::-1, ::-1, ::-1])[::-1, ::-1, ::-1]
    if how == "gaps":
        wide = np.zeros([2 * n + 1 for n in x.shape], x.dtype)[1::2, 1::2, 1::2]
        wide[...] = x
        return wide
    return np.ascontiguousarray(x)


HOW = ("contiguous", "head-major", "backwards", "gaps")


def as_dtype(x, dtype):
    """float32 values that `dtype` holds exactly, in that dtype."""
    if dtype == "bfloat16":
        return (np.ascontiguousarray(x, np.float32).view(np.uint32) >> 16).astype(np.uint16)
    return x.astype(NUMPY[dtype])


# ---------------------------------------------------------------------- every layout against the model


@pytest.mark.parametrize("spec", SPECS + LARGE, ids=str)
@settings(max_examples=10, deadline=None)
@given(data=st.data())
def test_a_program_of_moves_leaves_the_same_bytes_as_the_model(spec, data):
    num_blocks, isa = 40 if spec in LARGE else 6, data.draw(st.sampled_from(isas()))
    store, model = filled(spec, num_blocks, data.draw(st.integers(0, 99)), isa=isa, num_threads=3)
    width = data.draw(st.sampled_from([np.int32, np.int64]))
    for action in data.draw(st.lists(st.sampled_from(list(ACTIONS)), min_size=1, max_size=5)):
        order = np.array(data.draw(st.permutations(range(num_blocks))), width)
        ACTIONS[action](store, model, order, data)
    assert_same(store, model)


def do_write(store, model, order, data):
    spec, layer = store.spec, data.draw(st.integers(0, store.spec.num_layers - 1))
    num_tokens = data.draw(st.integers(0, store.num_blocks * spec.block_size // 3))
    positions = model.rng.permutation(store.num_blocks * spec.block_size)[:num_tokens]
    skipped = model.rng.random(num_tokens) < 0.2
    given_dtype, how = data.draw(st.sampled_from(list(NUMPY))), data.draw(st.sampled_from(HOW))
    tensors = []
    for plane, (_, dim) in enumerate(spec.planes):
        x = round_to(model.rng.standard_normal((num_tokens, spec.num_kv_heads, dim)) * 100, given_dtype)
        tensors.append(strided(as_dtype(x, given_dtype), how))
        for token in np.flatnonzero(~skipped):
            block, offset = divmod(int(positions[token]), spec.block_size)
            bits = stored_bytes(round_to(x[token], spec.dtype), spec.dtype).view(model.bits)
            model.blocks[block][layer][plane][offset] = bits.reshape(x[token].shape)
    slots = np.where(skipped, -1 - positions, positions).astype(order.dtype)
    store.write(layer, *tensors, np.repeat(slots, 2)[::2])


def do_copy(store, model, order, data):
    count = data.draw(st.integers(0, len(order) // 2))
    lengths = model.rng.integers(1, store.spec.block_size + 1, count)
    copies = np.stack([order[:count], order[len(order) - count :], lengths.astype(order.dtype)], axis=1)
    for src, dst, n in copies.tolist():
        for from_planes, to_planes in zip(model.blocks[src], model.blocks[dst], strict=True):
            for from_plane, to_plane in zip(from_planes, to_planes, strict=True):
                to_plane[:n] = from_plane[:n]
    store.copy_blocks(np.asfortranarray(copies))


def do_zero(store, model, order, data):
    blocks = order[: data.draw(st.integers(0, 3))]
    for block in blocks:
        for planes in model.blocks[block]:
            for plane in planes:
                plane[...] = 0
    store.zero(np.concatenate([blocks, blocks]))


def do_import(store, model, order, data):
    other = Model(store.spec, len(order), data.draw(st.integers(100, 199)))
    blocks = order[: data.draw(st.integers(1, 3))]
    for block in blocks:
        model.blocks[block] = other.blocks[block]
    store.import_blocks(blocks, other.rows(blocks))


def do_gather(store, model, order, data):
    spec, layer = store.spec, data.draw(st.integers(0, store.spec.num_layers - 1))
    num_tokens, how = data.draw(st.integers(0, len(order) * spec.block_size)), data.draw(st.sampled_from(HOW))
    shapes = [(num_tokens, spec.num_kv_heads, dim) for _, dim in spec.planes]
    outs = [strided(np.zeros(shape, NUMPY[spec.dtype]), how) for shape in shapes]
    store.gather(layer, order[::-1], *outs)
    for plane, out in enumerate(outs):
        tokens = np.concatenate([model.blocks[block][layer][plane] for block in order[::-1]])[:num_tokens]
        np.testing.assert_array_equal(np.ascontiguousarray(out).view(model.bits), tokens)


ACTIONS = {"write": do_write, "copy": do_copy, "zero": do_zero, "import": do_import, "gather": do_gather}


# ---------------------------------------------------------------------- conversion, exhaustively


def write_and_read(isa, dtype, x, given=None):
    """What the pool stores of the values `x`, as float32; `given` are the same values in another dtype."""
    dim = 64
    spec = KVSpec(1, 1, dim, dtype, 16)
    num_tokens = x.size // dim
    store = make(spec, -(-num_tokens // 16), isa=isa)
    tokens = (x if given is None else given).reshape(num_tokens, 1, dim)
    store.write(0, tokens, tokens, np.arange(num_tokens))
    out = np.empty((2, num_tokens, 1, dim), NUMPY[dtype])
    store.gather(0, np.arange(store.num_blocks), *out)
    np.testing.assert_array_equal(out[0].view(np.uint8), out[1].view(np.uint8))
    return as_float32(out[0].reshape(-1), dtype)


def as_float32(x, dtype):
    return (x.astype(np.uint32) << 16).view(np.float32) if dtype == "bfloat16" else x.astype(np.float32)


ALL_BITS = np.arange(65536, dtype=np.uint16)


@pytest.mark.parametrize("isa", isas())
@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
@pytest.mark.parametrize("side", ["below", "at", "above"])
def test_midpoints_of_all_16_bit_numbers_round_to_nearest_even(dtype, side, isa):
    """Halfway to the next number of the dtype, and the float32 numbers beside that: 65,536 of each."""
    values = as_float32(ALL_BITS.view(NUMPY[dtype]), dtype)
    finite = values[np.isfinite(values)]
    order = np.unique(finite.astype(np.float64))
    middle = ((order[:-1] + order[1:]) / 2).astype(np.float32)
    largest = float(order[-1])
    overflow = np.float32(largest + (largest - float(order[-2])) / 2)  # halfway to what would come next: to infinity
    x = np.concatenate([middle, [overflow, -overflow]]).astype(np.float32)
    if side != "at":
        x = np.nextafter(x, np.float32(-np.inf if side == "below" else np.inf))
    x = np.concatenate([x, np.zeros(-x.size % 64, np.float32)])
    np.testing.assert_array_equal(write_and_read(isa, dtype, x), round_to(x, dtype))


@pytest.mark.parametrize("isa", isas())
@pytest.mark.parametrize(("given_dtype", "dtype"), [*itertools.product(["float16", "bfloat16"], NUMPY)])
def test_every_16_bit_number_is_converted_between_dtypes(given_dtype, dtype, isa):
    given = ALL_BITS.view(NUMPY[given_dtype])
    values = as_float32(given, given_dtype)
    np.testing.assert_array_equal(write_and_read(isa, dtype, values, given), round_to(values, dtype))
