"""The hook into mlx-lm: every engine asks ``make_prompt_cache`` for caches, and that asks ``model.make_cache``."""

from __future__ import annotations

import sys
from typing import Any, NoReturn

from mlx_lm.models.cache import make_prompt_cache

_NAME = "make_cache"
_NOTHING = object()


class Hook:
    """What stands in for a model's ``make_cache``, one per model however many are installed on it.

    The last one of `installed`, each a `PagedKV`, makes the caches. They may leave in any order; with the last one to
    leave the model is as it was.
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
        """Make `kv` the one whose caches ``kv.model`` hands out; returns the hook that does it."""
        hook = vars(kv.model).get(_NAME)
        if not isinstance(hook, cls):
            hook = cls(kv.model)
            setattr(kv.model, _NAME, hook)
        hook.installed.append(kv)
        return hook

    @classmethod
    def of(cls, model: Any, call: str) -> Hook:
        """The hook of a model inside the block; anything else in its place is a RuntimeError that names it."""
        hook = vars(model).get(_NAME)
        if not isinstance(hook, cls):
            found = "not there" if hook is None else repr(hook)
            raise RuntimeError(
                f"[{call}] model.make_cache is {found}, not kvpool's: the model is not installed, or somebody has "
                "taken the hook away; mlx-lm would make its own caches, outside the pool"
            )
        return hook

    def lost(self, model: Any) -> str:
        """Why mlx-lm does not come here any more for caches of the model; "" if it does."""
        found = vars(model).get(_NAME, _NOTHING)
        if found is _NOTHING:
            return "somebody has deleted model.make_cache"
        return "" if found is self else f"somebody has set model.make_cache to {found!r}"

    def require_ours(self, model: Any) -> None:
        """Raise RuntimeError if something else is in this hook's place, which leaving would overwrite."""
        found = vars(model).get(_NAME, self)
        if found is not self:
            raise RuntimeError(
                f"[install] model.make_cache is {found!r}, which somebody has set inside the block: put back what "
                "was there before the block ends"
            )

    def leave(self, kv: Any) -> None:
        """Take back one `enter` of `kv`, wherever it stands.

        Raises
        ------
        RuntimeError
            Somebody has deleted the hook. `kv` has left all the same: there is nothing that could be put back.
        """
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
        """The caches that mlx-lm makes for a model, inside a block too."""
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

    Without a ``make_cache`` mlx-lm would honour it, with one it never does, and does not pass it on either.
    So the only place where it can be seen is the caller's frame.
    """
    if caller.f_code is make_prompt_cache.__code__ and caller.f_locals.get("max_kv_size") is not None:
        raise ValueError(
            f"[make_cache] max_kv_size is {caller.f_locals['max_kv_size']}, paged caches keep every token: leave "
            "it out, or use the model without kvpool"
        )
