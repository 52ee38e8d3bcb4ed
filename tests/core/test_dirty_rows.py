"""dirty_rows: the rows of the table that a step rewrote, so that a backend uploads only those.

The fuzzer's device reads by these rows alone (`tests/verify`); here are the numbers of what makes a row dirty.
"""

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
            pool.done(plan)
            return dirty.tolist()

        return pool, plan, handles, step

    return make


def test_steady_decode_makes_one_row_in_block_size_dirty(steps):
    lengths = list(range(16, 32))  # at every step exactly one of sixteen rows starts a block
    _, plan, handles, step = steps(lengths, block_size=16)
    assert step(handles, 0) == list(range(16)) and step(handles, 0) == step([]) == []
    for n in range(64):
        assert step(handles) == [row for row in range(16) if (lengths[row] + n) % 16 == 0]
    assert plan.seq_lens.tolist() == [length + 64 for length in lengths]  # lengths are written all the same


def test_row_with_another_handle_is_dirty_and_one_that_was_left_out_is_not(steps):
    _, plan, h, step = steps([1, 1, 1, 1, 1], block_size=16)
    step(h)
    assert step([h[0], h[3], h[2], h[1], h[4]]) == [1, 3]
    assert plan.block_tables[:, 0].tolist() == [1, 4, 3, 2, 5]
    assert step(h) == [1, 3]
    assert step([h[0], h[2], h[3]]) == [1, 2]  # from the gap on
    assert step(h[:1]) == []
    assert step(h) == [1, 2]
    assert plan.block_tables[:, 0].tolist() == [1, 2, 3, 4, 5]


def test_slot_reused_by_another_sequence_is_dirty(steps):
    pool, plan, h, step = steps([1, 1], block_size=16)
    step(h)
    pool.close(h[1])
    assert pool.blocks.alloc() == 2  # keeps the block of the closed sequence from coming back
    newcomer = pool.open()
    while newcomer & 0xFFFFF != h[1] & 0xFFFFF:  # slots are reused oldest first
        pool.close(newcomer)
        newcomer = pool.open()
    assert step([h[0], newcomer]) == [1]
    assert plan.block_tables[1, 0] == 3


TABLE_CHANGES = {  # of two rows of nine tokens: what happens, new tokens of the next step, what is dirty, what is shown
    "growth in another plan": (lambda pool, h, grow: grow(pool, h[1], 5), 0, [1], [4, 5, 6, 7]),
    "truncate that drops a block": (lambda pool, h, grow: pool.truncate(h[1], 4), 0, [1], [4, 0, 0, 0]),
    "truncate and growth back": (
        lambda pool, h, grow: (pool.truncate(h[1], 8), pool.blocks.alloc()), [0, 1], [1], [4, 5, 7, 0],
    ),
    "truncate inside the tail": (lambda pool, h, grow: pool.truncate(h[1], 9), [0, 1], [], [4, 5, 6, 0]),
    "copy on write": (lambda pool, h, grow: pool.fork(h[1]), [0, 1], [1], [4, 5, 7, 0]),
}  # fmt: skip


@pytest.mark.parametrize("change", TABLE_CHANGES)
def test_row_is_dirty_iff_its_table_changed(steps, grow, change):
    pool, plan, h, step = steps([9, 9])
    step(h, 0)
    act, new, dirty, shown = TABLE_CHANGES[change]
    act(pool, h, grow)
    assert step(h, new) == dirty
    assert plan.block_tables[:, :4].tolist() == [[1, 2, 3, 0], shown]


def test_rolled_back_rows_stay_carried_until_a_step_has_them(steps):
    pool, plan, h, step = steps([1, 4, 1, 1], num_blocks=6)
    step(h, 0)
    pool.step(plan, h, [1, 1, 1, 1])
    assert plan.dirty_rows.tolist() == [1]
    pool.rollback(plan)
    with pytest.raises(OutOfBlocks):
        pool.step(plan, h, 5)
    assert step(h[:2], 0) == [0, 1]
    assert plan.block_tables[1, :3].tolist() == [2, 0, 0]
    assert step(h, 0) == [2, 3]
    assert step(h, 0) == []


def test_rollback_of_growth_in_another_plan_makes_the_row_dirty(steps, make_plan):
    pool, plan, h, step = steps([4, 1])
    step(h, 0)
    other = make_plan(pool)
    pool.step(other, [h[0]], 1)
    pool.rollback(other)
    pool.blocks.alloc()  # the block that the rolled back step had taken
    assert 0 in step(h, [1, 0])
    assert plan.block_tables[0, :2].tolist() == [1, 4]


def test_padding_over_a_row_makes_it_dirty_and_forgets_it(steps):
    _, plan, h, step = steps([1, 1, 1, 1], block_size=16)
    step(h)
    assert step(h[:1], pad_to=(3, 3)) == [1, 2]
    assert plan.block_tables[:, 0].tolist() == [1, 0, 0]
    assert step(h[:1], pad_to=(3, 3)) == []  # padding over padding changes nothing
    assert step(h) == [1, 2]  # row 3 kept its content
    assert plan.block_tables[:, 0].tolist() == [1, 2, 3, 4]


def test_rebind_of_any_array_with_rows_makes_every_row_dirty(steps):
    _, plan, h, step = steps([0, 1, 1], block_size=16)
    for bind in (lambda: plan.bind(block_tables=np.zeros((32, 8), np.int32)), plan.bind):
        step(h, 0)
        bind()
        assert step(h[:2], 0) == [0, 1]
        assert step(h, 0) == [2]
        assert step(h, 0) == []


def test_reserve_that_grows_a_table_makes_the_row_dirty_and_a_skipped_row_is_clean(steps):
    pool, plan, h, step = steps([1, 1], num_blocks=5)  # two blocks are left
    step(h, 0)
    pool.reserve(plan, h, [2, 8])
    assert plan.dirty_rows.tolist() == [1]
    pool.done(plan)
    pool.step(plan, h, [4, 8], partial=True)
    assert (plan.served.tolist(), plan.dirty_rows.tolist()) == ([0, 1], [])
    pool.done(plan)


@pytest.mark.parametrize(
    ("formats", "dirty"),
    [(("csr",), [0, 1]), (("page_batch_info",), [0, 1]), (("seq_lens", "slot_mapping", "slot_ids"), []), ((), [])],
)
def test_only_formats_with_rows_have_dirty_ones(steps, make_plan, formats, dirty):
    pool, _, h, step = steps([1, 4], formats=formats)
    assert step(h, 0) == dirty
    other = make_plan(pool, formats=formats)  # which remembers its own rows
    pool.step(other, h, 0)
    assert other.dirty_rows.tolist() == dirty
