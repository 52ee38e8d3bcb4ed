"""The adapter's storage raises in any one of its calls: no block is lost, and the same pass made again gives the same.

That of the core's other users is in `test_backend_raises`; of the model, in `test_mlx_lm_recover`.
"""

import copy
from collections import Counter

import mlx.core as mx
import numpy as np
import pytest
from mlx_models import ROUTES, on_cpu, random_prompts, tiny_llama

from kvpool import Request
from kvpool.adapters.mlx_lm import EngineStopped, install
from kvpool.adapters.mlx_lm.engine import Engine
from kvpool.eviction import H2O, BlockEviction

BEGINS = ("copy_blocks", "prepare")  # before the first layer
CALLS = ("attend", "compact", "copy_blocks", "queued", "read", "settle", "prepare", "write")


class Lost(BaseException):
    """The device is gone, or Ctrl-C came while MLX evaluated."""


class Failing:
    """Stands in front of the storage of a `PagedKV`: call number `fail_at` raises, before its work or after it."""

    def __init__(self, kv, fail_at, is_late):
        self.fail_at, self.is_late, self.made, self.failed = fail_at, is_late, 0, Counter()
        for name in CALLS:
            setattr(kv.backend, name, self.failing(name, getattr(kv.backend, name)))

    def failing(self, name, call):
        def counted(*arguments, **options):
            self.made += 1
            fails = self.made == self.fail_at
            self.failed[name] += fails
            if fails and not self.is_late:
                raise Lost(name)
            result = call(*arguments, **options)
            if fails:
                raise Lost(name)
            return result

        return counted


def each_call_fails_once(run):
    """Run without failures, then once for each call to the storage, which fails: equal results. Which calls failed."""
    peace, undisturbed = run()
    assert undisturbed.made > 20 and not +undisturbed.failed
    failed = Counter()
    for number in range(1, undisturbed.made + 1):
        seen, failing = run(number, number % 2 == 0)
        failed += failing.failed
        assert failing.failed.total() == 1, number
        assert all(np.array_equal(a, b) for a, b in zip(seen, peace, strict=True)), (number, failing.failed)
    return failed


POLICIES = (H2O(max_kv=12, slack=2), BlockEviction(max_kv=12))
KINDS = [(route, None) for route in ROUTES] + [("fused", policy) for policy in POLICIES]


def passes(model, route, policy, fail_at=0, is_late=False):
    """A prompt and a fork of it, decoding past a budget. Returns (logits of all passes, what failed, calls)."""
    with on_cpu():
        kv = install(model, 60, block_size=4, eviction=policy, **ROUTES[route])
    failing = Failing(kv, fail_at, is_late)
    with kv:
        pieces, seen = [*random_prompts([7, 4 if policy else 3]), [5]], []
        first = fed(kv, model, kv.make_cache(), pieces, seen=seen)
        for cache, token in ((copy.deepcopy(first), 8), (first, 9)):
            more = [[token + n] for n in range(4 if policy else 1)]
            fed(kv, model, cache, pieces + more, len(pieces), seen)
        del first, cache
        kv.pool.check()
    stats = kv.pool.stats()
    assert (stats.used, stats.sequences, stats.pending) == (0, 0, 0)
    return seen, failing


def fed(kv, model, cache, pieces, begin=0, seen=None):
    """The cache after passes on `pieces` from `begin` on. One that fails is made again, in that cache if possible.

    `recover` takes it back, or it is in the pool, and is trimmed off.
    """
    for number in range(begin, len(pieces)):
        tokens, length = mx.array([pieces[number]]), cache[0].offset
        try:
            logits = model(tokens, cache=cache)
            mx.eval(logits)
        except Lost as lost:
            is_torn = str(lost) == "compact"
            if is_torn:
                requires_a_new_cache(model, tokens, cache)
            is_back = kv.recover()
            assert not is_back or str(lost) not in BEGINS or kv.eviction, "it was not taken back before its first layer"
            if kv.eviction is not None and not is_back and (is_torn or cache[0].offset > length):
                cache = fed(kv, model, kv.make_cache(), pieces[:number])
            elif kv.eviction is None and not is_back:
                assert {layer.offset for layer in cache} in ({length}, {length + tokens.shape[1]})
                for layer in cache:
                    layer.trim(layer.offset - length)
            kv.pool.check()
            assert {layer.offset for layer in cache} == {length} and kv.pool.stats().pending == 0
            logits = model(tokens, cache=cache)
        if seen is not None:
            seen.append(np.array(logits))
    return cache


def requires_a_new_cache(model, tokens, cache):
    for use in (lambda: model(tokens, cache=cache), lambda: copy.deepcopy(cache), lambda: cache[0].trim(1)):
        with pytest.raises(EngineStopped, match=r"\] an eviction failed when these 1 sequences had lost tokens"):
            use()


@pytest.mark.parametrize(("route", "policy"), KINDS)
def test_cache_fed_by_hand_goes_on_or_says_that_it_cannot(route, policy):
    model = tiny_llama()
    failed = each_call_fails_once(lambda *when: passes(model, route, policy, *when))
    calls = {"prepare", "write", "attend" if route == "fused" else "read"}
    if policy is None or not policy.whole_blocks:
        calls |= {"copy_blocks"} if policy is None else {"copy_blocks", "compact"}
    assert failed.keys() >= calls


def served(model, route, fail_at=0, is_late=False):
    """Two requests, one of three samples. Returns (tokens of the requests, the storage)."""
    with on_cpu():
        engine = Engine(model, 60, block_size=4, prefill_chunk=5, **ROUTES[route])
        failing = Failing(engine.kv, fail_at, is_late)
        prompts = random_prompts([9, 6])
        for number, prompt in enumerate(prompts):
            request = Request(id=number, prompt=np.array(prompt, np.int32), max_tokens=3, n=1 + 2 * number)
            engine.submit(request)
        done, raised = {}, 0
        while engine.num_unfinished:
            try:
                done |= {one.id: [sample.tokens.tolist() for sample in one.samples] for one in engine.step()}
            except Lost:
                raised += 1
                engine.kv.pool.check()
                engine.scheduler.check()
                assert engine.kv.pool.stats().pending == 0
        try:
            engine.close()
        except Lost:  # of the wait for what is queued
            raised += 1
            engine.close()
        engine.kv.pool.check()
        stats = engine.kv.pool.stats()
        assert (stats.used, stats.limbo, stats.sequences, stats.pending) == (0, 0, 0, 0)
        assert raised == failing.failed.total()
    return [done[0], done[1]], failing


@pytest.mark.parametrize("route", ROUTES)
def test_engine_goes_on_after_any_call_of_the_storage_that_fails(route):
    model = tiny_llama()
    failed = each_call_fails_once(lambda *when: served(model, route, *when))
    assert failed.keys() >= {"prepare", "write", "copy_blocks"}
