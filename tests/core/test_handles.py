"""Handles: slots and generations, and what is refused: stale, foreign, duplicate."""

import gc

import numpy as np
import pytest
from tests.verify._hooks import set_generation, set_stamps

from kvpool.errors import CapacityExceeded, ForeignHandle, OutOfSequences, StaleHandle
from tests.conftest import ONE_HANDLE_CALLS

LAST_GENERATION = 2**32 - 1


def slot(handle):
    return handle & 0xFFFFF


def generation(handle):
    return handle >> 20 & LAST_GENERATION


# --- slots and generations --------------------------------------------------------------------------------


def test_marks_of_calls_that_were_counted_to_the_end_are_forgotten(make_any):
    """The counter begins again with a number that rows and blocks have been marked with."""
    pool = make_any(max_seqs=4)
    handles, ids = [pool.open(1) for _ in range(3)], pool.blocks.alloc(3)
    for stamp in (0, 2**32 - 1):
        set_stamps(pool, stamp)
        pool.truncate(handles, 0)
        set_stamps(pool, stamp)
        pool.blocks.touch(ids)
        pool.check()


def test_slot_with_its_last_generation_retires_and_stays_so_after_reset(make_any, refused):
    pool = make_any(max_seqs=2)
    set_generation(pool, 0, LAST_GENERATION - 1)
    first, other = pool.open(), pool.open()
    assert (slot(first), generation(first)) == (0, LAST_GENERATION - 1)
    pool.close(first)
    last = pool.open()
    assert (slot(last), generation(last)) == (0, LAST_GENERATION)
    pool.close(last)
    with refused(pool, OutOfSequences, "open"):
        pool.open()
    for handle in (first, last):
        with refused(pool, StaleHandle, "close", handle):
            pool.close(handle)
    pool.close(other)
    assert slot(pool.open()) == 1
    pool.reset()
    assert slot(pool.open()) == 1
    with refused(pool, OutOfSequences, "open"):
        pool.open()


# --- tags that come round ---------------------------------------------------------------------------------


def pool_with_tag(core, tag):
    """A new pool with a tag that no living pool has: tags go round. None if nobody gets it."""
    for _ in range(2 * 2047):
        pool = core.Pool(4, 2, max_seqs=2, seed=1)
        if pool.open() >> 52 == tag:
            pool.reset()
            return pool
        pool.shutdown()
    return None


def history(core, pool):
    """Do this and that with a pool of two sequences, and say what is left."""
    plan = core.Plan(pool, 2, 4)
    first, second = pool.open(), pool.open()
    pool.close(second)
    (child,) = pool.fork(first).tolist()
    pool.step(plan, [first, child], 2)
    pool.close(first)
    told = pool.digest(), pool.fingerprint(), plan.slot_mapping.tolist()
    pool.done(plan)
    pool.close(child)
    return told


@pytest.mark.parametrize("end", ["shutdown", "dropped"])
def test_handles_of_a_dead_pool_stay_dead_when_another_has_its_tag(core, end):
    old = core.Pool(4, 2, max_seqs=2)
    handles = [old.open(), old.open()]
    for _ in range(3):
        old.close(handles[-1])
        handles.append(old.open())
    if end == "shutdown":
        old.shutdown()
    del old
    gc.collect()
    new = pool_with_tag(core, handles[0] >> 52)
    strangers = [new.open(), new.open()]
    assert not set(strangers) & set(handles) and not any(new.is_open(handle) for handle in handles)
    for handle in handles:
        with pytest.raises(StaleHandle):
            new.close(handle)
    assert all(new.is_open(handle) for handle in strangers)
    new.check()
    new.shutdown()


def test_generations_that_dead_pools_gave_out_are_not_in_digest_and_fingerprint(core):
    first = core.Pool(4, 2, max_seqs=2, seed=1)
    tag = first.open() >> 52
    first.reset()
    told = [history(core, first)]
    first.shutdown()
    second = pool_with_tag(core, tag)
    told.append(history(core, second))
    assert told[0] == told[1]
    assert second.open() >> 20 & LAST_GENERATION > 3  # they did begin elsewhere
    second.shutdown()


def test_tag_is_given_to_nobody_after_half_of_its_generations(core):
    pool = core.Pool(4, 2, max_seqs=1)
    set_generation(pool, 0, 2**31)
    tag = pool.open() >> 52
    pool.shutdown()
    assert pool_with_tag(core, tag) is None


# --- stale, foreign, duplicate ----------------------------------------------------------------------------


def closed(pool, other):
    handle = pool.open(4)
    pool.close(handle)
    return handle


DEAD = {  # the pool has one slot, and so has the other one
    "closed": (StaleHandle, closed),
    "of the slot's former owner": (StaleHandle, lambda pool, other: [closed(pool, other), pool.open(4)][0]),
    "with a slot beyond the pool": (StaleHandle, lambda pool, other: pool.open(4) + 1),
    "of another pool": (ForeignHandle, lambda pool, other: [other.open(4), pool.open(4)][0]),
    "that is a small number": (ForeignHandle, lambda pool, other: 0 * pool.open(4)),
}


@pytest.mark.parametrize("call", ONE_HANDLE_CALLS)
@pytest.mark.parametrize("kind", DEAD)
def test_handle_that_names_no_sequence_is_refused_in_every_call(make_any, make_plan, refused, kind, call):
    pool, other = make_any(max_seqs=1), make_any(max_seqs=1)
    plan, (error, make) = make_plan(pool), DEAD[kind]
    handle = make(pool, other)
    assert not pool.is_open(handle)
    with refused(pool, error, call, handle, plans=[plan]):
        ONE_HANDLE_CALLS[call](pool, plan, handle)


BATCH_CALLS = {
    "close": lambda pool, plan, hs: pool.close(hs),
    "truncate": lambda pool, plan, hs: pool.truncate(hs, 0),
    "can": lambda pool, plan, hs: pool.can(hs, 1),
    "step": lambda pool, plan, hs: pool.step(plan, hs, 1),
    "reserve": lambda pool, plan, hs: pool.reserve(plan, hs, 1),
    "unshare": lambda pool, plan, hs: pool.unshare(plan, hs, 3),
    "compact": lambda pool, plan, hs: pool.compact(hs, 5),
    "commit": lambda pool, plan, hs: pool.prefix.commit(hs, [1, 2, 3, 4] * np.size(hs)),
    "wanted": lambda pool, plan, hs: pool.prefix.wanted(hs).tolist(),
}


@pytest.mark.parametrize("call", BATCH_CALLS)
def test_empty_batch_is_legal(make_any, make_plan, call):
    pool = make_any(prefix_cache=True)
    plan = make_plan(pool)
    for handles in ([], (), np.empty(0, np.int64)):
        BATCH_CALLS[call](pool, plan, handles)
        if plan.is_pending:
            pool.done(plan)


def test_handle_of_no_sequence_is_refused_where_its_slot_exists(make_pool, make_plan, refused):
    pool = make_pool(max_seqs=2**20)
    plan = make_plan(pool)
    for handles in ([-1], [pool.open(), -1]):
        with refused(pool, ValueError, "step", -1, plans=[plan]):
            pool.step(plan, np.array(handles), 1)


def test_row_twice_in_a_step_of_decodes_is_refused(make_any, make_plan, refused):
    pool = make_any()
    plan, handles = make_plan(pool), [pool.open() for _ in range(3)]
    pool.step(plan, handles, 1)
    pool.done(plan)
    with refused(pool, ValueError, "step", handles[0], plans=[plan]):
        pool.step(plan, np.array([*handles, handles[0]]), 1)


def after(call, pool, plan, handle_of):
    """What a call does to a sequence of six tokens beside another one."""
    pool.open(4)
    handle = pool.open(4)
    pool.step(plan, [handle], 6)
    pool.done(plan)
    result = BATCH_CALLS[call](pool, plan, handle_of(handle))
    shown = [plan.block_tables.tolist(), plan.seq_lens.tolist(), plan.slot_mapping.tolist(), plan.served.tolist()]
    return result, shown, plan.is_pending, len(plan.handles), pool.stats(), pool.fingerprint(), pool.digest()


@pytest.mark.parametrize("call", BATCH_CALLS)
def test_one_handle_is_a_batch_of_one(make_pool, make_plan, call):
    found = []
    for handle_of in (lambda h: [h], int, np.int64, lambda h: np.array(h), lambda h: np.array([h])):
        pool = make_pool(prefix_cache=True)
        found.append(after(call, pool, make_plan(pool), handle_of))
    assert found[1:] == found[:1] * 4


@pytest.mark.parametrize(
    ("second", "counts", "of_step", "of_can"),
    [
        (-5, [1000, 1], CapacityExceeded, ValueError),
        (12345, [1000, 1], CapacityExceeded, ForeignHandle),
        (12345, [-1, 1], ValueError, ForeignHandle),
        (None, [1000, 1], CapacityExceeded, ValueError),
        (None, [1, -1], ValueError, ValueError),
    ],
)
def test_two_errors_in_a_batch_the_first_row_is_named_by_step_and_handles_come_first_in_can(
    make_any, make_plan, second, counts, of_step, of_can
):
    pool = make_any(16, 4, max_seqs=4)
    plan, first = make_plan(pool, 4, 16), pool.open(2)
    handles = [first, first if second is None else second]
    with pytest.raises(of_step):
        pool.step(plan, handles, counts)
    with pytest.raises(of_can):
        pool.can(handles, counts)
