"""Part (e): a pool that is too small says so, and nothing has moved."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

import kvpool
from kvpool.cli.demo.report import Claim, Outcome, Part
from kvpool.cli.demo.settings import Settings
from kvpool.errors import OutOfBlocks


def run(settings: Settings, say: Callable[[str], None]) -> Outcome:
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


PART = Part(
    "out_of_blocks",
    "a pool that is too small",
    {
        "out_of_blocks_raised": "a step that does not fit raises",
        "state_unchanged": "and nothing has changed",
        "goes_on_after_preempting": "without one sequence it goes on",
    },
    run,
)
