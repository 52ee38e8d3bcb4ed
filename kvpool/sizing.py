"""What the layers of a model keep, in groups, and how many bytes that is. (Blocks that fit a machine: `kvpool.config`.)

A group is all layers that keep the same: keys and values of every token (``full``), of the last tokens (``window``), of
the tokens since a multiple (``chunk``), or a state of one size whatever the length (``state``). `kvpool.model_config`
reads them from a config.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from math import prod

from kvpool.spec import DTYPES

_ITEMSIZES = DTYPES | {"int64": 8, "int32": 4, "uint32": 4, "int8": 1, "uint8": 1}
_ROWS_STEP = 256  # mlx-lm's caches grow by so many rows
_PREFILL_STEP = 2048  # tokens of a prompt that mlx-lm's generate feeds at once


@dataclass(frozen=True, slots=True)
class StateArray:
    """One array of a state, of one sequence."""

    shape: tuple[int, ...]
    dtype: str

    @property
    def nbytes(self) -> int:
        """Bytes of the array."""
        return prod(self.shape) * _ITEMSIZES[self.dtype]


@dataclass(frozen=True, slots=True)
class LayerGroup:
    """Layers of one model that keep the same.

    Parameters
    ----------
    kind : {"full", "window", "chunk", "state"}
        What they keep of a sequence.
    layers : tuple of int
        The layers that own the bytes. A layer that keeps two such caches stands twice.
    dtype : str
        Of keys and values; the arrays of a state have their own.
    size : int, optional
        Tokens of a window or a chunk.
    kept : int
        First tokens of a sequence that a window keeps for ever; `size` counts them. No model of mlx-lm has any.
    num_kv_heads, head_dim, v_head_dim : int
        Keys have `head_dim` elements per head, values `v_head_dim`. Latent attention keeps one head: the latent as
        key, the rotary part as value.
    read_by : tuple of int
        Layers that attend to keys and values of this group and own none.
    arrays : tuple of StateArray
        What a layer of kind "state" keeps.
    latent : bool
        Whether the keys are latents and the values their rotary parts.
    """

    kind: str
    layers: tuple[int, ...]
    dtype: str
    size: int | None = None
    kept: int = 0
    num_kv_heads: int = 0
    head_dim: int = 0
    v_head_dim: int = 0
    read_by: tuple[int, ...] = ()
    arrays: tuple[StateArray, ...] = ()
    latent: bool = False

    @property
    def token_nbytes(self) -> int:
        """Bytes of one token in all layers of the group; 0 for states."""
        elements = self.num_kv_heads * (self.head_dim + self.v_head_dim)
        return len(self.layers) * elements * _ITEMSIZES[self.dtype]

    @property
    def state_nbytes(self) -> int:
        """Bytes of a sequence that do not depend on its length: one checkpoint of the state takes as many."""
        return len(self.layers) * sum(array.nbytes for array in self.arrays)

    def num_held(self, num_tokens: int) -> int:
        """Tokens of a sequence that the group holds at most while it grows to `num_tokens`."""
        return num_tokens if self.size is None else min(num_tokens, self.size)

    def num_held_in_blocks(self, num_tokens: int, block_size: int) -> int:
        """Slots of the blocks that hold those tokens, wherever in a block the first of them lies."""
        if self.size is None or num_tokens <= self.size:
            return -(-num_tokens // block_size) * block_size
        is_aligned = self.kind == "chunk" and self.size % block_size == 0
        most = self.size // block_size if is_aligned else (self.size + block_size - 2) // block_size + 1
        return min(most, -(-num_tokens // block_size)) * block_size

    def num_held_by_mlx_lm(self, num_tokens: int) -> int:
        """Rows that mlx-lm's own cache of a layer has after a prompt of ``num_tokens - 1`` and one step."""
        if self.kind == "full":
            return -(-num_tokens // _ROWS_STEP) * _ROWS_STEP
        assert self.size is not None
        rows, grow = 0, _grown_window if self.kind == "window" else _grown_chunk
        for held, new in _steps(num_tokens):
            rows = grow(rows, held, new, self.size)
        return rows

    def sequence_nbytes(self, num_tokens: int) -> int:
        """Bytes of a sequence of `num_tokens`."""
        return self.num_held(num_tokens) * self.token_nbytes + self.state_nbytes

    def mlx_lm_nbytes(self, num_tokens: int) -> int:
        """Bytes that mlx-lm's own caches of these layers hold of it, see `num_held_by_mlx_lm`."""
        if self.kind == "state":
            return self.state_nbytes
        return self.num_held_by_mlx_lm(num_tokens) * self.token_nbytes


def _steps(num_tokens: int) -> Iterator[tuple[int, int]]:
    """(Tokens before, new ones) of mlx-lm's generate: pieces of a prompt, and its last token alone."""
    held = 0
    while held < num_tokens:
        new = min(_PREFILL_STEP, num_tokens - 1 - held) or 1
        yield held, new
        held += new


def _grown_window(rows: int, held: int, new: int, size: int) -> int:
    """Rows of a RotatingKVCache after `new` tokens more."""
    if new > 1:
        return min(held, rows, size - 1) + new if held else new
    if held >= rows and rows < size:
        rows += min(_ROWS_STEP, size - held)
    return min(rows, size)


def _grown_chunk(rows: int, held: int, new: int, size: int) -> int:
    """Rows of a ChunkedKVCache after `new` tokens more; it is trimmed to a chunk before each step."""
    valid = min(held, size)
    if held > size:
        rows = size
    if valid + new > rows:
        rows = (rows if valid % _ROWS_STEP == 0 else valid) + -(-new // _ROWS_STEP) * _ROWS_STEP
    return rows
