"""Fork, append and free from Python, ten million times: every block comes back, and the process does not grow."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from itertools import repeat
from typing import Any

import kvpool
from proof.figure import Budget, Figure
from tests.verify import builds

NAME = "soak"
TARGET = "1e7 fork/append/free: 0 blocks lost, 0 bytes leaked (LSan), RSS growth <= 64 KiB"
COMMAND = "python -m proof soak"
ROUNDS = 10_000_000
LEAK_ROUNDS = 600_000  # under LeakSanitizer, which takes 40 us for each
GROWTH = 64 * 1024


def resident() -> int:
    """Bytes of this process that are in memory."""
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * os.sysconf("SC_PAGESIZE")


def soak(rounds: int, careless: bool = False) -> dict[str, Any]:
    """Fork a sequence, append a token to the child (a copy of the shared tail), free it: `rounds` times.

    The first tenth warms up; what the process gains in the rest counts.
    """
    pool = kvpool.Pool(64, 4, max_seqs=8, in_order=True, seed=1)
    plan, parent = kvpool.Plan(pool, 1, 6), pool.open()
    pool.step(plan, [parent], 6)
    free, kept = pool.blocks.num_blank, []

    def run(times: int) -> None:
        for _ in repeat(None, times):
            child = pool.fork(parent)
            pool.step(plan, child, 1)
            pool.close(child)

    run(rounds // 10)
    before = resident()
    run(rounds - rounds // 10)
    grown = resident() - before
    if careless:
        pool.blocks.alloc()
        kept.append(bytearray(1 << 20))
        grown = resident() - before
    pool.check()
    return {
        "rounds": rounds,
        "lost": free - pool.blocks.num_blank,
        "grown": grown,
        "sequences": pool.stats().sequences - 1,
    }


def leaks(rounds: int, careless: bool) -> str:
    """What LeakSanitizer says of a shorter soak; empty: nothing is left."""
    code = "import ctypes; ctypes.CDLL(None).malloc(300)\n" if careless else ""
    code += f"from proof import soak; soak.soak({rounds})"
    done = builds.run("asan", ["-c", code], leaks=True)
    if done.returncode == 0:
        return ""
    found = [line for line in done.stderr.splitlines() if "SUMMARY" in line]
    return found[0] if found else f"the process ended with {done.returncode}: {done.stderr[-300:]}"


def measure(budget: Budget, careless: bool = False) -> Figure:
    """Soak in the build in place, a shorter one under LeakSanitizer (not in the short form)."""
    start, rounds = time.monotonic(), max(budget.of(ROUNDS), 50_000)
    argv = [sys.executable, "-m", "proof.soak", str(rounds), *(["careless"] if careless else [])]
    done = subprocess.run(argv, cwd=builds.ROOT, capture_output=True, text=True, check=True)
    result = json.loads(done.stdout)
    full = budget.share >= 1
    leaked = leaks(LEAK_ROUNDS, careless) if full else ""
    measured = f"{result['rounds']:,} rounds: {result['lost']} blocks lost, RSS +{result['grown'] // 1024} KiB"
    if full:
        measured += f", {leaked or f'0 bytes leaked in {LEAK_ROUNDS:,} rounds'}"
    holds = result["lost"] == result["sequences"] == 0 and result["grown"] <= GROWTH and not leaked
    return Figure(NAME, TARGET, measured, holds, COMMAND, time.monotonic() - start)


def planted(budget: Budget) -> Figure:
    """A soak that keeps a block, a megabyte, and loses 300 bytes."""
    return measure(budget, careless=True)


if __name__ == "__main__":
    print(json.dumps(soak(int(sys.argv[1]), sys.argv[2:] == ["careless"])))
