"""Quantized storage by the cpu kernels, against the reference backend: bytes equal, attention within 1e-3 and less."""

import numpy as np
import pytest
from quantized_rows import FLOATS, near_ties, rows

from kvpool.config import LAYOUTS, KVSpec
from kvpool.protocol import AttentionOptions, StepArrays
from kvpool_backends.cpu import CPUBackend, isas
from kvpool_backends.numpy import NumpyBackend
from kvpool_backends.numpy.elements import to_bfloat16

SEED = 8_105
BITS = [(8, 8), (4, 4), (8, 4), (4, 8), (None, 4), (8, None)]


def pair(spec, num_blocks, **options):
    return CPUBackend(spec, num_blocks, **options), NumpyBackend(spec, num_blocks)


def everything(backend):
    return backend.export_blocks(np.arange(backend.num_blocks))


def given_as(x, dtype):
    return to_bfloat16(x) if dtype == "bfloat16" else x.astype(dtype)


# ---------------------------------------------------------------------- writes


@pytest.mark.parametrize("isa", isas())
@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("given", FLOATS)
@pytest.mark.parametrize(("bits", "group"), [(8, 32), (8, 64), (4, 32), (4, 128)])
def test_write_stores_the_bytes_of_the_reference(bits, group, given, dtype, isa):
    spec = KVSpec(1, 3, 256, dtype, 7, k_bits=bits, v_bits=bits, quant_group_size=group)
    mine, reference = pair(spec, 30, isa=isa)
    rng = np.random.default_rng(SEED)
    k, v = (given_as(rows(rng, (200, 3, 256)), given) for _ in "kv")
    k_floats, v_floats = ((x.astype(np.uint32) << 16).view(np.float32) if given == "bfloat16" else x for x in (k, v))
    plan = StepArrays(slot_mapping=rng.permutation(210)[:200])
    mine.write(mine.prepare(plan), 0, k, v)
    reference.write(reference.prepare(plan), 0, k_floats, v_floats)
    assert np.array_equal(everything(mine), everything(reference))


def stores_alike(spec, x, isa, slots):
    mine, reference = pair(spec, -(-len(slots) // spec.block_size) + 1, isa=isa)
    for backend in (mine, reference):
        backend.write(backend.prepare(StepArrays(slot_mapping=slots)), 0, x, x)
    assert np.array_equal(everything(mine), everything(reference))


@pytest.mark.parametrize("isa", isas())
@pytest.mark.parametrize("bits", [4, 8])
def test_write_near_ties_rounds_as_a_division_does(bits, isa):
    spec = KVSpec(1, 1, 64, "float32", 16, k_bits=bits, v_bits=bits)
    stores_alike(spec, near_ties(np.random.default_rng(SEED), 1024, bits), isa, np.arange(1024))


@pytest.mark.parametrize("isa", isas())
@pytest.mark.parametrize("bits", [4, 8])
def test_write_divides_by_every_scale_whose_quotients_are_hard_to_round(bits, isa):
    """Scales with the lower half of the significand near 0: nothing else brings a quotient that near to a tie of a tie.

    A group from -L to nearly L has the scale L / 2^(bits - 1), so its significand is anything that L has.
    """
    rng, half = np.random.default_rng(SEED), 2 ** (bits - 1)
    low = (np.arange(129, 256)[:, None] * 2**16 + np.arange(-20, 21)).ravel().astype(np.float32)
    near = np.float32(low[:, None] / half * (rng.integers(0, 2 * half - 1, (low.size, 64)) + 0.5))
    near = (near.view(np.int32) + rng.integers(-3, 4, near.shape, np.int32)).view(np.float32)
    x = (near - low[:, None]).clip(-low[:, None], low[:, None] * np.float32((half - 1) / half))
    x[:, 0], x[:, 1] = -low, low * np.float32((half - 1) / half)
    stores_alike(KVSpec(1, 1, 64, "float32", 16, k_bits=bits, v_bits=bits), x[:, None], isa, np.arange(low.size))


@pytest.mark.parametrize("group", [32, 64, 128])
@pytest.mark.parametrize("isa", isas())
def test_write_of_ranges_beyond_float32_and_of_few_tokens_equals_the_reference(isa, group):
    """A scale that is infinite; NaN of both signs and with payloads; batches that are not full; heads far apart."""
    x = rows(np.random.default_rng(SEED), (19, 5, 128))[:, 1:4]
    x[1, 0, :2] = 3e38, -3e38
    x[2, 1, 3], x[2, 2, 5] = np.array([0x7F800001, 0xFFFFFFFF], np.uint32).view(np.float32)
    slots = np.arange(19)
    slots[[0, 7, 18]] = -1
    stores_alike(KVSpec(1, 3, 128, "float32", 16, k_bits=8, v_bits=4, quant_group_size=group), x, isa, slots)


@pytest.mark.parametrize("isa", isas())
@pytest.mark.parametrize("spec", [
    KVSpec(1, 2, 64, "float16", 16, k_bits=8, v_bits=4, quant_group_size=32), KVSpec(1, 2, 64, "float8_e4m3", 16),
], ids=str)  # fmt: skip
def test_elements_with_gaps_are_stored_and_gathered_like_others(spec, isa):
    mine, reference = pair(spec, 2, isa=isa)
    x = rows(np.random.default_rng(SEED), (32, 2, 128)).clip(-400, 400)[:, :, ::2]
    mine.store.write(0, x, x, np.arange(32))
    reference.write(reference.prepare(StepArrays(slot_mapping=np.arange(32))), 0, x, x)
    assert np.array_equal(everything(mine), everything(reference))
    outs = [np.zeros((32, 2, 64, 2), np.float32)[..., 0] for _ in "kv"]
    mine.store.gather(0, np.arange(2), *outs)
    assert all(map(np.array_equal, outs, mine.gather(0, [0, 1])))


# ---------------------------------------------------------------------- attention


def context(spec, length, num_queries, seed=SEED, isa=None):
    """Both backends with one row of `length` tokens in random blocks, and a plan of its last queries."""
    rng = np.random.default_rng(seed)
    need = -(-length // spec.block_size)
    mine, reference = pair(spec, need + 2, isa=isa)
    table = rng.permutation(need + 2)[:need]
    slots = (table[:, None] * spec.block_size + np.arange(spec.block_size)).ravel()[:length]
    k, v = (rng.standard_normal((length, spec.num_kv_heads, dim)).astype(np.float32) for _, dim in spec.planes)
    for backend in (mine, reference):
        nan = np.full((backend.num_blocks * spec.block_size, spec.num_kv_heads, 1), np.nan, np.float32)
        every = [np.repeat(nan, dim, axis=2) for _, dim in spec.planes]
        backend.write(backend.prepare(StepArrays(slot_mapping=np.arange(len(nan)))), 0, *every)
        backend.write(backend.prepare(StepArrays(slot_mapping=slots)), 0, k, v)
    plan = StepArrays(table[None].astype(np.int32), np.array([length]), np.array([0, num_queries]))
    return mine, reference, plan, rng


def check(spec, length, num_queries, group, make_options=lambda rng, heads: None, isa=None):
    mine, reference, plan, rng = context(spec, length, num_queries, isa=isa)
    heads = group * spec.num_kv_heads
    q = rng.standard_normal((num_queries, heads, spec.head_dim)).astype(np.float32)
    options = make_options(rng, heads)
    ours = mine.attend(mine.prepare(plan), 0, q, options=options)
    error = np.abs(ours - reference.attend(reference.prepare(plan), 0, q.astype(np.float64), options=options)).max()
    assert error < 2e-5, error  # the bound of the field is 1e-3


@pytest.mark.parametrize("sinks", [False, True])
@pytest.mark.parametrize("length", [65, 333, 4096])
@pytest.mark.parametrize("bits", [4, 8])
def test_fused_decode_equals_dequantize_then_dense(bits, length, sinks):
    spec = KVSpec(1, 2, 128, "bfloat16", 16, k_bits=bits, v_bits=bits)
    check(spec, length, 1, 4, lambda rng, heads: AttentionOptions(sinks=rng.standard_normal(heads)) if sinks else None)


@pytest.mark.parametrize("isa", isas())
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize(("k_bits", "v_bits"), BITS)
def test_attention_over_any_layout_and_bits_is_right(k_bits, v_bits, layout, isa):
    for dtype, group_size, num_queries, group, block, heads in (
        ("float32", 32, 1, 1, 3, 3), ("float16", 64, 3, 3, 16, 3), ("bfloat16", 32, 2, 5, 7, 3),
        ("float16", 32, 70, 2, 16, 2),  # a chunk
        ("float16", 32, 1, 2, 16, 4),  # scales of a token fill whole vectors of every instruction set
    ):  # fmt: skip
        spec = KVSpec(1, heads, 128, dtype, block, 192, layout, k_bits, v_bits, group_size)
        check(spec, 77, num_queries, group, isa=isa)


@pytest.mark.parametrize("num_queries", [1, 20])
def test_masked_tokens_that_are_nan_never_matter(num_queries):
    spec = KVSpec(1, 1, 64, "float16", 4, k_bits=8, v_bits=8)
    mine, _, plan, rng = context(spec, 40, num_queries)
    q = rng.standard_normal((num_queries, 2, 64)).astype(np.float32)
    mask = np.ones((num_queries, 40), bool)
    mask[:, 7] = False
    expected = mine.attend(mine.prepare(plan), 0, q, options=AttentionOptions(mask=mask))
    nan = np.full((1, 1, 64), np.nan, np.float32)
    mine.write(mine.prepare(StepArrays(slot_mapping=np.array([plan.block_tables[0, 1] * 4 + 3]))), 0, nan, nan)
    assert np.array_equal(mine.attend(mine.prepare(plan), 0, q, options=AttentionOptions(mask=mask)), expected)
    assert np.isnan(mine.attend(mine.prepare(plan), 0, q)).any()
