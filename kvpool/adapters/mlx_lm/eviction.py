"""Eviction in a batch: rows that come and go, and tokens that leave before a forward pass."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from kvpool.adapters.mlx_lm.hook import Hook
from kvpool.adapters.mlx_lm.passes import Passes
from kvpool.eviction import Evictor, Policy, check_backend


def make_cache(model: Any, eviction: Policy | None = None, **quantization: int | None) -> list[Any]:
    """An empty cache of a model inside ``with install(model, ...)``, one `PagedKVCache` per layer.

    Parameters
    ----------
    model
    eviction : kvpool.eviction.Policy, optional
        By which its tokens leave; by default that of `install`.
    kv_bits, k_bits, v_bits, quant_group_size : int, optional
        Those of `install`, by default: all caches of a model are in the same blocks.

    Raises
    ------
    RuntimeError
        The model is not installed now.
    TypeError, ValueError
        See `check_policy`; bits that the blocks do not have.
    """
    hook = vars(model).get("make_cache")
    if not isinstance(hook, Hook):
        raise RuntimeError("[make_cache] the model has no paged cache here: with install(model, ...)")
    return hook.installed[-1].make_cache(eviction, **quantization)


def check_policy(policy: Any, passes: Passes, route: str, call: str = "make_cache") -> Policy | None:
    """`policy`, if the caches of a model can follow it; `route` is that of `PagedKV`, for the refusal.

    Raises
    ------
    TypeError, ValueError
        No policy; one that needs scores on a route or a backend without, or moves tokens where nothing can, or smaller
        blocks.
    """
    if policy is None:
        return None
    if not isinstance(policy, Policy):
        raise TypeError(f"[{call}] eviction must be a policy of kvpool.eviction, not {type(policy).__name__}")
    check_backend(policy, passes.backend.capabilities, passes.backend.spec.block_size)
    if policy.scores is not None and not passes.sites:
        raise ValueError(f"[{call}] {type(policy).__name__} needs scores, and this model's route is {route}")
    return policy


def blocks_at_most(policy: Policy, tokens: int, chunk: int, block_size: int) -> int:
    """Blocks that a sequence which comes to so many tokens holds at any time, in passes of `chunk` tokens at most.

    What it holds when an eviction begins, beside the copies of all that will be rewritten (somebody may share it, or
    the prefix cache know it), and one more: a copy of its tail.
    """
    held = min(tokens, policy.most + chunk)
    copies = policy.most if tokens > policy.max_kv and not policy.whole_blocks else 0
    return 1 - (-held // block_size) - (-copies // block_size)


class Eviction(Evictor):
    """What belongs to one `Batch`: the policy, what it knows, and what the last pass has seen."""

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

    # ------------------------------------------------------------------------------------------- a pass

    def begin_pass(self, lens: np.ndarray, new: np.ndarray) -> None:
        """A pass begins, after which rows have `lens` tokens, `new` of them from it."""
        self.begin(np.where(new > 0, np.arange(len(lens)), -1), lens, new)

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
        self.evict([handles[row] for row in rows.tolist()], rows, lens[rows], after[rows], (lens + gone)[rows])
        return after, gone + lens - after
