"""Index arithmetic around 2^31, 2^32 and 2^40: slots, lengths, positions, bytes; Python's integers are the oracle.

Lengths grow by plans without an array per token, so that a sequence of a trillion tokens costs nothing; ids by blocks
that are taken and never touched; bytes by memory that is reserved and never filled.
"""

import math
import mmap

import numpy as np
import pytest

from kvpool import CapacityExceeded, Group, OutOfBlocks, OutOfSequences, Plan, Pool
from kvpool.config import KVSpec

EDGES = (2**31, 2**32, 2**40)
MOST_NEW = 2**31 - 1  # tokens of one step
FORMATS = ("block_tables", "seq_lens", "slot_mapping", "positions", "cu_q_lens", "csr", "slot_ids")
MAP_NORESERVE = 0x4000


def grow_to(pool, handle, length):
    """Append tokens without an array that has one entry for each."""
    plan = Plan(pool, 1, MOST_NEW, formats=())
    while pool.num_tokens(handle) < length:
        pool.step(plan, [handle], min(MOST_NEW, length - pool.num_tokens(handle)))


def slots_of(table, block_size, positions):
    return [table[position // block_size] * block_size + position % block_size for position in positions]


def assert_lengths_around(kind, edge, block_size):
    """A sequence of a pool of this kind steps over an edge, one token and seven at a time."""
    blocks = edge // block_size + 3
    pool = kind(blocks + 1, block_size, max_seqs=4, max_blocks_per_seq=blocks, in_order=True, seed=1)
    handle = pool.open()
    grow_to(pool, handle, edge - 9)
    plan = Plan(pool, 2, 16, formats=FORMATS, dtype="int64")
    for new in (7, *[1] * 4, 7):
        start = pool.num_tokens(handle)
        end, pages = start + new, -(-(start + new) // block_size)
        pool.step(plan, [handle], new)
        table = pool.table(handle).tolist()
        assert plan.positions.tolist() == list(range(start, end))
        assert plan.slot_mapping.tolist() == slots_of(table, block_size, range(start, end))
        assert plan.seq_lens.tolist() == [end]
        assert (plan.last_page_len.tolist(), plan.indptr.tolist()) == ([end - (pages - 1) * block_size], [0, pages])
        assert (pool.stats().tokens, pool.capacity(handle)) == (end, len(table) * block_size)
    assert end == pool.num_tokens(handle) == edge + 9
    child = int(pool.fork(handle)[0])
    pool.truncate(handle, edge - 1)
    assert (pool.num_tokens(handle), pool.stats().tokens) == (edge - 1, 2 * edge + 8)
    capacity = pool.capacity(child)
    pool.compact(child, block_size, first=block_size)  # all but the first block leave
    evicted = edge + 9 - block_size
    assert (pool.num_tokens(child), pool.kv_len(child), pool.capacity(child)) == (edge + 9, block_size, capacity)
    assert len(pool.table(child)) == capacity // block_size - evicted // block_size
    assert (pool.stats().tokens, pool.stats().evicted_tokens) == (2 * edge + 8, evicted)
    pool.step(plan, [child], 1)
    assert (plan.positions.tolist(), plan.seq_lens.tolist()) == ([edge + 9], [block_size + 1])
    assert plan.slot_mapping.tolist() == slots_of(pool.table(child).tolist(), block_size, [block_size])
    with pytest.raises(CapacityExceeded, match=f" would hold {edge + 11} tokens, the limit is {2**31 - 1}$"):
        pool.step(Plan(pool, 1, formats=("positions",)), [child], 1)  # int32
    pool.close([handle, child])
    pool.check()


@pytest.mark.parametrize("block_size", [2**31 - 1, 2**30, 3 * 2**28 + 1])
@pytest.mark.parametrize("edge", EDGES)
def test_sequence_that_grows_over_an_edge_has_exact_lengths_and_slots(edge, block_size):
    assert_lengths_around(Pool, edge, block_size)


@pytest.mark.slow
def test_stream_whose_capacity_would_pass_int32_is_refused():
    most = 2**21
    groups = [Group.full(block_size=4)]
    pool = Pool(most // 4 + 1, 1, max_seqs=1, max_blocks_per_seq=most, groups=groups, in_order=True)
    plan, handle = Plan(pool, 1, most, formats=()), pool.open(0)
    while pool.num_tokens(handle) < 2**31 - most:
        pool.step(plan, [handle], most)
        pool.compact([handle], [0])
    pool.step(plan, [handle], most - 5)
    with pytest.raises(CapacityExceeded, match=f" would hold {2**31 - 3} tokens, the limit is {2**31 - 4}$"):
        pool.step(plan, [handle], 2)  # 2^31 blocks of the pool have room for it
    pool.step(plan, [handle], 1)
    assert pool.capacity(handle) == pool.num_tokens(handle) == 2**31 - 4 and not pool.can([handle], 1)
    pool.check()


def test_length_that_passes_through_32_bits_is_detected():
    class Wraps(Pool):
        def num_tokens(self, handle):
            return super().num_tokens(handle) & 0xFFFFFFFF

    with pytest.raises(AssertionError):
        assert_lengths_around(Wraps, 2**32, 2**30)


@pytest.mark.parametrize(("edge", "block_size"), [(2**31, 2**15), (2**32, 2**16), (2**40, 2**24), (2**40, 2**22 + 1)])
def test_blocks_whose_slots_lie_around_an_edge_have_exact_slots(edge, block_size):
    first = edge // block_size - 2
    pool = Pool(first + 8, block_size, max_seqs=8, max_blocks_per_seq=4, in_order=True, seed=1)
    pool.blocks.alloc(first - 1)  # ids 1 .. first - 1
    handles = [pool.open() for _ in range(5)]
    plan = Plan(pool, 5, 15, formats=FORMATS, dtype="int64")
    pool.step(plan, handles, 3)
    tables = [pool.table(handle).tolist() for handle in handles]
    assert tables == [[first + row] for row in range(5)]
    expected = [slot for table in tables for slot in slots_of(table, block_size, range(3))]
    assert plan.slot_mapping.tolist() == expected
    pool.check()


@pytest.mark.parametrize("formats", [("slot_mapping",), ("page_batch_info",)])
@pytest.mark.parametrize("block_size", [2**30, 2**31 - 1])
def test_slots_beyond_int32_are_refused_when_the_plan_is_made(block_size, formats):
    small = {"max_seqs": 1, "max_blocks_per_seq": 1}
    Plan(Pool(2, 2**30 - 1, **small), 1, formats=formats)
    with pytest.raises(ValueError, match=rf"^\[Plan\] .*{2 * block_size}"):
        Plan(Pool(2, block_size, **small), 1, formats=formats)
    Plan(Pool(2, block_size, **small), 1, formats=formats, dtype="int64")


@pytest.mark.parametrize("count", [2**31, 2**32, 2**32 + 1, 2**40, 2**63 - 1])
def test_count_beyond_what_there_is_is_refused_as_it_is(count):
    pool = Pool(4, 2**31 - 1, max_seqs=1, max_blocks_per_seq=1)
    for sizes in ((2, 2**31), (2**31, 1)):
        with pytest.raises(ValueError):
            Pool(*sizes)
    for tokens, error in ((2**63, ValueError), (2**62, CapacityExceeded)):
        with pytest.raises(error):
            pool.open(tokens)
    with pytest.raises(OutOfBlocks):
        pool.blocks.alloc(count)
    handle, plan = pool.open(), Plan(pool, 1, MOST_NEW, formats=())
    with pytest.raises(OutOfSequences):
        pool.fork(handle, count)
    with pytest.raises(CapacityExceeded):
        pool.step(plan, [handle], [count])
    pool = Pool(4, 4, groups=[Group.full()])
    handle, plan = pool.open(), Plan(pool, 1, 4)
    pool.step(plan, [handle], 4)
    pool.done(plan)
    with pytest.raises(CapacityExceeded, match=f" would hold {min(count + 4, 2**63 - 1)} tokens"):
        pool.step(plan, [handle], [count])


def reserved(shape):
    """An array that has addresses, and nothing behind them."""
    try:
        memory = mmap.mmap(-1, 4 * math.prod(shape), mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | MAP_NORESERVE)
    except OSError:
        pytest.skip(f"this machine does not promise {4 * math.prod(shape)} bytes")
    return np.frombuffer(memory, np.float32).reshape(shape)


@pytest.mark.parametrize("edge", [*EDGES, 4 * EDGES[1]])  # the last: counted in elements
def test_kernels_write_and_read_blocks_whose_bytes_lie_around_an_edge(edge):
    cpu = pytest.importorskip("kvpool_backends.cpu")
    heads, dim, block_size = 2, 64, 16
    spec = KVSpec(1, heads, dim, "float32", block_size)
    num_blocks = edge // (heads * dim * block_size * 4) + 4
    arrays = [reserved(shape) for shape, _, _ in spec.base_arrays(num_blocks)]
    for isa in cpu.isas():
        store = cpu.BlockStore(spec, num_blocks, arrays, isa=isa, num_threads=1)
        rng = np.random.default_rng(edge % 1000)
        k, v = rng.standard_normal((2, 5 * block_size, heads, dim)).astype(np.float32)
        blocks = np.arange(num_blocks - 5, num_blocks)
        store.write(0, k, v, (blocks[:, None] * block_size + np.arange(block_size)).reshape(-1))
        out, q = np.empty((1, heads, dim), np.float32), rng.standard_normal((1, heads, dim)).astype(np.float32)
        store.attend(0, q, out, blocks[None].astype(np.int32), np.array([len(k)], np.int32), np.array([0, 1], np.int32))
        weights = np.exp(np.einsum("hd,thd->ht", q[0], k) / dim**0.5)
        expected = np.einsum("ht,thd->hd", weights / weights.sum(1, keepdims=True), v)
        np.testing.assert_allclose(out[0], expected, atol=1e-5)
        assert not any(array.reshape(-1)[: 1 << 16].any() for array in arrays), "written at the start"
