"""A trace as nodes of a prefix tree: what its requests have in common, and what no cache can give them."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import takewhile

from kvpool.replay.trace import Trace

Path = Sequence[int]
"""The full blocks of a prompt. Two prompts have the same number exactly where their tokens agree up to its end."""


def paths_of(trace: Trace, block_size: int) -> list[Path]:
    """Return the path of every request, in blocks of `block_size`, which divides the trace's.

    Raises
    ------
    ValueError
        The block size does not divide the trace's.
    """
    width = trace.block_size or block_size
    if block_size < 1 or width % block_size:
        raise ValueError(f"[paths_of] block_size is {block_size}, it has to divide that of the trace ({width})")
    parts, nodes, lonely = width // block_size, dict[tuple[int, int], int](), 0
    paths = list[Path]()
    for row, prompt in enumerate(trace.prompts.tolist()):
        count, node, path = prompt // block_size, -1, list[int]()
        for key in trace.ids_of(row).tolist():
            node = nodes.setdefault((node, key), len(nodes))
            path.extend(range(node * parts, node * parts + parts))
        del path[count:]
        alone = count - len(path)
        path.extend(range(-lonely - 1, -lonely - alone - 1, -1))
        lonely += alone
        paths.append(path)
    return paths


def shareable_blocks(trace: Trace, paths: Sequence[Path], block_size: int) -> list[int]:
    """Return how many leading blocks of each request an earlier one had; the last token is always computed."""
    seen, found = set[int](), []
    for prompt, path in zip(trace.prompts.tolist(), paths, strict=True):
        most = path[: (prompt - 1) // block_size]
        found.append(sum(1 for _ in takewhile(seen.__contains__, most)))
        seen.update(path)
    return found


def unique_blocks(paths: Sequence[Path]) -> int:
    """Return the number of different blocks: what a cache that loses nothing holds."""
    return len(set().union(*paths)) if paths else 0
