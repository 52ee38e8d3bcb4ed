"""`PagedServer` with a model that costs nothing: the scheduler and the pool under the open loop."""

from __future__ import annotations

import numpy as np
import pytest

from benchmarks.serving.harness import SimulatedClock, serve
from benchmarks.serving.paged import NullModel, PagedServer
from benchmarks.serving.workload import Lengths, Workload, make_workload
from kvpool import Pool, Scheduler


def paged(num_blocks=200, block_size=4, max_running=8, samples=1, **options):
    pool = Pool(num_blocks, block_size, max_seqs=256, max_blocks_per_seq=64, prefix_cache=True)
    scheduler = Scheduler(pool, max_running=max_running, **options)
    return PagedServer(scheduler, pool, NullModel(), max_running=max_running, samples=samples), scheduler, pool


def mixed(requests=60, samples=1, rate=3.0, seed=5):
    lengths = Lengths.parse("lognormal:12:0.8:60")
    return make_workload(lengths, lengths, requests=requests, rate=rate, shared_prefix=9, samples=samples, seed=seed)


def by_hand(*requests):
    arrivals, prompts, new = zip(*requests, strict=True)
    tokens = [np.arange(n, dtype=np.int32) + 100 * i for i, n in enumerate(prompts)]
    return Workload("by hand", np.array(arrivals, np.float64), tokens, np.array(new, np.int64))


def test_it_serves_like_slots_where_there_are_blocks_for_everybody():
    """The example of the slots, by hand: the same tokens at the same times."""
    work = by_hand((0, 2, 4), (0, 2, 1), (0, 4, 2), (0, 4, 1))
    server, _, pool = paged(max_running=2)
    record = serve(server, work, SimulatedClock())
    sequences, times = record.token_times
    assert sequences.tolist() == [0, 0, 0, 0, 1, 2, 2, 3]
    assert times.tolist() == [1, 2, 3, 4, 1, 2, 3, 4]
    assert record.column("decodes").tolist() == [0, 1, 2, 1]
    assert record.column("prefill_tokens").tolist() == [4, 4, 0, 4]
    assert record.column("context_tokens").tolist() == [2 + 2, 3 + 4, 4 + 5, 5 + 4]
    assert record.column("blocks_touched").tolist() == [2, 2, 3, 3]
    assert record.column("blocks_in_use").tolist() == [2, 2, 3, 3]
    assert pool.stats().used == 0


@pytest.mark.parametrize(("num_blocks", "preempt"), [(30, "last"), (30, "longest"), (45, "grower"), (400, "priority")])
@pytest.mark.parametrize("samples", [1, 3])
def test_every_token_of_every_sequence_is_counted_once(num_blocks, preempt, samples):
    work = mixed(samples=samples)
    server, scheduler, pool = paged(num_blocks, preempt=preempt, prefill_chunk=7, max_step_tokens=20, samples=samples)
    record = serve(server, work, SimulatedClock(lambda tick: 0.01 * tick.decodes + 0.001 * tick.prefill_tokens + 0.1))
    counts = np.bincount(record.token_times[0], minlength=samples * len(work))
    assert counts.tolist() == np.repeat(work.max_tokens, samples).tolist()
    stats = scheduler.stats()
    assert record.column("prefill_tokens").sum() == stats.prefill_tokens
    assert record.column("decodes").sum() == stats.decode_tokens
    assert (stats.preemptions > 0) == (num_blocks < 100)
    assert record.column("blocks_in_use").max() <= num_blocks
    assert pool.stats().used == 0


def test_requests_keep_their_names_through_preemption():
    """A sequence that comes back to another slot is still the one that left: gaps between its tokens stay positive."""
    work = mixed(requests=40, rate=50.0)
    server, scheduler, _ = paged(32, prefill_chunk=16)
    record = serve(server, work, SimulatedClock())
    assert scheduler.stats().preemptions > 3
    sequences, times = record.token_times
    assert (np.diff(times)[np.diff(sequences) == 0] >= 1).all()
