"""What threads do at once in a process of its own: ``python -m tests.verify.slow.threads CASE CALLS``.

Pools share nothing: what threads do to one pool each, without the GIL, is what they would do alone. Public calls of
many threads on one pool wait for each other. The control, threads on one pool with nothing between them, must be
reported by ThreadSanitizer, or it would see nothing at all. A case prints a JSON line, or ends with the exception of
what went wrong.
"""

from __future__ import annotations

import json
import sys
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import numpy as np
from tests.verify.slow.threads_driver import hammer

import kvpool
from kvpool import KVSpec, Plan, Pool
from kvpool.errors import ConcurrentUse
from tests.verify.slow.callers import TAG_SHIFT, Caller, Stranger, Wrong

THREADS = 4
ROUND = 20_000  # calls of a pool's life
REPEATED = 10  # one round of so many is made again by each thread alone
SEED = 1
KINDS = ({}, {"prefix_cache": True, "events": 64}, {"in_order": True}, {"prefix_cache": True, "in_order": True})
IN_ORDER = 2  # the kind without a prefix cache


def together(work: Callable[[int], None], threads: int = THREADS) -> None:
    """Run ``work(number)`` in each thread, all at once; an exception of one is raised."""
    start = threading.Barrier(threads)

    def run(number: int) -> None:
        start.wait()
        work(number)

    with ThreadPoolExecutor(threads) as pool:
        list(pool.map(run, range(threads)))


def new_pool(turn: int) -> Pool:
    """A pool that runs out of blocks and of sequences now and then; one kind after the other."""
    return Pool(180, 4, max_seqs=40, max_blocks_per_seq=12, seed=turn, **KINDS[turn % len(KINDS)])


def rounds(calls: int, seed: int, make: Callable[[Pool, int], Caller | Stranger]) -> int:
    """All threads on one pool, again and again on a new one, until so many calls were made."""
    made = 0
    for turn in range(seed, seed + max(1, calls // ROUND)):
        pool = new_pool(turn)
        callers = [make(pool, number) for number in range(THREADS)]
        together(lambda number, callers=callers: callers[number].run(min(calls, ROUND) // THREADS))
        pool.check()
        for caller in callers:
            caller.leave()
        pool.check()
        if (stats := pool.stats()).used or stats.limbo:
            raise Wrong(f"{stats.used} blocks are used and {stats.limbo} in limbo after everybody has left")
        made += sum(caller.calls for caller in callers)
    return made


def shared(calls: int, seed: int) -> dict:
    """One pool; each thread knows what its calls have to give."""
    return {"calls": rounds(calls, seed, lambda pool, number: Caller(pool, number, seed))}


def strangers(calls: int, seed: int) -> dict:
    """One pool; the threads take each other's sequences and plans."""
    everybody: list[Stranger] = []

    def make(pool: Pool, number: int) -> Stranger:
        if number == 0:
            everybody.clear()
        return Stranger(pool, number, seed, everybody)

    return {"calls": rounds(calls, seed, make)}


def apart(calls: int, seed: int) -> dict:
    """A pool for each thread, made by it: what it did there is what it does alone, and no two have a tag in common."""
    made = 0

    def life(turn: int, number: int) -> Caller:
        caller = Caller(new_pool(turn), number, turn)
        caller.run(min(calls, ROUND) // THREADS)
        caller.pool.check()
        return caller

    for turn in range(seed, seed + max(1, calls // ROUND)):
        callers: dict[int, Caller] = {}
        together(lambda number, turn=turn, callers=callers: callers.update({number: life(turn, number)}))
        tags = {caller.pool.open() >> TAG_SHIFT for caller in callers.values()}
        if len(tags) != THREADS:
            raise Wrong(f"{THREADS} living pools have {len(tags)} tags")
        if (turn - seed) % REPEATED == 0:
            for number, caller in callers.items():
                alone = life(turn, number)
                alone.pool.open()
                if alone.pool.digest() != caller.pool.digest():
                    raise Wrong(f"thread {number} did something else than alone")
        made += sum(caller.calls for caller in callers.values())
    return {"calls": made}


def stores(calls: int, seed: int) -> dict:
    """Stores of the CPU backend: one for each thread, and one that all of them call, which refuses who comes second."""
    from kvpool.protocol import StepArrays
    from kvpool_backends.cpu import CPUBackend

    spec = KVSpec(2, 2, 32, "float32", 4)
    one = CPUBackend(spec, 64, num_threads=2)
    taken, refused, one_each = [0] * THREADS, [0] * THREADS, max(20, calls // THREADS)

    def work(number: int) -> None:
        rng = np.random.default_rng([seed, number])
        own = CPUBackend(spec, 64, num_threads=1 + number % 2)
        blocks = np.arange(1 + number * 15, 16 + number * 15)  # of the common store: nobody else's
        for turn in range(one_each):
            backend = own if turn % 2 else one
            ids = rng.permutation(blocks)[:3].astype(np.int32)
            slots = (ids[:, None] * 4 + np.arange(4)).ravel()
            k, v = rng.standard_normal((2, 12, 2, 32)).astype(np.float32)
            plan = StepArrays(ids[None], np.array([12]), np.array([0, 1]), slots)
            try:
                backend.write(backend.prepare(plan), 0, k, v)
                found = backend.gather(0, ids)
                out = backend.attend(backend.prepare(plan), 0, k[:1].repeat(2, 1))
                assert backend.store.scratch_nbytes
            except ConcurrentUse:
                refused[number] += 1
                continue
            taken[number] += 1
            if not (np.array_equal(found[0], k) and np.array_equal(found[1], v) and np.isfinite(out).all()):
                raise Wrong(f"thread {number}, turn {turn}: a store holds what nobody wrote")

    together(work)
    if not sum(refused):
        raise Wrong("no call met another one: the case tests nothing")
    return {"calls": 3 * sum(taken), "refused": sum(refused)}


class Engine:
    """A small engine on a pool of its own: it counts its turns, and the CPU seconds of its thread."""

    def __init__(self, seed: int) -> None:
        self.pool = Pool(4096, 16, max_seqs=80, max_blocks_per_seq=64, seed=seed)
        self.plan = Plan(self.pool, 64, 64)
        self.handles = np.array([self.pool.open() for _ in range(64)])
        self.turns = 0

    def run(self, turns: int) -> float:
        """Seven calls a turn; CPU seconds."""
        pool, plan, handles = self.pool, self.plan, self.handles
        begun = time.thread_time()
        for _ in range(turns):
            if self.turns % 1000 == 0:
                pool.truncate(handles, 0)
            pool.step(plan, handles)
            pool.done(plan)
            handle = pool.open(4)
            pool.close(pool.fork(handle))
            pool.close(handle)
            pool.stats()
            self.turns += 1
        return time.thread_time() - begun


def cost(calls: int, seed: int) -> dict:
    """CPU seconds of a turn with two threads on two pools, beside those of one thread; the best of several each.

    Only windows count in which the other thread made nearly as many turns: on a busy machine it may not have run.
    """
    turns, alone, both = max(500, calls // 7 // 40), [], []
    one, other = Engine(seed), Engine(seed + 1)
    stop = threading.Event()

    def work(number: int) -> None:
        for _ in range(20 if number == 0 else 0):
            before = other.turns
            seconds = one.run(turns)
            if other.turns - before > 0.8 * turns:
                both.append(seconds)
        while number and not stop.is_set():
            other.run(100)
        stop.set()

    for _ in range(6):
        together(lambda _: alone.append(min(one.run(turns) for _ in range(5))), threads=1)
        stop.clear()
        together(work, threads=2)
    if not both:
        raise Wrong("the two threads never ran at the same time: nothing was measured")
    return {"windows": len(both), "microseconds": min(alone) / turns * 1e6, "ratio": min(both) / min(alone)}


# ---------------------------------------------------------------------- C functions of the core, without the GIL


def hammered(operations: int, seed: int) -> dict:
    """One pool per thread: the same digests as alone."""
    pools = [new_pool(IN_ORDER) for _ in range(THREADS)]
    together(lambda number: hammer(pools[number], seed + number, operations // THREADS))
    for number, pool in enumerate(pools):
        pool.check()
        alone = new_pool(IN_ORDER)
        hammer(alone, seed + number, operations // THREADS)
        if alone.digest() != pool.digest():
            raise Wrong(f"thread {number} did something else than alone")
    return {"calls": operations}


def hammered_without_a_lock(operations: int, seed: int) -> dict:
    """The control: one pool, many threads, nothing between them."""
    pool = new_pool(IN_ORDER)
    together(lambda number: hammer(pool, seed + number, operations // THREADS))
    return {"calls": operations}


POOLS = (shared, strangers, apart, hammered)
CASES = {case.__name__: case for case in (*POOLS, stores, cost, hammered_without_a_lock)}

if __name__ == "__main__":
    if "free" in sys.argv[3:] and getattr(sys, "_is_gil_enabled", lambda: True)():
        raise SystemExit(f"the GIL is on after the import of kvpool {kvpool.__version__}")
    print(json.dumps(CASES[sys.argv[1]](int(sys.argv[2]), SEED)))
