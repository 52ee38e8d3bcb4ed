"""`Pool.blocks` in plain Python: the calls of `kvpool/core/pool_blocks.pxi` on a model of a pool."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np

from kvpool.errors import DoubleFree, PlanStateError
from kvpool.testing import model_args as args
from kvpool.testing.model_blocks import MAX_REFCOUNT, BlockModel, public_call


def _named(pool: BlockModel, call: str, ids: Any) -> list[int]:
    """The blocks that a call names, without reserved ones."""
    named = args.one_or_many(call, "block id", ids, ("int32", "int64"))
    for block in named:
        if not 0 <= block < pool.num_blocks:
            raise IndexError(f"[{call}] block id is out of range ({block}), the pool has {pool.num_blocks} blocks")
    return [block for block in named if block >= pool.reserved_blocks]


def _judge(blocks: list[int], call: str, refusal: Callable[[int], Exception | None]) -> None:
    """Refuse the first block that stands twice or for which there is a refusal."""
    for k, block in enumerate(blocks):
        error = refusal(block)
        if block in blocks[:k]:
            kind = DoubleFree if call == "release" else ValueError
            error = kind(f"[{call}] block stands twice ({block})")
        if error is not None:
            raise error


@public_call
def take(pool: BlockModel, n: int) -> tuple[list[int], int]:
    """Blank blocks, then the oldest committed ones, which are not noted as dropped."""
    count = args.count("take", "n", n)
    if count > pool._available():
        pool._out_of_blocks("take", count)
    evicted = max(count - len(pool._blank), 0)
    blocks = [pool._take() for _ in range(count)]
    del pool._dropped[len(pool._dropped) - evicted :]
    pool._raw.update(dict.fromkeys(blocks, 1))
    pool._chain("take", *blocks)
    return blocks, evicted


@public_call
def take_block(pool: BlockModel, block: int) -> None:
    """A blank block, wherever it is on the stack."""
    block = args.integer("take_block", "block", block)
    if not 0 <= block < pool.num_blocks:
        raise IndexError(f"[take_block] block is out of range ({block}), the pool has {pool.num_blocks} blocks")
    if block not in pool._blank:
        raise ValueError(f"[take_block] block is not blank ({block})")
    pool._blank.remove(block)
    pool._raw[block] = 1
    pool._counters["allocs"] += 1
    pool._note_peak()
    pool._chain("take_block", block)


@public_call
def touch(pool: BlockModel, ids: Any) -> None:
    """One raw reference more on blocks in use and on committed ones."""
    blocks = _named(pool, "touch", ids)

    def refusal(block: int) -> Exception | None:
        if not pool._refcount(block) and block not in pool._committed:
            return ValueError(f"[touch] block is neither in use nor committed ({block})")
        if pool._refcount(block) >= MAX_REFCOUNT:
            return OverflowError(f"[touch] block has too many references ({block}), the most is 2^30")
        return None

    _judge(blocks, "touch", refusal)
    for block in blocks:
        pool._raw[block] = pool._raw.get(block, 0) + 1
        pool._lru = [b for b in pool._lru if b != block]
        pool._limbo = [(b, fence) for b, fence in pool._limbo if b != block]
    pool._note_peak()
    pool._chain("touch", *blocks)


@public_call
def release(pool: BlockModel, ids: Any, *, oldest: bool = False) -> None:
    """One raw reference less; who is named first is taken first."""
    blocks = _named(pool, "release", ids)
    if oldest and pool._pending:
        raise PlanStateError(f"[release] a step is pending ({pool._pending[-1].id})")
    _judge(
        blocks,
        "release",
        lambda block: None if pool._raw.get(block) else DoubleFree(f"[release] block has no raw reference ({block})"),
    )
    last_first = [block for block in blocks[::-1] if oldest or block not in pool._committed]
    first_first = [block for block in blocks if block not in last_first]
    pool._drop_raw(last_first + first_first)
    if oldest:
        ended = [block for block in blocks if block in pool._lru]
        pool._lru = ended + [block for block in pool._lru if block not in ended]
    pool._chain("release", oldest, *blocks)


@public_call
def commit(pool: BlockModel, ids: Any) -> None:
    """Blocks with a reference and without content become immutable."""
    blocks = _named(pool, "commit", ids)

    def refusal(block: int) -> Exception | None:
        if not pool._refcount(block):
            return DoubleFree(f"[commit] block has no reference ({block})")
        if block in pool._committed:
            return ValueError(f"[commit] block is committed already ({block})")
        return ValueError(f"[commit] block was dropped ({block})") if block in pool._dropped else None

    _judge(blocks, "commit", refusal)
    pool._committed.update(blocks)
    pool._chain("commit", *blocks)


@public_call
def uncommit(pool: BlockModel, ids: Any) -> None:
    """Blocks lose their content; evictable ones are blank, the first named on top."""
    blocks = _named(pool, "uncommit", ids)
    _judge(blocks, "uncommit", lambda block: None)
    for block in blocks[::-1]:
        pool._committed.discard(block)
        if block in pool._lru:
            pool._lru.remove(block)
            pool._blank.append(block)
            pool._counters["evictions"] += 1
    pool._chain("uncommit", *blocks)


@public_call
def refcounts(pool: BlockModel, ids: Any) -> np.ndarray:
    """References of blocks."""
    named = args.one_or_many("refcounts", "block id", ids, ("int32", "int64"))
    for block in named:
        if not 0 <= block < pool.num_blocks:
            raise IndexError(f"[refcounts] block id is out of range ({block}), the pool has {pool.num_blocks} blocks")
    return np.array([pool._refcount(block) for block in named], np.int32)


@public_call
def free_order(pool: BlockModel, n: int | None = None) -> np.ndarray:
    """Who would be taken next."""
    order = pool._blank[::-1] + pool._lru
    return np.array(order if n is None else order[: args.count("free_order", "n", n)], np.int32)


CALLS = {call.__name__: call for call in (take, take_block, touch, release, commit, uncommit, refcounts, free_order)}


class ModelPoolBlocks:
    """See `kvpool._core.PoolBlocks`."""

    def __init__(self, pool: BlockModel) -> None:
        self._pool = pool

    def __getattr__(self, name: str) -> Callable:
        if name not in CALLS:
            raise AttributeError(f"no call of Pool.blocks is named {name!r}")
        return partial(CALLS[name], self._pool)

    @property
    def num_free(self) -> int:
        """Blocks that `take` can give."""
        return self._pool._available()

    @property
    def num_blank(self) -> int:
        """Of these, those that hold nothing."""
        return len(self._pool._blank)

    @property
    def usage(self) -> float:
        """Share of the blocks that are in use."""
        return self._pool._used() / (self._pool.num_blocks - self._pool.reserved_blocks)
