"""Directives on a trace with pauses: what kept prompts find when they come back in time, and what the others lose.

The requests come one after the other at their times, which the pool is told in whole seconds. Every `EVERY`-th
conversation keeps its prompts, and pauses before each request for as long as its directive lasts, less a tenth. The
same trace is replayed without a directive, and both count what each request finds::

    python -m benchmarks.replay.retention TRACE BLOCKS TTL [MOST_KEPT]
"""

from __future__ import annotations

import sys
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from benchmarks.replay.readers import read_trace
from benchmarks.replay.trace import Trace
from kvpool import Plan, Pool
from kvpool.retention import Keep

EVERY = 16


@dataclass(frozen=True)
class Retained:
    """What a replay with directives, and one without, have found, in tokens."""

    due: int  # in common with the kept request before in their conversation, of those that come back inside its ttl
    found: int  # of these
    found_without: int  # the same without directives
    others: int  # that all other requests found
    others_without: int
    most_kept: float  # the largest share of the pool that was kept at a time


def with_pauses(trace: Trace, ttl: int) -> tuple[np.ndarray, np.ndarray]:
    """The time of each request in seconds, float64 ``[R]``, and the rows in that order."""
    times = trace.timestamps / 1000.0
    for session in np.unique(trace.sessions)[::EVERY]:
        (rows,) = np.nonzero(trace.sessions == session)
        times[rows] += np.arange(len(rows)) * (0.9 * ttl)
    return times, np.argsort(times, kind="stable")


def hits(trace: Trace, num_blocks: int, ttl: int, most: int | None, *, kept: bool) -> tuple[np.ndarray, int]:
    """Tokens that each request finds, int64 ``[R]``, and the most blocks that were kept at a time."""
    times, order = with_pauses(trace, ttl)
    keepers = set(np.unique(trace.sessions)[::EVERY].tolist())
    size, peak, found = trace.block_size, 0, np.zeros(len(trace), np.int64)
    longest = -(-int(trace.prompts.max()) // size)
    with Pool(num_blocks + 1, size, max_seqs=1, max_blocks_per_seq=longest, in_order=True, prefix_cache=True) as pool:
        assert pool.prefix is not None  # it has a prefix cache
        pool.prefix.limit_kept(b"", most)
        plan = Plan(pool, 1, int(trace.prompts.max()), formats=("seq_lens",))
        for row in order.tolist():
            if kept:
                pool.prefix.tick(int(times[row]))
            prompt = int(trace.prompts[row])
            tokens = trace.tokens(row, prompt)
            directive = Keep(1, ttl) if kept and trace.sessions[row] in keepers else None
            handle = pool.open(tokens, keep=directive)
            found[row] = pool.num_tokens(handle)
            pool.step(plan, [handle], prompt - int(found[row]))
            pool.prefix.commit(handle, tokens[found[row] :])
            pool.close(handle)
            peak = max(peak, pool.prefix.stats().kept)
        pool.check()
    return found, peak


def retained(trace: Trace, num_blocks: int, ttl: int, most: int | None = None) -> Retained:
    """Replay a trace with ids and conversations through a pool of so many blocks, with directives of `ttl` seconds.

    At most `most` blocks are kept; None: no limit.
    """
    times, order = with_pauses(trace, ttl)
    (with_, peak), (without, _) = (hits(trace, num_blocks, ttl, most, kept=kept) for kept in (True, False))
    keepers = set(np.unique(trace.sessions)[::EVERY].tolist())
    last: dict[int, int] = {}
    due, back = 0, np.zeros(len(trace), np.bool_)
    for row in order.tolist():
        session, size = int(trace.sessions[row]), trace.block_size
        before = last.get(session)
        if session in keepers and before is not None and int(times[row]) - int(times[before]) < ttl:
            own, other = trace.ids_of(row), trace.ids_of(before)
            least = min(len(own), len(other), int(trace.prompts[before]) // size, (int(trace.prompts[row]) - 1) // size)
            same = own[:least] == other[:least]
            shared = size * int(least if same.all() else same.argmin())
            due += shared
            with_[row], without[row] = min(with_[row], shared), min(without[row], shared)
            back[row] = True
        last[session] = row
    return Retained(
        due, int(with_[back].sum()), int(without[back].sum()), int(with_[~back].sum()), int(without[~back].sum()),
        peak / num_blocks,
    )  # fmt: skip


if __name__ == "__main__":
    if not 4 <= len(sys.argv) <= 5:
        sys.exit(__doc__)
    path, *sizes = sys.argv[1:]
    told = retained(read_trace(Path(path)), *map(int, sizes))
    print(
        f"of what was kept {told.found / told.due:.1%} is found in time, {told.found_without / told.due:.1%} without "
        f"directives; the others find {told.others / told.others_without - 1:+.2%}; {told.most_kept:.1%} kept at most"
    )
