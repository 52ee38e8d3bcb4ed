"""The open loop on a simulated clock: by hand-computed examples, and properties of every run."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from benchmarks.serving.harness import SimulatedClock, serve
from benchmarks.serving.metrics import latencies
from benchmarks.serving.phases import find_phases
from benchmarks.serving.slots import SlotServer
from benchmarks.serving.workload import Workload


def workload(*requests):
    """(arrival, prompt, new tokens) each."""
    arrivals, prompts, new = zip(*requests, strict=True)
    tokens = [np.zeros(n, np.int32) for n in prompts]
    return Workload("by hand", np.array(arrivals, np.float64), tokens, np.array(new, np.int64))


def run(server, work, cost=lambda tick: 1.0):
    return serve(server, work, SimulatedClock(cost))


def times_of(record):
    sequences, times = record.token_times
    return {int(s): times[sequences == s].tolist() for s in np.unique(sequences)}


# ------------------------------------------------------------------------------------------- by hand


FOUR = workload((0, 2, 4), (0, 2, 1), (0, 4, 2), (0, 4, 1))


def test_latencies_by_hand():
    """A arrives at 0.5 and is seen at tick 1 (until 2); ticks take 1 s."""
    work = workload((0, 1, 2), (0.5, 1, 3))
    record = run(SlotServer(2), work)
    assert times_of(record) == {0: [1, 2], 1: [2, 3, 4]}
    found = latencies(record)
    assert found["ttft"].tolist() == [1, 1.5]
    assert found["tpot"].tolist() == [1, 1]
    assert found["itl"].tolist() == [1, 1, 1]


def test_a_server_that_loses_tokens_is_detected():
    class Lossy(SlotServer):
        def describe(self):
            tick = super().describe()
            tick.emitted = tick.emitted[1:]
            return tick

    with pytest.raises(RuntimeError, match="4 tokens were generated, 8 were asked for"):
        run(Lossy(2), FOUR)


# --------------------------------------------------------------------------------------------- properties


requests = st.lists(st.tuples(st.floats(0, 20), st.integers(1, 30), st.integers(1, 12)), min_size=1, max_size=12).map(
    lambda found: workload(*sorted(found))
)


@settings(max_examples=60, deadline=None)
@given(work=requests, slots=st.integers(1, 5), chunk=st.integers(1, 40), target=st.integers(1, 6))
def test_every_run_adds_up(work, slots, chunk, target):
    record = run(
        SlotServer(slots, prefill_chunk=chunk),
        work,
        lambda tick: 0.5 + 0.125 * tick.decodes + 0.0625 * tick.prefill_tokens,
    )
    # every request gets its tokens, after it arrived, in order of time
    counts = np.bincount(record.token_times[0], minlength=len(work))
    assert counts.tolist() == work.max_tokens.tolist()
    assert record.num_tokens == work.num_tokens == int(record.tokens_per_tick.sum())
    found = latencies(record)
    assert len(found["ttft"]) == len(work)
    assert found["ttft"].min() > 0
    assert len(found["itl"]) == work.num_tokens - len(work)
    assert all(gap > 0 for gap in found["itl"])
    # ramp, steady and tail partition the ticks, their tokens and the time
    phases = find_phases(record, target)
    parts = (phases.ramp, phases.steady, phases.tail)
    assert [part.first for part in parts] == [0, phases.ramp.last, phases.steady.last]
    assert phases.tail.last == len(record)
    assert sum(part.tokens for part in parts) == work.num_tokens
    total = record.column("end")[-1] - record.column("start")[0]
    assert sum(part.seconds for part in parts) == pytest.approx(total)
    assert not record.column("prefill_tokens")[phases.tail.first :].any()
    assert (record.column("decodes")[: phases.ramp.last] < max(phases.level, 1)).all()
