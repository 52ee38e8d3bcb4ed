"""`kvpool.store` on a disk whose writers are killed: 0 wrong hits, and what was written is found.

A round starts one to eight processes on one directory. Each stores prompts and says so when they are written. All of
them are killed at random moments. Then everything that they said has to be found, byte for byte.
"""

from __future__ import annotations

import random
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from unittest import mock

import numpy as np

from kvpool.store import BlockLayout, DiskStore, Layout
from kvpool.testing.stores import content, loads, prompt
from proof.builds import ROOT
from proof.figure import Budget, Figure

NAME = "stores"
TARGET = "500 kills -9 of one to eight writers: 0 wrong hits, everything that was written is found"
COMMAND = "python -m proof stores"
KILLS = 500
LAYOUT = Layout((BlockLayout(4, 3000, "full"), BlockLayout(8, 500, "state")), "w")
SEGMENT = 20_000  # so small that most kills meet a segment that begins, ends, or makes room
LENGTH = 32
SMALL, LARGE = 16 * SEGMENT, 1 << 30  # a quota that drops all the time, and one that never does


def opened(path: str, quota: int) -> DiskStore:
    """A store that knows what is there."""
    store = DiskStore(path, LAYOUT, quota, segment_nbytes=SEGMENT, refresh_seconds=0.02)
    store.ready.wait(60)
    return store


def write(path: str, seed: int, quota: int) -> None:
    """What a process does until it is killed: store, wait, say so; look at what others have."""
    store, number = opened(path, quota), 0
    print("begun", flush=True)
    while True:
        for blocks in LAYOUT.blocks(prompt(seed + number, LENGTH)):
            if store.store(blocks, content(LAYOUT, blocks)) < len(blocks):
                break
            store.drain(60)
        else:
            print(seed + number, flush=True)
        for blocks in LAYOUT.blocks(prompt(random.randrange(seed + number + 1), LENGTH)):
            loads(store, blocks)
        number += 1


class Writer:
    """A process in `write`."""

    def __init__(self, path: str, seed: int, quota: int) -> None:
        command = [sys.executable, "-m", "proof.stores", path, str(seed), str(quota)]
        self.process = subprocess.Popen(
            command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True
        )

    def begins(self) -> bool:
        """Wait until it works."""
        assert self.process.stdout is not None
        return self.process.stdout.readline() == "begun\n"

    def kill(self) -> tuple[list[int], str]:
        """Kill it; return which prompts it has written, and what else it said."""
        self.process.send_signal(signal.SIGKILL)
        said, errors = self.process.communicate(timeout=60)
        status = f"ended with {self.process.returncode}" if self.process.returncode != -signal.SIGKILL else ""
        return [int(line) for line in said.split("\n")[:-1]], errors + status


def one_round(path: str, seed: int, quota: int, count: int) -> list[str]:
    """Start `count` writers, kill them, judge what is there. Return what is wrong."""
    draw, written = random.Random(seed), []
    wrong: list[str] = []
    writers = [Writer(path, seed * 10_000_000 + number * 1_000_000, quota) for number in range(count)]
    if not all(writer.begins() for writer in writers):
        wrong.append("a writer did not begin")
    for writer in writers:
        time.sleep(draw.random() * 0.1)
        done, errors = writer.kill()
        written += done
        wrong += [errors[-400:]] if errors else []
    store = opened(path, quota)
    try:
        for number in written:
            for blocks in LAYOUT.blocks(prompt(number, LENGTH)):
                missing = np.flatnonzero(~loads(store, blocks)).tolist()
                if missing and quota == LARGE:
                    wrong.append(f"prompt {number}, group {blocks.group}: blocks {missing} are lost")
        for writer in range(count):  # what each was writing when it was killed, whole or not
            for number in range(20):
                for blocks in LAYOUT.blocks(prompt(seed * 10_000_000 + writer * 1_000_000 + number, LENGTH)):
                    loads(store, blocks)
    except AssertionError as error:
        wrong.append(str(error))
    finally:
        store.close()
    sizes = {file.name: file.stat().st_size for file in Path(path).glob("*.kvpool*")}
    wrong += [f"{name} stays" for name in sizes if name.endswith("-open")]
    wrong += [f"{sum(sizes.values())} bytes, the quota is {quota}"] if sum(sizes.values()) > quota else []
    return [f"seed {seed}, {count} writers, quota {quota}: {one}" for one in wrong]


def kill(kills: int, seed: int) -> tuple[int, list[str]]:
    """Kill so many writers; return how many it were, and what was wrong."""
    draw, killed, rounds = random.Random(seed), 0, 0
    wrong: list[str] = []
    with tempfile.TemporaryDirectory(prefix="kvpool-stores-") as folder:
        while killed < kills and len(wrong) < 20:
            count, quota = draw.choice((1, 1, 2, 3, 8)), draw.choice((SMALL, LARGE))
            wrong += one_round(f"{folder}/{quota}", seed * 1000 + rounds, quota, count)
            killed, rounds = killed + count, rounds + 1
    return killed, wrong


def measure(budget: Budget) -> Figure:
    """Kill writers."""
    begin = time.monotonic()
    killed, wrong = kill(max(6, budget.of(KILLS)), budget.seed)
    measured = f"{killed} writers killed, seed {budget.seed}: {len(wrong)} findings"
    return Figure(NAME, TARGET, measured, not wrong, COMMAND, time.monotonic() - begin, "; ".join(wrong[:5]))


class Forgetful(DiskStore):
    """Loses the last block of a load."""

    def load(self, blocks, rows):  # type: ignore[no-untyped-def]
        loaded = super().load(blocks, rows)
        loaded[-1:] = False
        return loaded


class Trusting(DiskStore):
    """Takes what lies where a record should be, one byte further on."""

    def load(self, blocks, rows):  # type: ignore[no-untyped-def]
        with mock.patch("kvpool.store.segment_format.is_right", lambda *args: True):
            loaded = super().load(blocks, rows)
        for row in rows[:1]:
            row[:] = np.roll(row, 1)
        return loaded


def planted(budget: Budget) -> list[Figure]:
    """Stores that lose a block, or believe whatever is there."""
    rows = []
    for kind in (Forgetful, Trusting):
        with mock.patch(f"{__name__}.DiskStore", kind), tempfile.TemporaryDirectory() as folder:
            rounds = range(budget.seed * 1000, budget.seed * 1000 + 20)  # on a busy machine the first may write nothing
            wrong = next(filter(None, (one_round(f"{folder}/{seed}", seed, LARGE, 1) for seed in rounds)), [])
        rows.append(Figure(NAME, TARGET, f"{kind.__name__}: {wrong[:1]}", not wrong, COMMAND, 0.0))
    return rows


if __name__ == "__main__":
    write(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]))
