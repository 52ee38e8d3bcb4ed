"""What a step of the scheduler holds: decodes first, chunks within the budget, top-up at once."""

import random

import pytest

from kvpool import Pool, Request, RequestRejected, Scheduler
from tests.schedules import VOCABULARY, Machine, greedy


def random_scheduler(rng):
    size = rng.choice([1, 2, 4, 16])
    pool = Pool(
        rng.randint(12, 60) if size > 1 else 80,
        size,
        prefix_cache=rng.random() < 0.5,
        seed=1,
        in_order=rng.random() < 0.2,
    )
    scheduler = Scheduler(
        pool,
        max_running=rng.choice([1, 3, 8]),
        max_step_tokens=rng.choice([1, 5, 64]),
        prefill_chunk=rng.choice([1, 3, 64]),
        mixed=rng.random() < 0.6,
        preempt=rng.choice(["last", "longest", "grower", "priority"]),
        watermark=rng.choice([None, 0, 3]),
    )
    return pool, scheduler


@pytest.mark.parametrize("first_seed", range(0, 100, 25))
def test_outputs_random_workloads_equal_solo_greedy(first_seed):
    for seed in range(first_seed, first_seed + 25):
        rng = random.Random(seed)
        pool, scheduler = random_scheduler(rng)
        base = [rng.randrange(VOCABULARY) for _ in range(20)]
        requests = {}
        for _ in range(rng.randint(1, 15)):
            request = Request(
                base[: rng.randint(0, 20)] + [rng.randrange(VOCABULARY) for _ in range(rng.randint(1, 10))],
                max_tokens=rng.randint(1, 12),
                eos=(rng.randrange(VOCABULARY),) if rng.random() < 0.3 else (),
                n=rng.choice([1, 1, 3]),
                priority=rng.randrange(2),
            )
            try:
                requests[scheduler.add(request)] = request
            except RequestRejected:
                continue
        outputs = Machine(scheduler, pool).run()
        assert set(outputs) == {(name, i) for name, request in requests.items() for i in range(request.n)}, f"{seed=}"
        for (name, _), output in outputs.items():
            assert (output.tokens.tolist(), output.finish_reason) == greedy(requests[name]), f"{seed=}"
        assert pool.stats().used == 0, f"{seed=}"
        pool.check()
