"""Places of tokens in transformers' flat KV tensor, for `kvpool.adapters.transformers`: one row per layer and token."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
import torch

from kvpool import Pool


class Places:
    """Rows of the tensor for the tokens of a step.

    Parameters
    ----------
    page : int
        Tokens of a block.
    stride : int
        Rows from one block to the next.
    """

    def __init__(self, page: int, stride: int) -> None:
        self.page, self.stride = page, stride
        self.scratch = np.empty((2, 0, page), np.int64)  # grows

    def of_table(self, plan: Any) -> tuple[np.ndarray, np.ndarray]:
        """Rows to write new tokens to and to read from, for a pool of one table: ``[1, n]`` each.

        The second array holds until the next call.
        """
        lengths = np.diff(plan.indptr) * self.page - self.page + plan.last_page_len
        read = self.runs(plan.indices, plan.indptr[:-1] * self.page, lengths)
        return self.slots(plan.slot_mapping)[None], read[None]

    def of_group(self, part: Any, lens: np.ndarray, counts: list[int], window: int) -> tuple[np.ndarray, np.ndarray]:
        """The same for a layer group, ``[columns, n]`` each. A query reads `window` tokens, itself included; 0: all."""
        page, entry = self.page, np.arange(part.block_tables.shape[1])
        begin = np.maximum(lens - counts - (window or 2**31) + 1, 0)  # first position that is read
        first, end = begin[:, None] // page, -(-lens[:, None] // page)
        ids = part.block_tables[(first <= entry) & (entry < end)].astype(np.int64)  # [n, columns]
        starts = (np.cumsum(end - first) - (end - first)[:, 0]) * page + begin % page
        read = [self.runs(column, starts, lens - begin).copy() for column in ids.T]
        return self.slots(part.slot_mapping.astype(np.int64)), np.stack(read)

    def slots(self, slots: np.ndarray) -> np.ndarray:
        """Rows for slots of the pool."""
        return slots + slots // self.page * (self.stride - self.page)

    def runs(self, ids: np.ndarray, starts: np.ndarray, lengths: np.ndarray) -> np.ndarray:
        """Rows for runs of tokens: from the places `starts` on in the blocks `ids`, which are laid end to end.

        They hold until the next call.
        """
        if len(ids) > self.scratch.shape[1]:
            self.scratch = np.empty((2, 2 * len(ids), self.page), np.int64)
        np.add.outer(ids * self.stride, np.arange(self.page), out=self.scratch[0, : len(ids)])
        (whole, read), end = self.scratch.reshape(2, -1), 0
        for start, length in zip(starts.tolist(), lengths.tolist(), strict=True):
            begin, end = end, end + length
            read[begin:end] = whole[start : start + length]
        return read[:end]


class Stored:
    """Rows of a step: transformers' storage has those of the first column, this those of the others.

    Attributes
    ----------
    rows : int64 ``[columns - 1, N]``
        As wide as transformers' storage. What a step does not use is `trash`, for graphs and padding.
    """

    def __init__(self, trash: int) -> None:
        self.trash = trash
        self.rows = torch.zeros((0, 0), dtype=torch.int64)
        self.used = 0

    def keep(self, storage: torch.Tensor, index: int, values: np.ndarray) -> int:
        """Store the rows of a step, ``[columns, n]``; the first in a row of transformers' storage. Return n."""
        if len(values) > 1:
            if not len(self.rows):
                self.rows = storage.new_full((len(values) - 1, storage.shape[1]), self.trash)
            self.rows[:, : values.shape[1]] = torch.from_numpy(values[1:])
            self.rows[:, values.shape[1] : self.used] = self.trash
            self.used = values.shape[1]
        return store(storage[index], values[0])


def store(storage: torch.Tensor, values: np.ndarray) -> int:
    """Copy to the beginning of a tensor; on the CPU without torch, whose threads take longer to meet than to copy."""
    on_cpu = storage.device.type == "cpu"
    (storage.numpy() if on_cpu else storage)[: len(values)] = values if on_cpu else torch.from_numpy(values)
    return len(values)


class FreeBlocks:
    """The free blocks of a pool, cached ones included, where transformers keeps trees of its own."""

    def __init__(self, blocks: Pool) -> None:
        self.blocks = blocks

    def __len__(self) -> int:
        return self.blocks.stats().free

    def delete_full_trees(self) -> list[int]:
        """Sectors to give back: none."""
        return []


class Tables(Mapping[str, list[int]]):
    """The block table of each request, as transformers reads it when it frees all or makes room."""

    def __init__(self, blocks: Pool, handles: dict[str, int]) -> None:
        self.blocks, self.handles = blocks, handles

    def __getitem__(self, request_id: str) -> list[int]:
        return self.blocks.table(self.handles[request_id]).tolist()

    def __iter__(self) -> Iterator[str]:
        return iter(self.handles)

    def __len__(self) -> int:
        return len(self.handles)
