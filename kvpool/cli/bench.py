"""Compare the allocator with one in plain Python: nanoseconds of CPU time per operation.

Both make the same blocks move, and hand out tables, lengths and slots in every step. They take turns, and the least
times count, so the ratios hold on a busy machine.
"""

from __future__ import annotations

import argparse
import json
import re
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import numpy as np

from kvpool import Plan, Pool
from kvpool.cli.console import INT_MAX, progress, whole

BLOCK_SIZE, NUM_BLOCKS = 16, 20_000
STEPS = 256  # of a decode
MOST_ROWS, MOST_TOKENS = 2**13, 2**17  # what the allocator in Python takes seconds for
OPTIONS = (
    ("batch", "A,B,...", "1,64,256", "sequences of a decode step"),
    ("prompt", "N", "4k", "tokens of a prompt and of a sequence that is forked"),
    ("block-size", "N", str(BLOCK_SIZE), "tokens per block"),
    ("repetitions", "N", "15", "rounds, of which the fastest counts"),
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options."""
    for name, shown, default, text in OPTIONS:
        parser.add_argument(f"--{name}", metavar=shown, default=default, help=f"{text} (default: %(default)s)")


def run(args: argparse.Namespace) -> int:
    """Measure, and print a table."""
    repetitions = whole("--repetitions", args.repetitions)
    batches = numbers("--batch", args.batch, most=MOST_ROWS)
    prompt = number("--prompt", args.prompt, most=MOST_TOKENS)
    block_size = number("--block-size", args.block_size, most=1024)
    most = 1 + max(max(batches) * -(-STEPS // block_size), 2 * -(-prompt // block_size))
    num_blocks, rows = max(most, NUM_BLOCKS), []
    with progress(len(batches) + 2, args.json) as show:
        for name, *both in cases(num_blocks, block_size, batches, prompt):
            show(name)
            ours, theirs = least_seconds(both, repetitions)
            rows.append({"operation": name, "kvpool_ns": ours * 1e9, "python_ns": theirs * 1e9, "ratio": theirs / ours})
    if args.json:
        print(json.dumps({"block_size": block_size, "num_blocks": num_blocks, "rows": rows}, indent=2))
        return 0
    print(f"{'CPU time of an operation':44}{'kvpool':>12}{'plain Python':>14}{'ratio':>8}")
    for row in rows:
        print(f"{row['operation']:44}{row['kvpool_ns']:>9,.0f} ns{row['python_ns']:>11,.0f} ns{row['ratio']:>7.0f}x")
    return 0


def numbers(option: str, text: str, most: int = INT_MAX) -> tuple[int, ...]:
    """Return the numbers in ``"1k,4096"`` in ascending order."""
    return tuple(sorted({number(option, part, most) for part in text.split(",")}))


def number(option: str, text: str, most: int = INT_MAX) -> int:
    """Return ``"4k"`` as 4096."""
    found = re.fullmatch(r"(\d{1,9})k", text.lower())
    return whole(option, str(int(found[1]) * 1024) if found else text, most=most)


Timed = tuple[Callable[[], object], int]  # what is timed, and how many operations it does


def least_seconds(both: Sequence[Timed], rounds: int) -> list[float]:
    """Return the least CPU time per operation of each. They take turns, once before that without timing."""
    least = [float("inf") for _ in both]
    for call, _ in both:
        call()
    for _ in range(rounds):
        for at, (call, count) in enumerate(both):
            begin = time.process_time()
            call()
            least[at] = min(least[at], (time.process_time() - begin) / count)
    return least


class PlainAllocator:
    """A refcounting allocator of blocks as tutorials write it, and several engines; copy-on-write is left out.

    A deque of free ids, a list of reference counts, lists as tables, and a padded table built in every step. The first
    `reserved` blocks are never handed out.
    """

    def __init__(self, num_blocks: int = NUM_BLOCKS, block_size: int = BLOCK_SIZE, reserved: int = 0) -> None:
        self.block_size = block_size
        self.free_ids = deque(range(reserved, num_blocks))
        self.references = [0] * num_blocks
        self.tables: dict[int, list[int]] = {}
        self.lengths: dict[int, int] = {}
        self.made = 0

    def alloc(self, n: int = 1) -> list[int]:
        """Take `n` blocks; return their ids."""
        if n > len(self.free_ids):
            raise MemoryError(f"{n} blocks asked for, {len(self.free_ids)} free")
        ids = [self.free_ids.popleft() for _ in range(n)]
        for block in ids:
            self.references[block] = 1
        return ids

    def free(self, ids: Iterable[int]) -> None:
        """Drop one reference of each block."""
        for block in ids:
            if self.references[block] == 0:
                raise ValueError(f"block {block} is free already")
            self.references[block] -= 1
            if self.references[block] == 0:
                self.free_ids.append(block)

    def open(self) -> int:
        """Return the name of a new empty sequence."""
        self.made += 1
        self.tables[self.made], self.lengths[self.made] = [], 0
        return self.made

    def fork(self, name: int) -> int:
        """Return the name of a new sequence that shares every block of `name`."""
        child = self.open()
        self.tables[child], self.lengths[child] = list(self.tables[name]), self.lengths[name]
        for block in self.tables[child]:
            self.references[block] += 1
        return child

    def close(self, name: int) -> None:
        """Drop a sequence and its references."""
        self.free(reversed(self.tables.pop(name)))
        del self.lengths[name]

    def step(self, names: Sequence[int], num_new: int = 1) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Append `num_new` tokens to each sequence; return block_tables, seq_lens, slot_mapping."""
        slots, size = [], self.block_size
        for name in names:
            table, start = self.tables[name], self.lengths[name]
            for position in range(start, start + num_new):
                if position == len(table) * size:
                    table += self.alloc()
                slots.append(table[position // size] * size + position % size)
            self.lengths[name] = start + num_new
        width = max(len(self.tables[name]) for name in names)
        padded = [self.tables[name] + [0] * (width - len(self.tables[name])) for name in names]
        lengths = [self.lengths[name] for name in names]
        return np.array(padded, np.int32), np.array(lengths, np.int32), np.array(slots, np.int32)


def cases(num_blocks: int, block_size: int, batches: Sequence[int], prompt: int) -> Iterator[tuple[str, Timed, Timed]]:
    """Yield each operation, and what makes the core's turn and that of the allocator in Python."""

    def allocators() -> tuple[Pool, Plan, PlainAllocator]:
        rows = max(batches)
        pool = Pool(num_blocks, block_size, max_seqs=max(1024, rows), in_order=True)
        return pool, Plan(pool, rows, max(rows, prompt)), PlainAllocator(num_blocks, block_size)

    def growing(rows: int, steps: int, tokens: int) -> tuple[Callable[[], None], Callable[[], None]]:
        pool, plan, plain = allocators()

        def ours() -> None:
            handles = np.array([pool.open() for _ in range(rows)])
            for _ in range(steps):
                pool.step(plan, handles, tokens)
            pool.close(handles)

        def theirs() -> None:
            names = [plain.open() for _ in range(rows)]
            for _ in range(steps):
                plain.step(names, tokens)
            for name in names:
                plain.close(name)

        return ours, theirs

    for rows in batches:
        ours, theirs = growing(rows, STEPS, 1)
        yield f"decode step, {rows} in the batch", (ours, STEPS), (theirs, STEPS)
    pool, plan, plain = allocators()
    parent, original = pool.open(), plain.open()
    pool.step(plan, [parent], prompt)
    plain.step([original], prompt)
    both = (
        _repeated(lambda: pool.close(pool.fork(parent)), 1000),
        _repeated(lambda: plain.close(plain.fork(original)), 100),
    )
    yield f"fork and close a sequence of {prompt} tokens", *both
    ours, theirs = growing(1, 1, prompt)
    yield f"open, prefill {prompt} tokens, close", _repeated(ours, 100), _repeated(theirs, 10)


def _repeated(call: Callable[[], Any], calls: int) -> Timed:
    def run() -> None:
        for _ in range(calls):
            call()

    return run, calls
