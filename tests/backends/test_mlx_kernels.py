"""The kernel route: the pool stays where MLX has put it, whatever is kept or pipelined, and costs no copy."""

from concurrent.futures import ThreadPoolExecutor

import mlx.core as mx
import numpy as np
import pytest
from mlx_models import computing_on_cpu

from kvpool.config import KVSpec
from kvpool.errors import BackendUnavailable
from kvpool.protocol import StepArrays
from kvpool_backends.mlx import MLXBackend, kernels_refusal

SPEC = KVSpec(num_layers=2, num_kv_heads=2, head_dim=8, dtype="float32", block_size=4)
NUM_BLOCKS, BLOCKS = 5001, 16  # the pool is far larger than all that the steps below compute


cpu = pytest.fixture(computing_on_cpu, autouse=True)


def kernels(spec=SPEC, num_blocks=NUM_BLOCKS):
    return MLXBackend(spec, num_blocks, kernels=True)


def step_of(length):
    """A plan that writes token `length` - 1 of one sequence, which lies in blocks 1 to BLOCKS."""
    position = length - 1
    table = np.arange(1, BLOCKS + 1, dtype=np.int32)[None]
    slot = table[0, position // SPEC.block_size] * SPEC.block_size + position % SPEC.block_size
    return StepArrays(table, np.int32([length]), np.int32([0, 1]), np.int32([slot]))


def lengths(num_steps):
    return [1 + step % (BLOCKS * SPEC.block_size) for step in range(num_steps)]


def key(step):
    return mx.full((1, 2, 8), float(step))


# ----------------------------------------------------------------------------------------- where the pool lies


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
def test_the_pool_never_moves_whatever_is_kept_and_pipelined(dtype):
    """1,000 steps; results, views of them and of the pool are alive, what is built on them is queued by async_eval."""
    spec = KVSpec(2, 2, 8, dtype, block_size=4)
    backend = kernels(spec)
    addresses = backend._pool.addresses()
    assert addresses == backend.store.addresses()
    forced = [array[1:3] for array in backend._pool.arrays]
    forced += [array.reshape(-1) for array in backend._pool.arrays]  # not evaluated
    mx.eval(forced[: len(forced) // 2])
    kept, queued = [], key(0)
    for step, length in enumerate(lengths(1000)):
        plan = step_of(length)
        for layer in range(spec.num_layers):
            k = (key(step) + 0 * queued.sum()).astype(backend.dtype)  # depends on the step before, not evaluated
            backend.write(backend.prepare(plan), layer, k, k)
            out = backend.attend(backend.prepare(plan), layer, mx.zeros((1, 4, 8), backend.dtype))
            kept.append(out[:, 1:3])
        queued = out + 1
        mx.async_eval(queued)
        if step % 100 == 0:
            assert backend._pool.addresses() == addresses
    mx.eval(kept, forced)
    assert backend._pool.addresses() == addresses == backend.store.addresses()
    assert backend.settle() == backend.pool_copies == 0


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
@pytest.mark.parametrize("layout", ["NHD", "HND"])
def test_the_pool_begins_at_a_cache_line(dtype, layout):
    for num_blocks in (3, 129):
        backend = kernels(KVSpec(2, 3, 20, dtype, block_size=4, layout=layout), num_blocks)
        assert [address % 64 for address in backend._pool.addresses()] == [0] * len(backend._pool.arrays)


def test_results_are_values_that_later_writes_do_not_change():
    backend = kernels()
    k = key(1)
    backend.write(backend.prepare(step_of(1)), 0, k, k)
    early = backend.attend(backend.prepare(step_of(1)), 0, mx.zeros((1, 2, 8)))
    built = early * 2  # on the result, not evaluated
    gathered, _ = backend.gather(0, [1], 1)
    read, _ = backend.read(backend.prepare(step_of(1)), 0)
    backend.write(backend.prepare(step_of(1)), 0, key(9), key(9))
    for array, value in ((early, 1), (built, 2), (gathered, 1), (read, 1)):
        assert np.array_equal(np.array(array), np.full(array.shape, value, np.float32))


# ----------------------------------------------------------------------------------- MLX's transformations


def test_a_call_inside_compile_or_vmap_is_refused_and_changes_nothing():
    backend = kernels()
    before = backend.export_blocks(range(4))

    def write(x):
        backend.write(backend.prepare(step_of(1)), 0, x, x)
        return x

    def attend(x):
        return backend.attend(backend.prepare(step_of(1)), 0, x)

    for function, call in ((write, "write"), (attend, "attend")):
        with pytest.raises(RuntimeError, match=rf"\[{call}\] the arrays have no content yet.*mx\.compile"):
            mx.compile(function)(mx.ones((1, 2, 8)))
    with pytest.raises(RuntimeError, match=r"\[write\] the arrays have no content yet.*mx\.vmap"):
        mx.vmap(write)(mx.ones((3, 1, 2, 8)))
    assert np.array_equal(backend.export_blocks(range(4)), before)


def test_second_thread_continues_from_results_of_the_first():
    backend = kernels()
    for layer in range(2):
        backend.write(backend.prepare(step_of(1)), layer, key(3), key(3))
    out = backend.attend(backend.prepare(step_of(1)), 0, mx.zeros((1, 2, 8)))

    def go_on():
        with mx.stream(mx.new_stream(mx.cpu)):
            backend.write(backend.prepare(step_of(2)), 0, key(5), key(5))
            return np.array(backend.attend(backend.prepare(step_of(2)), 0, mx.zeros((1, 2, 8))) + out)

    with ThreadPoolExecutor(1) as threads:
        assert np.array_equal(threads.submit(go_on).result(), np.full((1, 2, 8), 7, np.float32))


# --------------------------------------------------------------------------------------------- the choice


def test_the_route_is_chosen_by_device_and_kernels_and_can_be_forced(monkeypatch):
    assert kernels_refusal() is None
    assert MLXBackend(SPEC, 4).route == "kernels" and "route='kernels'" in repr(MLXBackend(SPEC, 4))
    plain = MLXBackend(SPEC, 4, kernels=False)
    assert plain.route == "plain" and "route='plain'" in repr(plain)
    assert (MLXBackend(SPEC, 4).capabilities.lazy, plain.capabilities.lazy) == (False, True)
    assert MLXBackend(SPEC, 4).capabilities.batch_invariant and not plain.capabilities.batch_invariant
    assert MLXBackend(KVSpec(1, 1, 8, layout="HND"), 4).capabilities.layouts > plain.capabilities.layouts
    monkeypatch.setitem(__import__("sys").modules, "kvpool_backends.cpu._kernels", None)
    assert MLXBackend(SPEC, 4).route == "plain"
    with pytest.raises(BackendUnavailable, match=r"\[MLXBackend\] kernels=True, but the CPU kernels"):
        MLXBackend(SPEC, 4, kernels=True)


def test_on_a_gpu_without_metal_the_plain_route_is_taken(monkeypatch):
    monkeypatch.setattr(mx, "default_device", lambda: mx.gpu)
    monkeypatch.setattr(mx.metal, "is_available", lambda: False)
    assert MLXBackend(SPEC, 4).route == "plain"
    with pytest.raises(BackendUnavailable, match="MLX computes on"):
        MLXBackend(SPEC, 4, kernels=True)


def test_read_of_more_tokens_than_its_blocks_hold_asks_for_no_memory():
    backend = kernels(num_blocks=8)
    step = backend.prepare(StepArrays(np.int32([[1, 2]]), np.int32([2**31 - 1]), np.int32([0, 1]), np.int32([-1])))
    with pytest.raises(ValueError, match=r"\[read\] a context has 2147483647 tokens, 2 blocks hold 8"):
        backend.read(step, 0)
