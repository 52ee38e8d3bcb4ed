"""The wire formats of a plan against a straightforward reference: pool.table, lengths and a few loops."""


import numpy as np
import pytest

from kvpool.errors import CapacityExceeded
from kvpool.stats import PageBatchInfo

PAD = {  # default pads with a reserved block; block_tables has -1 without one
    "block_tables": 0,
    "seq_lens": 0,
    "slot_mapping": -1,
    "positions": 0,
    "last_page_len": 0,
    "slot_ids": -1,
}


def expected(pool, handles, new, *, rows=None, tokens=None, width, pad=PAD, group=0):
    """Every array of a group of a plan after the step, row by row and token by token."""
    kind = pool.options.groups[group]
    bs, columns = kind.block_size or pool.block_size, kind.columns
    rows = len(handles) if rows is None else rows
    tokens = sum(new) if tokens is None else tokens
    hole = 0 if pool.options.reserved_blocks else -1
    out = {
        "block_tables": np.full((rows, -(-width * pool.block_size // bs), columns), pad["block_tables"]),
        "seq_lens": np.full(rows, pad["seq_lens"]),
        "slot_mapping": np.full((columns, tokens), pad["slot_mapping"]),
        "positions": np.full(tokens, pad["positions"]),
        "last_page_len": np.full(rows, pad["last_page_len"]),
        "slot_ids": np.full(rows, pad["slot_ids"]),
        "kv_starts": np.zeros(rows, int),
    }
    cu_q_lens, indptr, indices = [0], [0], []
    token = 0
    for row, (handle, n) in enumerate(zip(handles, new, strict=True)):
        table = pool.table(handle, group)
        length, held = pool.num_tokens(handle), pool.kv_len(handle, group)
        holes = np.flatnonzero((table == hole).all(axis=1))
        places = np.arange(held - n, held)
        out["block_tables"][row, : len(table)] = table
        out["seq_lens"][row] = held
        out["slot_mapping"][:, token : token + n] = (table[places // bs] * bs).T + places % bs
        out["positions"][token : token + n] = range(length - n, length)
        out["slot_ids"][row] = int(handle) & 0xFFFFF
        out["last_page_len"][row] = (held - 1) % bs + 1 if held else 0
        out["kv_starts"][row] = (holes[-1] + 1) * bs if len(holes) else 0
        token += n
        cu_q_lens.append(token)
        indices += np.delete(table, holes, axis=0)[: -(-held // bs) - len(holes)].tolist()
        indptr.append(len(indices))
    flat = rows - len(handles)
    out["cu_q_lens"] = np.array(cu_q_lens + cu_q_lens[-1:] * flat)
    out["indptr"] = np.array(indptr + indptr[-1:] * flat)
    out["indices"] = np.array(indices, int).reshape(-1, columns)
    return out


#: The axis of columns, which a plan of one group with one column does not have.
COLUMNS_AXIS = {"block_tables": 2, "slot_mapping": 0, "indices": 1}


def assert_shows(plan, reference, dtype, group=0):
    """By the group; in a pool of one group by the plan, too."""
    part = plan.groups[group]
    for name, values in reference.items():
        shown = [getattr(part, "kv_lens" if name == "seq_lens" else name, None)]
        if shown[0] is None or (len(plan.groups) == 1 and name != "kv_starts"):
            shown.append(getattr(plan, name))
        for array in shown[shown[0] is None :]:
            assert array.dtype == dtype or name == "kv_starts", name
            if array.ndim < values.ndim:
                array = np.expand_dims(array, COLUMNS_AXIS[name])
            np.testing.assert_array_equal(array, values, err_msg=name)


BATCHES = {  # block_size, then lengths before the step and new tokens of each row
    "decode": (4, [1, 3, 4, 5, 8], [1, 1, 1, 1, 1]),
    "prefill": (4, [0, 0, 0], [1, 4, 9]),
    "mixed": (4, [7, 0, 12, 3], [1, 6, 0, 2]),
    "empty rows": (4, [0, 0, 4], [0, 3, 0]),
    "block of one": (1, [3, 0, 2], [1, 2, 0]),
    "block of three": (3, [2, 3, 4, 0], [2, 4, 1, 7]),
    "block of sixteen": (16, [15, 16, 17, 0], [1, 1, 1, 33]),
    "one row": (4, [6], [3]),
    "no rows": (4, [], []),
}


@pytest.fixture
def batch(make_pool, grow):
    """``batch(block_size, lengths)``: a pool and sequences of these lengths, in shuffled blocks."""

    def make(block_size, lengths, num_blocks=64, **options):
        pool = make_pool(num_blocks, block_size, **options)
        pool.blocks.alloc(8)
        pool.blocks.free([3, 1, 7, 5])
        handles = [pool.open() for _ in lengths]
        for length, handle in zip(lengths, handles, strict=True):
            if length:
                grow(pool, handle, length)
        return pool, handles

    return make


@pytest.mark.parametrize("dtype", ["int32", "int64"])
@pytest.mark.parametrize("case", BATCHES)
def test_every_format_equals_the_reference(core, batch, make_plan, case, dtype):
    block_size, lengths, new = BATCHES[case]
    pool, handles = batch(block_size, lengths)
    plan = make_plan(pool, formats=core.all_formats, table_width=20, dtype=dtype)
    pool.step(plan, handles, new)
    assert len(plan.handles) == len(handles) and plan.num_tokens == sum(new)
    assert plan.handles.dtype == np.int64 and plan.handles.tolist() == handles
    assert plan.served.dtype == np.uint8 and plan.served.tolist() == [1] * len(handles)
    assert_shows(plan, expected(pool, handles, new, width=20), dtype)


@pytest.mark.parametrize("dtype", ["int32", "int64"])
@pytest.mark.parametrize("case", BATCHES)
def test_pad_to_equals_the_reference_with_padding(core, batch, make_plan, case, dtype):
    block_size, lengths, new = BATCHES[case]
    pool, handles = batch(block_size, lengths)
    plan = make_plan(pool, formats=core.all_formats, table_width=20, dtype=dtype)
    pool.step(plan, handles, new, pad_to=(8, 64))
    assert len(plan.handles) == len(handles) and plan.num_tokens == sum(new)
    assert_shows(plan, expected(pool, handles, new, rows=8, tokens=64, width=20), dtype)


@pytest.mark.parametrize("least", [1, 11])
def test_pads_of_the_callers_choice(core, batch, make_plan, least):
    names = ("block_tables", "slot_mapping", "positions", "last_page_len", "slot_ids")
    pad = dict(zip(names, range(least, least + len(names)), strict=True)) | {"seq_lens": 0}
    pool, handles = batch(4, [7, 0, 12, 3])
    new = [1, 6, 0, 2]
    chosen = {name: value for name, value in pad.items() if value}
    plan = make_plan(pool, formats=core.all_formats, table_width=6, pad=chosen)
    pool.step(plan, handles, new, pad_to=(8, 16))
    assert_shows(plan, expected(pool, handles, new, rows=8, tokens=16, width=6, pad=pad), "int32")


def test_pool_without_a_reserved_block_pads_tables_with_minus_one(core, batch, make_plan):
    pool, handles = batch(4, [7, 0, 3], reserved_blocks=0)
    new = [1, 6, 0]
    pad = PAD | {"block_tables": -1}
    plan = make_plan(pool, formats=core.all_formats, table_width=6)
    pool.step(plan, handles, new, pad_to=(5, 9))
    assert_shows(plan, expected(pool, handles, new, rows=5, tokens=9, width=6, pad=pad), "int32")


def test_dtype_per_array(core, batch, make_plan):
    pool, handles = batch(4, [7, 0, 3])
    plan = make_plan(pool, dtype={"block_tables": "int32", "seq_lens": "int64", "slot_mapping": "int64"})
    pool.step(plan, handles, 1)
    assert [plan.block_tables.dtype, plan.seq_lens.dtype, plan.slot_mapping.dtype] == [
        "int32",
        "int64",
        "int64",
    ]
    assert [plan.slot_mapping.tolist()] == expected(pool, handles, [1, 1, 1], width=4)["slot_mapping"].tolist()


def test_reserved_blocks_of_a_sequence_are_in_its_table_but_not_in_csr(make_pool, make_plan):
    pool = make_pool()
    handle = pool.open(16)
    plan = make_plan(pool, formats=("block_tables", "csr"), table_width=6)
    pool.step(plan, [handle], 5)
    assert plan.block_tables.tolist() == [[1, 2, 3, 4, 0, 0]]
    assert plan.indptr.tolist() == [0, 2] and plan.indices.tolist() == [1, 2]
    assert plan.last_page_len.tolist() == [1]


@pytest.mark.parametrize("pad_to", [None, (3, 16)], ids=["plain", "padded"])
@pytest.mark.parametrize("grown", [0, 1, 4, 9])
def test_csr_rows_that_come_back_unchanged_are_right(make_pool, make_plan, grow, pad_to, grown):
    """indices are moved from the first changed row on; rows that were away may lie under others by now."""
    pool = make_pool(32)
    handles = [pool.open() for _ in range(3)]
    for handle, length in zip(handles, (4, 6, 2), strict=True):
        grow(pool, handle, length)
    plan = make_plan(pool, 3, 16, formats=("csr",))
    pool.step(plan, handles, 0)
    pool.done(plan)
    pool.step(plan, handles[:1], grown, pad_to=pad_to)
    pool.done(plan)
    pool.step(plan, handles, 0)
    tables = [pool.table(h).tolist() for h in handles]
    assert plan.indices.tolist() == [block for table in tables for block in table]
    assert plan.indptr.tolist() == [0, *np.cumsum([len(t) for t in tables])]


def test_rows_that_shrink_are_padded_again(make_pool, make_plan, grow):
    pool = make_pool()
    long, short = pool.open(), pool.open()
    grow(pool, long, 12)
    grow(pool, short, 2)
    plan = make_plan(pool, formats=("block_tables",), table_width=4)
    pool.step(plan, [long], 1)
    pool.done(plan)
    pool.step(plan, [short], 1)
    assert plan.block_tables.tolist() == [[4, 0, 0, 0]]
    pool.done(plan)
    pool.truncate(long, 3)
    pool.step(plan, [long], 0)
    assert plan.block_tables.tolist() == [[1, 0, 0, 0]]


@pytest.mark.parametrize("kind", [int, np.int64, list, tuple, np.int32, "int64 array"])
def test_num_new_in_every_legal_form(make_pool, make_plan, kind):
    pool = make_pool()
    handles = [pool.open() for _ in range(3)]
    if kind in (int, np.int64):
        new, total = kind(2), 6
    else:
        new, total = [2, 0, 1], 3
        new = (
            np.array(new, np.int64) if kind == "int64 array" else np.array(new, kind) if kind is np.int32 else kind(new)
        )
    plan = make_plan(pool)
    pool.step(plan, handles, new)
    assert plan.num_tokens == total


# --- Levanter's fields ------------------------------------------------------------------------------------


def test_page_batch_info_names_the_fields_of_levanter(make_pool, make_plan, grow):
    pool = make_pool(16, 4, reserved_blocks=0)
    pool.blocks.alloc(8)
    pool.blocks.free(7)
    pool.blocks.free(2)
    handle = pool.open()
    grow(pool, handle, 5)
    assert pool.table(handle).tolist() == [2, 7]
    plan = make_plan(pool, 2, 4, formats=("page_batch_info",), table_width=3)
    pool.step(plan, [handle], 1, pad_to=(2, 4))
    info = PageBatchInfo.of(plan)
    fields = info if isinstance(info, dict) else info._asdict()
    assert fields["slot_ids"].tolist() == [0, -1]
    assert fields["page_indices"].tolist() == [[2, 7, -1], [-1, -1, -1]]
    assert fields["seq_lens"].tolist() == [6, 0]
    assert fields["cu_q_lens"].tolist() == [0, 1, 1]
    assert int(fields["num_seqs"]) == 1
    assert fields["new_token_dests"].tolist() == [7 * 4 + 1, -1, -1, -1]


def test_page_batch_info_pads_with_minus_one_beside_a_reserved_block(make_pool, make_plan):
    pool = make_pool()
    plan = make_plan(pool, 2, 4, formats=("page_batch_info",), table_width=3)
    pool.step(plan, [pool.open()], 5 - 1)
    assert plan.block_tables.tolist() == [[1, -1, -1]]


# --- shapes, limits, views --------------------------------------------------------------------------------


def test_attributes_are_the_same_objects_while_the_shape_stays(core, make_pool, make_plan):
    pool = make_pool()
    handles = [pool.open(), pool.open()]
    plan = make_plan(pool, formats=core.all_formats)
    names = ("block_tables", "seq_lens", "slot_mapping", "positions", "cu_q_lens", "slot_ids")
    pool.step(plan, handles, 1)
    arrays = {name: getattr(plan, name) for name in names}
    pool.done(plan)
    pool.step(plan, handles, 1)
    assert all(getattr(plan, name) is array for name, array in arrays.items())
    assert arrays["seq_lens"].tolist() == [2, 2]


def test_attributes_follow_the_batch_size(make_pool, make_plan):
    pool = make_pool()
    handles = [pool.open() for _ in range(4)]
    plan = make_plan(pool)
    for rows in (4, 1, 3, 0, 4):
        pool.step(plan, handles[:rows], 1)
        assert plan.seq_lens.shape == (rows,) and plan.slot_mapping.shape == (rows,)
        assert plan.block_tables.shape == (rows, 15)
        pool.done(plan)


def test_plan_defaults(core, make_pool):
    pool = make_pool(max_blocks_per_seq=5)
    plan = core.Plan(pool, 3)
    handles = [pool.open() for _ in range(3)]
    pool.step(plan, handles)
    assert plan.block_tables.shape == (3, 5)
    assert plan.seq_lens.tolist() == [1, 1, 1]
    assert plan.slot_mapping.tolist() == [4, 8, 12]
    assert {a.dtype for a in (plan.block_tables, plan.seq_lens, plan.slot_mapping)} == {np.dtype("int32")}


def test_fresh_plan_is_empty_and_not_pending(make_pool, make_plan):
    plan = make_plan(make_pool())
    assert (len(plan.handles), plan.num_tokens, plan.is_pending) == (0, 0, False)
    assert plan.copies.shape == (0, 3) and plan.dirty_rows.shape == (0,)


def test_more_rows_than_the_plan_is_refused(make_pool, make_plan, refused):
    pool = make_pool()
    handles = [pool.open() for _ in range(4)]
    plan = make_plan(pool, 3)
    for partial in (False, True):
        with refused(pool, CapacityExceeded, "step", 4, plans=[plan]):
            pool.step(plan, handles, 0, partial=partial)


def test_more_tokens_than_the_plan_is_refused(make_pool, make_plan, refused):
    pool = make_pool()
    handles = [pool.open(), pool.open()]
    plan = make_plan(pool, 3, 5)
    for partial in (False, True):
        with refused(pool, CapacityExceeded, "step", 6, plans=[plan]):
            pool.step(plan, handles, 3, partial=partial)
    pool.step(plan, handles, [3, 2])


def test_more_decode_rows_than_tokens_of_the_plan_is_refused(make_pool, make_plan, refused, grow):
    pool = make_pool()
    handles = [pool.open() for _ in range(3)]
    for handle in handles:
        grow(pool, handle, 1)
    plan = make_plan(pool, 3, 2)
    with refused(pool, CapacityExceeded, "step", 3, plans=[plan]):
        pool.step(plan, handles, 1)
    wide = make_plan(pool, 3, 3)
    with refused(pool, ValueError, "step", 3, plans=[wide]):
        pool.step(wide, handles, 1, pad_to=(3, 2))
    pool.step(plan, handles[1:], 1)


def test_wider_table_than_the_plan_is_refused(make_pool, make_plan, refused):
    pool = make_pool()
    handle = pool.open(12)
    plan = make_plan(pool, table_width=2)
    with refused(pool, CapacityExceeded, "step", 3, plans=[plan]):
        pool.step(plan, [handle], 1)  # three blocks already, though one token needs one
    pool.truncate(handle, 0)
    pool.step(plan, [handle], 8)


def test_longer_sequence_than_the_pool_allows_is_refused(make_pool, make_plan, refused):
    pool = make_pool(max_blocks_per_seq=2)
    handle = pool.open()
    plan = make_plan(pool, formats=("seq_lens",))
    for call in ("step", "reserve"):
        with refused(pool, CapacityExceeded, call, plans=[plan]):
            getattr(pool, call)(plan, [handle], 9)
    with refused(pool, CapacityExceeded, "open"):
        pool.open(9)
    pool.step(plan, [handle], 8)


@pytest.mark.parametrize("pad_to", [(1, 64), (9, 64), (8, 3), (8, 65), (-1, 64), (8, -1), (2**40, 64), (8, 2**40)])
def test_pad_to_outside_batch_and_plan_is_refused(make_pool, make_plan, refused, pad_to):
    pool = make_pool()
    handles = [pool.open(), pool.open()]
    plan = make_plan(pool, 8, 64)
    with refused(pool, ValueError, "step", plans=[plan]):
        pool.step(plan, handles, 2, pad_to=pad_to)


def test_step_on_the_plan_of_another_pool_is_refused(make_pool, make_plan, refused):
    pool, other = make_pool(), make_pool()
    plan = make_plan(other)
    for call in ("step", "reserve"):
        with refused(pool, ValueError, call, plans=[plan]):
            getattr(pool, call)(plan, [], 1)
    for call in ("done", "rollback"):
        with refused(pool, ValueError, call, plans=[plan]):
            getattr(pool, call)(plan)


# --- int32 ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("fmt", ["slot_mapping", "page_batch_info"])
def test_int32_slots_are_refused_when_they_could_overflow(make_pool, make_plan, fmt):
    pool = make_pool(4, 2**29)  # 4 * 2^29 = 2^31
    with pytest.raises(ValueError) as caught:
        make_plan(pool, 2, 2, formats=(fmt,))
    assert str(caught.value).startswith("[Plan] ") and str(2**31) in str(caught.value)
    make_plan(pool, 2, 2, formats=(fmt,), dtype="int64")


def test_int32_slots_up_to_the_limit_are_legal(make_pool, make_plan):
    pool = make_pool(3, (2**31 - 1) // 3)
    make_plan(pool, 2, 2, formats=("slot_mapping",))


def test_int64_slots_beyond_2_31_are_right(make_pool, make_plan, core):
    pool = make_pool(9, 2**29)
    pool.blocks.alloc(5)
    handle = pool.open()
    plan = make_plan(pool, 1, 4, formats=core.all_formats, dtype="int64")
    pool.step(plan, [handle], 3)
    slots = [6 * 2**29, 6 * 2**29 + 1, 6 * 2**29 + 2]
    assert plan.slot_mapping.tolist() == slots
