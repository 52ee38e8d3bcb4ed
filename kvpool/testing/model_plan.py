"""`ModelPlan`: the arrays of a step, rebuilt from scratch by every step.

The plain twin of `kvpool.Plan`. Nothing is incremental here: the only memory is the three numbers per row
that the contract names (handle, epoch, blocks written), and they decide `dirty_rows`, never the contents.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Self

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
#: The formats that `dirty_rows` speaks about.
ROW_FORMATS = {"block_tables", "csr", "page_batch_info"}


@dataclass(eq=False, slots=True)
class Sequence:
    """An open sequence."""

    handle: int
    num_tokens: int
    table: list[int]
    epoch: int = 0
    #: (handle forked from, newest step id at that moment), for all its ancestors
    ancestors: list[tuple[int, int]] = field(default_factory=list)
    #: what `commit` and the prefix cache know, see `kvpool.testing.model`
    root: int | None = None
    tokens: list[int] = field(default_factory=list)
    published: int = 0  #: how many of its full blocks the index was offered
    #: (step, done tokens) when it was forked from a row of a pending step
    forked_in: tuple[int, int] | None = None
    #: tokens that left; `num_tokens` are those that are there, and positions go on from the sum of both
    evicted: int = 0
    point: int = 0  #: that sum when tokens left last
    tables: list[Any] = field(default_factory=list)  #: one per layer group, of pools that have some
    known: Any = None  #: what its prefix cache knows, of pools with layer groups
    is_loading: bool = False  #: somebody writes its blocks, until `loaded`
    is_closed: bool = False  #: closed since then


def _place(array: np.ndarray) -> tuple[int, tuple[int, ...]]:
    """Where the memory of an array is, and its shape."""
    return array.__array_interface__["data"][0], array.shape


def dirty_rows(memory: dict[int, Any], now: list[tuple[int, int, int]], num_rows: int) -> list[int]:
    """Rows that changed; `memory` is what each one showed last, as `now`, and absent for padding."""
    dirty = [row for row, shown in enumerate(now) if memory.get(row) != shown]
    memory.update(enumerate(now))
    padding = [row for row in range(len(now), num_rows) if row in memory]
    for row in padding:
        del memory[row]
    return dirty + padding


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
    """

    groups: Any = None  #: an object per layer group, of pools that have some

    def __new__(cls, pool: Any, *sizes: Any, **options: Any) -> Self:
        """Choose the class by the pool."""
        return super().__new__(getattr(pool, "plan_class", cls))

    def __init__(
        self,
        pool: Any,
        max_rows: int,
        max_tokens: int | None = None,
        *,
        formats: Any = ("block_tables", "seq_lens", "slot_mapping"),
        table_width: int | None = None,
        dtype: Any = "int32",
        pad: dict[str, int] | None = None,
        out: dict[str, np.ndarray] | None = None,
    ) -> None:
        if not hasattr(pool, "options"):
            raise TypeError(f"[Plan] pool is a {type(pool).__name__}, a pool is needed")

        def size(name: str, value: int | None, default: int) -> int:
            return default if value is None else args.integer("Plan", name, value, 1)

        self.pool = pool
        rows = args.integer("Plan", "max_rows", max_rows, 1)
        tokens = size("max_tokens", max_tokens, rows)
        width = size("table_width", table_width, pool.options.max_blocks_per_seq)
        self.limits = PlanLimits(rows, tokens, width)
        self.formats = (formats,) if isinstance(formats, str) else tuple(formats)
        for name in self.formats:
            if name not in FORMATS:
                raise ValueError(f"[Plan] unknown format ({name!r}), one of {', '.join(FORMATS)}")
        self._shapes = self._capacity_shapes()
        self._dtypes = self._array_dtypes(dtype)
        self._pads = self._array_pads(pad)
        self._base = {n: np.full(s, self._pads.get(n, 0), self._dtypes[n]) for n, s in self._shapes.items()}
        self._bound: dict[str, tuple[int, tuple[int, ...]]] = {}  # where the arrays of others were
        self._views: dict[str, np.ndarray] = {}
        # row -> (handle, epoch, blocks written); None if carried; rows that show padding are not in it
        self._memory: dict[int, tuple[int, int, int] | None] = dict.fromkeys(range(self.limits.max_rows))
        self._pending = False
        self.step_id = 0
        self._remember_batch([], [], [], [])
        if out is not None:
            self._bind("Plan", out)
        self._show(0, 0, 0)

    # ---- construction -------------------------------------------------------------------------------------

    def _capacity_shapes(self) -> dict[str, tuple[int, ...]]:
        rows, tokens, width = self.limits
        every = {
            "block_tables": (rows, width),
            "seq_lens": (rows,),
            "slot_mapping": (tokens,),
            "positions": (tokens,),
            "cu_q_lens": (rows + 1,),
            "indptr": (rows + 1,),
            "indices": (rows * width,),
            "last_page_len": (rows,),
            "slot_ids": (rows,),
        }
        wanted = {array for name in self.formats for array in FORMATS[name]}
        return {name: shape for name, shape in every.items() if name in wanted}

    def _array_dtypes(self, dtype: Any) -> dict[str, np.dtype]:
        given = dtype if isinstance(dtype, dict) else {name: dtype for name in self._shapes}
        for name, one in given.items():
            if name not in self._shapes:
                raise ValueError(f"[Plan] dtype of an array that the plan does not have ({name!r})")
            if one not in ("int32", "int64"):
                raise ValueError(f"[Plan] dtype of {name} is {one!r}, 'int32' or 'int64' is needed")
        dtypes = {name: np.dtype(given.get(name, "int32")) for name in self._shapes}
        num_slots = self.pool.num_blocks * self.pool.block_size
        if dtypes.get("slot_mapping") == np.int32 and num_slots > 2**31 - 1:
            raise ValueError(f"[Plan] slot_mapping is int32 but the pool has {num_slots} slots, use int64")
        return dtypes

    def _array_pads(self, pad: dict[str, int] | None) -> dict[str, int]:
        nowhere = 0 if self.pool.options.reserved_blocks else -1
        pads = {
            "block_tables": -1 if "page_batch_info" in self.formats else nowhere,
            "seq_lens": 0,
            "slot_mapping": -1,
            "positions": 0,
            "last_page_len": 0,
            "slot_ids": -1,
        }
        for name, value in (pad or {}).items():
            if name not in pads or name not in self._shapes:
                raise ValueError(f"[Plan] pad of an array that has none ({name!r})")
            limit = np.iinfo(self._dtypes[name])
            pads[name] = args.integer("Plan", f"pad of {name}", value, int(limit.min), int(limit.max))
        return pads

    def bind(self, **arrays: np.ndarray) -> None:
        """Fill these arrays from now on; every row is dirty in the next step.

        Raises
        ------
        PlanStateError
            The plan is pending.
        TypeError, ValueError
            An array has the wrong dtype; the wrong shape, strides or byte order, is read-only, or overlaps
            another array of the plan. Nothing was bound.
        """
        if self._pending:
            raise PlanStateError("[bind] the plan is pending, call done or rollback first")
        self._bind("bind", arrays)
        self._carry(self.limits.max_rows)

    def _bind(self, call: str, arrays: dict[str, np.ndarray]) -> None:
        for name, array in arrays.items():
            if name not in self._shapes:
                raise ValueError(f"[{call}] the plan has no array of this name ({name!r})")
            if not isinstance(array, np.ndarray):
                raise TypeError(f"[{call}] {name} is a {type(array).__name__}, an array is needed")
            if array.dtype.newbyteorder("=") != self._dtypes[name]:
                raise TypeError(f"[{call}] {name} has dtype {array.dtype}, {self._dtypes[name]} is needed")
            if array.shape != self._shapes[name]:
                raise ValueError(f"[{call}] {name} has shape {array.shape}, {self._shapes[name]} is needed")
            flags = array.flags
            if not (flags.c_contiguous and flags.writeable and flags.aligned and array.dtype.isnative):
                raise ValueError(f"[{call}] {name} must be C-contiguous, writable and in native byte order")
        base = {**self._base, **arrays}
        names = list(base)
        for i, one in enumerate(names):
            for other in names[i + 1 :]:
                if np.may_share_memory(base[one], base[other]):
                    raise ValueError(f"[{call}] {one} overlaps {other}")
        self._base = base
        self._bound.update((name, _place(array)) for name, array in arrays.items())
        for name in arrays:
            if name in self._views:
                self._views[name] = base[name][: len(self._views[name])]

    def _refuse_moved(self, call: str) -> None:
        """Refuse to write into an array that was resized since it was bound."""
        for name, place in self._bound.items():
            if _place(self._base[name]) != place:
                raise BufferError(f"[{call}] {name} was resized while it is bound, bind it again")

    # ---- what a step writes -------------------------------------------------------------------------------

    def _remember_batch(
        self,
        batch: list[Sequence],
        new: list[int],
        served: list[bool],
        copies: list[tuple[int, int, int]],
    ) -> None:
        self.num_tokens = sum(new)
        self.handles = np.array([seq.handle for seq in batch], np.int64)
        self.served = np.array(served, np.uint8)
        self.copies = np.array(copies, np.int32).reshape(-1, 3)
        self.copies.flags.writeable = False
        self.dirty_rows = np.zeros(0, np.int32)

    def _fill(
        self,
        batch: list[Sequence],
        new: list[int],
        served: list[bool],
        copies: list[tuple[int, int, int]],
        pad_to: tuple[int, int] | None,
    ) -> None:
        """Write everything: `batch` as it is after the step, `new` tokens served per row."""
        rows, tokens = pad_to or (len(batch), sum(new))
        self._remember_batch(batch, new, served, copies)
        if ROW_FORMATS & set(self.formats):
            self.dirty_rows = np.array(self._dirty(batch, rows), np.int32)
        self._show(rows, tokens, self._write(batch, new, rows, tokens))

    def _dirty(self, batch: list[Sequence], num_rows: int) -> list[int]:
        return dirty_rows(self._memory, [(seq.handle, seq.epoch, len(seq.table)) for seq in batch], num_rows)

    def _write(self, batch: list[Sequence], new: list[int], num_rows: int, num_tokens: int) -> int:
        """Build every array as nested lists, then store them; returns the length of `indices`."""
        bs = self.pool.block_size
        padding = num_rows - len(batch)
        lens = [seq.num_tokens for seq in batch]
        pages = [seq.table[: -(-seq.num_tokens // bs)] for seq in batch]
        fresh = [(seq, p) for seq, m in zip(batch, new, strict=True) for p in range(seq.num_tokens)[-m:] if m]

        def slot(seq: Sequence, position: int) -> int:
            return seq.table[position // bs] * bs + position % bs

        def padded(name: str, values: list, length: int) -> list:
            return values + [self._pads[name]] * (length - len(values))

        def table(name: str, values: list[list[int]], width: int) -> list[list[int]]:
            return [padded(name, v, width) for v in values] + [[self._pads[name]] * width] * padding

        def sums(counts: list[int]) -> list[int]:
            return [sum(counts[:i]) for i in range(len(counts) + 1)] + [sum(counts)] * padding

        build = {
            "block_tables": lambda: table("block_tables", [seq.table for seq in batch], self.limits.table_width),
            "seq_lens": lambda: padded("seq_lens", lens, num_rows),
            "slot_mapping": lambda: padded("slot_mapping", [slot(seq, p) for seq, p in fresh], num_tokens),
            "positions": lambda: padded("positions", [p + seq.evicted for seq, p in fresh], num_tokens),
            "cu_q_lens": lambda: sums(new),
            "indptr": lambda: sums([len(row) for row in pages]),
            "indices": lambda: [b for row in pages for b in row],
            "last_page_len": lambda: padded("last_page_len", [(n - 1) % bs + 1 if n else 0 for n in lens], num_rows),
            "slot_ids": lambda: padded("slot_ids", [seq.handle & 0xFFFFF for seq in batch], num_rows),
        }
        for name, base in self._base.items():
            values = build[name]()
            if values:
                base[: len(values)] = values
        return sum(len(row) for row in pages)

    def _show(self, num_rows: int, num_tokens: int, num_pages: int) -> None:
        """Make the attributes show the filled part; the same objects while the shapes stay."""
        shown = {
            "slot_mapping": num_tokens,
            "positions": num_tokens,
            "cu_q_lens": num_rows + 1,
            "indptr": num_rows + 1,
            "indices": num_pages,
        }
        for name, base in self._base.items():
            length = shown.get(name, num_rows)
            if name not in self._views or len(self._views[name]) != length:
                self._views[name] = base[:length]

    def _carry(self, num_rows: int) -> None:
        """Distrust what was written, so that these rows are dirty when they are shown next."""
        self._memory.update(dict.fromkeys(range(num_rows)))

    # ---- what a user reads --------------------------------------------------------------------------------

    def __getattr__(self, name: str) -> np.ndarray:
        views = self.__dict__.get("_views", {})
        if name in views:
            return views[name]
        raise AttributeError(f"the plan has no array {name!r}: its formats are {self.__dict__.get('formats')}")

    @property
    def is_pending(self) -> bool:
        """True from the step until `done` has passed or `rollback`."""
        return self._pending

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise TypeError("[Plan] a plan cannot be pickled or copied")
