"""A model for tests of the scheduler: the next token is a function of what the blocks hold, so a wrong block shows.

`Machine` executes steps on a dict from slot to token, exactly as a backend executes plans: copies, writes, reads.
"""

import numpy as np
from token_model import why_finished

VOCABULARY = 50


def digest(known):
    """Return a number that depends on every token."""
    state = 7
    for token in known:
        state = (state * 1000003 + int(token) + 1) % (2**61 - 1)
    return state


def next_token(known):
    """Return the token that greedy decoding takes."""
    return digest(known) % VOCABULARY


def logprobs_of(known, vocabulary):
    """Return normalized float32 logprobs of the next token."""
    scores = np.random.default_rng(digest(known)).normal(size=vocabulary) * 2
    return (scores - np.log(np.exp(scores).sum())).astype(np.float32)


def greedy(request):
    """Return what a request generates when it is alone, and why it ends."""
    known, tokens = request.prompt.tolist(), []
    while True:
        tokens.append(next_token(known))
        known.append(tokens[-1])
        if reason := why_finished(tokens, request.max_tokens, request.eos, request.stop):
            return tokens, reason


class Machine:
    """Holds the content of the blocks."""

    def __init__(self, scheduler, pool):
        self.scheduler = scheduler
        self.pool = pool
        self.content = {}

    def execute(self, step):
        """Do copies and writes of a step; return the context of each sample."""
        size, plan = self.pool.block_size, step.plan
        for source, target, count in plan.copies.tolist():
            for offset in range(count):
                self.content[target * size + offset] = self.content[source * size + offset]
        self.content.update(zip(plan.slot_mapping.tolist(), step.tokens.tolist(), strict=True))
        ends = plan.cu_q_lens[1:].tolist()
        return [self.context(plan, ends.index(at + 1)) for at in step.sample_at.tolist()]

    def context(self, plan, row):
        """Return the tokens that a row's table leads to."""
        size, table = self.pool.block_size, plan.block_tables[row].tolist()
        return [self.content[table[i // size] * size + i % size] for i in range(int(plan.seq_lens[row]))]

    def step(self):
        """Schedule, execute and update once, greedily; return (step, outputs), or None when nothing is left."""
        step = self.scheduler.schedule()
        if step is None:
            return None
        tokens = np.array([next_token(context) for context in self.execute(step)], np.int32)
        return step, self.scheduler.update(step, tokens)

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
