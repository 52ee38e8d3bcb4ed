"""Sequences that run together, and the log that lets all layers of a model share them.

mlx-lm keeps one cache object per layer and calls every operation once per layer: ``for c in caches:
c.filter(...)``, and within a forward pass each layer's ``update_and_fetch``. Block tables are the same in all
layers, so here one `Batch` owns the sequences and the layers are facades in front of it. Each operation has a
number. The facade that issues operation n first executes it; the others find it done and take over its
result. Which layer comes first does not matter.

Operation n + 1 is not accepted before every layer has issued n, so the log is one entry long, and an engine
that leaves layers out is told so instead of getting wrong tokens.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Hashable, Sequence
from typing import Any, NamedTuple

import mlx.core as mx
import numpy as np

import kvpool
from kvpool.adapters.mlx_lm.eviction import Eviction
from kvpool.adapters.mlx_lm.passes import Passes
from kvpool.adapters.mlx_lm.rows import NOT_OPENED, EngineStopped, Forward, Known, Rows
from kvpool.errors import PoolClosed
from kvpool.eviction import Policy


class _Operation(NamedTuple):
    name: str
    key: Hashable
    result: Any
    rows: Rows


class Batch:
    """One or more sequences, shared by the facades of all layers.

    Parameters
    ----------
    passes : Passes
        Pool and storage of the model, and whose turn it is.
    handles, lens
        The sequences, which the batch owns from now on, and their lengths.
    is_merged : bool
        Whether the batch came out of `merge`: then ``offset`` is an array with one entry per row, as in
        mlx-lm's batch caches, else an int.
    known : sequence of Known, optional
        What the prefix cache knows of each sequence; by default nothing.
    policy : Policy, optional
        By which tokens leave, see `kvpool.eviction`.
    """

    def __init__(
        self,
        passes: Passes,
        handles: Sequence[int],
        lens: Sequence[int],
        is_merged: bool,
        known: Sequence[Known] | None = None,
        policy: Policy | None = None,
    ) -> None:
        self.passes = passes
        self.handles = list(handles)
        self.known = [Known(passes.namespace)] * len(self.handles) if known is None else list(known)
        self.rows = Rows(np.array(lens, np.int64))
        self.is_merged = is_merged
        self.count = 0  # operations so far
        self.base = 0  # operations before it need not be followed any more, see `recover`
        self.base_rows = self.rows  # what a facade that is still before `base` sees
        self.is_stopped = False  # see `Passes.stop_engines`
        self.is_torn = False  # an eviction failed half-way
        self._operation: _Operation | None = None
        self.missing = 0  # layers that have yet to issue the last operation
        self._plan: Any = None
        self._given: Forward | None = None  # see `take_plan`
        self._forward: Forward | None = None  # the last pass, while nothing else has begun
        self.eviction = None if policy is None else self._evicting(policy)
        passes.batches[id(self)] = self

    def __del__(self) -> None:
        # Runs inside whatever the program is doing, a pool call included, so it must not change the pool: the
        # closes are noted, and done at the pool's next call.
        self._end_pass()
        with contextlib.suppress(PoolClosed):
            for handle in self.handles:
                if handle != NOT_OPENED:
                    self.passes.pool.defer_close(handle)

    # ------------------------------------------------------------------------------------------------ the log

    def issue(
        self, cursor: int, name: str, key: Hashable, execute: Callable[[], tuple[Any, Rows]]
    ) -> tuple[int, Rows, Any]:
        """Execute operation number `cursor` of a facade, or take over the result if another one did.

        Parameters
        ----------
        cursor : int
            Operations that the facade has issued so far.
        name, key
            What is asked; must be the same for all layers.
        execute : callable
            Does it and returns (result, rows afterwards). If it raises, nothing has happened.

        Returns
        -------
        (cursor, rows, result)
            The facade's next cursor, the batch as it sees it now, and the result.
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
            self.missing = self.passes.num_layers
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
        """The last layer has stored its keys and values: the forward pass is through."""
        self._operation = None
        if self._given is None:
            self.passes.finish()

    def require_idle(self, call: str) -> None:
        """Raise unless every layer has issued the last operation, and nothing was stopped in the middle."""
        if self.is_stopped:
            raise EngineStopped(
                f"[{call}] a forward pass failed while these {len(self.handles)} sequences were in an engine, "
                "which may have lost tokens: discard it, make a new one and insert its prompts again"
            )
        if self.is_torn:
            raise EngineStopped(
                f"[{call}] an eviction failed when these {len(self.handles)} sequences had lost tokens and what stays "
                "was not moved yet, they cannot be read any more: make a new cache and feed it their tokens again"
            )
        if self._operation is not None:
            raise RuntimeError(
                f"[{call}] {self.missing} of {self.passes.num_layers} layers have not done the operation before "
                f"({self._operation.name}); if a forward pass was interrupted, kv.recover() takes it back"
            )

    def _end_pass(self) -> None:
        """Attention of the pass before is refused from now on."""
        if self._forward is not None:
            self._forward.is_over = True
            self._forward = None

    def recover(self, rows: Rows) -> None:
        """Back to `rows`, what was there before the forward pass that some layers have not done."""
        self._end_pass()
        self.rows = self.base_rows = rows
        if self.eviction is not None:
            self.eviction.forget()
        self.count += 1  # even the layers that did it are behind now, and take `rows` over
        self.base = self.count
        self.missing = 0
        self._operation = None

    # ------------------------------------------------------------------------------------------ one forward

    def take_plan(self, forward: Forward, rows: Rows) -> None:
        """Start a pass over a plan that the caller has stepped. The batch has no sequences of its own.

        The pass counts as executed: every layer takes `forward` over. Layers of an earlier pass begin at `rows`.
        """
        self._given = forward
        self.is_merged = forward.shape[0] != 1
        self.base_rows = rows
        self.base = self.count + 1
        self.count += 2
        self.rows = Rows(rows.lens + forward.shape[1], gone=rows.gone)
        self._operation = _Operation("forward", forward.shape, forward, self.rows)
        self.missing = self.passes.num_layers

    @property
    def is_fused(self) -> bool:
        """Whether the layers attend straight over the pool now."""
        return self.passes.is_fused if self._given is None else self._given.is_fused

    def forward(self, num_rows: int, num_columns: int) -> tuple[Forward, Rows]:
        """Step the pool by the real tokens of an input ``[num_rows, num_columns]``; all or nothing."""
        if num_rows != len(self.handles):
            self._spread(num_rows)
        passes, before = self.passes, self.rows
        new = before.num_new(num_columns)
        try:
            passes.begin()
        except BaseException:
            self.is_stopped = self.is_merged  # the pass of somebody else goes on, or waits for `recover`
            raise
        try:
            with passes.lock:
                self._open_all()
                if self.eviction is not None:
                    lens, gone = self.eviction.run(self.handles, before.lens, before.gone)
                    before = self.rows = Rows(lens, before.todo, gone)
                after = before.after(new)
                plan = self._fitting_plan(int(new.sum()), int(after.lens.max()))
                passes.pool.step(plan, np.array(self.handles, np.int64), new)
                passes.note(self, plan, before)
            columns = None
            if before.todo is not None:
                real = np.arange(num_columns) < new[:, None]
                columns = mx.array(np.flatnonzero(real).astype(np.int32))
            forward = Forward(
                passes.backend,
                plan,
                (num_rows, num_columns),
                columns=columns,
                eviction=self.eviction,
                is_fused=passes.is_fused,
            )
            if self.eviction is not None:
                self.eviction.begin_pass(after.lens, new)
        except BaseException:
            passes.undo()
            if self.is_merged:
                passes.stop_engines()
            self.is_torn = self.eviction is not None and self._has_lost_tokens()
            raise
        return forward, after

    def _has_lost_tokens(self) -> bool:
        """Whether the pool has let tokens go that are still counted here: nobody has moved what stays."""
        lens = zip(self.handles, self.rows.lens.tolist(), strict=True)
        with self.passes.lock:
            return any(handle != NOT_OPENED and self.passes.pool.kv_len(handle) != n for handle, n in lens)

    def _spread(self, num_rows: int) -> None:
        """An empty, unmerged cache takes input of any number of rows, as mlx-lm's does; they stay equal."""
        if self.is_merged or self.rows.lens.any():
            raise ValueError(
                f"[update_and_fetch] the input has {num_rows} rows, the cache {len(self.handles)} sequences"
            )
        with self.passes.lock:
            self._close(self.handles[num_rows:])
            self.handles = self.handles[:num_rows] + [NOT_OPENED] * (num_rows - len(self.handles))
            self.known = (self.known + [Known(self.passes.namespace)] * num_rows)[:num_rows]
        self.rows = Rows(np.zeros(num_rows, np.int64))
        if self.eviction is not None:
            self.eviction = self._evicting(self.eviction.policy)

    def _evicting(self, policy: Policy) -> Eviction:
        return Eviction(policy, self.passes.pool, self.passes.backend, len(self.handles))

    def _open_all(self) -> None:
        for row, handle in enumerate(self.handles):
            if handle == NOT_OPENED:
                self.handles[row] = self.passes.open_empty()

    def _fitting_plan(self, num_tokens: int, longest: int) -> Any:
        """The batch's plan, or a larger one (sizes double, so this is rare)."""
        pool, plan = self.passes.pool, self._plan
        width = min(-(-longest // pool.block_size), pool.options.max_blocks_per_seq)
        rows, num_tokens = len(self.handles), max(num_tokens, len(self.handles))
        limits = None if plan is None else plan.limits
        if (
            limits is None
            or limits.max_rows < rows
            or limits.max_tokens < num_tokens
            or limits.table_width < width
        ):
            self._plan = kvpool.Plan(
                pool,
                _power_of_two(rows),
                _power_of_two(num_tokens),
                backend=self.passes.backend,
                table_width=min(_power_of_two(max(width, 16)), pool.options.max_blocks_per_seq),
                pad={"block_tables": 0},  # gathered and masked, so it must be some block
            )
        return self._plan

    # -------------------------------------------------------------------------------------- other operations

    def fork(self, indices: Sequence[int], is_merged: bool) -> Batch:
        """A new batch of forks of these rows. Copies no KV."""
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
        self._require_policy(other)
        with self.passes.lock:
            try:
                for i in indices:
                    handle = other.handles[i]
                    forks.append(NOT_OPENED if handle == NOT_OPENED else int(self.passes.pool.fork(handle)[0]))
            except BaseException:
                self._close(forks)
                raise
            self.handles += forks
            self.known += [other.known[i] for i in indices]
        if self.eviction is not None:
            self.eviction.append(other.eviction, indices)
        rows, chosen = (self.rows, other.rows), list(indices)
        lens = np.concatenate([rows[0].lens, rows[1].lens[chosen]])
        self.rows = Rows(lens, gone=np.concatenate([rows[0].gone, rows[1].gone[chosen]]))

    @property
    def policy(self) -> Policy | None:
        """By which tokens leave; None: none does."""
        return None if self.eviction is None else self.eviction.policy

    def _require_policy(self, other: Batch) -> None:
        if self.policy != other.policy:
            raise ValueError(f"[extend] {self.policy} and {other.policy}: caches of one batch evict by one policy")

    def filter(self, keep: Sequence[int]) -> tuple[None, Rows]:
        """Keep the rows `keep`, in that order; close the others."""
        kept = [self.handles[i] for i in keep]
        if len(set(keep)) != len(keep):
            raise ValueError(f"[filter] indices {list(keep)} are not distinct")
        with self.passes.lock:
            self._close([handle for i, handle in enumerate(self.handles) if i not in set(keep)])
            self.handles, self.known = kept, [self.known[i] for i in keep]
        todo = self.rows.todo
        index = np.array(keep, np.int64)
        if self.eviction is not None:
            self.eviction.keep_rows(keep)
        return None, Rows(self.rows.lens[index], None if todo is None else todo[index], self.rows.gone[index])

    def trim(self, num_tokens: int) -> tuple[int, Rows]:
        """Drop `num_tokens` tokens of every row, or as many as it has; the result is the largest drop."""
        lens = np.maximum(self.rows.lens - num_tokens, 0)
        opened = [i for i, handle in enumerate(self.handles) if handle != NOT_OPENED]
        if opened:
            with self.passes.lock:
                logical = lens + self.rows.gone
                self.passes.pool.truncate(np.array(self.handles, np.int64)[opened], logical[opened])
        if self.eviction is not None:
            self.eviction.truncate(lens)
        self.known = [
            Known(known.namespace, min(known.num_tokens, n)) for known, n in zip(self.known, lens.tolist(), strict=True)
        ]
        return int((self.rows.lens - lens).max(initial=0)), Rows(lens, gone=self.rows.gone)

    def discard(self) -> tuple[None, Rows]:
        """Give everything back; what is left are empty sequences, as new. Unlike `trim` after an eviction too."""
        with self.passes.lock:
            self._close(self.handles)
            self.handles = [NOT_OPENED] * len(self.handles)
        self.known = [Known(known.namespace) for known in self.known]
        if self.policy is not None:
            self.eviction = self._evicting(self.policy)
        return None, Rows(np.zeros(len(self.handles), np.int64))

    def prepare(self, lengths: Sequence[int]) -> tuple[None, Rows]:
        """The next forward passes bring `lengths` real tokens per row, then padding."""
        if len(lengths) != len(self.handles):
            raise ValueError(f"[prepare] {len(lengths)} lengths, the cache has {len(self.handles)} sequences")
        return None, Rows(self.rows.lens, np.array(lengths, np.int64), self.rows.gone)

    def finalize(self) -> tuple[None, Rows]:
        """The padded input is through."""
        return None, Rows(self.rows.lens, gone=self.rows.gone)

    def commit(self, tokens: Sequence[int]) -> int:
        """Give the prefix cache the tokens of the only sequence; returns how many it had not known.

        None where tokens were evicted: what is left is the cache of no prompt.
        """
        self.require_idle("commit")
        if self.rows.gone[0]:
            return 0
        (known,) = self.known
        length = int(self.rows.lens[0])
        if known.num_tokens < length:
            with self.passes.lock:
                self.passes.pool.prefix.commit(self.handles[0], tokens[known.num_tokens : length])
                self.known = [Known(known.namespace, length)]
        return length - known.num_tokens

    def _close(self, handles: Sequence[int]) -> None:
        opened = [handle for handle in handles if handle != NOT_OPENED]
        if opened:
            with self.passes.lock:
                self.passes.pool.close(opened)


def _power_of_two(n: int) -> int:
    """The least power of two >= n."""
    return 1 << max(0, n - 1).bit_length()
