"""A pool that notes its calls, the file that keeps them, and how they run again on a new pool.

A file is JSON lines. The first line is the header: version of kvpool, options of the pool, numbers of calls kept and
lost. Each other line is a call: its name, its arguments, the handles or blocks that it made, the pool's digest after
it. A handle stands there without the tag of its pool, a plan as a number, bytes as hexadecimal digits.

`rerun` makes the calls of a record again. Every call must give the digest that the record has for it, no call may
raise, and `check` must find nothing. `minimise` looks for the fewest calls that still end in the same kind of failure.
"""

from __future__ import annotations

import contextlib
import functools
import json
import operator
import threading
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Self

import kvpool
from kvpool._core import BlockAPI, Plan, Pool, PrefixCache
from kvpool.errors import CorruptState, KVPoolError
from kvpool.groups import Group
from kvpool.retention import Keep
from kvpool.stats import PoolOptions
from kvpool.testing.fuzz_target import minimal

CALLS = {  # every call that may change a pool -> its arguments in order; what is made again has no padding and no `out`
    "open": "tokens namespace cut reserve load again keep", "loaded": "handle n", "fork": "handle n",
    "truncate": "handles lens", "close": "handles",
    "close_finished": "handles mask", "defer_close": "handle", "step": "plan handles num_new partial",
    "reserve": "plan handles num_new", "done": "plan", "rollback": "plan", "unshare": "plan handles lens first",
    "compact": "handles lens first", "evict_blocks": "handle indices", "reset": "",
    "prefix.commit": "handles tokens counts keep", "prefix.tick": "now",
    "prefix.limit_kept": "namespace blocks", "prefix.pin": "tokens namespace ttl", "prefix.flush": "namespace",
    "blocks.alloc": "n", "blocks.incref": "ids", "blocks.decref": "ids", "blocks.free": "ids", "blocks.evict": "n",
    "blocks.take": "n", "blocks.take_block": "block", "blocks.touch": "ids blank", "blocks.release": "ids oldest",
    "blocks.mark_cached": "ids", "blocks.uncache": "ids keep_place", "blocks.drain_evicted": "",
}  # fmt: skip
MAKERS = ("open", "fork", "prefix.pin", "blocks.alloc", "blocks.take")  # they return handles or blocks
TAG_SHIFT = 52  # of a handle


class RecordError(KVPoolError, ValueError):
    """A file is not a record of calls, or is damaged; the message says where."""


@dataclass(frozen=True)
class Call:
    """One call that the pool accepted. `digest` is None where the pool does the work in a later call."""

    name: str
    arguments: dict[str, Any]
    made: list[int]
    digest: int | None

    def __str__(self) -> str:
        shown = ", ".join(f"{name}={value}" for name, value in self.arguments.items())
        return f"{self.name}({shown if len(shown) <= 100 else shown[:97] + '...'})"


@dataclass(frozen=True)
class Calls:
    """The calls of a file."""

    header: dict[str, Any]
    calls: tuple[Call, ...] = field(repr=False)


def made_by(name: str, result: Any, n: int | None = None) -> list[int]:
    """Handles or blocks that a call returned; `n`: it asked for so many."""
    if name not in MAKERS:
        return []
    found = result[0] if isinstance(result, tuple) else result
    return [found] if isinstance(found, int) else [int(i) for i in found[: 1 if n is None else n]]


def _noted(name: str, base: type) -> Callable[..., Any]:
    """A method that makes the call of a base class and notes it."""
    call = getattr(base, name.rpartition(".")[2])

    @functools.wraps(call)
    def method(self: Any, *args: Any, **options: Any) -> Any:
        pool: RecordedPool = self if base is Pool else self.pool
        if name == "defer_close" and pool._inside:  # of a finalizer, while a call of this thread is being noted
            pool._deferred.append(args[0] if args else options["handle"])
            return None
        with pool._turn, pool._noting():
            try:  # the arguments as they are now: a step may write into the arrays that it was given
                arguments = pool._plain(name, args, options)
            except Exception:
                arguments = {}  # the pool refuses them in its own words
            result = call(self, *args, **options)
            pool._note(name, arguments, result)
        return result

    return method


class RecordedPool(Pool):
    """A pool that keeps the calls which it accepted, for ``python -m benchmarks.replay --ops FILE``.

    Calls that are refused and calls that only read are not kept. Calls through the C interface pass it by: after one
    that changes something, a replay finds another digest.

    Parameters
    ----------
    *args, **options
        As `kvpool.Pool` takes them.
    keep : int, default 1,000,000
        Calls that are kept, with all tokens they were given. After more, the oldest are lost, and the record cannot be
        made again.

    Notes
    -----
    Calls are made one at a time, in the order in which they are noted, whichever threads make them. A `defer_close`
    of a finalizer that runs during another call of the same thread comes after that call. Other calls must not be made
    from finalizers and signal handlers, and a child of `os.fork` must not use the pool.

    Examples
    --------
    >>> from benchmarks.replay.recorded import RecordedPool
    >>> pool = RecordedPool(num_blocks=8, block_size=4)
    >>> pool.blocks.free(pool.blocks.alloc(2))
    >>> [str(call) for call in pool.calls]
    ['blocks.alloc(n=2)', 'blocks.free(ids=[1, 2])']
    """

    calls: deque[Call]
    _total: int
    _tag: int  # of the pool's handles, shifted; -1 before the first
    _plans: dict[int, int]  # id -> number; a plan with the id of a dead one has its number
    _turn: threading.RLock
    _inside: bool  # a call is being made and noted
    _deferred: list[int]  # handles to close after it

    def __new__(cls, *args: Any, keep: int = 1_000_000, **options: Any) -> Self:
        """Make the pool, with an empty record."""
        pool = super().__new__(cls, *args, **options)
        if pool.options.groups != (Group.full(),):
            raise ValueError("[RecordedPool] a pool with layer groups cannot be recorded")
        pool.calls = deque(maxlen=keep)
        pool._total, pool._tag, pool._plans, pool._turn = 0, -1, {}, threading.RLock()
        pool._inside, pool._deferred = False, []
        return pool

    @property
    def blocks(self) -> BlockAPI:
        """`Pool.blocks`, noted."""
        return _RecordedBlocks(self)

    @property
    def prefix(self) -> PrefixCache | None:
        """`Pool.prefix`, noted."""
        return _RecordedPrefix(self) if self.options.prefix_cache else None

    def save(self, path: str | Path) -> int:
        """Write the calls to a file; returns how many."""
        with self._turn:
            calls, lost = list(self.calls), self._total - len(self.calls)
        options = self.options._asdict() | {"groups": None}  # one full group, the only kind that is recorded
        header = {"kvpool": kvpool.__version__, "pool": options, "calls": len(calls), "lost": lost}
        lines = [header, *([call.name, call.arguments, call.made, call.digest] for call in calls)]
        Path(path).write_text("".join(json.dumps(line) + "\n" for line in lines))
        return len(calls)

    def _plain(self, name: str, args: tuple[Any, ...], options: dict[str, Any]) -> dict[str, Any]:
        """Copies of the arguments of a call, as a file has them."""
        names = CALLS[name].split()
        given = dict(zip(names, args, strict=False)) | {key: options[key] for key in names if key in options}
        return {key: self._copy(key, value) for key, value in given.items()}

    def _copy(self, key: str, value: Any) -> Any:
        if isinstance(value, Plan):
            return self._plans.setdefault(id(value), len(self._plans))
        if key in ("namespace", "mask"):
            return None if value is None else bytes(value).hex()
        if isinstance(value, Keep):
            return asdict(value)
        if value is not None and not isinstance(value, bool):
            is_batch = hasattr(value, "__len__") and bool(getattr(value, "ndim", True))
            value = [operator.index(i) for i in value] if is_batch else operator.index(value)
        return self._untagged(value) if key.startswith("handle") else value

    def _untagged(self, handles: Any) -> Any:
        """Handles without the tag of the pool; -1 for those of others, which `defer_close` passes over."""
        if isinstance(handles, list):
            return [self._untagged(handle) for handle in handles]
        return handles & (1 << TAG_SHIFT) - 1 if handles >> TAG_SHIFT == self._tag else -1

    @contextlib.contextmanager
    def _noting(self) -> Iterator[None]:
        """A call is made and noted; then what finalizers asked for meanwhile."""
        outer, self._inside = self._inside, True
        try:
            yield
        finally:
            self._inside = outer
        while self._deferred and not outer:
            self.defer_close(self._deferred.pop(0))

    def _note(self, name: str, arguments: dict[str, Any], result: Any) -> None:
        made = made_by(name, result, arguments.get("n"))
        if made and not name.startswith("blocks."):
            self._tag = made[0] >> TAG_SHIFT
            made = self._untagged(made)
        self.calls.append(Call(name, arguments, made, None if name == "defer_close" else self.digest()))
        self._total += 1


class _RecordedBlocks(BlockAPI):
    """`RecordedPool.blocks`."""


class _RecordedPrefix(PrefixCache):
    """`RecordedPool.prefix`."""


for _name in CALLS:
    _part, _, _call = _name.rpartition(".")
    _recorded, _base = {"": (RecordedPool, Pool), "blocks": (_RecordedBlocks, BlockAPI),
                        "prefix": (_RecordedPrefix, PrefixCache)}[_part]  # fmt: skip
    setattr(_recorded, _call, _noted(_name, _base))


def load(path: str | Path) -> Calls:
    """Read a file of calls.

    Raises
    ------
    RecordError
        The file is none of ours, cut short or changed; the message says where.
    OSError
        It cannot be read.
    """
    name, header = Path(path).name, None
    calls: list[Call] = []
    try:
        first, *lines = Path(path).read_text().splitlines()
        header = json.loads(first)
        expected, _, _ = int(header["calls"]), int(header["lost"]), str(header["kvpool"])
        if unknown := sorted(header["pool"].keys() - set(PoolOptions._fields)):
            raise ValueError(f"this version knows no pool with {unknown}")
        for line in lines:
            call = Call(*json.loads(line))
            if not isinstance(call.digest, int | None) or not call.arguments.keys() <= set(CALLS[call.name].split()):
                raise ValueError(f"{call} is not a call of a pool")
            calls.append(call)
    except (AttributeError, KeyError, TypeError, ValueError, RecursionError) as error:
        where = "its header" if header is None else f"line {len(calls) + 2}"
        raise RecordError(f"{name}: {where} cannot be read ({error!r})") from None
    if len(calls) != expected:
        raise RecordError(f"{name}: cut short or changed, {len(calls)} calls, its header says {expected}")
    return Calls(header, tuple(calls))


REFUSALS = (KVPoolError, ValueError, IndexError, TypeError, OverflowError)  # what a pool says of a call, documented


@dataclass(frozen=True)
class Failure:
    """The place where calls went wrong: `kind` is "digest", "corrupt", "refused" or the name of an exception."""

    kind: str
    at: int  # number of the call
    call: str
    message: str

    def __str__(self) -> str:
        return f"call {self.at}, {self.call}: {self.message}"


class Player:
    """Makes recorded calls on a new pool: handles, blocks and plans of the record become those that stand for them."""

    def __init__(self, options: dict[str, Any], pool_type: Callable[..., Any], check_every: int) -> None:
        try:
            self.pool = pool_type(**options)
        except (TypeError, ValueError) as error:
            raise RecordError(f"the record names a pool that cannot be made: {error}") from None
        self.check_every = check_every
        self.handles: dict[int, int] = {}  # handle in the record -> handle here
        self.blocks: dict[int, int] = {}  # block in the record -> block here
        self.plans: dict[int, Any] = {}

    def play(self, call: Call) -> None:
        """Make one call."""
        part, _, name = call.name.rpartition(".")
        arguments = {key: self.here(key, value) for key, value in call.arguments.items()}
        if "plan" in arguments:
            arguments["plan"] = self.plan(call.arguments)
        result = getattr(getattr(self.pool, part) if part else self.pool, name)(**arguments)
        known = self.blocks if part == "blocks" else self.handles
        known.update(zip(call.made, made_by(call.name, result, call.arguments.get("n")), strict=False))

    def here(self, key: str, value: Any) -> Any:
        """An argument of the record, as this pool takes it."""
        if key in ("namespace", "mask"):
            return None if value is None else bytes.fromhex(value)
        if key == "keep" and value is not None:
            return Keep(**value)
        if isinstance(value, list) and key in ("handles", "ids"):
            return [self.here(key, i) for i in value]
        if key in ("handle", "handles"):
            return self.handles.get(value, -1)
        return self.blocks.get(value, value) if key in ("ids", "block") else value

    def plan(self, arguments: dict[str, Any]) -> Any:
        """The plan of a call; a new one where that one has no room for a step."""
        number = arguments["plan"]
        if "handles" not in arguments:
            return self.plans[number]
        plan, rows, new = self.plans.get(number), len(arguments["handles"]), arguments.get("num_new", 1)
        tokens = sum(new) if isinstance(new, list) else new * rows
        if plan is None or (not plan.is_pending and (plan.limits.max_rows < rows or plan.limits.max_tokens < tokens)):
            plan = kvpool.Plan(self.pool, max(rows, 1), max(tokens, rows, 1), formats=())
            self.plans[number] = plan
        return plan


def rerun(
    record: Calls, pool_type: Callable[..., Any] = kvpool.Pool, *, check_every: int = 0,
    progress: Callable[[int], None] = lambda done: None,
) -> Failure | None:  # fmt: skip
    """Make the calls of a record again; returns what went wrong, None when all is as it was.

    Parameters
    ----------
    record : Calls
    pool_type : callable, default `kvpool.Pool`
        Makes the pool from the parameters in the record.
    check_every : int, default 0
        `check` after so many calls; 0: at the end only.
    progress : callable
        Is told the number of calls that are through.

    Raises
    ------
    RecordError
        The record lost its beginning.
    """
    if record.header["lost"]:
        raise RecordError(f"the first {record.header['lost']} calls are lost, there is no state to begin with")
    player = Player(record.header["pool"], pool_type, check_every)
    return _run(player, record.calls, exact=True, progress=progress)


def _run(
    player: Player, calls: Sequence[Call], exact: bool, progress: Callable[[int], None] = lambda done: None
) -> Failure | None:
    """Make calls until one fails; without `exact` digests do not count and refused calls are passed over."""
    pool, every = player.pool, player.check_every
    for number, call in enumerate(calls):
        try:
            player.play(call)
        except CorruptState as error:
            return Failure("corrupt", number, str(call), str(error))
        except (KeyError, *REFUSALS) as error:
            if exact:
                return Failure("refused", number, str(call), f"{type(error).__name__}: {error}")
            continue
        except Exception as error:
            return Failure(type(error).__name__, number, str(call), str(error))
        if exact and call.digest is not None and call.digest != (found := pool.digest()):
            return Failure("digest", number, str(call), f"digest {found:016x}, the record has {call.digest:016x}")
        if every and number % every == 0 and (failure := _check(pool, number, call)):
            return failure
        if number % 1024 == 0:
            progress(number)
    return _check(pool, len(calls) - 1, calls[-1] if calls else None)


def _check(pool: Any, number: int, call: Call | None) -> Failure | None:
    try:
        pool.check()
    except CorruptState as error:
        return Failure("corrupt", number, str(call or "the new pool"), str(error))
    return None


def minimise(record: Calls, failure: Failure, pool_type: Callable[..., Any] = kvpool.Pool) -> list[Call]:
    """The fewest calls that still fail like `failure`, by `kvpool.testing.fuzz_target.minimal`.

    Raises
    ------
    RecordError
        The failure is not one of the calls alone: a digest that differs needs the build that recorded it.
    """
    calls = list(record.calls[: failure.at + 1])

    def fails(some: list[Call]) -> bool:
        found = _run(Player(record.header["pool"], pool_type, 1), some, exact=False)
        return found is not None and found.kind == failure.kind

    if failure.kind in ("digest", "refused") or not fails(calls):
        raise RecordError(f"this cannot be made smaller: {failure}")
    return minimal(calls, fails)
