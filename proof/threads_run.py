"""What a child of `proof.threads` runs under ThreadSanitizer: ``python -m proof.threads_run CASE OPERATIONS``."""

from __future__ import annotations

import sys
import threading

import kvpool
from proof.freethreaded_run import THREADS, shared, together


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


def pool_of_all(operations: int) -> str:
    """One pool, public calls of many threads: each does what it has to, and none is refused."""
    return f"1 pool of all, {shared(max(4_000, operations // 100), 1)['calls']} public calls"


CASES = {case.__name__: case for case in (pools_apart, pool_with_a_lock, pool_of_all, pool_without_a_lock)}

if __name__ == "__main__":
    print(CASES[sys.argv[1]](int(sys.argv[2])))
