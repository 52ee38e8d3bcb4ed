"""`ModelPlan`: the arrays of a step, rebuilt from scratch by every step.

The plain twin of `kvpool.Plan`. Nothing is incremental here: the only memory is the three numbers per row and group
that the contract names (handle, epoch, entries written), and they decide `dirty_rows`, never the contents.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from kvpool.errors import PlanStateError
from kvpool.stats import PlanLimits
from kvpool.testing import model_args as args

#: The arrays of each format.
FORMATS = {
    "block_tables": ("block_tables",),
    "seq_lens": ("seq_lens",),
    "slot_mapping": ("slot_mapping",),
    "positions": ("positions",),
    "cu_q_lens": ("cu_q_lens",),
    "csr": ("indptr", "indices", "last_page_len"),
    "slot_ids": ("slot_ids",),
    "page_batch_info": ("slot_ids", "block_tables", "seq_lens", "cu_q_lens", "slot_mapping"),
}
ARRAYS = ("block_tables", "seq_lens", "slot_mapping", "positions", "cu_q_lens", "indptr", "indices", "last_page_len",
          "slot_ids")  # fmt: skip
COMMON = ("positions", "cu_q_lens", "slot_ids")  #: the others are arrays of each layer group
ALWAYS = ("copies", "dirty_rows")  #: that each group of blocks has, whatever the formats
#: The formats that `dirty_rows` speaks about.
ROW_FORMATS = {"block_tables", "csr", "page_batch_info"}
MOST = 2**31 - 1


def _place(array: np.ndarray) -> tuple[int, tuple[int, ...]]:
    """Where the memory of an array is, and its shape."""
    return array.__array_interface__["data"][0], array.shape


def _sums(counts: list[int], padding: int) -> list[int]:
    return [sum(counts[:i]) for i in range(len(counts) + 1)] + [sum(counts)] * padding


class GroupArrays:
    """What a plan has for one layer group: an element of ``plan.groups``."""

    def __init__(self, plan: ModelPlan, layer: Any) -> None:
        self._plan, self._layer, self._pool = plan, layer, plan.pool
        self.width = -(-plan.limits.table_width * plan.pool.block_size // layer.block_size)
        self.base: dict[str, np.ndarray] = {}
        self._size = 0, 0, 0  # rows, tokens, CSR entries that are shown
        # row -> (handle, epoch, entries written); None if carried; rows that show padding are not in it
        self._memory: dict[int, tuple[int, int, int] | None] = dict.fromkeys(range(plan.limits.max_rows))
        if layer.kind == "state":
            self.state_src = self.state_dst = np.zeros(0, np.int32)
            self.state_loads = self.state_saves = np.zeros((0, 1 + layer.group.blocks), np.int32)
            return
        if self.width * layer.columns > MOST:
            raise ValueError(f"[Plan] a row of group {layer.index} has more than 2^31 - 1 block ids")
        self.copies = np.zeros((0, 3), np.int32)
        self.dirty_rows = self.kv_starts = np.zeros(0, np.int32)

    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Whole shapes of the arrays that the group can have."""
        rows, tokens, _ = self._plan.limits
        columns = self._layer.columns
        if self._layer.kind == "state":
            return {"seq_lens": (rows,)}
        return {
            "block_tables": (rows, self.width) if columns == 1 else (rows, self.width, columns),
            "seq_lens": (rows,),
            "slot_mapping": (columns * tokens,),
            "indptr": (rows + 1,),
            "indices": (rows * self.width * columns,),
            "last_page_len": (rows,),
        }

    def refuse_dtype(self, name: str, dtype: np.dtype) -> None:
        """Refuse int32 where the values may not fit."""
        values = {
            "slot_mapping": self._layer.arena.num_blocks * self._layer.block_size,
            "indptr": self._plan.limits.max_rows * self.width,
        }.get(name, 0)
        if dtype == np.int32 and values > MOST:
            raise ValueError(f"[Plan] {name} is int32, but values reach {values}, use int64")

    # ---- what a step writes -------------------------------------------------------------------------------

    def fill(self, batch: list[Any], fresh: list[tuple[Any, int]], step: Any, num_rows: int, num_tokens: int) -> None:
        """Write everything: `batch` as it is after the step, `fresh` the new tokens as (sequence, position)."""
        g, size = self._layer.index, self._layer.block_size
        tables = [seq.tables[g] for seq in batch]
        held = [seq.num_tokens - table.evicted for seq, table in zip(batch, tables, strict=True)]
        self._size = num_rows, num_tokens, 0
        self._store("seq_lens", held, num_rows)
        if self._layer.kind == "state":
            self._fill_states(step, num_rows)
            return
        slots = [self._slots(seq.tables[g], p - seq.tables[g].evicted) for seq, p in fresh]
        padded = slots + [[self._plan.pads["slot_mapping"]] * self._layer.columns] * (num_tokens - len(slots))
        self._store("slot_mapping", [entry[c] for c in range(self._layer.columns) for entry in padded], 0)
        pages = [[e for e in t.entries[: -(-n // size)] if e] for t, n in zip(tables, held, strict=True)]
        self._size = num_rows, num_tokens, sum(map(len, pages))
        self._store("indptr", _sums([len(row) for row in pages], num_rows - len(batch)), 0)
        self._store("indices", [block for row in pages for entry in row for block in entry], 0)
        self._store("last_page_len", [(n - 1) % size + 1 if n else 0 for n in held], num_rows)
        if "block_tables" in self.base:
            rows = self.base["block_tables"].reshape(len(self.base["block_tables"]), self.width, -1)
            rows[:num_rows] = self._plan.pads["block_tables"]
            for row, table in zip(rows, tables, strict=False):
                row[: len(table.entries)] = self._pool.shown(self._layer, table.entries)
        last_hole = [max((i for i, entry in enumerate(t.entries) if not entry), default=-1) for t in tables]
        padding = [0] * (num_rows - len(batch))
        self.kv_starts = np.array([(i + 1) * size for i in last_hole] + padding, np.int32)
        self.copies = np.array([copy[1:] for copy in step.copies if copy[0] == g], np.int32).reshape(-1, 3)
        self.copies.flags.writeable = False
        self.dirty_rows = np.array(self._dirty(batch, num_rows), np.int32)

    def _store(self, name: str, values: list[int], length: int) -> None:
        """Write values, and pad up to a length."""
        if name in self.base:
            values = values + [self._plan.pads[name]] * (length - len(values))
            self.base[name][: len(values)] = values

    def _slots(self, table: Any, place: int) -> list[int]:
        """Of a token, in each column."""
        size = self._layer.block_size
        return [block * size + place % size for block in table.entries[place // size]]

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

    def _fill_states(self, step: Any, num_rows: int) -> None:
        """Which slot every row with new tokens reads, and which one it writes."""
        self.state_src, self.state_dst = np.full((2, num_rows), -1, np.int32)
        for r, row in enumerate(step.rows):
            if row.length > row.old_length:
                change, seq = row.changes[self._layer.index], self._plan.handles[r]
                ((slot,),) = self._pool.one("step", int(seq)).tables[self._layer.index].entries
                self.state_dst[r] = slot
                if change.replaced:
                    ((_, (old,), _),) = change.replaced
                    self.state_src[r] = old
                elif not change.num_appended:
                    self.state_src[r] = slot

    # ---- what a user reads --------------------------------------------------------------------------------

    @property
    def kv_lens(self) -> np.ndarray:
        """The rows' `kv_len` after the step."""
        return self.show("seq_lens")

    def show(self, name: str, flat: bool = False) -> np.ndarray:
        """The part of an array that the last step filled; `flat`: without columns, if it has one."""
        if name in ALWAYS:
            found: np.ndarray = getattr(self, name)
            return found
        if name not in self.base:
            raise AttributeError(f"this group of the plan has no {name!r}: its formats are {self._plan.formats}")
        rows, tokens, entries = self._size
        columns, base = self._layer.columns, self.base[name]
        flat = flat and columns == 1
        if name == "slot_mapping":
            return base[:tokens] if flat else base[: columns * tokens].reshape(columns, tokens)
        if name == "indices":
            return base[:entries] if flat else base[: columns * entries].reshape(entries, columns)
        if name == "block_tables":
            return base[:rows] if flat else base[:rows].reshape(rows, self.width, columns)
        return base[: rows + 1 if name == "indptr" else rows]

    def __getattr__(self, name: str) -> np.ndarray:
        if name in ARRAYS and name not in (*COMMON, "seq_lens"):
            return self.show(name)
        raise AttributeError(f"this group of the plan has no {name!r}")


class ModelPlan:
    """The arrays that one step fills; same constructor, attributes and errors as `kvpool.Plan`.

    Parameters
    ----------
    pool : ModelPool
        The only pool whose steps may fill this plan.
    max_rows, max_tokens, table_width : int
        Capacities. `max_tokens` defaults to `max_rows`, `table_width` to the pool's `max_blocks_per_seq`.
    formats : sequence of str
        Which wire formats to fill, see `FORMATS`.
    dtype : str or dict of str
        "int32" or "int64", for all arrays or per array.
    pad : dict of int, optional
        Pad value per array.
    out : dict of arrays, optional
        Arrays to fill instead of owned ones, checked as in `bind`.
    backend : KVBackend, optional
        Its formats are filled, too.
    """

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
        tokens = rows if max_tokens is None else args.integer("Plan", "max_tokens", max_tokens, 0, MOST)
        width = pool.options.max_blocks_per_seq
        if table_width is not None:
            width = args.integer("Plan", "table_width", table_width, 1, MOST)
        self.limits = PlanLimits(rows, tokens, width)
        self.formats = (formats,) if isinstance(formats, str) else tuple(formats)
        if backend is not None:
            self.formats += self._formats_of(backend)
        for name in self.formats:
            if name not in FORMATS:
                raise ValueError(f"[Plan] unknown format ({name!r}), one of {', '.join(FORMATS)}")
        self.names = [name for name in ARRAYS if any(name in FORMATS[one] for one in self.formats)]
        self.groups = tuple(GroupArrays(self, layer) for layer in pool.layers)
        self._dtypes = self._array_dtypes(dtype)
        self.pads = self._array_pads(pad)
        self.base: dict[str, np.ndarray] = {}
        for k, name in self._places():
            self._held(k)[name] = np.full(self._shape(k, name), self.pads.get(name, 0), self._dtypes[name])
        self._bound: dict[tuple[int, str], tuple[int, tuple[int, ...]]] = {}  # where the arrays of others were
        self._views: dict[str, np.ndarray] = {}
        self.is_pending, self.step_id, self._size = False, 0, (0, 0)
        self._remember([], [], [])
        self._bind("Plan", out or {})

    # ---- construction -------------------------------------------------------------------------------------

    def _formats_of(self, backend: Any) -> tuple[str, ...]:
        theirs = backend.spec.block_size, backend.num_blocks
        if theirs != (self.pool.block_size, self.pool.num_blocks):
            raise ValueError(f"[Plan] block_size and num_blocks are {theirs} in the backend, others in the pool")
        return tuple(backend.required_formats)

    def _held(self, k: int) -> dict[str, np.ndarray]:
        """The arrays of a group, -1: those that are common."""
        return self.base if k < 0 else self.groups[k].base

    def _shape(self, k: int, name: str) -> tuple[int, ...]:
        if k >= 0:
            return self.groups[k].shapes()[name]
        rows, tokens, _ = self.limits
        return {"positions": (tokens,), "cu_q_lens": (rows + 1,), "slot_ids": (rows,)}[name]

    def _owners(self, name: str) -> list[int]:
        """The groups that have an array; -1: it is common."""
        return [-1] if name in COMMON else [k for k, group in enumerate(self.groups) if name in group.shapes()]

    def _places(self) -> list[tuple[int, str]]:
        return [(k, name) for name in self.names for k in self._owners(name)]

    def _array_dtypes(self, dtype: Any) -> dict[str, np.dtype]:
        given = dtype if isinstance(dtype, dict) else dict.fromkeys(self.names, dtype)
        for name, one in given.items():
            if name not in self.names:
                raise ValueError(f"[Plan] dtype of an array that the plan does not have ({name!r})")
            if one not in ("int32", "int64"):
                raise ValueError(f"[Plan] dtype of {name} is {one!r}, 'int32' or 'int64' is needed")
        dtypes = {name: np.dtype(given.get(name, "int32")) for name in self.names}
        for k, name in self._places():
            if k >= 0 and self.pool.layers[k].kind != "state":
                self.groups[k].refuse_dtype(name, dtypes[name])
        narrow = any(dtypes.get(name) == np.int32 for name in ("seq_lens", "positions"))
        narrow = narrow or any(layer.kind in ("window", "chunk") for layer in self.pool.layers)  # kv_starts
        self.longest = MOST if narrow else 2**63 - 1  #: the longest sequence that a step may have
        return dtypes

    def _array_pads(self, pad: dict[str, int] | None) -> dict[str, int]:
        tables = -1 if "page_batch_info" in self.formats else self.pool.hole
        pads = {name: 0 for name in ARRAYS} | {"block_tables": tables, "slot_mapping": -1, "slot_ids": -1}
        for name, value in (pad or {}).items():
            if name not in self.names:
                raise ValueError(f"[Plan] pad of an array that the plan does not have ({name!r})")
            pads[name] = args.integer("Plan", f"pad of {name}", value, -MOST - 1, MOST)
        return pads

    def bind(self, **arrays: Any) -> None:
        """Fill these arrays from now on; every row is dirty in the next step.

        Raises
        ------
        PlanStateError
            The plan is pending.
        TypeError, ValueError
            An array has the wrong dtype; the wrong shape, strides or byte order, is read-only, or overlaps
            another array of the plan. Nothing was bound.
        """
        if self.is_pending:
            raise PlanStateError("[bind] the plan is pending, call done or rollback first")
        self._bind("bind", arrays)
        self.carry(self.limits.max_rows)

    def _by_group(self, call: str, arrays: dict[str, Any]) -> dict[tuple[int, str], Any]:
        """Arrays of the caller by group and name: in a pool of several groups a sequence has one for each."""
        found = {}
        for name, given in arrays.items():
            if name not in self.names:
                raise ValueError(f"[{call}] the plan has no array of this name ({name!r})")
            if name in COMMON or len(self.groups) == 1:
                if not self._owners(name):
                    raise ValueError(f"[{call}] a group of states has no array of this name ({name!r})")
                found.update({(k, name): given for k in self._owners(name)})
                continue
            if not isinstance(given, list | tuple) or len(given) != len(self.groups):
                raise TypeError(f"[{call}] {name} must have an array or None for each of {len(self.groups)} groups")
            for k, array in enumerate(given):
                if array is not None and k not in self._owners(name):
                    raise ValueError(f"[{call}] layer group {k} has no array of this name ({name!r})")
            found.update({(k, name): given[k] for k in self._owners(name) if given[k] is not None})
        return found

    def _bind(self, call: str, arrays: dict[str, Any]) -> None:
        given = self._by_group(call, arrays)
        for (k, name), array in given.items():
            if not isinstance(array, np.ndarray):
                raise TypeError(f"[{call}] {name} is a {type(array).__name__}, an array is needed")
            if array.dtype.newbyteorder("=") != self._dtypes[name]:
                raise TypeError(f"[{call}] {name} has dtype {array.dtype}, {self._dtypes[name]} is needed")
            if array.shape != self._shape(k, name):
                raise ValueError(f"[{call}] {name} has shape {array.shape}, {self._shape(k, name)} is needed")
            flags = array.flags
            if not (flags.c_contiguous and flags.writeable and flags.aligned and array.dtype.isnative):
                raise ValueError(f"[{call}] {name} must be C-contiguous, writable and in native byte order")
        base = {(k, name): self._held(k)[name] for k, name in self._places()} | given
        for place, array in given.items():
            for other, one in base.items():
                if other != place and np.may_share_memory(array, one):
                    raise ValueError(f"[{call}] {place[1]} overlaps {other[1]}")
        for (k, name), array in given.items():
            self._held(k)[name] = array
            self._bound[k, name] = _place(array)
        self._views.clear()

    def refuse_moved(self, call: str) -> None:
        """Refuse to write into an array that was resized since it was bound."""
        for (k, name), place in self._bound.items():
            if _place(self._held(k)[name]) != place:
                raise BufferError(f"[{call}] {name} was resized while it is bound, bind it again")

    # ---- what a step writes -------------------------------------------------------------------------------

    def _remember(self, batch: list[Any], new: list[int], served: list[bool]) -> None:
        self.num_tokens = sum(new)
        self.handles = np.array([seq.handle for seq in batch], np.int64)
        self.served = np.array(served, np.uint8)

    def fill(
        self, batch: list[Any], new: list[int], served: list[bool], step: Any, shape: tuple[int, int] | None
    ) -> None:
        """Write everything: `batch` as it is after the step, `new` tokens served per row."""
        rows, tokens = self._size = shape or (len(batch), sum(new))
        self._remember(batch, new, served)
        fresh = [(seq, p) for seq, n in zip(batch, new, strict=True) for p in range(seq.num_tokens)[-n:] if n]
        for group in self.groups:
            group.fill(batch, fresh, step, rows, tokens)
        values = {
            "positions": [p for _, p in fresh] + [self.pads["positions"]] * (tokens - len(fresh)),
            "cu_q_lens": _sums(new, rows - len(batch)),
            "slot_ids": [seq.handle & 0xFFFFF for seq in batch] + [self.pads["slot_ids"]] * (rows - len(batch)),
        }
        for name, base in self.base.items():
            base[: len(values[name])] = values[name]

    def carry(self, num_rows: int) -> None:
        """Distrust what was written, so that these rows are dirty when they are shown next."""
        for group in self.groups:
            group.carry(num_rows)

    # ---- what a user reads --------------------------------------------------------------------------------

    def _show(self, name: str) -> np.ndarray:
        rows, tokens = self._size
        if name in COMMON:
            return self.base[name][: {"positions": tokens, "cu_q_lens": rows + 1}.get(name, rows)]
        return self.groups[0].show(name, flat=True)

    def __getattr__(self, name: str) -> np.ndarray:
        if name.startswith("_") or name not in (*ARRAYS, *ALWAYS):
            raise AttributeError(name)
        if name not in COMMON and len(self.groups) > 1:
            raise ValueError(f"[Plan] {name} differs between layer groups, see plan.groups")
        if name in ARRAYS and name not in self.names:
            raise AttributeError(f"the plan has no array {name!r}: its formats are {self.formats}")
        view = self._show(name)
        if name not in ALWAYS and (name not in self._views or self._views[name].shape != view.shape):
            self._views[name] = view
        return self._views.get(name, view)

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise TypeError("[Plan] a plan cannot be pickled or copied")
