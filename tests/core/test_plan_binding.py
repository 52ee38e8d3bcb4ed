"""How a plan is made: its options, and the callers' arrays that it binds."""

import numpy as np
import pytest

from kvpool import Group

GROUPS = [Group.full(), Group.window(6, columns=2), Group.state(4)]


def some(*shape):
    return np.full(shape, -9, np.int32)


def test_bound_arrays_receive_what_the_step_writes_and_are_kept_alive(make_pool, make_plan):
    pool, lens = make_pool(), some(2)
    plan = make_plan(pool, 2, 8, table_width=4, out={"block_tables": some(2, 4)})
    plan.bind(seq_lens=lens)
    pool.step(plan, [pool.open(), pool.open()], [5, 1])
    assert plan.block_tables.tolist() == [[1, 2, 0, 0], [3, 0, 0, 0]]
    assert lens.tolist() == [5, 1] and np.shares_memory(plan.seq_lens, lens)


def test_each_group_receives_the_array_that_was_bound_for_it(make_pool, make_plan):
    pool, rows = make_pool(groups=GROUPS), some(2)
    tables, slots, lens = some(2, 4, 2), some(16), [some(2), some(2), some(2)]
    plan = make_plan(pool, 2, 8, formats=("block_tables", "seq_lens", "slot_mapping", "slot_ids"), table_width=4,
                     out={"block_tables": [None, tables, None], "slot_ids": rows})  # fmt: skip
    plan.bind(seq_lens=lens, slot_mapping=(None, slots, None))
    handles = [pool.open(), pool.open()]
    pool.step(plan, handles, [5, 1])
    full, window, _state = plan.groups
    assert full.block_tables[:, :2, 0].tolist() == [[1, 2], [3, 0]]  # its own
    assert tables[:, :2].tolist() == [[[4, 5], [6, 7]], [[8, 9], [0, 0]]] and not tables[:, 2:].any()
    assert full.slot_mapping.tolist() == [[4, 5, 6, 7, 8, 12]]
    assert slots.tolist() == [16, 17, 18, 19, 24, 32, 20, 21, 22, 23, 28, 36, *[-9] * 4]
    assert [array.tolist() for array in lens] == [[5, 1]] * 3 and rows.tolist() == [0, 1]
    assert np.shares_memory(window.block_tables, tables)
    pool.done(plan)
    plan.bind(seq_lens=[None, some(2), None])
    pool.step(plan, handles, 1)
    assert [part.dirty_rows.tolist() for part in (full, window)] == [[0, 1], [0, 1]]
    assert (lens[0].tolist(), lens[1].tolist(), window.kv_lens.tolist()) == ([6, 2], [5, 1], [6, 2])


def good():
    return np.zeros((2, 4), np.int32)


def read_only():
    array = good()
    array.flags.writeable = False
    return array


BAD_ARRAYS = {
    "float": (TypeError, lambda: np.zeros((2, 4), np.float32)),
    "int64": (TypeError, lambda: np.zeros((2, 4), np.int64)),
    "uint32": (TypeError, lambda: np.zeros((2, 4), np.uint32)),
    "object": (TypeError, lambda: np.zeros((2, 4), object)),
    "not an array": (TypeError, lambda: [[0] * 4] * 2),
    "None": (TypeError, lambda: None),
    "byte swapped": (ValueError, lambda: good().astype(">i4")),
    "one dimension": (ValueError, lambda: np.zeros(8, np.int32)),
    "no dimension": (ValueError, lambda: np.array(0, np.int32)),
    "three dimensions": (ValueError, lambda: np.zeros((1, 2, 4), np.int32)),
    "too many rows": (ValueError, lambda: np.zeros((3, 4), np.int32)),
    "too few rows": (ValueError, lambda: np.zeros((1, 4), np.int32)),
    "too narrow": (ValueError, lambda: np.zeros((2, 3), np.int32)),
    "too wide": (ValueError, lambda: np.zeros((2, 5), np.int32)),
    "strided rows": (ValueError, lambda: np.zeros((4, 4), np.int32)[::2]),
    "strided columns": (ValueError, lambda: np.zeros((2, 8), np.int32)[:, ::2]),
    "reversed": (ValueError, lambda: good()[::-1]),
    "Fortran order": (ValueError, lambda: np.zeros((2, 4), np.int32, order="F")),
    "broadcast": (ValueError, lambda: np.broadcast_to(np.zeros(4, np.int32), (2, 4))),
    "read only": (ValueError, read_only),
}


BAD_OF_GROUPS = {
    "one array for all": (TypeError, lambda: some(2, 4, 2)),
    "none": (TypeError, lambda: None),
    "a dict": (TypeError, lambda: {1: some(2, 4, 2)}),
    "one too few": (TypeError, lambda: [None, some(2, 4, 2)]),
    "one too many": (TypeError, lambda: [None, some(2, 4, 2), None, None]),
    "no array": (TypeError, lambda: [None, 3, None]),
    "int64": (TypeError, lambda: [None, np.zeros((2, 4, 2), np.int64), None]),
    "without columns": (ValueError, lambda: [None, some(2, 4), None]),
    "too wide": (ValueError, lambda: [None, some(2, 5, 2), None]),
    "of states": (ValueError, lambda: [None, None, some(2, 4)]),
}


@pytest.mark.parametrize(
    ("groups", "case"), [*((None, case) for case in BAD_ARRAYS), *((GROUPS, case) for case in BAD_OF_GROUPS)]
)
def test_arrays_that_do_not_fit_are_refused_and_none_is_bound(make_pool, make_plan, refused, groups, case):
    pool = make_pool(groups=groups)
    plan = make_plan(pool, 2, 8, table_width=4)
    pool.step(plan, [pool.open()], 5)
    pool.done(plan)
    exception, make_arrays = (BAD_OF_GROUPS if groups else BAD_ARRAYS)[case]
    bound = plan.groups[0].kv_lens, plan.groups[0].block_tables
    lens = [some(2), None, None] if groups else some(2)
    with refused(pool, exception, "bind", "block_tables", plans=[plan]):
        plan.bind(seq_lens=lens, block_tables=make_arrays())
    assert plan.groups[0].kv_lens is bound[0] and plan.groups[0].block_tables is bound[1]
    with refused(pool, exception, "Plan", "block_tables"):
        make_plan(pool, 2, 8, table_width=4, out={"block_tables": make_arrays()})


def test_arrays_that_overlap_are_refused(make_pool, make_plan, refused):
    pool, memory = make_pool(), np.zeros(40, np.int32)
    plan = make_plan(pool, 4, 4, table_width=4)
    plan.bind(seq_lens=memory[:4])
    for arrays in (
        {"slot_mapping": memory[3:7]},
        {"block_tables": memory[16:32].reshape(4, 4), "slot_mapping": memory[30:34]},
    ):
        with refused(pool, ValueError, "bind", "overlaps", plans=[plan]):
            plan.bind(**arrays)
    with refused(pool, ValueError, "Plan"):
        make_plan(pool, 4, 4, out={"seq_lens": memory[:4], "slot_mapping": memory[:4]})
    plan.bind(slot_mapping=memory[4:8], block_tables=memory[8:24].reshape(4, 4))
    pool.step(plan, [pool.open()], 1)
    assert memory[[0, 4, 8]].tolist() == [1, 4, 1]
    own = make_plan(pool, 4, 4)
    pool.step(own, [pool.open() for _ in range(4)], 1)
    pool.rollback(own)
    with refused(pool, ValueError, "bind", "overlaps", plans=[own]):
        own.bind(slot_mapping=own.seq_lens)


def test_arrays_of_two_groups_that_overlap_are_refused(make_pool, make_plan, refused):
    pool, memory = make_pool(groups=GROUPS), some(16)
    plan = make_plan(pool, 2, 8)
    plan.bind(seq_lens=[memory[:2], None, None])
    with refused(pool, ValueError, "bind", "overlaps", plans=[plan]):
        plan.bind(seq_lens=[None, memory[1:3], None])
    with refused(pool, ValueError, "bind", "overlaps", plans=[plan]):
        plan.bind(slot_mapping=[memory[2:10], None, None], seq_lens=[None, None, memory[9:11]])
    plan.bind(seq_lens=[None, memory[2:4], memory[4:6]])
    pool.step(plan, [pool.open(), pool.open()], [2, 3])
    assert memory[:6].tolist() == [2, 3] * 3


@pytest.mark.parametrize("name", ["nonsense", "indices", "copies", "served"])
def test_bind_of_an_array_that_the_plan_does_not_have_is_refused(make_pool, make_plan, refused, name):
    pool = make_pool()
    with refused(pool, ValueError, "bind", name):
        make_plan(pool, 2, 4, table_width=4).bind(**{name: good()})
    states = make_pool(groups=[Group.state(4)])
    with refused(states, ValueError, "bind", "block_tables"):
        make_plan(states, 2, 4, formats="block_tables").bind(block_tables=good())


def show_all(array):
    return array


@pytest.mark.parametrize("show", [show_all, lambda array: array[:2], lambda array: np.asarray(memoryview(array))[:2]])
@pytest.mark.parametrize("shape", [(1, 1), (512, 512)])
def test_array_cannot_be_resized_while_a_plan_has_bound_it(core, shape, show):
    """With ``refcheck=False`` NumPy does it behind a held buffer; a plan would write to memory of somebody else."""
    pool = core.Pool(16, 4, max_seqs=4, seed=1)
    owner, handle = np.zeros((2, 4), np.int32), pool.open(4)
    plan = core.Plan(pool, 2, 8, table_width=4, out={"block_tables": show(owner)})
    plan.bind(seq_lens=some(2))
    with pytest.raises(ValueError, match="cannot resize"):
        owner.resize(shape, refcheck=False)
    pool.step(plan, [handle], 0)
    pool.done(plan)
    assert owner[0, 0] == 1
    plan.bind(block_tables=(again := good()))
    owner.resize(shape, refcheck=False)
    pool.step(plan, [handle], 0)
    assert again[0, 0] == 1


def test_bound_array_that_gets_another_shape_is_written_as_before(make_pool, make_plan):
    pool, array = make_pool(), good()
    plan = make_plan(pool, 2, 8, table_width=4, out={"block_tables": array})
    array.shape = 4, 2
    pool.step(plan, [pool.open(), pool.open()], [5, 1])
    assert plan.block_tables.tolist() == [[1, 2, 0, 0], [3, 0, 0, 0]] and array.ravel().tolist()[:5] == [1, 2, 0, 0, 3]


# --- options ----------------------------------------------------------------------------------------------

BAD_PLANS = {
    "no rows": (ValueError, {"max_rows": 0}, 0),
    "negative rows": (ValueError, {"max_rows": -1}, -1),
    "huge rows": (ValueError, {"max_rows": 2**63}, 2**63),
    "rows float": (TypeError, {"max_rows": 2.0}, 2.0),
    "rows bool": (TypeError, {"max_rows": True}, True),
    "rows None": (TypeError, {"max_rows": None}, None),
    "negative tokens": (ValueError, {"max_tokens": -1}, -1),
    "tokens str": (TypeError, {"max_tokens": "8"}, "8"),
    "table_width 0": (ValueError, {"table_width": 0}, 0),
    "table_width float": (TypeError, {"table_width": 1.5}, 1.5),
    **{
        f"format {name!r}": (ValueError, {"formats": (name,)}, repr(name))
        for name in ("block_table", "PLAN", "block_tables ", "", "dirty_rows")
    },
    "format not a str": ((TypeError, ValueError), {"formats": (3,)}, 3),
    "format unhashable": ((TypeError, ValueError), {"formats": ([],)}, None),
    "formats None": (TypeError, {"formats": None}, None),
    "other dtype": ((TypeError, ValueError), {"dtype": "int16"}, "int16"),
    "float dtype": ((TypeError, ValueError), {"dtype": "float32"}, "float32"),
    "unknown dtype": ((TypeError, ValueError), {"dtype": "nonsense"}, "nonsense"),
    "dtype not a str": ((TypeError, ValueError), {"dtype": 3.5}, None),
    "unknown dtype of an array": ((TypeError, ValueError), {"dtype": {"seq_lens": "nonsense"}}, "nonsense"),
    "dtype of an unknown array": (ValueError, {"dtype": {"tables": "int32"}}, "tables"),
    "pad of an unknown array": (ValueError, {"pad": {"tables": 0}}, "tables"),
    "pad float": (TypeError, {"pad": {"slot_mapping": 0.5}}, 0.5),
    "pad bool": (TypeError, {"pad": {"slot_mapping": True}}, True),
    "pad beyond int32": (ValueError, {"pad": {"slot_mapping": 2**31}}, 2**31),
    "pad not a dict": (TypeError, {"pad": 3}, None),
    "indptr beyond int32": (ValueError, {"max_rows": 2**12, "table_width": 2**19, "formats": "csr"}, 2**31),
    "out of an unknown array": (ValueError, {"out": {"tables": np.zeros(2, np.int32)}}, "tables"),
    "out not a dict": (TypeError, {"out": 3}, None),
}


@pytest.mark.parametrize("case", BAD_PLANS)
def test_plan_refuses_bad_options(core, make_pool, refused, case):
    pool = make_pool()
    exception, options, value = BAD_PLANS[case]
    with refused(pool, exception, "Plan", value):
        core.Plan(pool, **({"max_rows": 4} | options))


@pytest.mark.parametrize("not_a_pool", [None, 3, "pool", object()])
def test_plan_needs_a_pool(core, not_a_pool):
    with pytest.raises(TypeError):
        core.Plan(not_a_pool, 4)
