"""One thread drives a pool at a time: others may look, may take turns, and are refused in between."""

import copy
import threading
from concurrent.futures import ThreadPoolExecutor
from functools import partial

import mlx.core as mx
import pytest
from mlx_models import PROMPTS, batch_tokens, random_prompts

from kvpool.adapters.mlx_lm import EngineStopped, PagedKVCache, install
from kvpool.errors import ConcurrentUse

HEADS, DIM = 2, 8


@pytest.fixture
def kv(model):
    return install(model, 400, block_size=4)


def in_thread(call):
    """What `call` returned, or raised, in a thread of its own that has ended since."""
    with ThreadPoolExecutor(1, "visitor") as threads:
        done = threads.submit(call)
    return done.exception() or done.result()


def update(cache, layers):
    x = mx.ones((1, HEADS, 3, DIM))
    for layer in layers:
        mx.eval(cache[layer].update_and_fetch(x, x))


def test_the_account_neither_waits_nor_evaluates(kv, monkeypatch):
    """MLX builds graphs without a lock: whoever evaluates the pool while another thread builds on it crashes."""

    def refuse(*_):
        raise AssertionError("the account touched MLX's graphs")

    cache = kv.make_cache()
    update(cache, range(3))
    update(cache, [0])  # in the middle of a pass, the worst moment
    for name in ("eval", "async_eval", "synchronize"):
        monkeypatch.setattr(mx, name, refuse)
    summary = in_thread(kv.summary)
    assert (summary.blocks_used, summary.sequences, summary.blocks_leaked) == (2, 1, 0), summary


def test_blocks_that_a_pass_in_progress_copies_from_are_not_leaked(kv):
    cache = kv.make_cache()
    update(cache, range(3))
    clone = copy.deepcopy(cache)
    update(cache, [0])  # has copied the tail that it shared
    del clone
    summary = in_thread(kv.summary)
    assert (summary.cow_copies, summary.blocks_used, summary.blocks_leaked) == (1, 3, 0), summary


@pytest.mark.long
def test_the_account_may_be_polled_while_an_engine_runs(model, kv):
    prompts = random_prompts(PROMPTS)
    expected = batch_tokens(model, prompts, 40)
    done, summaries = threading.Event(), []

    def poll():
        while not done.is_set():
            summaries.append(kv.summary())

    with ThreadPoolExecutor(1) as threads:
        poller = threads.submit(poll)
        try:
            with kv:
                tokens = batch_tokens(model, prompts, 40)
        finally:
            done.set()
        poller.result()
    assert tokens == expected
    assert len({summary.blocks_used for summary in summaries}) > 3, "the polls missed the run"
    assert {summary.blocks_leaked for summary in summaries} == {0}


def test_a_second_thread_is_refused_before_anything_happens(kv, monkeypatch):
    first, second = kv.make_cache(), kv.make_cache()
    update(first, [0])
    before = kv.pool.fingerprint()
    touched = []
    monkeypatch.setattr(kv.backend, "settle", lambda: touched.append(1))
    for call in (lambda: update(second, [0]), kv.recover, kv.settle):
        error = in_thread(call)
        assert isinstance(error, ConcurrentUse) and "visitor" in str(error), error
    assert kv.pool.fingerprint() == before and not touched
    update(first, [1, 2])  # the pass that was in progress goes on
    assert in_thread(lambda: update(second, [0, 1, 2])) is None
    assert first[0].offset == second[0].offset == 3


def test_an_engine_that_was_refused_is_stopped_and_the_other_one_goes_on(kv):
    """The refused engine has lost the tokens of its step, so it must not carry on as if nothing was."""
    first = kv.make_cache()
    merged = [PagedKVCache.merge([cache]) for cache in kv.make_cache()]
    update(first, [0])
    assert isinstance(in_thread(lambda: update(merged, [0])), ConcurrentUse)
    update(first, [1, 2])
    with pytest.raises(EngineStopped, match=r"\[forward\]"):
        update(merged, [0])
    update(first, [0, 1, 2])


def test_engines_in_two_threads_that_take_turns_equal_stock(model, kv):
    requests = [random_prompts(PROMPTS, seed) for seed in (1, 2)]
    expected = [batch_tokens(model, prompts) for prompts in requests]
    lock = threading.Lock()
    with kv, ThreadPoolExecutor(2) as threads:
        tokens = list(threads.map(partial(batch_tokens, model, lock=lock), requests))
    assert tokens == expected
