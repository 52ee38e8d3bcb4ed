"""`PagedKV`: pool and storage of one model, the hook into mlx-lm, admission and the account of it all."""

from __future__ import annotations

import itertools
import logging
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from operator import index
from typing import Any, Self

import mlx.core as mx
import mlx_lm

import kvpool
from kvpool.adapters.mlx_lm.arrays import Converted
from kvpool.adapters.mlx_lm.attention_hook import Caller, Site, find_sites
from kvpool.adapters.mlx_lm.batch import Batch
from kvpool.adapters.mlx_lm.cache import PagedKVCache
from kvpool.adapters.mlx_lm.eviction import check_policy
from kvpool.adapters.mlx_lm.hook import Hook
from kvpool.adapters.mlx_lm.passes import Passes
from kvpool.adapters.mlx_lm.rows import NOT_OPENED, Known
from kvpool.adapters.mlx_lm.shapes import inspect_model, require_bits, with_bits
from kvpool.errors import StaleHandle
from kvpool.eviction import Policy
from kvpool.protocol import KVBackend
from kvpool.spec import KVSpec

BackendFactory = Callable[[KVSpec, int], KVBackend]
SUPPORTED_VERSIONS = ("0.32.2",)  # releases of mlx-lm whose engines the tests run on kvpool

_log = logging.getLogger(__name__)
_numbers = itertools.count()  # a model's blocks mean nothing to another model on the same pool


def install(
    model: Any,
    num_blocks: int | None = None,
    *,
    pool: Any = None,
    block_size: int = 16,
    max_seqs: int = 4096,
    prefix_cache: bool = False,
    fused: bool | None = None,
    backend: str | BackendFactory | None = None,
    kernels: bool | None = None,
    overlap: bool = False,
    strict: bool = True,
    eviction: Policy | None = None,
    **quantization: int | None,
) -> PagedKV:
    """Give a model of mlx-lm a paged KV cache, for the length of a ``with`` block.

    Parameters
    ----------
    model
        As loaded by ``mlx_lm.load``. Inside the block ``model.make_cache`` makes paged caches, so every engine of
        mlx-lm uses them; it is set on this instance only and put back at the end. The caches outlive the block.
    num_blocks, block_size, max_seqs
        Of the pool to make: blocks (one of them reserved), tokens per block, sequences at a time.
    prefix_cache : bool
        Make the pool with a prefix cache, or use that of `pool`: for `PagedKV.fetch` and `commit`, `PagedPromptCache`.
    pool : kvpool.Pool, optional
        Use this pool.
    fused : bool, optional
        Attend straight over the pool (True), or gather every context for mlx-lm's own attention (False). By default
        the first, if there are kernels for it and the model is one of `attention_hook.KNOWN`. See `PagedKV.route`.
    backend : str or callable, optional
        Another than MLX's own: a name for `load_backend`, or ``factory(spec, num_blocks)``, for any arrays.
    kernels : bool, optional
        Of `kvpool_backends.mlx.MLXBackend`; by default they are used: those of Metal, or those of the CPU.
    overlap : bool
        Where MLX scatters: build a step while the one before runs, though MLX then copies the pool's arrays.
    strict : bool
        Refuse releases of mlx-lm that this adapter was not tested with.
    eviction : kvpool.eviction.Policy, optional
        Let tokens of a sequence leave, in all caches that `PagedKV.make_cache` is not told another policy for.
    kv_bits, k_bits, v_bits, quant_group_size : int, optional
        Store both, or one of them, in 8 or 4 bits: `shapes.with_bits`.

    Returns
    -------
    PagedKV
        A context manager. Where one model has several, the last one entered makes the caches; they leave in any order.

    Raises
    ------
    RuntimeError
        mlx-lm is not one of `SUPPORTED_VERSIONS` (and `strict`), or `fused` is True and cannot be; the text says why.
    ValueError
        The model keeps something else than keys and values in some layer, or layers differ; bits that do not fit.
    TypeError
        Not one of `num_blocks` and `pool`, or both; an `eviction` that is none; options that exclude each other.
    """
    if strict:
        require_tested_version("install")
    if (num_blocks is None) == (pool is None):
        raise TypeError("[install] either num_blocks or pool is needed, and not both")
    if num_blocks is not None:
        pool = kvpool.Pool(num_blocks, block_size, max_seqs=max_seqs, prefix_cache=prefix_cache)
    spec, windows, callers = inspect_model(model, pool.block_size)
    made = _storage(with_bits(spec, **quantization), pool.num_blocks, backend, kernels, overlap)
    sites, why_gather = _choose_route(callers, made, fused)
    kept: dict[str, Any] = {"prefix_cache": prefix_cache, "eviction": eviction}
    return PagedKV(model, pool, made, windows, sites=sites, why_gather=why_gather, **kept)


def _storage(
    spec: KVSpec, num_blocks: int, backend: str | BackendFactory | None, kernels: bool | None, overlap: bool
) -> KVBackend:
    """The backend that `install` was asked for, for arrays of MLX."""
    if callable(backend):
        factory: Any = backend
    else:
        from kvpool_backends import load_backend  # here, because kvpool does not depend on its backends

        factory = load_backend("mlx" if backend is None else backend)
    if backend is None:
        made = factory(spec, num_blocks, kernels=kernels, overlap=overlap)
    elif kernels is None and not overlap:
        made = factory(spec, num_blocks)
    else:
        raise TypeError("[install] kernels and overlap belong to the mlx backend, leave them out beside backend")
    return made if made.capabilities.arrays == "mlx" else Converted(made)


def require_tested_version(call: str) -> None:
    """Raise RuntimeError if mlx-lm is not one of `SUPPORTED_VERSIONS`."""
    if mlx_lm.__version__ not in SUPPORTED_VERSIONS:
        raise RuntimeError(
            f"[{call}] mlx-lm {mlx_lm.__version__} is installed, this adapter was tested with "
            f"{', '.join(SUPPORTED_VERSIONS)}; strict=False tries it anyway"
        )


def _choose_route(
    callers: Sequence[Caller | None], backend: KVBackend, fused: bool | None
) -> tuple[tuple[Site, ...], str]:
    """Where to hook attention, or nowhere and why."""
    why = "fused=False"
    if fused is not False:
        if not backend.capabilities.paged:
            why = "the backend runs without kernels"
        elif mlx_lm.__version__ not in SUPPORTED_VERSIONS:
            why = f"mlx-lm {mlx_lm.__version__} is not one of {', '.join(SUPPORTED_VERSIONS)}"
        else:
            try:
                return find_sites(callers), ""
            except LookupError as error:
                why = str(error)
            if fused is None:
                _log.warning("[install] this model gathers: %s", why)
    if fused:
        raise RuntimeError(f"[install] fused=True, but {why}")
    return (), why


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
    mlx_pool_copies: int  # whole pool arrays that MLX copied to write to them, as counted by the last `settle`
    route: str  # "fused", or "gather: " or "lost: " and why, see `PagedKV.route`

    def __str__(self) -> str:
        mib = 1 / 2**20
        return (
            f"blocks: {self.blocks_used} used, {self.blocks_peak} peak, {self.blocks_free} free "
            f"({self.blocks_cached} cached), {self.blocks_leaked} leaked; {self.sequences} sequences\n"
            f"KV: {self.kv_nbytes * mib:.2f} MiB used, {self.kv_nbytes_peak * mib:.2f} MiB peak, "
            f"{self.pool_nbytes * mib:.2f} MiB allocated; MLX peak {self.mlx_peak_nbytes * mib:.2f} MiB\n"
            f"copies: {self.cow_copies} blocks on write ({self.cow_tokens} tokens), "
            f"{self.mlx_pool_copies} pool arrays by MLX\n"
            f"attention: {self.route}"
        )


class PagedKV:
    """One pool and one storage, serving one model; made by `install`.

    When a step is done
    -------------------
    A step stays pending while a forward pass goes through the layers and is declared done when the last layer
    has stored its keys and values. From then on a finished sequence's blocks may be given to another one.

    With eager kernels a call has run when it returns, so what is left is the last layer's attention. Nothing comes
    between: it is next on the same thread, and a `PagedContext` refuses once the batch has moved on.

    Where writes are scatters (without kernels, or with those of Metal), the layers have *built* their writes and
    reads, and MLX may run them later, while the blocks have another owner. That is sound because MLX arrays are
    values. The pass's reads refer to the version of the pool array that its own writes made. Whoever writes next,
    on any stream and in any order of evaluation, makes a new version; MLX lets it have the old one's buffer only if
    nobody refers to the old version any more, and copies otherwise. So no later write can reach an earlier read.
    And no earlier write can hit a later owner's data: each write takes the newest version as input, so versions
    form one chain in the order in which the pool was stepped.

    With lazy kernels (`kvpool_backends.mlx.native`) arrays of the pool are no values: a write changes what every
    version shows. There reads are links of that chain as well, so that all of it runs in the order in which it was
    built, and a later write comes after every earlier read.

    Threads
    -------
    One thread at a time. Threads may take turns, under a lock that each of them holds for a whole step of its
    engine (``with lock: generator.next()``); who leaves has evaluated what it built, as engines do, or calls
    `settle`. A thread that comes while another one is in a forward pass gets `ConcurrentUse` before anything has
    happened. Between two passes nobody can notice from here that there was no lock, and MLX fails in its own
    ways. `summary`, `can_admit` and `blocks_for` evaluate nothing and may be called from any thread, `pool` itself
    may not: it has no lock.

    Attributes
    ----------
    pool : kvpool.Pool
    backend : kvpool.protocol.KVBackend
        That takes MLX's arrays.
    num_layers : int
    passes : Passes
        What its batches share.
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
        sites: tuple[Site, ...] = (),
        why_gather: str = "",
        prefix_cache: bool = False,
        eviction: Policy | None = None,
    ) -> None:
        self.model = model
        self.pool = pool
        self.backend = backend
        self._hooks: list[Hook] = []  # one for each time that the block was entered
        self._why_gather = why_gather
        self.num_layers = len(windows)
        self.prefix_cache = prefix_cache and pool.prefix is not None
        self._number = str(next(_numbers))
        self.namespace = self.own_namespace(b"")
        self.query_tokens = self.hit_tokens = 0
        self.passes = Passes(pool, backend, windows, sites, self.namespace if self.prefix_cache else b"")
        self.lock = self.passes.lock  # several calls of the pool, and the books beside it, belong together
        self.eviction = check_policy(eviction, self.passes, self.route)

    def __repr__(self) -> str:
        return f"<PagedKV of {self.num_layers} layers on {self.pool!r}, route {self.route}>"

    # ------------------------------------------------------------------------------------------- the hook

    def __enter__(self) -> Self:
        self._hooks.append(Hook.enter(self))
        for site in self.passes.sites:
            site.enter()
        return self

    def __exit__(self, *exc: object) -> None:
        if not self._hooks:
            raise RuntimeError("[install] this block was never entered, or has ended already")
        for site in self.passes.sites:
            site.require_ours()  # first, so that a block that cannot be left is still there as a whole
        self._hooks[-1].require_ours(self.model)
        for site in self.passes.sites:
            site.leave()
        self._hooks.pop().leave(self)

    @property
    def is_fused(self) -> bool:
        """Whether a layer attends straight over the pool now: inside the block, if the model is hooked."""
        return self.passes.is_fused

    @property
    def route(self) -> str:
        """How the model attends inside the block: "fused", or "gather: " and why.

        Or "lost: " and why, when mlx-lm does not find the hook any more and makes its own caches, outside the pool.
        """
        if lost := self._hooks and self._hooks[-1].lost(self.model):
            return f"lost: {lost}"
        covered = ", ".join(f"somebody has set {site}" for site in self.passes.sites if site.is_covered)
        why = self._why_gather or covered
        return f"gather: {why}" if why else "fused"

    def make_cache(self, eviction: Policy | None = None, **quantization: int | None) -> list[PagedKVCache]:
        """An empty cache, one facade per layer: for ``prompt_cache=``, ``insert(caches=[...])`` and so on.

        `eviction` is the policy by which its tokens leave, that of `install` by default. Blocks are all alike: bits
        (`kv_bits` and so on) other than those of `install` are a ValueError.
        """
        require_bits(self.backend.spec, **quantization)
        policy = self.eviction if eviction is None else check_policy(eviction, self.passes, self.route)
        return self._caches(Batch(self.passes, [NOT_OPENED], [0], is_merged=False, policy=policy))

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
        caches, num_cached = self.pinned(tokens, self.own_namespace(namespace))
        self.query_tokens += len(tokens)
        self.hit_tokens += num_cached
        return caches, num_cached

    def pinned(self, tokens: Sequence[int], own: bytes) -> tuple[list[PagedKVCache], int]:
        """`fetch` in a namespace as `own_namespace` has made it, and without an account."""
        with self.lock:
            handle = self.pool.prefix.pin(tokens[: max(len(tokens) - 1, 0)], own)
            num_cached = self.pool.num_tokens(handle)
        known = Known(own, num_cached)
        batch = Batch(self.passes, [handle], [num_cached], False, [known], self.eviction)
        return self._caches(batch), num_cached

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
        if batch is None or batch.passes is not self.passes or any(cache.batch is not batch for cache in caches):
            raise ValueError(f"[commit] the caches of all {self.num_layers} layers of one sequence are needed")
        if len(batch.handles) != 1:
            raise ValueError(f"[commit] the cache holds {len(batch.handles)} sequences, the limit is 1")
        if batch.known[0].namespace != self.own_namespace(namespace):
            raise ValueError("[commit] the cache was made in another namespace; begin with fetch")
        length = int(batch.rows.lens[0] + batch.rows.gone[0])
        if len(tokens) < length:
            raise ValueError(
                f"[commit] {len(tokens)} tokens, the cache holds {length}: all are needed, from the first on"
            )
        return batch.commit(tokens)

    def _require_prefix_cache(self, call: str) -> None:
        if not self.prefix_cache:
            raise RuntimeError(f"[{call}] the pool has no prefix cache: install(..., prefix_cache=True)")

    def own_namespace(self, namespace: bytes) -> bytes:
        """`namespace`, for this model alone: others may be on the same pool."""
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
        return growth <= self._available() and longest <= self.pool.options.max_blocks_per_seq

    def summary(self) -> Summary:
        """The account as of now, from any thread: it does not wait for MLX and evaluates nothing."""
        with self.lock:
            batches = self.passes.live_batches()  # kept alive: blocks of one that dies now would count as leaked
            held: set[int] = set()
            handles = [handle for batch in batches for handle in batch.handles if handle != NOT_OPENED]
            for handle in handles:
                with suppress(StaleHandle):  # its batch is in its finalizer
                    held.update(self.pool.table(handle).tolist())
            held.update(self.passes.copies[:, 0].tolist())  # sources
            stats = self.pool.stats()
            del batches  # before another step: to it, a batch that is still alive is one more owner
        leaked = max(0, stats.used - len(held))
        if self.prefix_cache and 0 < stats.sequences == len(handles):
            leaked = 0  # a block computed twice keeps its first copy alive, which may be in no table any more
        block_nbytes = self.backend.spec.block_nbytes
        return Summary(
            blocks_used=stats.used,
            blocks_peak=stats.peak_used,
            blocks_free=stats.free,
            blocks_cached=stats.evictable,
            blocks_leaked=leaked,
            sequences=stats.sequences,
            kv_nbytes=stats.used * block_nbytes,
            kv_nbytes_peak=stats.peak_used * block_nbytes,
            pool_nbytes=self.backend.num_blocks * block_nbytes,
            mlx_peak_nbytes=mx.get_peak_memory(),
            cow_copies=stats.cow_copies,
            cow_tokens=stats.cow_tokens,
            query_tokens=self.query_tokens,
            hit_tokens=self.hit_tokens,
            mlx_pool_copies=getattr(self.backend, "pool_copies", 0),
            route=self.route,
        )

    def _available(self) -> int:
        with self.lock:
            stats = self.pool.stats()
        return stats.free

    # ------------------------------------------------------------------------- one forward pass at a time

    def settle(self) -> int:
        """Wait for MLX and count the pool arrays that it copied since the last time, see `KVBackend.settle`.

        Raises
        ------
        ConcurrentUse
            Another thread ran the last forward pass and is still alive: its work may be half evaluated.
        """
        return self.passes.settle()

    def recover(self) -> bool:
        """Take back a forward pass that was interrupted between two layers, by an exception or Ctrl-C.

        A cache that is fed by hand is as before the pass and can go on. An engine cannot: mlx-lm's
        `BatchGenerator` has taken the tokens of a step out of its queues before the model sees them, and
        drops the answers of the other requests. So the batches that engines have made are stopped and raise
        `EngineStopped` from now on: make a new engine, after this call, and insert the prompts again.

        Returns
        -------
        bool
            Whether there was one. False too where what failed came after the last layer's write, in the model's head
            or in sampling: the pass is through, its tokens are in the caches, and `trim` takes them out.

        Raises
        ------
        ConcurrentUse
            Another thread is in it.
        """
        return self.passes.recover()
