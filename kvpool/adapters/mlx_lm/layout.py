"""Layer groups and arenas of a model's caches, and the place of each layer in them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, NamedTuple

import kvpool
from kvpool.adapters.mlx_lm.shapes import Leaf, ModelShape, Shape, numbers_in, with_bits
from kvpool.config import MAX_TOKENS
from kvpool.groups import Group
from kvpool.sizing import arranged, block_nbytes_of
from kvpool.spec import KVSpec, checked_int

MAX_GROUPS = 8
LOOKAHEAD = 16  # tokens that speculative decoding may take back, where windows allow it
MOST_ENTRIES = 2**27  # of the tables of all sequences, unless a sequence holds little of a long text
MOST_CHECKPOINTS = 256  # of a model with states only, which has one block for each

_Members = dict[tuple[Shape, str, int, int], list[int]]  # shape, kind, size and keep of a group, and its layers


class Place(NamedTuple):
    """The place of a layer's keys and values: an array of a storage, by a column of a layer group."""

    group: int
    column: int
    storage: int
    array: int


@dataclass(frozen=True)
class Layout:
    """The pool and storage of a model's caches."""

    model: ModelShape  # its leaves are as they are held: kinds of layers beyond the number of groups are opaque
    specs: tuple[KVSpec, ...]  # the storages: one for each shape, or more where shapes share an arena
    arenas: tuple[int, ...]  # of each storage
    groups: tuple[Group, ...]
    places: tuple[Place | None, ...]  # of each leaf, None without keys and values

    @cached_property
    def leaves(self) -> tuple[Leaf, ...]:
        """The caches of the model."""
        return self.model.leaves

    @cached_property
    def is_called(self) -> bool:
        """Whether a pass must be known before its first layer, so that the model's call is hooked."""
        return self.is_apart or bool(self.nested) or self.groups != (Group.full(),)

    @cached_property
    def is_apart(self) -> bool:
        """Whether rows run one by one."""
        return self.model.is_apart or any(leaf.kind in ("opaque", "chunk") for leaf in self.leaves)

    @cached_property
    def held(self) -> tuple[int, ...]:
        """The leaves that a batch holds itself: states and opaque ones."""
        return tuple(i for i, place in enumerate(self.places) if place is None)

    @cached_property
    def has_latents(self) -> bool:
        """Whether a layer keeps latents: its decodes may attend over the pool, its chunks gather."""
        return any(spec.latent for spec in self.specs)

    @cached_property
    def nested(self) -> tuple[int, ...]:
        """The leaves inside of CacheLists."""
        return tuple(i for node in self.model.tree if not isinstance(node, int) for i in numbers_in(node))

    @property
    def state_group(self) -> int:
        """The layer group of what a batch holds itself, -1 without one."""
        return len(self.groups) - 1 if self.held else -1

    @cached_property
    def storage_of(self) -> dict[int, int]:
        """The storage of each group of blocks."""
        return {place.group: place.storage for place in self.places if place is not None}

    @property
    def stored(self) -> list[KVSpec | None]:
        """What each group stores, as `GroupStorage` takes it. Batches hold the states themselves."""
        return [self.specs[self.storage_of[i]] if i in self.storage_of else None for i in range(len(self.groups))]

    @cached_property
    def block_nbytes(self) -> tuple[int, ...]:
        """Bytes of a block of each arena. Without keys and values arena 0 holds checkpoints only, one in a block."""
        columns = [self.columns_of(arena) for arena in dict.fromkeys(self.arenas)]
        return tuple(map(block_nbytes_of, columns)) or (self.model.state_nbytes,)

    def columns_of(self, arena: int) -> list[tuple[KVSpec]]:
        """Return what a column holds that lies in an arena, for each of its storages."""
        return [(spec,) for spec, own in zip(self.specs, self.arenas, strict=True) if own == arena]

    @property
    def can_restore(self) -> bool:
        """Whether all that a batch holds itself can be saved in blocks: a prefix can be found without it."""
        return all(self.leaves[leaf].kind == "state" for leaf in self.held)

    @cached_property
    def checkpoint_blocks(self) -> int:
        """Blocks of arena 0 that hold the states of a sequence. 0: there are none, or one that cannot be restored."""
        return -(-self.model.state_nbytes // self.block_nbytes[0]) if self.can_restore else 0

    @property
    def least_bound(self) -> int:
        """The length up to which no layer lets tokens go."""
        return min((group.size for group in self.groups if group.kind in ("window", "chunk")), default=2**62)

    def evicting(self, call: str, policy: Any) -> Place:
        """Return the place of the first layer of the only full group: `policy` evicts from it."""
        full = [i for i, group in enumerate(self.groups) if group.kind == "full"]
        if len(full) != 1:
            found = f"{len(full)} shapes of layers that keep" if full else "no layer that keeps"
            why = "tokens can leave one shape only" if full else "windows, chunks and states let go by themselves"
            raise ValueError(
                f"[{call}] {type(policy).__name__} evicts from full attention, this model has {found} every token, "
                f"and {why}: leave eviction out ({self.model.describe()})"
            )
        return Place(full[0], 0, self.storage_of[full[0]], 0)

    def columns(self, arena: int) -> int:
        """Return the blocks of an arena that one block of tokens takes in all its groups."""
        return sum(group.columns for group in self.groups if group.kind != "state" and group.arena == arena) or 1

    def sizes(self, num_blocks: int) -> list[int]:
        """Return the blocks of each arena in a pool with room for `num_blocks` blocks of tokens, see `make_pool`."""
        if not self.specs:
            return [min(num_blocks, 1 + MOST_CHECKPOINTS)]
        return [1 + (num_blocks - 1) * self.columns(arena) for arena in range(len(self.block_nbytes))]

    def make_pool(
        self,
        num_blocks: int,
        block_size: int,
        max_seqs: int,
        prefix_cache: bool = False,
        evicts: bool = False,
        events: int = 0,
        max_model_len: int | None = None,
    ) -> Any:
        """Return a pool with room for `num_blocks` blocks of tokens in all layers, if nothing were let go.

        It has a prefix cache where `can_restore`, which is of use if a checkpoint is smaller than the pool. `evicts`: a
        sequence may be longer than what it holds. One of `max_model_len` tokens may run once the pool is larger.
        """
        sizes, prefix_cache = self.sizes(num_blocks), prefix_cache and self.can_restore
        groups, seen = [], {0}
        for group in self.groups:
            if group.kind == "state":
                fits = self.checkpoint_blocks < sizes[0]  # one block is reserved
                group = Group.state(2 * max_seqs, blocks=self.checkpoint_blocks if fits else 0)
            elif group.arena not in seen:
                seen.add(group.arena)
                group = replace(group, num_blocks=sizes[group.arena])
            groups.append(group)
        asked = 1 if max_model_len is None else checked_int("install", "max_model_len", max_model_len)
        longest = min(max(num_blocks - 1, -(-asked // block_size)), max(1, MOST_ENTRIES // max_seqs))
        if evicts or all(group.kind != "full" for group in self.groups):
            longest = max(longest, -(-MAX_TOKENS // block_size))
        bounded = [group.size for group in self.groups if group.kind in ("window", "chunk")]
        return kvpool.Pool(
            sizes[0],
            block_size,
            max_seqs=max_seqs,
            max_blocks_per_seq=longest,
            prefix_cache=prefix_cache,
            events=events if prefix_cache else 0,
            lookahead=min([LOOKAHEAD, *(size - 1 for size in bounded)]) if bounded else 0,
            groups=groups,
        )

    def require_pool(self, pool: Any) -> None:
        """Raise ValueError unless a pool has the groups of this layout."""
        given = pool.options.groups
        if [_key(group) for group in given] != [_key(group) for group in self.groups]:
            raise ValueError(
                f"[install] the pool has the layer groups {_text(given)}, this model needs {_text(self.groups)}: "
                "leave pool out and give num_blocks"
            )
        blocks = given[self.state_group].blocks if self.held else 0
        if blocks not in (0, self.checkpoint_blocks):
            raise ValueError(
                f"[install] a checkpoint of the pool has {blocks} blocks, the states of this model need "
                f"{self.checkpoint_blocks}: Group.state(slots, blocks={self.checkpoint_blocks})"
            )
        if self.is_called and pool.options.in_order:
            raise ValueError("[install] the pool has in_order=True, a model whose layers differ needs one without")


def layout_of(
    model: ModelShape, block_size: int, keeps_all: bool, is_shared: bool = False, **quantization: int | None
) -> Layout:
    """Return how the caches of a model are held, with bits as for `install`.

    `keeps_all`: in one full group where that is possible, also if it keeps tokens that windows do not see. `is_shared`:
    layers of several shapes share an arena where their bytes agree, in a backend with the layout "block".
    """
    members = _members(model.leaves)
    if keeps_all and model.is_uniform:
        ((shape, *_), *_) = members
        members = {(shape, "full", 0, 0): list(range(len(model.leaves)))}
    if len(members) + any(leaf.shape is None for leaf in model.leaves) > MAX_GROUPS:
        rest = {i for layers in list(members.values())[MAX_GROUPS - 1 :] for i in layers}
        leaves = tuple(Leaf("opaque", leaf.name) if i in rest else leaf for i, leaf in enumerate(model.leaves))
        model = replace(model, leaves=leaves)
        members = _members(leaves)
    specs_of = {shape: with_bits(shape.spec(1, block_size), **quantization) for shape, *_ in members}
    needs = [(specs_of[shape], len(layers)) for (shape, *_), layers in members.items()]
    kinds: dict[tuple[Shape, int], int] = {}  # shape and arrays of a storage, and its arena
    groups: list[Group] = []
    places: list[Place | None] = [None] * len(model.leaves)
    for number, (((shape, kind, size, keep), layers), held) in enumerate(
        zip(members.items(), arranged(needs, is_shared), strict=True)
    ):
        kinds.setdefault((shape, held.width), held.arena)
        storage = list(kinds).index((shape, held.width))
        for i, leaf in enumerate(layers):
            column, array = divmod(i, held.width)
            places[leaf] = Place(number, column, storage, array)
        groups.append(Group(kind, size, keep, columns=held.columns, arena=held.arena))
    if any(leaf.shape is None for leaf in model.leaves):
        groups.append(Group.state(1))
    specs = tuple(replace(specs_of[shape], num_layers=width) for shape, width in kinds)
    arenas = tuple(kinds.values())
    if len(set(arenas)) < len(arenas):
        specs = tuple(replace(spec, layout="block") for spec in specs)
    return Layout(model, specs, arenas, tuple(groups), tuple(places))


def _members(leaves: Sequence[Leaf]) -> _Members:
    """Return the layers of each kind and shape, in the order of the first ones."""
    members: _Members = {}
    for i, leaf in enumerate(leaves):
        if leaf.shape is not None:
            members.setdefault((leaf.shape, leaf.kind, leaf.size, leaf.keep or 0), []).append(i)
    return members


def _key(group: Group) -> tuple[Any, ...]:
    """The key that groups of the same layers share."""
    size = 0 if group.kind == "state" else group.size
    return group.kind, size, group.keep, group.block_size, group.columns, group.arena


def _text(groups: Sequence[Group]) -> str:
    kinds = [f"{g.kind}({g.size or ''}{f', keep={g.keep}' if g.keep else ''})" for g in groups]
    return ", ".join(f"{kind} x {g.columns} in arena {g.arena}" for kind, g in zip(kinds, groups, strict=True))
