"""Ranks that see different tokens: pools that keep equal tables by equal calls have to notice.

A replicated engine compares digests instead of tables. What one rank sampled differently, or was told to forget, is
in no table for a long time; so the digest of that very call must differ.
"""

from __future__ import annotations

from typing import Any

from kvpool import Plan


def _told(make_pool: Any, options: dict[str, Any], tokens: list[int], space: bytes) -> list[int]:
    """The digests of a new pool after tokens were committed, and after a namespace was forgotten."""
    pool = make_pool(**{**options, "events": 0})
    try:
        size = len(tokens)
        plan = Plan(pool, 1, size)
        handle = pool.open()
        pool.step(plan, [handle], size)
        if not pool.options.in_order:
            pool.done(plan)
        before = pool.digest()
        pool.prefix.commit(handle, tokens)
        committed = pool.digest()
        pool.prefix.flush(space)
        return [before, committed, pool.digest()]
    finally:
        pool.shutdown()


def ranks_agree(make_pool: Any, options: dict[str, Any], a: int, b: int) -> str | None:
    """What is wrong with the digests of two pools that differ in one token, or in one namespace; None: nothing."""
    most = options["block_size"] * min(options["num_blocks"] - options["reserved_blocks"], 2)
    size = 1 + a % min(most, options["block_size"] * (options["max_blocks_per_seq"] or 2))
    tokens = [(b >> k % 24) & 3 for k in range(size)]
    other = [*tokens]
    other[b % size] ^= 1 + a % 3
    one, same, differs = (_told(make_pool, options, said, b"") for said in (tokens, tokens, other))
    if one != same:
        return "two pools of one seed have different digests after equal calls"
    if one[0] != differs[0]:
        return "two pools have different digests before they were told different tokens"
    if one[1] == differs[1]:
        return f"two pools have equal digests after they were told {tokens} and {other}"
    if one[2] == _told(make_pool, options, tokens, b"another")[2]:
        return "two pools have equal digests after they were told to forget different namespaces"
    return None
