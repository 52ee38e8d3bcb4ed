"""`Converted`: a backend for arrays of another framework, as a backend for those of MLX."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import mlx.core as mx
import numpy as np

from kvpool.protocol import KVBackend


class Converted:
    """Wraps a backend for other arrays and converts them from and to MLX arrays. All else is passed through.

    Every call evaluates its arguments and has run when it returns. So no MLX work is queued on the storage.

    Parameters
    ----------
    backend : KVBackend
    """

    def __init__(self, backend: KVBackend) -> None:
        self._inside = backend
        self._dtype = getattr(mx, backend.spec.dtype)
        self.capabilities = replace(backend.capabilities, arrays="mlx", lazy=False)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inside, name)

    def write(self, step: Any, layer: int, k: mx.array, v: mx.array) -> None:
        """See `kvpool.protocol.KVBackend.write`."""
        self._inside.write(step, layer, self._theirs(k), self._theirs(v))

    def attend(self, step: Any, layer: int, q: mx.array, scale: float | None = None, **more: Any) -> Any:
        """See `kvpool.protocol.KVBackend.attend`; float32 results are rounded to the dtype of `q`."""
        results = self._inside.attend(step, layer, self._theirs(q), scale, **more)
        if isinstance(results, tuple):
            return tuple(self._ours(x, q.dtype if i == 0 else mx.float32) for i, x in enumerate(results))
        return self._ours(results, q.dtype)

    def read(self, step: Any, layer: int) -> tuple[mx.array, mx.array]:
        """See `kvpool.protocol.KVBackend.read`."""
        k, v = self._inside.read(step, layer)
        return self._ours(k, self._dtype), self._ours(v, self._dtype)

    def queued(self, layer: int) -> list[mx.array]:
        """Nothing that MLX could evaluate."""
        return []

    def _theirs(self, x: mx.array) -> Any:
        return self._inside.asarray(np.array(x.astype(mx.float32)))

    def _ours(self, x: Any, dtype: mx.Dtype) -> mx.array:
        return mx.array(self._inside.to_numpy(x)).astype(dtype)
