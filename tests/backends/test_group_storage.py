"""`GroupStorage`: bytes and places of layers, masks over tables with holes, and what it refuses.

The random engine of the conformance kit (test_conformance_faults.py) compares its results with dense attention.
"""

import re
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from kvpool import Group, Plan, Pool
from kvpool.group_storage import GroupStorage
from kvpool.protocol import AttentionOptions
from kvpool.sizing import StateArray
from kvpool.spec import KVSpec
from kvpool.testing.conformance_engines import engine, seen_by_rule
from kvpool.testing.dense import dense_attention
from kvpool_backends import load_backend
from kvpool_backends.cpu import CPUBackend
from kvpool_backends.numpy import NumpyBackend

WIDE = KVSpec(2, 4, 8, "float32", 4, layout="block")
NARROW = KVSpec(2, 2, 8, "float32", 8, layout="block")
STATE = [StateArray((3,), "float32")]


def two_groups(**options):
    groups = [Group.full(), Group.window(9, block_size=8, columns=2), Group.state(3)]
    return Pool(40, 4, max_seqs=4, groups=groups, **options)


# ---------------------------------------------------------------------- bytes and places


def test_shapes_of_one_arena_share_one_budget():
    with two_groups() as pool:
        storage = GroupStorage(NumpyBackend, pool, [WIDE, NARROW, STATE])
        assert WIDE.block_nbytes == NARROW.block_nbytes == storage.block_nbytes() == 2048
        assert storage.nbytes == 40 * 2048 + 3 * 12 and storage.num_blocks == (40,)
        assert repr(storage) == "<GroupStorage of 6 layers in 3 groups, arenas: 40 x 2048 bytes>"
        smaller = GroupStorage(NumpyBackend, pool, [WIDE, replace(NARROW, num_kv_heads=1, v_head_dim=5), STATE])
        assert smaller.block_nbytes() == 2048
        elsewhere = GroupStorage(NumpyBackend, pool, [WIDE, NARROW, None])  # somebody else keeps the states
        assert not elsewhere.states and elsewhere.nbytes == 40 * 2048


def test_arenas_of_one_shape_have_the_bytes_of_their_backends():
    groups = [Group.full(), Group.window(9, arena=1, num_blocks=12)]
    with Pool(40, 4, max_seqs=4, groups=groups) as pool:
        storage = GroupStorage(NumpyBackend, pool, [KVSpec(3, 2, 8, block_size=4), KVSpec(1, 1, 4, block_size=4)])
        assert [storage.block_nbytes(arena) for arena in (0, 1)] == [3 * 2 * 4 * 2 * 16, 4 * 2 * 8]
        assert storage.nbytes == 40 * 768 + 12 * 64


@pytest.mark.parametrize("factory", [NumpyBackend, CPUBackend])
def test_blocks_go_from_one_group_to_the_other_and_answers_stay_right(factory):
    run = engine(factory, [Group.full(), Group.window(11)], WIDE, NARROW, shared=True, seed=5)
    seen = [set(), set()]
    step = run.step

    def watched(handles, counts):
        is_done = step(handles, counts)
        for group in (0, 1):
            for handle in run.history:
                seen[group] |= set(run.pool.table(handle, group).ravel().tolist()) - {0}
        return is_done

    run.step = watched
    run.play(range(60))
    assert len(seen[0] & seen[1]) > 20, "hardly any block was in both groups"


def test_layers_that_share_keys_and_values_own_no_bytes_and_may_not_write():
    with two_groups() as pool:
        alone = GroupStorage(NumpyBackend, pool, [WIDE, NARROW, STATE])
        places = [(0, 0), None, (1, 3), (0, 0), (1, 3), (1, 0)]
        storage = GroupStorage(NumpyBackend, pool, [WIDE, NARROW, STATE], places)
        assert storage.nbytes == alone.nbytes
        plan = Plan(pool, 1, 8, backend=storage)
        pool.step(plan, [pool.open()], [5])
        step, rng = storage.prepare(plan), np.random.default_rng(1)
        for layer, heads in ((0, 4), (2, 2), (5, 2)):
            k, v = rng.standard_normal((2, 5, heads, 8), np.float32)
            storage.write(step, layer, k, v)
        q = rng.standard_normal((5, 4, 8), np.float32)
        for layer, source in ((3, 0), (4, 2)):
            assert np.array_equal(storage.attend(step, layer, q), storage.attend(step, source, q))
            with pytest.raises(ValueError, match=rf"\[write\] layer {layer} shares the keys and values of an earlier"):
                storage.write(step, layer, k, v)
        assert not np.array_equal(storage.attend(step, 5, q), storage.attend(step, 2, q))
        with pytest.raises(ValueError, match=r"\[attend\] layer 1 has no keys and values"):
            storage.attend(step, 1, q)


def test_example_of_the_docs_equals_dense_attention():
    page = (Path(__file__).parents[2] / "docs" / "backends.md").read_text()
    (text,) = re.findall(r"```python\n(from kvpool import Group.*?)```", page, re.DOTALL)
    namespace = {}
    exec(text, namespace)
    rng, pool, storage = np.random.default_rng(2), namespace["pool"], namespace["storage"]
    assert storage.block_nbytes() == 2 * 4 * 64 * 2 * 2 * 16, "the shapes do not have as many bytes"
    heads, handle, total = (4, 2, 4, 2, 2), pool.open(), 0
    given = [rng.standard_normal((2, 165, n, 64)).astype(np.float16).astype(np.float32) for n in heads]
    for new in (140, 1, 20, 1, 3):
        q = [rng.standard_normal((new, 4, 64), np.float32) for _ in heads]

        def project(layer, q=q, span=slice(total, total + new)):
            return q[layer], *given[layer][:, span]

        def recur(arrays, new=new):
            return [array + new for array in arrays]

        outputs, total = namespace["forward"]([handle], [new], project, recur), total + new
        for layer, out in enumerate(outputs):
            k, v = given[min(layer, 3)][:, :total]
            options = AttentionOptions(window=128) if layer % 2 or layer == 4 else None
            assert np.allclose(out, dense_attention(q[layer], k, v, None, options)[0], atol=1e-4), f"layer {layer}"
        (slot,) = pool.table(handle, 2)
        assert (storage.states[2].read([slot])[0] == total).all()


# ---------------------------------------------------------------------- masks over holes


@pytest.mark.parametrize("kind", [bool, float])
@pytest.mark.parametrize("heads", [(), (1,), (4,)])
@pytest.mark.parametrize("group", [Group.full(), Group.window(9), Group.window(9, keep=3), Group.chunk(8)], ids=str)
def test_masks_name_positions_whatever_the_group_holds(group, heads, kind):
    """A mask for chunks and decodes far behind the hole, beside dense attention with the rule of the group."""
    spec = KVSpec(1, 2, 8, "float32", 4)
    with Pool(60, 4, max_seqs=4, groups=[group]) as pool:
        storage = GroupStorage(NumpyBackend, pool, [spec])
        plan, rng = Plan(pool, 2, 32, backend=storage), np.random.default_rng(3)
        handles, total = [pool.open(), pool.open()], [0, 0]
        k, v = rng.standard_normal((2, 2, 60, 2, 8), np.float32)  # per row
        for new in ([11, 2], [7, 1], [1, 6], [5, 3], [6, 1]):
            pool.step(plan, handles, new)
            step = storage.prepare(plan)
            storage.copy_blocks(plan)
            spans = [slice(n, n + m) for n, m in zip(total, new, strict=True)]
            storage.write(step, 0, *(np.concatenate([x[row][span] for row, span in enumerate(spans)]) for x in (k, v)))
            q = rng.standard_normal((sum(new), 4, 8), np.float32)
            mask = rng.random((sum(new), *heads, 40)) > 0.3
            if kind is float:
                mask = np.where(mask, rng.standard_normal(mask.shape), -np.inf).astype(np.float32)
            out, begin = storage.attend(step, 0, q, options=AttentionOptions(mask=mask)), 0
            for row, span in enumerate(spans):
                mine, length = slice(begin, begin + new[row]), span.stop
                rule = seen_by_rule(group, span.start, length).reshape(new[row], *[1] * len(heads), length)
                part = mask[mine, ..., :length]
                part = part & rule if kind is bool else np.where(rule, part, -np.inf)
                right, _ = dense_attention(q[mine], k[row][:length], v[row][:length], None, AttentionOptions(mask=part))
                assert np.allclose(out[mine], right, atol=1e-5), f"row {row} of length {length}"
                begin, total[row] = begin + new[row], length
            pool.done(plan)
        if group.kind != "full":
            assert (pool.table(handles[0]) == 0).any(), "no block was let go"


def test_options_that_groups_cannot_have_are_refused():
    with Pool(60, 4, max_seqs=4, groups=[Group.window(9, keep=3)]) as pool:
        storage = GroupStorage(NumpyBackend, pool, [KVSpec(1, 2, 8, "float32", 4)])
        plan = Plan(pool, 1, 8, backend=storage)
        pool.step(plan, [pool.open()], [5])
        step, q = storage.prepare(plan), np.zeros((5, 2, 8), np.float32)
        for options, message in (
            (AttentionOptions(window=3), r"\[attend\] options have a window \(3\), the group is a window itself"),
            (AttentionOptions(alibi_slopes=np.ones(2)), r"\[attend\] alibi_slopes need distances"),
            (AttentionOptions(mask=np.ones((5, 4), bool)), r"\[attend\] mask has shape \[5, 4\], .*with C' > 4"),
            (AttentionOptions(mask=np.ones((4, 9), bool)), r"\[attend\] mask has shape \[4, 9\], it must be \[5, "),
        ):
            with pytest.raises(ValueError, match=message):
                storage.attend(step, 0, q, options=options)


# ---------------------------------------------------------------------- checkpoints of plans

FIRST, SECOND = [StateArray((70, 3), "float32"), StateArray((5,), "uint8")], [StateArray((9, 16), "float16")]


def found_again(factory, seed):
    """A prefix that is found has the states that its first sequence had there, in both state groups."""
    rng = np.random.default_rng(seed)
    print(f"seed {seed}")
    groups = [Group.full(), Group.state(6, blocks=2), Group.state(6, blocks=1)]
    with Pool(40, 4, max_seqs=3, groups=groups, prefix_cache=True) as pool:
        storage = GroupStorage(factory, pool, [replace(WIDE, num_layers=1, num_kv_heads=2), FIRST, SECOND])
        plan, tokens = Plan(pool, 1, 32, backend=storage), list(range(20))

        def run(handle, count):
            pool.step(plan, [handle], [count])
            storage.copy_blocks(plan)
            before = [storage.states[g].export_slots(np.maximum(plan.groups[g].state_src, 0)) for g in (1, 2)]
            after = [rng.integers(0, 256, data.shape, np.uint8) for data in before]
            for g, data in zip((1, 2), after, strict=True):
                storage.states[g].import_slots(plan.groups[g].state_dst, data)
            storage.save_checkpoints(plan)
            pool.done(plan)
            return before, after

        handle = pool.open(tokens, b"", cut=12)
        _, due = run(handle, 12)
        pool.prefix.commit(handle, tokens[:12])
        run(handle, 5)
        pool.close(handle)
        for g in (1, 2):
            storage.states[g].zero(range(6))
        handle = pool.open(tokens)
        assert pool.num_tokens(handle) == 12
        found, _ = run(handle, 1)
        return all(np.array_equal(x, y) for x, y in zip(found, due, strict=True))


@pytest.mark.parametrize("name", ["numpy", "cpu", "mlx"])
def test_plan_saves_and_loads_the_states_of_checkpoints(name):
    if name == "mlx":
        pytest.importorskip("mlx.core", reason="the backend of MLX needs mlx")
    assert found_again(load_backend(name), 21)


def test_checkpoints_of_another_size_are_refused():
    groups = [Group.full(), Group.state(6, blocks=3)]
    why = r"stored\[1\] has 845 bytes, a checkpoint of them takes 1 blocks, not 3"
    with Pool(40, 4, max_seqs=3, groups=groups, prefix_cache=True) as pool, pytest.raises(ValueError, match=why):
        GroupStorage(NumpyBackend, pool, [WIDE, FIRST])


# ---------------------------------------------------------------------- refusals


@pytest.mark.parametrize(
    ("stored", "layers", "error", "message"),
    [
        ([WIDE, NARROW], None, ValueError, r"stored has 2 entries, the pool has 3 groups"),
        ([WIDE, WIDE, STATE], None, ValueError, r"stored\[1\] has block_size 4, its group has 8"),
        ([WIDE, [], STATE], None, ValueError, r"stored\[1\] is empty"),
        ([WIDE, ["x"], STATE], None, TypeError, r"stored\[1\] must hold a KVSpec, got str"),
        ([WIDE, NARROW, NARROW], None, TypeError, r"stored\[2\] must be StateArrays"),
        ([WIDE, NARROW, []], None, TypeError, r"stored\[2\] must be StateArrays"),
        ([replace(WIDE, layout="NHD"), NARROW, STATE], None, ValueError, r"arena 0 holds 2 shapes in layout 'NHD'"),
        ([WIDE, NARROW, STATE], [(0, 2)], ValueError, r"layers\[0\] is \(0, 2\), no group holds such a layer"),
        ([WIDE, NARROW, STATE], [(0, 0), (2, 0)], ValueError, r"layers\[1\] is \(2, 0\), no group holds"),
    ],
)
def test_storage_that_does_not_fit_its_pool_is_refused(stored, layers, error, message):
    with two_groups() as pool, pytest.raises(error, match=r"\[GroupStorage\] " + message):
        GroupStorage(NumpyBackend, pool, stored, layers)


def test_plan_of_another_pool_is_refused():
    with two_groups() as pool, two_groups() as other:
        storage = GroupStorage(NumpyBackend, pool, [WIDE, NARROW, STATE])
        plan = Plan(other, 1, 8, formats=storage.required_formats)
        with pytest.raises(ValueError, match=r"\[Plan\] the backend is of another pool"):
            Plan(other, 1, 8, backend=storage)
        with pytest.raises(ValueError, match=r"\[prepare\] the plan is of another pool"):
            storage.prepare(plan)
        with pytest.raises(ValueError, match=r"\[copy_blocks\] the plan is of another pool"):
            storage.copy_blocks(plan)


def test_pools_without_groups_of_blocks_are_refused():
    with Pool(8, 4) as pool:
        assert "1 groups" in repr(GroupStorage(NumpyBackend, pool, [WIDE]))
    with Pool(8, 4, groups=[Group.state(3)]) as pool, pytest.raises(ValueError, match="state groups only"):
        GroupStorage(NumpyBackend, pool, [STATE])
    with pytest.raises(TypeError, match=r"\[GroupStorage\] pool must be a Pool, got int"):
        GroupStorage(NumpyBackend, 3, [WIDE])


BLOCK = np.zeros((1, 2048), np.uint8)
REFUSED = [
    (lambda s: s.zero([40]), IndexError, r"\[zero\] block 40 is outside the arena, the limit is 40"),
    (lambda s: s.zero([0.5]), TypeError, r"\[zero\] block ids must be integers, got float64"),
    (lambda s: s.zero([[1]]), ValueError, r"\[zero\] blocks must have shape \[n\]"),
    (lambda s: s.zero([1], arena=1), ValueError, r"\[zero\] arena is 1, there are 1 arenas of blocks"),
    (lambda s: s.import_blocks([1], BLOCK[:, :9]), ValueError, r"data must have shape \[1, 2048\], got \[1, 9\]"),
    (lambda s: s.import_blocks([1], BLOCK.astype(np.int8)), TypeError, r"\[import_blocks\] data must be uint8"),
    (lambda s: s.import_blocks([1, 1], BLOCK[[0, 0]]), ValueError, r"\[import_blocks\] a block is named twice"),
    (lambda s: s.save_states(0, [1], [[1]]), ValueError, r"\[save_states\] group 0 is not a state group"),
    (lambda s: s.save_states(2, [1], [[1, 2]]), ValueError, r"\[save_states\] blocks must have shape \[1, 1\]"),
    (lambda s: s.save_states(2, [1, 2], [[4], [4]]), ValueError, r"\[import_blocks\] a block is named twice"),
    (lambda s: s.load_states(2, [[4]], [1, 2]), ValueError, r"\[load_states\] blocks must have shape \[2, 1\]"),
    (lambda s: s.load_states(2, [[4]], [3]), IndexError, r"\[import_slots\] slot 3 is outside the group"),
    (lambda s: s.attend(None, 6, BLOCK), IndexError, r"\[attend\] layer is 6, the model has 6 layers"),
    (lambda s: s.read(None, True), TypeError, r"\[read\] layer must be an int, got bool"),
]


@pytest.mark.parametrize("number", range(len(REFUSED)))
def test_wrong_argument_is_refused_before_a_byte_changes(number):
    call, error, message = REFUSED[number]
    with two_groups() as pool:
        storage = GroupStorage(NumpyBackend, pool, [WIDE, NARROW, STATE])
        rng = np.random.default_rng(0)
        blocks, states = rng.integers(0, 256, (40, 2048), np.uint8), rng.integers(0, 256, (3, 12), np.uint8)
        storage.import_blocks(np.arange(40), blocks)
        storage.states[2].import_slots(range(3), states)
        with pytest.raises(error, match=message):
            call(storage)
        assert np.array_equal(storage.export_blocks(np.arange(40)), blocks)
        assert np.array_equal(storage.states[2].export_slots(range(3)), states)


@pytest.mark.parametrize("name", ["numpy", "cpu", "mlx"])
def test_memory_that_cannot_hold_the_blocks_is_refused(name):
    if name == "mlx":
        pytest.importorskip("mlx.core")
    factory = load_backend(name)
    rows = np.zeros((3, WIDE.block_nbytes + 16), np.uint8)
    for spec, storage, error, message in (
        (WIDE, rows, ValueError, r"storage must have shape \[3, 2048\]"),
        (WIDE, rows[:2, :-16], ValueError, r"storage must have shape \[3, 2048\]"),
        (WIDE, np.zeros((2048, 3), np.uint8).T, ValueError, r"storage must have shape \[3, 2048\], contiguous rows"),
        (WIDE, rows.view(np.int8)[:, :-16], TypeError, r"storage must be a uint8 numpy array, got int8"),
        (WIDE, [1], TypeError, r"storage must be a uint8 numpy array, got list"),
        (WIDE, rows[:, 2:-14], ValueError, r"rows of storage must begin at multiples of 4 bytes"),
        (WIDE, np.zeros((3, 2050), np.uint8)[:, :2048], ValueError, r"rows of storage must begin at multiples of 4 b"),
        (replace(WIDE, layout="NHD"), rows[:, :-16], ValueError, r"storage is for layout 'block', the spec has 'NHD'"),
    ):
        with pytest.raises(error, match=message):
            factory(spec, 3, storage=storage)
    rows.flags.writeable = False
    with pytest.raises(ValueError, match="be writable"):
        factory(WIDE, 3, storage=rows[:, :-16])
