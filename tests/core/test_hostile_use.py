"""Memory and names that the caller can reach: what he does to them must not reach the pool.

Goal: arrays that a plan shows, sentinels, subclasses that lie about themselves, handles of dead pools. Each case was
a crash or a silent wrong result once.
"""

import gc
import sys

import numpy as np
import pytest

from kvpool import Plan, Pool
from kvpool.errors import PoolClosed


def stepped(formats, lengths=(9, 1, 1)):
    pool = Pool(64, 4)
    plan = Plan(pool, 4, 64, table_width=8, formats=formats)
    handles = [pool.open() for _ in lengths]
    pool.step(plan, handles, list(lengths))
    return pool, plan, handles


def test_handle_minus_one_in_a_pool_of_all_slots_is_refused():
    """-1 names the last slot and equals the sentinel of a closed sequence."""
    pool = Pool(16, 16, max_seqs=1 << 20, max_blocks_per_seq=2)
    plan = Plan(pool, 4, 16)
    for _ in range(1 << 20):
        last = pool.open()
    pool.step(plan, [last], 3)
    pool.done(plan)
    pool.close(last)
    before = pool.fingerprint()
    for handle in (-1, -(1 << 63), -(1 << 20)):
        with pytest.raises(ValueError, match="negative"):
            pool.step(plan, np.array([handle]))
    assert pool.fingerprint() == before


def test_csr_arrays_changed_by_their_reader_do_not_steer_the_next_write():
    """Rows that did not change stay as the reader left them; the row that grew is where it belongs."""
    pool, plan, handles = stepped(("csr",))
    pool.done(plan)
    plan.indptr[:] += 10_000_000
    plan.indices[:] = -7
    pool.step(plan, handles, [0, 0, 4])
    assert plan.indptr[3] == 6
    assert plan.indices[4:].tolist() == pool.table(handles[2]).tolist()


@pytest.mark.parametrize("name", ["handles", "served", "copies", "dirty_rows"])
def test_arrays_that_an_undo_relies_on_are_read_only(name):
    pool, plan, _ = stepped(("block_tables",))
    with pytest.raises(ValueError, match="read-only"):
        getattr(plan, name)[:] = 0
    pool.rollback(plan)
    pool.check()


def test_list_with_a_wrong_len_is_read_by_its_true_length():
    class Liar(list):
        def __len__(self):
            return 1 << 61

    pool = Pool(16, 4)
    handles = Liar(pool.open() for _ in range(5))
    pool.close(handles)
    assert pool.stats().sequences == 0


def test_many_deferred_closes_take_linear_time():
    from time import process_time

    times = []
    for n in (1 << 12, 1 << 16):
        pool = Pool(4, 4, max_seqs=n)
        for handle in [pool.open() for _ in range(n)]:
            pool.defer_close(handle)
        start = process_time()
        assert pool.stats().sequences == 0
        times.append(process_time() - start)
    assert times[1] < 16 * 8 * max(times[0], 1e-4)  # 16 times the work; the square would be 256 times


@pytest.mark.parametrize("value", [10**5000, -(10**5000)], ids=["positive", "negative"])
def test_number_too_long_to_print_is_refused_by_name(value):
    pool = Pool(8, 4)
    with pytest.raises(IndexError, match=r"\[incref\] ids is out of range \(<int>\)"):
        pool.blocks.incref(value)


def test_compact_judges_its_arguments_in_their_order():
    pool = Pool(8, 4)
    handle = pool.open()
    for arguments, error, first in (
        ((["x"], [1], -1), TypeError, "handles"),
        (([handle], "x", -1), TypeError, "lens"),
        (([handle], [0], -1), ValueError, "first"),
    ):
        with pytest.raises(error, match=first):
            pool.compact(*arguments)


def half_made(kind, make):
    """Objects of a kind that the garbage collector lists while `make(index)` reads `index`, and the one it makes."""
    seen = []
    known = {id(o) for o in gc.get_objects() if type(o) is kind}

    class Index:
        def __index__(self):
            seen.extend(o for o in gc.get_objects() if type(o) is kind and id(o) not in known)
            return 4

    return seen, make(Index())


WRONG = [
    *({"block_size": 0}, {"reserved_blocks": 99}, {"max_seqs": 0}, {"max_blocks_per_seq": 0}, {"watermark": 99}),
    *({"seed": "x"}, {"prefix_cache": 1}, {"events": 5}, {"in_order": 3}, {"block_size": "4"}, {"groups": []}),
]


@pytest.mark.parametrize("wrong", WRONG, ids=str)
def test_finalizer_of_a_pool_that_could_not_be_made_finds_it_closed(wrong):
    seen = []

    class Finalized(Pool):
        def __del__(self):
            for call in (lambda: self.is_open(0), lambda: self.blocks.incref([1]), self.stats, self.check):
                with pytest.raises(PoolClosed):
                    call()
                seen.append(call)
            self.shutdown()

    with pytest.raises((ValueError, TypeError)):
        Finalized(**({"num_blocks": 8, "block_size": 4} | wrong))
    assert len(seen) == 4


@pytest.mark.parametrize("name", ["max_seqs", "watermark", "seed"])
def test_half_made_pool_is_unreachable(name):
    seen, pool = half_made(Pool, lambda index: Pool(8, 4, **{name: index}))
    assert not seen and gc.is_tracked(pool)


def test_half_made_plan_is_unreachable():
    pool = Pool(8, 4)
    seen, plan = half_made(Plan, lambda index: Plan(pool, 2, formats=("positions",), pad={"positions": index}))
    assert not seen and gc.is_tracked(plan)


def test_step_writes_to_memory_of_the_plan_when_its_array_was_turned_to_other_memory():
    """NumPy's ``__setstate__`` lets go of the memory that the array showed; a plan goes on to write there."""
    pool, plan, handles = stepped(("slot_mapping",), lengths=(2,))
    pool.done(plan)
    shown = plan.slot_mapping.base
    memory = shown.base
    shown.__setstate__((1, (1,), np.dtype(np.int32), False, b"\0\0\0\0"))
    del shown
    assert sys.getrefcount(memory) == 3, "the plan, this function, and the call"
    pool.step(plan, handles, 2)
    assert np.frombuffer(memory, np.int32)[:2].tolist() == [6, 7]
