"""Eviction in a batch: scores as the layers see them, and tokens that leave before a forward pass.

What one pass has seen is kept as it is until the next one begins, so nothing waits for it, and a pass that is taken
back leaves no trace.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import mlx.core as mx
import numpy as np

import kvpool
from kvpool.adapters.mlx_lm.hook import Hook
from kvpool.eviction import Memory, Policy, check_backend


def make_cache(model: Any, eviction: Policy | None = None) -> list[Any]:
    """An empty cache of a model inside ``with install(model, ...)``, one `PagedKVCache` per layer.

    Parameters
    ----------
    model
    eviction : kvpool.eviction.Policy, optional
        By which its tokens leave; by default that of `install`.

    Raises
    ------
    RuntimeError
        The model is not installed now.
    TypeError, ValueError
        See `check_policy`.
    """
    hook = vars(model).get("make_cache")
    if not isinstance(hook, Hook):
        raise RuntimeError("[make_cache] the model has no paged cache here: with install(model, ...)")
    return hook.installed[-1].make_cache(eviction)


def check_policy(policy: Any, kv: Any) -> Policy | None:
    """`policy`, if the caches of `kv` can follow it.

    Raises
    ------
    TypeError, ValueError
        No policy; one that needs scores on a route or a backend without, or moves tokens where nothing can.
    """
    if policy is None:
        return None
    if not isinstance(policy, Policy):
        raise TypeError(f"[make_cache] eviction must be a policy of kvpool.eviction, not {type(policy).__name__}")
    check_backend(policy, kv.backend.capabilities())
    if policy.scores is not None and not kv.sites:
        raise ValueError(f"[make_cache] {type(policy).__name__} needs scores, and this model's route is {kv.route}")
    return policy


class Eviction:
    """What belongs to one `Batch`: the policy, what it knows, and what the last pass has seen.

    Parameters
    ----------
    kv : PagedKV
    policy : Policy
    num_rows : int
    """

    def __init__(self, kv: Any, policy: Policy, num_rows: int) -> None:
        spec = kv.backend.spec
        self.kv = kv
        self.policy = policy
        self.memory = Memory(policy, spec.num_layers, spec.num_kv_heads, spec.block_size, num_rows)
        self._staged: list[mx.array | None] = [None] * spec.num_layers
        self._step: tuple[np.ndarray, np.ndarray] | None = None  # lengths after the pass, rows with tokens in it
        self._plan: Any = None

    # ------------------------------------------------------------------------------------------- rows

    def append(self, other: Eviction | None, indices: Sequence[int]) -> None:
        """Rows of another batch come after those here."""
        self.settle()
        if other is None or other.policy != self.policy:
            raise ValueError("[extend] caches that evict by another policy cannot be in one batch")
        other.settle()
        self.memory.append(other.memory, indices)

    def keep_rows(self, rows: Sequence[int]) -> None:
        """Only these rows stay."""
        self.settle()
        self.memory.keep_rows(rows)

    def truncate(self, lens: np.ndarray) -> None:
        """Rows lost their ends."""
        self.settle()
        self.memory.truncate(lens)

    # ------------------------------------------------------------------------------------------- scores

    def begin(self, lens: np.ndarray, new: np.ndarray) -> None:
        """A pass begins, after which rows have `lens` tokens, `new` of them from it."""
        self._step = lens, new > 0

    def observe(self, layer: int, scores: mx.array) -> None:
        """A layer has seen ``[B, Hk, C]``."""
        self._staged[layer] = scores

    def forget(self) -> None:
        """The pass was taken back."""
        self._step = None
        self._staged = [None] * len(self._staged)

    def settle(self) -> None:
        """Take over what the last pass has seen."""
        step, staged = self._step, self._staged
        self.forget()
        if step is None or all(scores is None for scores in staged):
            return
        shape = next(scores.shape for scores in staged if scores is not None)
        found = np.zeros((len(staged), *shape), np.float32)
        for layer, scores in enumerate(staged):
            if scores is not None:
                found[layer] = scores
        self.memory.observe(found, *step)

    # ------------------------------------------------------------------------------------------- eviction

    def lens_after(self, lens: np.ndarray) -> np.ndarray:
        """Lengths that rows of `lens` tokens have when the next pass begins."""
        return self.policy.lens_after(lens, self.memory.block_size)

    def run(self, handles: Sequence[int], lens: np.ndarray, gone: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Before a pass: let tokens leave where there is no room; returns lengths, and how many have left, per row.

        Raises
        ------
        OutOfBlocks
            No blocks for copies of shared ones. Nothing has changed.
        """
        self.settle()
        after = self.lens_after(lens)
        rows = np.flatnonzero(after < lens)
        if not rows.size:
            return lens, gone
        move = self._evict_blocks if self.policy.whole_blocks else self._compact
        move([handles[row] for row in rows.tolist()], rows, lens, after, lens + gone)
        return after, gone + lens - after

    def _evict_blocks(
        self, handles: list[int], rows: np.ndarray, lens: np.ndarray, after: np.ndarray, logical: np.ndarray
    ) -> None:
        for handle, row in zip(handles, rows.tolist(), strict=True):
            blocks = self.memory.select(row, int(lens[row]), int(after[row]))
            self.kv.pool.evict_blocks(handle, blocks)
            self.memory.evicted(row, int(lens[row]), blocks, int(logical[row]))

    def _compact(
        self, handles: list[int], rows: np.ndarray, lens: np.ndarray, after: np.ndarray, logical: np.ndarray
    ) -> None:
        pool, backend, sink = self.kv.pool, self.kv.backend, self.policy.sink
        self._unshare(handles, after[rows], sink)
        tables = [pool.table(handle) for handle in handles]
        pool.compact(handles, after[rows], sink)
        for table, row in zip(tables, rows.tolist(), strict=True):
            n = int(lens[row])
            keep = self.memory.select(row, n, int(after[row]))
            backend.compact(table[: -(-n // self.memory.block_size)], keep)
            self.memory.evicted(row, n, keep, int(logical[row]))

    def _unshare(self, handles: list[int], lens: np.ndarray, sink: int) -> None:
        """Blocks of their own for rows that share what will be rewritten."""
        pool = self.kv.pool
        width = max(-(-pool.capacity(handle) // pool.block_size) for handle in handles)
        plan = self._plan
        if plan is None or plan.max_rows < len(handles) or plan.table_width < width:
            width = min(2 * width, pool.max_blocks_per_seq)
            self._plan = plan = kvpool.Plan(pool, 2 * len(handles), formats=(), table_width=width)
        pool.unshare(plan, handles, lens, sink)
        try:
            if plan.num_copies:
                self.kv.backend.copy_blocks(plan.copies)
        except BaseException:
            if plan.is_pending:
                pool.rollback(plan)
            raise
        if plan.is_pending:
            pool.done(plan)
