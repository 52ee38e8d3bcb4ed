"""The model, pinned to numbers worked out by hand: the judge of the core is judged here.

The contract tests run against the model too (``KVPOOL_CORE=model``); these are the ones that never run against
anything else.
"""

from __future__ import annotations

import copy
import pickle

import pytest
from conftest import ALL_FORMATS

from kvpool.errors import CorruptState, DoubleFree, ForeignHandle, OutOfBlocks, PlanStateError, StaleHandle
from kvpool.testing import ModelPlan, ModelPool


def make(num_blocks: int = 32, block_size: int = 4, **options: object) -> tuple[ModelPool, ModelPlan, ModelPlan]:
    pool = ModelPool(num_blocks, block_size, **options)
    return pool, ModelPlan(pool, 8, 64, formats=ALL_FORMATS), ModelPlan(pool, 8, 64)


def test_model_fork_storm_has_the_golden_numbers() -> None:
    # A prompt of 6 tokens in blocks 1 and 2, eight samples of it, five tokens each.
    pool, plan, _ = make()
    parent = pool.open()
    pool.step(plan, [parent], 6)
    pool.done(plan)
    batch = [parent, *pool.fork(parent, 7).tolist()]

    pool.step(plan, batch, 1)  # seven copies of the two valid tokens; the last holder keeps block 2
    assert plan.copies.tolist() == [[2, dst, 2] for dst in (3, 4, 5, 6, 7, 8, 9)]
    assert [pool.table(h).tolist() for h in batch] == [[1, b] for b in (3, 4, 5, 6, 7, 8, 9, 2)]
    pool.done(plan)
    pool.step(plan, batch, 1)  # length 8: in place
    assert len(plan.copies) == 0 and plan.slot_mapping.tolist() == [4 * b + 3 for b in (3, 4, 5, 6, 7, 8, 9, 2)]
    pool.done(plan)
    for _ in range(3):  # lengths 9, 10, 11: one new block each
        pool.step(plan, batch, 1)
        pool.done(plan)

    stats = pool.stats()
    assert (stats.allocs, stats.cow_copies, stats.cow_tokens, stats.peak_used) == (2 + 7 + 8, 7, 14, 17)
    assert (stats.used, stats.blank, stats.shared, stats.tokens, stats.capacity) == (17, 14, 1, 88, 96)
    assert stats.fragmentation == pytest.approx(1 / 12)
    assert pool.blocks.refcount_histogram().tolist() == [14, 16, 0, 0, 0, 0, 0, 0, 1]
    pool.close(batch)  # the last one, [1, 2, 17], leaves 17, 2, 1; the one before, [1, 9, 16], left 16, 9
    assert pool.blocks.alloc(6).tolist() == [1, 2, 17, 9, 16, 8]


def test_model_plan_has_every_array_as_drawn_on_paper() -> None:
    pool, plan, _ = make(12, 4, reserved_blocks=2)
    one, two = pool.open(), pool.open(5)
    pool.step(plan, [two, one], [0, 5], pad_to=(3, 6))
    assert plan.block_tables[:, :3].tolist() == [[2, 3, 0], [4, 5, 0], [0, 0, 0]]
    assert plan.seq_lens.tolist() == [0, 5, 0]
    assert plan.slot_mapping.tolist() == [16, 17, 18, 19, 20, -1]
    assert plan.positions.tolist() == [0, 1, 2, 3, 4, 0]
    assert plan.cu_q_lens.tolist() == [0, 0, 5, 5]
    assert plan.indptr.tolist() == [0, 0, 2, 2] and plan.indices.tolist() == [4, 5]
    assert plan.last_page_len.tolist() == [0, 1, 0]
    assert plan.slot_ids.tolist() == [1, 0, -1]
    assert plan.dirty_rows.tolist() == [0, 1, 2]
    pool.done(plan)
    pool.step(plan, [two, one], [1, 1], pad_to=(3, 6))
    assert plan.dirty_rows.tolist() == []  # two had its blocks, one its tail, and the padding stays padding


def test_model_handles_count_slots_and_generations() -> None:
    pool = ModelPool(4, 1, max_seqs=2)
    first, second = pool.open(), pool.open()
    tag = first >> 52
    assert (first, second) == (tag << 52, tag << 52 | 1)
    pool.close([second, first])
    assert pool.open() == tag << 52 | 1 << 20 | 1  # the oldest freed slot, next generation
    with pytest.raises(StaleHandle):
        pool.table(second)
    with pytest.raises(ForeignHandle):
        pool.table(first ^ 1 << 52)


def test_model_limbo_keeps_a_freed_block_until_the_newest_step_of_that_moment_passes() -> None:
    pool, older, newer = make(4, 4)
    reader, other = pool.open(), pool.open()
    pool.step(older, [reader], 1)  # block 1
    pool.step(newer, [other], 1)  # block 2
    pool.close(reader)
    assert pool.state()["limbo"] == [(1, -1)]  # the fence is the newest step, one before the next
    pool.done(newer)  # noted: the older step is not through
    assert newer.is_pending and pool.stats().limbo == 1
    pool.done(older)
    assert not newer.is_pending and pool.state()["blank"] == [3, 1]


def test_model_rollback_restores_what_the_step_changed() -> None:
    pool, plan, _ = make(8, 4)
    parent = pool.open()
    pool.step(plan, [parent], 6)
    pool.done(plan)
    child = int(pool.fork(parent)[0])
    before = pool.state()
    pool.step(plan, [child, parent], [3, 1])  # child: 2 replaced by 3, then 4; parent keeps 2
    assert [pool.table(h).tolist() for h in (child, parent)] == [[1, 3, 4], [1, 2]]
    grandchild = pool.fork(child)
    with pytest.raises(PlanStateError):
        pool.rollback(plan)
    pool.close(grandchild)
    pool.rollback(plan)
    after = pool.state()
    assert after["blank"] == [7, 6, 5, 4, 3]  # 4 was released first, then 3
    assert [after["refcounts"], after["holds"], after["raw"]] == [before[k] for k in ("refcounts", "holds", "raw")]
    assert [s[:2] for s in after["sequences"].values()] == [s[:2] for s in before["sequences"].values()]


def test_model_committed_block_is_evicted_oldest_first_and_noted_once() -> None:
    pool = ModelPool(4, 2)
    blocks = pool.blocks.alloc(3)
    pool.blocks.mark_cached(blocks)
    pool.blocks.free([2, 1, 3])
    assert pool.state()["lru"] == [2, 1, 3]
    pool.blocks.touch(1)
    assert pool.blocks.alloc(2).tolist() == [2, 3] and pool.blocks.drain_evicted().tolist() == [2, 3]
    assert pool.blocks.drain_evicted().tolist() == [] and pool.stats().evictions == 2


def test_model_block_is_not_written_below_what_a_pending_copy_reads() -> None:
    pool, first, second = make(8, 4)
    parent = pool.open()
    pool.step(first, [parent], 3)
    pool.done(first)
    child = int(pool.fork(parent)[0])
    pool.truncate(child, 2)
    pool.step(first, [parent], 1)  # copies three tokens out of block 1, whose only holder is the child now
    assert first.copies.tolist() == [[1, 2, 3]] and pool.blocks.refcount(1) == 1
    pool.step(second, [child], 1)  # offset 2 is still to be read
    assert second.copies.tolist() == [[1, 3, 2]] and pool.state()["holds"] == [1, 1]


def test_model_refusal_leaves_the_state_and_says_who_is_short() -> None:
    pool, plan, _ = make(4, 4)
    a, b = pool.open(), pool.open()
    before = pool.fingerprint()
    with pytest.raises(OutOfBlocks) as caught:
        pool.step(plan, [a, b], [8, 9])
    error = caught.value
    assert (error.needed, error.short_by, error.row, error.handle) == (5, 2, 1, b)
    assert (error.blank, error.evictable, error.limbo) == (3, 0, 0)
    assert pool.fingerprint() == before
    pool.step(plan, [b, a], [9, 8], partial=True)
    assert plan.served.tolist() == [1, 0] and plan.cu_q_lens.tolist() == [0, 9, 9]
    with pytest.raises(DoubleFree):
        pool.blocks.decref(1)  # a reference of a sequence


def test_model_check_finds_a_block_in_two_places() -> None:
    pool = ModelPool(4, 4)
    pool.blocks.alloc()
    pool._blank.append(1)
    with pytest.raises(CorruptState):
        pool.check()


def test_model_digest_tells_histories_apart_and_fingerprint_states() -> None:
    one, two = ModelPool(4, 4), ModelPool(4, 4)
    for pool in (one, two):
        pool.blocks.free(pool.blocks.alloc(2)[::-1].copy())
    assert one.digest() == two.digest() and one.fingerprint() == two.fingerprint()
    one.open()
    assert one.digest() != two.digest() and one.fingerprint() != two.fingerprint()


@pytest.mark.parametrize("duplicate", [copy.copy, copy.deepcopy, pickle.dumps])
def test_model_cannot_be_copied(duplicate: object) -> None:
    pool, plan, _ = make()
    for thing in (pool, plan):
        with pytest.raises(TypeError):
            duplicate(thing)
