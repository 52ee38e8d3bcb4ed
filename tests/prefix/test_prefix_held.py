"""Blocks that wait: a block that a pending plan has still to fill is found by nobody, whatever the layer groups.

What the blocks hold, the fuzzer judges (`tests/verify`). Each test holds for the core and for the plain model.
"""

from __future__ import annotations

import pytest

from kvpool import Group, Plan, Pool
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

    def __init__(self, kinds, groups):
        make_pool, make_plan = kinds
        self.pool = make_pool(64, 4, groups=groups, prefix_cache=True, max_seqs=8, events=1_000)
        self.plan = make_plan(self.pool, 4, 64)
        self.first = self.pool.open([*PROMPT, 1], b"", len(PROMPT))
        self.pool.step(self.plan, [self.first], len(PROMPT))
        self.pool.done(self.plan)
        self.second = int(self.pool.fork(self.first)[0])

    def unshare(self):
        """Blocks of group 0 that hold tokens of the first sequence, but for two, are to be copied."""
        self.pool.unshare(self.plan, [self.first], 14)

    def found(self):
        """How many tokens of the prompt are a hit."""
        self.pool.check()
        return self.pool.prefix.match([*PROMPT, 1])

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
    family.unshare()
    assert (family.plan.groups[0].copies[:, 2] == 4).all()
    pool.prefix.commit(family.first, PROMPT)
    assert pool.prefix.committed(family.first) == len(PROMPT)
    assert family.found() == 0 and family.stored() == 0
    pool.rollback(family.plan)
    assert family.found() == 0 and family.stored() == 0
    assert pool.prefix.committed(family.first) == len(PROMPT)
    pool.prefix.commit(family.second, PROMPT)  # what was restored was written long ago
    pool.prefix.commit(family.first, [])  # it has the states of a checkpoint
    assert family.found() == len(PROMPT) and family.stored() == 4


def test_copy_is_found_when_its_plan_is_done(family):
    family.unshare()
    family.pool.prefix.commit(family.first, PROMPT)
    assert family.found() == 0 and family.stored() == 0
    family.pool.done(family.plan)
    assert family.found() == len(PROMPT) and family.stored() == 4
    pinned = family.pool.prefix.pin(PROMPT)
    assert family.pool.table(pinned, 0).tolist() == family.pool.table(family.first, 0)[:4].tolist()
    before = family.pool.prefix.stats().duplicates
    family.pool.prefix.commit(family.second, PROMPT)
    assert family.pool.prefix.stats().duplicates == before + 4


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
