"""`can`: what `step` would find, whatever the rows ask for, and at the price of one look at each."""

import time
from typing import Any

import numpy as np
from catalogue import Unchecked, broken, planted

from kvpool import Pool
from kvpool.errors import CapacityExceeded, OutOfBlocks

ROWS = 2048


class SumsIn32Bits(Unchecked):
    """What the rows need is added up in 32 bits."""

    def can(self, handles: Any, num_new: Any = 1) -> bool:
        """Wrap around."""
        new = np.broadcast_to(np.array(num_new, np.int64), len(handles))
        total = int(np.sum(new, dtype=np.int64)) & 0xFFFFFFFF
        return super().can(list(handles)[:1], total) if total < 64 else super().can(handles, num_new)


class LooksAtEachRowAlone(Pool):
    """A batch whose first row asks for nothing is judged row by row, each in a call of its own."""

    def can(self, handles: Any, num_new: Any = 1) -> bool:
        """Make a call per row."""
        if np.ndim(num_new) and num_new[0] == 0:
            return all([super(LooksAtEachRowAlone, self).can([int(h)], 1) for h in handles])
        return super().can(handles, num_new)


def batch(Pool: Any, rows: int) -> tuple[Any, np.ndarray]:
    pool = Pool(4 * rows + 1, 16, max_seqs=rows, max_blocks_per_seq=4, seed=1)
    return pool, np.array([pool.open(16) for _ in range(rows)], np.int64)


@planted(SumsIn32Bits)
def test_can_says_what_step_would_whatever_the_rows_ask_for(Pool, Plan):
    """Zeros first, zeros between, and numbers whose sums pass 32 and 64 bits."""
    rows = 6
    for new in (
        [0] * rows,
        [0, *[1] * (rows - 1)],
        [1, 0] * 3,
        [0, 64, 64, 64, 64, 64],
        [0, 65, 0, 0, 0, 0],
        [0, 2**31 - 1, 0, 0, 0, 0],
        [0, 2**31, 2**31, 0, 0, 0],
        [2**62] * rows,
        [0, *[2**63 - 1] * 5],
    ):
        pool, handles = batch(Pool, rows)
        plan = Plan(pool, rows, 1 << 20)
        got = [pool.can(handles, np.array(new, np.int64)), pool.can(handles, new), pool.can(handles.tolist(), new)]
        try:
            pool.step(plan, handles, np.array(new, np.int64))
            expected = True
        except (CapacityExceeded, OutOfBlocks):
            expected = False
        assert got == [expected] * 3, new
        pool.check()


def cpu_seconds(*calls: Any) -> list[float]:
    """The best of some rounds of each call, in CPU time; they take turns, for a CPU may slow down in between."""
    best = [float("inf")] * len(calls)
    for _ in range(40):
        for k, call in enumerate(calls):
            start = time.process_time()
            for _ in range(10):
                call()
            best[k] = min(best[k], time.process_time() - start)
    return [max(seconds, 1e-6) for seconds in best]


@planted(broken(Pool=LooksAtEachRowAlone), model=False)
def test_can_with_a_first_row_of_no_tokens_costs_what_it_costs_otherwise(Pool, Plan):
    """It took the slow way through the whole batch once."""
    pool, handles = batch(Pool, ROWS)
    ones = np.ones(ROWS, np.int32)
    zero_first = ones.copy()
    zero_first[0] = 0
    first, others = cpu_seconds(lambda: pool.can(handles, zero_first), lambda: pool.can(handles, ones))
    assert first < 1.6 * others
