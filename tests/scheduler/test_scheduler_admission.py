"""Who is admitted: decodes and prefix hits count. Random workloads judge the watermark and the order."""

import numpy as np
from schedules import Machine

from kvpool import Pool, Request, Scheduler


def test_admission_leaves_the_blocks_that_decodes_of_the_same_step_take():
    """The decode needs its last block in the very step in which somebody could be admitted with it."""
    pool = Pool(4, 4)
    scheduler = Scheduler(pool, watermark=0)
    machine = Machine(scheduler, pool)
    scheduler.add(Request([1, 2, 3, 4], max_tokens=6, id="a"))
    machine.step()  # four tokens computed: the next decode takes a block
    scheduler.add(Request([1, 2, 3, 4, 5], max_tokens=1, id="b"))
    step = scheduler.schedule()
    assert step.num_decodes == 1 and len(step.lanes) == 1
    scheduler.fail(step)
    assert {name for name, _ in machine.run()} == {"a", "b"}
    assert scheduler.stats().preemptions == 0


def test_admission_counts_prefix_hits():
    """The second prompt needs 1 block of its own, 3 are shared: it is admitted where a stranger is not."""
    for own in (True, False):
        pool = Pool(8, 4, prefix_cache=True, seed=1)
        scheduler = Scheduler(pool, watermark=2)
        machine = Machine(scheduler, pool)
        scheduler.add(Request(range(14), max_tokens=6))
        machine.step()
        prompt = np.arange(14) + (0 if own else 100)
        scheduler.add(Request(prompt, max_tokens=1, id="b"))
        step = scheduler.schedule()
        assert len(step.lanes) == (2 if own else 1)
        assert step.num_new.tolist() == ([1, 2] if own else [1])
        scheduler.fail(step)
        output = machine.run()["b", 0]
        assert output.num_cached == (12 if own else 0)
        assert scheduler.stats().hit_tokens == output.num_cached


def test_admission_evictable_hits_are_not_counted_twice():
    """A cached prompt whose blocks nobody holds: hits are evictable, but not available to the rest of the request."""
    pool = Pool(8, 4, prefix_cache=True, seed=1)
    scheduler = Scheduler(pool, watermark=2)
    machine = Machine(scheduler, pool)
    scheduler.add(Request(range(14), max_tokens=1, id="warm"))
    machine.run()
    assert pool.stats().evictable == 3
    scheduler.add(Request([50, 51], max_tokens=4, id="a"))
    machine.step()  # 1 block used, 3 free, 3 evictable
    scheduler.add(Request(range(22), max_tokens=1, id="b"))  # 6 blocks, 3 of them hits: 3 more, none left
    before = pool.prefix.stats()
    step = scheduler.schedule()
    assert len(step.lanes) == 1
    assert pool.prefix.stats() == before  # nothing evicted, nothing counted
    scheduler.fail(step)
    scheduler.cancel("a")
    assert machine.run()["b", 0].num_cached == 12
