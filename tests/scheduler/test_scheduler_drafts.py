"""Drafted tokens: every output is what decoding alone gives, and drafts take nothing from others."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from eviction_workload import EvictedMemory
from group_workload import GroupRunner, draw_groups, with_prefixes
from scheduler_workload import ONLY, Runner, Workload, draw, numbers
from schedules import MODEL, Machine, greedy

from kvpool import Group, Pool, Request, Scheduler
from kvpool.eviction import H2O, Evictor


def drafting(workload: Workload) -> Workload:
    """The same workload with drafts, of which few, most or nearly all are right. State groups are left out."""
    rng = np.random.default_rng([workload.seed, 77])
    workload.drafts = float(rng.choice([0.3, 0.8, 0.97]))
    groups = workload.pool.get("groups")
    if groups:
        groups = workload.pool["groups"] = [group for group in groups if group.kind != "state"]
        workload.pool["lookahead"] = int(rng.integers(1, min(group.size for group in groups if group.size)))
    return workload


@pytest.mark.long
def test_random_workload_with_drafts_gives_what_decoding_alone_gives():
    drafted = accepted = preempted = 0
    for seed in numbers(40, 600):
        counts = Runner(drafting(draw(seed))).run().scheduler.stats()
        drafted, accepted = drafted + counts.drafted_tokens, accepted + counts.accepted_tokens
        preempted += counts.preemptions
    assert ONLY or (drafted > 1000 and 0.2 < accepted / drafted < 0.8 and preempted > 20)


@pytest.mark.long
@pytest.mark.parametrize("prefixes", [False, True])
def test_random_workload_with_drafts_and_groups_gives_what_decoding_alone_gives(prefixes):
    accepted = rejected = 0
    for seed in numbers(20, 300):
        workload = drafting(draw_groups(seed))
        runner = GroupRunner(with_prefixes(workload) if prefixes else workload, check_every=5).run()
        counts = runner.scheduler.stats()
        accepted += counts.accepted_tokens
        rejected += counts.drafted_tokens - counts.accepted_tokens
    assert ONLY or min(accepted, rejected) > 30


# ---- one sequence


class Solo(Machine):
    """One sequence, whose drafts are those of the test."""

    def __init__(self, request: Request, drafts: Any, **options: Any) -> None:
        self.pool = Pool(32, 4)
        super().__init__(Scheduler(self.pool, speculate=drafts, **options), self.pool)
        self.scheduler.add(request)
        self.steps: list[int] = []  # inputs of each

    def execute(self, step: Any) -> Any:
        self.scheduler.check()
        self.steps.append(len(step.tokens))
        return super().execute(step)

    def tokens(self) -> list[int]:
        (output,) = self.run().values()
        assert self.pool.stats().used == 0
        return output.tokens.tolist()


def right(prompt: Any, count: int = 100) -> Any:
    """A proposer of the tokens that come, beyond any end."""
    alone = greedy(Request(prompt, count))
    return lambda rows: [alone[len(row.generated) :] for row in rows]


PROMPT = np.arange(9)


@pytest.mark.parametrize(
    ("drafts", "count", "steps", "accepted"),
    [
        (right(PROMPT), 11, [9, 9, 1], 8),  # the prompt gives one token, eight drafts nine more
        (lambda rows: [[99, 99, 99]] * len(rows), 6, [9, 4, 4, 3, 2, 1], 0),
    ],
    ids=["right", "wrong"],
)
def test_right_drafts_end_a_sequence_in_few_steps_and_wrong_ones_give_one_token_a_step(drafts, count, steps, accepted):
    solo = Solo(Request(PROMPT, count), drafts, max_step_tokens=9)
    assert solo.tokens() == greedy(Request(PROMPT, count))
    assert solo.steps == steps and solo.scheduler.stats().accepted_tokens == accepted


def test_step_says_which_tokens_were_taken():
    alone = greedy(Request(PROMPT, 20))
    solo = Solo(Request(PROMPT, 20), lambda rows: [[*alone[1:3], 99, 98]])
    solo.step()
    step = solo.scheduler.schedule()
    assert (step.num_drafts, step.taken, step.num_decodes) == (4, None, 1)
    assert step.tokens.tolist() == [*alone[:3], 99, 98]
    assert step.sample_position.tolist() == [1, 2, 3, 4, 5]
    assert [step.generated(at).tolist() for at in (0, 2)] == [alone[:1], alone[:3]]
    solo.scheduler.update(step, MODEL.greedy(solo.execute(step)))
    assert step.taken.tolist() == [True, True, True, False, False]
    assert solo.scheduler.tokens_of(0).tolist() == alone[:4]


# ---- beside others


def test_row_without_blocks_for_its_drafts_has_none():
    """The pool has exactly what the two sequences need: nobody is preempted for a draft, and some drafts run."""
    pool = Pool(8, 4, reserved_blocks=0)
    scheduler = Scheduler(pool, speculate=lambda rows: [[99] * 9] * len(rows), watermark=0)
    for prompt in ([1, 2, 3], [4, 5, 6]):
        scheduler.add(Request(prompt, 14))
    Machine(scheduler, pool).run()
    assert scheduler.stats().preemptions == 0 < scheduler.stats().drafted_tokens


@pytest.mark.parametrize("wrong", [[-1], [2**31], ["x"], [[1, 2]], 5])
def test_proposer_that_raises_or_gives_no_tokens_loses_nothing(wrong):
    turns = iter([wrong])
    solo = Solo(Request(PROMPT, 8), lambda rows: [next(turns, ())])
    solo.step()
    with pytest.raises((ValueError, TypeError), match=r"\[schedule\]"):
        solo.scheduler.schedule()
    solo.scheduler.check()
    assert solo.tokens() == greedy(Request(PROMPT, 8))


# ---- refusals


def test_pool_that_takes_no_token_back_is_refused():
    proposer = right(PROMPT)
    with pytest.raises(ValueError, match="a state takes no token back"):
        Scheduler(Pool(9, 4, groups=[Group.full(), Group.state(4)]), speculate=proposer)
    with pytest.raises(ValueError, match="only with lookahead"):
        Scheduler(Pool(9, 4, groups=[Group.full(), Group.window(8)]), speculate=proposer)
    Scheduler(Pool(9, 4, groups=[Group.full(), Group.window(8)], lookahead=1), speculate=proposer)
    with pytest.raises(TypeError, match="speculate must be callable, not int"):
        Scheduler(Pool(9, 4), speculate=4)


def test_eviction_and_drafts_exclude_each_other():
    pool = Pool(9, 4)
    evictor = Evictor(H2O(max_kv=8, sink=1), pool, EvictedMemory(MODEL, pool))
    with pytest.raises(ValueError, match="speculate and eviction exclude each other"):
        Scheduler(pool, speculate=right(PROMPT), eviction=evictor)
