"""kvpool's own pool as a target of `kvpool.testing.fuzz_target`: what `kvpool fuzz` runs without ``--target``."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import kvpool
from kvpool.testing.fuzz_target import MOST_SEQUENCES, Copy, TargetFinding
from kvpool.testing.model import ModelPlan, ModelPool


class _Calls:
    """The calls of an `Allocator`, made on a pool with a prefix cache: each step is done when the call returns.

    Prompts are committed as far as a hit may reach, so later ones find them.
    """

    def __init__(self, make_pool: Any, make_plan: Any, num_blocks: int, block_size: int) -> None:
        self.block_size = block_size
        self.pool = make_pool(
            *(num_blocks, block_size), max_seqs=MOST_SEQUENCES, max_blocks_per_seq=4 * num_blocks + 16,
            reserved_blocks=0, prefix_cache=True, seed=1,
        )  # fmt: skip
        self.plan = make_plan(self.pool, 1, 4 * block_size + 8, formats=())
        self.open_: list[int] = []  # handles, in the order in which both sides have them

    def open(self, tokens: Sequence[int]) -> tuple[int, int]:
        """Open a prompt and compute what no hit has of it. Returns the handle, and the tokens of the hit."""
        handle = self.pool.open(tokens)
        hit = self.pool.num_tokens(handle)
        self.append(handle, tokens[hit:])
        end = (len(tokens) - 1) // self.block_size * self.block_size
        self.pool.prefix.commit(handle, tokens[hit:end])
        self.open_.append(handle)
        return handle, hit

    def append(self, seq: int, tokens: Sequence[int]) -> list[Copy]:
        self.pool.step(self.plan, [seq], len(tokens))
        copies = [(src, dst, n) for src, dst, n in self.plan.copies.tolist()]
        self.pool.done(self.plan)
        return copies

    def free(self, seq: int) -> None:
        self.pool.close(seq)
        self.open_.remove(seq)

    def fork(self, seq: int) -> int:
        self.open_.append(int(self.pool.fork(seq)[0]))
        return self.open_[-1]

    def truncate(self, seq: int, length: int) -> None:
        self.pool.truncate(seq, length)


class PoolAllocator:
    """A pool beside its plain model, as an `Allocator`. Each call is made on both, and they must agree.

    They agree on hits, copies, refusals, free blocks, and on tables, but for the names of blocks: with a prefix cache
    the pool may hand out others. The pool checks itself before each answer about free blocks.
    """

    def __init__(self, num_blocks: int, block_size: int) -> None:
        self.num_blocks, self.block_size = num_blocks, block_size
        self.OutOfBlocks = kvpool.OutOfBlocks
        self.core = _Calls(kvpool.Pool, kvpool.Plan, num_blocks, block_size)
        self.model = _Calls(ModelPool, ModelPlan, num_blocks, block_size)
        self.pool = self.core.pool
        self.hits: dict[int, int] = {}

    @property
    def num_free(self) -> int:
        """Blank blocks and evictable ones."""
        self.pool.check()
        free: int = self.pool.blocks.num_free
        self._agree("free blocks", free, self.model.pool.stats().free)
        return free

    def open(self, tokens: Sequence[int]) -> int:
        (handle, hit), (_, expected) = self._both("open", None, tokens)
        self._agree("hit tokens", hit, expected)
        self.hits[handle] = hit
        return int(handle)

    def append(self, seq: int, tokens: Sequence[int]) -> list[Copy]:
        copies, expected = self._both("append", seq, tokens)
        self._agree("tokens copied", [n for _, _, n in copies], [n for _, _, n in expected])
        return list(copies)

    def table(self, seq: int) -> Any:
        return self.pool.table(seq)

    def free(self, seq: int) -> None:
        self._both("free", seq)

    def fork(self, seq: int) -> int:
        return int(self._both("fork", seq)[0])

    def truncate(self, seq: int, length: int) -> None:
        self._both("truncate", seq, length)

    def cached(self, seq: int) -> int:
        return self.hits[seq]

    def _both(self, name: str, seq: int | None, *given: Any) -> tuple[Any, Any]:
        """What a call returns on the pool and on the model. One that is refused is refused by both."""
        place = None if seq is None else self.core.open_.index(seq)
        results: list[Any] = []
        for side in (self.core, self.model):
            try:
                results.append(getattr(side, name)(*([] if place is None else [side.open_[place]]), *given))
            except kvpool.OutOfBlocks as refused:
                results.append(refused)
        found, expected = results
        short = [result.short_by if isinstance(result, kvpool.OutOfBlocks) else 0 for result in results]
        self._agree("blocks short", *short)
        if short[0]:
            raise found
        self._compare()
        return found, expected

    def _compare(self) -> None:
        """The tables of both are equal up to the names of blocks."""
        names: dict[int, int] = {}
        for mine, theirs in zip(self.core.open_, self.model.open_, strict=True):
            found, expected = (self.pool.table(mine).tolist(), self.model.pool.table(theirs).tolist())
            self._agree("blocks of a table", len(found), len(expected))
            self._agree("table", [names.setdefault(a, b) for a, b in zip(found, expected, strict=True)], expected)
        self._agree("blocks in use", len(set(names)), len(set(names.values())))

    def _agree(self, what: str, found: Any, expected: Any) -> None:
        if found != expected:
            raise TargetFinding("model", f"{what}: the pool has {found}, the plain model {expected}")
