"""A block manager with nano-vllm's verbs, on kvpool's blocks, and a small engine that asks it sequence by sequence.

    python examples/block_manager.py

Replace your own manager by `BlockManager` first: the tables, the keys and the scheduler stay yours. docs/migration.md
goes on from here to `one_step.py`, where one call serves the whole batch.
"""

import hashlib
from collections import deque
from dataclasses import dataclass, field

import numpy as np

from kvpool.adapters.block_pool import BlockPool

VOCABULARY = 1 << 20


@dataclass(eq=False)
class Sequence:
    """A request: its tokens, how many of them have K and V, and its block table."""

    tokens: list[int]
    max_tokens: int
    num_cached: int = 0
    block_table: list[int] = field(default_factory=list)
    keys: list[bytes] = field(default_factory=list)
    handle: int = -1  # of `one_step.py`
    answer: list[int] = field(default_factory=list)


class BlockManager:
    """can_allocate, allocate, can_append, may_append, hash_blocks, deallocate."""

    def __init__(self, num_blocks: int, block_size: int) -> None:
        self.pool, self.block_size = BlockPool(num_blocks), block_size  # block 0 stands for "none"

    def missing(self, seq: Sequence) -> int:
        return -(-len(seq.tokens) // self.block_size) - len(seq.block_table)

    def keys_of(self, seq: Sequence) -> list[bytes]:
        """A key for each full block, of the key before it and its tokens. They are made once."""
        for start in range(len(seq.keys) * self.block_size, len(seq.tokens) - self.block_size + 1, self.block_size):
            tokens = np.array(seq.tokens[start : start + self.block_size], np.int32)
            seq.keys.append(hashlib.blake2b(b"".join([*seq.keys[-1:], tokens]), digest_size=16).digest())
        return seq.keys

    def can_allocate(self, seq: Sequence) -> int:
        """Blocks of the prompt that the cache has, or -1: there is no room for the others. Nothing changes."""
        hits = self.pool.lookup(self.keys_of(seq)[: (len(seq.tokens) - 1) // self.block_size])
        return len(hits) if self.missing(seq) - len(hits) <= self.pool.room(hits) else -1

    def allocate(self, seq: Sequence, num_hits: int) -> None:
        hits = self.pool.lookup(seq.keys[:num_hits])
        self.pool.touch(hits)
        seq.block_table, seq.num_cached = hits, num_hits * self.block_size
        seq.block_table += self.pool.get(self.missing(seq))

    def can_append(self, seq: Sequence) -> bool:
        return self.missing(seq) <= self.pool.num_free

    def may_append(self, seq: Sequence) -> None:
        seq.block_table += self.pool.get(self.missing(seq))

    def hash_blocks(self, seq: Sequence, first: int) -> None:
        """All tokens are computed: the blocks from the one of token `first` on that are full can be found."""
        done = slice(first // self.block_size, len(seq.tokens) // self.block_size)
        self.pool.cache(seq.block_table[done], self.keys_of(seq)[done])

    def deallocate(self, seq: Sequence) -> None:
        self.pool.free(seq.block_table[::-1])  # the tail is evicted first
        seq.block_table, seq.num_cached = [], 0


class Model:
    """Stands for a model: it stores the tokens where K and V would go, and the next one depends on all it reads."""

    def __init__(self, num_blocks: int, block_size: int) -> None:
        self.kv = np.zeros((num_blocks, block_size), np.int64)

    def __call__(self, tokens, slot_mapping, block_tables, seq_lens) -> list[int]:
        self.kv.reshape(-1)[slot_mapping] = tokens
        contexts = self.kv[block_tables].reshape(len(seq_lens), -1)
        return [self.next(context[:length]) for context, length in zip(contexts, seq_lens, strict=True)]

    @staticmethod
    def next(context) -> int:
        """The token that follows."""
        return int(np.arange(1, len(context) + 1) @ context % VOCABULARY)


class Engine:
    """Prompts first, then a token for each running sequence; where blocks are short, the newest one starts again."""

    def __init__(self, manager: BlockManager, model: Model) -> None:
        self.manager, self.model = manager, model
        self.waiting: deque[Sequence] = deque()
        self.running: list[Sequence] = []

    def schedule(self) -> list[Sequence]:
        batch = []
        while self.waiting and (hits := self.manager.can_allocate(self.waiting[0])) >= 0:
            self.manager.allocate(seq := self.waiting.popleft(), hits)
            batch.append(seq)
        if batch:
            self.running += batch
            return batch
        for seq in self.running:
            while not self.manager.can_append(seq):
                self.manager.deallocate(last := self.running.pop())
                self.waiting.appendleft(last)
                if last is seq:
                    return batch
            self.manager.may_append(seq)
            batch.append(seq)
        return batch

    def step(self) -> None:
        batch = self.schedule()
        for seq, token in zip(batch, self.model(*self.arrays(batch)), strict=True):
            self.manager.hash_blocks(seq, seq.num_cached)
            seq.num_cached = len(seq.tokens)
            seq.tokens.append(token)
            seq.answer.append(token)
            if len(seq.answer) == seq.max_tokens:
                self.manager.deallocate(seq)
                self.running.remove(seq)

    def arrays(self, batch: list[Sequence]):
        """What the kernels read: tokens, slot_mapping, block_tables, seq_lens."""
        size, tokens, slots = self.manager.block_size, [], []
        for seq in batch:
            tokens += seq.tokens[seq.num_cached :]
            slots += [seq.block_table[i // size] * size + i % size for i in range(seq.num_cached, len(seq.tokens))]
        width = max((len(seq.block_table) for seq in batch), default=0)
        tables = [seq.block_table + [0] * (width - len(seq.block_table)) for seq in batch]
        return tokens, np.array(slots, np.int32), np.array(tables, np.int32), [len(seq.tokens) for seq in batch]


def expected(prompt: list[int], max_tokens: int) -> list[int]:
    """What the model answers to a prompt that is alone and has no cache."""
    tokens = list(prompt)
    for _ in range(max_tokens):
        tokens.append(Model.next(tokens))
    return tokens[len(prompt) :]


def serve(engine, requests: list[tuple[list[int], int]]) -> list[list[int]]:
    """Run requests to their end; returns the answers."""
    sequences = [Sequence(list(prompt), max_tokens) for prompt, max_tokens in requests]
    engine.waiting += sequences
    while engine.waiting or engine.running:
        engine.step()
    return [seq.answer for seq in sequences]


def workload(num: int, shared: int, own: int, max_tokens: int, seed: int = 0) -> list[tuple[list[int], int]]:
    """Requests whose prompts begin with one of four texts."""
    rng = np.random.default_rng(seed)
    texts = rng.integers(0, VOCABULARY, (4, shared)).tolist()
    return [(texts[i % 4] + rng.integers(0, VOCABULARY, own).tolist(), max_tokens) for i in range(num)]


if __name__ == "__main__":
    requests = workload(num=12, shared=48, own=9, max_tokens=30)
    engine = Engine(BlockManager(num_blocks=40, block_size=16), Model(40, 16))
    answers = serve(engine, requests)
    assert answers == [expected(*request) for request in requests]
    print(f"{len(answers)} answers, each as the model alone gives it")
