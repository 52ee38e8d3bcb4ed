"""Memory that runs out at every allocation of every call, of the core and of Python: the call is refused, no more.

The fuzzer of `tests.verify` draws the calls. Each is made while its first allocation fails, then while its second one
does, until it goes through. A call that meets a failure must raise `MemoryError`, and leave the pool's fingerprint,
digest and statistics and its plans as they were. So the program ends as it does without failures. Memory of the core
fails in builds that can fail on demand (`kvpool/core/memory.pxi`); Python's fails in any, by `_testcapi.set_nomemory`,
in a process apart: ``python -m tests.core.test_memory_failure SEED [planted]``.
"""

from __future__ import annotations

import gc
import importlib.util
import itertools
import json
import subprocess
import sys
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, ClassVar

import pytest

import kvpool
from kvpool import Group, Plan, _core
from tests.verify._verify import Run
from tests.verify.words import WORDS, Shape, shape_of
from tests.verify.wrapped import Wrapped

ROOT = Path(__file__).resolve().parents[2]
SEEDS = range(6)
#: Calls that take memory, in every script.
TAKE_MEMORY = {"Pool", "Plan", "step", "can", "reset", "resize"}
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


can_fail = pytest.mark.skipif(not _core.can_fail(), reason="make asan: a build whose memory fails on demand")
needs_testcapi = pytest.mark.skipif(
    importlib.util.find_spec("_testcapi") is None, reason="this Python has no _testcapi"
)


@can_fail
@pytest.mark.parametrize(
    ("made", "least"), [(script, TAKE_MEMORY | {"unshare"}), (script_with_groups, TAKE_MEMORY | {"open"})]
)
@pytest.mark.parametrize("seed", SEEDS)
def test_call_whose_allocation_fails_changes_nothing(seed, made, least):
    failed = sweep_core(made(seed))
    assert set(failed) >= least and failed.total() > 100, failed


def swept(*arguments):
    """What a process apart has found: a failure of Python's memory would meet pytest too."""
    command = [sys.executable, "-W", "ignore", "-m", "tests.core.test_memory_failure", *arguments]
    done = subprocess.run(command, capture_output=True, text=True, check=True, cwd=ROOT)
    return json.loads(done.stdout)


@needs_testcapi
@pytest.mark.parametrize("seed", "123456")
def test_call_without_memory_for_its_objects_changes_nothing(seed):
    found = swept(seed)
    assert found["points"] > 150 and not found["findings"], found


@needs_testcapi
def test_call_without_memory_that_leaves_a_sequence_behind_is_detected():
    assert "step: the failure of allocation" in swept("3", "planted")["findings"][0]


@can_fail
def test_resize_without_memory_names_the_size_of_the_arena_that_grows():
    pool = kvpool.Pool(20, 4, groups=[Group.full(), Group.full(arena=1, num_blocks=30)], prefix_cache=True)
    for number in range(1, 12):  # of its blocks, then of the tree
        _core.fail_at(number)
        try:
            with pytest.raises(MemoryError, match=r"^\[resize\] no memory for 50 entries$"):
                pool.resize(50, arena=1)
        finally:
            _core.fail_at(0)
    assert pool.resize(50, arena=1).tolist() == []


@pytest.mark.skipif(_core.can_fail(), reason="this build can")
def test_release_build_refuses_to_fail_on_demand():
    with pytest.raises(RuntimeError, match=r"\[fail_at\]"):
        _core.fail_at(1)


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
