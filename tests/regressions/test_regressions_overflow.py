"""Family G: products that do not fit, bounds that nobody checks. See README.md."""

import numpy as np

from kvpool.config import KVSpec
from kvpool_backends.cpu import BlockStore


def test_g3_bytes_of_a_huge_pool_are_exact():
    """8,388,608 pages: strides were 32-bit, and the output was all zeros."""
    spec = KVSpec(1, 8, 128, "float16", 16)
    for num_blocks in (2**16 - 1, 2**16, 2**17, 8_388_608, 2**31 - 1):
        assert spec.pool_nbytes(num_blocks) == num_blocks * 16 * 8 * 128 * 2 * 2


def test_g4_slots_beyond_two_to_the_31_elements_hold_their_tokens():
    """slot * 576 overflowed at 3.7 million slots; memory that is never touched costs nothing."""
    spec, num_blocks = KVSpec(1, 1, 576, "float16", 16, v_head_dim=8), 234_000
    store = BlockStore(spec, num_blocks, [np.zeros(shape, np.float16) for shape, _, _ in spec.base_arrays(num_blocks)])
    slots = np.array([0, 2**31 // 576 - 1, 2**31 // 576 + 1, num_blocks * 16 - 1], np.int64)
    k = np.arange(1, 5, dtype=np.float16)[:, None, None] * np.ones((4, 1, 576), np.float16)
    store.write(0, k, k[:, :, :8], slots)
    found = np.empty((4 * 16, 1, 576), np.float16)
    store.gather(0, (slots // 16).astype(np.int32), found, np.empty((4 * 16, 1, 8), np.float16))
    assert found[np.arange(4) * 16 + slots % 16, 0, 0].tolist() == [1, 2, 3, 4]


def test_g5_capacity_is_computed_in_64_bits(make_pool):
    """A 32-bit product was widened after it had overflowed."""
    pool = make_pool(40, 2**28)
    handle = pool.open(2**31 + 5)
    assert (len(pool.table(handle)), pool.capacity(handle)) == (9, 9 * 2**28)
