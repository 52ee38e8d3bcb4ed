"""`transformers`' continuous batching on a kvpool pool: its engine, scheduler and kernels on kvpool's blocks.

transformers looks up its allocators in a registry. In the block of `install`, the one for full attention is
`PoolAllocator`, the one for sliding attention `WindowAllocator`. They share one pool. Layers of one kind are a layer
group of it. A block has pages of as many layers as divide both kinds evenly, so it may serve either. One `Pool.step`
and a few numpy calls make the indices of a step.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from inspect import signature
from math import gcd
from typing import Any

import numpy as np
import torch
import transformers

from kvpool import Group, Plan, Pool
from kvpool.adapters import importing, warn_if_untested

FORMATS = ("csr", "slot_mapping", "seq_lens")


class Places:
    """Rows of the tensor for the tokens of a step: blocks have `page` tokens, and are `stride` rows apart."""

    def __init__(self, page: int, stride: int) -> None:
        self.page, self.stride = page, stride
        self.whole = np.empty((0, page), np.int64)  # grows, as the next one
        self.read = np.empty(0, np.int64)

    def of_group(self, part: Any, counts: list[int], window: int) -> tuple[np.ndarray, np.ndarray]:
        """Rows to write new tokens to and to read from, for a layer group: ``[columns, n]`` each.

        A query reads `window` tokens, itself included; 0: all. The second array holds until the next call.
        """
        begin = np.maximum(part.kv_lens - counts - (window or 2**31) + 1, part.kv_starts)  # first position that is read
        starts, lengths = part.indptr[:-1] * self.page + begin - part.kv_starts, part.kv_lens - begin
        columns, total = part.indices.shape[1], int(lengths.sum())
        if columns * total > len(self.read):
            self.read = np.empty(2 * columns * total, np.int64)
        read = self.read[: columns * total].reshape(columns, total)
        for out, ids in zip(read, part.indices.T, strict=True):
            self.runs(ids, starts, lengths, out)
        slots = part.slot_mapping
        return slots + slots // self.page * (self.stride - self.page), read

    def runs(self, ids: np.ndarray, starts: np.ndarray, lengths: np.ndarray, out: np.ndarray) -> None:
        """Rows for runs of tokens: from the places `starts` on in the blocks `ids`, which are laid end to end."""
        if len(ids) > len(self.whole):
            self.whole = np.empty((2 * len(ids), self.page), np.int64)
        np.add.outer(ids * self.stride, np.arange(self.page), out=self.whole[: len(ids)])
        whole, end = self.whole.reshape(-1), 0
        for start, length in zip(starts.tolist(), lengths.tolist(), strict=True):
            begin, end = end, end + length
            out[begin:end] = whole[start : start + length]


class Stored:
    """Rows of a step: transformers' storage has those of the first column, this those of the others."""

    def __init__(self, trash: int) -> None:
        self.trash = trash  # what a step does not use, for graphs and padding
        self.rows = torch.zeros((0, 0), dtype=torch.int64)  # [columns - 1, N], as wide as transformers' storage
        self.used = 0

    def keep(self, storage: torch.Tensor, index: int, values: np.ndarray) -> int:
        """Store the rows of a step, ``[columns, n]``; the first in a row of transformers' storage. Return n."""
        if len(values) > 1:
            if not len(self.rows):
                self.rows = storage.new_full((len(values) - 1, storage.shape[1]), self.trash)
            self.rows[:, : values.shape[1]] = torch.from_numpy(values[1:])
            self.rows[:, values.shape[1] : self.used] = self.trash
            self.used = values.shape[1]
        return store(storage[index], values[0])


def store(storage: torch.Tensor, values: np.ndarray) -> int:
    """Copy to the beginning of a tensor; on the CPU without torch, whose threads take longer to meet than to copy."""
    on_cpu = storage.device.type == "cpu"
    (storage.numpy() if on_cpu else storage)[: len(values)] = values if on_cpu else torch.from_numpy(values)
    return len(values)


class FreeBlocks:
    """The free blocks of a pool, cached ones included, where transformers keeps trees of its own."""

    def __init__(self, blocks: Pool) -> None:
        self.blocks = blocks

    def __len__(self) -> int:
        return self.blocks.stats().free

    def delete_full_trees(self) -> list[int]:
        return []


class Tables(Mapping[str, list[int]]):
    """The block table of each request, as transformers reads it when it frees all or makes room."""

    def __init__(self, blocks: Pool, handles: dict[str, int]) -> None:
        self.blocks, self.handles = blocks, handles

    def __getitem__(self, request_id: str) -> list[int]:
        return self.blocks.table(self.handles[request_id], 0).ravel().tolist()

    def __iter__(self) -> Iterator[str]:
        return iter(self.handles)

    def __len__(self) -> int:
        return len(self.handles)


RELEASES = ("5.22.2", "5.25")  # the oldest whose engine the tests run on kvpool, and the first that they do not
with importing("transformers", transformers.__version__, ">= {}, < {}".format(*RELEASES)):
    from transformers.generation.continuous_batching import cache as stock_cache
    from transformers.generation.continuous_batching.cache_allocators import (
        FULL_ATTENTION,
        SLIDING_ATTENTION,
        FullAttentionCacheAllocator,
        SlidingAttentionCacheAllocator,
    )
    from transformers.generation.continuous_batching.input_outputs import ContinuousBatchingIOs


CALLS = (  # of transformers' engine, which the pool answers
    *("register_cache_tensor", "get_seqlen_k", "needs_new_blocks", "needs_new_sectors", "allocate_cache_to_request"),
    *("free_blocks", "count_non_shareable_blocks", "fork_blocks", "match_prefix_blocks", "acquire_prefix_blocks"),
    *("mark_complete_blocks", "get_read_indices", "get_write_indices", "update"),
)


def _has_changed(name: str) -> bool:
    """Whether transformers calls its own allocator in another way than `PoolAllocator` is called here."""
    stock, ours = getattr(FullAttentionCacheAllocator, name, None), getattr(PoolAllocator, name)
    return stock is None or list(signature(stock).parameters) != list(signature(ours).parameters)


@contextlib.contextmanager
def install() -> Iterator[None]:
    """Give the engines that are made inside the block, and end in it, a pool of kvpool. Its end restores everything.

    RuntimeError: this release of transformers calls its allocators in another way, or other code has hooked it.
    """
    warn_if_untested("install", "transformers", transformers.__version__, *RELEASES)
    if changed := list(filter(_has_changed, CALLS)):
        raise RuntimeError(f"[install] transformers {transformers.__version__} has changed {', '.join(changed)}")
    registry, prepare = stock_cache.ATTN_TYPE_TO_ALLOCATOR, ContinuousBatchingIOs.prepare_batch_tensors
    stock = {FULL_ATTENTION: FullAttentionCacheAllocator, SLIDING_ATTENTION: SlidingAttentionCacheAllocator}
    for kind, allocator in stock.items():
        if registry[kind] is not allocator:
            raise RuntimeError(f"[install] the allocator is {registry[kind].__name__}, not transformers' own")

    def prepare_on_pool(io: Any, requests_in_batch: list[Any], *args: Any, **kwargs: Any) -> None:
        prepare(io, requests_in_batch, *args, **kwargs)
        for allocator in io.cache.cache_allocators.values():
            if isinstance(allocator, PoolAllocator):
                allocator.fill(io)

    registry.update({FULL_ATTENTION: PoolAllocator, SLIDING_ATTENTION: WindowAllocator})
    ContinuousBatchingIOs.prepare_batch_tensors = prepare_on_pool
    try:
        yield
    finally:
        registry.update(stock)
        ContinuousBatchingIOs.prepare_batch_tensors = prepare


class PoolAllocator(FullAttentionCacheAllocator):
    """The blocks of all full-attention layers, from the pool `blocks`. Made by transformers, see `install`.

    transformers asks each allocator of a model in turn. The first one has the pool and answers for all.
    """

    sliding_window = 0  # tokens that a query reads, itself included; 0: all

    def register_cache_tensor(self, bytes_per_sector: int, non_trash_bytes: int, cache_tensor: Any, pool: Any) -> None:
        """Make the pool, once all allocators of the model know how much memory there is."""
        super().register_cache_tensor(bytes_per_sector, non_trash_bytes, cache_tensor, pool)
        members = pool.__dict__.setdefault("members", [])
        members.append(self)
        if len(members) == pool.num_allocators:
            layers = gcd(*(member.pages_per_block for member in members))  # a page of each is a block
            for member in members:
                member.lay_out(layers, bytes_per_sector, cache_tensor)
            members[0].lead(members)

    def lay_out(self, layers: int, bytes_per_sector: int, cache_tensor: Any) -> None:
        """Use blocks of so many layers, `columns` of them for each block of tokens."""
        self.columns, page = self.pages_per_block // layers, self.tokens_per_page
        self.block_physical_stride = self.rows_per_token * page * layers
        self.bytes_per_block = self.bytes_per_page * layers
        self.blocks_per_sector = bytes_per_sector // self.bytes_per_block
        self.places = Places(page, self.block_physical_stride)
        self._copy_view = cache_tensor.view(-1, self.bytes_per_block)
        rows = self.cache_tensor.flatten(0, 1)
        self.column_of = {layer: i // layers for i, layer in enumerate(self.layer_indices)}
        first = {layer: 2 * (i % layers) * page for i, layer in enumerate(self.layer_indices)}
        self._kv_token_views = {layer: (rows[at:], rows[at + page :]) for layer, at in first.items()}
        self.writes, self.reads = Stored(self.write_trash_index), Stored(self.read_trash_index)

    @property
    def group(self) -> Group:
        """The layer group of these layers."""
        return Group("window" if self.sliding_window else "full", self.sliding_window, columns=self.columns)

    def get_seqlen_k(self, past_length: int, query_length: int) -> int:
        return query_length + min(past_length, (self.sliding_window or past_length + 1) - 1)

    def lead(self, members: list[PoolAllocator]) -> None:
        """Make the pool for all kinds of layers."""
        self.members, num_blocks = members, self.num_blocks * self.columns
        reserved = 2 * self.blocks_per_sector  # transformers pads with them
        finds = self.use_block_sharing and not any(member.sliding_window for member in members)
        self.blocks = Pool(  # in order: transformers runs one step after the other
            num_blocks + reserved, self.tokens_per_page, max_seqs=min(1 << 20, max(64, 4 * num_blocks)),
            reserved_blocks=reserved, in_order=True, prefix_cache=finds, groups=[one.group for one in members],
        )  # fmt: skip
        self.prefix = self.blocks.prefix
        self.handles: dict[str, int] = {}  # by request
        self.block_table = Tables(self.blocks, self.handles)
        self.known: dict[str, int] = {}  # tokens that the prefix cache knows of each request
        self.free = FreeBlocks(self.blocks)
        self.one_row = Plan(self.blocks, 1, formats=())
        self.plan = Plan(self.blocks, 64, 1024, formats=FORMATS, dtype="int64")  # grows
        self.prompt: list[int] = []
        self.take_over()

    def take_over(self) -> None:
        """Stand in transformers' pool of sectors where its free blocks were; its `reset` makes it forget that."""
        self.pool.free_sectors.clear()
        self.pool._free_blocks[self.index] = self.free

    def needs_new_blocks(self, request_id: str, past_length: int, query_length: int) -> int:
        """Blocks that the next tokens of a request take in all kinds of layers."""
        if self.index:
            return 0
        handle = self.handles.get(request_id)
        room = 0 if handle is None else self.blocks.capacity(handle)
        entries = -(-max(0, past_length + query_length - room) // self.tokens_per_page)
        return entries * sum(member.columns for member in self.members)

    def needs_new_sectors(self, request_id: str, past_length: int, query_length: int) -> int:
        """0 if the request fits; else 1, which is more than there are."""
        if self.index:
            return 0
        self.take_over()
        if (handle := self.handles.get(request_id)) is None:
            return int(self.needs_new_blocks(request_id, past_length, query_length) > len(self.free))
        return int(not self.blocks.can([handle], past_length + query_length - self.blocks.num_tokens(handle)))

    def allocate_cache_to_request(self, request_id: str, past_length: int, query_length: int) -> None:
        """Reserve the blocks of the next tokens, and copy a last block that is shared."""
        if self.index:
            return
        if (handle := self.handles.get(request_id)) is None:
            self.handles[request_id] = self.blocks.open(past_length + query_length)
            return
        self.blocks.reserve(self.one_row, [handle], past_length + query_length - self.blocks.num_tokens(handle))
        for part in self.one_row.groups:
            self.copy_blocks(*part.copies.T[:2].tolist())

    def free_blocks(self, request_id: str, no_cache: bool = False) -> None:
        """The request is over. What the prefix cache knows of it stays until its blocks are needed."""
        if self.index:
            return
        self.known.pop(request_id, None)
        if request_id in self.handles:
            self.blocks.close(self.handles.pop(request_id))

    def count_non_shareable_blocks(self, source_request_id: str, past_length: int) -> int:
        return 0  # a fork needs no block until a write

    def fork_blocks(self, source_request_id: str, dest_request_id: str, past_length: int) -> tuple[list, list]:
        """Share every block; nothing is to be copied now."""
        if self.index:
            return [], []
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
        return []  # `fill` writes those of all requests

    get_write_indices = get_read_indices

    def fill(self, io: Any) -> None:
        """Step the pool for the batch of `io`, and write where its tokens go and what they read."""
        if self.index:
            return
        if len(self.members) > 1 and io.device != self.cache_tensor.device:
            raise ValueError("[install] a model with layers of several kinds needs use_async_batching=False")
        handles = [self.handles[future.state.request_id] for future in io.requests_in_batch]
        found = self.indices(handles, [future.query_length for future in io.requests_in_batch])
        for member, (write, read) in zip(self.members, found, strict=True) if not io.use_block_table else ():
            io.true_write_sizes[member.index] = member.writes.keep(io.write_index_storage, member.index, write)
            if io.max_kv_read:
                io.true_read_sizes[member.index] = member.reads.keep(io.read_index_storage, member.index, read)

    def update(self, key_states: Any, value_states: Any, layer_idx: int, read_index: Any, write_index: Any) -> Any:
        """Write new keys and values, and read all that the queries see."""
        if column := self.column_of[layer_idx]:
            write_index = self.writes.rows[column - 1, : len(write_index)]
            read_index = self.reads.rows[column - 1, : len(read_index)] if len(read_index) else read_index
        return super().update(key_states, value_states, layer_idx, read_index, write_index)

    def indices(self, handles: list[int], counts: list[int]) -> list[tuple[np.ndarray, np.ndarray]]:
        """Step the pool. Rows to write to and to read from, ``[columns, n]``, for each kind of layers; see `Places`."""
        rows, tokens = len(handles), sum(counts)
        if rows > self.plan.limits.max_rows or tokens > self.plan.limits.max_tokens:
            self.plan = Plan(self.blocks, 2 * rows, 2 * tokens, formats=FORMATS, dtype="int64")
        self.blocks.step(plan := self.plan, handles, counts)
        parts = zip(self.members, plan.groups, strict=True)
        return [one.places.of_group(part, counts, one.sliding_window) for one, part in parts]


class WindowAllocator(PoolAllocator):
    """The blocks of all layers with sliding attention. They let go of blocks that no later query reads."""

    supports_block_sharing = supports_block_table = False
    layer_type = SLIDING_ATTENTION

    def __init__(self, index: int, config: Any, *args: Any, **kwargs: Any) -> None:
        size = getattr(config, "sliding_window", None)
        if not isinstance(size, int) or size <= 0:
            raise ValueError(f"[install] sliding_window is {size!r}, it must be an int above 0")
        self.sliding_window = size
        super().__init__(index, config, *args, **kwargs)
