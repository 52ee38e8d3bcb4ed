"""`GroupStorage`: the storage of a pool of any layer groups, made of backends that know one shape each.

A backend holds layers of one shape over the blocks of one arena. This object makes as many as the groups need, gives
each layer of the model its place, and shows every backend ordinary steps of one column, without holes. Groups of
several shapes can share an arena: their backends then work on the rows of one array of bytes (layout "block").
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from math import prod
from typing import Any, NamedTuple

import numpy as np

from kvpool._core import Plan, Pool
from kvpool.groups import Group
from kvpool.protocol import (
    AttentionOptions,
    KVBackend,
    StepArrays,
    check_distinct,
    checked_bytes,
    checked_ids,
    checked_resize,
    move_rows,
    move_within,
)
from kvpool.sizing import Parts, StateArray, aligned_nbytes, block_nbytes_of
from kvpool.spec import KVSpec, checked_int

Slots = Sequence[int] | np.ndarray
_AS_BITS = {"bfloat16": "uint16", "float8_e4m3": "uint8"}  # where the framework does not have them


class StateSlots:
    """Arrays of any dtypes and shapes, each ``[num_slots, *shape]``.

    Parameters
    ----------
    arrays : sequence of StateArray
        What one slot holds: all arrays of all layers of the state group.
    num_slots : int
    xp : module
        The framework of the arrays: numpy, or ``mlx.core``.

    Raises
    ------
    TypeError, ValueError, IndexError
        From any call, as ``[call] what is wrong (value), the limit``, before a byte is changed.

    Notes
    -----
    bfloat16 is uint16 in numpy, as bits, and float8_e4m3 is uint8. What `read` and `export_slots` return are copies.
    """

    def __init__(self, arrays: Sequence[StateArray], num_slots: int, xp: Any = np) -> None:
        self.arrays = tuple(arrays)
        self.num_slots = checked_int("StateSlots", "num_slots", num_slots)
        for number, array in enumerate(self.arrays):
            if not isinstance(array, StateArray):
                raise TypeError(f"[StateSlots] arrays[{number}] must be a StateArray, got {type(array).__name__}")
            if not array.nbytes:
                raise ValueError(f"[StateSlots] arrays[{number}] has shape {list(array.shape)}, no dimension may be 0")
        self.slot_nbytes = sum(array.nbytes for array in self.arrays)
        self._xp = xp
        self._planes = [xp.zeros((self.num_slots, *array.shape), self._dtype(array)) for array in self.arrays]

    def __repr__(self) -> str:
        return f"<StateSlots of {self.num_slots} slots, {len(self.arrays)} arrays, {self.slot_nbytes} bytes a slot>"

    def read(self, slots: Slots) -> list[Any]:
        """Return the arrays ``[n, *shape]`` of the states in `slots`; -1 is no state, all zeros."""
        ids = self._ids("read", slots, least=-1)
        found = [plane[self._xp.array(np.maximum(ids, 0))] for plane in self._planes]
        if (ids >= 0).all():
            return found
        has_state = [self._xp.array((ids >= 0).reshape(-1, *[1] * (x.ndim - 1))) for x in found]
        return [self._xp.where(has, x, self._xp.zeros_like(x)) for has, x in zip(has_state, found, strict=True)]

    def write(self, slots: Slots, arrays: Sequence[Any]) -> None:
        """Store row n of each of `arrays` ``[n, *shape]`` in slot ``slots[n]``; -1 stores nothing. No slot twice."""
        ids = self._ids("write", slots, least=-1)
        rows = np.flatnonzero(ids >= 0)
        check_distinct("write", "slot", ids[rows])
        if len(arrays) != len(self._planes):
            raise ValueError(f"[write] there are {len(arrays)} arrays, a state has {len(self._planes)}")
        for number, (array, plane) in enumerate(zip(arrays, self._planes, strict=True)):
            if type(array) is not type(plane) or array.dtype != plane.dtype:
                found = getattr(array, "dtype", type(array).__name__)
                raise TypeError(f"[write] arrays[{number}] is {found}, the state has {plane.dtype}")
            expected = (len(ids), *plane.shape[1:])
            if tuple(array.shape) != expected:
                raise ValueError(f"[write] arrays[{number}] must have shape {list(expected)}, got {list(array.shape)}")
        for array, plane in zip(arrays, self._planes, strict=True):
            plane[self._xp.array(ids[rows])] = array[self._xp.array(rows)]

    def copy(self, src: Slots, dst: Slots) -> None:
        """Copy whole states from ``src[n]`` to ``dst[n]``, all read before one is written; no dst twice."""
        sources, targets = self._ids("copy", src), self._ids("copy", dst)
        if len(sources) != len(targets):
            raise ValueError(f"[copy] there are {len(sources)} src and {len(targets)} dst, they must be as many")
        check_distinct("copy", "slot", targets)
        for plane in self._planes:
            plane[self._xp.array(targets)] = plane[self._xp.array(sources)]

    def resize(self, num_slots: int, moves: Any) -> None:
        """Have another number of slots; see `KVBackend.resize`."""
        size, moves = checked_resize(self.num_slots, num_slots, moves)
        index = np.arange(size) % self.num_slots  # what comes is anything
        index[moves[:, 1]] = moves[:, 0]
        for number, plane in enumerate(self._planes):
            try:
                new = self._xp.take(plane, self._xp.array(index), axis=0)
                if hasattr(self._xp, "eval"):
                    self._xp.eval(new)  # or all old arrays would stay until somebody reads
            except (MemoryError, RuntimeError):
                if size > self.num_slots:
                    raise
                move_within(plane, moves)
                new = plane[:size]
            self._planes[number] = new
        self.num_slots = size

    def zero(self, slots: Slots) -> None:
        """Set every byte of these slots to 0."""
        ids = self._xp.array(self._ids("zero", slots))
        for plane in self._planes:
            plane[ids] = self._xp.zeros_like(plane[ids])

    def export_slots(self, slots: Slots) -> np.ndarray:
        """Return the bytes of states, uint8 ``[n, slot_nbytes]``: array after array, little-endian."""
        ids = self._ids("export_slots", slots)
        data, begin = np.empty((len(ids), self.slot_nbytes), np.uint8), 0
        for plane, array in zip(self._planes, self.arrays, strict=True):
            flat = plane[self._xp.array(ids)].reshape(len(ids), prod(array.shape))
            data[:, begin : begin + array.nbytes] = np.asarray(flat.view(self._xp.uint8))
            begin += array.nbytes
        return data

    def import_slots(self, slots: Slots, data: np.ndarray) -> None:
        """Overwrite states with rows of `export_slots`. Slots must be distinct."""
        ids = self._ids("import_slots", slots)
        check_distinct("import_slots", "slot", ids)
        data = checked_bytes("import_slots", data, len(ids), self.slot_nbytes)
        begin = 0
        for plane, array in zip(self._planes, self.arrays, strict=True):
            part = self._xp.array(data[:, begin : begin + array.nbytes]).view(plane.dtype)
            plane[self._xp.array(ids)] = part.reshape(len(ids), *array.shape)
            begin += array.nbytes

    def _dtype(self, array: StateArray) -> Any:
        name = array.dtype
        return getattr(self._xp, name if hasattr(self._xp, name) else _AS_BITS[name])

    def _ids(self, call: str, slots: Slots, least: int = 0) -> np.ndarray:
        return checked_ids(call, "slot", slots, self.num_slots, "group", least)


_PAGE_NBYTES = 4096


class Place(NamedTuple):
    """Where a layer of the model keeps its keys and values."""

    group: int
    column: int
    backend: KVBackend
    layer: int  # of the backend


class _Cut(NamedTuple):
    """What the rows of a plan hold in a group: the entries of their tables without the hole."""

    seq_lens: np.ndarray  # [S] tokens before the hole and behind it
    kept: np.ndarray  # [S] tokens before the hole
    starts: np.ndarray  # [S] first position behind it
    evicted: np.ndarray  # [S] tokens that have no place any more: a place is a position less these


@dataclass(frozen=True)
class GroupStep:
    """A plan as `GroupStorage.prepare` leaves it: for each place of a group what its backend made of it."""

    steps: dict[tuple[int, int, int], Any]  # (group, column, id of the backend)
    cuts: dict[int, _Cut]
    positions: np.ndarray  # [T] of the query tokens
    rows: np.ndarray  # [T] their rows


class GroupStorage:
    """Keys, values and states of all layers of a model, in the arenas of a pool.

    Parameters
    ----------
    factory : callable
        Makes backends, ``factory(spec, num_blocks)``: such as `load_backend` returns, or `functools.partial` of it.
    pool : Pool
        Of any groups, one of blocks at least.
    stored : sequence
        One entry per group of the pool. A group of blocks has the `KVSpec` of one column, or a sequence of them: the
        layers of the column one after the other, where heads or dimensions change from layer to layer. A state group
        has a sequence of `StateArray`, or None: then somebody else keeps its states.
    layers : sequence of (int, int) or None, optional
        For each layer of the model the group, and the layer of it, that hold its keys and values; None if it has none.
        By default the layers of the groups in their order. A layer that names a place which an earlier one has shares
        its keys and values: it attends and reads, owns no bytes and may not write.
    xp : module
        The framework of the states' arrays: numpy, or ``mlx.core``.

    Attributes
    ----------
    pool : Pool
        What it was made for.
    groups : tuple of Group
        Those of the pool.
    backends : tuple of KVBackend
        All of them, arena by arena, those of an arena in the order of its groups.
    stores : tuple of KVBackend or BlockRows
        For each arena what exports, imports and zeroes its whole blocks.
    states : dict of int to StateSlots
        The state groups, by their number.
    required_formats : tuple of str
        What ``Plan(pool, ..., backend=storage)`` fills.

    Raises
    ------
    TypeError, ValueError
        A spec does not fit its group or its arena.
    """

    required_formats = ("block_tables", "seq_lens", "cu_q_lens", "slot_mapping", "positions")

    def __init__(
        self,
        factory: Callable[..., KVBackend],
        pool: Pool,
        stored: Sequence[Any],
        layers: Sequence[tuple[int, int] | None] | None = None,
        *,
        xp: Any = np,
    ) -> None:
        self.groups = _checked_groups(pool)
        self.pool = pool
        if len(stored) != len(self.groups):
            raise ValueError(f"[GroupStorage] stored has {len(stored)} entries, the pool has {len(self.groups)} groups")
        self.states: dict[int, StateSlots] = {}
        parts: dict[int, Parts] = {}
        for number, (group, what) in enumerate(zip(self.groups, stored, strict=True)):
            if group.kind != "state":
                parts[number] = _checked_parts(pool, number, group, what)
            elif what is not None:
                self.states[number] = StateSlots(_checked_arrays(number, what), group.size, xp)
        self._arenas = [
            Arena(factory, arena, pool.stats(arena).num_blocks, [x for g, x in parts.items() if self._in(g) == arena])
            for arena in sorted(set(map(self._in, parts)))
        ]
        self.backends = tuple(backend for arena in self._arenas for made in arena.backends.values() for backend in made)
        self.stores = tuple(arena.store for arena in self._arenas)
        for number, store in self.states.items():
            blocks = self.groups[number].blocks
            if blocks not in (0, self.bundle_blocks(number)):
                raise ValueError(
                    f"[GroupStorage] stored[{number}] has {store.slot_nbytes} bytes, a checkpoint of them takes "
                    f"{self.bundle_blocks(number)} blocks, not {blocks}: give them to Group.state(slots, blocks=)"
                )
        self._held = {number: self._arenas[self._in(number)].backends[parts[number]] for number in parts}
        self._own = {  # the layers of each group
            number: [
                Place(number, column, backend, layer)
                for column in range(self.groups[number].columns)
                for backend in backends
                for layer in range(backend.spec.num_layers)
            ]
            for number, backends in self._held.items()
        }
        self._places, self._is_owner = self._placed(layers)

    def __repr__(self) -> str:
        arenas = ", ".join(f"{arena.store.num_blocks} x {arena.block_nbytes} bytes" for arena in self._arenas)
        return f"<GroupStorage of {len(self._places)} layers in {len(self.groups)} groups, arenas: {arenas}>"

    @property
    def num_blocks(self) -> tuple[int, ...]:
        """Blocks of each arena."""
        return tuple(arena.store.num_blocks for arena in self._arenas)

    def _in(self, group: int) -> int:
        return self.groups[group].arena

    def _placed(self, layers: Sequence[tuple[int, int] | None] | None) -> tuple[list[Place | None], list[bool]]:
        if layers is None:
            layers = [(g, i) for g, own in self._own.items() for i in range(len(own))]
        seen: set[tuple[int, int]] = set()
        places: list[Place | None] = []
        owners = []
        for layer, at in enumerate(layers):
            if at is not None and not (at[0] in self._own and 0 <= at[1] < len(self._own[at[0]])):
                raise ValueError(f"[GroupStorage] layers[{layer}] is {tuple(at)}, no group holds such a layer")
            places.append(None if at is None else self._own[at[0]][at[1]])
            owners.append(at is not None and tuple(at) not in seen)
            if at is not None:
                seen.add((at[0], at[1]))
        return places, owners

    # ---------------------------------------------------------------------- one step

    def asarray(self, x: np.ndarray) -> Any:
        """Return a float32 numpy array as the backends take it."""
        return self.backends[0].asarray(x)

    def to_numpy(self, x: Any) -> np.ndarray:
        """Return a result of the backends as a numpy array."""
        return self.backends[0].to_numpy(x)

    def prepare(self, plan: Plan) -> GroupStep:
        """Make a step of a plan, for all layers; see `KVBackend.prepare`."""
        groups = self._of_plan("prepare", plan)
        ends = np.asarray(plan.cu_q_lens, np.int64)
        rows = np.repeat(np.arange(len(ends) - 1), np.diff(ends))
        positions = np.asarray(plan.positions, np.int64)[: len(rows)]
        steps, cuts = {}, {}
        for number, backends in self._held.items():
            held, starts = (np.asarray(of, np.int64) for of in (groups[number].kv_lens, groups[number].kv_starts))
            lens = held.copy()  # of rows without a new token nobody asks for more
            lens[rows] = positions + 1  # the last one of a row counts
            for column in range(self.groups[number].columns):
                arrays = StepArrays.of_group(plan, number, column)
                cuts[number] = _Cut(arrays.seq_lens, arrays.seq_lens - held + starts, starts, lens - held)
                for backend in backends:
                    steps[number, column, id(backend)] = backend.prepare(arrays)
        return GroupStep(steps, cuts, positions, rows)

    def copy_blocks(self, plan: Plan) -> None:
        """Copy what a step copies on write, in all columns of all groups, and load states from checkpoints.

        See `KVBackend.copy_blocks`, and ``state_loads`` in docs/prefix.md.
        """
        groups = self._of_plan("copy_blocks", plan)
        for number, backends in self._held.items():
            for backend in backends:
                backend.copy_blocks(np.array(groups[number].copies))
        for number, slots, bundles in self._checkpoints("state_loads", groups):
            self.load_states(number, bundles, slots)

    def save_checkpoints(self, plan: Plan) -> None:
        """Save the states that a step takes checkpoints of, after its last layer; see ``state_saves`` there."""
        for number, slots, bundles in self._checkpoints("state_saves", self._of_plan("save_checkpoints", plan)):
            self.save_states(number, slots, bundles)

    def compact(self, group: int, table: np.ndarray, keep: np.ndarray) -> None:
        """Move tokens to the front of the table of a row, as `Pool.compact` says; see `KVBackend.compact`.

        Parameters
        ----------
        group : int
            A group of blocks.
        table : int ``[entries, columns]``
            Of the row as it was before `Pool.compact`: the entries that hold tokens.
        keep : int ``[layers of the group, Hk, target]``
            Places that stay, ascending, by layer and head.
        """
        if group not in self._held:
            raise ValueError(f"[compact] group {group} holds no blocks, those that do are {sorted(self._held)}")
        table, keep = np.asarray(table), np.asarray(keep)
        expected = self.groups[group].columns, len(self._own[group])
        if table.ndim != 2 or keep.ndim != 3 or (table.shape[1], keep.shape[0]) != expected:
            raise ValueError(
                f"[compact] table has shape {list(table.shape)} and keep {list(keep.shape)}, group {group} has "
                f"{expected[0]} columns and {expected[1]} layers"
            )
        at = 0
        for column in range(expected[0]):
            for backend in self._held[group]:
                end = at + backend.spec.num_layers
                backend.compact(table[:, column], keep[at:end])
                at = end

    def write(self, step: GroupStep, layer: int, k: Any, v: Any) -> None:
        """Store the new tokens of a step in one layer of the model; see `KVBackend.write`."""
        place = self._at("write", layer)
        if not self._is_owner[layer]:
            raise ValueError(f"[write] layer {layer} shares the keys and values of an earlier layer, it only reads")
        place.backend.write(_of(step, place), place.layer, k, v)

    def attend(
        self,
        step: GroupStep,
        layer: int,
        q: Any,
        scale: float | None = None,
        *,
        options: AttentionOptions | None = None,
    ) -> Any:
        """Attention of the query tokens over what the group of the layer reads; see `KVBackend.attend`.

        A window and a chunk are applied: leave them out of the options. A mask of the options has a column for each
        position of the row, also where the group holds nothing; of a group that lost tokens by eviction, for each
        place of its table.
        """
        place = self._at("attend", layer)
        options = self._options(step, place.group, int(q.shape[0]), options)
        return place.backend.attend(_of(step, place), place.layer, q, scale, options=options)

    def read(self, step: GroupStep, layer: int) -> tuple[Any, Any]:
        """Copies of what the rows of a step hold in a layer, the hole cut out; see `KVBackend.read` and `seen`."""
        place = self._at("read", layer)
        return place.backend.read(_of(step, place), place.layer)

    def seen(self, step: GroupStep, layer: int) -> np.ndarray:
        """Which columns of `read` each query token sees, bool ``[n, C]``: n without padding tokens."""
        return self._visible(step, self._at("seen", layer).group)[0]

    # ---------------------------------------------------------------------- whole blocks

    def block_nbytes(self, arena: int = 0) -> int:
        """Return the bytes of one block of an arena, in all layers that share it."""
        return self._arena("block_nbytes", arena).block_nbytes

    @property
    def nbytes(self) -> int:
        """Bytes of all blocks of all arenas, and of all state slots."""
        blocks = sum(arena.store.num_blocks * arena.block_nbytes for arena in self._arenas)
        return blocks + sum(slots.num_slots * slots.slot_nbytes for slots in self.states.values())

    def zero(self, blocks: Sequence[int] | np.ndarray, arena: int = 0) -> None:
        """Set every byte of these blocks of an arena to 0."""
        self._arena("zero", arena).store.zero(blocks)

    def export_blocks(self, blocks: Sequence[int] | np.ndarray, arena: int = 0) -> np.ndarray:
        """Return the bytes of whole blocks of an arena, uint8 ``[n, block_nbytes(arena)]``: a copy."""
        return self._arena("export_blocks", arena).store.export_blocks(blocks)

    def import_blocks(self, blocks: Sequence[int] | np.ndarray, data: np.ndarray, arena: int = 0) -> None:
        """Overwrite whole blocks of an arena with rows of `export_blocks`. Blocks must be distinct."""
        self._arena("import_blocks", arena).store.import_blocks(blocks, data)

    def resize(self, num_blocks: dict[int, int]) -> dict[int, np.ndarray]:
        """Give arenas of the pool other sizes, and move with it what their blocks and state slots hold.

        Between two steps. Steps made before are not valid any more. See `Pool.resize` and `KVBackend.resize`.

        Returns
        -------
        dict of int to int32 ``[K, 2]``
            The moves of each arena.

        Raises
        ------
        PlanStateError, OutOfBlocks, ValueError, CapacityExceeded
            As from `Pool.resize`. State unchanged.
        MemoryError, RuntimeError
            No memory for an arena that grows. Those that grow are as before; those that shrink have shrunk.
        """
        before = {arena: self.pool.stats(arena).num_blocks for arena in num_blocks}
        moves: dict[int, np.ndarray] = self.pool.resize(num_blocks)
        grown: list[int] = []
        try:
            for arena, size in sorted(num_blocks.items(), key=lambda one: one[1] > before[one[0]]):  # which grow: last
                self._resize_arena(arena, size, moves[arena])
                grown += [arena] * (size > before[arena])
        except BaseException:
            less = {arena: before[arena] for arena, size in num_blocks.items() if size > before[arena]}
            self.pool.resize(less)  # what is blank leaves: nothing moves
            for arena in grown:
                self._resize_arena(arena, before[arena], ())
            raise
        finally:
            self.groups = self.pool.options.groups
        return moves

    def _resize_arena(self, arena: int, size: int, moves: Any) -> None:
        if arena < len(self._arenas):
            self._arenas[arena].resize(size, moves)
        else:
            group = [number for number, group in enumerate(self.groups) if group.kind == "state"]
            if (number := group[arena - len(self._arenas)]) in self.states:
                self.states[number].resize(size, moves)

    def bundle_blocks(self, group: int) -> int:
        """Return how many blocks of arena 0 hold one state of a state group."""
        return -(-self._slots("bundle_blocks", group).slot_nbytes // self.block_nbytes(0))

    def save_states(self, group: int, slots: Sequence[int] | np.ndarray, blocks: Any) -> None:
        """Copy states into bundles of blocks of arena 0, ints ``[n, bundle_blocks(group)]``, all distinct."""
        data = self._slots("save_states", group).export_slots(slots)
        bundles = self._bundles("save_states", group, len(data), blocks)
        rows = np.zeros((len(data), bundles.shape[1] * self.block_nbytes(0)), np.uint8)
        rows[:, : data.shape[1]] = data
        self.import_blocks(bundles.reshape(-1), rows.reshape(bundles.size, -1))

    def load_states(self, group: int, blocks: Any, slots: Sequence[int] | np.ndarray) -> None:
        """Copy bundles that `save_states` has filled into state slots."""
        store = self._slots("load_states", group)
        bundles = self._bundles("load_states", group, len(slots), blocks)
        rows = self.export_blocks(bundles.reshape(-1)).reshape(len(bundles), -1)
        store.import_slots(slots, rows[:, : store.slot_nbytes])

    def settle(self) -> int:
        """Wait until all calls have run; see `KVBackend.settle`."""
        return sum(backend.settle() for backend in self.backends)

    # ---------------------------------------------------------------------- internals

    def _of_plan(self, call: str, plan: Plan) -> Sequence[Any]:
        if plan.pool is not self.pool:
            raise ValueError(f"[{call}] the plan is of another pool")
        return plan.groups

    def _at(self, call: str, layer: int) -> Place:
        if isinstance(layer, bool) or not isinstance(layer, (int, np.integer)):
            raise TypeError(f"[{call}] layer must be an int, got {type(layer).__name__}")
        if not 0 <= layer < len(self._places):
            raise IndexError(f"[{call}] layer is {layer}, the model has {len(self._places)} layers")
        place = self._places[layer]
        if place is None:
            raise ValueError(f"[{call}] layer {layer} has no keys and values")
        return place

    def _arena(self, call: str, arena: int) -> Arena:
        if not 0 <= arena < len(self._arenas):
            raise ValueError(f"[{call}] arena is {arena}, there are {len(self._arenas)} arenas of blocks")
        return self._arenas[arena]

    def _slots(self, call: str, group: int) -> StateSlots:
        if group not in self.states:
            raise ValueError(f"[{call}] group {group} is not a state group, those are {sorted(self.states)}")
        return self.states[group]

    def _checkpoints(self, name: str, groups: Sequence[Any]) -> Iterator[tuple[int, np.ndarray, np.ndarray]]:
        """Yield what a plan loads or saves: state group, slots, bundles."""
        for number in self.states:
            rows = getattr(groups[number], name)
            if len(rows):
                yield number, rows[:, 0], rows[:, 1:]

    def _bundles(self, call: str, group: int, num_states: int, blocks: Any) -> np.ndarray:
        bundles, expected = np.asarray(blocks), (num_states, self.bundle_blocks(group))
        if bundles.shape != expected:
            raise ValueError(f"[{call}] blocks must have shape {list(expected)}, got {list(bundles.shape)}")
        return bundles

    def _visible(self, step: GroupStep, number: int) -> tuple[np.ndarray, np.ndarray]:
        """Bool ``[n, C]``: what each query token sees by the rule of its group; and the places of the columns."""
        group, cut = self.groups[number], step.cuts[number]
        columns = np.arange(int(cut.seq_lens.max(initial=0)))
        own = (step.positions - cut.evicted[step.rows])[:, None]
        at = columns + np.where(columns < cut.kept[:, None], 0, (cut.starts - cut.kept)[:, None])
        at = at[step.rows]
        if group.kind == "chunk":
            return (at <= own) & (at >= own - own % group.size), at
        if group.kind == "window":
            return (at <= own) & ((at > own - group.size) | (at < group.keep)), at
        return at <= own, at

    def _options(
        self, step: GroupStep, number: int, num_tokens: int, options: AttentionOptions | None
    ) -> AttentionOptions | None:
        group = self.groups[number]
        options = AttentionOptions() if options is None else options
        if options.window is not None and group.kind != "full":
            raise ValueError(f"[attend] options have a window ({options.window}), the group is a {group.kind} itself")
        if group.kind == "window" and not group.keep:
            options = replace(options, window=group.size)
        elif group.kind in ("window", "chunk") or options.mask is not None:
            if options.alibi_slopes is not None and group.keep:
                raise ValueError("[attend] alibi_slopes need distances, a window that keeps tokens has none")
        else:
            return options
        is_ruled = group.kind == "chunk" or group.keep > 0
        if not is_ruled and (options.mask is None or not step.cuts[number].starts.any()):
            return options
        return replace(options, mask=self._mask(step, number, num_tokens, options.mask))

    def _mask(self, step: GroupStep, number: int, num_tokens: int, mask: np.ndarray | None) -> np.ndarray:
        visible, at = self._visible(step, number)
        count, width = visible.shape
        if mask is None:
            found = np.zeros((num_tokens, width), bool)
            found[:count] = visible
            return found
        if mask.shape[0] != num_tokens or mask.shape[-1] <= step.positions.max(initial=-1):
            raise ValueError(
                f"[attend] mask has shape {list(mask.shape)}, it must be [{num_tokens}, ..., C'] with C' > "
                f"{step.positions.max(initial=-1)}"
            )
        heads = mask.shape[1:-1]
        index = np.minimum(at, mask.shape[-1] - 1).reshape(count, *[1] * len(heads), width)
        visible = visible.reshape(index.shape)
        taken = np.take_along_axis(mask[:count], np.broadcast_to(index, (count, *heads, width)), -1)
        found = np.zeros((num_tokens, *heads, width), mask.dtype)
        found[:count] = taken & visible if mask.dtype == np.bool_ else np.where(visible, taken, -np.inf)
        return found


class BlockRows:
    """Blocks of an arena as rows of one array of bytes, each a block as `export_blocks` returns it."""

    def __init__(self, num_blocks: int, block_nbytes: int) -> None:
        self.num_blocks = num_blocks
        self.bytes = self._zeros(num_blocks, block_nbytes)

    @staticmethod
    def _zeros(num_blocks: int, block_nbytes: int) -> np.ndarray:
        room = np.zeros(num_blocks * block_nbytes + _PAGE_NBYTES, np.uint8)  # the system hands out its pages late
        first = -room.ctypes.data % _PAGE_NBYTES
        return room[first : first + num_blocks * block_nbytes].reshape(num_blocks, block_nbytes)

    def resize(self, num_blocks: int, moves: Any) -> None:
        size, moves = checked_resize(self.num_blocks, num_blocks, moves)
        try:
            new = self._zeros(size, self.bytes.shape[1])
        except MemoryError:
            if size > self.num_blocks:
                raise
            move_within(self.bytes, moves)
            new = self.bytes[:size]
        else:
            move_rows(self.bytes, new, moves)
        self.bytes, self.num_blocks = new, size

    def zero(self, blocks: Sequence[int] | np.ndarray) -> None:
        self.bytes[self._ids("zero", blocks)] = 0

    def export_blocks(self, blocks: Sequence[int] | np.ndarray) -> np.ndarray:
        return self.bytes[self._ids("export_blocks", blocks)]

    def import_blocks(self, blocks: Sequence[int] | np.ndarray, data: np.ndarray) -> None:
        ids = self._ids("import_blocks", blocks)
        data = checked_bytes("import_blocks", data, len(ids), self.bytes.shape[1])
        check_distinct("import_blocks", "block", ids)
        self.bytes[ids] = data

    def _ids(self, call: str, blocks: Sequence[int] | np.ndarray) -> np.ndarray:
        return checked_ids(call, "block", blocks, self.num_blocks, "arena")


class Arena:
    """The backends of one arena: one with memory of its own if all groups have one shape, else some that share rows.

    `shapes` has what a column of each group holds; for each of them `backends` has a backend for each spec.
    """

    def __init__(self, factory: Callable[..., KVBackend], arena: int, num_blocks: int, shapes: Iterable[Parts]) -> None:
        shapes = dict.fromkeys(shapes)
        self.block_nbytes = block_nbytes_of(shapes)
        self.backends: dict[Parts, tuple[KVBackend, ...]] = {}
        self.store: KVBackend | BlockRows  # exports, imports and zeroes whole blocks
        if len(shapes) == 1 and all(len(parts) == 1 for parts in shapes):
            (parts,) = shapes
            self.store = factory(parts[0], num_blocks)
            self.backends[parts] = (self.store,)
            return
        wrong = sorted({str(spec.layout) for parts in shapes for spec in parts} - {"block"})
        if wrong:
            raise ValueError(
                f"[GroupStorage] arena {arena} holds {len({spec for parts in shapes for spec in parts})} shapes in "
                f"layout {wrong[0]!r}; give them layout 'block', or each group an arena of its own"
            )
        self.store = BlockRows(num_blocks, self.block_nbytes)
        for parts in shapes:
            rows = zip(parts, self._rows(parts), strict=True)
            self.backends[parts] = tuple(factory(spec, num_blocks, storage=own) for spec, own in rows)

    def _rows(self, parts: Parts) -> Iterator[np.ndarray]:
        begin = 0
        for spec in parts:
            yield self.store.bytes[:, begin : begin + spec.block_nbytes]  # type: ignore[union-attr]
            begin += aligned_nbytes(spec)

    def resize(self, num_blocks: int, moves: Any) -> None:
        self.store.resize(num_blocks, moves)
        if isinstance(self.store, BlockRows):
            for parts, backends in self.backends.items():
                for backend, rows in zip(backends, self._rows(parts), strict=True):
                    backend.resize(num_blocks, moves, storage=rows)


def _of(step: GroupStep, place: Place) -> Any:
    return step.steps[place.group, place.column, id(place.backend)]


def _checked_groups(pool: Pool) -> tuple[Group, ...]:
    if not isinstance(pool, Pool):
        raise TypeError(f"[GroupStorage] pool must be a Pool, got {type(pool).__name__}")
    groups = pool.options.groups
    if all(group.kind == "state" for group in groups):
        raise ValueError("[GroupStorage] the pool has state groups only, a StateSlots for each holds them")
    return groups


def _checked_parts(pool: Pool, number: int, group: Group, what: Any) -> Parts:
    parts = (what,) if isinstance(what, KVSpec) else tuple(what)
    size = group.block_size or pool.block_size
    for spec in parts:
        if not isinstance(spec, KVSpec):
            raise TypeError(f"[GroupStorage] stored[{number}] must hold a KVSpec, got {type(spec).__name__}")
        if spec.block_size != size:
            raise ValueError(f"[GroupStorage] stored[{number}] has block_size {spec.block_size}, its group has {size}")
    if not parts:
        raise ValueError(f"[GroupStorage] stored[{number}] is empty, a group of blocks has a KVSpec")
    return parts


def _checked_arrays(number: int, what: Any) -> tuple[StateArray, ...]:
    arrays = () if isinstance(what, KVSpec) else tuple(what)
    if not arrays or not all(isinstance(array, StateArray) for array in arrays):
        raise TypeError(f"[GroupStorage] stored[{number}] must be StateArrays, group {number} is a state group")
    return arrays
