"""The scheduler on pools with layer groups: every arena is the bottleneck in turn, and no request is lost to it."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from group_workload import GroupRunner, arena_of, draw_groups, peak, with_prefixes
from scheduler_workload import numbers
from schedules import drain

from kvpool import Group, Plan, Pool, Request, Scheduler
from kvpool.errors import OutOfBlocks, RequestRejected
from kvpool.scheduler.needs import Needs

PARTS = 3
GROUPS = [Group.full(), Group.window(8, arena=1, num_blocks=200), Group.state(100)]


def small(**options: Any) -> Pool:
    """A pool of three arenas with plenty in each, unless told."""
    given: dict[str, Any] = {"num_blocks": 201, "block_size": 4, "max_seqs": 32, "groups": GROUPS, **options}
    return Pool(given.pop("num_blocks"), given.pop("block_size"), **given)


def groups_with(full: int = 200, window: int = 200, slots: int = 100) -> dict[str, Any]:
    """So many usable blocks in each arena."""
    return {
        "num_blocks": full + 1,
        "groups": [Group.full(), Group.window(8, arena=1, num_blocks=window + 1), Group.state(slots)],
    }


# ---- workloads


@pytest.mark.parametrize("prefixes", [False, True])
@pytest.mark.parametrize("part", range(PARTS))
def test_random_workload_with_groups_gives_what_decoding_alone_gives(part, prefixes):
    for seed in numbers(18, 600)[part::PARTS]:
        workload = draw_groups(seed)
        GroupRunner(with_prefixes(workload) if prefixes else workload, check_every=5).run()


# ---- counts


def test_needs_are_what_the_pool_takes():
    """A sequence that is computed in random chunks holds `held` after each of them, and never more than `most`."""
    for seed in range(30):
        rng = np.random.default_rng([seed, 5])
        workload = draw_groups(seed)
        groups, size = workload.pool["groups"], workload.pool["block_size"]
        groups = [replace(group, num_blocks=4000) if group.num_blocks else group for group in groups]
        groups = [Group.state(4) if group.kind == "state" else group for group in groups]
        pool = Pool(**{**workload.pool, "num_blocks": 4000, "groups": groups, "watermark": 0})
        chunk = int(rng.integers(1, 30))
        tokens = min(int(rng.integers(1, 150)), 200 * size)
        needs = Needs(pool, chunk)
        plan, handle, done = Plan(pool, 1, chunk), pool.open(), 0
        while done < tokens:
            new = min(int(rng.integers(1, chunk + 1)), tokens - done)
            pool.step(plan, [handle], new)
            used, most = [pool.stats(arena).used for arena in range(needs.num_arenas)], needs.most(tokens)
            assert (used <= most).all(), f"seed {seed}: {used} used, {most} are the most"
            if not pool.options.in_order:
                pool.done(plan)
            done += new
            used, held = [pool.stats(arena).used for arena in range(needs.num_arenas)], needs.held(done).tolist()
            assert used == held, f"seed {seed}: {used} used at {done}, {held} counted"
        for group in (replace(group, arena=0, num_blocks=None) for group in groups):  # not much too much either
            counted = Needs(Pool(4000, size, groups=[Group.full(), group], lookahead=pool.options.lookahead), chunk)
            arena = arena_of([Group.full(), group], 1)
            own = counted.most(tokens)[arena] - (0 if arena else -(-tokens // size))
            exact = peak(group, {**workload.pool, "in_order": False}, tokens, chunk)
            slack = group.columns * (group.kind in ("window", "chunk"))
            assert exact <= own <= exact + slack, f"seed {seed}: {group} counts {own}, it holds {exact}"


@pytest.mark.parametrize(
    ("room", "words"),
    [
        ({"full": 9}, "need 10 blocks of arena 0, the pool has 9"),
        ({"window": 3}, "need 4 blocks of arena 1, the pool has 3"),
        ({"slots": 1}, "need 2 state slots of arena 2, the pool has 1"),
    ],
)
def test_request_that_can_never_fit_names_the_arena(room, words):
    pool = small(max_blocks_per_seq=50, **groups_with(**room))
    scheduler = Scheduler(pool, prefill_chunk=4)
    before = pool.fingerprint()
    with pytest.raises(RequestRejected, match=words) as caught:
        scheduler.add(Request(range(30), max_tokens=11))
    assert caught.value.reason == "too_large"
    assert pool.fingerprint() == before
    scheduler.check()


def test_slots_for_two_states_a_row_run_that_many_rows():
    """Slots do not grow, so no watermark is left of them."""
    scheduler = Scheduler(small(**groups_with(slots=8)), max_running=10)
    for _ in range(10):
        scheduler.add(Request([1, 2, 3], max_tokens=9))
    assert len(scheduler.schedule().handles) == 4


def test_watermark_is_left_in_every_arena_of_blocks():
    for room in ({"full": 12}, {"window": 12}):
        pool = small(**groups_with(**room))
        scheduler = Scheduler(pool, watermark=5, max_running=8)
        for _ in range(4):
            scheduler.add(Request(range(16), max_tokens=1))
        assert len(scheduler.schedule().handles) == 1, room  # 4 blocks each: a second one would leave 4


def test_others_that_take_promised_blocks_delay_a_request_and_lose_nothing():
    """Chunks wait for blocks that somebody else holds; alone a request is told which arena."""
    pool = small(**groups_with(full=10))
    scheduler = Scheduler(pool, prefill_chunk=4, max_step_tokens=4)
    name = scheduler.add(Request(range(32), max_tokens=1))
    step = scheduler.schedule()
    guest = pool.open(36)  # 9 of 10 blocks
    scheduler.update(step, np.zeros(0, np.int32))
    with pytest.raises(OutOfBlocks, match="runs alone and finds no blocks for its next chunk in arena 0") as caught:
        scheduler.schedule()
    assert caught.value.arena == 0
    scheduler.check()
    pool.close(guest)
    assert [(output.id, output.tokens.tolist()) for output in drain(scheduler, 7)] == [(name, [7])]
    assert [pool.stats(arena).used for arena in range(3)] == [0, 0, 0]


def test_tier_on_a_pool_with_windows_or_states_is_refused():
    tier = SimpleNamespace(spill_to_host=None, prefetch=None)
    with pytest.raises(ValueError, match=r"full groups, this pool has others \(full, window, state\)"):
        Scheduler(small(), tier=tier)
