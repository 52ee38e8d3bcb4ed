"""The decode step: one token more for each of S sequences of about 4,096 tokens, in blocks of 16.

Wanted of every step: block_tables, seq_lens, slot_mapping. The lengths are staggered, so that in each step
one row in 16 takes a block. The C floor has the same outputs in its own persistent arrays; the Python
allocator builds its padded table in every step.
"""

import numpy as np
import pytest

import kvpool
from benchmarks.baselines import Floor
from kvpool.cli.bench import PlainAllocator

BLOCK_SIZE = 16
CONTEXT = 4096
STEPS = 16
ROUNDS = 60
WIDTH = (CONTEXT + BLOCK_SIZE) // BLOCK_SIZE + STEPS * (ROUNDS + 3) // BLOCK_SIZE + 2
SIZES = [1, 8, 64, 256, 1024]


def start_lengths(rows):
    """Return the rows' lengths before the first step: 4,096 and up to 15 more."""
    return CONTEXT + np.arange(rows) % BLOCK_SIZE


def decoding_pool(rows, *, in_order=True, groups=None):
    """Return a pool with `rows` sequences of `start_lengths`, and their handles."""
    pool = kvpool.Pool(
        rows * WIDTH + 1, BLOCK_SIZE, max_seqs=rows, max_blocks_per_seq=WIDTH, in_order=in_order, groups=groups
    )
    handles = np.array([pool.open() for _ in range(rows)], np.int64)
    prompt = kvpool.Plan(pool, 1, CONTEXT + BLOCK_SIZE)
    for handle, length in zip(handles.tolist(), start_lengths(rows).tolist(), strict=True):
        pool.step(prompt, [handle], length)
        if not in_order:
            pool.done(prompt)
    return pool, handles


def floor_decode(rows):
    """Return the C floor's `STEPS` decode steps, from the same start."""
    floor = Floor(rows * WIDTH, rows=rows, width=WIDTH, block_size=BLOCK_SIZE)
    floor.set_lengths(start_lengths(rows))
    return floor.steps(np.arange(rows, dtype=np.int32), np.empty(rows, np.int32), 1, STEPS)


def python_decode(rows):
    """Return the Python allocator's `STEPS` decode steps, from the same start."""
    pool = PlainAllocator(rows * WIDTH, BLOCK_SIZE)
    seq_ids = [pool.open() for _ in range(rows)]
    for seq_id, length in zip(seq_ids, start_lengths(rows).tolist(), strict=True):
        pool.step([seq_id], length)

    def run():
        for _ in range(STEPS):
            pool.step(seq_ids)

    return run


@pytest.mark.benchmark(group="decode step")
@pytest.mark.parametrize("rows", SIZES)
@pytest.mark.parametrize("who", ["kvpool", "floor", "python"])
def bench_decode(measure, rows, who):
    if who == "floor":
        run = floor_decode(rows)
    elif who == "python":
        run = python_decode(rows)
    else:
        pool, handles = decoding_pool(rows)
        step, plan = pool.step, kvpool.Plan(pool, rows)

        def run():
            for _ in range(STEPS):
                step(plan, handles, 1)

    rounds = 3 if who == "python" else ROUNDS
    measure(run, STEPS, row=f"decode step in order, {rows} sequences", who=who, rounds=rounds, rows=rows)


@pytest.mark.benchmark(group="decode step with fences")
@pytest.mark.parametrize("rows", SIZES)
def bench_decode_fenced(measure, rows, groups=None):
    """Step and `done`, the default: two plans in turn, step i runs while step i - 1 is still pending."""
    pool, handles = decoding_pool(rows, in_order=False, groups=groups)
    step, done = pool.step, pool.done
    first, second = kvpool.Plan(pool, rows), kvpool.Plan(pool, rows)
    step(second, handles, 1)

    def run():
        for _ in range(STEPS // 2):
            step(first, handles, 1)
            done(second)
            step(second, handles, 1)
            done(first)

    measure(run, STEPS, row=f"decode step and done, {rows} sequences", who="kvpool", rounds=ROUNDS - 2, rows=rows)
