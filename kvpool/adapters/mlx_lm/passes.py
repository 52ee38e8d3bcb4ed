"""`Passes`: the forward passes of one model on one pool, one at a time. `Rows`: the lengths of a batch."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Sequence
from functools import cached_property
from operator import attrgetter
from typing import Any, NamedTuple

import mlx.core as mx
import numpy as np

from kvpool.adapters.mlx_lm.attention import Site
from kvpool.adapters.mlx_lm.layout import Layout
from kvpool.adapters.mlx_lm.states import Checkpoints
from kvpool.errors import ConcurrentUse, KVPoolError
from kvpool.protocol import KVBackend

_is_active = attrgetter("is_active")
NOT_OPENED = -1  # in place of a handle: an empty sequence, opened when it gets its first token


class EngineStopped(KVPoolError, RuntimeError):
    """A batch was in an engine when a forward pass failed. The engine may have lost tokens: make a new one.

    Also raised after an eviction failed half-way, for any cache: its content cannot be read any more.
    """


class Rows:
    """What a batch looks like between two operations. Never changed, only replaced.

    So a facade that has not issued the next operation still sees the state before it.

    Attributes
    ----------
    lens : int64 ``[B]``
        Tokens of each sequence that are in the pool.
    gone : int64 ``[B]``
        Tokens that were evicted: the next one has position ``lens + gone``.
    todo : int64 ``[B]``, optional
        Real tokens that are still to come, while right-padded input is processed.
    """

    def __init__(self, lens: np.ndarray, todo: np.ndarray | None = None, gone: np.ndarray | None = None) -> None:
        self.lens = lens
        self.gone = np.zeros_like(lens) if gone is None else gone
        self.todo = todo

    @cached_property
    def offsets(self) -> mx.array:
        """Positions of the next tokens, int32 ``[B]`` on the device. Made once."""
        return mx.array((self.lens + self.gone).astype(np.int32))

    def num_new(self, num_columns: int) -> np.ndarray:
        """Return how many of the next `num_columns` input columns are real tokens, per row."""
        if self.todo is None:
            return np.full(len(self.lens), num_columns, np.int64)
        return np.minimum(self.todo, num_columns)

    def after(self, new: np.ndarray) -> Rows:
        """Return the rows with `new` more tokens each."""
        return Rows(self.lens + new, None if self.todo is None else self.todo - new, self.gone)


class Known(NamedTuple):
    """What the prefix cache knows of a sequence."""

    namespace: bytes = b""  # that it was opened in
    num_tokens: int = 0  # committed, or found when it was opened
    cut: int | None = None  # of its prompt, see `PagedKV.fetch`


class Passes:
    """What the batches of one model share: pool, storage, and the forward pass in progress.

    `PagedKV` documents when a step is done and the rules for threads.

    Parameters
    ----------
    model
        Whose forward passes these are. Kept weakly: caches may outlive it.
    pool : kvpool.Pool
    layout : Layout
        Where the pool and the backends hold the caches of the model.
    backends : sequence of KVBackend
        The storages of the layout.
    store
        Has ``export_blocks`` and ``import_blocks`` for the first arena.
    sites : sequence of Site
        Where the attention of the model is hooked. Empty if the model gathers.
    namespace : bytes
        The prefix cache's namespace for sequences that are opened empty. b"" without a prefix cache.

    Attributes
    ----------
    backend : kvpool.protocol.KVBackend
        The storage of the first arena. None if no layer has keys and values.
    checkpoints : Checkpoints
        Copies states from and to blocks of the first arena.
    dtype : mx.Dtype
        The dtype of its keys and values, as the model computes them.
    has_checkpoints : bool
        Whether a pass may have to end where the pool takes a checkpoint.
    is_called : bool
        Whether calls of the model are hooked, see `calls`.
    is_lazy : bool
        Whether a backend's writes and reads are nodes of MLX's graph.
    num_layers : int
        Caches of the model: facades of a batch.
    windows : tuple
        Attention window per layer, None without one.
    lock : threading.RLock
        Held around several calls of the pool that belong together, with the records kept beside it.
    batches : WeakValueDictionary
        Every `Batch` that is alive, by its id.
    """

    def __init__(
        self,
        model: Any,
        pool: Any,
        layout: Layout,
        backends: Sequence[KVBackend],
        store: Any = None,
        sites: Sequence[Site] = (),
        namespace: bytes = b"",
        calls: Sequence[Site] = (),
    ) -> None:
        self.model = weakref.ref(model)
        self.pool = pool
        self.layout = layout
        self.backends = tuple(backends)
        self.backend: Any = self.backends[0] if self.backends else None
        self.checkpoints = Checkpoints(layout, store)
        self.is_called = layout.is_called
        self.is_lazy = any(backend.capabilities.lazy for backend in self.backends)
        self.windows = tuple(leaf.window for leaf in layout.leaves)
        self.num_layers = len(self.windows)
        self.sites = tuple(sites)
        self.calls = tuple(calls)
        self._hooked = 0  # blocks that are entered
        self.dtype: mx.Dtype | None = getattr(mx, self.backends[0].spec.dtype) if self.backends else None
        self.lock = threading.RLock()
        self.batches: weakref.WeakValueDictionary[int, Any] = weakref.WeakValueDictionary()
        self.namespace = namespace
        self.has_checkpoints = bool(namespace and layout.groups)
        self._driver: threading.Thread | None = None  # who is in a forward pass
        self._last_driver: threading.Thread | None = None
        self._running: tuple[weakref.ref[Any], Any, Rows] | None = None  # its batch, plan, and rows before it

    @property
    def is_fused(self) -> bool:
        """Whether layers attend straight over the pool now: the model is hooked, and the block is entered."""
        return bool(self._hooked and self.sites) and all(map(_is_active, self.sites))

    @property
    def defers(self) -> bool:
        """Whether a layer stores keys and values with its queries: its kernels wait for every evaluation."""
        return self.is_fused and not self.is_lazy

    def hook(self) -> None:
        """Put the stand-ins in place, until as many calls of `unhook`."""
        for site in (*self.calls, *self.sites):
            site.enter()
        self._hooked += 1

    def unhook(self) -> None:
        """Undo one `hook`."""
        self._hooked -= 1
        for site in (*self.calls, *self.sites):
            site.leave()

    def places(self, handles: Sequence[int]) -> np.ndarray:
        """Return the length of each sequence at which its next checkpoint is due, int64 ``[B]``. -1: none."""
        found = np.full(len(handles), -1, np.int64)
        opened = np.flatnonzero(np.array(handles, np.int64) != NOT_OPENED)
        if self.has_checkpoints and len(opened):
            found[opened] = self.pool.prefix.wanted(np.array(handles, np.int64)[opened])
        return found

    def live_batches(self) -> list[Any]:
        """Return all batches that are alive, as a list: another thread may make one at any time."""
        return [batch for reference in self.batches.valuerefs() if (batch := reference()) is not None]

    @property
    def plan(self) -> Any:
        """The plan of the pass in progress, None between passes. The pool keeps sources of its copies until it ends."""
        if self._running is None or not self._running[1].is_pending:
            return None
        return self._running[1]

    # ------------------------------------------------------------------------------------------- one pass

    def begin(self) -> None:
        """Start a pass, before the pool is stepped. Raise if another pass is unfinished."""
        self._drive("update_and_fetch")
        if self._running is not None and self._running[0]() is None:
            self.undo()  # its batch is gone, so nobody else will do it
            self._drive("update_and_fetch")
        if self._running is not None:
            raise RuntimeError(
                "[update_and_fetch] an earlier forward pass was interrupted between two layers; "
                "kv.recover() takes it back"
            )

    def note(self, batch: Any, plan: Any, before: Rows) -> None:
        """Record that the pool was stepped for `batch`, whose rows were `before`."""
        self._running = (weakref.ref(batch), plan, before)

    def finish(self) -> None:
        """End the pass: all layers have stored their keys and values. `PagedKV` says why that is enough."""
        assert self._running is not None
        _, plan, _ = self._running
        with self.lock:
            if plan.is_pending:
                self.pool.done(plan)
            self._running = None
        self._driver = None

    def undo(self) -> None:
        """Take back the step, if there was one. Lengths and tables are then as before it."""
        running, self._running = self._running, None
        if running is not None:
            reference, plan, before = running
            batch = reference()
            with self.lock:
                if plan.is_pending:
                    self.pool.rollback(plan)
                elif batch is not None:  # a pool with in_order=True
                    self.pool.truncate(np.array(batch.handles, np.int64), before.lens + before.gone)
            if batch is not None and batch.eviction is not None:
                batch.eviction.forget()
        self._driver = None

    def recover(self) -> bool:
        """See `PagedKV.recover`."""
        self._drive("recover")
        running = self._running
        self.undo()
        if running is None:
            return False
        reference, _, before = running
        batch = reference()
        if batch is not None:
            batch.recover(before)
        self.stop_engines()
        return True

    def stop_engines(self) -> None:
        """Stop every batch that an engine has made, after a failed pass.

        It is not known here which engine ran the pass or which tokens it lost, so all of them are stopped.
        """
        for batch in self.live_batches():
            batch.is_stopped |= batch.is_merged

    # ------------------------------------------------------------------------------------------- threads

    def settle(self) -> int:
        """See `PagedKV.settle`."""
        current = threading.current_thread()
        last = self._last_driver
        if last is not None and last is not current and last.is_alive():
            raise ConcurrentUse(f"[settle] thread {last.name!r} ran the last forward pass, this is {current.name!r}")
        return sum(backend.settle() for backend in self.backends)

    def _drive(self, call: str) -> None:
        """Make this thread the one in a forward pass. Raise `ConcurrentUse` if another live thread is in one."""
        current = threading.current_thread()
        with self.lock:
            driver = self._driver
            if driver is not None and driver is not current and driver.is_alive():
                raise ConcurrentUse(
                    f"[{call}] thread {driver.name!r} is in a forward pass, this is {current.name!r}; one at a time"
                )
            self._driver = self._last_driver = current
