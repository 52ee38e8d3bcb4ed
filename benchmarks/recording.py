"""What ``Pool(record=...)`` costs: a decode step of 64 and of 256 rows, with and without.

``python -m benchmarks.recording`` prints instructions (callgrind, None without valgrind) and the best time of many.
"""

import gc
import json
import re
import shutil
import subprocess
import sys
import tempfile
import time
from itertools import repeat
from pathlib import Path

import numpy as np

import kvpool
from benchmarks.baselines import load_c

ROWS = (64, 256)
STEPS = 64  # four blocks of each row
RECORD = 1 << 20


def decoder(rows, record):
    """Return what makes `STEPS` decode steps, and what takes them back."""
    pool = kvpool.Pool(40 * rows + 1, 16, max_seqs=rows, max_blocks_per_seq=32, in_order=True, seed=1, record=record)
    plan, handles = kvpool.Plan(pool, rows), np.array([pool.open() for _ in range(rows)])
    lengths = np.zeros(rows, np.int32)

    def run():
        for _ in repeat(None, STEPS):
            pool.step(plan, handles, 1)

    return run, lambda: pool.truncate(handles, lengths)


def count():
    """Under callgrind: dump the instructions of each case."""
    marks = load_c("counting")
    marks.count_prepare()
    gc.disable()
    for rows in ROWS:
        for record in (0, RECORD):
            run, undo = decoder(rows, record)
            for _ in range(3):
                run()
                undo()
            marks.count_toggle()
            run()
            marks.count_toggle()
            marks.count_dump(f"{record}|{rows}".encode())


def instructions():
    """Return rows -> (without, with) in instructions per step, None without valgrind."""
    if shutil.which("valgrind") is None:
        return None
    load_c("counting")
    found = {rows: [0.0, 0.0] for rows in ROWS}
    with tempfile.TemporaryDirectory() as folder:
        command = [
            "valgrind", "--tool=callgrind", "--instr-atstart=no", "--collect-atstart=no",
            f"--callgrind-out-file={folder}/counts", sys.executable, "-m", "benchmarks.recording", "count",
        ]  # fmt: skip
        subprocess.run(command, check=True, cwd=Path(__file__).parent.parent, capture_output=True)
        for path in Path(folder).iterdir():
            text = path.read_text()
            trigger = re.search(r"^desc: Trigger: Client Request: (\d+)\|(\d+)$", text, re.MULTILINE)
            total = re.search(r"^(?:totals|summary): (\d+)", text, re.MULTILINE)
            if trigger and total:
                found[int(trigger[2])][trigger[1] != "0"] = int(total[1]) / STEPS
    return found


def times(rounds=200):
    """Return rows -> (without, with), ns per step: the best of many rounds, in turn."""
    found = {}
    for rows in ROWS:
        pair, best = [decoder(rows, 0), decoder(rows, RECORD)], [float("inf")] * 2
        for _ in range(rounds):
            for which, (run, undo) in enumerate(pair):
                start = time.perf_counter_ns()
                run()
                best[which] = min(best[which], (time.perf_counter_ns() - start) / STEPS)
                undo()
        found[rows] = best
    return found


if __name__ == "__main__":
    if sys.argv[1:] == ["count"]:
        count()
    else:
        json.dump({"instructions": instructions(), "ns": times()}, sys.stdout, indent=2)
