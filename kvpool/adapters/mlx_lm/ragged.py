"""One forward pass of an mlx-lm model over the tokens of a plan: any mix of prefill chunks and decodes.

A model of mlx-lm takes a rectangle of tokens and one cache per layer. On the fused route only attention looks at more
than one token. The attention kernels read from the plan which token belongs to which sequence. So the T tokens of a
plan are T rows of one column, each at its own position. There is no padding. On the gather route a row is a sequence,
as everywhere in mlx-lm. There a plan has one token for each sequence, or one chunk of a single sequence.

A pass does not change the model. It replaces the model's attention function and puts it back (`attention`).
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from functools import partial
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np

from kvpool.adapters.mlx_lm.attention import Forward
from kvpool.adapters.mlx_lm.cache import Batch, PagedKVCache
from kvpool.adapters.mlx_lm.host import PagedKV
from kvpool.adapters.mlx_lm.passes import Rows
from kvpool.protocol import StepArrays


class RaggedForward:
    """Run the plans of a pool through a model, one at a time.

    Parameters
    ----------
    kv : PagedKV
        From `install`. The caller need not enter it: each pass installs the attention hook for its own duration.

    Attributes
    ----------
    is_ragged : bool
        Whether a pass takes any plan. True on the fused route.
    eviction : kvpool.eviction.Evictor or None
        Receives the attention scores of the layers. Call its `begin` before each pass.

    Raises
    ------
    ValueError
        `kv` has an eviction policy of its own. The caller that makes the plans must own the policy, as `Engine` does.
    """

    def __init__(self, kv: PagedKV) -> None:
        if kv.eviction is not None:
            raise ValueError("[RaggedForward] plans keep every token, kv evicts: install without eviction")
        if kv.layout.groups:
            raise ValueError("[RaggedForward] kv has layer groups: install with a pool that has none")
        self.kv = kv
        self.eviction: Any = None
        self.is_ragged = bool(kv.passes.sites)
        self._defers = self.is_ragged and not kv.backend.capabilities.lazy
        self._batch = Batch(kv.passes, [], [], is_merged=False)
        self._caches = [PagedKVCache(self._batch, layer) for layer in range(kv.num_layers)]

    def __call__(
        self, tokens: np.ndarray, plan: Any, lens: np.ndarray, rows: np.ndarray, evicted: np.ndarray | None = None
    ) -> mx.array:
        """Return the logits of some tokens of a plan that was stepped, float32 ``[M, V]``.

        All copies, writes and reads of the plan are done when the call returns. MLX may evaluate the logits later. The
        caller calls `done` or `rollback`. Exceptions of the model pass through.

        Parameters
        ----------
        tokens : int32 ``[T]``
            In the order of the plan's rows.
        lens : int64 ``[S]``
            Lengths of the plan's sequences after the step: tokens that have slots.
        rows : int32 ``[M]``
            Which of the T tokens. An index may occur twice. Without any the result is ``[0, V]`` or ``[0, 1]``.
        evicted : int ``[S]``, optional
            Tokens that each sequence has lost. Its positions are ahead of its places in the table by as many.

        Raises
        ------
        ValueError
            On the gather route, a plan that is neither decodes only nor one chunk of one sequence.
        """
        kv = self.kv
        new = np.diff(np.asarray(plan.cu_q_lens, np.int64)[: len(lens) + 1])
        shape, starts = self._shape(len(tokens), lens, new)
        ahead = None if evicted is None else evicted if len(starts) == len(lens) else np.repeat(evicted, new)
        forward = None
        entered = 0
        try:
            for site in kv.passes.sites:
                site.enter()
                entered += 1
            forward = Forward(
                kv.backend, plan, shape, eviction=self.eviction, is_fused=self.is_ragged, defers=self._defers
            )
            self._batch.take_plan(forward, Rows(starts, gone=ahead))
            logits = self._logits(mx.array(tokens.reshape(shape)), forward, rows)
            forward.flush()
            if kv.backend.capabilities.lazy:
                mx.eval(logits, *(queued for layer in range(kv.num_layers) for queued in kv.backend.queued(layer)))
        finally:
            if forward is not None:
                forward.is_over = True
            for site in kv.passes.sites[:entered]:
                site.leave()
        return logits

    def _shape(self, num_tokens: int, lens: np.ndarray, new: np.ndarray) -> tuple[tuple[int, int], np.ndarray]:
        """Return the shape of the model's input, and the place of each row's first token."""
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

    def _logits(self, inputs: mx.array, forward: Forward, rows: np.ndarray) -> mx.array:
        """Run the model over all tokens and its head over the tokens that were asked for."""
        caches = self._caches
        if not len(rows):
            hidden = self.kv.model(inputs, cache=caches)  # MLX never evaluates it
            return mx.zeros((0, hidden.shape[-1]), mx.float32)
        # A policy with scores needs the last layer's attention of every row's last token, sampled or not.
        wants_scores = self.eviction is not None and self.eviction.policy.scores is not None
        splits = len(rows) < inputs.size and self._defers and not wants_scores
        last = partial(_LastLayer, self._batch, forward, rows) if splits else None
        model, taken = _with_rows(self.kv.model, mx.array(rows), last)
        logits = model(inputs, cache=caches)
        logits = logits.reshape(-1, logits.shape[-1])
        if taken is None:
            logits = logits[mx.array(rows)]
        return logits.astype(mx.float32)


# ------------------------------------------------------------------------------------ logits of some rows only


class _RowsOf:
    """A model's body that returns the hidden states of some rows only. All attributes are those of the body."""

    def __init__(self, body: nn.Module, rows: mx.array, last: Callable[[nn.Module], _LastLayer] | None) -> None:
        self._body = body
        self._rows = rows
        self._is_split = last is not None
        if last is not None:
            self._body = copy.copy(body)
            dict.__setitem__(self._body, "layers", [*body.layers[:-1], last(body.layers[-1])])

    def __call__(self, *args: Any, **options: Any) -> mx.array:
        hidden: mx.array = self._body(*args, **options)
        if self._is_split:
            return hidden
        return hidden.reshape(-1, 1, hidden.shape[-1])[self._rows]

    def __getattr__(self, name: str) -> Any:
        return getattr(self._body, name)


class _LastLayer:
    """The last layer of a model. It computes only keys and values of tokens that are not sampled.

    The wrapped layer runs twice. The first run stores the keys and values of all tokens; nobody uses its result, so MLX
    never computes that. The second run computes the rows that were asked for. Each such row is a sequence of its own
    that ends with its token. All attributes are those of the layer.
    """

    def __init__(self, batch: Batch, forward: Forward, rows: np.ndarray, layer: nn.Module) -> None:
        some = StepArrays.of_queries(forward.plan, rows)
        self._layer = layer
        self._rows = mx.array(rows)
        self._whole = forward
        self._pass = Forward(forward.backend, some, (len(rows), 1), is_fused=True, stores=False)
        before = batch.base_rows
        own = Batch(batch.passes, [], [], is_merged=True)
        self._cache = PagedKVCache(own, batch.passes.num_layers - 1)
        own.take_plan(self._pass, Rows(before.lens[rows], gone=before.gone[rows]))

    def __call__(self, x: mx.array, *args: Any, **options: Any) -> Any:
        self._whole.attends = False
        self._layer(x, *args, **options)
        given = [self._cache if type(one) is PagedKVCache else one for one in args]
        named = {name: self._cache if type(one) is PagedKVCache else one for name, one in options.items()}
        result = self._layer(x[self._rows], *given, **named)
        self._pass.is_over = True
        return result

    def __getattr__(self, name: str) -> Any:
        return getattr(self._layer, name)


def _with_rows(
    model: nn.Module, rows: mx.array, last: Callable[[nn.Module], _LastLayer] | None
) -> tuple[nn.Module, mx.array | None]:
    """Return a copy of `model` whose head sees `rows` only, if ``model.model`` is followed by the head alone.

    The head of a large vocabulary costs as much as several layers, and a chunk of a prompt needs one row of it. The
    copy is shallow, shares every weight, and lives for one pass. The model itself stays untouched. `last` wraps the
    last layer, so that it only stores keys and values of the other tokens.
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
"""Modules of `_HEADS` that pass a layer a second argument per token, besides its input."""
_FAMILIES = "gemma gemma2 gemma3_text gpt_oss llama ministral3 mixtral qwen2 qwen3 qwen3_moe"
_HEADS = frozenset(f"mlx_lm.models.{name}" for name in _FAMILIES.split())
"""Modules whose ``Model`` computes the head from ``self.model(...)`` token by token."""
