"""The prefix cache's part of `proof.machine.machine`: prompts that share prefixes, and what a hit must hold.

The judges are the same two. `ModelPool` predicts every hit, and `PrefixContent` knows for every stamp ever written
which prefix of which namespace it ends: a hit is read from both memories of the fake backend and must be exactly the
tokens that were asked for, written in this namespace since its last flush. In the late memory only what is done was
executed: a hit on a copy that is still pending reads poison there, whether it is rolled back or not.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, ClassVar

import numpy as np
from hypothesis import strategies as st
from hypothesis.stateful import invariant, rule

from proof.machine.content import Content
from proof.machine.machine import PoolMachine, _some, counts, picks, small, which_plan
from proof.machine.pair import PLANS, RAISED, Side

NOBODYS = 2**31 - 1  # a token that no prompt has
NAMESPACES = (b"", b"", b"", b"a", b"b")
namespaces = st.sampled_from(NAMESPACES)
styles = st.sampled_from([0, 0, 0, 1, 2, 3])
#: What a family of one prompt does while plans are in flight.
FAMILY_ACTS = (
    *("commit", "commit", "commit", "rollback", "rollback", "ask", "ask", "ask", "done"),
    *("unshare", "fork", "step", "reserve", "truncate", "close", "contradict"),
)
WRONG_TOKENS: tuple[Any, ...] = (
    [-1],
    [0, 2**31],
    (1, -(2**40)),
    np.array([0, -1], np.int32),
    np.array([2**31], np.int64),
    [2**70],
    [True],
    [0, 1.0],
    ["1"],
    [None],
    np.array([1.0]),
    np.array([1], np.uint32),
    np.array([1], np.int16),
    np.array([[1, 2]], np.int32),
    np.zeros(8, np.int32)[::2],
    np.array([1], ">i4"),
    "12",
    b"12",
    None,
    1.5,
)
WRONG_NAMESPACES: tuple[Any, ...] = ("", None, 0, bytearray(b"a"), ("a",))


def script(style: int, position: int) -> int:
    """The token that sequences of a style have at a position: styles agree up to a point, most of them for long."""
    return int(style > 0 and position >= (1, 3, 17)[style - 1])


class PrefixContent(Content):
    """A fake backend that knows which prefix each stamp ends."""

    def __init__(self, num_blocks: int, block_size: int) -> None:
        super().__init__(num_blocks, block_size)
        self.tokens: dict[int, list[int]] = {}  # handle -> its tokens, one per stamp
        self.script: dict[int, tuple[list[int], int]] = {}  # handle -> its prompt, style of what comes after it
        self.committed: dict[int, int] = {}  # handle -> tokens given to `commit`, or found
        self.space: dict[int, tuple[bytes, int]] = {}  # handle -> namespace and how often it was flushed before
        self.ends: dict[int | None, tuple[tuple[bytes, int], tuple[int, ...]]] = {}  # stamp -> space, prefix
        self.flushes = dict.fromkeys(NAMESPACES, 0)

    def opened(self, handle: int, prompt: tuple[int, ...] = (), style: int = 0, namespace: bytes = b"") -> None:
        """A new sequence that is going to have these tokens."""
        super().opened(handle)
        self.tokens[handle] = []
        self.script[handle] = list(prompt), style
        self.committed[handle] = 0
        self.space[handle] = namespace, self.flushes[namespace]

    def found(self, handle: int, table: list[int], length: int) -> None:
        """The sequence came with `length` cached tokens: they must be what its prompt says."""
        slots = self._context(table, length)
        stamps = [self.now[slot] for slot in slots]
        prompt, space = tuple(self.script[handle][0]), self.space[handle]
        for position, slot in enumerate(slots):
            due = space, prompt[: position + 1]
            for memory in (self.now, self.late):
                held = self.ends.get(memory[slot])
                assert held == due, f"content: a hit holds {held}, asked was {due}"
        self.stamps[handle] = [stamp for stamp in stamps if stamp is not None]
        self.tokens[handle] = list(prompt[:length])
        self.committed[handle] = length

    def forked(self, parent: int, children: list[int]) -> None:
        """The children go on in another style each."""
        super().forked(parent, children)
        for i, child in enumerate(children):
            prompt, style = self.script[parent]
            self.tokens[child] = list(self.tokens[parent])
            self.script[child] = list(prompt), (style + i) % 3
            self.committed[child] = self.committed[parent]
            self.space[child] = self.space[parent]

    def truncated(self, handle: int, length: int) -> None:
        """What comes after may differ from what was there: the prompt is forgotten."""
        super().truncated(handle, length)
        del self.tokens[handle][length:]
        self.committed[handle] = min(self.committed[handle], length)
        if length % 2:
            prompt, style = self.script[handle]
            self.script[handle] = prompt[:length], style + 1

    def compacted(self, handle: int, table: list[int], keep: list[int]) -> None:
        """Nothing that the sequence has or will have may be found any more: its tokens are no prefix."""
        if len(keep) < len(self.stamps[handle]):
            self._no_prefix(handle, len(keep))
        super().compacted(handle, table, keep)

    def lost_blocks(self, handle: int, places: list[int]) -> None:
        """Like compaction; what stays found are the blocks that left."""
        super().lost_blocks(handle, places)
        if places:
            self._no_prefix(handle, len(self.stamps[handle]))

    def _no_prefix(self, handle: int, length: int) -> None:
        self.tokens[handle] = [NOBODYS] * length
        self.committed[handle] = 0

    def next_token(self, handle: int, position: int) -> int:
        """The token that the sequence has at a position."""
        prompt, style = self.script[handle]
        return prompt[position] if position < len(prompt) else script(style % 4, position)

    def started(self, plan: int, rows: Any, new_slots: list[list[int]], copies: list[list[int]]) -> None:
        """Every new stamp ends a prefix."""
        super().started(plan, rows, new_slots, copies)
        for (handle, _), slots in zip(rows, new_slots, strict=True):
            tokens = self.tokens[handle]
            for stamp in self.stamps[handle][len(tokens) :]:
                tokens.append(self.next_token(handle, len(tokens)))
                self.ends[stamp] = self.space[handle], tuple(tokens)
            assert len(tokens) == len(self.stamps[handle]), slots

    def rolled_back(self, plan: int, lengths: dict[int, int]) -> None:
        """The tokens go with the stamps."""
        super().rolled_back(plan, lengths)
        for handle, length in lengths.items():
            del self.tokens[handle][length:]

    def flushed(self, namespace: bytes | None) -> None:
        """What was written in a namespace until now must not be found any more."""
        for name in self.flushes:
            self.flushes[name] += namespace in (None, name)

    def reset(self) -> None:
        """Nothing is left to be found."""
        super().reset()
        self.flushed(None)


def plain_events(events: list[tuple]) -> list[tuple]:
    """Events as comparable values."""
    return [tuple(tuple(x) if isinstance(x, list | np.ndarray) else x for x in event) for event in events]


class PrefixMachine(PoolMachine):
    """`PoolMachine` on pools with a prefix cache."""

    options: ClassVar[dict[str, Any]] = {"prefix_cache": True, "events": 12}
    make_content = PrefixContent
    content: PrefixContent
    # No different on pools with a prefix cache: they leave their turns to the rules below.
    generate = misuse = step_padded = None  # type: ignore[assignment]

    @invariant()
    def everything_agrees(self) -> None:
        """Also how much of every sequence is committed."""
        is_quiet = self.quiet
        super().everything_agrees()
        for name in () if is_quiet else self.opened():
            for side in (self.pair.test, self.pair.oracle):
                got, due = side.pool.prefix.committed(side.handle(name)), self.content.committed[name]
                assert got == due, f"committed of {name}: {got}, due {due}"

    # ---- helpers ------------------------------------------------------------------------------------------

    def _form(self, tokens: list[int]) -> Any:
        """The same tokens, in every form that is accepted."""
        forms: tuple[Callable[[], Any], ...] = (
            lambda: np.array(tokens, np.int32),
            lambda: list(tokens),
            lambda: np.array(tokens, np.int64),
            lambda: tuple(tokens),
        )
        return forms[self.turn % 4]()

    def _prompt(self, style: int, length: int) -> list[int]:
        return [script(style, position) for position in range(length)]

    def _open_prompt(self, prompt: list[int], style: int, namespace: bytes) -> int | None:
        """Open for a prompt; returns the handle. What `match` promised must be found."""
        form = self._form(prompt)
        promised = self.both(lambda side: side.pool.prefix.match(form, namespace))
        got = self.both(lambda side: side.pool.open(form, namespace), handles=True)
        if got is RAISED:
            return None
        pool = self.pair.test.pool
        length = pool.num_tokens(self.pair.test.handle(got[0]))
        assert length == promised, f"open found {length} tokens, match promised {promised}"
        self._opened(got[0], length, prompt, style, namespace)
        return got[0]

    def _opened(self, name: int, length: int, prompt: list[int], style: int, namespace: bytes) -> None:
        table = self.pair.test.pool.table(self.pair.test.handle(name)).tolist()
        self.tables[name] = table
        self.content.opened(name, tuple(prompt), style, namespace)
        self.content.found(name, table, length)
        self.content.took(table[length // self.block_size :])

    def _commit_tokens(self, rows: list[int], amounts: list[int]) -> None:
        """Commit so many tokens of each row, in one call; whether that is legal is up to the oracle."""
        content = self.content
        known = [content.tokens[name][content.committed[name] :] for name in rows]
        given = [(tokens + [0] * amount)[:amount] for tokens, amount in zip(known, amounts, strict=True)]
        flat = self._form([token for tokens in given for token in tokens])
        arguments: tuple[Any, ...] = (flat, np.array(amounts, np.int32 if self.turn % 3 else np.int64))
        if len(set(amounts)) == 1 and self.turn % 2:
            arguments = (flat,)
        alone = len(rows) == 1 and self._as_array()
        if (
            self.both(
                lambda side: side.pool.prefix.commit(
                    side.handle(rows[0]) if alone else side.batch(rows, self._as_array()), *arguments
                )
            )
            is RAISED
        ):
            return
        for name, amount in zip(rows, amounts, strict=True):
            first = content.committed[name] // self.block_size
            content.committed[name] += amount
            for block in self.tables[name][first : content.committed[name] // self.block_size]:
                content.freeze(block)

    def _close_one(self, name: int) -> None:
        self.both(lambda side: side.pool.close(side.handle(name)))
        self._forget([name])

    def _read_tables(self, rows: list[int]) -> None:
        for name in rows:
            self.tables[name] = self.pair.test.pool.table(self.pair.test.handle(name)).tolist()

    def _done_amounts(self, rows: list[int]) -> list[int]:
        """How many tokens of each row are computed, as far as the machine can see, and not yet committed."""
        amounts = []
        for name in rows:
            length = len(self.content.stamps[name])
            for lengths in self.before.values():
                length = min(length, lengths.get(name, length))
            amounts.append(max(0, length - self.content.committed[name]))
        return amounts

    def _commit(self, rows: list[int]) -> None:
        """Instead of the marks of a pool without a prefix cache."""
        self._read_tables(rows)
        self._commit_tokens(rows, self._done_amounts(rows))

    def _grow(self, index: int, rows: list[int], goal: list[int]) -> None:
        """Step rows up to a length, as far as the plan allows, and wait for it."""
        index = self._idle_plan(index)
        room = PLANS[index]["max_tokens"]
        rows = rows[: PLANS[index]["max_rows"]]
        num_new = []
        for name, length in zip(rows, goal, strict=False):
            num_new.append(max(0, min(room, length - len(self.content.stamps[name]))))
            room -= num_new[-1]
        self._step(index, rows, num_new)
        for pending in list(self.before):
            self._done(pending)

    # ---- rules --------------------------------------------------------------------------------------------

    @rule(
        requests=st.lists(st.tuples(styles, st.integers(0, 6), st.integers(-1, 2)), min_size=1, max_size=4),
        namespace=namespaces,
        index=which_plan,
        serve=st.sampled_from(["open", "grow", "commit", "commit", "close", "close"]),
    )
    def serve(self, requests: list[tuple[int, int, int]], namespace: bytes, index: int, serve: str) -> None:
        """Requests one after the other: opened, computed, committed, closed, or only the first of these."""
        self._forget_deferred()
        for style, blocks, more in requests:
            prompt = self._prompt(style, max(0, blocks * self.block_size + more))
            name = self._open_prompt(prompt, style, namespace)
            self.everything_agrees()
            if name is None or serve == "open":
                continue
            self._grow(index, [name], [len(prompt)])
            if serve != "grow":
                self._commit([name])
            if serve == "close":
                self.everything_agrees()
                self._close_one(name)

    @rule(chosen=picks, amounts=counts, how=st.sampled_from(["all", "all", "some", "one", "blind"]))
    def commit(self, chosen: list[int], amounts: list[int], how: str) -> None:
        """Tokens become known: all that are computed, some of them, or more than are."""
        rows = self._rows(chosen)
        self._read_tables(rows)
        done = self._done_amounts(rows)
        wanted = [amounts[i % len(amounts)] for i in range(len(rows))]
        if how == "one":
            rows, done, wanted = rows[:1], done[:1], [1]
        if how != "blind":
            wanted = done if how == "all" else [min(pair) for pair in zip(done, wanted, strict=True)]
        self._commit_tokens(rows, wanted)

    @rule(
        style=styles,
        blocks=st.integers(1, 3),
        namespace=namespaces,
        index=which_plan,
        pressure=st.integers(0, 6),
        close_first=st.booleans(),
    )
    def twins(self, style: int, blocks: int, namespace: bytes, index: int, pressure: int, close_first: bool) -> None:
        """Two requests compute one prefix at once; the first leaves under pressure, the second goes on."""
        self._forget_deferred()
        prompt = self._prompt(style, blocks * self.block_size + 1)
        pair = [self._open_prompt(prompt, style, namespace) for _ in range(2)]
        names = [name for name in pair if name is not None]
        self._grow(index, names, [len(prompt)] * 2)
        for name in names:
            self._commit([name])
            self.everything_agrees()
        if not names:
            return
        if close_first:
            self._close_one(names[0])
        self.both(lambda side: side.pool.blocks.evict(pressure))
        self.everything_agrees()
        self._grow(index, names[1:], [len(prompt) + self.block_size])
        self._commit(names[1:])

    @rule(
        style=styles,
        blocks=st.integers(1, 3),
        more=st.integers(0, 1),
        index=which_plan,
        acts=st.lists(st.tuples(st.sampled_from(FAMILY_ACTS), small), min_size=3, max_size=8),
    )
    def family(self, style: int, blocks: int, more: int, index: int, acts: list[tuple[str, int]]) -> None:
        """A prompt is computed and forked; copies are made, told and undone in any order, and others ask for it."""
        self._forget_deferred()
        prompt = self._prompt(style, blocks * self.block_size + more)
        first = self._open_prompt(prompt, style, b"")
        if first is None:
            return
        self._grow(index, [first], [len(prompt)])
        members = [first, *self._fork(first, 1)]
        for act, pick in [("unshare", 0), *acts]:
            self.everything_agrees()
            members = [name for name in members if name in self.content.stamps]
            if act == "ask":
                name = self._open_prompt([*prompt, 0], style, b"")
                members += [] if name is None else [name]
            elif act in ("rollback", "done") and self.before:
                (self.rollback if act == "rollback" else self.done)(0)
            elif members:
                name = members[pick % len(members) if pick % 3 == 0 else 0]  # mostly to one of them
                members += self._family_act(act, index, name, pick) or []

    def _family_act(self, act: str, index: int, name: int, pick: int) -> list[int] | None:
        length, index = len(self.content.stamps[name]), self._idle_plan(index)
        if act == "unshare":
            keep = [max(0, length - 1 - pick // 8)]
            rows, first = [name], pick % 2
            self._start(index, rows, lambda side, plan: side.pool.unshare(plan, side.batch(rows, True), keep, first))
        elif act == "commit":
            self._commit([name])
        elif act == "step":
            self._step(index, [name], 1 + pick % 3)
        elif act == "reserve":
            self._start(index, [name], lambda side, plan: side.pool.reserve(plan, side.batch([name], True), 1 + pick))
        elif act == "truncate":
            self._truncate([name], [max(0, length - 1 - pick % 4)])
        elif act == "close":
            self._close_one(name)
        elif act == "fork":
            return self._fork(name, 1)
        elif act == "contradict":
            self._contradict(name)
        return None

    def _contradict(self, name: int) -> None:
        """Two rows of one commit tell different tokens of a block that they share."""
        self._read_tables(self.opened())
        content, bs = self.content, self.block_size
        start = content.committed[name]
        full = range(bs - 1, start + self._done_amounts([name])[0], bs)  # where blocks end
        others = [other for other in self.opened() if other != name and content.committed[other] == start]
        both = [
            (other, end)
            for other in others
            for end in full
            if start <= end < start + self._done_amounts([other])[0]
            and self.tables[name][end // bs] == self.tables[other][end // bs]
        ]
        if both:
            other, end = both[0]
            told = content.tokens[name][start : end + 1]
            form = self._form([*told, *told[:-1], told[-1] + 1])
            got = self.both(lambda side: side.pool.prefix.commit(side.batch([name, other], True), form))
            assert got is RAISED, "one block was told two different tokens in one commit"

    @rule(style=styles, blocks=st.integers(0, 6), namespace=namespaces)
    def pin(self, style: int, blocks: int, namespace: bytes) -> None:
        """Hold a prefix."""
        self._forget_deferred()
        prefix = self._prompt(style, blocks * self.block_size + blocks % 2)
        form = self._form(prefix)
        got = self.both(lambda side: side.pool.prefix.pin(form, namespace), handles=True)
        if got is not RAISED:
            length = self.pair.test.pool.num_tokens(self.pair.test.handle(got[0]))
            self._opened(got[0], length, prefix, style, namespace)

    @rule(pick=small)
    def unpin(self, pick: int) -> None:
        """Let go of a prefix, or of any sequence."""
        name = self._rows([pick])[0]
        self.both(lambda side: side.pool.prefix.unpin(side.handle(name)))
        self._forget([name])

    @rule(namespace=st.sampled_from([None, *NAMESPACES]), go_on=st.booleans(), rare=small)
    def flush(self, namespace: bytes | None, go_on: bool, rare: int) -> None:
        """Forget a namespace; sequences that are older commit in vain."""
        self._forget_deferred()
        if rare < 8:
            self.both(lambda side: side.pool.prefix.flush(namespace))
            self.content.flushed(namespace)
            if go_on:
                self.everything_agrees()
                self._commit(self.opened())

    @rule(
        what=st.sampled_from(["events", "open blank", "evict", "histogram", "reset"]),
        namespace=namespaces,
        n=small,
    )
    def other(self, what: str, namespace: bytes, n: int) -> None:
        """The calls that need no rule of their own; reset is rare."""
        self._forget_deferred()
        if what == "open blank":
            got = self.both(lambda side: side.pool.open(n, namespace), handles=True)
            if got is not RAISED:
                self._opened(got[0], 0, [], n % 4, namespace)
        elif what == "evict":
            self.both(lambda side: side.pool.blocks.evict(n // 3))
        elif what == "histogram":
            self.pair.compare_histogram()
        elif what == "reset" and n < 2:
            self._reset()
        else:
            self.both(lambda side: plain_events(side.pool.prefix.events()))

    @rule(pick=st.integers(0, 7), which=st.integers(0, 99))
    def misuse_prefix(self, pick: int, which: int) -> None:
        """Bad tokens, namespaces, handles and counts."""
        self._forget_deferred()
        tokens = WRONG_TOKENS[which % len(WRONG_TOKENS)]
        namespace = WRONG_NAMESPACES[which % len(WRONG_NAMESPACES)]
        rows = _some(self.opened(), [which, which + 1])
        stale = self.dead[-1 - which % len(self.dead)]
        counts = [which % 5 + 1] * max(1, len(rows) + which % 2)  # too many, or too much
        too_long = [0] * (self.pair.oracle.pool.options.max_blocks_per_seq * self.block_size + 1)
        calls: tuple[Callable[[Side], Any], ...] = (
            lambda side: side.pool.open(tokens),
            lambda side: side.pool.prefix.match(tokens),
            lambda side: side.pool.prefix.pin(tokens),
            lambda side: (side.pool.prefix.match, side.pool.open, side.pool.prefix.pin)[which % 3]([0, 0], namespace),
            lambda side: side.pool.prefix.commit(side.batch(rows, which % 2 == 0), tokens),
            lambda side: side.pool.prefix.commit(side.batch([*rows, stale], False), [], None if which % 2 else 0),
            lambda side: side.pool.prefix.commit(side.batch(rows, True), [0] * (which % 5), counts),
            lambda side: side.pool.open(too_long),
        )
        got = self.both(calls[pick])
        assert got is RAISED, f"misuse {pick}, {which} was accepted: {got}"
