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


def test_first_step_makes_every_row_dirty(steps):
    _, _, handles, step = steps([1, 5, 0])
    assert step(handles) == [0, 1, 2]


def test_steady_decode_makes_one_row_in_block_size_dirty(steps):
    lengths = list(range(16, 32))  # at every step exactly one of sixteen rows starts a block
    _, _, handles, step = steps(lengths, block_size=16)
    step(handles, 0)
    for n in range(64):
        assert step(handles) == [row for row in range(16) if (lengths[row] + n) % 16 == 0]


def test_row_is_clean_while_its_table_stays(steps):
    _, plan, handles, step = steps([1, 1], block_size=16)
    step(handles)
    for _ in range(5):
        assert step(handles) == []
    assert plan.seq_lens.tolist() == [7, 7]  # lengths are written all the same


def test_reading_rows_are_clean(steps):
    _, _, handles, step = steps([4, 8])
    step(handles, 0)
    assert step(handles, 0) == []


def test_moved_rows_are_dirty_and_the_others_are_not(steps):
    _, plan, h, step = steps([1, 1, 1, 1, 1], block_size=16)
    step(h)
    assert step([h[0], h[3], h[2], h[1], h[4]]) == [1, 3]
    assert plan.block_tables[:, 0].tolist() == [1, 4, 3, 2, 5]


def test_shifted_rows_are_dirty_from_the_gap_on(steps):
    _, _, h, step = steps([1, 1, 1, 1], block_size=16)
    step(h)
    assert step([h[0], h[2], h[3]]) == [1, 2]


def test_row_left_out_and_back_again_is_clean(steps):
    _, plan, h, step = steps([1, 1, 1, 1], block_size=16)
    step(h)
    assert step(h[:2]) == []
    assert step(h) == []
    assert plan.block_tables[:, 0].tolist() == [1, 2, 3, 4]


def test_row_that_grew_in_another_plan_meanwhile_is_dirty(steps, grow):
    pool, plan, h, step = steps([1, 1], block_size=4)
    step(h)
    grow(pool, h[1], 5)
    assert step(h, 0) == [1]
    assert plan.block_tables[1, :3].tolist() == [2, 3, 0]


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


def test_truncate_that_drops_a_block_makes_the_row_dirty(steps):
    pool, plan, h, step = steps([9, 9])
    step(h, 0)
    pool.truncate(h[1], 4)
    assert step(h, 0) == [1]
    assert plan.block_tables[1, :3].tolist() == [4, 0, 0]


def test_truncate_and_growth_back_to_the_same_width_is_dirty(steps):
    pool, plan, h, step = steps([9, 9])
    step(h, 0)
    pool.truncate(h[1], 8)  # block 6 goes back
    taken = pool.blocks.alloc()
    assert taken == 6
    assert step(h, [0, 1]) == [1]
    assert plan.block_tables[1, :3].tolist() == [4, 5, 7]


def test_truncate_inside_the_tail_block_is_clean(steps):
    pool, _, h, step = steps([9, 11])
    step(h, 0)
    pool.truncate(h[1], 9)
    assert step(h, 1) == []


def test_copy_on_write_makes_the_row_dirty(steps):
    pool, plan, h, step = steps([6])
    rows = [h[0], int(pool.fork(h[0])[0])]
    step(rows, 0)
    assert step(rows) == [0]  # the first holder moves to a copy, the last one writes in place
    assert plan.block_tables[:, :2].tolist() == [[1, 3], [1, 2]]


def test_rows_of_a_rolled_back_step_are_dirty_in_the_next(steps):
    pool, plan, h, step = steps([1, 4, 1, 1], block_size=4)
    step(h, 0)
    pool.step(plan, h[:3], 1)
    assert plan.dirty_rows.tolist() == [1]
    pool.rollback(plan)
    assert step(h, 0) == [0, 1, 2]
    assert plan.block_tables[1, :3].tolist() == [2, 0, 0]
    assert step(h, 0) == []


def test_rolled_back_rows_stay_carried_until_a_step_has_them(steps):
    pool, plan, h, step = steps([1, 1, 1, 1], block_size=4)
    step(h, 0)
    pool.step(plan, h, 1)
    pool.rollback(plan)
    assert step(h[:2], 0) == [0, 1]
    assert step(h, 0) == [2, 3]


def test_rollback_of_growth_in_another_plan_makes_the_row_dirty(steps, make_plan):
    pool, plan, h, step = steps([4, 1])
    step(h, 0)
    other = make_plan(pool)
    pool.step(other, [h[0]], 1)
    pool.rollback(other)
    pool.blocks.alloc()  # the block that the rolled back step had taken
    assert 0 in step(h, [1, 0])
    assert plan.block_tables[0, :2].tolist() == [1, 4]


def test_row_whose_growth_was_rolled_back_is_shown_without_it(steps):
    pool, plan, h, step = steps([4, 1])
    step(h, 0)
    pool.step(plan, h, [1, 0])
    grown = plan.block_tables[0].tolist()
    pool.rollback(plan)
    assert 0 in step(h, 0)
    assert plan.block_tables[0].tolist() == [grown[0], *grown[2:], grown[2]] != grown


def test_forgotten_row_of_a_new_sequence_is_dirty(steps):
    _, plan, h, step = steps([0])
    assert step(h, 0) == [0] and step(h, 0) == []
    plan.bind()
    assert step(h, 0) == [0]


def test_padding_over_a_row_makes_it_dirty_and_forgets_it(steps):
    _, plan, h, step = steps([1, 1, 1], block_size=16)
    step(h)
    assert step(h[:1], pad_to=(3, 3)) == [1, 2]
    assert plan.block_tables[:, 0].tolist() == [1, 0, 0]
    assert step(h[:1], pad_to=(3, 3)) == []  # padding over padding changes nothing
    assert step(h) == [1, 2]
    assert plan.block_tables[:, 0].tolist() == [1, 2, 3]


def test_padding_beyond_the_old_rows_leaves_them_alone(steps):
    _, _, h, step = steps([1, 1, 1, 1], block_size=16)
    step(h)
    assert step(h[:1], pad_to=(2, 2)) == [1]
    assert step(h) == [1]  # rows 2 and 3 kept their content


def test_empty_batch_has_no_dirty_rows(steps):
    _, _, h, step = steps([1])
    step(h)
    assert step([]) == []


def test_rebind_of_any_array_with_rows_makes_every_row_dirty(steps):
    _, plan, h, step = steps([1, 1, 1], block_size=16)
    step(h)
    plan.bind(block_tables=np.zeros((32, 8), np.int32))
    assert step(h[:2]) == [0, 1]
    assert step(h) == [2]
    assert step(h) == []


def test_reserve_that_grows_a_table_makes_the_row_dirty(steps):
    pool, plan, h, step = steps([1, 1])
    step(h, 0)
    pool.reserve(plan, h, [2, 8])
    assert plan.dirty_rows.tolist() == [1]
    pool.done(plan)
    assert step(h, [2, 8]) == []


def test_skipped_row_is_clean(steps):
    pool, plan, h, step = steps([4, 3], num_blocks=3)  # both blocks are used
    step(h, 0)
    pool.step(plan, h, 1, partial=True)
    assert plan.served.tolist() == [0, 1]
    assert plan.dirty_rows.tolist() == []


def test_refused_step_does_not_consume_carried_rows(steps):
    pool, plan, h, step = steps([3, 3], num_blocks=4)
    step(h, 0)
    pool.step(plan, h, 1)
    pool.rollback(plan)
    with pytest.raises(OutOfBlocks):
        pool.step(plan, h, 5)
    assert step(h, 0) == [0, 1]


@pytest.mark.parametrize("fmt", ["csr", "page_batch_info"])
def test_other_formats_with_rows_report_dirty_rows_too(steps, fmt):
    _, _, h, step = steps([1, 4], formats=(fmt,))
    assert step(h, 0) == [0, 1]
    assert 1 in step(h, 1)


@pytest.mark.parametrize("formats", [("seq_lens",), ("slot_mapping", "positions", "cu_q_lens", "slot_ids"), ()])
def test_plan_without_rows_in_its_formats_reports_none(steps, formats):
    _, _, h, step = steps([1, 4], formats=formats)
    assert step(h) == []


def test_two_plans_remember_their_rows_apart(steps, make_plan):
    pool, _, h, step = steps([1, 1], block_size=16)
    step(h)
    other = make_plan(pool)
    pool.step(other, h)
    assert other.dirty_rows.tolist() == [0, 1]
    pool.done(other)
    assert step(h) == []
