"""Ctrl-C in a long `attend` of the cpu backend: it ends within 100 ms, and the next call is as if nothing had been.

Without its look for signals the call would go on for the four fifths of it that are left.
"""

import os
import signal
import time

import numpy as np
import pytest

from kvpool import KVSpec, Plan, Pool
from kvpool.errors import ConcurrentUse
from kvpool_backends.cpu import CPUBackend

CONTEXT, CHUNK, BLOCK_SIZE = 16_384, 1_024, 16
SPEC = KVSpec(num_layers=1, num_kv_heads=4, head_dim=64, block_size=BLOCK_SIZE, dtype="float32")
LATENCY = 0.1  # seconds; of CPU time, because other processes may have the cores


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
        self.backend.write(self.backend.prepare(plan), 0, k[CHUNK:], v[CHUNK:])
        pool.done(plan)
        pool.step(plan, [handle], CHUNK)
        self.backend.write(self.backend.prepare(plan), 0, k[:CHUNK], v[:CHUNK])
        self.plan, self.q = plan, rng.standard_normal((CHUNK, 16, 64), np.float32)

    def attend(self):
        return self.backend.attend(self.backend.prepare(self.plan), 0, self.q)


class Interrupted(BaseException):
    """Not KeyboardInterrupt, which would end the run of the tests where it comes outside of a call."""


def late(prefill, after):
    """Seconds of CPU time from the signal to the end of the call."""
    with pytest.raises(Interrupted):
        start = time.process_time()
        signal.setitimer(signal.ITIMER_PROF, after)
        prefill.attend()
    return time.process_time() - start - after


@pytest.mark.parametrize("num_threads", [pytest.param(1, marks=pytest.mark.long), 2])
def test_attend_is_interrupted_soon_and_can_be_called_again(num_threads):
    def interrupt(signum, frame):
        raise Interrupted

    prefill = Prefill(num_threads)
    expected = prefill.attend()
    start = time.process_time()
    prefill.attend()
    whole = time.process_time() - start
    former = signal.signal(signal.SIGPROF, interrupt)
    try:
        found = [late(prefill, part * whole) for part in (0.05, 0.08, 0.12, 0.16, 0.2)]
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)
        signal.signal(signal.SIGPROF, former)
    assert np.median(found) < min(whole / 2, max(LATENCY * num_threads, whole / 4)), (whole, found)
    np.testing.assert_array_equal(prefill.attend(), expected)


@pytest.fixture
def on_alarm():
    """``on_alarm(handler)``: after 20 ms it runs, and again after 20 ms as long as it returns True."""
    former = []

    def begin(handler):
        def run(signum, frame):
            if handler():
                signal.setitimer(signal.ITIMER_REAL, 0.02)

        former.append(signal.signal(signal.SIGALRM, run))
        signal.setitimer(signal.ITIMER_REAL, 0.02)

    yield begin
    signal.setitimer(signal.ITIMER_REAL, 0)
    for handler in former:
        signal.signal(signal.SIGALRM, handler)


def is_inside(prefill):
    """Whether a handler has come inside of `attend`; elsewhere this takes the time of a whole call."""
    try:
        prefill.attend()
    except ConcurrentUse:
        return True
    return False


@pytest.mark.long
def test_attend_goes_on_where_the_handler_does_not_raise(on_alarm):
    prefill, seen = Prefill(2), []
    expected = prefill.attend()

    def use():
        seen.append(is_inside(prefill))
        return not any(seen)

    on_alarm(use)
    found = prefill.attend()
    assert any(seen)
    np.testing.assert_array_equal(found, expected)


@pytest.mark.long
@pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")
def test_attend_in_a_child_that_the_handler_has_forked_says_so(on_alarm):
    prefill, parent, children = Prefill(2), os.getpid(), []
    expected = prefill.attend()

    def fork():
        if is_inside(prefill):
            children.append(os.fork())
        return not children

    on_alarm(fork)
    code = 2
    try:
        found = prefill.attend()
    except RuntimeError as error:
        code = 0 if "forked" in str(error) else 1
    finally:
        if os.getpid() != parent:
            os._exit(code)
    np.testing.assert_array_equal(found, expected)
    _, status = os.waitpid(children[0], 0)
    assert os.waitstatus_to_exitcode(status) == 0
