"""The policy may name the only decode while prefills stay: then the prefills go on, and no step is empty."""

import pytest
from token_model import TokenMemory, TokenModel

from kvpool import Pool, Request, Scheduler


@pytest.mark.parametrize("mixed", [True, False])
def test_step_when_the_only_decode_was_preempted_is_a_chunk_of_those_who_stay(mixed):
    pool = Pool(8, 1, reserved_blocks=0)
    scheduler = Scheduler(pool, max_running=4, prefill_chunk=1, watermark=0, preempt="grower", mixed=mixed)
    model = TokenModel()
    memory = TokenMemory(model, 8, 1)
    requests = {0: Request([1], 6, id=0), 1: Request([2, 3, 4, 5, 6], 1, id=1)}
    outputs = {}
    scheduler.add(requests[0])
    for turn in range(60):
        if turn == 1:
            scheduler.add(requests[1])
        step = scheduler.schedule()
        if step is None:
            break
        assert len(step.handles) > 0
        states = memory.forward(step.tokens, step.plan)
        for output in scheduler.update(step, model.greedy(states[step.sample_at])):
            outputs[output.id] = output.tokens.tolist()
        scheduler.check()
    assert scheduler.stats().preemptions > 0
    assert outputs == {i: model.solo(r.prompt, r.max_tokens).tokens.tolist() for i, r in requests.items()}
    assert pool.stats().used == 0
