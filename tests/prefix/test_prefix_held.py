"""Blocks that wait: a block that a pending plan has still to fill is found by nobody, whatever the layer groups.

What the blocks hold, the fuzzer judges (`tests/verify`). Each test holds for the core and for the plain model.
"""

from __future__ import annotations

import pytest

from kvpool import Group, Plan, PlanStateError, Pool
from kvpool.testing import ModelPlan, ModelPool

PROMPT = list(range(100, 116))  # four blocks
GROUPS = {
    "full": [Group.full()],
    "two columns": [Group.full(columns=2)],
    "two full": [Group.full(), Group.full(block_size=8)],
    "window": [Group.full(), Group.window(8)],
    "state": [Group.full(), Group.state(16, blocks=2)],
}
POOLS = {"core": (Pool, Plan), "model": (ModelPool, ModelPlan)}


class Family:
    """A pool, and two sequences that share all blocks of the prompt, none of them committed."""

    def __init__(self, kinds, groups, length=16):
        make_pool, self.make_plan = kinds
        self.pool = make_pool(64, 4, groups=groups, prefix_cache=True, max_seqs=8, events=1_000)
        self.columns = groups[0].columns
        self.plan = self.new_plan()
        self.first = self.pool.open([*PROMPT[:length], 1], b"", length)
        self.step(self.plan, self.first, length)
        self.second = int(self.pool.fork(self.first)[0])

    def new_plan(self):
        return self.make_plan(self.pool, 4, 64)

    def step(self, plan, handle, n):
        self.pool.step(plan, [handle], n)
        self.pool.done(plan)

    def unshare(self, plan, handle, length=14, first=0):
        """Blocks of group 0 that hold the first tokens, but for some, are to be copied."""
        self.pool.unshare(plan, [handle], length, first)
        return self.copied(plan)

    def copied(self, plan):
        """How many tokens each entry of group 0 that is to be copied has."""
        return plan.groups[0].copies[:: self.columns, 2].tolist()

    def found(self, prompt=PROMPT):
        """How many tokens of the prompt are a hit."""
        self.pool.check()
        return self.pool.prefix.match([*prompt, 1])

    def stored(self):
        """How many entries of group 0 were told of since the last time."""
        return sum(event[0] == "stored" and event[6] == 0 for event in self.pool.prefix.events())


@pytest.fixture(params=GROUPS)
def groups(request):
    return GROUPS[request.param]


@pytest.fixture(params=POOLS)
def kinds(request):
    return POOLS[request.param]


@pytest.fixture
def family(kinds, groups):
    return Family(kinds, groups)


def test_copy_that_was_rolled_back_is_never_found(family):
    """The backend raised before it copied: nobody may find the block that the copy was for."""
    pool = family.pool
    assert family.unshare(family.plan, family.first) == [4] * 4
    pool.prefix.commit(family.first, PROMPT)
    assert pool.prefix.committed(family.first) == len(PROMPT)
    assert family.found() == 0 and family.stored() == 0
    pool.rollback(family.plan)
    assert family.found() == 0 and family.stored() == 0
    assert pool.prefix.committed(family.first) == len(PROMPT)
    pool.prefix.commit(family.second, PROMPT)  # what was restored was written long ago
    pool.prefix.commit(family.first, [])  # it has the states of a checkpoint
    assert family.found() == len(PROMPT) and family.stored() == 4


@pytest.mark.parametrize("end", ["close", "close all", "reset"])
def test_copy_of_a_row_that_was_closed_is_never_found(family, end):
    pool = family.pool
    family.unshare(family.plan, family.first)
    pool.prefix.commit(family.first, PROMPT)
    if end == "reset":
        pool.reset()
    else:
        pool.close([family.first] if end == "close" else [family.first, family.second])
        assert family.found() == 0
        pool.rollback(family.plan)
    assert family.found() == 0 and family.stored() == 0
    assert pool.stats().limbo == 0


def test_copy_is_found_when_its_plan_is_done(family):
    family.unshare(family.plan, family.first)
    family.pool.prefix.commit(family.first, PROMPT)
    assert family.found() == 0 and family.stored() == 0
    family.pool.done(family.plan)
    assert family.found() == len(PROMPT) and family.stored() == 4
    pinned = family.pool.prefix.pin(PROMPT)
    assert family.pool.table(pinned, 0).tolist() == family.pool.table(family.first, 0)[:4].tolist()
    before = family.pool.prefix.stats().duplicates
    family.pool.prefix.commit(family.second, PROMPT)
    assert family.pool.prefix.stats().duplicates == before + 4


def test_copy_is_found_through_a_child_and_not_before(family):
    pool = family.pool
    family.unshare(family.plan, family.first)
    child = int(pool.fork(family.first)[0])
    pool.prefix.commit(child, PROMPT)
    assert family.found() == 0
    with pytest.raises(PlanStateError):
        pool.rollback(family.plan)
    pool.close(family.first)
    family.pool.done(family.plan)
    assert family.stored() == 4
    assert family.found() in (0, len(PROMPT))  # a child has no states to save


def test_blocks_behind_a_copy_wait_with_it_though_their_content_is_there(family):
    """Another sequence has published the first block: it is found, and nothing behind it."""
    pool = family.pool
    other = pool.open([*PROMPT, 1], b"", len(PROMPT))
    family.step(family.plan, other, len(PROMPT))
    assert family.unshare(family.plan, family.first, 4) == [4]
    pool.prefix.commit(other, PROMPT[:4])
    known = family.stored()
    pool.prefix.commit(family.first, PROMPT)
    assert family.found() == family.found(PROMPT[:4]) < len(PROMPT) and family.stored() == 0
    family.pool.done(family.plan)
    assert family.found() == len(PROMPT) and known + family.stored() == 4


def test_blocks_behind_a_copy_that_was_rolled_back_wait_until_it_is_committed(family):
    pool = family.pool
    assert family.unshare(family.plan, family.first, 8, 4) == [4]  # the second block
    pool.prefix.commit(family.first, PROMPT)
    assert family.found() <= 4 and family.stored() == 1
    pool.rollback(family.plan)
    assert family.found() <= 4 and family.stored() == 0
    pool.prefix.commit(family.first, [])
    assert family.found() <= 4 and family.stored() == 0 and pool.prefix.stats().checkpoints_published == 0
    pool.prefix.commit(family.second, PROMPT)
    pool.prefix.commit(family.first, [])  # it has the states of a checkpoint
    assert family.found() == len(PROMPT) and family.stored() == 3


def test_row_that_waits_goes_on_when_a_plan_ends_after_another_row_has_committed(family):
    pool, later = family.pool, family.new_plan()
    family.unshare(family.plan, family.first, 4)
    pool.prefix.commit(family.first, PROMPT)
    pool.rollback(family.plan)
    pool.prefix.commit(family.second, PROMPT[:4])
    assert family.found() <= 4
    family.step(later, family.second, 1)
    assert family.found() == len(PROMPT) and family.stored() == 4


def test_two_plans_that_copy_one_block_are_waited_for_in_turn(family):
    pool, later = family.pool, family.new_plan()
    family.unshare(family.plan, family.first)
    pool.prefix.commit(family.first, PROMPT)
    assert family.unshare(later, family.first) == [4] * 4  # what is committed is not rewritten
    family.pool.done(family.plan)
    assert family.found() == 0 and family.stored() == 0
    pool.rollback(later)
    assert family.found() == len(PROMPT) and family.stored() == 4
    pool.close([family.first, family.second])
    assert family.found() == len(PROMPT)


@pytest.mark.parametrize("call", ["step", "reserve"])
def test_copy_of_the_tail_holds_nothing_back(kinds, groups, call):
    """Step n + 1 writes behind what step n left: the full blocks before it are found at once."""
    family = Family(kinds, groups, 10)
    getattr(family.pool, call)(family.plan, [family.first], 1)
    assert family.copied(family.plan) == [2]
    family.pool.prefix.commit(family.first, PROMPT[:10])
    assert family.stored() == 2
    family.pool.rollback(family.plan)
    family.found()
    family.step(family.plan, family.first, len(PROMPT) - 10)
    family.pool.prefix.commit(family.first, PROMPT[10:])
    assert family.stored() == 2


@pytest.mark.parametrize("end", ["done", "rollback"])
def test_flush_while_blocks_wait_keeps_them_unfound(family, end):
    family.unshare(family.plan, family.first)
    family.pool.prefix.commit(family.first, PROMPT)
    family.pool.prefix.flush()
    family.pool.done(family.plan) if end == "done" else family.pool.rollback(family.plan)
    assert family.found() == 0 and family.stored() == 0
    family.pool.close([family.first, family.second])
    assert family.found() == 0 and family.pool.stats().evictable == 0


@pytest.mark.parametrize("groups", [[Group.full()]], ids=["full"])
def test_rows_that_wait_for_one_step_are_published_by_their_slots(family):
    """Of two copies of one content, that of the lower slot is the one that is found."""
    pool = family.pool
    pool.fork(family.first)
    pool.unshare(family.plan, [family.second, family.first], 14)
    pool.prefix.commit([family.second, family.first], PROMPT * 2)
    family.pool.done(family.plan)
    assert pool.table(pool.prefix.pin(PROMPT)).tolist() == pool.table(family.first)[:4].tolist()
    assert pool.prefix.stats().duplicates == 4


def test_pool_that_runs_in_order_publishes_at_once(kinds):
    make_pool, make_plan = kinds
    pool = make_pool(32, 4, prefix_cache=True, in_order=True)
    handle = pool.open()
    pool.step(make_plan(pool, 2, 16), [handle], 16)
    pool.fork(handle)
    pool.unshare(make_plan(pool, 2, 16), [handle], 14)
    pool.prefix.commit(handle, PROMPT)
    assert pool.prefix.match([*PROMPT, 1]) == 16
