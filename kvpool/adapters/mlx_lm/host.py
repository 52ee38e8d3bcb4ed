"""`install` and `PagedKV`: a pool and a storage for one model, the hook into mlx-lm, admission and statistics."""

from __future__ import annotations

import itertools
import logging
import weakref
from collections.abc import Callable, Iterable, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass, replace
from functools import partial
from operator import index
from typing import Any, Self

import mlx.core as mx
import mlx_lm
import numpy as np
from mlx_lm.models.cache import KVCache

import kvpool
from kvpool.adapters import warn_if_untested
from kvpool.adapters.mlx_lm.attention import NUM_TOKENS, ROWS, find_sites, reason_to_gather
from kvpool.adapters.mlx_lm.cache import Batch, PagedKVCache
from kvpool.adapters.mlx_lm.eviction import check_policy
from kvpool.adapters.mlx_lm.hooks import Hook, Site, server_sites
from kvpool.adapters.mlx_lm.layout import Layout, layout_of
from kvpool.adapters.mlx_lm.passes import NOT_OPENED, TRIM, Passes, site_of
from kvpool.adapters.mlx_lm.shapes import COUNTS_CONTEXT, ModelShape, build, inspect_model, leaves_of, require_bits
from kvpool.adapters.mlx_lm.states import arrays_in
from kvpool.adapters.mlx_lm.stored import StoredPrefixes, StoreFactory
from kvpool.errors import ConcurrentUse, StaleHandle
from kvpool.eviction import Policy, SlidingWindow
from kvpool.group_storage import BlockRows, GroupStorage
from kvpool.groups import Group
from kvpool.protocol import KVBackend
from kvpool.scheduler.needs import Needs
from kvpool.spec import KVSpec, checked_int
from kvpool.store import BlockStore


class Converted:
    """Wraps a backend for other arrays and converts them from and to MLX arrays. All else is passed through.

    Every call evaluates its arguments and has run when it returns. So no MLX work is queued on the storage.
    """

    def __init__(self, backend: KVBackend) -> None:
        self._inside = backend
        self._dtype = getattr(mx, backend.spec.dtype)
        self.capabilities = replace(backend.capabilities, arrays="mlx", lazy=False)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inside, name)

    def write(self, step: Any, layer: int, k: mx.array, v: mx.array) -> None:
        """See `kvpool.protocol.KVBackend.write`."""
        self._inside.write(step, layer, self._theirs(k), self._theirs(v))

    def attend(self, step: Any, layer: int, q: mx.array, scale: float | None = None, **more: Any) -> Any:
        """See `kvpool.protocol.KVBackend.attend`; float32 results are rounded to the dtype of `q`."""
        results = self._inside.attend(step, layer, self._theirs(q), scale, **more)
        if isinstance(results, tuple):
            return tuple(self._ours(x, q.dtype if i == 0 else mx.float32) for i, x in enumerate(results))
        return self._ours(results, q.dtype)

    def read(self, step: Any, layer: int) -> tuple[mx.array, mx.array]:
        """See `kvpool.protocol.KVBackend.read`."""
        k, v = self._inside.read(step, layer)
        return self._ours(k, self._dtype), self._ours(v, self._dtype)

    def queued(self, layer: int) -> list[mx.array]:
        """Nothing that MLX could evaluate."""
        return []

    def _theirs(self, x: mx.array) -> Any:
        return self._inside.asarray(np.array(x.astype(mx.float32)))

    def _ours(self, x: Any, dtype: mx.Dtype) -> mx.array:
        return mx.array(self._inside.to_numpy(x)).astype(dtype)


BackendFactory = Callable[[KVSpec, int], KVBackend]
RELEASES = ("0.32", "0.33")  # of mlx-lm: the oldest whose engines the tests run, and the first that they do not
CALLS = ("update_and_fetch", "keys_and_values", "make_mask", "is_trimmable", "trim", "size", "empty")  # of a cache

_log = logging.getLogger(__name__)
_given: weakref.WeakSet[Any] = weakref.WeakSet()  # pools that several may use
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
    eviction: Policy | SlidingWindow | None = None,
    store: BlockStore | StoreFactory | None = None,
    events: int = 0,
    max_model_len: int | None = None,
    **quantization: int | None,
) -> PagedKV:
    """Give a model of mlx-lm a paged KV cache, for the length of a ``with`` block.

    Parameters
    ----------
    model
        As loaded by ``mlx_lm.load``. Inside the block ``model.make_cache`` makes paged caches, for every engine.
    num_blocks, block_size, max_seqs, max_model_len
        Size of a new pool: blocks of tokens (one is reserved), tokens per block, sequences, tokens of the longest one
        (what the blocks hold, unless `PagedKV.resize` is to make room for more). Groups if layers differ.
    prefix_cache : bool
        Make the pool with a prefix cache, or use that of `pool`. Warns where it cannot: see docs/mlx-lm.md.
    pool : kvpool.Pool, optional
        A pool that is there. If its only group is a full one, layers with windows keep every token, too.
    fused : bool, optional
        True: attend over the pool. False: gather for mlx-lm's own attention. Default: what works, see `PagedKV.route`.
    backend : str or callable, optional
        A backend other than MLX's own: a name for `load_backend`, or ``factory(spec, num_blocks)``, for any arrays.
    kernels : bool, optional
        See `kvpool_backends.mlx.MLXBackend`. By default they are used.
    eviction : kvpool.eviction.Policy or SlidingWindow, optional
        Evict tokens of the full layers, see `PagedKV.make_cache`. Or give these layers a window, for all caches.
    store : BlockStore or callable, optional
        Where prefixes outlive the pool, or what makes that of a `Layout`: docs/store.md, "Engines".
    events : int, default 0
        Events of the prefix cache that a new pool keeps for ``kv.pool.prefix.events()``.
    kv_bits, k_bits, v_bits, quant_group_size : int, optional
        Store both, or one of them, in 8 or 4 bits: `shapes.with_bits`.

    Returns
    -------
    PagedKV
        A context manager. If a model has several, the last one entered makes the caches. They may exit in any order.

    Raises
    ------
    RuntimeError
        mlx-lm's caches lack a call of `CALLS`, or `fused` is True and impossible.
    ValueError
        Bits, `pool` (its layer groups), `store` (its layout, no prefix cache) or `eviction` do not fit the model.
    TypeError
        Neither or both of `num_blocks` and `pool`, an `eviction` that is not a policy, options that exclude each other.
    """
    require_hooks()
    if (num_blocks is None) == (pool is None):
        raise TypeError("[install] either num_blocks or pool is needed, and not both")
    storage = partial(make_storage, backend=backend, kernels=kernels)
    layout = _layout(model, block_size, pool, prefix_cache, eviction, storage, quantization)
    policy = None if isinstance(eviction, SlidingWindow) else eviction
    if num_blocks is not None:
        pool = layout.make_pool(num_blocks, block_size, max_seqs, prefix_cache, bool(policy), events, max_model_len)
    paged = partial(PagedKV, model, layout, storage)
    sites, why = _choose_route(paged, model, layout, fused, getattr(policy, "kind", None))
    return paged(pool, sites=sites, why_gather=why, prefix_cache=prefix_cache, eviction=policy, kept_in=store)


def layout_on(
    storage: Callable[..., KVBackend], model: ModelShape, block_size: int, keeps_all: bool, **quantization: int | None
) -> Layout:
    """Return how the caches of a model are held by storages of one kind. Shapes share an arena if those can share."""
    layout = layout_of(model, block_size, keeps_all, is_shared=False, **quantization)
    if len(layout.specs) < 2 or "block" not in storage(layout.specs[0], 1).capabilities.layouts:
        return layout
    return layout_of(model, block_size, keeps_all, is_shared=True, **quantization)


def _layout(
    model: Any,
    block_size: int,
    pool: Any,
    prefix_cache: bool,
    eviction: Any,
    storage: Callable[..., KVBackend],
    quantization: dict[str, int | None],
) -> Layout:
    """Return how the caches of a model are held: in one full group where a given pool has no other."""
    shape, keeps_all = inspect_model(model), pool is not None and pool.options.groups == (Group.full(),)
    if isinstance(eviction, SlidingWindow):
        if type(model).__module__ in COUNTS_CONTEXT:
            raise ValueError("[install] this model takes positions from the length of its context: leave eviction out")
        shape, keeps_all = shape.sliding(eviction), False
    size = block_size if pool is None else pool.block_size
    layout = layout_on(storage, shape, size, keeps_all, **quantization)
    if isinstance(eviction, Policy):
        layout.evicting("install", eviction)
    if pool is not None:
        layout.require_pool(pool)
        _given.add(pool)
    unknown = sorted({leaf.name for leaf in layout.leaves if leaf.kind == "opaque"})
    if unknown:
        effect = "; no prefix of this model is found" if prefix_cache else ""
        _log.warning("[install] %s is held whole for each sequence, outside the blocks%s", ", ".join(unknown), effect)
    return layout


def make_storage(
    spec: KVSpec,
    num_blocks: int,
    *,
    backend: str | BackendFactory | None = None,
    kernels: bool | None = None,
    **memory: Any,
) -> KVBackend:
    """Return the backend for `install`. It takes arrays of MLX. `memory`: see `KVBackend`, or nothing."""
    if callable(backend):
        factory: Any = backend
    else:
        from kvpool_backends import load_backend  # here, because kvpool does not depend on its backends

        factory = load_backend("mlx" if backend is None else backend)
    if backend is None:
        made = factory(spec, num_blocks, kernels=kernels, **memory)
    elif kernels is None:
        made = factory(spec, num_blocks, **memory)
    else:
        raise TypeError("[install] kernels belongs to the mlx backend, leave it out beside backend")
    missing = [name for name, verb in vars(KVBackend).items() if callable(verb) and not hasattr(made, name)]
    if missing:
        raise TypeError(
            f"[install] backend {type(made).__name__} has no {', '.join(missing)}: kvpool.protocol.KVBackend says what "
            "a backend does, kvpool.testing.conformance checks it"
        )
    return made if made.capabilities.arrays == "mlx" else Converted(made)


def require_hooks() -> None:
    """Raise RuntimeError unless mlx-lm's caches have the calls that paged ones answer. Warn of untested releases."""
    warn_if_untested("install", "mlx-lm", mlx_lm.__version__, *RELEASES)
    if missing := [call for call in CALLS if not hasattr(KVCache, call)]:
        raise RuntimeError(
            f"[install] mlx-lm {mlx_lm.__version__} has caches without {', '.join(missing)}: install mlx-lm >= "
            f"{RELEASES[0]}, or keep its own caches and use kvpool.adapters.prompt_cache"
        )


def _choose_route(
    paged: Callable[..., PagedKV], model: Any, layout: Layout, fused: bool | None, scores: str | None
) -> tuple[tuple[Site, ...], str]:
    """Return where to hook attention. If nowhere, also the reason."""
    if fused is False:
        return (), "fused=False"
    sites, why = find_sites(model), ""
    if not layout.specs:
        why = "no layer attends over blocks"
    elif any(leaf.kind == "chunk" for leaf in layout.leaves):
        why = "layers attend in chunks"
    else:
        block_size = layout.specs[0].block_size
        small = layout.make_pool(1 + 2 * len(ROWS) * -(-NUM_TOKENS // block_size), block_size, 8)
        trial = paged(small, sites=sites)
        can = [backend.capabilities for backend in trial.backends]
        if not all(one.paged for one in can):
            why = "the backend runs without kernels"
        elif any(leaf.keep for leaf in layout.leaves) and not all("mask" in one.features for one in can):
            why = "the backend takes no mask"
        elif layout.has_latents and not all(one.latent for one in can):
            why = "the backend does not attend to latents"
        elif why := reason_to_gather(trial):
            if not fused:
                _log.warning("[install] this model gathers: %s", why)
        else:
            for backend in trial.backends:
                # Kernels for all lengths: compile them now, not in a request.
                backend.warmup((), scores=scores)
    if fused and why:
        raise RuntimeError(f"[install] fused=True, but {why}")
    return (() if why else sites), why


@dataclass(frozen=True, slots=True)
class Summary:
    """Memory and statistics of one `PagedKV`. Blocks of all arenas together; a block covers the layers of one."""

    blocks_used: int  # in tables now
    blocks_peak: int  # the most at any time
    blocks_free: int  # what a new sequence could take, the cached ones included
    blocks_cached: int  # of these, kept by the prefix cache until somebody needs them
    blocks_leaked: int  # in use, but in no table of a live cache of this model
    sequences: int
    kv_nbytes: int  # blocks_used * bytes per block
    kv_nbytes_peak: int
    state_nbytes: int  # states of recurrent layers, and caches that are held whole; a shared one counts once per cache
    pool_nbytes: int  # allocated, once
    mlx_peak_nbytes: int  # mx.get_peak_memory(): all of MLX, weights and activations included
    cow_copies: int  # blocks copied because a shared tail was written
    cow_tokens: int
    query_tokens: int  # tokens that `PagedKV.fetch` was asked for
    hit_tokens: int  # of these, found in the prefix cache
    mlx_pool_copies: int  # whole pool arrays that MLX copied to write to them, as counted by the last `settle`
    route: str  # "fused", or "gather: " or "lost: " and why, see `PagedKV.route`
    writes: str  # "in place", or "scattered: " and what that costs

    def __str__(self) -> str:
        mib = 1 / 2**20
        return (
            f"blocks: {self.blocks_used} used, {self.blocks_peak} peak, {self.blocks_free} free "
            f"({self.blocks_cached} cached), {self.blocks_leaked} leaked; {self.sequences} sequences\n"
            f"KV: {self.kv_nbytes * mib:.2f} MiB used, {self.kv_nbytes_peak * mib:.2f} MiB peak, "
            f"{self.pool_nbytes * mib:.2f} MiB allocated, {self.state_nbytes * mib:.2f} MiB of states; "
            f"MLX peak {self.mlx_peak_nbytes * mib:.2f} MiB\n"
            f"copies: {self.cow_copies} blocks on write ({self.cow_tokens} tokens), "
            f"{self.mlx_pool_copies} pool arrays by MLX\n"
            f"attention: {self.route}; writes: {self.writes}"
        )


def _checkpoints(pool: Any, layout: Layout) -> tuple[BlockRows, ...]:
    """Return the storage of a model with states only: a block for each checkpoint."""
    if pool.prefix is None or not layout.checkpoint_blocks:
        return ()
    num_blocks, nbytes = pool.num_blocks, layout.block_nbytes[0]
    try:
        return (BlockRows(num_blocks, nbytes),)
    except MemoryError:
        raise MemoryError(
            f"[install] no memory for {num_blocks} checkpoints of states, {nbytes} bytes each: give fewer blocks, "
            "a block of this model holds one checkpoint; or prefix_cache=False"
        ) from None


class PagedKV:
    """One pool and one storage for one model. `install` makes it.

    When a step is done
    -------------------
    A step is pending while a forward pass goes through the layers. It is done when the last layer has stored its keys
    and values. From then on the pool may give the blocks of a finished sequence to another one.

    Eager kernels have run when their call returns. Only the last layer's attention is left then. It is the next call
    on the same thread, and a `PagedContext` refuses to attend after the batch has moved on.

    Where writes are scatters (without kernels, or with Metal's), MLX may run writes and reads later, when the blocks
    have another owner. This is sound because MLX arrays are values. Each write takes the newest version of the pool
    array as input, so the versions form one chain, in the order in which the pool was stepped. The reads of a pass
    refer to the version that its own writes made. MLX reuses the buffer of a version only if nothing refers to it.

    With lazy kernels (`kvpool_backends.mlx.native`) the pool's arrays are not values: a write changes every version.
    There reads are links of the chain, too, so a later write runs after every earlier read.

    Threads
    -------
    One thread at a time. Threads may take turns under a lock that each holds for a whole step of its engine
    (``with lock: generator.next()``). Before handing over, a thread must evaluate its pending MLX work, as engines do,
    or call `settle`. A thread that starts a forward pass while another is in one gets `ConcurrentUse`, and nothing has
    changed. A missing lock between two passes cannot be detected here, and MLX fails in its own ways. Any thread may
    call `summary` and `can_admit`, which evaluate nothing. `pool` has no lock.

    Attributes
    ----------
    pool : kvpool.Pool
    layout : Layout
        Which layers share a table and a storage.
    backends : tuple of KVBackend
        The storages of the layout. They take arrays of MLX.
    backend : kvpool.protocol.KVBackend
        The first of them. None if no layer has keys and values.
    arenas : tuple
        What exports and imports the blocks of each arena.
    stored : StoredPrefixes or None
        What moves blocks from and to the store.
    prefix_cache : bool
        Whether `fetch` and `commit` work.
    query_tokens, hit_tokens : int
        Tokens that `fetch` has looked up, and found.
    """

    def __init__(
        self,
        model: Any,
        layout: Layout,
        storage: Callable[..., KVBackend],
        pool: Any,
        *,
        sites: tuple[Site, ...] = (),
        why_gather: str = "",
        prefix_cache: bool = False,
        eviction: Policy | None = None,
        kept_in: BlockStore | StoreFactory | None = None,
    ) -> None:
        self.model = model
        self.pool = pool
        self.layout = layout
        self.storage = GroupStorage(storage, pool, layout.stored) if layout.specs else None
        self.backends: tuple[Any, ...] = () if self.storage is None else self.storage.backends
        self.backend: Any = self.backends[0] if self.backends else None
        self.arenas: Any = _checkpoints(pool, layout) if self.storage is None else tuple(self.storage.stores)
        self._blocks: list[tuple[Hook, tuple[Site, ...], ExitStack]] = []  # that are entered, and what undoes each
        self._why_gather = why_gather
        self.num_layers = len(layout.leaves)
        self.prefix_cache = prefix_cache and pool.prefix is not None and layout.can_restore
        self._number = str(next(_numbers))
        self.namespace = self.own_namespace(b"")
        self.query_tokens = self.hit_tokens = 0
        calls = [site_of(model), TRIM] if layout.is_called else []
        calls += [] if sites else find_sites(model)[1:]  # the masks of Gemma 2 also where it gathers
        namespace = self.namespace if self.prefix_cache else b""
        blocks = self.arenas[0] if self.arenas else None
        self.passes = Passes(model, pool, layout, self.backends, blocks, sites, namespace, calls)
        self.lock = self.passes.lock
        self.eviction = check_policy(eviction, self.passes, self.route, "install")
        if kept_in is not None and not self.prefix_cache:
            raise ValueError("[install] store needs prefix_cache=True, and a model whose caches can be restored")
        self.stored = None if kept_in is None else StoredPrefixes(self, kept_in)

    def __repr__(self) -> str:
        return f"<PagedKV of {self.num_layers} layers on {self.pool!r}, route {self.route}>"

    # ------------------------------------------------------------------------------------------- the hook

    def __enter__(self) -> Self:
        server = server_sites()
        with ExitStack() as undo:
            hook = Hook.enter(self)
            undo.callback(hook.leave, self)
            self.passes.hook()
            undo.callback(self.passes.unhook)
            for site in server:
                site.enter()
                undo.callback(site.leave)
            self._blocks.append((hook, server, undo.pop_all()))
        return self

    def __exit__(self, *exc: object) -> None:
        if not self._blocks:
            raise RuntimeError("[install] this block was never entered, or has ended already")
        hook, server, undo = self._blocks[-1]
        for site in (*server, *self.passes.calls, *self.passes.sites):
            site.require_ours()  # before any change: a block that cannot be left stays entered
        hook.require_ours(self.model)
        self._blocks.pop()
        undo.close()

    @property
    def route(self) -> str:
        """The way the model attends inside the block: "fused", or "gather: " and the reason. Then what is held whole.

        It is "lost: " and the reason when mlx-lm does not find the hook and makes its own caches, outside the pool.
        """
        if lost := self._blocks and self._blocks[-1][0].lost(self.model):
            return f"lost: {lost}"
        sites = (*self.passes.calls, *self.passes.sites)
        covered = ", ".join(f"somebody has set {site}" for site in sites if site.is_covered)
        why = self._why_gather or covered
        route = f"gather: {why}" if why else "fused"
        unknown = sorted({leaf.name for leaf in self.layout.leaves if leaf.kind == "opaque"})
        return f"{route}; opaque: {', '.join(unknown)}" if unknown else route

    def make_cache(self, eviction: Policy | None = None, **quantization: int | None) -> list[Any]:
        """Return an empty cache, one facade per cache of the model, for ``prompt_cache=``, ``insert(caches=[...])``.

        `eviction` is the policy of this cache, by default that of `install`. A `SlidingWindow` is none: it is a layer
        group of the pool, so `install` takes it. Bits other than those of `install` raise ValueError.
        """
        for backend in self.backends:
            require_bits(backend.spec, **quantization)
        policy = self.eviction if eviction is None else check_policy(eviction, self.passes, self.route)
        return self._caches(Batch(self.passes, [NOT_OPENED], [0], is_merged=False, policy=policy))

    # ------------------------------------------------------------------------------------------ prefix cache

    def fetch(
        self, tokens: Sequence[int], namespace: bytes = b"", cut: int | None = None
    ) -> tuple[list[PagedKVCache], int]:
        """A cache that begins with what the prefix cache holds of a prompt.

        No KV is copied: the cache shares the blocks that it found, and while it lives they stay. Feed it the rest of
        the prompt: ``generate_step(tokens[num_cached:], model, prompt_cache=caches)``.

        Parameters
        ----------
        tokens : sequence of int
            The whole prompt. Only whole blocks are found, and at least one token is left to compute.
        namespace : bytes
            From `kvpool.namespace`; requests find only what was committed in the same one. Another model on
            the same pool is in another namespace anyway.
        cut : int, optional
            Where the part of the prompt begins that the next turn of a conversation may rewrite. If layers differ, the
            pool keeps a checkpoint there when the cache is fed. By default 16 tokens before the end.

        Returns
        -------
        caches : list of PagedKVCache
            One per layer; empty when nothing was found.
        num_cached : int
            Tokens in it.
        """
        self._require_prefix_cache("fetch")
        own = self.own_namespace(namespace)
        with self.lock:
            if self.stored is not None:
                self.stored.load_now(np.asarray(tokens, np.int32), namespace, own)
            handle = self.pool.open(tokens, own, cut, reserve=False)
            num_cached = self.pool.num_tokens(handle)
        self.query_tokens += len(tokens)
        self.hit_tokens += num_cached
        batch = Batch(self.passes, [handle], [num_cached], False, [own], self.eviction)
        return self._caches(batch), num_cached

    def commit(self, caches: Sequence[PagedKVCache], tokens: Sequence[int], namespace: bytes = b"") -> int:
        """Let later `fetch` calls find the tokens of a cache, which does not change. Legal between two forward passes.

        Parameters
        ----------
        caches : list of PagedKVCache
            One sequence, all layers. For a running request: ``generator.extract_cache([uid])``.
        tokens : sequence of int
            The tokens that the cache was fed, from the first position on. Tokens that it does not hold are ignored.
        namespace : bytes
            The namespace in which it was fetched.

        Returns
        -------
        int
            Tokens that were new.

        Raises
        ------
        ValueError
            Not one whole sequence of this model, fewer tokens than the cache holds (is the cached part of the prompt
            missing?), or another namespace. Nothing was committed.
        """
        self._require_prefix_cache("commit")
        leaves = list(leaves_of(caches))
        batch = leaves[0].batch if len(leaves) == self.num_layers else None
        if batch is None or batch.passes is not self.passes or any(leaf.batch is not batch for leaf in leaves):
            raise ValueError(f"[commit] the caches of all {self.num_layers} layers of one sequence are needed")
        if len(batch.handles) != 1:
            raise ValueError(f"[commit] the cache holds {len(batch.handles)} sequences, the limit is 1")
        if batch.namespaces[0] != self.own_namespace(namespace):
            raise ValueError("[commit] the cache was made in another namespace; begin with fetch")
        length = int(batch.rows.lens[0])
        if len(tokens) < length:
            raise ValueError(
                f"[commit] {len(tokens)} tokens, the cache holds {length}: all are needed, from the first on"
            )
        new: int = batch.commit(tokens)
        if self.stored is not None:
            self.stored.save(np.asarray(tokens[:length], np.int32), namespace, self.own_namespace(namespace))
            self.stored.move(runs=False)
        return new

    def flush(self) -> None:
        """Forget all prefixes because the weights have changed. The store is closed: it belongs to the old ones."""
        if self.pool.prefix is not None:
            self.pool.prefix.flush()
        if self.stored is not None:
            self.stored.abandon()

    def close(self) -> None:
        """Wait for MLX, save what is not in the store yet, for some seconds at most, and close the store.

        If another thread that is alive ran the last step, that thread has to call `settle`.
        """
        try:
            with suppress(ConcurrentUse):
                self.settle()  # or MLX might give memory of the pool away under the last step
        finally:
            if self.stored is not None:
                self.stored.close()

    def _require_prefix_cache(self, call: str) -> None:
        if not self.prefix_cache:
            raise RuntimeError(
                f"[{call}] the pool has no prefix cache: install(..., prefix_cache=True), for a model without caches "
                "that are held whole"
            )

    def own_namespace(self, namespace: bytes) -> bytes:
        """Return `namespace` for this model alone. Other models may use the same pool."""
        return kvpool.namespace(model=self._number, salt=namespace)

    def _caches(self, batch: Batch) -> list[Any]:
        return build(self.layout.model.tree, lambda layer: PagedKVCache(batch, layer))

    # ------------------------------------------------------------------------------------ admission, account

    def can_admit(
        self, prompt_len: int, max_tokens: int, running: Iterable[tuple[int, int]] = (), *, chunk: int | None = None
    ) -> bool:
        """Return whether a request fits, even if the running requests generate all tokens that they may.

        Ask before ``insert()``. A later `OutOfBlocks` leaves the pool intact, but the engine in the middle of a step.

        Parameters
        ----------
        prompt_len, max_tokens : int
            Of the new request.
        running : iterable of (num_tokens, limit)
            For each request in the engine: tokens in its cache now (0 while it waits) and at most.
        chunk : int, optional
            Most tokens of a request in one forward pass (``prefill_step_size``). Default: its whole prompt. A window
            holds the tokens of a chunk beside those that it keeps.

        Notes
        -----
        One more block per request is counted, for the copy of a tail that it may share with a kept cache. Free blocks
        are those of this moment. So caches that are kept while requests run must exist before the call, or be counted
        in `running`. Blocks that a window lets go are counted as free unless somebody shares them.
        """
        requests = [(0, prompt_len + max_tokens), *running]
        chunk = max(1, *(limit for _, limit in requests)) if chunk is None else chunk
        for name, value, least in (("prompt_len", prompt_len, 0), ("max_tokens", max_tokens, 0), ("chunk", chunk, 1)):
            if index(value) < least:
                raise ValueError(f"[can_admit] {name} is {value}, the least is {least}")
        longest = -(-(prompt_len + max_tokens) // self.pool.block_size)
        needs = Needs(self.pool, chunk)
        with self.lock:
            fits = needs.short(needs.growth(*zip(*requests, strict=True)), needs.free()) < 0
        return fits and longest <= self.pool.options.max_blocks_per_seq

    def summary(self) -> Summary:
        """Return current statistics. Any thread may call it: it evaluates nothing and does not wait for MLX."""
        with self.lock:
            batches = self.passes.live_batches()  # kept alive, or the blocks of a dying one would count as leaked
            handles = [handle for batch in batches for handle in batch.handles if handle != NOT_OPENED]
            stats = [self.pool.stats(arena) for arena in range(len(self.layout.block_nbytes))]
            held = self._held_blocks(handles, len(stats))
            state_nbytes = sum(x.nbytes for batch in batches for items in batch.held.values() for x in arrays_in(items))
            del batches  # a batch that this list keeps alive would keep its blocks in the next step
        leaked = sum(max(0, arena.used - len(blocks)) for arena, blocks in zip(stats, held, strict=True))
        sizes = self.layout.block_nbytes if self.backends or self.prefix_cache else (0,)
        return Summary(
            blocks_used=sum(arena.used for arena in stats),
            blocks_peak=sum(arena.peak_used for arena in stats),
            blocks_free=sum(arena.free for arena in stats),
            blocks_cached=sum(arena.evictable for arena in stats),
            blocks_leaked=leaked,
            sequences=stats[0].sequences,
            kv_nbytes=sum(arena.used * nbytes for arena, nbytes in zip(stats, sizes, strict=True)),
            kv_nbytes_peak=sum(arena.peak_used * nbytes for arena, nbytes in zip(stats, sizes, strict=True)),
            state_nbytes=state_nbytes,
            pool_nbytes=sum(arena.num_blocks * nbytes for arena, nbytes in zip(stats, sizes, strict=True)),
            mlx_peak_nbytes=mx.get_peak_memory(),
            cow_copies=sum(arena.cow_copies for arena in stats),
            cow_tokens=sum(arena.cow_tokens for arena in stats),
            query_tokens=self.query_tokens,
            hit_tokens=self.hit_tokens,
            mlx_pool_copies=sum(getattr(backend, "pool_copies", 0) for backend in self.backends),
            route=self.route,
            writes=getattr(self.backend, "writes", "in place"),
        )

    def _held_blocks(self, handles: Sequence[int], num_arenas: int) -> list[set[int]]:
        """Return the blocks of each arena that are in a table, or sources of the pass in progress."""
        held: list[set[int]] = [set() for _ in range(num_arenas)]
        plan = self.passes.plan
        for number in self.layout.storage_of:
            own = held[self.layout.groups[number].arena]
            for handle in handles:
                with suppress(StaleHandle):  # its batch is in its finalizer
                    own.update(self.pool.table(handle, number).ravel().tolist())
            if plan is not None:
                own.update(plan.groups[number].copies[:, 0].tolist())
        return [{block for block in blocks if block >= self.pool.options.reserved_blocks} for blocks in held]

    # ------------------------------------------------------------------------- one forward pass at a time

    def resize(self, num_blocks: int) -> None:
        """Give the pool and its storage room for `num_blocks` blocks of tokens, between two forward passes.

        Caches keep their tokens. A smaller pool evicts from the prefix cache first. The longest sequence stays what
        `install` was told. Memory that goes is given back to the system, MLX's cache of buffers too. O(bytes of the
        blocks that stay).

        Raises
        ------
        OutOfBlocks, PlanStateError
            What is in use does not fit; a forward pass is in progress. The pool and its storage are unchanged.
        ValueError, CapacityExceeded
            See `Pool.resize`; or the pool is not this object's alone. State unchanged.
        MemoryError, RuntimeError
            No memory for more blocks. Caches are as before.
        """
        sizes = self.sizes("resize", num_blocks)
        self.settle()
        with self.lock:
            if self.stored is not None:
                self.stored.end_loads()
            if self.storage is not None:
                self.storage.resize(sizes)
            else:
                before, moves = self.pool.num_blocks, self.pool.resize(sizes)
                try:
                    for store in self.arenas:
                        store.resize(sizes[0], moves[0])
                except BaseException:
                    self.pool.resize({0: min(before, sizes[0])})  # what is blank leaves again: nothing moves
                    raise
        mx.clear_cache()

    def sizes(self, call: str, num_blocks: int) -> dict[int, int]:
        """Return the blocks of each arena for `num_blocks` blocks of tokens. ValueError unless `resize` may change."""
        if self.pool in _given:
            raise ValueError(f"[{call}] the pool was given to install, so the blocks of others could move")
        size = checked_int(call, "num_blocks", num_blocks, least=2)
        return dict(enumerate(self.layout.sizes(size)))

    def settle(self) -> int:
        """Wait for MLX and count the pool arrays that it has copied since the last call, see `KVBackend.settle`.

        Raises
        ------
        ConcurrentUse
            Another thread that is still alive ran the last forward pass. Its work may be half evaluated.
        """
        return self.passes.settle()

    def recover(self) -> bool:
        """Take back a forward pass that was interrupted between two layers, by an exception or Ctrl-C.

        A cache that the caller feeds is as before the pass and can go on. An engine cannot: mlx-lm's `BatchGenerator`
        takes the tokens of a step out of its queues before the model sees them. So all batches of engines are stopped
        and raise `EngineStopped`. Make a new engine after this call and insert the prompts again.

        Returns
        -------
        bool
            Whether a pass was taken back. False also if the failure came after the last layer's write, in the model's
            head or in sampling: the tokens of the pass are in the caches then, and `trim` removes them.

        Raises
        ------
        ConcurrentUse
            Another thread is in a forward pass.
        """
        return self.passes.recover()
