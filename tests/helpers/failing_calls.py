"""Scripts of calls whose memory runs out at every allocation, one after the other: the core's own, and Python's.

A *script* is a list of calls on one pool, made from a seed. It runs once in peace, which counts its allocations and
says how it ends; then once for each allocation, which fails. The call that meets the failure must raise `MemoryError`,
leave the pool's fingerprint, digest and memory as they were, and succeed when it is made again. The script then ends
as it did in peace. Memory of the core fails in builds that can fail on demand (`kvpool/core/memory.pxi`); Python's
fails in any, by `_testcapi.set_nomemory`: ``python -m tests.helpers.failing_calls SEED [planted]``, a process apart.
"""

from __future__ import annotations

import gc
import json
import random
import sys
import weakref
from collections import Counter
from collections.abc import Callable
from typing import Any

import numpy as np

import kvpool
from kvpool import _core

FORMATS = ("block_tables", "seq_lens", "slot_mapping", "positions", "cu_q_lens", "csr")
QUIET = 12  # so many allocations of Python in a row that nobody asked for: the call makes no more
Call = tuple[str, Callable[["Stage"], Any]]


class Stage:
    """A pool, its plans and its sequences: what the calls of a script work on."""

    def __init__(self) -> None:
        self.pool: Any = None
        self.plans: list[Any] = []
        self.handles: list[int] = []
        self.ids: Any = None
        self.told = 0  # events of the prefix cache, those included that were lost
        self.made: Any = None  # what the last call returned, for "keep" to file

    def pending(self, how: str, number: int = 0) -> None:
        """`done` or `rollback` of a plan, if it is pending."""
        if self.plans[number].is_pending:
            getattr(self.pool, how)(self.plans[number])

    def snapshot(self) -> tuple:
        """All that a refused call must leave alone."""
        if self.pool is None:
            return ()
        slots = (1 << 20) - 1  # tag and first generation are others in every pool
        copies = [[group.copies for group in p.groups[:1]] if p.groups else [p.copies] for p in self.plans]
        shown = [
            (p.is_pending, p.step_id, (p.handles & slots).tolist(), [array.tolist() for array in arrays])
            for p, arrays in zip(self.plans, copies, strict=True)
        ]
        return (self.pool.fingerprint(), self.pool.digest(), self.pool.stats(), shown, len(self.handles), self.told)


def keep(s: Stage) -> None:
    """File what the call before returned."""
    if isinstance(s.made, kvpool.Pool):
        s.pool = s.made
    elif isinstance(s.made, kvpool.Plan):
        s.plans.append(s.made)
    elif isinstance(s.made, list):
        s.told += sum(event[1] if event[0] == "lost" else 1 for event in s.made)
    elif isinstance(s.made, int):
        s.handles.append(s.made)
    elif s.made.dtype == np.int64:
        s.handles.extend(s.made.tolist())
    else:
        s.ids = s.made.tolist()


KEPT: Call = ("keep", keep)


def script(seed: int) -> list[Call]:
    """Construct a pool, use every call that takes memory, and end."""
    rng = random.Random(seed)
    cached = seed % 2 == 1
    num_blocks, size = rng.choice([70, 150, 300]), rng.choice([1, 2, 4])
    options: dict[str, Any] = {"max_seqs": rng.choice([48, 64, 200]), "reserved_blocks": rng.randrange(3), "seed": 1}
    options["in_order"] = rng.random() < 0.4
    if cached:
        options |= {"prefix_cache": True, "events": rng.choice([0, 3, 400])}
    formats, dtype = rng.sample(FORMATS, rng.randint(1, len(FORMATS))), rng.choice(["int32", "int64"])
    rows, width, copies = rng.choice([40, 60]), rng.choice([8, 12]), rng.choice([18, 35, 39])
    prompt = [rng.randrange(50) for _ in range(3 * size)]
    finish = "rollback" if seed % 3 else "done"
    plan: Call = ("Plan", lambda s: kvpool.Plan(s.pool, rows, 400, formats=formats, table_width=width, dtype=dtype))
    begin: Call = ("open", lambda s: s.pool.open(prompt, b"tenant") if cached else s.pool.open(len(prompt)))
    calls: list[Call] = [
        ("Pool", lambda s: kvpool.Pool(num_blocks, size, **options)), KEPT, plan, KEPT, begin, KEPT,
        ("step", lambda s: s.pool.step(s.plans[0], s.handles[:1], 2 * size + 1)),
        ("done", lambda s: s.pending("done")),
    ]  # fmt: skip
    if cached:
        calls.append(("commit", lambda s: s.pool.prefix.commit(s.handles[:1], prompt[: 2 * size + 1])))
    calls += [
        ("fork", lambda s: s.pool.fork(s.handles[0], copies)), KEPT, plan, KEPT,
        ("can", lambda s: s.pool.can(s.handles, [1] * len(s.handles))),
        ("step", lambda s: s.pool.step(s.plans[1], s.handles, 1)),  # every row copies its tail: the log grows
        (finish, lambda s: s.pending(finish, 1)),
        ("reserve", lambda s: s.pool.reserve(s.plans[0], s.handles[:2], [size, 1])),
        ("done", lambda s: s.pending("done")),
        begin, KEPT, ("alloc", lambda s: s.pool.blocks.alloc(3)), KEPT,
        ("incref", lambda s: s.pool.blocks.incref(s.ids)), ("decref", lambda s: s.pool.blocks.decref(s.ids)),
        ("free", lambda s: s.pool.blocks.free(s.ids)),
        ("truncate", lambda s: s.pool.truncate(s.handles[1:3], [1, 0])),
        ("Plan", lambda s: kvpool.Plan(s.pool, 1, 66 * size, formats=())), KEPT,
        ("unshare", lambda s: s.pool.unshare(s.plans[2], s.handles[4:5], 2 * size)),  # more copies than rows
        ("done", lambda s: s.pending("done", 2)),
        ("compact", lambda s: s.pool.compact(s.handles[4:5], [size + 1])),
        ("evict_blocks", lambda s: s.pool.evict_blocks(s.handles[17], [0, 1])),
        ("close", lambda s: s.pool.close(s.handles[1:4])),
        ("keep", lambda s: [s.pool.defer_close(h) for h in s.handles[6:16]] and None),
        ("stats", lambda s: s.pool.stats()),
        ("close_finished", lambda s: s.pool.close_finished(s.handles[4:6], [True, False])),
    ]  # fmt: skip
    if cached:
        calls += [
            ("match", lambda s: s.pool.prefix.match(prompt, b"tenant")),
            ("pin", lambda s: s.pool.prefix.pin(prompt, b"tenant")),
            *(long_commit(66 * size) if num_blocks > 70 else ()),
            ("flush", lambda s: s.pool.prefix.flush(b"tenant")),
            ("drain_events", lambda s: s.pool.prefix.events()), KEPT,
        ]  # fmt: skip
    return [*calls, ("reset", lambda s: s.pool.reset()), ("open", lambda s: s.pool.open([1, 2, 3]))]


def long_commit(length: int) -> list[Call]:
    """One commit that makes more nodes than the journal of events has room for at first."""
    tokens = list(range(length))
    return [
        ("keep", lambda s: s.pending("rollback", 1)), ("open", lambda s: s.pool.open(tokens, b"another")), KEPT,
        ("step", lambda s: s.pool.step(s.plans[2], s.handles[-1:], length)), ("done", lambda s: s.pending("done", 2)),
        ("commit", lambda s: s.pool.prefix.commit(s.handles[-1:], tokens)),
    ]  # fmt: skip


def script_with_groups(seed: int) -> list[Call]:
    """Prefix hits of a pool with layer groups: checkpoints that are taken, published, loaded and flushed."""
    rng = random.Random(seed)
    prompt = [rng.randrange(50) for _ in range(rng.randrange(30, 60))]
    groups = [kvpool.Group.full(), kvpool.Group.window(6), kvpool.Group.state(60, blocks=2)]
    options: dict[str, Any] = {"groups": groups[seed % 2 :], "in_order": seed % 5 == 0}
    options |= {"events": rng.choice([0, 3, 400]), "max_seqs": 48, "prefix_cache": True, "seed": 1}

    def chunk(s: Stage) -> None:
        length, place = s.pool.num_tokens(s.handles[-1]), int(s.pool.prefix.wanted(s.handles[-1:])[0])
        s.pool.step(s.plans[0], s.handles[-1:], (place if place > 0 else len(prompt)) - length)

    def commit(s: Stage) -> None:
        first, length = (call(s.handles[-1]) for call in (s.pool.prefix.committed, s.pool.num_tokens))
        s.pool.prefix.commit(s.handles[-1:], prompt[first:length])

    begin: Call = ("open", lambda s: s.pool.open(prompt, b"tenant", cut=len(prompt) - 3))
    done: Call = ("done", lambda s: s.pending("done"))
    compute: list[Call] = [("step", chunk), done, ("commit", commit)]
    return [
        ("Pool", lambda s: kvpool.Pool(120, 2, **options)), KEPT, ("Plan", lambda s: kvpool.Plan(s.pool, 4, 100)), KEPT,
        begin, KEPT, *compute * 3, ("close", lambda s: s.pool.close(s.handles[-1:])), begin, KEPT, ("step", chunk),
        ("rollback", lambda s: s.pending("rollback")), ("fork", lambda s: s.pool.fork(s.handles[-1], 3)), KEPT,
        ("step", chunk), done, ("match", lambda s: s.pool.prefix.match(prompt, b"tenant")),
        ("pin", lambda s: s.pool.prefix.pin(prompt, b"tenant")), ("evict", lambda s: s.pool.blocks.evict(5)),
        ("fork", lambda s: s.pool.fork(s.handles[-1], 18)), KEPT,
        *[("Plan", lambda s: kvpool.Plan(s.pool, 18, 18)), KEPT,  # states of more rows than a log begins with
          ("step", lambda s: s.pool.step(s.plans[-1], s.handles[-18:], 1)),
          ("done", lambda s: s.pending("done", -1))] * 3,
        ("close", lambda s: s.pool.close(s.handles[-18:-1])),
        *([("unshare", lambda s: s.pool.unshare(s.plans[0], s.handles[-1:], len(prompt) - 1)), done] * (seed % 2 == 0)),
        ("flush", lambda s: s.pool.prefix.flush(b"tenant")), ("flush", lambda s: s.pool.prefix.flush(b"unknown")),
        ("drain_events", lambda s: s.pool.prefix.events()), KEPT,
        ("reset", lambda s: s.pool.reset()), ("open", lambda s: s.pool.open([1, 2, 3], b"other")),
    ]  # fmt: skip


class Careless(kvpool.Pool):
    """A pool whose refused `step` leaves a sequence open."""

    def step(self, *arguments: Any, **options: Any) -> None:
        """Like the core's; without memory it has opened a sequence."""
        try:
            super().step(*arguments, **options)
        except MemoryError:
            self.open()
            raise


def play(calls: list[Call], fail: int = 0, sticky: bool = False) -> tuple[Any, int, str]:
    """Run a script; the core's allocation `fail` fails, and all behind it if `sticky`.

    Returns how it ended, how many allocations it made, and the call that failed.
    """
    s, failed, made = Stage(), "", 0
    for name, call in calls:
        before = s.snapshot()
        _core.fail_at(fail - made if fail > made else 0, sticky)
        try:
            s.made = call(s)
        except MemoryError:
            made += _core.allocations()[0]
            _core.fail_at(0)
            assert s.snapshot() == before, f"{name}: the failure of allocation {fail} changed the state"
            failed = name
            if s.pool is not None:
                s.pool.check()
            s.made = call(s)
        else:
            made += _core.allocations()[0]
            if made >= fail > made - _core.allocations()[0]:
                failed = f"{name} (went on)"
        finally:
            _core.fail_at(0)
    s.pool.check()
    ending, alive = s.snapshot(), weakref.ref(s.pool)
    del s
    gc.collect()
    assert alive() is None, "the pool did not die"
    return ending, made, failed


def sweep_core(calls: list[Call]) -> Counter[str]:
    """Fail each of the core's allocations, alone and with all behind it; how often in which call."""
    gc.collect()
    at_start, by_call = _core.allocations()[1], Counter[str]()
    ending, total, _ = play(calls)
    for k in range(1, total + 1):
        for sticky in (False, True):
            again, _, failed = play(calls, k, sticky)
            assert failed, f"allocation {k} did not fail"
            assert again == ending, f"{failed}: after the failure of allocation {k} the script ends otherwise"
            lost = _core.allocations()[1] - at_start
            assert not lost, f"{failed}: {lost} blocks of memory lost after the failure of allocation {k}"
            by_call[failed] += 1
    return by_call


def stage_at(calls: list[Call]) -> Stage:
    """A stage after these calls."""
    s = Stage()
    for _, call in calls:
        s.made = call(s)
    return s


def attempt(s: Stage, call: Any, k: int) -> Exception | None:
    """Make the call while the k-th allocation of Python fails; how it was refused."""
    import _testcapi  # CPython's own: not there in every distribution of Python

    try:
        _testcapi.set_nomemory(k, k + 1)
        try:
            s.made = call(s)
        finally:
            _testcapi.remove_mem_hooks()
    except Exception as error:
        return error.with_traceback(None)
    return None


def sweep_python(calls: list[Call], at: int) -> tuple[int, list[str]]:
    """Fail each allocation of Python of one call: it is refused without a trace, or goes on and ends as in peace."""
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
        elif s.pool is not None:
            s.pool.check()
    return points, findings


def main(seed: int, *more: str) -> None:
    """Fail Python's allocations in all calls of a script; one JSON object."""
    gc.disable()
    if more == ("planted",):
        kvpool.Pool = Careless  # type: ignore[misc]
    calls = script(seed)
    swept = [sweep_python(calls, at) for at, (name, _) in enumerate(calls) if name != "keep"]
    findings = [finding for _, found in swept for finding in found]
    print(json.dumps({"points": sum(points for points, _ in swept), "findings": findings}))


if __name__ == "__main__":
    main(int(sys.argv[1]), *sys.argv[2:])
