"""A published teaching notebook on continuous batching over paged KV, with its numbers, on this scheduler.

Four requests arrive at iterations 0, 2, 4, 6 and generate different numbers of tokens, blocks of 4 tokens; first with
plenty of blocks, then with 8, and its exercises. Its own scheduler (recompute from scratch, whoever grows is
preempted) was run for the numbers that ours are compared with: iterations, preemptions, peaks.
"""

import math
from types import SimpleNamespace

import numpy as np
import pytest
from token_model import TokenMemory, TokenModel

from kvpool import Plan, Pool, Request, Scheduler

BLOCK_SIZE = 4
VOCABULARY = 320
ARRIVALS = (0, 2, 4, 6)
MAX_TOKENS = (10, 25, 8, 18)
PROMPTS = ((62, 109, 62), (130, 220, 162, 166, 17, 19), (234, 251, 121, 86), (161, 32, 49, 254, 111))
NOTEBOOK_PLENTY = SimpleNamespace(iterations=27, peak=13, concurrent=4, static=32)
NOTEBOOK_TIGHT = SimpleNamespace(iterations=65, preemptions=15, concurrent=4)
NOTEBOOK_BY_MAX_BATCH = {8: 27, 2: 36, 1: 61}
POLICIES = ("last", "longest", "grower", "priority")


class TokenBackend:
    """The token model behind the scheduler: one forward, greedy."""

    def __init__(self, pool):
        self.model = TokenModel(VOCABULARY, seed=123)
        self.memory = TokenMemory(self.model, pool.num_blocks, pool.block_size)

    def __call__(self, step):
        states = self.memory.forward(step.tokens, step.plan)
        return self.model.greedy(states[step.sample_at])

    def solo(self, request):
        return self.model.solo(request.prompt, request.max_tokens, eos=request.eos).tokens.tolist()


def four_requests(**how):
    pairs = zip(PROMPTS, MAX_TOKENS, strict=True)
    return [Request(prompt, tokens, id=i, **how) for i, (prompt, tokens) in enumerate(pairs)]


def serve(requests, arrivals, num_blocks, max_batch=8, **options):
    """Run to the end, one iteration of the notebook per step; its trace, and every output beside solo greedy."""
    pool = Pool(num_blocks, BLOCK_SIZE, reserved_blocks=0, prefix_cache=options.pop("prefix_cache", False), seed=1)
    backend = TokenBackend(pool)
    scheduler = Scheduler(pool, max_running=max_batch, watermark=0, **options)
    run = SimpleNamespace(used=[], running=[], outputs={}, finished_at={}, pool=pool, scheduler=scheduler)
    waiting = sorted(zip(arrivals, requests, strict=True), key=lambda pair: pair[0])
    iteration = 0
    while True:
        while waiting and waiting[0][0] <= iteration:
            scheduler.add(waiting.pop(0)[1])
        step = scheduler.schedule()
        if step is None and not waiting:
            break
        run.used.append(pool.stats().used)
        run.running.append(0 if step is None else len(step.handles))
        for output in scheduler.update(step, backend(step)) if step is not None else ():
            run.outputs[output.id] = output
            run.finished_at[output.id] = iteration
        iteration += 1
        assert iteration < 10_000
        scheduler.check()
    for request in requests:
        assert run.outputs[request.id].tokens.tolist() == backend.solo(request)
    pool.check()
    assert pool.stats().used == 0, "all blocks must be returned to the pool at the end"
    run.iterations, run.preemptions = iteration, scheduler.stats().preemptions
    return run


def test_lesson_of_four_lengths_uses_30_blocks_where_static_reserves_64():
    lengths, pool = [32, 128, 64, 256], Pool(64, 16, reserved_blocks=0)
    plan = Plan(pool, 4, sum(lengths))
    pool.step(plan, [pool.open() for _ in lengths], lengths)
    static = len(lengths) * math.ceil(max(lengths) / 16)
    assert (pool.stats().used, static) == (30, 64)


def test_four_requests_with_plenty_of_blocks_take_the_notebooks_iterations():
    run = serve(four_requests(), ARRIVALS, num_blocks=64)
    assert run.iterations == NOTEBOOK_PLENTY.iterations
    assert run.preemptions == 0
    assert max(run.running) == NOTEBOOK_PLENTY.concurrent
    longest = max(len(p) + m for p, m in zip(PROMPTS, MAX_TOKENS, strict=True))
    assert len(PROMPTS) * math.ceil(longest / BLOCK_SIZE) == NOTEBOOK_PLENTY.static
    assert max(run.used) <= NOTEBOOK_PLENTY.peak  # the last token of a sequence needs no block


@pytest.mark.parametrize("policy", POLICIES)
def test_tight_pool_of_eight_blocks_finishes_all_in_no_more_iterations_than_the_notebook(policy):
    """Exercise 1, the policies compared: each gives solo's tokens, none is worse than the notebook."""
    run = serve(four_requests(), ARRIVALS, num_blocks=8, preempt=policy)
    assert len(run.outputs) == 4
    assert 1 <= max(run.running) <= NOTEBOOK_TIGHT.concurrent
    assert run.iterations <= NOTEBOOK_TIGHT.iterations
    assert run.preemptions <= NOTEBOOK_TIGHT.preemptions
    assert sum(output.preemptions for output in run.outputs.values()) == run.preemptions


def test_smaller_max_batch_costs_iterations_and_delays_the_last():
    """Exercise 2, throughput against latency: the notebook's iterations for each batch."""
    found = {batch: serve(four_requests(), ARRIVALS, num_blocks=64, max_batch=batch) for batch in (8, 2, 1)}
    assert {batch: run.iterations for batch, run in found.items()} == NOTEBOOK_BY_MAX_BATCH
    mean = {batch: np.mean(list(run.finished_at.values())) for batch, run in found.items()}
    assert mean[8] < mean[2] < mean[1]
    assert max(found[1].running) == 1 and max(found[2].running) == 2


def test_common_prefix_saves_its_full_blocks():
    """Exercise 3: 20 common tokens are 5 blocks; beside the first, each of three more requests saves them."""
    common = np.random.default_rng(3).integers(VOCABULARY, size=20)
    requests = [Request(np.append(common, [i, i + 1]), 6, id=i) for i in range(4)]
    arrivals = (0, 1, 2, 3)  # the prefix is known when its prompt has been computed
    apart = serve(requests, arrivals, num_blocks=64)
    shared = serve(requests, arrivals, num_blocks=64, prefix_cache=True)
    assert max(apart.used) - max(shared.used) == 3 * 5
    assert [shared.outputs[i].num_cached for i in range(4)] == [0, 20, 20, 20]
    assert shared.scheduler.stats().prefill_tokens == 22 + 3 * 2


def test_samples_of_one_prompt_share_its_blocks_and_copy_one_tail():
    """Exercise 3 by fork: two samples of a prompt of 22 tokens, 6 blocks of which the last is copied once."""
    request = Request(np.arange(22), 4, id=0, n=2)
    pool = Pool(64, BLOCK_SIZE, reserved_blocks=0)
    backend, scheduler = TokenBackend(pool), Scheduler(pool, max_running=4)
    scheduler.add(request)
    used, outputs = [], []
    while (step := scheduler.schedule()) is not None:
        used.append(pool.stats().used)
        outputs += scheduler.update(step, backend(step))
    assert [o.tokens.tolist() for o in outputs] == [backend.solo(request)] * 2
    assert pool.stats().cow_copies == 1
    assert max(used) == 9  # 5 common ones, and 2 each for positions 20 .. 24; the tail is held while it is copied
    assert pool.stats().used == 0


@pytest.mark.parametrize("num_blocks", [64, 14])
def test_sixteen_random_requests_stay_below_static_reservation(num_blocks):
    """Exercise 4: random arrivals and lengths; with plenty of blocks, and with a quarter of the peak."""
    rng = np.random.default_rng(16)
    requests = [
        Request(rng.integers(VOCABULARY, size=rng.integers(2, 16)), int(rng.integers(4, 33)), id=i) for i in range(16)
    ]
    run = serve(requests, np.sort(rng.integers(0, 40, size=16)).tolist(), num_blocks)
    static = 8 * max(math.ceil((r.prompt.size + r.max_tokens) / BLOCK_SIZE) for r in requests)
    assert len(run.outputs) == 16
    assert max(run.used) < static
    assert (run.preemptions > 0) == (num_blocks == 14)


def test_eos_ends_a_sequence_early():
    """Exercise 5: the token that a request generates sixth ends it there; the others go on to their length."""
    plain = serve(four_requests(), ARRIVALS, num_blocks=64)
    requests = four_requests()
    sixth = int(plain.outputs[1].tokens[5])
    requests[1] = Request(PROMPTS[1], MAX_TOKENS[1], id=1, eos=(sixth,))
    run = serve(requests, ARRIVALS, num_blocks=64)
    assert run.outputs[1].finish_reason == "eos"
    assert run.outputs[1].tokens.tolist() == plain.outputs[1].tokens[:6].tolist()
    assert run.iterations < plain.iterations
    assert [run.outputs[i].tokens.size for i in (0, 2, 3)] == [10, 8, 18]
