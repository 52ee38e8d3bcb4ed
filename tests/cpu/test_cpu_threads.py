"""Arrays that another thread writes while a call on a `BlockStore` reads them: accepted as a whole, or refused.

Behind the pool's memory lies one block more, which belongs to nobody: a wrong id reads or writes it.
"""

import sys
import threading
import time

import numpy as np
import pytest

from kvpool.config import KVSpec
from kvpool_backends.cpu import BlockStore

BLOCKS, ROWS, WIDTH = 64, 8, 4096
SPEC = KVSpec(1, 1, 8, "float32", 1)
NOBODY = 1e30  # what lies behind the pool
WRONG = BLOCKS  # the id of it


class Memory:
    """The planes of a pool, each with a block of nobody's behind it."""

    def __init__(self):
        rng = np.random.default_rng(1)
        self.planes = [rng.standard_normal(shape).astype(np.float32) for shape, _, _ in SPEC.base_arrays(BLOCKS + 1)]
        for plane in self.planes:
            plane[BLOCKS:] = NOBODY

    def is_whole(self):
        """Nobody's block is as it was, and nothing of it is anywhere else."""
        return all((plane[BLOCKS:] == NOBODY).all() and (plane[:BLOCKS] != NOBODY).all() for plane in self.planes)


def ascending(n):
    return np.arange(n, dtype=np.int64)


Q = np.ones((ROWS, 1, 8), np.float32)
TABLES = ascending(ROWS * WIDTH).reshape(ROWS, WIDTH) % BLOCKS
LENS, SUMS = np.full(ROWS, WIDTH), ascending(ROWS + 1)
TOKENS = np.ones((WIDTH, 1, 8), np.float32)
PAGES = np.zeros((WIDTH, SPEC.block_nbytes), np.uint8)


def attend(store, tables=TABLES, lens=LENS, sums=SUMS):
    out = np.zeros((len(lens), 1, 8), np.float32)
    q = Q if len(lens) == ROWS else np.ones((len(lens), 1, 8), np.float32)
    store.attend(0, q, out, tables, lens, sums)
    return out


def gather(store, blocks):
    out = np.zeros((2, len(blocks), 1, 8), np.float32)
    store.gather(0, blocks, *out)
    return out


def export(store, blocks):
    out = np.zeros((len(blocks), SPEC.block_nbytes), np.uint8)
    store.export_blocks(blocks, out)
    return out.view(np.float32)


IDS = ascending(WIDTH) % BLOCKS
MANY = ascending(2000)  # rows of one token: lengths that numpy writes without the GIL
#: name -> (what the array is, what its second half becomes, the call, which returns what it has read)
CALLS = {
    "attend, int32 tables": (TABLES.astype(np.int32), WRONG, attend),
    "attend, int64 tables": (TABLES, WRONG, attend),
    "attend, negative ids": (TABLES.astype(np.int32), -1, attend),
    "attend, seq_lens": (
        MANY % 7 + 1,
        2**40,
        lambda store, a: attend(store, np.tile(TABLES[0, :8], (2000, 1)), a, ascending(2001)),
    ),
    "attend, cu_q_lens": (
        ascending(2001),
        2**40,
        lambda store, a: attend(store, np.tile(TABLES[0, :8], (2000, 1)), MANY % 7 + 1, a),
    ),
    "write": (IDS, WRONG, lambda store, a: store.write(0, TOKENS, TOKENS, a)),
    "gather": (IDS, WRONG, gather),
    "export_blocks": (IDS, WRONG, export),
    "import_blocks": (ascending(BLOCKS), WRONG, lambda store, a: store.import_blocks(a, PAGES[:BLOCKS])),
    "zero": (IDS, WRONG, lambda store, a: store.zero(a)),
    "copy_blocks": (
        np.stack([ascending(32), ascending(32) + 32, np.ones(32, np.int64)], 1),
        WRONG,
        lambda store, a: store.copy_blocks(a),
    ),
    "compact": (ascending(BLOCKS)[None], WRONG, lambda store, a: store.compact(ascending(BLOCKS), a)),
}


@pytest.mark.parametrize("call", CALLS)
def test_array_written_by_another_thread_is_accepted_as_a_whole_or_refused(call):
    """Make one call over and over while a thread writes its array: good, bad, good, bad."""
    good, wrong, make = CALLS[call]
    memory, rounds = Memory(), 100
    store = BlockStore(SPEC, BLOCKS, [plane[:BLOCKS] for plane in memory.planes], num_threads=1)
    expected = make(store, good)
    bad = good.copy()
    bad.reshape(-1)[good.size // 2 :] = wrong
    array, stop = good.copy(), threading.Event()

    def write():
        while not stop.is_set():
            for source in (bad, good) * 10:  # threads change at the end of a turn: it is bad for half of the time
                array[:] = source

    writer, before = threading.Thread(target=write), sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    writer.start()
    accepted = refused = 0
    try:
        for _ in range(100 * rounds):
            time.sleep(0)
            try:
                found = make(store, array)
            except (IndexError, ValueError):
                refused += 1
            else:
                accepted += 1
                assert expected is None or np.array_equal(found, expected), f"{call} read what it had not judged"
            assert memory.is_whole(), f"{call} touched what is not the pool's"
            if refused >= rounds and accepted >= rounds:
                break
    finally:
        stop.set()
        writer.join()
        sys.setswitchinterval(before)
    assert accepted and refused, f"the writer was never there: {accepted} accepted, {refused} refused"
