"""`CPUBackend`: the backend protocol on its own memory, computed by the native kernels."""

from __future__ import annotations

import mmap
import sys
from collections.abc import Iterable, Sequence
from contextlib import suppress
from math import prod
from typing import Any

import numpy as np

from kvpool.protocol import (
    FEATURES,
    SCORES,
    AnyPlan,
    AttentionOptions,
    BatchShape,
    Capabilities,
    StepArrays,
    checked_resize,
    move_rows,
)
from kvpool.spec import DTYPES, LAYOUTS, QUANT_BITS, QUANT_GROUP_SIZES, KVSpec
from kvpool_backends.checks import (
    STORED,
    block_ids,
    check_layer,
    checked_import,
    checked_keep,
    checked_results,
    checked_rows,
    checked_storage,
    gathered,
)
from kvpool_backends.cpu._kernels import BlockStore, default_isa, tilings

_HUGE_PAGE_NBYTES = 2 * 2**20
_PAGE_NBYTES = mmap.PAGESIZE
_FREES_PAGES = sys.platform == "linux"  # MADV_DONTNEED does; elsewhere pages go with their mapping


def zeroed(
    shapes: Sequence[tuple[int, ...]], dtypes: Sequence[Any], call: str = "zeroed"
) -> list[np.ndarray]:
    """Arrays of zeros, each from the start of a page on, in one mapping that asks for huge pages.

    The system hands out the pages when they are first written. Two things make this faster than `numpy.zeros` for
    attention: with pages of 4 KB every second block of a random table misses the TLB, and numpy's arrays begin 16
    bytes into a cache line, so that every vector load would touch two lines (a quarter more time, measured). Raises
    MemoryError, ``[call] ...``, if the system has not that much address space.
    """
    begins, end = [], 0
    for shape, dtype in zip(shapes, dtypes, strict=True):
        begins.append(end)
        end += -(-prod(shape) * np.dtype(dtype).itemsize // _PAGE_NBYTES) * _PAGE_NBYTES
    # Private: a shared mapping would be the parent's pool in a forked child, and gets no huge pages.
    try:
        memory = mmap.mmap(-1, end + _HUGE_PAGE_NBYTES, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    except (OSError, OverflowError) as error:
        raise MemoryError(f"[{call}] no memory for {end} bytes ({error})") from error
    if hasattr(mmap, "MADV_HUGEPAGE") and end >= _HUGE_PAGE_NBYTES:
        with suppress(OSError):  # a kernel without huge pages: slower, nothing else
            memory.madvise(mmap.MADV_HUGEPAGE)
    first = -np.frombuffer(memory, np.uint8).ctypes.data % _HUGE_PAGE_NBYTES
    return [
        np.frombuffer(memory, dtype, prod(shape), first + begin).reshape(shape)
        for shape, dtype, begin in zip(shapes, dtypes, begins, strict=True)
    ]


def _give_back(array: np.ndarray, first: int = 0) -> None:
    """Give the pages of an array of `zeroed` back, from row `first` on. Nobody reads these any more."""
    owner: Any = array
    while isinstance(owner, (np.ndarray, memoryview)):
        owner = owner.base if isinstance(owner, np.ndarray) else owner.obj
    at = array.ctypes.data - np.frombuffer(owner, np.uint8).ctypes.data
    nbytes = array.nbytes // len(array)
    begin, end = (-(-(at + rows * nbytes) // _PAGE_NBYTES) * _PAGE_NBYTES for rows in (first, len(array)))
    if begin < end:
        with suppress(OSError):  # of locked pages: they stay
            owner.madvise(mmap.MADV_DONTNEED, begin, end - begin)


def default_layout(isa: str | None = None) -> str:
    """The layout that a decode with this instruction set, by default the one that stores take, reads fastest."""
    return str(tilings().get(isa or default_isa(), {"layout": "NHD"})["layout"])


class StoreBackend:
    """What backends on a `BlockStore` do alike; `KVBackend` documents each method."""

    store: BlockStore

    def copy_blocks(self: Any, plan: AnyPlan | np.ndarray) -> None:
        self.store.copy_blocks(np.asarray(getattr(plan, "copies", plan)))

    def read(self: Any, step: AnyPlan, layer: int) -> tuple[Any, Any]:
        check_layer(self, "read", layer)
        store, lens = self._idle_store(), np.asarray(step.seq_lens)
        width, most = step.block_tables.shape[1], int(lens.max(initial=0))
        if most > width * self.spec.block_size:  # before there is memory for them
            raise ValueError(f"[read] a context has {most} tokens, {width} blocks hold {width * self.spec.block_size}")
        arrays, views = self._zeros(len(lens), self.spec.num_kv_heads, most)
        for row, n in enumerate(lens.tolist()):
            blocks = step.block_tables[row, : -(-n // self.spec.block_size)]
            store.gather(layer, blocks, *(x[row, :, :n].swapaxes(0, 1) for x in views))
        return self._results(arrays)

    def gather(
        self: Any, layer: int, blocks: Sequence[int] | np.ndarray, num_tokens: int | None = None
    ) -> tuple[Any, Any]:
        check_layer(self, "gather", layer)
        ids, count = gathered(self, blocks, num_tokens)
        arrays, views = self._zeros(count, self.spec.num_kv_heads)
        self._idle_store().gather(layer, ids, *views)
        return self._results(arrays)

    def queued(self, layer: int) -> Sequence[Any]:
        """No arrays: a call has finished when it returns."""
        return ()

    def _zeros(self, *shape: int) -> tuple[Sequence[Any], Sequence[np.ndarray]]:
        """Arrays ``[*shape, D]`` and ``[*shape, Dv]`` of what the kernels gather, and numpy views of them."""
        raise NotImplementedError

    def _results(self, arrays: Sequence[Any]) -> tuple[Any, Any]:
        """Arrays of `_zeros`, filled, as `read` returns them."""
        raise NotImplementedError

    def _idle_store(self) -> BlockStore:
        """Return the store when nothing that was called before is at work on it."""
        return self.store

    def compact(self: Any, blocks: Sequence[int] | np.ndarray, keep: Sequence[int] | np.ndarray) -> None:
        ids, places = checked_keep(self, blocks, keep)
        self._idle_store().compact(ids, places.reshape(places.shape[0] * places.shape[1], places.shape[2]))

    def zero(self: Any, blocks: Sequence[int] | np.ndarray) -> None:
        self._idle_store().zero(block_ids(self, "zero", blocks))

    def export_blocks(self: Any, blocks: Sequence[int] | np.ndarray) -> np.ndarray:
        ids = block_ids(self, "export_blocks", blocks)
        data = np.empty((ids.size, self.spec.block_nbytes), np.uint8)
        self._idle_store().export_blocks(ids, data)
        return data

    def import_blocks(self: Any, blocks: Sequence[int] | np.ndarray, data: np.ndarray) -> None:
        ids, data = checked_import(self, blocks, data)
        self._idle_store().import_blocks(ids, np.ascontiguousarray(data))


class CPUBackend(StoreBackend):
    """Paged KV storage and attention at the speed of memory. `kvpool.protocol.KVBackend` documents each method.

    Parameters
    ----------
    spec : KVSpec
        Any layout, dtype, bits, head dimensions and block size. Without a layout it is in that of the instruction set,
        see `default_layout`.
    num_blocks : int
        Blocks in the pool, reserved ones included. ``spec.pool_nbytes(num_blocks)`` of address space is taken here;
        the system hands out zeroed pages when they are first written.
    storage : uint8 ``[num_blocks, spec.block_nbytes]``, optional
        Memory to use instead, see `KVBackend`; only with layout "block".
    isa : str, optional
        Instruction set, one of `isas()`; by default the best, or ``KVPOOL_CPU_ISA``.
    num_threads : int, optional
        Threads of a call; by default the process's, see `set_num_threads`.

    Notes
    -----
    `k`, `v` and `q` may be float16, float32, float64 (converted to float32 first) or uint16, which is bfloat16 as bits.
    `attend` and `gather` return float32; arithmetic is float32 on the stored values. A row's result has the same bits
    alone and in any batch, on any number of threads. A backend takes one call at a time (`BlockStore`).
    """

    required_formats: tuple[str, ...] = ("block_tables", "seq_lens", "cu_q_lens", "slot_mapping")
    capabilities: Capabilities = Capabilities(
        name="cpu",
        layouts=LAYOUTS,
        dtypes=tuple(DTYPES),
        return_attn=False,
        features=FEATURES,
        quant_bits=QUANT_BITS,
        quant_group_sizes=QUANT_GROUP_SIZES,
        scores=SCORES,
        scores_out=True,
        compacts=True,
        batch_invariant=True,
    )

    def __init__(
        self,
        spec: KVSpec,
        num_blocks: int,
        *,
        storage: np.ndarray | None = None,
        isa: str | None = None,
        num_threads: int | None = None,
    ) -> None:
        self.num_blocks = checked_storage("CPUBackend", self.capabilities, spec, num_blocks)
        self.spec = spec.in_layout(default_layout(isa))
        self._how: dict[str, Any] = {"isa": isa, "num_threads": num_threads}
        self._arrays = self._memory("CPUBackend", self.num_blocks, storage)
        self.store = BlockStore(self.spec, self.num_blocks, self._arrays, **self._how)

    def _memory(self, call: str, num_blocks: int, storage: np.ndarray | None) -> list[np.ndarray]:
        if storage is not None:
            return [checked_rows(call, self.spec, num_blocks, storage)]
        bases = self.spec.base_arrays(num_blocks)
        return zeroed([shape for shape, _, _ in bases], [STORED[dtype] for _, dtype, _ in bases], call)

    def __repr__(self) -> str:
        return f"<CPUBackend of {self.spec.describe(self.num_blocks)}, {self.store.isa}>"

    def asarray(self, x: np.ndarray) -> np.ndarray:
        return np.array(x, np.float32)

    def to_numpy(self, x: np.ndarray) -> np.ndarray:
        return np.array(x, np.float32)

    def resize(self, num_blocks: int, moves: Any, *, storage: np.ndarray | None = None) -> None:
        size, moves = checked_resize(self.num_blocks, num_blocks, moves)
        in_place = _FREES_PAGES and storage is None and size <= self.num_blocks
        try:
            arrays = [] if in_place else self._memory("resize", size, storage)
        except MemoryError:
            if size > self.num_blocks:
                raise
            in_place = True
        if in_place:
            arrays = [array[:size] for array in self._arrays]
        store = BlockStore(self.spec, size, arrays, **self._how)
        if in_place:
            self.store.copy_blocks(np.insert(moves, 2, self.spec.block_size, axis=1).astype(np.int32))
        for old, new in zip(self._arrays, arrays, strict=True) if storage is None else ():
            if not in_place:
                move_rows(old, new, moves)
            _give_back(old, size if in_place else 0)
        self._arrays, self.store, self.num_blocks = arrays, store, size

    # ---------------------------------------------------------------------- one step

    def prepare(self, plan: AnyPlan) -> AnyPlan:
        """The plan itself: the kernels check, and copy, what they read with every call."""
        return plan

    def write(self, step: AnyPlan, layer: int, k: Any, v: Any) -> None:
        self.store.write(layer, _tokens(k), _tokens(v), step.slot_mapping)

    def attend(
        self,
        step: AnyPlan,
        layer: int,
        q: Any,
        scale: float | None = None,
        *,
        options: AttentionOptions | None = None,
        return_attn: bool = False,
        scores: str | None = None,
        scores_out: np.ndarray | None = None,
    ) -> np.ndarray | tuple[np.ndarray, np.ndarray]:
        """See `KVBackend.attend`. The kernels never hold all weights of a query: no `return_attn`.

        "raw" scores cost a store per KV head and position; "mass" lays the scores of all query heads aside meanwhile,
        ``4 * Hq`` bytes for a token.
        """
        rows = len(step.seq_lens)
        if return_attn or scores is not None or scores_out is not None:
            shape = (rows, self.spec.num_kv_heads, int(np.max(step.seq_lens, initial=0)))
            checked_results(self.capabilities, return_attn, scores, scores_out, shape)
            scores_out = np.empty(shape, np.float32) if scores_out is None else scores_out
        q = _tokens(q)
        if q.ndim != 3:
            raise ValueError(f"[attend] q must have shape [T, Hq, {self.spec.head_dim}], got {list(q.shape)}")
        out = np.empty((*q.shape[:2], self.spec.value_head_dim), np.float32)
        longest = self.store.attend(
            layer, q, out, step.block_tables, step.seq_lens, step.cu_q_lens, scale, options,
            scores=scores, scores_out=scores_out,
        )  # fmt: skip
        if scores_out is None:
            return out
        return out, scores_out[:rows, :, :longest]

    def warmup(self, shapes: Iterable[BatchShape], *, scores: str | None = None) -> None:
        """Run each shape once over block 0, so that scratch has its size and the threads run. Changes no block.

        `scores` are those that the engine is going to ask for.
        """
        heads = self.spec.num_kv_heads
        for shape in shapes:
            step = StepArrays.of_shape(shape, self.spec.block_size)
            k, v = (np.zeros((shape.num_tokens, heads, dim), np.float32) for _, dim in self.spec.planes)
            self.write(step, 0, k, v)
            if not self.spec.latent:
                q = np.zeros((shape.num_tokens, shape.num_q_heads, self.spec.head_dim), np.float32)
                self.attend(step, 0, q, scores=scores)

    def settle(self) -> int:
        return 0

    # ---------------------------------------------------------------------- internals

    def _zeros(self, *shape: int) -> tuple[list[np.ndarray], list[np.ndarray]]:
        is_float8 = self.spec.dtype == "float8_e4m3"
        arrays = [
            np.zeros((*shape, dim), np.float32 if bits or is_float8 else STORED[self.spec.dtype])
            for (_, dim), bits in zip(self.spec.planes, self.spec.bits, strict=True)
        ]
        return arrays, arrays

    def _results(self, arrays: Sequence[np.ndarray]) -> tuple[np.ndarray, np.ndarray]:
        k, v = map(_as_float32, arrays)
        return k, v


def _as_float32(stored: np.ndarray) -> np.ndarray:
    if stored.dtype == np.uint16:  # bfloat16, the upper half of a float32
        return (stored.astype(np.uint32) << 16).view(np.float32)
    return stored.astype(np.float32, copy=False)


def _tokens(x: Any) -> np.ndarray:
    x = np.asarray(x)
    return x.astype(np.float32) if x.dtype == np.float64 else x
