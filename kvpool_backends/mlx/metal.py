"""The Metal route: attention by the kernels of `kvpool_backends.metal`, straight over the pool.

A long chunk of plain attention is bound by arithmetic, not by reads. So its context is gathered, in the order that MLX
takes, for MLX's own attention, which knows each GPU's matrix units: for head dimensions for which that makes no array
of all scores.

`MetalAttention` reads. `MetalBackend` writes by scatters as the plain route does,
`native.backend.NativeMetalBackend` in place.
"""

from __future__ import annotations

import platform
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache, reduce
from typing import TYPE_CHECKING, Any, NamedTuple

import mlx.core as mx
import numpy as np

from kvpool.protocol import AnyPlan, AttentionOptions, BatchShape, Capabilities, KVBackend, StepArrays
from kvpool.spec import KVSpec
from kvpool_backends.checks import check_layer, checked_queries, checked_results, checked_step
from kvpool_backends.mlx.base import BaseBackend, has_metal, int32
from kvpool_backends.mlx.metal_kernels import (
    HEAD_DIM_MAX,
    PART_TOKENS,
    AttentionStep,
    Launch,
    MetalKernels,
    Plane,
    arrays_of,
    attention_step,
    head_tiles,
    part_length,
    parts_of,
    plan_attention,
    score_export,
)
from kvpool_backends.mlx.plain import PlainBackend, exported_scores, mass_of_scores, sinks_like

LONG_CHUNK = 32  # queries of a row above which MLX's own attention is taken; only a Mac can tell what is right
BLOCK_SIZES = tuple(range(8, 257, 8))
HEAD_DIMS = tuple(range(4, HEAD_DIM_MAX + 1, 4))
# Head dimensions of keys and values for which MLX's own attention makes no array of all scores, and that for which it
# does not either if the GPU has tensor operations and a chunk as many queries as that. Since which release: from
# ScaledDotProductAttention::use_fallback of MLX.
FUSED_DIMS = {64: (0, 31), 80: (0, 31), 128: (0, 31), 72: (0, 32, 1), 96: (0, 32, 1)}
TENSOR_DIMS, TENSOR_CHUNK = {256: (0, 32, 2)}, 1024
# Below this many elements MLX binds an input in another address space, which is another kernel: inputs are padded.
CONSTANT_SIZE_MAX = 8

if TYPE_CHECKING:

    class _Storage(BaseBackend, KVBackend):
        """The interface of both storages that the Metal route writes with."""

        _warm_write: Callable[[int], None]

else:
    _Storage = object


@dataclass(frozen=True, slots=True, repr=False)
class MetalStep(StepArrays):
    """The arrays of a step, with those that its layers share on the device."""

    tables: Any = None  # mx.array, int32 [B, W]
    written: Any = None  # the step of the storage
    work: dict[tuple[Any, ...], Work] = field(default_factory=dict)  # by what it depends on
    bound: dict[tuple[Any, ...], Bound] = field(default_factory=dict)  # by the calls that were checked


class Work(NamedTuple):
    """The kernel launches for the queries of a step, shared by its layers."""

    launches: tuple[tuple[AttentionStep, mx.array | None], ...]  # with the tokens of each, None for all of them
    chunks: tuple[tuple[int, int, int], ...]  # (row, first token, token behind the last) of the long chunks
    order: mx.array | None  # [T] where a token is in the results, one after the other; None if it is there


class Bound(NamedTuple):
    """A call of `attend` that was checked, for all layers that attend alike."""

    launches: tuple[tuple[Launch, mx.array | None], ...]  # with the tokens of each, None for all of them
    work: Work
    scale: float


class MetalAttention(_Storage):
    """Reads a pool with Metal kernels. Everything is lazy. A `BaseBackend` beside it writes."""

    route = "metal"
    part_tokens = PART_TOKENS  # of a context that is split, see `plan_attention`
    _kernels: MetalKernels

    def _allocate(self) -> None:
        super()._allocate()
        self._kernels = MetalKernels(self.spec, self.num_blocks, self._metal_kernel)
        self._long_chunk = long_chunk(self.spec)
        self._asked: dict[tuple[int, tuple[str, ...]], AttentionOptions] = {}  # by query heads and features

    def _on_pool(self, layer: int, kernel: Callable[..., list[mx.array]]) -> Sequence[mx.array]:
        """Return ``kernel(k_pool, v_pool)`` on the planes of a layer, ordered with its writes."""
        raise NotImplementedError

    # ------------------------------------------------------------------------------------------ one step

    def prepare(self, plan: AnyPlan) -> Any:
        """Check a plan and upload the arrays that its layers share."""
        host = checked_step(self, plan)
        return MetalStep(
            host.block_tables,
            host.seq_lens,
            host.cu_q_lens,
            host.slot_mapping,
            tables=_on_device(host.block_tables),
            written=super().prepare(host),  # type: ignore[safe-super]
        )

    def write(self, step: Any, layer: int, k: mx.array, v: mx.array) -> None:
        super().write(step.written, layer, k, v)  # type: ignore[safe-super]

    def attend(
        self, step: Any, layer: int, q: mx.array, scale: float | None = None, *,
        options: AttentionOptions | None = None, return_attn: bool = False,
        scores: str | None = None, scores_out: np.ndarray | None = None,
    ) -> Any:
        if return_attn or scores is not None or scores_out is not None:
            checked_results(self.capabilities, return_attn, scores, scores_out)
        q = q if isinstance(q, mx.array) else mx.array(q)
        kind: tuple[Any, ...] | None = () if options is None else None
        if isinstance(options, AttentionOptions) and options.mask is None:
            kind = _kind(options)
        call = q.shape, q.dtype, scale if scale is None else float(scale), kind, scores
        bound = None if kind is None else step.bound.get(call)
        if bound is None:
            scale, options = checked_queries(self, step, layer, q, scale, options)
            if not len(q) or not step.cu_q_lens[-1]:
                out = mx.zeros((*q.shape[:2], self.spec.result_dim), q.dtype)
                shape = len(step.seq_lens), self.spec.num_kv_heads, int(step.seq_lens.max(initial=0))
                return out if scores is None else (out, mx.zeros(shape))
            bound = self._bind(step, q, scale, options, scores)
            if kind is not None:
                step.bound[call] = bound
        else:
            check_layer(self, "attend", layer)
        return self._launch(layer, q, step, bound, options, scores)

    def read(self, step: Any, layer: int) -> tuple[mx.array, mx.array]:
        check_layer(self, "read", layer)
        return self._contexts(layer, step)

    def warmup(
        self,
        shapes: Iterable[BatchShape],
        options: Sequence[AttentionOptions] = (),
        *,
        scores: str | None = None,
    ) -> None:
        """Build every kernel for batches of these shapes. Each runs once, on zeros or on old blocks.

        Parameters
        ----------
        shapes
            Of the longest contexts: batches with shorter ones, and with chunks of any length, are prepared too. Without
            any: contexts and chunks of any length, for the heads and options of the calls of `attend` so far.
        options
            That a model attends with, besides none. Kernels depend on which fields are given, not on their values.
        scores : str, optional
            A kind that is going to be asked for, besides none.
        """
        given = list(shapes)
        todo = [(shape, chosen) for shape in given for chosen in (None, *options)]
        if not given:
            width = 1 << 16  # blocks: `_variants` takes no more of them than a row needs that has two parts
            asked = list(self._asked.items())
            longest = LONG_CHUNK + 1 if self._long_chunk is None else self._long_chunk + 1
            todo = [(BatchShape(1, longest, width, heads), chosen) for (heads, _), chosen in asked]
        for shape in given:
            self._warm_write(shape.num_tokens)
        for shape, chosen in todo:
            for q_lens, contexts in self._variants(shape):
                for kind in (None,) if scores is None else (None, scores):
                    self._warm_attend(shape.num_q_heads, q_lens, contexts, chosen, kind)

    # ----------------------------------------------------------------------------------------- internals

    def _bind(self, plan: MetalStep, q: mx.array, scale: float, options: AttentionOptions, scores: str | None) -> Bound:
        """Return what layers share whose queries are alike and whose options differ in values only."""
        work, features, num_heads = self._work(plan, q, scale, options, scores), options.features, q.shape[1]
        if options.mask is None:
            self._asked.setdefault((num_heads, features), options)
        launches = []
        for step, tokens in work.launches:
            count = len(q) if tokens is None else len(tokens)
            launch = self._kernels.bind(q.dtype, count, num_heads, step._replace(features=features), scores)
            launches.append((launch, tokens))
        return Bound(tuple(launches), work, scale)

    def _launch(
        self,
        layer: int,
        q: mx.array,
        plan: MetalStep,
        bound: Bound,
        options: AttentionOptions | None,
        scores: str | None,
    ) -> Any:
        """Return the result. With `scores`, return the scores too."""
        work = bound.work
        heads = arrays_of(options)
        launched: list[mx.array] = []
        for launch, tokens in bound.launches:
            if tokens is None:
                launched += self._launched(layer, launch, q, heads)
                continue
            slopes, sinks, mask = heads
            mask = mask if options is None or options.mask is None else mask[tokens]
            launched += self._launched(layer, launch, q[tokens], (slopes, sinks, mask))
        if work.order is None and scores is None and not work.chunks:
            return launched[0]
        options = options or AttentionOptions()
        each = 1 if scores is None else 2
        outs, exported = launched[::each], launched[1::2] if each == 2 else []
        contexts = [self._contexts(layer, plan, slice(row, row + 1)) for row, _, _ in work.chunks]
        sunk = sinks_like(q, heads[1]) if options.sinks is not None else None
        for (_, first, last), (k, v) in zip(work.chunks, contexts, strict=True):
            queries = q[first:last].swapaxes(0, 1)[None]
            k, v = k.astype(q.dtype), v.astype(q.dtype)
            out = mx.fast.scaled_dot_product_attention(queries, k, v, scale=bound.scale, mask="causal", sinks=sunk)
            outs.append(out[0].swapaxes(0, 1))
        out = outs[0] if work.order is None else mx.concatenate(outs)[work.order]
        if scores is None:
            return out
        return out, self._scores(q, plan, work, exported, [k for k, _ in contexts], bound.scale, options, scores)

    def _launched(self, layer: int, launch: Launch, q: mx.array, heads: tuple[mx.array, ...]) -> Sequence[mx.array]:
        layout = self._kernels.layout(layer)
        return self._on_pool(layer, lambda k, v: launch(layout, q, k, v, heads))

    def _scores(
        self,
        q: mx.array,
        plan: MetalStep,
        work: Work,
        exported: list[mx.array],
        keys: list[mx.array],
        scale: float,
        options: AttentionOptions,
        kind: str,
    ) -> mx.array:
        """Return scores ``[B, Hk, C]``: from the kernels; for long chunks from MLX, over their gathered keys."""
        heads, longest = self.spec.num_kv_heads, int(plan.seq_lens.max())
        if not exported:
            result = mx.zeros((len(plan.seq_lens), heads, longest))
        elif kind == "raw":
            result = sum(exported[1:], exported[0])  # a launch says 0 of the rows of another one
        else:
            result = mass_of_scores(reduce(mx.maximum, exported)[:, :, None], heads, options.sinks)
        for (row, _, last), k in zip(work.chunks, keys, strict=True):
            newest = q[last - 1 : last, :, None]
            position = plan.seq_lens[row : row + 1, None] - 1
            result[row, :, : k.shape[2]] = exported_scores(newest, k, scale, position, options, None, kind)[0]
        return result

    def _work(
        self, plan: MetalStep, q: mx.array, scale: float, options: AttentionOptions, scores: str | None
    ) -> Work:
        """Return the launches for `q`. They are made once for all layers with equal arguments."""
        is_plain = options.window is options.soft_cap is options.alibi_slopes is options.mask is None
        gathers = is_plain and self._long_chunk is not None
        key = (*q.shape[:2], scale, options.window, options.soft_cap, gathers, scores is None)
        if key in plan.work:
            return plan.work[key]
        q_lens, starts, group = np.diff(plan.cu_q_lens), plan.cu_q_lens, q.shape[1] // self.spec.num_kv_heads
        is_chunk = (q_lens > (self._long_chunk or 0)) & gathers
        large = [n for n in set(q_lens.tolist()) if n and head_tiles(self.spec, group, n).units]
        is_matrix = np.isin(q_lens, large) & ~is_chunk
        owner = np.repeat(np.where(is_chunk, 2, is_matrix), q_lens)  # of a token: a launch, or 2 for none
        only_matrix = (owner == 1).any() and not (owner == 0).any()
        owner = np.append(owner, np.full(len(q) - len(owner), only_matrix))  # padding joins a launch
        launches: list[tuple[AttentionStep, mx.array | None]] = []
        places = []
        for kind in (0, 1):
            tokens = np.flatnonzero(owner == kind)
            if not len(tokens):
                continue
            taken = np.where((is_matrix == kind) & ~is_chunk, q_lens, 0)
            tiles = head_tiles(self.spec, group, int(taken.max(initial=1)))
            work = plan_attention(
                plan.seq_lens,
                np.concatenate([[0], np.cumsum(taken)]),
                len(tokens),
                tiles=tiles,
                window=options.window,
                **parts_of(self.spec, tiles, self.part_tokens),
            )
            padding = max(0, -(-CONSTANT_SIZE_MAX // work.parts.shape[1]) - len(work.parts))
            work = work._replace(parts=np.pad(work.parts, ((0, padding), (0, 0)), constant_values=1))
            step = attention_step(work, plan.tables, scale, options)
            if scores is not None:
                step = step._replace(export=score_export(work, plan.seq_lens, options.window, CONSTANT_SIZE_MAX))
            launches.append((step, None if len(tokens) == len(q) else int32(tokens)))
            places.append(tokens)
        chunks = tuple((int(row), int(starts[row]), int(starts[row + 1])) for row in np.flatnonzero(is_chunk))
        places += [np.arange(first, last) for _, first, last in chunks]
        order = None if len(places) == 1 else int32(np.argsort(np.concatenate(places)))
        plan.work[key] = Work(tuple(launches), chunks, order)
        return plan.work[key]

    def _contexts(self, layer: int, plan: MetalStep, rows: slice = slice(None)) -> tuple[mx.array, mx.array]:
        """Return K and V of some rows, ``[B, Hk, C, D]``. C is the longest context."""
        seq_lens = plan.seq_lens[rows]
        tables, lens = plan.tables[rows], int32(seq_lens)

        def kernel(*pools: Plane) -> list[mx.array]:
            return [
                self._kernels.gather(layer, plane, pool, tables, lens, int(seq_lens.max(initial=0)))
                for (plane, _), pool in zip(self.spec.planes, pools, strict=True)
            ]

        k, v = self._on_pool(layer, kernel)
        return k, v

    def _variants(self, shape: BatchShape) -> Iterator[tuple[tuple[int, ...], tuple[int, ...]]]:
        """Return (queries, contexts) of batches that together launch every kernel of a shape."""
        capacity = shape.table_width * self.spec.block_size
        longest = min(capacity, shape.num_tokens - shape.num_rows + 1)
        group = shape.num_q_heads // self.spec.num_kv_heads
        tried = set()
        for exponent in range(longest.bit_length() + 1):
            num_queries = min(1 << exponent, longest)
            tiles = head_tiles(self.spec, group, num_queries)
            if tiles in tried:
                continue
            tried.add(tiles)
            yield (num_queries,), (num_queries,)
            shortest = parts_of(self.spec, tiles, self.part_tokens)["part_tokens"]
            beside = int(part_length(1, tiles.heads * tiles.groups, shortest))
            if capacity > beside:  # a row of one query has parts before one of more has
                yield (num_queries, 1), (num_queries, beside + 1)
            one_part = int(part_length(num_queries, tiles.heads * tiles.groups, shortest))
            if capacity >= one_part + num_queries:
                yield (num_queries,), (one_part + num_queries,)
        if self._long_chunk is not None and longest > self._long_chunk:
            yield (self._long_chunk + 1,), (self._long_chunk + 1,)

    def _warm_attend(
        self,
        num_q_heads: int,
        q_lens: tuple[int, ...],
        contexts: tuple[int, ...],
        options: AttentionOptions | None,
        scores: str | None,
    ) -> None:
        spec, num_queries, context = self.spec, sum(q_lens), max(contexts)
        tables = np.zeros((len(contexts), -(-context // spec.block_size)), np.int32)
        step = self.prepare(StepArrays(tables, np.array(contexts), np.cumsum([0, *q_lens])))
        if options is not None and options.mask is not None:
            mask = np.zeros((num_queries, *options.mask.shape[1:-1], context), np.float32)
            options = AttentionOptions(options.window, options.soft_cap, options.sinks, options.alibi_slopes, mask)
        q = mx.zeros((num_queries, num_q_heads, spec.query_dim), self.dtype)
        mx.eval(self.attend(step, 0, q, options=options, scores=scores))


def long_chunk(spec: KVSpec) -> int | None:
    """Return above how many queries of a row MLX's own attention is taken. None: never, as it would make all scores."""
    if spec.latent or spec.head_dim != spec.value_head_dim:
        return None
    release, dim = tuple(map(int, re.findall(r"\d+", mx.__version__)[:3])), spec.head_dim  # type: ignore[attr-defined]
    if dim in FUSED_DIMS:
        return LONG_CHUNK if release >= FUSED_DIMS[dim] else None
    return TENSOR_CHUNK - 1 if release >= TENSOR_DIMS.get(dim, (99,)) and has_tensor_operations() else None


def has_tensor_operations() -> bool:
    """Whether MLX uses the tensor operations of this GPU: an M5 or newer, from macOS 26.2 on."""
    if not has_metal() or tuple(map(int, platform.mac_ver()[0].split(".")[:2])) < (26, 2):
        return False
    generation, kind = re.findall(r"g(\d+)(\w?)", str(mx.device_info()["architecture"]))[0]
    return int(generation) >= (18 if kind == "p" else 17)


def metal_capabilities(layouts: tuple[str, ...]) -> Capabilities:
    """Return the capabilities of the kernels, for a storage with these layouts."""
    return replace(
        PlainBackend.capabilities,
        layouts=layouts,
        head_dims=HEAD_DIMS,
        block_sizes=BLOCK_SIZES,
        batch_invariant=True,
        paged=True,
        latent=True,
    )


class MetalBackend(MetalAttention, PlainBackend):
    """`MLXBackend` that reads with Metal kernels. It writes as the plain route, whose notes on copies apply."""

    capabilities = metal_capabilities(("NHD",))

    def _allocate(self) -> None:
        super()._allocate()
        self._pool.pack = self._kernels.packed

    def _on_pool(self, layer: int, kernel: Callable[..., list[mx.array]]) -> list[mx.array]:
        # MLX ends a command buffer when its kernels bind too many elements. It counts those of a whole pool, but of a
        # slice only the slice's. A kernel finds the rest behind it: both have the same address.
        return kernel(*([plane.reshape(-1)[:CONSTANT_SIZE_MAX] for plane in side] for side in self._pool.sides(layer)))


@lru_cache(maxsize=512)  # by identity
def _kind(options: AttentionOptions) -> tuple[Any, ...]:
    """Return the part of options without a mask that checks and launches depend on: not the values of sinks, slopes."""
    sizes = (None if x is None else x.size for x in (options.sinks, options.alibi_slopes))
    return options.window, options.soft_cap, *sizes


def _on_device(tables: np.ndarray) -> mx.array:
    """Return block tables with enough columns, and rows that begin where MLX expects them."""
    return int32(np.pad(tables, ((0, 0), (0, max(0, CONSTANT_SIZE_MAX - tables.shape[1])))))
