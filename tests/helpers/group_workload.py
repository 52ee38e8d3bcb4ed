"""Random workloads for `kvpool.Scheduler` on pools with layer groups, in which each arena is the bottleneck in turn.

The requests and options are those of `scheduler_workload`. What the first group holds, which is full, is judged by the
token model, and the others by `tests.verify`. Needs are counted here by sets of entries, not by the scheduler's
formulas.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
from scheduler_workload import Guest, Runner, Workload, draw, tokens_needed

from kvpool import Group, Request


def arena_of(groups: list[Group], number: int) -> int:
    """The arena of a group: those of states come after those of blocks."""
    if groups[number].kind != "state":
        return groups[number].arena
    blocks = 1 + max(group.arena for group in groups)
    return blocks + sum(group.kind == "state" for group in groups[:number])


def entries_at(group: Group, size: int, begin: int, end: int, lookahead: int) -> set[int]:
    """The entries that a row holds in a step from length `begin` to `end`."""
    position = begin - lookahead
    first = 0
    if group.kind == "window":
        first = position - group.size + 1
    elif group.kind == "chunk" and position >= 0:
        first = position // group.size * group.size
    every = range(-(-end // size))
    return {i for i in every if (i + 1) * size > first or i < -(-group.keep // size)}


def peak(group: Group, pool: dict[str, Any], tokens: int, chunk: int, shared: int = 0) -> int:
    """Blocks that a row holds at most in a group until it has so many tokens; without those of `shared` tokens."""
    if group.kind == "state":
        return 1 if pool["in_order"] else 2
    size = group.block_size or pool["block_size"]
    steps = ((begin, min(begin + chunk, tokens)) for begin in range(tokens))
    held = [entries_at(group, size, begin, end, pool["lookahead"]) for begin, end in steps]
    return max(len([i for i in entries if i >= shared // size]) for entries in held) * group.columns


def needs_alone(request: Request, pool: dict[str, Any], chunk: int) -> tuple[list[int], list[int]]:
    """Blocks in each arena with which a request can run: at least, at most (a window lies anywhere in blocks)."""
    groups, tokens = pool["groups"], tokens_needed(request)
    unit = max(group.block_size or pool["block_size"] for group in groups if group.kind != "state")
    shared = request.prompt.size // unit * unit
    count = 1 + max(arena_of(groups, number) for number in range(len(groups)))
    least, most = [0] * count, [0] * count
    for number, group in enumerate(groups):
        arena, width = arena_of(groups, number), request.beam_width
        own = peak(group, pool, tokens, chunk)
        loose = own + group.columns * (group.kind in ("window", "chunk"))
        if width > 1 and group.kind != "state":
            rest = peak(group, pool, tokens, chunk, shared)
            least[arena] += own
            most[arena] += shared // (group.block_size or pool["block_size"]) * group.columns
            most[arena] += width * (min(loose, rest + group.columns) + group.columns)
        else:
            least[arena] += own * max(1, width)
            most[arena] += loose if width <= 1 else 2 * width
    return least, most


def draw_groups(seed: int) -> Workload:
    """Workload number `seed`: that of the same number without groups, on a pool with a full, a window, a state group.

    Some have a chunk group or a second window, too. Arena number ``seed % arenas`` has room for the largest request and
    little more, the others have plenty.
    """
    workload = draw(seed)
    rng = np.random.default_rng([seed, 18])
    size = int(rng.choice([1, 2, 4, 8]))
    scheduler, requests = workload.scheduler, [request for _, request in workload.arrivals]
    scheduler["plans"] = 1
    workload.tier = False
    chunk = min(scheduler["prefill_chunk"], scheduler["max_step_tokens"])
    window = int(rng.integers(2, 20))
    pool = workload.pool | {"block_size": size, "prefix_cache": False, "max_blocks_per_seq": 200}
    pool["lookahead"] = int(rng.integers(0, min(3, window)))
    kinds = [
        Group.full(block_size=size * int(rng.choice([1, 2, 4])), columns=int(rng.integers(1, 3))),
        Group.window(
            window, keep=int(rng.integers(0, min(window, 5))), block_size=size * int(rng.choice([1, 2])), arena=1
        ),
        Group.state(1),
    ]
    if rng.random() < 0.4:
        kinds.append(Group.chunk(int(rng.integers(3, 20)), arena=int(rng.integers(0, 2)), columns=2))
    if rng.random() < 0.2:
        kinds.append(Group.window(window + 3))
    pool["groups"] = kinds
    most = [max(needs) for needs in zip(*(needs_alone(r, pool, chunk)[1] for r in requests), strict=True)]
    tight = seed % len(most)
    sizes = [need * (1 if arena == tight else 2 * len(requests)) for arena, need in enumerate(most)]
    sizes[tight] += int(rng.integers(0, 1 + most[tight] // 2)) if rng.random() < 0.7 else 0
    if rng.random() < 0.06:  # the largest request does not fit
        sizes[tight] = max(1, most[tight] // 2)
    sizes[0] += pool["watermark"]
    workload.exact = sizes[tight] == most[tight]
    pool["num_blocks"] = sizes[0] + pool["reserved_blocks"]
    told = False
    for number, group in enumerate(kinds):
        if group.kind == "state":
            kinds[number] = Group.state(sizes[2])
        elif group.arena == 1 and not told:
            told = True
            blocks = sizes[1] + pool["reserved_blocks"]
            kinds[number] = Group(group.kind, group.size, group.keep, group.block_size, group.columns, 1, blocks)
    workload.pool = pool
    return workload


def with_prefixes(workload: Workload) -> Workload:
    """The same workload on a pool with a prefix cache, whose states have checkpoints. Most requests tell their cut."""
    rng = np.random.default_rng([workload.seed, 19])
    size = min(int(rng.integers(1, 5)), workload.pool["num_blocks"] - workload.pool["reserved_blocks"])
    groups = [Group.state(one.size, blocks=size) if one.kind == "state" else one for one in workload.pool["groups"]]
    workload.pool |= {"prefix_cache": True, "groups": groups}
    for at, (tick, request) in enumerate(workload.arrivals):
        if rng.random() < 0.7:
            workload.arrivals[at] = tick, replace(request, cut=int(rng.integers(request.prompt.size + 1)))
    return workload


class GroupGuest(Guest):
    """Somebody else in the same pool, with sequences."""

    def visit(self) -> None:
        if self.rng.random() < 0.4:
            self.leave()
        elif self.rng.random() < 0.3 and self.pool.stats().free > 1:
            try:
                self.handles.append(self.pool.open(int(self.rng.integers(0, 4 * self.pool.block_size))))
            except MemoryError:
                return

    def leave(self) -> bool:
        had = bool(self.handles)
        self.pool.close(self.handles)
        self.handles = []
        return had


class Arenas(Runner):
    """What is other on a pool with layer groups: needs of each arena, and who else is there."""

    def __init__(self, workload: Workload, *given: Any, **options: Any) -> None:
        super().__init__(workload, *given, **options)
        self.guest = GroupGuest(self.pool, self.rng)
        self.watch.strict = False
        self.watch.checkpoints = bool(workload.pool["prefix_cache"])
        groups = workload.pool["groups"]
        self.num_arenas = 1 + max(arena_of(groups, number) for number in range(len(groups)))

    def needs(self, request: Request, chunk: int) -> tuple[list[int], list[int]]:
        """Blocks in each arena with which a request can run: at least, at most."""
        return needs_alone(request, self.workload.pool, chunk)

    def fits(self, request: Request) -> tuple[bool, bool]:
        options = self.workload.scheduler
        least, most = self.needs(request, min(options["prefill_chunk"], options["max_step_tokens"]))
        usable = [stats.num_blocks - stats.reserved for stats in map(self.pool.stats, range(self.num_arenas))]
        usable[0] -= self.pool.options.watermark
        return all(map(int.__le__, least, usable)), all(map(int.__le__, most, usable))

    def _finish(self) -> None:
        super()._finish()
        for arena in range(self.num_arenas):
            stats = self.pool.stats(arena)
            assert stats.used == stats.limbo == 0, f"arena {arena} leaked: {stats}"
        if not (self.workload.guests or self.watch.failures or self.may_set_back()):
            assert self.scheduler._core.setbacks == 0, "a sequence was preempted for a chunk, or for copies"

    def may_set_back(self) -> bool:
        """Whether a sequence may be preempted for what the scheduler has promised it."""
        return False


class GroupRunner(Arenas):
    """Runs a workload on a pool with layer groups."""

    def _execute(self, step: Any, tick: int) -> None:
        """Where nobody else takes blocks, every running sequence is a row while the budget lasts."""
        options, counts = self.workload.scheduler, self.scheduler.stats()
        alone = not self.workload.guests and not any(r.beam_width for r in self.requests.values())
        has_room = len(step.tokens) < options["max_step_tokens"] and options["mixed"]
        if alone and has_room and all(map(self.pool.is_open, step.handles.tolist())):
            running = counts.prefilling + counts.decoding
            assert running == len(step.handles), f"{running} sequences run, {len(step.handles)} are rows"
        super()._execute(step, tick)
