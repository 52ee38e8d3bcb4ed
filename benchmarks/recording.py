"""What ``Pool(record=...)`` costs, call by call and for the life of requests, with and without.

``python -m benchmarks.recording`` prints, for each case, instructions (callgrind, None without valgrind) and the best
CPU time of many. Calls are made from Python with arrays of int32 and int64, the cheapest way there is from Python: what
recording adds is the same from everywhere, and from Python nowhere a larger share; of calls from C it is one.
"""

import gc
import json
import sys
import time
from itertools import repeat

import numpy as np

import kvpool
from benchmarks import callgrind

RECORD = 1 << 20
PROMPT = 2048
LIVES, LIFE_STEPS = 64, 200  # of the requests that are served together


def steps(rows, record):
    """Decode steps of so many rows: four blocks of each row."""
    pool = kvpool.Pool(40 * rows + 1, 16, max_seqs=rows, max_blocks_per_seq=32, in_order=True, seed=1, record=record)
    plan, handles = kvpool.Plan(pool, rows), np.array([pool.open() for _ in range(rows)])
    lengths = np.zeros(rows, np.int32)

    def run():
        for _ in repeat(None, 64):
            pool.step(plan, handles, 1)

    return 64, run, lambda: pool.truncate(handles, lengths)


def blocks(record):
    """Four blocks, taken and given back."""
    pool = kvpool.Pool(1000, 16, seed=1, record=record)

    def run():
        for _ in repeat(None, 64):
            pool.blocks.free(pool.blocks.alloc(4))

    return 64, run, lambda: None


def forks(record):
    """A fork of a sequence of 64 blocks, closed again."""
    pool = kvpool.Pool(1000, 16, seed=1, record=record)
    parent = pool.open(1024)

    def run():
        for _ in repeat(None, 64):
            pool.close(pool.fork(parent))

    return 64, run, lambda: None


def prompts(record):
    """A cached prompt, opened and closed."""
    pool = kvpool.Pool(1000, 16, prefix_cache=True, in_order=True, seed=1, record=record)
    tokens = np.random.default_rng(1).integers(0, 150_000, PROMPT, np.int32)
    pool.step(kvpool.Plan(pool, 1, PROMPT), [first := pool.open(tokens)], PROMPT)
    pool.prefix.commit(first, tokens)

    def run():
        for _ in repeat(None, 16):
            pool.close(pool.open(tokens))

    return 16, run, lambda: None


def commits(record):
    """A block of tokens, committed."""
    pool = kvpool.Pool(1000, 16, prefix_cache=True, in_order=True, seed=1, record=record)
    tokens = np.random.default_rng(1).integers(0, 150_000, PROMPT, np.int32)
    handle, parts = pool.open(tokens), np.split(tokens, PROMPT // 16)
    pool.step(kvpool.Plan(pool, 1, PROMPT), [handle], PROMPT)

    def run():
        for part in parts:
            pool.prefix.commit(handle, part)

    def undo():
        pool.truncate(handle, 0)
        pool.prefix.flush()
        pool.step(plan, [handle], PROMPT)

    plan = kvpool.Plan(pool, 1, PROMPT)
    return len(parts), run, undo


def lives(record):
    """What a server asks for: prompts, nowhere cached, each with its step; decode steps together; commits; the end."""
    size = PROMPT + LIFE_STEPS
    pool = kvpool.Pool(
        LIVES * (size // 16 + 2), 16, max_seqs=LIVES, prefix_cache=True, in_order=True, seed=1, record=record
    )
    plan = kvpool.Plan(pool, LIVES, PROMPT)
    texts = np.random.default_rng(1).integers(0, 150_000, (LIVES, size), np.int32)
    prompt, rest = [np.ascontiguousarray(part) for part in np.split(texts, [PROMPT], 1)]

    def run():
        handles = np.empty(LIVES, np.int64)
        for i in range(LIVES):
            handles[i] = pool.open(prompt[i])
            pool.step(plan, handles[i : i + 1], PROMPT)
            pool.prefix.commit(handles[i], prompt[i])
        for _ in repeat(None, LIFE_STEPS):
            pool.step(plan, handles, 1)
        for i in range(LIVES):
            pool.prefix.commit(handles[i], rest[i])
            pool.close(handles[i])

    return LIVES, run, pool.prefix.flush


CASES = {  # name: what makes a run of so many calls, and what takes it back
    **{f"step of {rows}": lambda record, rows=rows: steps(rows, record) for rows in (1, 8, 64, 256)},
    "alloc + free of 4": blocks, "fork + close": forks, "open of a cached prompt + close": prompts,
    "commit of a block": commits, "life of a request": lives,
}  # fmt: skip

BOUND = 0.05  # most that recording may add to the instructions of a case


def too_dear(counts):
    """Names of the cases to which recording adds more than it may, or nothing at all."""
    return [name for name, (without, with_record) in counts.items()
            if not without < with_record <= (1 + BOUND) * without]  # fmt: skip


def count():
    """Under callgrind: dump the instructions of each case, four times: addresses decide what Python's memory costs."""
    marks = callgrind.marks()
    marks.count_prepare()
    gc.disable()
    for name, make in CASES.items():
        for record in (0, RECORD) * 4:
            calls, run, undo = make(record)
            for _ in range(2):
                run()
                undo()
            marks.count_toggle()
            run()
            marks.count_toggle()
            marks.count_dump(f"{record}|{calls}|{name}".encode())


def instructions():
    """Return case -> (without, with) in instructions per call, the least of four runs; None without valgrind."""
    if not callgrind.is_here():
        return None
    found = {name: [float("inf")] * 2 for name in CASES}
    for mark, counts in callgrind.counted("-m", "benchmarks.recording", "count").items():
        record, calls, name = mark.split("|")
        found[name][record != "0"] = min(counts) / int(calls)
    return found


def times(rounds=200):
    """Return case -> (without, with), ns of CPU per call: the best of many rounds, in turn."""
    found = {}
    for name, make in CASES.items():
        pair, best = [make(0), make(RECORD)], [float("inf")] * 2
        for _ in range(rounds if name != "life of a request" else rounds // 4):
            for which, (calls, run, undo) in enumerate(pair):
                start = time.thread_time_ns()
                run()
                best[which] = min(best[which], (time.thread_time_ns() - start) / calls)
                undo()
        found[name] = best
    return found


def report():
    """Print all of it as JSON: without, with, and the share that recording adds."""
    measured = {"instructions": instructions(), "ns": times()}
    for of in measured.values():
        for name, (without, with_record) in (of or {}).items():
            of[name] = [round(without), round(with_record), round(with_record / without - 1, 4)]
    json.dump(measured, sys.stdout, indent=2)


if __name__ == "__main__":
    if sys.argv[1:] == ["count"]:
        count()
    else:
        report()
