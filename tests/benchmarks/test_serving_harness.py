"""The open loop on a simulated clock: by hand-computed examples, and properties of every run."""

from __future__ import annotations

import time

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from benchmarks.serving.harness import SimulatedClock, Tick, WallClock, serve, serve_side_by_side
from benchmarks.serving.metrics import latencies, percentiles, summarize, usage
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


def test_continuous_batching_fills_a_place_as_soon_as_it_is_free():
    """Two slots. Tick 1: A and B are computed, B is through. 2: C in. 3: C through. 4: A's last token, D in."""
    record = run(SlotServer(2), FOUR)
    assert times_of(record) == {0: [1, 2, 3, 4], 1: [1], 2: [2, 3], 3: [4]}
    assert record.column("decodes").tolist() == [0, 1, 2, 1]
    assert record.column("prefill_tokens").tolist() == [4, 4, 0, 4]
    assert record.column("running").tolist() == [2, 2, 2, 2]
    assert record.column("waiting").tolist() == [2, 1, 1, 0]
    assert record.wall == 4


def test_idle_time_is_skipped():
    work = workload((2, 1, 1), (10, 1, 2))
    record = run(SlotServer(4), work)
    assert times_of(record) == {0: [3], 1: [11, 12]}
    assert record.wall == 10
    clock = WallClock()
    clock.skip_to(1000.0)
    assert 1000 <= clock.now() < 1100
    clock.skip_to(5.0)  # it does not go back
    assert clock.now() >= 1000


def test_latencies_by_hand():
    """A arrives at 0.5 and is seen at tick 1 (until 2); ticks take 1 s."""
    work = workload((0, 1, 2), (0.5, 1, 3))
    record = run(SlotServer(2), work)
    assert times_of(record) == {0: [1, 2], 1: [2, 3, 4]}
    found = latencies(record)
    assert found["ttft"].tolist() == [1, 1.5]
    assert found["tpot"].tolist() == [1, 1]
    assert found["itl"].tolist() == [1, 1, 1]


def test_a_prompt_longer_than_a_chunk_takes_several_ticks_and_no_decode_waits_for_it():
    work = workload((0, 1, 5), (1, 10, 1))
    record = run(SlotServer(2, prefill_chunk=4), work)
    assert record.column("prefill_tokens").tolist() == [1, 4, 4, 2, 0]
    assert times_of(record) == {0: [1, 2, 3, 4, 5], 1: [4]}


def test_work_after_the_last_tick_of_a_turn_is_cpu_time_of_its_server():
    class Late(SlotServer):
        def settle(self):
            end = time.process_time() + 0.02
            while time.process_time() < end:
                pass

    late, prompt = serve_side_by_side([(Late(2), FOUR), (SlotServer(2), FOUR)])
    assert summarize(late, find_phases(late))["cpu_seconds"] >= 0.02 > prompt.settled


def test_a_server_that_loses_tokens_is_detected():
    class Lossy(SlotServer):
        def describe(self):
            tick = super().describe()
            tick.emitted = tick.emitted[1:]
            return tick

    with pytest.raises(RuntimeError, match="4 tokens were generated, 8 were asked for"):
        run(Lossy(2), FOUR)


# ----------------------------------------------------------------------------------------- phases by hand


class Scripted:
    """A server whose ticks are given: (rows that decode, prompt tokens)."""

    def __init__(self, ticks):
        self.ticks = [Tick(np.zeros(1, int), decodes, prefill) for decodes, prefill in ticks]

    def add(self, number, prompt, max_tokens):
        self.left = list(self.ticks)

    @property
    def is_busy(self):
        return bool(self.left)

    def tick(self):
        self.last = self.left.pop(0)

    def describe(self):
        return self.last


def scripted(ticks, seconds):
    durations = iter(seconds)
    return serve(Scripted(ticks), workload((0, 1, len(ticks))), SimulatedClock(lambda tick: next(durations)))


RAMPED = [(0, 9), (1, 9), (3, 9), (4, 0), (4, 9), (3, 0), (4, 9), (4, 0), (2, 0), (1, 0)]


def test_phases_by_hand():
    """The batch is full at tick 3; the last prompt is computed in tick 6."""
    phases = find_phases(scripted(RAMPED, [1, 2, 3, 4, 5, 6, 7, 8, 9, 10]))
    spans = [(p.first, p.last, p.seconds, p.tokens) for p in (phases.ramp, phases.steady, phases.tail)]
    assert spans == [(0, 3, 6, 3), (3, 7, 22, 4), (7, 10, 27, 3)]
    assert phases.level == 4
    assert phases.steady.tokens_per_sec == pytest.approx(4 / 22)


def test_spikes_are_counted_by_factor_and_by_seconds():
    seconds = [1, 1, 1, 1, 1, 1, 1, 6, 5, 1]
    record = scripted(RAMPED, seconds)
    phases = find_phases(record)
    assert (phases.spikes.tolist(), phases.spike_seconds, phases.spike_threshold) == ([7], 6, 5)


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


@settings(max_examples=60, deadline=None)
@given(values=st.lists(st.floats(0, 1e6), min_size=1, max_size=50))
def test_percentiles_are_those_of_sorted_values(values):
    """By the definition: linear between the two values around rank (n - 1) * p."""
    found = percentiles("x", np.array(values))
    ordered = sorted(values)
    for p in (50, 95, 99):
        rank = (len(values) - 1) * p / 100
        low = int(rank)
        high = min(low + 1, len(values) - 1)
        expected = ordered[low] + (ordered[high] - ordered[low]) * (rank - low)
        assert found[f"x_p{p}"] == pytest.approx(expected, rel=1e-9, abs=1e-9)
    assert percentiles("x", np.zeros(0)) == {"x_p50": None, "x_p95": None, "x_p99": None}


def test_the_summary_has_numbers_of_its_record():
    record = run(SlotServer(2, slot_blocks=3), FOUR)
    found = summarize(record, find_phases(record)) | usage(record, token_nbytes=10)
    assert found["tokens"] == 8
    assert found["tokens_per_sec"] == 2
    assert found["ttft_ms_p50"] == 1500  # of 1, 1, 2, 4 s
    assert found["decode_tick_ms_p50"] == 1000
    assert found["blocks_in_use_peak"] == 6
    assert found["blocks_in_use_mean"] == 6  # both slots are taken in every tick
    assert found["paged_kv_bytes_read"] == 10 * (2 + 2 + 3 + 4 + 4 + 5 + 5 + 4)


def test_samples_are_sequences_of_their_request():
    class Twice(SlotServer):
        def describe(self):
            tick = super().describe()
            tick.emitted = np.concatenate([2 * tick.emitted, 2 * tick.emitted + 1])
            return tick

    work = workload((0, 1, 2), (1, 1, 1))
    work = Workload("twice", work.arrivals, work.prompts, work.max_tokens, samples=2)
    record = run(Twice(2), work)
    assert times_of(record) == {0: [1, 2], 1: [1, 2], 2: [2], 3: [2]}
    assert latencies(record)["ttft"].tolist() == [1, 1, 1, 1]
