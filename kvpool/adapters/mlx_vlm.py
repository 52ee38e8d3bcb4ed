"""mlx-vlm's automatic prefix caching on a `PromptCache`: ``install(PromptCache(8 << 30))``. docs/prompt-cache.md.

mlx-vlm asks one object for prefixes, its coordinator, and hands it a manager. `Coordinator` and `Manager` take their
places. What a model needs is mlx-vlm's as before: the plan of its caches, its batches, its rules for images.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Iterable, Sequence
from typing import Any

import mlx.core as mx
from mlx_vlm import apc, apc_coordinator
from mlx_vlm.models.cache import KVCache

import kvpool
from kvpool.adapters.prompt_cache import PromptCache

_MAX_LOOKUPS = 1024  # prompts whose namespace is remembered until their checkpoints are asked for


class Manager:
    """What mlx-vlm calls a manager: the prompts of a process, and counters."""

    def __init__(self, prompts: PromptCache) -> None:
        self.prompts = prompts
        self.exact_cache_guard_tokens = 1  # tokens at the end of a prompt that no checkpoint has
        self.lock = threading.RLock()
        self.stats = apc.APCStats()
        self.memory_plan = apc_coordinator.PrefillMemoryPlan()  # of no prompt: nothing is reserved

    def coordinator(self, model: Any) -> Coordinator:
        """Return a coordinator for a model."""
        return Coordinator(self, model)

    def lookup_exact_cache(
        self,
        token_ids: Sequence[int],
        extra_hash: int = 0,
        max_prefix_tokens: int | None = None,
        min_prefix_tokens: int = 0,
    ) -> tuple[list[Any] | None, int]:
        """Return caches with the longest known prefix that is longer than `min_prefix_tokens`, and its length."""
        known = token_ids if max_prefix_tokens is None else token_ids[: max_prefix_tokens + 1]
        caches, length = self.prompts.fetch(known, _namespace(extra_hash))
        if length <= min_prefix_tokens:
            caches, length = None, 0
        with self.lock:
            self.stats.hits += length > 0
            self.stats.exact_hits += length > 0
            self.stats.misses += length == 0
            self.stats.matched_tokens += length
        return caches, length

    def store_exact_cache(self, token_ids: Sequence[int], prompt_cache: Sequence[Any], extra_hash: int = 0) -> bool:
        """Insert caches of one sequence. False: nothing of them is kept."""
        is_kept = self.prompts.insert(token_ids, prompt_cache, _namespace(extra_hash))
        with self.lock:
            self.stats.stores += is_kept
            self.stats.exact_stores += is_kept
            self.stats.memory_skips += not is_kept
            self.stats.stored_tokens += len(token_ids) * is_kept
        return is_kept

    def store_kv_blocks(
        self,
        token_ids: Sequence[int],
        layer_keys: Sequence[mx.array],
        layer_values: Sequence[mx.array],
        *,
        extra_hash: int = 0,
        skip_first_n_tokens: int = 0,
    ) -> list[Any]:
        """Insert keys and values of one sequence, layer by layer. Return no blocks: none has to be released."""
        row = [KVCache() for _ in layer_keys]
        for cache, keys, values in zip(row, layer_keys, layer_values, strict=True):
            cache.keys, cache.values, cache.offset = keys, values, keys.shape[2]
        self.store_exact_cache(token_ids, row, extra_hash)
        return []

    def release(self, blocks: Iterable[Any] = ()) -> None:
        """Do nothing: a hit holds no blocks, and who made the store of the prompts closes it."""

    close = release

    def stats_snapshot(self) -> dict[str, Any]:
        """Return the counters, as mlx-vlm's server shows them."""
        with self.lock:
            snapshot: dict[str, Any] = self.stats.snapshot(0, 1)
        return snapshot | {"resident_bytes": self.prompts.nbytes, "memory_max_bytes": self.prompts.max_bytes}

    def clear(self) -> None:
        """Forget all prompts, and set the counters to 0. A store keeps its own."""
        self.prompts.trim_to(n_sequences=0, n_bytes=0)
        with self.lock:
            self.stats = apc.APCStats()


class Coordinator(apc_coordinator.APCCoordinator):
    """mlx-vlm's `APCCoordinator` on a `Manager`. Any prefix of a dense model is found, not whole blocks alone."""

    manager: Manager

    def __init__(self, manager: Manager, model: Any) -> None:
        super().__init__(manager, model)
        self._lookups: OrderedDict[int, tuple[bytes, int]] = OrderedDict()

    def prepare_prefill(self, *arguments: Any, **options: Any) -> None:
        """Do nothing: the budget of the prompts holds at all times."""

    observe_cache = prepare_prefill

    def lookup(self, token_ids: Sequence[int], *, extra_hash: int, **rules: Any) -> dict[str, Any] | None:
        """Return the longest known prefix of a prompt that has all its media. `extra_hash` says what these are."""
        if not self.enabled:
            return None
        hit = apc.apc_lookup_plan(self.manager, token_ids, extra_hash=extra_hash, apc_mode="exact", **rules)
        with self.manager.lock:
            self._lookups[_key(token_ids)] = _namespace(extra_hash), hit["prefix_len"] if hit else 0
            if len(self._lookups) > _MAX_LOOKUPS:
                self._lookups.popitem(last=False)
        return hit and {**hit, "cache_plan": self.plan}

    def checkpoint_lengths(self, token_ids: Sequence[int], media_token_ids: set[int]) -> list[int]:
        """Return where to store a checkpoint: where `PromptCache.wanted` says, and before the last tokens."""
        final = self.checkpoint_len(token_ids, media_token_ids)
        if final <= 0:
            return []
        with self.manager.lock:
            namespace, known = self._lookups.pop(_key(token_ids), (_namespace(0), 0))
        places = self.manager.prompts.wanted(token_ids, known, namespace=namespace)
        safe = (
            apc.adjust_prefix_to_text_suffix_boundary(token_ids, place, media_token_ids, max_prefix_tokens=final)
            for place in places
        )
        return sorted({final, *(place for place in safe if 0 < place <= final)})

    def materialize_single(
        self, hit: dict[str, Any], *, min_capacity_tokens: int, kv_quant_config: dict[str, Any] | None = None
    ) -> list[Any]:
        """Return the caches of a hit, quantized as the request wants them."""
        if kv_quant_config is not None and not self.is_checkpoint:
            keys, values = zip(*map(apc.layer_kv_for_apc, hit["warm_cache"]), strict=True)
            caches = apc.make_warm_kv_cache_from_layers(keys, values, hit["prefix_len"], kv_quant_config)
            hit = {**hit, "warm_cache": caches}
        found: list[Any] = super().materialize_single(hit, min_capacity_tokens=min_capacity_tokens)
        return found

    def store_checkpoint(
        self,
        token_ids: Sequence[int],
        prompt_cache: Sequence[Any],
        *,
        extra_hash: int = 0,
        batch_idx: int | None = None,
    ) -> bool:
        """Insert the caches of a model that has states or windows, at the end of these tokens."""
        if not self.enabled or not self.is_checkpoint:
            return False
        row = apc.snapshot_prompt_cache_row(prompt_cache, batch_idx or 0, clone=False)
        return row is not None and self.manager.store_exact_cache(token_ids, row, extra_hash)


def install(prompts: PromptCache) -> Manager:
    """Make mlx-vlm's server and its generation keep their prefixes in `prompts`.

    Call it before the server loads a model. The server's own limits for prefixes (``APC_*``) have no effect then.
    Generation without the server takes the manager that is returned, as ``apc_manager=``.
    """
    manager, own = Manager(prompts), apc_coordinator.APCCoordinator

    def coordinator(given: Any, model: Any) -> Any:
        return given.coordinator(model) if isinstance(given, Manager) else own(given, model)

    apc.APCCoordinator = apc_coordinator.APCCoordinator = coordinator
    apc.from_env = lambda *arguments, **options: manager
    return manager


def _namespace(extra_hash: int) -> bytes:
    return kvpool.namespace(mlx_vlm=str(extra_hash))


def _key(token_ids: Sequence[int]) -> int:
    return hash(tuple(token_ids))
