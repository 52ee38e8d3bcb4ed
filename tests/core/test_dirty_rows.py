"""dirty_rows: the rows of the table that a step rewrote, so that a backend uploads only those.

The fuzzer's device reads by these rows alone, and the plain model has the same ones (`tests/verify`).
"""

import numpy as np
import pytest


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


def test_rebind_of_any_array_with_rows_makes_every_row_dirty(steps):
    _, plan, h, step = steps([0, 1, 1], block_size=16)
    for bind in (lambda: plan.bind(block_tables=np.zeros((32, 8), np.int32)), plan.bind):
        step(h, 0)
        bind()
        assert step(h[:2], 0) == [0, 1]
        assert step(h, 0) == [2]
        assert step(h, 0) == []


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
