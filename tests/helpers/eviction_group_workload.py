"""The random workloads of `group_workload` with a budget per sequence: tokens leave the full group, which is the first.

The oracle of `eviction_workload` judges what a row holds there.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from eviction_workload import EvictingRunner, alone, draw_policy, leave_out_beams
from group_workload import Arenas, draw_groups, needs_alone, with_prefixes
from scheduler_workload import Workload, tokens_needed

from kvpool import Request
from kvpool.eviction import Policy


def needs_evicting(
    policy: Policy, request: Request, pool: dict[str, Any], chunk: int, caches: bool
) -> tuple[list[int], list[int]]:
    """As `needs_alone`, but the full group keeps a budget: the rules of docs/scheduling.md."""
    full, tokens = pool["groups"][0], tokens_needed(request)
    size = full.block_size or pool["block_size"]
    found, entries, most = needs_alone(request, pool, chunk), -(-tokens // size), policy.max_kv - 1 + chunk
    own = alone(policy, request, size, chunk, caches)
    loose = min(entries, (most + size - 2) // size + 1) - -(-min(tokens, most) // size)  # they begin anywhere in blocks
    for needs, held in zip(found, (own - loose, own), strict=True):
        needs[0] += (held - entries) * full.columns
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


class EvictingGroupRunner(Arenas, EvictingRunner):
    """An `EvictingRunner` on a pool with layer groups."""

    def needs(self, request: Request, chunk: int) -> tuple[list[int], list[int]]:
        """Of a request that keeps a budget."""
        pool = self.workload.pool
        return needs_evicting(self.policy, request, pool, chunk, pool["prefix_cache"])

    def may_set_back(self) -> bool:
        """Copies of what is shared, or calls that fail, take what was promised."""
        shares = self.workload.pool["prefix_cache"] or any(request.n > 1 for request in self.requests.values())
        return shares or bool(self.break_rate)
