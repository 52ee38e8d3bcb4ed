"""A tier: blocks leave for the host and come back, and nothing is computed again."""

import numpy as np
import pytest
from schedules import MODEL, Machine, greedy
from token_model import TokenMemory

from kvpool import Group, Pool, Request, Scheduler


class Spilling(Machine):
    """Executes the steps of a scheduler whose tier it is: it keeps the content of the blocks that are spilled."""

    def __init__(self, pool, **options):
        super().__init__(Scheduler(pool, watermark=0, tier=self, **options), pool)

    def spill_to_host(self, handle, blocks):
        return self.memory.save(blocks)

    def prefetch(self, kept, handle, blocks):
        self.memory.load(kept, blocks)


def made(num_blocks, prefix_cache=False, **options):
    """A pool, a scheduler with a tier, and what executes its steps."""
    pool = Pool(num_blocks, 2, prefix_cache=prefix_cache, seed=1)
    machine = Spilling(pool, **options)
    return pool, machine.scheduler, machine


class SpillingTwo(Spilling):
    """The same for a pool of two full groups, which hold the same tokens."""

    def __init__(self, pool, size, **options):
        super().__init__(pool, **options)
        self.groups = self.memory, TokenMemory(MODEL, 64, size, group=1)

    def execute(self, step):
        one, other = (memory.forward(step.tokens, step.plan)[step.sample_at] for memory in self.groups)
        assert np.array_equal(one, other)
        return one

    def spill_to_host(self, handle, blocks):
        return [memory.save(ids.ravel()) for memory, ids in zip(self.groups, blocks, strict=True)]

    def prefetch(self, kept, handle, blocks):
        for memory, part, ids in zip(self.groups, kept, blocks, strict=True):
            memory.load(part, ids.ravel())


@pytest.mark.parametrize("prefix_cache", [False, True])
def test_tier_receives_the_blocks_of_each_full_group(prefix_cache):
    groups = [Group.full(), Group.full(block_size=4, arena=1, num_blocks=12)]
    machine = SpillingTwo(Pool(16, 2, groups=groups, prefix_cache=prefix_cache, seed=1), 4, prefill_chunk=3)
    requests = [Request(range(10 * i, 10 * i + 4 + i), max_tokens=15, n=1 + i % 2) for i in range(4)]
    for request in requests:
        machine.scheduler.add(request)
    assert {key: output.tokens.tolist() for key, output in machine.run().items()} == {
        (i, j): greedy(request) for i, request in enumerate(requests) for j in range(request.n)
    }
    machine.scheduler.check()
    stats = machine.scheduler.stats()
    assert stats.spills > 0 and stats.preemptions == stats.recomputed_tokens == 0


@pytest.mark.parametrize("n", [1, 2])
def test_restored_sequence_holds_no_second_copy_of_what_is_cached(n):
    """It is spilled in the middle of its prompt, while another user of the pool has the other blocks."""
    pool, scheduler, machine = made(90, prefix_cache=True, prefill_chunk=4, max_step_tokens=6)
    requests = [Request(range(4), 60, id="decodes"), Request(range(100, 140), 14, id="spilled", n=n)]
    scheduler.add(requests[0])
    machine.step()
    scheduler.add(requests[1])
    for _ in range(4):
        machine.step()
    guest = pool.open(2 * pool.stats().blank)
    while not scheduler.stats().spilled:
        machine.step()
    pool.close(guest)
    assert pool.stats().evictable > 0
    outputs = []
    while scheduler.stats().decoding + scheduler.stats().spilled:
        outputs += machine.step()[1]
        tables = {block for handle in scheduler.handles.tolist() for block in pool.table(handle).tolist()}
        assert pool.stats().used == len(tables)
    assert {one.id: one.tokens.tolist() for one in outputs} == {one.id: greedy(one) for one in requests}
    assert pool.prefix.match([*range(100, 140), 1]) == 40


def until_spilled():
    """Two requests, a and b, of which b has been spilled."""
    pool, scheduler, machine = made(12)
    requests = [Request(range(6), max_tokens=12, id=name) for name in "ab"]
    for request in requests:
        scheduler.add(request)
    while not scheduler.stats().spilled:
        machine.step()
    return pool, scheduler, machine, greedy(requests[0])


def test_tier_spilled_comes_back_before_those_who_wait():
    pool, scheduler, machine, expected = until_spilled()
    for name in "xyz":
        scheduler.add(Request([1], max_tokens=1, id=name, priority=5))
    outputs = {}
    while scheduler.stats().spilled:
        assert scheduler.stats().waiting == 3
        outputs |= {output.id: output.tokens.tolist() for output in machine.step()[1]}
    outputs |= {name: output.tokens.tolist() for (name, _), output in machine.run().items()}
    assert outputs["a"] == outputs["b"] == expected and pool.stats().used == 0


def test_tier_cancelled_while_spilled_is_dropped():
    _, scheduler, machine, expected = until_spilled()
    (output,) = scheduler.cancel("b")
    assert len(output.tokens) and output.tokens.tolist() == expected[: len(output.tokens)]
    scheduler.check()
    assert scheduler.stats().spilled == 0
    assert machine.run()["a", 0].tokens.tolist() == expected
