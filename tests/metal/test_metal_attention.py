"""`paged_attention` and `paged_reduce` against float64: shapes, dtypes, layouts, features, parts, schedules.

Every pool is full of NaN wherever no token lies, and every table entry that belongs to nobody names a block that does
not exist. ``KVPOOL_METAL_SWEEP=1`` asks for all shapes with all features, 0.01 for one in a hundred of them.
"""

import functools
import os

import mlx.core as mx
import numpy as np
import pytest
from metal_cases import FEATURES, Batch, choices, shape_of

from kvpool.protocol import AttentionOptions
from kvpool_backends.mlx.metal_kernels import MetalKernels, attention_step, head_tiles, plan_attention

FACTORS = {
    "dtype": ("float32", "float16", "bfloat16"),
    "head_dim": (64, 80, 96, 112, 128, 192, 256, 512, (512, 64)),
    "group": (1, 4, 5, 8, 12, 16, 32, 64),
    "queries": (1, 3, 40),  # of each row, as far as it has tokens, and 100 rows of a KV head
    "block_size": (8, 16, 32),
    "seq_lens": ((1,), (8, 7), (33, 32, 31), (100, 1), (257,), (64, 9, 600), (1000,)),
    "layout": ("NHD", "HND"),
    "features": ((), *((name,) for name in FEATURES), FEATURES),
    "part_tokens": (32, 512),
}

CHOICES = choices(FACTORS, ("dtype", "head_dim", "group", "queries", "features"))


def batch_of(choice):
    """A batch of `FACTORS`; decode of NHD with 64 dimensions where the choice says nothing."""
    return Batch(**shape_of({"queries": 1, "head_dim": 64, "layout": "NHD"} | choice))


def run_all_schedules(batch, engine):
    for schedule in engine.schedules:
        batch.check(batch.run(engine.factory(schedule)))


@pytest.mark.parametrize("choice", CHOICES, ids=lambda choice: "-".join(str(x) for x in choice.values()))
def test_every_pair_of_choices_equals_float64(engine, choice):
    batch = batch_of(choice)
    if os.environ.get("KVPOOL_METAL_SWEEP") or batch.group * max(batch.q_lens) * batch.head_dim < 5000:
        run_all_schedules(batch, engine)
    else:  # a long run
        batch.check(batch.run(engine.factory(engine.schedules[-1])))


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
@pytest.mark.parametrize("part_tokens", [32, 512])
def test_sums_over_16_bits_are_those_of_float32(engine, dtype, part_tokens):
    """Results of float32 hide no rounding."""
    batch = Batch(dtype=dtype, q_dtype="float32", head_dim=128, group=2, seq_lens=(512, 77), part_tokens=part_tokens)
    batch.check(batch.run(engine.factory(0)))


@pytest.mark.parametrize("features", [(), ("window",), FEATURES])
@pytest.mark.parametrize(("group", "head_dim", "layout"), [(1, 64, "NHD"), (3, 80, "HND"), (8, 128, "NHD")])
def test_windows_and_chunks_equal_float64(engine, group, head_dim, layout, features):
    batch = Batch(
        dtype="float16",
        head_dim=head_dim,
        group=group,
        layout=layout,
        seq_lens=(90, 300, 40, 20, 5),
        q_lens=(3, 1, 8, 20, 0),
        features=features,
        part_tokens=64,
        seed=3,
    )
    run_all_schedules(batch, engine)


SHAPES = [
    *({"head_dim": dim, "v_head_dim": v_dim, "block_size": 8} for dim, v_dim in ((192, 128), (80, 112), (64, 256))),
    *({"head_dim": dim, "dtype": "float16", "layout": "HND", "block_size": 8} for dim in (8, 20, 72, 160)),
    *({"group": group, "kv_heads": 1, "seq_lens": (40, 3)} for group in (20, 71)),
    {"dtype": "float16", "kv_heads": 1, "group": 2, "seq_lens": (40_000,), "block_size": 32},
    # Tables on both sides of 8 elements: Metal gives smaller inputs another address space.
    *(
        {"seq_lens": (16 * columns - 1,) * rows, "extra_columns": 0}
        for rows, columns in ((1, 1), (1, 7), (2, 4), (7, 1))
    ),
]


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_shapes_at_the_ends_equal_float64(engine, shape):
    batch = Batch(**shape)
    for schedule in engine.schedules[-1:] if max(batch.seq_lens) > 1000 else engine.schedules:
        batch.check(batch.run(engine.factory(schedule)))


TILE = 32  # tokens
BEFORE = 2  # tiles before the last one: 0, 1, or this many and more
PAIRS = {(before, tail) for before in range(BEFORE + 1) for tail in range(1, TILE + 1)}
BLOCK_SIZES = (8, 16, 24, 32)
SMALL = {  # the smallest shape of each kernel
    "paged_attention": {"kv_heads": 1, "group": 1, "head_dim": 32},
    "paged_matrix": {"kv_heads": 1, "group": 9, "head_dim": 32},
    "latent": {"kv_heads": 1, "group": 2, "head_dim": 32, "v_head_dim": 8, "latent": True},
}


def tail_batch(kernel, block_size, seq_lens, features=()):
    """Rows whose contexts are one part each."""
    return Batch(seq_lens=seq_lens, block_size=block_size, part_tokens=1024, features=features, **SMALL[kernel])


def last_tiles(batch):
    """Where the context of each row ends: (tiles of its last run before the last one, tokens in the last one)."""
    work = plan_attention(
        np.array(batch.seq_lens), batch.cu_q_lens, len(batch.q), tiles=batch.tiles, part_tokens=batch.part_tokens
    )
    found = []
    for *_, part, run, _, end in work.items.tolist():
        inside = end - 1 - part
        tile, tail = divmod(inside if batch.tiles.units else inside % run, TILE)
        found.append((min(tile, BEFORE), tail + 1))
    return found


@functools.cache
def contexts(kernel, block_size):
    """The least lengths with which every pair occurs, one for each."""
    lengths = tuple(range(1, 1025))
    found = {}
    for length, pair in zip(lengths, last_tiles(tail_batch(kernel, block_size, lengths)), strict=True):
        found.setdefault(pair, length)
    return tuple(sorted(found.values()))


@pytest.mark.parametrize("features", [(), ("sinks",)])
@pytest.mark.parametrize("block_size", BLOCK_SIZES)
@pytest.mark.parametrize("kernel", SMALL)
def test_last_tiles_of_any_length_equal_float64(engine, kernel, block_size, features):
    batch = tail_batch(kernel, block_size, contexts(kernel, block_size), features)
    assert set(last_tiles(batch)) == PAIRS
    batch.check(batch.run(engine.factory(1)))


@pytest.mark.parametrize("part_tokens", [64, 512])
def test_padding_and_queries_that_see_nothing_get_zero(engine, part_tokens):
    for features in (("mask",), ("mask", "sinks")):
        batch = Batch(seq_lens=(200, 40), features=features, padding=3, part_tokens=part_tokens)
        batch.options.mask[0] = -np.inf
        out = batch.run(engine.factory(0))
        batch.check(out)
        assert (out[[0, -3, -2, -1]] == 0).all()


@pytest.mark.parametrize("part_tokens", [64, 512])
@pytest.mark.parametrize(("group", "q_lens"), [(1, (1, 1)), (2, (3, 1)), (16, (4, 4))])
def test_masks_and_sinks_at_the_ends_of_the_float_range_equal_float64(engine, group, q_lens, part_tokens):
    """Numbers that are infinite in base 2; queries whose tokens all have one of them, and with others beside it."""
    batch = Batch(group=group, seq_lens=(200, 40), q_lens=q_lens, features=("mask", "sinks"), part_tokens=part_tokens)
    ends = np.array([np.finfo(np.float32).min, np.finfo(np.float32).max, -3e38, 0.0, -0.0], np.float32)
    for shift in range(len(ends)):
        mask = np.resize(np.roll(ends, shift), (len(batch.q), 1, 1)).repeat(200, axis=2)
        mask[:, :, 100:150] = ends[0]
        batch.__dict__["options"] = AttentionOptions(mask=mask, sinks=np.resize(ends[:3], batch.num_q_heads))
        batch.__dict__.pop("expected", None)
        batch.check(batch.run(engine.factory(0)))


def test_masked_tokens_may_hold_anything(engine):
    batch = Batch(seq_lens=(100,), q_lens=(4,), features=("mask",), dtype="float32", seed=1)
    batch.options.mask[:, :, 50:60] = -np.inf
    expected = batch.expected
    for i in (0, 1):
        batch.content[0][i][50:60] = np.nan
    batch.__dict__["expected"] = expected
    run_all_schedules(batch, engine)


def test_an_infinite_value_stays_with_the_queries_that_see_it(engine):
    for group in (1, 4):
        batch = Batch(seq_lens=(100,), q_lens=(4,), group=group)
        batch.content[0][1][99] = np.inf
        out = batch.run(engine.factory(0))
        assert np.isfinite(out[:3]).all()
        assert (out[3] == np.inf).all()


@pytest.mark.parametrize("features", [(), ("sinks",), ("window", "mask")])
def test_any_number_of_parts_agrees(engine, features):
    batch = Batch(seq_lens=(640, 333), block_size=8, features=features)
    whole = batch.run(engine.factory(0), part_tokens=1024)
    batch.check(whole)
    magnitude = np.abs(whole).max(axis=(0, 2), keepdims=True)
    for part_tokens in (16, 24, 40, 128, 200, 512):  # 40, 27, 16, 5, 4, 2 parts of the longest context
        split = batch.run(engine.factory(1), part_tokens=part_tokens)
        np.testing.assert_allclose(split / magnitude, whole / magnitude, rtol=0, atol=1e-5)


def test_a_row_gets_the_same_bits_in_any_batch(engine):
    together = Batch(seq_lens=(600, 90, 33, 70), q_lens=(1, 3, 1, 20), seed=5)
    kernels = MetalKernels(together.spec, together.num_blocks, engine.factory(3))
    out = together.run(engine.factory(0))
    for row, length in enumerate(together.seq_lens):
        tokens = slice(together.cu_q_lens[row], together.cu_q_lens[row + 1])
        num_queries = int(tokens.stop - tokens.start)
        own = head_tiles(together.spec, together.group, num_queries)
        shapes = {head_tiles(together.spec, together.group, queries) for queries in (1, 2, 4, 20, 64)}
        for tiles in {own} | {tiles for tiles in shapes if tiles.kernel == own.kernel}:
            work = plan_attention(
                np.array([length]),
                np.array([0, num_queries]),
                num_queries,
                tiles=tiles,
                part_tokens=together.part_tokens,
            )
            step = attention_step(work, mx.array(together.tables[row : row + 1]), together.head_dim**-0.5)
            (alone,) = kernels.attend(0, mx.array(together.q[tokens]), *together.pools, step)
            np.testing.assert_array_equal(np.array(alone), out[tokens])


def test_strided_queries_are_read_where_they_are(engine):
    for group in (2, 4):
        batch = Batch(seq_lens=(50, 20), q_lens=(2, 2), group=group)
        work = plan_attention(np.array(batch.seq_lens), batch.cu_q_lens, 4, tiles=head_tiles(batch.spec, group, 2))
        kernels = MetalKernels(batch.spec, batch.num_blocks, engine.factory(0))
        heads_first = mx.contiguous(mx.array(batch.q).swapaxes(0, 1)).swapaxes(0, 1)
        step = attention_step(work, mx.array(batch.tables), 1 / 8)
        (out,) = kernels.attend(0, heads_first, *batch.pools, step)
        batch.check(np.array(out))
