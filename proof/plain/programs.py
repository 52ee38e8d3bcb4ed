"""Random programs on pools with layer groups, beside the plain Python model and a memory of what blocks hold.

A program is a list of words ``(op, a, b, c)``. Compared after every call: what it
returned or raised, the statistics of all arenas, all tables, every array of the plan that was filled, and `check`.
With a prefix cache, its statistics and events are compared, too. The model then hands out other ids than the core, so
only the holes are compared in arrays of ids. `proof.plain.content.GroupContent` judges what the queries of
each step read, and asks no pool.
"""

from __future__ import annotations

import itertools
import random
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np

from kvpool.groups import Group
from kvpool.testing import ModelPlan
from kvpool.testing.fuzz_target import TargetFinding, TargetReport, Word, hunt
from proof.machine.pair import RAISED, Pair, Side
from proof.plain import plain_pool
from proof.plain.content import GroupContent

CALLS_PER_RUN = 150
#: Calls, and how often they are made beside each other where a program makes them as often as usual.
OPERATIONS = {
    **{"open": 2, "prefill": 4, "step": 10, "reserve": 1, "fork": 2, "truncate": 3, "done": 5, "rollback": 2, "can": 1},
    **{"close": 1, "close_finished": 1, "defer_close": 1, "reset": 1, "foreign": 1, "forget": 1, "named": 2},
    **{"unshare": 1, "compact": 2, "leave": 1},
}
#: Calls on pools with a prefix cache.
CACHED = {
    **{"prompt": 4, "compute": 3, "advance": 3, "chunk": 2, "commit": 3, "load": 2, "lie": 1, "ask": 2},
    **{"flush": 1, "evict": 2, "hold": 1, "close": 1, "step": 4, "done": 3, "can": 1, "close_finished": 1},
    **{"defer_close": 1, "foreign": 1, "forget": 1, "open": 1, "prefill": 1, "fork": 3, "reserve": 1, "reset": 1},
    **{"rollback": 6, "truncate": 1, "unshare": 6, "compact": 1, "leave": 1, "match": 1, "pin": 1},
}
#: How often a program makes a call, beside what is usual. Some calls it leaves out: they would undo what others need.
SWARM = (0, 0, 1, 2, 2, 8)
WITHOUT_ROWS = ("load", "reset", "done", "foreign", "named", "prompt", "match", "pin", "evict", "hold")
EVICTING = ("unshare", "compact", "leave")  #: refused without a full group
OPENING = ("open", "prompt", "load", "fork", "pin")
#: Calls on blocks by id, on some arena; the ones that lead somewhere more often.
BLOCK_CALLS = (
    *("alloc", "alloc", "take", "incref", "incref", "decref", "decref", "free", "release", "release"),
    *("mark_cached", "mark_cached", "mark_cached", "touch", "touch", "uncache", "evict", "take_block"),
    *("drain_evicted", "refcounts", "free_order", "is_cached", "touch blank", "uncache keep_place"),
)
COMMON = ("seq_lens", "positions", "cu_q_lens", "slot_ids")
PLANS: tuple[dict[str, Any], ...] = (
    {"max_rows": 6, "max_tokens": 64, "formats": ("block_tables", "slot_mapping", "table_updates", *COMMON)},
    {"max_rows": 6, "max_tokens": 96},
    {
        "max_rows": 3,
        "max_tokens": 20,
        "formats": ("block_tables", "slot_mapping", "seq_lens", "cu_q_lens", "table_updates"),
    },
    {"max_rows": 4, "max_tokens": 40, "formats": ("block_tables", "slot_mapping"), "table_width": 9},
)
KINDS = ("full", "window", "chunk", "state")
FIELDS = ("num_tokens", "is_pending", "step_id")
GROUP_ARRAYS = ("block_tables", "slot_mapping", "kv_starts", "kv_lens", "copies", "dirty_rows")
STATE_ARRAYS = ("state_src", "state_dst", "state_loads", "state_saves")
BY_ID = ("block_tables", "slot_mapping", "copies", "table_updates", *STATE_ARRAYS)
SPACES = (b"", b"", b"other")
#: Few prompts of few different tokens, so that programs find prefixes.
PROMPTS = tuple([random.Random(n).randrange(3) for _ in range(100)] for n in range(3))


def operations_of(options: dict[str, Any]) -> tuple[str, ...]:
    """The calls that programs make on a pool with these options."""
    return tuple(CACHED if options["prefix_cache"] else OPERATIONS)


Entries = dict[tuple[int, int, int, int], int]  #: (row id, group, index, column) -> block


class Mirrors:
    """Tables as two backends keep them that see nothing but `table_updates`.

    One applies them when a step is issued, also of steps that are rolled back; the other when a step passes, so of
    those it sees nothing. After a step its rows must be in the mirror as the plan's own tables show them.
    """

    def __init__(self, groups: list[Group]) -> None:
        self.groups = [g for g, group in enumerate(groups) if group.kind != "state"]
        self.early: Entries = {}
        self.late: Entries = {}
        self.waiting: list[tuple[Any, Entries, Entries]] = []  # plan, its updates, what its own tables show

    def issued(self, pool: Any, plan: Any) -> None:
        """A plan with updates was filled."""
        updates = {(row, g, i, column): block for row, g, i, column, block in plan.table_updates.tolist()}
        shown = {
            (handle & 0xFFFFF, g, i, column): block
            for at, handle in enumerate(plan.handles.tolist())
            for g in self.groups
            for i, entry in enumerate(plan.groups[g].block_tables[at, : len(pool.table(handle, g))].tolist())
            for column, block in enumerate(entry)
        }
        assert updates.keys() <= shown.keys(), f"content: updates beyond the tables: {updates.keys() - shown.keys()}"
        self._apply(self.early, updates, shown)
        self.waiting.append((plan, updates, shown))
        self.passed()

    def passed(self) -> None:
        """Plans that are pending no more have passed, oldest first."""
        while self.waiting and not self.waiting[0][0].is_pending:
            _, updates, shown = self.waiting.pop(0)
            self._apply(self.late, updates, shown)

    def rolled_back(self) -> None:
        """The newest plan was rolled back."""
        if self.waiting and not self.waiting[-1][0].is_pending:
            self.waiting.pop()

    def _apply(self, mirror: Entries, updates: Entries, shown: Entries) -> None:
        mirror.update(updates)
        wrong = {place: block for place, block in shown.items() if mirror.get(place) != block}
        assert not wrong, f"content: the mirror has other blocks than {wrong}"


class Program:
    """The state of a program: the two pools, the memory, and what the next words may name."""

    def __init__(self, test: Side, oracle: Side, options: dict[str, Any], counters: bool = True) -> None:
        self.pair = Pair(test, oracle)
        self.counters = counters  # whether what the pool says of itself is compared: `stats`, `check`
        self.groups: list[Group] = options["groups"]
        self.size: int = options["block_size"]
        self.max_seqs: int = options["max_seqs"]
        self.in_order: bool = options["in_order"]
        self.num_arenas = _num_arenas(self.groups)
        self.content = GroupContent(self.groups, self.size, options["reserved_blocks"], options["lookahead"])
        self.mirrors = Mirrors(self.groups)
        self.cache: bool = options["prefix_cache"]
        self.operations = operations_of(options)
        self.hole = 0 if options["reserved_blocks"] else -1
        self.live: list[int] = []
        self.texts: dict[int, list[int]] = {}  # tokens of each sequence, some of them not computed yet
        self.spaces: dict[int, bytes] = {}  # namespace of each sequence
        self.new_token = itertools.count(1 << 20)
        self.flushes = Counter[bytes]()
        self.told: tuple[dict[Any, Any], dict[Any, Any]] = {}, {}  # what is cached by the events of both sides
        self.held: list[tuple[int, dict[Side, Any]]] = []  # arena, blocks that each side took
        self.took = False  # whether the call hands out blocks
        self.raw = [Counter[int]() for _ in range(self.num_arenas)]  # references that the program itself holds
        self.cached: list[list[int]] = [[] for _ in range(self.num_arenas)]  # what it has marked

    def play(self, word: Word) -> None:
        """Make the call that a word names on both pools, and compare them."""
        self.call(self.operations[word[0] % len(self.operations)], *word[1:])

    def call(self, name: str, a: int, b: int, c: int) -> None:
        """Make one call by its name, or mostly one that leads somewhere if this one cannot."""
        if not self.live and name not in WITHOUT_ROWS:
            name = "prompt" if self.cache else "open"
        elif self.live and b & 7 and name in ("done", "rollback") and not self._pending():
            name = "step"
        elif b & 7 and name in OPENING and len(self.live) == self.max_seqs:
            name = "close"
        self.took = False
        getattr(self, name)(a, b, c)

    def finish(self) -> None:
        """All that is pending is done, every sequence grows by a token, and everything is given back."""
        self.settle()
        for name in list(self.live):
            self._step([name], [1], 1, {"partial": False})
            self.settle()
        self.pair.both(lambda side: side.pool.close(side.batch(self.live, False)))
        for arena, raw in enumerate(self.raw):
            for block in sorted(raw.elements()):
                self._named(arena, "decref", [block])
        while self.held:
            self.give_back(0)
        self.compare()
        for arena in range(self.num_arenas) if self.counters else ():
            stats = self.pair.test.pool.stats(arena)
            assert stats.used == stats.limbo == 0, f"arena {arena} keeps blocks: {stats}"

    def settle(self) -> None:
        """Everything pending is done."""
        while self._pending():
            self.done(0, 0, 0)

    # ---- what words name ----------------------------------------------------------------------------------

    def _one(self, c: int) -> int:
        return self.live[c % len(self.live)]

    def _rows(self, c: int) -> list[int]:
        return list(dict.fromkeys(self._one(c >> shift) for shift in range(0, 4 * (1 + c % 4), 4)))

    def _idle(self, a: int) -> int:
        plans = self.pair.oracle.plans
        idle = [k for k in range(len(plans)) if not plans[k].is_pending]
        return idle[a % len(idle)] if idle else a % len(plans)

    def _pending(self) -> list[int]:
        """Plans that are pending, oldest first."""
        plans = self.pair.oracle.plans
        return sorted((k for k in range(len(plans)) if plans[k].is_pending), key=lambda k: plans[k].step_id)

    # ---- calls --------------------------------------------------------------------------------------------

    def open(self, a: int, b: int, c: int) -> None:
        """Open an empty sequence, sometimes with blocks."""
        tokens = (a % (4 * self.size) if b & 7 else a % 400) if b & 1 else 0
        self._opened(self.pair.both(lambda side: side.pool.open(tokens), handles=True), [], b"")
        self.compare()

    def _opened(self, got: Any, text: list[int], space: bytes) -> None:
        """A sequence was opened, perhaps with a hit: note its tokens and its blocks."""
        if got is RAISED:
            return
        self.took = True
        self.live += got
        self.texts[got[0]], self.spaces[got[0]] = text, space
        hit = self.pair.test.pool.num_tokens(self.pair.test.handle(got[0]))
        tables = [(g, np.atleast_2d(self._table(got[0], g))[: hit // self.content.sizes[g]]) for g in self.content.kv]
        found = {(self.groups[g].arena, block) for g, table in tables for block in table.ravel().tolist()}
        self.content.opened(got[0], (space, self.flushes[space]), text[:hit], found)

    def _prompt(self, a: int, b: int, c: int) -> tuple[list[int], bytes]:
        """A prompt and its namespace: one of three prompts, perhaps with changes, or a sequence's tokens and more."""
        rng = random.Random(b)
        if self.live and c & 3 == 0:
            name = self._one(c >> 4)
            known = self.texts[name]
            text = known[: rng.randrange(len(known) + 1)] + [rng.randrange(3) for _ in range(1 + rng.randrange(8))]
            return text, self.spaces[name]
        text = list(PROMPTS[a % 3][: 1 + rng.randrange(12 * self.size)])
        for _ in range(rng.choice((0, 0, 1, 2))):
            text[rng.randrange(len(text))] = rng.randrange(3)
        return text, SPACES[a // 3 % 3]

    def prompt(self, a: int, b: int, c: int) -> None:
        """Open a prompt, with a cut or without one; perhaps a step computes the rest of it."""
        text, space = self._prompt(a, b, c)
        cut = (None, len(text), (a >> 4) % (len(text) + 1))[c % 3]

        def call(side: Side) -> Any:
            return side.pool.open(text, space, cut, reserve=bool(a & 8))

        could = self.pair.could_open(text, space, reserve=bool(a & 8))
        got = self.pair.both(call, handles=True)
        assert could is not (got is RAISED), f"can(tokens=) said {could}"
        self._opened(got, text, space)
        self.compare()
        if got is not RAISED and b & 1:  # and compute it
            length = len(self.content.stamps[got[0]])
            self._step(got, [len(text) - length], self._idle(a), {"partial": False}, a)

    def ask(self, a: int, b: int, c: int) -> None:
        """Read what the cache has of the tokens of a sequence."""
        self._ask(self._one(c))

    def _ask(self, name: int) -> None:
        """Compute the tokens of a sequence once more, over what a hit has of them."""
        text = [*self.texts[name], 0]
        got = self.pair.both(lambda side: side.pool.open(text, self.spaces[name]), handles=True)
        self._opened(got, text, self.spaces[name])
        self.compare()
        if got is not RAISED:
            self.settle()
            self._step(got, [len(text) - len(self.content.stamps[got[0]])], 0, {"partial": False})
            self.settle()
            self.pair.both(lambda side: side.pool.close(side.batch(got, False)))
            self.compare()

    def load(self, a: int, b: int, c: int) -> None:
        """Load a prompt. Before it has come, others step, it is closed, or everything is flushed."""
        text, space = self._prompt(a, b, c)
        grain = max((self.content.sizes[g] for g in self.content.kv), default=self.size)
        if a & 15:
            text = text[: len(text) // grain * grain]
        could = self.pair.could_open(text, space, load=True)
        got = self.pair.both(lambda side: side.pool.open(text, space, load=True), handles=True)
        assert could is not (got is RAISED), f"can(tokens=, load=True) said {could}"
        if got is RAISED:
            self.compare()
            return
        (name,) = got
        self._opened(got, text, space)
        pool, handle = self.pair.test.pool, self.pair.test.handle(name)
        states = [g for g, group in enumerate(self.groups) if group.kind == "state"]
        bundles = {g: pool.prefix.bundle(handle, g).tolist() for g in states}
        self.content.loading({block for blocks in bundles.values() for block in blocks})
        self.compare()
        self._meanwhile(name, b % 8, a, c)
        begin = len(self.content.stamps.get(name, []))
        for n in ((0, len(text), len(text), len(text), a % (len(text) + 2))[c % 5], 0):
            if self.pair.both(lambda side, n=n: side.pool.loaded(side.handle(name), n)) is not RAISED:
                break
        if pool.is_open(handle):
            length = pool.num_tokens(handle)
            self.content.truncated(name, min(begin, length))  # after a flush, nothing of it is computed
            self.content.loaded(name, self._text(name, length)[begin:], self._table, bundles)
        self.compare()
        if name in self.live and a & 1:
            self._commit(name, len(self.content.stamps[name]))
            self.compare()

    def _meanwhile(self, name: int, what: int, a: int, c: int) -> None:
        """Something happens while a sequence is loaded."""
        if what == 0:
            self.pair.both(lambda side: side.pool.close(side.handle(name)))
        elif what == 1:
            self._flush(None)
        elif what == 2:
            calls = ("fork", "truncate", "close_finished", "defer_close")
            given = ((), (0,), ([0],), ())[a % 4]
            self.pair.both(
                lambda side: getattr(side.pool, calls[a % 4])(
                    [side.handle(name)] if a % 4 == 2 else side.handle(name), *given
                )
            )
        elif what < 6 and len(self.live) > 1:
            stamps = self.content.stamps[name]
            self.live.remove(name)
            (self.step, self.done, self.close)[what - 3](a, a >> 3, c)
            self.live.append(name)
            self.content.stamps[name], self.took = stamps, False
        self.compare()

    def pin(self, a: int, b: int, c: int) -> None:
        """Pin a prefix."""
        text, space = self._prompt(a, b, c)
        if self.pair.test.pool.prefix.match([*text, 0], space):
            self._opened(self.pair.both(lambda side: side.pool.prefix.pin(text, space), handles=True), text, space)
        self.compare()

    def match(self, a: int, b: int, c: int) -> None:
        """Match a prompt."""
        text, space = self._prompt(a, b, c)
        self.pair.both(lambda side: side.pool.prefix.match(text, space))

    def chunk(self, a: int, b: int, c: int) -> None:
        """Step some sequences to the next place of a checkpoint, or to the end of their tokens."""
        rows = self._rows(c)[:2]
        lengths = [len(self.content.stamps[name]) for name in rows]
        wanted = self.pair.both(lambda side: side.pool.prefix.wanted(side.batch(rows, bool(a & 32))))
        ends = [end if end > 0 else len(self.texts[name]) for name, end in zip(rows, wanted.tolist(), strict=True)]
        counts = [max(1, end - length) for end, length in zip(ends, lengths, strict=True)]
        self._step(rows, counts, self._idle(a), {"partial": bool(a & 64)}, a)

    def compute(self, a: int, b: int, c: int) -> None:
        """Compute some chunks of a sequence. Each is done and committed."""
        name = self._one(c)
        for _ in range(1 + a % 5):
            self.chunk(b & 0xFFF0, 0, 4 * self.live.index(name))
            while name in self.content.pending_rows():
                self.done(0, 0, 0)
            self._commit(name, len(self.content.stamps[name]))

    def advance(self, a: int, b: int, c: int) -> None:
        """Issue steps for some chunks of a sequence, and leave them to a later commit."""
        name = self._one(c)
        for _ in range(1 + a % 3):
            self.chunk(b & 0xFFF0, 0, 4 * self.live.index(name))

    def commit(self, a: int, b: int, c: int) -> None:
        """Commit the tokens of a sequence that are done, sometimes fewer, or one too many."""
        name = self._one(c)
        self._commit(name, self.content.done_length(name) + (1 if b % 8 == 0 else -(a % 9) if b % 8 == 1 else 0))
        self.compare()

    def _commit(self, name: int, end: int) -> None:
        start = self.pair.test.pool.prefix.committed(self.pair.test.handle(name))
        tokens = self._text(name, max(start, end))[start:]
        self.pair.both(lambda side: side.pool.prefix.committed(side.handle(name)))
        self.pair.both(lambda side: side.pool.prefix.commit(side.handle(name), tokens))

    def lie(self, a: int, b: int, c: int) -> None:
        """Commit all tokens of some sequences, one of them perhaps a wrong one. If the pool accepts that, flush."""
        rows = self._rows(c)[:2]
        starts = [self.pair.test.pool.prefix.committed(self.pair.test.handle(name)) for name in rows]
        texts = [self.texts[name][: len(self.content.stamps[name])] for name in rows]
        told = [text[start:] for text, start in zip(texts, starts, strict=True)]
        is_wrong = bool(b & 7 == 7 and told[-1])
        if is_wrong:
            told[-1][a % len(told[-1])] += 1
        counts = [len(tokens) for tokens in told]

        def call(side: Side) -> None:
            side.pool.prefix.commit(side.batch(rows, bool(a & 32)), [*itertools.chain(*told)], counts)

        if self.pair.both(call) is not RAISED and is_wrong:
            self._flush(None)
        self.compare()

    def flush(self, a: int, b: int, c: int) -> None:
        """Forget a namespace or everything, rarely."""
        if a % 8 == 0:
            self._flush((None, *SPACES)[b % 4])
        self.compare()

    def _flush(self, space: bytes | None) -> None:
        self.pair.both(lambda side: side.pool.prefix.flush(space))
        self.flushes.update(set(SPACES) if space is None else {space})

    def evict(self, a: int, b: int, c: int) -> None:
        """Make blocks blank."""
        arena = a % self.num_arenas
        self.pair.both(lambda side: side.pool.blocks.arena(arena).evict(1 + b % 3))
        self.compare()

    def hold(self, a: int, b: int, c: int) -> None:
        """Take blank blocks, or give them back."""
        arena = a % self.num_arenas
        if b & 1 and self.held:
            self.give_back(c)
            return

        def call(side: Side) -> int:
            taken[side] = side.pool.blocks.arena(arena).alloc(1 + c % 8)
            return len(taken[side])

        taken: dict[Side, Any] = {}
        if self.pair.both(call) is not RAISED:
            self.held.append((arena, taken))
            self.content.poison({(arena, int(block)) for block in taken[self.pair.test]})
        self.compare()

    def give_back(self, c: int) -> None:
        """Release blocks that `hold` took."""
        arena, taken = self.held.pop(c % len(self.held))
        self.pair.both(lambda side: side.pool.blocks.arena(arena).decref(taken[side]))
        self.compare()

    def step(self, a: int, b: int, c: int) -> None:
        """Step some sequences by a few tokens."""
        rows = self._rows(c)
        self._step(rows, [(b >> 2 * k) % 4 for k in range(len(rows))], self._idle(a), {"partial": bool(a & 64)}, a)

    def prefill(self, a: int, b: int, c: int) -> None:
        """Step by many tokens."""
        rows = self._rows(c)[:2]
        counts = [(b >> 5 * k) % (7 * self.size + 2) for k in range(len(rows))]
        self._step(rows, counts, self._idle(a), {"partial": bool(a & 64)}, a)

    def _step(self, rows: list[int], counts: list[int], plan: int, options: dict[str, Any], a: int = 0) -> None:
        if self.pair.oracle.plans[plan].is_pending and a & 3:
            self.done(0, 0, 0)
            return
        if a & 3 == 3:
            options = {**options, "pad_to": (PLANS[plan]["max_rows"], PLANS[plan]["max_tokens"])}

        def call(side: Side) -> None:
            side.pool.step(side.plans[plan], side.batch(rows, bool(a & 32)), counts, **options)

        before = self._shown(plan)
        if self.pair.both(call) is RAISED:
            assert self._shown(plan) == before, f"plan {plan} was changed by a step that was refused"
        else:
            served = self.pair.test.plans[plan].served.tolist()
            self._issued(plan, rows, [n * bool(ok) for n, ok in zip(counts, served, strict=True)])
        self.compare()

    def _shown(self, plan: int) -> list[Any]:
        """All arrays of the groups of a plan, as lists."""
        plan_groups = self.pair.test.plans[plan].groups
        names = [STATE_ARRAYS if group.kind == "state" else GROUP_ARRAYS for group in self.groups]
        return [getattr(plan_groups[g], name).tolist() for g in range(len(names)) for name in names[g]]

    def _issued(self, plan: int, rows: list[int], new: list[int]) -> None:
        self.took = True
        self.compare_plan(plan)
        if "table_updates" in PLANS[plan].get("formats", ()):
            self.mirrors.issued(self.pair.test.pool, self.pair.test.plans[plan])
        lengths = [len(self.content.stamps[name]) for name in rows]
        tokens = [self._text(name, at + n)[at:] for name, at, n in zip(rows, lengths, new, strict=True)]
        self.content.issued(self.pair.test.plans[plan], rows, tokens)
        if self.in_order:
            self._see_tables()  # which poisons the blocks that were handed out
            self.content.done(self.pair.test.plans[plan], self._table)

    def _text(self, name: int, n: int) -> list[int]:
        """The first tokens of a sequence. If it has too few, add new ones: with a cache, tokens that others have."""
        text = self.texts[name]
        new = PROMPTS[name % 3][len(text) : n] if self.cache else []
        text += [*new, *itertools.islice(self.new_token, max(0, n - len(text) - len(new)))]
        return text[:n]

    def reserve(self, a: int, b: int, c: int) -> None:
        """Reserve blocks for tokens to come."""
        rows, plan, n = self._rows(c), self._idle(a), b % (2 * self.size)
        if self.pair.both(lambda side: side.pool.reserve(side.plans[plan], side.batch(rows, False), n)) is not RAISED:
            self._issued(plan, rows, [0] * len(rows))
        self.compare()

    def done(self, a: int, b: int, c: int) -> None:
        """Declare a pending plan done: the oldest, sometimes another one."""
        pending = self._pending() or [a % len(PLANS)]
        plan = pending[c % len(pending) if b % 4 == 1 else 0]
        if self.pair.both(lambda side: side.pool.done(side.plans[plan])) is not RAISED:
            self.content.done(self.pair.test.plans[plan], self._table)
            self.mirrors.passed()
        self.compare()

    def rollback(self, a: int, b: int, c: int) -> None:
        """Roll the newest plan back; an older one is refused. Mostly ask what the cache has of its rows then."""
        pending = self._pending() or [a % len(PLANS)]
        plan = pending[c % len(pending) if b % 8 == 0 else -1]
        rows: list[int] = []
        if self.pair.both(lambda side: side.pool.rollback(side.plans[plan])) is not RAISED:
            rows = self.content.rolled_back(self.pair.test.plans[plan])
            self.mirrors.rolled_back()
        self.compare()
        rows = [name for name in rows if name in self.live]
        if self.cache and rows and a & 3:
            self._ask(rows[c % len(rows)])

    def fork(self, a: int, b: int, c: int) -> None:
        """Fork a sequence."""
        self._fork(self._one(c), a, b)

    def _fork(self, parent: int, a: int, b: int) -> None:
        got = self.pair.both(lambda side: side.pool.fork(side.handle(parent), 1 + a % 2), handles=True)
        if got is not RAISED:
            self.live += got
            self.content.forked(parent, got)
            length = len(self.content.stamps[parent])
            self.texts.update({child: self.texts[parent][: length if b & 1 else None] for child in got})
            self.spaces.update(dict.fromkeys(got, self.spaces[parent]))
        self.compare()

    def truncate(self, a: int, b: int, c: int) -> None:
        """Shorten a sequence by little, to little, or by anything; a length beyond its end is refused."""
        rows = self.content.pending_rows()
        free = [name for name in self.live if name not in rows]
        name = free[c % len(free)] if free and b & 12 else self._one(c)
        most = len(self.content.stamps[name])
        lengths = (a % (most + 1), a % (3 * self.size + 1), most + 1 - a % (4 + self.content.lookahead))
        length = max(0, lengths[min(b & 3, 2)])
        if self.pair.both(lambda side: side.pool.truncate(side.handle(name), length)) is not RAISED:
            self.content.truncated(name, length)
            del self.texts[name][length:]
        else:
            assert not self.content.may_truncate(name, length), f"content: {name} may be cut to {length} of {most}"
        self.compare()

    def _evicting(self, a: int, c: int) -> tuple[int, int]:
        """A sequence, mostly one that is no row of a pending step, and a group, mostly a full one."""
        pending = self.content.pending_rows()
        free = [name for name in self.live if name not in pending]
        full = [g for g, group in enumerate(self.groups) if group.kind == "full"]
        group = full[a % len(full)] if full and a & 28 else a % (len(self.groups) + 1)
        return free[c % len(free)] if free and c & 28 else self._one(c), group

    def unshare(self, a: int, b: int, c: int) -> None:
        """Copy what sequences share in a group, so that they can be compacted. If none do, mostly fork one."""
        if b & 7 and len(self._pending()) == len(PLANS):
            self.done(0, 0, 0)
        if not self.live:
            return
        (name, group), plan = self._evicting(a, c), self._idle(b)
        if b & 3 and not self._sharing():
            self._fork(max(self.live, key=self.content.done_length), a, b)
        sharing = self._sharing() if b & 3 else []
        name = sharing[c % len(sharing)] if sharing else name
        rows = list(dict.fromkeys([name, *self._rows(c)]))[: (1, 1, 1, 2, 3)[b % 5]]
        held = [len(self.content.held(row, group)) for row in rows]
        lens = [max(0, n - 1 - (b >> 2 * k) % (1 + n // 2)) for k, n in enumerate(held)]

        def call(side: Side) -> None:
            side.pool.unshare(side.plans[plan], side.batch(rows, bool(a & 32)), lens, b % 2 * self.size, group)

        if self.pair.both(call) is not RAISED:
            self._issued(plan, rows, [0] * len(rows))
            if self.cache and a & 3:
                self._commit(name, self.content.done_length(name))
            if a >> 8 & 3 == 3:  # the backend fails
                self.rollback(a, 1, c)
        self.compare()

    def _sharing(self) -> list[int]:
        """Sequences that share blocks of full groups with others."""
        full = [g for g, group in enumerate(self.groups) if group.kind == "full"]
        held = [{(g, block) for g in full for block in self._table(name, g).ravel().tolist()} for name in self.live]
        return [name for k, name in enumerate(self.live) if any(held[k] & other for other in held[:k] + held[k + 1 :])]

    def compact(self, a: int, b: int, c: int) -> None:
        """Tokens leave a sequence; any of those behind the first may stay."""
        name, group = self._evicting(a, c)
        held = len(self.content.held(name, group))
        length = b % (held + 2) if b & 3 == 0 else max(0, held - b % 9)
        first = min((0, 0, self.size, b % 7)[a >> 5 & 3], length)
        table = self._table(name, min(group, len(self.groups) - 1)).tolist()
        if self.pair.both(lambda side: side.pool.compact(side.handle(name), length, first, group)) is not RAISED:
            rest = random.Random(a ^ b << 16).sample(range(first, held), length - first)
            self.content.compacted(name, group, table, [*range(first), *sorted(rest)])
        self.compare()

    def leave(self, a: int, b: int, c: int) -> None:
        """Full entries leave the table of a sequence."""
        name, group = self._evicting(a, c)
        size = self.content.sizes[min(group, len(self.groups) - 1)]
        full = len(self.content.held(name, group)) // size
        places = [i for i in range(full + (b & 15 == 0)) if b >> 4 + i % 12 & 1]
        if self.pair.both(lambda side: side.pool.evict_blocks(side.handle(name), places, group)) is not RAISED:
            self.content.left(name, group, [i * size + k for i in places for k in range(size)])
        self.compare()

    def close(self, a: int, b: int, c: int) -> None:
        """Close sequences."""
        rows = self._rows(c)[: 1 + a % 2]
        self.pair.both(lambda side: side.pool.close(side.batch(rows, bool(b & 1))))
        self.compare()

    def close_finished(self, a: int, b: int, c: int) -> None:
        """Close those of some sequences that are finished."""
        rows = self._rows(c)
        mask = np.array([a >> k & 1 for k in range(len(rows))], np.uint8)
        self.pair.both(lambda side: side.pool.close_finished(side.batch(rows, False), mask))
        self.compare()

    def defer_close(self, a: int, b: int, c: int) -> None:
        """Close a sequence at the next call, as a finalizer would."""
        row = self._one(c)
        self.pair.both(lambda side: side.pool.defer_close(side.handle(row)))
        self.compare()

    def can(self, a: int, b: int, c: int) -> None:
        """Ask whether a step would find its blocks."""
        rows = self._rows(c)
        counts = [(b >> 4 * k) % 16 for k in range(len(rows))]
        self.pair.both(lambda side: side.pool.can(side.batch(rows, False), counts))
        self.compare()

    def forget(self, a: int, b: int, c: int) -> None:
        """Distrust what a plan has written; a pending one refuses."""
        self.pair.both(lambda side: side.plans[a % len(PLANS)].bind())

    def named(self, a: int, b: int, c: int) -> None:
        """A call on blocks by id, on some arena: those in tables, the program's own, cached ones, sometimes any."""
        arena, name = (b >> 5) % self.num_arenas, BLOCK_CALLS[a % len(BLOCK_CALLS)]
        if name in ("alloc", "take", "evict"):
            count = c % 4 if c & 48 else c % 64
            self._named(arena, name, [], count)
        elif name in ("drain_evicted", "free_order"):
            self._named(arena, name, [])
        else:
            known = self._known(arena, name) or [c % 8]
            ids = [known[(c >> 6 * k) % len(known)] for k in range(1 + b % 2)]
            self._named(arena, name, [c % 100 - 2] if b % 32 == 0 else list(dict.fromkeys(ids)))
        self.compare()

    def _known(self, arena: int, name: str) -> list[int]:
        """Blocks of an arena to which a call mostly does something."""
        if name in ("decref", "free", "release"):
            return sorted(self.raw[arena])
        if name == "touch blank":
            return self.pair.oracle.pool.blocks.arena(arena).free_order().tolist()
        known = {block for at, block in self.content.named if at == arena and block >= 0} | self.raw[arena].keys()
        return sorted(known | set(self.cached[arena] if name.startswith(("touch", "uncache")) else ()))

    def _named(self, arena: int, name: str, ids: list[int], count: int | None = None) -> None:
        """Make the call on both sides, with what its name says it is asked for, and note who holds what now."""
        name, *option = name.split()

        def call(side: Side) -> Any:
            method = getattr(side.pool.blocks.arena(arena), name)
            if name == "take_block":
                return method(ids[0])
            return method(*([ids] if ids else []) if count is None else [count], **dict.fromkeys(option, True))

        got = self.pair.both(call)
        if got is RAISED:
            return
        if name in ("alloc", "take"):
            self.raw[arena].update(map(int, got if name == "alloc" else got[0]))
        elif name in ("incref", "touch", "take_block"):
            self.raw[arena].update(ids)
        elif name in ("decref", "free", "release"):
            self.raw[arena] -= Counter(ids)
        elif name == "mark_cached":
            self.cached[arena] += ids

    def reset(self, a: int, b: int, c: int) -> None:
        """Forget everything, rarely."""
        if a % 8 == 0:
            self.pair.both(lambda side: side.pool.reset())
            self.raw = [Counter() for _ in self.raw]
            self.cached = [[] for _ in self.cached]
            self.content.reset()
            self.mirrors.waiting.clear()
            self.held.clear()
            self.flushes.update(set(SPACES))
        self.compare()

    def foreign(self, a: int, b: int, c: int) -> None:
        """Calls that pools with groups refuse."""
        name = self._one(c) if self.live else 0
        calls: list[Callable[[Side], Any]] = [
            lambda side: side.pool.open([1, 2, 3], 7),
            lambda side: side.pool.truncate(side.handle(name), 1 << 40),
            lambda side: side.pool.close(side.batch([name, name] if self.live else [name], False)),
            lambda side: side.pool.step(side.plans[self._idle(a)], side.batch([name], False), -1),
            lambda side: side.pool.fork(side.handle(name), 1000),
            lambda side: side.plans[a % len(PLANS)].block_tables,
            lambda side: side.plans[a % len(PLANS)].slot_mapping,
            lambda side: side.plans[a % len(PLANS)].copies,
            lambda side: side.plans[a % len(PLANS)].dirty_rows,
        ]
        self.pair.both(calls[b % len(calls)])
        self.compare()

    # ---- comparison ---------------------------------------------------------------------------------------

    def _table(self, name: int, group: int) -> Any:
        return self.pair.test.pool.table(self.pair.test.handle(name), group)

    def _see_tables(self) -> None:
        seen: dict[int, list[list[list[int]]]] = {}
        for name in self.live:
            tables = [self._table(name, g) for g in range(len(self.groups))]
            seen[name] = [[np.atleast_1d(entry).tolist() for entry in table] for table in tables]
        self.content.tables(seen, self.took)

    def compare(self) -> None:
        """Compare everything that can be read."""
        test, oracle = self.pair.test, self.pair.oracle
        for arena in range(self.num_arenas) if self.counters else ():
            got, want = test.pool.stats(arena), oracle.pool.stats(arena)
            assert got == want, f"stats({arena}): {got}, due {want}"
            if not self.cache:  # the model counts no references of bundles
                calls = (pool.blocks.arena(arena).refcount_histogram() for pool in (test.pool, oracle.pool))
                self._same(f"refcount_histogram of arena {arena}", *calls)
        alive = []
        for name in self.live:
            mine, due = test.handle(name), oracle.handle(name)
            assert test.pool.is_open(mine) == oracle.pool.is_open(due), f"is_open of {name}"
            if oracle.pool.is_open(due):
                alive.append(name)
                for call in ("num_tokens", "capacity"):
                    got, want = getattr(test.pool, call)(mine), getattr(oracle.pool, call)(due)
                    assert got == want, f"{call} of {name}: {got}, due {want}"
                for g in range(len(self.groups)):
                    got, want = test.pool.kv_len(mine, g), oracle.pool.kv_len(due, g)
                    assert got == want, f"kv_len of {name} in group {g}: {got}, due {want}"
                    self._same(f"table of {name} in group {g}", test.pool.table(mine, g), oracle.pool.table(due, g))
        self.live = alive
        for mine, due in zip(test.plans, oracle.plans, strict=True):
            assert mine.is_pending == due.is_pending, "is_pending"
        if self.counters:
            test.pool.check()
        if self.counters and self.cache:
            got, want = test.pool.prefix.stats(), oracle.pool.prefix.stats()
            assert got == want, f"prefix.stats: {got}, due {want}"
            for side, known in zip((test, oracle), self.told, strict=True):
                _fold(side.pool.prefix.events(), known)
            assert self.told[0] == self.told[1], f"events told of {self.told[0]}, due {self.told[1]}"
        self._see_tables()

    def compare_plan(self, index: int) -> None:
        """Compare every array of a plan that was just filled."""
        mine, due = self.pair.test.plans[index], self.pair.oracle.plans[index]
        for name in FIELDS:
            got, want = getattr(mine, name), getattr(due, name)
            assert got == want, f"plan {index} {name}: {got}, due {want}"
        got, want = [list(map(one.name, p.handles)) for one, p in ((self.pair.test, mine), (self.pair.oracle, due))]
        assert got == want, f"plan {index} handles: {got}, due {want}"
        formats = PLANS[index].get("formats", ("seq_lens",))
        for name in ("served", *(name for name in (*COMMON, "table_updates") if name in formats)):
            self._same(f"plan {index} {name}", getattr(mine, name), getattr(due, name))
        assert len(mine.groups) == len(due.groups), f"plan {index}: {len(mine.groups)} groups"
        for g, group in enumerate(self.groups):
            for name in STATE_ARRAYS if group.kind == "state" else GROUP_ARRAYS:
                got, want = getattr(mine.groups[g], name), getattr(due.groups[g], name)
                self._same(f"plan {index} groups[{g}].{name}", got, want)

    def _same(self, what: str, got: np.ndarray, want: np.ndarray) -> None:
        """Two arrays are equal. With a prefix cache, only the holes of arrays of ids are compared."""
        if self.cache and (what.startswith("table of") or what.endswith(BY_ID)):
            got, want = got > self.hole, want > self.hole
        is_same = got.dtype == want.dtype and got.shape == want.shape and (got == want).all()
        assert is_same, f"{what}: {got.dtype} {got.shape} {got.tolist()}, due {want.dtype} {want.shape} {want.tolist()}"


def _fold(events: list[Any], known: dict[Any, Any]) -> None:
    """Apply events to what is cached: (content key, group) -> the rest of its event."""
    for name, *said in events:
        if name == "stored":
            assert (said[0], said[5]) not in known, f"events: stored twice, {said}"
            known[said[0], said[5]] = said
        elif name == "removed":
            del known[tuple(said)]
        assert name != "lost", "events were lost"


def groups_of(rng: random.Random, size: int, reserved: int) -> list[Group]:
    """One to eight groups; only states, or one at least has blocks in arena 0."""
    num_arenas = rng.choice([1, 1, 1, 2, 2, 3, 6])
    if rng.random() < 0.08:
        return [Group.state(rng.randint(2, 8)) for _ in range(rng.choice([1, 1, 2, 3]))]
    kinds = ["full"] if rng.random() < 0.4 else ["full", "full", "window", "window", "chunk", "state"]
    groups: list[Group] = []
    told = 0  # the last arena that has blocks
    for place in range(rng.choice([1, 2, 2, 2, 3, 3, 3, 4, 5, 8])):
        kind = rng.choice([kind for kind in kinds if place or kind != "state"])
        if kind == "state":
            groups.append(Group.state(rng.randint(2, 8)))
            continue
        options: dict[str, Any] = {"columns": rng.choice([1, 1, 2, 3])}
        if rng.random() < 0.6:
            options["block_size"] = size * rng.choice([1, 2, 2, 4])
        arena = rng.randrange(num_arenas) if place else 0
        if arena:
            options["arena"] = min(arena, told + 1)
            if arena > told:
                told, options["num_blocks"] = told + 1, reserved + rng.randint(6, 40)
        if kind == "window":
            width = rng.choice([rng.randint(1, 5), rng.randint(1, 12)])
            options["keep"] = rng.choice([0, rng.randrange(width)])
            groups.append(Group.window(width, **options))
        elif kind == "chunk":
            groups.append(Group.chunk(rng.choice([rng.randint(1, 5), rng.randint(1, 12)]), **options))
        else:
            groups.append(Group.full(**options))
    return groups


#: What may be wrong with an option of a pool, or right.
WRONG: tuple[dict[str, Any], ...] = (
    *({"lookahead": n} for n in (-1, 0, 1, 2, 5, True, None, 1.0)),
    *({"groups": groups} for groups in ([], 3, "full", [1], [None], (), [Group.state(2)], [Group.full()] * 9)),
    *({"prefix_cache": flag} for flag in (True, False, 1)),
    *({"reserved_blocks": n} for n in (0, 1, 5, 20)),
    *({"watermark": n} for n in (0, 3, 99)),
    *({"events": n} for n in (0, 4)),
    *({"num_blocks": n} for n in (0, 1, 2, 6)),
    *({"block_size": n} for n in (0, 1, 2, 3)),
)


def make_group(rng: random.Random) -> Group:
    """A group with options that may be wrong."""
    kind = rng.choice(KINDS)
    number: Any = rng.choice([1, 2, 3, 5, 8, 1, 2, 3, 5, 8, 0, -1, True, 1.5, None])
    if kind == "state":
        return Group.state(number)
    options: dict[str, Any] = {}
    for name, values in (
        ("block_size", [None, 2, 2, 4, 8, 1, 3, 6, 16, 0, -2, "2"]),
        ("columns", [1, 1, 2, 5, 0, -1, None]),
        ("arena", [0, 0, 0, 1, 1, 2, 7, 8, -1, None]),
        ("num_blocks", [None, None, 6, 6, 9, 1, 0, -1, 2.0]),
    ):
        if rng.random() < 0.35:
            options[name] = rng.choice(values)
    if kind == "full":
        return Group.full(**options)
    if kind == "chunk":
        return Group.chunk(number, **options)
    if rng.random() < 0.5:
        options["keep"] = rng.choice([0, 1, 2, 4, 5, 8, -1, None])
    return Group.window(number, **options)


def compare_constructors(make_pool: Any, seed: int, count: int, oracle: Any = plain_pool) -> dict[str, int]:
    """Make pools that may be wrong on both sides; both make one, or both raise the same. Returns how many of each."""
    rng = random.Random(f"constructors {seed}")
    met: dict[str, int] = {}
    for _ in range(count):
        groups: Any = []
        for _ in range(rng.choice([1, 1, 2, 2, 3])):
            try:
                groups.append(make_group(rng))
            except (TypeError, ValueError):
                continue
        options = {"num_blocks": 16, "block_size": 2, "groups": groups, "max_seqs": 4}
        if rng.random() < 0.4:  # one thing that is wrong, for which both sides have the same word
            options |= {"groups": [Group.full(), Group.window(4), Group.state(3)], **rng.choice(WRONG)}
        results: list[Any] = []
        for make in (make_pool, oracle):
            try:
                pool = make(**options)
                arenas = [tuple(pool.stats(arena)) for arena in range(_num_arenas(options["groups"]))]
                results.append((arenas, pool.options.groups, pool.options.lookahead))
                pool.shutdown()
            except Exception as error:  # the other side must raise it as well
                results.append(type(error))
        assert results[0] == results[1], f"Pool(**{options}): {results[0]}, due {results[1]}"
        name = results[1].__name__ if isinstance(results[1], type) else "made"
        met[name] = met.get(name, 0) + 1
    return met


def _num_arenas(groups: Any) -> int:
    return 1 + max(group.arena for group in groups) + sum(group.kind == "state" for group in groups)


def options_of(seed: int, prefix_cache: bool = False) -> dict[str, Any]:
    """The pool of a run."""
    rng = random.Random(seed)
    size, reserved = rng.choice([1, 2, 2, 3, 4]), rng.choice([0, 1, 1, 2])
    groups = groups_of(rng, size, reserved)
    if prefix_cache:
        bundles = (1, 1, 2, 3, 0)
        groups = [replace(group, blocks=rng.choice(bundles) * (group.kind == "state")) for group in groups[:4]]
    widths = [group.size for group in groups if group.kind in ("window", "chunk")]
    return {
        "num_blocks": reserved + rng.randint(8, 64),
        "block_size": size,
        "max_seqs": rng.choice([3, 5, 8, 8]),
        "max_blocks_per_seq": rng.choice([None, None, 6, 30]),
        "reserved_blocks": reserved,
        "watermark": rng.choice([0, 0, 2]),
        "in_order": rng.random() < 0.25,
        "lookahead": rng.choice([0, 0, rng.randrange(min(widths, default=5))]),
        "groups": groups,
        "prefix_cache": prefix_cache,
        "events": rng.choice([0, 10_000]) if prefix_cache else 0,
        "two_classes": prefix_cache and rng.random() < 0.5,
    }


class GroupRun:
    """Programs on one kind of pool, for `kvpool.testing.fuzz_target.hunt`."""

    def __init__(
        self,
        options: dict[str, Any],
        seed: int,
        make: tuple[Any, Any],
        oracle: tuple[Any, Any] = (plain_pool, ModelPlan),
        counters: bool = True,
    ) -> None:
        self.sizes, self.seed, self.make, self.oracle = options, seed, make, oracle
        self.counters = counters

    def words(self) -> list[Word]:
        """The program of the seed, which draws how often it makes each call."""
        rng, usual = random.Random(f"words {self.seed}"), CACHED if self.sizes["prefix_cache"] else OPERATIONS
        weights = [weight * rng.choice(SWARM) for weight in usual.values()]
        if all(group.kind != "full" for group in self.sizes["groups"]):
            weights = [weight / (16 if name in EVICTING else 1) for name, weight in zip(usual, weights, strict=True)]
        operations = rng.choices(range(len(usual)), weights if any(weights) else None, k=CALLS_PER_RUN)
        return [(op, rng.getrandbits(16), rng.getrandbits(16), rng.getrandbits(16)) for op in operations]

    def play(self, words: list[Word]) -> int:
        """Play a program on new pools; returns the calls made."""
        sides = [Side(*make, self.sizes, PLANS) for make in (self.make, self.oracle)]
        program = Program(sides[0], sides[1], self.sizes, self.counters)
        made, name = 0, "the end"
        try:
            for made, word in enumerate(words):  # noqa: B007 - read where it raised
                name = program.operations[word[0] % len(program.operations)]
                program.play(word)
            name = "the end"
            program.finish()
        except Exception as error:  # the pool may fail with anything
            kind = "content" if str(error).startswith("content") else type(error).__name__
            raise TargetFinding(kind, f"call {made}, {name}: {error}") from error
        finally:
            for side in sides:
                side.shutdown()
        return len(words)

    def script(self, words: list[Word], what: str) -> str:
        """A test that plays these words."""
        names = operations_of(self.sizes)
        lines = "".join(f"        {word},  # {names[word[0] % len(names)]}\n" for word in words)
        comment = "".join(f"    # {line}\n" for line in what.splitlines()[:3])
        options = "".join(f"        {name!r}: {value!r},\n" for name, value in self.sizes.items())
        return (
            "import kvpool\nfrom kvpool.groups import Group\nfrom proof.plain.programs import GroupRun\n\n\n"
            f"def test_fuzz_groups():\n{comment}    options = {{\n{options}    }}\n"
            f"    words = [\n{lines}    ]\n    GroupRun(options, {self.seed}, (kvpool.Pool, kvpool.Plan)).play(words)\n"
        )


def hunt_groups(
    make: tuple[Any, Any], seed: int = 1, *, oracle: tuple[Any, Any] = (plain_pool, ModelPlan), **until: Any
) -> TargetReport:
    """Random programs on pools with groups, until one differs from the model or reads the wrong content.

    Parameters
    ----------
    make, oracle : tuple of callables
        The classes of pool and plan, under test and beside it.
    seed : int
        Of the first run; the report's `seed` and ``calls=1`` repeat the run that failed.
    until
        When to stop, and who is told: see `kvpool.testing.fuzz_target.hunt`.

    Returns
    -------
    TargetReport
        `finding` is None, or says what differs; `script` is the shortest program found, as a test.
    """

    def make_run(run_seed: int) -> GroupRun:
        return GroupRun(options_of(run_seed, run_seed % 5 > 0), run_seed, make, oracle)

    return hunt(make_run, seed, **until)
