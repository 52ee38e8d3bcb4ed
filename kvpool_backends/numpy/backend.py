"""`NumpyBackend`: paged KV storage and attention in plain numpy, float64 inside.

The code is simple on purpose. Each query slices the context that it may see and does dense attention on it. So there is
no mask that could be wrong, and no slot outside the context is ever touched.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from math import prod
from typing import Any

import numpy as np
from numpy.lib.stride_tricks import as_strided

from kvpool.protocol import (
    FEATURES,
    SCORES,
    AnyPlan,
    AttentionOptions,
    BatchShape,
    Capabilities,
    StepArrays,
    checked_resize,
    move_within,
)
from kvpool.spec import DTYPES, LAYOUTS, QUANT_BITS, QUANT_GROUP_SIZES, WORD_BITS, KVSpec
from kvpool_backends.checks import (
    STORED,
    block_ids,
    check_layer,
    check_tokens,
    checked_copies,
    checked_import,
    checked_keep,
    checked_queries,
    checked_results,
    checked_rows,
    checked_step,
    checked_storage,
    gathered,
)
from kvpool_backends.numpy.elements import dequantize, from_bfloat16, from_float8, quantize, to_bfloat16, to_float8

# Of keys, or of values: one array; or words, scales and biases.
_Plane = tuple[np.ndarray, ...]


class NumpyBackend:
    """Reference backend. Implements `kvpool.protocol.KVBackend`, which documents each method.

    Parameters
    ----------
    spec : KVSpec
        Any layout, dtype, bits, head dimensions and block size.
    num_blocks : int
        Blocks in the pool, reserved ones included.
    storage : uint8 ``[num_blocks, spec.block_nbytes]``, optional
        Memory to use instead, see `KVBackend`; only with layout "block".

    Notes
    -----
    `k` and `v` given to `write` may also be uint16 bit patterns when the spec says bfloat16. Results are
    float32, or float64 for float64 queries; all arithmetic is float64, on the stored values.
    """

    required_formats: tuple[str, ...] = ("block_tables", "seq_lens", "cu_q_lens", "slot_mapping")
    capabilities: Capabilities = Capabilities(
        name="numpy",
        layouts=LAYOUTS,
        dtypes=tuple(DTYPES),
        features=FEATURES,
        scores=SCORES,
        scores_out=True,
        compacts=True,
        batch_invariant=True,
        quant_bits=QUANT_BITS,
        quant_group_sizes=QUANT_GROUP_SIZES,
        latent=True,
    )

    def __init__(self, spec: KVSpec, num_blocks: int, *, storage: np.ndarray | None = None) -> None:
        self.num_blocks = checked_storage("NumpyBackend", self.capabilities, spec, num_blocks)
        self.spec = spec
        # _planes[layer] = (k, v), or what is stored of them, each a strided view [num_blocks, block_size,
        # num_kv_heads, dim] of a base array, in which blocks lie one behind the other.
        if storage is None:
            self._bases = _zeros(spec, self.num_blocks)
        else:
            self._bases = [checked_rows("NumpyBackend", spec, self.num_blocks, storage)]
        self._planes = _views(spec, self.num_blocks, self._bases)

    def __repr__(self) -> str:
        return f"<NumpyBackend of {self.spec.describe(self.num_blocks)}>"

    def asarray(self, x: np.ndarray) -> np.ndarray:
        return np.array(x, np.float32)

    def to_numpy(self, x: np.ndarray) -> np.ndarray:
        return np.array(x, np.float64 if np.asarray(x).dtype == np.float64 else np.float32)

    # ---------------------------------------------------------------------- copies and writes

    def prepare(self, plan: AnyPlan) -> StepArrays:
        return checked_step(self, plan)

    def copy_blocks(self, plan: AnyPlan | np.ndarray) -> None:
        copies = checked_copies(self, plan)
        for plane in self._every_plane():
            for src, dst, num_tokens in copies:
                plane[dst, :num_tokens] = plane[src, :num_tokens]

    def write(self, step: StepArrays, layer: int, k: Any, v: Any) -> None:
        k, v = np.asarray(k), np.asarray(v)
        check_tokens(self, layer, step.slot_mapping.size, k, v)
        written = np.flatnonzero(step.slot_mapping >= 0)
        stored: list[np.ndarray] = []
        for name, bits, x in zip("kv", self.spec.bits, (k, v), strict=True):
            stored += self._to_parts(name, x[written], bits)
        block, offset = np.divmod(step.slot_mapping[written], self.spec.block_size)
        for plane, x in zip(self._planes[layer], stored, strict=True):
            plane[block, offset] = x

    def compact(self, blocks: Sequence[int] | np.ndarray, keep: Any) -> None:
        ids, places = checked_keep(self, blocks, keep)
        new = np.arange(places.shape[-1])
        heads = np.arange(self.spec.num_kv_heads)[:, None]
        block, offset = ids[new // self.spec.block_size], new % self.spec.block_size
        for planes, old in zip(self._planes, places, strict=True):
            for plane in planes:
                moved = plane[ids[old // self.spec.block_size], old % self.spec.block_size, heads]
                plane[block, offset] = moved.swapaxes(0, 1)

    def zero(self, blocks: Sequence[int] | np.ndarray) -> None:
        ids = block_ids(self, "zero", blocks)
        for plane in self._every_plane():
            plane[ids] = 0

    # ---------------------------------------------------------------------- reads

    def attend(
        self, step: StepArrays, layer: int, q: Any, scale: float | None = None, *,
        options: AttentionOptions | None = None, return_attn: bool = False,
        scores: str | None = None, scores_out: np.ndarray | None = None,
    ) -> Any:
        q = np.asarray(q)
        if q.dtype.kind != "f":
            raise TypeError(f"[attend] q must be a float array, got {q.dtype}")
        scale, options = checked_queries(self, step, layer, q, scale, options)
        k_plane, v_plane = self._layer(layer)
        num_tokens, num_q_heads, _ = q.shape
        longest = int(step.seq_lens.max(initial=0))
        exported = np.zeros((step.seq_lens.size, self.spec.num_kv_heads, longest), np.float32)
        given = checked_results(self.capabilities, return_attn, scores, scores_out, exported.shape)
        out = np.zeros((num_tokens, num_q_heads, self.spec.result_dim))
        attn = np.zeros((num_tokens, num_q_heads, longest if return_attn else 0))
        for row, seq_len in enumerate(step.seq_lens.tolist()):
            begin, end = step.cu_q_lens[row : row + 2].tolist()
            if begin == end:
                continue
            keys, values = (self._context(plane, step.block_tables[row], seq_len) for plane in (k_plane, v_plane))
            if self.spec.latent:
                keys, values = np.concatenate([keys, values], axis=-1), keys
            for token in range(begin, end):
                position = seq_len - (end - token)
                oldest = 0 if options.window is None else max(0, position + 1 - options.window)
                visible = slice(oldest, position + 1)
                bias = _bias(options, token, position, visible)
                one = _attend_one(q[token], keys[visible], values[visible], scale, options, bias)
                raw, weights, out[token] = one
                if return_attn:
                    attn[token, :, visible] = weights
            exported[row, :, visible] = _of_kv_heads(weights if scores == "mass" else raw, keys.shape[1])
        dtype = np.float64 if q.dtype == np.float64 else np.float32
        results = [out.astype(dtype)]
        if return_attn:
            results.append(attn.astype(dtype))
        if given is not None:
            given[:] = exported
        if scores is not None:
            results.append(exported if given is None else given)
        return results[0] if len(results) == 1 else tuple(results)

    def read(self, step: StepArrays, layer: int) -> tuple[np.ndarray, np.ndarray]:
        check_layer(self, "read", layer)
        shape = (step.seq_lens.size, self.spec.num_kv_heads, int(step.seq_lens.max(initial=0)))
        k, v = (np.zeros((*shape, dim), np.float32) for _, dim in self.spec.planes)
        for row, n in enumerate(step.seq_lens.tolist()):
            for x, plane in zip((k, v), self._layer(layer), strict=True):
                x[row, :, :n] = self._context(plane, step.block_tables[row], n).swapaxes(0, 1)
        return k, v

    def gather(
        self, layer: int, blocks: Sequence[int] | np.ndarray, num_tokens: int | None = None
    ) -> tuple[np.ndarray, np.ndarray]:
        check_layer(self, "gather", layer)
        ids, count = gathered(self, blocks, num_tokens)
        k, v = (self._context(plane, ids, count) for plane in self._layer(layer))
        return k.astype(np.float32), v.astype(np.float32)

    # ---------------------------------------------------------------------- export and import

    def export_blocks(self, blocks: Sequence[int] | np.ndarray) -> np.ndarray:
        ids = block_ids(self, "export_blocks", blocks)
        data = np.empty((ids.size, self.spec.block_nbytes), np.uint8)
        for plane, columns in self._plane_columns():
            data[:, columns] = np.ascontiguousarray(plane[ids]).view(np.uint8).reshape(data[:, columns].shape)
        return data

    def import_blocks(self, blocks: Sequence[int] | np.ndarray, data: np.ndarray) -> None:
        ids, data = checked_import(self, blocks, data)
        for plane, columns in self._plane_columns():
            part = np.ascontiguousarray(data[:, columns]).view(plane.dtype)
            plane[ids] = part.reshape(ids.size, *plane.shape[1:])

    def resize(self, num_blocks: int, moves: Any, *, storage: np.ndarray | None = None) -> None:
        have = self.num_blocks
        size, moves = checked_resize(have, num_blocks, moves)
        if storage is None and self._bases[0].ndim == 2:
            raise TypeError("[resize] the blocks are in `storage`: give storage of the new size, too")
        try:
            if storage is not None:
                self._bases = [checked_rows("resize", self.spec, size, storage)]
                self.num_blocks = size
            elif size > have:
                found = _zeros(self.spec, size)  # the system hands out its pages as they are filled
                self._planes = []  # or its views would keep what is let go
                for number, new in enumerate(found):
                    new[: self._bases[number].size] = self._bases[number]
                    self._bases[number] = new
                self.num_blocks = size
            else:
                for plane in self._every_plane():
                    move_within(plane, moves)
                self._planes, self.num_blocks = [], size
                for base in self._bases:  # the system takes the pages behind back
                    base.resize(base.size // have * size, refcheck=False)
        finally:
            self._planes = _views(self.spec, self.num_blocks, self._bases)

    def warmup(self, shapes: Iterable[BatchShape], *, scores: str | None = None) -> None:
        """Nothing to compile here."""

    def queued(self, layer: int) -> tuple[()]:
        return ()

    def settle(self) -> int:
        return 0

    # ---------------------------------------------------------------------- internals

    def _every_plane(self) -> Iterator[np.ndarray]:
        for planes in self._planes:
            yield from planes

    def _plane_columns(self) -> Iterator[tuple[np.ndarray, slice]]:
        """Every plane with the bytes that it takes in a row of `export_blocks`."""
        begin = 0
        for plane in self._every_plane():
            end = begin + plane[0].size * plane.itemsize
            yield plane, slice(begin, end)
            begin = end

    def _layer(self, layer: int) -> tuple[_Plane, _Plane]:
        planes, num_k = self._planes[layer], 1 if self.spec.k_bits is None else 3
        return planes[:num_k], planes[num_k:]

    def _context(self, plane: _Plane, table: np.ndarray, num_tokens: int) -> np.ndarray:
        """float64 ``[num_tokens, Hk, dim]`` of the blocks in `table`, and nothing behind these tokens."""
        ids = table[: -(-num_tokens // self.spec.block_size)]
        stored = [part[ids].reshape(-1, *part.shape[2:])[:num_tokens] for part in plane]
        if len(stored) == 1:
            return self._as_floats(stored[0]).astype(np.float64)
        words, scales, biases = stored
        bits = WORD_BITS * words.shape[-1] // (scales.shape[-1] * self.spec.quant_group_size)
        return dequantize(words, self._as_floats(scales), self._as_floats(biases), bits).astype(np.float64)

    def _as_floats(self, stored: np.ndarray) -> np.ndarray:
        """float32 of what is stored in the spec's dtype."""
        if self.spec.dtype == "float8_e4m3":
            return from_float8(stored)
        return from_bfloat16(stored) if self.spec.dtype == "bfloat16" else stored.astype(np.float32)

    def _to_parts(self, name: str, x: np.ndarray, bits: int | None) -> list[np.ndarray]:
        """`x` as it is stored: quantized from what the spec's dtype holds of it."""
        stored = self._to_stored(name, x)
        if bits is None:
            return [stored]
        words, scales, biases = quantize(self._as_floats(stored), self.spec.quant_group_size, bits)
        return [words, self._to_stored(name, scales), self._to_stored(name, biases)]

    def _to_stored(self, name: str, x: np.ndarray) -> np.ndarray:
        if self.spec.dtype == "bfloat16":
            if x.dtype == np.uint16:
                return x
            if np.issubdtype(x.dtype, np.floating):
                return to_bfloat16(x)
        elif self.spec.dtype == "float8_e4m3" and np.issubdtype(x.dtype, np.floating):
            return to_float8(x)
        elif np.issubdtype(x.dtype, np.floating):
            with np.errstate(over="ignore"):  # beyond the largest float16 is infinity, as everywhere
                return x.astype(STORED[self.spec.dtype])
        raise TypeError(f"[write] {name} must be a float array, got {x.dtype}")


def _zeros(spec: KVSpec, num_blocks: int) -> list[np.ndarray]:
    """The base arrays, as bytes."""
    return [np.zeros(prod(shape) * itemsize, np.uint8) for shape, _, itemsize in spec.base_arrays(num_blocks)]


def _views(spec: KVSpec, num_blocks: int, bases: list[np.ndarray]) -> list[tuple[np.ndarray, ...]]:
    """Per layer the strided view of each plane: in base arrays, or in rows of layout "block"."""
    layers = []
    for layer in range(spec.num_layers):
        planes = []
        for number, stored in enumerate(spec.stored_planes):
            layout, dtype = spec.plane_layout(stored.name, num_blocks), STORED[stored.dtype]
            base, size = bases[spec.base_number(layer, number)], dtype.itemsize
            step = layout.block_stride * size if base.ndim == 1 else base.strides[0]
            begin = (layout.offset + layer * layout.layer_stride) * size
            strides = (step, layout.slot_stride * size, layout.head_stride * size, size)
            first = base if base.ndim == 1 else base[0]
            shape = (num_blocks, spec.block_size, spec.num_kv_heads, stored.dim)
            planes.append(as_strided(first[begin : begin + size].view(dtype), shape, strides))
        layers.append(tuple(planes))
    return layers


def _bias(options: AttentionOptions, token: int, position: int, visible: slice) -> np.ndarray:
    """The sum of all that is added to the scores of one query, ``[Hq or 1, visible]``; -inf hides a key."""
    bias = np.zeros((1, visible.stop - visible.start))
    if options.alibi_slopes is not None:
        distance = np.arange(visible.start - position, 1)
        bias = options.alibi_slopes.astype(np.float64)[:, None] * distance
    if options.mask is not None:
        mask = options.mask[token, ..., visible]
        bias = bias + (np.where(mask, 0.0, -np.inf) if mask.dtype == np.bool_ else mask)
    return bias


def _attend_one(
    q: np.ndarray, keys: np.ndarray, values: np.ndarray, scale: float, options: AttentionOptions, bias: np.ndarray
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Scores and weights ``[Hq, C]``, result ``[Hq, Dv]`` of one query token ``[Hq, D]`` over ``[C, Hk, ...]``."""
    num_q_heads, num_kv_heads = q.shape[0], keys.shape[1]
    groups = q.astype(np.float64).reshape(num_kv_heads, -1, q.shape[-1])  # contiguous groups of query heads
    scores = np.einsum("hgd,chd->hgc", groups, keys).reshape(num_q_heads, -1) * scale
    if options.soft_cap is not None:
        scores = options.soft_cap * np.tanh(scores / options.soft_cap)
    scores = scores + bias
    sinks = np.full(num_q_heads, -np.inf) if options.sinks is None else options.sinks.astype(np.float64)
    peak = np.maximum(scores.max(axis=-1), sinks)[:, None]
    peak = np.where(np.isneginf(peak), 0.0, peak)  # every key is hidden: -inf - -inf would be NaN
    weights = np.exp(scores - peak)
    total = weights.sum(axis=-1, keepdims=True) + np.exp(sinks[:, None] - peak)
    weights /= np.where(total > 0, total, 1.0)
    result = np.einsum("hgc,chd->hgd", weights.reshape(*groups.shape[:2], -1), values)
    return scores, weights, result.reshape(num_q_heads, -1)


def _of_kv_heads(scores: np.ndarray, num_kv_heads: int) -> np.ndarray:
    """Means over the query heads of each KV head, ``[Hk, C]`` of ``[Hq, C]``; hidden ones (-inf) add nothing."""
    return np.where(np.isneginf(scores), 0.0, scores).reshape(num_kv_heads, -1, scores.shape[-1]).mean(axis=1)
