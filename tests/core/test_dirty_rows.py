"""dirty_rows: the rows of the table that a step rewrote, so that a backend uploads only those."""

import numpy as np
import pytest

from kvpool.errors import OutOfBlocks


@pytest.fixture
def steps(make_pool, make_plan, grow):
    """``pool, plan, handles, step = steps(lengths)``; ``step(rows, new)`` is done and returns dirty_rows."""

    def make(lengths, *, num_blocks=128, block_size=4, **options):
        pool = make_pool(num_blocks, block_size)
        handles = [pool.open() for _ in lengths]
        for handle, length in zip(handles, lengths, strict=True):
            if length:
                grow(pool, handle, length)
        options.setdefault("table_width", 8)
        plan = make_plan(pool, 32, 256, **options)

        def step(rows, new=1, **step_options):
            pool.step(plan, rows, new, **step_options)
            dirty = plan.dirty_rows
            assert dirty.dtype == np.int32 and dirty.tolist() == sorted(dirty.tolist())
            dirty = dirty.tolist()
            pool.done(plan)
            return dirty

        return pool, plan, handles, step

    return make


def test_steady_decode_makes_one_row_in_block_size_dirty(steps):
    lengths = list(range(16, 32))  # at every step exactly one of sixteen rows starts a block
    _, _, handles, step = steps(lengths, block_size=16)
    step(handles, 0)
    for n in range(64):
        assert step(handles) == [row for row in range(16) if (lengths[row] + n) % 16 == 0]


def test_slot_reused_by_another_sequence_is_dirty(steps):
    pool, plan, h, step = steps([1, 1], block_size=16)
    step(h)
    pool.close(h[1])
    raw = pool.blocks.alloc()  # keeps the block of the closed sequence from coming back
    assert raw == 2
    newcomer = pool.open()
    while newcomer & 0xFFFFF != h[1] & 0xFFFFF:  # slots are reused oldest first
        pool.close(newcomer)
        newcomer = pool.open()
    assert step([h[0], newcomer]) == [1]
    assert plan.block_tables[1, 0] == 3


def test_rolled_back_rows_stay_carried_until_a_step_has_them(steps):
    pool, plan, h, step = steps([1, 1, 1, 1], block_size=4)
    step(h, 0)
    pool.step(plan, h, 1)
    pool.rollback(plan)
    assert step(h[:2], 0) == [0, 1]
    assert step(h, 0) == [2, 3]


def test_padding_over_a_row_makes_it_dirty_and_forgets_it(steps):
    _, plan, h, step = steps([1, 1, 1], block_size=16)
    step(h)
    assert step(h[:1], pad_to=(3, 3)) == [1, 2]
    assert plan.block_tables[:, 0].tolist() == [1, 0, 0]
    assert step(h[:1], pad_to=(3, 3)) == []  # padding over padding changes nothing
    assert step(h) == [1, 2]
    assert plan.block_tables[:, 0].tolist() == [1, 2, 3]


def test_rebind_of_any_array_with_rows_makes_every_row_dirty(steps):
    _, plan, h, step = steps([1, 1, 1], block_size=16)
    step(h)
    plan.bind(block_tables=np.zeros((32, 8), np.int32))
    assert step(h[:2]) == [0, 1]
    assert step(h) == [2]
    assert step(h) == []


def test_refused_step_does_not_consume_carried_rows(steps):
    pool, plan, h, step = steps([3, 3], num_blocks=4)
    step(h, 0)
    pool.step(plan, h, 1)
    pool.rollback(plan)
    with pytest.raises(OutOfBlocks):
        pool.step(plan, h, 5)
    assert step(h, 0) == [0, 1]


@pytest.mark.parametrize("fmt", ["csr", "kv_slots", "page_batch_info"])
def test_other_formats_with_rows_report_dirty_rows_too(steps, fmt):
    _, _, h, step = steps([1, 4], formats=(fmt,), kv_width=32)
    assert step(h, 0) == [0, 1]
    assert 1 in step(h, 1)


@pytest.mark.parametrize("formats", [("seq_lens",), ("slot_mapping", "positions", "cu_q_lens", "slot_ids"), ()])
def test_plan_without_rows_in_its_formats_reports_none(steps, formats):
    _, _, h, step = steps([1, 4], formats=formats)
    assert step(h) == []


def test_dirty_rows_are_exactly_what_an_uploading_backend_needs(make_pool, make_plan):
    """A copy that only ever receives the dirty rows equals the table after every step."""
    rng = np.random.default_rng(7)
    pool = make_pool(256, 2, max_seqs=16)
    plan = make_plan(pool, 12, 64, table_width=12)
    uploaded = np.zeros((12, 12), np.int32)
    handles = [pool.open() for _ in range(6)]
    for _ in range(300):
        for handle in [h for h in handles if pool.num_tokens(h) > 20]:
            pool.truncate(handle, int(rng.integers(0, 10)))
        choice = rng.random()
        if choice < 0.1 and len(handles) < 12:
            handles.append(int(pool.fork(handles[rng.integers(len(handles))])[0]))
        elif choice < 0.2 and len(handles) > 3:
            pool.close(handles.pop(rng.integers(len(handles))))
        elif choice < 0.3:
            rng.shuffle(handles)
        elif choice < 0.4:
            handle = handles[rng.integers(len(handles))]
            pool.truncate(handle, int(rng.integers(0, pool.num_tokens(handle) + 1)))
        rows = handles[: rng.integers(0, len(handles) + 1)]
        pool.step(plan, rows, rng.integers(0, 3, len(rows)), pad_to=(12, 64) if rng.random() < 0.2 else None)
        table, dirty = plan.block_tables, plan.dirty_rows
        uploaded[dirty] = table[dirty]
        np.testing.assert_array_equal(uploaded[: len(table)], table)
        if rng.random() < 0.2:
            pool.rollback(plan)
        else:
            pool.done(plan)
