"""The Metal route: attention by the kernels of `kvpool_backends.metal`, straight over the pool.

Decode, windows and short chunks run `paged_attention`, whatever their options. A long chunk of plain attention is bound
by arithmetic and not by reads, so its context is gathered, in the order that MLX takes, for MLX's own attention.

`MetalAttention` is what reads, on either of two ways to write: `MetalBackend` scatters as the plain route does, with
every MLX; `kvpool_backends.mlx.native.metal_backend.NativeMetalBackend` writes in place by the extension.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple

import mlx.core as mx
import numpy as np

from kvpool.protocol import (
    FEATURES,
    SCORES,
    ArrayPlan,
    AttentionOptions,
    BatchShape,
    Capabilities,
    PlanArrays,
    checked_options,
    checked_scores,
)
from kvpool.spec import QUANT_BITS, QUANT_GROUP_SIZES
from kvpool_backends.mlx.attention import exported_scores, mass_of_scores
from kvpool_backends.mlx.backend import MLXBackend
from kvpool_backends.mlx.metal_kernels import (
    PART_TOKENS,
    AttentionStep,
    MetalKernels,
    Plane,
    attention_step,
    head_tiles,
    plan_attention,
    score_export,
    with_arrays,
)
from kvpool_backends.mlx.plain import PlainBackend
from kvpool_backends.mlx.storage import DTYPES

LONG_CHUNK = 32  # queries of a row above which MLX's own attention is taken; only a Mac can tell what is right
BLOCK_SIZES = tuple(range(8, 257, 8))
HEAD_DIMS = tuple(range(4, 257, 4))
# Below this many elements MLX binds an input in another address space, which is another kernel: inputs are padded.
CONSTANT_SIZE_MAX = 8

if TYPE_CHECKING:

    class _Storage(MLXBackend):
        """What both ways to write have."""

        def write(self, layer: int, k: mx.array, v: mx.array, plan: PlanArrays) -> None: ...
        def write_tokens(self, layer: int, k: mx.array, v: mx.array, arrays: Any) -> None: ...
        def step_arrays(self, plan: PlanArrays, seq_lens: np.ndarray) -> Any: ...
        def _warm_write(self, num_tokens: int) -> None: ...

else:
    _Storage = object


@dataclass(frozen=True, slots=True, repr=False)
class MetalPlan(ArrayPlan):
    """The arrays of a step, and what its layers share on the device."""

    tables: Any = None  # mx.array, int32 [B, W]
    written: Any = None  # what the storage's own `step_arrays` made
    work: dict[tuple[Any, ...], Work] = field(default_factory=dict)  # by what it depends on


class Work(NamedTuple):
    """How the queries of a step are attended."""

    step: AttentionStep | None  # of all rows but those with long chunks; None without any
    tokens: mx.array | None  # [T'] which tokens these are; None for all of them
    chunks: tuple[tuple[int, int, int], ...]  # (row, first token, token behind the last) of the long chunks
    order: mx.array | None  # [T] where a token is in the results, one after the other


class MetalAttention(_Storage):
    """Reads of a pool by Metal kernels; everything is lazy. Beside an `MLXBackend` that writes."""

    route = "metal"
    is_eager = False
    part_tokens = PART_TOKENS  # of a context that is split, see `plan_attention`
    _kernels: MetalKernels

    def _allocate(self) -> None:
        super()._allocate()
        self._kernels = MetalKernels(self.spec, self.num_blocks, self._metal_kernel)

    def _on_pool(self, layer: int, kernel: Callable[..., list[mx.array]]) -> list[mx.array]:
        """The results of ``kernel(k_pool, v_pool)`` on the planes of a layer, in order with its writes."""
        raise NotImplementedError

    # ------------------------------------------------------------------------------------------ one step

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
        """Causal attention of ``q [T, Hq, D]`` over the paged context, see `KVBackend.attend`."""
        if return_attn:
            raise ValueError("[attend] return_attn is True, this backend does not return weights")
        checked_scores(scores, scores_out, self.capabilities(), (0, 0, 0))
        out, *exported = self._launch(layer, *self._checked(layer, q, plan, options), scale, scores)
        return (out, *exported) if exported else out

    def write_and_attend(
        self,
        layer: int,
        q: mx.array,
        k: mx.array,
        v: mx.array,
        plan: PlanArrays,
        scale: float | None = None,
        *,
        options: AttentionOptions | None = None,
    ) -> mx.array:
        """`write` and then `attend`, with the checks of both before anything is written."""
        checked = self._checked(layer, q, plan, options)
        self.write(layer, k, v, plan)
        return self._launch(layer, *checked, scale)[0]

    def step_arrays(self, plan: PlanArrays, seq_lens: np.ndarray) -> MetalPlan:
        """What the layers of one step need: a copy, so that the plan may go on to its next step. Nothing is checked.

        seq_lens : int ``[B]``, context lengths after the step.
        """
        width = -(-int(seq_lens.max(initial=0)) // self.spec.block_size)
        tables = np.array(plan.block_tables[: len(seq_lens), :width])
        slots, written = np.array(plan.slot_mapping), super().step_arrays(plan, seq_lens)
        return MetalPlan(
            tables, np.array(seq_lens), np.array(plan.cu_q_lens), slots, tables=_on_device(tables), written=written
        )

    def write_tokens(self, layer: int, k: mx.array, v: mx.array, arrays: MetalPlan) -> None:
        """`write`, for a step of `step_arrays`. Nothing is checked."""
        super().write_tokens(layer, k, v, arrays.written)

    def read(self, layer: int, arrays: MetalPlan) -> tuple[mx.array, mx.array]:
        """The contexts of a step as K ``[B, Hk, C, D]`` and V ``[B, Hk, C, Dv]``, 0 past a row's end."""
        k, v = self._on_pool(layer, lambda *pools: self._contexts(layer, pools, arrays))
        return k, v

    def warmup(
        self,
        shapes: Iterable[BatchShape],
        options: Sequence[AttentionOptions] = (),
        *,
        scores: str | None = None,
    ) -> None:
        """Build every kernel that batches of these shapes launch: each one is run once, on zeros or on old blocks.

        Parameters
        ----------
        shapes
            Of the longest contexts: batches with shorter ones, and with chunks of any length, are prepared too.
        options
            That a model attends with, besides none. Kernels depend on which fields are given, not on their values.
        scores : str, optional
            A kind that is going to be asked for, besides none.
        """
        for shape in shapes:
            self._warm_write(shape.num_tokens)
            for chosen in (None, *options):
                for num_queries, context in self._variants(shape):
                    for kind in (None,) if scores is None else (None, scores):
                        self._warm_attend(shape.num_q_heads, num_queries, context, chosen, kind)

    # ----------------------------------------------------------------------------------------- internals

    def _checked(
        self, layer: int, q: mx.array, plan: PlanArrays, options: AttentionOptions | None
    ) -> tuple[mx.array, MetalPlan, AttentionOptions]:
        self._check_layer("attend", layer)
        q = q if isinstance(q, mx.array) else mx.array(q)
        num_heads = self._query_heads(q)
        plan = plan if type(plan) is MetalPlan else self._checked_plan(plan)
        if len(plan.cu_q_lens) != len(plan.seq_lens) + 1 or plan.cu_q_lens[-1] > len(q):
            raise ValueError(f"[attend] cu_q_lens {plan.cu_q_lens.tolist()} do not fit {len(q)} query tokens")
        longest = int(plan.seq_lens.max(initial=0))
        return q, plan, checked_options(options, self.capabilities(), len(q), num_heads, longest)

    def _checked_plan(self, plan: PlanArrays) -> MetalPlan:
        """Somebody's plan, for one call; only what rows with queries read has to be legal."""
        seq_lens, cu_q_lens = (np.asarray(x, np.int64) for x in (plan.seq_lens, plan.cu_q_lens))
        q_lens = np.diff(cu_q_lens)
        fits = len(q_lens) == len(seq_lens) <= len(plan.block_tables) and not cu_q_lens[:1].any()
        if not fits or (q_lens < 0).any() or (q_lens > seq_lens).any():
            raise ValueError(f"[attend] cu_q_lens {cu_q_lens.tolist()} do not fit contexts {seq_lens.tolist()}")
        tables = np.asarray(plan.block_tables)[: len(seq_lens)]
        tables = self._used_tables(tables, np.where(q_lens > 0, seq_lens, 0))
        return MetalPlan(tables, seq_lens, cu_q_lens, np.asarray(plan.slot_mapping), tables=_on_device(tables))

    def _launch(
        self,
        layer: int,
        q: mx.array,
        plan: MetalPlan,
        options: AttentionOptions,
        scale: float | None,
        scores: str | None = None,
    ) -> list[mx.array]:
        """The result, and the scores where they are asked for."""
        if not len(q) or not plan.cu_q_lens[-1]:
            shape = (len(plan.seq_lens), self.spec.num_kv_heads, int(plan.seq_lens.max(initial=0)))
            out = mx.zeros((*q.shape[:2], self.spec.value_head_dim), q.dtype)
            return [out] if scores is None else [out, mx.zeros(shape)]
        scale = self.spec.head_dim**-0.5 if scale is None else float(scale)
        work = self._work(plan, q, scale, options, scores)

        def kernel(k_pool: Plane, v_pool: Plane) -> list[mx.array]:
            results = []
            if work.step is not None:
                tokens, step = q if work.tokens is None else q[work.tokens], with_arrays(work.step, options)
                results += self._kernels.attend(layer, tokens, k_pool, v_pool, step, scores)
            for row, _, _ in work.chunks:
                results += self._contexts(layer, (k_pool, v_pool), plan, slice(row, row + 1))
            return results

        results = self._on_pool(layer, kernel)
        of_step = 0 if work.step is None else 1 if scores is None else 2
        outs, exported, contexts = results[:of_step][:1], results[:of_step][1:], results[of_step:]
        sinks = None if options.sinks is None else mx.array(options.sinks).astype(q.dtype)
        for (_, first, last), k, v in zip(work.chunks, contexts[::2], contexts[1::2], strict=True):
            queries = q[first:last].swapaxes(0, 1)[None]
            k, v = k.astype(q.dtype), v.astype(q.dtype)
            out = mx.fast.scaled_dot_product_attention(queries, k, v, scale=scale, mask="causal", sinks=sinks)
            outs.append(out[0].swapaxes(0, 1))
        out = outs[0] if work.order is None else mx.concatenate(outs)[work.order]
        if scores is None:
            return [out]
        return [out, self._scores(q, plan, work, exported, contexts[::2], scale, options, scores)]

    def _scores(
        self,
        q: mx.array,
        plan: MetalPlan,
        work: Work,
        exported: list[mx.array],
        keys: list[mx.array],
        scale: float,
        options: AttentionOptions,
        kind: str,
    ) -> mx.array:
        """``[B, Hk, C]``: what the kernel exported, and of long chunks what MLX computes from their gathered keys."""
        heads, longest = self.spec.num_kv_heads, int(plan.seq_lens.max())
        if not exported:
            result = mx.zeros((len(plan.seq_lens), heads, longest))
        elif kind == "raw":
            (result,) = exported
        else:
            result = mass_of_scores(exported[0][:, :, None], heads, options.sinks)
        for (row, _, last), k in zip(work.chunks, keys, strict=True):
            newest = q[last - 1 : last, :, None]
            position = plan.seq_lens[row : row + 1, None] - 1
            result[row, :, : k.shape[2]] = exported_scores(newest, k, scale, position, options, None, kind)[0]
        return result

    def _work(
        self, plan: MetalPlan, q: mx.array, scale: float, options: AttentionOptions, scores: str | None
    ) -> Work:
        """How `q` is attended, made once for all layers that ask for the same."""
        has_long = not set(options.features) - {"sinks"}
        key = (*q.shape[:2], scale, options.window, options.soft_cap, has_long, scores is None)
        if key in plan.work:
            return plan.work[key]
        q_lens, num_tokens = np.diff(plan.cu_q_lens), len(q)
        rows = np.flatnonzero(q_lens > (LONG_CHUNK if has_long else q_lens.max()))
        chunks = tuple((int(row), int(plan.cu_q_lens[row]), int(plan.cu_q_lens[row + 1])) for row in rows)
        tokens = np.arange(num_tokens)
        for _, first, last in chunks:
            tokens[first:last] = -1
        tokens, q_lens = tokens[tokens >= 0], np.where(np.isin(np.arange(len(q_lens)), rows), 0, q_lens)
        step = None
        if len(tokens):
            step = self._attention_step(plan, q_lens, len(tokens), q.shape[1], scale, options, scores is not None)
        if not chunks:
            plan.work[key] = Work(step, None, (), None)
        else:
            order = np.concatenate([tokens, *(np.arange(first, last) for _, first, last in chunks)])
            plan.work[key] = Work(step, _int32(tokens), chunks, _int32(np.argsort(order)))
        return plan.work[key]

    def _attention_step(
        self,
        plan: MetalPlan,
        q_lens: np.ndarray,
        num_tokens: int,
        num_heads: int,
        scale: float,
        options: AttentionOptions,
        with_scores: bool,
    ) -> AttentionStep:
        spec = self.spec
        tiles = head_tiles(
            num_heads // spec.num_kv_heads, max(dim for _, dim in spec.planes), int(q_lens.max(initial=1))
        )
        work = plan_attention(
            plan.seq_lens,
            np.concatenate([[0], np.cumsum(q_lens)]),
            num_tokens,
            block_size=spec.block_size,
            tiles=tiles,
            window=options.window,
            part_tokens=self.part_tokens,
        )
        padding = max(0, -(-CONSTANT_SIZE_MAX // work.parts.shape[1]) - len(work.parts))
        work = work._replace(parts=np.pad(work.parts, ((0, padding), (0, 0)), constant_values=1))
        step = attention_step(
            work, plan.tables, scale, AttentionOptions(window=options.window, soft_cap=options.soft_cap)
        )
        if not with_scores:
            return step
        return step._replace(export=score_export(work, plan.seq_lens, options.window, CONSTANT_SIZE_MAX))

    def _contexts(
        self,
        layer: int,
        pools: Sequence[Plane],
        plan: MetalPlan,
        rows: slice = slice(None),
    ) -> list[mx.array]:
        """K and V of some rows as ``[B, Hk, C, D]``, C being the longest of them."""
        seq_lens = plan.seq_lens[rows]
        tables, lens = plan.tables[rows], _int32(seq_lens)
        return [
            self._kernels.gather(layer, plane, pool, tables, lens, int(seq_lens.max(initial=0)))
            for (plane, _), pool in zip(self.spec.planes, pools, strict=True)
        ]

    def _variants(self, shape: BatchShape) -> Iterator[tuple[int, int]]:
        """(queries, context) of rows that between them launch every kernel of a shape."""
        capacity = shape.table_width * self.spec.block_size
        longest = min(capacity, shape.num_tokens - shape.num_rows + 1)
        num_queries = 1
        tried = set()
        while True:
            tiles = head_tiles(
                shape.num_q_heads // self.spec.num_kv_heads, max(dim for _, dim in self.spec.planes), num_queries
            )
            if num_queries > longest or tiles in tried:
                break
            tried.add(tiles)
            yield num_queries, num_queries
            if capacity > self.part_tokens:
                yield num_queries, self.part_tokens + num_queries
            num_queries *= 2
        if longest > LONG_CHUNK:
            yield LONG_CHUNK + 1, LONG_CHUNK + 1

    def _warm_attend(
        self, num_q_heads: int, num_queries: int, context: int, options: AttentionOptions | None, scores: str | None
    ) -> None:
        spec = self.spec
        plan = ArrayPlan(
            np.zeros((1, -(-context // spec.block_size)), np.int32),
            np.array([context]),
            np.array([0, num_queries]),
        )
        if options is not None and options.mask is not None:
            mask = np.zeros((num_queries, *options.mask.shape[1:-1], context), np.float32)
            options = AttentionOptions(options.window, options.soft_cap, options.sinks, options.alibi_slopes, mask)
        q = mx.zeros((num_queries, num_q_heads, spec.head_dim), self.dtype)
        mx.eval(self.attend(0, q, plan, options=options, scores=scores))


class MetalBackend(MetalAttention, PlainBackend):  # type: ignore[misc]  # a step is another class on each route
    """`MLXBackend` with Metal kernels that read, and writes as on the plain route, with what it says about copies."""

    @staticmethod
    def capabilities() -> Capabilities:
        """What this backend accepts."""
        return metal_capabilities(("NHD",), QUANT_BITS)

    def _allocate(self) -> None:
        super()._allocate()
        self._pool.pack = self._kernels.packed

    def _on_pool(self, layer: int, kernel: Callable[..., list[mx.array]]) -> list[mx.array]:
        return kernel(*self._pool.sides(layer))


def metal_capabilities(layouts: tuple[str, ...], quant_bits: tuple[int, ...] = ()) -> Capabilities:
    """What the kernels serve, beside what stores in these layouts and bits."""
    return Capabilities(
        name="mlx",
        layouts=layouts,
        dtypes=tuple(DTYPES),
        head_dims=HEAD_DIMS,
        block_sizes=BLOCK_SIZES,
        return_attn=False,
        features=FEATURES,
        compacts=True,
        quant_bits=quant_bits,
        quant_group_sizes=QUANT_GROUP_SIZES if quant_bits else (),
        scores=SCORES,
        batch_invariant=True,
    )


def _on_device(tables: np.ndarray) -> mx.array:
    """Block tables with columns enough, and rows that begin where MLX expects them."""
    return _int32(np.pad(tables, ((0, 0), (0, max(0, CONSTANT_SIZE_MAX - tables.shape[1])))))


def _int32(x: np.ndarray) -> mx.array:
    return mx.array(np.ascontiguousarray(x, np.int32))
