"""Fork, append and free from Python, ten million times: every block comes back, and the process does not grow."""

import json
import subprocess
import sys

import pytest

from tests.verify import builds

pytestmark = [pytest.mark.slow, pytest.mark.skipif(sys.platform != "linux", reason="/proc, and gcc's sanitizers")]
ROUNDS = 10_000_000
LEAK_ROUNDS = 600_000  # under LeakSanitizer, which takes 40 us for each
GROWTH = 64 * 1024  # bytes in memory; the first tenth of the rounds warms up
SOAK = """
import json, os, sys
from itertools import repeat
import kvpool

def resident():
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * os.sysconf("SC_PAGESIZE")

pool = kvpool.Pool(64, 4, max_seqs=8, in_order=True, seed=1)
plan, parent, rounds = kvpool.Plan(pool, 1, 6), pool.open(), int(sys.argv[1])
pool.step(plan, [parent], 6)
blank = pool.blocks.num_blank

def run(times):
    for _ in repeat(None, times):
        child = pool.fork(parent)
        pool.step(plan, child, 1)  # a copy of the shared tail
        pool.close(child)

run(rounds // 10)
before = resident()
run(rounds - rounds // 10)
{fault}
grown = resident() - before
pool.check()
print(json.dumps([blank - pool.blocks.num_blank, pool.stats().sequences - 1, grown]))
"""


def soaked(rounds, fault=""):
    """(blocks lost, sequences lost, bytes grown) of a soak."""
    command = [sys.executable, "-c", SOAK.format(fault=fault), str(rounds)]
    done = subprocess.run(command, cwd=builds.ROOT, capture_output=True, text=True, check=True)
    return json.loads(done.stdout)


def leaked(rounds, fault=""):
    """What LeakSanitizer says of a soak."""
    done = builds.run("asan", ["-c", SOAK.format(fault=fault), str(rounds)], leaks=True)
    assert done.stdout, done.stderr
    return [line for line in done.stderr.splitlines() if "SUMMARY" in line] or done.returncode


def test_ten_million_forks_lose_nothing():
    lost, open_, grown = soaked(ROUNDS)
    assert (lost, open_) == (0, 0) and grown <= GROWTH


def test_forks_leave_nothing_that_a_leak_sanitizer_sees():
    assert leaked(LEAK_ROUNDS) == 0


def test_block_sequence_and_memory_that_are_kept_are_seen():
    lost, open_, grown = soaked(50_000, "pool.blocks.alloc(); pool.open(); kept = bytearray(1 << 20)")
    assert (lost, open_) == (1, 1) and grown > GROWTH


def test_memory_that_is_lost_is_seen_by_the_leak_sanitizer():
    assert "300 byte" in str(leaked(1_000, "import ctypes; ctypes.CDLL(None).malloc(300)"))
