"""A budget per sequence on pools with layer groups: tokens leave the full group, and every arena is counted.

``KVPOOL_LONG=1`` runs 500 random workloads, ``KVPOOL_WORKLOAD=17`` number 17 alone.
"""

from __future__ import annotations

import os

import numpy as np
import pytest
from eviction_group_workload import EvictingGroupRunner, draw_evicting_groups
from eviction_workload import EvictedMemory
from schedules import drain
from token_model import TokenModel

from kvpool import Group, Pool, Request, Scheduler
from kvpool.errors import OutOfBlocks, RequestRejected
from kvpool.eviction import H2O, BlockEviction, Evictor

COUNT = 500 if os.environ.get("KVPOOL_LONG") else 24
ONLY = os.environ.get("KVPOOL_WORKLOAD")
HEAVY, WHOLE = H2O(max_kv=16, sink=2, slack=2), BlockEviction(max_kv=16, sink=2, recent_tokens=4)


@pytest.mark.long
def test_random_workload_on_groups_keeps_the_tokens_that_the_policy_names():
    reached = dict.fromkeys(("evictions", "shared", "preempted", "found", "cancelled", "in order"), 0)
    for seed in [int(ONLY)] if ONLY else range(COUNT):
        runner = EvictingGroupRunner(*draw_evicting_groups(seed), break_rate=0.05 * (seed % 3 == 0)).run()
        counts = runner.scheduler.stats()
        reached["evictions"] += runner.oracle.evictions
        reached["shared"] += runner.oracle.shared
        reached["preempted"] += counts.preemptions > 0
        reached["found"] += counts.hit_tokens + counts.again_hit_tokens > 0
        reached["cancelled"] += counts.cancelled > 0
        reached["in order"] += runner.pool.options.in_order
        assert (counts.evicted_tokens > 0) == (runner.oracle.evictions > 0)
    if not ONLY:  # the workloads must contain what they test
        assert min(reached.values()) >= 2 and reached["evictions"] > 300, reached


# ---- one at a time


def groups_of(slots=8, window=40, **full):
    return [Group.full(**full), Group.window(8, arena=1, num_blocks=window), Group.state(slots)]


def build(policy, num_blocks=40, **options):
    how = {"groups": options.pop("groups", groups_of()), "prefix_cache": options.pop("prefix_cache", False)}
    pool = Pool(num_blocks, 4, max_blocks_per_seq=options.pop("longest", 99), **how)
    memory = EvictedMemory(TokenModel(), pool)
    evictor = Evictor(policy, pool, memory)
    return pool, memory, Scheduler(pool, eviction=evictor, **{"prefill_chunk": 8, "max_step_tokens": 64, **options})


def most_used(pool):
    return [pool.stats(arena).peak_used for arena in range(3)]


@pytest.mark.parametrize("policy", [HEAVY, WHOLE])
def test_long_request_needs_its_budget_in_one_arena_and_its_window_in_another(policy):
    # 16 - 1 tokens when a step begins and 8 of the step, anywhere in blocks of four: 7. Window: 8 - 1 + 8 tokens.
    pool, _, scheduler = build(policy, 8, groups=groups_of(slots=2, window=6))
    scheduler.add(Request(range(100), max_tokens=60))
    (output,), most = drain(scheduler), most_used(pool)
    assert output.tokens.size == 60 and output.preemptions == 0 and scheduler.stats().evicted_tokens > 100
    assert 5 <= most[0] <= 7 and most[1] <= 5 and most[2] == 2
    assert [pool.stats(arena).used for arena in range(3)] == [0, 0, 0]
    with pytest.raises(RequestRejected, match="need 7 blocks of arena 0, the pool has 6"):
        build(policy, 7)[2].add(Request(range(100), max_tokens=60))
    with pytest.raises(RequestRejected, match="159 tokens need 40 blocks, a sequence has at most 39"):
        build(policy, longest=39)[2].add(Request(range(100), max_tokens=60))  # positions are not evicted


def test_copies_of_a_cached_prompt_count_where_a_request_is_judged():
    how = {"groups": [Group.full(columns=2), Group.window(8)], "prefix_cache": True}
    # Columns of seven entries, four for copies, one cached twice. Window: five. One block is reserved.
    build(HEAVY, 1 + 2 * 12 + 5, **how)[2].add(Request(range(100), max_tokens=60))
    with pytest.raises(RequestRejected, match="need 29 blocks, the pool has 28"):
        build(HEAVY, 2 * 12 + 5, **how)[2].add(Request(range(100), max_tokens=60))
    build(WHOLE, 1 + 2 * 8 + 5, **how)[2].add(Request(range(100), 60))


def test_missing_blocks_for_copies_are_said_of_the_arena_that_lacks_them():
    groups = [Group.window(64), Group.full(arena=1, num_blocks=41)]
    pool = Pool(41, 4, max_blocks_per_seq=60, groups=groups, prefix_cache=True)
    policy = H2O(max_kv=32, sink=2, slack=2)
    evictor = Evictor(policy, pool, EvictedMemory(TokenModel(), pool), group=1)
    scheduler = Scheduler(pool, eviction=evictor, prefill_chunk=8, max_step_tokens=64)
    scheduler.add(Request(range(29), max_tokens=40))
    with pytest.raises(OutOfBlocks, match="copies that eviction needs in arena 1") as caught:
        for number in range(40):
            step = scheduler.schedule()
            scheduler.update(step, np.zeros(len(step.sample_at), np.int32))
            if number == 4:
                pool.fork(int(scheduler.handles[0]))  # somebody else shares its blocks, and takes all but two
                taken = pool.blocks.arena(1).alloc(pool.stats(1).free)
                pool.blocks.arena(1).decref(taken[:2])
    assert caught.value.arena == 1 and pool.stats(0).free > 0


def test_columns_of_the_group_are_counted_and_evicted_together():
    pool, _, scheduler = build(HEAVY, 22, groups=groups_of(columns=3))
    scheduler.add(Request(range(100), max_tokens=60))
    drain(scheduler)
    assert 18 <= most_used(pool)[0] <= 21
    with pytest.raises(RequestRejected, match="need 21 blocks of arena 0, the pool has 20"):
        build(HEAVY, 21, groups=groups_of(columns=3))[2].add(Request(range(100), max_tokens=60))


def test_rows_that_lost_tokens_say_so_and_keep_their_positions():
    pool, _, scheduler = build(HEAVY)
    scheduler.add(Request(range(60), max_tokens=5))
    seen = 0
    while (step := scheduler.schedule()) is not None:
        (handle,) = step.handles.tolist()
        length = int(step.plan.positions[len(step.tokens) - 1]) + 1
        assert pool.kv_len(handle) == step.plan.groups[0].kv_lens[0] == length - step.evicted[0] <= 15 + 8
        assert pool.kv_len(handle, 1) == pool.num_tokens(handle) == length
        assert step.plan.positions[: len(step.tokens)].tolist() == list(range(length - len(step.tokens), length))
        seen = max(seen, int(step.evicted[0]))
        scheduler.update(step, np.zeros(len(step.sample_at), np.int32))
    assert seen >= 64 - 16
