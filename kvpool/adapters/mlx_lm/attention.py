"""Attention straight over the pool, and how a model of mlx-lm comes to use it.

On the fused route ``update_and_fetch`` stores the new keys and values and returns one `PagedContext` in place of both.
``make_mask`` returns a `PagedMask`. A model of mlx-lm passes them to attention untouched: inside ``with install(...)``
a stand-in for ``mx.fast.scaled_dot_product_attention``, which passes everything else to the original. gemma2 computes
its capped scores itself; there the stand-in replaces ``Attention.__call__``. Any other use of them raises an error.

Models with latent attention decode over the latents themselves, so a decode attends over the pool (`PagedLatents`). In
a chunk they expand each latent to the keys and values of all heads, so a chunk gathers.

A hook says nothing about what a model does with a context on the way. So `reason_to_gather` runs two short rows through
the model, on paged caches with the hook in place and on mlx-lm's own caches. A model that looks into its keys, values
or masks on the way to attention raises an error there. A model that the stand-ins get wrong gives other logits.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Callable
from types import TracebackType
from typing import Any, NoReturn

import mlx.core as mx
import mlx.nn as nn
import numpy as np
from mlx_lm.models import gemma2

from kvpool.adapters.mlx_lm.hooks import Hook, Site
from kvpool.protocol import AttentionOptions, KVBackend, StepArrays

ROWS = ((5, 3, 7, 2), (4, 9))  # tokens; the last one of each row is a decode, the others are a chunk
NUM_TOKENS = max(map(len, ROWS))

TOLERANCE = {"float32": 1e-4, "float16": 0.05, "bfloat16": 0.2}
"""The largest root of the mean square of the difference, relative to that of the logits."""


def reason_to_gather(kv: Any) -> str:
    """Return why the model of `kv`, which has sites, must not attend over the pool. "" if it may.

    Costs four forward passes, two over the pool and two of mlx-lm's, of 14 tokens together. `kv` is of no use
    afterwards.
    """
    try:
        ours = _hooked(kv, _paged)
        kv.passes.sites = ()
        theirs = _hooked(kv, _expected)
    except Exception as error:  # of the model's code: whatever it makes of a placeholder
        return _described(error)
    difference = float(np.sqrt(np.mean((ours - theirs) ** 2)) / max(np.sqrt(np.mean(theirs**2)), 1e-30))
    limit = TOLERANCE[kv.backend.spec.dtype]
    return "" if difference <= limit else f"its logits over the pool differ by {difference:.2g}, the limit is {limit}"


def _hooked(kv: Any, run: Callable[[Any], np.ndarray]) -> np.ndarray:
    kv.passes.hook()
    try:
        return run(kv)
    finally:
        kv.passes.unhook()


def _paged(kv: Any) -> np.ndarray:
    """Return the logits of all tokens, over the pool: both rows in one padded chunk, then a decode."""
    caches = [one.merge([one, other]) for one, other in zip(kv.make_cache(), kv.make_cache(), strict=True)]
    lengths = [len(row) - 1 for row in ROWS]
    longest = max(lengths)
    padding = [longest - length for length in lengths]
    for cache in caches:
        cache.prepare(lengths=lengths, right_padding=padding)
    chunk = [[*row[:-1], *[0] * pad] for row, pad in zip(ROWS, padding, strict=True)]
    chunks = _float32(kv.model(mx.array(chunk), cache=caches))
    for cache in caches:
        cache.finalize()
    decodes = _float32(kv.model(mx.array([row[-1:] for row in ROWS]), cache=caches))
    return np.concatenate([part for i, n in enumerate(lengths) for part in (chunks[i, :n], decodes[i])])


def _expected(kv: Any) -> np.ndarray:
    """Return the logits of all tokens on mlx-lm's own caches, or on what is gathered from a pool with bits."""
    exact = kv.backend.spec.bits == (None, None)
    rows = [kv.model(mx.array([row]), cache=Hook.stock_caches(kv.model) if exact else kv.make_cache()) for row in ROWS]
    return np.concatenate([_float32(row)[0] for row in rows])


def _float32(logits: Any) -> np.ndarray:
    return np.array(logits.astype(mx.float32))


def _described(error: Exception) -> str:
    """Return where the model was when it raised, and what it did, in one line."""
    place, frame = "", error.__traceback__
    while frame is not None:
        place, frame = _place(frame) or place, frame.tb_next
    text = re.split(r", but |; install|\. ", " ".join(str(error).split()))[0]  # without the advice
    return f"{place}: {text[:120]}"


def _place(frame: TracebackType) -> str:
    """Return module, function and line. "" for those that do not belong to one model."""
    name, code = frame.tb_frame.f_globals.get("__name__", ""), frame.tb_frame.f_code
    if name.startswith("kvpool.") or name == "mlx_lm.models.base":
        return ""
    return f"{name}.{code.co_qualname}, line {frame.tb_lineno}"


class Forward:
    """One forward pass: what its layers share, and how they store keys and values.

    The copies of the plan, a `kvpool.Plan` or a `kvpool.protocol.StepArrays`, are not executed here. With `defers` the
    keys and values of a layer are stored when its queries are known, so that one evaluation computes all three: kernels
    that run at once wait for every evaluation.
    """

    def __init__(
        self,
        backend: KVBackend,
        plan: Any,
        shape: tuple[int, int],
        *,
        columns: mx.array | None = None,
        eviction: Any = None,
        first_layer: int = 0,
        is_fused: bool = False,
        defers: bool = False,
        stores: bool = True,
    ) -> None:
        self.backend = backend
        self.plan = plan
        self.shape = shape  # rows and columns of the model's input
        self.columns = columns  # which input positions are real tokens, int32 [T]; None when all are
        self.eviction = eviction  # receives the attention scores of the layers
        self.first_layer = first_layer  # number of the backend's layer 0 for `eviction`
        self._observed: Any = None  # a step of the queries that `eviction` looks at, each in a row of its own
        self._masks: dict[tuple[int, int], np.ndarray | None] = {}  # by window and keep
        self.is_fused = is_fused  # whether the layers attend over the pool
        self.defers = defers
        self.stores = stores  # False for a pass over tokens that another pass has stored
        self.attends = True  # whether anybody uses the attention: if not, the result is 0
        self.is_over = False  # a later operation has begun, so the blocks may hold other tokens
        self.late: tuple[int, mx.array, mx.array] | None = None
        self.step = backend.prepare(plan)

    def put(self, layer: int, keys: mx.array, values: mx.array) -> None:
        """Store a layer's new keys ``[B, Hk, N, D]`` and values, now or with its queries (`defers`)."""
        if not self.stores:
            return
        if self.shape[1] == 1:
            k, v = keys.squeeze(2), values.squeeze(2)
        else:
            k, v = keys.swapaxes(1, 2).flatten(0, 1), values.swapaxes(1, 2).flatten(0, 1)
        if self.columns is not None:
            k, v = k[self.columns], v[self.columns]
        if self.defers and self.attends:
            if self.late is not None:
                self.flush()
            self.late = layer, k, v
        else:
            self.backend.write(self.step, layer, k, v)

    def scores(self, layer: int, q: mx.array, scale: float, options: AttentionOptions | None) -> mx.array:
        """Return the scores of the queries that `eviction` looks at, ``[R, Hk, C]``: a second attention."""
        queries, kind = self.eviction.observed.queries, self.eviction.policy.kind
        if self._observed is None:
            self._observed = self.backend.prepare(StepArrays.of_queries(self.plan, queries))
        chosen = q[mx.array(queries)]
        _, scores = self.backend.attend(self._observed, layer, chosen, scale, options=options, scores=kind)
        return scores

    def mask(self, window: int, keep: int) -> np.ndarray | None:
        """Return the mask of queries that read the last `window` tokens and the first `keep` ones, for all layers.

        It has 0 or -inf for each place of the table, float32 ``[T, C]``. None: no query hides one.
        """
        if (window, keep) not in self._masks:
            lens, ends = np.asarray(self.plan.seq_lens), np.asarray(self.plan.cu_q_lens)[1:]
            longest, found = int(lens.max(initial=0)), None
            if longest > window + keep:
                rows = np.repeat(np.arange(len(lens)), np.diff(ends, prepend=0))
                oldest = lens[rows] - ends[rows] + np.arange(len(rows)) - window  # that is hidden
                places = np.arange(longest)
                hidden = (places >= keep) & (places <= oldest[:, None])
                found = np.where(hidden, np.float32(-np.inf), np.float32(0))
            self._masks[window, keep] = found
        return self._masks[window, keep]

    def flush(self) -> None:
        """Store the keys and values that `put` deferred, if any."""
        if self.late is not None:
            self.backend.write(self.step, *self.late)
            self.late = None


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
    """A causal mask, with a window if the model asks for one or the cache has one."""

    __slots__ = ("window",)

    def __init__(self, asked: int | None, kept: int | None) -> None:
        if asked and kept and asked > kept:  # what its first tokens see then depends on where chunks begin
            raise TypeError(f"[make_mask] the window of the mask is {asked}, that of the cache {kept}")
        self.window = asked or kept


paged_mask = functools.lru_cache(PagedMask)  # the layers of all passes share a few


class PagedContext(_Placeholder):
    """Keys and values of one layer in one forward pass, in the pool. It reads `keep` tokens beside its window."""

    __slots__ = ("forward", "keep", "layer", "window")

    def __init__(self, forward: Forward, layer: int, window: int | None, keep: int = 0) -> None:
        self.forward = forward
        self.layer = layer
        self.window = window
        self.keep = keep

    @property
    def dtype(self) -> mx.Dtype:
        """The dtype of the keys and values that the model computed."""
        dtype: mx.Dtype = getattr(mx, self.forward.backend.spec.dtype)
        return dtype

    def astype(self, dtype: mx.Dtype) -> PagedContext:
        """Return the context itself: attention computes in float32 in any case."""
        if dtype not in (self.dtype, mx.float32):
            raise TypeError(self._text(f"cast to {dtype}"))
        return self

    def attend(
        self,
        queries: mx.array,
        values: Any,
        scale: float,
        mask: Any = None,
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
            return mx.zeros((*queries.shape[:-1], backend.spec.result_dim), queries.dtype)
        options = None
        window = None
        if type(mask) is PagedMask:
            window = mask.window
        else:
            _require_short(mask, num_columns)
        if not (window is self.window is sinks is soft_cap is None):
            options = self._options(window, soft_cap, sinks)
        columns = forward.columns
        q = queries.squeeze(2) if num_columns == 1 else queries.swapaxes(1, 2).flatten(0, 1)
        if columns is not None:
            q = q[columns]
        if forward.late is not None:  # one evaluation computes all three
            late, k, v = forward.late
            mx.eval(k, v, q)
            backend.write(forward.step, late, k, v)
            forward.late = None
        eviction = forward.eviction
        kind = None if eviction is None else eviction.policy.kind
        if kind is None or eviction.observed is not None:
            out: Any = backend.attend(forward.step, self.layer, q, scale, options=options)
            if kind is not None:
                eviction.observe(forward.first_layer + self.layer, forward.scores(self.layer, q, scale, options))
        else:
            out, scores = backend.attend(forward.step, self.layer, q, scale, options=options, scores=kind)
            eviction.observe(forward.first_layer + self.layer, scores)
        if columns is not None:  # the result of padding columns is 0
            padded = mx.zeros((num_rows * num_columns, *out.shape[1:]), out.dtype)
            padded[columns] = out
            out = padded
        return mx.expand_dims(out, 2) if num_columns == 1 else out.reshape(*shape, num_heads, -1).swapaxes(1, 2)

    def _options(self, asked: int | None, soft_cap: float | None, sinks: mx.array | None) -> AttentionOptions:
        """Return the options of the layer, for a model that asks for a window or for none."""
        window = smaller_window(self.window, asked)
        if not self.keep or window is None or window != self.window:
            return _options(window, soft_cap, sinks)
        options, hidden = _options(None, soft_cap, sinks), self.forward.mask(window, self.keep)
        return options if hidden is None else AttentionOptions(None, soft_cap, options.sinks, mask=hidden)


class PagedLatents(PagedContext):
    """Latents of one layer in a decode, in the pool: keys and values at once. `RotaryKeys` come with them."""

    __slots__ = ()

    def attend(
        self,
        queries: mx.array,
        values: Any,
        scale: float,
        mask: Any = None,
        sinks: mx.array | None = None,
        soft_cap: float | None = None,
    ) -> mx.array:
        """Attention of ``queries [B, Hq, 1, D]``, in the space of the latents: ``[B, Hq, 1, D]``.

        `mask` ``[B, Hq, 1, Dr]`` is what a model takes for scores of the rotary parts: its rotary queries times
        `scale`, see `RotaryKeys`. Anything else raises TypeError.
        """
        rotary = self.forward.backend.spec.value_head_dim
        if not isinstance(mask, mx.array) or mask.shape != (*queries.shape[:-1], rotary):
            raise TypeError(f"[attention] the mask is not the product of the rotary queries and {rotary} rotary keys")
        whole = mx.concatenate([queries * scale, mask], axis=-1)
        return super().attend(whole, values, 1.0, None, sinks, soft_cap)


class RotaryKeys(_Placeholder):
    """Rotary parts of the keys that belong to `PagedLatents`.

    A model multiplies its rotary queries by them and adds the product to the scores, as a mask. MLX's ``@`` takes
    nothing but arrays. So the transposed keys are an identity matrix: the product is the rotary queries themselves.
    """

    __slots__ = ("_context",)

    def __init__(self, context: PagedLatents) -> None:
        self._context = context

    def swapaxes(self, axis1: int, axis2: int) -> mx.array:
        """Return the identity matrix that stands for the transposed keys."""
        if {axis1, axis2} != {-1, -2}:
            raise TypeError(self._text(f"asked for swapaxes({axis1}, {axis2})"))
        return _identity(self._context.forward.backend.spec.value_head_dim, self._context.dtype)


@functools.cache
def _identity(size: int, dtype: mx.Dtype) -> mx.array:
    identity = mx.eye(size, dtype=dtype)
    mx.eval(identity)  # arrays that are not evaluated belong to the stream of one thread
    return identity


def paged_latents(forward: Forward, layer: int, window: int | None, keep: int = 0) -> tuple[PagedLatents, RotaryKeys]:
    """Return what stands for the latents and the rotary keys of a layer in a decode."""
    latents = PagedLatents(forward, layer, window, keep)
    return latents, RotaryKeys(latents)


@functools.lru_cache(maxsize=1024)  # by identity of `sinks`: reading a parameter waits for all that MLX computes
def _options(window: int | None, soft_cap: float | None, sinks: mx.array | None) -> AttentionOptions:
    """Return the options of a layer: one object for all its passes."""
    heads = None if sinks is None else np.array(sinks.astype(mx.float32))
    return AttentionOptions(window=window, soft_cap=soft_cap, sinks=heads)


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


# ------------------------------------------------------------------------------------------- the stand-ins


def _attention(original: Any) -> Any:
    @functools.wraps(original)
    def scaled_dot_product_attention(q: mx.array, k: Any, v: Any, **options: Any) -> mx.array:
        if isinstance(k, PagedContext):
            return k.attend(q, v, **options)
        return original(q, k, v, **options)

    return scaled_dot_product_attention


def _gemma2_call(original: Any) -> Any:
    @functools.wraps(original)
    def __call__(self: Any, x: mx.array, mask: Any = None, cache: Any = None) -> mx.array:
        if type(mask) is not PagedMask:
            if self.repeats > 1 and isinstance(mask, mx.array) and mask.ndim == 4:
                mask = mask[:, :, None]  # a mask per row; the scores have an axis more than those of other models
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


# --------------------------------------------------------------------------------------------------- sites


ATTENTION = Site(mx.fast, "scaled_dot_product_attention", _attention)
GEMMA2 = Site(gemma2.Attention, "__call__", _gemma2_call)


def find_sites(model: Any) -> tuple[Site, ...]:
    """Return what stand-ins have to replace for a model to attend over the pool."""
    modules = model.modules() if isinstance(model, nn.Module) else ()
    is_capped = any(isinstance(module, gemma2.Attention) for module in modules)
    return (ATTENTION, GEMMA2) if is_capped else (ATTENTION,)


# ---------------------------------------------------------------------- masks of gathered contexts


def causal_mask(
    lens: np.ndarray,
    new: np.ndarray,
    num_columns: int,
    window: int | None,
    return_array: bool = False,
    *,
    held: int | None = None,
    keep: int = 0,
) -> mx.array | str | None:
    """Return the mask of a pass that adds `new` tokens ``[B]`` to sequences of `lens` tokens ``[B]``.

    `window` is that of the model, `held` that of its cache: mlx-lm's RotatingKVCache has dropped all but the last
    ``held - 1`` tokens when a pass begins. Where the model asks for a wider mask, only those can be seen. The first
    `keep` tokens are seen beside a window.

    The result is None or "causal" where all rows are equally long and the window covers them. Otherwise it is an array,
    see `PagedKVCache.make_mask`.
    """
    ends = lens + new
    kv_len = int(ends.max())
    is_even = bool((ends == kv_len).all() and (new == num_columns).all())
    window = window or held
    oldest = lens - held + 1 if held is not None and window is not None and window > held else None
    if is_even and (window is None or kv_len <= window + keep) and (oldest is None or oldest.max() <= 0):
        if num_columns == 1:
            return None
        if not return_array:
            return "causal"
    different = slice(1) if is_even else slice(None)  # one row stands for all equal ones
    last = np.maximum(ends[different] - 1, 0)  # padding columns repeat it: they see something, so nothing becomes NaN
    position = np.minimum(lens[different, None] + np.arange(num_columns), last[:, None]).astype(np.int32)
    query, key = mx.array(position)[:, None, :, None], mx.arange(kv_len)
    mask = key <= query
    if window is not None:
        mask = mask & ((key > query - window) | (key < keep))
    if oldest is not None:
        mask = mask & (key >= mx.array(oldest[different].astype(np.int32))[:, None, None, None])
    return mask
