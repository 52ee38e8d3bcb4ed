"""`kvpool.store` on a disk whose writers are killed: 0 wrong hits, and what was written is found.

A round starts one to eight processes on one directory (this file, as a program). Each stores prompts and says so when
they are written. All of them are killed at random moments. Then everything that they said has to be found, byte for
byte.
"""

import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest

from kvpool.store import BlockLayout, DiskStore, Layout
from kvpool.testing.stores import content, loads, prompt

ROOT = Path(__file__).resolve().parents[2]
FEW, MANY = 10, 500  # writers that are killed
LAYOUT = Layout((BlockLayout(4, 3000, "full"), BlockLayout(8, 500, "state")), "w")
SEGMENT = 20_000  # so small that most kills meet a segment that begins, ends, or makes room
LENGTH = 32
SMALL, LARGE = 16 * SEGMENT, 1 << 30  # a quota that drops all the time, and one that never does


def opened(path, quota):
    """A store that knows what is there."""
    store = DiskStore(path, LAYOUT, quota, segment_nbytes=SEGMENT, refresh_seconds=0.02)
    store.ready.wait(60)
    return store


def write(path, seed, quota):
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

    def __init__(self, path, seed, quota):
        command = [sys.executable, "-m", "tests.store.test_store_processes", path, str(seed), str(quota)]
        self.process = subprocess.Popen(
            command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True
        )

    def begins(self):
        """Wait until it works."""
        return self.process.stdout.readline() == "begun\n"

    def kill(self):
        """Kill it; return which prompts it has written, and what else it said."""
        self.process.send_signal(signal.SIGKILL)
        said, errors = self.process.communicate(timeout=60)
        status = f"ended with {self.process.returncode}" if self.process.returncode != -signal.SIGKILL else ""
        return [int(line) for line in said.split("\n")[:-1]], errors + status


def one_round(path, seed, quota, count):
    """Start `count` writers, kill them, judge what is there. Return what is wrong."""
    draw, written, wrong = random.Random(seed), [], []
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


@pytest.mark.parametrize(
    ("kills", "seed"), [pytest.param(FEW, 1, marks=pytest.mark.long), pytest.param(MANY, 2, marks=pytest.mark.slow)]
)
def test_killed_writers_leave_no_wrong_hit_and_lose_nothing(kills, seed, tmp_path):
    draw, killed, rounds = random.Random(seed), 0, 0
    while killed < kills:
        count, quota = draw.choice((1, 1, 2, 3, 8)), draw.choice((SMALL, LARGE))
        assert one_round(f"{tmp_path}/{quota}", seed * 1000 + rounds, quota, count) == []
        killed, rounds = killed + count, rounds + 1


if __name__ == "__main__":
    write(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]))
