"""`PagedKVCache`: what a layer of an mlx-lm model sees. It has the methods of mlx-lm's own caches."""

from __future__ import annotations

from collections.abc import Sequence
from operator import index
from typing import Any, NoReturn

import mlx.core as mx
import numpy as np

from kvpool.adapters.mlx_lm.batch import Batch
from kvpool.adapters.mlx_lm.fused import PagedContext, PagedMask, smaller_window
from kvpool.adapters.mlx_lm.rows import Forward, Rows


class _NotSaved:
    """Part of every ``state``: ``mx.eval`` passes over it, ``save_prompt_cache`` stops with its text."""

    def __repr__(self) -> str:
        return "[PagedKVCache] a paged cache cannot be saved, its arrays belong to all caches of the pool"


class PagedKVCache:
    """The cache of one layer: a facade of a `Batch` that all layers share.

    ``make_mask``, ``offset`` and the other properties change nothing, whatever their number and order, and
    ``offset`` moves with this layer's own ``update_and_fetch``: some models build two masks per forward pass,
    some read the offset of another layer. The pool is stepped by the first ``update_and_fetch`` of a pass.

    A sliding-window layer (mlx-lm's RotatingKVCache) keeps all its tokens here, and its window is in the
    mask: the result is the same, and such a cache can always be trimmed.

    No ``__len__`` and no ``__bool__``: mlx-lm tests ``if cache`` and would take an empty cache for none.
    No ``meta_state``, ``keys`` or ``values`` and no setter of ``state``: K and V are in the pool, a cache is saved
    and loaded nowhere.
    """

    def __init__(self, batch: Batch, layer: int) -> None:
        self._batch = batch
        self._layer = layer
        self._cursor = batch.count
        self._rows = batch.rows
        self._forward: Forward | None = None  # the last forward pass, None if something else came after it

    def __repr__(self) -> str:
        return f"PagedKVCache(layer={self._layer}, lengths={self._seen().lens.tolist()})"

    @property
    def batch(self) -> Batch:
        """The sequences behind this layer and all others."""
        return self._batch

    def __getattr__(self, name: str) -> NoReturn:
        # The merge and extend of mlx-lm's own caches look for attributes of theirs in what they are given.
        raise AttributeError(
            f"PagedKVCache has no {name!r}: stock and paged caches cannot be in one batch", name=name, obj=self
        )

    # ------------------------------------------------------------------------------------------ attention

    @property
    def offset(self) -> int | mx.array:
        """Position of the next token: an int, or int32 ``[B]`` for merged caches. Evicted tokens count."""
        rows = self._rows if self._cursor >= self._batch.base else self._batch.base_rows  # `_seen`, twice per layer
        return rows.offsets if self._batch.is_merged else int(rows.lens[0] + rows.gone[0])

    def make_mask(
        self, N: int, return_array: bool = False, window_size: int | None = None
    ) -> mx.array | str | PagedMask | None:
        """The attention mask of the next `N` input columns.

        Returns
        -------
        None, "causal", or bool ``[B or 1, 1, N, C]``
            C is the longest context after the pass. As in mlx-lm the short forms stand for a full mask where
            all rows are equally long.
        PagedMask
            On the fused route, always.
        """
        window = smaller_window(window_size, self._batch.passes.windows[self._layer])
        if self._batch.is_fused:
            return PagedMask(window)
        rows = self._seen()
        eviction, lens = self._batch.eviction, rows.lens
        if eviction is not None:
            lens = eviction.lens_after(lens)  # what `update_and_fetch` will find
        return causal_mask(lens, rows.num_new(N), N, window, return_array)

    def update_and_fetch(
        self, keys: mx.array, values: mx.array
    ) -> tuple[mx.array, mx.array] | tuple[PagedContext, PagedContext]:
        """Store this layer's K ``[B, Hk, N, D]`` and V, return the whole contexts ``[B, Hk, C, D]``.

        On the fused route one `PagedContext` stands for both, and nothing is gathered.

        Raises
        ------
        OutOfBlocks
            From the first layer of a pass; pool and cache are as before.
        CapacityExceeded
            The same, for a sequence that is longer than all blocks together.
        TypeError
            Keys or values have another dtype than the pool: the model was cast after `install`.
        ConcurrentUse
            Another thread is in a forward pass.
        EngineStopped
            A pass failed while these sequences were in an engine, see `PagedKV.recover`; or an eviction half-way.
        """
        batch, passes = self._batch, self._batch.passes
        dtype = passes.dtype
        if keys.dtype != dtype or values.dtype != dtype:
            raise TypeError(
                f"[update_and_fetch] keys are {keys.dtype}, values {values.dtype}, the pool holds {dtype}: install "
                "again, or make the engine again, after a model was cast"
            )
        num_rows, _, num_columns, _ = keys.shape
        shape = num_rows, num_columns
        self._forward = None
        self._cursor, self._rows, forward = batch.issue(self._cursor, "forward", shape, lambda: batch.forward(*shape))
        forward.put(self._layer, keys, values)
        if not batch.missing:
            batch.stored()
        self._forward = forward
        if forward.is_fused:
            context = PagedContext(forward, self._layer, passes.windows[self._layer])
            return context, context
        return self.keys_and_values()

    def keys_and_values(self) -> tuple[mx.array, mx.array]:
        """What the last ``update_and_fetch`` stored and found, for layers that attend to another layer's cache."""
        if self._forward is None or self._cursor != self._batch.count:
            raise RuntimeError("[keys_and_values] no update_and_fetch since the cache was made or changed")
        self._forward.flush()
        contexts: tuple[mx.array, mx.array] = self._batch.passes.backend.read(self._forward.step, self._layer)
        return contexts

    # ------------------------------------------------------------------------------------------- batching

    @classmethod
    def merge(cls, caches: Sequence[PagedKVCache]) -> PagedKVCache:
        """One cache with forks of the sequences of `caches`, which stay as they are."""
        first = caches[0]
        _require_paged("merge", caches)
        batches = [cache._batch for cache in caches]

        def execute() -> tuple[Batch, Rows]:
            for batch in batches:
                batch.require_idle("merge")
            merged = Batch(first._batch.passes, [], [], is_merged=True, policy=first._batch.policy)
            for batch in batches:
                merged.extend(batch)
            return merged, first._batch.rows

        return cls(first._issue("merge", tuple(map(id, batches)), execute), first._layer)

    def extend(self, other: PagedKVCache) -> None:
        """Append forks of the sequences of `other`."""
        _require_paged("extend", [other])
        batch = self._batch
        self._issue("extend", id(other._batch), lambda: batch.extend(other._batch))

    def filter(self, batch_indices: Sequence[int] | mx.array) -> None:
        """Keep these rows, in this order; the others' blocks go back to the pool."""
        keep = self._indices("filter", batch_indices)
        self._issue("filter", keep, lambda: self._batch.filter(keep))

    def extract(self, idx: int) -> PagedKVCache:
        """A cache of its own with a fork of row `idx`."""
        (row,) = self._indices("extract", [idx])
        batch = self._batch
        one = self._issue("extract", row, lambda: (batch.fork([row], is_merged=False), batch.rows))
        return PagedKVCache(one, self._layer)

    def __deepcopy__(self, memo: dict[int, Any]) -> PagedKVCache:
        """A fork. One ``copy.deepcopy`` of the list of all layers makes one fork, through its memo."""
        batch = self._batch
        fork = memo.get(id(batch))
        if fork is None:
            batch.require_idle("deepcopy")
            fork = batch.fork(range(len(batch.handles)), batch.is_merged)
            fork.rows = batch.rows
            memo[id(batch)] = fork
        return PagedKVCache(fork, self._layer)

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
        self._issue("prepare", key, lambda: self._batch.prepare(key))

    def finalize(self) -> None:
        """The padded input is through."""
        self._issue("finalize", (), self._batch.finalize)

    # ----------------------------------------------------------------------------------- length and memory

    def is_trimmable(self) -> bool:
        """Whether every token is still there; tokens that were evicted do not come back."""
        return not self._seen().gone.any()

    def trim(self, n: int) -> int:
        """Drop the last `n` tokens of every row, or as many as there are; returns how many."""
        n = index(n)
        if n < 0:
            raise ValueError(f"[trim] n is {n}, the least is 0")
        return self._issue("trim", n, lambda: self._batch.trim(n))

    def discard(self) -> None:
        """Give back all that the rows hold. Tokens that were evicted do not forbid it, as they forbid `trim`."""
        self._issue("discard", (), self._batch.discard)

    def to_quantized(self, group_size: int = 64, bits: int = 4) -> Any:
        """What mlx-lm calls for its ``kv_bits``: the cache itself, if its blocks are stored like that already.

        Raises
        ------
        ValueError
            They are not. What is stored stays as it is; the bits are those of `install`.
        """
        spec = self._batch.passes.backend.spec
        if spec.bits == (bits, bits) and spec.quant_group_size == group_size:
            return self
        raise ValueError(
            f"[to_quantized] kv_bits={bits} with groups of {group_size}, the blocks hold {spec.storage}: leave kv_bits "
            f"out and let the pool store such bits, install(..., kv_bits={bits}, quant_group_size={group_size})"
        )

    def size(self) -> int:
        """Tokens of the longest row."""
        return int(self._seen().lens.max(initial=0))

    def empty(self) -> bool:
        """Whether no row has a token."""
        return self.size() == 0

    @property
    def nbytes(self) -> int:
        """Bytes of the rows' blocks in this layer. Blocks that rows share count for each of them."""
        spec = self._batch.passes.backend.spec
        blocks = int((-(-self._seen().lens // spec.block_size)).sum())
        return blocks * spec.block_nbytes // spec.num_layers

    @property
    def state(self) -> list[Any]:
        """What ``mx.eval(cache.state)`` needs in order to execute the writes of this layer, if they are lazy.

        It cannot be saved or set, because the pool's arrays belong to all caches of the pool: ``save_prompt_cache``
        raises a ValueError and writes nothing.
        """
        return [*self._batch.passes.backend.queued(self._layer), _NotSaved()]

    # ------------------------------------------------------------------------------------------- internals

    def _seen(self) -> Rows:
        """The batch as of this layer's last operation."""
        return self._rows if self._cursor >= self._batch.base else self._batch.base_rows

    def _issue(self, name: str, key: Any, execute: Any) -> Any:
        self._forward = None
        self._cursor, self._rows, result = self._batch.issue(self._cursor, name, key, execute)
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


def causal_mask(
    lens: np.ndarray, new: np.ndarray, num_columns: int, window: int | None, return_array: bool = False
) -> mx.array | str | None:
    """The mask of a pass that adds `new` tokens ``[B]`` to sequences of `lens` tokens ``[B]``, in mlx-lm's forms.

    None or "causal" where all rows are equally long and no window cuts in, else an array, see `PagedKVCache.make_mask`.
    """
    ends = lens + new
    kv_len = int(ends.max())
    is_even = bool((ends == kv_len).all() and (new == num_columns).all())
    if is_even and (window is None or kv_len <= window):
        if num_columns == 1:
            return None
        if not return_array:
            return "causal"
    different = slice(1) if is_even else slice(None)  # one row stands for all equal ones
    return _mask(lens[different], ends[different], num_columns, kv_len, window)


def _mask(starts: np.ndarray, ends: np.ndarray, num_columns: int, kv_len: int, window: int | None) -> mx.array:
    """Causal mask, bool ``[B, 1, N, C]``: column j of row i sits at position ``starts[i] + j``.

    Padding columns repeat the row's last position: they see something, so nothing becomes NaN.
    """
    last = np.maximum(ends - 1, 0)
    position = np.minimum(starts[:, None] + np.arange(num_columns), last[:, None]).astype(np.int32)
    query, key = mx.array(position)[:, None, :, None], mx.arange(kv_len)
    mask = key <= query
    if window is not None:
        mask = mask & (key > query - window)
    return mask
