"""Compare the allocator with one in plain Python: nanoseconds of CPU time per operation.

Both make the same blocks move, and hand out tables, lengths and slots in every step. Contestants alternate, so the
ratios hold on a busy machine.
"""

from __future__ import annotations

import argparse
import json
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from typing import Any, NamedTuple

import numpy as np

from kvpool import Plan, Pool
from kvpool.cli.bench.measure import Contestant, race
from kvpool.cli.bench.options import LIST, NUMBER, Option, declare, number, numbers
from kvpool.cli.console import progress, whole

BLOCK_SIZE, NUM_BLOCKS = 16, 20_000
STEPS = 256  # of a decode
MOST_ROWS, MOST_TOKENS = 2**13, 2**17  # what the allocator in Python takes seconds for
OPTIONS: tuple[Option, ...] = (
    ("batch", LIST, "1,64,256", "sequences of a decode step"),
    ("prompt", NUMBER, "4k", "tokens of a prompt and of a sequence that is forked"),
    ("block-size", NUMBER, str(BLOCK_SIZE), "tokens per block"),
    ("repetitions", NUMBER, "15", "rounds"),
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options."""
    declare(parser, OPTIONS)


def run(args: argparse.Namespace) -> int:
    """Measure, and print a table."""
    repetitions = whole("--repetitions", args.repetitions)
    batches = numbers("--batch", args.batch, most=MOST_ROWS)
    prompt = number("--prompt", args.prompt, most=MOST_TOKENS)
    block_size = number("--block-size", args.block_size, most=1024)
    most = 1 + max(max(batches) * -(-STEPS // block_size), 2 * -(-prompt // block_size))
    sizes = Sizes(max(most, NUM_BLOCKS), block_size, max(batches), prompt)
    rows = []
    with progress(len(batches) + 2, args.json) as show:
        for name, make in cases(sizes, batches):
            show(name)
            core, plain = make()
            result = race(core, [plain], repetitions, clock=time.process_time)
            ours, theirs = result.yardstick.best, result.timings[plain.name].best
            rows.append({"operation": name, "kvpool_ns": ours * 1e9, "python_ns": theirs * 1e9, "ratio": theirs / ours})
    if args.json:
        print(json.dumps({"block_size": block_size, "num_blocks": sizes.num_blocks, "rows": rows}, indent=2))
        return 0
    print(f"{'operation':44}{'kvpool':>12}{'plain Python':>14}{'ratio':>8}")
    for row in rows:
        print(f"{row['operation']:44}{row['kvpool_ns']:>9,.0f} ns{row['python_ns']:>11,.0f} ns{row['ratio']:>7.0f}x")
    return 0


class PlainAllocator:
    """A refcounting allocator of blocks as tutorials write it, and several engines; copy-on-write is left out.

    A deque of free ids, a list of reference counts, lists as tables, and a padded table built in every step.

    Parameters
    ----------
    num_blocks, block_size : int
    reserved : int
        So many of the first blocks are never handed out.
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


class Sizes(NamedTuple):
    """What is measured."""

    num_blocks: int
    block_size: int
    batch: int  # the largest
    prompt: int  # tokens

    def pool_and_plan(self) -> tuple[Pool, Plan]:
        """Return a pool whose steps are done as soon as they are made."""
        pool = Pool(self.num_blocks, self.block_size, max_seqs=max(1024, self.batch), in_order=True)
        return pool, Plan(pool, self.batch, max(self.batch, self.prompt))

    def plain(self) -> PlainAllocator:
        """Return the allocator in Python."""
        return PlainAllocator(self.num_blocks, self.block_size)


Contest = tuple[Contestant, Contestant]  # the core's turn and the Python allocator's


def cases(sizes: Sizes, batches: Sequence[int]) -> Iterator[tuple[str, Callable[[], Contest]]]:
    """Name each operation, and what makes its contestants."""
    for rows in batches:
        yield f"decode step, {rows} in the batch", partial(decode, sizes, rows)
    yield f"fork and close a sequence of {sizes.prompt} tokens", partial(fork, sizes)
    yield f"open, prefill {sizes.prompt} tokens, close", partial(prompt, sizes)


def decode(sizes: Sizes, rows: int) -> Contest:
    """One token for each sequence."""
    (pool, plan), plain = sizes.pool_and_plan(), sizes.plain()

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


def fork(sizes: Sizes) -> Contest:
    """A fork shares all blocks of its parent."""
    (pool, plan), plain = sizes.pool_and_plan(), sizes.plain()
    parent, original = pool.open(), plain.open()
    pool.step(plan, [parent], sizes.prompt)
    plain.step([original], sizes.prompt)
    return (
        _repeated("kvpool", lambda: pool.close(pool.fork(parent)), 1000),
        _repeated("python", lambda: plain.close(plain.fork(original)), 100),
    )


def prompt(sizes: Sizes) -> Contest:
    """A request that ends after its prompt."""
    (pool, plan), plain = sizes.pool_and_plan(), sizes.plain()

    def ours() -> None:
        handle = pool.open()
        pool.step(plan, [handle], sizes.prompt)
        pool.close(handle)

    def theirs() -> None:
        name = plain.open()
        plain.step([name], sizes.prompt)
        plain.close(name)

    return _repeated("kvpool", ours, 100), _repeated("python", theirs, 10)


def _repeated(name: str, call: Callable[[], Any], calls: int) -> Contestant:
    def run() -> None:
        for _ in range(calls):
            call()

    return Contestant(name, run, calls)
