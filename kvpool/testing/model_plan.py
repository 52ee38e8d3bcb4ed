"""`ModelPlan`: the arrays of a step, rebuilt from scratch by every step.

Nothing is incremental here: the only memory is the three numbers per row and group that the contract names (handle,
epoch, entries written), and they decide `dirty_rows`, never the contents.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from kvpool.errors import PlanStateError
from kvpool.stats import PlanLimits
from kvpool.testing import model_args as args
from kvpool.testing.model_blocks import ceil_div
from kvpool.testing.model_groups import Step

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


def _padded(values: list[int], length: int, pad: int = 0) -> np.ndarray:
    return np.array(values + [pad] * (length - len(values)), np.int32)


class GroupArrays:
    """What a plan has for one layer group: an element of ``plan.groups``."""

    def __init__(self, plan: ModelPlan, layer: Any) -> None:
        self._plan, self._layer = plan, layer
        self.width = ceil_div(plan.limits.table_width * plan.pool.block_size, layer.block_size)
        # row -> (handle, epoch, entries written); None if carried; rows that show padding are not in it
        self._memory: dict[int, tuple[int, int, int] | None] = dict.fromkeys(range(plan.limits.max_rows))
        if layer.kind == "state":
            self.state_loads = self.state_saves = np.zeros((0, 1 + layer.group.blocks), np.int32)

    def fill(self, batch: list[Any], fresh: list[tuple[Any, int]], step: Any, num_rows: int, num_tokens: int) -> None:
        """Write everything: `batch` as it is after the step, `fresh` the new tokens as (sequence, position)."""
        layer, pool = self._layer, self._plan.pool
        g, size, columns = layer.index, layer.block_size, layer.columns
        tables = [seq.tables[g] for seq in batch]
        held = [pool.held(seq, layer) for seq in batch]
        padding = num_rows - len(batch)
        self._arrays = {"seq_lens": _padded(held, num_rows)}
        if layer.kind == "state":
            moves = [pool.state_move(row, layer) for row in step.rows] + [(-1, -1)] * padding
            self.state_src, self.state_dst = np.array(moves, np.int32).reshape(-1, 2).T.copy()
            return
        places = [(seq.tables[g].entries, p - seq.tables[g].evicted) for seq, p in fresh]
        slots = [[block * size + p % size for block in entries[p // size]] for entries, p in places]
        slots += [[-1] * columns] * (num_tokens - len(slots))
        pages = [[e for e in t.entries[: ceil_div(n, size)] if e] for t, n in zip(tables, held, strict=True)]
        rows = np.full((num_rows, self.width, columns), self._plan.pad, np.int32)
        for row, table in zip(rows, tables, strict=False):
            row[: len(table.entries)] = pool.shown(layer, table.entries)
        self._arrays |= {
            "block_tables": rows,
            "slot_mapping": np.array(slots, np.int32).reshape(-1, columns).T,
            "indptr": np.array(_sums([len(row) for row in pages], padding), np.int32),
            "indices": np.array([entry for row in pages for entry in row], np.int32).reshape(-1, columns),
            "last_page_len": _padded([(n - 1) % size + 1 if n else 0 for n in held], num_rows),
        }
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
        """An array of the last step; `flat`: without columns, if it has one."""
        if name in ALWAYS:
            found: np.ndarray = getattr(self, name)
            return found
        if name not in self._arrays or name not in self._plan.names:
            raise AttributeError(f"this group of the plan has no {name!r}: its formats are {self._plan.formats}")
        array = self._arrays[name]
        if flat and self._layer.columns == 1 and array.ndim > 1:
            return array[0] if name == "slot_mapping" else array[..., 0]
        return array

    def __getattr__(self, name: str) -> np.ndarray:
        if name == "kv_lens" or (name in ARRAYS and name not in (*COMMON, "seq_lens")):
            return self.show("seq_lens" if name == "kv_lens" else name)
        raise AttributeError(f"this group of the plan has no {name!r}")


class ModelPlan:
    """The arrays that one step fills, all int32: attributes and errors as `kvpool.Plan` has them."""

    def __init__(
        self, pool: Any, max_rows: int, max_tokens: int | None = None, *,
        formats: Any = ("block_tables", "seq_lens", "slot_mapping"), table_width: int | None = None,
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
        for name in self.formats:
            if name not in FORMATS:
                raise ValueError(f"[Plan] unknown format ({name!r}), one of {', '.join(FORMATS)}")
        self.names = [name for name in ARRAYS if any(name in FORMATS[one] for one in self.formats)]
        self.pad = -1 if "page_batch_info" in self.formats else pool.hole  #: of block tables
        self.groups = tuple(GroupArrays(self, layer) for layer in pool.layers)
        self.is_pending, self.step_id = False, 0
        self.fill([], [], [], Step(0, self, []), None)

    def bind(self) -> None:
        """Every row is dirty in the next step."""
        if self.is_pending:
            raise PlanStateError("[bind] the plan is pending, call done or rollback first")
        self.carry(self.limits.max_rows)

    def fill(
        self, batch: list[Any], new: list[int], served: list[bool], step: Any, shape: tuple[int, int] | None
    ) -> None:
        """Write everything: `batch` as it is after the step, `new` tokens served per row."""
        rows, tokens = shape or (len(batch), sum(new))
        self.num_tokens = sum(new)
        self.handles = np.array([seq.handle for seq in batch], np.int64)
        self.served = np.array(served, np.uint8)
        fresh = [(seq, p) for seq, n in zip(batch, new, strict=True) for p in range(seq.num_tokens)[-n:] if n]
        self._arrays = {
            "positions": _padded([p for _, p in fresh], tokens),
            "cu_q_lens": np.array(_sums(new, rows - len(batch)), np.int32),
            "slot_ids": _padded([seq.handle & 0xFFFFF for seq in batch], rows, -1),
        }
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
        return self._arrays[name]

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise TypeError("[Plan] a plan cannot be pickled or copied")
