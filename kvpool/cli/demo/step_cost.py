"""Part (c): what one decode step of bookkeeping costs, beside the allocator that tutorials write."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from statistics import median
from typing import Any

import numpy as np

import kvpool
from kvpool.cli.demo.report import Claim, Outcome, Part
from kvpool.cli.demo.settings import Settings

MIN_RATIO = 10.0
"""The claim asks for this much. Measured ratios are far above it, so that a noisy machine does not decide."""


class ListAllocator:
    """A deque of free blocks, a list per sequence, the padded table rebuilt from the lists on every step.

    The form found in teaching code and in several Python engines. It does the same work as
    `kvpool.Pool.step` in steady decode: takes blocks, and hands out int32 block tables, lengths and slots.
    """

    def __init__(self, num_blocks: int, block_size: int) -> None:
        self.block_size = block_size
        self.free = deque(range(1, num_blocks))  # block 0 pads the tables, as in the pool
        self.refcount = [0] * num_blocks
        self.tables: list[list[int]] = []
        self.lens: list[int] = []

    def take(self) -> int:
        block = self.free.popleft()
        self.refcount[block] = 1
        return block

    def open(self, num_tokens: int) -> None:
        self.tables.append([self.take() for _ in range(-(-num_tokens // self.block_size))])
        self.lens.append(num_tokens)

    def step(self) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        slots = []
        for i, table in enumerate(self.tables):
            position = self.lens[i]
            if position == len(table) * self.block_size:
                table.append(self.take())
            slots.append(table[position // self.block_size] * self.block_size + position % self.block_size)
            self.lens[i] = position + 1
        width = max(map(len, self.tables))
        padded = [table + [0] * (width - len(table)) for table in self.tables]
        return np.array(padded, np.int32), np.array(self.lens, np.int32), np.array(slots, np.int32)


def seconds_per_step(step: Callable[[], Any], num_steps: int) -> float:
    """Return the mean time of `num_steps` calls."""
    start = time.perf_counter()
    for _ in range(num_steps):
        step()
    return (time.perf_counter() - start) / num_steps


def measure(batch: int, settings: Settings) -> dict[str, Any]:
    """Time both allocators on the same steady decode, in interleaved rounds of one block's worth of steps."""
    block_size = settings.block_size
    steps = block_size  # every sequence crosses a block boundary once in a round
    lengths = [settings.context - block_size + i % block_size for i in range(batch)]
    width = -(-(settings.context + (settings.rounds + 1) * steps) // block_size)
    num_blocks = batch * width + 1

    lists = ListAllocator(num_blocks, block_size)
    for num_tokens in lengths:
        lists.open(num_tokens)
    with kvpool.Pool(num_blocks, block_size, max_seqs=batch, max_blocks_per_seq=width) as pool:
        plan = kvpool.Plan(pool, max_rows=batch, max_tokens=sum(lengths))
        handles = np.array([pool.open() for _ in range(batch)], np.int64)
        pool.step(plan, handles, np.array(lengths, np.int32))
        pool.done(plan)

        def pool_step() -> None:
            pool.step(plan, handles)
            pool.done(plan)

        timings: dict[str, list[float]] = {"kvpool": [], "lists": []}
        for _ in range(settings.rounds):
            timings["kvpool"].append(seconds_per_step(pool_step, steps))
            timings["lists"].append(seconds_per_step(lists.step, steps))
        pool_step()
        tables, lens, slots = lists.step()
        same = (
            np.array_equal(plan.block_tables[:batch, : tables.shape[1]], tables)
            and np.array_equal(plan.seq_lens[:batch], lens)
            and np.array_equal(plan.slot_mapping[:batch], slots)
        )
    ours, theirs = median(timings["kvpool"]), median(timings["lists"])
    return {"same": bool(same), "kvpool_us": ours * 1e6, "lists_us": theirs * 1e6, "ratio": theirs / ours}


def run(settings: Settings, say: Callable[[str], None]) -> Outcome:
    """Measure each batch size; the claims are equal results and a ratio of at least `MIN_RATIO`."""
    rows = {}
    for batch in settings.batch_sizes:
        say(f"step cost, {batch} sequences")
        rows[batch] = measure(batch, settings)
    costs = "\n".join(
        f"{batch} sequences: {r['kvpool_us']:.1f} us; lists {r['lists_us']:.0f} us, {r['ratio']:.0f} x"
        for batch, r in rows.items()
    )
    steps = settings.rounds * settings.block_size + 1
    same = all(r["same"] for r in rows.values())
    claims = {
        "step_same_tables": Claim(same, f"after {steps} steps, {settings.context} tokens of context"),
        "step_cheaper": Claim(all(r["ratio"] >= MIN_RATIO for r in rows.values()), costs),
    }
    numbers = {f"sequences_{batch}": {k: v for k, v in r.items() if k != "same"} for batch, r in rows.items()}
    return Outcome(claims, {"context": settings.context, "min_ratio": MIN_RATIO, **numbers})


PART = Part(
    "step_cost",
    "one decode step of bookkeeping (step and done, wall time), beside a pure-Python allocator",
    {
        "step_same_tables": "same tables, lengths and slots",
        "step_cheaper": f"at least {MIN_RATIO:.0f} times cheaper",
    },
    run,
)
