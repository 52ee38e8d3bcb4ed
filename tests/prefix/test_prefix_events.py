"""Events: what a router outside the process learns about the cache."""

from __future__ import annotations

import hashlib
import importlib.util
import itertools
import json
import subprocess
import sys

import numpy as np
import pytest
from prefixes import cache, serve

A, B, C = ([n] * 4 for n in (1, 2, 3))


def key_of(tokens: list[list[int]], namespace: bytes = b"") -> bytes:
    """The content key of a chain of blocks, from its definition."""
    key = hashlib.sha256(namespace).digest()[:16]
    for block in tokens:
        key = hashlib.sha256(key + np.array(block, "<i4").tobytes()).digest()[:16]
    return key


def drained(pool):
    return [tuple(tuple(x) if isinstance(x, list) else x for x in event) for event in pool.prefix.events()]


def test_events_tell_every_block_that_is_stored_or_leaves(make_pool, make_plan):
    pool = make_pool(prefix_cache=True, events=8)
    for _ in range(2):
        cache(make_plan, pool, A + B, b"t")
    assert drained(pool) == [
        ("stored", key_of([A], b"t"), None, tuple(A), 4, b"t", 0, "full", None),
        ("stored", key_of([A, B], b"t"), key_of([A], b"t"), tuple(B), 4, b"t", 0, "full", None),
    ]
    pool.blocks.evict(1)
    assert drained(pool) == [("removed", key_of([A, B], b"t"), 0)]
    pool.close(pool.open(60))  # all 15 blocks
    assert drained(pool) == [("removed", key_of([A], b"t"), 0)]
    serve(make_plan, pool, A + B, b"t")
    cache(make_plan, pool, C)
    drained(pool)
    pool.prefix.flush(b"t")
    assert drained(pool) == [("removed", key_of([A], b"t"), 0), ("removed", key_of([A, B], b"t"), 0), ("cleared", b"t")]
    pool.prefix.flush()
    assert drained(pool) == [("removed", key_of([C]), 0), ("cleared", None)]
    cache(make_plan, pool, C)
    pool.reset()
    assert drained(pool)[-1] == ("cleared", None) and drained(pool) == []


def test_events_that_do_not_fit_are_counted(make_pool, make_plan):
    pool = make_pool(prefix_cache=True, events=2)
    cache(make_plan, pool, A + B + C)
    assert drained(pool) == [
        ("lost", 1),
        ("stored", key_of([A, B]), key_of([A]), tuple(B), 4, b"", 0, "full", None),
        ("stored", key_of([A, B, C]), key_of([A, B]), tuple(C), 4, b"", 0, "full", None),
    ]
    pool.blocks.evict(1)
    assert drained(pool) == [("removed", key_of([A, B, C]), 0)]


TAKEN_WITHOUT_MEMORY = """if True:
    import json, _testcapi, kvpool

    kinds = []
    for k in range(100):
        pool = kvpool.Pool(8, 4, prefix_cache=True, events=2)
        plan, handle = kvpool.Plan(pool, 1, 12), pool.open()
        pool.step(plan, [handle], 12)
        pool.done(plan)
        pool.prefix.commit(handle, list(range(12)))  # of three events the first is lost
        _testcapi.set_nomemory(k, 0)
        try:
            taken = pool.prefix.events()
        except MemoryError:
            taken = None
        finally:
            _testcapi.remove_mem_hooks()
        taken = pool.prefix.events() if taken is None else taken
        kinds.append([event[:2] if event[0] == "lost" else event[0] for event in taken])
        assert pool.prefix.events() == []
    print(json.dumps(kinds))
"""


@pytest.mark.skipif(importlib.util.find_spec("_testcapi") is None, reason="this Python has no _testcapi")
def test_events_without_memory_for_them_count_as_lost():
    """In a process of its own: the allocations that fail are those of every thread."""
    said = subprocess.run([sys.executable, "-c", TAKEN_WITHOUT_MEMORY], stdout=subprocess.PIPE, check=True).stdout
    untold, lost = [["lost", 1], "stored", "stored"], [["lost", 3]]
    # Memory ends before the events are taken, while they become objects, or not at all.
    assert [kind for kind, _ in itertools.groupby(json.loads(said))] == [untold, lost, untold]


def test_event_keys_are_the_same_in_every_pool_and_differ_by_namespace_and_prefix(make_pool, make_plan):
    seen = []
    for seed in (1, 2):
        pool = make_pool(32, prefix_cache=True, events=64, seed=seed)
        for namespace in (b"", b"a", b"b"):
            for prompt in (A + B, B + B, B + A):
                cache(make_plan, pool, prompt, namespace)
        seen.append([event[1] for event in drained(pool)])
    assert seen[0] == seen[1] and len(set(seen[0])) == len(seen[0]) == 3 * 5
    assert {len(key) for key in seen[0]} == {16}


def test_pool_without_events_has_none(make_any, make_plan):
    pool = make_any()
    cache(make_plan, pool, A)
    pool.prefix.flush()
    assert pool.prefix.events() == []


@pytest.mark.parametrize(
    ("events", "prefix_cache", "error"),
    [
        *((-1, True, ValueError), (1.0, True, TypeError), ("1", True, TypeError), (True, True, TypeError)),
        (8, False, ValueError),
    ],
)
def test_events_of_the_wrong_size_or_without_a_cache_are_refused(make_pool, events, prefix_cache, error):
    with pytest.raises(error, match=r"^\[Pool\] "):
        make_pool(prefix_cache=prefix_cache, events=events)
