"""`transformers`' continuous batching on a kvpool pool: its engine, scheduler and kernels on kvpool's blocks.

    with install():
        outputs = model.generate_batch(prompts, generation_config, continuous_batching_config=ContinuousBatchingConfig(
            page_size=16, num_blocks=256, max_batch_tokens=256, use_async_batching=False))

transformers looks up its allocators in a registry. Inside the block, the one for full attention is `PoolAllocator`, the
one for sliding attention `WindowAllocator`. A request is a sequence. The prefix cache is the pool's. A fork shares
every block and copies the last one when it is written. transformers makes the indices of a step in Python, one per
token of every context. Here one `Pool.step` and a few numpy calls make them. The end of the block restores everything.
Engines made in it must end in it.

The allocators of a model share one pool. Layers of one kind are a layer group of it, and windows let blocks go. A block
has a page for each of as many layers as divide both kinds evenly, so any block may serve any of them.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from math import gcd
from typing import Any

import numpy as np
import torch
import transformers

from kvpool import Group, Plan, Pool
from kvpool.adapters.releases import importing

SUPPORTED_VERSIONS = ("5.23.0",)  # releases whose engine the tests run on kvpool
with importing("transformers", transformers.__version__, ", ".join(SUPPORTED_VERSIONS)):
    from transformers.generation.continuous_batching import cache as stock_cache
    from transformers.generation.continuous_batching.cache_allocators import (
        FULL_ATTENTION,
        SLIDING_ATTENTION,
        FullAttentionCacheAllocator,
        SlidingAttentionCacheAllocator,
    )
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

    window = 2**31 - 1  # tokens that a query reads, itself included

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
        self.num_blocks = self.num_pages // layers
        self.scratch = np.empty((2, 0, page), np.int64)  # grows
        self._copy_view = cache_tensor.view(-1, self.bytes_per_block)
        rows = self.cache_tensor.flatten(0, 1)
        self.column_of = {layer: i // layers for i, layer in enumerate(self.layer_indices)}
        first = {layer: 2 * (i % layers) * page for i, layer in enumerate(self.layer_indices)}
        self._kv_token_views = {layer: (rows[at:], rows[at + page :]) for layer, at in first.items()}
        self.stored = Stored(self.write_trash_index), Stored(self.read_trash_index)  # of columns behind the first

    @property
    def group(self) -> Group:
        """What these layers are to the pool."""
        return Group.full(columns=self.columns)

    def lead(self, members: list[PoolAllocator]) -> None:
        """Make the pool for all kinds of layers."""
        self.members = members
        reserved = 2 * self.blocks_per_sector  # transformers pads with them
        plain = [member.group for member in members] == [Group.full()]
        self.blocks = Pool(  # in order: transformers runs one step after the other
            self.num_blocks + reserved, self.tokens_per_page, max_seqs=min(1 << 20, max(64, 4 * self.num_blocks)),
            reserved_blocks=reserved, in_order=True, prefix_cache=plain and self.use_block_sharing,
            groups=None if plain else [member.group for member in members],
        )  # fmt: skip
        self.formats = ("csr", "slot_mapping") if plain else ("block_tables", "slot_mapping", "seq_lens")
        self.prefix = self.blocks.prefix
        self.handles: dict[str, int] = {}  # by request
        self.block_table = Tables(self.blocks, self.handles)
        self.known: dict[str, int] = {}  # tokens that the prefix cache knows of each request
        self.one_row = Plan(self.blocks, 1, formats=())
        self.plan = Plan(self.blocks, 64, 1024, formats=self.formats, dtype="int64")  # grows
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
            return int(self.needs_new_blocks(request_id, past_length, query_length) > len(self))
        return int(not self.blocks.can([handle], past_length + query_length - self.blocks.num_tokens(handle)))

    def allocate_cache_to_request(self, request_id: str, past_length: int, query_length: int) -> None:
        """Reserve the blocks of the next tokens, and copy a last block that is shared."""
        if self.index:
            return
        if (handle := self.handles.get(request_id)) is None:
            self.handles[request_id] = self.blocks.open(past_length + query_length)
            return
        self.blocks.reserve(self.one_row, [handle], past_length + query_length - self.blocks.num_tokens(handle))
        for part in self.one_row.groups or (self.one_row,):
            self.copy_blocks(*part.copies.T[:2].tolist())

    def free_blocks(self, request_id: str, no_cache: bool = False) -> None:
        """The request is over. What the prefix cache knows of it stays until its blocks are needed."""
        if self.index:
            return
        self.known.pop(request_id, None)
        if request_id in self.handles:
            self.blocks.close(self.handles.pop(request_id))

    def count_non_shareable_blocks(self, source_request_id: str, past_length: int) -> int:
        """A fork needs no block until a write."""
        return 0

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
        """Nothing: `fill` writes those of all requests."""
        return []

    get_write_indices = get_read_indices

    def fill(self, io: Any) -> None:
        """Step the pool for the batch of `io`, and write where its tokens go and what they read."""
        if self.index:
            return
        handles = [self.handles[future.state.request_id] for future in io.requests_in_batch]
        found = self.indices(handles, [future.query_length for future in io.requests_in_batch])
        if len(self.members) > 1 and io.device != self.cache_tensor.device:
            raise ValueError("[install] a model with layers of several kinds needs use_async_batching=False")
        for member, (write, read) in zip(self.members, found, strict=True):
            if not io.use_block_table:
                member.store(io, write, read)

    def store(self, io: Any, write: np.ndarray, read: np.ndarray) -> None:
        """Give the indices of the first column to transformers, and keep those of the others for `update`."""
        ours = [(io.write_index_storage, io.true_write_sizes, write), (io.read_index_storage, io.true_read_sizes, read)]
        for stored, (storage, sizes, found) in zip(self.stored, ours if io.max_kv_read else ours[:1], strict=False):
            sizes[self.index] = store(storage[self.index], found[0])
            if self.columns > 1:
                stored.keep(storage, found[1:])

    def update(self, key_states: Any, value_states: Any, layer_idx: int, read_index: Any, write_index: Any) -> Any:
        """Write new keys and values, and read all that the queries see."""
        if column := self.column_of[layer_idx]:
            write_index = self.stored[0].rows[column - 1, : len(write_index)]
            read_index = self.stored[1].rows[column - 1, : len(read_index)] if len(read_index) else read_index
        return super().update(key_states, value_states, layer_idx, read_index, write_index)

    def indices(self, handles: list[int], counts: list[int]) -> list[tuple[np.ndarray, np.ndarray]]:
        """Step the pool. Rows of the flat KV tensor to write new tokens to and to read from, for each kind of layers.

        Both are ``[columns, n]``, and hold until the next call.
        """
        rows, tokens = len(handles), sum(counts)
        if rows > self.plan.limits.max_rows or tokens > self.plan.limits.max_tokens:
            self.plan = Plan(self.blocks, 2 * rows, 2 * tokens, formats=self.formats, dtype="int64")
        self.blocks.step(plan := self.plan, handles, counts)
        if plan.groups:
            parts = zip(self.members, plan.groups, strict=True)
            return [member.indices_of_group(part, plan.seq_lens, np.asarray(counts)) for member, part in parts]
        lengths = np.diff(plan.indptr) * self.tokens_per_page - self.tokens_per_page + plan.last_page_len
        read = self.places(plan.indices, plan.indptr[:-1] * self.tokens_per_page, lengths)
        return [(self.slots(plan.slot_mapping)[None], read[None])]

    def indices_of_group(self, part: Any, lens: np.ndarray, counts: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Do the same for these layers, whose arrays `part` has."""
        page, entry = self.tokens_per_page, np.arange(part.block_tables.shape[1])
        begin = np.maximum(lens - counts - self.window + 1, 0)  # first position that is read
        first, end = begin[:, None] // page, -(-lens[:, None] // page)
        ids = part.block_tables[(first <= entry) & (entry < end)].astype(np.int64)  # [n, columns]
        starts = np.cumsum(end - first) - (end - first)[:, 0]
        at = starts * page + begin % page
        read = [self.places(ids[:, column], at, lens - begin).copy() for column in range(self.columns)]
        return self.slots(part.slot_mapping.astype(np.int64)), np.stack(read)

    def slots(self, slots: np.ndarray) -> np.ndarray:
        """Rows of the flat KV tensor for slots of the pool."""
        page = self.tokens_per_page
        return slots + slots // page * (self.block_physical_stride - page)

    def places(self, ids: np.ndarray, starts: np.ndarray, lengths: np.ndarray) -> np.ndarray:
        """Rows of the flat KV tensor for runs of tokens: places from `starts` on in the blocks `ids`, laid end to end.

        They hold until the next call.
        """
        page = self.tokens_per_page
        if len(ids) > self.scratch.shape[1]:
            self.scratch = np.empty((2, 2 * len(ids), page), np.int64)
        np.add.outer(ids * self.block_physical_stride, np.arange(page), out=self.scratch[0, : len(ids)])
        (whole, read), end = self.scratch.reshape(2, -1), 0
        for start, length in zip(starts.tolist(), lengths.tolist(), strict=True):
            begin, end = end, end + length
            read[begin:end] = whole[start : start + length]
        return read[:end]


class WindowAllocator(PoolAllocator):
    """The blocks of all layers with sliding attention. They let go of blocks that no later query reads."""

    supports_block_sharing = False
    supports_block_table = False
    layer_type = SLIDING_ATTENTION

    def __init__(self, index: int, config: Any, *args: Any, **kwargs: Any) -> None:
        size = getattr(config, "sliding_window", None)
        if not isinstance(size, int) or size <= 0:
            raise ValueError(f"[install] sliding_window is {size!r}, it must be an int above 0")
        self.sliding_window = self.window = size  # the first is transformers' name
        super().__init__(index, config, *args, **kwargs)

    @property
    def group(self) -> Group:
        """What these layers are to the pool."""
        return Group.window(self.window, columns=self.columns)

    def get_seqlen_k(self, past_length: int, query_length: int) -> int:
        """Keys that the queries of a request read."""
        return query_length + min(past_length, self.window - 1)


class Stored:
    """Indices of a step for the columns behind the first, where graphs and padding find those of the first.

    Attributes
    ----------
    rows : int64 ``[columns - 1, N]``
        As wide as transformers' own storage. What a step does not use is `trash`.
    """

    def __init__(self, trash: int) -> None:
        self.trash = trash
        self.rows = torch.zeros((0, 0), dtype=torch.int64)
        self.used = 0

    def keep(self, like: torch.Tensor, values: np.ndarray) -> None:
        """Store the indices of a step."""
        if len(values) != len(self.rows):
            self.rows = like.new_full((len(values), like.shape[1]), self.trash)
        count = values.shape[1]
        self.rows[:, :count] = torch.from_numpy(values)
        self.rows[:, count : self.used] = self.trash
        self.used = count


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
