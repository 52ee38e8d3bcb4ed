"""Traces: the requests of a serving system, with their prompts reduced to block hashes.

Also what these prompts have in common (`paths_of`), and a synthetic trace.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import takewhile

import numpy as np
from numpy.typing import NDArray

TOKEN_MAX = 2**31 - 1
"""Largest token id of the prefix cache."""


@dataclass(frozen=True, eq=False)
class Trace:
    """Requests in file order, R of them.

    Two prompts begin with the same tokens exactly as far as their hash ids are equal: id j of a request stands for
    its tokens ``[j * block_size, (j + 1) * block_size)``. Tokens behind the last id belong to this request alone.

    Attributes
    ----------
    name : str
        For people: the file's name.
    block_size : int
        Tokens per hash id; 0 for a trace without ids.
    prompts, outputs : int64 ``[R]``
        Tokens of each prompt (at least 1) and of its answer.
    ids : int64 ``[sum of ids]``
        Hash ids of all requests, one request after the other.
    id_offsets : int64 ``[R + 1]``
        Request i has ``ids[id_offsets[i]:id_offsets[i + 1]]``.
    timestamps : int64 or float64 ``[R]``
        Arrival, milliseconds. Closed-loop replay does not look at it.
    sessions : int64 ``[R]``
        Conversation, -1 when unknown.
    """

    name: str
    block_size: int
    prompts: NDArray[np.int64]
    outputs: NDArray[np.int64]
    ids: NDArray[np.int64] = field(repr=False)
    id_offsets: NDArray[np.int64] = field(repr=False)
    timestamps: NDArray[np.int64] | NDArray[np.float64] = field(repr=False)
    sessions: NDArray[np.int64] = field(repr=False)

    def __len__(self) -> int:
        return len(self.prompts)

    def head(self, rows: int) -> Trace:
        """Return a trace of the first `rows` requests."""
        end = int(self.id_offsets[min(rows, len(self))])
        return replace(
            self,
            prompts=self.prompts[:rows],
            outputs=self.outputs[:rows],
            ids=self.ids[:end],
            id_offsets=self.id_offsets[: rows + 1],
            timestamps=self.timestamps[:rows],
            sessions=self.sessions[:rows],
        )

    def ids_of(self, row: int) -> NDArray[np.int64]:
        """Return the hash ids of one request."""
        return self.ids[self.id_offsets[row] : self.id_offsets[row + 1]]

    def tokens(self, row: int, length: int) -> NDArray[np.int32]:
        """Return token ids for the first `length` positions of a request, int32 ``[length]``.

        Every token of a block is the (renumbered) hash id of that block, every token behind the last id, generated
        ones included, is a number that only this request has. So two requests agree on a prefix of tokens
        exactly when their ids agree on it, for every block size of the pool.
        """
        codes, first_unused = self._codes
        start, end = self.id_offsets[row], self.id_offsets[row + 1]
        known = codes[start : min(end, start - (-length // max(self.block_size, 1)))]
        tokens = np.full(length, first_unused + row, np.int32)
        hashed = np.repeat(known, self.block_size)[: min(length, int(self.prompts[row]))]
        tokens[: len(hashed)] = hashed
        return tokens

    @cached_property
    def _codes(self) -> tuple[NDArray[np.int32], int]:
        """The hash ids as small numbers, and the first number above them."""
        codes, first_unused = self.ids, int(self.ids.max(initial=-1)) + 1
        if self.ids.min(initial=0) < 0 or first_unused + len(self) > TOKEN_MAX:
            values, codes = np.unique(self.ids, return_inverse=True)
            first_unused = len(values)
        return codes.astype(np.int32), first_unused


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


MASK = 2**64 - 1


class SplitMix64:
    """Random integers from a 64-bit counter."""

    def __init__(self, seed: int) -> None:
        self.state = seed & MASK

    def draw(self) -> int:
        """Return 64 random bits."""
        self.state = (self.state + 0x9E3779B97F4A7C15) & MASK
        bits = self.state
        bits = (bits ^ bits >> 30) * 0xBF58476D1CE4E5B9 & MASK
        bits = (bits ^ bits >> 27) * 0x94D049BB133111EB & MASK
        return bits ^ bits >> 31

    def below(self, limit: int) -> int:
        """Return an integer in ``[0, limit)``."""
        return self.draw() % limit

    def between(self, first: int, last: int) -> int:
        """Return an integer in ``[first, last]``."""
        return first + self.below(last - first + 1)

    def small(self, first: int, last: int) -> int:
        """Return an integer in ``[first, last]``, more often a small one: the least of three."""
        return min(self.between(first, last) for _ in range(3))


@dataclass
class _Conversation:
    number: int
    ids: list[int]
    turns_left: int


def synthetic_trace(seed: int = 1, sessions: int = 24, block_size: int = 16) -> Trace:
    """Return the trace of `sessions` conversations, each of 1 to 12 turns.

    Prompts keep their last, partly filled block without an id, as agent traces do.
    """
    random, num_ids = SplitMix64(seed), 0

    def new_ids(count: int) -> list[int]:
        nonlocal num_ids
        num_ids += count
        return list(range(num_ids - count, num_ids))

    system_prompts = [new_ids(random.between(4, 24)) for _ in range(3)]
    live = [_Conversation(number, system_prompts[random.below(3)], random.small(1, 12)) for number in range(sessions)]
    clock, rows = 0, []
    while live:
        talk = live[random.below(len(live))]
        history = talk.ids
        if len(history) > 1 and random.below(8) == 0:
            history = history[: random.between(1, len(history))]
        talk.ids = history + new_ids(random.small(1, 40))
        clock += random.between(0, 400)
        prompt = len(talk.ids) * block_size + random.below(block_size)
        rows.append((clock, talk.number, prompt, random.small(1, 160), talk.ids))
        talk.turns_left -= 1
        if talk.turns_left == 0:
            live.remove(talk)
    timestamps, numbers, prompts, outputs, ids = zip(*rows, strict=True)
    return Trace(
        name=f"synthetic (seed {seed}, {sessions} sessions)",
        block_size=block_size,
        prompts=np.array(prompts, np.int64),
        outputs=np.array(outputs, np.int64),
        ids=np.concatenate([np.array(row, np.int64) for row in ids]),
        id_offsets=np.cumsum([0, *map(len, ids)], dtype=np.int64),
        timestamps=np.array(timestamps, np.int64),
        sessions=np.array(numbers, np.int64),
    )
