"""`PagedPromptCache`: mlx-lm's `LRUPromptCache` on blocks that requests share."""

from __future__ import annotations

from collections.abc import Hashable, Sequence

from mlx_lm.models.cache import trim_prompt_cache

import kvpool
from kvpool.adapters.mlx_lm.cache import PagedKVCache
from kvpool.adapters.mlx_lm.host import PagedKV

MAX_TOKEN = 2**31 - 1


class PagedPromptCache:
    """The interface of mlx-lm's `LRUPromptCache`, for ``mlx_lm.server`` and programs like it.

        with install(model, num_blocks=4096, prefix_cache=True) as kv:
            prompts = PagedPromptCache(kv)
            cache, rest = prompts.fetch_nearest_cache("model", prompt)
            (uid,) = generator.insert([rest], caches=[cache], all_tokens=[prompt[: len(prompt) - len(rest)]])
            ...
            prompts.insert_cache("model", response.all_tokens, response.prompt_cache)

    mlx-lm's keeps whole caches and deep-copies one for every hit. Here an insertion commits blocks and keeps
    no cache, a hit shares the blocks of the longest prefix that is still there, wherever prompts part, and
    what is stored lives in the pool's free blocks: the least recently used one is given up when a sequence
    needs it, the end of a prompt before its beginning. So nothing has to be sized or trimmed.

    Parameters
    ----------
    kv : PagedKV
        Made by ``install(..., prefix_cache=True)``.
    draft : PagedKV, optional
        Of the draft model, for speculative decoding: caches then hold the layers of both, as mlx-lm wants.

    Notes
    -----
    Differences to mlx-lm's class. Hits end at a block boundary, and one token at least is left to compute.
    A miss gives an empty cache, not None. `cache_type` is accepted and not needed: what is asked for again
    stays. Sizes count blocks, not sequences, and only those that no running sequence uses.

    The weights are taken to stay as they are. After they changed, an adapter loaded into the model for
    instance, use another `model` key or ``kv.pool.prefix.flush()``.
    """

    def __init__(self, kv: PagedKV, draft: PagedKV | None = None) -> None:
        self._kvs = [kv] if draft is None else [kv, draft]
        self._keys: dict[Hashable, bytes] = {}
        self._images: dict[int, int] = {}

    # -------------------------------------------------------------------------------------- fetch and insert

    def fetch_nearest_cache(self, model: Hashable, tokens: Sequence[int]) -> tuple[list[PagedKVCache], Sequence[int]]:
        """The longest stored prefix of a prompt, as a cache to go on from, and the tokens to feed it.

        Parameters
        ----------
        model : hashable
            Requests with equal keys share what they store, others never do.
        tokens : sequence of int
            The whole prompt. Negative numbers stand for the tokens of an image, as in mlx-lm's server; a hit
            never ends inside one.
        """
        found = [kv.fetch(self._tokens(tokens), self._namespace(model)) for kv in self._kvs]
        num_cached = _outside_images(tokens, min(n for _, n in found))
        for caches, n in found:
            if n > num_cached:
                trim_prompt_cache(caches, n - num_cached)
        return [cache for caches, _ in found for cache in caches], tokens[num_cached:]

    def insert_cache(
        self,
        model: Hashable,
        tokens: Sequence[int],
        prompt_cache: Sequence[PagedKVCache],
        *,
        cache_type: str = "assistant",
    ) -> None:
        """Store what a cache holds; the cache itself is not kept.

        Parameters
        ----------
        model, cache_type
            The key it was fetched with; the type changes nothing.
        tokens : sequence of int
            What it was fed, the part that was cached included.
        prompt_cache : list of PagedKVCache
            Of one sequence; see `PagedKV.commit` for what is refused.
        """
        layers = sum(kv.num_layers for kv in self._kvs)
        if len(prompt_cache) != layers:
            raise ValueError(f"[insert_cache] {len(prompt_cache)} caches, {layers} layers in {len(self._kvs)} models")
        start = 0
        for kv in self._kvs:
            caches = prompt_cache[start : start + kv.num_layers]
            kv.commit(caches, self._tokens(tokens), self._namespace(model))
            start += kv.num_layers

    # ------------------------------------------------------------------------------------------------- sizes

    def __len__(self) -> int:
        """Blocks that are kept for later requests only."""
        return self._sizes("evictable")["n_sequences"]

    def __bool__(self) -> bool:
        """True, empty or not."""
        return True

    @property
    def nbytes(self) -> int:
        """Bytes of these blocks. They are part of the pool: a request that needs them takes them."""
        return self._sizes("evictable")["n_bytes"]

    def trim_to(self, *, n_sequences: int | None = None, n_bytes: int | None = None) -> None:
        """Give up blocks, least recently used first, until no more than so many blocks or bytes are kept."""
        for kv in self._kvs:
            excess = [0]
            if n_sequences is not None:
                excess.append(len(self) - max(0, n_sequences))
            if n_bytes is not None:
                excess.append(-(-(self.nbytes - max(0, n_bytes)) // kv.backend.spec.block_nbytes))
            with kv.lock:
                kv.pool.blocks.evict(max(excess))

    def stats_by_type(self) -> dict[str, dict[str, int]]:
        """Blocks and their bytes: those kept for later requests, and those that caches hold now."""
        return {"kept": self._sizes("evictable"), "running": self._sizes("used")}

    # --------------------------------------------------------------------------------------------- internals

    def _sizes(self, place: str) -> dict[str, int]:
        counts = []
        for kv in self._kvs:
            with kv.lock:
                counts.append((getattr(kv.pool.stats(), place), kv.backend.spec.block_nbytes))
        return {"n_sequences": sum(n for n, _ in counts), "n_bytes": sum(n * nbytes for n, nbytes in counts)}

    def _namespace(self, model: Hashable) -> bytes:
        """A namespace per key. Keys are told apart as a dict does it, so any hashable will do."""
        if model not in self._keys:
            self._keys[model] = kvpool.namespace(key=str(len(self._keys)))
        return self._keys[model]

    def _tokens(self, tokens: Sequence[int]) -> Sequence[int]:
        """Tokens as the pool takes them: ids of images become numbers that no vocabulary reaches."""
        if min(tokens, default=0) >= 0:
            return tokens
        return [
            token if token >= 0 else MAX_TOKEN - self._images.setdefault(token, len(self._images)) for token in tokens
        ]


def _outside_images(tokens: Sequence[int], end: int) -> int:
    """The largest n <= `end` where ``tokens[:n]`` holds every image whole or not at all."""
    while 0 < end < len(tokens) and tokens[end] < 0 and tokens[end] == tokens[end - 1]:
        end -= 1
    return end
