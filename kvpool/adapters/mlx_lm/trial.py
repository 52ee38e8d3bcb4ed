"""The self-check of `install`: does a model attend over the pool as it attends by itself?

A model is hooked by what it does, not by its name. `reason_to_gather` runs two short rows through the model, on paged
caches with the hook in place and on mlx-lm's own caches. A model that looks into its keys, values or masks on the way
to attention raises an error there. A model that the stand-ins get wrong gives other logits.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from types import TracebackType
from typing import Any

import mlx.core as mx
import numpy as np

from kvpool.adapters.mlx_lm.cache_hook import Hook

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
    rows = [
        kv.model(mx.array([row]), cache=Hook.stock_caches(kv.model) if exact else kv.make_cache()) for row in ROWS
    ]
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
