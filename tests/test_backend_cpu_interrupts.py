"""Ctrl-C in a long `attend` of the cpu backend: it ends within 100 ms, and the next call is as if nothing had been.

Without its look for signals the call would go on for the four fifths of it that are left.
"""

import signal
import time

import numpy as np
import pytest

from kvpool import KVSpec, Plan, Pool
from kvpool_backends.cpu import CPUBackend

CONTEXT, CHUNK, BLOCK_SIZE = 16_384, 1_024, 16
SPEC = KVSpec(num_layers=1, num_kv_heads=4, head_dim=64, block_size=BLOCK_SIZE, dtype="float32")
LATENCY = 0.1  # seconds


class Prefill:
    """A chunk behind a long context, as one call."""

    def __init__(self, num_threads):
        rng = np.random.default_rng(3)
        blocks = CONTEXT // BLOCK_SIZE + 1
        self.backend = CPUBackend(SPEC, blocks, num_threads=num_threads)
        pool = Pool(blocks, BLOCK_SIZE, max_blocks_per_seq=blocks)
        plan = Plan(pool, 1, CONTEXT, formats=("block_tables", "seq_lens", "cu_q_lens", "slot_mapping"))
        handle = pool.open()
        pool.step(plan, [handle], CONTEXT - CHUNK)
        k, v = rng.standard_normal((2, CONTEXT, 4, 64), np.float32)
        self.backend.write(0, k[CHUNK:], v[CHUNK:], plan)
        pool.done(plan)
        pool.step(plan, [handle], CHUNK)
        self.backend.write(0, k[:CHUNK], v[:CHUNK], plan)
        self.plan, self.q = plan, rng.standard_normal((CHUNK, 16, 64), np.float32)

    def attend(self):
        return self.backend.attend(0, self.q, self.plan)


def interrupt(signum, frame):
    raise KeyboardInterrupt


def late(prefill, after):
    """Seconds from the signal to the end of the call."""
    start = time.perf_counter()
    signal.setitimer(signal.ITIMER_REAL, after)
    with pytest.raises(KeyboardInterrupt):
        prefill.attend()
    return time.perf_counter() - start - after


@pytest.mark.parametrize("num_threads", [1, 2])
def test_attend_is_interrupted_soon_and_can_be_called_again(num_threads):
    prefill = Prefill(num_threads)
    expected = prefill.attend()
    start = time.perf_counter()
    prefill.attend()
    whole = time.perf_counter() - start
    former = signal.signal(signal.SIGALRM, interrupt)
    try:
        found = [late(prefill, part * whole) for part in (0.05, 0.08, 0.12, 0.16, 0.2)]
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, former)
    assert np.median(found) < min(LATENCY, whole / 3), (whole, found)
    np.testing.assert_array_equal(prefill.attend(), expected)


def test_attend_goes_on_where_the_handler_does_not_raise():
    prefill, seen = Prefill(2), []
    expected = prefill.attend()
    former = signal.signal(signal.SIGALRM, lambda signum, frame: seen.append(signum))
    try:
        signal.setitimer(signal.ITIMER_REAL, 0.02, 0.02)
        found = prefill.attend()
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, former)
    assert seen
    np.testing.assert_array_equal(found, expected)
