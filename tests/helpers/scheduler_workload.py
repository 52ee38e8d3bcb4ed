"""Random workloads for `kvpool.Scheduler`, run on the token model and compared with decoding alone.

`draw(seed)` makes a workload, `Runner(workload).run()` runs and judges it: every output against a reference that has
no pool, every step against what docs/scheduling.md says of steps (`scheduler_watch`), the pool when all is over.
A failure names the number of its workload: ``KVPOOL_WORKLOAD=17`` runs that one alone, and checks after every step.
``KVPOOL_LONG=1`` runs many more.
"""

from __future__ import annotations

import os
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
from scheduler_turns import Turns
from scheduler_watch import Watch
from token_model import TokenMemory, TokenModel, salt_of

from kvpool import Pool, Request, Scheduler
from kvpool.errors import OutOfBlocks, OutOfSequences, RequestRejected, UnknownRequest
from kvpool.retention import Keep
from kvpool.scheduler import Decoding

NAMESPACES = (b"", b"lora-1", b"tenant-2")
TENANTS = (None, "a", "b", ("c", 1))
EOS_ANY, BLOCK_SIZES = 7, (1, 2, 3, 4, 8, 16, 32)
ONLY = os.environ.get("KVPOOL_WORKLOAD")


def numbers(count: int, long: int) -> range:
    """The workloads that a test runs: so many, or as many in long tests, or the one of `ONLY`."""
    return range(int(ONLY), int(ONLY) + 1) if ONLY else range(long if os.environ.get("KVPOOL_LONG") else count)


@dataclass
class Workload:
    """Everything that a run depends on."""

    seed: int
    pool: dict[str, Any]
    scheduler: dict[str, Any]
    arrivals: list[tuple[int, Request]]  # tick, request; ids are 0, 1, 2, ...
    #: request: tick, moment ("before", "out", "after")
    cancels: dict[int, tuple[int, str]] = field(default_factory=dict)
    fail_rate: float = 0.0
    guests: bool = False  # somebody else uses the pool, too
    tier: bool = False  # KV may be spilled
    exact: bool = False  # the largest request and no block more
    quantum: float = 2.0**-16
    patience: dict[int, int] = field(default_factory=dict)  # request: looks at the clock until its deadline
    drafts: float | None = None  # how often a drafted token is right; None: nobody drafts

    def __str__(self) -> str:
        return f"workload {self.seed}: Pool({self.pool}) Scheduler({self.scheduler}), {len(self.arrivals)} requests"


def tokens_needed(request: Request) -> int:
    """Tokens of a sequence whose KV is ever in the pool: all but the last."""
    return request.prompt.size + request.max_tokens - 1


def blocks_alone(request: Request, block_size: int) -> int:
    """Blocks with which a request can run: for a beam a bound from above."""
    whole = -(-tokens_needed(request) // block_size)
    if not request.beam_width:
        return whole
    shared = request.prompt.size // block_size
    return shared + request.beam_width * (whole - shared + 1)


def log_uniform(rng: np.random.Generator, low: int, high: int) -> int:
    return int(np.floor(np.exp(rng.uniform(np.log(low), np.log(high + 1)))))


def draw_request(
    rng: np.random.Generator, model: TokenModel, name: int, templates: list[Any], width: int, pressed: bool, plain: bool
) -> Request:
    """One request: prompts that share prefixes, ends that really happen. Plain ones are one sequence each."""
    length = log_uniform(rng, 1, 25 if pressed else 70)
    prompt = rng.integers(model.vocabulary, size=length)
    if rng.random() < 0.5:
        template = templates[rng.integers(len(templates))]
        shared = int(rng.integers(1, template.size + 1))
        prompt = np.concatenate([template[:shared], prompt[: max(1, length - shared)]])
    how: dict[str, Any] = {"namespace": NAMESPACES[rng.choice(3, p=[0.7, 0.15, 0.15])]}
    max_tokens = log_uniform(rng, 6 if pressed else 1, 40 if pressed else 28)
    kind = 1.0 if plain else rng.random()
    if kind < 0.12:
        how["beam_width"] = int(rng.integers(1, min(4, width) + 1))
        how["n"] = int(rng.integers(1, how["beam_width"] + 1))
        how["length_penalty"] = float(rng.choice([0.0, 0.7, 1.0, 2.0, -0.5]))
        max_tokens = min(max_tokens, 10)
    elif kind < 0.3:
        how["n"] = int(rng.integers(2, 6))
    if "beam_width" not in how and (rng.random() < 0.4 or "n" in how):
        how["user"] = int(rng.integers(1 << 30))  # the seed of its samples; None: greedy
    ends = rng.random()
    if ends < 0.45:
        alone = model.solo(prompt, max_tokens, salt=salt_of(how["namespace"]), seed=how.get("user")).tokens.tolist()
        at = int(rng.integers(len(alone)))
        if ends < 0.25:
            how["eos"] = (alone[at], *rng.integers(model.vocabulary, size=int(rng.integers(0, 3))).tolist())
        else:
            how["stop"] = (alone[max(0, at - int(rng.integers(0, 4))) : at + 1], rng.integers(64, size=2).tolist())
    return Request(prompt, max_tokens, id=name, priority=int(rng.choice([0, 0, 0, 1, -1])), **how)


def draw(seed: int) -> Workload:
    """Workload number `seed`. Half are under pressure: many at once, long outputs, few small blocks."""
    rng = np.random.default_rng([seed, 20260])
    model = TokenModel()
    pressed, plain = bool(rng.random() < 0.5), bool(rng.random() < 0.35)
    block_size = int(rng.choice(BLOCK_SIZES[:5] if pressed else BLOCK_SIZES))
    max_running = log_uniform(rng, 4 if pressed else 1, 32)
    templates = [rng.integers(model.vocabulary, size=int(rng.integers(8, 50))) for _ in range(2)]
    count = log_uniform(rng, 5 if pressed else 1, 16)
    requests = [draw_request(rng, model, i, templates, max_running, pressed, plain) for i in range(count)]
    tick, arrivals = 0, []
    gap = rng.choice([0.0, 0.5, 1.0 if pressed else 6.0])
    for request in requests:
        tick += int(rng.poisson(gap))
        arrivals.append((tick, request))
    scheduler = draw_scheduler(rng, max_running, pressed)
    workload = Workload(seed, draw_pool(rng, requests, block_size, pressed), scheduler, arrivals)
    for name in range(count):
        if rng.random() < 0.15:
            late = int(rng.integers(0, 30))
            workload.cancels[name] = (arrivals[name][0] + late, str(rng.choice(["before", "out", "after"])))
    workload.fail_rate = float(rng.choice([0.0, 0.0, 0.1]))
    workload.quantum = float(rng.choice([2.0**-16, 2.0**-16, 2.0**-2]))  # a coarse one: hypotheses of equal score
    workload.guests = bool(rng.random() < 0.2)
    largest = max(blocks_alone(request, block_size) for request in requests)
    usable = workload.pool["num_blocks"] - workload.pool["reserved_blocks"] - workload.pool["watermark"]
    workload.exact = usable == largest
    workload.tier = bool(rng.random() < 0.35)
    share_out(workload)
    return workload


def draw_crowd(seed: int) -> Workload:
    """Workload number `seed` of another kind: many requests of several tenants wait for a small pool."""
    rng = np.random.default_rng([seed, 20262])
    model = TokenModel()
    templates = [rng.integers(model.vocabulary, size=30) for _ in range(2)]
    requests = []
    for name in range(int(rng.integers(20, 50))):
        length = int(rng.integers(40, 70)) if rng.random() < 0.1 else log_uniform(rng, 1, 30)
        prompt = rng.integers(model.vocabulary, size=length)
        if rng.random() < 0.4:
            prompt = np.concatenate([templates[rng.integers(2)][: int(rng.integers(1, 31))], prompt])
        how = {"priority": int(rng.choice([0, 0, 0, 1, -1])), "namespace": NAMESPACES[0]}
        requests.append(Request(prompt, log_uniform(rng, 1, 24), id=name, **how))
    gap = rng.choice([0.0, 0.3, 1.0])
    arrivals = list(zip(np.cumsum(rng.poisson(gap, len(requests))).tolist(), requests, strict=True))
    block_size, running = int(rng.choice([1, 2, 4])), int(rng.integers(2, 9))
    pool = draw_pool(rng, requests, block_size, pressed=True)
    scheduler = draw_scheduler(rng, running, pressed=True)
    workload = Workload(seed, pool, scheduler, arrivals, fail_rate=float(rng.choice([0.0, 0.0, 0.05])))
    share_out(workload)
    return workload


def share_out(workload: Workload) -> None:
    """Give requests tenants, deadlines and directives, and the scheduler weights and bounds of its order."""
    rng = np.random.default_rng([workload.seed, 20264])
    tenants = TENANTS[: int(rng.integers(1, 5))]
    whose = [tenants[at] for at in rng.integers(len(tenants), size=len(workload.arrivals))]
    arrivals = zip(workload.arrivals, whose, strict=True)
    workload.arrivals = [(tick, replace(request, tenant=tenant)) for (tick, request), tenant in arrivals]
    weights = {name: float(rng.choice([0.25, 1.0, 1.0, 3.0])) for name in tenants if rng.random() < 0.7}
    workload.scheduler["weights"] = weights
    workload.scheduler["ageing"] = int(rng.choice([1, 2, 4, 256]))
    workload.scheduler["overtake"] = int(rng.choice([0, 0, 1, 2, 16]))
    if rng.random() < 0.3:
        some = [request.id for _, request in workload.arrivals if rng.random() < 0.4]
        workload.patience = {name: log_uniform(rng, 1, 200) for name in some}
    if rng.random() < 0.3:
        for at, (tick, request) in enumerate(workload.arrivals):
            keep = Keep(int(rng.integers(1, 8)), log_uniform(rng, 1, 400)) if rng.random() < 0.4 else None
            workload.arrivals[at] = tick, replace(request, keep=keep)


def draw_pool(rng: np.random.Generator, requests: list[Request], block_size: int, pressed: bool) -> dict[str, Any]:
    """A pool in which the largest request fits, sometimes exactly; rarely it does not."""
    reserved, watermark = int(rng.integers(0, 2)), int(rng.choice([0, 0, 0, 1, 2]))
    largest = max(blocks_alone(r, block_size) for r in requests)
    everything = sum(blocks_alone(r, block_size) * (1 if r.beam_width else r.n) for r in requests)
    most = min(everything - largest, largest if pressed else 600)
    spare = 0 if rng.random() < 0.3 else int(rng.integers(0, most + 1))
    if rng.random() < 0.06:
        largest = max(1, largest - int(rng.integers(1, 4)))
    return {
        "num_blocks": reserved + watermark + largest + spare,
        "block_size": block_size,
        "reserved_blocks": reserved,
        "watermark": watermark,
        "prefix_cache": bool(rng.random() < 0.6),
        "in_order": bool(rng.random() < 0.1),
        "max_seqs": int(rng.choice([40, 128])),
    }


def draw_scheduler(rng: np.random.Generator, max_running: int, pressed: bool) -> dict[str, Any]:
    """Options of `Scheduler`."""
    options: dict[str, Any] = {
        "max_running": max_running,
        "prefill_chunk": log_uniform(rng, 1, 512),
        "max_step_tokens": max_running + log_uniform(rng, 1, 512),
        "mixed": bool(rng.random() < 0.75),
        "preempt": str(rng.choice(["last", "longest", "grower", "priority"])),
        "watermark": None if rng.random() < (0.3 if pressed else 0.6) else int(rng.choice([0, 0, 1, 3])),
        "plans": int(rng.integers(1, 3)),
    }
    if rng.random() < 0.25:
        options["max_step_tokens"] = log_uniform(rng, 1, 64)  # decodes may exceed it, prefills wait then
    if rng.random() < 0.15:
        options["max_waiting"] = int(rng.integers(1, 6))
    if rng.random() < 0.1:
        options["max_model_len"] = int(rng.integers(40, 100))
    if rng.random() < 0.15:
        rows, tokens = max_running, max(max_running, options["max_step_tokens"])
        options["pad_to"] = rows + int(rng.integers(0, 4)), tokens + int(rng.integers(0, 9))
    return options


def expected_of(model: TokenModel, request: Request) -> list[Any]:
    """What decoding alone makes of a request, one result per output."""
    how = {"eos": request.eos, "stop": request.stop, "salt": salt_of(request.namespace)}
    if request.beam_width:
        how["length_penalty"] = request.length_penalty
        return model.beam(request.prompt, request.max_tokens, request.beam_width, request.n, **how)
    return [model.solo(request.prompt, request.max_tokens, seed=request.user, index=i, **how) for i in range(request.n)]


class Tier:
    """Keeps the planes of blocks that are spilled to it, when it feels like it."""

    def __init__(self, memory: TokenMemory, rng: np.random.Generator) -> None:
        self.memory, self.rng = memory, rng

    def spill_to_host(self, handle: int, blocks: Any) -> Any:
        return None if self.rng.random() < 0.3 else self.memory.save(blocks)

    def prefetch(self, kept: Any, handle: int, blocks: Any) -> None:
        self.memory.load(kept, blocks)


class Guest:
    """Somebody else in the same pool: takes what is there now and then, gives it back soon."""

    def __init__(self, pool: Pool, rng: np.random.Generator) -> None:
        self.pool, self.rng = pool, rng
        self.handles: list[int] = []
        self.blocks: list[int] = []

    def visit(self) -> None:
        if self.rng.random() < 0.05:
            space = NAMESPACES[self.rng.integers(3)] if self.rng.random() < 0.7 else None
            if self.pool.prefix is not None:
                self.pool.prefix.flush(space)
        if self.rng.random() < 0.05:
            self.pool.blocks.evict(int(self.rng.integers(1, 4)))
        stats = self.pool.stats()
        there = stats.free // 2
        if self.rng.random() < 0.3:
            self.leave()
        elif self.rng.random() < 0.3 and there > 1:
            self.handles.append(self.pool.open(int(self.rng.integers(0, there)) * self.pool.block_size // 2))
        elif self.rng.random() < 0.3 and there > 1:
            self.blocks += self.pool.blocks.alloc(min(stats.blank, int(self.rng.integers(0, there)))).tolist()

    def leave(self) -> bool:
        """Give everything back; whether there was anything."""
        had = bool(self.handles or self.blocks)
        self.pool.close(self.handles)
        self.pool.blocks.decref(self.blocks)
        self.handles, self.blocks = [], []
        return had


class Flight:
    """A step that is out: its inputs, what is known of its rows, and its states once the model has run."""

    def __init__(self, scheduler: Scheduler, step: Any, sampled: np.ndarray | None = None) -> None:
        self.step, self.tokens = step, step.tokens.copy()
        if step.follows is not None:
            assert sampled is not None and ((step.follows >= 0) == (step.tokens == -1)).all()
            late = step.follows >= 0
            self.tokens[late] = sampled[step.follows[late]]
        self.requests = [scheduler.request_of(lane) for lane in step.lanes.tolist()]
        self.states: np.ndarray | None = None

    def run(self, memory: Any) -> np.ndarray:
        """What the model makes of the step: computed once."""
        if self.states is None:
            salts = [salt_of(request.namespace) for request in self.requests]
            self.states = memory.forward(self.tokens, self.step.plan, np.array(salts, np.uint64))
        return self.states


class Runner:
    """Runs a workload; every method that finds something wrong raises AssertionError.

    `ahead`: the next step is planned while one is out, whenever the scheduler does it.
    """

    def __init__(
        self, workload: Workload, scheduler_class: Any = Scheduler, check_every: int = 7, ahead: bool = False
    ) -> None:
        if ahead:
            workload = replace(workload, scheduler=workload.scheduler | {"plans": 2})
        self.workload, self.ahead = workload, ahead
        self.following: Flight | None = None  # planned ahead
        self.steps_ahead = 0
        self.rng = np.random.default_rng([workload.seed, 4])
        self.model = TokenModel(quantum=workload.quantum)
        self.pool = Pool(seed=1, **workload.pool)
        groups = self.pool.options.groups
        size = (groups and groups[0].block_size) or self.pool.block_size
        self.memory: Any = TokenMemory(self.model, self.pool.num_blocks, size)
        self.now = 0
        tier = Tier(self.memory, self.rng) if workload.tier else None
        options = {} if workload.drafts is None else {"speculate": self._drafts}
        self.scheduler = scheduler_class(self.pool, clock=self.clock, tier=tier, **options, **workload.scheduler)
        self.watch = Watch(self.scheduler, self.pool, workload.scheduler)
        self.watch.caches = workload.pool.get("prefix_cache", False)
        self.guest = Guest(self.pool, self.rng)
        is_plain = all(r.n == 1 and not r.beam_width for r in self._requests())
        if is_plain and type(self) is Runner and not (ahead or workload.tier):
            self.watch.turns = Turns(workload.scheduler)
        self.watch.strict = not (workload.tier or workload.guests or workload.pool.get("in_order"))
        self.check_every = 1 if ONLY else check_every
        self.outputs: dict[tuple[int, int], Any] = {}
        self.added: dict[int, int] = {}  # request: when
        self.seen: dict[tuple[int, int], int] = {}  # sequence: tokens that were shown
        self.requests = {request.id: request for request in self._requests()}
        self.expected = {name: expected_of(self.model, request) for name, request in self.requests.items()}
        self.cancelled: set[int] = set()
        self.refused: set[int] = set()
        self.steps = 0
        self.log: list[tuple[Any, ...]] = []  # what the steps were, for comparisons of two runs

    def _requests(self) -> list[Request]:
        return [request for _, request in self.workload.arrivals]

    def _drafts(self, rows: list[Decoding]) -> list[np.ndarray]:
        """Drafts that are often right, of any number, also behind the end of the answer."""
        found = []
        for row in rows:
            alone = self.expected[row.request.id][row.index].tokens
            begin = len(row.generated)
            assert np.array_equal(row.generated, alone[:begin]), "a proposer sees other tokens"
            assert 1 <= row.most < row.request.max_tokens - begin, f"{row.most} drafts behind {begin} tokens"
            drafts = np.append(alone[begin:], self.rng.integers(64, size=row.most + 3))
            wrong = self.rng.random(len(drafts)) > self.workload.drafts
            drafts[wrong] = self.rng.integers(64, size=int(wrong.sum()))
            found.append(drafts[: self.rng.integers(0, min(row.most + 3, 20))])
        return found

    def clock(self) -> int:
        """Every look at the clock is later than the one before: events have an order."""
        self.now += 1
        return self.now

    def run(self) -> Runner:
        try:
            self._run()
        except Exception as error:
            raise AssertionError(f"{self.workload}\nstep {self.steps}: {type(error).__name__}: {error}") from error
        return self

    def _run(self) -> None:
        pending = list(self.workload.arrivals)
        tick = 0
        while True:
            pending = self._arrive(pending, tick)
            self._cancel(tick, "before")
            if self.workload.guests:
                self.guest.visit()
            step = self._schedule() if self.following is None else self.following.step
            if step is None:
                if not pending:
                    break
            else:
                self._execute(step, tick)
                self._cancel(tick, "after")
                if self.steps % self.check_every == 0:
                    self.check()
            tick += 1
        self._finish()

    def _arrive(self, pending: list[tuple[int, Request]], tick: int) -> list[tuple[int, Request]]:
        """Add what has arrived; what finds the queue full comes again."""
        later = []
        for when, request in pending:
            if when > tick or (later and later[-1][0] <= tick):  # nobody overtakes at the door
                later.append((when, request))
                continue
            most, turns = self.workload.scheduler.get("max_waiting"), self.watch.turns
            waiting = self.scheduler.stats().waiting if turns is None else len(turns.waiting)  # new ones count
            is_crowd = most is not None and (
                waiting >= most or turns is None or turns.new_of(request.tenant) >= turns.share(request.tenant, most)
            )
            if request.id in self.workload.patience:
                request = replace(request, deadline=self.now + 1 + self.workload.patience[request.id])
            try:
                name = self.scheduler.add(request)
            except RequestRejected as error:
                if error.reason == "queue_full":
                    assert is_crowd, f"{waiting} wait, {most} may"
                    later.append((when, request))
                    continue
                self._refuse(request, error.reason)
                continue
            assert name == request.id
            assert turns is None or not is_crowd, f"{waiting} wait, {most} may"
            if turns is not None:
                turns.arrive(request)
            self.requests[name] = request
            assert self.fits(request)[0]
            assert tokens_needed(request) <= self.workload.scheduler.get("max_model_len", 10**9)
            self.added[name] = self.now
        return later

    def need(self, request: Request) -> int:
        """Blocks with which a request can run."""
        return blocks_alone(request, self.pool.block_size)

    def usable(self) -> int:
        return self.pool.num_blocks - self.pool.options.reserved_blocks - self.pool.options.watermark

    def fits(self, request: Request) -> tuple[bool, bool]:
        """Whether a request may fit the pool, and whether it must."""
        fits = self.need(request) <= self.usable()
        return fits or request.beam_width > 0, fits

    def _refuse(self, request: Request, reason: str) -> None:
        self.refused.add(request.id)
        if reason == "too_long":
            assert tokens_needed(request) > self.workload.scheduler["max_model_len"]
            return
        assert reason == "too_large", reason
        too_wide = request.beam_width > self.workload.scheduler["max_running"]
        assert too_wide or not self.fits(request)[1], f"{request.id} fits"

    def _cancel(self, tick: int, moment: str) -> None:
        for name, (when, where) in self.workload.cancels.items():
            if where != moment or when > tick or name in self.cancelled or name not in self.added:
                continue
            self.cancelled.add(name)
            done = [key for key in self.outputs if key[0] == name]
            if len(done) == self.requests[name].n:
                try:
                    self.scheduler.cancel(name)
                except UnknownRequest:
                    continue
                raise AssertionError(f"{name} has finished, and was cancelled")
            self._collect(self.scheduler.cancel(name))

    def _schedule(self) -> Any:
        self.watch.door = {name: self.requests[name] for name in self.added}
        try:
            step = self.scheduler.schedule()
        except (OutOfBlocks, OutOfSequences):
            assert self.guest.leave(), "out of blocks without guests"
            step = self.scheduler.schedule()
        if step is None:
            assert not (set(self.added) - {key[0] for key in self.outputs}), "no step, but requests are left"
        elif not len(step.handles):
            assert self.guest.leave(), "an empty step without guests"
        return step

    def _execute(self, step: Any, tick: int) -> None:
        self.steps += 1
        flight, self.following = self.following or Flight(self.scheduler, step), None
        self.watch.step(step, flight.requests)
        self.log.append(((step.handles & 0xFFFFF).tolist(), step.num_new.tolist(), flight.tokens.tolist()))
        self._cancel(tick, "out")
        if self.rng.random() < self.workload.fail_rate:
            self._fail(step)
            return
        results = self.sample(step, flight.run(self.memory)[step.sample_at])
        if self.ahead:
            self._plan_ahead(results[0])
            if self.following is not None and self.rng.random() < self.workload.fail_rate:
                self._fail(step)
                return
        if step.follows is not None:
            self.watch.dropped += not all(map(self.pool.is_open, step.handles.tolist()))
        before = self.now
        outputs = self.scheduler.update(step, *results)
        self._expired(before, outputs)
        self.watch.updated(len(step.sample_at), self.requests)
        self._collect(outputs)
        if self.following is None or self.following.states is not None:
            self._poison()

    def _plan_ahead(self, sampled: np.ndarray) -> None:
        """Plan the step after one that is out. Then it may run at once, or fail."""
        step = self.scheduler.schedule()
        if step is None:
            return
        self.steps_ahead += 1
        self.following = Flight(self.scheduler, step, sampled)
        if self.rng.random() < 0.5:  # the model is as fast as that
            self.following.run(self.memory)
        if self.check_every == 1:
            self.check()
        if self.rng.random() < self.workload.fail_rate:
            self._fail(step)

    def _fail(self, step: Any) -> None:
        """Take a step back, and the one that was planned after it."""
        self.memory.spoil(step.plan)
        self.scheduler.fail(step)
        self.following = None
        self.watch.failed()

    def _expired(self, before: int, outputs: list[Any]) -> None:
        """Who had a deadline before the update has ended, and nobody whose deadline is to come."""
        ended = {output.id for output in outputs} | {name for name, _ in self.outputs}
        for name in self.added:
            deadline = self.requests[name].deadline
            assert deadline is None or deadline > before or name in ended, f"{name} goes on after its deadline"
        for output in outputs:
            early = output.finish_reason == "deadline" and self.requests[output.id].deadline > self.now
            assert not early, f"{output.id} ended before its deadline"

    def sample(self, step: Any, states: np.ndarray) -> tuple[Any, Any, Any]:
        """Tokens, logprobs and beams of a step."""
        tokens = self.model.greedy(states)
        users = [request.user for request in step.requests]
        rows = [i for i, user in enumerate(users) if user is not None]
        if rows:
            seeds = [users[i] for i in rows]
            index, position = step.sample_index[rows], step.sample_position[rows]
            tokens[rows] = self.model.sample(states[rows], seeds, index, position)
        logprobs = np.take_along_axis(self.model.logprobs(states), tokens[:, None].astype(np.int64), axis=1)[:, 0]
        of_beams = np.flatnonzero(step.beam_width)
        beams = self.model.top(states[of_beams], 2 * int(step.beam_width.max())) if of_beams.size else None
        return tokens, logprobs, beams

    def _collect(self, outputs: list[Any]) -> None:
        for output in outputs:
            key = (output.id, output.index)
            assert key not in self.outputs, f"{key} ended twice"
            self.outputs[key] = output
            self.watch.gone.add(output.id)
            if self.watch.turns is not None:
                self.watch.turns.leave(output.id)
            if output.finish_reason in ("cancelled", "deadline"):
                self.watch.tokenless = 0  # what was computed for it will not end in a token
                self.watch.forget_closed()
            self._judge(output, self.requests[output.id])

    def _judge(self, output: Any, request: Request) -> None:
        if output.finish_reason in ("cancelled", "deadline"):
            is_due = output.id in (self.cancelled if output.finish_reason == "cancelled" else self.workload.patience)
            assert is_due, f"{output.id} was not {output.finish_reason}"
            if not request.beam_width:
                alone = self.expected[output.id][output.index].tokens[: output.tokens.size]
                found = f"{output.finish_reason} {output.id}: {output.tokens}"
                assert np.array_equal(output.tokens, alone), f"{found} is not {alone}"
            return
        alone = self.expected[output.id][output.index]
        name = f"output {output.index} of request {output.id}"
        assert output.tokens.dtype == np.int32
        assert np.array_equal(output.tokens, alone.tokens), f"{name}: {output.tokens} alone is {alone.tokens}"
        assert output.finish_reason == alone.finish_reason, f"{name}: {output.finish_reason}, not {alone.finish_reason}"
        if request.beam_width:
            assert abs(output.score - alone.score) < 1e-4, f"{name}: {output.score}, not {alone.score}"
        else:
            assert np.array_equal(output.logprobs, alone.logprobs), f"{name}: other logprobs"
            assert output.score is None

    def _poison(self) -> None:
        """What nobody holds must not be read again. (A cached block of a prefix cache may be.)"""
        if not self.workload.pool["prefix_cache"]:
            first = self.pool.options.reserved_blocks
            self.memory.poison([b for b in range(first, self.pool.num_blocks) if not self.pool.blocks.refcount(b)])

    def check(self) -> None:
        self.pool.check()
        self.scheduler.check()
        for name in self.added:
            request = self.requests[name]
            if (name, 0) in self.outputs or request.beam_width:
                continue
            tokens = self.scheduler.tokens_of(name)
            assert tokens.size >= self.seen.get((name, 0), 0), f"{name} lost tokens"
            self.seen[name, 0] = tokens.size
            assert np.array_equal(tokens, self.expected[name][0].tokens[: tokens.size])

    def _finish(self) -> None:
        """All requests ended, once each; the pool is empty."""
        for name in self.added:
            ended = [self.outputs[key] for key in self.outputs if key[0] == name]
            if not any(o.finish_reason == "cancelled" for o in ended):
                assert len(ended) == self.requests[name].n, f"{name}: {len(ended)} outputs"
        assert set(self.added) | self.refused == set(self.requests)
        self.scheduler.check()
        self.guest.leave()
        self.pool.check()
        stats = self.pool.stats()
        assert (stats.used, stats.limbo, stats.sequences, stats.pending) == (0, 0, 0, 0), f"leaked: {stats}"
        if not self.workload.pool["prefix_cache"]:
            assert stats.evictable == 0
        counts = self.scheduler.stats()
        assert (counts.waiting, counts.prefilling, counts.decoding, counts.spilled) == (0, 0, 0, 0), counts
        assert counts.rejected >= len(self.refused)
        self.watch.finished(self.requests, self.outputs)
