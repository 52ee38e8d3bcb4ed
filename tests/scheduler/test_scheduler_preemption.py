"""Out of blocks: what victims keep, and that they come back exactly. Random workloads judge who makes room."""

import numpy as np
import pytest
from scheduler_workload import Runner, Workload
from schedules import Machine, drain, greedy

from kvpool import Group, Pool, Request, Scheduler


def test_preempt_grower_is_the_sequence_that_finds_no_block():
    """a and b grow in the same step, one block is left, rows are served in order: b finds none."""
    pool = Pool(14, 2)
    scheduler = Scheduler(pool, watermark=0, preempt="grower")
    machine = Machine(scheduler, pool)
    scheduler.add(Request([1, 2], max_tokens=5, id="a"))  # 1 block, full
    scheduler.add(Request([3, 4], max_tokens=5, id="b"))  # 1 block, full
    scheduler.add(Request([5], max_tokens=5, id="c"))  # 1 block, room
    machine.step()
    held = pool.open(2 * (pool.stats().blank - 1))
    step = scheduler.schedule()
    assert [request.id for request in step.requests] == ["a", "c"]
    scheduler.fail(step)
    pool.close(held)
    assert {name: o.preemptions for (name, _), o in machine.run().items()} == {"a": 0, "b": 1, "c": 0}


def test_preempt_recomputed_tokens_are_counted():
    """Pools from one request up."""
    preemptions = 0
    for blocks in range(9, 20):
        pool = Pool(blocks, 2)
        scheduler = Scheduler(pool, watermark=0)
        for start in range(4):
            scheduler.add(Request(range(start, start + 5), max_tokens=11))
        Machine(scheduler, pool).run()
        stats = scheduler.stats()
        assert bool(stats.recomputed_tokens) == bool(stats.preemptions)
        assert stats.admissions == 4 + stats.preemptions
        assert stats.prefill_tokens + stats.decode_tokens == 4 * 15 + stats.recomputed_tokens
        preemptions += stats.preemptions
    assert preemptions > 10


def test_preempt_full_blocks_are_committed_first_so_that_coming_back_is_cheap():
    """Prompts of one token fill no block: what is found again was committed when it was lost."""
    recomputed = {}
    for prefix_cache in (False, True):
        pool = Pool(16, 2, prefix_cache=prefix_cache, seed=1)
        scheduler = Scheduler(pool, watermark=0)
        for start in (0, 100):
            scheduler.add(Request([start], max_tokens=18))
        Machine(scheduler, pool).run()
        assert scheduler.stats().preemptions >= 1
        assert bool(scheduler.stats().again_hit_tokens) == prefix_cache
        recomputed[prefix_cache] = scheduler.stats().recomputed_tokens
    assert recomputed[True] < recomputed[False]


GROUPS = [Group.full(), Group.full(block_size=4)]


@pytest.mark.parametrize(
    ("num_blocks", "groups", "how"),
    [(16, None, {}), (22, GROUPS, {}), (26, None, {"n": 4}), (22, None, {"beam_width": 3})],
    ids=["one table", "groups", "samples", "beams"],
)
def test_what_a_request_finds_of_itself_is_no_hit(num_blocks, groups, how):
    """No two prompts have a token in common. What is found was computed before a preemption, or by another sample."""
    pool = Pool(num_blocks, 2, prefix_cache=True, groups=groups, seed=1)
    scheduler = Scheduler(pool, watermark=0, max_running=6)
    requests = 4
    for number in range(requests):
        scheduler.add(Request(range(100 * number, 100 * number + 5), max_tokens=10, **how))
    outputs = []
    while (step := scheduler.schedule()) is not None:
        beams = np.count_nonzero(step.beam_width)
        scores = np.random.default_rng(1).normal(size=(beams, 8)).astype(np.float32) - 3
        continuations = np.tile(np.int32(range(8)), (beams, 1)), scores
        outputs += scheduler.update(step, step.sample_position * 10 + step.sample_index, beams=continuations)
    mine, stats = scheduler.stats(), pool.prefix.stats()
    assert (mine.hit_tokens, stats.hit_tokens, stats.hit_rate) == (0, 0, 0.0)
    assert sum(output.num_cached for output in outputs) == 0
    assert stats.queries == requests
    assert stats.again_hit_tokens == mine.again_hit_tokens > 0
    assert 0 < stats.again_queries <= mine.admissions - requests


def test_what_a_request_finds_of_others_is_a_hit_once():
    pool = Pool(14, 2, prefix_cache=True, seed=1)
    scheduler = Scheduler(pool, watermark=0)
    for end in (50, 60):
        scheduler.add(Request([*range(8), end], max_tokens=10))
        step = scheduler.schedule()  # the prompt of the first is known when the second comes
        scheduler.update(step, np.full(len(step.sample_at), 7, np.int32))
    drain(scheduler, 7)
    assert scheduler.stats().preemptions > 0
    assert scheduler.stats().hit_tokens == pool.prefix.stats().hit_tokens == 8


def test_request_left_alone_with_blocks_that_are_cached_twice_has_the_whole_pool():
    """Both compute the same five tokens; the first one's are cached, and leave, as nobody needs them."""
    pool = Pool(20, 1, reserved_blocks=0, prefix_cache=True)
    scheduler = Scheduler(pool, watermark=0)
    machine = Machine(scheduler, pool)
    short = Request([*range(5), 50], max_tokens=1, id="short")
    exact = Request([*range(5), *range(60, 65)], max_tokens=11, id="exact")  # 20 tokens with KV: the whole pool
    scheduler.add(short)
    scheduler.add(exact)
    outputs = machine.run()
    assert outputs["exact", 0].tokens.tolist() == greedy(exact)
    assert (outputs["short", 0].preemptions, outputs["exact", 0].preemptions) == (0, 0)
    assert pool.stats().used == 0


def test_sample_left_alone_with_blocks_that_are_cached_twice_goes_on():
    """Of three samples two make room for the third, and leave blocks in the cache that it has copies of."""
    pool = {"num_blocks": 5, "block_size": 2, "reserved_blocks": 0, "max_seqs": 6, "prefix_cache": True}
    options = {"max_running": 3, "prefill_chunk": 1, "max_step_tokens": 1, "mixed": False, "preempt": "last"}
    requests = [Request([0, 0], n, id=at, n=3, user=at) for at, n in enumerate((1, 8))]
    workload = Workload(0, pool, options | {"watermark": None, "plans": 1}, [(0, one) for one in requests])
    assert Runner(workload).run().watch.restarted is None


@pytest.mark.parametrize("mixed", [True, False])
def test_step_when_the_only_decode_was_preempted_is_a_chunk_of_those_who_stay(mixed):
    pool = Pool(8, 1, reserved_blocks=0)
    scheduler = Scheduler(pool, max_running=4, prefill_chunk=1, watermark=0, preempt="grower", mixed=mixed)
    machine = Machine(scheduler, pool)
    requests = [Request([1], 6, id=0), Request([2, 3, 4, 5, 6], 1, id=1)]
    scheduler.add(requests[0])
    machine.step()
    scheduler.add(requests[1])
    outputs = machine.run()
    assert scheduler.stats().preemptions > 0 and pool.stats().used == 0
    assert {request.id: greedy(request) for request in requests} == {
        name: output.tokens.tolist() for (name, _), output in outputs.items()
    }
