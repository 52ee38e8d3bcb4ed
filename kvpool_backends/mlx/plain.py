"""The plain route: scatters, gathers and MLX's own attention, on every device of MLX."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import mlx.core as mx
import numpy as np

from kvpool.protocol import FEATURES, SCORES, AnyPlan, AttentionOptions, BatchShape, Capabilities, StepArrays
from kvpool.spec import QUANT_BITS, QUANT_GROUP_SIZES
from kvpool_backends.checks import (
    block_ids,
    check_layer,
    check_tokens,
    checked_copies,
    checked_import,
    checked_keep,
    checked_queries,
    checked_results,
    checked_step,
    gathered,
)
from kvpool_backends.mlx.attention import attention, exported_scores
from kvpool_backends.mlx.base import BaseBackend
from kvpool_backends.mlx.scatter import PoolArrays, positions_of
from kvpool_backends.mlx.storage import DTYPES


@dataclass(frozen=True, slots=True, repr=False)
class PlainStep(StepArrays):
    """The checked arrays of a step, with those that its layers share on the device."""

    written: mx.array | None = None  # [T'] which tokens are written; None: all of them
    blocks: Any = None  # mx.array [T'] int32, block of each written token
    offsets: Any = None  # mx.array [T'] int32, its position in the block
    tables: Any = None  # mx.array [B, ceil(kv_len / S)] int32
    kv_len: int = 0  # longest context of the batch, in tokens
    valid: mx.array | None = None  # [B, kv_len] bool, the tokens that exist; None when all rows are equally long

    def of_rows(self, rows: np.ndarray) -> PlainStep:
        """Return the part of the step for some rows, for reads."""
        if len(rows) == len(self.seq_lens):
            return self
        index, seq_lens = _int32(rows), self.seq_lens[rows]
        valid = None if self.valid is None else self.valid[index]
        return PlainStep(seq_lens=seq_lens, tables=self.tables[index], kv_len=self.kv_len, valid=valid)


class PlainBackend(BaseBackend):
    """`MLXBackend` without kernels: `[num_blocks, block_size, num_kv_heads, head_dim]` per layer and plane.

    Writes are scatters, reads are gathers into ``[B, Hk, C, D]`` for ``mx.fast.scaled_dot_product_attention``.
    MLX arrays are values, so any order of evaluation is correct and no fences are needed. The price: a write copies the
    pool of its layer if a read of the previous step has not finished when MLX runs the write. So the `write` of the
    last layer waits for all work that was queued before. A step is built while the previous one runs, and begins after
    that one has finished. After a step that did not write the last layer, the next `prepare` waits. `settle` counts the
    copies that still happened.

    Everything is lazy and runs on the stream that is current when it is called.
    """

    route = "plain"
    writes = "scattered: a step begins when the one before has finished"
    capabilities = Capabilities(
        name="mlx",
        layouts=("NHD",),
        dtypes=tuple(DTYPES),
        return_attn=False,
        features=FEATURES,
        scores=SCORES,
        compacts=True,
        quant_bits=QUANT_BITS,
        quant_group_sizes=QUANT_GROUP_SIZES,
        arrays="mlx",
        lazy=True,
        paged=False,
    )
    _pool: PoolArrays

    def _allocate(self) -> None:
        self._pool = PoolArrays(self.spec, self.num_blocks)
        self._is_behind = False  # whether a step has written, and nobody has waited since

    # ------------------------------------------------------------------------------------------ one step

    def prepare(self, plan: AnyPlan) -> Any:
        """Check a plan and upload the arrays that its layers share. Earlier steps may still run."""
        host = checked_step(self, plan)
        if host.slot_mapping.size:
            mx.async_eval(self._pool.arrays)  # start writes that are still lazy: `write` will wait for them
            if self._is_behind:
                self._wait()
        kv_len = int(host.seq_lens.max(initial=0))
        kept = np.flatnonzero(host.slot_mapping >= 0)
        blocks, offsets = np.divmod(host.slot_mapping[kept], self.spec.block_size)
        return PlainStep(
            host.block_tables,
            host.seq_lens,
            host.cu_q_lens,
            host.slot_mapping,
            written=None if len(kept) == host.slot_mapping.size else _int32(kept),
            blocks=_int32(blocks),
            offsets=_int32(offsets),
            tables=_int32(host.block_tables),
            kv_len=kv_len,
            valid=mx.arange(kv_len) < _int32(host.seq_lens)[:, None] if (host.seq_lens != kv_len).any() else None,
        )

    def copy_blocks(self, plan: AnyPlan | np.ndarray) -> None:
        """Copy the first tokens of blocks in all layers. A row is ``(src, dst, num_tokens)``. Waits for MLX."""
        copies = checked_copies(self, plan)
        if len(copies):
            src, dst = positions_of(copies, self.spec.block_size)
            self._pool.copy([src] * self.spec.num_layers, dst)

    def write(self, step: Any, layer: int, k: mx.array, v: mx.array) -> None:
        """Store ``k [T, Hk, D]`` and ``v [T, Hk, Dv]`` in the token slots of the step. Skip negative slots.

        In the last layer this waits for the work that MLX runs: see `PlainBackend`.
        """
        k, v = mx.array(k), mx.array(v)
        check_tokens(self, layer, step.slot_mapping.size, k, v)
        if step.written is not None:
            k, v = k[step.written], v[step.written]
        self._is_behind = True
        if layer == self.spec.num_layers - 1:
            self._wait()
        if len(k):
            self._pool.write(layer, step.blocks, step.offsets, k, v)

    def _wait(self) -> None:
        self._pool.wait()
        self._is_behind = False

    def attend(
        self, step: Any, layer: int, q: mx.array, scale: float | None = None, *,
        options: AttentionOptions | None = None, return_attn: bool = False,
        scores: str | None = None, scores_out: np.ndarray | None = None,
    ) -> Any:
        """Causal attention of ``q [T, Hq, D]`` over the paged context, see `KVBackend.attend`.

        Queries are padded to the longest chunk of the batch, so a batch that mixes one long prefill with many
        decode rows is better served in two calls.
        """
        checked_results(self.capabilities, return_attn, scores, scores_out)
        q = mx.array(q)
        scale, options = checked_queries(self, step, layer, q, scale, options)
        q_lens = np.diff(step.cu_q_lens)
        exported = mx.zeros((len(q_lens), self.spec.num_kv_heads, step.kv_len))
        rows = np.flatnonzero(q_lens)
        if not len(rows):
            out = mx.zeros((*q.shape[:2], self.spec.value_head_dim), q.dtype)
            return out if scores is None else (out, exported)
        read, first = step.of_rows(rows), step.cu_q_lens[rows]
        out = self._attend(layer, q, read, first, q_lens[rows], scale, options)
        if scores is None:
            return out
        newest = first + q_lens[rows] - 1
        exported[_int32(rows)] = self._scores(layer, q, read, newest, scale, options, scores)
        return out, exported

    def _attend(
        self,
        layer: int,
        q: mx.array,
        step: PlainStep,
        first: np.ndarray,
        q_lens: np.ndarray,
        scale: float,
        options: AttentionOptions,
    ) -> mx.array:
        """Do `attend` for rows that have queries. first, q_lens: int64 ``[B]``."""
        longest = int(q_lens.max())
        column = np.arange(longest)
        # Query j of row i is token first[i] + j; past its end a row repeats its last query, which is dropped.
        index = first[:, None] + np.minimum(column, q_lens[:, None] - 1)
        position = (step.seq_lens - q_lens)[:, None] + np.minimum(column, q_lens[:, None] - 1)
        k, v = self.read(step, layer)
        mask = options.mask
        if mask is not None:
            mask = mask.reshape(mask.shape[0], -1, mask.shape[-1])[index, :, : step.kv_len]
        out = attention(
            q[_int32(index)].swapaxes(1, 2),
            k.astype(q.dtype),
            v.astype(q.dtype),
            scale,
            position,
            options,
            mask,
        ).swapaxes(1, 2)
        real = column < q_lens[:, None]
        result = mx.zeros((q.shape[0], *out.shape[2:]), out.dtype)
        result[_int32(index[real])] = out.flatten(0, 1)[_int32(np.flatnonzero(real))]
        return result

    def _scores(
        self,
        layer: int,
        q: mx.array,
        step: PlainStep,
        newest: np.ndarray,
        scale: float,
        options: AttentionOptions,
        kind: str,
    ) -> mx.array:
        """Return scores ``[B, Hk, C]`` of the rows that have queries. `newest`, int64 ``[B]``: their newest queries."""
        k, _ = self.read(step, layer)
        mask = options.mask
        if mask is not None:
            mask = mask.reshape(mask.shape[0], 1, -1, mask.shape[-1])[newest, ..., : step.kv_len]
        position = step.seq_lens[:, None] - 1
        return exported_scores(q[_int32(newest)][:, :, None], k, scale, position, options, mask, kind)

    def read(self, step: Any, layer: int) -> tuple[mx.array, mx.array]:
        """Return the contexts of a step, K ``[B, Hk, C, D]`` and V ``[B, Hk, C, Dv]``, rows left-aligned.

        Positions past a row's context hold anything in K (mask them) and 0 in V: a weight of 0 does not hide
        a NaN.
        """
        check_layer(self, "read", layer)
        k, v = (x[:, : step.kv_len] for x in self._pool.read(layer, step.tables))
        if step.valid is not None:
            v = mx.where(step.valid[:, :, None, None], v, mx.array(0, v.dtype))
        return k.swapaxes(1, 2), v.swapaxes(1, 2)

    def queued(self, layer: int) -> list[mx.array]:
        """Return the pool arrays of the layer. Keep no view of them: with one, every write copies."""
        return list(self._pool.planes[layer])

    # -------------------------------------------------------------------------------------- whole blocks

    def gather(
        self, layer: int, blocks: Sequence[int] | np.ndarray, num_tokens: int | None = None
    ) -> tuple[mx.array, mx.array]:
        """Return copies of K ``[n, Hk, D]`` and V ``[n, Hk, Dv]`` of the first `num_tokens` tokens of `blocks`."""
        check_layer(self, "gather", layer)
        ids, count = gathered(self, blocks, num_tokens)
        k, v = self._pool.read(layer, _int32(ids)[None])
        k, v = mx.contiguous(k[0, :count]), mx.contiguous(v[0, :count])
        mx.eval(k, v)
        return k, v

    def compact(self, blocks: Sequence[int] | np.ndarray, keep: Sequence[int] | np.ndarray) -> None:
        """Move the kept tokens of one sequence to the front of its blocks, on the device. Waits for MLX."""
        ids, places = checked_keep(self, blocks, keep)
        to = np.flatnonzero((places != np.arange(places.shape[-1])).any(axis=(0, 1)))  # those before are there already
        if len(to):
            size, heads = self.spec.block_size, mx.arange(self.spec.num_kv_heads)
            moved = places[..., to].swapaxes(1, 2)
            src = [(_int32(ids[old // size]), _int32(old % size), heads) for old in moved]
            self._pool.copy(src, (_int32(ids[to // size]), _int32(to % size)))

    def zero(self, blocks: Sequence[int] | np.ndarray) -> None:
        """Set whole blocks to 0 in all layers."""
        ids = block_ids(self, "zero", blocks)
        if len(ids):
            self._pool.put(_int32(ids), [[mx.array(0, p.dtype) for p in layer] for layer in self._pool.planes])

    def export_blocks(self, blocks: Sequence[int] | np.ndarray) -> np.ndarray:
        """Return the bytes of whole blocks, uint8 ``[n, spec.block_nbytes]``."""
        ids = block_ids(self, "export_blocks", blocks)
        if not len(ids):
            return np.zeros((0, self.spec.block_nbytes), np.uint8)
        index = _int32(ids)
        parts = [
            np.array(plane[index].view(mx.uint8)).reshape(len(ids), -1)
            for layer in self._pool.planes
            for plane in layer
        ]
        return np.concatenate(parts, axis=1)

    def import_blocks(self, blocks: Sequence[int] | np.ndarray, data: np.ndarray) -> None:
        """Overwrite whole blocks with rows from `export_blocks`."""
        ids, data = checked_import(self, blocks, data)
        if not len(ids):
            return
        shape = (len(ids), self.spec.block_size, self.spec.num_kv_heads, -1)
        new: list[list[mx.array]] = []
        at = 0
        for layer in self._pool.planes:
            new.append([])
            for plane in layer:
                nbytes = plane[0].nbytes
                raw = mx.array(np.ascontiguousarray(data[:, at : at + nbytes]))
                new[-1].append(raw.view(plane.dtype).reshape(shape))
                at += nbytes
        self._pool.put(_int32(ids), new)

    def warmup(self, shapes: Iterable[BatchShape], *, scores: str | None = None) -> None:
        """Run each shape once on zeros, so that MLX builds its kernels. Changes no block."""
        for shape in shapes:
            longest = -(-shape.num_tokens // max(1, shape.num_rows))
            context = shape.table_width * self.spec.block_size
            tables = np.zeros((shape.num_rows, shape.table_width), np.int32)
            step = PlainStep(
                tables=_int32(tables), kv_len=context, valid=mx.ones((shape.num_rows, context), mx.bool_)
            )
            k, v = self.read(step, 0)
            q = mx.zeros((shape.num_rows, shape.num_q_heads, longest, self.spec.head_dim), self.dtype)
            mask = mx.ones((shape.num_rows, 1, longest, context), mx.bool_)
            self._warm_write(shape.num_tokens)
            mx.eval(mx.fast.scaled_dot_product_attention(q, k, v, scale=1.0, mask=mask))

    def _warm_write(self, num_tokens: int) -> None:
        """Run the scatter of `write` on a new array."""
        spec = self.spec
        where = mx.zeros((num_tokens,), mx.int32)
        k, v = (mx.zeros((num_tokens, spec.num_kv_heads, dim), self.dtype) for _, dim in spec.planes)
        for rows in self._pool.stored(k, v):
            scratch = mx.zeros((1, spec.block_size, *rows.shape[1:]), rows.dtype)
            scratch[where, where] = rows
            mx.eval(scratch)

    # --------------------------------------------------------------------------------------------- memory

    def settle(self) -> int:
        """Wait for all queued work on the pool. Count the pool arrays that MLX has copied, see `PoolArrays`.

        An engine that calls it between two steps gets writes in place (the reads of the first step are
        through) and an exact count. Like every call that evaluates: not while another thread evaluates or
        builds work on the pool, MLX does not guard its graphs.
        """
        return self._pool.settle()


def _int32(x: np.ndarray) -> mx.array:
    return mx.array(np.ascontiguousarray(x, np.int32))
