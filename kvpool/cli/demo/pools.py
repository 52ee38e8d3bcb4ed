"""The parts that need no model: what a step of bookkeeping costs, and what a pool does that is too small."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

import kvpool
from kvpool.cli.bench.allocator import PlainAllocator
from kvpool.cli.bench.measure import Contestant, race
from kvpool.cli.demo.report import Claim, Outcome, Part, Settings
from kvpool.errors import OutOfBlocks

MIN_RATIO = 10.0
"""The claim asks for this much. Measured ratios are far above it, so that a noisy machine does not decide."""

# ---------------------------------------------------------------------- what a step costs


def measure(batch: int, settings: Settings) -> dict[str, Any]:
    """Time both allocators on the same steady decode, in interleaved rounds of one block's worth of steps."""
    block_size = settings.block_size
    steps = block_size  # every sequence crosses a block boundary once in a round
    lengths = np.array([settings.context - block_size + i % block_size for i in range(batch)], np.int32)
    width = -(-(settings.context + 3 * (settings.rounds + 1) * steps) // block_size)
    num_blocks = batch * width + 1

    plain = PlainAllocator(num_blocks, block_size, reserved=1)
    names = [plain.open() for _ in range(batch)]
    for name, num_tokens in zip(names, lengths.tolist(), strict=True):
        plain.step([name], num_tokens)
    with kvpool.Pool(num_blocks, block_size, max_seqs=batch, max_blocks_per_seq=width) as pool:
        plan = kvpool.Plan(pool, max_rows=batch, max_tokens=int(lengths.sum()))
        handles = np.array([pool.open() for _ in range(batch)], np.int64)
        pool.step(plan, handles, lengths)
        pool.done(plan)

        def pool_steps() -> None:
            for _ in range(steps):
                pool.step(plan, handles)
                pool.done(plan)

        def plain_steps() -> None:
            for _ in range(steps):
                plain.step(names)

        core, lists = Contestant("kvpool", pool_steps, steps), Contestant("lists", plain_steps, steps)
        result = race(core, [lists], settings.rounds)
        pool.step(plan, handles)
        pool.done(plan)
        tables, lens, slots = plain.step(names)
        same = (
            np.array_equal(plan.block_tables[:batch, : tables.shape[1]], tables)
            and np.array_equal(plan.seq_lens[:batch], lens)
            and np.array_equal(plan.slot_mapping[:batch], slots)
        )
    ours, theirs = result.yardstick.median, result.timings["lists"].median
    return {"same": bool(same), "kvpool_us": ours * 1e6, "lists_us": theirs * 1e6, "ratio": theirs / ours}


def run_step_cost(settings: Settings, say: Callable[[str], None]) -> Outcome:
    """Measure each batch size; the claims are equal results and a ratio of at least `MIN_RATIO`."""
    rows = {}
    for batch in settings.batch_sizes:
        say(f"step cost, {batch} sequences")
        rows[batch] = measure(batch, settings)
    costs = "\n".join(
        f"{batch} sequences: {r['kvpool_us']:.1f} us; lists {r['lists_us']:.0f} us, {r['ratio']:.0f} x"
        for batch, r in rows.items()
    )
    claims = {
        "step_same_tables": Claim(
            all(r["same"] for r in rows.values()), f"after all steps, {settings.context} tokens of context"
        ),
        "step_cheaper": Claim(all(r["ratio"] >= MIN_RATIO for r in rows.values()), costs),
    }
    numbers = {f"sequences_{batch}": r for batch, r in rows.items()}
    return Outcome(claims, {"context": settings.context, "min_ratio": MIN_RATIO, **numbers})


STEP_COST = Part(
    "step_cost",
    "one decode step of bookkeeping (step and done, wall time), beside a pure-Python allocator",
    {
        "step_same_tables": "same tables, lengths and slots",
        "step_cheaper": f"at least {MIN_RATIO:.0f} times cheaper",
    },
    run_step_cost,
)

# ---------------------------------------------------------------------- out of blocks


def run_out_of_blocks(settings: Settings, say: Callable[[str], None]) -> Outcome:
    """Grow three sequences by a block each, in a pool of eight blocks, until a step does not fit."""
    say("a pool that is too small")
    with kvpool.Pool(9, settings.block_size, max_seqs=4) as pool:
        plan = kvpool.Plan(pool, max_rows=3, max_tokens=16 * settings.block_size)
        handles = np.array([pool.open() for _ in range(3)], np.int64)
        error, steps, before = None, 0, pool.fingerprint()
        while error is None and steps < 16:
            before = pool.fingerprint()
            try:
                pool.step(plan, handles, settings.block_size)
                pool.done(plan)
                steps += 1
            except OutOfBlocks as exc:
                error = exc
        after = pool.fingerprint()
        pool.close(int(handles[-1]))  # what a scheduler does next: preempt one sequence, go on with the rest
        try:
            pool.step(plan, handles[:2], settings.block_size)
            pool.done(plan)
            pool.check()
            recovered = True
        except kvpool.KVPoolError:
            recovered = False
    message, short = (str(error), error.short_by) if error else ("", 0)
    claims = {
        "out_of_blocks_raised": Claim(error is not None, f"OutOfBlocks in step {steps + 1}, {short} block short"),
        "state_unchanged": Claim(
            error is not None and before == after, f"fingerprint {before:016x} before\n{after:28x} after"
        ),
        "goes_on_after_preempting": Claim(recovered, "the same step for the other two"),
    }
    notes = (f"A step that does not fit raises OutOfBlocks:\n  {message}",) if message else ()
    fingerprints = [f"{before:016x}", f"{after:016x}"]  # as text: JSON readers keep 53 bits of a number
    return Outcome(claims, {"message": message, "fingerprints": fingerprints}, notes)


OUT_OF_BLOCKS = Part(
    "out_of_blocks",
    "a pool that is too small",
    {
        "out_of_blocks_raised": "a step that does not fit raises",
        "state_unchanged": "and nothing has changed",
        "goes_on_after_preempting": "without one sequence it goes on",
    },
    run_out_of_blocks,
)
