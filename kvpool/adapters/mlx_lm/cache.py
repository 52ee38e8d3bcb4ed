"""`PagedKVCache`: what a layer of an mlx-lm model sees. `Batch`: the sequences behind all layers.

mlx-lm keeps one cache object per layer and calls every operation once per layer: ``for c in caches: c.filter(...)``,
and ``update_and_fetch`` of each layer within a forward pass. Block tables are the same in all layers. So one `Batch`
owns the sequences, and the caches of the layers are facades in front of it.

Each operation has a number. The first facade that issues operation n executes it. The others take over its result.
Which layer comes first does not matter. The batch refuses operation n + 1 until every layer has issued n, so the log
has one entry. An engine that leaves layers out gets an error, not wrong tokens.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Hashable, Sequence
from operator import index
from typing import Any, NamedTuple, NoReturn

import mlx.core as mx
import numpy as np

import kvpool
from kvpool.adapters.mlx_lm.attention import Forward, PagedContext, PagedMask, causal_mask, paged_latents, paged_mask
from kvpool.adapters.mlx_lm.eviction import Eviction
from kvpool.adapters.mlx_lm.passes import (
    FORMATS,
    NOT_OPENED,
    EngineStopped,
    Passes,
    Rows,
    Turn,
    real_columns,
    wrong_dtype,
)
from kvpool.adapters.mlx_lm.states import Held, arrays_in, chosen, joined, nothing
from kvpool.errors import PoolClosed
from kvpool.eviction import Policy


class _Operation(NamedTuple):
    name: str
    key: Hashable
    result: Any
    rows: Rows


class Batch:
    """One or more sequences, which it owns, shared by the facades of all layers.

    `is_merged`: it is the result of `merge`. Then ``offset`` is an array with one entry per row, as in mlx-lm's batch
    caches, otherwise an int. `namespaces` are those in which the sequences were opened, by default that of `passes`.
    """

    def __init__(
        self,
        passes: Passes,
        handles: Sequence[int],
        lens: Sequence[int],
        is_merged: bool,
        namespaces: Sequence[bytes] | None = None,
        policy: Policy | None = None,
    ) -> None:
        self.passes = passes
        self.handles = list(handles)
        self.namespaces = [passes.namespace] * len(self.handles) if namespaces is None else list(namespaces)
        self.rows = Rows(np.array(lens, np.int64))
        self.is_merged = is_merged
        self.count = 0  # operations so far
        self.base = 0  # operations before it need not be followed any more, see `restart`
        self.base_rows = self.rows  # what a facade that is still before `base` sees
        self.is_stopped = False  # see `Passes.stop_engines`
        self._operation: _Operation | None = None
        self.missing = 0  # layers that have yet to issue the last operation
        self._plan: Any = None
        self._forward: Forward | None = None  # the last pass, while nothing else has begun
        self.eviction = Eviction.of(policy, passes, len(self.handles))
        self.held = nothing(passes.layout, len(self.handles))
        passes.batches[id(self)] = self

    def __del__(self) -> None:
        # A finalizer may run inside a call of the pool, so it must not change the pool. The pool records these
        # closes and executes them at its next call.
        self._end_pass()
        with contextlib.suppress(PoolClosed):
            for handle in self.handles:
                if handle != NOT_OPENED:
                    self.passes.pool.defer_close(handle)

    # ------------------------------------------------------------------------------------------------ the log

    def issue(
        self, cursor: int, name: str, key: Hashable, execute: Callable[[], tuple[Any, Rows]]
    ) -> tuple[int, Rows, Any]:
        """Execute operation number `cursor` of a facade, or return the result if another facade has done it.

        `name` and `key`, the operation and its arguments, must be equal for all layers. `execute` returns its result
        and the rows afterwards; if it raises, the batch is unchanged. Return the facade's next cursor, the rows that it
        sees now, and the result.
        """
        cursor = max(cursor, self.base)
        if cursor == self.count:
            self.require_idle(name)
            result, self.rows = execute()
            self._end_pass()
            if isinstance(result, Forward):
                self._forward = result
            self.count += 1
            self._operation = _Operation(name, key, result, self.rows)
            self.missing = len(self.passes.windows)
        operation = self._operation
        if cursor != self.count - 1 or operation is None or (operation.name, operation.key) != (name, key):
            done = "nothing" if operation is None else f"{operation.name}{operation.key}"
            raise RuntimeError(
                f"[{name}] a layer asks for {name}{key} as operation {cursor}, the batch is at {self.count} "
                f"and the other layers did {done}: every layer's cache needs the same calls in the same order"
            )
        self.missing -= 1
        if not self.missing and name != "forward":
            self._operation = None  # its result may hold another batch alive
        return cursor + 1, operation.rows, operation.result

    def stored(self) -> None:
        """End the forward pass: the last layer has stored its keys and values."""
        self._operation = None
        self.passes.finish()

    def require_idle(self, call: str) -> None:
        """Raise unless every layer has issued the last operation and the batch was not stopped."""
        if self.is_stopped:
            raise EngineStopped(
                f"[{call}] a forward pass failed while these {len(self.handles)} sequences were in an engine, "
                "which may have lost tokens: discard it, make a new one and insert its prompts again"
            )
        if self.eviction is not None and self.eviction.is_torn:
            raise EngineStopped(
                f"[{call}] an eviction failed when these {len(self.handles)} sequences had lost tokens and what stays "
                "was not moved yet, they cannot be read any more: make a new cache and feed it their tokens again"
            )
        if self._operation is not None:
            raise RuntimeError(
                f"[{call}] {self.missing} of {len(self.passes.windows)} layers have not done the operation before "
                f"({self._operation.name}); if a forward pass was interrupted, kv.recover() takes it back"
            )

    def _end_pass(self) -> None:
        """Refuse attention of the last pass from now on."""
        if self._forward is not None:
            self._forward.is_over = True
            self._forward = None

    def restart(self, rows: Rows) -> None:
        """Have all layers see `rows`, whichever of them did the last operation."""
        self._end_pass()
        self.rows = self.base_rows = rows
        self.count += 1
        self.base = self.count
        self.missing = 0
        self._operation = None

    # ------------------------------------------------------------------------------------------ one forward

    def forward(self, num_rows: int, num_columns: int) -> tuple[Forward, Rows]:
        """Step the pool by the real tokens of an input ``[num_rows, num_columns]``. All or nothing."""
        if num_rows != len(self.handles):
            self._spread(num_rows)
        passes = self.passes
        if passes.layout.is_called:
            raise RuntimeError(
                "[update_and_fetch] this model's caches work only inside the install block, and only in a call of the "
                "model itself: a part of it was called, or the block has ended"
            )
        plan, after, new = self._step(self.rows.num_new(num_columns))
        try:
            if len(plan.copies):
                passes.backend.copy_blocks(plan)
            forward = Forward(
                passes.backend,
                plan,
                (num_rows, num_columns),
                columns=None if after.todo is None else real_columns(new, num_columns),
                eviction=self.eviction,
                is_fused=passes.is_fused,
            )
            if self.eviction is not None:
                self.eviction.begin_pass(plan, np.arange(num_rows), new)
        except BaseException:
            self._take_back()
            raise
        return forward, after

    def _step(self, new: np.ndarray) -> tuple[Any, Rows, np.ndarray]:
        """Begin a pass and step the pool by so many tokens of each row. Return plan, rows afterwards, and `new`.

        If it raises, there is no pass. If what follows raises, `_take_back` ends the pass.
        """
        passes, before = self.passes, self.rows
        try:
            passes.begin()
        except BaseException:
            self.is_stopped = self.is_merged  # another pass goes on, or waits for `recover`
            raise
        try:
            with passes.lock:
                self._open_all()
                if self.eviction is not None:
                    gone = self.eviction.run(self.handles, before.lens, before.gone)
                    before = self.rows = Rows(before.lens, before.todo, gone)
                after = before.after(new)
                plan = self._fitting_plan(int(new.sum()), after)
                passes.pool.step(plan, np.array(self.handles, np.int64), new)
                passes.note(self, plan, before)
        except BaseException:
            self._take_back()
            raise
        return plan, after, new

    def _take_back(self) -> None:
        """End a pass whose first layer has not begun, as if it had not been."""
        self.passes.undo()
        if self.is_merged:
            self.passes.stop_engines()

    # ------------------------------------------------------------------------------------------ a hooked call

    def begin_call(self, num_rows: int, num_columns: int) -> np.ndarray:
        """Return how many tokens each row gets in a call of the model."""
        self.require_idle("forward")
        if num_rows != len(self.handles):
            self._spread(num_rows)
        if self.rows.todo is not None and not self.rows.todo.any():
            raise ValueError("[forward] no row has a token left: prepare was given too small lengths")
        return self.rows.num_new(num_columns)

    def begin_turn(self, new: np.ndarray, first: np.ndarray, num_columns: int) -> Turn:
        """Step the pool by `new` tokens of each row, before the first layer. All or nothing.

        They begin in columns `first` of an input with `num_columns` columns.
        """
        self._end_pass()
        num_rows = len(self.handles)
        plan, after, new = self._step(new)
        before = self.rows
        try:
            self._load(plan)
            how: dict[str, Any] = {"first": first, "eviction": self.eviction}
            turn = Turn(self.passes, plan, before, after, num_columns, self.is_merged, **how)
            if self.eviction is not None:
                self.eviction.begin_pass(plan, np.arange(num_rows), new)
        except BaseException:
            self._take_back()
            raise
        self._operation = _Operation("forward", (num_rows, num_columns), None, before)
        self.missing = len(self.passes.windows)
        return turn

    def end_turn(self, rows: Rows, held: Held) -> None:
        """End the call that `begin_turn` began: all layers have done their part."""
        passes = self.passes

        def read(slots: Sequence[int]) -> Held:
            written = passes.plan.groups[passes.layout.state_group].state_dst.tolist()
            return chosen(passes.layout, held, [written.index(slot) for slot in slots])

        passes.checkpoints.save(passes.plan, read)
        self.held = held
        self.restart(rows)
        passes.finish()

    def _load(self, plan: Any) -> None:
        """Load the states that a plan asks for, into every batch with a row that has one of them: forks share it."""
        slots, held = self.passes.checkpoints.loaded(plan)
        if not slots:
            return
        group, table = self.passes.layout.state_group, self.passes.pool.table
        read = plan.groups[group].state_src.tolist()  # -1: a row without new tokens, which may share a slot
        for batch in {self, *self.passes.live_batches()}:
            own = [-1 if handle == NOT_OPENED else next(iter(table(handle, group)), -1) for handle in batch.handles]
            if batch is self:
                own = [slot if slot >= 0 else kept for slot, kept in zip(read, own, strict=True)]
            batch._take_states(slots, held, own)

    def _take_states(self, slots: list[int], held: Held, own: Sequence[int]) -> None:
        """Let rows hold what was loaded; `own` has their slots."""
        num_rows = len(self.handles)
        index = [num_rows + slots.index(slot) if slot in slots else row for row, slot in enumerate(own)]
        if index != list(range(num_rows)):
            layout = self.passes.layout
            self.held = chosen(layout, joined(layout, [(self.held, num_rows), (held, len(slots))]), index)

    def _spread(self, num_rows: int) -> None:
        """Give an empty, unmerged cache `num_rows` rows. mlx-lm's caches take input of any number of rows, too."""
        if self.is_merged or self.rows.lens.any():
            raise ValueError(
                f"[update_and_fetch] the input has {num_rows} rows, the cache {len(self.handles)} sequences"
            )
        with self.passes.lock:
            self._close(self.handles[num_rows:])
            self.handles = self.handles[:num_rows] + [NOT_OPENED] * (num_rows - len(self.handles))
            self.namespaces = (self.namespaces + [self.passes.namespace] * num_rows)[:num_rows]  # open rows keep theirs
        self.rows = Rows(np.zeros(num_rows, np.int64))
        self.held = nothing(self.passes.layout, num_rows)
        self.eviction = Eviction.of(self.policy, self.passes, num_rows)

    def has_room(self, new: np.ndarray) -> bool:
        """Whether so many tokens of each row find their blocks. Opens rows that are not open."""
        with self.passes.lock:
            self._open_all()
            return bool(self.passes.pool.can(np.array(self.handles, np.int64), new))

    def _open_all(self) -> None:
        for row, handle in enumerate(self.handles):
            if handle == NOT_OPENED:
                self.handles[row] = int(self.passes.pool.open(0, self.namespaces[row]))

    def _fitting_plan(self, num_tokens: int, after: Rows) -> Any:
        """Return the batch's plan, or a larger one. Sizes double, so this is rare."""
        pool, plan = self.passes.pool, self._plan
        lens = after.lens
        if len(self.passes.layout.storage_of) == 1:  # no table has what was evicted, but for a part of a block
            lens = after.held + np.minimum(after.gone, pool.block_size)
        width = min(-(-int(lens.max()) // pool.block_size), pool.options.max_blocks_per_seq)
        rows, num_tokens = len(self.handles), max(num_tokens, len(self.handles))
        limits = None if plan is None else plan.limits
        if limits is None or limits.max_rows < rows or limits.max_tokens < num_tokens or limits.table_width < width:
            self._plan = kvpool.Plan(
                pool,
                _power_of_two(rows),
                _power_of_two(num_tokens),
                formats=FORMATS,
                table_width=min(_power_of_two(max(width, 16)), pool.options.max_blocks_per_seq),
                pad={"block_tables": 0},  # it is read and masked, so it must be a valid block
                backend=self.passes.backend,
            )
        return self._plan

    # -------------------------------------------------------------------------------------- other operations

    def fork(self, indices: Sequence[int], is_merged: bool) -> Batch:
        """Return a new batch of forks of these rows. Copies no KV."""
        forks = Batch(self.passes, [], [], is_merged, policy=self.policy)
        forks._append(self, indices)
        return forks

    def extend(self, other: Batch) -> tuple[None, Rows]:
        """Append forks of the rows of `other`."""
        if other.passes is not self.passes:
            raise ValueError("[extend] the caches belong to different pools")
        other.require_idle("extend")
        self._append(other, range(len(other.handles)))
        return None, self.rows

    def _append(self, other: Batch, indices: Sequence[int]) -> None:
        """Fork rows of `other` into this batch, all or none."""
        forks: list[int] = []
        if self.policy != other.policy:
            raise ValueError(f"[extend] {self.policy} and {other.policy}: caches of one batch evict by one policy")
        with self.passes.lock:
            try:
                for i in indices:
                    handle = other.handles[i]
                    forks.append(NOT_OPENED if handle == NOT_OPENED else int(self.passes.pool.fork(handle)[0]))
            except BaseException:
                self._close(forks)
                raise
            layout, num_rows = self.passes.layout, len(self.handles)
            self.held = joined(layout, [(self.held, num_rows), (chosen(layout, other.held, indices), len(indices))])
            self.handles += forks
            self.namespaces += [other.namespaces[i] for i in indices]
        if self.eviction is not None and other.eviction is not None:
            self.eviction.append(other.eviction, indices)
        mine, theirs, picked = self.rows, other.rows, list(indices)
        lens = np.concatenate([mine.lens, theirs.lens[picked]])
        self.rows = Rows(lens, gone=np.concatenate([mine.gone, theirs.gone[picked]]))

    @property
    def policy(self) -> Policy | None:
        """The policy that selects tokens to evict. None: no token is evicted."""
        return None if self.eviction is None else self.eviction.policy

    def filter(self, keep: Sequence[int]) -> tuple[None, Rows]:
        """Keep the rows `keep`, in that order; close the others."""
        kept = [self.handles[i] for i in keep]
        if len(set(keep)) != len(keep):
            raise ValueError(f"[filter] indices {list(keep)} are not distinct")
        with self.passes.lock:
            self._close([handle for i, handle in enumerate(self.handles) if i not in set(keep)])
            self.handles, self.namespaces = kept, [self.namespaces[i] for i in keep]
            self.held = chosen(self.passes.layout, self.held, keep)
        todo = self.rows.todo
        index = np.array(keep, np.int64)
        if self.eviction is not None:
            self.eviction.keep_rows(keep)
        return None, Rows(self.rows.lens[index], None if todo is None else todo[index], self.rows.gone[index])

    def trim(self, num_tokens: int) -> tuple[int, Rows]:
        """Drop `num_tokens` tokens of every row, or as many as it has. The result is the largest drop."""
        lens = np.maximum(self.rows.lens - num_tokens, 0)
        opened = [i for i, handle in enumerate(self.handles) if handle != NOT_OPENED]
        if opened:
            with self.passes.lock:
                self.passes.pool.truncate(np.array(self.handles, np.int64)[opened], lens[opened])
        rows = Rows(lens, gone=self.rows.gone)
        if self.eviction is not None:
            self.eviction.truncate(rows.held)
        return int((self.rows.lens - lens).max(initial=0)), rows

    def prepare(self, lengths: Sequence[int]) -> tuple[None, Rows]:
        """Announce that the next forward passes bring `lengths` real tokens per row, then padding."""
        if len(lengths) != len(self.handles):
            raise ValueError(f"[prepare] {len(lengths)} lengths, the cache has {len(self.handles)} sequences")
        return None, Rows(self.rows.lens, np.array(lengths, np.int64), self.rows.gone)

    def finalize(self) -> tuple[None, Rows]:
        """End the padded input."""
        return None, Rows(self.rows.lens, gone=self.rows.gone)

    def commit(self, tokens: Sequence[int]) -> int:
        """Commit the only sequence to the prefix cache. Return how many of its tokens were new.

        After an eviction nothing is committed: what is left is not the KV of a prompt.
        """
        self.require_idle("commit")
        length, prefix = int(self.rows.lens[0]), self.passes.pool.prefix
        if self.rows.gone[0] or not length:
            return 0
        with self.passes.lock:
            known = prefix.committed(self.handles[0])
            if known < length:
                prefix.commit(self.handles[0], tokens[known:length])
        return length - known

    def commit_inputs(self, turn: Turn, places: np.ndarray, inputs: np.ndarray) -> None:
        """Commit the tokens that a turn has computed of rows that were on their way to a checkpoint.

        `inputs` are those of the whole call. A row of which the prefix cache misses an earlier token is left out.
        """
        pool = self.passes.pool
        with self.passes.lock:
            for row in np.flatnonzero((places >= 0) & (turn.new > 0)).tolist():
                handle, first = self.handles[row], int(turn.first[row])
                if pool.prefix.committed(handle) == turn.before.lens[row]:
                    pool.prefix.commit(handle, inputs[row, first : first + int(turn.new[row])])

    def blocks(self, row: int, group: int) -> list[int]:
        """Return the blocks that a row holds in a group, all columns."""
        if self.handles[row] == NOT_OPENED:
            return []
        with self.passes.lock:
            table = self.passes.pool.table(self.handles[row], group)
        return [block for block in table.ravel().tolist() if block >= self.passes.pool.options.reserved_blocks]

    def _close(self, handles: Sequence[int]) -> None:
        opened = [handle for handle in handles if handle != NOT_OPENED]
        if opened:
            with self.passes.lock:
                self.passes.pool.close(opened)


def _power_of_two(n: int) -> int:
    return 1 << max(0, n - 1).bit_length()


class _NotSaved:
    """Part of every ``state``. ``mx.eval`` ignores it. ``save_prompt_cache`` raises an error with its text."""

    def __repr__(self) -> str:
        return "[PagedKVCache] a paged cache cannot be saved, its arrays belong to all caches of the pool"


class PagedKVCache:
    """The cache of one layer: a facade of a `Batch` that all layers share.

    ``make_mask``, ``offset`` and the other properties change nothing. A model may read them in any number and order:
    some models build two masks per forward pass, some read the offset of another layer. ``offset`` advances with this
    layer's own ``update_and_fetch``. The first ``update_and_fetch`` of a pass steps the pool.

    In a pool whose only group is a full one a sliding-window layer (mlx-lm's RotatingKVCache) keeps all its tokens. Its
    window is in the mask. The result is the same, and such a cache can always be trimmed. Where layers differ the model
    sees other caches during a call (`passes`). The facades then merge, fork, filter and count.

    There is no ``__len__`` and no ``__bool__``, because mlx-lm tests ``if cache`` and would treat an empty cache as
    none. There are no ``meta_state``, ``keys`` or ``values`` and no setter of ``state``, because K and V are in the
    pool and a cache cannot be saved or loaded.

    Attributes
    ----------
    batch : Batch
        The sequences behind this layer and all others.
    hooked_batch : Batch or None
        The same, if calls of the model with this cache are hooked.
    number : int
        Which of the model's caches this is.
    """

    def __init__(self, batch: Batch, layer: int) -> None:
        self.batch = batch
        self.hooked_batch = batch if batch.passes.layout.is_called else None
        self.number = layer
        self._cursor = batch.count
        self._rows = batch.rows
        self._forward: Forward | None = None  # the last forward pass, None if something else came after it

    def __repr__(self) -> str:
        return f"PagedKVCache(layer={self.number}, lengths={self._seen().lens.tolist()})"

    def __getitem__(self, index: int) -> NoReturn:
        raise RuntimeError(
            "[cache] this model's caches work only inside the install block, and only in a call of the model itself"
        )

    def __getattr__(self, name: str) -> NoReturn:
        # mlx-lm's own caches look for their attributes in what is given to their merge and extend.
        raise AttributeError(
            f"PagedKVCache has no {name!r}: stock and paged caches cannot be in one batch", name=name, obj=self
        )

    # ------------------------------------------------------------------------------------------ attention

    @property
    def offset(self) -> int | mx.array:
        """Position of the next token: an int, or int32 ``[B]`` for merged caches. It counts evicted tokens."""
        rows = self._rows if self._cursor >= self.batch.base else self.batch.base_rows  # `_seen`, twice per layer
        return rows.offsets if self.batch.is_merged else int(rows.lens[0])

    def make_mask(
        self, N: int, return_array: bool = False, window_size: int | None = None
    ) -> mx.array | str | PagedMask | None:
        """The attention mask of the next `N` input columns.

        Returns
        -------
        None, "causal", or bool ``[B or 1, 1, N, C]``
            C is the longest context after the pass. Where all rows are equally long, a short form stands for the
            full mask, as in mlx-lm.
        PagedMask
            On the fused route. Of latents, None for one column; chunks gather.
        """
        batch, window = self.batch, self.batch.passes.windows[self.number]
        if batch.passes.is_fused and not batch.passes.layout.has_latents:
            return paged_mask(window_size, window)
        if batch.passes.is_fused and N == 1:
            return None  # the model adds the scores of rotary parts
        rows = self._seen()
        held = rows.held
        if batch.eviction is not None:
            held = batch.eviction.lens_after(held)  # what `update_and_fetch` will find
        return causal_mask(held, rows.num_new(N), N, window_size, return_array, held=window)

    def update_and_fetch(self, keys: mx.array, values: mx.array) -> tuple[Any, Any]:
        """Store this layer's K ``[B, Hk, N, D]`` and V, return the whole contexts ``[B, Hk, C, D]``.

        On the fused route nothing is gathered: one `PagedContext` stands for both. Chunks of latents gather.

        Raises
        ------
        OutOfBlocks
            Raised by the first layer of a pass. Pool and cache are unchanged.
        CapacityExceeded
            A sequence is longer than all blocks together. Pool and cache are unchanged.
        TypeError
            Keys or values have another dtype than the pool: the model was cast after `install`.
        ConcurrentUse
            Another thread is in a forward pass.
        EngineStopped
            A pass failed while these sequences were in an engine (see `PagedKV.recover`), or an eviction failed
            half-way.
        """
        batch, passes = self.batch, self.batch.passes
        dtype = passes.dtype
        if keys.dtype != dtype or values.dtype != dtype:
            raise wrong_dtype(keys, values, dtype)
        num_rows, _, num_columns, _ = keys.shape
        shape = num_rows, num_columns
        self._forward = None
        self._cursor, self._rows, forward = batch.issue(self._cursor, "forward", shape, lambda: batch.forward(*shape))
        forward.put(self.number, keys, values)
        if not batch.missing:
            batch.stored()
        self._forward = forward
        if not forward.is_fused or passes.layout.has_latents:
            return self.keys_and_values()
        context = PagedContext(forward, self.number, passes.windows[self.number])  # here too: each call costs time
        return context, context

    def keys_and_values(self) -> tuple[Any, Any]:
        """Return the contexts of the last ``update_and_fetch``, for layers that attend to another layer's cache."""
        if self._forward is None or self._cursor != self.batch.count:
            raise RuntimeError("[keys_and_values] no update_and_fetch since the cache was made or changed")
        forward, passes = self._forward, self.batch.passes
        if forward.is_fused and self.batch.passes.is_fused:
            if not passes.layout.has_latents:
                context = PagedContext(forward, self.number, passes.windows[self.number])
                return context, context
            if forward.shape[1] == 1:
                return paged_latents(forward, self.number, passes.windows[self.number])
        forward.flush()
        contexts: tuple[mx.array, mx.array] = passes.backend.read(forward.step, self.number)
        return contexts

    # ------------------------------------------------------------------------------------------- batching

    @classmethod
    def merge(cls, caches: Sequence[PagedKVCache]) -> PagedKVCache:
        """Return one cache with forks of the sequences of `caches`. Those stay unchanged."""
        first = caches[0]
        _require_paged("merge", caches)
        batches = [cache.batch for cache in caches]

        def execute() -> tuple[Batch, Rows]:
            for batch in batches:
                batch.require_idle("merge")
            merged = Batch(first.batch.passes, [], [], is_merged=True, policy=first.batch.policy)
            for batch in batches:
                merged.extend(batch)
            return merged, first.batch.rows

        return cls(first._issue("merge", tuple(map(id, batches)), execute), first.number)

    def extend(self, other: PagedKVCache) -> None:
        """Append forks of the sequences of `other`."""
        _require_paged("extend", [other])
        batch = self.batch
        self._issue("extend", id(other.batch), lambda: batch.extend(other.batch))

    def filter(self, batch_indices: Sequence[int] | mx.array) -> None:
        """Keep these rows, in this order. The blocks of the others return to the pool."""
        keep = self._indices("filter", batch_indices)
        self._issue("filter", keep, lambda: self.batch.filter(keep))

    def extract(self, idx: int) -> PagedKVCache:
        """Return a new cache with a fork of row `idx`."""
        (row,) = self._indices("extract", [idx])
        batch = self.batch
        one = self._issue("extract", row, lambda: (batch.fork([row], is_merged=False), batch.rows))
        return PagedKVCache(one, self.number)

    def __deepcopy__(self, memo: dict[int, Any]) -> PagedKVCache:
        """A fork. One ``copy.deepcopy`` of the list of all layers makes one fork, through its memo."""
        batch = self.batch
        fork = memo.get(id(batch))
        if fork is None:
            batch.require_idle("deepcopy")
            fork = batch.fork(range(len(batch.handles)), batch.is_merged)
            fork.rows = batch.rows
            memo[id(batch)] = fork
        return PagedKVCache(fork, self.number)

    def __reduce__(self) -> Any:
        raise TypeError("[PagedKVCache] cannot be pickled or copied, only deep-copied (a fork)")

    def prepare(
        self,
        *,
        lengths: Sequence[int] | None = None,
        right_padding: Sequence[int] | None = None,
        left_padding: Sequence[int] | None = None,
    ) -> None:
        """Announce right-padded input: `lengths` real tokens per row in the next forward passes."""
        if left_padding is not None and max(left_padding) > 0:
            raise ValueError("[prepare] left_padding is not supported, rows are left-aligned here")
        if right_padding is None or max(right_padding) <= 0:
            return
        if lengths is None:
            raise ValueError("[prepare] right_padding needs lengths")
        key = tuple(map(int, lengths))
        self._issue("prepare", key, lambda: self.batch.prepare(key))

    def finalize(self) -> None:
        """End the padded input."""
        self._issue("finalize", (), self.batch.finalize)

    # ----------------------------------------------------------------------------------- length and memory

    def is_trimmable(self) -> bool:
        """Whether any number of tokens can be dropped: nothing was evicted or let go, and no layer has a state."""
        rows, layout = self._seen(), self.batch.passes.layout
        if rows.gone.any() or layout.held:
            return False
        return not rows.lens.max(initial=0) > layout.least_bound

    def trim(self, n: int) -> int:
        """Drop the last `n` tokens of every row, or as many as there are. Return how many."""
        n = index(n)
        if n < 0:
            raise ValueError(f"[trim] n is {n}, the least is 0")
        return self._issue("trim", n, lambda: self.batch.trim(n))

    def to_quantized(self, group_size: int = 64, bits: int = 4) -> Any:
        """Return the cache itself, if its blocks have these bits. mlx-lm calls this for its ``kv_bits``.

        Raises
        ------
        ValueError
            The blocks have other bits. `install` sets the bits; a cache cannot change them.
        """
        place = self.batch.passes.layout.places[self.number]
        if place is None:
            return self
        spec = self.batch.passes.backends[place.storage].spec
        if spec.bits == (bits, bits) and spec.quant_group_size == group_size:
            return self
        raise ValueError(
            f"[to_quantized] kv_bits={bits} with groups of {group_size}, the blocks hold {spec.storage}: leave kv_bits "
            f"out and let the pool store such bits, install(..., kv_bits={bits}, quant_group_size={group_size})"
        )

    def size(self) -> int:
        """Tokens of the longest row, without those that were evicted."""
        return int(self._seen().held.max(initial=0))

    def empty(self) -> bool:
        """Whether no row has a token."""
        return self.size() == 0

    @property
    def nbytes(self) -> int:
        """Bytes of the rows' blocks in this layer, or of its state. A shared block counts once per row."""
        batch, passes = self.batch, self.batch.passes
        place = passes.layout.places[self.number]
        if place is None:
            return sum(x.nbytes for x in arrays_in(batch.held[self.number]))
        spec = passes.backends[place.storage].spec
        blocks = sum(len(batch.blocks(row, place.group)) for row in range(len(batch.handles)))
        return blocks // passes.layout.groups[place.group].columns * spec.block_nbytes // spec.num_layers

    @property
    def state(self) -> list[Any]:
        """Arrays for ``mx.eval(cache.state)``, which executes the writes of this layer if they are lazy.

        The state cannot be saved or set, because the pool's arrays belong to all its caches. ``save_prompt_cache``
        raises ValueError and writes nothing.
        """
        passes = self.batch.passes
        place = passes.layout.places[self.number]
        if place is None:
            return [*arrays_in(self.batch.held[self.number]), _NotSaved()]
        return [*passes.backends[place.storage].queued(place.array), _NotSaved()]

    # ------------------------------------------------------------------------------------------- internals

    def _seen(self) -> Rows:
        """Return the rows as of this layer's last operation."""
        return self._rows if self._cursor >= self.batch.base else self.batch.base_rows

    def _issue(self, name: str, key: Any, execute: Any) -> Any:
        self._forward = None
        self._cursor, self._rows, result = self.batch.issue(self._cursor, name, key, execute)
        return result

    def _indices(self, call: str, indices: Sequence[int] | mx.array) -> tuple[int, ...]:
        count = len(self._seen().lens)
        asked = np.array(indices, np.int64)
        rows = np.where(asked < 0, asked + count, asked)
        if ((rows < 0) | (rows >= count)).any():
            raise IndexError(f"[{call}] rows {asked.tolist()}, the cache has 0 .. {count - 1}")
        return tuple(rows.tolist())


def _require_paged(call: str, caches: Sequence[Any]) -> None:
    strangers = {type(cache).__name__ for cache in caches if not isinstance(cache, PagedKVCache)}
    if strangers:
        raise TypeError(
            f"[{call}] {', '.join(sorted(strangers))} cannot be in one batch with paged caches: it was made before "
            "install, or by another model"
        )
