"""A scheduler as engines write it in Python: an object per sequence, a loop over them, `PlainAllocator`."""

from collections import deque

import numpy as np

from kvpool.cli.bench.allocator import PlainAllocator


class PythonSequence:
    """Prompt, output, and how much of both is computed."""

    def __init__(self, prompt, max_tokens, eos):
        self.tokens = list(prompt)
        self.limit = len(prompt) + max_tokens
        self.eos = eos
        self.computed = 0
        self.seq_id = None


class PythonStep:
    """What is computed, and where it is sampled."""

    def __init__(self):
        self.rows = []
        self.num_new = []
        self.tokens = []
        self.sample_at = []
        self.sampled = []
        self.tables = None


class PythonScheduler:
    """Decode first, chunked prefill, first come first served; no cache, no preemption.

    Parameters
    ----------
    num_blocks, block_size : int
        Of the pool.
    max_running, max_step_tokens, prefill_chunk : int
        As in `kvpool.Scheduler`.
    """

    def __init__(self, num_blocks, block_size, *, max_running, max_step_tokens, prefill_chunk):
        self.pool = PlainAllocator(num_blocks, block_size)
        self.max_running = max_running
        self.max_step_tokens = max_step_tokens
        self.prefill_chunk = prefill_chunk
        self.waiting = deque()
        self.running = []

    def add(self, prompt, max_tokens, eos):
        """Queue a request."""
        self.waiting.append(PythonSequence(prompt, max_tokens, eos))

    def schedule(self):
        """Return the next step."""
        step, budget = PythonStep(), self.max_step_tokens
        for sequence in self.running:
            if len(sequence.tokens) - sequence.computed == 1:
                self.put(step, sequence, 1)
                budget -= 1
        for sequence in self.running:
            left = len(sequence.tokens) - sequence.computed
            if left > 1 and budget > 0:
                new = min(left, self.prefill_chunk, budget)
                self.put(step, sequence, new)
                budget -= new
        while self.waiting and budget > 0 and len(self.running) < self.max_running:
            need = -(-len(self.waiting[0].tokens) // self.pool.block_size)
            if len(self.pool.free_ids) < need + len(self.running):
                break
            sequence = self.waiting.popleft()
            sequence.seq_id = self.pool.open()
            self.running.append(sequence)
            new = min(len(sequence.tokens), self.prefill_chunk, budget)
            self.put(step, sequence, new)
            budget -= new
        self.take_blocks(step)
        return step

    def put(self, step, sequence, new):
        """Give a sequence a row."""
        step.rows.append(sequence)
        step.num_new.append(new)
        step.tokens += sequence.tokens[sequence.computed : sequence.computed + new]
        if sequence.computed + new == len(sequence.tokens):
            step.sample_at.append(len(step.tokens) - 1)
            step.sampled.append(sequence)

    def take_blocks(self, step):
        """Blocks, tables, lengths and slots of the step; the pool takes one count for all rows of a call."""
        decodes = [sequence.seq_id for sequence, new in zip(step.rows, step.num_new, strict=True) if new == 1]
        step.tables = [self.pool.step(decodes)] if decodes else []
        for sequence, new in zip(step.rows, step.num_new, strict=True):
            if new > 1:
                step.tables.append(self.pool.step([sequence.seq_id], new))
        step.tokens = np.array(step.tokens, np.int32)

    def update(self, step, tokens):
        """Append the tokens; end and close sequences."""
        for sequence, new in zip(step.rows, step.num_new, strict=True):
            sequence.computed += new
        for sequence, token in zip(step.sampled, tokens.tolist(), strict=True):
            sequence.tokens.append(token)
            if token in sequence.eos or len(sequence.tokens) >= sequence.limit:
                self.pool.close(sequence.seq_id)
                self.running.remove(sequence)
