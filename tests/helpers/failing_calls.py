"""Random programs in which memory runs out in every call: the core's own, and Python's.

The fuzzer of `tests.verify` draws the calls. Each is made while its first allocation fails, then while its second one
does, until it goes through. A call that meets a failure must raise `MemoryError`, and leave the pool's fingerprint,
digest and statistics and its plans as they were. So the program ends as it does in peace. Memory of the core fails in
builds that can fail on demand (`kvpool/core/memory.pxi`); Python's fails in any, by `_testcapi.set_nomemory`:
``python -m tests.helpers.failing_calls SEED [planted]``, a process apart.
"""

from __future__ import annotations

import gc
import itertools
import json
import sys
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any, ClassVar

import kvpool
from kvpool import Group, Plan, _core
from tests.verify._verify import Run
from tests.verify.words import WORDS, Shape, shape_of
from tests.verify.wrapped import Wrapped

LENGTH = 150  # words of a program
RARE = ("reset", "unshare", "can")  # words that are said more often here
MANY = 40  # rows, more than any array has room for at first


def fail_in_core(attempt: int) -> Callable[[], None]:
    """Allocation 1, 1, 2, 2, ... of the core fails, first with all behind it, then alone; what ends that."""
    _core.fail_at(attempt // 2 + 1, attempt % 2 == 0)
    return lambda: _core.fail_at(0)


def fail_in_python(attempt: int) -> Callable[[], None]:
    """One allocation of Python fails; what ends that."""
    import _testcapi  # CPython's own: not there in every distribution of Python

    _testcapi.set_nomemory(attempt + 1, attempt + 2)
    return _testcapi.remove_mem_hooks


def persevere(name: str, call: Callable[[], Any], snapshot: Callable[[], Any]) -> Any:
    """Make a call while one of its allocations after the other fails, until it goes through."""
    for attempt in itertools.count():
        before = snapshot()
        end = Failing.fail(attempt)
        try:
            try:
                return call()
            finally:
                end()
        except MemoryError as error:
            if type(error) is not MemoryError:  # too few blocks
                raise
        Failing.met[name] += 1
        assert snapshot() == before, f"{name}: the failure of allocation {attempt} changed the state"
    return None


class Failing(Wrapped):
    """A pool whose memory runs out in every call."""

    fail: ClassVar[Callable[[int], Callable[[], None]]] = staticmethod(fail_in_core)
    met: ClassVar[Counter[str]] = Counter()  # failures, by the call

    def __init__(self, **options: Any) -> None:
        self.plans: list[Plan] = []

    def made(self, name: str, call: Callable[..., Any], given: Any, options: dict[str, Any], part: Any = None) -> Any:
        """Make a call."""
        return persevere(name, partial(call, *given, **options), self.snapshot)

    def snapshot(self) -> tuple[Any, ...]:
        """All that a refused call must leave alone."""
        copies = [[group.copies.tolist() for group in p.groups if hasattr(group, "copies")] for p in self.plans]
        shown = [(p.is_pending, p.step_id, p.handles.tolist()) for p in self.plans]
        return self.fingerprint(), self.digest(), self.stats(), shown, copies

    @staticmethod
    def make_plan(pool: Failing, **options: Any) -> Plan:
        """A plan of the pool."""
        pool.plans.append(pool.made("Plan", Plan, (pool,), options))
        return pool.plans[-1]


class Careless(Failing):
    """A pool whose refused `step` leaves a sequence open."""

    def step(self, *given: Any, **options: Any) -> None:
        """Without memory, it has opened a sequence."""

        def step() -> None:
            try:
                super(Wrapped, self).step(*given, **options)
            except MemoryError as error:
                if type(error) is MemoryError:
                    super(Wrapped, self).open()
                raise

        self.made("step", step, (), {})


def script(seed: int, groups: list[Group] | None = None) -> Shape:
    """A program on a pool of one full group."""
    found = shape_of(seed)
    more = bytes(4 * [WORDS.index(word) for word in RARE])
    return replace(found, pool=found.pool | {"groups": groups, "lookahead": 0}, dice=found.dice[: -len(more)] + more)


def script_with_groups(seed: int) -> Shape:
    """One on a pool with layer groups and checkpoints."""
    found = script(seed, [Group.full(), Group.window(6), Group.state(100, blocks=2)][seed % 2 :])
    return replace(found, pool=found.pool | {"num_blocks": 60})


def many(make_pool: Callable[..., Any], shape: Shape) -> int:
    """Steps, copies, commits and a resize of more than arrays have room for at first; the digest."""
    sizes = {"num_blocks": 900, "block_size": 2, "max_seqs": 2 * MANY, "max_blocks_per_seq": 200, "reserved_blocks": 1}
    pool = make_pool(**(shape.pool | sizes | {"prefix_cache": True, "watermark": 0, "in_order": False}))
    make_plan = getattr(pool, "make_plan", Plan)
    plan = make_plan(pool, max_rows=MANY, max_tokens=300)
    prompt = list(range(201))
    parent = pool.open(prompt, cut=150)
    for end in (150, 201):
        pool.step(plan, [parent], end - pool.num_tokens(parent))
        pool.done(plan)
    pool.prefix.commit(parent, prompt)
    pool.prefix.unpin(pool.prefix.pin(prompt, ttl=9))
    rows = [parent, *pool.fork(parent, MANY - 1).tolist()]
    for ends in (pool.rollback, pool.done, pool.done, pool.done):  # tails that are shared, full, and neither
        plan = make_plan(pool, max_rows=MANY, max_tokens=300)
        pool.can(rows, 1)
        pool.step(plan, rows, 1)
        ends(plan)
    if pool.options.groups[0].kind == "full":
        pool.unshare(make_plan(pool, max_rows=1, max_tokens=0), rows[:1], 190)
    pool.reset()
    arenas = 1 + sum(group.kind == "state" for group in pool.options.groups)
    pool.resize({arena: 3 * pool.stats(arena).num_blocks for arena in range(arenas)})
    found = pool.digest()
    pool.shutdown()
    return int(found)


def ended(shape: Shape, make_pool: Callable[..., Any] = kvpool.Pool) -> tuple[Any, ...]:
    """How a program ends."""
    run = Run(shape, make_pool)
    run.run(LENGTH)
    found = run.digest(), run.facts(), many(make_pool, shape)
    run.shutdown()
    return found


def sweep_core(shape: Shape) -> Counter[str]:
    """Fail each allocation of all calls of a program; how often in which call."""
    kind = Careless if kvpool.Pool is Careless else Failing
    gc.collect()
    before = _core.allocations()[1]
    peace = ended(shape)
    Failing.met.clear()
    again = ended(shape, lambda **options: persevere("Pool", partial(kind, **options), tuple))
    assert again == peace, f"after failures, the program ends otherwise: {again}, due {peace}"
    gc.collect()
    assert _core.allocations()[1] == before, "blocks of memory were lost"
    return Failing.met


def main(seed: str, planted: str = "") -> None:
    """Fail Python's allocations in all calls of two programs; one JSON object."""
    gc.disable()
    Failing.fail, points, findings = staticmethod(fail_in_python), 0, []
    if planted:
        kvpool.Pool = Careless  # type: ignore[misc]
    for make in (script, script_with_groups):
        try:
            points += sweep_core(make(int(seed))).total()
        except Exception as error:  # whatever it is
            findings.append(repr(error))
    print(json.dumps({"points": points, "findings": findings}))


if __name__ == "__main__":
    main(*sys.argv[1:])
