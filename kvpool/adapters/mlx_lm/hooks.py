"""What `install` replaces in mlx-lm while a block lasts, and how each thing is put back.

A `Hook` stands for a model's ``make_cache``, which engines reach by ``make_prompt_cache``. A `Site` is one attribute of
a module or a class, which a stand-in replaces for all models that are installed.

mlx-lm's server itself answers what fails before a request has begun. Later an exception ends the connection without an
answer, and a pool may raise later: it may run out of blocks, or hold other bits than the server's ``kv_bits``. So one
site sends the error.
"""

from __future__ import annotations

import functools
import json
import logging
import sys
import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple, NoReturn

from mlx_lm.models.cache import make_prompt_cache

_log = logging.getLogger(__name__)

_NAME = "make_cache"
_NOTHING = object()
_patches: dict[tuple[Any, str], _Patch] = {}
_lock = threading.Lock()


class Hook:
    """Replaces a model's ``make_cache``. A model has one hook, however many `PagedKV` are installed on it.

    The last of `installed` makes the caches. They may leave in any order. The last one to leave restores the model.
    """

    def __init__(self, model: Any) -> None:
        self.installed: list[Any] = []
        self._hidden = vars(model).get(_NAME, _NOTHING)
        self._heeds_max_kv_size = not hasattr(model, _NAME)

    def __call__(self) -> list[Any]:
        if self._heeds_max_kv_size:
            _refuse_max_kv_size(sys._getframe(1))
        return self.installed[-1].make_cache()

    def __deepcopy__(self, memo: dict[int, Any]) -> NoReturn:
        raise TypeError("[install] a model cannot be copied inside the block, its caches are those of one pool")

    @classmethod
    def enter(cls, kv: Any) -> Hook:
        """Let ``kv.model`` make caches of `kv` from now on. Return the hook."""
        hook = vars(kv.model).get(_NAME)
        if not isinstance(hook, cls):
            hook = cls(kv.model)
            setattr(kv.model, _NAME, hook)
        hook.installed.append(kv)
        return hook

    def lost(self, model: Any) -> str:
        """Return why mlx-lm does not find this hook any more, or "" if it does."""
        found = vars(model).get(_NAME, _NOTHING)
        if found is _NOTHING:
            return "somebody has deleted model.make_cache"
        return "" if found is self else f"somebody has set model.make_cache to {found!r}"

    def require_ours(self, model: Any) -> None:
        """Raise RuntimeError if somebody has set ``make_cache`` to something else: leaving would overwrite it."""
        found = vars(model).get(_NAME, self)
        if found is not self:
            raise RuntimeError(
                f"[install] model.make_cache is {found!r}, which somebody has set inside the block: put back what "
                "was there before the block ends"
            )

    def leave(self, kv: Any) -> None:
        """Undo the newest `enter` of `kv`. Raise RuntimeError if somebody has deleted the hook; `kv` has left then."""
        self.installed.reverse()
        self.installed.remove(kv)  # its newest
        self.installed.reverse()
        if lost := self.lost(kv.model):
            raise RuntimeError(
                f"[install] {lost} inside the block: mlx-lm has made its own caches since, outside the pool; end the "
                "block to take the hook away"
            )
        if not self.installed:
            self._uncover(kv.model)

    @classmethod
    def stock_caches(cls, model: Any) -> list[Any]:
        """Return the caches that mlx-lm makes for a model without the hook. Works inside a block, too."""
        hook = vars(model).get(_NAME)
        if not isinstance(hook, cls):
            return make_prompt_cache(model)
        hook._uncover(model)
        try:
            return make_prompt_cache(model)
        finally:
            setattr(model, _NAME, hook)

    def _uncover(self, model: Any) -> None:
        """Put back what was there before this hook."""
        if self._hidden is _NOTHING:
            delattr(model, _NAME)
        else:
            setattr(model, _NAME, self._hidden)


def _refuse_max_kv_size(caller: Any) -> None:
    """Raise if `caller` is a ``make_prompt_cache`` that was given a ``max_kv_size``.

    mlx-lm honours it for models without a ``make_cache``. For others it ignores it and does not pass it on, so only the
    caller's frame shows it.
    """
    if caller.f_code is make_prompt_cache.__code__ and caller.f_locals.get("max_kv_size") is not None:
        raise ValueError(
            f"[make_cache] max_kv_size is {caller.f_locals['max_kv_size']}, paged caches keep every token: leave "
            "it out, or use the model without kvpool"
        )


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


@dataclass(slots=True)
class _Patch:
    """A stand-in and the number of its users. It is kept after the last one leaves, for the next."""

    original: Any
    stand_in: Any
    count: int = 0


def _answering(original: Any) -> Any:
    @functools.wraps(original)
    def handle_completion(self: Any, *args: Any, **kwargs: Any) -> Any:
        try:
            return original(self, *args, **kwargs)
        except ConnectionError:  # the client is gone
            raise
        except Exception as error:
            _log.exception("a request to mlx-lm's server failed")
            _answer(self, json.dumps({"error": f"{type(error).__name__}: {error}"}).encode())

    return handle_completion


def _answer(handler: Any, body: bytes) -> None:
    """Send an error: status 500 if no head of an answer was sent, else an event of the stream."""
    if getattr(handler, "_headers_buffer", True):  # there is none before the first line of a head
        handler._headers_buffer = []
        handler._set_completion_headers(500)
        handler.send_header("Content-Length", str(len(body)))
        handler.end_headers()
    else:
        body = b"data: " + body + b"\n\n"
    handler.wfile.write(body)
    handler.wfile.flush()


def server_sites() -> tuple[Site, ...]:
    """Return what `install` replaces in mlx-lm's server: nothing where a release has that elsewhere."""
    try:
        from mlx_lm.server import APIHandler
    except ImportError:
        return ()
    site = Site(APIHandler, "handle_completion", _answering)
    return (site,) if site.name in vars(APIHandler) else ()
