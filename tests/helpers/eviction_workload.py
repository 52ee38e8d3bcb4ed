"""The random workloads of `scheduler_workload` with a budget per sequence, and an oracle of what each row then holds.

The oracle knows tokens and positions: of every sequence a list of positions that must be in its blocks, in this
order, each with the digest that the token model gives to the tokens up to there. Scores are a fixed function of that
digest, so what a policy must choose follows from the list too.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
from scheduler_workload import Runner, Workload, draw, tokens_needed
from token_model import TokenMemory, TokenModel, mix, salt_of

from kvpool import Pool, Request, Scheduler
from kvpool.config import KVSpec
from kvpool.eviction import H2O, BlockEviction, Evictor, Policy
from kvpool.protocol import Capabilities


class EvictedMemory(TokenMemory):
    """A `TokenMemory` whose sequences lose tokens: also the backend that an `Evictor` moves them in.

    Of a pool with layer groups it holds the first.
    """

    def __init__(self, model: TokenModel, pool: Pool) -> None:
        groups = pool.options.groups
        super().__init__(model, pool.num_blocks, (groups and groups[0].block_size) or pool.block_size)
        self.spec = KVSpec(1, 1, 8, "float32", self.block_size)
        self.num_blocks = pool.num_blocks
        self.rows: list[tuple[np.ndarray, np.ndarray]] = []  # of the last forward: positions and values of each row
        self.fail_next: str | None = None  # "copy_blocks" or "compact" raises, once

    capabilities = Capabilities("tokens", ("NHD",), ("float32",), scores=("raw", "mass"), compacts=True)

    def _fails(self, call: str) -> None:
        if self.fail_next == call:
            self.fail_next = None
            raise OSError(f"{call} is broken")

    def copy_blocks(self, copies: Any) -> None:
        self._fails("copy_blocks")
        self._copy(copies)

    def compact(self, blocks: Any, keep: np.ndarray) -> None:
        places = np.arange(self.block_size)
        slots = (np.asarray(blocks, np.int64)[:, None] * self.block_size + places).ravel()
        read, write = slots[np.asarray(keep)[0, 0]], slots[: np.shape(keep)[-1]]
        for plane in self.planes:
            kept = plane[read]
            plane[write[: len(kept) // 2]] = kept[: len(kept) // 2]
            self._fails("compact")  # half done
            plane[write] = kept

    def forward(self, tokens: Any, plan: Any, salts: Any = 0) -> np.ndarray:
        self.rows = []
        return super().forward(tokens, plan, salts)

    def read(self, row: int, context: np.ndarray) -> None:
        self.rows.append((self.position[context], self.value[context]))


def score_of(values: np.ndarray) -> np.ndarray:
    """Of a token, float32: 24 bits of what it is, so that no two are alike."""
    return (values >> np.uint64(40)).astype(np.float32) - np.float32(2**23)


class Oracle(Evictor):
    """An evictor that says what must be left: `held` are positions, and `values` what they stand for."""

    def __init__(self, policy: Policy, pool: Pool, memory: EvictedMemory) -> None:
        super().__init__(policy, pool, memory)
        self.held: dict[int, np.ndarray] = {}
        self.values: dict[int, np.ndarray] = {}
        self.evictions = self.shared = 0
        self.parent_of: Any = None  # lane of a fork: what its parent held at the end of the prompt

    def evict(self, handles, rows, after):  # type: ignore[no-untyped-def]
        (handle,), size = handles, self.memory.block_size
        if handle not in self.held:  # a fork that has not been in a step yet
            self.held[handle], self.values[handle] = self.parent_of(int(rows[0]))
        ids = self.pool.table(handle, self.group).ravel().tolist()
        self.shared += any(self.pool.blocks.refcount(block) > 1 for block in ids)
        held, target = self.held[handle], int(after[0])
        assert len(held) == self.pool.kv_len(handle, self.group)
        super().evict(handles, rows, after)
        self.evictions += 1
        scores = np.abs(score_of(self.values[handle][held]))
        stays = np.zeros(len(held), bool)
        stays[: self.policy.sink] = True
        recent = min(self.policy.recent, target - self.policy.sink)
        if isinstance(self.policy, BlockEviction):
            first = -(-self.policy.sink // size)
            end = (len(held) - recent) // size
            blocks = sorted(range(first, end), key=lambda b: scores[b * size : b * size + size].sum(dtype=np.float64))
            stays[:] = True
            for block in blocks[: (len(held) - target) // size]:
                stays[block * size : block * size + size] = False
        else:
            stays[len(held) - recent :] = True
            middle = sorted(range(self.policy.sink, len(held) - recent), key=lambda at: -scores[at])
            stays[middle[: target - self.policy.sink - recent]] = True
        assert stays.sum() == target
        self.held[handle] = held[stays]


def draw_policy(rng: np.random.Generator, block_size: int) -> Policy:
    """One with a budget that most requests pass."""
    max_kv, sink = int(rng.integers(8, 36)), int(rng.integers(0, 4))
    kind = str(rng.choice(["raw", "mass"]))
    if rng.random() < 0.7:
        return H2O(max_kv=max_kv, sink=sink, heavy=int(rng.integers(2, max_kv // 2)), alpha=0.5, kind=kind, slack=1)
    recent = int(rng.integers(1, max_kv // 2))
    least = -(-sink // block_size) * block_size + recent + block_size
    return BlockEviction(max_kv=max(max_kv, least), sink=sink, recent_tokens=recent, alpha=0.5)


def alone(policy: Policy, request: Request, block_size: int, chunk: int, caches: bool) -> int:
    """Blocks with which a request runs under a policy, as docs/scheduling.md says."""
    tokens = tokens_needed(request)
    most = policy.max_kv - 1
    need = min(-(-tokens // block_size), (most + chunk + block_size - 2) // block_size + 1)  # they begin anywhere
    if caches and tokens > policy.max_kv and not policy.whole_blocks:
        need += -(-most // block_size)
    if caches and tokens > policy.max_kv:
        need += 1
    return need


def leave_out_beams(workload: Workload) -> bool:
    """Take the beams out of a workload. Returns whether requests are left."""
    workload.arrivals = [(tick, request) for tick, request in workload.arrivals if not request.beam_width]
    named = {request.id for _, request in workload.arrivals}
    workload.cancels = {name: cancel for name, cancel in workload.cancels.items() if name in named}
    return bool(named)


def draw_evicting(seed: int) -> tuple[Workload, Policy]:
    """Workload number `seed`, without beams, and a budget; in half of them no block more than one request needs."""
    rng = np.random.default_rng([seed, 8])
    workload = draw(seed)
    if not leave_out_beams(workload):
        return draw_evicting(seed + 1000)
    size, options, pool = workload.pool["block_size"], workload.scheduler, workload.pool
    policy = draw_policy(rng, size)
    chunk = min(options["prefill_chunk"], options["max_step_tokens"])
    need = max(alone(policy, r, size, chunk, pool["prefix_cache"]) for _, r in workload.arrivals)
    spare = 0 if rng.random() < 0.4 else int(rng.integers(0, 3 * need))
    pool["num_blocks"] = pool["reserved_blocks"] + pool["watermark"] + need + spare
    return workload, policy


class EvictingRunner(Runner):
    """A `Runner` under a policy: what each row reads is what the oracle says it holds."""

    def __init__(self, workload: Workload, policy: Policy, break_rate: float = 0.0, **how: Any) -> None:
        found: list[Oracle] = []

        def make(pool: Pool, **options: Any) -> Scheduler:
            found.append(Oracle(policy, pool, EvictedMemory(TokenModel(quantum=workload.quantum), pool)))
            return Scheduler(pool, eviction=found[0], **options)

        super().__init__(workload, make, **how)
        (self.oracle,) = found
        self.policy, self.break_rate = policy, break_rate
        self.memory = self.oracle.backend
        tier = self.scheduler._core.tier
        if tier is not None:
            tier.memory = self.memory
        self.watch.strict = self.watch.simple = False
        self.watch._victims = lambda *_: None
        self.watch.updated = lambda *_: None  # its bounds are those of a scheduler that preempts for decodes only
        self.at_end_of_prompt: dict[Any, tuple[np.ndarray, np.ndarray]] = {}
        self.oracle.parent_of = lambda lane: self.at_end_of_prompt[self.scheduler.request_of(lane).id]

    def need(self, request: Request) -> int:
        options = self.workload.scheduler
        chunk = min(options["prefill_chunk"], options["max_step_tokens"])
        return alone(self.policy, request, self.pool.block_size, chunk, self.workload.pool["prefix_cache"])

    def roomy(self, request: Request) -> bool:
        return tokens_needed(request) <= self.policy.max_kv

    def _schedule(self) -> Any:
        if self.rng.random() < self.break_rate:
            self.oracle.backend.fail_next = str(self.rng.choice(["copy_blocks", "compact"]))
        try:
            return super()._schedule()
        except OSError:
            self.check()
            return super()._schedule()
        finally:
            self.oracle.backend.fail_next = None

    def _execute(self, step: Any, tick: int) -> None:
        self.pool.check()
        self.scheduler.check()
        rows = self.scheduler._core.rows
        for row, (lane, handle) in enumerate(zip(step.lanes.tolist(), step.handles.tolist(), strict=True)):
            sequence = rows.sequence(lane)
            request, begin = sequence.group.request, int(rows.computed[lane])
            tokens = rows.known(lane, 0, begin + int(step.num_new[row]))
            digests = self.model.digests(tokens, np.arange(len(tokens)))
            start = self.model.start(salt_of(request.namespace))
            self.oracle.values[handle] = mix(start + np.cumsum(digests, dtype=np.uint64))
            if handle not in self.oracle.held:
                fork = step.evicted[row] > 0
                self.oracle.held[handle] = self.at_end_of_prompt[request.id][0] if fork else np.arange(begin)
            assert len(self.oracle.held[handle]) <= self.policy.most, "a step begins above the budget"
        super()._execute(step, tick)

    def sample(self, step: Any, states: np.ndarray) -> tuple[Any, Any, Any]:
        """What the rows have read is judged, and shown to the policy."""
        memory = self.oracle.backend
        lens = np.array([len(positions) for positions, _ in memory.rows])
        scores = np.zeros((len(lens), 1, int(lens.max(initial=0))), np.float32)
        for row, (handle, (positions, values)) in enumerate(zip(step.handles.tolist(), memory.rows, strict=True)):
            held, known = self.oracle.held[handle], self.oracle.values[handle]
            due = np.concatenate([held, np.arange(len(known) - int(step.num_new[row]), len(known))])
            assert np.array_equal(positions, due), f"row {row} holds {positions.tolist()}, not {due.tolist()}"
            assert np.array_equal(values, known[due]), f"row {row} reads tokens of somebody else"
            self.oracle.held[handle] = due
            scores[row, 0, : len(values)] = score_of(values)
        first = step.sample_position == 0
        handle_of = dict(zip(step.lanes.tolist(), step.handles.tolist(), strict=True))
        for at in np.flatnonzero(first):
            handle = handle_of[int(step.sample_lane[at])]
            self.at_end_of_prompt[step.requests[at].id] = self.oracle.held[handle], self.oracle.values[handle]
        self.oracle.begin(step.lanes, lens)
        for layer in range(len(self.oracle.memory.scores)):
            self.oracle.observe(layer, scores)
        return super().sample(step, states)

    def _judge(self, output: Any, request: Request) -> None:
        if self.roomy(request):
            super()._judge(output, request)

    def check(self) -> None:
        expected = self.expected
        self.expected = dict(expected)
        for name in self.added:
            if not self.roomy(self.requests[name]) and (name, 0) not in self.outputs:
                self.expected[name] = [SimpleNamespace(tokens=self.scheduler.tokens_of(name))]  # nobody knows better
        super().check()
        self.expected = expected
