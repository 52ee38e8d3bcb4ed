"""Instructions per single operation at 1,000 to 1,000,000 blocks and with 1 to 8 layer groups, counted by callgrind.

Beside them p99 / p50 of times. Counts do not depend on caches, clocks or neighbours.
"""

from __future__ import annotations

import gc
import json
import statistics
import sys
import time
from itertools import repeat

from benchmarks import callgrind
from proof.figure import Budget, Figure
from proof.singles import BATCH, GROUP_CALLS, GROUP_COUNTS, Operation, name_of, operations

NAME = "complexity"
TARGET = "instructions per single operation: 1k to 1M blocks within 5 %, linear at most in 1 to 8 groups"
COMMAND = "python -m proof complexity"
SIZES = (1_000, 10_000, 100_000, 1_000_000)
QUICK_SIZES = (1_000, 20_000)
WITHIN = 0.05
RUNS, WARM_UPS = 7, 4  # Python rewrites the code of a function in its first runs
TIMED = 1500  # single operations


def count(sizes: tuple[int, ...], careless: bool) -> None:
    """Under callgrind: dump the instructions of each operation at each size."""
    marks = callgrind.marks()
    marks.count_prepare()
    gc.disable()
    for size in (0, *sizes):
        found = operations(size, careless) if size else {"nothing": Operation(lambda: None)}
        for name, it in found.items():
            it.enter()
            for _ in repeat(None, WARM_UPS):
                it.run()
                it.undo()
            mark = f"{name}|{size}".encode()
            for _ in repeat(None, RUNS):
                marks.count_toggle()
                it.run()
                marks.count_toggle()
                marks.count_dump(mark)
                it.undo()
            it.leave()


def counted(sizes: tuple[int, ...], careless: bool) -> dict[str, dict[int, float]]:
    """Operation -> blocks -> median of instructions, what an empty operation costs taken off."""
    found = callgrind.counted("-m", "proof.complexity", json.dumps([sizes, careless]), PYTHONHASHSEED="0")
    runs: dict[str, dict[int, list[int]]] = {}
    for mark, counts in found.items():
        name, _, size = mark.rpartition("|")
        runs.setdefault(name, {})[int(size)] = counts
    nothing = statistics.median(runs.pop("nothing")[0])
    return {
        name: {size: (statistics.median(by[size]) - nothing) / BATCH for size in sorted(by)}
        for name, by in sorted(runs.items())
    }


def bent(counts: dict[str, dict[int, float]]) -> dict[str, float]:
    """Call -> what a group adds behind half of the groups, over what one adds up to there; 1: linear."""
    few, half, many = GROUP_COUNTS[0], GROUP_COUNTS[-2], GROUP_COUNTS[-1]
    found = {}
    for call in GROUP_CALLS:
        cost = {n: min(counts[name_of(call, n)].values()) for n in GROUP_COUNTS}
        found[call] = (cost[many] - cost[half]) / (many - half) / ((cost[half] - cost[few]) / (half - few))
    return found


def tails(size: int) -> dict[str, float]:
    """Operation -> p99 / p50 of the times of single operations."""
    ratios = {}
    for name, it in operations(size, batch=1).items():
        it.enter()
        times = []
        for _ in repeat(None, TIMED):
            begin = time.perf_counter_ns()
            it.run()
            times.append(time.perf_counter_ns() - begin)
            it.undo()
        it.leave()
        times.sort()
        ratios[name] = times[TIMED * 99 // 100] / times[TIMED // 2]
    return ratios


def measure(budget: Budget, careless: bool = False) -> Figure:
    """Count, compare the sizes with the smallest, and time the largest beside."""
    start = time.monotonic()
    if not callgrind.is_here():
        return Figure(NAME, TARGET, "not measured: no valgrind here", False, COMMAND, 0.0)
    full = budget.share >= 1
    counts = counted(SIZES if full and not careless else QUICK_SIZES, careless)
    spread = {name: max(by.values()) / min(by.values()) - 1 for name, by in counts.items()}
    worst = max(spread, key=spread.__getitem__)
    lines = [f"{name}: {', '.join(f'{n:,.0f}' for n in by.values())} instructions" for name, by in counts.items()]
    if full and not careless:
        small, large = tails(SIZES[0]), tails(SIZES[-1])
        lines.append("p99 / p50 at 1k, 1M: " + ", ".join(f"{n} {small[n]:.1f} {large[n]:.1f}" for n in small))
    measured = f"{len(counts)} operations, within {spread[worst]:.1%} ({worst})"
    holds = len(counts) == len(operations(SIZES[0], careless)) and spread[worst] <= WITHIN
    if not careless:
        bends = bent(counts)
        most = max(bends, key=bends.__getitem__)
        measured += f"; groups 5 to 8 cost {bends[most]:.2f} of groups 2 to 4 ({most})"
        holds &= bends[most] <= 1 + WITHIN
    return Figure(NAME, TARGET, measured, holds, COMMAND, time.monotonic() - start, "\n".join(lines))


def planted(budget: Budget) -> Figure:
    """Operations that look at the whole pool."""
    return measure(budget, careless=True)


if __name__ == "__main__":
    sizes_, careless_ = json.loads(sys.argv[1])
    count(tuple(sizes_), careless_)
