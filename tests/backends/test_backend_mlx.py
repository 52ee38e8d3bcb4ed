"""The MLX backend: the conformance kit by both routes, and what is particular to plain MLX: donation and copies."""

from dataclasses import replace
from functools import partial

import mlx.core as mx
import numpy as np
import pytest
from mlx_models import on_cpu

from kvpool.config import KVSpec
from kvpool.protocol import AttentionOptions, StepArrays
from kvpool.testing import conformance
from kvpool_backends.mlx import MLXBackend

SPEC = KVSpec(num_layers=2, num_kv_heads=2, head_dim=8, dtype="float32", block_size=4)
SLOTS = np.arange(4, 10, dtype=np.int32)  # of six tokens in blocks 1 and 2
# It returns no attention weights, and takes with kernels every layout that the kit tries.
OF_NO_ROUTE = {"attention_weights_are_returned", "scores_come_after_weights", "scores_out_is_filled_in_place"}
NOT_APPLICABLE = {
    "plain": OF_NO_ROUTE
    | {"a_row_has_the_same_bits_in_any_batch"}
    | {"shapes_in_one_arena_equal_dense_attention", "layers_of_one_group_may_differ"}
    | {"given_rows_are_used_and_nothing_between_them"},
    "kernels": OF_NO_ROUTE,
}


def plain(spec, num_blocks):
    return MLXBackend(spec, num_blocks, kernels=False)


@pytest.fixture(params=["kernels", "plain"])
def route(request):
    with on_cpu():
        yield request.param


@pytest.fixture
def make(route):
    return partial(MLXBackend, kernels=route == "kernels")


@pytest.mark.parametrize("case", conformance.CASES, ids=lambda case: case.__name__)
def test_mlx_backend_conforms(case, make, route):
    expected = "not applicable" if case.__name__ in NOT_APPLICABLE[route] else "passed"
    assert conformance.check_backend(make, [case]) == {case.__name__: expected}


def tokens(value, count=4):
    shape = (count, SPEC.num_kv_heads, SPEC.head_dim)
    return mx.full(shape, float(value)), mx.full(shape, -float(value))


def one_row(backend, block, length=4):
    """The arrays of a step that writes all `length` tokens of a sequence that lies in one block."""
    slots = np.arange(length, dtype=np.int32) + block * SPEC.block_size
    table, lens, sums = np.int32([[block]]), np.array([length]), np.array([0, length])
    return backend.prepare(StepArrays(table, lens, sums, slots))


def test_writes_after_settle_stay_in_place(make):
    backend = make(SPEC, 8)
    for step in range(5):
        for layer in range(SPEC.num_layers):
            arrays = one_row(backend, 1 + step)
            backend.write(arrays, layer, *tokens(step))
            mx.async_eval(backend.read(arrays, layer))
        assert backend.settle() == 0
    assert backend.pool_copies == 0


def test_step_that_leaves_out_the_last_layer_makes_the_next_one_wait(monkeypatch):
    """A write that does not wait for the reads of the step before copies the pool."""
    backend, events = plain(SPEC, 8), []
    real = backend._pool.wait
    monkeypatch.setattr(backend._pool, "wait", lambda: (events.append("wait"), real()))
    for layers in ((0, 1), (0,), (0,), (1, 0), (0, 1)):
        arrays = one_row(backend, 1)
        for layer in layers:
            events.append(layer)
            backend.write(arrays, layer, *tokens(1))
    # A step waits where it writes its last layer. One that does not is waited for when the next one begins.
    assert events == [0, 1, "wait", 0, "wait", 0, "wait", 1, "wait", 0, "wait", 0, 1, "wait"]


def test_compaction_stays_on_the_device_and_in_place(monkeypatch):
    backend = plain(SPEC, 8)
    for layer in range(SPEC.num_layers):
        k = mx.arange(8 * 16, dtype=mx.float32).reshape(8, 2, 8) + 1000 * layer
        backend.write(backend.prepare(StepArrays(slot_mapping=np.arange(8, 16))), layer, k, -k)
    backend.settle()
    for name in ("export_blocks", "import_blocks"):
        monkeypatch.setattr(backend, name, None)
    backend.compact([2, 3], [[[0, 3, 5], [0, 1, 7]], [[0, 1, 2], [1, 2, 6]]])
    assert backend.settle() == 0
    for layer, keep in enumerate(([[0, 0], [3, 1], [5, 7]], [[0, 1], [1, 2], [2, 6]])):
        due = np.arange(8 * 16, dtype=np.float32).reshape(8, 2, 8)[keep, [0, 1]] + 1000 * layer
        k, v = backend.gather(layer, [2, 3], 3)
        assert np.array_equal(k, due) and np.array_equal(v, -due)


def test_a_write_while_a_read_is_outstanding_is_counted_as_a_copy_and_said_once(caplog):
    backend = plain(SPEC, 8)
    arrays = one_row(backend, 1)
    backend.write(arrays, 0, *tokens(0))
    assert backend.settle() == 0 and not caplog.records
    for step in range(3):
        outstanding = backend.read(arrays, 0)  # built on the pool of now, not evaluated
        backend.write(arrays, 0, *tokens(step + 1))
        assert backend.settle() == 2  # K and V of layer 0 moved, layer 1 did not
        assert float(outstanding[0].min()) == float(outstanding[0].max()) == step
        del outstanding
    assert backend.pool_copies == 6
    (record,) = caplog.records
    assert record.levelname == "WARNING"
    assert "MLX has copied 2 of 4 pool arrays" in record.getMessage() and "not said again" in record.getMessage()


def test_copying_blocks_moves_their_tokens_and_not_the_pool(make):
    """Many blocks, so that a copy which writes while its reads still run would be found out."""
    backend, many = make(SPEC, 4001), 2000
    rng = np.random.default_rng(0)
    data = rng.integers(0, 256, (many, SPEC.block_nbytes), np.uint8)
    src, dst = np.arange(1, many + 1), rng.permutation(np.arange(many + 1, 2 * many + 1))
    backend.import_blocks(src, data)
    backend.settle()
    backend.copy_blocks(np.stack([src, dst, np.full(many, SPEC.block_size)], 1))
    assert backend.settle() == 0
    assert np.array_equal(backend.export_blocks(dst), data)


@pytest.mark.parametrize("evaluate_first", ["writer", "reader", "together"])
def test_blocks_may_be_rewritten_while_the_reads_of_their_last_owner_are_in_flight(evaluate_first):
    backend = plain(SPEC, 8)
    old = one_row(backend, 3)
    backend.write(old, 0, *tokens(5))
    reader = backend.read(old, 0)
    new = one_row(backend, 3)  # the same block, given to another sequence
    backend.write(new, 0, *tokens(9))
    writer = backend.read(new, 0)
    order = {"writer": [writer, reader], "reader": [reader, writer], "together": [[reader, writer]]}
    for arrays in order[evaluate_first]:
        mx.async_eval(arrays)
    for (k, v), value in ((reader, 5.0), (writer, 9.0)):
        assert np.array_equal(np.array(k), np.full((1, 2, 4, 8), value))
        assert np.array_equal(np.array(v), np.full((1, 2, 4, 8), -value))


def refuse(exception, call, function, *arguments, **options):
    with pytest.raises(exception) as caught:
        function(*arguments, **options)
    assert str(caught.value).startswith(f"[{call}] ")


def test_arguments_that_the_kit_does_not_try_are_refused_before_a_byte_changes(make):
    backend, k = make(SPEC, 4), tokens(1)[0]
    step = backend.prepare(StepArrays(slot_mapping=np.arange(4, dtype=np.int32)))
    before = backend.export_blocks(range(4))
    refuse(ValueError, "copy_blocks", backend.copy_blocks, np.int32([0, 1, 1]))
    refuse(TypeError, "import_blocks", backend.import_blocks, [1], before[:1].astype(np.int8))
    refuse(ValueError, "attend", backend.attend, step, 0, k, return_attn=True)
    assert np.array_equal(backend.export_blocks(range(4)), before)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_sinks_larger_than_the_type_of_the_queries_stay_finite(make, dtype):
    """MLX's own attention takes sinks in the type of the queries, and infinite ones give NaN."""
    largest = np.finfo(np.float32).max
    backend = make(replace(SPEC, dtype=dtype), 4)
    plan = StepArrays(np.array([[1, 2]], np.int32), np.array([6], np.int32), np.array([0, 6], np.int32), SLOTS)
    given = [mx.random.normal((6, heads, 8), key=mx.random.key(heads)) for heads in (4, 2, 2)]
    q, k, v = (x.astype(getattr(mx, dtype)) for x in given)
    backend.write(backend.prepare(plan), 0, k, v)
    without = np.array(backend.attend(backend.prepare(plan), 0, q).astype(mx.float32))
    options = AttentionOptions(sinks=np.array([largest, -largest, 70_000.0, -70_000.0]))
    out = np.array(backend.attend(backend.prepare(plan), 0, q, options=options).astype(mx.float32))
    assert not out[:, 0::2].any()
    np.testing.assert_allclose(out[:, 1::2], without[:, 1::2], atol=0.02)
