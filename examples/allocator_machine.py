"""A Hypothesis test of an allocator of your own: ``python -m pytest examples/allocator_machine.py``.

`Allocator` stands for yours. Hypothesis draws calls. `Checked` makes each of them and plays the backend: it stores in
every slot which prefix the slot holds, so it finds a table that reads tokens of another sequence, a block that is lost
and a refusal without a reason. A failure is shrunk to the fewest calls.
"""

from contextlib import suppress
from itertools import count

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule

from kvpool.testing.fuzz_target import Checked


class Allocator:
    """Blocks with reference counts; forks share them, and a shared last block is copied before it is written."""

    def __init__(self, num_blocks, block_size):
        self.num_blocks, self.block_size = num_blocks, block_size
        self.free_blocks, self.counts = list(range(num_blocks)), [0] * num_blocks
        self.sequences, self.names = {}, count()

    num_free = property(lambda self: len(self.free_blocks))

    def take(self, n):
        if n > self.num_free:
            raise MemoryError(f"{n} blocks needed, {self.num_free} free")
        taken = [self.free_blocks.pop() for _ in range(n)]
        for block in taken:
            self.counts[block] = 1
        return taken

    def open(self, tokens):
        table = self.take(-(-len(tokens) // self.block_size))
        self.sequences[seq := next(self.names)] = (table, len(tokens))
        return seq

    def append(self, seq, tokens):
        table, length = self.sequences[seq]
        copies = length % self.block_size > 0 and self.counts[table[-1]] > 1 and bool(tokens)
        new = self.take(-(-(length + len(tokens)) // self.block_size) - len(table) + copies)
        copied = []
        if copies:
            self.counts[table[-1]] -= 1
            copied = [(table[-1], new[0], length % self.block_size)]
        self.sequences[seq] = (table[: len(table) - copies] + new, length + len(tokens))
        return copied

    def fork(self, seq):
        table, length = self.sequences[seq]
        for block in table:
            self.counts[block] += 1
        self.sequences[child := next(self.names)] = (list(table), length)
        return child

    def table(self, seq):
        return self.sequences[seq][0]

    def free(self, seq):
        for block in self.sequences.pop(seq)[0]:
            self.counts[block] -= 1
            if not self.counts[block]:
                self.free_blocks.append(block)


TOKENS = st.lists(st.integers(0, 3), min_size=1, max_size=8)  # few different ones, so prefixes are alike


class Machine(RuleBasedStateMachine):
    """Calls in any order. What is refused for want of blocks has changed nothing, which `Checked` looks at."""

    @initialize(num_blocks=st.integers(8, 24), block_size=st.integers(1, 4))
    def begin(self, num_blocks, block_size):
        self.checked = Checked(Allocator(num_blocks, block_size))

    def some(self, data):
        return data.draw(st.sampled_from(self.checked.sequences))

    @rule(tokens=TOKENS)
    def open(self, tokens):
        self.made(lambda: self.checked.open(tokens))

    @precondition(lambda self: self.checked.sequences)
    @rule(data=st.data(), tokens=TOKENS)
    def append(self, data, tokens):
        seq = self.some(data)
        self.made(lambda: self.checked.append(seq, tokens))

    @precondition(lambda self: self.checked.sequences)
    @rule(data=st.data())
    def fork(self, data):
        seq = self.some(data)
        self.made(lambda: self.checked.fork(seq))

    @precondition(lambda self: self.checked.sequences)
    @rule(data=st.data())
    def free(self, data):
        self.checked.free(self.some(data))

    def made(self, call):
        with suppress(MemoryError):
            call()


TestAllocator = Machine.TestCase
TestAllocator.settings = settings(max_examples=300, deadline=None)
