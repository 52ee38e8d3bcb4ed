"""One forward pass of an mlx-lm model over the tokens of a plan: any mix of prefill chunks and decodes.

A model of mlx-lm takes a rectangle of tokens and one cache per layer. Where all layers attend over the pool, only
attention looks at more than one token. The attention kernels read from the plan which token belongs to which sequence.
So the T tokens of a plan are T rows of one column, each at its own position. There is no padding. Other models (the
gather route, recurrent layers, caches that are held whole) see a sequence in each row, as everywhere in mlx-lm. There a
plan has one token for each sequence, or one chunk of a single sequence.

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

from kvpool.adapters.mlx_lm.calls import LayerCache, Part, Turn, cut, in_parts, together
from kvpool.adapters.mlx_lm.eviction import Eviction
from kvpool.adapters.mlx_lm.host import PagedKV
from kvpool.adapters.mlx_lm.passes import Rows
from kvpool.adapters.mlx_lm.states import Held, SlotStates, arrays_of


class RaggedForward:
    """Run the plans of a pool through a model, one at a time.

    Parameters
    ----------
    kv : PagedKV
        From `install`. The caller need not enter it: each pass installs the attention hook for its own duration.

    Attributes
    ----------
    is_ragged : bool
        Whether a pass takes any plan: all layers attend over the pool, and rows may share a pass.
    eviction : Eviction or None
        Has the policy of `kv`, and receives the attention scores of the layers. Call its `begin_pass` before each
        pass. The code that makes the plans evicts tokens between two plans, as `kvpool.Scheduler` does.
    states : SlotStates
        What the state slots of the pool hold.
    late : list of mx.array
        Of the last pass, what MLX has to evaluate beside its logits: writes that are lazy, and states.
    """

    def __init__(self, kv: PagedKV) -> None:
        self.kv = kv
        self.eviction = Eviction.of(kv.eviction, kv.passes)
        layout = kv.layout
        self.is_ragged = bool(kv.passes.sites) and not layout.held and not layout.is_apart
        self._defers = self.is_ragged and not kv.passes.is_lazy
        self._state_group = layout.state_group
        self.states_are_held = self._state_group >= 0
        self.states = SlotStates(layout)
        self.late: list[mx.array] = []

    def __call__(
        self,
        tokens: mx.array | np.ndarray,
        plan: Any,
        lens: np.ndarray,
        rows: np.ndarray,
        evicted: np.ndarray | None = None,
    ) -> mx.array:
        """Return the logits of some tokens of a plan that was stepped, float32 ``[M, V]``.

        All copies, writes and reads of the plan are done when the call returns, or they are in MLX's graph, and the
        states that it names are stored. The caller evaluates the logits and `late`, calls `done` or `rollback`, then
        `keep_states`. Exceptions of the model pass through.

        Parameters
        ----------
        tokens : int32 ``[T]``
            In the order of the plan's rows.
        lens : int64 ``[S]``
            The plan's ``seq_lens``.
        rows : int32 ``[M]``
            Which of the T tokens. An index may occur twice. Without any the result is ``[0, V]`` or ``[0, 1]``.
        evicted : int ``[S]``, optional
            Tokens that each sequence has lost. Needed in a pool without layer groups: its lengths do not count them,
            and positions do.

        Raises
        ------
        ValueError
            A plan that is neither decodes only nor one chunk of one sequence, where passes are not ragged.
        """
        kv = self.kv
        new = np.diff(np.asarray(plan.cu_q_lens, np.int64)[: len(lens) + 1])
        is_counted = evicted is None or plan.groups is not None  # whether `lens` counts evicted tokens
        gone = np.zeros_like(lens) if is_counted else np.asarray(evicted, np.int64)
        kv.passes.hook()
        try:
            turn = self._turn(plan, lens, new, gone)
            if self.states_are_held:
                self.states.write(*kv.passes.checkpoints.loaded(plan))
            inputs = mx.array(tokens).reshape(len(turn.new), turn.num_columns)
            logits, held_by = self._logits(inputs, turn, rows)
        finally:
            kv.passes.unhook()
        self.late = [x for _, held in held_by for x in arrays_of(held)] if self.states_are_held else []
        if kv.passes.is_lazy:
            layers = [(backend, i) for backend in kv.backends for i in range(backend.spec.num_layers)]
            self.late += [x for backend, i in layers for x in backend.queued(i)]
        if self.states_are_held:
            for part, held in held_by:
                self.states.write(self._slots(plan, "state_dst", part), held)
            kv.passes.checkpoints.save(plan, self.states.read)
        return logits

    def keep_states(self, handles: np.ndarray) -> None:
        """Forget the states of all sequences but these."""
        if self.states_are_held:
            table = self.kv.pool.table
            self.states.keep(slot for handle in handles for slot in table(int(handle), self._state_group).tolist())

    def _turn(self, plan: Any, lens: np.ndarray, new: np.ndarray, gone: np.ndarray) -> Turn:
        """Return the turn of a plan: its rows are tokens where passes are ragged, else sequences."""
        starts, num_tokens = lens - new, int(new.sum())
        num_columns = 1
        if self.is_ragged:
            first = np.cumsum(new) - new
            starts = np.arange(num_tokens) + np.repeat(starts - first, new)
            gone, new = np.repeat(gone, new), np.ones(num_tokens, np.int64)
        elif len(lens) == 1:
            num_columns = num_tokens
        elif (new != 1).any():
            raise ValueError(
                f"[forward] the plan has {len(lens)} rows with up to {new.max()} tokens: a pass of this model is one "
                "token for each row, or one row"
            )
        before, after = Rows(starts, gone=gone), Rows(starts + new, gone=gone)
        how: dict[str, Any] = {"eviction": self.eviction, "defers": self._defers}
        return Turn(self.kv.passes, plan, before, after, new, num_columns, num_columns == 1, **how)

    def _slots(self, plan: Any, name: str, part: Part) -> list[int]:
        """Return the state slots of a part's rows: ``state_src`` or ``state_dst``."""
        slots: list[int] = getattr(plan.groups[self._state_group], name)[part.rows].tolist()
        return slots

    def _logits(self, inputs: mx.array, turn: Turn, rows: np.ndarray) -> tuple[mx.array, list[tuple[Part, Held]]]:
        """Run the model over all tokens and its head over the tokens that were asked for."""
        model, taken = self.kv.model, False
        is_whole = np.array_equal(rows, np.arange(inputs.size))
        if len(rows) and not is_whole:
            # A policy with scores needs the last layer's attention of every row's last token, sampled or not.
            wants_scores = self.eviction is not None and self.eviction.policy.scores is not None
            splits = len(rows) < inputs.size and self.is_ragged and not wants_scores
            last = partial(_LastLayer, turn, rows) if splits else None
            model, taken = _with_rows(model, mx.array(rows), last)

        def run(own: list[Any], part: Part) -> Any:
            return model(inputs if part.takes_input_whole else cut(inputs, part), cache=own)

        found, held_by = in_parts(turn, lambda part: self.states.read(self._slots(turn.plan, "state_src", part)), run)
        logits = together(found, len(turn.new), turn.num_columns)
        if not len(rows):  # MLX never evaluates it
            return mx.zeros((0, logits.shape[-1]), mx.float32), held_by
        logits = logits.reshape(-1, logits.shape[-1])
        return (logits if taken or is_whole else logits[mx.array(rows)]).astype(mx.float32), held_by


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

    def __init__(self, turn: Turn, rows: np.ndarray, layer: nn.Module) -> None:
        self._turn = turn.of_queries(rows)
        self._rows = mx.array(rows)
        self._layer = layer

    def __call__(self, x: mx.array, *args: Any, **options: Any) -> Any:
        (whole,) = (one for one in (*args, *options.values()) if type(one) is LayerCache)
        whole.part.attends = False
        self._layer(x, *args, **options)
        (part,) = self._turn.parts(is_apart=False)
        some = LayerCache(part, whole.number)
        given = [some if one is whole else one for one in args]
        named = {name: some if one is whole else one for name, one in options.items()}
        result = self._layer(x[self._rows], *given, **named)
        part.end()
        return result

    def __getattr__(self, name: str) -> Any:
        return getattr(self._layer, name)


def _with_rows(
    model: nn.Module, rows: mx.array, last: Callable[[nn.Module], _LastLayer] | None
) -> tuple[nn.Module, bool]:
    """Return a copy of `model` whose head sees `rows` only, if ``model.model`` is followed by the head alone.

    The head of a large vocabulary costs as much as several layers, and a chunk of a prompt needs one row of it. The
    copy is shallow, shares every weight, and lives for one pass. The model itself stays untouched. `last` wraps the
    last layer, so that it only stores keys and values of the other tokens.
    """
    body = model.get("model")
    if not isinstance(body, nn.Module) or type(model).__module__ not in _HEADS:
        return model, False
    if type(model).__module__ in _PER_TOKEN:
        last = None
    one = copy.copy(model)
    dict.__setitem__(one, "model", _RowsOf(body, rows, last))
    return one, True


_PER_TOKEN = frozenset({"mlx_lm.models.ministral3"})
"""Modules of `_HEADS` that pass a layer a second argument per token, besides its input."""
_FAMILIES = "gemma gemma2 gemma3_text gpt_oss llama ministral3 mixtral qwen2 qwen3 qwen3_moe"
_HEADS = frozenset(f"mlx_lm.models.{name}" for name in _FAMILIES.split())
"""Modules whose ``Model`` computes the head from ``self.model(...)`` token by token."""
