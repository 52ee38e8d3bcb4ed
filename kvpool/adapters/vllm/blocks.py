"""vLLM's `BlockPool`, whose references and free list are those of `Pool.blocks`.

vLLM's own class keeps what is vLLM's: block hashes and their map, events, metrics, watchers of reuse. So
`KVPoolBlocks` is a subclass of it, and what a block tells about its references, the core answers.

    block.ref_cnt == references of the block in the core
    block.block_hash is not None  <=>  the core caches the block
    free_block_queue == free_order() of the core, and its num_free_blocks == num_free

`take_place` first gives both classes the same calls: a release whose pool means something else is refused at the start.
"""

from __future__ import annotations

import logging
import random
from collections.abc import Callable, Iterable, Iterator, Sequence
from types import SimpleNamespace
from typing import Any

from vllm import __version__ as vllm_version
from vllm.v1.core import block_pool, kv_cache_coordinator
from vllm.v1.core.kv_cache_utils import BlockHash, KVCacheBlock

from kvpool import Pool, __version__
from kvpool.errors import KVPoolError, OutOfBlocks

STOCK: Any = block_pool.BlockPool
log = logging.getLogger("vllm.kvpool")  # below vLLM's own, which decides where it goes


class Block(KVCacheBlock):
    """A block of vLLM whose references are counted by the pool."""

    __slots__ = ()
    __eq__ = object.__eq__  # a block is itself
    __hash__ = object.__hash__
    pool: Any

    def __init__(self, pool: KVPoolBlocks, block_id: int) -> None:
        self.block_id, self.pool, self.is_null = block_id, pool, block_id == 0  # type: ignore[misc]
        self.reset_hash()

    @property
    def ref_cnt(self) -> int:
        return self.pool.references[self.block_id]

    @ref_cnt.setter
    def ref_cnt(self, count: int) -> None:
        """A manager that copies a block takes references one by one."""
        for _ in range(self.ref_cnt, count):
            self.pool.core.touch([self.block_id])
        for _ in range(count, self.ref_cnt):
            self.pool.core.release([self.block_id])
        self.pool.free_block_queue.num_free_blocks = self.pool.core.num_free

    def __repr__(self) -> str:
        return f"Block(block_id={self.block_id}, ref_cnt={self.ref_cnt}, block_hash={self.block_hash!r})"


class FreeBlocks:
    """What readers ask of vLLM's free list; the list itself is the core's."""

    def __init__(self, pool: KVPoolBlocks) -> None:
        self.pool, self.num_free_blocks = pool, pool.core.num_free

    def get_all_free_blocks(self) -> list[KVCacheBlock]:
        return [self.pool.blocks[block] for block in self.pool.core.free_order().tolist()]

    def iter_blocks_after(self, cursor: KVCacheBlock | None) -> Iterator[KVCacheBlock]:
        """The free blocks behind one of them, or all."""
        free = self.get_all_free_blocks()
        return iter(free[free.index(cursor) + 1 :] if cursor is not None else free)


class KVPoolBlocks(STOCK):
    """vLLM's block pool, whose counts and free list are kvpool's. Arguments are those of vLLM's class."""

    def __init__(self, num_gpu_blocks: int, *args: Any, **kwargs: Any) -> None:
        super().__init__(num_gpu_blocks, *args, **kwargs)
        self.core = Pool(num_gpu_blocks, 1, max_seqs=1, max_blocks_per_seq=1, in_order=True).blocks
        self.references = self.core.references
        self.blocks = [Block(self, block) for block in range(num_gpu_blocks)]
        self.null_block = self.blocks[0]
        self.free_block_queue = FreeBlocks(self)

    def get_new_blocks(self, num_blocks: int) -> list[KVCacheBlock]:
        try:
            ids, evicted = self.core.take(num_blocks)
        except OutOfBlocks as error:
            raise ValueError(f"Cannot get {num_blocks} free blocks from the pool: {error}") from None
        self.free_block_queue.num_free_blocks -= num_blocks
        every = self.blocks
        taken = [every[block] for block in ids]
        if self._reuse_watchers:
            self._notify_reuse(taken)
        if evicted:
            for block in taken:
                if block._block_hash is not None:
                    self._emit_block_removed_events(super()._remove_cached_block_hashes(block))
        if self.metrics_collector:
            for block in taken:
                if self.enable_caching:
                    self.metrics_collector.on_block_evicted(block)
                self.metrics_collector.on_block_allocated(block)
        return taken

    def touch(self, blocks: Sequence[KVCacheBlock]) -> None:
        self.core.touch([block.block_id for block in blocks], blank=True)
        self.free_block_queue.num_free_blocks = self.core.num_free
        if self.metrics_collector:
            for block in blocks:
                self.metrics_collector.on_block_accessed(block)

    def free_blocks(self, ordered_blocks: Iterable[KVCacheBlock]) -> None:
        ids: list[int] = []
        others: dict[Any, list[KVCacheBlock]] = {}
        for block in ordered_blocks:
            if block.pool is self:
                ids.append(block.block_id)
            elif block.pool is not None:  # a list that waited may name blocks of other pools, or of none
                others.setdefault(block.pool, []).append(block)
        self.core.release(ids)
        self.free_block_queue.num_free_blocks = self.core.num_free
        for pool, blocks in others.items():
            pool.free_blocks(blocks)

    def unpin_blocks(self, blocks: Iterable[KVCacheBlock], on_reuse: Callable[[KVCacheBlock], None]) -> None:
        """They join the end of the free list, with a hash or without, so those without are cached while they leave."""
        ids = [block.block_id for block in blocks]
        bare = [block for block in ids if self.blocks[block].block_hash is None]
        self._reuse_watchers.update(dict.fromkeys(ids, on_reuse))
        self.core.mark_cached(bare)
        self.core.release(ids)
        self.core.uncache(bare, keep_place=True)
        self.free_block_queue.num_free_blocks = self.core.num_free

    def reset_prefix_cache(self) -> bool:
        done = super().reset_prefix_cache()
        if done:
            self.core.uncache([block.block_id for block in self.blocks], keep_place=True)
        return done

    def _insert_block_hash(self, block_hash_with_group_id: Any, block: KVCacheBlock, num_tokens: int | None) -> None:
        bare = block.block_hash is None
        super()._insert_block_hash(block_hash_with_group_id, block, num_tokens=num_tokens)
        if bare and block.block_hash is not None and block.pool is self:
            self.core.mark_cached([block.block_id])

    def _remove_cached_block_hashes(self, block: KVCacheBlock) -> list[Any]:
        removed = super()._remove_cached_block_hashes(block)
        if block.pool is self:
            self.core.uncache([block.block_id], keep_place=True)
        return removed


def play(make: Callable[..., Any], seed: int) -> list[Any]:
    """What a block pool says to calls as vLLM's managers make them, drawn from a seed."""
    rng = random.Random(seed)
    pool = make(num_gpu_blocks=12, enable_caching=True, hash_block_size=1, enable_kv_cache_events=False)
    held: list[list[Any]] = []  # blocks of requests
    told: list[Any] = []
    for step in range(120):
        word = rng.choice(["get", "get", "cache", "free", "free", "hit", "evict", "unpin", "count", "reset"])
        blocks = held.pop(rng.randrange(len(held))) if held and word in {"cache", "free", "unpin", "count"} else []
        if word == "get" and pool.get_num_free_blocks() >= 3:
            held.append(pool.get_new_blocks(rng.randrange(4)))
        elif word == "cache":
            bare = [block for block in blocks if block.block_hash is None]
            hashes = [BlockHash(bytes([step, k])) for k in range(len(bare))]
            pool.cache_full_blocks(SimpleNamespace(block_hashes=hashes), bare, 0, len(bare), 1, 0)
        elif word == "free":
            pool.free_blocks(reversed(blocks))
        elif word == "hit":
            wanted = BlockHash(bytes([rng.randrange(step + 1), 0]))
            found = pool.get_cached_block(wanted, [0]) or []
            pool.touch(found)
            held.append(found)
        elif word == "evict":
            pool.evict_blocks({rng.randrange(1, 12)})
        elif word == "unpin":
            pool.unpin_blocks(blocks, lambda block: told.append(("reused", block.block_id)))
        elif word == "count" and blocks:
            blocks[0].ref_cnt += 1
            held.append([blocks[0]])
        elif word == "reset":
            told.append(pool.reset_prefix_cache())
        if word in {"cache", "count"}:
            held.append(blocks)
        order = [block.block_id for block in pool.free_block_queue.get_all_free_blocks()]
        told.append((word, order, [(block.ref_cnt, block.block_hash) for block in pool.blocks[1:]], pool.get_usage()))
    return told


def take_place(seeds: Iterable[int] = range(8)) -> None:
    """Put `KVPoolBlocks` where vLLM's coordinator makes its block pool, if it does in everything what vLLM's does.

    Raises
    ------
    RuntimeError
        The two differ, or vLLM has no such place. Nothing was changed.
    """
    if kv_cache_coordinator.BlockPool is KVPoolBlocks:
        return
    silent, block_pool.logger.disabled = block_pool.logger.disabled, True
    try:
        if kv_cache_coordinator.BlockPool is not STOCK:
            raise TypeError(f"something else has its place: {kv_cache_coordinator.BlockPool}")
        for seed in seeds:
            if play(STOCK, seed) != play(KVPoolBlocks, seed):
                raise ValueError(f"vLLM's block pool and kvpool's answer differently (seed {seed})")
    except (AttributeError, TypeError, ValueError, AssertionError, KVPoolError) as error:
        raise RuntimeError(
            f"[kvpool] vLLM {vllm_version} has a block pool that this plugin does not know ({error}). Unset "
            f"KVPOOL_VLLM, or take kvpool out of VLLM_PLUGINS, to run vLLM with its own"
        ) from error
    finally:
        block_pool.logger.disabled = silent
    kv_cache_coordinator.BlockPool = KVPoolBlocks
    log.info("kvpool %s holds the KV cache blocks of this engine", __version__)
