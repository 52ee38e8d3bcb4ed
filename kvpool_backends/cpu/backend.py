"""`CPUBackend`: the backend protocol on memory of its own, computed by the native kernels."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import numpy as np

from kvpool.config import DTYPES, LAYOUTS, KVSpec, checked_int
from kvpool.eviction.keep import checked_keep
from kvpool.protocol import (
    FEATURES,
    SCORES,
    ArrayPlan,
    AttentionOptions,
    BatchShape,
    Capabilities,
    PlanArrays,
    checked_scores,
)
from kvpool.spec import QUANT_BITS, QUANT_GROUP_SIZES
from kvpool_backends.cpu._kernels import BlockStore, base_arrays
from kvpool_backends.cpu.memory import zeroed

_STORED: dict[str, np.dtype[Any]] = {
    "float32": np.dtype(np.float32),
    "float16": np.dtype(np.float16),
    "bfloat16": np.dtype(np.uint16),
    "float8_e4m3": np.dtype(np.uint8),
    "uint32": np.dtype(np.uint32),
}


class MemoryReport(NamedTuple):
    """Memory of a backend, in bytes."""

    pool_nbytes: int  # blocks * bytes per block
    scratch_nbytes: int  # that calls have left for the next ones
    scores_nbytes: int  # of that, the most that the scores of a call took: 0 but for "mass"


class CPUBackend:
    """Paged KV storage and attention at the speed of memory. Implements `kvpool.protocol.KVBackend`; see there.

    Parameters
    ----------
    spec : KVSpec
        Any layout, dtype, bits, head dimensions and block size.
    num_blocks : int
        Blocks in the pool, reserved ones included. ``spec.pool_nbytes(num_blocks)`` of address space is taken here;
        the system hands out zeroed pages when they are first written.
    isa : str, optional
        Instruction set, one of `isas()`; by default the best, or ``KVPOOL_CPU_ISA``.
    num_threads : int, optional
        Threads of a call; by default the process's, see `set_num_threads`.

    Notes
    -----
    `k`, `v` and `q` may be float16, float32, float64 (converted to float32 first) or uint16, which is bfloat16 as bits.
    `attend` and `gather` return float32; arithmetic is float32 on the stored values. A row's result has the same bits
    alone and in any batch, on any number of threads. One call at a time, several backends side by side (`BlockStore`).
    """

    required_formats: tuple[str, ...] = ("block_tables", "seq_lens", "cu_q_lens", "slot_mapping")

    def __init__(
        self, spec: KVSpec, num_blocks: int, *, isa: str | None = None, num_threads: int | None = None
    ) -> None:
        if not isinstance(spec, KVSpec):
            raise TypeError(f"[CPUBackend] spec must be a KVSpec, got {type(spec).__name__}")
        refused = self.capabilities().refusal(spec)
        if refused:
            raise ValueError(f"[CPUBackend] {refused}")
        self.spec = spec
        self.num_blocks = checked_int("CPUBackend", "num_blocks", num_blocks)
        bases = base_arrays(spec, self.num_blocks)
        arrays = zeroed([shape for shape, _, _ in bases], [_STORED[dtype] for _, dtype, _ in bases], "CPUBackend")
        self.store = BlockStore(spec, self.num_blocks, arrays, isa=isa, num_threads=num_threads)

    def __repr__(self) -> str:
        return f"<CPUBackend of {self.spec.describe(self.num_blocks)}, {self.store.isa}>"

    @staticmethod
    def capabilities() -> Capabilities:
        """What this backend accepts."""
        return Capabilities(
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

    def asarray(self, x: np.ndarray) -> np.ndarray:
        """A float32 numpy array (a copy)."""
        return np.array(x, np.float32)

    def to_numpy(self, x: np.ndarray) -> np.ndarray:
        """A result as float32 numpy (a copy)."""
        return np.array(x, np.float32)

    # ---------------------------------------------------------------------- one step

    def copy_blocks(self, plan: PlanArrays | np.ndarray) -> None:
        """Copy the first tokens of blocks in all layers, ``(src, dst, num_tokens)`` each."""
        self.store.copy_blocks(getattr(plan, "copies", plan))

    def write(self, layer: int, k: Any, v: Any, plan: PlanArrays) -> None:
        """Store ``k [T, Hk, D]`` and ``v [T, Hk, Dv]`` at ``plan.slot_mapping``, negative slots skipped."""
        self.store.write(layer, _tokens(k), _tokens(v), plan.slot_mapping)

    def attend(
        self,
        layer: int,
        q: Any,
        plan: PlanArrays,
        scale: float | None = None,
        *,
        options: AttentionOptions | None = None,
        return_attn: bool = False,
        scores: str | None = None,
        scores_out: np.ndarray | None = None,
    ) -> np.ndarray | tuple[np.ndarray, np.ndarray]:
        """Causal attention of ``q [T, Hq, D]`` over the paged context: float32 ``[T, Hq, Dv]``, a new array.

        With `scores` also these, float32 ``[B, Hk, C]``. "raw" costs a store per KV head and position; "mass" lays the
        scores of all query heads aside meanwhile, ``4 * Hq`` bytes for a token (`BlockStore.scores_scratch_nbytes`).

        Raises
        ------
        ValueError
            `return_attn`: the kernels never hold all weights of a query.
        """
        if return_attn:
            raise ValueError("[attend] backend 'cpu' does not return weights (return_attn=True), only results")
        q = _tokens(q)
        if q.ndim != 3:
            raise ValueError(f"[attend] q must have shape [T, Hq, {self.spec.head_dim}], got {list(q.shape)}")
        out = np.empty((*q.shape[:2], self.spec.value_head_dim), np.float32)
        if scores is None and scores_out is None:
            self.store.attend(layer, q, out, plan.block_tables, plan.seq_lens, plan.cu_q_lens, scale, options)
            return out
        rows = len(plan.seq_lens)
        if scores_out is None:
            shape = (rows, self.spec.num_kv_heads, int(np.max(plan.seq_lens, initial=0)))
            checked_scores(scores, None, self.capabilities(), shape)
            scores_out = np.empty(shape, np.float32)
        elif not isinstance(scores_out, np.ndarray):
            raise TypeError(f"[attend] scores_out must be a float32 numpy array, got {type(scores_out).__name__}")
        longest = self.store.attend(
            layer, q, out, plan.block_tables, plan.seq_lens, plan.cu_q_lens, scale, options,
            scores=scores, scores_out=scores_out,
        )  # fmt: skip
        return out, scores_out[:rows, :, :longest]

    # ---------------------------------------------------------------------- whole blocks

    def gather(
        self, layer: int, blocks: Sequence[int] | np.ndarray, num_tokens: int | None = None
    ) -> tuple[np.ndarray, np.ndarray]:
        """Copies of k ``[n, Hk, D]`` and v ``[n, Hk, Dv]``, the first `num_tokens` tokens of `blocks`, as float32."""
        ids = _block_ids("gather", blocks)
        capacity = ids.size * self.spec.block_size
        count = capacity if num_tokens is None else checked_int("gather", "num_tokens", num_tokens, least=0)
        if count > capacity:
            raise ValueError(f"[gather] num_tokens is {count}, the blocks hold {capacity}")
        heads, floats = self.spec.num_kv_heads, np.dtype(np.float32)
        is_float8 = self.spec.dtype == "float8_e4m3"
        k, v = (
            np.empty((count, heads, dim), floats if bits or is_float8 else _STORED[self.spec.dtype])
            for (_, dim), bits in zip(self.spec.planes, self.spec.bits, strict=True)
        )
        self.store.gather(layer, ids, k, v)
        return self._as_float32(k), self._as_float32(v)

    def compact(self, blocks: Sequence[int] | np.ndarray, keep: Sequence[int] | np.ndarray) -> None:
        """Move the tokens of one sequence that stay to the front of its blocks."""
        ids, places = checked_keep(self, blocks, keep)
        self.store.compact(ids, places.reshape(places.shape[0] * places.shape[1], places.shape[2]))

    def zero(self, blocks: Sequence[int] | np.ndarray) -> None:
        """Set every byte of these blocks to 0, in all layers and planes."""
        self.store.zero(_block_ids("zero", blocks))

    def export_blocks(self, blocks: Sequence[int] | np.ndarray) -> np.ndarray:
        """The bytes of whole blocks, uint8 ``[n, spec.block_nbytes]``."""
        ids = _block_ids("export_blocks", blocks)
        data = np.empty((ids.size, self.spec.block_nbytes), np.uint8)
        self.store.export_blocks(ids, data)
        return data

    def import_blocks(self, blocks: Sequence[int] | np.ndarray, data: np.ndarray) -> None:
        """Overwrite whole blocks, distinct ones, with rows of `export_blocks`."""
        self.store.import_blocks(_block_ids("import_blocks", blocks), np.ascontiguousarray(data))

    def memory(self) -> MemoryReport:
        """What is held now. Arrays that `attend` returned are the caller's: scores are ``4 * Hk`` bytes per token."""
        pool_nbytes = self.num_blocks * self.spec.block_nbytes
        return MemoryReport(pool_nbytes, self.store.scratch_nbytes, self.store.scores_scratch_nbytes)

    def warmup(self, shapes: Iterable[BatchShape], *, scores: str | None = None) -> None:
        """Run each shape once over block 0, so that scratch has its size and the threads run. Changes no block.

        `scores` are those that the engine is going to ask for.
        """
        heads = self.spec.num_kv_heads
        for shape in shapes:
            num_rows, num_tokens, width, num_q_heads = shape
            context = width * self.spec.block_size
            slots = np.full(num_tokens, -1)
            ends = np.minimum(np.arange(num_rows + 1) * -(-num_tokens // max(num_rows, 1)), num_tokens)
            plan = ArrayPlan(
                np.zeros((num_rows, width), np.int32), np.full(num_rows, context), ends, slots
            )
            k, v = (np.zeros((num_tokens, heads, dim), np.float32) for _, dim in self.spec.planes)
            self.write(0, k, v, plan)
            self.attend(0, np.zeros((num_tokens, num_q_heads, self.spec.head_dim), np.float32), plan, scores=scores)

    # ---------------------------------------------------------------------- internals

    def _as_float32(self, stored: np.ndarray) -> np.ndarray:
        if stored.dtype == np.uint16:  # bfloat16, the upper half of a float32
            return (stored.astype(np.uint32) << 16).view(np.float32)
        return stored.astype(np.float32, copy=False)


def _tokens(x: Any) -> np.ndarray:
    x = np.asarray(x)
    return x.astype(np.float32) if x.dtype == np.float64 else x


def _block_ids(call: str, blocks: Sequence[int] | np.ndarray) -> np.ndarray:
    ids = np.asarray(blocks)
    if ids.size == 0:
        return np.zeros(0, np.int64)
    if ids.dtype.kind not in "iu":
        raise TypeError(f"[{call}] block ids must be integers, got {ids.dtype}")
    return ids.astype(np.int64, copy=False)
