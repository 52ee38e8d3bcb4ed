"""Copy on write: who may write in place, who moves to a copy, and what the copies read."""

import numpy as np
import pytest

from kvpool.errors import OutOfBlocks


@pytest.fixture
def shared(make_pool, grow):
    """``pool, holders = shared(length, n)``: n sequences of this length that share all their blocks."""

    def make(length, n, **options):
        pool = make_pool(32, 4, **options)
        parent = pool.open()
        grow(pool, parent, length)
        return pool, [parent, *map(int, pool.fork(parent, n - 1))]

    return make


def tables(pool, handles):
    return [pool.table(h).tolist() for h in handles]


def test_private_tail_is_written_in_place(make_pool, make_plan, grow):
    pool = make_pool()
    handle = pool.open()
    grow(pool, handle, 6)
    plan = make_plan(pool)
    pool.step(plan, [handle], 1)
    assert plan.copies.shape == (0, 3) and plan.copies.dtype == "int32"
    assert plan.slot_mapping.tolist() == [2 * 4 + 2]


def test_writer_of_a_shared_tail_moves_to_a_copy_of_the_valid_tokens(shared, make_plan):
    pool, (parent, child) = shared(6, 2)
    plan = make_plan(pool)
    pool.step(plan, [child], 1)
    assert plan.copies.tolist() == [[2, 3, 2]]
    assert tables(pool, [parent, child]) == [[1, 2], [1, 3]]
    assert plan.slot_mapping.tolist() == [3 * 4 + 2]
    assert [pool.blocks.refcount(b) for b in (1, 2, 3)] == [2, 1, 1]


def test_plan_counts_its_copies_and_their_tokens(shared, make_plan):
    pool, holders = shared(7, 3)
    plan = make_plan(pool)
    pool.step(plan, holders, 1)
    assert (len(plan.copies), plan.copies[:, 2].sum()) == (2, 6)
    pool.done(plan)
    pool.step(plan, holders, 1)
    assert (len(plan.copies), plan.copies[:, 2].sum()) == (0, 0)


def test_other_holder_then_writes_in_place(shared, make_plan):
    pool, (parent, child) = shared(6, 2)
    first, second = make_plan(pool), make_plan(pool)
    pool.step(first, [child], 1)
    pool.step(second, [parent], 1)  # offset 2 is not below the two tokens that the pending copy reads
    assert second.copies.shape == (0, 3)
    assert second.slot_mapping.tolist() == [2 * 4 + 2]


@pytest.mark.parametrize("n", [2, 3, 8])
def test_all_holders_in_one_plan_are_served_in_order_and_the_last_writes_in_place(shared, make_plan, n):
    pool, holders = shared(6, n)
    plan = make_plan(pool, 8)
    pool.step(plan, holders, 1)
    assert plan.copies.tolist() == [[2, 3 + i, 2] for i in range(n - 1)]
    assert tables(pool, holders) == [[1, 3 + i] for i in range(n - 1)] + [[1, 2]]
    sources, destinations = set(plan.copies[:, 0].tolist()), set(plan.copies[:, 1].tolist())
    assert not sources & destinations
    assert pool.blocks.refcount(2) == 1


def test_full_shared_blocks_are_never_copied(shared, make_plan):
    pool, holders = shared(8, 3)
    plan = make_plan(pool)
    pool.step(plan, holders, 1)
    assert plan.copies.shape == (0, 3)
    assert tables(pool, holders) == [[1, 2, 3], [1, 2, 4], [1, 2, 5]]
    assert [pool.blocks.refcount(b) for b in (1, 2)] == [3, 3]


def test_reading_a_shared_tail_copies_nothing(shared, make_plan):
    pool, holders = shared(6, 3)
    plan = make_plan(pool)
    pool.step(plan, holders, 0)
    assert plan.copies.shape == (0, 3)
    assert pool.blocks.refcount(2) == 3


@pytest.mark.parametrize("valid", [1, 2, 3])
def test_copy_takes_exactly_the_valid_tokens(shared, make_plan, valid):
    pool, (_, child) = shared(4 + valid, 2)
    plan = make_plan(pool)
    pool.step(plan, [child], 1)
    assert plan.copies.tolist() == [[2, 3, valid]]


def test_long_write_copies_the_tail_and_appends(shared, make_plan):
    pool, (_, child) = shared(6, 2)
    plan = make_plan(pool)
    pool.step(plan, [child], 10)
    assert plan.copies.tolist() == [[2, 3, 2]]
    assert pool.table(child).tolist() == [1, 3, 4, 5]
    assert plan.slot_mapping.tolist() == [*range(14, 16), *range(16, 20), *range(20, 24)]


def test_source_is_held_until_the_plan_is_done(shared, make_plan):
    pool, (parent, child) = shared(6, 2)
    plan = make_plan(pool)
    pool.step(plan, [child], 1)
    pool.close(parent)  # block 2 has no reference any more, but the copy still reads it
    stats = pool.stats()
    assert pool.blocks.refcount(2) == 0 and (stats.used, stats.limbo) == (3, 0)
    pool.done(plan)
    assert pool.stats().used == 2
    assert pool.blocks.alloc() == 2


def test_replaced_block_of_the_only_holder_is_held_then_free(make_pool, make_plan):
    pool = make_pool()
    handle = pool.open(4)
    pool.blocks.incref(1)
    plan = make_plan(pool)
    pool.step(plan, [handle], 2)
    pool.blocks.decref(1)  # nobody names block 1 now
    stats = pool.stats()
    assert (stats.used, stats.limbo) == (2, 0)
    pool.done(plan)
    stats = pool.stats()
    assert (stats.used, stats.limbo, stats.blank) == (1, 0, 14)
    assert pool.blocks.alloc() == 1


# --- the floor: no write below what a pending copy still reads --------------------------------------------


def test_write_below_a_pending_copy_moves_away(shared, make_plan):
    pool, (parent, child) = shared(3, 2)
    first, second = make_plan(pool), make_plan(pool)
    pool.step(first, [parent], 1)
    assert first.copies.tolist() == [[1, 2, 3]]
    pool.truncate(child, 1)
    pool.step(second, [child], 1)  # offset 1 would overwrite what the first copy reads
    assert second.copies.tolist() == [[1, 3, 1]]
    assert tables(pool, [parent, child]) == [[2], [3]]


def test_write_at_the_floor_stays_in_place(shared, make_plan):
    pool, (parent, child) = shared(3, 2)
    first, second = make_plan(pool), make_plan(pool)
    pool.step(first, [parent], 1)
    pool.step(second, [child], 1)
    assert second.copies.shape == (0, 3)
    assert pool.table(child).tolist() == [1]


def test_floor_ends_with_the_plan_that_reads(shared, make_plan):
    pool, (parent, child) = shared(3, 2)
    first, second = make_plan(pool), make_plan(pool)
    pool.step(first, [parent], 1)
    pool.truncate(child, 1)
    pool.done(first)
    pool.step(second, [child], 1)
    assert second.copies.shape == (0, 3)
    assert pool.table(child).tolist() == [1]


def test_floor_is_the_largest_of_several_copies(shared, make_plan):
    pool, (a, b, c) = shared(3, 3)
    plans = [make_plan(pool) for _ in range(3)]
    pool.truncate(b, 1)
    pool.step(plans[0], [a], 1)  # reads three tokens of block 1
    pool.step(plans[1], [b], 1)  # reads one
    assert [plan.copies.tolist() for plan in plans[:2]] == [[[1, 2, 3]], [[1, 3, 1]]]
    pool.truncate(c, 2)
    pool.step(plans[2], [c], 1)
    assert plans[2].copies.tolist() == [[1, 4, 2]]


def test_floor_of_a_younger_copy_stays_when_the_older_plan_is_done(shared, make_plan):
    pool, (a, b, c) = shared(3, 3)
    plans = [make_plan(pool) for _ in range(3)]
    pool.truncate(b, 2)
    pool.step(plans[0], [a], 1)
    pool.step(plans[1], [b], 1)
    pool.done(plans[0])  # what remains is the copy that reads two tokens
    pool.truncate(c, 2)
    pool.step(plans[2], [c], 1)
    assert plans[2].copies.shape == (0, 3)
    assert pool.table(c).tolist() == [1]


def test_floor_counts_the_copies_of_the_plan_itself(shared, make_plan):
    pool, (parent, child) = shared(3, 2)
    pool.truncate(child, 1)
    plan = make_plan(pool)
    pool.step(plan, [parent, child], 1)
    assert plan.copies.tolist() == [
        [1, 2, 3],
        [1, 3, 1],
    ]  # the child may not overwrite what the parent's copy reads
    pool.done(plan)
    assert pool.blocks.refcount(1) == 0 and pool.stats().used == 2


def test_floor_lets_the_longer_holder_write_last(shared, make_plan):
    pool, (parent, child) = shared(3, 2)
    pool.truncate(child, 1)
    plan = make_plan(pool)
    pool.step(plan, [child, parent], 1)
    assert plan.copies.tolist() == [[1, 2, 1]]
    assert tables(pool, [parent, child]) == [[1], [2]]


def test_floor_of_a_rolled_back_copy_is_gone(shared, make_plan):
    pool, (parent, child) = shared(3, 2)
    first, second = make_plan(pool), make_plan(pool)
    pool.step(first, [parent], 1)
    pool.rollback(first)
    pool.close(parent)
    pool.truncate(child, 1)
    pool.step(second, [child], 1)
    assert second.copies.shape == (0, 3)


# --- reserved blocks, raw references, several blocks at once ----------------------------------------------


def test_shared_reserved_blocks_are_replaced_without_a_copy(make_pool, make_plan):
    pool = make_pool()
    handle = pool.open(12)
    pool.blocks.incref([1, 3])
    plan = make_plan(pool)
    pool.step(plan, [handle], 12)
    assert plan.copies.shape == (0, 3)
    assert pool.table(handle).tolist() == [4, 2, 5]  # ascending index: 1 -> 4, then 3 -> 5
    assert [pool.blocks.refcount(b) for b in (1, 3)] == [1, 1]


def test_only_the_first_replaced_block_holds_valid_tokens(make_pool, make_plan, grow):
    pool = make_pool()
    handle = pool.open(12)
    grow(pool, handle, 2)
    pool.blocks.incref([1, 2, 3])
    plan = make_plan(pool)
    pool.step(plan, [handle], 7)  # to nine tokens: blocks 0, 1 and 2 of the table
    assert plan.copies.tolist() == [[1, 4, 2]]
    assert pool.table(handle).tolist() == [4, 5, 6]


def test_blocks_beyond_the_write_stay(make_pool, make_plan, grow):
    pool = make_pool()
    handle = pool.open(12)
    grow(pool, handle, 2)
    pool.blocks.incref([1, 2, 3])
    plan = make_plan(pool)
    pool.step(plan, [handle], 2)
    assert pool.table(handle).tolist() == [4, 2, 3]


def test_raw_reference_makes_the_tail_shared(make_pool, make_plan, grow):
    pool = make_pool()
    handle = pool.open()
    grow(pool, handle, 2)
    pool.blocks.incref(1)
    plan = make_plan(pool)
    pool.step(plan, [handle], 1)
    assert plan.copies.tolist() == [[1, 2, 2]]
    pool.done(plan)
    pool.blocks.free(1)  # the raw reference is the last one


# --- reserve ----------------------------------------------------------------------------------------------


def test_reserve_takes_the_blocks_and_leaves_the_length(make_pool, make_plan, grow):
    pool = make_pool()
    handle = pool.open()
    grow(pool, handle, 3)
    plan = make_plan(pool, formats=("block_tables", "seq_lens", "slot_mapping", "cu_q_lens"), table_width=4)
    pool.reserve(plan, [handle], 6)
    assert plan.is_pending and plan.num_tokens == 0 and len(plan.handles) == 1
    assert plan.seq_lens.tolist() == [3] and plan.cu_q_lens.tolist() == [0, 0]
    assert plan.slot_mapping.shape == (0,)
    assert plan.block_tables.tolist() == [[1, 2, 3, 0]]
    assert (pool.num_tokens(handle), pool.capacity(handle)) == (3, 12)


def test_reserve_resolves_the_shared_tail(shared, make_plan):
    pool, (parent, child) = shared(6, 2)
    first, second = make_plan(pool), make_plan(pool)
    pool.reserve(first, [child], 1)
    assert first.copies.tolist() == [[2, 3, 2]]
    assert tables(pool, [parent, child]) == [[1, 2], [1, 3]]
    pool.done(first)
    pool.step(second, [child], 1)
    assert second.copies.shape == (0, 3) and second.slot_mapping.tolist() == [14]


def test_step_inside_a_reservation_cannot_run_out(make_pool, make_plan, grow):
    pool = make_pool(6)
    handle = pool.open()
    grow(pool, handle, 3)
    reserve, plan = make_plan(pool), make_plan(pool)
    pool.reserve(reserve, [handle], 9)
    pool.done(reserve)
    pool.blocks.alloc(2)
    assert pool.stats().blank == 0
    for _ in range(9):
        pool.step(plan, [handle], 1)
        pool.done(plan)
    with pytest.raises(OutOfBlocks):
        pool.step(plan, [handle], 1)


def test_fork_ends_a_reservation(make_pool, make_plan, grow, refused):
    pool = make_pool(4)
    handle = pool.open()
    grow(pool, handle, 6)
    plan, reserve = make_plan(pool), make_plan(pool)
    pool.reserve(reserve, [handle], 1)
    pool.done(reserve)
    pool.blocks.alloc()
    child = int(pool.fork(handle)[0])
    with refused(pool, OutOfBlocks, "step", plans=[plan]):
        pool.step(plan, [handle], 1)  # the tail is shared now
    pool.close(child)
    pool.step(plan, [handle], 1)


def test_reserve_zero_takes_nothing(shared, make_plan):
    pool, holders = shared(6, 2)
    plan = make_plan(pool)
    pool.reserve(plan, holders, 0)
    assert plan.copies.shape == (0, 3) and tables(pool, holders) == [[1, 2], [1, 2]]


def test_reserve_twice_takes_the_blocks_once(make_pool, make_plan):
    pool = make_pool()
    handle = pool.open()
    plan = make_plan(pool)
    for _ in range(2):
        pool.reserve(plan, [handle], 8)
        pool.done(plan)
    assert pool.table(handle).tolist() == [1, 2]


def test_reserve_in_order_pool_is_done_at_once(shared, make_plan):
    pool, (_, child) = shared(6, 2, in_order=True)
    plan = make_plan(pool)
    pool.reserve(plan, [child], 1)
    assert not plan.is_pending and plan.copies.tolist() == [[2, 3, 2]]
    assert pool.stats().pending == 0


# --- content: the oracle stamps every slot ----------------------------------------------------------------


def test_every_sequence_reads_its_own_tokens_after_forks_and_writes(make_pool, make_plan):
    """An engine that executes copies, then writes, then reads sees every lineage's own history."""
    rng = np.random.default_rng(11)
    pool = make_pool(200, 3, max_seqs=32)
    memory = np.full(200 * 3, -1)
    history = {pool.open(): []}
    plan = make_plan(pool, 32, 128)
    stamp = 0
    for _ in range(200):
        handles = list(history)
        rng.shuffle(handles)
        choice = rng.random()
        if choice < 0.3 and len(handles) < 12:
            for child in map(int, pool.fork(handles[0], int(rng.integers(1, 4)))):
                history[child] = list(history[handles[0]])
        elif choice < 0.45 and len(handles) > 1:
            pool.close(handles[0])
            del history[handles[0]]
        elif choice < 0.6:
            length = int(rng.integers(0, len(history[handles[0]]) + 1))
            pool.truncate(handles[0], length)
            del history[handles[0]][length:]
        rows = [h for h in handles if h in history and rng.random() < 0.8 and len(history[h]) < 30]
        new = rng.integers(0, 5, len(rows))
        pool.step(plan, rows, new)
        read = {dst: memory[src * 3 : src * 3 + n].copy() for src, dst, n in plan.copies.tolist()}
        for dst, tokens in read.items():
            memory[dst * 3 : dst * 3 + 3] = -1
            memory[dst * 3 : dst * 3 + len(tokens)] = tokens
        stamps = np.arange(stamp, stamp + plan.num_tokens)
        stamp += plan.num_tokens
        assert len(set(plan.slot_mapping.tolist())) == plan.num_tokens
        memory[plan.slot_mapping] = stamps
        taken = 0
        for handle, n in zip(rows, new.tolist(), strict=True):
            history[handle] += stamps[taken : taken + n].tolist()
            taken += n
        for handle, tokens in history.items():
            table = pool.table(handle)
            assert [memory[table[p // 3] * 3 + p % 3] for p in range(len(tokens))] == tokens
        pool.done(plan)
