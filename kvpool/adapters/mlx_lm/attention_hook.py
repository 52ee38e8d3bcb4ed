"""Where mlx-lm's models attend, and what stands in there on the fused route.

mlx-lm has no call for a cache that attends by itself. Its model modules take the function
``scaled_dot_product_attention`` from ``mlx_lm.models.base`` by name; so here the name in the model's own module is
bound to a function that knows `PagedContext` and hands everything else, stock caches too, to the original. gemma2
computes its capped scores itself; there it is ``Attention.__call__``.

A stand-in is only right for the text that it was written for. So a model is taken if, in all its layers, the code
that calls ``update_and_fetch`` is one of `KNOWN`, has the source that this module was tested with, and calls the
function of ``base``, of which the same is true. Any other model gathers.
"""

from __future__ import annotations

import functools
import hashlib
import inspect
import sys
import threading
from collections.abc import Callable, Sequence
from types import CodeType
from typing import Any, NamedTuple

import mlx.core as mx
from mlx_lm.models import base

from kvpool.adapters.mlx_lm.fused import PagedContext, PagedMask

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
"""Classes that do not call the function of ``base``: their ``__call__`` itself is stood in for."""


# --------------------------------------------------------------------------------------------------- sites


class Site(NamedTuple):
    """One attribute of mlx-lm that a stand-in takes the place of."""

    owner: Any
    name: str
    make: Callable[[Any], Any]

    def __str__(self) -> str:
        return f"{self.owner.__name__}.{self.name}"

    @property
    def is_active(self) -> bool:
        """Whether the stand-in is there now, and nobody has set something else over it."""
        patch = _patches.get((self.owner, self.name))
        return patch is not None and vars(self.owner).get(self.name) is patch.stand_in

    @property
    def is_covered(self) -> bool:
        """Whether something else is where the stand-in should be now."""
        patch = _patches.get((self.owner, self.name))
        return patch is not None and patch.count > 0 and not self.is_active

    def enter(self) -> None:
        """Put the stand-in in place, or count one more that wants it there."""
        with _lock:
            found = vars(self.owner)[self.name]
            patch = _patches.get((self.owner, self.name))
            if patch is None or (not patch.count and found is not patch.original):
                patch = _patches[self.owner, self.name] = _Patch(found, self.make(found))
            if found is patch.original:  # the module may have been reloaded since the first one came
                setattr(self.owner, self.name, patch.stand_in)
            patch.count += 1

    def require_ours(self) -> None:
        """Raise RuntimeError if the next `leave` would be the last one and somebody has set the attribute meanwhile."""
        patch, found = _patches.get((self.owner, self.name)), vars(self.owner).get(self.name)
        if patch is not None and patch.count == 1 and found not in (patch.stand_in, patch.original):
            raise RuntimeError(
                f"[install] {self} is {found!r}, which somebody has set inside the block: "
                "put back what was there before the block ends"
            )

    def leave(self) -> None:
        """Take back one `enter`; the last one puts the original back, whatever the order."""
        with _lock:
            patch = _patches[self.owner, self.name]
            patch.count -= 1
            if not patch.count:
                setattr(self.owner, self.name, patch.original)


class _Patch:
    """A stand-in, and how many want it in place. It is kept for the next one who does."""

    __slots__ = ("count", "original", "stand_in")

    def __init__(self, original: Any, stand_in: Any) -> None:
        self.original = original
        self.stand_in = stand_in
        self.count = 0


_patches: dict[tuple[Any, str], _Patch] = {}
_lock = threading.Lock()


def _original(owner: Any, name: str) -> Any:
    """The attribute without our stand-in."""
    with _lock:
        patch = _patches.get((owner, name))
        found = vars(owner).get(name)
    return patch.original if patch is not None and found is patch.stand_in else found


# ------------------------------------------------------------------------------------------ finding them


def watch(caches: Sequence[Any]) -> list[Caller | None]:
    """Note who calls ``update_and_fetch`` of each cache; the list fills while the model runs."""
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
    """Where the layers of a model attend, if all of it is known.

    Raises
    ------
    LookupError
        Some layer is not; the text says which and why.
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
    """Of the source text; "" when there is none."""
    try:
        return hashlib.sha256(inspect.getsource(function).encode()).hexdigest()[:16]
    except (OSError, TypeError):
        return ""
