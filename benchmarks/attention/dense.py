"""Decode over dense, contiguous K and V by torch, in its best form; and the threads of torch and BLAS."""

from __future__ import annotations

import contextlib
import importlib
import importlib.util
import os
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import numpy as np


def torch_attention(q: np.ndarray, k: np.ndarray, v: np.ndarray, dtype: str) -> Callable[[], Any]:
    """Return torch's SDPA of q ``[B, Hk, G, D]``, k and v ``[B, Hk, C, D]``, on the same memory.

    The query heads of a group are handed over as queries of one head: with ``enable_gqa`` torch is slower.
    """
    torch: Any = importlib.import_module("torch")  # no extra of kvpool brings it: nor its types

    def tensor(x: np.ndarray) -> Any:
        return torch.from_numpy(x.view(np.int16)).view(torch.bfloat16) if dtype == "bfloat16" else torch.from_numpy(x)

    attend = torch.inference_mode()(torch.nn.functional.scaled_dot_product_attention)
    return partial(attend, tensor(q), tensor(k), tensor(v))


def torch_version() -> str | None:
    """Return the version of torch, None where it does not import."""
    with contextlib.suppress(ImportError):
        return str(importlib.import_module("torch").__version__)
    return None


@contextlib.contextmanager
def torch_threads(num_threads: int) -> Iterator[None]:
    """Within it, torch uses so many threads."""
    torch: Any = importlib.import_module("torch")
    before = torch.get_num_threads()
    torch.set_num_threads(num_threads)
    yield
    torch.set_num_threads(before)


def blas_threads(num_threads: int) -> contextlib.AbstractContextManager[Any] | None:
    """Return a context in which numpy's BLAS uses so many threads, None where it cannot be told to."""
    if importlib.util.find_spec("threadpoolctl"):
        limits: contextlib.AbstractContextManager[Any] = importlib.import_module("threadpoolctl").threadpool_limits(
            num_threads, "blas"
        )
        return limits
    affinity = getattr(os, "sched_getaffinity", None)  # Linux has it
    num_cpus = len(affinity(0)) if affinity else os.cpu_count() or 1
    return contextlib.nullcontext() if num_threads == num_cpus else None
