"""Fuzzing a block allocator or a backend, somebody else's or kvpool's own: random programs, each result checked.

`Allocator` says what an adapter has: ten lines. `Checked` plays the backend for it, with a storage in which every slot
is stamped with what it stands for: namespace-free, a hash over all tokens up to its position. After every call each
sequence must read its own stamps through its table, tables must be tables, and the free count must add up.
`fuzz_target` draws programs and shrinks what fails to a test in Python. `PoolAllocator` is kvpool's own pool as a
target. `fuzz_backend` plays random engines on a backend, each answer beside dense attention, then the conformance kit.
"""

from __future__ import annotations

import contextlib
import itertools
import operator
import random
import time
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, fields
from typing import Any, Protocol

import kvpool
from kvpool.spec import KVSpec
from kvpool.testing import conformance
from kvpool.testing.conformance_engines import RandomEngine
from kvpool.testing.filled import Factory, NotApplicable, specs
from kvpool.testing.model import ModelPlan, ModelPool

Word = tuple[int, int, int, int]
SHORT = 48  # items, of which all pairs are tried


class FuzzFinding(AssertionError):
    """The target disagrees with the expected result; `call` is the number of the call in its run."""

    call = -1


def minimal(items: list[Any], fails: Callable[[list[Any]], bool]) -> list[Any]:
    """A part of `items` that still fails, and of which no item can be left out, nor two of a short one.

    Like ddmin, but for one thing: after a piece was left out, the pieces behind it are tried, not again those before
    it, which had to stay a moment ago. A pass takes as many tries as there are pieces, however many of them go.
    """
    size = max(1, len(items) // 2)
    while size:
        at, before = 0, len(items)
        while at < len(items):
            rest = items[:at] + items[at + size :]
            if fails(rest):
                items = rest
            else:
                at += size
        if size > 1 or len(items) == before:
            size = min(size // 2, len(items))
    pairs = itertools.combinations(range(len(items)), 2) if len(items) <= SHORT else ()
    for first, second in pairs:  # what opens and what closes
        rest = items[:first] + items[first + 1 : second] + items[second + 1 :]
        if fails(rest):
            return minimal(rest, fails)
    return items


def smaller_numbers(words: list[Word], fails: Callable[[list[Word]], bool]) -> list[Word]:
    """The same calls with smaller arguments, as far as they still fail."""
    for at in range(len(words)):
        for place in (1, 2, 3):
            for value in (0, 1, 2, 3, 5, 15, 1 << 28, 1 << 29, 3 << 29):
                if value >= words[at][place]:
                    continue
                op, a, b, c = (value if k == place else old for k, old in enumerate(words[at]))
                tried = [*words[:at], (op, a, b, c), *words[at + 1 :]]
                if fails(tried):
                    words = tried
                    break
    return words


Copy = tuple[int, int, int]
OPERATIONS = ("open", "append", "append", "append", "fork", "truncate", "free", "free")
#: Tokens of small programs: few, so that prefixes meet; of one digit and of two, so that careless keys meet.
VOCABULARY = (1, 11, 2, 12, 21)
CALLS_PER_RUN = 60
MOST_SEQUENCES = 8
TURNS = 20  # of an engine on a backend; each is a word of a program


class Allocator(Protocol):
    """Calls of an allocator for the fuzzer; the last three are optional, and ``max_new`` (tokens of an append).

    Any `MemoryError` (or the class in `OutOfBlocks`, if the adapter names one) from a call is a refusal for want of
    blocks: it has to be true, and to leave everything as it was.
    """

    num_blocks: int  # that can be handed out; their ids are in range(limit), limit = num_blocks unless there is `limit`
    block_size: int  # tokens
    num_free: int  # blocks that could be handed out now, cached ones that may be evicted included

    def open(self, tokens: Sequence[int]) -> Hashable:
        """A new sequence with these tokens, written by the engine right after the call."""

    def append(self, seq: Any, tokens: Sequence[int]) -> Iterable[Copy] | None:
        """More tokens, written right after the call; returns (src, dst, tokens) of the block copies due before that.

        None: every table entry that changed is a copy of the block that was there.
        """

    def table(self, seq: Any) -> Sequence[int]:
        """Block ids of a sequence, in order."""

    def free(self, seq: Any) -> None:
        """The sequence ends."""

    def fork(self, seq: Any) -> Hashable:
        """Optional: a second sequence with the same tokens."""

    def truncate(self, seq: Any, length: int) -> None:
        """Optional: the sequence keeps its first `length` tokens."""

    def cached(self, seq: Any) -> int:
        """Optional, asked right after `open`: leading tokens that were found in a cache, and are not written."""


NEEDED = ("num_blocks", "block_size", "num_free", "open", "append", "table", "free")


def missing(allocator: Any) -> list[str]:
    """The required calls of `Allocator` that this object lacks."""

    def has(name: str) -> bool:
        try:
            return hasattr(allocator, name)
        except Exception:  # it is there, and raises
            return True

    return [name for name in NEEDED if not has(name)]


class TargetFinding(FuzzFinding):
    """The allocator did something wrong; `kind` says of which kind, in one word or two."""

    def __init__(self, kind: str, what: str) -> None:
        super().__init__(f"{kind}: {what}")
        self.kind = kind


def _raised(name: str, error: Exception) -> TargetFinding:
    """The finding that a call of the allocator raised what it should not."""
    return TargetFinding("exception", f"{name} raised {type(error).__name__}: {error}")


def _copies(given: Iterable[Any] | None) -> list[Copy] | None:
    """The copies that `append` returned, as plain numbers."""
    if given is None:
        return None
    return [(operator.index(src), operator.index(dst), operator.index(n)) for src, dst, n in given]


@dataclass
class _Sequence:
    key: Any  # of the allocator
    tokens: list[int]
    table: list[int]
    name: str = ""  # in a script

    def __repr__(self) -> str:
        return self.name


class Checked:
    """An allocator with a storage of stamps: calls go through it, and everything is checked after each."""

    def __init__(self, allocator: Any) -> None:
        self.allocator = allocator
        self.size: int = allocator.block_size
        self.limit: int = getattr(allocator, "limit", allocator.num_blocks)
        self.refusal: type[BaseException] = getattr(allocator, "OutOfBlocks", MemoryError)
        self.store: dict[int, int] = {}  # slot -> stamp
        self.sequences: list[_Sequence] = []

    # ---- calls --------------------------------------------------------------------------------------------

    def open(self, tokens: list[int]) -> _Sequence:
        """A new sequence; what it shares must hold the right tokens already."""
        most = -(-len(tokens) // self.size)
        key = self._call("open", lambda: self.allocator.open(list(tokens)), most)
        sequence = _Sequence(key, list(tokens), [])
        sequence.table = self._table(sequence)
        shared = {block for other in self.sequences for block in other.table}
        cached = None
        if hasattr(self.allocator, "cached"):
            cached = self._asked("cached", lambda: operator.index(self.allocator.cached(key)))
        self.sequences.append(sequence)
        stamps = self._stamps(tokens)
        for position in range(len(tokens)):
            block = sequence.table[position // self.size]
            is_known = block in shared if cached is None else position < cached
            if not is_known:
                self.store[self._slot(sequence, position)] = stamps[position]
        self._check()
        return sequence

    def append(self, sequence: _Sequence, tokens: list[int]) -> None:
        """More tokens: copies first, then writes."""
        before, start = list(sequence.table), len(sequence.tokens)
        most = max(0, -(-(start + len(tokens)) // self.size) - len(before)) + 1
        copies = self._call("append", lambda: _copies(self.allocator.append(sequence.key, list(tokens))), most)
        sequence.tokens += tokens
        sequence.table = self._table(sequence)
        if copies is None:
            pairs = zip(before, sequence.table, strict=False)
            copies = [(old, new, self.size) for old, new in pairs if old != new]
        for src, dst, n in copies:
            for k in range(n):
                self.store[dst * self.size + k] = self.store.get(src * self.size + k, 0)
        stamps = self._stamps(sequence.tokens)
        for position in range(start, len(sequence.tokens)):
            self.store[self._slot(sequence, position)] = stamps[position]
        self._check()

    def fork(self, sequence: _Sequence) -> _Sequence:
        """A second sequence with the same tokens."""
        key = self._call("fork", lambda: self.allocator.fork(sequence.key), len(sequence.table))
        child = _Sequence(key, list(sequence.tokens), [])
        child.table = self._table(child)
        self.sequences.append(child)
        self._check()
        return child

    def truncate(self, sequence: _Sequence, length: int) -> None:
        """Keep the first tokens."""
        self._call("truncate", lambda: self.allocator.truncate(sequence.key, length), 0)
        del sequence.tokens[length:]
        sequence.table = self._table(sequence)
        self._check()

    def free(self, sequence: _Sequence) -> None:
        """The sequence ends; what nobody else has is poisoned."""
        self._call("free", lambda: self.allocator.free(sequence.key), 0)
        self.sequences.remove(sequence)
        self._check()

    # ---- checks -------------------------------------------------------------------------------------------

    def _call(self, name: str, call: Callable[[], Any], most: int) -> Any:
        """Make a call that takes at most `most` blocks; a refusal must be true and change nothing."""
        free = self._num_free()
        try:
            return self._asked(name, call, self.refusal)
        except self.refusal:
            if free >= most:
                raise TargetFinding("refusal", f"{name} needs {most} blocks and was refused, {free} are free") from None
            if (now := self._num_free()) != free:
                raise TargetFinding("refusal", f"{name} was refused, and left {now} of {free} blocks free") from None
            self._check()
            raise

    def _asked(self, name: str, question: Callable[[], Any], *expected: type[BaseException]) -> Any:
        """The answer to a question. What it raises is a finding, but for what is expected."""
        passed: tuple[type[BaseException], ...] = (TargetFinding, *expected)  # a finding of an adapter that compares
        try:
            return question()
        except passed:
            raise
        except Exception as error:
            raise _raised(name, error) from error

    def _num_free(self) -> int:
        """The free count, as the allocator says it."""
        return int(self._asked("num_free", lambda: operator.index(self.allocator.num_free)))

    def _table(self, sequence: _Sequence) -> list[int]:
        """The table of a sequence, which must be one."""
        given: list[Any] = self._asked("table", lambda: list(self.allocator.table(sequence.key)))
        table: list[int] = []
        for block in given:
            try:
                table.append(operator.index(block))  # an int, or one of NumPy
            except TypeError:
                raise TargetFinding("table", f"{given} has an entry that is not a block ({block})") from None
            if not 0 <= table[-1] < self.limit:
                raise TargetFinding("table", f"{given} has an entry that is not a block ({block})")
        if len(set(table)) != len(table):
            raise TargetFinding("table", f"{table} has a block twice")
        if len(table) * self.size < len(sequence.tokens):
            raise TargetFinding("table", f"{table} has no room for {len(sequence.tokens)} tokens")
        return table

    def _stamps(self, tokens: Iterable[int]) -> list[int]:
        """The stamp of each position."""
        stamps, prefix = [], 17
        for token in tokens:
            prefix = hash((prefix, token))
            stamps.append(prefix)
        return stamps

    def _slot(self, sequence: _Sequence, position: int) -> int:
        return sequence.table[position // self.size] * self.size + position % self.size

    def _check(self) -> None:
        for sequence in self.sequences:
            if self._table(sequence) != sequence.table:
                raise TargetFinding("table", f"{sequence.table} of a sequence that no call named changed")
            for position, stamp in enumerate(self._stamps(sequence.tokens)):
                slot = self._slot(sequence, position)
                if self.store.get(slot) != stamp:
                    raise TargetFinding(
                        "content", f"a sequence of {sequence.tokens} reads another token at {position} (slot {slot})"
                    )
        used = {block for sequence in self.sequences for block in sequence.table}
        for slot in [slot for slot in self.store if slot // self.size not in used]:
            if not hasattr(self.allocator, "cached"):
                del self.store[slot]
        free, due = self._num_free(), self.allocator.num_blocks - len(used)
        if free != due:
            raise TargetFinding("count", f"{free} blocks are free, not {due}: {len(used)} are in use by sequences")


# ---- programs ----------------------------------------------------------------------------------------------


def _tokens(checked: Checked, a: int, b: int, least: int) -> list[int]:
    """Tokens of a call: of an open sequence, so that prefixes meet, or new ones."""
    n = least + a % (2 * checked.size + 2)
    rng = random.Random(b % 64)
    return [VOCABULARY[rng.randrange(len(VOCABULARY))] for _ in range(n)]


def play(checked: Checked, words: Iterable[Word], trace: list[str] | None = None) -> int:
    """Run a program; returns the calls made. What is wrong raises `TargetFinding`."""
    calls = named = 0
    for op, a, b, c in words:
        name, live = OPERATIONS[op % len(OPERATIONS)], checked.sequences
        if name != "open" and not hasattr(checked.allocator, name):
            continue
        if name in ("open", "fork") and len(live) >= MOST_SEQUENCES:
            name = "free"
        if name != "open" and not live:
            name = "open"
        sequence = live[c % len(live)] if live else None
        arguments: list[Any] = []
        if name == "open":
            tokens = _tokens(checked, a, b, 1)
            if sequence and b & 1:
                tokens = (sequence.tokens[: 1 + a % (len(sequence.tokens) + 1)] + tokens)[: 3 * checked.size] or tokens
            arguments = [tokens]
        elif name == "append":
            most = getattr(checked.allocator, "max_new", 1 << 30)
            arguments = [sequence, _tokens(checked, a % 4, b, 1)[:most]]
        elif name == "truncate":
            assert sequence is not None
            arguments = [sequence, a % (len(sequence.tokens) + 1)]
        else:
            arguments = [sequence]
        calls += 1
        if trace is not None:
            made = f"s{named} = " if name in ("open", "fork") else ""
            trace.append(f"{made}checked.{name}({', '.join(map(repr, arguments))})")
        try:
            result = getattr(checked, name)(*arguments)
        except checked.refusal:
            if trace is not None:
                trace[-1] = f"with pytest.raises({checked.refusal.__name__}):\n    {trace[-1].rpartition(' = ')[2]}"
            continue
        if name in ("open", "fork"):
            result.name = f"s{named}"
            named += 1
    return calls


@dataclass(slots=True)
class TargetReport:
    """The result of a fuzz run.

    `script_fails`: the calls in `script` failed when they were tried; else what is tested fails only sometimes. `cases`
    are those of the conformance kit, by name, where a backend was tested.
    """

    runs: int = 0
    calls: int = 0
    seconds: float = 0.0
    finding: str | None = None
    kind: str = ""
    seed: int | None = None
    script: str = ""
    script_fails: bool = False
    cases: dict[str, str] = field(default_factory=dict)


def as_test(name: str, source: str, imports: str, what: str, calls: Iterable[str]) -> str:
    """A test of these calls; `what` is wrong with them. `source` has more imports in the lines before its last one."""
    before, _, _ = source.rpartition("\n")
    body = "\n".join(f"    {line}" for line in [*(f"# {line}" for line in what.splitlines()), *calls])
    return f"{before}\n{imports}\n\n\ndef test_fuzz_{name}():\n{body}\n"


class TargetRun:
    """Programs on a foreign allocator: what `fuzz` needs to draw, play, shrink and print them."""

    def __init__(self, factory: Callable[..., Any], sizes: dict[str, int], seed: int, source: str) -> None:
        self.factory, self.sizes, self.seed, self.source = factory, sizes, seed, source

    def words(self) -> list[Word]:
        """The program of the seed, as `play` reads it."""
        rng, bits = random.Random(self.seed), 16
        return [
            (rng.randrange(len(OPERATIONS)), rng.getrandbits(bits), rng.getrandbits(bits), rng.getrandbits(bits))
            for _ in range(CALLS_PER_RUN)
        ]

    def play(self, words: list[Word], trace: list[str] | None = None) -> int:
        """Play on a new allocator."""
        try:
            checked = Checked(self.factory(**self.sizes))
        except Exception as error:
            raise _raised("the factory", error) from error
        return play(checked, words, trace)

    def script(self, words: list[Word], what: str) -> str:
        """A test on `Checked`."""
        trace: list[str] = []
        with contextlib.suppress(TargetFinding):
            self.play(words, trace)
        expression = self.source.rpartition("\n")[2]
        arguments = ", ".join(f"{name}={value}" for name, value in self.sizes.items())
        calls = [f"checked = Checked({expression}({arguments}))"]
        calls += [part for line in trace for part in line.split("\n")]
        head = "import pytest\n" * any("raises" in line for line in trace)
        return head + as_test("target", self.source, "from kvpool.testing.fuzz_target import Checked", what, calls)


def _shrink(report: TargetReport, run: Any, words: list[Word], first: TargetFinding) -> None:
    """Shrink a program that fails to one that fails in the same way."""

    def finding_of(tried: list[Word]) -> TargetFinding | None:
        try:
            run.play(tried)
        except TargetFinding as finding:
            return finding if finding.kind == first.kind else None
        return None

    def fails(tried: list[Word]) -> bool:
        return finding_of(tried) is not None

    few = smaller_numbers(minimal(words, fails), fails)
    finding = finding_of(few)
    report.script_fails = finding is not None
    if finding is None:
        few, finding = words, first
    report.finding, report.kind = str(finding), finding.kind
    report.script = run.script(few, report.finding)


def runs_of(
    report: Any,
    seed: int,
    *,
    calls: int | None = None,
    seconds: float | None = None,
    told: Callable[[Any], None] | None = None,
) -> Iterator[int]:
    """The seed of run after run, until the report has a finding, or so many calls are made, or seconds are over.

    Counts the runs and the time; who runs adds to the calls. Whole runs are made. `told` is called with the report, a
    `TargetReport` or the like, after every run. Without a finding, its seed is None at the end.
    """
    rng, began = random.Random(seed), time.monotonic()
    while report.finding is None:
        report.seed = rng.getrandbits(32) if report.runs else seed
        yield report.seed
        report.runs += 1
        report.seconds = time.monotonic() - began
        if told:
            told(report)
        if report.finding is None and (
            (calls is not None and report.calls >= calls) or (seconds is not None and report.seconds >= seconds)
        ):
            report.seed = None
            break


def fuzz(make_run: Callable[[int], Any], seed: int, **until: Any) -> TargetReport:
    """Run after run of ``make_run(seed)``, such as a `TargetRun`, until one fails. `until`: see `runs_of`."""
    report = TargetReport()
    for run_seed in runs_of(report, seed, **until):
        run = make_run(run_seed)
        words = run.words()
        try:
            report.calls += run.play(words)
        except TargetFinding as finding:
            report.calls += len(words)
            _shrink(report, run, words, finding)
    return report


def fuzz_target(
    factory: Callable[..., Any],
    seed: int = 1,
    *,
    source: str = "factory",
    num_blocks: int | None = None,
    block_size: int | None = None,
    **until: Any,
) -> TargetReport:
    """Random programs on allocators of ``factory(num_blocks=..., block_size=...)`` until one fails.

    Returns a report whose `finding` is None, or says what is wrong, with the shortest test found in `script`. The first
    run is that of `seed`, so the report's `seed` and ``calls=1`` repeat the run that failed.
    `source` is the expression that makes the factory in that test, the imports it needs in lines before it. `until`
    says when to stop, and who is told: see `runs_of`.
    """

    def make_run(run_seed: int) -> TargetRun:
        shape = random.Random(run_seed)
        blocks, size = shape.randint(3, 24), shape.choice([1, 2, 3, 4])
        sizes = {"num_blocks": num_blocks or blocks, "block_size": block_size or size}
        return TargetRun(factory, sizes, run_seed, source)

    return fuzz(make_run, seed, **until)


# ---- kvpool's own pool -------------------------------------------------------------------------------------


class _Calls:
    """The calls of an `Allocator`, made on a pool with a prefix cache: each step is done when the call returns.

    Prompts are committed as far as a hit may reach, so later ones find them.
    """

    def __init__(self, make_pool: Any, make_plan: Any, num_blocks: int, block_size: int) -> None:
        self.block_size = block_size
        self.pool = make_pool(
            *(num_blocks, block_size), max_seqs=MOST_SEQUENCES, max_blocks_per_seq=4 * num_blocks + 16,
            reserved_blocks=0, prefix_cache=True, seed=1,
        )  # fmt: skip
        self.plan = make_plan(self.pool, 1, 4 * block_size + 8, formats=())
        self.open_: list[int] = []  # handles, in the order in which both sides have them

    def open(self, tokens: Sequence[int]) -> tuple[int, int]:
        """Open a prompt and compute what no hit has of it. Returns the handle, and the tokens of the hit."""
        handle = self.pool.open(tokens)
        hit = self.pool.num_tokens(handle)
        self.append(handle, tokens[hit:])
        end = (len(tokens) - 1) // self.block_size * self.block_size
        self.pool.prefix.commit(handle, tokens[hit:end])
        self.open_.append(handle)
        return handle, hit

    def append(self, seq: int, tokens: Sequence[int]) -> list[Copy]:
        self.pool.step(self.plan, [seq], len(tokens))
        copies = [(src, dst, n) for src, dst, n in self.plan.copies.tolist()]
        self.pool.done(self.plan)
        return copies

    def free(self, seq: int) -> None:
        self.pool.close(seq)
        self.open_.remove(seq)

    def fork(self, seq: int) -> int:
        self.open_.append(int(self.pool.fork(seq)[0]))
        return self.open_[-1]

    def truncate(self, seq: int, length: int) -> None:
        self.pool.truncate(seq, length)


class PoolAllocator:
    """A pool beside its plain model, as an `Allocator`. Each call is made on both, and they must agree.

    They agree on hits, copies, refusals, free blocks, and on tables, but for the names of blocks: with a prefix cache
    the pool may hand out others. The pool checks itself before each answer about free blocks.
    """

    def __init__(self, num_blocks: int, block_size: int) -> None:
        self.num_blocks, self.block_size = num_blocks, block_size
        self.OutOfBlocks = kvpool.OutOfBlocks
        self.core = _Calls(kvpool.Pool, kvpool.Plan, num_blocks, block_size)
        self.model = _Calls(ModelPool, ModelPlan, num_blocks, block_size)
        self.pool = self.core.pool
        self.hits: dict[int, int] = {}

    @property
    def num_free(self) -> int:
        """Blank blocks and evictable ones."""
        self.pool.check()
        free: int = self.pool.blocks.num_free
        self._agree("free blocks", free, self.model.pool.stats().free)
        return free

    def open(self, tokens: Sequence[int]) -> int:
        (handle, hit), (_, expected) = self._both("open", None, tokens)
        self._agree("hit tokens", hit, expected)
        self.hits[handle] = hit
        return int(handle)

    def append(self, seq: int, tokens: Sequence[int]) -> list[Copy]:
        copies, expected = self._both("append", seq, tokens)
        self._agree("tokens copied", [n for _, _, n in copies], [n for _, _, n in expected])
        return list(copies)

    def table(self, seq: int) -> Any:
        return self.pool.table(seq)

    def free(self, seq: int) -> None:
        self._both("free", seq)

    def fork(self, seq: int) -> int:
        return int(self._both("fork", seq)[0])

    def truncate(self, seq: int, length: int) -> None:
        self._both("truncate", seq, length)

    def cached(self, seq: int) -> int:
        return self.hits[seq]

    def _both(self, name: str, seq: int | None, *given: Any) -> tuple[Any, Any]:
        """What a call returns on the pool and on the model. One that is refused is refused by both."""
        place = None if seq is None else self.core.open_.index(seq)
        results: list[Any] = []
        for side in (self.core, self.model):
            try:
                results.append(getattr(side, name)(*([] if place is None else [side.open_[place]]), *given))
            except kvpool.OutOfBlocks as refused:
                results.append(refused)
        found, expected = results
        short = [result.short_by if isinstance(result, kvpool.OutOfBlocks) else 0 for result in results]
        self._agree("blocks short", *short)
        if short[0]:
            raise found
        self._compare()
        return found, expected

    def _compare(self) -> None:
        """The tables of both are equal up to the names of blocks."""
        names: dict[int, int] = {}
        for mine, theirs in zip(self.core.open_, self.model.open_, strict=True):
            found, expected = (self.pool.table(mine).tolist(), self.model.pool.table(theirs).tolist())
            self._agree("blocks of a table", len(found), len(expected))
            self._agree("table", [names.setdefault(a, b) for a, b in zip(found, expected, strict=True)], expected)
        self._agree("blocks in use", len(set(names)), len(set(names.values())))

    def _agree(self, what: str, found: Any, expected: Any) -> None:
        if found != expected:
            raise TargetFinding("model", f"{what}: the pool has {found}, the plain model {expected}")


# ---- backends ----------------------------------------------------------------------------------------------


class BackendFinding(TargetFinding):
    """Whatever a backend raised; `kind` is the type."""

    def __init__(self, error: Exception) -> None:
        super().__init__("exception", f"{type(error).__name__}: {error}")
        self.kind = type(error).__name__
        if isinstance(error, AssertionError):
            self.args = (str(error) or "an assert without a message failed",)


class BackendRun:
    """The engine of a seed: any of its turns can be left out. For `fuzz`."""

    def __init__(self, factory: Factory, spec: KVSpec, seed: int, num_blocks: int | None, source: str) -> None:
        self.factory, self.spec, self.seed, self.num_blocks, self.source = factory, spec, seed, num_blocks, source

    def words(self) -> list[Word]:
        """All turns."""
        return [(turn, 0, 0, 0) for turn in range(TURNS)]

    def play(self, words: list[Word]) -> int:
        """Play some turns; returns how many."""
        try:
            engine = RandomEngine(self.factory, self.spec, self.seed, num_blocks=self.num_blocks)
            engine.play(turn for turn, *_ in words)
        except Exception as error:  # a backend may fail with anything
            raise BackendFinding(error) from error
        return len(words)

    def script(self, words: list[Word], what: str) -> str:
        """A test that plays these turns."""
        expression = self.source.rpartition("\n")[2]
        sizes = f", num_blocks={self.num_blocks}" if self.num_blocks else ""
        imports = "from kvpool.config import KVSpec\nfrom kvpool.testing.conformance_engines import RandomEngine"
        given = ((part.name, getattr(self.spec, part.name), part.default) for part in fields(self.spec))
        spec = ", ".join(f"{name}={value!r}" for name, value, usual in given if value != usual)
        turns = [turn for turn, *_ in words]
        call = f"RandomEngine({expression}, KVSpec({spec}), {self.seed}{sizes}).play({turns})"
        return as_test("backend", self.source, imports, what, [call])


def _conform(report: TargetReport, factory: Factory, source: str) -> None:
    """The conformance kit, case by case."""
    told, failed = [], []
    for case in conformance.CASES:
        try:
            report.cases |= conformance.check_backend(factory, [case])
        except AssertionError as error:
            report.cases[case.__name__] = "failed"
            told.append(str(error).partition("\n")[2])
            failed.append(case)
    if not failed:
        return
    head = f"{len(failed)} of {len(conformance.CASES)} cases of the conformance kit failed"
    report.finding = "\n".join([head, *told])
    expression, case = source.rpartition("\n")[2], failed[0]
    imports = f"from {case.__module__} import {case.__name__}"
    report.script = as_test("backend", source, imports, told[0], [f"{case.__name__}({expression})"])
    try:
        case(factory)
    except Exception:  # whatever it is: the case fails once more, so the script will
        report.script_fails = True


def fuzz_backend(
    factory: Factory,
    seed: int = 1,
    *,
    source: str = "factory",
    num_blocks: int | None = None,
    block_size: int | None = None,
    **until: Any,
) -> TargetReport:
    """Random engines on backends of ``factory(spec, num_blocks)`` until one fails, then the conformance kit.

    Returns a report whose `finding` is None, or says what is wrong, with the shortest test found in `script`; its
    `calls` are turns of engines. The first run is that of `seed`, so the report's `seed` and ``calls=1`` repeat the run
    that failed. `until` says when to stop, and who is told: see `runs_of`.

    Raises
    ------
    ValueError
        There is no spec to try: the backend has no blocks of `block_size` tokens.
    """
    began = time.monotonic()
    try:
        offered = list(specs(factory, block_sizes=(block_size or 8,)))
    except NotApplicable:
        offered = []
    except Exception as refused:
        return TargetReport(seed=seed, finding=str(BackendFinding(refused)))
    if block_size:
        offered = [spec for spec in offered if spec.block_size == block_size]
    if not offered:
        raise ValueError(f"the backend accepts no spec of block_size {block_size or 8}")

    def make_run(run_seed: int) -> BackendRun:
        return BackendRun(factory, random.Random(run_seed).choice(offered), run_seed, num_blocks, source)

    report = fuzz(make_run, seed, **until)
    if report.finding is None:
        report.seed = seed
        _conform(report, factory, source)
    report.seconds = time.monotonic() - began
    return report
