"""n samples of a prompt: one prefill, forks that share it, and a first token for each."""

import numpy as np
import pytest
from schedules import Machine, greedy

from kvpool import Pool, Request, Scheduler


@pytest.mark.parametrize("block_size", [1, 2, 4, 16])
def test_samples_share_one_prefill(block_size):
    pool = Pool(200, block_size)
    scheduler = Scheduler(pool)
    request = Request(range(9), max_tokens=6, n=5)
    scheduler.add(request)
    outputs = Machine(scheduler, pool).run()
    assert {key: output.tokens.tolist() for key, output in outputs.items()} == {
        (0, i): greedy(request)[0] for i in range(5)
    }
    stats = scheduler.stats()
    assert (stats.prefill_tokens, stats.decode_tokens, stats.finished) == (9, 5 * 5, 5)
    copies = pool.stats().cow_copies
    assert copies == (0 if 9 % block_size == 0 else 4)  # the last of those who share a tail writes in place


def test_samples_prompt_row_stands_n_times_in_sample_at():
    pool = Pool(64, 4)
    scheduler = Scheduler(pool)
    scheduler.add(Request([1, 2], max_tokens=3))
    scheduler.update(scheduler.schedule(), np.int32([9]))
    scheduler.add(Request(range(6), max_tokens=3, n=3, id="n"))
    step = scheduler.schedule()
    assert step.sample_at.tolist() == [0, 6, 6, 6]
    assert step.sample_index.tolist() == [0, 0, 1, 2]
    assert step.sample_lane.tolist() == [0, 1, 1, 1]
    assert step.sample_position.tolist() == [1, 0, 0, 0]
    assert [request.id for request in step.requests] == [0, "n", "n", "n"]
    scheduler.update(step, np.int32([1, 11, 12, 13]))
    assert [scheduler.tokens_of("n", i).tolist() for i in range(3)] == [[11], [12], [13]]
    step = scheduler.schedule()
    assert step.sample_index.tolist() == [0, 0, 1, 2] and len(set(step.sample_lane.tolist())) == 4


def test_samples_that_end_with_their_first_token_need_no_fork():
    pool = Pool(64, 4)
    scheduler = Scheduler(pool)
    scheduler.add(Request(range(6), max_tokens=3, n=4, eos=(7,)))
    outputs = scheduler.update(scheduler.schedule(), np.int32([7, 5, 7, 6]))
    assert [(output.index, output.finish_reason) for output in outputs] == [(0, "eos"), (2, "eos")]
    assert scheduler.stats().decoding == 2 and pool.stats().sequences == 2
    scheduler.check()
    scheduler.add(Request(range(6), max_tokens=1, n=3, id="one"))
    step = scheduler.schedule()
    outputs = scheduler.update(step, np.int32([1, 1, 2, 3, 4]))
    assert [(output.id, output.tokens.tolist()) for output in outputs] == [("one", [i]) for i in (2, 3, 4)]
    scheduler.check()
