"""A resize that gets no memory: a smaller pool keeps what it has and moves within it, a larger one is as before."""

import mlx.core as mx
import numpy as np
import pytest

from kvpool import Group, Pool, group_storage
from kvpool.group_storage import BlockRows, StateArray, StateSlots
from kvpool.spec import KVSpec
from kvpool_backends.cpu import backend as cpu
from kvpool_backends.mlx import MLXBackend, base, plain
from kvpool_backends.numpy import backend as numpy

SPEC = KVSpec(3, 2, 32, block_size=4)
MOVES = np.array([[7, 2], [9, 0], [6, 5]])  # of a pool of 10 blocks that keeps 6
STAYS = [9, 1, 7, 3, 4, 6]


class Rows(BlockRows):
    """Rows with the calls of a backend."""

    def __init__(self):
        super().__init__(10, SPEC.block_nbytes)


class Slots(StateSlots):
    """States with the calls of a backend."""

    def __init__(self, xp):
        super().__init__((StateArray((SPEC.block_nbytes // 8,), "float32"),) * 2, 10, xp)
        self.export_blocks, self.import_blocks = self.export_slots, self.import_slots

    num_blocks = property(lambda self: self.num_slots)


#: How one is made, and what it calls for memory: a module or class, and a name.
MADE = {
    "numpy": (lambda: numpy.NumpyBackend(SPEC, 10), numpy, "_zeros"),
    "cpu": (lambda: cpu.CPUBackend(SPEC, 10), cpu, "zeroed"),
    "mlx kernels": (lambda: MLXBackend(SPEC, 10, kernels=True), base, "_zeros"),
    "mlx plain": (lambda: MLXBackend(SPEC, 10, kernels=False), plain.mx, "take"),
    "rows": (Rows, BlockRows, "_zeros"),
    "states": (lambda: Slots(np), group_storage.np, "take"),
    "states of mlx": (lambda: Slots(mx), mx, "take"),
}


def dry(patch, place, name, calls):
    """From call number `calls` on there is no memory."""
    real, count = getattr(place, name), iter(range(10**6))

    def call(*args, **options):
        if next(count) >= calls:
            raise MemoryError("planted")
        return real(*args, **options)

    patch.setattr(place, name, staticmethod(call) if isinstance(place, type) else call)


def filled(make):
    """A storage of 10 blocks, and their bytes."""
    one, data = make(), np.random.default_rng(1).integers(0, 100, (10, SPEC.block_nbytes), np.uint8)
    one.import_blocks(range(10), data)
    return one, data


@pytest.mark.parametrize("made", MADE)
@pytest.mark.parametrize("calls", [0, 1, 2])
def test_smaller_pool_has_its_blocks_where_the_pool_has_moved_them(made, calls, monkeypatch):
    make, place, name = MADE[made]
    one, data = filled(make)
    with monkeypatch.context() as patch:
        dry(patch, place, name, calls)
        one.resize(6, MOVES)
    assert one.num_blocks == 6
    assert np.array_equal(one.export_blocks(range(6)), data[STAYS])
    one.resize(8, [])  # there is memory again
    one.import_blocks([6, 7], data[:2])
    assert np.array_equal(one.export_blocks(range(8)), data[[*STAYS, 0, 1]])


@pytest.mark.parametrize("made", MADE)
@pytest.mark.parametrize("calls", [0, 1, 2])
def test_larger_pool_is_as_before_or_has_all_it_was_to_have(made, calls, monkeypatch):
    make, place, name = MADE[made]
    one, data = filled(make)
    with monkeypatch.context() as patch:
        dry(patch, place, name, calls)
        try:
            one.resize(12, [])
        except MemoryError:
            assert one.num_blocks == 10
        else:
            assert calls and one.num_blocks == 12
    assert np.array_equal(one.export_blocks(range(10)), data)
    one.resize(6, MOVES)
    assert np.array_equal(one.export_blocks(range(6)), data[STAYS])


@pytest.mark.parametrize("after", [0, 1, 3])
def test_interrupted_shrink_of_mlx_leaves_a_smaller_backend(after, monkeypatch):
    one, data = filled(MADE["mlx kernels"][0])
    real, count = base.PoolMemory._put, iter(range(100))

    def put(memory, number, array):
        if next(count) == after:
            raise KeyboardInterrupt
        real(memory, number, array)

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(base.PoolMemory, "_put", put)
        one.resize(6, MOVES)
    assert one.num_blocks == 6
    assert np.array_equal(one.export_blocks(range(6)), data[STAYS])


def test_pages_that_the_system_does_not_take_back_do_not_stop_a_shrink(monkeypatch):
    one = cpu.CPUBackend(KVSpec(1, 2, 256, block_size=16), 40)
    monkeypatch.setattr(cpu.mmap, "MADV_DONTNEED", 12345)  # an advice that the system refuses
    with pytest.raises(OSError):
        cpu.mmap.mmap(-1, 4096).madvise(cpu.mmap.MADV_DONTNEED)
    one.resize(6, [])
    assert one.num_blocks == 6


def test_storage_of_which_one_part_shrinks_and_another_gets_no_memory_has_the_sizes_of_its_pool(monkeypatch):
    pool = Pool(40, 4, max_seqs=4, groups=[Group.full(), Group.window(9, arena=1, num_blocks=12)])
    storage = group_storage.GroupStorage(numpy.NumpyBackend, pool, [SPEC, KVSpec(1, 1, 4, block_size=4)])
    real = numpy._zeros

    def zeros(spec, num_blocks):
        if num_blocks == 20:
            raise MemoryError("planted")
        return real(spec, num_blocks)

    monkeypatch.setattr(numpy, "_zeros", zeros)
    with pytest.raises(MemoryError):
        storage.resize({0: 30, 1: 20})
    assert storage.num_blocks == (30, 12) == tuple(pool.stats(arena).num_blocks for arena in (0, 1))
    assert storage.groups == pool.options.groups
