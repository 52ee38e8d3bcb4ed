"""What one thread does to a pool: calls that have to succeed, calls that have to be refused, and books of its own.

A `Caller` changes only its own sequences, plans and blocks, so it knows what each call on them has to give, whatever
other threads do to the same pool. A `Rude` caller takes everybody's: there, any documented refusal will do.
"""

from __future__ import annotations

import random
from operator import attrgetter
from typing import Any, ClassVar

import kvpool
from kvpool import CapacityExceeded, KVPoolError, OutOfBlocks, OutOfSequences, PlanStateError, StaleHandle
from kvpool.errors import ConcurrentUse, CorruptState, ForeignHandle

FULL = (OutOfBlocks, OutOfSequences)  # what other threads may cause
NAMESPACES = (b"", b"tenant")
CHUNK = 500  # verbs drawn at a time
TAG_SHIFT = 52
MOST_OPEN, MOST_BLOCKS = 12, 10


class Wrong(AssertionError):
    """A call did something else than it had to."""


def token(family: int, position: int) -> int:
    """What stands at a position of all sequences of a family: forks and prompts never contradict each other."""
    return family * 7 + position % 5


class Caller:
    """Random calls of one thread. `calls` counts them, all of the pool's public ones."""

    VERBS: ClassVar[dict[str, int]] = {  # with their weights
        "open": 8, "step": 20, "done": 14, "rollback": 4, "fork": 4, "truncate": 5, "close": 6, "commit": 12,
        "flush": 1, "read": 8, "alloc": 3, "free": 3, "touch": 2, "defer": 1, "refused": 9, "events": 1, "reserve": 2,
    }  # fmt: skip

    def __init__(self, pool: kvpool.Pool, number: int, seed: int) -> None:
        self.pool, self.number = pool, number
        self.rng = random.Random(seed << 8 | number)
        self.calls = 0
        self.lengths: dict[int, int] = {}  # of open sequences
        self.family: dict[int, int] = {}
        self.raw: dict[int, int] = {}  # block -> references of ours
        self.dead: list[int] = []  # handles that were closed
        self.plans = [kvpool.Plan(pool, 4, 64, formats=("block_tables",)) for _ in range(3)]
        self.free_plans = list(self.plans)
        self.pending: list[tuple[kvpool.Plan, dict[int, int]]] = []  # in step order, with the lengths before
        self.is_noted: set[int] = set()  # ids of plans whose `done` was said early
        self.cached = pool.prefix is not None

    # ------------------------------------------------------------------ running

    def run(self, calls: int) -> None:
        """Make about as many calls."""
        verbs = [getattr(self, name) for name in self.VERBS]
        weights = list(self.VERBS.values())
        last = self.calls + calls
        while self.calls < last:
            for verb in self.rng.choices(verbs, weights, k=min(CHUNK, last - self.calls)):
                verb()

    def call(self, name: str, *args: Any, may: tuple[type[BaseException], ...] = ()) -> Any:
        """A public call that has to succeed, or to be refused in one of these ways; None then."""
        self.calls += 1
        try:
            return attrgetter(name)(self.pool)(*args)
        except may:
            return None

    def refuse(self, kind: type[BaseException], name: str, *args: Any) -> None:
        """A public call that has to be refused in this way."""
        self.calls += 1
        try:
            attrgetter(name)(self.pool)(*args)
        except kind:
            return
        raise Wrong(f"{name}{args} was not refused with {kind.__name__}")

    def same(self, what: str, found: object, expected: object) -> None:
        """The books are right."""
        if found != expected:
            raise Wrong(f"thread {self.number}, call {self.calls}: {what} is {found}, expected {expected}")

    # ------------------------------------------------------------------ sequences

    def open(self) -> None:
        """An empty one, or with a prompt of which some tokens may be cached."""
        if len(self.lengths) >= MOST_OPEN:
            return self.close()
        family = self.rng.randrange(6)
        prompt: Any = self.rng.randrange(9)
        if self.cached and self.rng.random() < 0.6:
            prompt = [token(family, at) for at in range(self.rng.randrange(1, 24))]
        handle = self.call("open", prompt, self.rng.choice(NAMESPACES), may=FULL)
        if handle is not None:
            found = self.call("num_tokens", handle) or 0  # None: a rude caller has closed it
            if found and (isinstance(prompt, int) or found >= len(prompt)):
                raise Wrong(f"{found} cached tokens of the prompt {prompt}")
            self.lengths[handle], self.family[handle] = found, family
        return None

    def some(self, most: int = 4) -> list[int]:
        """A few open sequences."""
        count = min(len(self.lengths), self.rng.randint(1, most))
        return self.rng.sample(list(self.lengths), count)

    def fork(self) -> None:
        """Children of the same length."""
        if not self.lengths or len(self.lengths) >= MOST_OPEN:
            return
        (parent,) = self.some(1)
        children = self.call("fork", parent, 2, may=FULL)
        for child in [] if children is None else children.tolist():
            self.lengths[child], self.family[child] = self.lengths[parent], self.family[parent]

    def waiting(self) -> list[tuple[kvpool.Plan, dict[int, int]]]:
        """Plans of ours that are pending whatever others do. One that was declared done passes with an older one."""
        return [(plan, before) for plan, before in self.pending if id(plan) not in self.is_noted]

    def truncate(self) -> None:
        """Refused for rows of pending plans; of a plan that was declared done, others may decide."""
        (handle,) = self.some(1) or [None]
        if handle is None:
            return
        length = self.rng.randint(0, self.lengths[handle])
        if any(handle in before for _, before in self.waiting()):
            return self.refuse(PlanStateError, "truncate", handle, length)
        is_open_question = any(handle in before for _, before in self.pending)
        self.call("truncate", handle, length, may=(PlanStateError,) if is_open_question else ())
        if is_open_question:
            found = self.call("num_tokens", handle)
            self.same("a length", found in (length, self.lengths[handle]), True)
            length = found
        self.lengths[handle] = length
        return None

    def close(self) -> None:
        """At any time."""
        rows = self.some(2)
        self.call("close", rows)
        self.forget(rows)

    def defer(self) -> None:
        """What a finalizer does."""
        if self.lengths:
            rows = self.some(1)
            self.call("defer_close", rows[0])
            self.forget(rows)

    def forget(self, rows: list[int]) -> None:
        """They are closed."""
        for handle in rows:
            del self.lengths[handle], self.family[handle]
        self.dead = [*self.dead, *rows][-20:]

    # ------------------------------------------------------------------ steps

    def step(self) -> None:
        """A step of a few rows, some with many tokens."""
        self.advance("step")

    def reserve(self) -> None:
        """Blocks without tokens."""
        self.advance("reserve")

    def advance(self, name: str) -> None:
        """`step` or `reserve` on a plan of ours; one that is pending is refused."""
        self.look()
        if not self.free_plans:
            for plan, _ in self.waiting()[:1]:
                self.refuse(PlanStateError, name, plan, self.some(), 1)
            return self.done()
        plan = self.free_plans[-1]
        rows = self.some()
        new = [self.rng.choice((1, 1, 1, 0, 5, 9)) for _ in rows]
        if any(self.lengths[h] + n > MOST_BLOCKS * self.pool.block_size for h, n in zip(rows, new, strict=True)):
            return self.close()
        self.call(name, plan, rows, new, may=FULL)
        took = plan.is_pending if not self.pool.options.in_order else None
        return self.book(plan, rows, new if name == "step" else [0] * len(rows), took)

    def book(self, plan: kvpool.Plan, rows: list[int], new: list[int], took: bool | None) -> None:
        """Note a step that went well; of an in-order pool the lengths tell (`took` None)."""
        before = {handle: self.lengths[handle] for handle in rows}
        after = {handle: self.lengths[handle] + n for handle, n in zip(rows, new, strict=True)}
        if took is None:
            found = {handle: self.call("num_tokens", handle) for handle in rows}
            if found not in (before, after):
                raise Wrong(f"lengths {found} after a step of {new} on {before}")
            self.lengths |= found
        elif took:
            self.free_plans.remove(plan)
            self.pending.append((plan, before))
            self.lengths |= after

    def look(self) -> None:
        """Plans that passed in the meantime, after older ones of other threads: no call, an attribute."""
        for plan, _ in [entry for entry in self.pending if not entry[0].is_pending]:
            self.pending = [entry for entry in self.pending if entry[0] is not plan]
            self.is_noted.discard(id(plan))
            self.free_plans.append(plan)

    def done(self) -> None:
        """The oldest of ours that nobody has declared done; a second time is refused."""
        self.look()
        for plan, _ in self.waiting()[:1]:
            self.call("done", plan)
            self.is_noted.add(id(plan))
            return self.look()
        plans = self.free_plans or [plan for plan, _ in self.pending]
        return self.refuse(PlanStateError, "done", plans[0])

    def rollback(self) -> None:
        """The newest of ours, if it is the newest of the pool and has no children."""
        self.look()
        if not self.pending:
            return self.refuse(PlanStateError, "rollback", self.free_plans[0])
        plan, before = self.pending[-1]
        if id(plan) in self.is_noted:
            return self.refuse(PlanStateError, "rollback", plan)
        self.call("rollback", plan, may=(PlanStateError,))
        if not plan.is_pending:
            self.lengths |= {handle: length for handle, length in before.items() if handle in self.lengths}
            self.look()
        return None

    # ------------------------------------------------------------------ prefix cache, blocks

    def commit(self) -> None:
        """Tokens from where the sequence's commits ended; refused where they are not done yet."""
        if not self.cached or not self.lengths:
            return
        (handle,) = self.some(1)
        start = self.call("prefix.committed", handle) or 0
        end = self.rng.randint(start, max(start, self.lengths[handle]))
        family = self.family[handle]
        self.call("prefix.commit", handle, [token(family, at) for at in range(start, end)], may=(ValueError,))

    def flush(self) -> None:
        """Forget a namespace, or all of them."""
        if self.cached and self.rng.random() < 0.3:
            self.call("prefix.flush", self.rng.choice((None, *NAMESPACES)))

    def events(self) -> None:
        """What happened in the index; each thread takes some."""
        for event in self.call("prefix.events") if self.cached else []:
            if not isinstance(event, tuple) or not event:
                raise Wrong(f"an event is {event!r}")

    def alloc(self) -> None:
        """Blocks of our own."""
        if len(self.raw) < 12:
            ids = self.call("blocks.alloc", 3, may=FULL)
            for block in [] if ids is None else ids.tolist():
                self.same("holders of a new block", block in self.raw, False)
                self.raw[block] = 1

    def touch(self) -> None:
        """One reference more."""
        if self.raw:
            ids = self.rng.sample(list(self.raw), 1)
            self.call("blocks.incref", ids)
            self.raw[ids[0]] += 1
            self.same(f"refcount of block {ids[0]}", self.call("blocks.refcount", ids[0]), self.raw[ids[0]])

    def free(self) -> None:
        """One reference less; what has more of them is not freed."""
        if self.raw:
            block = self.rng.choice(list(self.raw))
            if self.raw[block] > 1:
                self.refuse(ValueError, "blocks.free", [block])
            self.call("blocks.decref", [block])
            self.raw[block] -= 1
            if not self.raw[block]:
                del self.raw[block]

    # ------------------------------------------------------------------ readers, refusals

    def read(self) -> None:
        """Readers, which are never refused and agree with the books."""
        kind = self.rng.randrange(8)
        if kind == 0:
            stats = self.call("stats")
            self.same("blocks in all places", stats.free + stats.limbo + stats.used, self.usable())
        elif kind == 1:
            self.call("digest")
        elif kind == 2 and self.cached:
            self.call("prefix.stats")
        elif kind == 6:
            self.same("blank blocks in range", 0 <= self.pool.blocks.num_blank <= self.usable(), True)
            repr((self.pool, self.plans[0]))
        elif kind == 3 and self.dead:
            self.same("a closed handle", self.call("is_open", self.rng.choice(self.dead)), False)
        elif self.lengths:
            (handle,) = self.some(1)
            length, size = self.lengths[handle], self.pool.block_size
            self.same("is_open", self.call("is_open", handle), True)
            self.same("num_tokens", self.call("num_tokens", handle), length)
            table = self.call("table", handle)
            if table is not None and kind == 4:
                self.same("blocks enough", len(table) * size >= length and len(set(table.tolist())) == len(table), True)
                self.call("can", [handle], 3)
            elif kind == 5 and self.rng.random() < 0.1:
                self.call("check")

    def usable(self) -> int:
        """Blocks that are not reserved."""
        return self.pool.num_blocks - self.pool.options.reserved_blocks

    def refused(self) -> None:
        """A call that is wrong in one way."""
        kind = self.rng.randrange(9)
        if kind == 0 and self.dead:
            self.refuse(StaleHandle, "close", self.rng.choice(self.dead))
        elif kind == 1 and self.lengths:
            (handle,) = self.some(1)
            self.refuse(ForeignHandle, "num_tokens", handle ^ 1 << TAG_SHIFT)
        elif kind == 2 and self.lengths:
            (handle,) = self.some(1)
            self.refuse(ValueError, "truncate", [handle, handle], [0, 0])
        elif kind == 3 and self.lengths and self.free_plans:
            (handle,) = self.some(1)
            self.refuse(CapacityExceeded, "step", self.free_plans[0], [handle], 65)
        elif kind == 4:
            self.refuse(ValueError, "close", [-1])
        elif kind == 5 and self.free_plans:
            self.refuse(ValueError, "step", self.free_plans[0], self.some(), -1) if self.lengths else None
        elif kind == 6:
            self.refuse(TypeError, "close", "handle")
        elif kind == 7:
            self.refuse(IndexError, "blocks.refcount", self.pool.num_blocks)
        elif kind == 8 and len(self.raw) > 1:
            (block,) = self.rng.sample(list(self.raw), 1)
            self.refuse(ValueError, "blocks.decref", [block, block])

    # ------------------------------------------------------------------ the end

    def leave(self) -> None:
        """Give everything back: what is left in the pool then is nobody's."""
        for plan, _ in self.pending:
            if id(plan) not in self.is_noted:
                self.call("done", plan)
        for block, references in self.raw.items():
            for _ in range(references):
                self.call("blocks.decref", [block])
        self.call("close", list(self.lengths))
        self.lengths, self.raw, self.pending = {}, {}, []


class Guesses(dict):
    """What a rude caller believes of a sequence that is not its own."""

    def __missing__(self, handle: int) -> int:
        return 3


class Rude(Caller):
    """Takes the sequences and plans of all threads: its books are guesses, and any documented refusal will do."""

    VERBS = Caller.VERBS | {"meddle": 10, "evict": 2, "move": 2}
    REFUSALS = (KVPoolError, ValueError, IndexError)

    def __init__(self, pool: kvpool.Pool, number: int, seed: int, everybody: list[Rude]) -> None:
        super().__init__(pool, number, seed)
        self.lengths, self.family = Guesses(), Guesses()
        self.everybody = everybody
        everybody.append(self)

    def call(self, name: str, *args: Any, may: tuple[type[BaseException], ...] = ()) -> Any:
        """Any documented refusal will do, but for those that say that threads are in each other's way."""
        self.calls += 1
        try:
            return attrgetter(name)(self.pool)(*args)
        except (ConcurrentUse, CorruptState):
            raise
        except self.REFUSALS:
            return None

    def refuse(self, kind: type[BaseException], name: str, *args: Any) -> None:
        """As good as any call, of the right types."""
        if kind is not TypeError:
            self.call(name, *args)

    def same(self, what: str, found: object, expected: object) -> None:
        """Nothing is known for sure."""

    def some(self, most: int = 4) -> list[int]:
        """A few sequences of one thread, which may be closed by now."""
        handles = list(dict.copy(self.rng.choice(self.everybody).lengths)) or [0]  # a copy: it grows meanwhile
        return self.rng.sample(handles, min(len(handles), self.rng.randint(1, most)))

    def forget(self, rows: list[int]) -> None:
        """What is closed, if it was ours; a batch may have been refused."""
        for handle in rows:
            if self.call("is_open", handle):
                continue
            self.lengths.pop(handle, None)
            self.family.pop(handle, None)
            self.dead = [*self.dead, handle][-20:]

    def book(self, plan: kvpool.Plan, rows: list[int], new: list[int], took: bool | None) -> None:
        """Which plans may be pending, no more."""
        if took:
            self.free_plans.remove(plan)
            self.pending.append((plan, {}))

    def open(self) -> None:
        """Like the others, without those that somebody has closed."""
        if len(self.lengths) > MOST_OPEN // 2:
            self.forget(list(self.lengths))
        super().open()

    def leave(self) -> None:
        """One by one: what is closed already is refused."""
        for plan in self.plans:
            self.call("done", plan)
        for handle in self.lengths:
            self.call("close", handle)
        self.lengths, self.pending = Guesses(), []
        super().leave()

    def meddle(self) -> None:
        """End or begin a step on anybody's plan."""
        plan = self.rng.choice(self.rng.choice(self.everybody).plans)
        name = self.rng.choice(("step", "done", "done", "rollback"))
        self.call(name, plan, *((self.some(), 1) if name == "step" else ()))

    def evict(self) -> None:
        """Blocks leave the cache."""
        self.call("blocks.evict", self.rng.randrange(4))

    def move(self) -> None:
        """Tokens leave a sequence: blocks of its own for it, then fewer tokens."""
        rows, lens = self.some(1), [self.rng.randrange(4)]
        if self.free_plans and self.rng.random() < 0.7:
            plan = self.free_plans[-1]
            self.call("unshare", plan, rows, lens)
            self.book(plan, rows, [0], plan.is_pending)
        else:
            self.call("compact", rows, lens)
