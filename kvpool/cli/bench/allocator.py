"""Compare the allocator with one in plain Python: nanoseconds of CPU time per operation.

The Python allocator keeps a list of free blocks, a reference count per block and a list of blocks per sequence, as
tutorials do. Both do the same work. Contestants alternate, so the ratios hold on a busy machine.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

from kvpool import Plan, Pool
from kvpool.cli.bench.measure import Contestant, race
from kvpool.cli.console import whole

BLOCK_SIZE, NUM_BLOCKS, PROMPT = 16, 20_000, 4096
STEPS = 256  # of a decode: every sequence takes 16 blocks on the way


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options."""
    parser.add_argument("--repetitions", metavar="N", default="15", help="rounds (default: %(default)s)")


def run(args: argparse.Namespace) -> int:
    """Measure, and print a table."""
    repetitions = whole("--repetitions", args.repetitions)
    rows = []
    for name, core, plain in cases():
        result = race(core, [plain], repetitions, clock=time.process_time)
        ours, theirs = result.yardstick.best, result.timings[plain.name].best
        rows.append({"operation": name, "kvpool_ns": ours * 1e9, "python_ns": theirs * 1e9, "ratio": theirs / ours})
    if args.json:
        print(json.dumps({"block_size": BLOCK_SIZE, "num_blocks": NUM_BLOCKS, "rows": rows}, indent=2))
        return 0
    print(f"{'operation':44}{'kvpool':>12}{'plain Python':>14}{'ratio':>8}")
    for row in rows:
        print(f"{row['operation']:44}{row['kvpool_ns']:>9,.0f} ns{row['python_ns']:>11,.0f} ns{row['ratio']:>7.0f}x")
    return 0


class PlainAllocator:
    """Blocks and sequences in Python's own lists."""

    def __init__(self) -> None:
        self.free = list(range(NUM_BLOCKS - 1, 0, -1))
        self.references = [0] * NUM_BLOCKS
        self.tables: dict[int, list[int]] = {}
        self.lengths: dict[int, int] = {}
        self.made = 0

    def open(self) -> int:
        """A new empty sequence."""
        self.made += 1
        self.tables[self.made], self.lengths[self.made] = [], 0
        return self.made

    def step(self, sequences: list[int], n: int) -> np.ndarray:
        """`n` tokens for each; returns their slots."""
        slots = []
        for name in sequences:
            table, start = self.tables[name], self.lengths[name]
            while len(table) * BLOCK_SIZE < start + n:
                table.append(self.free.pop())
                self.references[table[-1]] = 1
            slots += [table[k // BLOCK_SIZE] * BLOCK_SIZE + k % BLOCK_SIZE for k in range(start, start + n)]
            self.lengths[name] = start + n
        return np.array(slots, np.int32)

    def fork(self, name: int) -> int:
        """A sequence with the same blocks."""
        child = self.open()
        self.tables[child], self.lengths[child] = list(self.tables[name]), self.lengths[name]
        for block in self.tables[child]:
            self.references[block] += 1
        return child

    def close(self, name: int) -> None:
        """Give the blocks back."""
        for block in self.tables.pop(name):
            self.references[block] -= 1
            if not self.references[block]:
                self.free.append(block)
        del self.lengths[name]


def cases() -> Iterator[tuple[str, Contestant, Contestant]]:
    """Name, the core's turn and the Python allocator's, of each operation."""
    for rows in (1, 64, 256):
        yield f"decode step, {rows} in the batch", *decode(rows)
    yield f"fork and close a sequence of {PROMPT} tokens", *fork()
    yield f"open, prefill {PROMPT} tokens, close", *prompt()


def pool_and_plan(rows: int) -> tuple[Pool, Plan]:
    """A pool whose steps are done as soon as they are made."""
    pool = Pool(NUM_BLOCKS, BLOCK_SIZE, max_seqs=1024, in_order=True)
    return pool, Plan(pool, rows, max(rows, PROMPT))


def decode(rows: int) -> tuple[Contestant, Contestant]:
    """One token for each sequence."""
    pool, plan = pool_and_plan(rows)
    plain = PlainAllocator()

    def ours() -> None:
        handles = np.array([pool.open() for _ in range(rows)])
        for _ in range(STEPS):
            pool.step(plan, handles, 1)
        pool.close(handles)

    def theirs() -> None:
        names = [plain.open() for _ in range(rows)]
        for _ in range(STEPS):
            plain.step(names, 1)
        for name in names:
            plain.close(name)

    return Contestant("kvpool", ours, STEPS), Contestant("python", theirs, STEPS)


def fork() -> tuple[Contestant, Contestant]:
    """A fork shares all blocks of its parent."""
    pool, plan = pool_and_plan(1)
    parent, plain = pool.open(), PlainAllocator()
    pool.step(plan, [parent], PROMPT)
    original = plain.open()
    plain.step([original], PROMPT)
    return (
        _repeated("kvpool", lambda: pool.close(pool.fork(parent)), 1000),
        _repeated("python", lambda: plain.close(plain.fork(original)), 100),
    )


def prompt() -> tuple[Contestant, Contestant]:
    """A request that ends after its prompt."""
    pool, plan = pool_and_plan(1)
    plain = PlainAllocator()

    def ours() -> None:
        handle = pool.open()
        pool.step(plan, [handle], PROMPT)
        pool.close(handle)

    def theirs() -> None:
        name = plain.open()
        plain.step([name], PROMPT)
        plain.close(name)

    return _repeated("kvpool", ours, 100), _repeated("python", theirs, 10)


def _repeated(name: str, call: Callable[[], Any], calls: int) -> Contestant:
    def run() -> None:
        for _ in range(calls):
            call()

    return Contestant(name, run, calls)
