"""A paged allocator as tutorials write it, and the adapter by which ``kvpool fuzz --target`` drives it.

The algorithm is the one of a published PagedAttention simulation: full and partial blocks are shared by a chained
hash of their tokens, a shared tail is copied when it is written to, a block goes back when its count is zero. It is
written down here anew, with the faults of the original and the one that the first repair of it leaves; `without`
repairs them one by one, so that a test can say which fault the fuzzer finds.
"""

import hashlib
from collections import deque

#: Fault -> the kind of finding that it is.
FAULTS = {
    "gives out None when it is out of blocks": "table",
    "keeps the blocks of a request that it refuses": "refusal",
    "joins tokens without a separator": "content",
    "starts a block at length % size == 1": "table",
}


class SeedAllocator:
    """Requests over blocks; `without` names the faults that are repaired."""

    def __init__(self, num_blocks, block_size, without=()):
        self.block_size = block_size
        self.num_blocks = num_blocks
        self.unfixed = set(FAULTS) - set(without)
        self.blank = deque(range(num_blocks))
        self.count = {}  # block -> requests that have it
        self.key_of = {}  # block -> hash that it is known by
        self.block_of = {}  # hash -> block

    def has(self, fault):
        """Whether this fault was left in."""
        return fault in self.unfixed

    def take(self):
        """A blank block."""
        if not self.blank:
            if self.has("gives out None when it is out of blocks"):
                return None
            raise MemoryError("no block is free")
        block = self.blank.popleft()
        self.count[block] = 1
        return block

    def drop(self, block):
        """One request fewer has the block; the last one gives it back."""
        if block not in self.count:
            return
        self.count[block] -= 1
        if self.count[block] == 0:
            self.forget(block)
            del self.count[block]
            self.blank.append(block)

    def forget(self, block):
        """The block is not known by a hash any more."""
        key = self.key_of.pop(block, None)
        if key is not None and self.block_of.get(key) == block:
            del self.block_of[key]

    def key(self, before, tokens):
        """Hash of a prefix that is one block longer."""
        joint = "" if self.has("joins tokens without a separator") else ","
        return hashlib.sha256((before + joint + joint.join(map(str, tokens))).encode()).hexdigest()

    def open(self, tokens):
        """A request: known blocks are shared, the others taken."""
        table, key = [], ""
        for at in range(0, len(tokens), self.block_size):
            key = self.key(key, tokens[at : at + self.block_size])
            block = self.block_of.get(key)
            if block is None:
                try:
                    block = self.take()
                except MemoryError:
                    if not self.has("keeps the blocks of a request that it refuses"):
                        for taken in table:
                            self.drop(taken)
                    raise
                if block is not None:
                    self.key_of[block], self.block_of[key] = key, block
            else:
                self.count[block] += 1
            table.append(block)
        return {"tokens": list(tokens), "table": table}

    def append(self, request, token):
        """One more token: in a new block, in a copy of a shared one, or in place."""
        length, last = len(request["tokens"]), request["table"][-1]
        if self.has("starts a block at length % size == 1"):
            starts = (length + 1) % self.block_size == 1
        else:
            starts = length % self.block_size == 0
        if starts:
            request["table"].append(self.take())
        elif self.count.get(last, 1) > 1:
            copy = self.take()
            self.drop(last)
            request["table"][-1] = copy
        request["tokens"].append(token)

    def free(self, request):
        """The request ends."""
        for block in request["table"]:
            self.drop(block)


class Adapter:
    """Ten lines: what `kvpool.testing.fuzz_target.Allocator` asks for."""

    max_new = 1  # tokens that one `append` takes

    def __init__(self, num_blocks, block_size, without=()):
        self.allocator = SeedAllocator(num_blocks, block_size, without)
        self.num_blocks, self.block_size = num_blocks, block_size
        self.free, self.table = self.allocator.free, lambda request: request["table"]
        self.open = self.allocator.open

    @property
    def num_free(self):
        return len(self.allocator.blank)

    def append(self, request, tokens):
        self.allocator.append(request, tokens[0])


def sound(num_blocks, block_size):
    """The allocator with every fault repaired."""
    return Adapter(num_blocks, block_size, without=FAULTS)
