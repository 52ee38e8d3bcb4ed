"""Operations whose cost must depend neither on the size of the pool nor on the length of a table.

``python -m benchmarks.scaling`` measures their CPU time and prints one JSON object, operation -> size -> ns.
`count_instructions` runs the same under callgrind and returns operation -> size -> instructions: these do
not depend on caches, clocks or neighbours, so that a difference of a few percent means something.
"""

import functools
import gc
import json
import os
import re
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from itertools import repeat
from pathlib import Path

import numpy as np

import kvpool
from benchmarks.baselines import load_c

POOL_SIZES = [1_000, 10_000, 100_000, 1_000_000]  # blocks
CONTEXTS = [64, 1_024, 16_384, 262_144]  # tokens
ROWS = 4
BLOCK_SIZE = 16
BLOCKS = 32
RUNS = 16
WARM_UPS = 32  # Python rewrites the code of a function in its first runs
POOL_OPERATIONS = (
    "fork, 8 children",
    "close, 8 children",
    "alloc, 32 blocks",
    "free, 32 blocks",
    "alloc and free, 32 times one",
    "16 decode steps, 4 rows",
)
STARTS_UNDONE = ("close, 8 children", "free, 32 blocks")  # what these take away is made by their undo
CONTEXT_OPERATION = "16 decode steps, 4 rows, by context"
SMALL_INTS = 257  # Python keeps the ints below; the pool starts behind them so that every id costs the same


def open_rows(pool, num_tokens):
    """Return the handles of `ROWS` sequences of `num_tokens` tokens."""
    handles = np.array([pool.open() for _ in range(ROWS)], np.int64)
    plan = kvpool.Plan(pool, 1, num_tokens)
    for handle in handles.tolist():
        pool.step(plan, [handle], num_tokens)
    return handles


def pool_operations(num_blocks):
    """Return name -> (operation, what takes it back) on a pool of `num_blocks`."""
    pool = kvpool.Pool(num_blocks, BLOCK_SIZE, max_seqs=16, max_blocks_per_seq=64, in_order=True, seed=1)
    pool.blocks.alloc(SMALL_INTS)
    handles = open_rows(pool, BLOCKS * BLOCK_SIZE)
    lengths = np.full(ROWS, BLOCKS * BLOCK_SIZE, np.int32)
    plan, parent = kvpool.Plan(pool, ROWS), int(handles[0])
    ids, children = np.empty(BLOCKS, np.int32), np.empty(8, np.int64)

    def fork():
        children[:] = pool.fork(parent, len(children))

    def close():
        pool.close(children)

    def alloc():
        pool.blocks.alloc(BLOCKS, out=ids)

    def free():
        pool.blocks.free(ids)

    def alloc_free_each():
        for _ in repeat(None, BLOCKS):
            pool.blocks.free(pool.blocks.alloc())

    def decode():
        for _ in repeat(None, BLOCK_SIZE):
            pool.step(plan, handles, 1)

    def truncate():
        pool.truncate(handles, lengths)

    actions = (
        (fork, close),
        (close, fork),
        (alloc, free),
        (free, alloc),
        (alloc_free_each, None),
        (decode, truncate),
    )
    return dict(zip(POOL_OPERATIONS, actions, strict=True))


def context_operations(context):
    """Return the steady decode of sequences of `context` tokens; they grow by one block in each run."""
    width = context // BLOCK_SIZE + RUNS + WARM_UPS + 2
    pool = kvpool.Pool(
        SMALL_INTS + ROWS * width, BLOCK_SIZE, max_seqs=ROWS, max_blocks_per_seq=width, in_order=True, seed=1
    )
    handles = open_rows(pool, context)
    plan = kvpool.Plan(pool, ROWS)

    def decode():
        for _ in repeat(None, BLOCK_SIZE):
            pool.step(plan, handles, 1)

    return {CONTEXT_OPERATION: (decode, None)}


def measure(name, run, undo, marks):
    """Return the median CPU time of `run` in ns, or dump its instruction count when `marks` are given."""
    for _ in repeat(None, WARM_UPS):
        run()
        if undo:
            undo()
    times = []
    for _ in repeat(None, RUNS):
        if marks:
            marks.count_toggle()
            run()
            marks.count_toggle()
        else:
            start = time.thread_time_ns()
            run()
            times.append(time.thread_time_ns() - start)
        if undo:
            undo()
    if marks:
        marks.count_dump(name.encode())
        return None
    return statistics.median(times)


def measure_all():
    """Return operation -> size -> ns; under callgrind every entry is None and the counts are dumped."""
    marks = load_c("counting")
    if marks.counting():
        marks.count_prepare()
    else:
        marks = None
    gc.disable()
    measure("nothing|0", lambda: None, None, marks)
    results = {}
    for sizes, operations in ((POOL_SIZES, pool_operations), (CONTEXTS, context_operations)):
        for size in sizes:
            for name, (run, undo) in operations(size).items():
                if name in STARTS_UNDONE:
                    undo()
                results.setdefault(name, {})[size] = measure(f"{name}|{size}", run, undo, marks)
    return results


@functools.cache
def count_instructions():
    """Run this module under callgrind. Return operation -> size -> instructions, None without valgrind."""
    valgrind = shutil.which("valgrind")
    if valgrind is None:
        return None
    load_c("counting")  # compiled here, not under callgrind
    with tempfile.TemporaryDirectory() as folder:
        command = [
            valgrind, "--tool=callgrind", "--instr-atstart=no", "--collect-atstart=no",
            f"--callgrind-out-file={folder}/counts", sys.executable, "-m", "benchmarks.scaling",
        ]  # fmt: skip
        subprocess.run(
            command,
            check=True,
            cwd=Path(__file__).parent.parent,
            env={**os.environ, "PYTHONHASHSEED": "0"},
            capture_output=True,
        )
        counts = {}
        for path in Path(folder).iterdir():
            text = path.read_text()
            trigger = re.search(r"^desc: Trigger: Client Request: (.*)\|(\d+)$", text, re.MULTILINE)
            total = re.search(r"^(?:totals|summary): (\d+)", text, re.MULTILINE)
            if trigger and total:
                counts.setdefault(trigger[1], {})[int(trigger[2])] = int(total[1]) / RUNS
    overhead = counts.pop("nothing")[0]
    return {name: {size: counts[name][size] - overhead for size in sorted(counts[name])} for name in counts}


if __name__ == "__main__":
    json.dump(measure_all(), sys.stdout, indent=2)
