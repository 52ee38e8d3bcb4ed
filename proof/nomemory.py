"""Python's own memory runs out at every allocation of every call: what a child process of `proof.failures` runs.

The scripts are those of `proof.failing`. Here CPython's allocator fails, by `_testcapi.set_nomemory`: conversions of
arguments, arrays that are returned, entries of lists and dicts. The call must raise `MemoryError` and leave the pool
as it was, or do without that memory and end as in peace.
"""

from __future__ import annotations

import _testcapi  # CPython's own: not there in every distribution of Python
import gc
import json
import sys
from typing import Any

import kvpool
from proof.failing import Call, Careless, Stage, script

QUIET = 12  # so many allocations in a row that nobody asked for: the call makes no more


def stage_at(calls: list[Call]) -> Stage:
    """A stage after these calls."""
    s = Stage()
    for _, call in calls:
        call(s)
    return s


def attempt(s: Stage, call: Any, k: int) -> Exception | None:
    """Make the call while the k-th allocation of Python fails; how it was refused."""
    try:
        _testcapi.set_nomemory(k, k + 1)
        try:
            call(s)
        finally:
            _testcapi.remove_mem_hooks()
    except Exception as error:
        return error.with_traceback(None)
    return None


def sweep_call(calls: list[Call], at: int) -> tuple[int, list[str]]:
    """Fail each allocation of one call of a script; returns (points, findings)."""
    name, call = calls[at]
    peace = stage_at(calls[: at + 1]).snapshot()
    points, quiet, k, findings = 0, 0, 0, []
    while quiet < QUIET:
        k += 1
        s = stage_at(calls[:at])
        before, held = s.snapshot(), (len(s.plans), len(s.handles), s.pool is None)
        error = attempt(s, call, k)
        quiet = 0 if error else quiet + 1
        points += error is not None
        if error is None:
            if s.snapshot() != peace:
                findings.append(f"{name}, allocation {k}: went on, and did something else")
            continue
        if not isinstance(error, MemoryError):
            findings.append(f"{name}, allocation {k}: {error!r}")
        if held != (len(s.plans), len(s.handles), s.pool is None):
            continue  # the script itself failed, behind the call
        if s.snapshot() != before:
            findings.append(f"{name}, allocation {k}: refused, but the state changed")
            continue
        if s.pool is not None:
            s.pool.check()
    return points, findings


def sweep(first: int, scripts: int) -> dict[str, Any]:
    """All calls of some scripts."""
    points, findings = 0, []
    for seed in range(first, first + scripts):
        calls = script(seed)
        for at in range(len(calls)):
            made, found = sweep_call(calls, at) if calls[at][0] != "keep" else (0, [])
            points += made
            findings += [f"seed {seed}: {finding}" for finding in found]
    return {"points": points, "findings": findings}


def main(argv: list[str]) -> int:
    """``nomemory.py SCRIPTS SEED [planted]``: one JSON object."""
    gc.disable()
    scripts, seed = map(int, argv[:2])
    if argv[2:] == ["planted"]:
        kvpool.Pool = Careless  # type: ignore[misc]
    print(json.dumps(sweep(seed, scripts)))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
