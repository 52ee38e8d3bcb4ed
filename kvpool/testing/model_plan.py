"""`ModelPlan`: the arrays of a step, rebuilt from scratch by every step.

Nothing is incremental here: the only memory is the three numbers per row and group that the contract names (handle,
epoch, entries written), and they decide `dirty_rows`, never the contents.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from kvpool.errors import PlanStateError
from kvpool.stats import PlanLimits
from kvpool.testing import model_args as args
from kvpool.testing.model_blocks import ceil_div

COMMON = ("positions", "cu_q_lens", "slot_ids")  #: the others are arrays of each layer group
ARRAYS = (*COMMON, "block_tables", "seq_lens", "slot_mapping", "indptr", "indices", "last_page_len")
#: The arrays of each format.
FORMATS: dict[str, tuple[str, ...]] = {name: (name,) for name in ARRAYS[:6]}
FORMATS["csr"] = "indptr", "indices", "last_page_len"
FORMATS["page_batch_info"] = "slot_ids", "block_tables", "seq_lens", "cu_q_lens", "slot_mapping"
ALWAYS = ("copies", "dirty_rows")  #: that each group of blocks has, whatever the formats
ROW_FORMATS = {"block_tables", "csr", "page_batch_info"}  #: that `dirty_rows` speaks about
MOST = 2**31 - 1


def _sums(counts: list[int], padding: int) -> list[int]:
    return [sum(counts[:i]) for i in range(len(counts) + 1)] + [sum(counts)] * padding


class Arrays:
    """Arrays that a step fills from their beginning. `shapes`: whole ones of all that there can be."""

    base: dict[str, np.ndarray]  # those that the plan has
    shapes: dict[str, tuple[int, ...]]

    def store(self, name: str, values: list[int], length: int, pad: int = 0) -> None:
        """Write values, and pad up to a length."""
        if name in self.base:
            values = values + [pad] * (length - len(values))
            self.base[name][: len(values)] = values


class GroupArrays(Arrays):
    """What a plan has for one layer group: an element of ``plan.groups``."""

    def __init__(self, plan: ModelPlan, layer: Any) -> None:
        self._plan, self._layer, self.base = plan, layer, {}
        rows, tokens, width = plan.limits
        columns, self.width = layer.columns, ceil_div(width * plan.pool.block_size, layer.block_size)
        self._size = 0, 0, 0  # rows, tokens, CSR entries that are shown
        # row -> (handle, epoch, entries written); None if carried; rows that show padding are not in it
        self._memory: dict[int, tuple[int, int, int] | None] = dict.fromkeys(range(rows))
        self.shapes = {"seq_lens": (rows,)}
        if layer.kind == "state":
            self.state_src = self.state_dst = np.zeros(0, np.int32)
            self.state_loads = self.state_saves = np.zeros((0, 1 + layer.group.blocks), np.int32)
            return
        if self.width * columns > MOST:
            raise ValueError(f"[Plan] a row of group {layer.index} has more than 2^31 - 1 block ids")
        self.copies = np.zeros((0, 3), np.int32)
        self.dirty_rows = self.kv_starts = np.zeros(0, np.int32)
        self.shapes |= {
            "block_tables": (rows, self.width) if columns == 1 else (rows, self.width, columns),
            "slot_mapping": (columns * tokens,),
            "indptr": (rows + 1,),
            "indices": (rows * self.width * columns,),
            "last_page_len": (rows,),
        }
        most = {"slot_mapping": layer.arena.num_blocks * layer.block_size, "indptr": rows * self.width}
        for name, value in most.items():
            if plan.dtypes.get(name) == np.int32 and value > MOST:
                raise ValueError(f"[Plan] {name} is int32, but values reach {value}, use int64")

    def fill(self, batch: list[Any], fresh: list[tuple[Any, int]], step: Any, num_rows: int, num_tokens: int) -> None:
        """Write everything: `batch` as it is after the step, `fresh` the new tokens as (sequence, position)."""
        layer, pads, pool = self._layer, self._plan.pads, self._plan.pool
        g, size, columns = layer.index, layer.block_size, layer.columns
        tables = [seq.tables[g] for seq in batch]
        held = [pool.held(seq, layer) for seq in batch]
        self._size = num_rows, num_tokens, 0
        self.store("seq_lens", held, num_rows, pads["seq_lens"])
        padding = num_rows - len(batch)
        if layer.kind == "state":
            moves = [pool.state_move(row, layer) for row in step.rows] + [(-1, -1)] * padding
            self.state_src, self.state_dst = np.array(moves, np.int32).reshape(-1, 2).T.copy()
            return
        places = [(seq.tables[g].entries, p - seq.tables[g].evicted) for seq, p in fresh]
        slots = [[block * size + p % size for block in entries[p // size]] for entries, p in places]
        slots += [[pads["slot_mapping"]] * columns] * (num_tokens - len(slots))
        self.store("slot_mapping", [entry[c] for c in range(columns) for entry in slots], 0)
        pages = [[e for e in t.entries[: ceil_div(n, size)] if e] for t, n in zip(tables, held, strict=True)]
        self._size = num_rows, num_tokens, sum(map(len, pages))
        self.store("indptr", _sums([len(row) for row in pages], padding), 0)
        self.store("indices", [block for row in pages for entry in row for block in entry], 0)
        last = [(n - 1) % size + 1 if n else 0 for n in held]
        self.store("last_page_len", last, num_rows, pads["last_page_len"])
        if "block_tables" in self.base:
            rows = self.base["block_tables"].reshape(self.shapes["block_tables"][0], self.width, columns)
            rows[:num_rows] = pads["block_tables"]
            for row, table in zip(rows, tables, strict=False):
                row[: len(table.entries)] = pool.shown(layer, table.entries)
        starts = [max((i + 1 for i, entry in enumerate(t.entries) if not entry), default=0) * size for t in tables]
        self.kv_starts = np.array(starts + [0] * padding, np.int32)
        self.copies = np.array([copy[1:] for copy in step.copies if copy[0] == g], np.int32).reshape(-1, 3)
        self.copies.flags.writeable = False
        self.dirty_rows = np.array(self._dirty(batch, num_rows), np.int32)

    def _dirty(self, batch: list[Any], num_rows: int) -> list[int]:
        """Rows that changed since they were shown last."""
        if not ROW_FORMATS & set(self._plan.formats):
            return []
        tables = [(seq.handle, seq.tables[self._layer.index]) for seq in batch]
        now = [(handle, table.epoch, len(table.entries)) for handle, table in tables]
        dirty = [row for row, shown in enumerate(now) if self._memory.get(row) != shown]
        self._memory.update(enumerate(now))
        padding = [row for row in range(len(now), num_rows) if row in self._memory]
        for row in padding:
            del self._memory[row]
        return dirty + padding

    def carry(self, num_rows: int) -> None:
        """Distrust what was written, so that these rows are dirty when they are shown next."""
        self._memory.update(dict.fromkeys(range(num_rows)))

    def show(self, name: str, flat: bool = False) -> np.ndarray:
        """The part of an array that the last step filled; `flat`: without columns, if it has one."""
        if name in ALWAYS:
            found: np.ndarray = getattr(self, name)
            return found
        if name not in self.base:
            raise AttributeError(f"this group of the plan has no {name!r}: its formats are {self._plan.formats}")
        (rows, tokens, entries), columns = self._size, self._layer.columns
        shapes = {"slot_mapping": (columns, tokens), "indices": (entries, columns), "indptr": (rows + 1,)}
        shape = ({"block_tables": (rows, self.width, columns)} | shapes).get(name, (rows,))
        view = self.base[name].reshape(-1)[: math.prod(shape)].reshape(shape)
        if flat and columns == 1 and len(shape) > 1:
            return view[0] if name == "slot_mapping" else view[..., 0]
        return view

    def __getattr__(self, name: str) -> np.ndarray:
        if name == "kv_lens" or (name in ARRAYS and name not in (*COMMON, "seq_lens")):
            return self.show("seq_lens" if name == "kv_lens" else name)
        raise AttributeError(f"this group of the plan has no {name!r}")


class ModelPlan(Arrays):
    """The arrays that one step fills; same constructor, attributes and errors as `kvpool.Plan`."""

    def __init__(
        self, pool: Any, max_rows: int, max_tokens: int | None = None, *,
        formats: Any = ("block_tables", "seq_lens", "slot_mapping"), table_width: int | None = None,
        dtype: Any = "int32", pad: dict[str, int] | None = None, out: dict[str, Any] | None = None, backend: Any = None,
    ) -> None:  # fmt: skip
        if not hasattr(pool, "options"):
            raise TypeError(f"[Plan] pool is a {type(pool).__name__}, a pool is needed")
        self.pool = pool
        pool.refuse_closed("Plan")
        rows = args.integer("Plan", "max_rows", max_rows, 1, 2**20)
        tokens = args.integer("Plan", "max_tokens", rows if max_tokens is None else max_tokens, 0, MOST)
        width = pool.options.max_blocks_per_seq if table_width is None else table_width
        self.limits = PlanLimits(rows, tokens, args.integer("Plan", "table_width", width, 1, MOST))
        self.formats = (formats,) if isinstance(formats, str) else tuple(formats)
        if backend is not None:
            theirs = backend.spec.block_size, backend.num_blocks
            if theirs != (pool.block_size, pool.num_blocks):
                raise ValueError(f"[Plan] block_size and num_blocks are {theirs} in the backend, others in the pool")
            self.formats += tuple(backend.required_formats)
        for name in self.formats:
            if name not in FORMATS:
                raise ValueError(f"[Plan] unknown format ({name!r}), one of {', '.join(FORMATS)}")
        self.names = [name for name in ARRAYS if any(name in FORMATS[one] for one in self.formats)]
        self.dtypes = self._array_dtypes(dtype)
        self.pads = self._array_pads(pad)
        self.shapes = {"positions": (tokens,), "cu_q_lens": (rows + 1,), "slot_ids": (rows,)}
        self.groups = tuple(GroupArrays(self, layer) for layer in pool.layers)
        for part in (self, *self.groups):
            names = [name for name in self.names if name in part.shapes]
            part.base = {n: np.full(part.shapes[n], self.pads[n], self.dtypes[n]) for n in names}
        narrow = np.int32 in [self.dtypes.get(name) for name in ("seq_lens", "positions")]
        narrow = narrow or any(layer.kind in ("window", "chunk") for layer in pool.layers)  # kv_starts
        self.longest = MOST if narrow else 2**63 - 1  #: the longest sequence that a step may have
        self._bound: list[tuple[Arrays, str, Any]] = []  # where the arrays of others were
        self.is_pending, self.step_id, self._size, self.num_tokens = False, 0, (0, 0), 0
        self.handles, self.served = np.zeros(0, np.int64), np.zeros(0, np.uint8)
        self._bind("Plan", out or {})

    def _array_dtypes(self, dtype: Any) -> dict[str, np.dtype]:
        given = dtype if isinstance(dtype, dict) else dict.fromkeys(self.names, dtype)
        for name, one in given.items():
            if name not in self.names:
                raise ValueError(f"[Plan] dtype of an array that the plan does not have ({name!r})")
            if one not in ("int32", "int64"):
                raise ValueError(f"[Plan] dtype of {name} is {one!r}, 'int32' or 'int64' is needed")
        return {name: np.dtype(given.get(name, "int32")) for name in self.names}

    def _array_pads(self, pad: dict[str, int] | None) -> dict[str, int]:
        tables = -1 if "page_batch_info" in self.formats else self.pool.hole
        pads = {name: 0 for name in ARRAYS} | {"block_tables": tables, "slot_mapping": -1, "slot_ids": -1}
        for name, value in (pad or {}).items():
            if name not in self.names:
                raise ValueError(f"[Plan] pad of an array that the plan does not have ({name!r})")
            pads[name] = args.integer("Plan", f"pad of {name}", value, -MOST - 1, MOST)
        return pads

    def bind(self, **arrays: Any) -> None:
        """Fill these arrays from now on; every row is dirty in the next step."""
        if self.is_pending:
            raise PlanStateError("[bind] the plan is pending, call done or rollback first")
        self._bind("bind", arrays)
        self.carry(self.limits.max_rows)

    def _by_part(self, call: str, arrays: dict[str, Any]) -> list[tuple[Arrays, str, Any]]:
        """Arrays of the caller and their parts: what several groups have is given by a sequence."""
        found: list[tuple[Arrays, str, Any]] = []
        for name, given in arrays.items():
            parts: tuple[Arrays, ...] = (self,) if name in COMMON else self.groups
            if name not in self.names:
                raise ValueError(f"[{call}] the plan has no array of this name ({name!r})")
            if len(parts) == 1:
                given = [given]
            elif not isinstance(given, list | tuple) or len(given) != len(parts):
                raise TypeError(f"[{call}] {name} must have an array or None for each of {len(parts)} groups")
            for part, array in zip(parts, given, strict=True):
                if array is not None or len(parts) == 1:
                    if name not in part.shapes:
                        raise ValueError(f"[{call}] a group of states has no array of this name ({name!r})")
                    found.append((part, name, array))
        return found

    def _bind(self, call: str, arrays: dict[str, Any]) -> None:
        given = self._by_part(call, arrays)
        for part, name, array in given:
            if not isinstance(array, np.ndarray):
                raise TypeError(f"[{call}] {name} is a {type(array).__name__}, an array is needed")
            if array.dtype.newbyteorder("=") != self.dtypes[name]:
                raise TypeError(f"[{call}] {name} has dtype {array.dtype}, {self.dtypes[name]} is needed")
            if array.shape != part.shapes[name]:
                raise ValueError(f"[{call}] {name} has shape {array.shape}, {part.shapes[name]} is needed")
            flags = array.flags
            if not (flags.c_contiguous and flags.writeable and flags.aligned and array.dtype.isnative):
                raise ValueError(f"[{call}] {name} must be C-contiguous, writable and in native byte order")
        all_bases = {(part, name): array for part in (self, *self.groups) for name, array in part.base.items()}
        all_bases |= {(part, name): array for part, name, array in given}
        for part, name, array in given:
            for other, one in all_bases.items():
                if other != (part, name) and np.may_share_memory(array, one):
                    raise ValueError(f"[{call}] {name} overlaps {other[1]}")
        for part, name, array in given:
            part.base[name] = array
        places = [(part, name, (array.ctypes.data, array.shape)) for part, name, array in given]
        self._bound = [one for one in self._bound if one[:2] not in [new[:2] for new in places]] + places

    def refuse_moved(self, call: str) -> None:
        """Refuse to write into an array that was resized since it was bound."""
        for part, name, place in self._bound:
            if (part.base[name].ctypes.data, part.base[name].shape) != place:
                raise BufferError(f"[{call}] {name} was resized while it is bound, bind it again")

    def fill(
        self, batch: list[Any], new: list[int], served: list[bool], step: Any, shape: tuple[int, int] | None
    ) -> None:
        """Write everything: `batch` as it is after the step, `new` tokens served per row."""
        rows, tokens = self._size = shape or (len(batch), sum(new))
        self.num_tokens = sum(new)
        self.handles = np.array([seq.handle for seq in batch], np.int64)
        self.served = np.array(served, np.uint8)
        fresh = [(seq, p) for seq, n in zip(batch, new, strict=True) for p in range(seq.num_tokens)[-n:] if n]
        self.store("positions", [p for _, p in fresh], tokens, self.pads["positions"])
        self.store("cu_q_lens", _sums(new, rows - len(batch)), 0)
        self.store("slot_ids", [seq.handle & 0xFFFFF for seq in batch], rows, self.pads["slot_ids"])
        for group in self.groups:
            group.fill(batch, fresh, step, rows, tokens)

    def carry(self, num_rows: int) -> None:
        """Distrust what was written, so that these rows are dirty when they are shown next."""
        for group in self.groups:
            group.carry(num_rows)

    def __getattr__(self, name: str) -> np.ndarray:
        if name.startswith("_") or name not in (*ARRAYS, *ALWAYS):
            raise AttributeError(name)
        if name not in COMMON and len(self.groups) > 1:
            raise ValueError(f"[Plan] {name} differs between layer groups, see plan.groups")
        if name in ARRAYS and name not in self.names:
            raise AttributeError(f"the plan has no array {name!r}: its formats are {self.formats}")
        if name not in COMMON:
            return self.groups[0].show(name, flat=True)
        rows, tokens = self._size
        return self.base[name][: {"positions": tokens, "cu_q_lens": rows + 1}.get(name, rows)]

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise TypeError("[Plan] a plan cannot be pickled or copied")
