"""Causal masks over left-aligned contexts."""

from __future__ import annotations

import mlx.core as mx
import numpy as np


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
    mask = _mask(lens[different], ends[different], num_columns, kv_len, window, keep)
    if oldest is not None:
        mask = mask & (mx.arange(kv_len) >= mx.array(oldest[different].astype(np.int32))[:, None, None, None])
    return mask


def _mask(
    starts: np.ndarray, ends: np.ndarray, num_columns: int, kv_len: int, window: int | None, keep: int
) -> mx.array:
    """Causal mask, bool ``[B, 1, N, C]``: column j of row i sits at position ``starts[i] + j``.

    Padding columns repeat the row's last position: they see something, so nothing becomes NaN.
    """
    last = np.maximum(ends - 1, 0)
    position = np.minimum(starts[:, None] + np.arange(num_columns), last[:, None]).astype(np.int32)
    query, key = mx.array(position)[:, None, :, None], mx.arange(kv_len)
    mask = key <= query
    if window is not None:
        mask = mask & ((key > query - window) | (key < keep))
    return mask
