"""What a trace is: the requests of a serving system, with their prompts reduced to block hashes."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from functools import cached_property

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
