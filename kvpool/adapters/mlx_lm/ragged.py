"""One forward pass of an mlx-lm model over the tokens of a plan, whatever mix of chunks and decodes they are.

A model of mlx-lm takes a rectangle of tokens and one cache per layer. On the fused route nothing but attention looks
beyond a token, and attention is the kernels', which know from the plan which token belongs to which sequence. So the T
tokens of a plan go in as T rows of one column, each at a position of its own: no padding, any mix. On the gather route
the rows are sequences, as everywhere in mlx-lm: a plan has one token for each, or one chunk of a single one.

The model is the one that was loaded; of what is around it a pass changes where its attention is found, and puts that
back (`attention_hook`).
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np

from kvpool.adapters.mlx_lm.cache import causal_mask
from kvpool.adapters.mlx_lm.fused import PagedKeys, PagedMask, PagedValues, smaller_window, tokens_of
from kvpool.adapters.mlx_lm.host import PagedKV
from kvpool.adapters.mlx_lm.rows import Forward
from kvpool.protocol import StepArrays


class RaggedForward:
    """Runs the plans of a pool through a model, one at a time.

    Parameters
    ----------
    kv : PagedKV
        From `install`. It need not be entered: a pass does that for itself, and for its own length.

    Attributes
    ----------
    is_ragged : bool
        Whether a pass takes any plan (the fused route).
    eviction : kvpool.eviction.Evictor or None
        Who wants the scores that the layers see; it is told of a pass by `Evictor.begin`.

    Raises
    ------
    ValueError
        `kv` evicts by itself: plans and policy are one caller's business, see `Engine`.
    """

    def __init__(self, kv: PagedKV) -> None:
        if kv.eviction is not None:
            raise ValueError("[RaggedForward] plans keep every token, kv evicts: install without eviction")
        self.kv = kv
        self.eviction: Any = None
        self.is_ragged = bool(kv.passes.sites)

    def __call__(
        self, tokens: np.ndarray, plan: Any, lens: np.ndarray, rows: np.ndarray, evicted: np.ndarray | None = None
    ) -> mx.array:
        """The logits of some tokens of a plan that was stepped, float32 ``[M, V]``.

        Copies, writes and reads of the plan are done when the call returns, though what the head computes from them may
        be left to evaluate; what is the pool's (`done`, `rollback`) is
        the caller's. Whatever the model raises is passed on.

        Parameters
        ----------
        tokens : int32 ``[T]``
            In the order of the plan's rows.
        lens : int64 ``[S]``
            Lengths of the plan's sequences after the step: tokens that have slots.
        rows : int32 ``[M]``
            Which of the T tokens; repetitions are allowed. With none the result is ``[0, V]``, or ``[0, 1]``.
        evicted : int ``[S]``, optional
            How many tokens each sequence has lost: so much are positions ahead of places.

        Raises
        ------
        ValueError
            On the gather route, a plan that is neither decodes only nor one chunk of one sequence.
        """
        kv = self.kv
        new = np.diff(np.asarray(plan.cu_q_lens, np.int64)[: len(lens) + 1])
        shape, starts = self._shape(len(tokens), lens, new)
        with self._hooked():
            step = kv.backend.prepare(plan)
            if len(plan.copies):
                kv.backend.copy_blocks(plan)
            ahead = 0 if evicted is None else evicted if len(starts) == len(lens) else np.repeat(evicted, new)
            forward = Forward(kv.backend, step, plan, shape, eviction=self.eviction)
            one = _Pass(self, forward, starts, starts + ahead)
            try:
                caches = [RaggedCache(one, layer) for layer in range(kv.num_layers)]
                logits = self._logits(mx.array(tokens.reshape(shape)), caches, rows)
                one.store_rest()
                if kv.backend.capabilities.lazy:
                    mx.eval(logits, *(queued for layer in range(kv.num_layers) for queued in kv.backend.queued(layer)))
            finally:
                forward.is_over = True
        return logits

    def _shape(self, num_tokens: int, lens: np.ndarray, new: np.ndarray) -> tuple[tuple[int, int], np.ndarray]:
        """Rows and columns of the model's input, and the place of each row's first token."""
        starts = lens - new
        if self.is_ragged:
            first = np.concatenate([[0], np.cumsum(new)[:-1]]) if len(new) else new
            positions = np.arange(num_tokens) + np.repeat(starts - first, new)
            return (num_tokens, 1), positions
        if len(lens) == 1:
            return (1, num_tokens), starts
        if (new != 1).any():
            raise ValueError(
                f"[forward] the plan has {len(lens)} rows with up to {new.max()} tokens: without kernels for this "
                "model a pass is one token for each, or one row"
            )
        return (num_tokens, 1), starts

    def _logits(self, inputs: mx.array, caches: list[RaggedCache], rows: np.ndarray) -> mx.array:
        """Hidden states of all tokens, and of those asked for the logits."""
        if not len(rows):
            hidden = self.kv.model(inputs, cache=caches)  # built, and never evaluated
            return mx.zeros((0, hidden.shape[-1]), mx.float32)
        model, taken = _with_rows(self.kv.model, mx.array(rows), caches[-1] if len(rows) < inputs.size else None)
        logits = model(inputs, cache=caches)
        logits = logits.reshape(-1, logits.shape[-1])
        if taken is None:
            logits = logits[mx.array(rows)]
        return logits.astype(mx.float32)

    @contextmanager
    def _hooked(self) -> Iterator[None]:
        """The model attends over the pool, inside."""
        with ExitStack() as stack:
            for site in self.kv.passes.sites:
                site.enter()
                stack.callback(site.leave)
            yield


class _Pass:
    """What the layers of one pass share."""

    def __init__(
        self,
        passes: RaggedForward,
        forward: Forward,
        starts: np.ndarray,
        positions: np.ndarray,
    ) -> None:
        self.passes = passes
        self.forward = forward
        self.shape = forward.shape
        self.starts = starts
        self.positions = positions
        self.offsets = mx.array(positions.astype(np.int32))
        self._keys: PagedKeys | None = None

    def keys(self, layer: int, keys: mx.array, values: mx.array) -> PagedKeys:
        """A layer's new keys and values, still to be stored: when its queries are there, see `PagedKeys`."""
        self.store_rest()
        self._keys = PagedKeys(self.forward, layer, self.window(layer), (keys, values))
        return self._keys

    def keys_of(self, layer: int, rows: mx.array) -> PagedKeys:
        """A layer's keys as some tokens of the pass see them: each is a sequence of its own that ends with it."""
        some = StepArrays.of_queries(self.forward.plan, np.array(rows))
        backend = self.forward.backend
        forward = Forward(backend, backend.prepare(some), some, (len(rows), 1), eviction=self.forward.eviction)
        return PagedKeys(forward, layer, self.window(layer))

    def window(self, layer: int) -> int | None:
        return self.passes.kv.passes.windows[layer]

    def store_rest(self) -> None:
        """Store what the last layer has left."""
        if self._keys is not None:
            self._keys.store()


class RaggedCache:
    """The cache of one layer, for one pass. Like `PagedKVCache` to the model, and of no use to mlx-lm's engines.

    No ``__len__`` and no ``__bool__``: mlx-lm tests ``if cache`` and would take an empty cache for none.
    """

    def __init__(self, one: _Pass, layer: int) -> None:
        self._pass = one
        self._layer = layer
        self._is_stored = False
        self._rows: mx.array | None = None  # of the pass, that go through the layer now
        self._is_for_storage = False

    @property
    def splits(self) -> bool:
        """Whether a layer can store all tokens first, and then compute some: `only_store` and `only_rows`.

        Not where scores are wanted: those of the last token of every row, sampled or not.
        """
        passes, eviction = self._pass.passes, self._pass.passes.eviction
        wants_scores = eviction is not None and eviction.policy.scores is not None
        return passes.is_ragged and not passes.kv.backend.capabilities.lazy and not wants_scores

    def only_store(self) -> None:
        """What the layer computes next is not looked at: its keys and values are stored, and that is all."""
        self._is_for_storage = True

    def only_rows(self, rows: mx.array) -> None:
        """The layer goes on with some tokens of the pass, whose keys and values are stored."""
        self._is_for_storage, self._is_stored, self._rows = False, False, rows

    @property
    def offset(self) -> int | mx.array:
        """The position of each row's first token; of the one behind its last token when the layer has stored."""
        one = self._pass
        ahead = one.shape[1] if self._is_stored else 0
        if self._rows is not None:
            return one.offsets[self._rows] + ahead
        return int(one.positions[0]) + ahead if one.shape[0] == 1 else one.offsets + ahead

    def make_mask(
        self, N: int, return_array: bool = False, window_size: int | None = None
    ) -> mx.array | str | PagedMask | None:
        """The mask of the pass, see `PagedKVCache.make_mask`."""
        kv = self._pass.passes.kv
        window = smaller_window(window_size, kv.passes.windows[self._layer])
        if self._pass.passes.is_ragged:
            return PagedMask(window)
        starts = self._pass.starts
        return causal_mask(starts, np.full(len(starts), N), N, window, return_array)

    def update_and_fetch(self, keys: mx.array, values: mx.array) -> tuple[Any, Any]:
        """Store the layer's K ``[B, Hk, N, D]`` and V; the contexts, or what stands for them."""
        kv = self._pass.passes.kv
        if keys.dtype != kv.passes.dtype or values.dtype != kv.passes.dtype:
            raise TypeError(
                f"[update_and_fetch] keys are {keys.dtype}, values {values.dtype}, the pool holds {kv.passes.dtype}: "
                "make the engine again after a model was cast"
            )
        self._is_stored = True
        if self._rows is not None:
            paged = self._pass.keys_of(self._layer, self._rows)
            return paged, PagedValues(paged)
        keys, values = tokens_of(keys, None), tokens_of(values, None)
        if self._is_for_storage:
            self._pass.keys(self._layer, keys, values).store()
            paged = PagedKeys(self._pass.forward, self._layer, None, unseen=True)
            return paged, PagedValues(paged)
        if self._pass.passes.is_ragged and not kv.backend.capabilities.lazy:
            paged = self._pass.keys(self._layer, keys, values)
            return paged, PagedValues(paged)
        kv.backend.write(self._pass.forward.step, self._layer, keys, values)
        if not self._pass.passes.is_ragged:
            return self.keys_and_values()
        paged = PagedKeys(self._pass.forward, self._layer, self._pass.window(self._layer))
        return paged, PagedValues(paged)

    def keys_and_values(self) -> tuple[mx.array, mx.array]:
        """The contexts of the pass, for layers that attend to another layer's cache."""
        contexts: tuple[mx.array, mx.array] = self._pass.passes.kv.backend.read(self._pass.forward.step, self._layer)
        return contexts


# ------------------------------------------------------------------------------------ logits of some rows only


class _RowsOf:
    """A model's body, of whose hidden states only some rows come back. For the rest it is the body."""

    def __init__(self, body: nn.Module, rows: mx.array, last: RaggedCache | None) -> None:
        self._body = body
        self._rows = rows
        if last is not None and last.splits:
            self._body = copy.copy(body)
            dict.__setitem__(self._body, "layers", [*body.layers[:-1], _LastLayer(body.layers[-1], rows, last)])
            self._is_split = True
        else:
            self._is_split = False

    def __call__(self, *args: Any, **options: Any) -> mx.array:
        hidden: mx.array = self._body(*args, **options)
        if self._is_split:
            return hidden
        return hidden.reshape(-1, 1, hidden.shape[-1])[self._rows]

    def __getattr__(self, name: str) -> Any:
        return getattr(self._body, name)


class _LastLayer:
    """The last layer of a model: of tokens that nobody samples it computes keys and values, and nothing else.

    It is called twice. What the first call returns is dropped, so MLX never computes it; but it has stored the keys and
    values of all tokens. The second one computes the rows that are asked for. For the rest it is the layer.
    """

    def __init__(self, layer: nn.Module, rows: mx.array, cache: RaggedCache) -> None:
        self._layer = layer
        self._rows = rows
        self._cache = cache

    def __call__(self, x: mx.array, *args: Any, **options: Any) -> Any:
        self._cache.only_store()
        self._layer(x, *args, **options)
        self._cache.only_rows(self._rows)
        return self._layer(x[self._rows], *args, **options)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._layer, name)


def _with_rows(model: nn.Module, rows: mx.array, last: RaggedCache | None = None) -> tuple[nn.Module, mx.array | None]:
    """`model` with a head that sees `rows` only, if it is built as most are: ``model.model`` and a head behind it.

    The head of a large vocabulary costs as much as several layers, and a chunk of a prompt needs one row of it. The
    result is a shallow copy that shares every weight, made for one pass, so the model itself stays untouched. With the
    cache of the last layer that layer computes no more of the other tokens than what it stores.
    """
    body = model.get("model")
    if not isinstance(body, nn.Module) or type(model).__module__ not in _HEADS:
        return model, None
    if type(model).__module__ in _PER_TOKEN:
        last = None
    one = copy.copy(model)
    dict.__setitem__(one, "model", _RowsOf(body, rows, last))
    return one, rows


_PER_TOKEN = frozenset({"mlx_lm.models.ministral3"})
"""Of those below, modules that give a layer one more thing per token, besides its input."""
_FAMILIES = "gemma gemma2 gemma3_text gpt_oss llama ministral3 mixtral qwen2 qwen3 qwen3_moe"
_HEADS = frozenset(f"mlx_lm.models.{name}" for name in _FAMILIES.split())
"""Modules whose ``Model`` computes the head from ``self.model(...)`` token by token."""
