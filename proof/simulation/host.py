"""The host of `proof.simulation.simulator`: an engine that schedules.

It keeps books of its own (tokens, stamps, lengths, how many blocks a table has) and asks the pool for handles,
tables and plans only, so that whatever the pool gets wrong differs from the books or from the device's memory.
"""

from __future__ import annotations

import random
from collections import Counter, deque
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from kvpool import Plan, Pool
from kvpool.errors import OutOfBlocks, OutOfSequences, PlanStateError
from proof.simulation.books import Flight, Request, Row, Send, Tally
from proof.simulation.device import Device, Violation, Work, frozen
from proof.simulation.evict import compact, evict_blocks
from proof.simulation.layers import layers_of
from proof.simulation.misuse import make_wrong_call
from proof.simulation.world import Shape, Stamps, prompts

LOG_LINES = 40
SLOT = (1 << 20) - 1  # of a handle: its row in tables of all sequences


@dataclass(frozen=True, slots=True)
class Kit:
    """What is simulated; the faults of `proof.simulation.faults` are kits with one part broken."""

    Pool: Any = Pool
    Plan: Any = Plan
    Device: Any = Device
    #: what the shape of every world is changed to, for faults that need something to be on
    shape: dict[str, Any] = field(default_factory=dict)


class Host:
    """One simulated world: `run`, then `drain`."""

    def __init__(self, seed: int, kit: Kit) -> None:
        self.rng = random.Random(seed)
        self.shape = shape = Shape.draw(self.rng, kit.shape)
        self.tally = Tally()
        self.log: deque[str] = deque([f"{shape}"], maxlen=LOG_LINES)
        self.pool = kit.Pool(shape.num_blocks, shape.block_size, seed=seed, **shape.pool_options())
        self.layers = layers_of(shape.groups, shape.block_size, shape.reserved_blocks)
        self.with_state = any(layers.kind == "state" for layers in self.layers)
        formats = ("slot_mapping", "block_tables", *(["table_updates"] if shape.by_updates else []))
        sizes: dict[str, Any] = {"formats": formats}
        if not shape.groups:
            sizes = {"formats": (*formats, "kv_slots_ragged"), "kv_width": shape.max_length}
        sizes |= {"max_rows": shape.max_rows, "max_tokens": shape.max_tokens, "table_width": shape.width}
        self.plans = [kit.Plan(self.pool, **sizes) for _ in range(shape.depth)]
        blocks = [self.pool.stats(arena).num_blocks for arena in self.arenas()]
        mirror = (shape.max_seqs, shape.width) if shape.by_updates else None
        self.device = kit.Device(self.layers, blocks, shape.num_layers, shape.by_tables, mirror)
        self.stamps = Stamps()
        self.prompts = prompts(self.rng, shape, self.stamps)
        self.spare = list(self.plans)
        self.waiting: list[Request] = []
        self.running: list[Request] = []
        self.flights: list[Flight] = []  # oldest first
        self.of_work: dict[int, Flight] = {}
        self.mailbox: list[Flight] = []
        self.pins: list[tuple[int, list[int]]] = []
        self.sends: list[Send] = []
        self.states: Counter[tuple[str, str]] = Counter()  # what was aborted and preempted, in which state
        self.num_forks = self.ticket = 0
        self.dead = -1  # handle of a sequence that was closed
        self.events = [getattr(self, name) for name in shape.weights]
        self.weights = list(shape.weights.values())

    def run(self, steps: int) -> None:
        """Let events happen until so many steps were made."""
        ticks, limit = 0, 400 * steps
        while self.tally.steps < steps:
            for event in self.rng.choices(self.events, self.weights, k=64):
                event()
            self.audit()
            ticks += 64
            if ticks > limit:
                raise Violation(f"stuck: {self.tally.steps} steps in {ticks} events")

    def drain(self) -> None:
        """Finish everything; then nothing may be in use."""
        while self.flights:
            self.sync(self.flights[0])
        for request in list(self.running):
            self.close(request)
        while self.pins:
            self.unpin()
        while self.sends:
            self.sent()
        for arena in self.arenas():
            stats = self.pool.stats(arena)
            busy = (stats.used, stats.limbo, stats.sequences, stats.pending)
            if any(busy) or stats.free != stats.num_blocks - stats.reserved:
                raise Violation(f"leak: (used, limbo, sequences, pending) = {busy} at idle in arena {arena}, {stats}")
        self.pool.check()
        self.tally.reads = self.device.reads

    def leave(self) -> None:
        """Give the pool back."""
        self.pool.shutdown()

    def audit(self) -> None:
        """The books and the pool agree; every request whose work is executed reads what it wrote."""
        for arena in self.arenas():
            stats = self.pool.stats(arena)
            if stats.free + stats.limbo + stats.used != stats.num_blocks - stats.reserved:
                raise Violation(f"accounting: {stats}")
        if stats.sequences != len(self.running) + len(self.pins):
            raise Violation(f"{stats.sequences} sequences, {len(self.running)} run and {len(self.pins)} are pinned")
        for request in self.running:
            self.verify(request)

    def verify(self, request: Request) -> None:
        """A request has its length, and reads what it wrote as far as that is executed."""
        length = self.pool.num_tokens(request.handle) - request.gone
        if length != request.length or self.pool.kv_len(request.handle) != length:
            raise Violation(f"sequence {request.handle} has {length} tokens, {request.length} were written")
        if request.length and self.device.is_settled(request.ticket):
            self.read(request, self.least(request), length)

    def arenas(self) -> range:
        """The numbers of all arenas."""
        return range(1 + max(layers.arena for layers in self.layers))

    def least(self, request: Request) -> int:
        """The least length to which a request may be cut, by what the pool promises; tokens that left apart."""
        if self.with_state:
            return request.length
        has_all = all(layers.kind == "full" for layers in self.layers)
        return request.least if has_all else max(request.passed - self.shape.lookahead, 0)

    def read(self, request: Request, position: int, length: int) -> None:
        """Read what queries at a position and later may read of so many tokens."""
        stamps, who = np.array(request.stamps[:length], np.int64), f"sequence {request.handle}"
        for layers in self.layers:
            table = layers.table(self.pool, request.handle)
            if layers.kind == "state":
                self.device.expect_state(layers, int(table[0, 0]) if len(table) else -1, int(stamps[-1]), who)
            else:
                self.device.expect(layers, table, stamps, int(layers.first_read(position)), who)

    def look(self, request: Request) -> list[set[int]]:
        """Note the blocks of a request's tables; returns those that are new in them."""
        tables = [set(layers.table(self.pool, request.handle).ravel().tolist()) for layers in self.layers]
        for layers, table in zip(self.layers, tables, strict=True):
            table.difference_update(range(-1, layers.low))
        old = request.tables or [set() for _ in tables]
        request.tables = tables
        return [table - before for table, before in zip(tables, old, strict=True)]

    def poison(self, request: Request) -> None:
        """Blocks that came into a request's tables hold nothing that anybody may read."""
        for layers, fresh in zip(self.layers, self.look(request), strict=True):
            if fresh and not self.shape.in_order:
                self.device.poison(layers.arena, fresh)

    # ---- events: requests come and go ---------------------------------------------------------------------

    def submit(self) -> None:
        """A request arrives, with a prompt that others may have had."""
        if len(self.waiting) < 4:
            namespace, tokens, stamps = self.rng.choice(self.prompts)
            target = self.rng.randint(len(tokens), self.shape.max_length)
            self.waiting.append(Request(list(tokens), list(stamps), target, namespace))

    def admit(self) -> None:
        """Open a sequence for the oldest request that waits."""
        if not self.waiting or len(self.running) >= self.shape.max_running:
            return
        request = self.waiting[0]
        use = self.rng.random() < 0.9
        try:
            if self.shape.prefix_cache and use:
                request.handle = self.pool.open(request.tokens, request.namespace)
            elif use:
                request.handle = self.pool.open(len(request.tokens), request.namespace)
            else:
                request.handle = self.pool.open(0, request.namespace)
        except (OutOfBlocks, OutOfSequences):
            return
        self.running.append(self.waiting.pop(0))
        self.opened(request, len(request.tokens) - 1 if self.shape.prefix_cache and use else 0)

    def opened(self, request: Request, most: int) -> None:
        """Read what was found, and poison what was taken."""
        cached = self.pool.num_tokens(request.handle)
        if cached > most or cached % self.shape.block_size:
            raise Violation(f"{cached} of {len(request.tokens)} tokens are said to be cached")
        request.length = request.committed = request.passed = cached
        request.flights, request.drafting = [], False
        request.ticket = self.ticket if self.shape.in_order else -1
        found = self.layers[0].table(self.pool, request.handle)[: cached // self.shape.block_size]
        request.tables = [set(found.ravel().tolist()), *(set() for _ in self.layers[1:])]
        self.poison(request)
        if not self.shape.in_order:
            self.verify(request)
        self.tally.hits += cached
        found = f"{request.tokens} {request.namespace!r} cached {cached} {request.tables}"
        self.log.append(f"open {request.handle} {found}")

    def close(self, request: Request) -> None:
        """Close a sequence in whatever state it is."""
        self.verify(request)
        way = self.rng.random()
        if way < 0.2:
            self.pool.defer_close(request.handle)
        elif way < 0.4:
            self.pool.close_finished([request.handle], np.array([True]))
        else:
            self.pool.close(request.handle)
        self.log.append(f"close {request.handle}")
        self.dead = request.handle
        self.running.remove(request)
        request.handle = -1

    def abort(self) -> None:
        """A client leaves, whatever its request is doing."""
        if self.running or self.waiting:
            self.tally.aborts += 1
            request = self.rng.choice(self.running + self.waiting)
            self.states["abort", request.state()] += 1
            if request.handle < 0:
                self.waiting.remove(request)
            else:
                self.close(request)

    def finish(self) -> None:
        """Requests that have their tokens end, though steps beyond the end may be in flight."""
        for request in [r for r in self.running if r.length + r.gone >= r.target]:
            whole = not request.gone and len(request.tokens) < self.shape.max_length
            if self.rng.random() < 0.3 and whole:  # comes back with an answer
                self.prompts.append((request.namespace, list(request.tokens), list(request.stamps)))
                if len(self.prompts) > self.shape.num_prompts:
                    self.prompts.pop(self.rng.randrange(len(self.prompts)))
            self.close(request)

    def preempt(self) -> None:
        """Take a request's blocks away; it starts again later."""
        if not self.running:
            return
        request = self.rng.choice(self.running)
        self.tally.preemptions += 1
        self.states["preempt", request.state()] += 1
        self.close(request)
        if len(self.waiting) < 8:
            self.waiting.insert(0, self.again(request))

    def again(self, request: Request) -> Request:
        """The same request from its beginning; of one that lost tokens, what is left."""
        tokens, stamps = list(request.tokens), list(request.stamps)
        if request.gone:
            tokens, stamps = tokens or [0], []
            self.stamps.extend(stamps, tokens, request.namespace)
        return Request(tokens, stamps, request.target, request.namespace)

    def fork(self) -> None:
        """A request becomes a few, in whatever state it is."""
        if not self.running or len(self.running) >= self.shape.max_running:
            return
        parent = self.rng.choice(self.running)
        n = min(self.rng.randint(1, 3), self.shape.max_running - len(self.running))
        try:
            children = self.pool.fork(parent.handle, n).tolist()
        except OutOfSequences:
            return
        self.num_forks += n
        self.tally.forks += n
        self.log.append(f"fork {parent.handle} {children}")
        pending = [(parent.flights[-1][0], parent.done_length())] if parent.flights else []
        for handle in children:
            child = Request(list(parent.tokens), list(parent.stamps), parent.target, parent.namespace, handle)
            child.length, child.passed, child.ticket = parent.length, parent.passed, parent.ticket
            child.committed, child.flights = parent.committed, list(pending)
            child.gone, child.least, child.salt = parent.gone, parent.least, parent.salt
            self.running.append(child)
            self.look(child)

    # ---- events: steps ------------------------------------------------------------------------------------

    def schedule(self) -> None:
        """Issue a step for some of the running requests."""
        if not self.spare:
            if not self.mailbox and not self.device.queue:  # messages were lost
                self.give_up()
            return
        rows, counts, left = [], [], self.shape.max_tokens
        fresh: list[list[int]] = []
        some = self.rng.sample(self.running, min(len(self.running), self.rng.randint(1, self.shape.max_rows)))
        for request in some:
            row = Row(request, request.handle, request.length, len(request.tokens))
            n, sampled = self.row_tokens(request, row, left)
            if n < 0:
                continue
            rows.append(row)
            counts.append(n)
            fresh.append(sampled)
            left -= n
        if rows and self.rng.random() < self.shape.reserving:
            self.reserve(rows, counts)
        elif rows:
            self.step(rows, counts, fresh)

    def row_tokens(self, request: Request, row: Row, left: int) -> tuple[int, list[int]]:
        """Return how many tokens a request computes next (-1: it waits), and those that are sampled for it."""
        if request.drafting:
            return -1, []
        known = len(request.tokens) - request.length
        if known:
            return min(known, left, self.rng.randint(1, self.shape.chunk)), []
        drafts = self.rng.randint(1, self.shape.most_drafts) if self.rng.random() < self.shape.drafting else 0
        n = min(1 + drafts, left, self.shape.max_length - request.length)
        if n <= 0 and self.rng.random() < 0.9:  # it has all it may have; a row without new tokens is legal
            return -1, []
        row.drafts = max(0, n - 1)
        return n, [self.rng.randrange(self.shape.vocabulary) for _ in range(n)]

    def step(self, rows: list[Row], counts: list[int], fresh: list[list[int]]) -> None:
        """Call the pool, and note what the device has to do."""
        plan = self.spare[-1]
        partial = self.rng.random() < 0.3
        pad_to = (self.shape.max_rows, self.shape.max_tokens) if self.rng.random() < 0.2 else None
        handles = [row.handle for row in rows]
        able = self.pool.can(handles, counts)
        try:
            self.pool.step(plan, handles, counts, partial=partial, pad_to=pad_to)
            if not able and not partial:
                raise Violation(f"can denied a step that was taken: {handles} {counts}")
        except OutOfBlocks:
            if able:
                raise Violation(f"can promised blocks that are not there: {handles} {counts}") from None
            self.log.append("out of blocks")
            if self.rng.random() < 0.5:
                self.preempt()
            return
        served = plan.served.tolist()
        counts = [n if ok else 0 for n, ok in zip(counts, served, strict=True)]
        for row, n, sampled, ok in zip(rows, counts, fresh, served, strict=True):
            request = row.request
            if ok and sampled:
                request.tokens += sampled
                self.stamps.extend(request.stamps, sampled, request.namespace, request.salt)
                request.drafting = row.drafts > 0
            elif not ok:
                row.drafts = 0
            request.length += n
        self.tally.tokens += sum(counts)
        self.launch(plan, rows, counts)

    def first_slots(self, request: Request, row: Row, at: int, n: int) -> list[int]:
        """Return where in the slot mapping the first token of each block stands that the step appended."""
        size = self.shape.block_size
        request.num_blocks = max(row.num_blocks, -(-request.length // size))
        return [at + block * size - row.length for block in range(row.num_blocks, request.num_blocks) if n]

    def reserve(self, rows: list[Row], counts: list[int]) -> None:
        """Take blocks ahead."""
        plan = self.spare[-1]
        try:
            self.pool.reserve(plan, [row.handle for row in rows], counts)
        except OutOfBlocks:
            return
        for row in rows:
            row.drafts = 0
        self.launch(plan, rows, [0] * len(rows))

    def launch(self, plan: Any, rows: list[Row], counts: list[int]) -> None:
        """Give a plan to the device."""
        self.spare.pop()
        self.ticket += 1
        stamps: list[int] = []
        context: list[int] = []
        for row, n in zip(rows, counts, strict=True):
            request = row.request
            stamps += request.stamps[row.length : row.length + n]
            context += request.stamps[: request.length]
        work = Work(
            *(self.ticket, plan, len(rows), np.array([row.handle & SLOT for row in rows], np.int64)),
            *(np.array(stamps, np.int64), np.array(context, np.int64)),
            *(np.array(lens, np.int64) for lens in ([row.length for row in rows], [r.request.length for r in rows])),
        )
        flight = Flight(plan, work, rows, self.num_forks)
        if self.shape.in_order:
            work.plan = frozen(plan, self.layers, self.shape.by_updates)
        for row in rows:
            self.poison(row.request)
        self.device.submit(work)
        self.tally.steps += 1
        for layers in self.layers:
            arrays = layers.arrays(plan)
            if layers.kind == "state":
                self.tally.states += int(((arrays.state_src >= 0) & (arrays.state_src != arrays.state_dst)).sum())
            else:
                self.tally.copies += len(arrays.copies)
        self.log.append(f"step {self.ticket}: {[(row.handle, n) for row, n in zip(rows, counts, strict=True)]}")
        for row in rows:
            row.request.ticket = self.ticket
            if self.shape.in_order:
                row.request.passed = max(row.request.passed, row.request.length)
            else:
                row.request.flights.append((flight, row.length))
        self.of_work[self.ticket] = flight
        self.flights.append(flight)

    # ---- events: what became of steps ---------------------------------------------------------------------

    def execute(self) -> None:
        """The device does one operation; a step that it completes sends a message, mostly."""
        if not self.device.queue:  # the device starves
            self.schedule()
            return
        work = self.device.advance()
        if work is None:
            return
        flight = self.of_work.pop(work.ticket)
        flight.executed = True
        if self.rng.random() < self.shape.losing:
            self.tally.lost += 1
            self.log.append(f"executed {work.ticket}, the message is lost")
        else:
            self.mailbox.append(flight)

    def deliver(self) -> None:
        """A message arrives, not always the oldest."""
        if self.mailbox:
            at = self.rng.randrange(len(self.mailbox)) if self.rng.random() < self.shape.reordering else 0
            flight = self.mailbox.pop(at)
            if not flight.over:  # it may have been given up, and its plan be in use again
                self.note(flight)

    def note(self, flight: Flight) -> None:
        """Tell the pool that a step was executed; what is through then is worked off."""
        if flight.noted:
            return
        self.log.append(f"done {flight.work.ticket}")
        self.tally.out_of_order += flight is not self.flights[0]
        if not self.shape.in_order:
            self.pool.done(flight.plan)
        flight.noted = True
        while self.flights and self.flights[0].noted:
            if self.flights[0].plan.is_pending:
                raise Violation(f"step {self.flights[0].work.ticket} is pending though it and all before it are done")
            self.passed(self.flights.pop(0))

    def passed(self, flight: Flight) -> None:
        """A step is over: drafts are judged."""
        self.over(flight)
        for row, length in zip(flight.rows, flight.work.lens.tolist(), strict=True):
            request = row.request
            if request.handle == row.handle and not self.shape.in_order and self.shape.groups:
                request.passed = max(request.passed, length)
                had = sum(map(len, request.tables))
                self.look(request)
                self.tally.let_go += had - sum(map(len, request.tables))
            if request.handle != row.handle or not row.drafts:
                continue
            request.drafting = False
            self.cut(request, request.length - self.rng.randint(0, row.drafts))

    def cut(self, request: Request, keep: int) -> None:
        """Shorten a sequence that is in no step; what it had beyond is forgotten."""
        self.tally.cut += request.length - keep
        self.log.append(f"truncate {request.handle} {keep}")
        self.pool.truncate(request.handle, keep + request.gone)
        request.length = keep
        request.passed = min(request.passed, keep + self.shape.lookahead)
        self.look(request)
        request.committed = min(request.committed, keep)
        del request.tokens[keep:], request.stamps[keep:]

    def trim(self) -> None:
        """A client takes back the end of its text."""
        idle = [r for r in self.idle() if r.length > max(1, self.least(r))]
        if idle:
            request = self.rng.choice(idle)
            self.cut(request, self.rng.randint(max(1, self.least(request)), request.length - 1))

    def idle(self) -> list[Request]:
        """Those that run and are in no step; forks of rows in flight too."""
        idle = [r for r in self.running if not r.drafting]
        return [r for r in idle if not any(flight.rows_have(r) for flight, _ in r.flights)]

    def compact(self) -> None:
        """Tokens leave."""
        compact(self)

    def evict_blocks(self) -> None:
        """Blocks leave."""
        evict_blocks(self)

    def over(self, flight: Flight) -> None:
        """Its plan is free, and nobody waits for it any more."""
        flight.over = True
        self.spare.append(flight.plan)
        for request in self.running:
            if request.flights:
                request.flights = [each for each in request.flights if each[0] is not flight]

    def sync(self, flight: Flight) -> None:
        """Wait for a step: whatever became of its message, it is executed then."""
        while not flight.executed:
            if not self.device.queue:
                raise Violation(f"step {flight.work.ticket} was never executed")
            completed = self.device.advance()
            if completed is not None:
                self.of_work.pop(completed.ticket).executed = True
        for each in list(self.flights):
            if each.executed and not each.over and (each is flight or self.rng.random() < 0.5):
                self.note(each)

    def give_up(self) -> None:
        """A step's message is overdue: roll it back, wait for the device, or begin anew."""
        if not self.flights:
            return
        flight, way = self.rng.choice(self.flights), self.rng.random()
        if way < self.shape.resetting:
            self.reset()
        elif way < 0.5:
            self.sync(flight)
        elif not self.shape.in_order:
            while not flight.over and self.roll_back(self.flights[-1]):  # it failed, and all that follow it
                pass

    def roll_back(self, flight: Flight) -> bool:
        """Undo the newest step, executed, half executed or not at all; False when that is not allowed."""
        if flight.noted:
            return False
        queue = self.device.queue.copy()
        self.device.cancel(flight.work)
        try:
            self.pool.rollback(flight.plan)
        except PlanStateError:
            if self.num_forks == flight.fork_mark:
                raise
            self.tally.forbidden += 1
            if not flight.executed:  # a fork depends on it: it has to be executed after all
                self.device.queue = queue
            return False
        self.log.append(f"rollback {flight.work.ticket}")
        self.tally.rollbacks += 1
        self.of_work.pop(flight.work.ticket, None)
        self.flights.remove(flight)
        for row in flight.rows:
            request = row.request
            if request.handle == row.handle:
                request.length = row.length
                self.look(request)
                request.drafting = request.drafting and not row.drafts
                del request.tokens[row.num_known :], request.stamps[row.num_known :]
        self.over(flight)
        return True

    def reset(self) -> None:
        """Stop the device and forget everything; the requests start again."""
        self.log.append("reset")
        self.tally.resets += 1
        self.device.clear()
        self.pool.reset()
        for plan in self.plans:
            plan.bind()
        for flight in self.flights:
            flight.over = True
        self.spare = list(self.plans)
        self.flights, self.mailbox, self.pins, self.sends = [], [], [], []
        self.of_work.clear()
        for request in self.running[: 8 - len(self.waiting)]:
            self.waiting.append(self.again(request))
        self.running = []

    # ---- events: the prefix cache -------------------------------------------------------------------------

    def commit(self) -> None:
        """Make known what a request has computed."""
        if self.running:
            self.tell(self.rng.choice(self.running))

    def tell(self, request: Request) -> None:
        """Commit what is done of it, or a part."""
        done = request.done_length()
        if self.shape.prefix_cache and done > request.committed and not request.gone:
            upto = done if self.rng.random() < 0.7 else self.rng.randint(request.committed + 1, done)
            self.pool.prefix.commit(request.handle, request.tokens[request.committed : upto])
            self.log.append(f"commit {request.handle} {request.tokens[:upto]}")
            request.committed = upto

    def pin(self) -> None:
        """Hold what is cached of a prompt."""
        if self.shape.prefix_cache and len(self.pins) < 2:
            namespace, tokens, stamps = self.rng.choice(self.prompts)
            try:
                handle = self.pool.prefix.pin(tokens, namespace)
            except OutOfSequences:
                return
            self.pins.append((handle, stamps[: self.pool.num_tokens(handle)]))
            self.log.append(f"pin {handle} {tokens}")

    def unpin(self) -> None:
        """Let go what was pinned; it is still what it was."""
        if self.pins:
            handle, stamps = self.pins.pop(self.rng.randrange(len(self.pins)))
            if stamps and not self.shape.in_order:
                layers = self.layers[0]
                self.device.expect(layers, layers.table(self.pool, handle), np.array(stamps), 0, f"pin {handle}")
            self.pool.prefix.unpin(handle)
            self.log.append(f"unpin {handle}")

    def send(self) -> None:
        """Somebody begins to copy a request's full blocks elsewhere, or its state, and holds them meanwhile."""
        if not self.running or len(self.sends) == 2:
            return
        request, layers = self.rng.choice(self.running), self.layers[self.tally.sends % len(self.layers)]
        done, is_state = request.done_length(), layers.kind == "state"
        full = int(done == request.length > 0) if is_state else done // layers.size
        if full and self.device.is_settled(request.ticket):
            table = layers.table(self.pool, request.handle)[:full]
            left = (table >= layers.low).all(axis=1)
            low = 0 if left.all() else (int(np.flatnonzero(~left)[-1]) + 1) * layers.size
            layers.blocks(self.pool).incref(table[left].ravel())
            stamps = request.stamps[:done] if is_state else request.stamps[: full * layers.size]
            self.sends.append(Send(layers, table, left, stamps, low))
            self.tally.sends += 1
            self.log.append(f"send {request.handle} group {layers.number} {table.tolist()}")

    def sent(self) -> None:
        """The copy is made: the blocks hold what they held when it began, whatever became of the request."""
        if self.sends:
            send = self.sends.pop(self.rng.randrange(len(self.sends)))
            if send.layers.kind == "state":
                self.device.expect_state(send.layers, int(send.table[0, 0]), send.stamps[-1], "a transfer")
            else:
                self.device.expect(send.layers, send.table, np.array(send.stamps, np.int64), send.low, "a transfer")
            send.layers.blocks(self.pool).decref(send.table[send.left].ravel())
            self.log.append(f"sent {send.table.tolist()}")

    def flush(self) -> None:
        """Forget what is cached."""
        if self.shape.prefix_cache:
            self.pool.prefix.flush(self.rng.choice([None, b"", b"other"]))
            self.log.append("flush")

    def misuse(self) -> None:
        """Somebody calls at the wrong moment."""
        make_wrong_call(self)
