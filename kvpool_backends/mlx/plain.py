"""The plain route: scatters, gathers and MLX's own attention, on every device of MLX.

How MLX writes in place
-----------------------
An MLX array is a value. ``pool[blocks, offsets] = rows`` makes a new array and rebinds the name. The new array takes
the old one's buffer (*donation*) if nothing else holds that buffer when the scatter runs. Otherwise MLX copies the
whole pool. A buffer is held by a view of the pool, a gather that was built but has not run, and a gather that runs. So
`PoolArrays` keeps no view and returns none, and its owner waits until the gathers have run before MLX gets the write.

The same rule makes reuse of blocks safe. A gather reads the version of the pool that it was built on. A scatter that is
built later gets a copy while that gather needs the old buffer. So a block may be freed and rewritten as soon as the
reads of its last owner are *built*, even if they have not run.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import mlx.core as mx
import numpy as np

from kvpool.protocol import (
    FEATURES,
    SCORES,
    AnyPlan,
    AttentionOptions,
    BatchShape,
    Capabilities,
    StepArrays,
    move_within,
)
from kvpool.spec import QUANT_BITS, QUANT_GROUP_SIZES, WORD_BITS, KVSpec
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
from kvpool_backends.mlx.base import DTYPES, BaseBackend, PoolMemory, int32


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
        index, seq_lens = int32(rows), self.seq_lens[rows]
        valid = None if self.valid is None else self.valid[index]
        return PlainStep(seq_lens=seq_lens, tables=self.tables[index], kv_len=self.kv_len, valid=valid)


class PlainBackend(BaseBackend):
    """`MLXBackend` without kernels: `[num_blocks, block_size, num_kv_heads, head_dim]` per layer and plane.

    Writes are scatters, reads are gathers into ``[B, Hk, C, D]`` for ``mx.fast.scaled_dot_product_attention``. Any
    order of evaluation is correct. The price: the `write` of the last layer waits for all work that was queued before,
    because a read of the previous step that is still in flight would cost a copy. So a step is built while the previous
    one runs, and begins after that one has finished. After a step that did not write the last layer, the next `prepare`
    waits.
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
            written=None if len(kept) == host.slot_mapping.size else int32(kept),
            blocks=int32(blocks),
            offsets=int32(offsets),
            tables=int32(host.block_tables),
            kv_len=kv_len,
            valid=mx.arange(kv_len) < int32(host.seq_lens)[:, None] if (host.seq_lens != kv_len).any() else None,
        )

    def copy_blocks(self, plan: AnyPlan | np.ndarray) -> None:
        """Waits for MLX."""
        copies = checked_copies(self, plan)
        if len(copies):
            src, dst = positions_of(copies, self.spec.block_size)
            self._pool.copy([src] * self.spec.num_layers, dst)

    def write(self, step: Any, layer: int, k: mx.array, v: mx.array) -> None:
        """In the last layer this waits for the work that MLX runs, see `PlainBackend`."""
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
        """Queries are padded to the longest chunk: one long prefill and many decode rows are better served apart."""
        checked_results(self.capabilities, return_attn, scores, scores_out)
        q = mx.array(q)
        scale, options = checked_queries(self, step, layer, q, scale, options)
        q_lens = np.diff(step.cu_q_lens)
        exported = mx.zeros((len(q_lens), self.spec.num_kv_heads, step.kv_len))
        rows = np.flatnonzero(q_lens)
        if not len(rows):
            out = mx.zeros((*q.shape[:2], self.spec.value_head_dim), q.dtype)
            return out if scores is None else (out, exported)
        read, first, q_lens = step.of_rows(rows), step.cu_q_lens[rows], q_lens[rows]
        # Query j of row i is token first[i] + j; past its end a row repeats its last query, which is dropped.
        real = np.arange(int(q_lens.max())) < q_lens[:, None]
        column = np.where(real, np.arange(real.shape[1]), q_lens[:, None] - 1)
        index, position = first[:, None] + column, (read.seq_lens - q_lens)[:, None] + column
        keys, values = self.read(read, layer)
        k, v, mask = keys.astype(q.dtype), values.astype(q.dtype), options.mask
        if mask is not None:
            mask = mask.reshape(mask.shape[0], -1, mask.shape[-1])[..., : step.kv_len]
        shown = None if mask is None else mask[index]
        out = attention(q[int32(index)].swapaxes(1, 2), k, v, scale, position, options, shown).swapaxes(1, 2)
        result = mx.zeros((q.shape[0], *out.shape[2:]), out.dtype)
        result[int32(index[real])] = out.flatten(0, 1)[int32(np.flatnonzero(real))]
        if scores is None:
            return result
        newest, position = first + q_lens - 1, read.seq_lens[:, None] - 1
        shown = None if mask is None else mask[newest][:, None]
        q = q[int32(newest)][:, :, None]
        exported[int32(rows)] = exported_scores(q, keys, scale, position, options, shown, scores)
        return result, exported

    def read(self, step: Any, layer: int) -> tuple[mx.array, mx.array]:
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
        check_layer(self, "gather", layer)
        ids, count = gathered(self, blocks, num_tokens)
        k, v = self._pool.read(layer, int32(ids)[None])
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
            src = [(int32(ids[old // size]), int32(old % size), heads) for old in moved]
            self._pool.copy(src, (int32(ids[to // size]), int32(to % size)))

    def zero(self, blocks: Sequence[int] | np.ndarray) -> None:
        ids = block_ids(self, "zero", blocks)
        if len(ids):
            self._pool.put(int32(ids), [[mx.array(0, p.dtype) for p in layer] for layer in self._pool.planes])

    def export_blocks(self, blocks: Sequence[int] | np.ndarray) -> np.ndarray:
        ids = block_ids(self, "export_blocks", blocks)
        if not len(ids):
            return np.zeros((0, self.spec.block_nbytes), np.uint8)
        index = int32(ids)
        parts = [
            np.array(plane[index].view(mx.uint8)).reshape(len(ids), -1)
            for layer in self._pool.planes
            for plane in layer
        ]
        return np.concatenate(parts, axis=1)

    def import_blocks(self, blocks: Sequence[int] | np.ndarray, data: np.ndarray) -> None:
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
        self._pool.put(int32(ids), new)

    def warmup(self, shapes: Iterable[BatchShape], *, scores: str | None = None) -> None:
        """Run each shape once, so that MLX builds its kernels. Changes no block."""
        for shape in shapes:
            self._warm_write(shape.num_tokens)
            if not self.spec.latent:
                q = mx.zeros((shape.num_tokens, shape.num_q_heads, self.spec.head_dim), self.dtype)
                step = self.prepare(StepArrays.of_shape(shape, self.spec.block_size))
                mx.eval(self.attend(step, 0, q, scores=scores))

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
        """Wait for all queued work on the pool. Count the pool arrays that MLX has copied, see `PoolArrays.settle`.

        Not while another thread evaluates or builds work on the pool: MLX does not guard its graphs.
        """
        return self._pool.settle()


# ---------------------------------------------------------------------- storage


class PoolArrays(PoolMemory):
    """The stored planes ``[N, S, Hk, n]`` of every layer, `planes`, in the order of `KVSpec.stored_planes`.

    Read them in one expression; a name kept on a view of one makes every write a copy. ``pack(plane, x)`` makes words,
    scales and biases of tokens ``[T, Hk, D]`` of plane "k" or "v"; somebody may put another one here.
    """

    def __init__(self, spec: KVSpec, num_blocks: int) -> None:
        super().__init__(spec, num_blocks)
        self.pack: Callable[[str, mx.array], list[mx.array]] = self._quantized
        count = len(spec.stored_planes)
        self.planes = [self.arrays[i : i + count] for i in range(0, len(self.arrays), count)]

    def _put(self, number: int, array: mx.array) -> None:
        super()._put(number, array)
        self.planes[number // len(self.planes[0])][number % len(self.planes[0])] = array

    def _move_within(self, array: mx.array, moves: np.ndarray) -> None:
        for move in np.split(moves, range(1, len(moves))) if len(moves) else ():
            move_within(array, move)
            mx.eval(array)  # before it takes more memory than a row

    def _resized(self, old: mx.array, shape: tuple[int, ...], dtype: mx.Dtype, moves: np.ndarray) -> mx.array:
        index = np.arange(shape[0]) % len(old)  # what comes is anything
        index[moves[:, 1]] = moves[:, 0]
        new = mx.take(old, int32(index), axis=0)
        mx.eval(new)
        return new

    def sides(self, layer: int) -> tuple[tuple[mx.array, ...], tuple[mx.array, ...]]:
        """Return the planes of the keys and of the values of a layer."""
        planes, count = self.planes[layer], 1 if self._spec.k_bits is None else 3
        return tuple(planes[:count]), tuple(planes[count:])

    def stored(self, k: mx.array, v: mx.array) -> list[mx.array]:
        """Return the stored form of tokens for the planes of a layer. Lazy."""
        parts = []
        for (name, _), bits, x in zip(self._spec.planes, self._spec.bits, (k, v), strict=True):
            parts += [x.astype(DTYPES[self._spec.dtype])] if bits is None else self.pack(name, x)
        return parts

    def _quantized(self, plane: str, x: mx.array) -> list[mx.array]:
        bits, size = dict(zip("kv", self._spec.bits, strict=True))[plane], self._spec.quant_group_size
        x = x.astype(DTYPES[self._spec.dtype])
        words, scales, biases = mx.quantize(x, size, bits)
        finite = mx.unflatten(mx.isfinite(x), -1, (-1, size)).all(axis=-1)
        words = mx.where(mx.repeat(finite, words.shape[-1] // finite.shape[-1], axis=-1), words, 0)
        return [words, *(mx.where(finite, part, mx.array(mx.nan, part.dtype)) for part in (scales, biases))]

    def write(self, layer: int, blocks: mx.array, offsets: mx.array, k: mx.array, v: mx.array) -> None:
        """Store token t, ``k[t]`` and ``v[t]``, at position ``offsets[t]`` of block ``blocks[t]``. Lazy."""
        for plane, rows in zip(self.planes[layer], self.stored(k, v), strict=True):
            plane[blocks, offsets] = rows

    def read(self, layer: int, tables: mx.array) -> tuple[mx.array, mx.array]:
        """Return the blocks of `tables` ``[B, W]`` as K ``[B, W * S, Hk, D]`` and V. Lazy, and not a view."""
        k, v = (
            self._floats([plane[tables].flatten(1, 2) for plane in planes], bits)
            for planes, bits in zip(self.sides(layer), self._spec.bits, strict=True)
        )
        return k, v

    def _floats(self, parts: list[mx.array], bits: int | None) -> mx.array:
        """Return the values of planes of the keys or of the values, rounded once."""
        if bits is None:
            return parts[0]
        words, *factors = parts
        if not words.size:  # MLX dequantizes at least one token
            return mx.zeros((*words.shape[:-1], words.shape[-1] * WORD_BITS // bits), factors[0].dtype)
        scales, biases = (part.astype(mx.float32) for part in factors)
        return mx.dequantize(words, scales, biases, self._spec.quant_group_size, bits).astype(factors[0].dtype)

    def copy(self, src: Sequence[tuple[mx.array, ...]], dst: tuple[mx.array, mx.array]) -> None:
        """Copy positions of each layer, ``(blocks, offsets)`` or ``(blocks, offsets, heads)``, to `dst` in its planes.

        The rows are read out first and for good: a scatter that reads the array which it writes cannot be in
        place. This waits for all work that was queued before.
        """
        rows = [[plane[at] for plane in planes] for at, planes in zip(src, self.planes, strict=True)]
        mx.eval(rows)
        for planes, taken in zip(self.planes, rows, strict=True):
            for plane, row in zip(planes, taken, strict=True):
                plane[dst] = row

    def put(self, blocks: mx.array, data: list[list[mx.array]]) -> None:
        """Overwrite whole blocks with ``data[layer][plane]`` ``[n, S, Hk, D]``. Lazy."""
        for planes, new in zip(self.planes, data, strict=True):
            for plane, values in zip(planes, new, strict=True):
                plane[blocks] = values

    def wait(self) -> None:
        """Wait for all queued work, before the last write of a step is built. Count the copies of that layer."""
        mx.synchronize()
        self.count_copies(len(self.arrays) - len(self.planes[-1]))

    def settle(self) -> int:
        """Wait for all queued work on the pool. Count the arrays that MLX has copied since the last call.

        With one write of a layer between two calls the count is exact, otherwise it is a lower bound: two copies can
        end in the first buffer.
        """
        mx.eval(self.arrays)
        mx.synchronize()  # the reads of the last layer come after its write
        return self.count_copies()


def positions_of(copies: np.ndarray, block_size: int) -> tuple[tuple[mx.array, mx.array], ...]:
    """Return (blocks, offsets) of every token that `copies` ``[K, 3]`` reads, and of every token that it writes."""
    counts = copies[:, 2].astype(np.int64)
    first = np.repeat(np.cumsum(counts) - counts, counts)
    offsets = mx.array((np.arange(counts.sum()) - first).astype(np.int32))
    return tuple((mx.array(np.repeat(copies[:, side], counts)), offsets) for side in (0, 1))


# ---------------------------------------------------------------------- attention


def attention(
    q: mx.array,
    k: mx.array,
    v: mx.array,
    scale: float,
    position: np.ndarray,
    options: AttentionOptions,
    mask: np.ndarray | None,
) -> mx.array:
    """Attend with a padded batch: q ``[B, Hq, n, D]``, k and v ``[B, Hk, C, D]`` and ``[B, Hk, C, Dv]`` in its dtype.

    Keys that no query of the row sees may hold anything, values past the row's context must be finite. `position`, int
    ``[B, n]``, is that of the queries in their rows; `mask` that of the options for them, ``[B, n, 1 or Hq, C]``.
    """
    seen, distance = _seen_and_distance(k.shape[2], position, options)
    if options.window is not None:
        v = mx.where(seen.any(axis=2)[..., None], v, mx.array(0, v.dtype))  # a weight of 0 does not hide a NaN
    if options.soft_cap is options.alibi_slopes is mask is None:
        sinks = None if options.sinks is None else sinks_like(q, mx.array(options.sinks))
        return mx.fast.scaled_dot_product_attention(q, k, v, scale=scale, mask=seen, sinks=sinks)
    weights = _softmax_with_sinks(_scores(q, k, scale, distance, seen, options, mask), options.sinks)
    return _by_kv_head(weights, v.astype(mx.float32)).astype(q.dtype)


def sinks_like(q: mx.array, sinks: mx.array) -> mx.array:
    """Return float32 sinks in the dtype of the queries, for MLX's attention, which knows no infinite ones."""
    most = mx.finfo(q.dtype).max
    return mx.clip(sinks, -most, most).astype(q.dtype)


def exported_scores(
    q: mx.array,
    k: mx.array,
    scale: float,
    position: np.ndarray,
    options: AttentionOptions,
    mask: np.ndarray | None,
    kind: str,
) -> mx.array:
    """Return the scores of `KVBackend.attend` for one query per row, float32 ``[B, Hk, C]``. See `attention`."""
    seen, distance = _seen_and_distance(k.shape[2], position, options)
    scores = _scores(q, k, scale, distance, seen, options, mask)
    if kind == "mass":
        return mass_of_scores(scores, k.shape[1], options.sinks)
    return _of_kv_heads(mx.where(scores == -mx.inf, 0, scores), k.shape[1])


def _seen_and_distance(context: int, position: np.ndarray, options: AttentionOptions) -> tuple[mx.array, mx.array]:
    """Return which keys queries at `position` ``[B, n]`` see, and key minus query position, ``[B, 1, n, C]``."""
    distance = mx.arange(context) - mx.array(position.astype(np.int32))[:, None, :, None]
    seen = distance <= 0
    if options.window is not None:
        seen = seen & (distance > -min(options.window, 2**31 - 1))
    return seen, distance


def mass_of_scores(scores: mx.array, num_kv_heads: int, sinks: np.ndarray | None) -> mx.array:
    """Return scores ``[B, Hk, C]`` of the exponents ``[B, Hq, 1, C]``, by one more pass over them."""
    return _of_kv_heads(_softmax_with_sinks(scores, sinks), num_kv_heads)


def _of_kv_heads(x: mx.array, num_kv_heads: int) -> mx.array:
    """Return the means over the query heads of each KV head: ``[B, Hk, C]`` of ``[B, Hq, 1, C]``."""
    group = x.shape[1] // num_kv_heads
    return (x / group).reshape(x.shape[0], num_kv_heads, group, x.shape[3]).sum(axis=2)  # a sum may be no float32


def _scores(
    q: mx.array,
    k: mx.array,
    scale: float,
    distance: mx.array,
    seen: mx.array,
    options: AttentionOptions,
    mask: np.ndarray | None,
) -> mx.array:
    """Return the exponents of the softmax, float32 ``[B, Hq, n, C]``. -inf where the query does not see the key."""
    scores = _by_kv_head(q.astype(mx.float32) * scale, k.astype(mx.float32).swapaxes(2, 3))
    if options.soft_cap is not None:
        scores = mx.tanh(scores / options.soft_cap) * options.soft_cap
    if options.alibi_slopes is not None:
        scores = scores + mx.array(options.alibi_slopes)[:, None, None] * distance
    if mask is not None:
        given = mx.array(mask).swapaxes(1, 2)
        if mask.dtype == np.bool_:
            seen = seen & given
        else:
            scores = scores + given
    return mx.where(seen, scores, -mx.inf)


def _by_kv_head(x: mx.array, y: mx.array) -> mx.array:
    """``x[:, h] @ y[:, h // G]`` for ``[B, Hq, n, i]`` and ``[B, Hk, i, j]``."""
    groups = x.reshape(x.shape[0], y.shape[1], -1, *x.shape[2:])
    return mx.matmul(groups, y[:, :, None]).flatten(1, 2)


def _softmax_with_sinks(scores: mx.array, sinks: np.ndarray | None) -> mx.array:
    """Softmax of ``[B, Hq, n, C]`` with one more key of score ``sinks[h]``; 0 in rows of -inf."""
    peak = scores.max(axis=-1, keepdims=True)
    sink = mx.array(-mx.inf) if sinks is None else mx.array(sinks)[:, None, None]
    peak = mx.maximum(peak, sink)
    peak = mx.where(peak == -mx.inf, 0, peak)  # -inf - -inf would be NaN
    weights = mx.exp(scores - peak)
    total = weights.sum(axis=-1, keepdims=True) + mx.exp(sink - peak)
    return weights / mx.where(total > 0, total, 1)
