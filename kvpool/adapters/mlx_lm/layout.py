"""How the caches of a model share pool and storage: layer groups, arenas, and the place of each layer in them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, NamedTuple

import kvpool
from kvpool.adapters.mlx_lm.shapes import Leaf, ModelShape, Shape
from kvpool.groups import Group
from kvpool.spec import KVSpec

MAX_GROUPS = 8
IDLE = 0.05  # of the bytes of a block of tokens may belong to no layer
LOOKAHEAD = 16  # tokens that speculative decoding may take back, where windows allow it
MAX_TOKENS = 2**17  # of a sequence, in models that hold a bounded number of blocks for any length


class Place(NamedTuple):
    """Where the keys and values of a layer are: array `array` of column `column` of layer group `group`."""

    group: int
    column: int
    arena: int
    array: int


@dataclass(frozen=True)
class Layout:
    """How a model's caches are held.

    Attributes
    ----------
    model : ModelShape
        Its leaves are as they are held: kinds of layers beyond the number of groups are opaque.
    specs : tuple of KVSpec
        The storage of each arena.
    groups : tuple of Group
        Empty for a pool without layer groups, which keeps every token.
    places : tuple
        A `Place` for each leaf with keys and values, else None.
    """

    model: ModelShape
    specs: tuple[KVSpec, ...]
    groups: tuple[Group, ...]
    places: tuple[Place | None, ...]

    @cached_property
    def leaves(self) -> tuple[Leaf, ...]:
        """The caches of the model."""
        return self.model.leaves

    @cached_property
    def is_called(self) -> bool:
        """Whether a pass must be known before its first layer, so that the model's call is hooked."""
        return bool(self.groups) or self.model.is_apart

    @cached_property
    def is_apart(self) -> bool:
        """Whether rows run one by one."""
        return self.model.is_apart or any(leaf.kind in ("opaque", "chunk") for leaf in self.leaves)

    @cached_property
    def held(self) -> tuple[int, ...]:
        """The leaves that a batch holds itself: states and opaque ones."""
        return tuple(i for i, place in enumerate(self.places) if place is None)

    @cached_property
    def nested(self) -> tuple[int, ...]:
        """The leaves inside of CacheLists."""
        return tuple(i for node in self.model.tree if not isinstance(node, int) for i in _numbers(node))

    @property
    def least_bound(self) -> int:
        """The length up to which no layer lets tokens go."""
        return min((group.size for group in self.groups if group.kind in ("window", "chunk")), default=2**62)

    def evicting(self, call: str, policy: Any) -> Place:
        """Return the group that a policy evicts from and its arena, as the place of its first layer.

        Raises
        ------
        ValueError
            No group is full, or several are.
        """
        if not self.groups:
            return Place(0, 0, 0, 0)
        full = [i for i, group in enumerate(self.groups) if group.kind == "full"]
        if len(full) != 1:
            found = f"{len(full)} shapes of layers" if full else "no layer"
            why = "tokens leave one group" if full else "windows, chunks and states let go by themselves"
            raise ValueError(
                f"[{call}] {type(policy).__name__} evicts from full attention, this model has {found} that keeps every "
                f"token, {why}: {self.model.describe()}"
            )
        return Place(full[0], 0, self.groups[full[0]].arena, 0)

    def columns(self, arena: int) -> int:
        """Return the blocks of an arena that one block of tokens takes in all its groups."""
        return sum(group.columns for group in self.groups if group.kind != "state" and group.arena == arena) or 1

    def make_pool(
        self, num_blocks: int, block_size: int, max_seqs: int, prefix_cache: bool = False, evicts: bool = False
    ) -> Any:
        """Return a pool with room for `num_blocks` blocks of tokens in all layers, if nothing were let go.

        With layer groups it has no prefix cache. `evicts`: a sequence may be longer than what it holds.
        """
        if not self.groups:
            return kvpool.Pool(num_blocks, block_size, max_seqs=max_seqs, prefix_cache=prefix_cache)
        sizes = [1 + (num_blocks - 1) * self.columns(arena) for arena in range(max(1, len(self.specs)))]
        groups, seen = [], {0}
        for group in self.groups:
            if group.kind == "state":
                group = Group.state(2 * max_seqs)
            elif group.arena not in seen:
                seen.add(group.arena)
                group = replace(group, num_blocks=sizes[group.arena])
            groups.append(group)
        longest = num_blocks - 1
        if evicts or all(group.kind != "full" for group in self.groups):
            longest = max(longest, -(-MAX_TOKENS // block_size))
        bounded = [group.size for group in self.groups if group.kind in ("window", "chunk")]
        return kvpool.Pool(
            sizes[0],
            block_size,
            max_seqs=max_seqs,
            max_blocks_per_seq=longest,
            lookahead=min([LOOKAHEAD, *(size - 1 for size in bounded)]) if bounded else 0,
            groups=groups,
        )

    def require_pool(self, pool: Any) -> None:
        """Raise ValueError unless a pool has the groups of this layout."""
        given = pool.options.groups or ()
        if [_key(group) for group in given] != [_key(group) for group in self.groups]:
            raise ValueError(
                f"[install] the pool has the layer groups {_text(given)}, this model needs {_text(self.groups)}: "
                "leave pool out and give num_blocks"
            )
        if self.groups and pool.options.in_order:
            raise ValueError("[install] the pool has in_order=True, a model with layer groups needs one without")


def layout_of(model: ModelShape, block_size: int, keeps_all: bool) -> Layout:
    """Return how the caches of a model are held.

    `keeps_all`: in one table where that is possible, also if it keeps tokens that windows do not see. A prefix cache
    needs it.
    """
    is_plain = model.keeps_every_token or (keeps_all and model.is_uniform)
    return one_table(model, block_size) if is_plain else grouped(model, block_size)


def one_table(model: ModelShape, block_size: int) -> Layout:
    """Return the layout that keeps every token of all layers in one table.

    Raises
    ------
    ValueError
        See `ModelShape.spec`.
    """
    places = tuple(Place(0, 0, 0, layer) for layer in range(len(model.leaves)))
    return Layout(model, (model.spec(block_size),), (), places)


def grouped(model: ModelShape, block_size: int) -> Layout:
    """Return the layout in which layers of one kind and one shape are a group."""
    members = _members(model.leaves)
    if len(members) + any(leaf.shape is None for leaf in model.leaves) > MAX_GROUPS:
        rest = {i for layers in list(members.values())[MAX_GROUPS - 1 :] for i in layers}
        leaves = tuple(Leaf("opaque", leaf.name) if i in rest else leaf for i, leaf in enumerate(model.leaves))
        model = replace(model, leaves=leaves)
        members = _members(leaves)
    shapes = list(dict.fromkeys(shape for shape, _, _ in members))
    widths = [
        arrays_of_an_arena([len(layers) for (other, _, _), layers in members.items() if other == shape])
        for shape in shapes
    ]
    groups: list[Group] = []
    places: list[Place | None] = [None] * len(model.leaves)
    for (shape, kind, size), layers in members.items():
        arena = shapes.index(shape)
        for i, leaf in enumerate(layers):
            column, array = divmod(i, widths[arena])
            places[leaf] = Place(len(groups), column, arena, array)
        groups.append(Group(kind, size, columns=-(-len(layers) // widths[arena]), arena=arena))
    if not groups:  # a sequence needs blocks to have a length; these hold nothing
        groups.append(Group.window(1))
    if any(leaf.shape is None for leaf in model.leaves):
        groups.append(Group.state(1))
    specs = tuple(shape.spec(width, block_size) for shape, width in zip(shapes, widths, strict=True))
    return Layout(model, specs, tuple(groups), tuple(places))


def arrays_of_an_arena(counts: Sequence[int]) -> int:
    """Return how many layer arrays an arena has whose groups have `counts` layers.

    The most for which at most 5 % of the arrays of every group belong to no layer: more arrays mean fewer blocks to
    count.
    """
    return next(
        arrays
        for arrays in range(max(counts), 0, -1)
        if all(-(-count // arrays) * arrays * (1 - IDLE) <= count for count in counts)
    )


def _numbers(node: Any) -> list[int]:
    return [node] if isinstance(node, int) else [i for inner in node for i in _numbers(inner)]


def _members(leaves: Sequence[Leaf]) -> dict[tuple[Shape, str, int], list[int]]:
    """Return the layers of each kind and shape, in the order of the first ones."""
    members: dict[tuple[Shape, str, int], list[int]] = {}
    for i, leaf in enumerate(leaves):
        if leaf.shape is not None:
            members.setdefault((leaf.shape, leaf.kind, leaf.size), []).append(i)
    return members


def _key(group: Group) -> tuple[Any, ...]:
    """What two groups have in common that serve the same layers."""
    size = 0 if group.kind == "state" else group.size
    return group.kind, size, group.keep, group.block_size, group.columns, group.arena


def _text(groups: Sequence[Group]) -> str:
    if not groups:
        return "none"
    return ", ".join(f"{g.kind}({g.size or ''}) x {g.columns} in arena {g.arena}" for g in groups)
