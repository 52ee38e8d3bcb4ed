"""Forward passes of one model on one pool: one at a time, by mlx-lm's caches or by a plan.

Recurrent layers, unknown caches and layers that let blocks go must know a pass before their first layer asks for a
mask. And a right-padded batch is not a batch for a recurrent layer: the padding would go into its state. So inside
``with install(...)`` the class of such a model has another ``__call__``. It passes everything through that is not a
list of this pool's caches.

`call` steps the pool for all rows, and runs the model in *parts*: rows that the model can take at once, without
padding. A part sees caches of its own: `LayerCache` for keys and values, mlx-lm's ArraysCache with the arrays of its
rows, a copy of an unknown cache. What the caches of a batch hold changes when all parts are done. So a pass that fails
leaves every state as it was before.
"""

from __future__ import annotations

import copy
import functools
import threading
import weakref
from collections.abc import Callable, Sequence
from functools import cached_property
from importlib import import_module
from operator import attrgetter
from typing import Any

import mlx.core as mx
import numpy as np
from mlx_lm.models.cache import can_trim_prompt_cache

from kvpool.adapters.mlx_lm.attention import (
    Forward,
    PagedContext,
    PagedMask,
    causal_mask,
    paged_latents,
    paged_mask,
    smaller_window,
)
from kvpool.adapters.mlx_lm.hooks import Site
from kvpool.adapters.mlx_lm.layout import Layout, Place
from kvpool.adapters.mlx_lm.shapes import build, leaves_of
from kvpool.adapters.mlx_lm.states import (
    Checkpoints,
    Held,
    chosen,
    closed,
    joined,
    nothing,
    opened,
)
from kvpool.errors import ConcurrentUse, KVPoolError
from kvpool.protocol import KVBackend, StepArrays

_is_active = attrgetter("is_active")
FORMATS = ("block_tables", "seq_lens", "slot_mapping", "cu_q_lens", "positions")  # of the plans of passes
NOT_OPENED = -1  # in place of a handle: an empty sequence, opened when it gets its first token


class EngineStopped(KVPoolError, RuntimeError):
    """A batch was in an engine when a forward pass failed. The engine may have lost tokens: make a new one.

    Also raised after an eviction failed half-way, for any cache: its content cannot be read any more.
    """


class Rows:
    """The state of a batch between two operations: arrays int64 ``[B]``.

    It is replaced, never changed. So a facade that has not issued the next operation still sees the state before it.
    """

    def __init__(self, lens: np.ndarray, todo: np.ndarray | None = None, gone: np.ndarray | None = None) -> None:
        self.lens = lens  # tokens of each sequence: the position of the next one
        self.gone = np.zeros(len(lens), np.int64) if gone is None else gone  # of them, evicted by a policy
        self.todo = todo  # real tokens that are still to come, while right-padded input is processed

    @cached_property
    def offsets(self) -> mx.array:
        """Positions of the next tokens, int32 ``[B]`` on the device. Made once."""
        return mx.array(self.lens.astype(np.int32))

    @property
    def held(self) -> np.ndarray:
        """Tokens of each sequence that were not evicted, int64 ``[B]``."""
        return self.lens - self.gone

    def num_new(self, num_columns: int) -> np.ndarray:
        """Return how many of the next `num_columns` input columns are real tokens, per row."""
        if self.todo is None:
            return np.full(len(self.lens), num_columns, np.int64)
        return np.minimum(self.todo, num_columns)

    def after(self, new: np.ndarray) -> Rows:
        """Return the rows with `new` more tokens each."""
        return Rows(self.lens + new, None if self.todo is None else self.todo - new, self.gone)


class Passes:
    """The pool and storage that the batches of one model share, and the forward pass in progress.

    `PagedKV` documents when a step is done and the rules for threads.
    """

    def __init__(
        self,
        model: Any,
        pool: Any,
        layout: Layout,
        backends: Sequence[KVBackend],
        store: Any,
        sites: Sequence[Site],
        namespace: bytes,
        calls: Sequence[Site],
    ) -> None:
        self.model = weakref.ref(model)  # caches may outlive it
        self.pool = pool
        self.layout = layout
        self.backends = tuple(backends)
        self.backend: Any = self.backends[0] if self.backends else None
        self.checkpoints = Checkpoints(layout, store)
        self.is_lazy = any(backend.capabilities.lazy for backend in self.backends)  # in MLX's graph
        self.windows = tuple(leaf.window for leaf in layout.leaves)
        self.sites = tuple(sites)  # where the attention of the model is hooked, none if the model gathers
        self.calls = tuple(calls)  # what else is hooked
        self._hooked = 0  # blocks that are entered
        self.dtype: mx.Dtype | None = getattr(mx, self.backends[0].spec.dtype) if self.backends else None
        self.lock = threading.RLock()  # for several calls of the pool that belong together, and the records beside it
        self.batches: weakref.WeakValueDictionary[int, Any] = weakref.WeakValueDictionary()
        self.namespace = namespace  # of sequences that are opened empty, b"" without a prefix cache
        self._driver: threading.Thread | None = None  # who is in a forward pass
        self.last_driver: threading.Thread | None = None
        self._running: tuple[weakref.ref[Any], Any, Rows] | None = None  # its batch, plan, and rows before it

    @property
    def is_fused(self) -> bool:
        """Whether layers attend straight over the pool now: the model is hooked, and the block is entered."""
        return bool(self._hooked and self.sites) and all(map(_is_active, self.sites))

    def hook(self) -> None:
        """Put the stand-ins in place, all or none, until as many calls of `unhook`."""
        entered = []
        try:
            for site in (*self.calls, *self.sites):
                site.enter()
                entered.append(site)
        except BaseException:
            for site in entered:
                site.leave()
            raise
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
        if self.namespace and len(opened):
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
                    self.pool.truncate(np.array(batch.handles, np.int64), before.lens)
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
            batch.restart(before)
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
        last = self.last_driver
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
            self._driver = self.last_driver = current


class Turn:
    """One call of a model: a step of the pool, and the parts in which the rows of the input run.

    The rows are those of the plan. Where the layers attend over the pool, they may also be its tokens: each with its
    own position, in one column. Such a turn has one part. The constructor executes the copies of the plan.
    """

    def __init__(
        self,
        passes: Passes,
        plan: Any,
        before: Rows,
        after: Rows,
        num_columns: int,
        is_merged: bool,
        *,
        first: np.ndarray | None = None,
        eviction: Any = None,
    ) -> None:
        self.passes = passes
        self.plan = plan
        self.before = before
        self.after = after
        self.new = after.lens - before.lens  # tokens of each row, int64 [B]
        self.num_columns = num_columns  # of the model's input
        self.is_merged = is_merged  # whether offsets are arrays, as in mlx-lm's batch caches
        self.first = np.zeros(len(self.new), np.int64) if first is None else first  # column of each row's first token
        self.eviction = eviction  # receives the attention scores of the layers
        self.queries: np.ndarray | None = None  # see `of_queries`
        self._columns: dict[tuple[int, int], Any] = {}
        for number, storage in passes.layout.storage_of.items():
            copies = plan.groups[number].copies
            if len(copies):
                passes.backends[storage].copy_blocks(copies)

    def of_queries(self, queries: np.ndarray) -> Turn:
        """Return a turn of some tokens of this one, whose rows are tokens. It stores and copies nothing.

        A token may occur twice. Each sees its sequence up to itself.
        """
        turn = copy.copy(self)
        turn.queries = queries
        turn.before, turn.after = Rows(self.before.lens[queries]), Rows(self.after.lens[queries])
        turn.new, turn.first = self.new[queries], self.first[queries]
        turn.eviction, turn._columns = None, {}
        return turn

    def arrays(self, group: int, column: int) -> Any:
        """Return the step arrays of one column of a group, for all rows."""
        key = group, column
        if key not in self._columns:
            whole = StepArrays.of_group(self.plan, group, column)
            self._columns[key] = whole if self.queries is None else StepArrays.of_queries(whole, self.queries)
        return self._columns[key]

    def parts(self) -> list[Part]:
        """Return the parts of the call, in the order of their first rows.

        Rows of one part have equally many new tokens where a layer would take padding for tokens. Empty rows have no
        state yet, so they are not in a part with others.
        """
        num_rows, layout = len(self.new), self.passes.layout
        if num_rows == 1 or not (layout.is_apart or layout.held):
            return [Part(self, np.arange(num_rows))]
        live = np.flatnonzero(self.new)
        if layout.is_apart:
            return [Part(self, live[i : i + 1]) for i in range(len(live))]
        kinds = 2 * self.new + (self.before.lens == 0)
        if kinds.min() == kinds.max():
            return [Part(self, np.arange(num_rows))]
        return [Part(self, live[kinds[live] == kind]) for kind in dict.fromkeys(kinds[live].tolist())]


class Part:
    """Rows ``[R]`` of a turn that the model takes at once, in ascending order."""

    def __init__(self, turn: Turn, rows: np.ndarray) -> None:
        self.turn = turn
        self.rows = rows
        self.is_whole = len(rows) == len(turn.new)
        self.new, self.lens, self.first = turn.new, turn.before.lens, turn.first
        if not self.is_whole:
            self.new, self.lens, self.first = self.new[rows], self.lens[rows], self.first[rows]
        self.shape = len(rows), int(self.new.max())  # of the model's input
        is_even = bool((self.new == self.shape[1]).all())
        self._real = None if is_even else real_columns(self.new, self.shape[1])
        self.forwards: dict[tuple[int, int], Forward] = {}  # of each column of a group that a layer has asked for
        self.reads: dict[int, Any] = {}  # storage -> what a layer took out of it at last, on the gathered route
        self.takes_input_whole = self.is_whole and self.shape[1] == turn.num_columns  # no cut
        self.is_fused = turn.passes.is_fused
        before, after = turn.before, turn.after
        self.offsets: tuple[int | mx.array, int | mx.array]  # of the first token of each row, and of the first after it
        if len(rows) == 1 or not turn.is_merged:
            self.offsets = int(before.lens[rows[0]]), int(after.lens[rows[0]])
        elif self.is_whole:
            self.offsets = before.offsets, after.offsets
        else:
            some = mx.array(rows.astype(np.int32))
            self.offsets = before.offsets[some], after.offsets[some]

    def forward(self, place: Place) -> Forward:
        """Return the forward pass of the column of a group that has a layer. Made once."""
        key = place.group, place.column
        if key not in self.forwards:
            turn, arrays = self.turn, self.turn.arrays(*key)
            backend = turn.passes.backends[place.storage]
            evicts = turn.eviction is not None and turn.eviction.group == place.group
            self.forwards[key] = Forward(
                backend,
                arrays if self.is_whole else StepArrays.rows_of(arrays, self.rows),
                self.shape,
                columns=self._real,
                eviction=turn.eviction if evicts else None,
                first_layer=place.column * backend.spec.num_layers,
                is_fused=self.is_fused,
                defers=self.is_fused and not turn.passes.is_lazy,
                stores=turn.queries is None,
            )
        return self.forwards[key]

    def end(self) -> None:
        """Store what is not stored yet, and refuse attention of this part from now on.

        Reads start here, if another part follows: its writes wait for reads that run, and copy the pool for lazy ones.
        """
        if not self.is_whole:
            mx.async_eval(self.reads)
        self.reads.clear()
        for forward in self.forwards.values():
            if forward.late is not None:
                forward.flush()
            forward.is_over = True


class LayerCache:
    """Keys and values of one layer in one part of a call, as a model sees them.

    ``offset`` is the position of the next token, int32 ``[R]``, or an int for a single row. It advances with this
    layer's own ``update_and_fetch``, whose result ``keys`` and ``values`` are. Nothing else changes it.
    """

    def __init__(self, part: Part, leaf: int) -> None:
        layout = part.turn.passes.layout
        place = layout.places[leaf]
        assert place is not None
        self.part = part
        self.number = leaf
        self.place = place  # of its keys and values
        self._leaf = layout.leaves[leaf]
        self.chunk_size = self._leaf.size
        self._window = part.turn.passes.windows[leaf]
        self._shown = place.array, self._window, self._leaf.keep or 0
        self._forward: Forward | None = None
        self.offset = part.offsets[0]
        self.keys: Any = None
        self.values: Any = None

    @property
    def start_position(self) -> int:
        """Position of the first key that ``update_and_fetch`` returns for the first row."""
        part = self.part
        return int(part.turn.plan.groups[self.place.group].kv_starts[part.rows[0]])

    def maybe_trim_front(self) -> None:
        """Do nothing: blocks before the chunk have left the table when the last pass was done."""

    def make_mask(
        self, N: int, return_array: bool = False, window_size: int | None = None
    ) -> mx.array | str | PagedMask | None:
        """Return the mask of the next `N` columns, for the keys that the pool holds."""
        part, window, shape, keep = self.part, self._window, self._leaf.shape, 0
        if self._leaf.keep is not None:  # a narrower window of the model hides the kept tokens, too
            keep = self._leaf.keep if smaller_window(window, window_size) == window else 0
            window_size = smaller_window(window, window_size)
        if part.is_fused and shape is not None and not shape.latent:
            return paged_mask(window_size, window)
        if part.is_fused and shape is not None and N == 1:
            return None  # the model adds the scores of rotary parts
        shown = np.asarray(part.turn.arrays(self.place.group, 0).seq_lens, np.int64)  # what was not let go
        held = shown[part.rows] - part.new
        return causal_mask(held, part.new, N, window_size, return_array, held=window, keep=keep)

    def update_and_fetch(self, keys: mx.array, values: mx.array) -> tuple[Any, Any]:
        """Store this layer's K ``[R, Hk, N, D]`` and V, return the contexts that the pool holds.

        Raises
        ------
        TypeError
            Keys or values have another dtype than the pool: the model was cast after `install`.
        ValueError
            They have another shape than when the model was traced, or the layer stores twice in one call.
        """
        part, shape = self.part, self._leaf.shape
        assert shape is not None
        dtype = getattr(mx, shape.dtype)
        if keys.dtype != dtype or values.dtype != dtype:
            raise wrong_dtype(keys, values, dtype)
        rows, columns = part.shape
        outer = rows, shape.num_kv_heads, columns
        if keys.shape != (*outer, shape.head_dim) or values.shape != (*outer, shape.v_head_dim) or self._forward:
            raise ValueError(
                f"[update_and_fetch] keys have shape {keys.shape}, values {values.shape}, this call stores "
                f"{(*outer, shape.head_dim)} and {(*outer, shape.v_head_dim)}, once"
            )
        place = self.place
        self._forward = part.forwards.get((place.group, place.column)) or part.forward(place)
        self.offset = part.offsets[1]
        if not shape.v_head_dim:
            values = mx.zeros((*values.shape[:3], 1), dtype)
        self._forward.put(place.array, keys, values)
        if not part.is_fused or (shape.latent and columns > 1):
            self.keys, self.values = part.reads[place.storage] = self._gathered(self._forward)
        elif shape.latent:
            self.keys, self.values = paged_latents(self._forward, *self._shown)
        else:
            self.keys = self.values = PagedContext(self._forward, *self._shown)
        return self.keys, self.values

    def keys_and_values(self) -> tuple[Any, Any]:
        """Return the contexts of this call, for layers that attend to another layer's cache."""
        if self._forward is None:
            raise RuntimeError("[keys_and_values] no update_and_fetch in this call")
        return self.keys, self.values

    def _gathered(self, forward: Forward) -> tuple[mx.array, mx.array]:
        forward.flush()
        k, v = forward.backend.read(forward.step, self.place.array)
        shape = self._leaf.shape
        return k, v if shape is None or shape.v_head_dim else v[..., :0]


def wrong_dtype(keys: mx.array, values: mx.array, dtype: mx.Dtype | None) -> TypeError:
    """Return the error for keys and values of another dtype than the pool's."""
    return TypeError(
        f"[update_and_fetch] keys are {keys.dtype}, values {values.dtype}, the pool holds {dtype}: install "
        "again, or make the engine again, after a model was cast"
    )


def real_columns(new: np.ndarray, num_columns: int) -> mx.array:
    """Return the places of real tokens in a right-padded input, int32 ``[T]``."""
    return mx.array(np.flatnonzero(np.arange(num_columns) < new[:, None]).astype(np.int32))


# -------------------------------------------------------------------------------------------------- the call


def call(
    batch: Any, run: Callable[[list[Any], Part], Any], num_rows: int, num_columns: int, tokens: mx.array | None
) -> Any:
    """Run a model over the next `num_columns` columns of a batch's rows.

    A row whose pool takes a checkpoint in the middle of its tokens runs in two turns or more. Each is a step of the
    pool. So every row is cut where it is cut alone.

    ``run(caches, part)`` calls the model with the input of a part. `tokens`, int ``[B, N]``, are the input if it is all
    that the model is given: only then are checkpoints found by later prompts. The results of several parts are put
    together; in padding they are 0.
    """
    layout, passes = batch.passes.layout, batch.passes
    due = batch.begin_call(num_rows, num_columns)
    first = np.zeros_like(due)
    pairs: list[tuple[Part, Any]] = []
    is_split = bool(passes.namespace) and tokens is not None
    while True:
        places = passes.places(batch.handles) if is_split else np.full(num_rows, -1)
        if not pairs and (places >= 0).any() and not batch.has_room(due):
            is_split, places = False, np.full(num_rows, -1)  # the only step raises, and nothing has changed
        ends = np.where(places >= 0, places - batch.rows.lens, num_columns)
        turn = batch.begin_turn(np.minimum(due - first, ends), first, num_columns)
        found, held_by = in_parts(
            turn, lambda part: batch.held if part.is_whole else chosen(layout, batch.held, part.rows.tolist()), run
        )
        batch.end_turn(turn.after, _held_after(layout, batch.held, held_by, num_rows))
        pairs += found
        if (places >= 0).any():
            batch.commit_inputs(turn, places, np.array(tokens).astype(np.int64))
        first = first + turn.new
        if (first == due).all():
            result = together(pairs, num_rows, num_columns)
            return with_writes(passes, result) if layout.nested else result


def in_parts(
    turn: Turn, held_before: Callable[[Part], Held], run: Callable[[list[Any], Part], Any]
) -> tuple[list[tuple[Part, Any]], list[tuple[Part, Held]]]:
    """Run a model over the parts of a turn, see `call`. Return its results, and what the rows of each part hold then.

    `held_before` says what the rows of a part hold. It is asked only if they are not empty.
    """
    layout = turn.passes.layout
    results, held_by = [], []
    for part in turn.parts():
        held: Held = {}
        if layout.held:
            held = held_before(part) if part.lens.any() else nothing(layout, len(part.rows))
        own = []
        for leaf, place in enumerate(layout.places):
            own.append(opened(layout, held, leaf) if place is None else LayerCache(part, leaf))
        result = run(build(layout.model.tree, own.__getitem__) if layout.nested else own, part)
        part.end()
        results.append((part, result))
        if layout.held:
            held = {leaf: closed(layout, leaf, own[leaf]) for leaf in layout.held}
        held_by.append((part, held))
    return results, held_by


def _held_after(layout: Any, before: Held, held_by: list[tuple[Part, Held]], num_rows: int) -> Held:
    """Return what the rows hold after all parts, in the order of the rows."""
    if not layout.held or (len(held_by) == 1 and held_by[0][0].is_whole):
        return held_by[0][1]
    moved = np.concatenate([part.rows for part, _ in held_by])
    idle = np.setdiff1d(np.arange(num_rows), moved)
    pieces = [(held, len(part.rows)) for part, held in held_by] + [(chosen(layout, before, idle.tolist()), len(idle))]
    return chosen(layout, joined(layout, pieces), np.argsort(np.concatenate([moved, idle])).tolist())


def with_writes(passes: Passes, result: Any) -> Any:
    """Let a result depend on the writes of caches inside a CacheList.

    Some models fill such a cache long before they read it, so nobody would evaluate its writes.
    """
    if not isinstance(result, mx.array):
        return result
    places = [place for i in passes.layout.nested if (place := passes.layout.places[i]) is not None]
    queued = [x for place in places for x in passes.backends[place.storage].queued(place.array)]
    return mx.depends(result, queued) if queued else result


def together(pairs: list[tuple[Part, Any]], num_rows: int, num_columns: int) -> Any:
    """Return what a model returned in several parts, in the places of their rows and columns."""
    if len(pairs) == 1 and pairs[0][0].takes_input_whole:
        return pairs[0][1]
    parts, results = [part for part, _ in pairs], [result for _, result in pairs]
    if not all(isinstance(result, mx.array) for result in results):
        raise TypeError(
            f"[forward] the rows of this model run apart, and it returned {type(results[0]).__name__}, not an array"
        )
    if len(parts) == num_rows and all(part.shape == (1, num_columns) for part in parts):
        return mx.concatenate(results)
    whole = mx.zeros((num_rows, num_columns, *results[0].shape[2:]), results[0].dtype)
    for part, result in pairs:
        if not part.first.any():
            whole[mx.array(part.rows.astype(np.int32)), : part.shape[1]] = result
            continue
        ends = part.first + part.new
        for i, (row, first, end) in enumerate(zip(part.rows.tolist(), part.first.tolist(), ends.tolist(), strict=True)):
            whole[row, first:end] = result[i, : end - first]
    return whole


# -------------------------------------------------------------------------------------------------- the hook


def site_of(model: Any) -> Site:
    """Return where the call of a model is hooked: ``__call__`` of its class."""
    owner = next(cls for cls in type(model).__mro__ if "__call__" in vars(cls))
    return Site(owner, "__call__", _stand_in)


def _trim(original: Any) -> Any:
    """Take tokens back in speculative decoding.

    mlx-lm takes none from a window that is full, and its next tokens are wrong. Here a window holds as many tokens more
    as the pool's lookahead says. `Pool.truncate` raises if that is not enough.
    """

    @functools.wraps(original)
    def trim_prompt_cache(cache: Any, num_tokens: int) -> int:
        if _batch_of(cache) is None or can_trim_prompt_cache(cache):
            found: int = original(cache, num_tokens)
            return found
        return max(leaf.trim(num_tokens) for leaf in leaves_of(cache))

    return trim_prompt_cache


TRIM = Site(import_module("mlx_lm.generate"), "trim_prompt_cache", _trim)


def _stand_in(original: Any) -> Any:
    @functools.wraps(original)
    def __call__(self: Any, *args: Any, **kwargs: Any) -> Any:
        caches = kwargs.get("cache")
        if caches is None:
            caches = next((given for given in args if isinstance(given, list)), None)
        batch = _batch_of(caches)
        if batch is None:
            return original(self, *args, **kwargs)
        assert caches is not None
        _require_own(self, caches, batch)
        arrays = [x for x in (*args, *kwargs.values()) if isinstance(x, mx.array)]
        num_rows, num_columns = arrays[0].shape[:2]
        is_tokens = len(arrays) == 1 and arrays[0].ndim == 2 and mx.issubdtype(arrays[0].dtype, mx.integer)

        def run(own: list[Any], part: Part) -> Any:
            def given(value: Any) -> Any:
                if value is caches:
                    return own
                if part.takes_input_whole or not isinstance(value, mx.array):
                    return value
                return cut(value, part) if value.shape[:2] == (num_rows, num_columns) else value

            return original(self, *map(given, args), **{name: given(value) for name, value in kwargs.items()})

        return call(batch, run, num_rows, num_columns, arrays[0] if is_tokens else None)

    return __call__


def cut(x: mx.array, part: Part) -> mx.array:
    """Return the rows and columns of a part."""
    if len(part.rows) == 1:
        row, first = int(part.rows[0]), int(part.first[0])
        return x[row : row + 1, first : first + part.shape[1]]
    if part.first.any():  # in padding it is the last column
        columns = np.minimum(part.first[:, None] + np.arange(part.shape[1]), x.shape[1] - 1)
        return x[mx.array(part.rows[:, None].astype(np.int32)), mx.array(columns.astype(np.int32))]
    return x[mx.array(part.rows.astype(np.int32)), : part.shape[1]]


def _batch_of(caches: Sequence[Any] | None) -> Any:
    """Return the batch behind a list of caches if a call with them is hooked, else None."""
    for cache in leaves_of(caches or ()):
        batch = getattr(cache, "hooked_batch", None)
        if batch is not None:
            return batch
    return None


def _require_own(model: Any, caches: Sequence[Any], batch: Any) -> None:
    """Raise unless `caches` are those of all layers of `batch`, in order, and of this model."""
    found = list(leaves_of(caches))
    if batch.passes.model() is not model:
        raise ValueError(
            "[forward] the caches belong to another model or another pool: make them by this model's install"
        )
    for number, cache in enumerate(found):
        if getattr(cache, "hooked_batch", None) is not batch:
            raise ValueError(
                f"[forward] cache {number} is a {type(cache).__name__} of "
                "somebody else: all caches of a call must come from one make_cache, merge or copy"
            )
    if [cache.number for cache in found] != list(range(len(batch.passes.windows))):
        raise ValueError(
            f"[forward] the caches are those of layers {[cache.number for cache in found]}, "
            f"the model has layers 0 .. {len(batch.passes.windows) - 1}"
        )
