"""What one thread does to a pool: calls that have to succeed, calls that have to be refused, and an account of its own.

A `Caller` changes only its own sequences, plans and blocks, so it knows what each call on them has to give, whatever
other threads do to the same pool. A `Stranger` takes everybody's: there, any documented refusal will do.
"""

from __future__ import annotations

import random
from operator import attrgetter
from typing import Any, ClassVar

import kvpool
from kvpool import KVPoolError, OutOfBlocks, OutOfSequences, PlanStateError
from kvpool.errors import ConcurrentUse, CorruptState

FULL = (OutOfBlocks, OutOfSequences)  # what other threads may cause
NAMESPACES = (b"", b"tenant")
TAG_SHIFT = 52
MOST_OPEN, MOST_BLOCKS = 12, 10


class Wrong(AssertionError):
    """A call did something else than it had to."""


def prompt_of(family: int, first: int, last: int) -> list[int]:
    """Tokens from `first` to `last` of all sequences of a family: forks and prompts never contradict each other."""
    return [family * 7 + position % 5 for position in range(first, last)]


class Caller:
    """Random calls of one thread. `calls` counts them, all of the pool's public ones."""

    VERBS: ClassVar[dict[str, int]] = {  # with their weights
        "open": 8, "step": 22, "done": 14, "rollback": 4, "fork": 4, "truncate": 5, "close": 7, "commit": 12,
        "alloc": 3, "free": 5, "read": 8,
    }  # fmt: skip

    def __init__(self, pool: kvpool.Pool, number: int, seed: int) -> None:
        self.pool, self.calls, self.rng = pool, 0, random.Random(seed << 8 | number)
        self.lengths: dict[int, int] = {}  # of open sequences
        self.family: dict[int, int] = {}
        self.blocks: list[int] = []  # of our own
        #: Our plans, those of older steps first, and the lengths of their rows before the step.
        self.plans = {kvpool.Plan(pool, 4, 64, formats=("block_tables",)): {} for _ in range(3)}
        self.noted: set[kvpool.Plan] = set()  # their `done` was called: they pass with an older plan of others

    def run(self, calls: int) -> None:
        """Make about as many calls."""
        verbs = [getattr(self, name) for name in self.VERBS]
        weights = list(self.VERBS.values())
        last = self.calls + calls
        while self.calls < last:
            for verb in self.rng.choices(verbs, weights, k=min(500, last - self.calls)):
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

    def same(self, what: str, found: object, *expected: object) -> None:
        if found not in expected:
            raise Wrong(f"call {self.calls}: {what} is {found}, expected {expected}")

    def some(self, most: int) -> list[int]:
        """A few open sequences."""
        return self.rng.sample(list(self.lengths), min(len(self.lengths), self.rng.randint(1, most)))

    def waiting(self) -> list[kvpool.Plan]:
        """Plans that are pending whatever others do."""
        return [plan for plan in self.plans if plan.is_pending and plan not in self.noted]

    def idle(self) -> list[kvpool.Plan]:
        """Plans that are not pending: no call, an attribute."""
        return [plan for plan in self.plans if not plan.is_pending]

    # ------------------------------------------------------------------ sequences

    def open(self) -> None:
        """An empty one, or with a prompt of which some tokens may be cached."""
        if len(self.lengths) >= MOST_OPEN:
            return self.close()
        family, prompt = self.rng.randrange(6), self.rng.randrange(9)
        tokens = prompt_of(family, 0, self.rng.randrange(1, 24))
        given: Any = tokens if self.pool.prefix is not None and self.rng.random() < 0.6 else prompt
        handle = self.call("open", given, self.rng.choice(NAMESPACES), may=FULL)
        if handle is not None:
            found = self.call("num_tokens", handle)
            self.same("a hit", found, *(range(len(tokens)) if given is tokens else [0]))
            self.lengths[handle], self.family[handle] = found, family
        return None

    def fork(self) -> None:
        """Children of the same length."""
        for parent in self.some(1) if len(self.lengths) < MOST_OPEN else []:
            children = self.call("fork", parent, 2, may=FULL)
            for child in [] if children is None else children.tolist():
                self.lengths[child], self.family[child] = self.lengths[parent], self.family[parent]

    def truncate(self) -> None:
        """Refused for rows of pending plans; of one whose `done` was called, others may decide."""
        for handle in self.some(1):
            before, length = self.lengths[handle], self.rng.randint(0, self.lengths[handle])
            plans = [plan for plan, rows in self.plans.items() if handle in rows and plan.is_pending]
            if set(plans) - self.noted:
                self.refuse(PlanStateError, "truncate", handle, length)
                continue
            self.call("truncate", handle, length, may=(PlanStateError,) if plans else ())
            self.lengths[handle] = self.call("num_tokens", handle)
            self.same("a length", self.lengths[handle], length, *([before] if plans else []))

    def close(self) -> None:
        """Some, now or with the next call."""
        rows = self.some(2)
        if self.rng.random() < 0.9:
            self.call("close", rows)
        else:
            for handle in rows:
                self.call("defer_close", handle)
        for handle in rows:
            del self.lengths[handle], self.family[handle]

    # ------------------------------------------------------------------ steps

    def step(self) -> None:
        """A step of a few rows, some with many tokens, or blocks for one; a plan that is pending is refused."""
        rows, name = self.some(4), self.rng.choice(("step",) * 9 + ("reserve",))
        if not self.idle():
            for plan in self.waiting()[:1]:
                self.refuse(PlanStateError, name, plan, rows, 1)
            return self.done()
        new = [self.rng.choice((1, 1, 1, 0, 5, 9)) for _ in rows]
        if any(self.lengths[h] + n > MOST_BLOCKS * self.pool.block_size for h, n in zip(rows, new, strict=True)):
            return self.close()
        plan, before = self.idle()[0], {handle: self.lengths[handle] for handle in rows}
        self.call(name, plan, rows, new, may=FULL)
        after = {handle: before[handle] + n * (name == "step") for handle, n in zip(rows, new, strict=True)}
        if self.pool.options.in_order:
            found = {handle: self.call("num_tokens", handle) for handle in rows}
            self.same("lengths after a step", found, before, after)
            self.lengths |= found
        elif plan.is_pending:
            del self.plans[plan]
            self.plans[plan] = before
            self.noted.discard(plan)
            self.lengths |= after
        return None

    def done(self) -> None:
        """The oldest that waits for it; a second time is refused."""
        for plan in self.waiting()[:1]:
            self.call("done", plan)
            return self.noted.add(plan)
        return self.refuse(PlanStateError, "done", next(iter(self.plans)))

    def rollback(self) -> None:
        """The newest of ours, if it is the newest of the pool and has no children."""
        plan = list(self.plans)[-1]
        if plan not in self.waiting():
            return self.refuse(PlanStateError, "rollback", plan)
        self.call("rollback", plan, may=(PlanStateError,))
        if not plan.is_pending:
            self.lengths |= {handle: n for handle, n in self.plans[plan].items() if handle in self.lengths}
            self.plans = {plan: self.plans[plan]} | self.plans
        return None

    # ------------------------------------------------------------------ prefix cache, blocks

    def commit(self) -> None:
        """Tokens from where the sequence's commits ended; refused where they are not done yet."""
        for handle in self.some(1) if self.pool.prefix is not None else []:
            start = self.call("prefix.committed", handle)
            end = self.rng.randint(start, max(start, self.lengths[handle]))
            self.call("prefix.commit", handle, prompt_of(self.family[handle], start, end), may=(ValueError,))

    def alloc(self) -> None:
        """Blocks of our own."""
        ids = self.call("blocks.alloc", 3, may=FULL) if len(self.blocks) < 12 else None
        found = [] if ids is None else ids.tolist()
        self.same("blocks that are given twice", {*found} & {*self.blocks}, set())
        self.blocks += found

    def free(self) -> None:
        """One of them; what has another reference is not freed."""
        if self.blocks:
            block = self.blocks.pop(self.rng.randrange(len(self.blocks)))
            self.call("blocks.incref", [block])
            self.same(f"refcount of block {block}", self.call("blocks.refcount", block), 2)
            self.refuse(ValueError, "blocks.free", [block])
            self.call("blocks.decref", [block])
            self.call("blocks.free", [block])

    # ------------------------------------------------------------------ readers

    def read(self) -> None:
        """Readers, which are never refused and agree with what is known."""
        stats, usable = self.call("stats"), self.pool.num_blocks - self.pool.options.reserved_blocks
        self.same("blocks in all places", stats.free + stats.limbo + stats.used, usable)
        self.call(self.rng.choice(("digest", "fingerprint", *(["prefix.stats"] if self.pool.prefix else []))))
        for handle in self.some(1):
            self.same("is_open", self.call("is_open", handle), True)
            self.same("num_tokens", self.call("num_tokens", handle), self.lengths[handle])
            table = self.call("table", handle)
            self.same("blocks that a row has twice", len(table) - len(set(table.tolist())), 0)
            self.same("blocks enough", len(table) * self.pool.block_size >= self.lengths[handle], True)
            self.call("can", [handle], 3)
            if self.rng.random() < 0.05:
                self.call("check")

    def leave(self) -> None:
        """Give everything back: what is left in the pool then is nobody's."""
        for plan in self.waiting():
            self.call("done", plan)
        self.call("blocks.free", self.blocks)
        self.call("close", list(self.lengths))


class Stranger:
    """Takes the sequences and plans of all threads, `everybody`: any documented refusal will do."""

    def __init__(self, pool: kvpool.Pool, number: int, seed: int, everybody: list[Stranger]) -> None:
        self.pool, self.rng, self.calls = pool, random.Random(seed << 8 | number), 0
        self.plans = [kvpool.Plan(pool, 4, 64, formats=("block_tables",)) for _ in range(3)]
        self.handles: list[int] = []
        self.everybody = everybody
        everybody.append(self)

    def drawn(self) -> tuple[Any, ...]:
        """A call: its name, and what it is given."""
        rng, plan = self.rng, self.rng.choice(self.rng.choice(self.everybody).plans)
        handles = list(rng.choice(self.everybody).handles) or [0]  # a copy: it changes meanwhile
        rows = rng.sample(handles, min(len(handles), rng.randint(1, 4)))
        tokens = prompt_of(rng.randrange(6), 0, rng.randrange(1, 24))
        cache = [("prefix.commit", rows[0], tokens), ("prefix.flush",), ("prefix.events",), ("prefix.match", tokens)]
        kinds: tuple[list[tuple[Any, ...]], ...] = (
            [("open", rng.choice((3, tokens))), ("open", 5), ("fork", rows[0], 2)],
            [("step", plan, rows, rng.choice((1, 1, 9))), ("reserve", plan, rows, 5), ("done", plan)],
            [("truncate", rows, [rng.randrange(4)] * len(rows)), ("compact", rows, [1] * len(rows))],
            [("close", rows), ("defer_close", rows[0]), ("can", rows, 3), ("table", rows[0]), ("blocks.evict", 2)],
            [("rollback", plan), ("unshare", plan, rows, [1] * len(rows)), ("num_tokens", rows[0]), ("stats",)],
            cache if self.pool.prefix is not None else [("stats",)],
        )
        return rng.choice(rng.choices(kinds, (2, 3, 1, 1, 1, 1))[0])

    def call(self, name: str, *args: Any) -> Any:
        """A refusal must not say that threads are in each other's way."""
        self.calls += 1
        try:
            return attrgetter(name)(self.pool)(*args)
        except (ConcurrentUse, CorruptState):
            raise
        except (KVPoolError, ValueError, IndexError):
            return None

    def run(self, calls: int) -> None:
        """Make so many calls."""
        for _ in range(calls):
            name, *args = self.drawn()
            found = self.call(name, *args)
            if found is not None and name in ("open", "fork"):
                self.handles = [*self.handles, *([found] if name == "open" else found.tolist())]
            while len(self.handles) > MOST_OPEN:
                self.call("close", self.handles.pop(0))

    def leave(self) -> None:
        """One by one: what is closed already is refused."""
        for name, given in (("done", self.plans), ("close", self.handles)):
            for one in given:
                self.call(name, one)
