"""Attention straight over the pool, and how a model of mlx-lm comes to use it.

On the fused route ``update_and_fetch`` stores the new keys and values and returns one `PagedContext` in place of both.
``make_mask`` returns a `PagedMask`. A model of mlx-lm passes them to ``scaled_dot_product_attention`` untouched. Any
other use of them raises an error that says so.

mlx-lm has no hook for a cache that attends by itself. Its model modules import ``scaled_dot_product_attention`` from
``mlx_lm.models.base`` by name. Inside ``with install(...)`` that name is bound, in the model's own module, to a
stand-in. The stand-in knows `PagedContext` and passes everything else, stock caches too, to the original. gemma2
computes its capped scores itself; there the stand-in replaces ``Attention.__call__``.

A stand-in is correct only for the source code that it was written for. A model is hooked if, in all its layers, the
code that calls ``update_and_fetch`` is one of `KNOWN`, has the source that this module was tested with, and calls the
function of ``base``, whose source is checked as well. Any other model gathers.
"""

from __future__ import annotations

import functools
import hashlib
import inspect
import sys
import threading
from collections.abc import Callable, Sequence
from types import CodeType
from typing import Any, NamedTuple, NoReturn

import mlx.core as mx
import numpy as np
from mlx_lm.models import base

from kvpool.protocol import AttentionOptions, KVBackend, StepArrays


class Forward:
    """One forward pass: what its layers share, and how they store keys and values.

    The copies of the plan are not executed here.

    Parameters
    ----------
    backend : kvpool.protocol.KVBackend
    plan
        A `kvpool.Plan`, or a `kvpool.protocol.StepArrays`.
    shape : (B, N)
        Rows and columns of the model's input.
    columns : int32 ``[T]``, optional
        Which of the B * N input positions are real tokens; None when all are.
    eviction : kvpool.eviction.Evictor, optional
        Receives the attention scores of the layers.
    is_fused : bool
        Whether the layers attend over the pool.
    defers : bool
        Store the keys and values of a layer when its queries are known, so that one evaluation computes all three.
        Kernels that run at once wait for every evaluation.
    stores : bool
        Whether the pass stores keys and values. False for a pass over tokens that another pass has stored.

    Attributes
    ----------
    step
        What the backend's `prepare` returned for the plan.
    attends : bool
        Whether anybody uses the attention. If not, the result is 0.
    is_over : bool
        Whether a later operation has begun: the blocks may hold other tokens.
    """

    def __init__(
        self,
        backend: KVBackend,
        plan: Any,
        shape: tuple[int, int],
        *,
        columns: mx.array | None = None,
        eviction: Any = None,
        is_fused: bool = False,
        defers: bool = False,
        stores: bool = True,
    ) -> None:
        self.backend = backend
        self.plan = plan
        self.shape = shape
        self.columns = columns
        self.eviction = eviction
        self.is_fused = is_fused
        self.defers = defers
        self.stores = stores
        self.attends = True
        self.is_over = False
        self._late: tuple[int, mx.array, mx.array] | None = None
        self.step = backend.prepare(plan)

    def put(self, layer: int, keys: mx.array, values: mx.array) -> None:
        """Store a layer's new keys ``[B, Hk, N, D]`` and values, now or with its queries (`defers`)."""
        if not self.stores:
            return
        k, v = keys.swapaxes(1, 2).flatten(0, 1), values.swapaxes(1, 2).flatten(0, 1)
        if self.columns is not None:
            k, v = k[self.columns], v[self.columns]
        if self.defers and self.attends:
            if self._late is not None:
                self.flush()
            self._late = layer, k, v
        else:
            self.backend.write(self.step, layer, k, v)

    def flush(self, *others: mx.array) -> None:
        """Store the keys and values that `put` deferred, if any. Evaluate `others` with them."""
        if self._late is not None:
            layer, k, v = self._late
            mx.eval(k, v, *others)
            self.backend.write(self.step, layer, k, v)
            self._late = None


class _Placeholder:
    """Takes the place of an array in a model of mlx-lm. Any use as an array raises TypeError."""

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
    """A causal mask, with a window if the layer has one. ``make_mask`` returns it on the fused route."""

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
            The same object: ``update_and_fetch`` returns it twice.
        mask
            A `PagedMask`, or a short form of mlx-lm: "causal", or None for a single column.
        sinks, soft_cap
            See `kvpool.protocol.AttentionOptions`.

        Raises
        ------
        RuntimeError
            The pass is over: its blocks may hold other tokens.
        TypeError, ValueError
            Values, queries or mask do not belong to this pass.
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
        if columns is not None:  # the result of padding columns is 0
            padded = mx.zeros((num_rows * num_columns, *out.shape[1:]), out.dtype)
            padded[columns] = out
            out = padded
        return out.reshape(num_rows, num_columns, num_heads, -1).swapaxes(1, 2)

    def _scores(self, q: mx.array, observed: Any, scale: float, options: AttentionOptions | None) -> mx.array:
        """Return the scores of some queries of the pass, ``[R, Hk, C]``: a second attention, one row per query."""
        forward, backend = self.forward, self.forward.backend
        if observed.step is None:
            observed.step = backend.prepare(StepArrays.of_queries(forward.plan, observed.queries))
        chosen, kind = q[mx.array(observed.queries)], forward.eviction.policy.scores
        _, scores = backend.attend(observed.step, self.layer, chosen, scale, options=options, scores=kind)
        return scores


def _require_short(mask: Any, num_columns: int) -> None:
    """Raise TypeError unless the mask is a short form of mlx-lm, which stands for a causal mask."""
    if (mask is None and num_columns == 1) or (isinstance(mask, str) and mask == "causal"):
        return
    raise TypeError(
        f"[attention] the mask of {num_columns} columns is {mask if mask is None else type(mask).__name__}, not what "
        "make_mask returned; install(model, ..., fused=False) takes any mask"
    )


def smaller_window(one: int | None, other: int | None) -> int | None:
    """Return the smaller of two windows. None stands for no window."""
    return min(one, other) if one and other else one or other or None


ATTENTION = "scaled_dot_product_attention"


class Caller(NamedTuple):
    """The code that called a cache's ``update_and_fetch``."""

    module: str
    code: CodeType


# ------------------------------------------------------------------------------------------- the stand-ins


def _function(original: Any) -> Any:
    @functools.wraps(original)
    def scaled_dot_product_attention(
        queries: mx.array, keys: Any, values: Any, cache: Any, scale: float, mask: Any, sinks: Any = None
    ) -> mx.array:
        if type(keys) is PagedContext:
            return keys.attend(queries, values, scale, mask, sinks)
        return original(queries, keys, values, cache, scale=scale, mask=mask, sinks=sinks)

    return scaled_dot_product_attention


def _gemma2_call(original: Any) -> Any:
    @functools.wraps(original)
    def __call__(self: Any, x: mx.array, mask: Any = None, cache: Any = None) -> mx.array:
        if type(mask) is not PagedMask:
            return original(self, x, mask, cache)
        num_rows, num_columns, _ = x.shape
        queries, keys, values = (
            projection(x).reshape(num_rows, num_columns, num_heads, -1).transpose(0, 2, 1, 3)
            for projection, num_heads in (
                (self.q_proj, self.n_heads),
                (self.k_proj, self.n_kv_heads),
                (self.v_proj, self.n_kv_heads),
            )
        )
        queries = self.rope(queries, offset=cache.offset)
        keys = self.rope(keys, offset=cache.offset)
        paged_keys, paged_values = cache.update_and_fetch(keys, values)
        output = paged_keys.attend(queries, paged_values, self.scale, mask, soft_cap=self.attn_logit_softcapping)
        return self.o_proj(output.transpose(0, 2, 1, 3).reshape(num_rows, num_columns, -1))

    return __call__


BASE = "8deba4a8a8fb4e29"
"""Digest of ``base.scaled_dot_product_attention``."""

KNOWN = {
    "mlx_lm.models.gemma.Attention": "3b9b8774b647f7a4",
    "mlx_lm.models.gemma2.Attention": "a62901768129867d",
    "mlx_lm.models.gemma3_text.Attention": "a293df9f54178d8a",
    "mlx_lm.models.gpt_oss.AttentionBlock": "907d3050ceb13722",
    "mlx_lm.models.llama.Attention": "3b9b8774b647f7a4",
    "mlx_lm.models.ministral3.Attention": "dc931792a5813d57",
    "mlx_lm.models.mixtral.MixtralAttention": "0f086b54722bb40f",
    "mlx_lm.models.qwen2.Attention": "0d02f6cbda3a89f1",
    "mlx_lm.models.qwen3.Attention": "789af9d8868081c1",
    "mlx_lm.models.qwen3_moe.Attention": "9107ca69f9dfb65c",
}
"""Digests of the ``__call__`` of the classes that attend, by module and class. Tested with `SUPPORTED_VERSIONS`."""

REPLACED = {"mlx_lm.models.gemma2.Attention": _gemma2_call}
"""Classes that do not call the function of ``base``. Their ``__call__`` itself is replaced."""


# --------------------------------------------------------------------------------------------------- sites


class Site(NamedTuple):
    """One attribute of mlx-lm that a stand-in replaces."""

    owner: Any
    name: str
    make: Callable[[Any], Any]

    def __str__(self) -> str:
        return f"{self.owner.__name__}.{self.name}"

    @property
    def is_active(self) -> bool:
        """Whether the attribute is the stand-in now."""
        patch = _patches.get((self.owner, self.name))
        return patch is not None and vars(self.owner).get(self.name) is patch.stand_in

    @property
    def is_covered(self) -> bool:
        """Whether the stand-in should be in place, but somebody has set the attribute to something else."""
        patch = _patches.get((self.owner, self.name))
        return patch is not None and patch.count > 0 and not self.is_active

    def enter(self) -> None:
        """Put the stand-in in place, or count one more user of it."""
        with _lock:
            found = vars(self.owner)[self.name]
            patch = _patches.get((self.owner, self.name))
            if patch is None or (not patch.count and found is not patch.original):
                patch = _patches[self.owner, self.name] = _Patch(found, self.make(found))
            if found is patch.original:  # also after a reload of the module
                setattr(self.owner, self.name, patch.stand_in)
            patch.count += 1

    def require_ours(self) -> None:
        """Raise RuntimeError if the next `leave` is the last one and somebody else has set the attribute."""
        patch, found = _patches.get((self.owner, self.name)), vars(self.owner).get(self.name)
        if patch is not None and patch.count == 1 and found not in (patch.stand_in, patch.original):
            raise RuntimeError(
                f"[install] {self} is {found!r}, which somebody has set inside the block: "
                "put back what was there before the block ends"
            )

    def leave(self) -> None:
        """Undo one `enter`, in any order. The last call puts the original back."""
        with _lock:
            patch = _patches[self.owner, self.name]
            patch.count -= 1
            if not patch.count:
                setattr(self.owner, self.name, patch.original)


class _Patch:
    """A stand-in and the number of its users. It is kept after the last one leaves, for the next."""

    __slots__ = ("count", "original", "stand_in")

    def __init__(self, original: Any, stand_in: Any) -> None:
        self.original = original
        self.stand_in = stand_in
        self.count = 0


_patches: dict[tuple[Any, str], _Patch] = {}
_lock = threading.Lock()


def _original(owner: Any, name: str) -> Any:
    """Return the attribute without the stand-in."""
    with _lock:
        patch = _patches.get((owner, name))
        found = vars(owner).get(name)
    return patch.original if patch is not None and found is patch.stand_in else found


# ------------------------------------------------------------------------------------------ finding them


def watch(caches: Sequence[Any]) -> list[Caller | None]:
    """Record who calls ``update_and_fetch`` of each cache. The list is filled while the model runs."""
    callers: list[Caller | None] = [None] * len(caches)

    def watched(layer: int, update_and_fetch: Callable[..., Any]) -> Callable[..., Any]:
        def call(keys: mx.array, values: mx.array) -> Any:
            frame = sys._getframe(1)
            callers[layer] = Caller(frame.f_globals["__name__"], frame.f_code)
            return update_and_fetch(keys, values)

        return call

    for layer, cache in enumerate(caches):
        cache.update_and_fetch = watched(layer, cache.update_and_fetch)
    return callers


def find_sites(callers: Sequence[Caller | None]) -> tuple[Site, ...]:
    """Return where the layers of a model attend, if the code of all of them is known.

    Raises
    ------
    LookupError
        The code of some layer is not known. The text says which and why.
    """
    if digest(_original(base, ATTENTION)) != BASE:
        raise LookupError(f"mlx_lm.models.base.{ATTENTION} has changed")
    return tuple(dict.fromkeys(_site(caller) for caller in dict.fromkeys(callers) if caller is not None))


def _site(caller: Caller) -> Site:
    cls_name, _, method = caller.code.co_qualname.rpartition(".")
    name = f"{caller.module}.{cls_name}"
    if method != "__call__" or name not in KNOWN:
        raise LookupError(f"{caller.module}.{caller.code.co_qualname} is not among those that can be hooked")
    module = sys.modules[caller.module]
    cls = getattr(module, cls_name)
    call = _original(cls, "__call__")
    if getattr(call, "__code__", None) is not caller.code or digest(call) != KNOWN[name]:
        raise LookupError(f"{name}.__call__ has changed")
    if name in REPLACED:
        return Site(cls, "__call__", REPLACED[name])
    if _original(module, ATTENTION) is not _original(base, ATTENTION):
        raise LookupError(f"{caller.module}.{ATTENTION} is not that of mlx_lm.models.base")
    return Site(module, ATTENTION, _function)


def digest(function: Any) -> str:
    """The first 16 hex digits of the SHA-256 of a function's source; "" without source."""
    try:
        return hashlib.sha256(inspect.getsource(function).encode()).hexdigest()[:16]
    except (OSError, TypeError):
        return ""
