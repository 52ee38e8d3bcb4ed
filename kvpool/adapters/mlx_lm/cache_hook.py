"""The hook into mlx-lm: engines call ``make_prompt_cache`` for caches, and that calls ``model.make_cache``."""

from __future__ import annotations

import sys
from typing import Any, NoReturn

from mlx_lm.models.cache import make_prompt_cache

_NAME = "make_cache"
_NOTHING = object()


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
