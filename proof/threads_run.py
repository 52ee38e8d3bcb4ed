"""What a child of `proof.threads` runs under ThreadSanitizer: ``python -m proof.threads_run CASE OPERATIONS``."""

from __future__ import annotations

import random
import sys
import threading
import time
from collections.abc import Callable

import kvpool
from kvpool import ConcurrentUse, KVPoolError

THREADS = 4


def together(work: Callable[[int], None]) -> None:
    """Run ``work(number)`` in each thread, all at once; an exception of one is raised."""
    errors: list[BaseException] = []
    start = threading.Barrier(THREADS)

    def run(number: int) -> None:
        start.wait()
        try:
            work(number)
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=run, args=(number,)) for number in range(THREADS)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if errors:
        raise errors[0]


def new_pool() -> kvpool.Pool:
    """A pool that runs out of blocks now and then."""
    return kvpool.Pool(200, 4, max_seqs=40, max_blocks_per_seq=12, seed=1)


def pools_apart(operations: int) -> str:
    """One pool per thread, without the GIL: the same digests as alone."""
    from proof.threads_driver import hammer

    pools = [new_pool() for _ in range(THREADS)]
    together(lambda number: hammer(pools[number], number, operations // THREADS))
    for number, pool in enumerate(pools):
        pool.check()
        alone = new_pool()
        hammer(alone, number, operations // THREADS)
        assert alone.digest() == pool.digest(), f"thread {number} did something else than alone"
    return f"{THREADS} pools, {operations} operations"


def pool_with_a_lock(operations: int) -> str:
    """One pool, many threads, without the GIL, one at a time."""
    from proof.threads_driver import hammer

    pool, lock = new_pool(), threading.Lock()

    def work(number: int) -> None:
        for turn in range(200):
            with lock:
                hammer(pool, number << 20 | turn, operations // THREADS // 200)

    together(work)
    pool.check()
    return f"1 pool with a lock, {operations} operations"


def pool_without_a_lock(operations: int) -> str:
    """The control: one pool, many threads, nothing between them. Must be reported."""
    from proof.threads_driver import hammer

    pool = new_pool()
    together(lambda number: hammer(pool, number, min(operations, 40_000) // THREADS))
    return "1 pool without a lock"


class Slow:
    """An int that lets other threads run while the pool asks for it."""

    def __index__(self) -> int:
        time.sleep(0)
        return 1


def pool_with_the_busy_flag(operations: int) -> str:
    """One pool, public calls of many threads that give way inside of them: `ConcurrentUse`, never corruption."""
    pool = new_pool()
    refused = [0] * THREADS

    def work(number: int) -> None:
        rng = random.Random(number)
        plan = None
        handles: list[int] = []
        for _ in range(max(200, operations // 400)):
            try:
                if plan is None:
                    plan = kvpool.Plan(pool, 4, 64)
                if len(handles) < 5:
                    handles.append(pool.open(rng.randrange(9)))
                elif rng.random() < 0.3:
                    pool.close(handles[0])
                    handles.pop(0)
                else:
                    pool.step(plan, handles[: rng.randrange(1, 4)], [Slow(), Slow(), Slow()][: rng.randrange(1, 4)])
            except ConcurrentUse:
                refused[number] += 1
            except (KVPoolError, ValueError):
                pass
            try:
                if plan is not None and plan.is_pending:
                    pool.done(plan)
            except ConcurrentUse:
                refused[number] += 1

    together(work)
    pool.check()
    assert sum(refused), "no call met another one: the test tests nothing"
    return f"1 pool, {sum(refused)} calls refused with ConcurrentUse"


CASES = {case.__name__: case for case in (pools_apart, pool_with_a_lock, pool_with_the_busy_flag, pool_without_a_lock)}

if __name__ == "__main__":
    print(CASES[sys.argv[1]](int(sys.argv[2])))
