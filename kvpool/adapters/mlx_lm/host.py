"""`PagedKV`: pool and storage of one model, the hook into mlx-lm, admission and the account of it all."""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from operator import index
from typing import Any, Self

import mlx.core as mx
import mlx_lm
import numpy as np
from mlx_lm.models.cache import KVCache, RotatingKVCache, make_prompt_cache

import kvpool
from kvpool.adapters.mlx_lm.batch import NOT_OPENED, Batch, Known, Rows
from kvpool.adapters.mlx_lm.cache import PagedKVCache
from kvpool.config import KVSpec

SUPPORTED_VERSIONS = ("0.32.2",)  # releases of mlx-lm whose engines the tests run on kvpool

_HOOK = "make_cache"  # every engine asks make_prompt_cache for caches, and that asks the model
_NOTHING = object()
_numbers = itertools.count()  # a model's blocks mean nothing to another model on the same pool


@dataclass(frozen=True, slots=True)
class Summary:
    """Where the memory of one `PagedKV` is. Blocks cover all layers."""

    blocks_used: int  # in tables now
    blocks_peak: int  # the most at any time
    blocks_free: int  # what a new sequence could take, the cached ones included
    blocks_cached: int  # of these, kept by the prefix cache until somebody needs them
    blocks_leaked: int  # in use, but in no table of a live cache of this model
    sequences: int
    kv_nbytes: int  # blocks_used * bytes per block
    kv_nbytes_peak: int
    pool_nbytes: int  # allocated, once
    mlx_peak_nbytes: int  # mx.get_peak_memory(): all of MLX, weights and activations included
    cow_copies: int  # blocks copied because a shared tail was written
    cow_tokens: int
    query_tokens: int  # tokens that `PagedKV.fetch` was asked for
    hit_tokens: int  # of these, found in the prefix cache
    mlx_pool_copies: int  # whole pool arrays that MLX copied to write to them; a lower bound with overlap

    def __str__(self) -> str:
        mib = 1 / 2**20
        return (
            f"blocks: {self.blocks_used} used, {self.blocks_peak} peak, {self.blocks_free} free "
            f"({self.blocks_cached} cached), {self.blocks_leaked} leaked; {self.sequences} sequences\n"
            f"KV: {self.kv_nbytes * mib:.2f} MiB used, {self.kv_nbytes_peak * mib:.2f} MiB peak, "
            f"{self.pool_nbytes * mib:.2f} MiB allocated; MLX peak {self.mlx_peak_nbytes * mib:.2f} MiB\n"
            f"copies: {self.cow_copies} blocks on write ({self.cow_tokens} tokens), "
            f"{self.mlx_pool_copies} pool arrays by MLX"
        )


def install(
    model: Any,
    num_blocks: int | None = None,
    *,
    pool: Any = None,
    block_size: int = 16,
    max_seqs: int = 4096,
    prefix_cache: bool = False,
    overlap: bool = False,
    strict: bool = True,
) -> PagedKV:
    """Give a model of mlx-lm a paged KV cache, for the length of a ``with`` block.

    Parameters
    ----------
    model
        As loaded by ``mlx_lm.load``. Inside the block ``model.make_cache`` makes paged caches, so every
        engine of mlx-lm uses them; it is set on this instance only and put back at the end. Caches made
        inside may be used on and outlive it.
    num_blocks, block_size, max_seqs
        Size of the pool to make: blocks (one of them reserved), tokens per block, sequences at a time.
    prefix_cache : bool
        Make the pool with a prefix cache, or use that of the given `pool`: needed by `PagedKV.fetch`,
        `PagedKV.commit` and `PagedPromptCache`.
    pool : kvpool.Pool, optional
        Use this pool in place of a new one.
    overlap : bool
        Build a step while the one before still runs. Where it does still run, MLX copies the pool's arrays
        to write to them, which takes time and up to twice the memory. By default each step waits for the one
        before, and writes are in place.
    strict : bool
        Refuse releases of mlx-lm that this adapter was not tested with.

    Returns
    -------
    PagedKV
        A context manager.

    Raises
    ------
    RuntimeError
        mlx-lm is not one of `SUPPORTED_VERSIONS` (and `strict`).
    ValueError
        The model keeps something else than keys and values in some layer, or layers differ in shape.
    TypeError
        Not exactly one of `num_blocks` and `pool`.
    """
    if strict and mlx_lm.__version__ not in SUPPORTED_VERSIONS:
        raise RuntimeError(
            f"[install] mlx-lm {mlx_lm.__version__} is installed, this adapter was tested with "
            f"{', '.join(SUPPORTED_VERSIONS)}; strict=False tries it anyway"
        )
    if (num_blocks is None) == (pool is None):
        raise TypeError("[install] either num_blocks or pool is needed, and not both")
    if num_blocks is not None:
        pool = kvpool.Pool(num_blocks, block_size, max_seqs=max_seqs, prefix_cache=prefix_cache)
    from kvpool_backends.mlx import MLXBackend  # here, because kvpool does not depend on its backends

    spec, windows = inspect_model(model, pool.block_size)
    backend = MLXBackend(spec, pool.num_blocks)
    return PagedKV(model, pool, backend, windows, prefix_cache=prefix_cache, overlap=overlap)


def inspect_model(model: Any, block_size: int) -> tuple[KVSpec, tuple[int | None, ...]]:
    """Shapes of a model's KV cache and the attention window of each layer (None: sees everything).

    Found by tracing one token through the model with mlx-lm's own caches. Nothing is computed.
    """
    caches = make_prompt_cache(model)
    for layer, cache in enumerate(caches):
        if type(cache) not in (KVCache, RotatingKVCache) or getattr(cache, "keep", 0) != 0:
            raise ValueError(f"[install] layer {layer} uses {type(cache).__name__}, not KVCache or RotatingKVCache")
    model(mx.zeros((1, 1), mx.int32), cache=caches)
    idle = [layer for layer, cache in enumerate(caches) if cache.keys is None]
    if idle:
        raise ValueError(f"[install] layers {idle} never use their cache")
    shapes = {(c.keys.shape[1], c.keys.shape[3], c.values.shape[3], c.keys.dtype) for c in caches}
    if len(shapes) != 1:
        raise ValueError(f"[install] layers differ in KV heads, head dims or dtype: {sorted(map(str, shapes))}")
    ((heads, k_dim, v_dim, dtype),) = shapes
    name = str(dtype).removeprefix("mlx.core.")
    windows = tuple(getattr(cache, "max_size", None) for cache in caches)
    return KVSpec(len(caches), heads, k_dim, name, block_size, v_dim), windows


class PagedKV:
    """One pool and one storage, serving one model; made by `install`.

    Why a step is done before it has run
    ------------------------------------
    A step stays pending while a forward pass goes through the layers and is declared done when the last layer
    has *built* its write and its read, though MLX may run them later. From then on a finished sequence's
    blocks may be given to another one, while the pass that reads them is in flight. That is sound because MLX
    arrays are values. The pass's gathers refer to the version of the pool array that its own writes made.
    Whoever writes next, on any stream and in any order of evaluation, makes a new version; MLX lets it have
    the old one's buffer only if nobody refers to the old version any more, and copies otherwise. So no later
    write can reach an earlier read. And no earlier write can hit a later owner's data: each write takes the
    newest version as input, so versions form one chain in the order in which the pool was stepped. (A write
    primitive that works in a shared buffer would end this argument, and would need `done` after evaluation.)

    Attributes
    ----------
    pool : kvpool.Pool
    backend : kvpool_backends.mlx.MLXBackend
    num_layers : int
    windows : tuple
        Attention window per layer, None without one.
    prefix_cache : bool
        Whether `fetch` and `commit` work.
    namespace : bytes
        Of sequences that were not given one.
    query_tokens, hit_tokens : int
        Tokens that `fetch` was asked for, and found.
    """

    def __init__(
        self,
        model: Any,
        pool: Any,
        backend: Any,
        windows: tuple[int | None, ...],
        *,
        prefix_cache: bool = False,
        overlap: bool = False,
    ) -> None:
        self.model = model
        self.pool = pool
        self.backend = backend
        self.windows = windows
        self.num_layers = len(windows)
        self.overlap = overlap
        self.batches: weakref.WeakSet[Batch] = weakref.WeakSet()
        self._replaced: list[Any] = []  # what the hook hides, innermost last
        self.prefix_cache = prefix_cache
        self._number = str(next(_numbers))
        self.namespace = self._own(b"")
        self.query_tokens = self.hit_tokens = 0
        self._running: tuple[weakref.ref[Batch], Any, Rows] | None = None  # the forward pass in progress

    # ------------------------------------------------------------------------------------------- the hook

    def __enter__(self) -> Self:
        self._replaced.append(vars(self.model).get(_HOOK, _NOTHING))
        setattr(self.model, _HOOK, self.make_cache)
        return self

    def __exit__(self, *exc: object) -> None:
        replaced = self._replaced.pop()
        if replaced is _NOTHING:
            delattr(self.model, _HOOK)
        else:
            setattr(self.model, _HOOK, replaced)

    def make_cache(self) -> list[PagedKVCache]:
        """An empty cache, one facade per layer: for ``prompt_cache=``, ``insert(caches=[...])`` and so on."""
        return self._caches(Batch(self, [NOT_OPENED], [0], is_merged=False))

    # ------------------------------------------------------------------------------------------ prefix cache

    def fetch(self, tokens: Sequence[int], namespace: bytes = b"") -> tuple[list[PagedKVCache], int]:
        """A cache that begins with what the prefix cache holds of a prompt.

        No block is taken and no KV is copied: the cache shares the blocks that it found, and while it lives
        they stay. Feed it the rest of the prompt: ``generate_step(tokens[num_cached:], model,
        prompt_cache=caches)``, or ``insert([tokens[num_cached:]], caches=[caches])``.

        Parameters
        ----------
        tokens : sequence of int
            The whole prompt. Only whole blocks are found, and at least one token is left to compute.
        namespace : bytes
            From `kvpool.namespace`; requests find only what was committed in the same one. Another model on
            the same pool is in another namespace anyway.

        Returns
        -------
        caches : list of PagedKVCache
            One per layer; empty when nothing was found.
        num_cached : int
            Tokens in it.
        """
        self._require_prefix_cache("fetch")
        own = self._own(namespace)
        handle = self.pool.pin(tokens[: max(len(tokens) - 1, 0)], own)
        num_cached = self.pool.num_tokens(handle)
        self.query_tokens += len(tokens)
        self.hit_tokens += num_cached
        known = Known(own, num_cached)
        return self._caches(Batch(self, [handle], [num_cached], False, [known])), num_cached

    def commit(self, caches: Sequence[PagedKVCache], tokens: Sequence[int], namespace: bytes = b"") -> int:
        """Let later `fetch` calls find the tokens that a cache holds.

        At any time between two forward passes: after the prompt, while the sequence grows, when it is
        finished. The cache itself stays as it is and may be used on or dropped.

        Parameters
        ----------
        caches : list of PagedKVCache
            One sequence, all layers. Of a running request: ``generator.extract_cache([uid])``.
        tokens : sequence of int
            What the cache was fed, from the first position on; more than it holds are left out.
        namespace : bytes
            The one it was fetched in.

        Returns
        -------
        int
            Tokens that were new.

        Raises
        ------
        ValueError
            Not one whole sequence of this model, fewer tokens than the cache holds (is the cached part of
            the prompt missing?), or another namespace. Nothing was committed.
        """
        self._require_prefix_cache("commit")
        batch = caches[0].batch if len(caches) == self.num_layers else None
        if batch is None or batch.kv is not self or any(cache.batch is not batch for cache in caches):
            raise ValueError(f"[commit] the caches of all {self.num_layers} layers of one sequence are needed")
        if len(batch.handles) != 1:
            raise ValueError(f"[commit] the cache holds {len(batch.handles)} sequences, the limit is 1")
        if batch.known[0].namespace != self._own(namespace):
            raise ValueError("[commit] the cache was made in another namespace; begin with fetch")
        length = int(batch.rows.lens[0])
        if len(tokens) < length:
            raise ValueError(
                f"[commit] {len(tokens)} tokens, the cache holds {length}: all are needed, from the first on"
            )
        return batch.commit(tokens)

    def open_empty(self) -> int:
        """A new sequence in the model's own namespace."""
        return int(self.pool.pin([], self.namespace) if self.prefix_cache else self.pool.open())

    def _require_prefix_cache(self, call: str) -> None:
        if not self.prefix_cache:
            raise RuntimeError(f"[{call}] the pool has no prefix cache: install(..., prefix_cache=True)")

    def _own(self, namespace: bytes) -> bytes:
        return kvpool.namespace(model=self._number, salt=namespace)

    def _caches(self, batch: Batch) -> list[PagedKVCache]:
        return [PagedKVCache(batch, layer) for layer in range(self.num_layers)]

    # ------------------------------------------------------------------------------------ admission, account

    def blocks_for(self, num_tokens: int) -> int:
        """Blocks that so many tokens take."""
        return -(-num_tokens // self.pool.block_size)

    def can_admit(self, prompt_len: int, max_tokens: int, running: Iterable[tuple[int, int]] = ()) -> bool:
        """Whether a request fits, whatever the requests that already run still generate.

        Ask before ``insert()``: an `OutOfBlocks` later leaves the pool intact, but the engine in the middle
        of a step.

        Parameters
        ----------
        prompt_len, max_tokens : int
            Of the new request.
        running : iterable of (num_tokens, limit)
            Of each request in the engine: tokens in its cache now (0 while it waits) and at most.

        Notes
        -----
        Counts one block more per request, for the copy of a tail that it may share with a kept cache. Free
        blocks are counted as of now, so caches that are kept while requests run (a prompt cache) must have
        been made before, or be counted in `running`.
        """
        for name, value in (("prompt_len", prompt_len), ("max_tokens", max_tokens)):
            if index(value) < 0:
                raise ValueError(f"[can_admit] {name} is {value}, the least is 0")
        requests = [(0, prompt_len + max_tokens), *running]
        growth = sum(self.blocks_for(limit) - self.blocks_for(now) + 1 for now, limit in requests)
        longest = self.blocks_for(prompt_len + max_tokens)
        return growth <= self._available() and longest <= self.pool.max_blocks_per_seq

    def summary(self) -> Summary:
        """The account as of now. Waits for MLX."""
        self.backend.settle()
        stats, memory, block_nbytes = self.pool.stats(), self.backend.memory(), self.backend.spec.block_nbytes
        held = {
            int(block)
            for batch in self.batches
            for handle in batch.handles
            if handle != NOT_OPENED
            for block in self.pool.table(handle)
        }
        return Summary(
            blocks_used=stats.used,
            blocks_peak=stats.peak_used,
            blocks_free=self._available(),
            blocks_cached=stats.evictable,
            blocks_leaked=stats.used - len(held),
            sequences=stats.sequences,
            kv_nbytes=stats.used * block_nbytes,
            kv_nbytes_peak=stats.peak_used * block_nbytes,
            pool_nbytes=memory.pool_nbytes,
            mlx_peak_nbytes=memory.mlx_peak_nbytes,
            cow_copies=stats.cow_copies,
            cow_tokens=stats.cow_tokens,
            query_tokens=self.query_tokens,
            hit_tokens=self.hit_tokens,
            mlx_pool_copies=memory.pool_copies,
        )

    def _available(self) -> int:
        stats = self.pool.stats()
        return stats.free + stats.evictable

    # ------------------------------------------------------------------------- one forward pass at a time

    def begin_forward(self) -> None:
        """Before the pool is stepped: nothing else may be half done, and MLX has finished the step before."""
        if self._running is not None and self._running[0]() is None:
            self.undo_forward()  # nobody is left to ask for it
        if self._running is not None:
            raise RuntimeError(
                "[update_and_fetch] an earlier forward pass was interrupted between two layers; "
                "kv.recover() takes it back"
            )
        if not self.overlap:
            self.backend.settle()

    def note_forward(self, batch: Batch, plan: Any, before: Rows) -> None:
        """The pool was stepped for `batch`, whose rows were `before`."""
        self._running = (weakref.ref(batch), plan, before)

    def finish_forward(self) -> None:
        """All layers have built their writes and reads; the class docstring tells why that is enough."""
        assert self._running is not None
        _, plan, _ = self._running
        self._running = None
        if plan.is_pending:
            self.pool.done(plan)

    def undo_forward(self) -> None:
        """Take the step back; lengths and tables are as before it."""
        assert self._running is not None
        reference, plan, before = self._running
        self._running = None
        batch = reference()
        if plan.is_pending:
            self.pool.rollback(plan)
        elif batch is not None:  # a pool with in_order=True
            self.pool.truncate(np.array(batch.handles, np.int64), before.lens)

    def recover(self) -> bool:
        """Take back a forward pass that was interrupted between two layers, by an exception or Ctrl-C.

        The batch that it ran on is as before it and can go on.

        Returns
        -------
        bool
            Whether there was one.
        """
        if self._running is None:
            return False
        reference, _, before = self._running
        self.undo_forward()
        batch = reference()
        if batch is not None:
            batch.recover(before)
        return True
