"""The plain route: scatters, gathers and MLX's own attention, on every device that MLX has."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import mlx.core as mx
import numpy as np

from kvpool.eviction.keep import checked_keep
from kvpool.protocol import (
    FEATURES,
    SCORES,
    AttentionOptions,
    BatchShape,
    Capabilities,
    PlanArrays,
    checked_options,
    checked_scores,
)
from kvpool.spec import QUANT_BITS, QUANT_GROUP_SIZES
from kvpool_backends.mlx.attention import attention, exported_scores
from kvpool_backends.mlx.backend import MLXBackend
from kvpool_backends.mlx.scatter import PoolArrays, positions_of
from kvpool_backends.mlx.storage import DTYPES
from kvpool_backends.mlx.upload import StepArrays


class PlainBackend(MLXBackend):
    """`MLXBackend` without kernels: `[num_blocks, block_size, num_kv_heads, head_dim]` per layer and plane.

    Writes are scatters, reads are gathers into ``[B, Hk, C, D]`` for ``mx.fast.scaled_dot_product_attention``.
    It is correct in any order of evaluation and needs no fences, because MLX arrays are values; the price is
    that a write copies the pool of its layer when a read of the step before has not finished. `settle` between
    steps avoids that and counts what happened anyway.

    Everything is lazy and runs on the stream that is current when it is called.
    """

    route = "plain"
    is_eager = False
    is_in_place = False
    _pool: PoolArrays

    def _allocate(self) -> None:
        self._pool = PoolArrays(self.spec, self.num_blocks)

    @staticmethod
    def capabilities() -> Capabilities:
        """What this backend accepts."""
        return Capabilities(
            name="mlx",
            layouts=("NHD",),
            dtypes=tuple(DTYPES),
            return_attn=False,
            features=FEATURES,
            scores=SCORES,
            compacts=True,
            quant_bits=QUANT_BITS,
            quant_group_sizes=QUANT_GROUP_SIZES,
        )

    # ------------------------------------------------------------------------------------------ one step

    def copy_blocks(self, plan: PlanArrays | np.ndarray) -> None:
        """Copy the first tokens of blocks in all layers, ``(src, dst, num_tokens)`` each. Waits for MLX."""
        copies = np.asarray(plan if isinstance(plan, np.ndarray) else plan.copies)
        if copies.ndim != 2 or copies.shape[1] != 3:
            raise ValueError(f"[copy_blocks] copies have shape {copies.shape}, it must be [K, 3]")
        self._check_ids("copy_blocks", copies[:, :2])
        counts, limit = copies[:, 2], self.spec.block_size
        if ((counts < 1) | (counts > limit)).any():
            raise ValueError(f"[copy_blocks] num_tokens {counts.tolist()}, the range is 1 .. {limit}")
        if len(copies):
            src, dst = positions_of(copies, limit)
            self._pool.copy([src] * self.spec.num_layers, dst)

    def write(self, layer: int, k: mx.array, v: mx.array, plan: PlanArrays) -> None:
        """Store ``k [T, Hk, D]`` and ``v [T, Hk, Dv]`` at ``plan.slot_mapping``, negative slots skipped."""
        slots = np.asarray(plan.slot_mapping)
        k, v = mx.array(k), mx.array(v)
        for name, x, head_dim in zip("kv", (k, v), self._head_dims(), strict=True):
            self._check_shape("write", name, x, (len(slots), self.spec.num_kv_heads, head_dim))
        self._check_layer("write", layer)
        self._check_ids("write", slots[slots >= 0] // self.spec.block_size)
        if (slots < 0).any():
            kept = np.flatnonzero(slots >= 0)
            if not len(kept):
                return
            slots, k, v = slots[kept], k[mx.array(kept)], v[mx.array(kept)]
        if len(slots):
            blocks, offsets = np.divmod(slots, self.spec.block_size)
            self._pool.write(layer, _int32(blocks), _int32(offsets), k, v)

    def attend(
        self,
        layer: int,
        q: mx.array,
        plan: PlanArrays,
        scale: float | None = None,
        *,
        options: AttentionOptions | None = None,
        return_attn: bool = False,
        scores: str | None = None,
        scores_out: np.ndarray | None = None,
    ) -> Any:
        """Causal attention of ``q [T, Hq, D]`` over the paged context, see `KVBackend.attend`.

        Queries are padded to the longest chunk of the batch, so a batch that mixes one long prefill with many
        decode rows is better served in two calls.
        """
        if return_attn:
            raise ValueError("[attend] return_attn is True, this backend does not return weights")
        checked_scores(scores, scores_out, self.capabilities(), (0, 0, 0))
        self._check_layer("attend", layer)
        q = mx.array(q)
        cu = np.asarray(plan.cu_q_lens, np.int64)
        seq_lens = np.asarray(plan.seq_lens, np.int64)
        num_tokens, num_heads = q.shape[0], self._query_heads(q)
        q_lens = np.diff(cu)
        if cu[-1] > num_tokens or (q_lens < 0).any() or (q_lens > seq_lens).any():
            raise ValueError(f"[attend] cu_q_lens {cu.tolist()} do not fit {num_tokens} query tokens")
        longest = int(seq_lens.max(initial=0))
        options = checked_options(options, self.capabilities(), num_tokens, num_heads, longest)
        rows = np.flatnonzero(q_lens)
        exported = mx.zeros((len(seq_lens), self.spec.num_kv_heads, longest))
        if not len(rows):
            out = mx.zeros((num_tokens, num_heads, self.spec.value_head_dim), q.dtype)
            return out if scores is None else (out, exported)
        tables = _int32(self._used_tables(np.asarray(plan.block_tables)[rows], seq_lens[rows]))
        arrays = self._arrays(np.zeros(0, np.int32), seq_lens[rows], tables)
        out = self._attend(layer, q, arrays, cu[rows], q_lens[rows], seq_lens[rows], scale, options)
        if scores is None:
            return out
        exported[_int32(rows), :, : arrays.kv_len] = self._scores(
            layer, q, arrays, cu[rows] + q_lens[rows] - 1, seq_lens[rows], scale, options, scores
        )
        return out, exported

    def _attend(
        self,
        layer: int,
        q: mx.array,
        arrays: StepArrays,
        first: np.ndarray,
        q_lens: np.ndarray,
        seq_lens: np.ndarray,
        scale: float | None,
        options: AttentionOptions,
    ) -> mx.array:
        """`attend` on the rows that have queries. first, q_lens, seq_lens: int64 ``[B]``."""
        longest = int(q_lens.max())
        column = np.arange(longest)
        # Query j of row i is token first[i] + j; past its end a row repeats its last query, which is dropped.
        index = first[:, None] + np.minimum(column, q_lens[:, None] - 1)
        position = (seq_lens - q_lens)[:, None] + np.minimum(column, q_lens[:, None] - 1)
        k, v = self.read(layer, arrays)
        mask = options.mask
        if mask is not None:
            mask = mask.reshape(mask.shape[0], -1, mask.shape[-1])[index, :, : arrays.kv_len]
        out = attention(
            q[_int32(index)].swapaxes(1, 2),
            k.astype(q.dtype),
            v.astype(q.dtype),
            self.spec.head_dim**-0.5 if scale is None else scale,
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
        arrays: StepArrays,
        newest: np.ndarray,
        seq_lens: np.ndarray,
        scale: float | None,
        options: AttentionOptions,
        kind: str,
    ) -> mx.array:
        """``[B, Hk, C]`` of the rows that have queries; int64 ``[B]`` `newest` are their newest ones."""
        k, _ = self.read(layer, arrays)
        mask = options.mask
        if mask is not None:
            mask = mask.reshape(mask.shape[0], 1, -1, mask.shape[-1])[newest, ..., : arrays.kv_len]
        scale = self.spec.head_dim**-0.5 if scale is None else scale
        return exported_scores(q[_int32(newest)][:, :, None], k, scale, seq_lens[:, None] - 1, options, mask, kind)

    # -------------------------------------------------------------- the same, prepared once for all layers

    def step_arrays(self, plan: PlanArrays, seq_lens: np.ndarray, tables: mx.array | None = None) -> StepArrays:
        """What the layers of one step need on the device; the plan's arrays are copied.

        Parameters
        ----------
        plan
            Its slots and block ids must all be legal, padding too.
        seq_lens : int ``[B]``
            Context lengths after the step.
        tables : mx.array, int32 ``[>= B, >= ceil(max(seq_lens) / S)]``, optional
            ``plan.block_tables`` on the device, from a `TableUploader`; by default the used part is copied
            there.
        """
        if tables is None:
            width = -(-int(seq_lens.max(initial=0)) // self.spec.block_size)
            tables = _int32(plan.block_tables[:, :width])
        return self._arrays(plan.slot_mapping, seq_lens, tables)

    def _arrays(self, slots: np.ndarray, seq_lens: np.ndarray, tables: mx.array) -> StepArrays:
        kv_len = int(seq_lens.max(initial=0))
        blocks, offsets = np.divmod(slots, self.spec.block_size)
        valid = None
        if (seq_lens != kv_len).any():
            valid = mx.arange(kv_len) < _int32(seq_lens)[:, None]
        width = -(-kv_len // self.spec.block_size)
        return StepArrays(_int32(blocks), _int32(offsets), tables[: len(seq_lens), :width], kv_len, valid)

    def write_tokens(self, layer: int, k: mx.array, v: mx.array, arrays: StepArrays) -> None:
        """`write` with the arrays of a step on the device already. Nothing is checked; another dtype is cast."""
        self._pool.write(layer, arrays.blocks, arrays.offsets, k, v)

    def read(self, layer: int, arrays: StepArrays) -> tuple[mx.array, mx.array]:
        """The contexts of a step as K ``[B, Hk, C, D]`` and V ``[B, Hk, C, Dv]``, rows left-aligned.

        Positions past a row's context hold anything in K (mask them) and 0 in V: a weight of 0 does not hide
        a NaN.
        """
        k, v = (x[:, : arrays.kv_len] for x in self._pool.read(layer, arrays.tables))
        if arrays.valid is not None:
            v = mx.where(arrays.valid[:, :, None, None], v, mx.array(0, v.dtype))
        return k.swapaxes(1, 2), v.swapaxes(1, 2)

    def planes(self, layer: int) -> list[mx.array]:
        """The pool arrays of one layer, for ``mx.eval``. Keep no view of them: every write would copy."""
        return list(self._pool.planes[layer])

    # -------------------------------------------------------------------------------------- whole blocks

    def gather(
        self, layer: int, blocks: Sequence[int] | np.ndarray, num_tokens: int | None = None
    ) -> tuple[mx.array, mx.array]:
        """Copies of K ``[n, Hk, D]`` and V ``[n, Hk, Dv]``, the first `num_tokens` tokens of `blocks`."""
        self._check_layer("gather", layer)
        ids = self._ids("gather", blocks)
        count = self._gathered_tokens(ids, num_tokens)
        k, v = self._pool.read(layer, _int32(ids)[None])
        k, v = mx.contiguous(k[0, :count]), mx.contiguous(v[0, :count])
        mx.eval(k, v)
        return k, v

    def compact(self, blocks: Sequence[int] | np.ndarray, keep: Sequence[int] | np.ndarray) -> None:
        """Move the tokens of one sequence that stay to the front of its blocks, on the device. Waits for MLX."""
        ids, places = checked_keep(self, blocks, keep)
        to = np.flatnonzero((places != np.arange(places.shape[-1])).any(axis=(0, 1)))  # those before are there already
        if len(to):
            size, heads = self.spec.block_size, mx.arange(self.spec.num_kv_heads)
            moved = places[..., to].swapaxes(1, 2)
            src = [(_int32(ids[old // size]), _int32(old % size), heads) for old in moved]
            self._pool.copy(src, (_int32(ids[to // size]), _int32(to % size)))

    def zero(self, blocks: Sequence[int] | np.ndarray) -> None:
        """Set whole blocks to 0 in all layers."""
        ids = self._ids("zero", blocks)
        if len(ids):
            self._pool.put(_int32(ids), [[mx.array(0, p.dtype) for p in layer] for layer in self._pool.planes])

    def export_blocks(self, blocks: Sequence[int] | np.ndarray) -> np.ndarray:
        """The bytes of whole blocks, uint8 ``[n, spec.block_nbytes]``."""
        ids = self._ids("export_blocks", blocks)
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
        """Overwrite whole blocks with rows of `export_blocks`."""
        ids = self._ids("import_blocks", blocks)
        data = np.asarray(data)
        if data.dtype != np.uint8:
            raise TypeError(f"[import_blocks] data has dtype {data.dtype}, it must be uint8")
        if data.shape != (len(ids), self.spec.block_nbytes):
            raise ValueError(
                f"[import_blocks] data has shape {data.shape}, it must be {(len(ids), self.spec.block_nbytes)}"
            )
        if len(np.unique(ids)) != len(ids):
            raise ValueError(f"[import_blocks] blocks {ids.tolist()} are not distinct")
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

    def warmup(self, shapes: Iterable[BatchShape]) -> None:
        """Run each shape once on zeros, so that MLX has built its kernels. Changes no block."""
        for shape in shapes:
            longest = -(-shape.num_tokens // max(1, shape.num_rows))
            context = shape.table_width * self.spec.block_size
            arrays = StepArrays(
                mx.zeros((shape.num_tokens,), mx.int32),
                mx.zeros((shape.num_tokens,), mx.int32),
                mx.zeros((shape.num_rows, shape.table_width), mx.int32),
                context,
                mx.ones((shape.num_rows, context), mx.bool_),
            )
            k, v = self.read(0, arrays)
            q = mx.zeros((shape.num_rows, shape.num_q_heads, longest, self.spec.head_dim), self.dtype)
            mask = mx.ones((shape.num_rows, 1, longest, context), mx.bool_)
            self._warm_write(shape.num_tokens)
            mx.eval(mx.fast.scaled_dot_product_attention(q, k, v, scale=1.0, mask=mask))

    def _warm_write(self, num_tokens: int) -> None:
        """Run a scatter as `write` does, into an array of its own."""
        spec = self.spec
        where = mx.zeros((num_tokens,), mx.int32)
        k, v = (mx.zeros((num_tokens, spec.num_kv_heads, dim), self.dtype) for _, dim in spec.planes)
        for rows in self._pool.stored(k, v):
            scratch = mx.zeros((1, spec.block_size, *rows.shape[1:]), rows.dtype)
            scratch[where, where] = rows
            mx.eval(scratch)

    # --------------------------------------------------------------------------------------------- memory

    def settle(self) -> int:
        """Wait for all queued work on the pool and count the pool arrays that MLX copied, see `PoolArrays`.

        An engine that calls it between two steps gets writes in place (the reads of the first step are
        through) and an exact count. Like every call that evaluates: not while another thread evaluates or
        builds work on the pool, MLX does not guard its graphs.
        """
        return self._pool.settle()

    # --------------------------------------------------------------------------------------------- checks

    def _head_dims(self) -> tuple[int, int]:
        return self.spec.head_dim, self.spec.value_head_dim

    @staticmethod
    def _check_shape(call: str, name: str, x: mx.array, shape: tuple[int, ...]) -> None:
        if x.shape != shape:
            raise ValueError(f"[{call}] {name} has shape {x.shape}, it must be {shape}")


def _int32(x: np.ndarray) -> mx.array:
    return mx.array(np.ascontiguousarray(x, np.int32))
