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
from kvpool.testing.recorded import Call, Calls, RecordError, made_by

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
    calls = list(record.calls[: failure.at + 1])

    def fails(some: list[Call]) -> bool:
        found = _run(Player(record.header["pool"], pool_type, 1), some, exact=False)
        return found is not None and found.kind == failure.kind

    if failure.kind in ("digest", "refused") or not fails(calls):
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
