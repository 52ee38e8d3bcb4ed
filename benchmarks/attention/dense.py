"""Decode over dense, contiguous K and V with numpy and torch, each in its best form."""

from __future__ import annotations

import contextlib
import importlib
import importlib.util
import os
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import numpy as np

from benchmarks.attention.cache import widened

Attention = Callable[[], Any]  # computes, and returns the result: [B, Hk, G, D] of the framework


def numpy_attention(q: np.ndarray, k: np.ndarray, v: np.ndarray, dtype: str) -> Attention:
    """Return attention by BLAS, sequence by sequence; 16-bit caches are widened first, as numpy multiplies none.

    q is ``[B, Hk, G, D]``, k and v are ``[B, Hk, C, D]``, elements of `dtype`.
    """
    queries = widened(q, dtype) / np.float32(np.sqrt(q.shape[-1]))
    out = np.empty((*q.shape[:3], v.shape[-1]), np.float32)

    def attend() -> np.ndarray:
        for row in range(len(q)):
            weights = queries[row] @ widened(k[row], dtype).transpose(0, 2, 1)
            weights -= weights.max(axis=-1, keepdims=True)
            np.exp(weights, out=weights)
            weights /= weights.sum(axis=-1, keepdims=True)
            np.matmul(weights, widened(v[row], dtype), out=out[row])
        return out

    return attend


def torch_attention(q: np.ndarray, k: np.ndarray, v: np.ndarray, dtype: str) -> Attention:
    """Return torch's SDPA on the same memory.

    The query heads of a group are handed over as queries of one head: with ``enable_gqa`` torch is slower.
    """
    torch: Any = importlib.import_module("torch")  # no extra of kvpool brings it: nor its types

    def tensor(x: np.ndarray) -> Any:
        return torch.from_numpy(x.view(np.int16)).view(torch.bfloat16) if dtype == "bfloat16" else torch.from_numpy(x)

    attend = torch.inference_mode()(torch.nn.functional.scaled_dot_product_attention)
    return partial(attend, tensor(q), tensor(k), tensor(v))


MAKERS: dict[str, Callable[..., Attention]] = {"numpy": numpy_attention, "torch": torch_attention}


def installed(names: tuple[str, ...]) -> dict[str, str]:
    """Return those of `names` that import here, with their versions."""
    found = {}
    for name in names:
        with contextlib.suppress(ImportError):
            found[name] = str(importlib.import_module(name).__version__)
    return found


def missing_threads(name: str, num_threads: int) -> str | None:
    """Return why dense attention by `name` cannot be measured with so many threads, None if it can."""
    if name == "numpy" and num_threads != num_cpus() and importlib.util.find_spec("threadpoolctl") is None:
        return "numpy's threads are set by threadpoolctl: pip install threadpoolctl"
    return None


def num_cpus() -> int:
    """Return the CPUs that this process may use."""
    affinity = getattr(os, "sched_getaffinity", None)  # Linux has it
    return len(affinity(0)) if affinity else os.cpu_count() or 1


@contextlib.contextmanager
def framework_threads(num_threads: int, names: tuple[str, ...]) -> Iterator[None]:
    """Within it, the frameworks in `names` use so many threads, if they let themselves be told."""
    with contextlib.ExitStack() as stack:
        if "torch" in names:
            torch: Any = importlib.import_module("torch")
            stack.callback(torch.set_num_threads, torch.get_num_threads())
            torch.set_num_threads(num_threads)
        if "numpy" in names and importlib.util.find_spec("threadpoolctl"):
            stack.enter_context(importlib.import_module("threadpoolctl").threadpool_limits(num_threads, "blas"))
        yield
