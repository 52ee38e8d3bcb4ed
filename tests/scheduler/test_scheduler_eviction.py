"""A budget per sequence under the scheduler: what rows hold, what requests need, and that nothing else changes.

``KVPOOL_LONG=1`` runs 500 random workloads, ``KVPOOL_WORKLOAD=17`` number 17 alone.
"""

import os

import numpy as np
import pytest
from eviction_workload import EvictedMemory, EvictingRunner, draw_evicting, leave_out_beams
from scheduler_workload import Runner, draw
from token_model import TokenModel

from kvpool import Plan, Pool, Request, Scheduler
from kvpool.errors import CapacityExceeded, PlanStateError, RequestRejected
from kvpool.eviction import H2O, BlockEviction, Evictor, SlidingWindow

COUNT = 500 if os.environ.get("KVPOOL_LONG") else 24
ONLY = os.environ.get("KVPOOL_WORKLOAD")
HEAVY, WHOLE = H2O(max_kv=16, sink=2, slack=2), BlockEviction(max_kv=16, sink=2, recent_tokens=4)
POLICIES = (HEAVY, WHOLE)
FORMATS = ("block_tables", "seq_lens", "slot_mapping", "positions", "cu_q_lens")


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


@pytest.mark.parametrize("seed", range(6))
def test_budget_that_no_context_reaches_changes_no_step(seed):
    def roomy(pool, **options):
        memory = EvictedMemory(TokenModel(), pool)
        return Scheduler(pool, eviction=Evictor(H2O(max_kv=4096), pool, memory), **options)

    leave_out_beams(workload := draw(seed))
    plain, evicting = Runner(workload).run(), Runner(workload, roomy).run()
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


# ---- what is refused


class Ends(Pool):
    """Its positions end when a sequence has lost more than eight tokens."""

    def evict_blocks(self, handle, indices, group=0):
        if self.num_tokens(handle) - self.kv_len(handle) + 4 * len(indices) > 8:
            raise CapacityExceeded("positions end")
        super().evict_blocks(handle, indices, group)


@pytest.mark.parametrize("wrong", [0, 1])
@pytest.mark.parametrize(
    ("cause", "policy", "error"),
    [
        ("pending", HEAVY, PlanStateError),
        ("pending", WHOLE, PlanStateError),
        ("positions end", WHOLE, CapacityExceeded),
    ],
)
def test_eviction_that_is_refused_for_one_row_touches_none(cause, policy, error, wrong):
    pool = (Ends if cause == "positions end" else Pool)(40, 4)
    memory, plan = EvictedMemory(TokenModel(), pool), Plan(pool, 2, 64, formats=FORMATS)
    evictor, handles = Evictor(policy, pool, memory, 2), [int(pool.open()) for _ in range(2)]
    pool.step(plan, handles, 20)
    memory.forward(np.arange(40), plan)
    pool.done(plan)
    after = np.array([12, 12])
    if cause == "pending":
        pool.step(plan, handles[wrong : wrong + 1], 1)
    else:
        after[wrong] = 8
    before, written = pool.fingerprint(), memory.position.copy()
    with pytest.raises(error):
        evictor.evict(handles, np.arange(2), after)
    assert pool.fingerprint() == before and np.array_equal(memory.position, written) and not evictor.memory.known.any()
    if cause == "pending":
        pool.done(plan)
    after = np.array([pool.kv_len(handle) - 8 for handle in handles])
    evictor.evict(handles, np.arange(2), after)
    assert [pool.kv_len(handle) for handle in handles] == after.tolist()


def test_evictor_that_could_not_work_is_not_made():
    pool, memory = build(HEAVY)[:2]
    not_a_policy = "policy must be a kvpool.eviction.Policy, not"
    for policy, of, error, words in (
        (16, pool, TypeError, f"{not_a_policy} int"),
        (SlidingWindow(max_kv=16), pool, TypeError, f"{not_a_policy} SlidingWindow; a window is a layer group"),
        (HEAVY, memory, TypeError, "pool must be a kvpool.Pool, not EvictedMemory"),
        (HEAVY, Pool(40, 8), ValueError, "block_size is 4 in the backend, 8 in the pool"),
        (HEAVY, Pool(41, 4), ValueError, "num_blocks is 40 in the backend, 41 in the pool"),
    ):
        with pytest.raises(error, match=rf"\[Evictor\] {words}"):
            Evictor(policy, of, memory)
    with pytest.raises(ValueError, match=r"\[BlockEviction\] max_kv is 16, in blocks of 8 the least is 20"):
        build(WHOLE, block_size=8)


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
