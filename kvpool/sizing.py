"""What the layers of a model keep, in groups, and how many bytes that is. (Blocks that fit a machine: `kvpool.config`.)

A group is all layers that keep the same: keys and values of every token (``full``), of the last tokens (``window``), of
the tokens since a multiple (``chunk``), or a state of one size whatever the length (``state``). `kvpool.model_config`
reads them from a config. `arranged` says how groups share arenas of blocks.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from math import prod
from typing import NamedTuple

from kvpool.spec import DTYPES, KVSpec

_ITEMSIZES = DTYPES | {"int64": 8, "int32": 4, "uint32": 4, "int8": 1, "uint8": 1}


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
    """Layers of one model that keep the same."""

    kind: str  #: what they keep of a sequence: "full", "window", "chunk" or "state"
    layers: tuple[int, ...]  #: those that own the bytes, among those that keep anything; with two such caches twice
    dtype: str  #: of keys and values; the arrays of a state have their own
    size: int | None = None  #: tokens of a window or a chunk
    kept: int = 0  #: first tokens that a window keeps for ever; `size` counts them. No model of mlx-lm has any
    num_kv_heads: int = 0
    head_dim: int = 0  #: elements of a key, per head
    v_head_dim: int = 0  #: elements of a value
    arrays: tuple[StateArray, ...] = ()  #: what a layer of kind "state" keeps
    latent: bool = False  #: the keys are latents and the values their rotary parts, of one head

    @property
    def token_nbytes(self) -> int:
        """Bytes of one token in all layers of the group; 0 for states."""
        elements = self.num_kv_heads * (self.head_dim + self.v_head_dim)
        return len(self.layers) * elements * _ITEMSIZES[self.dtype]

    @property
    def state_nbytes(self) -> int:
        """Bytes of a sequence that do not depend on its length: one checkpoint of the state takes as many."""
        return len(self.layers) * sum(array.nbytes for array in self.arrays)

    def num_held_in_blocks(self, num_tokens: int, block_size: int) -> int:
        """Slots of the blocks that hold those tokens, wherever in a block the first of them lies."""
        if self.size is None or num_tokens <= self.size:
            return -(-num_tokens // block_size) * block_size
        is_aligned = self.kind == "chunk" and self.size % block_size == 0
        most = self.size // block_size if is_aligned else (self.size + block_size - 2) // block_size + 1
        return min(most, -(-num_tokens // block_size)) * block_size


# ---- arenas ------------------------------------------------------------------------------------------------

IDLE = 0.05  # of the bytes of a block of tokens may belong to no layer
_ALIGNMENT = 16  # bytes: where the rows of an arena and the parts of a row begin

Parts = tuple[KVSpec, ...]


class Held(NamedTuple):
    """Where a group of layers has its blocks."""

    arena: int
    width: int  # layer arrays of a block
    columns: int  # blocks for each block of tokens


class ArenaSize(NamedTuple):
    """What the blocks of an arena take."""

    specs: tuple[KVSpec, ...]  # what a block holds, by group
    columns: int  # blocks for each block of tokens, in all groups of the arena
    block_nbytes: int


def arena_sizes(needs: Sequence[tuple[KVSpec, int]], held: Sequence[Held]) -> tuple[ArenaSize, ...]:
    """Return the arenas of groups that are held as `arranged` says."""
    sizes = []
    for number in range(len({each.arena for each in held})):
        own = [(spec, each) for (spec, _), each in zip(needs, held, strict=True) if each.arena == number]
        specs = tuple(replace(spec, num_layers=each.width) for spec, each in own)
        nbytes = block_nbytes_of({(spec,) for spec in specs})
        sizes.append(ArenaSize(specs, sum(each.columns for _, each in own), nbytes))
    return tuple(sizes)


def arranged(needs: Sequence[tuple[KVSpec, int]], is_shared: bool) -> list[Held]:
    """Return how groups of layers are held; `needs` has for each the spec of one layer, and how many layers it has.

    With `is_shared` several shapes share an arena where their bytes agree (their layout must then be "block"). Else
    each shape has an arena of its own.
    """
    shapes = list(dict.fromkeys(spec for spec, _ in needs))
    widths = None
    if is_shared and len(shapes) > 1 and all(map(_fits_a_block, shapes)):
        widths = arrays_of_one_size([(count, spec.block_nbytes) for spec, count in needs])
    if widths:
        return [Held(0, width, -(-count // width)) for width, (_, count) in zip(widths, needs, strict=True)]
    held = []
    for spec, count in needs:
        width = arrays_of_an_arena([other for its, other in needs if its == spec])
        held.append(Held(shapes.index(spec), width, -(-count // width)))
    return held


def _fits_a_block(spec: KVSpec) -> bool:
    try:
        replace(spec, layout="block")
    except ValueError:  # its planes cannot be aligned
        return False
    return True


def arrays_of_one_size(needs: Sequence[tuple[int, int]]) -> list[int] | None:
    """Return how many layer arrays a block has for each group, whose blocks have equal bytes.

    `needs` has for each group its layers, and the bytes of a block of one of them. The bytes of a block are the most
    for which at most 5 % of them idle in every group. None: there is no such number.
    """
    for nbytes in sorted({arrays * one for count, one in needs for arrays in range(1, count + 1)}, reverse=True):
        widths = [min(count, nbytes // one) for count, one in needs]
        if all(
            width and -(-count // width) * nbytes * (1 - IDLE) <= count * one
            for width, (count, one) in zip(widths, needs, strict=True)
        ):
            return widths
    return None


def arrays_of_an_arena(counts: Sequence[int]) -> int:
    """Return how many layer arrays an arena has whose groups have `counts` layers.

    The most for which at most 5 % of the arrays of every group belong to no layer: more arrays mean fewer blocks to
    count.
    """
    widths = arrays_of_one_size([(count, 1) for count in counts])
    assert widths is not None  # blocks of one array have none to idle
    return max(widths)


def block_nbytes_of(shapes: Collection[Parts]) -> int:
    """Return the bytes of a block of an arena, given what a column of each of its groups holds."""
    if len(shapes) == 1 and all(len(parts) == 1 for parts in shapes):
        return next(iter(shapes))[0].block_nbytes
    return max(sum(map(aligned_nbytes, parts)) for parts in shapes)


def aligned_nbytes(spec: KVSpec) -> int:
    """Return the bytes that a part takes of a row."""
    return -(-spec.block_nbytes // _ALIGNMENT) * _ALIGNMENT
