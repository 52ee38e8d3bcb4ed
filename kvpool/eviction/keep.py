"""What `KVBackend.compact` is given, checked."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

__all__ = ["checked_keep"]


def checked_keep(backend: Any, blocks: Sequence[int] | np.ndarray, keep: Any) -> tuple[np.ndarray, np.ndarray]:
    """The arguments of `KVBackend.compact` as arrays: for use inside backends, before a byte is changed.

    Parameters
    ----------
    backend : KVBackend
    blocks, keep
        As given to `compact`.

    Returns
    -------
    ids : int64 ``[m]``
        The blocks, distinct and inside the pool.
    keep : int64 ``[L, Hk, n]``
        C-contiguous, ascending along the last axis.

    Raises
    ------
    TypeError, ValueError, IndexError
        ``[compact] ...``: no integers, shapes that do not fit, a block named twice, positions that do not ascend or are
        outside of the blocks, a block outside of the pool.
    """
    spec = backend.spec
    ids, places = np.asarray(blocks), np.asarray(keep)
    for name, array in (("blocks", ids), ("keep", places)):
        if array.size and not np.issubdtype(array.dtype, np.integer):
            raise TypeError(f"[compact] {name} must be integers, got {array.dtype}")
    if ids.ndim != 1:
        raise ValueError(f"[compact] blocks must have shape [m], got {list(ids.shape)}")
    if ids.size and not 0 <= ids.min() <= ids.max() < backend.num_blocks:
        bad = int(ids.min()) if ids.min() < 0 else int(ids.max())
        raise IndexError(f"[compact] block {bad} is outside the pool, the limit is {backend.num_blocks}")
    if np.unique(ids).size != ids.size:
        raise ValueError(f"[compact] a block is named twice in {ids.tolist()}")
    heads = (spec.num_layers, spec.num_kv_heads)
    if places.ndim != 1 and (places.ndim != 3 or places.shape[:2] != heads):
        raise ValueError(f"[compact] keep must have shape [n] or [{heads[0]}, {heads[1]}, n], got {list(places.shape)}")
    limit = ids.size * spec.block_size
    if places.size:
        if not 0 <= places.min() <= places.max() < limit:
            bad = int(places.min()) if places.min() < 0 else int(places.max())
            raise ValueError(f"[compact] position {bad} is outside the {ids.size} blocks, the limit is {limit}")
        if (np.diff(places, axis=-1) <= 0).any():
            raise ValueError("[compact] keep must ascend along its last axis")
    places = np.broadcast_to(places.astype(np.int64), (*heads, places.shape[-1]))
    return ids.astype(np.int64), np.ascontiguousarray(places)
