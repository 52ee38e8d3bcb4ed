"""A pool with room for long sequences touches the pages of its tables that are in use, and no others."""

import resource
import subprocess
import sys

import pytest

SEQS, ENTRIES, BLOCK_SIZE = 1024, 65_536, 16  # room for 2^20 tokens each
PAGE = resource.getpagesize()
SLACK = 1 << 20  # what Python and the allocator take beside

PROGRAM = """
import sys
import numpy as np
from kvpool import Group, Plan, Pool

def resident():
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * {page}

def serve(entries, groups, careless):
    before = resident()
    pool = Pool(8 * {seqs}, {size}, max_seqs={seqs}, max_blocks_per_seq=entries, groups=groups)
    plan = Plan(pool, {seqs}, 2 * {seqs} * {size}, table_width=4)
    handles = np.array([pool.open() for _ in range({seqs})])
    pool.step(plan, handles, {size} + 1)
    pool.done(plan)
    if careless:
        held.append(np.ones((64, {entries}), np.int32))
    held.append((pool, plan))
    return resident() - before

held = []
groups = {{"none": None, "three": [Group.full(), Group.window(32), Group.state(2 * {seqs})]}}[sys.argv[1]]
serve(4, groups, False)
print(serve(4, groups, False), serve({entries}, groups, sys.argv[2] == "careless"))
"""

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="resident pages are read from /proc")


def resident_bytes(groups, careless=""):
    """What a pool with room for few tokens takes of memory, and one with room for many."""
    text = PROGRAM.format(page=PAGE, seqs=SEQS, entries=ENTRIES, size=BLOCK_SIZE)
    env = {"PATH": "", "GLIBC_TUNABLES": "glibc.malloc.hugetlb=0"}
    done = subprocess.run([sys.executable, "-c", text, groups, careless], env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return tuple(map(int, done.stdout.split()))


@pytest.mark.parametrize(("groups", "tables"), [("none", 1), ("three", 2)])
def test_tables_with_room_for_a_million_tokens_touch_a_page_per_sequence(groups, tables):
    few, many = resident_bytes(groups)
    print(f"{groups}: {few:,} bytes with room for 64 tokens, {many:,} with room for 1M")
    assert many - few <= tables * SEQS * PAGE + SLACK


def test_touched_rows_are_seen():
    few, many = resident_bytes("three", "careless")
    assert many - few > 2 * SEQS * PAGE + SLACK
