"""A budget per sequence under the scheduler: what rows hold, what requests need, and that nothing else changes."""

from collections import Counter

import numpy as np
import pytest
from eviction_group_workload import EvictingGroupRunner, draw_evicting_groups
from eviction_workload import EvictedMemory, EvictingRunner, draw_evicting, leave_out_beams
from scheduler_workload import ONLY, Runner, draw, numbers
from schedules import drain
from token_model import TokenModel

from kvpool import Group, Plan, Pool, Request, Scheduler
from kvpool.errors import CapacityExceeded, OutOfBlocks, PlanStateError, RequestRejected
from kvpool.eviction import H2O, BlockEviction, Evictor, SlidingWindow

HEAVY, WHOLE = H2O(max_kv=16, sink=2, slack=2), BlockEviction(max_kv=16, sink=2, recent_tokens=4)
POLICIES = (HEAVY, WHOLE)
FORMATS = ("block_tables", "seq_lens", "slot_mapping", "positions", "cu_q_lens")


@pytest.mark.long
@pytest.mark.parametrize("groups", [False, True])
def test_random_workload_keeps_the_tokens_that_the_policy_names(groups):
    kind, drawn, rate = (EvictingGroupRunner, draw_evicting_groups, 3) if groups else (EvictingRunner, draw_evicting, 2)
    reached = Counter()
    for seed in numbers(24, 500):
        runner = kind(*drawn(seed), break_rate=0.05 * (seed % rate == rate - 1)).run()
        counts = runner.scheduler.stats()
        happens = {"preempted": counts.preemptions, "spilled": counts.spills or groups, "cancelled": counts.cancelled}
        happens |= {"found": counts.hit_tokens + counts.again_hit_tokens, "in order": runner.pool.options.in_order}
        reached.update({name: bool(value) for name, value in happens.items()})
        reached.update(evictions=runner.oracle.evictions, shared=runner.oracle.shared)
        assert (counts.evicted_tokens > 0) == (runner.oracle.evictions > 0)
    if not ONLY:  # workloads in which nothing happens would prove nothing
        assert min(reached.values()) >= 2 and reached["evictions"] > 300, reached


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


def build(policy, num_blocks=40, block_size=4, *, groups=None, longest=None, prefix_cache=False, **options):
    pool = Pool(num_blocks, block_size, max_blocks_per_seq=longest, groups=groups, prefix_cache=prefix_cache)
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


# ---- layer groups


def groups_of(slots=8, window=40, **full):
    return [Group.full(**full), Group.window(8, arena=1, num_blocks=window), Group.state(slots)]


def build_groups(policy, num_blocks=40, **options):
    return build(policy, num_blocks, **{"groups": groups_of(), "longest": 99} | options)


def most_used(pool):
    return [pool.stats(arena).peak_used for arena in range(3)]


@pytest.mark.parametrize("policy", [HEAVY, WHOLE])
def test_long_request_needs_its_budget_in_one_arena_and_its_window_in_another(policy):
    # 16 - 1 tokens when a step begins and 8 of the step, anywhere in blocks of four: 7. Window: 8 - 1 + 8 tokens.
    pool, _, scheduler = build_groups(policy, 8, groups=groups_of(slots=2, window=6))
    scheduler.add(Request(range(100), max_tokens=60))
    (output,), most = drain(scheduler), most_used(pool)
    assert output.tokens.size == 60 and output.preemptions == 0 and scheduler.stats().evicted_tokens > 100
    assert 5 <= most[0] <= 7 and most[1] <= 5 and most[2] == 2
    assert [pool.stats(arena).used for arena in range(3)] == [0, 0, 0]
    with pytest.raises(RequestRejected, match="need 7 blocks of arena 0, the pool has 6"):
        build_groups(policy, 7)[2].add(Request(range(100), max_tokens=60))
    with pytest.raises(RequestRejected, match="159 tokens need 40 blocks, a sequence has at most 39"):
        build_groups(policy, longest=39)[2].add(Request(range(100), max_tokens=60))  # positions are not evicted


def test_copies_of_a_cached_prompt_count_where_a_request_is_judged():
    how = {"groups": [Group.full(columns=2), Group.window(8)], "prefix_cache": True}
    # Columns of seven entries, four for copies, one cached twice. Window: five. One block is reserved.
    build_groups(HEAVY, 1 + 2 * 12 + 5, **how)[2].add(Request(range(100), max_tokens=60))
    with pytest.raises(RequestRejected, match="need 29 blocks, the pool has 28"):
        build_groups(HEAVY, 2 * 12 + 5, **how)[2].add(Request(range(100), max_tokens=60))
    build_groups(WHOLE, 1 + 2 * 8 + 5, **how)[2].add(Request(range(100), 60))


def test_missing_blocks_for_copies_are_said_of_the_arena_that_lacks_them():
    groups = [Group.window(64), Group.full(arena=1, num_blocks=41)]
    pool = Pool(41, 4, max_blocks_per_seq=60, groups=groups, prefix_cache=True)
    policy = H2O(max_kv=32, sink=2, slack=2)
    evictor = Evictor(policy, pool, EvictedMemory(TokenModel(), pool), group=1)
    scheduler = Scheduler(pool, eviction=evictor, prefill_chunk=8, max_step_tokens=64)
    scheduler.add(Request(range(29), max_tokens=40))
    with pytest.raises(OutOfBlocks, match="copies that eviction needs in arena 1") as caught:
        for number in range(40):
            step = scheduler.schedule()
            scheduler.update(step, np.zeros(len(step.sample_at), np.int32))
            if number == 4:
                pool.fork(int(scheduler.handles[0]))  # somebody else shares its blocks, and takes all but two
                taken = pool.blocks.arena(1).alloc(pool.stats(1).free)
                pool.blocks.arena(1).decref(taken[:2])
    assert caught.value.arena == 1 and pool.stats(0).free > 0


def test_columns_of_the_group_are_counted_and_evicted_together():
    pool, _, scheduler = build_groups(HEAVY, 22, groups=groups_of(columns=3))
    scheduler.add(Request(range(100), max_tokens=60))
    drain(scheduler)
    assert 18 <= most_used(pool)[0] <= 21
    with pytest.raises(RequestRejected, match="need 21 blocks of arena 0, the pool has 20"):
        build_groups(HEAVY, 21, groups=groups_of(columns=3))[2].add(Request(range(100), max_tokens=60))


def test_rows_that_lost_tokens_say_so_and_keep_their_positions():
    pool, _, scheduler = build_groups(HEAVY)
    scheduler.add(Request(range(60), max_tokens=5))
    seen = 0
    while (step := scheduler.schedule()) is not None:
        (handle,) = step.handles.tolist()
        length = int(step.plan.positions[len(step.tokens) - 1]) + 1
        assert pool.kv_len(handle) == step.plan.groups[0].kv_lens[0] == length - step.evicted[0] <= 15 + 8
        assert pool.kv_len(handle, 1) == pool.num_tokens(handle) == length
        assert step.plan.positions[: len(step.tokens)].tolist() == list(range(length - len(step.tokens), length))
        seen = max(seen, int(step.evicted[0]))
        scheduler.update(step, np.zeros(len(step.sample_at), np.int32))
    assert seen >= 64 - 16
