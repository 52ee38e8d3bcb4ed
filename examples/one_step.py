"""The engine of `block_manager.py` with one call per step for the whole batch, and what that saves.

    python examples/one_step.py

It serves the same requests by three managers: one as tutorials write it (Python lists and a deque), the same verbs on
kvpool's blocks, and one `Pool.step` per batch. All answers are equal. It prints the CPU time of each manager with the
arrays that it makes for the kernels, least of some runs.
"""

import argparse
import time
from collections import deque

import numpy as np
from block_manager import BlockManager, Engine, Model, Sequence, expected, serve, workload

from kvpool import Plan, Pool


class StepEngine:
    """Tables, lengths, hits and the arrays of a step are the pool's; the engine keeps a handle of each sequence."""

    def __init__(self, num_blocks: int, block_size: int, model: Model, max_rows: int, max_tokens: int) -> None:
        self.pool = Pool(num_blocks, block_size, prefix_cache=True, in_order=True)
        formats = ("block_tables", "slot_mapping", "seq_lens")
        self.plan, self.model = Plan(self.pool, max_rows, max_tokens, formats=formats), model
        self.waiting: deque[Sequence] = deque()
        self.running: list[Sequence] = []

    def schedule(self) -> tuple[list[Sequence], list[int]]:
        """The sequences of the next step and how many tokens each adds. Prompts first."""
        batch, counts = [], []
        while self.waiting and self.pool.can(tokens=self.waiting[0].tokens):
            seq = self.waiting.popleft()
            seq.handle = self.pool.open(seq.tokens)  # holds the hits, takes blocks for the rest
            batch.append(seq)
            counts.append(len(seq.tokens) - self.pool.num_tokens(seq.handle))
        if batch:
            self.running += batch
            return batch, counts
        while not self.pool.can([seq.handle for seq in self.running], 1):
            self.waiting.appendleft(last := self.running.pop())
            self.pool.close(last.handle)
        return self.running, [1] * len(self.running)

    def step(self) -> None:
        batch, counts = self.schedule()
        handles = [seq.handle for seq in batch]
        self.pool.step(self.plan, handles, counts)
        tokens = [token for seq, count in zip(batch, counts, strict=True) for token in seq.tokens[-count:]]
        plan = self.plan
        sampled = self.model(tokens, plan.slot_mapping, plan.block_tables, plan.seq_lens)
        self.pool.prefix.commit(handles, tokens, counts)  # full blocks can be found
        for seq, token in zip(batch, sampled, strict=True):
            seq.tokens.append(token)
            seq.answer.append(token)
        over = [seq for seq in batch if len(seq.answer) == seq.max_tokens]
        self.pool.close([seq.handle for seq in over])
        self.running = [seq for seq in self.running if len(seq.answer) < seq.max_tokens]


class TutorialManager(BlockManager):
    """The same verbs in plain Python, as tutorials write them: reference counts, a free list, a table of keys."""

    def __init__(self, num_blocks: int, block_size: int) -> None:
        self.block_size = block_size
        self.free, self.counts = deque(range(1, num_blocks)), [0] * num_blocks
        self.key_of: list[bytes | None] = [None] * num_blocks
        self.block_of: dict[bytes, int] = {}

    def found(self, keys: list[bytes]) -> list[int]:
        blocks = []
        for key in keys:
            if key not in self.block_of:
                break
            blocks.append(self.block_of[key])
        return blocks

    def take(self) -> int:
        block = self.free.popleft()
        if self.block_of.get(self.key_of[block]) == block:
            del self.block_of[self.key_of[block]]
        self.key_of[block], self.counts[block] = None, 1
        return block

    def can_allocate(self, seq: Sequence) -> int:
        hits = self.found(self.keys_of(seq)[: (len(seq.tokens) - 1) // self.block_size])
        room = len(self.free) - sum(not self.counts[block] for block in hits)
        return len(hits) if self.missing(seq) - len(hits) <= room else -1

    def allocate(self, seq: Sequence, num_hits: int) -> None:
        for block in self.found(seq.keys[:num_hits]):
            if not self.counts[block]:
                self.free.remove(block)
            self.counts[block] += 1
            seq.block_table.append(block)
        seq.num_cached = num_hits * self.block_size
        self.may_append(seq)

    def can_append(self, seq: Sequence) -> bool:
        return self.missing(seq) <= len(self.free)

    def may_append(self, seq: Sequence) -> None:
        for _ in range(self.missing(seq)):
            seq.block_table.append(self.take())

    def hash_blocks(self, seq: Sequence, first: int) -> None:
        keys = self.keys_of(seq)
        for i in range(first // self.block_size, len(seq.tokens) // self.block_size):
            if keys[i] not in self.block_of:
                self.block_of[keys[i]] = seq.block_table[i]
                self.key_of[seq.block_table[i]] = keys[i]

    def deallocate(self, seq: Sequence) -> None:
        for block in reversed(seq.block_table):
            self.counts[block] -= 1
            if not self.counts[block]:
                self.free.append(block)
        seq.block_table, seq.num_cached = [], 0


class Untimed:
    """A model whose time does not count."""

    def __init__(self, model) -> None:
        self.model, self.seconds = model, 0.0

    def __call__(self, *arrays):
        begin = time.thread_time()
        answer = self.model(*arrays)
        self.seconds += time.thread_time() - begin
        return answer


def measure(make, requests) -> tuple[float, list[list[int]]]:
    """CPU seconds of an engine without its model, and the answers."""
    model = Untimed(lambda tokens, slots, tables, lens: [length % 1000 for length in np.asarray(lens).tolist()])
    begin = time.thread_time()
    answers = serve(make(model), requests)
    return time.thread_time() - begin - model.seconds, answers


def makers(num_blocks: int, block_size: int, rows: int, tokens: int):
    """What makes each engine for a model."""
    return {
        "a tutorial's manager": lambda model: Engine(TutorialManager(num_blocks, block_size), model),
        "the same verbs on BlockPool": lambda model: Engine(BlockManager(num_blocks, block_size), model),
        "one Pool.step per batch": lambda model: StepEngine(num_blocks, block_size, model, rows, tokens),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--requests", type=int, default=128)
    parser.add_argument("--prompt", type=int, default=1024, help="tokens that a prompt shares with others")
    parser.add_argument("--tokens", type=int, default=128, help="tokens of an answer")
    parser.add_argument("--block-size", type=int, default=16)
    parser.add_argument("--runs", type=int, default=5)
    asked = parser.parse_args()
    small = workload(num=12, shared=48, own=9, max_tokens=30)
    for name, make in makers(40, 16, 12, 2048).items():
        assert serve(make(Model(40, 16)), small) == [expected(*request) for request in small], name

    requests = workload(asked.requests, asked.prompt, 100, asked.tokens)
    each = -(-(asked.prompt + 100 + asked.tokens) // asked.block_size)
    made = makers(asked.requests * each + 1, asked.block_size, asked.requests, asked.requests * (asked.prompt + 100))
    seconds = {name: [] for name in made}
    for _ in range(asked.runs):
        answers = []
        for name, make in made.items():
            took, answered = measure(make, requests)
            seconds[name].append(took)
            answers.append(answered)
        assert answers[0] == answers[1] == answers[2]
    base = min(seconds["a tutorial's manager"])
    print(f"{asked.requests} requests of {asked.prompt} + 100 tokens, answers of {asked.tokens}")
    for name, took in seconds.items():
        print(f"{name}: {min(took) * 1e3:.0f} ms, {base / min(took):.1f} times as fast")


if __name__ == "__main__":
    main()
