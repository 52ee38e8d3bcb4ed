"""The scheduler with a model that costs nothing: `schedule` and `update`, the allocator included.

Decoding: S sequences, one token each, nothing else. Mixed: requests of 256 prompt tokens and 64 generated ones on 256
slots, in chunks of 256 and steps of 1,024 tokens; who ends is replaced in the next step. The Python scheduler has the
same decisions to take and none of the others (no cache, no samples, no preemption).
"""

import numpy as np
import pytest

import kvpool
from benchmarks.scheduler_baseline import PythonScheduler

BLOCK_SIZE = 16
PROMPT = 32
STEPS = 50
ROUNDS = 20
LENGTH = STEPS * (ROUNDS + 8)
SIZES = [16, 64, 256]
MIXED_ROWS, MIXED_PROMPT, MIXED_TOKENS = 256, 256, 64
BUDGET = 1024


def kvpool_scheduler(rows, tokens, **options):
    """Return a scheduler over a pool in which so many sequences of so many tokens fit."""
    pool = kvpool.Pool(rows * (tokens // BLOCK_SIZE + 2) + 1, BLOCK_SIZE, max_seqs=rows)
    return kvpool.Scheduler(pool, max_running=rows, prefill_chunk=256, **options)


def python_scheduler(rows, tokens, **options):
    """Return the same in Python."""
    num_blocks = rows * (tokens // BLOCK_SIZE + 2)
    return PythonScheduler(num_blocks, BLOCK_SIZE, max_running=rows, prefill_chunk=256, **options)


def add(scheduler, prompt, max_tokens):
    """Add a request to either."""
    if isinstance(scheduler, kvpool.Scheduler):
        scheduler.add(kvpool.Request(prompt, max_tokens, eos=(2,)))
    else:
        scheduler.add(prompt.tolist(), max_tokens, {2})


def turn(scheduler, tokens):
    """One step of a model that always says 5; return how many tokens were sampled."""
    step = scheduler.schedule()
    scheduler.update(step, tokens[: len(step.sample_at)])
    return len(step.sample_at)


@pytest.mark.benchmark(group="scheduler, decoding")
@pytest.mark.parametrize("rows", SIZES)
@pytest.mark.parametrize("who", ["kvpool", "python"])
def bench_scheduler_decode(measure, rows, who):
    make = kvpool_scheduler if who == "kvpool" else python_scheduler
    scheduler = make(rows, LENGTH + PROMPT, max_step_tokens=8192)
    tokens = np.full(rows, 5, np.int32)
    for _ in range(rows):
        add(scheduler, np.ones(PROMPT, np.int32), LENGTH)
    assert turn(scheduler, tokens) == rows

    def run():
        for _ in range(STEPS):
            scheduler.update(scheduler.schedule(), tokens)

    rounds = 3 if who == "python" else ROUNDS
    measure(run, STEPS, row=f"scheduler step, {rows} decoding", who=who, rounds=rounds, rows=rows)


@pytest.mark.benchmark(group="scheduler, mixed")
@pytest.mark.parametrize("who", ["kvpool", "python"])
def bench_scheduler_mixed(measure, who):
    make = kvpool_scheduler if who == "kvpool" else python_scheduler
    scheduler = make(MIXED_ROWS, MIXED_PROMPT + MIXED_TOKENS, max_step_tokens=BUDGET)
    tokens = np.full(2 * MIXED_ROWS, 5, np.int32)
    prompt = np.ones(MIXED_PROMPT, np.int32)
    rounds = 3 if who == "python" else 10
    for _ in range(MIXED_ROWS * (rounds + 6)):
        add(scheduler, prompt, MIXED_TOKENS)
    for _ in range(4 * MIXED_TOKENS):  # until finishes and admissions are spread
        turn(scheduler, tokens)

    def run():
        done = 0
        while done < MIXED_ROWS * MIXED_TOKENS // 4:
            done += turn(scheduler, tokens)

    name = f"scheduler, per token, {MIXED_ROWS} running, prompts of {MIXED_PROMPT}, {MIXED_TOKENS} tokens each"
    measure(run, MIXED_ROWS * MIXED_TOKENS // 4, row=name, who=who, rounds=rounds)
