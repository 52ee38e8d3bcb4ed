"""Random workloads for `kvpool.Scheduler` on pools with layer groups, in which each arena is the bottleneck in turn.

The requests and options are those of `scheduler_workload`. `GroupMemory` stands for the storage: it computes tokens
through the tables of the full group, and judges what the other groups would read against them. Needs are counted here
by sets of entries, not by the scheduler's formulas.
"""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
from scheduler_workload import Guest, Runner, Workload, draw, tokens_needed
from token_model import TokenMemory, TokenModel

from kvpool import Group, Pool, Request

NOTHING = np.uint64(0xBAD0BAD0BAD0BAD0)


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
    pool: dict[str, Any] = {
        "block_size": size,
        "reserved_blocks": workload.pool["reserved_blocks"],
        "watermark": workload.pool["watermark"],
        "in_order": workload.pool["in_order"],
        "max_seqs": workload.pool["max_seqs"],
        "max_blocks_per_seq": 200,
        "lookahead": int(rng.integers(0, min(3, window))),
        "prefix_cache": False,
    }
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


class GroupMemory:
    """A `TokenModel` over the storage of all groups, driven by plans alone. Group 0 must be full.

    Tokens come from what group 0 holds. Every other group, each of its columns, and every state must hold the same
    history wherever the layers would read it. A checkpoint is what its blocks hold: nothing, once another one or a
    group has written one of them.
    """

    def __init__(self, model: TokenModel, pool: Pool) -> None:
        self.groups = pool.options.groups or ()
        self.lookahead = pool.options.lookahead
        self.sizes = [group.block_size or pool.block_size for group in self.groups]
        blocks = [pool.stats(arena_of(list(self.groups), g)).num_blocks for g in range(len(self.groups))]
        self.memories = [TokenMemory(model, n, size) for n, size in zip(blocks, self.sizes, strict=True)]
        self.states = [np.full(n, NOTHING, np.uint64) for n in blocks]
        self.bundles: dict[int, tuple[tuple[int, ...], np.uint64]] = {}  # block of arena 0: its bundle and the state

    def _view(self, plan: Any, g: int, column: int) -> Any:
        """One column of a group as the plan of a pool without groups."""
        part, common = plan.groups[g], {name: getattr(plan, name) for name in ("cu_q_lens", "positions")}
        return SimpleNamespace(
            seq_lens=part.kv_lens,
            block_tables=np.where(part.block_tables[:, :, column] < 0, 2**30, part.block_tables[:, :, column]),
            slot_mapping=part.slot_mapping[column],
            copies=part.copies if column == 0 else part.copies[:0],
            handles=plan.handles,
            num_tokens=plan.num_tokens,
            **common,
        )

    def forward(self, tokens: Any, plan: Any, salts: Any) -> np.ndarray:
        """The states after each token, as `TokenMemory.forward` returns them; all other groups are judged."""
        first = self._view(plan, 0, 0)
        self._load(plan)
        self._forget_bundles(plan)
        seen = self.memories[0].forward(tokens, first, salts)
        for g, group in enumerate(self.groups):
            if group.kind == "state":
                self._step_states(plan, g)
                continue
            for column in range(1 if g == 0 else 0, group.columns):
                self._step_column(tokens, plan, g, column, salts)
        self._save(plan)
        return seen

    def _load(self, plan: Any) -> None:
        for g, group in enumerate(self.groups):
            if group.kind == "state" and group.blocks:
                for slot, *blocks in plan.groups[g].state_loads.tolist():
                    found = {self.bundles.get(block, ((), NOTHING)) for block in blocks}
                    assert [bundle for bundle, _ in found] == [tuple(blocks)], f"{blocks} is no checkpoint"
                    self.states[g][slot] = next(iter(found))[1]

    def _save(self, plan: Any) -> None:
        for g, group in enumerate(self.groups):
            if group.kind == "state" and group.blocks:
                for slot, *blocks in plan.groups[g].state_saves.tolist():
                    for block in blocks:
                        self.bundles[block] = tuple(blocks), self.states[g][slot]
                        for other, size in self._in_arena_0():
                            self.memories[other].position[block * size : (block + 1) * size] = -1

    def _forget_bundles(self, plan: Any) -> None:
        """What a plan writes is no checkpoint any more."""
        for g, size in self._in_arena_0():
            slots = plan.groups[g].slot_mapping
            for block in {*(slots[slots >= 0] // size).ravel().tolist(), *plan.groups[g].copies[:, 1].tolist()}:
                self.bundles.pop(block, None)

    def _in_arena_0(self) -> list[tuple[int, int]]:
        """Groups whose blocks are in arena 0, and the tokens of one."""
        groups = enumerate(self.groups)
        return [(g, self.sizes[g]) for g, group in groups if group.kind != "state" and group.arena == 0]

    def _known(self, plan: Any, row: int, positions: np.ndarray) -> np.ndarray:
        """What every group has to have at these positions of a row: what the full group has."""
        return self._history(0, self._view(plan, 0, 0), row, positions)

    def _history(self, g: int, view: Any, row: int, positions: np.ndarray) -> np.ndarray:
        """What a group has at these positions of a row."""
        memory = self.memories[g]
        slots = memory._slots(view, np.full(positions.size, row), positions)
        assert np.array_equal(memory.position[slots], positions), f"group {g} has other positions in row {row}"
        return memory.history[slots]

    def _step_column(self, tokens: Any, plan: Any, g: int, column: int, salts: Any) -> None:
        memory, view, first = self.memories[g], self._view(plan, g, column), self._view(plan, 0, 0)
        rows, count = len(plan.handles), int(plan.num_tokens)
        lens = np.asarray(plan.seq_lens[:rows], np.int64)
        new = np.diff(np.asarray(plan.cu_q_lens[: rows + 1], np.int64))
        row = np.repeat(np.arange(rows), new)
        offset = np.arange(count) - np.repeat(np.cumsum(new) - new, new)
        positions = (lens - new)[row] + offset
        memory._copy(np.asarray(view.copies, np.int64))
        before = self.memories[0]._before(first, np.asarray(first.seq_lens[:rows]) - new, np.asarray(salts, np.uint64))
        memory._write(np.asarray(tokens, np.int64), view.slot_mapping[:count], positions, row, offset, before)
        group = self.groups[g]
        for at in range(rows):
            if g == 0:  # by places, of which eviction leaves fewer than there are positions
                places = np.arange(int(view.seq_lens[at]))
                one, other = (memory._slots(each, np.full(places.size, at), places) for each in (first, view))
                for plane in (memory.position, memory.history):
                    assert np.array_equal(plane[one], plane[other]), f"column {column} holds other tokens in row {at}"
                continue
            begin, end = int(lens[at] - new[at]), int(lens[at])
            first_read = {"window": begin - group.size + 1, "chunk": begin - begin % (group.size or 1)}
            low = max(0, first_read.get(group.kind, 0))
            read = np.union1d(np.arange(low, end), np.arange(min(group.keep, end))).astype(np.int64)
            got, due = self._history(g, view, at, read), self._known(plan, at, read)
            assert np.array_equal(got, due), f"group {g} holds another history in row {at}"

    def _step_states(self, plan: Any, g: int) -> None:
        states, part = self.states[g], plan.groups[g]
        rows = len(plan.handles)
        new = np.diff(plan.cu_q_lens[: rows + 1])
        written = [int(dst) for dst in part.state_dst[:rows] if dst >= 0]
        assert len(set(written)) == len(written), "two rows write one state"
        results = {}
        for at in range(rows):
            end, src = int(plan.seq_lens[at]), int(part.state_src[at])
            begin = end - int(new[at])
            if begin:
                assert states[src] == self._known(plan, at, np.array([begin - 1]))[0], f"row {at}: another state"
            else:
                assert src < 0, f"row {at} begins with a state"
            results[int(part.state_dst[at])] = self._known(plan, at, np.array([end - 1]))[0]
        for dst, state in results.items():
            states[dst] = state

    def spoil(self, plan: Any) -> None:
        """What a forward leaves that breaks off."""
        self._forget_bundles(plan)
        for g, group in enumerate(self.groups):
            if group.kind == "state":
                written = plan.groups[g].state_dst
                self.states[g][written[written >= 0]] = NOTHING
                if group.blocks:
                    self.states[g][plan.groups[g].state_loads[:, 0]] = NOTHING
                    for block in plan.groups[g].state_saves[:, 1:].ravel().tolist():
                        self.bundles.pop(block, None)
            else:
                self.memories[g].spoil(self._view(plan, g, 0))


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


class GroupRunner(Runner):
    """Runs a workload on a pool with layer groups."""

    def __init__(self, workload: Workload, **options: Any) -> None:
        workload.pool["num_blocks"], sizes = workload.pool["num_blocks"], dict(workload.pool)
        super().__init__(workload, **options)
        self.memory: Any = GroupMemory(self.model, self.pool)
        self.guest = GroupGuest(self.pool, self.rng)
        self.watch.strict = False
        self.watch.checkpoints = bool(workload.pool["prefix_cache"])
        self.num_arenas = 1 + max(arena_of(sizes["groups"], g) for g in range(len(sizes["groups"])))
        self.failures = 0

    def fits(self, request: Request) -> tuple[bool, bool]:
        """Whether a request may fit the pool, and whether it must."""
        options = self.workload.scheduler
        chunk = min(options["prefill_chunk"], options["max_step_tokens"])
        least, most = needs_alone(request, self.workload.pool, chunk)
        usable = []
        for arena in range(self.num_arenas):
            stats = self.pool.stats(arena)
            usable.append(stats.num_blocks - stats.reserved - (self.pool.options.watermark if arena == 0 else 0))
        return all(map(int.__le__, least, usable)), all(map(int.__le__, most, usable))

    def need(self, request: Request) -> int:
        """As `Runner` asks: 0 if the request was right to be accepted."""
        return 0 if self.fits(request)[0] else 1

    def usable(self) -> int:
        """As `Runner` asks."""
        return 0

    def _refuse(self, request: Request, reason: str) -> None:
        if reason == "too_large" and request.beam_width <= self.workload.scheduler["max_running"]:
            assert not self.fits(request)[1], f"{request.id} fits"
            self.refused.add(request.id)
            return
        super()._refuse(request, reason)

    def _execute(self, step: Any, tick: int) -> None:
        self._promises_hold(step)
        super()._execute(step, tick)

    def _promises_hold(self, step: Any) -> None:
        """Nobody else took blocks, so every running sequence is a row while the budget lasts."""
        options = self.workload.scheduler
        if self.workload.guests or not options["mixed"] or any(r.beam_width for r in self.requests.values()):
            return
        counts = self.scheduler.stats()
        if len(step.tokens) < options["max_step_tokens"] and all(map(self.pool.is_open, step.handles.tolist())):
            running = counts.prefilling + counts.decoding
            assert running == len(step.handles), f"{running} sequences run, {len(step.handles)} are rows"

    def _poison(self) -> None:
        """What no sequence names must not be read again."""

    def _finish(self) -> None:
        super()._finish()
        for arena in range(self.num_arenas):
            stats = self.pool.stats(arena)
            assert stats.used == stats.limbo == 0, f"arena {arena} leaked: {stats}"
        if not (self.workload.guests or self.watch.failures):
            assert self.scheduler._core.setbacks == 0, "a sequence was preempted for a chunk"
