"""The wire formats of a plan against a straightforward reference: pool.table, lengths and a few loops."""

import numpy as np
import pytest

from kvpool import Group
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
KINDS = {
    "none": lambda size: None,
    "columns": lambda size: [Group.full(columns=2, block_size=2 * size)],
    "window": lambda size: [Group.full(block_size=4 * size), Group.window(5, keep=1, columns=2), Group.chunk(4)],
}


@pytest.fixture
def batch(make_pool, grow):
    """``batch(block_size, lengths)``: a pool and rows of these lengths, in shuffled blocks; every other one has more
    blocks than it needs."""

    def make(block_size, lengths, num_blocks=256, **options):
        pool = make_pool(num_blocks, block_size, **options)
        pool.blocks.alloc(8)
        pool.blocks.free([3, 1, 7, 5])
        handles = [pool.open(k % 2 * 20) for k in range(len(lengths))]
        for length, handle in zip(lengths, handles, strict=True):
            if length:
                grow(pool, handle, length)
        return pool, handles

    return make


@pytest.mark.parametrize("dtype", ["int32", "int64"])
@pytest.mark.parametrize("pad_to", [None, (8, 64)], ids=["plain", "padded"])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("case", BATCHES)
def test_every_format_equals_the_reference(core, batch, make_plan, case, kind, pad_to, dtype):
    block_size, lengths, new = BATCHES[case]
    pool, handles = batch(block_size, lengths, groups=KINDS[kind](block_size))
    plan = make_plan(pool, formats=core.all_formats, table_width=40, dtype=dtype)
    pool.step(plan, handles, new, pad_to=pad_to)
    assert len(plan.handles) == len(handles) and plan.num_tokens == sum(new)
    assert plan.handles.dtype == np.int64 and plan.handles.tolist() == handles
    assert plan.served.dtype == np.uint8 and plan.served.tolist() == [1] * len(handles)
    rows, tokens = pad_to or (None, None)
    for group in range(len(plan.groups)):
        due = expected(pool, handles, new, rows=rows, tokens=tokens, width=40, group=group)
        assert_shows(plan, due, dtype, group)


@pytest.mark.parametrize(
    ("reserved", "chosen"),
    [
        (1, {"block_tables": 1, "slot_mapping": 2, "positions": 3, "last_page_len": 4, "slot_ids": 5}),
        (1, {"block_tables": 11, "slot_mapping": 12, "positions": 13, "last_page_len": 14, "slot_ids": 15}),
        (0, {}),
    ],
)
def test_pads_of_the_callers_choice(core, batch, make_plan, reserved, chosen):
    pool, handles = batch(4, [7, 0, 12, 3], reserved_blocks=reserved)
    new, pad = [1, 6, 0, 2], PAD | {"block_tables": reserved - 1} | chosen
    plan = make_plan(pool, formats=core.all_formats, table_width=6, pad=chosen)
    pool.step(plan, handles, new, pad_to=(8, 16))
    assert_shows(plan, expected(pool, handles, new, rows=8, tokens=16, width=6, pad=pad), "int32")


def test_dtype_per_array(batch, make_plan):
    pool, handles = batch(4, [7, 0, 3])
    plan = make_plan(pool, dtype={"block_tables": "int32", "seq_lens": "int64", "slot_mapping": "int64"})
    pool.step(plan, handles, 1)
    assert [plan.block_tables.dtype, plan.seq_lens.dtype, plan.slot_mapping.dtype] == ["int32", "int64", "int64"]
    assert [plan.slot_mapping.tolist()] == expected(pool, handles, [1, 1, 1], width=20)["slot_mapping"].tolist()


@pytest.mark.parametrize("kind", [int, np.int64, list, tuple, np.array, lambda new: np.array(new, np.int32)])
def test_num_new_in_every_legal_form(make_pool, make_plan, kind):
    pool = make_pool()
    plan, handles = make_plan(pool), [pool.open() for _ in range(3)]
    new = kind(2) if kind in (int, np.int64) else kind([2, 0, 1])
    pool.step(plan, handles, new)
    assert plan.num_tokens == (6 if np.ndim(new) == 0 else 3)


@pytest.mark.parametrize(
    ("formats", "dirty"),
    [(("csr",), [0, 1]), (("page_batch_info",), [0, 1]), (("seq_lens", "slot_mapping", "slot_ids"), []), ((), [])],
)
def test_only_formats_with_rows_have_dirty_ones(make_pool, make_plan, formats, dirty):
    """The fuzzer's device reads by these rows alone, and the plain model has the same ones (`tests/verify`)."""
    pool = make_pool()
    handles = [pool.open(), pool.open()]
    for plan in (make_plan(pool, formats=formats), make_plan(pool, formats=formats)):  # each remembers its own
        for due in (dirty, []):
            pool.step(plan, handles, 0)
            assert plan.dirty_rows.dtype == np.int32 and plan.dirty_rows.tolist() == due
            pool.done(plan)


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


def test_plan_defaults(core, make_pool):
    pool = make_pool(max_blocks_per_seq=5)
    plan = core.Plan(pool, 3)
    assert (len(plan.handles), plan.num_tokens, plan.is_pending) == (0, 0, False)
    assert plan.copies.shape == (0, 3) and plan.dirty_rows.shape == (0,)
    handles = [pool.open() for _ in range(3)]
    pool.step(plan, handles)
    assert plan.block_tables.shape == (3, 5)
    assert plan.seq_lens.tolist() == [1, 1, 1]
    assert plan.slot_mapping.tolist() == [4, 8, 12]
    assert {a.dtype for a in (plan.block_tables, plan.seq_lens, plan.slot_mapping)} == {np.dtype("int32")}


LIMITS = {  # rows and tokens of the plan, its other options; lengths, new tokens, what else is given; what is named
    "rows": ((3, 64), {}, [0] * 4, 0, {}, 4),
    "rows, partial": ((3, 64), {}, [0] * 4, 0, {"partial": True}, 4),
    "tokens": ((3, 5), {}, [0, 0], 3, {}, 6),
    "tokens, partial": ((3, 5), {}, [0, 0], 3, {"partial": True}, 6),
    "tokens of decode rows": ((3, 2), {}, [1, 1, 1], 1, {}, 3),
    "width": ((3, 64), {"table_width": 2}, [9], 0, {}, 3),
    "blocks of a sequence": ((3, 64), {}, [60], 1, {}, 61),
}


@pytest.mark.parametrize("case", LIMITS)
def test_step_beyond_a_limit_is_refused(make_pool, make_plan, grow, refused, case):
    sizes, options, lengths, new, more, named = LIMITS[case]
    pool = make_pool(64, max_blocks_per_seq=15)
    plan, handles = make_plan(pool, *sizes, **options), [pool.open() for _ in lengths]
    for handle, length in zip(handles, lengths, strict=True):
        grow(pool, handle, length)
    with refused(pool, CapacityExceeded, "step", named, plans=[plan]):
        pool.step(plan, handles, new, **more)


@pytest.mark.parametrize("pad_to", [(1, 64), (9, 64), (8, 3), (8, 65), (-1, 64), (8, -1), (2**40, 64), (8, 2**40)])
def test_pad_to_outside_batch_and_plan_is_refused(make_pool, make_plan, refused, pad_to):
    pool = make_pool()
    handles = [pool.open(), pool.open()]
    plan = make_plan(pool, 8, 64)
    for new in (2, [2, 3]):
        with refused(pool, ValueError, "step", plans=[plan]):
            pool.step(plan, handles, new, pad_to=pad_to)
