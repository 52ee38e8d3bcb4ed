"""`transformers`' continuous batching on a kvpool pool: its engine, scheduler and kernels on kvpool's blocks.

    with install():
        outputs = model.generate_batch(prompts, generation_config, continuous_batching_config=ContinuousBatchingConfig(
            page_size=16, num_blocks=256, max_batch_tokens=256, use_async_batching=False))

transformers looks up its allocators in a registry. Inside the block, the one for full attention is `PoolAllocator`. A
request is a sequence. The prefix cache is the pool's. A fork shares every block and copies the last one when it is
written. transformers makes the indices of a step in Python, one per token of every context. Here one `Pool.step` and a
few numpy calls make them. The end of the block restores everything. Engines made in it must end in it.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
import torch
import transformers

from kvpool import Plan, Pool
from kvpool.adapters.releases import importing

SUPPORTED_VERSIONS = ("5.23.0",)  # releases whose engine the tests run on kvpool
with importing("transformers", transformers.__version__, ", ".join(SUPPORTED_VERSIONS)):
    from transformers.generation.continuous_batching import cache as stock_cache
    from transformers.generation.continuous_batching.cache_allocators import FULL_ATTENTION, FullAttentionCacheAllocator
    from transformers.generation.continuous_batching.input_outputs import ContinuousBatchingIOs


@contextlib.contextmanager
def install(*, strict: bool = True) -> Iterator[None]:
    """Give the engines that are made inside the block a pool of kvpool.

    RuntimeError: transformers is not one of `SUPPORTED_VERSIONS` (and `strict`), or other code has hooked it.
    """
    found, tested = transformers.__version__, ", ".join(SUPPORTED_VERSIONS)
    if strict and found not in SUPPORTED_VERSIONS:
        raise RuntimeError(f"[install] transformers {found} is installed, tested with {tested}; see strict=False")
    registry, prepare = stock_cache.ATTN_TYPE_TO_ALLOCATOR, ContinuousBatchingIOs.prepare_batch_tensors
    if registry[FULL_ATTENTION] is not FullAttentionCacheAllocator:
        raise RuntimeError(f"[install] the allocator is {registry[FULL_ATTENTION].__name__}, not transformers' own")

    def prepare_on_pool(io: Any, requests_in_batch: list[Any], *args: Any, **kwargs: Any) -> None:
        prepare(io, requests_in_batch, *args, **kwargs)
        for allocator in io.cache.cache_allocators.values():
            if isinstance(allocator, PoolAllocator):
                allocator.fill(io)

    registry[FULL_ATTENTION] = PoolAllocator
    ContinuousBatchingIOs.prepare_batch_tensors = prepare_on_pool
    try:
        yield
    finally:
        registry[FULL_ATTENTION] = FullAttentionCacheAllocator
        ContinuousBatchingIOs.prepare_batch_tensors = prepare


class PoolAllocator(FullAttentionCacheAllocator):
    """The blocks of all full-attention layers, from the pool `blocks`. Made by transformers, see `install`."""

    def register_cache_tensor(self, bytes_per_sector: int, non_trash_bytes: int, cache_tensor: Any, pool: Any) -> None:
        """Make the pool, now that the number of blocks is known."""
        super().register_cache_tensor(bytes_per_sector, non_trash_bytes, cache_tensor, pool)
        if pool.num_allocators > 1:
            raise ValueError(f"[install] the model has {pool.num_allocators} kinds of attention layers, the limit is 1")
        reserved = 2 * self.blocks_per_sector  # transformers pads with them
        self.blocks = Pool(  # in order: transformers runs one step after the other
            self.num_blocks + reserved, self.tokens_per_page, max_seqs=min(1 << 20, max(64, 4 * self.num_blocks)),
            reserved_blocks=reserved, in_order=True, prefix_cache=self.use_block_sharing
        )  # fmt: skip
        self.prefix = self.blocks.prefix
        self.handles: dict[str, int] = {}  # by request
        self.block_table = Tables(self.blocks, self.handles)
        self.known: dict[str, int] = {}  # tokens that the prefix cache knows of each request
        self.one_row = Plan(self.blocks, 1, formats=())
        self.plan = Plan(self.blocks, 64, 1024, formats=("csr", "slot_mapping"), dtype="int64")  # grows
        self.scratch = np.empty((2, 0, self.tokens_per_page), np.int64)  # grows
        self.prompt: list[int] = []
        self.take_over()

    def take_over(self) -> None:
        """Stand in transformers' pool of sectors where its free blocks were; its `reset` makes it forget that."""
        self.pool.free_sectors.clear()
        self.pool._free_blocks[self.index] = self

    def __len__(self) -> int:
        """Free blocks, cached ones included."""
        return self.blocks.stats().free

    def delete_full_trees(self) -> list[int]:
        """Sectors to give back: none."""
        return []

    def needs_new_sectors(self, request_id: str, past_length: int, query_length: int) -> int:
        """0 if the request fits; else 1, which is more than there are."""
        self.take_over()
        if (handle := self.handles.get(request_id)) is None:
            return int(self.needs_new_blocks(request_id, past_length, query_length) > len(self))
        return int(not self.blocks.can([handle], past_length + query_length - self.blocks.num_tokens(handle)))

    def allocate_cache_to_request(self, request_id: str, past_length: int, query_length: int) -> None:
        """Reserve the blocks of the next tokens, and copy a last block that is shared."""
        if (handle := self.handles.get(request_id)) is None:
            self.handles[request_id] = self.blocks.open(past_length + query_length)
            return
        self.blocks.reserve(self.one_row, [handle], past_length + query_length - self.blocks.num_tokens(handle))
        self.copy_blocks(*self.one_row.copies.T[:2].tolist())

    def free_blocks(self, request_id: str, no_cache: bool = False) -> None:
        """The request is over. What the prefix cache knows of it stays until its blocks are needed."""
        self.known.pop(request_id, None)
        if request_id in self.handles:
            self.blocks.close(self.handles.pop(request_id))

    def count_non_shareable_blocks(self, source_request_id: str, past_length: int) -> int:
        """A fork needs no block until a write."""
        return 0

    def fork_blocks(self, source_request_id: str, dest_request_id: str, past_length: int) -> tuple[list, list]:
        """Share every block; nothing is to be copied now."""
        handle = self.handles[source_request_id]
        if self.blocks.num_tokens(handle) != past_length:
            raise ValueError(f"[fork] {past_length} tokens, the request has {self.blocks.num_tokens(handle)}")
        self.handles[dest_request_id] = int(self.blocks.fork(handle)[0])
        self.known[dest_request_id] = self.known.get(source_request_id, 0)
        return [], []

    def match_prefix_blocks(self, prompt_ids: list[int]) -> list[int]:
        """One entry per block that the prefix cache has of the prompt."""
        self.prompt = prompt_ids
        found = 0 if self.prefix is None else self.prefix.match(prompt_ids)
        return [0] * (found // self.tokens_per_page)

    def acquire_prefix_blocks(self, request_id: str, prefix_len: int, block_ids: list[int]) -> None:
        """Begin the request with what `match_prefix_blocks` has found."""
        prompt = self.prompt[:prefix_len]
        self.handles[request_id] = self.blocks.open() if self.prefix is None else self.prefix.pin(prompt)
        self.known[request_id] = prefix_len

    def mark_complete_blocks(self, request_id: str, token_ids: list[int], new_new_blocks: int) -> None:
        """Tell the prefix cache of the blocks that are full now."""
        handle, known = self.handles[request_id], self.known.get(request_id, 0)
        full = self.blocks.num_tokens(handle) // self.tokens_per_page * self.tokens_per_page
        if full > known and self.prefix is not None:
            self.prefix.commit(handle, token_ids[known:full])
            self.known[request_id] = full

    def get_read_indices(self, request_id: str, past_length: int, query_length: int) -> list[int]:
        """Nothing: `fill` writes those of all requests."""
        return []

    get_write_indices = get_read_indices

    def fill(self, io: Any) -> None:
        """Step the pool for the batch of `io`, and write where its tokens go and what they read."""
        handles = [self.handles[future.state.request_id] for future in io.requests_in_batch]
        write, read = self.indices(handles, [future.query_length for future in io.requests_in_batch])
        if not io.use_block_table:
            io.true_write_sizes[self.index] = store(io.write_index_storage[self.index], write)
            if io.max_kv_read:
                io.true_read_sizes[self.index] = store(io.read_index_storage[self.index], read)

    def indices(self, handles: list[int], counts: list[int]) -> tuple[np.ndarray, np.ndarray]:
        """Step the pool; rows of the flat KV tensor to write new tokens to, and, until the next call, to read from."""
        rows, tokens, page, stride = len(handles), sum(counts), self.tokens_per_page, self.block_physical_stride
        if rows > self.plan.limits.max_rows or tokens > self.plan.limits.max_tokens:
            self.plan = Plan(self.blocks, 2 * rows, 2 * tokens, formats=("csr", "slot_mapping"), dtype="int64")
        self.blocks.step(plan := self.plan, handles, counts)
        if len(plan.indices) > self.scratch.shape[1]:
            self.scratch = np.empty((2, 2 * len(plan.indices), page), np.int64)
        np.add.outer(plan.indices * stride, np.arange(page), out=self.scratch[0, : len(plan.indices)])
        (whole, read), end = self.scratch.reshape(2, -1), 0
        lengths = np.diff(plan.indptr) * page - page + plan.last_page_len
        for block, length in zip(plan.indptr[:-1].tolist(), lengths.tolist(), strict=True):
            begin, end = end, end + length
            read[begin:end] = whole[block * page : block * page + length]
        return plan.slot_mapping + plan.slot_mapping // page * (stride - page), read[:end]


def store(storage: torch.Tensor, values: np.ndarray) -> int:
    """Copy to the beginning of a tensor; on the CPU without torch, whose threads take longer to meet than to copy."""
    on_cpu = storage.device.type == "cpu"
    (storage.numpy() if on_cpu else storage)[: len(values)] = values if on_cpu else torch.from_numpy(values)
    return len(values)


class Tables(Mapping[str, list[int]]):
    """The block table of each request, as transformers reads it when it frees all or makes room."""

    def __init__(self, blocks: Pool, handles: dict[str, int]) -> None:
        self.blocks, self.handles = blocks, handles

    def __getitem__(self, request_id: str) -> list[int]:
        return self.blocks.table(self.handles[request_id]).tolist()

    def __iter__(self) -> Iterator[str]:
        return iter(self.handles)

    def __len__(self) -> int:
        return len(self.handles)
