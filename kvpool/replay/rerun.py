"""Recorded calls on a new pool: does it go the same way, is it whole, and which few calls make it fail.

`rerun` makes the calls of a record again. Every call must give the digest that the record has for it, no call may
raise, and `check` must find nothing. `minimise` looks for the fewest calls that still end in the same kind of failure.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import kvpool
from kvpool.errors import CorruptState, KVPoolError
from kvpool.replay.calls import Call, Calls, RecordError

REFUSALS = (KVPoolError, ValueError, IndexError, TypeError, OverflowError)  # what a pool says of a call, documented


@dataclass(frozen=True)
class Failure:
    """Where calls went wrong: `kind` is "digest", "corrupt", "refused" or the name of an exception."""

    kind: str
    at: int  # number of the call
    call: str
    message: str

    def __str__(self) -> str:
        return f"call {self.at}, {self.call}: {self.message}"


class Player:
    """Makes recorded calls on a pool: slots become handles, numbers become plans."""

    def __init__(self, parameters: dict[str, Any], pool_type: Callable[..., Any], check_every: int) -> None:
        self.pool = pool_type(**parameters)
        self.check_every = check_every
        self.handles: dict[int, int] = {}  # slot in the record -> handle here
        self.blocks: dict[int, int] = {}  # block in the record -> block here
        self.plans: dict[int, Any] = {}
        self.rows: dict[int, list[int]] = {}  # of the last step on a plan

    def start(self, arguments: dict[str, Any]) -> None:
        """Make the new pool what a reset left: generations of slots, content that was dropped, the digest."""
        pool, dropped = self.pool, arguments["dropped"]
        if dropped and pool.prefix is None:  # an index forgets what was dropped in the next call
            pool.blocks.alloc(pool.blocks.num_blank)
            pool.blocks.mark_cached(dropped)
            pool.blocks.free(dropped)
            pool.blocks.evict(len(dropped))
            pool.reset()
        for slot, generation in arguments["generations"]:
            pool._set_generation(slot, generation)
        pool._set_digest(arguments["digest"])

    def take(self, rows: int | Sequence[int]) -> list[int]:
        """Handles of slots of the record."""
        return [self.handles[row] for row in ([rows] if isinstance(rows, int) else rows)]

    def ids(self, ids: int | Sequence[int]) -> list[int]:
        """Blocks of the record."""
        return [self.blocks.get(i, i) for i in ([ids] if isinstance(ids, int) else ids)]

    def plan(self, number: int, rows: int, tokens: int) -> Any:
        """The plan of a number, with room for so much."""
        plan = self.plans.get(number)
        if plan is None or (not plan.is_pending and (plan.limits.max_rows < rows or plan.limits.max_tokens < tokens)):
            plan = kvpool.Plan(self.pool, max(rows, 1), max(tokens, rows, 1), formats=())
            self.plans[number] = plan
        return plan

    def play(self, call: Call) -> None:
        """Make one call."""
        pool, a = self.pool, call.arguments
        if call.name in ("step", "reserve"):
            self.step(call)
        elif call.name == "unshare":
            self.rows[a["plan"]] = rows = self.take(a["rows"])
            pool.unshare(self.plan(a["plan"], len(rows), 0), rows, a["lens"], a["first"])
        elif call.name == "compact":
            pool.compact(self.take(a["rows"]), a["lens"], a["first"])
        elif call.name == "evict_blocks":
            pool.evict_blocks(self.handles[a["row"]], a["indices"])
        elif call.name in ("done", "rollback"):
            getattr(pool, call.name)(self.plans[a["plan"]])
        elif call.name.startswith("blocks."):
            self.named(call.name.removeprefix("blocks."), **a)
        elif call.name == "open":
            namespace = bytes.fromhex(a["namespace"])
            self.handles[a["row"]] = (pool.prefix.pin if a["pin"] else pool.open)(a["tokens"], namespace)
        elif call.name == "fork":
            children = pool.fork(self.handles[a["row"]], len(a["children"])).tolist()
            self.handles |= zip(a["children"], children, strict=True)
        elif call.name == "truncate":
            pool.truncate(self.take(a["rows"]), a["lens"])
        elif call.name in ("close", "defer_close"):
            pool.close(self.take(a["rows"]))
        elif call.name == "close_finished":
            pool.close_finished(self.take(a["rows"]), [bool(m) for m in a["mask"]])
        elif call.name == "prefix.commit":
            pool.prefix.commit(self.take(a["rows"]), a["tokens"], a["counts"])
        elif call.name == "prefix.flush":
            pool.prefix.flush(None if a["namespace"] is None else bytes.fromhex(a["namespace"]))
        else:  # "start"
            pool.reset()
            self.plans.clear()

    def named(self, name: str, ids: Any = None, n: int = 0, **options: Any) -> None:
        """A call of `Pool.blocks`."""
        blocks = self.pool.blocks
        if name == "alloc":
            self.blocks |= zip(ids, blocks.alloc(len(ids)).tolist(), strict=True)
        elif name == "take":
            self.blocks |= zip(ids, blocks.take(len(ids))[0], strict=True)
        elif name == "evict":
            blocks.evict(n)
        elif name == "drain_evicted":
            blocks.drain_evicted()
        elif name == "take_block":
            blocks.take_block(ids[0])
        else:
            getattr(blocks, name)(self.ids(ids), **options)

    def step(self, call: Call) -> None:
        """`step` or `reserve`."""
        a, number = call.arguments, call.arguments["plan"]
        rows = self.rows[number] if a["rows"] is None else self.take(a["rows"])
        new = a["num_new"]
        total = new * len(rows) if isinstance(new, int) else sum(new)
        plan = self.plan(number, len(rows), total)
        options = {"partial": True} if a["partial"] else {}
        getattr(self.pool, call.name)(plan, rows, new, **options)
        self.rows[number] = rows


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
        The record lost its beginning, and no reset is left in it.
    """
    begins = record.begins
    if begins is None:
        raise RecordError(
            f"the first {record.header['lost']} calls are lost and no reset came after them: there is no state to "
            f"begin with. A larger record=, or pool.reset() now and then, keeps one"
        )
    player = Player(record.header["pool"], pool_type, check_every)
    calls = list(record.calls[begins:])
    if record.header["lost"]:
        player.start(calls.pop(0).arguments)
        begins += 1
    return _run(player, calls, begins, exact=True, progress=progress)


def _run(
    player: Player, calls: Sequence[Call], first: int, exact: bool, progress: Callable[[int], None] = lambda done: None
) -> Failure | None:
    """Make calls until one fails; without `exact` digests do not count and refused calls are passed over."""
    pool, every = player.pool, player.check_every
    for number, call in enumerate(calls, first):
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
        if exact and call.digest != pool.digest() & 0xFFFFFFFF:
            found = pool.digest() & 0xFFFFFFFF
            return Failure("digest", number, str(call), f"digest {found:08x}, the record has {call.digest:08x}")
        if every and number % every == 0 and (failure := _check(pool, number, call)):
            return failure
        if number % 1024 == 0:
            progress(number - first)
    return _check(pool, first + len(calls) - 1, calls[-1] if calls else None)


def _check(pool: Any, number: int, call: Call | None) -> Failure | None:
    try:
        pool.check()
    except CorruptState as error:
        return Failure("corrupt", number, str(call or "the new pool"), str(error))
    return None


def minimise(
    record: Calls, failure: Failure, pool_type: Callable[..., Any] = kvpool.Pool,
    progress: Callable[[int], None] = lambda left: None,
) -> list[Call]:  # fmt: skip
    """The fewest calls that still fail like `failure`: halves, quarters, ... are left out, as long as any can be.

    Raises
    ------
    RecordError
        The failure is not one of the calls alone: a digest that differs needs the build that recorded it.
    """
    calls = [call for call in record.calls[: failure.at + 1] if call.name != "start"]

    def fails(some: list[Call]) -> bool:
        found = _run(Player(record.header["pool"], pool_type, 1), some, 0, exact=False)
        return found is not None and found.kind == failure.kind

    calls = _with_rows(calls)
    if failure.kind in ("digest", "refused") or record.header["lost"] or not fails(calls):
        raise RecordError(f"this cannot be made smaller: {failure}")
    size = len(calls) // 2
    while size:
        at = 0
        while at < len(calls):
            without = calls[:at] + calls[at + size :]
            if fails(without):
                calls = without
            else:
                at += size
            progress(len(calls))
        size //= 2
    return calls


def _with_rows(calls: Sequence[Call]) -> list[Call]:
    """The same calls, every step with its rows: one may be left out without the next one losing its rows."""
    rows: dict[int, list[int]] = {}
    found = []
    for call in calls:
        if call.name in ("step", "reserve", "unshare"):
            number = call.arguments["plan"]
            if call.arguments["rows"] is not None:
                rows[number] = call.arguments["rows"]
            call = Call(call.name, call.arguments | {"rows": rows[number]}, call.digest)
        found.append(call)
    return found
