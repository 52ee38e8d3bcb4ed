"""A budget per sequence under the scheduler: what rows hold, what requests need, and that nothing else changes.

``KVPOOL_LONG=1`` runs 500 random workloads, ``KVPOOL_WORKLOAD=17`` number 17 alone.
"""

import os
from contextlib import contextmanager, suppress
from unittest import mock

import numpy as np
import pytest
from eviction_workload import EvictedMemory, EvictingRunner, draw_evicting, leave_out_beams
from scheduler_workload import Runner, draw
from token_model import TokenModel

from kvpool import Plan, Pool, Request, Scheduler
from kvpool.errors import CapacityExceeded, OutOfBlocks, PlanStateError, RequestRejected
from kvpool.eviction import H2O, BlockEviction, Evictor, Memory, SlidingWindow

COUNT = 500 if os.environ.get("KVPOOL_LONG") else 24
ONLY = os.environ.get("KVPOOL_WORKLOAD")
HEAVY, WHOLE = H2O(max_kv=16, sink=2, slack=2), BlockEviction(max_kv=16, sink=2, recent_tokens=4)
POLICIES = (HEAVY, WHOLE)


@pytest.mark.long
def test_random_workload_keeps_the_tokens_that_the_policy_names():
    evictions = shared = preempted = spilled = 0
    for seed in [int(ONLY)] if ONLY else range(COUNT):
        runner = EvictingRunner(*draw_evicting(seed), break_rate=0.05 * (seed % 2)).run()
        counts = runner.scheduler.stats()
        evictions += runner.oracle.evictions
        shared += runner.oracle.shared
        preempted += counts.preemptions > 0
        spilled += counts.spills > 0
        assert (counts.evicted_tokens > 0) == (runner.oracle.evictions > 0)
    if not ONLY:  # workloads in which nothing happens would prove nothing
        assert evictions > 500 and shared > 50 and min(preempted, spilled) >= 2, (evictions, shared, preempted, spilled)


def plain_workload(seed):
    workload = draw(seed)
    leave_out_beams(workload)
    return workload


@pytest.mark.parametrize("seed", range(6))
def test_budget_that_no_context_reaches_changes_no_step(seed):
    plain = Runner(plain_workload(seed)).run()

    class Roomy(Runner):
        def __init__(self, workload):
            def make(pool, **options):
                memory = EvictedMemory(TokenModel(), pool)
                return Scheduler(pool, eviction=Evictor(H2O(max_kv=4096), pool, memory), **options)

            super().__init__(workload, make)

    evicting = Roomy(plain_workload(seed)).run()
    assert evicting.log == plain.log and evicting.scheduler.stats() == plain.scheduler.stats()
    assert evicting.pool.fingerprint() == plain.pool.fingerprint()


# ---- one at a time


def build(policy, num_blocks=40, block_size=4, prefix_cache=False, **options):
    pool = Pool(num_blocks, block_size, prefix_cache=prefix_cache)
    memory = EvictedMemory(TokenModel(), pool)
    evictor = Evictor(policy, pool, memory)
    return pool, memory, Scheduler(pool, eviction=evictor, **{"prefill_chunk": 8, "max_step_tokens": 64, **options})


def run(scheduler, memory, steps=10**6):
    outputs = []
    while steps and (step := scheduler.schedule()) is not None:
        states = memory.forward(step.tokens, step.plan)
        outputs += scheduler.update(step, TokenModel().greedy(states[step.sample_at]))
        scheduler.check()
        steps -= 1
    return outputs


@pytest.mark.parametrize("policy", POLICIES)
def test_long_request_needs_its_budget_and_a_chunk(policy):
    # 16 - 1 tokens when a step begins and 8 of the step: 23, in blocks of four six, seven if a part of one is gone.
    pool, memory, scheduler = build(policy, num_blocks=8)
    scheduler.add(Request(range(100), max_tokens=60))
    most = 0
    while (step := scheduler.schedule()) is not None:
        states = memory.forward(step.tokens, step.plan)
        most = max(most, pool.stats().used)
        assert (step.evicted >= step.plan.positions[0] - 15).all()
        outputs = scheduler.update(step, TokenModel().greedy(states[step.sample_at]))
        scheduler.check()
    assert outputs[0].tokens.size == 60 and outputs[0].preemptions == 0
    assert most <= 7 and pool.stats().used == 0
    with pytest.raises(RequestRejected, match="need 7 blocks, the pool has 6"):
        build(policy, num_blocks=7)[2].add(Request(range(100), max_tokens=60))


def test_copies_of_a_cached_prompt_count_where_a_request_is_judged():
    request = Request(range(100), max_tokens=60)
    # Seven, four for copies, one cached twice, one reserved.
    build(HEAVY, num_blocks=13, prefix_cache=True)[2].add(request)
    with pytest.raises(RequestRejected, match="need 12 blocks, the pool has 11"):
        build(HEAVY, num_blocks=12, prefix_cache=True)[2].add(request)
    build(WHOLE, num_blocks=9, prefix_cache=True)[2].add(request)  # whole blocks are never copied


@pytest.mark.parametrize("policy", POLICIES)
def test_prompt_is_found_again_as_far_as_it_came_before_it_lost_tokens(policy):
    pool, memory, scheduler = build(policy, prefix_cache=True)
    scheduler.add(Request(range(60), max_tokens=5))
    (first,) = run(scheduler, memory)
    scheduler.add(Request(range(60), max_tokens=5))
    (second,) = run(scheduler, memory)
    assert (first.num_cached, second.num_cached) == (0, 12)  # below the budget of 16, in whole blocks
    scheduler.add(Request(range(10), max_tokens=3))  # below the budget: as ever
    (third,) = run(scheduler, memory)
    assert third.num_cached == 8
    assert np.array_equal(third.tokens, TokenModel().solo(range(10), 3).tokens)
    assert pool.stats().used == 0


def test_failed_step_leaves_no_score_and_no_token():
    memory, scheduler = build(HEAVY)[1:]
    scheduler.add(Request(range(40), max_tokens=30))
    run(scheduler, memory, 7)
    evictor = scheduler._core.eviction
    step = scheduler.schedule()
    before = evictor.memory.scores.copy(), evictor.memory.known.copy()
    evictor.begin(step.lanes, step.plan.seq_lens[: len(step.lanes)].copy())
    evictor.observe(0, np.ones((1, 1, 16), np.float32))
    memory.spoil(step.plan)
    scheduler.fail(step)
    scheduler.check()
    assert np.array_equal(evictor.memory.scores, before[0]) and np.array_equal(evictor.memory.known, before[1])
    assert run(scheduler, memory)[0].tokens.size == 30


def test_compacted_sequence_is_not_spilled():
    class Tier:
        calls = 0

        def spill_to_host(self, handle, blocks):
            self.calls += 1
            return list(blocks)

        def prefetch(self, kept, handle, blocks):
            raise AssertionError("nothing was spilled")

    tier = Tier()
    pool, memory, scheduler = build(HEAVY, num_blocks=9, tier=tier, watermark=0)
    for name in range(2):
        scheduler.add(Request(range(name, name + 30), max_tokens=40))
        run(scheduler, memory, 6)
    guest = pool.blocks.alloc(pool.stats().blank)
    with suppress(OutOfBlocks):
        run(scheduler, memory, 8)
    assert not tier.calls
    pool.blocks.decref(guest)
    assert all(output.tokens.size == 40 for output in run(scheduler, memory))


def two_rows(policy, pool):
    """An evictor with two sequences of 20 tokens, and the plan that they were stepped by."""
    memory = EvictedMemory(TokenModel(), pool)
    plan = Plan(pool, 2, 64, formats=("block_tables", "seq_lens", "slot_mapping", "positions", "cu_q_lens"))
    handles = [int(pool.open()) for _ in range(2)]
    pool.step(plan, handles, 20)
    memory.forward(np.arange(40), plan)
    pool.done(plan)
    return Evictor(policy, pool, memory, 2), plan, handles


def evict_both(evictor, handles, after):
    pool = evictor.pool
    lens = [pool.kv_len(handle) for handle in handles]
    evictor.evict(handles, np.arange(2), lens, after, [pool.num_tokens(handle) for handle in handles])


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("pending", [0, 1])
def test_row_before_one_of_a_pending_plan_is_not_touched(policy, pending):
    pool = Pool(40, 4)
    evictor, plan, handles = two_rows(policy, pool)
    pool.step(plan, handles[pending : pending + 1], 1)
    before, written = pool.fingerprint(), evictor.backend.position.copy()
    lens = [pool.kv_len(handle) for handle in handles]
    with pytest.raises(PlanStateError, match="is a row of a pending plan"):
        evict_both(evictor, handles, [n - 8 for n in lens])
    assert pool.fingerprint() == before and np.array_equal(evictor.backend.position, written)
    assert not evictor.memory.known.any()
    pool.done(plan)
    evict_both(evictor, handles, [n - 8 for n in lens])
    assert [pool.kv_len(handle) for handle in handles] == [n - 8 for n in lens]


@pytest.mark.parametrize("policy", POLICIES)
def test_rows_of_another_length_than_the_pool_says_are_refused(policy):
    pool = Pool(40, 4)
    evictor, _, handles = two_rows(policy, pool)
    before, written = pool.fingerprint(), evictor.backend.position.copy()
    for lens in ([20, 19], [20, 21]):
        with pytest.raises(ValueError, match=r"\[evict\] lens\[1\] is \d+, the sequence holds 20 tokens"):
            evictor.evict(handles, np.arange(2), lens, [12, 12], [20, 20])
    assert pool.fingerprint() == before and np.array_equal(evictor.backend.position, written)


class Ends(Pool):
    """Its positions end when a sequence has lost more than eight tokens."""

    def evict_blocks(self, handle, indices, group=0):
        if self.num_tokens(handle) - self.kv_len(handle) + 4 * len(indices) > 8:
            raise CapacityExceeded("positions end")
        super().evict_blocks(handle, indices, group)


@pytest.mark.parametrize("last", [0, 1])
def test_row_before_one_whose_positions_end_is_not_touched(last):
    pool = Ends(40, 4)
    evictor, _, handles = two_rows(WHOLE, pool)
    before = pool.fingerprint()
    with pytest.raises(CapacityExceeded):
        evict_both(evictor, handles, [8 if row == last else 12 for row in range(2)])
    assert pool.fingerprint() == before and not evictor.memory.known.any()
    evict_both(evictor, handles, [12, 12])
    assert [pool.kv_len(handle) for handle in handles] == [12, 12]


# ---- what is refused


def test_engine_refuses_options_that_exclude_eviction():
    pool, memory, scheduler = build(HEAVY)
    for width in (1, 2):
        with pytest.raises(RequestRejected, match=rf"\[add\] a beam keeps .* \(beam_width {width}\)") as caught:
            scheduler.add(Request([1, 2], beam_width=width, n=1))
        assert caught.value.reason == "beam" and scheduler.stats().rejected == width
    with pytest.raises(TypeError, match=r"\[Scheduler\] eviction must be a kvpool.eviction.Evictor, not H2O"):
        Scheduler(pool, eviction=HEAVY)
    with pytest.raises(ValueError, match=r"\[Scheduler\] the evictor is on another pool"):
        Scheduler(Pool(8, 4), eviction=Evictor(HEAVY, pool, memory))


def test_evictor_that_could_not_work_is_not_made():
    pool, memory = build(HEAVY)[:2]
    for wrong in (16, SlidingWindow(max_kv=16)):
        words = f"policy must be a kvpool.eviction.Policy, not {type(wrong).__name__}; a window is a layer group"
        with pytest.raises(TypeError, match=rf"\[Evictor\] {words}"):
            Evictor(wrong, pool, memory)
    with pytest.raises(TypeError, match=r"\[Evictor\] pool must be a kvpool.Pool, not EvictedMemory"):
        Evictor(HEAVY, memory, memory)
    with pytest.raises(ValueError, match=r"\[BlockEviction\] max_kv is 16, in blocks of 8 the least is 20"):
        build(WHOLE, block_size=8)
    with pytest.raises(ValueError, match=r"\[Evictor\] block_size is 4 in the backend, 8 in the pool"):
        Evictor(HEAVY, Pool(40, 8), memory)
    with pytest.raises(ValueError, match=r"\[Evictor\] num_blocks is 40 in the backend, 41 in the pool"):
        Evictor(HEAVY, Pool(41, 4), memory)


# ---- faults that the workloads convict


@contextmanager
def slot_keeps_what_was_seen_before():
    start = Memory.start
    with mock.patch.object(Memory, "start", lambda self, row: start(self, row) if row >= len(self.known) else None):
        yield


@contextmanager
def shared_blocks_are_compacted_as_they_are():
    compact = Pool.compact

    def force(self, handles, lens, first=0):
        return compact(self, handles, lens, 2**30)  # as if nothing had to move

    forced = type("Forced", (Pool,), {"compact": force})
    with (
        mock.patch.object(Evictor, "_unshare", lambda *_: None),
        mock.patch("eviction_workload.Pool", forced),
        mock.patch("scheduler_workload.Pool", forced),
    ):
        yield


@pytest.mark.parametrize(
    ("fault", "seed"),  # of the first workload that shows it, so that the test is short; others do too
    [(slot_keeps_what_was_seen_before, 6), (shared_blocks_are_compacted_as_they_are, 6)],
)
def test_planted_fault_is_detected(fault, seed):
    with fault():
        for number in range(seed, seed + 60):
            try:
                EvictingRunner(*draw_evicting(number)).run()
            except (AssertionError, OutOfBlocks):
                return
    raise AssertionError("no workload noticed")
