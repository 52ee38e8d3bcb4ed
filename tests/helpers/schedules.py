"""Runs a scheduler on the token model, greedily: what a wrong block holds gives other tokens, or an error."""

import numpy as np
from token_model import TokenMemory, TokenModel

MODEL = TokenModel()


def greedy(request):
    """Return what a request generates when it is alone."""
    return MODEL.solo(request.prompt, request.max_tokens, eos=request.eos, stop=request.stop).tokens.tolist()


class Machine:
    """Executes the steps of a scheduler."""

    def __init__(self, scheduler, pool):
        self.scheduler, self.memory = scheduler, TokenMemory(MODEL, pool.num_blocks, pool.block_size)

    def execute(self, step):
        """Return the state of each sample of a step."""
        return self.memory.forward(step.tokens, step.plan)[step.sample_at]

    def step(self):
        """Schedule, execute and update once; return (step, outputs), or None when nothing is left."""
        step = self.scheduler.schedule()
        return None if step is None else (step, self.scheduler.update(step, MODEL.greedy(self.execute(step))))

    def run(self, limit=10_000):
        """Step until nothing is left; return the outputs by (id, index)."""
        outputs = {}
        for _ in range(limit):
            done = self.step()
            if done is None:
                return outputs
            outputs.update({(output.id, output.index): output for output in done[1]})
        raise AssertionError(f"not done after {limit} steps: {self.scheduler}")


def drain(scheduler, token=0):
    """Give every sample one token, step for step, until nothing is left; return the outputs."""
    outputs = []
    while (step := scheduler.schedule()) is not None:
        outputs += scheduler.update(step, np.full(len(step.sample_at), token, np.int32))
        scheduler.check()
    return outputs
