"""The random workloads of `group_workload` with a budget per sequence: tokens leave the full group, which is the first.

The oracle of `eviction_workload` judges what a row holds there. All other groups must have every token.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from eviction_workload import EvictingRunner, Oracle, draw_policy, leave_out_beams
from group_workload import GroupGuest, GroupMemory, arena_of, draw_groups, needs_alone, with_prefixes
from scheduler_workload import Workload, tokens_needed

from kvpool import Request
from kvpool.eviction import Policy


def needs_evicting(
    policy: Policy, request: Request, pool: dict[str, Any], chunk: int, caches: bool
) -> tuple[list[int], list[int]]:
    """As `needs_alone`, but the full group keeps a budget: the rules of docs/scheduling.md."""
    full, tokens, most = pool["groups"][0], tokens_needed(request), policy.max_kv - 1
    size = full.block_size or pool["block_size"]
    entries = -(-tokens // size)
    held = -(-min(tokens, most + chunk) // size), min(entries, (most + chunk + size - 2) // size + 1)
    copies = 0
    if caches and tokens > policy.max_kv:
        copies = 1 + (0 if policy.whole_blocks else -(-most // size))
    found = needs_alone(request, pool, chunk)
    for needs, own in zip(found, held, strict=True):
        needs[0] += (own + copies - entries) * full.columns
    return found


def draw_evicting_groups(seed: int) -> tuple[Workload, Policy]:
    """Workload number `seed`, without beams, every second one with a prefix cache.

    A third has no block to spare, and in an eighth the largest request does not fit.
    """
    rng = np.random.default_rng([seed, 21])
    workload = draw_groups(seed)
    if not leave_out_beams(workload):
        return draw_evicting_groups(seed + 1000)
    pool, options, caches = workload.pool, workload.scheduler, bool(seed % 2)
    policy = draw_policy(rng, pool["groups"][0].block_size)
    chunk = min(options["prefill_chunk"], options["max_step_tokens"])
    needs = [needs_evicting(policy, request, pool, chunk, caches)[1][0] for _, request in workload.arrivals]
    spare = 0 if rng.random() < 0.35 else int(rng.integers(0, 3 * max(needs)))
    spare = -1 if rng.random() < 0.125 and max(needs) > 1 else spare
    pool["num_blocks"] = pool["reserved_blocks"] + pool["watermark"] + max(needs) + spare
    return with_prefixes(workload) if caches else workload, policy


class EvictedGroupMemory(GroupMemory):
    """A `GroupMemory` whose full group loses tokens: what the others must have comes from the tokens themselves."""

    def __init__(self, oracle: Oracle, histories: dict[int, np.ndarray]) -> None:
        super().__init__(oracle.backend.model, oracle.pool)
        self.memories[0] = oracle.backend
        self.histories = histories

    def _known(self, plan: Any, row: int, positions: np.ndarray) -> np.ndarray:
        return self.histories[int(plan.handles[row])][positions]


class EvictingGroupRunner(EvictingRunner):
    """An `EvictingRunner` on a pool with layer groups."""

    def __init__(self, workload: Workload, policy: Policy, **how: Any) -> None:
        super().__init__(workload, policy, **how)
        self.memory = EvictedGroupMemory(self.oracle, self.histories)
        self.guest = GroupGuest(self.pool, self.rng)
        self.watch.checkpoints = workload.pool["prefix_cache"]
        groups = list(self.memory.groups)
        self.num_arenas = 1 + max(arena_of(groups, number) for number in range(len(groups)))

    def fits(self, request: Request) -> tuple[bool, bool]:
        """Whether a request may fit the pool, and whether it must."""
        options, pool = self.workload.scheduler, self.workload.pool
        chunk = min(options["prefill_chunk"], options["max_step_tokens"])
        usable = [stats.num_blocks - stats.reserved for stats in map(self.pool.stats, range(self.num_arenas))]
        usable[0] -= self.pool.options.watermark
        least, most = needs_evicting(self.policy, request, pool, chunk, pool["prefix_cache"])
        return all(map(int.__le__, least, usable)), all(map(int.__le__, most, usable))

    def need(self, request: Request) -> int:
        """As `Runner` asks: no more than `usable` if the request may fit."""
        return 0 if self.fits(request)[0] else self.usable() + 1

    def _refuse(self, request: Request, reason: str) -> None:
        if reason != "too_large":
            super()._refuse(request, reason)
            return
        assert not self.fits(request)[1], f"{request.id} fits"
        self.refused.add(request.id)

    def _poison(self) -> None:
        """Poison blocks of the full group that no sequence holds, so that a read of one is found."""
        if not self.workload.pool["prefix_cache"]:
            first, refcount = self.pool.options.reserved_blocks, self.pool.blocks.refcount
            free = [block for block in range(first, self.pool.num_blocks) if not refcount(block)]
            self.oracle.backend.poison(free)

    def _finish(self) -> None:
        super()._finish()
        for arena in range(self.num_arenas):
            stats = self.pool.stats(arena)
            assert stats.used == stats.limbo == 0, f"arena {arena} leaked: {stats}"
        shares = self.workload.pool["prefix_cache"] or any(request.n > 1 for request in self.requests.values())
        if not (shares or self.workload.guests or self.watch.failures or self.break_rate):
            assert self.scheduler._core.setbacks == 0, "a sequence was preempted for a chunk, or for copies"
