"""Attention straight over the pool: what a layer's cache hands to the model in place of arrays.

On the fused route ``update_and_fetch`` stores the new keys and values and returns one `PagedContext` in place of both,
and ``make_mask`` returns a `PagedMask`. mlx-lm's models pass them on to ``scaled_dot_product_attention`` untouched, and
there stands, for the length of ``with install(...)``, a function that knows them (`attention_hook`). Whoever else
touches one of them gets an error that says so.
"""

from __future__ import annotations

from typing import Any, NoReturn

import mlx.core as mx
import numpy as np

from kvpool.adapters.mlx_lm.rows import Forward
from kvpool.protocol import AttentionOptions, StepArrays


class _Placeholder:
    """Stands where a model of mlx-lm keeps an array, and refuses to be one."""

    __slots__ = ()

    def _refuse(self, *_: Any) -> NoReturn:
        raise TypeError(self._text("used as an array"))

    __getitem__ = __iter__ = __array__ = __mlx_array__ = __neg__ = _refuse
    __add__ = __radd__ = __sub__ = __rsub__ = __mul__ = __rmul__ = __truediv__ = __matmul__ = __rmatmul__ = _refuse

    def __getattr__(self, name: str) -> NoReturn:
        raise AttributeError(self._text(f"asked for {name!r}"), name=name, obj=self)

    def _text(self, what: str) -> str:
        return (
            f"[{type(self).__name__}] {what}, but on the fused route keys, values and masks stay in the pool: "
            "install(model, ..., fused=False) hands out arrays"
        )


class PagedMask(_Placeholder):
    """Causal, and with a window, if the layer has one. What ``make_mask`` returns on the fused route."""

    __slots__ = ("window",)

    def __init__(self, window: int | None) -> None:
        self.window = window

    def __repr__(self) -> str:
        return f"PagedMask(window={self.window})"


class PagedContext(_Placeholder):
    """Keys and values of one layer in one forward pass, in the pool.

    Parameters
    ----------
    forward : Forward
        The pass.
    layer, window
        Which layer, and its attention window.
    """

    __slots__ = ("forward", "layer", "window")

    def __init__(self, forward: Forward, layer: int, window: int | None) -> None:
        self.forward = forward
        self.layer = layer
        self.window = window

    def attend(
        self,
        queries: mx.array,
        values: Any,
        scale: float,
        mask: Any,
        sinks: mx.array | None = None,
        soft_cap: float | None = None,
    ) -> mx.array:
        """Attention of ``queries [B, Hq, N, D]`` over the contexts of the pass: ``[B, Hq, N, Dv]``.

        Parameters
        ----------
        values : PagedContext
            This one again.
        mask
            A `PagedMask`; or mlx-lm's own short forms, "causal", and None for a single column.
        sinks, soft_cap
            See `kvpool.protocol.AttentionOptions`.

        Raises
        ------
        RuntimeError
            The pass is over: its blocks may hold other tokens by now.
        TypeError, ValueError
            Values, queries or mask of something else.
        """
        forward = self.forward
        if forward.is_over:
            raise RuntimeError("[attention] these keys are those of an earlier forward pass")
        if values is not self:
            raise TypeError(f"[attention] values are {values!r}, not those that came with the keys")
        num_rows, num_heads, num_columns, _ = queries.shape
        shape = forward.shape
        if (num_rows, num_columns) != shape:
            raise ValueError(f"[attention] queries are for {num_rows} rows of {num_columns} columns, keys {shape}")
        backend = forward.backend
        if not forward.attends:
            return mx.zeros((*queries.shape[:-1], backend.spec.value_head_dim), queries.dtype)
        options = None
        window = None
        if type(mask) is PagedMask:
            window = mask.window
        else:
            _require_short(mask, num_columns)
        if not (window is self.window is sinks is soft_cap is None):
            window = smaller_window(self.window, window)
            heads = None if sinks is None else np.array(sinks.astype(mx.float32))
            options = AttentionOptions(window=window, soft_cap=soft_cap, sinks=heads)
        columns = forward.columns
        q = queries.swapaxes(1, 2).flatten(0, 1)
        if columns is not None:
            q = q[columns]
        if forward.defers:
            forward.flush(q)
        eviction = forward.eviction
        kind = None if eviction is None else eviction.policy.scores
        if kind is None or eviction.observed is not None:
            out: Any = backend.attend(forward.step, self.layer, q, scale, options=options)
            if kind is not None:
                eviction.observe(self.layer, self._scores(q, eviction.observed, scale, options))
        else:
            out, scores = backend.attend(forward.step, self.layer, q, scale, options=options, scores=kind)
            eviction.observe(self.layer, scores)
        if columns is not None:  # padding columns see nothing
            padded = mx.zeros((num_rows * num_columns, *out.shape[1:]), out.dtype)
            padded[columns] = out
            out = padded
        return out.reshape(num_rows, num_columns, num_heads, -1).swapaxes(1, 2)

    def _scores(self, q: mx.array, observed: Any, scale: float, options: AttentionOptions | None) -> mx.array:
        """What some queries of the pass see, ``[R, Hk, C]``: attended once more, each in a row of its own."""
        forward, backend = self.forward, self.forward.backend
        if observed.step is None:
            observed.step = backend.prepare(StepArrays.of_queries(forward.plan, observed.queries))
        chosen, kind = q[mx.array(observed.queries)], forward.eviction.policy.scores
        _, scores = backend.attend(observed.step, self.layer, chosen, scale, options=options, scores=kind)
        return scores


def _require_short(mask: Any, num_columns: int) -> None:
    """Raise TypeError unless the mask is one of mlx-lm's short forms, which stand for a causal one."""
    if (mask is None and num_columns == 1) or (isinstance(mask, str) and mask == "causal"):
        return
    raise TypeError(
        f"[attention] the mask of {num_columns} columns is {mask if mask is None else type(mask).__name__}, not what "
        "make_mask returned; install(model, ..., fused=False) takes any mask"
    )


def smaller_window(one: int | None, other: int | None) -> int | None:
    """The smaller of two windows; None stands for no window."""
    return min(one, other) if one and other else one or other or None
