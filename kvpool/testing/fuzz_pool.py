"""Random programs on `kvpool.Pool` beside the plain Python model: the same calls on both, everything compared.

A program is a list of words ``(op, a, b, c)``. What a word means depends on the state that it meets, so every part of
a program is a program; that is what shrinking needs. `Pair` compares what a call returned or raised, then statistics,
tables, lengths and reference counts, and every array of a plan that was filled.
"""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from typing import Any

import numpy as np

from kvpool import Plan, Pool
from kvpool.errors import KVPoolError
from kvpool.testing.fuzz_target import TargetFinding, TargetReport, Word, hunt
from kvpool.testing.model import ModelPlan, ModelPool

LOCAL_BITS = 52  # of a handle; above them is the tag, which differs from pool to pool

#: What `Pair.both` returns when both sides raised the same.
RAISED = object()
#: The plans of every machine; together they have every format, both dtypes, own pads and tight limits.
PLANS: tuple[dict[str, Any], ...] = (
    {
        "max_rows": 8,
        "max_tokens": 64,
        "formats": ("block_tables", "seq_lens", "slot_mapping", "positions", "cu_q_lens", "slot_ids"),
    },
    {
        "max_rows": 8,
        "max_tokens": 96,
        "formats": ("csr", "kv_slots", "kv_slots_ragged", "block_tables"),
        "dtype": "int64",
        "pad": {"kv_slots": -7, "block_tables": -9},
    },
    {"max_rows": 6, "max_tokens": 24, "formats": ("page_batch_info",), "dtype": {"slot_mapping": "int64"}},
    {"max_rows": 3, "max_tokens": 9, "formats": ("csr", "kv_slots_ragged"), "table_width": 8, "kv_width": 40},
)
ARRAYS = (
    ("block_tables", "seq_lens", "slot_mapping", "positions", "cu_q_lens", "slot_ids"),
    ("indptr", "indices", "last_page_len", "kv_slots", "kv_slots_ragged", "kv_indptr", "block_tables"),
    ("slot_ids", "block_tables", "seq_lens", "cu_q_lens", "slot_mapping"),
    ("indptr", "indices", "last_page_len", "kv_slots_ragged", "kv_indptr"),
)
TOKEN_FIELDS = ("num_tokens", "is_pending", "step_id")
ALWAYS = ("copies", "dirty_rows", "served")


def local(handle: int) -> int:
    """The part of a handle that two equal pools agree on."""
    return int(handle) & (1 << LOCAL_BITS) - 1


class Side:
    """One pool with its plans; handles are named by their local part."""

    def __init__(
        self,
        make_pool: Callable,
        make_plan: Callable,
        options: dict[str, Any],
        plans: tuple[dict[str, Any], ...] = PLANS,
    ) -> None:
        self.pool = make_pool(**options)
        self._make_plan = make_plan
        first = self.pool.open()  # the only way to learn the tag
        self.pool.close(first)
        self._first = int(first)  # of row 0, with the tag and the first generation of this pool
        self.plans = [make_plan(self.pool, **plan) for plan in plans]
        self._foreign: list[Any] = []

    def handle(self, name: int) -> int:
        """The full handle of a local one."""
        return self._first + name

    def name(self, handle: int) -> int:
        """The local part of a handle: its row, and how many generations behind the first."""
        return int(handle) - self._first

    def batch(self, names: list[int], as_array: bool) -> Any:
        """Full handles, as a list or as an array."""
        handles = [self.handle(name) for name in names]
        return np.array(handles, np.int64) if as_array else handles

    def foreign_plan(self) -> Any:
        """An idle plan of another pool of the same kind."""
        if not self._foreign:
            other = type(self.pool)(4, 2)
            self._foreign = [other, self._make_plan(other, 2)]
        return self._foreign[1]

    def shutdown(self) -> None:
        """Give the tags back."""
        for pool in [self.pool, *self._foreign[:1]]:
            pool.shutdown()


def _plain(value: Any) -> Any:
    if isinstance(value, np.ndarray):
        return (str(value.dtype), value.shape, value.tolist())
    return value


def _outcome(call: Callable, side: Side) -> tuple[Any, Exception | None]:
    try:
        return call(side), None
    except Exception as error:  # whatever it is, the other side must raise it as well
        return None, error


_NUMBERS = ("needed", "short_by", "row", "blank", "evictable", "limbo", "arena")


def _same_error(got: Exception, want: Exception, test: Side, oracle: Side) -> bool:
    if type(got) is not type(want):
        return False
    for name in _NUMBERS:
        if getattr(got, name, None) != getattr(want, name, None):
            return False
    one, other = getattr(got, "handle", -1), getattr(want, "handle", -1)
    return one == other or test.name(one) == oracle.name(other)


class Pair:
    """The pool under test beside the oracle."""

    def __init__(self, test: Side, oracle: Side) -> None:
        self.test, self.oracle = test, oracle
        self._shown: dict[tuple[int, str], np.ndarray] = {}

    def both(self, call: Callable[[Side], Any], handles: bool = False) -> Any:
        """Make a call on both sides; returns what it returned, or `RAISED` when both raised the same.

        `handles` says that handles are returned: they are compared, and returned, by their local part.
        A call that raises must leave the fingerprint and the digest as they were.
        """
        want, error = _outcome(call, self.oracle)
        if error is not None:
            pool = self.test.pool
            before = pool.fingerprint(), pool.digest()
            got, raised = _outcome(call, self.test)
            if raised is None:
                raise AssertionError(f"returned {got!r}, {type(error).__name__} was due: {error}")
            if not _same_error(raised, error, self.test, self.oracle):
                raise AssertionError(
                    f"raised {type(raised).__name__}: {raised} {vars(raised)}, "
                    f"due was {type(error).__name__}: {error} {vars(error)}"
                ) from raised
            if isinstance(raised, KVPoolError):
                assert str(raised).startswith("["), f"message without its call: {raised}"
            assert (pool.fingerprint(), pool.digest()) == before, f"state changed by a call that raised: {raised}"
            return RAISED
        got = call(self.test)
        if handles:
            assert np.asarray(got).dtype == np.asarray(want).dtype
            want = list(map(self.oracle.name, np.atleast_1d(want)))
            got = list(map(self.test.name, np.atleast_1d(got)))
        assert _plain(got) == _plain(want), f"returned {got!r}, {want!r} was due"
        return got

    def could_open(self, *prompt: Any, **how: Any) -> Any:
        """Ask both sides whether a prompt could be opened: that changes nothing."""
        before = self.test.pool.fingerprint(), self.test.pool.digest()
        could = self.both(lambda side: side.pool.can(tokens=prompt[0], namespace=prompt[1], **how))
        assert before == (self.test.pool.fingerprint(), self.test.pool.digest()), "can(tokens=) changed the pool"
        return could

    def compare_state(self) -> dict[int, list[int]]:
        """Compare everything that can be read; returns the tables of the open sequences."""
        test, oracle = self.test.pool, self.oracle.pool
        got, want = test.stats(), oracle.stats()
        assert tuple(got) == tuple(want), f"stats: {got}, due {want}"
        if oracle.prefix is not None:
            got, want = test.prefix.stats(), oracle.prefix.stats()
            assert tuple(got) == tuple(want), f"prefix.stats: {got}, due {want}"
        state = oracle.state()
        tables = {}
        for name, (length, table, _, _, (evicted, _)) in state["sequences"].items():
            handle = self.test.handle(name)
            tables[name] = test.table(handle).tolist()
            assert tables[name] == table, f"table of {name}: {tables[name]}, due {table}"
            assert test.kv_len(handle) == length, f"kv_len of {name}"
            assert test.num_tokens(handle) == length + evicted, f"num_tokens of {name}"
            assert test.capacity(handle) == len(table) * test.block_size, f"capacity of {name}"
            assert test.is_open(handle), f"is_open of {name}"
        for block in range(test.options.reserved_blocks, test.num_blocks):
            count, due = test.blocks.refcount(block), state["refcounts"].get(block, 0)
            assert count == due, f"refcount of {block}: {count}, due {due}"
        for mine, due in zip(self.test.plans, self.oracle.plans, strict=True):
            assert mine.is_pending == due.is_pending, "is_pending"
        test.check()
        return tables

    def compare_histogram(self) -> None:
        """Compare the refcount histograms."""
        self.both(lambda side: side.pool.blocks.refcount_histogram())

    def compare_plan(self, index: int) -> None:
        """Compare every attribute of a plan that was just filled."""
        mine, due = self.test.plans[index], self.oracle.plans[index]
        for name in TOKEN_FIELDS:
            got, want = getattr(mine, name), getattr(due, name)
            assert got == want, f"plan {index} {name}: {got}, due {want}"
        got, want = list(map(self.test.name, mine.handles)), list(map(self.oracle.name, due.handles))
        assert got == want, f"plan {index} handles: {got}, due {want}"
        for name in ALWAYS + ARRAYS[index]:
            got, want = getattr(mine, name), getattr(due, name)
            assert got.dtype == want.dtype and got.shape == want.shape and (got == want).all(), (
                f"plan {index} {name}: {got.dtype} {got.tolist()}, due {want.dtype} {want.tolist()}"
            )
        for name in ARRAYS[index]:
            shown, key = getattr(mine, name), (index, name)
            before = self._shown.get(key)
            if before is not None and before.shape == shown.shape:
                assert before is shown, f"plan {index} {name} is a new array object though its shape is the same"
            self._shown[key] = shown

    def forget_shown(self, index: int) -> None:
        """Arrays were bound: the attributes are new objects."""
        for name in ARRAYS[index]:
            self._shown.pop((index, name), None)


CALLS_PER_RUN = 200
NAMESPACES = (b"", b"lora-1")
OPERATIONS = (
    *("open", "open", "open_prompt", "open_prompt", "step", "step", "step", "step", "step", "step", "reserve"),
    *("fork", "truncate", "close", "close", "done", "done", "done", "rollback", "commit", "commit", "commit"),
    *("match", "flush", "events", "alloc", "decref", "incref", "evict", "unshare", "compact", "leave", "stale"),
    *("defer_close", "load", "loaded"),
)
ONLY_CACHED = ("open_prompt", "load", "commit", "match", "flush", "events")


class Program:
    """The state of a program: the two pools, and what the next words may name."""

    def __init__(self, make_pool: Callable[..., Any], options: dict[str, Any]) -> None:
        self.pair = Pair(Side(make_pool, Plan, options), Side(ModelPool, ModelPlan, options))
        self.size: int = options["block_size"]
        self.cached: bool = options["prefix_cache"]
        self.live: list[int] = []
        self.dead: list[int] = [0]  # `Side` opened and closed one
        self.said: dict[int, list[int]] = {}  # tokens of each sequence, as far as somebody asked
        self.spaces: dict[int, bytes] = {}
        self.held: list[int] = []  # blocks with a reference of ours
        self.loads: list[int] = []  # sequences that are loaded, closed ones and some that were loaded among them

    def play(self, word: Word) -> None:
        """Make one call on both pools and compare them."""
        name = OPERATIONS[word[0] % len(OPERATIONS)]
        if not self.live or (name in ONLY_CACHED and not self.cached):
            name = "open"
        getattr(self, name)(*word[1:])
        tables = self.pair.compare_state()
        self.dead += [name for name in self.live if name not in tables]
        self.live = list(tables)
        self.loads = self.loads[-8:]

    def shutdown(self) -> None:
        """Give the tags back."""
        for side in (self.pair.test, self.pair.oracle):
            side.shutdown()

    # ---- what words name ----------------------------------------------------------------------------------

    def _one(self, c: int) -> int:
        return self.live[c % len(self.live)]

    def _rows(self, c: int) -> list[int]:
        return list(dict.fromkeys(self._one(c >> shift) for shift in range(0, 4 * (1 + c % 4), 4)))

    def _text(self, name: int, n: int, b: int) -> list[int]:
        """The first `n` tokens of a sequence; new ones by `b`, few kinds of them, so that prefixes meet."""
        text = self.said.setdefault(name, [])
        text += [b >> k % 16 & 1 for k in range(len(text), n)]
        return text[:n]

    def _idle(self, a: int) -> int:
        plans = self.pair.oracle.plans
        idle = [k for k in range(len(plans)) if not plans[k].is_pending]
        return idle[a % len(idle)] if idle else a % len(plans)

    def _pending(self) -> list[int]:
        """Plans that are pending, oldest first."""
        plans = self.pair.oracle.plans
        return sorted((k for k in range(len(plans)) if plans[k].is_pending), key=lambda k: plans[k].step_id)

    # ---- calls --------------------------------------------------------------------------------------------

    def _opened(self, got: Any, text: list[int], space: bytes) -> None:
        if got is not RAISED:
            for name in got:
                self.live.append(name)
                self.said[name], self.spaces[name] = list(text), space

    def open(self, a: int, b: int, c: int) -> None:
        """Open an empty sequence, sometimes with blocks."""
        tokens = a % (3 * self.size) if b & 1 else 0
        space = NAMESPACES[c & 1] if self.cached else b""
        self._opened(self.pair.both(lambda side: side.pool.open(tokens, space), handles=True), [], space)

    def open_prompt(self, a: int, b: int, c: int) -> None:
        """Open a prompt: of a sequence that is open, with another end, or a new one."""
        other = self._one(c)
        known = self.said[other][: a % (len(self.said[other]) + 1)]
        text, space = known + [b >> k & 1 for k in range(1 + a % (2 * self.size))], NAMESPACES[c >> 8 & 1]
        could = self.pair.could_open(text, space)
        got = self.pair.both(lambda side: side.pool.open(text, space), handles=True)
        assert could is not (got is RAISED), f"can(tokens=) said {could}"
        self._opened(got, text, space)

    def load(self, a: int, b: int, c: int) -> None:
        """Open a prompt whose blocks come from elsewhere."""
        text, space = self._text(self._one(c), 1 + a % (4 * self.size), b), NAMESPACES[c >> 8 & 1]
        got = self.pair.both(lambda side: side.pool.open(text, space, load=True), handles=True)
        self._opened(got, text, space)
        self.loads += [] if got is RAISED else got

    def loaded(self, a: int, b: int, c: int) -> None:
        """Say how much has come: nothing, some of it, or more than there is room for."""
        if self.loads:
            name, n = self.loads[c % len(self.loads)], 0 if b % 4 == 0 else a % (4 * self.size + 2)
            self.pair.both(lambda side: side.pool.loaded(side.handle(name), n))

    def step(self, a: int, b: int, c: int) -> None:
        """Step some sequences by up to a block and a token."""
        rows, plan = self._rows(c), self._idle(a)
        counts = [(b >> 3 * k) % (self.size + 2) for k in range(len(rows))]
        partial = bool(a & 64)

        def call(side: Side) -> None:
            side.pool.step(side.plans[plan], side.batch(rows, bool(a & 32)), counts, partial=partial)

        if self.pair.both(call) is not RAISED:
            self.pair.compare_plan(plan)

    def reserve(self, a: int, b: int, c: int) -> None:
        """Reserve blocks for tokens to come."""
        rows, plan, n = self._rows(c), self._idle(a), b % (2 * self.size)

        def call(side: Side) -> None:
            side.pool.reserve(side.plans[plan], side.batch(rows, False), n)

        if self.pair.both(call) is not RAISED:
            self.pair.compare_plan(plan)

    def done(self, a: int, b: int, c: int) -> None:
        """Declare a pending plan done: the oldest, sometimes another one."""
        pending = self._pending() or [a % len(PLANS)]
        plan = pending[c % len(pending) if b % 8 == 0 else 0]
        self.pair.both(lambda side: side.pool.done(side.plans[plan]))

    def rollback(self, a: int, b: int, c: int) -> None:
        """Roll the newest plan back; an older one is refused."""
        pending = self._pending() or [a % len(PLANS)]
        plan = pending[c % len(pending) if b % 8 == 0 else -1]
        self.pair.both(lambda side: side.pool.rollback(side.plans[plan]))

    def fork(self, a: int, b: int, c: int) -> None:
        """Fork a sequence."""
        parent = self._one(c)
        got = self.pair.both(lambda side: side.pool.fork(side.handle(parent), 1 + a % 3), handles=True)
        self._opened(got, self.said[parent], self.spaces[parent])

    def truncate(self, a: int, b: int, c: int) -> None:
        """Shorten a sequence; a length beyond its end is refused."""
        name = self._one(c)
        length = a % (self.pair.test.pool.num_tokens(self.pair.test.handle(name)) + 2)
        if self.pair.both(lambda side: side.pool.truncate(side.handle(name), length)) is not RAISED:
            del self.said[name][length:]

    def compact(self, a: int, b: int, c: int) -> None:
        """Let tokens of a sequence go."""
        name = self._one(c)
        length = a % (self.pair.test.pool.kv_len(self.pair.test.handle(name)) + 1)
        self.pair.both(lambda side: side.pool.compact(side.handle(name), length, b % 3))

    def unshare(self, a: int, b: int, c: int) -> None:
        """Copy what sequences share, so that they can be compacted."""
        rows, plan = self._rows(c), self._idle(a)
        lens = [(b >> 3 * k) % (2 * self.size + 1) for k in range(len(rows))]

        def call(side: Side) -> None:
            side.pool.unshare(side.plans[plan], side.batch(rows, False), lens, a % 2)

        if self.pair.both(call) is not RAISED:
            self.pair.compare_plan(plan)

    def leave(self, a: int, b: int, c: int) -> None:
        """Take blocks out of the middle of a sequence."""
        name = self._one(c)
        places = sorted({a % 5, b % 5} if a & 8 else {a % 5})
        self.pair.both(lambda side: side.pool.evict_blocks(side.handle(name), places))

    def defer_close(self, a: int, b: int, c: int) -> None:
        """Close two sequences at the next call, as a finalizer would."""
        rows = self._rows(c)[:2]
        for row in rows:
            self.pair.both(lambda side, row=row: side.pool.defer_close(side.handle(row)))  # type: ignore[misc]

    def close(self, a: int, b: int, c: int) -> None:
        """Close sequences."""
        rows = self._rows(c)
        self.pair.both(lambda side: side.pool.close(side.batch(rows, bool(a & 1))))

    def stale(self, a: int, b: int, c: int) -> None:
        """Name a closed sequence: refused."""
        name = self.dead[c % len(self.dead)]
        calls: list[Callable[[Side], Any]] = [
            lambda side: side.pool.fork(side.handle(name)),
            lambda side: side.pool.close(side.batch([*self.live[:2], name], False)),
            lambda side: side.pool.truncate(side.handle(name), 0),
            lambda side: side.pool.is_open(side.handle(name)),
        ]
        self.pair.both(calls[a % len(calls)])

    def commit(self, a: int, b: int, c: int) -> None:
        """Say which tokens a sequence holds, as far as they are computed, or one too far."""
        name = self._one(c)
        pool, handle = self.pair.test.pool, self.pair.test.handle(name)
        start, end = pool.prefix.committed(handle), pool.num_tokens(handle)
        n = a % (end - start + 2) if end >= start else 0
        tokens = self._text(name, start + n, b)[start:]
        self.pair.both(lambda side: side.pool.prefix.commit(side.handle(name), tokens))

    def match(self, a: int, b: int, c: int) -> None:
        """Ask how much of a prompt is cached."""
        name = self._one(c)
        text = self._text(name, 1 + a % (4 * self.size), b)
        self.pair.both(lambda side: side.pool.prefix.match(text, self.spaces[name]))

    def flush(self, a: int, b: int, c: int) -> None:
        """Forget a namespace, or rarely everything."""
        if b % 4 == 0:
            space = None if a % 8 == 0 else NAMESPACES[c & 1]
            self.pair.both(lambda side: side.pool.prefix.flush(space))

    def events(self, a: int, b: int, c: int) -> None:
        """Compare what the cache told since the last time."""
        self.pair.both(lambda side: [event[0] for event in side.pool.prefix.events()])

    def alloc(self, a: int, b: int, c: int) -> None:
        """Take blocks for tables of our own."""
        got = self.pair.both(lambda side: side.pool.blocks.alloc(1 + a % 3))
        if got is not RAISED:
            self.held += got.tolist()

    def incref(self, a: int, b: int, c: int) -> None:
        """Take one more reference to a block."""
        block = self.held[c % len(self.held)] if self.held else a % self.pair.test.pool.num_blocks
        if self.pair.both(lambda side: side.pool.blocks.incref(block)) is not RAISED:
            self.held.append(block)

    def decref(self, a: int, b: int, c: int) -> None:
        """Give a reference back."""
        if self.held:
            block = self.held.pop(c % len(self.held))
            self.pair.both(lambda side: side.pool.blocks.decref(block))

    def evict(self, a: int, b: int, c: int) -> None:
        """Evict cached blocks."""
        self.pair.both(lambda side: side.pool.blocks.evict(a % 3))


def options_of(seed: int, num_blocks: int | None = None, block_size: int | None = None) -> dict[str, Any]:
    """The pool of a run."""
    rng = random.Random(seed)
    blocks, size, reserved = rng.randint(4, 24), rng.choice([1, 2, 2, 3, 4, 7]), rng.choice([0, 1])
    return {
        "num_blocks": num_blocks or blocks,
        "block_size": block_size or size,
        "max_seqs": rng.choice([3, 6, 12]),
        "reserved_blocks": reserved,
        "watermark": rng.choice([0, 0, 1]),
        "in_order": rng.random() < 0.2,
        "prefix_cache": rng.random() < 0.6,
        "events": rng.choice([0, 8]),
    }


class PoolRun:
    """Programs on one kind of `Pool`, for `kvpool.testing.fuzz_target.hunt`."""

    def __init__(self, options: dict[str, Any], seed: int, make_pool: Callable[..., Any] = Pool) -> None:
        self.sizes, self.seed, self.make_pool = options, seed, make_pool

    def words(self) -> list[Word]:
        """The program of the seed."""
        rng = random.Random(f"words {self.seed}")
        return [
            (rng.randrange(len(OPERATIONS)), rng.getrandbits(16), rng.getrandbits(16), rng.getrandbits(16))
            for _ in range(CALLS_PER_RUN)
        ]

    def play(self, words: list[Word]) -> int:
        """Play a program on new pools; returns the calls made."""
        options = dict(self.sizes)
        if not options["prefix_cache"]:
            options["events"] = 0
        program = Program(self.make_pool, options)
        try:
            for made, word in enumerate(words):
                try:
                    program.play(word)
                except Exception as error:  # the pool may fail with anything
                    name = OPERATIONS[word[0] % len(OPERATIONS)]
                    raise TargetFinding(type(error).__name__, f"call {made}, {name}: {error}") from error
        finally:
            program.shutdown()
        return len(words)

    def script(self, words: list[Word], what: str) -> str:
        """A test that plays these words."""
        lines = "".join(f"        {word},  # {OPERATIONS[word[0] % len(OPERATIONS)]}\n" for word in words)
        comment = "".join(f"    # {line}\n" for line in what.splitlines()[:3])
        options = json.dumps(self.sizes, indent=8).replace("true", "True").replace("false", "False")
        return (
            "from kvpool.testing.fuzz_pool import PoolRun\n\n\n"
            f"def test_fuzz_pool():\n{comment}    options = {options[:-1]}    }}\n"
            f"    words = [\n{lines}    ]\n    PoolRun(options, {self.seed}).play(words)\n"
        )


def hunt_pool(
    make_pool: Callable[..., Any] = Pool,
    seed: int = 1,
    *,
    num_blocks: int | None = None,
    block_size: int | None = None,
    **until: Any,
) -> TargetReport:
    """Random programs on `make_pool` beside the model, until one differs.

    Parameters
    ----------
    make_pool : callable
        `kvpool.Pool`, or a subclass.
    seed : int
        Of the first run; the report's `seed` and ``calls=1`` repeat the run that failed.
    num_blocks, block_size : int, optional
        Of every pool; drawn by seed otherwise.
    until
        When to stop, and who is told: see `kvpool.testing.fuzz_target.hunt`.

    Returns
    -------
    TargetReport
        `finding` is None, or says what differs; `script` is the shortest program found, as a test.
    """

    def make_run(run_seed: int) -> PoolRun:
        return PoolRun(options_of(run_seed, num_blocks, block_size), run_seed, make_pool)

    return hunt(make_run, seed, **until)
