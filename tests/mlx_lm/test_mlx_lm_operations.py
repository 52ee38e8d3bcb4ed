"""What the cache objects promise mlx-lm: one log for all layers, pure reads, forks, quiet finalizers."""

import copy
import gc
import pickle
import weakref
from types import SimpleNamespace

import mlx.core as mx
import numpy as np
import pytest
from mlx_models import on_cpu

from kvpool import Pool
from kvpool.adapters.mlx_lm import PagedKVCache, install
from kvpool.adapters.mlx_lm.cache import Batch

HEADS, DIM = 2, 8


@pytest.fixture
def kv(model):
    return install(model, 100, block_size=4)


def forward(cache, columns, order=None, rows=1):
    """One pass without a model: layer l stores ``100 * l + column``. Returns what each layer got back."""
    layers = range(len(cache)) if order is None else order
    got = {}
    for layer in layers:
        values = mx.array(columns, mx.float32) + 100 * layer
        keys = mx.broadcast_to(values[None, None, :, None], (rows, HEADS, len(columns), DIM))
        k, v = cache[layer].update_and_fetch(keys, -keys)
        got[layer] = -np.array(v)[:, 0, :, 0]  # 0 past the end of a row, where k holds anything
        assert rows > 1 or np.array_equal(np.array(k)[:, 0, :, 0], got[layer])
    return got


def test_masks_and_offsets_may_be_asked_for_in_any_number_and_order(kv):
    cache = kv.make_cache()
    assert all(cache), "caches are truthy, also if they are empty"
    forward(cache, [1, 2, 3])
    before = kv.pool.fingerprint()
    for layer in (2, 0, 1, 2):
        for _ in range(3):
            assert cache[layer].make_mask(4) == "causal"
            assert cache[layer].make_mask(1) is None
            assert cache[layer].make_mask(4, return_array=True).shape == (1, 1, 4, 7)
            assert cache[layer].offset == 3
    assert kv.pool.fingerprint() == before


def test_a_layer_has_its_own_window_even_if_the_model_names_none(kv):
    kv.passes.windows = (None, 3, None)
    cache = kv.make_cache()
    forward(cache, [1, 2, 3])
    assert cache[0].make_mask(1) is None
    assert np.array(cache[1].make_mask(1))[0, 0].tolist() == [[0, 1, 1, 1]]
    assert np.array(cache[1].make_mask(1, window_size=2))[0, 0].tolist() == [[0, 0, 1, 1]]
    assert np.array(cache[1].make_mask(1, window_size=9))[0, 0].tolist() == [[0, 1, 1, 1]]


@pytest.mark.parametrize(("kernels", "waits"), [(False, ["wait"]), (True, [])])
def test_only_the_last_scatter_of_a_pass_waits_for_the_pass_before(model, monkeypatch, kernels, waits):
    """So a pass is built while the one before runs. Writes in place wait for nothing."""
    with on_cpu():
        kv = install(model, 20, block_size=4, kernels=kernels)
    calls, write, cache = [], kv.backend.write, kv.make_cache()
    monkeypatch.setattr(kv.backend, "write", lambda step, layer, *kv: calls.append(layer) or write(step, layer, *kv))
    monkeypatch.setattr(mx, "synchronize", lambda *_: calls.append("wait"))
    for _ in range(3):
        forward(cache, [1])
    assert calls == 3 * [0, 1, 2, *waits]
    assert kv.summary().writes.startswith("in place" if kernels else "scattered: a step begins when the one before")


def test_keys_and_values_repeat_the_last_update(kv):
    cache = kv.make_cache()
    with pytest.raises(RuntimeError, match=r"\[keys_and_values\]"):
        cache[0].keys_and_values()
    got = forward(cache, [1, 2, 3])
    assert np.array_equal(np.array(cache[1].keys_and_values()[0])[:, 0, :, 0], got[1])
    for c in cache:
        c.trim(1)
    with pytest.raises(RuntimeError, match=r"\[keys_and_values\]"):
        cache[1].keys_and_values()


# ------------------------------------------------------------------------------------------- misuse is told


def test_layers_with_different_requests_raise(kv):
    cache = kv.make_cache()
    forward(cache, [1, 2, 3])
    cache[0].trim(1)
    with pytest.raises(RuntimeError, match=r"\[forward\] a layer asks"):
        forward(cache, [4], order=[1])
    with pytest.raises(RuntimeError, match=r"\[trim\] a layer asks"):
        cache[1].trim(2)
    with pytest.raises(RuntimeError, match=r"\[trim\] 2 of 3 layers"):
        cache[0].trim(1)
    with pytest.raises(RuntimeError, match=r"\[deepcopy\] 2 of 3 layers"):
        copy.deepcopy(cache)
    with pytest.raises(RuntimeError, match=r"\[extend\] 2 of 3 layers"):
        kv.make_cache()[0].extend(cache[0])
    assert cache[1].trim(1) == cache[2].trim(1) == 1  # the right calls still work
    assert forward(cache, [4])[2].tolist() == [[201, 202, 204]]


@pytest.mark.parametrize(
    ("exception", "call"),
    [
        (ValueError, lambda c: c.trim(-5)),
        (TypeError, lambda c: c.trim(1.0)),
        (IndexError, lambda c: c.filter([1])),
        (IndexError, lambda c: c.extract(-2)),
        (ValueError, lambda c: c.filter([0, 0])),
        (ValueError, lambda c: c.prepare(lengths=[1, 2], right_padding=[0, 1])),
        (ValueError, lambda c: c.prepare(right_padding=[1])),
        (ValueError, lambda c: c.prepare(left_padding=[1])),
        (ValueError, lambda c: c.update_and_fetch(*[mx.zeros((2, HEADS, 1, DIM))] * 2)),
        (TypeError, pickle.dumps),
        (TypeError, copy.copy),
    ],
)
def test_wrong_calls_are_refused_and_change_nothing(kv, exception, call):
    cache = kv.make_cache()
    forward(cache, [1, 2, 3])
    before = kv.pool.fingerprint()
    with pytest.raises(exception):
        call(cache[0])
    assert kv.pool.fingerprint() == before
    assert forward(cache, [4])[0].tolist() == [[1, 2, 3, 4]]


def test_caches_of_two_pools_do_not_mix(model, kv):
    cache, stranger = kv.make_cache(), install(model, 20, block_size=4).make_cache()
    with pytest.raises(ValueError, match=r"\[extend\] .* different pools"):
        cache[0].extend(stranger[0])
    with pytest.raises(ValueError, match=r"\[extend\] .* different pools"):
        PagedKVCache.merge([cache[0], stranger[0]])


# ------------------------------------------------------------------------- interrupted passes, dropped caches


@pytest.mark.parametrize("in_order", [False, True])
@pytest.mark.parametrize("shared_tail", [False, True])
def test_an_interrupted_pass_can_be_taken_back(model, in_order, shared_tail):
    kv = install(model, pool=Pool(50, 4, in_order=in_order))
    cache = kv.make_cache()
    forward(cache, [1, 2, 3, 4, 5, 6])
    other = copy.deepcopy(cache) if shared_tail else None
    lengths = kv.pool.stats().tokens
    forward(cache, [7, 8, 9], order=[2, 0])  # layer 1 never ran
    with pytest.raises(RuntimeError, match=r"kv\.recover"):
        forward(cache, [7], order=[0])
    with pytest.raises(RuntimeError, match=r"kv\.recover"):
        forward(kv.make_cache(), [7])
    assert kv.recover() and not kv.recover()
    assert kv.pool.stats().tokens == lengths and kv.pool.stats().pending == 0
    assert [c.offset for c in cache] == [6, 6, 6]
    got = forward(cache, [70, 80])
    for layer in range(3):
        assert got[layer].tolist() == [[100 * layer + x for x in (1, 2, 3, 4, 5, 6, 70, 80)]]
    if other is not None:
        assert forward(other, [9])[1].tolist() == [[101, 102, 103, 104, 105, 106, 109]]
    kv.pool.check()


def test_an_interrupted_pass_of_a_dropped_cache_is_taken_back_by_itself(kv):
    cache, survivor = kv.make_cache(), kv.make_cache()
    forward(cache, [1, 2, 3], order=[0])
    del cache
    assert forward(survivor, [1, 2])[0].tolist() == [[1, 2]]
    assert kv.summary().blocks_used == 1 and kv.pool.stats().pending == 0
    kv.pool.check()


def test_finalizers_note_the_close_and_do_nothing_else():
    class Recorder:
        def __init__(self):
            self.calls = []

        def __getattr__(self, name):
            return lambda *arguments: self.calls.append((name, *arguments))

    pool = Recorder()
    layout = SimpleNamespace(held=())
    passes = SimpleNamespace(pool=pool, layout=layout, namespace=b"", batches=weakref.WeakValueDictionary())
    batch = Batch(passes, [11, -1, 12], [4, 0, 5], False)
    del batch
    assert pool.calls == [("defer_close", 11), ("defer_close", 12)]


def test_dropping_a_cache_after_the_pool_was_shut_down_is_silent(kv, recwarn):
    cache = kv.make_cache()
    forward(cache, [1])
    kv.pool.shutdown()
    del cache
    gc.collect()
    assert not recwarn.list


def test_empty_caches_take_no_sequence_of_the_pool(model):
    kv = install(model, 100, block_size=4, max_seqs=16)
    waiting = [kv.make_cache() for _ in range(100)]
    assert kv.summary().sequences == 0
    forward(waiting[50], [1])
    assert kv.summary().sequences == 1


def test_freed_blocks_may_be_reused_while_the_pass_that_reads_them_is_in_flight(model):
    """A finished row is dropped and its blocks rewritten before any read of its last pass has run."""
    kv = install(model, 5, block_size=4)
    cache = kv.make_cache()
    k = mx.broadcast_to(mx.arange(16, dtype=mx.float32)[None, None, :, None], (1, HEADS, 16, DIM))
    in_flight = [layer.update_and_fetch(k, k) for layer in cache]  # all 4 blocks, and no read has run
    table = kv.pool.table(cache[0].batch.handles[0])
    del cache
    successor = kv.make_cache()
    later = [layer.update_and_fetch(k + 100, k + 100) for layer in successor]
    assert sorted(kv.pool.table(successor[0].batch.handles[0])) == sorted(table)
    mx.eval(later)
    mx.eval(in_flight)
    for old, new in zip(in_flight, later, strict=True):
        assert np.array_equal(np.array(old[0]), np.array(k))
        assert np.array_equal(np.array(new[1]), np.array(k + 100))
