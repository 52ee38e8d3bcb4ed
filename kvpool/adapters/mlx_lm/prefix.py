"""`PagedPromptCache`: mlx-lm's `LRUPromptCache` on blocks that requests share."""

from __future__ import annotations

from collections.abc import Hashable, Sequence

from mlx_lm.models.cache import can_trim_prompt_cache, trim_prompt_cache

import kvpool
from kvpool.adapters.mlx_lm.cache import PagedKVCache
from kvpool.adapters.mlx_lm.host import PagedKV
from kvpool.adapters.mlx_lm.shapes import leaves_of

MAX_TOKEN = 2**31 - 1


class PagedPromptCache:
    """The interface of mlx-lm's `LRUPromptCache`, for ``mlx_lm.server`` and programs like it.

        with install(model, num_blocks=4096, prefix_cache=True) as kv:
            prompts = PagedPromptCache(kv)
            cache, rest = prompts.fetch_nearest_cache("model", prompt)
            (uid,) = generator.insert([rest], caches=[cache], all_tokens=[prompt[: len(prompt) - len(rest)]])
            ...
            prompts.insert_cache("model", response.all_tokens, response.prompt_cache)

    mlx-lm's class keeps whole caches and deep-copies one for every hit. Here an insertion commits blocks and keeps no
    cache. A hit shares the blocks of the longest stored prefix, wherever two prompts part. Stored blocks are free ones
    of the pool: when a sequence needs one, the least recently used is evicted, the end of a prompt before its
    beginning. So the cache needs no size and no trimming.

    Parameters
    ----------
    kv : PagedKV
        Made by ``install(..., prefix_cache=True)``. If its pool has no prefix cache, nothing is found.
    draft : PagedKV, optional
        For the draft model of speculative decoding. Caches then hold the layers of both models, as mlx-lm expects.

    Notes
    -----
    Differences to mlx-lm's class: Hits end at a block boundary and leave at least one token to compute. A miss gives an
    empty cache, not None. `cache_type` is ignored, because blocks that are used again stay. Sizes count blocks, not
    sequences, and only blocks that no running sequence uses.

    Stored blocks belong to the weights that computed them. If the weights change, for instance by an adapter, use
    another `model` key or ``kv.pool.prefix.flush()``.
    """

    def __init__(self, kv: PagedKV, draft: PagedKV | None = None) -> None:
        self._kvs = [kv] if draft is None else [kv, draft]
        self._keys: dict[Hashable, bytes] = {}
        self._images: dict[int, int] = {}

    # -------------------------------------------------------------------------------------- fetch and insert

    def fetch_nearest_cache(
        self, model: Hashable, tokens: Sequence[int], *, cut: int | None = None
    ) -> tuple[list[PagedKVCache], Sequence[int]]:
        """Return a cache with the longest stored prefix of a prompt, and the tokens to feed it.

        Parameters
        ----------
        model : hashable
            Only requests with equal keys share blocks.
        tokens : sequence of int
            The whole prompt. Negative numbers stand for the tokens of an image, as in mlx-lm's server. A hit never ends
            inside an image.
        cut : int, optional
            See `PagedKV.fetch`.
        """
        known = self._tokens(tokens)
        cut = cut if known is tokens else 0  # what is fed for an image says nothing about it, so nothing can be kept
        end = len(tokens)
        found = [self._found(kv, model, known, cut) for kv in self._kvs]
        while any(n != end for _, n in found):
            end = _outside_images(tokens, min(n for _, n in found))
            found = [self._shortened(kv, model, known, one, end) for kv, one in zip(self._kvs, found, strict=True)]
        return [cache for caches, _ in found for cache in caches], tokens[end:]

    def _found(
        self, kv: PagedKV, model: Hashable, tokens: Sequence[int], cut: int | None
    ) -> tuple[list[PagedKVCache], int]:
        return kv.fetch(tokens, self._namespace(model), cut) if kv.prefix_cache else (kv.make_cache(), 0)

    def _shortened(
        self, kv: PagedKV, model: Hashable, tokens: Sequence[int], found: tuple[list[PagedKVCache], int], end: int
    ) -> tuple[list[PagedKVCache], int]:
        """Return the cache of a model with at most `end` tokens."""
        caches, n = found
        if n <= end:
            return found
        if not can_trim_prompt_cache(caches):  # nobody takes back tokens behind a window, or a state
            return self._found(kv, model, tokens[: end + 1], 0)
        trim_prompt_cache(caches, n - end)
        return caches, end

    def insert_cache(
        self,
        model: Hashable,
        tokens: Sequence[int],
        prompt_cache: Sequence[PagedKVCache],
        *,
        cache_type: str = "assistant",
    ) -> None:
        """Store the content of a cache. The cache itself is not kept.

        Parameters
        ----------
        model, cache_type
            The key with which it was fetched. The type is ignored.
        tokens : sequence of int
            All tokens of the cache, the cached part included.
        prompt_cache : list of PagedKVCache
            One sequence. `PagedKV.commit` lists what is refused.
        """
        leaves = list(leaves_of(prompt_cache))
        layers = sum(kv.num_layers for kv in self._kvs)
        if len(leaves) != layers:
            raise ValueError(f"[insert_cache] {len(leaves)} caches, {layers} layers in {len(self._kvs)} models")
        start = 0
        for kv in self._kvs:
            if kv.prefix_cache:
                kv.commit(leaves[start : start + kv.num_layers], self._tokens(tokens), self._namespace(model))
            start += kv.num_layers

    # ------------------------------------------------------------------------------------------------- sizes

    def __len__(self) -> int:
        """Number of blocks that only later requests may use."""
        return self._sizes("evictable")["n_sequences"]

    def __bool__(self) -> bool:
        """True, empty or not."""
        return True

    @property
    def nbytes(self) -> int:
        """Bytes of these blocks. They are part of the pool, and a request that needs them takes them."""
        return self._sizes("evictable")["n_bytes"]

    def trim_to(self, *, n_sequences: int | None = None, n_bytes: int | None = None) -> None:
        """Evict blocks, least recently used first, until at most `n_sequences` blocks or `n_bytes` are kept."""
        for kv in (kv for kv in self._kvs if kv.prefix_cache):
            excess = [0]
            if n_sequences is not None:
                excess.append(len(self) - max(0, n_sequences))
            if n_bytes is not None:
                excess.append(-(-(self.nbytes - max(0, n_bytes)) // kv.layout.block_nbytes[0]))
            with kv.lock:
                kv.pool.blocks.evict(max(excess))

    def stats_by_type(self) -> dict[str, dict[str, int]]:
        """Return blocks and bytes that are kept for later requests, and that caches hold now."""
        return {"kept": self._sizes("evictable"), "running": self._sizes("used")}

    # --------------------------------------------------------------------------------------------- internals

    def _sizes(self, place: str) -> dict[str, int]:
        counts = []
        for kv in self._kvs:
            with kv.lock:
                for arena, nbytes in enumerate(kv.layout.block_nbytes):
                    counts.append((getattr(kv.pool.stats(arena), place), nbytes))
        return {"n_sequences": sum(n for n, _ in counts), "n_bytes": sum(n * nbytes for n, nbytes in counts)}

    def _namespace(self, model: Hashable) -> bytes:
        """Return the namespace of a key. Keys are compared as in a dict, so any hashable works."""
        if model not in self._keys:
            self._keys[model] = kvpool.namespace(key=str(len(self._keys)))
        return self._keys[model]

    def _tokens(self, tokens: Sequence[int]) -> Sequence[int]:
        """Return tokens for the pool: ids of images become numbers beyond any vocabulary."""
        if min(tokens, default=0) >= 0:
            return tokens
        return [
            token if token >= 0 else MAX_TOKEN - self._images.setdefault(token, len(self._images)) for token in tokens
        ]


def _outside_images(tokens: Sequence[int], end: int) -> int:
    """Return the largest n <= `end` for which ``tokens[:n]`` cuts no image."""
    while 0 < end < len(tokens) and tokens[end] < 0 and tokens[end] == tokens[end - 1]:
        end -= 1
    return end
