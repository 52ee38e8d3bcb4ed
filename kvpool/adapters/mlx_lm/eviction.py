"""Token eviction in a batch: its rows change, and tokens leave before a forward pass."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Self

import numpy as np

from kvpool.adapters.mlx_lm.hooks import Hook
from kvpool.adapters.mlx_lm.passes import Passes
from kvpool.eviction import Evictor, Policy, SlidingWindow, check_backend


def make_cache(model: Any, eviction: Policy | None = None, **quantization: int | None) -> list[Any]:
    """Return an empty cache of a model inside ``with install(model, ...)``, one `PagedKVCache` per layer.

    Parameters
    ----------
    model
    eviction : kvpool.eviction.Policy, optional
        Selects the tokens to evict. Default: the policy of `install`.
    kv_bits, k_bits, v_bits, quant_group_size : int, optional
        Must be those of `install`: all caches of a model share the blocks.

    Raises
    ------
    RuntimeError
        The model is not installed now.
    TypeError, ValueError
        Not a policy, one that the model or its backend cannot follow, or bits that the blocks do not have.
    """
    hook = vars(model).get("make_cache")
    if not isinstance(hook, Hook):
        raise RuntimeError("[make_cache] the model has no paged cache here: call it inside `with install(model, ...)`")
    return hook.installed[-1].make_cache(eviction, **quantization)


def check_policy(policy: Any, passes: Passes, route: str, call: str = "make_cache") -> Policy | None:
    """Return `policy` if the caches of a model can follow it. `route` is `PagedKV.route`, for error messages."""
    if policy is None:
        return None
    if not isinstance(policy, Policy):
        hint = ": a window belongs to the pool, give it to install" if isinstance(policy, SlidingWindow) else ""
        raise TypeError(f"[{call}] eviction must be a kvpool.eviction.Policy, not {type(policy).__name__}{hint}")
    layout = passes.layout
    backend = passes.backends[layout.evicting(call, policy).storage]
    check_backend(policy, backend.capabilities, backend.spec.block_size)
    why = f"and this model's route is {route}" if not passes.sites else ""
    why = "chunks of this model's latent attention give none" if layout.has_latents else why
    why = "rows of this model run apart" if layout.held or layout.is_apart else why
    if why:
        raise ValueError(f"[{call}] {type(policy).__name__} needs scores, {why}; SlidingWindow needs none")
    return policy


class Eviction(Evictor):
    """The eviction state of one `Batch`: the policy, its memory, and the scores of the last pass."""

    is_torn = False  # an eviction failed half-way: what its rows hold cannot be read any more

    @classmethod
    def of(cls, policy: Policy | None, passes: Passes, num_rows: int = 0) -> Self | None:
        """Return the state of `num_rows` sequences under a policy that `check_policy` has returned."""
        if policy is None:
            return None
        place = passes.layout.evicting("make_cache", policy)
        return cls(policy, passes.pool, passes.backends[place.storage], num_rows, place.group)

    # ------------------------------------------------------------------------------------------- rows

    def append(self, other: Eviction, indices: Sequence[int]) -> None:
        """Append rows of another batch with the same policy."""
        self.settle()
        other.settle()
        self.memory.append(other.memory, indices)

    def keep_rows(self, rows: Sequence[int]) -> None:
        """Keep only these rows."""
        self.settle()
        self.memory.keep_rows(rows)

    def truncate(self, held: np.ndarray) -> None:
        """The pool has shortened the rows, which hold so many tokens now."""
        self.settle()
        self.memory.truncate(held)

    # ------------------------------------------------------------------------------------------- a pass

    def begin_pass(self, plan: Any, rows: np.ndarray, new: np.ndarray) -> None:
        """Begin a pass that adds `new` tokens to each row of a plan."""
        held = np.array(plan.groups[self.group].kv_lens[: len(new)], np.int64)
        self.begin(np.where(new > 0, rows, -1), held, new)

    def run(self, handles: Sequence[int], lens: np.ndarray, gone: np.ndarray) -> np.ndarray:
        """Evict tokens of `Rows` above their budget, before a pass. Return how many each has lost, int64 ``[B]``.

        OutOfBlocks: there are no blocks for copies of shared ones, and nothing has changed.
        """
        self.settle()
        held = lens - gone
        after = self.lens_after(held)
        rows = np.flatnonzero(after < held)
        if not rows.size:
            return gone
        above = [handles[row] for row in rows.tolist()]
        try:
            self.evict(above, rows, after[rows])
        except BaseException:
            left = [self.pool.kv_len(handle, self.group) for handle in above]
            self.is_torn = left != held[rows].tolist()
            raise
        return lens - after
