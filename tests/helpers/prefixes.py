"""What the tests of the prefix cache do again and again: serve a request, and see what is cached."""

from __future__ import annotations

from typing import Any

import numpy as np


def compute(make_plan: Any, pool: Any, handle: int, n: int) -> None:
    """Write n tokens and wait for them."""
    plan = make_plan(pool, 1, max(n, 1), formats=("seq_lens",))
    pool.step(plan, [handle], n)
    if plan.is_pending:
        pool.done(plan)


def serve(make_plan: Any, pool: Any, tokens: list[int], namespace: bytes = b"") -> int:
    """Open for a prompt, compute what is not cached and commit it; returns the handle."""
    handle = pool.open(tokens, namespace)
    cached = pool.num_tokens(handle)
    compute(make_plan, pool, handle, len(tokens) - cached)
    pool.prefix.commit(handle, tokens[cached:])
    return handle


def cache(make_plan: Any, pool: Any, tokens: list[int], namespace: bytes = b"") -> list[int]:
    """Serve a prompt and close it; returns its full blocks."""
    handle = serve(make_plan, pool, tokens, namespace)
    blocks = pool.table(handle, 0).ravel().tolist()
    pool.close(handle)
    return blocks[: len(tokens) // pool.block_size]


def as_arrays(tokens: list[int]) -> list[Any]:
    """The same tokens in every accepted form."""
    return [tokens, tuple(tokens), np.array(tokens, np.int32), np.array(tokens, np.int64)]
