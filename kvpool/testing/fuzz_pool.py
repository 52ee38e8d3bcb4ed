"""kvpool's own pool as a target of `kvpool.testing.fuzz_target`: what `kvpool fuzz` runs without ``--target``."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import kvpool
from kvpool.testing.fuzz_target import MOST_SEQUENCES, Copy


class PoolAllocator:
    """A pool with a prefix cache, as an `Allocator`: each call is a step that is done when it returns.

    Prompts are committed as far as a hit may reach, so later ones find them. The pool checks itself before each answer
    about free blocks.
    """

    def __init__(self, num_blocks: int, block_size: int) -> None:
        self.num_blocks, self.block_size = num_blocks, block_size
        self.OutOfBlocks = kvpool.OutOfBlocks
        self.pool = kvpool.Pool(
            *(num_blocks, block_size), max_seqs=MOST_SEQUENCES, max_blocks_per_seq=4 * num_blocks + 16,
            reserved_blocks=0, prefix_cache=True, seed=1,
        )  # fmt: skip
        self.plan = kvpool.Plan(self.pool, 1, 4 * block_size + 8, formats=())
        self.hits: dict[int, int] = {}

    @property
    def num_free(self) -> int:
        """Blank blocks and evictable ones."""
        self.pool.check()
        return self.pool.blocks.num_free

    def open(self, tokens: Sequence[int]) -> int:
        """Open a prompt and compute what no hit has of it."""
        handle = self.pool.open(tokens)
        self.hits[handle] = hit = self.pool.num_tokens(handle)
        self._step(handle, len(tokens) - hit)
        end = (len(tokens) - 1) // self.block_size * self.block_size
        self.pool.prefix.commit(handle, tokens[hit:end])  # type: ignore[union-attr]
        return handle

    def append(self, seq: int, tokens: Sequence[int]) -> list[Copy]:
        """Compute more tokens."""
        return self._step(seq, len(tokens))

    def _step(self, seq: int, n: int) -> list[Copy]:
        self.pool.step(self.plan, [seq], n)
        copies = [(src, dst, tokens) for src, dst, tokens in self.plan.copies.tolist()]
        self.pool.done(self.plan)
        return copies

    def table(self, seq: int) -> Any:
        """The blocks of a sequence."""
        return self.pool.table(seq)

    def free(self, seq: int) -> None:
        """Close a sequence."""
        self.pool.close(seq)

    def fork(self, seq: int) -> int:
        """Fork a sequence."""
        return int(self.pool.fork(seq)[0])

    def truncate(self, seq: int, length: int) -> None:
        """Shorten a sequence."""
        self.pool.truncate(seq, length)

    def cached(self, seq: int) -> int:
        """Tokens that were a hit."""
        return self.hits[seq]
