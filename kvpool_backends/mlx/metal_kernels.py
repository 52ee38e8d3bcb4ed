"""The Metal kernels of `kvpool_backends.metal`, built and launched through ``mx.fast.metal_kernel``.

Once per step, `plan_attention` makes a work list of the lengths of a batch, and `attention_step` uploads it.
`MetalKernels` launches attention with it, layer by layer, and gathers. `in_place_source` returns the source of the
kernels that store into a pool, for a caller that can bind a pool for writing. ``metal_kernel`` cannot.

Nothing here needs a Metal device: any factory with the interface of ``metal_kernel`` works.
"""

from __future__ import annotations

import hashlib
import json
import logging
import math
import os
from collections.abc import Callable, Sequence
from functools import cache, lru_cache, partial
from importlib.resources import files
from pathlib import Path
from typing import Any, NamedTuple, cast

import mlx.core as mx
import numpy as np

from kvpool.protocol import AttentionOptions
from kvpool.spec import KVSpec
from kvpool_backends.mlx.base import DTYPES

_log = logging.getLogger(__name__)

CHOICES = {  # of the constants below, what the sweep of `benchmarks.metal` tries
    "SIMDGROUPS": (2, 4),
    "ROW_DIMS_MAX": (512, 1024),
    "PART_TOKENS": (32, 64, 128, 256, 512, 1024),
    "PARTS_MAX": (32, 40, 64, 96, 128, 256),
}


def tuned(name: str, default: int) -> int:
    """The constant `name` in the file of ``KVPOOL_METAL_SETTINGS``, if there is one, else `default`."""
    path = os.environ.get("KVPOOL_METAL_SETTINGS")
    if not path:
        return default
    try:
        found = json.loads(Path(path).read_text()).get(name, default)
    except (OSError, ValueError, AttributeError) as error:
        _log.warning("[metal] %s cannot be read (%s), %s is %d", path, error, name, default)
        return default
    if found != default and found not in CHOICES[name]:
        _log.warning("[metal] %s in %s is %r, the choices are %s; it is %d", name, path, found, CHOICES[name], default)
        return default
    return int(found)


def default_parts() -> int:
    """Parts of a long context: as many as give each core of this GPU enough to do."""
    if mx.cuda.is_available():
        return 96
    has_many_cores = mx.metal.is_available() and "Ultra" in str(mx.device_info()["device_name"])
    return 96 if has_many_cores else 40  # other GPUs of Apple's have up to 40 cores, an Ultra 48 to 80


# What is right here only a Mac can tell; results depend on these numbers in their last bits only.
SIMDGROUPS = tuned("SIMDGROUPS", 4)  # of a threadgroup of `paged_attention` and `paged_reduce`: 128 threads
# Pairs of query and head in `paged_attention`, times 128 or 256 dimensions; half unless planes have 16 bits.
ROW_DIMS_MAX = tuned("ROW_DIMS_MAX", 512)
PART_TOKENS = tuned("PART_TOKENS", 64)  # of a context, per threadgroup
# Of one context of a model with 8 KV heads; beyond, parts double in length.
PARTS_MAX = tuned("PARTS_MAX", default_parts())
STEP_TOKENS = 8  # parts and runs begin at multiples of it: a step of loads stays in a block
HEAD_DIM_MAX = 512
LATENT_DIM_MAX = 640  # with rotary parts
THREADGROUP_NBYTES_MAX = 32 << 10  # of threadgroup memory, on every GPU of Apple's
LANES = 32

# As MLX's prelude spells them; words are what is copied of packed planes.
TYPE_NAMES = {"float32": "float", "float16": "float16_t", "bfloat16": "bfloat16_t", "uint32": "uint"}
NO_WINDOW = 2**31 - 1

Kernel = Callable[..., list[mx.array]]
Factory = Callable[..., Kernel]
Plane = mx.array | Sequence[mx.array]  # base arrays: one, or words, scales and biases of a packed plane


class HeadTiles(NamedTuple):
    """Division of the query heads of one KV head and the queries of a row among threadgroups."""

    heads: int  # of a group, in one threadgroup
    groups: int  # threadgroups for all heads of the group
    queries: int  # in one threadgroup
    units: int = 0  # `paged_matrix`: 16 dimensions each of a simdgroup; 0 for `paged_attention`

    @property
    def rows(self) -> int:
        """(query, head) pairs of a threadgroup."""
        return self.heads * self.queries

    @property
    def kernel(self) -> str:
        """The kernel that takes such rows."""
        return "paged_matrix" if self.units else "paged_attention"

    def simdgroups(self, spec: KVSpec) -> int:
        """Simdgroups of a threadgroup."""
        if not self.units:
            return SIMDGROUPS
        parts = [-(-dim // (16 * self.units)) for _, dim in spec.planes]
        return sum(parts) if spec.latent else max(parts)


class AttentionWork(NamedTuple):
    """The work list that `plan_attention` makes of a batch."""

    tiles: HeadTiles
    items: np.ndarray  # int32 [N, 8], see paged_attention.metal
    parts: np.ndarray  # int32 [T, 3]: row of a token inside its items, first item, number of items

    @property
    def direct(self) -> bool:
        """Whether every query has one part, so that nothing is left to reduce."""
        return bool((self.parts[:, 2] == 1).all())


class AttentionStep(NamedTuple):
    """All that the layers of a step share, on the device; made by `attention_step`."""

    tiles: HeadTiles
    direct: bool
    items: mx.array
    parts: mx.array
    tables: mx.array  # int32 [B, W]
    numbers: mx.array  # float32 [2]: scale, soft cap
    window: int
    features: tuple[str, ...]  # of the options
    export: ScoreExport | None = None  # for steps whose scores are asked for


class Launch(NamedTuple):
    """One launch of attention in a step: what its layers share, see `MetalKernels.bind`."""

    attend: Kernel
    reduce: Kernel | None  # None: nothing is left to reduce
    inputs: tuple[Any, ...]  # tables to window
    parts: mx.array
    more_inputs: list[Any]  # of scores
    group: int  # query heads per KV head, if the kernel leaves raw scores of each; else 0
    noted: list[Any]  # by the extension, for other layers: nothing or one

    def __call__(
        self,
        layout: mx.array,
        q: mx.array,
        k_pool: Sequence[mx.array],
        v_pool: Sequence[mx.array],
        heads: tuple[mx.array, ...],
    ) -> list[mx.array]:
        """Attention of one layer, see `MetalKernels.attend`. `heads`: slopes, sinks and mask."""
        (keys, *k_factors), (values, *v_factors) = k_pool, v_pool
        factors = (*k_factors, *v_factors, *self.more_inputs)
        out = self.attend(inputs=[q, keys, values, layout, *self.inputs, *heads, *factors])
        if self.group:
            rows, all_heads, columns = out[1].shape
            out[1] = (out[1] / self.group).reshape(rows, all_heads // self.group, -1, columns).sum(axis=2)
        if self.reduce is not None:
            out[:1] = self.reduce(inputs=[out[0], self.parts, heads[1]])
        return out


class ScoreExport(NamedTuple):
    """Arrays to export the scores of a step."""

    observed: mx.array  # int32 [N or more]: see paged_attention.metal
    num_rows: int  # B
    columns: int  # C
    covered: bool  # by the kernel, all of [B, C]


def head_tiles(spec: KVSpec, group: int, queries: int) -> HeadTiles:
    """Rows of a threadgroup for `group` query heads per KV head and rows of a batch with `queries` queries.

    Registers decide, and threadgroup memory. `paged_matrix` takes what `paged_attention` cannot; its simdgroups share
    the dimensions out.
    """
    dim, narrow = max(dim for _, dim in spec.planes), spec.itemsize_nbytes == 2
    together = 1 << (queries - 1).bit_length()
    room = ROW_DIMS_MAX if narrow and not spec.is_quantized else ROW_DIMS_MAX // 2
    if dim <= 256 and not spec.latent and group * together <= room // 128 // -(-dim // 128):
        return HeadTiles(group, 1, together)
    many = spec.latent or group * together > 8  # rows
    units = 4 if spec.is_quantized or (narrow and dim > 128 and many) else 1 if dim <= 80 else 2
    rows = min(32, 64 // units) if narrow else 32 // max(units, 2) if dim <= 256 else 8
    if spec.latent:
        simdgroups = HeadTiles(1, 1, 1, units).simdgroups(spec)
        while rows > 8 and rows * (144 * (simdgroups + 1) + 12) > THREADGROUP_NBYTES_MAX:
            rows //= 2
    groups = -(-group // rows)
    heads = -(-group // groups)
    return HeadTiles(heads, groups, min(together, 1 << (rows // heads).bit_length() - 1), units)


def latent_refusal(spec: KVSpec) -> str | None:
    """The reason why the kernels do not have latents of this kind. None if they do, and for other specs."""
    if spec.latent and spec.query_dim > LATENT_DIM_MAX:
        return f"latents and rotary parts have {spec.query_dim} elements, at most {LATENT_DIM_MAX}"
    if spec.latent and spec.k_bits != spec.v_bits:
        return f"bits of latents are {spec.bits}, they must be the same"
    return None


def plan_attention(
    seq_lens: np.ndarray,
    cu_q_lens: np.ndarray,
    num_tokens: int,
    *,
    tiles: HeadTiles,
    window: int | None = None,
    part_tokens: int = PART_TOKENS,
    parts_max: int = PARTS_MAX,
) -> AttentionWork:
    """Work list of a batch: one item per tile of queries and part of the context.

    Where a context is cut depends on the length and the number of queries of its own row, on nothing else. More
    queries have more threadgroups, and longer parts: sums of parts stay few beside K and V. Tokens from
    ``cu_q_lens[B]`` to `num_tokens` are padding, their result is 0. `parts_of` has the least length of a part, a
    multiple of `STEP_TOKENS`, and the most parts of a context for a model.
    """
    contexts, starts = np.asarray(seq_lens, np.int64), np.asarray(cu_q_lens, np.int64)
    q_lens = np.diff(starts)

    # Tiles of queries, and which tokens their queries see.
    tiles_of_row = -(-q_lens // tiles.queries)
    row = np.repeat(np.arange(len(q_lens)), tiles_of_row)
    first = _ranges(tiles_of_row) * tiles.queries
    count = np.minimum(tiles.queries, q_lens[row] - first)
    position = contexts[row] - q_lens[row] + first
    end = position + count
    begin = np.zeros_like(end) if window is None else np.maximum(0, position - window + 1)

    # Parts of their contexts, and runs of tokens inside a part, one per simdgroup.
    least = part_length(q_lens, tiles.heads * tiles.groups, part_tokens)
    doublings = np.ceil(np.log2(np.maximum(1, contexts / (least * parts_max)))).astype(np.int64)
    size = (least << doublings)[row]
    run = -(-np.minimum(size, contexts[row]) // (SIMDGROUPS * STEP_TOKENS)) * STEP_TOKENS
    first_part = begin // size
    parts_of_tile = (end - 1) // size - first_part + 1
    tile = np.repeat(np.arange(len(row)), parts_of_tile)
    part = (first_part[tile] + _ranges(parts_of_tile)) * size[tile]

    row_of, seen = row[tile], (np.maximum(begin[tile], part), np.minimum(end[tile], part + size[tile]))
    items = (row_of, starts[row_of] + first[tile], count[tile], position[tile], part, run[tile], *seen)
    first_item = np.cumsum(parts_of_tile) - parts_of_tile
    parts = (_ranges(count), np.repeat(first_item, count), np.repeat(parts_of_tile, count))

    # Padding tokens are items of one query that sees nothing.
    padding = np.arange(starts[-1], num_tokens)
    idle = np.zeros_like(padding)
    idle_items = (idle, padding, idle + 1, *[idle] * 5)
    idle_parts = (idle, len(tile) + np.arange(len(padding)), idle + 1)
    return AttentionWork(tiles, _columns(items, idle_items), _columns(parts, idle_parts))


def parts_of(spec: KVSpec, tiles: HeadTiles, part_tokens: int = PART_TOKENS) -> dict[str, int]:
    """Arguments of `plan_attention` for a model: `part_tokens` and `parts_max`.

    The sums of a row of a part are written and read. Parts are so long that these sums stay small, also beside packed
    planes. With fewer KV heads there are more parts, so that all cores have work.
    """
    sums, token = 8 * (spec.result_dim + 4), spec.token_nbytes / spec.num_layers / spec.num_kv_heads  # bytes
    doublings = max(0, math.ceil(math.log2(sums / token / 3.7)))  # it is 2.1 for 16 bits, 3.6 for latents
    parts_max = PARTS_MAX * 8 // (spec.num_kv_heads * tiles.groups)
    return {"part_tokens": part_tokens << doublings, "parts_max": max(PARTS_MAX, min(parts_max, 128))}


def part_length(q_lens: np.ndarray | int, group: int, part_tokens: int) -> Any:
    """Tokens of a part of a short context. More queries have more tiles, so their parts are longer."""
    doublings = np.ceil(np.log2(np.maximum(1, np.asarray(q_lens) * group / 8))).astype(np.int64)
    return part_tokens << np.minimum(doublings, 20)


def _ranges(counts: np.ndarray) -> np.ndarray:
    """``0 .. n - 1`` for each n of `counts`, one after the other."""
    return np.arange(counts.sum()) - np.repeat(np.cumsum(counts) - counts, counts)


def _columns(*tables: Sequence[np.ndarray]) -> np.ndarray:
    """Tables given by their columns, one below the other, as int32."""
    return np.concatenate([np.stack(columns, axis=1) for columns in tables]).astype(np.int32)


def attention_step(
    work: AttentionWork, tables: mx.array, scale: float, options: AttentionOptions | None = None
) -> AttentionStep:
    """Bring a work list and options to the device, once for all layers; `work` was planned with their window."""
    options = options or AttentionOptions()
    return AttentionStep(
        work.tiles,
        work.direct,
        mx.array(work.items),
        mx.array(work.parts),
        tables,
        mx.array([scale, options.soft_cap or 0.0], mx.float32),
        NO_WINDOW if options.window is None else min(options.window, NO_WINDOW),
        options.features,
    )


def arrays_of(options: AttentionOptions | None) -> tuple[mx.array, ...]:
    """Return slopes ``[Hq]``, sinks ``[Hq]`` and mask ``[T, 1 or Hq, C]``, float32 on the device; a 0 for None."""
    if options is None or options.mask is None:
        return per_head(options)
    slopes, sinks, _ = per_head.__wrapped__(options)
    given = options.mask if options.mask.ndim == 3 else options.mask[:, None]
    given = np.where(given, np.float32(0), np.float32(-np.inf)) if given.dtype == np.bool_ else given
    return slopes, sinks, _uploaded(given)


@lru_cache(maxsize=512)  # by identity: a layer that attends with the same object again finds its arrays on the device
def per_head(options: AttentionOptions | None) -> tuple[mx.array, ...]:
    """Return `arrays_of` options without a mask. They are made once, so no layer of a model waits for an upload."""
    slopes, sinks = (None, None) if options is None else (options.alibi_slopes, options.sinks)
    one = mx.array([0.0])
    slopes, sinks = (one if x is None else _uploaded(x) for x in (slopes, sinks))
    return slopes, sinks, mx.array([[[0.0]]])


def _uploaded(x: np.ndarray) -> mx.array:
    return mx.array(np.ascontiguousarray(x))  # MLX takes no negative strides


def score_export(
    work: AttentionWork, seq_lens: np.ndarray, window: int | None, at_least: int = 1
) -> ScoreExport:
    """Which items of a work list hold the newest query of a row: a list of length `at_least` on the device.

    `seq_lens` are those of the whole batch, `window` is what `work` was planned with.
    """
    row, _, count, position, _, _, _, end = work.items.T
    seq_lens = np.asarray(seq_lens, np.int64)
    newest = (end > 0) & (position + count == seq_lens[row]) if len(seq_lens) else np.zeros(len(row), bool)
    longest = int(seq_lens.max(initial=0))
    covered = bool((seq_lens == longest).all()) and len(np.unique(row[newest])) == len(seq_lens)
    observed = np.full(max(len(row), at_least), -1, np.int32)
    observed[: len(row)] = np.where(newest, count - 1, -1)
    return ScoreExport(
        mx.array(observed), len(seq_lens), longest, covered and (window is None or window >= longest)
    )


class MetalKernels:
    """Launches the kernels on the pool of one spec, of any layout, with a shape that `metal_capabilities` takes.

    `factory` is ``mx.fast.metal_kernel`` or what stands in for it. Raises ValueError as `latent_refusal` says.
    """

    widen = False  # matrices of 16 bits to floats, for a compiler that does not multiply both

    def __init__(self, spec: KVSpec, num_blocks: int, factory: Factory | None = None) -> None:
        if refusal := latent_refusal(spec):
            raise ValueError(f"[MetalKernels] {refusal}")
        self.spec = spec
        self.num_blocks = num_blocks
        self._factory = cast(Factory, mx.fast.metal_kernel) if factory is None else factory
        dense = [plane for plane, bits in zip(spec.planes, spec.bits, strict=True) if bits is None]
        self._touching = all(spec.plane_layout(name, num_blocks).slot_stride == dim for name, dim in dense)
        self._layouts: dict[tuple[int, str], mx.array] = {}
        self._launchers: dict[tuple[Any, ...], tuple[Kernel, Kernel]] = {}
        self._built: dict[str, Kernel] = {}

    def attend(
        self,
        layer: int,
        q: mx.array,
        k_pool: Plane,
        v_pool: Plane,
        step: AttentionStep,
        scores: str | None = None,
        options: AttentionOptions | None = None,
    ) -> list[mx.array]:
        """Attention of ``q [T, Hq, D]`` over contexts in the pool, with the options of the step. No checks.

        Returns ``[T, Hq, Dv]`` in the dtype of q. With `scores`, for a step that has an `export`, float32 beside it:
        for "raw" the means ``[B, Hk, C]``, for "mass" what goes into exp, ``[B, Hq, C]``.
        """
        launch = self.bind(q.dtype, q.shape[0], q.shape[1], step, scores)
        pools = _arrays(k_pool), _arrays(v_pool)
        return launch(self.layout(layer), q, *pools, arrays_of(options))

    def bind(
        self, dtype: mx.Dtype, num_tokens: int, num_q_heads: int, step: AttentionStep, scores: str | None = None
    ) -> Launch:
        """Return the launch that `attend` makes for each layer, for queries ``[num_tokens, num_q_heads, D]``."""
        spec, tiles = self.spec, step.tiles
        chosen = dtype, num_q_heads, tiles, step.direct, step.features, scores
        if chosen not in self._launchers:
            self._launchers[chosen] = self._launcher(dtype, num_q_heads, step, scores)
        attend, reduce = self._launchers[chosen]
        width = tiles.simdgroups(spec) * LANES
        num_items, num_groups = step.items.shape[0], spec.num_kv_heads * tiles.groups
        result = (num_tokens, num_q_heads, spec.result_dim)
        partials = (num_items, num_groups, tiles.rows, spec.result_dim + 4)
        more_inputs, more_shapes, more = self._score_arguments(step, num_q_heads, scores)
        attend = partial(
            attend,
            output_shapes=[result if step.direct else partials, *more_shapes],
            output_dtypes=[dtype if step.direct else mx.float32, *[mx.float32] * len(more_shapes)],
            grid=(num_groups * width, num_items, 1),
            threadgroup=(width, 1, 1),
            **more,
        )
        summed = None if step.direct else partial(
            reduce,
            output_shapes=[result],
            output_dtypes=[dtype],
            grid=(SIMDGROUPS * LANES, num_q_heads, num_tokens),
            threadgroup=(SIMDGROUPS * LANES, 1, 1),
        )  # fmt: skip
        group = num_q_heads // spec.num_kv_heads if scores == "raw" and tiles.units else 0
        inputs = step.tables, step.items, step.numbers, step.window
        return Launch(attend, summed, inputs, step.parts, more_inputs, group, [])

    def _score_arguments(
        self, step: AttentionStep, num_q_heads: int, scores: str | None
    ) -> tuple[list[Any], list[tuple[int, ...]], dict[str, float]]:
        """Inputs, shapes of outputs and other arguments of a launch that exports scores; nothing for None."""
        if scores is None:
            return [], [], {}
        assert step.export is not None
        observed, num_rows, columns, covered = step.export
        heads = self.spec.num_kv_heads if scores == "raw" and not step.tiles.units else num_q_heads
        hidden = 0.0 if scores == "raw" else -np.inf
        return [observed, columns], [(num_rows, heads, columns)], {} if covered else {"init_value": hidden}

    def gather(
        self, layer: int, plane: str, pool: Plane, tables: mx.array, seq_lens: mx.array, longest: int
    ) -> mx.array:
        """Contexts of plane "k" or "v" as ``[B, Hk, longest, D]``, 0 past the end of a row. Nothing is checked."""
        spec = self.spec
        dim, bits = dict(spec.planes)[plane], spec.k_bits if plane == "k" else spec.v_bits
        shape = tables.shape[0], spec.num_kv_heads, longest, dim
        if not longest:  # a GPU has no grid of 0
            return mx.zeros(shape, DTYPES[spec.dtype])
        template = {"T": DTYPES[spec.dtype], "DIM": dim, "BLOCK_SIZE": spec.block_size}
        if bits is not None:
            template |= {"BITS": bits, "SIZE": spec.quant_group_size}
        (out,) = self._kernel("gather_blocks" if bits is None else "gather_packed")(
            inputs=[*_arrays(pool), self.layout(layer, plane), tables, seq_lens],
            template=list(template.items()),
            output_shapes=[shape],
            output_dtypes=[DTYPES[spec.dtype]],
            grid=(dim // 4, tables.shape[0] * longest, spec.num_kv_heads),
            threadgroup=(dim // 4, min(tables.shape[0] * longest, 1024 // dim), 1),
        )
        return out

    def packed(self, plane: str, x: mx.array) -> list[mx.array]:
        """Tokens ``[T, Hk, D]`` of a packed plane as words, scales and biases ``[T, Hk, n]``. Nothing is checked."""
        spec, (num_tokens, num_heads, dim) = self.spec, x.shape
        size, bits = spec.quant_group_size, spec.k_bits if plane == "k" else spec.v_bits
        assert bits is not None
        factors = (num_tokens, num_heads, dim // size)
        return self._kernel("packed_tokens")(
            inputs=[x],
            template=[("T", DTYPES[spec.dtype]), ("DIM", dim), ("BITS", bits), ("SIZE", size)],
            output_shapes=[(num_tokens, num_heads, dim * bits // 32), factors, factors],
            output_dtypes=[mx.uint32, DTYPES[spec.dtype], DTYPES[spec.dtype]],
            grid=(dim // 4, num_heads, num_tokens),
            threadgroup=(dim // 4, min(num_heads, 1024 // dim), 1),
        )

    def _launcher(
        self, dtype: mx.Dtype, num_q_heads: int, step: AttentionStep, scores: str | None
    ) -> tuple[Kernel, Kernel]:
        """The kernels for queries of a dtype in steps of one kind, with their template arguments."""
        spec, tiles = self.spec, step.tiles
        shared: dict[str, Any] = {
            "Q": dtype,
            "VALUE_DIM": spec.result_dim,
            "GROUP": num_q_heads // spec.num_kv_heads,
            "HEADS": tiles.heads,
            "QUERIES": tiles.queries,
            "SINKS": "sinks" in step.features,
        }
        own: dict[str, Any] = {
            "T": DTYPES[spec.dtype],
            "DIM": spec.head_dim,
            "BLOCK_SIZE": spec.block_size,
            "SIMDGROUPS": tiles.simdgroups(spec),
            **(
                {"UNITS": tiles.units, "ROTARY": spec.value_head_dim if spec.latent else 0, "WIDEN": self.widen}
                if tiles.units
                else {"TOUCHING": self._touching}
            ),
            "SOFT_CAP": "soft_cap" in step.features,
            "ALIBI": "alibi_slopes" in step.features,
            "MASK": "mask" in step.features,
            "DIRECT": step.direct,
            "K_BITS": spec.k_bits or 0,
            "V_BITS": spec.v_bits or 0,
            "SIZE": spec.quant_group_size,
            "RAW": scores == "raw",
            "MASS": scores == "mass",
        }
        return (
            partial(self._kernel(attention_name(spec, scores, tiles.kernel)), template=list((shared | own).items())),
            partial(self._kernel("paged_reduce"), template=[*shared.items(), ("SIMDGROUPS", SIMDGROUPS)]),
        )

    def layout(self, layer: int, plane: str = "") -> mx.array:
        """The argument `layout` of a kernel: of both planes, or of one."""
        key = layer, plane
        if key not in self._layouts:
            numbers = plane_strides(self.spec, self.num_blocks, layer).reshape(-1, 2, 4)
            self._layouts[key] = mx.array(numbers[:, "kv".index(plane)] if plane else numbers).flatten()
        return self._layouts[key]

    def _kernel(self, name: str) -> Kernel:
        if name not in self._built:
            header, source = header_text(name), body_text(name)
            self._built[name] = self._factory(
                name=f"kvpool_{name}_{content_hash(header, source)}",
                input_names=list(INPUTS[name]),
                output_names=list(OUTPUTS.get(name, ("out", "exported") if "columns" in INPUTS[name] else ("out",))),
                source=source,
                header=header,
                ensure_row_contiguous=False,  # strides are read: a copy of the pool is never made
            )
        return self._built[name]


_ATTENTION_INPUTS = (
    *("q", "k_pool", "v_pool", "layout", "tables", "work"),
    *("numbers", "window", "slopes", "sinks", "mask"),
)
INPUTS = {
    f"{kernel}{packed and '_packed_'}{packed}{scores}": (
        *_ATTENTION_INPUTS,
        *(f"{plane}_{factors}" for plane in packed for factors in ("scales", "biases")),
        *(("observed", "columns") if scores else ()),
    )
    for kernel in ("paged_attention", "paged_matrix")
    for packed in ("", "k", "v", "kv")
    for scores in ("", "_raw", "_mass")
} | {
    "paged_reduce": ("partials", "parts", "sinks"),
    "gather_blocks": ("pool", "layout", "tables", "seq_lens"),
    "gather_packed": ("words", "scales", "biases", "layout", "tables", "seq_lens"),
    "packed_tokens": ("x",),
}
OUTPUTS = {"packed_tokens": ("words", "scales", "biases")}


def attention_name(spec: KVSpec, scores: str | None = None, kernel: str = "paged_attention") -> str:
    """The variant of a kernel, of `INPUTS`, that attends over a pool of `spec` and exports `scores`."""
    packed = "".join(plane for plane, bits in zip("kv", spec.bits, strict=True) if bits is not None)
    return f"{kernel}{packed and '_packed_'}{packed}{'' if scores is None else f'_{scores}'}"


def _arrays(plane: Plane) -> Sequence[mx.array]:
    return (plane,) if isinstance(plane, mx.array) else plane


def plane_strides(spec: KVSpec, num_blocks: int, layer: int) -> np.ndarray:
    """Offset, block, slot and head stride of K, then of V, in elements of their base arrays; int64 ``[8]``.

    Of a quantized pool ``[16]``: then those of the scales of K and of V, which are those of their biases too.
    """
    numbers = []
    stored = [plane.name for plane in spec.stored_planes]
    for plane in ("k", "v", "k_scales", "v_scales")[: 4 if spec.is_quantized else 2]:
        if plane not in stored:
            numbers += [0] * 4
            continue
        layout = spec.plane_layout(plane, num_blocks)
        offset = layout.offset + layer * layout.layer_stride
        numbers += [offset, layout.block_stride, layout.slot_stride, layout.head_stride]
    return np.array(numbers, np.int64)


def in_place_source(name: str, types: tuple[str, ...], numbers: tuple[int, ...]) -> tuple[str, str]:
    """Name and text of a whole kernel ("kv_write", "kv_write_packed", "copy_blocks"), to compile after MLX's prelude.

    `types` (keys of `TYPE_NAMES`) and `numbers` are its template arguments, in the order of its text. The name has a
    hash of the text: a new text never runs under an old name.
    """
    text = header_text(name) + source_text(name)
    arguments = ", ".join([*(TYPE_NAMES[t] for t in types), *map(str, numbers)])
    function = "_".join(["kvpool", name, *types, *map(str, numbers), content_hash(text)])
    instance = f"{name}<{arguments}>"
    return function, f'{text}\ntemplate [[host_name("{function}")]] [[kernel]] decltype({instance}) {instance};\n'


@cache
def source_text(name: str) -> str:
    """A file of `kvpool_backends.metal`, or a kernel of ``moves.metal``, without comments, indentation, blank lines.

    MLX looks for the names of built-in values all over the text and copies it at every launch.
    """
    text = _file_text(name if "." in name else "moves.metal")
    if "." not in name:
        text = text.split(f"// ---- {name}\n")[1].split("// ----")[0]
    lines = (line.split("//")[0].strip() for line in text.splitlines())
    return "".join(f"{line}\n" for line in lines if line)


def header_text(name: str) -> str:
    """The text in front of a kernel."""
    headers = ["kv_layout.h"]
    if name.startswith("paged_matrix"):
        headers.append("kv_matrix.h")
    if "packed" in name:
        headers.append("kv_packed.h")
    if name.startswith(("paged_attention", "paged_matrix")):
        headers.append("paged_attention.h")
    return "".join(map(source_text, headers))


def body_text(name: str) -> str:
    """The body of a kernel of `INPUTS`: variants share one, which their inputs and template tell apart."""
    return source_text(f"{'_'.join(name.split('_')[:2])}.metal" if name.startswith("paged") else name)


def _file_text(name: str) -> str:
    try:
        folder = files("kvpool_backends.metal")
    except ModuleNotFoundError:  # a checkout that is not installed
        folder = Path(__file__).parents[2] / "metal"
    return folder.joinpath(name).read_text()


def content_hash(*texts: str) -> str:
    """Ten hexadecimal digits: kernels of the same name and another text are other kernels to MLX."""
    return hashlib.sha256("\0".join(texts).encode()).hexdigest()[:10]
