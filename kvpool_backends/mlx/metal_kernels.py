"""The Metal kernels of `kvpool_backends.metal`, built and launched through ``mx.fast.metal_kernel``.

`plan_attention` turns the lengths of a batch into a work list, once per step; `MetalKernels` launches attention and
gathers with it, layer by layer; `in_place_source` writes out the kernels that store into a pool, for a caller that can
bind a pool for writing (``metal_kernel`` cannot).

Nothing here needs a Metal device: any factory with the interface of ``metal_kernel`` will do.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from functools import cache
from importlib.resources import files
from pathlib import Path
from typing import NamedTuple, cast

import mlx.core as mx
import numpy as np

from kvpool.config import KVSpec
from kvpool.protocol import AttentionOptions

# What a device may make of these numbers only a device can tell; results depend on them in their last bits only.
SIMDGROUPS = 8  # of an attention threadgroup: 256 threads
ROWS_MAX = 16  # (query, head) pairs that share one read of K and V
PART_TOKENS = 512  # a context of up to this length stays in one part
PARTS_MAX = 64  # of one context; beyond, parts double in length
WINDOW_MAX = 8  # rows with more queries than this have threadgroups enough without parts
LANES = 32

DTYPES = {"float32": mx.float32, "float16": mx.float16, "bfloat16": mx.bfloat16}
TYPE_NAMES = {"float32": "float", "float16": "float16_t", "bfloat16": "bfloat16_t"}  # as MLX's prelude spells them
NO_WINDOW = 2**31 - 1

Kernel = Callable[..., list[mx.array]]
Factory = Callable[..., Kernel]


class HeadTiles(NamedTuple):
    """How the query heads of one KV head and the queries of a row share threadgroups."""

    heads: int  # of a group, in one threadgroup
    groups: int  # threadgroups for all heads of the group
    queries: int  # in one threadgroup

    @property
    def rows(self) -> int:
        """(query, head) pairs of a threadgroup."""
        return self.heads * self.queries


class AttentionWork(NamedTuple):
    """What `plan_attention` makes of a batch: the same for all layers of a step."""

    tiles: HeadTiles
    items: np.ndarray  # int32 [N, 8], see paged_attention.metal
    parts: np.ndarray  # int32 [T, 3]: row of a token inside its items, first item, number of items

    @property
    def direct(self) -> bool:
        """Whether every query has one part, so that nothing is left to reduce."""
        return bool((self.parts[:, 2] == 1).all())


def head_tiles(group: int, head_dim: int, longest: int) -> HeadTiles:
    """Rows of a threadgroup for `group` query heads per KV head and at most `longest` queries per row of a batch."""
    groups = -(-group // ROWS_MAX)
    heads = -(-group // groups)
    # Wide heads take twice the registers: more queries are not worth it, more heads of one group are.
    room = (ROWS_MAX if head_dim <= 128 else ROWS_MAX // 2) // heads
    queries = 1
    while queries < longest and 2 * queries <= room:
        queries *= 2
    return HeadTiles(heads, groups, queries)


def plan_attention(
    seq_lens: np.ndarray,
    cu_q_lens: np.ndarray,
    num_tokens: int,
    *,
    block_size: int,
    tiles: HeadTiles,
    window: int | None = None,
    part_tokens: int = PART_TOKENS,
) -> AttentionWork:
    """Work list of a batch: one item per tile of queries and part of the context.

    Where a context is cut depends on the length and the number of queries of its own row, on nothing else.

    Parameters
    ----------
    seq_lens : int ``[B]``
    cu_q_lens : int ``[B + 1]``
    num_tokens : int
        T; tokens from ``cu_q_lens[B]`` on are padding, their result is 0.
    block_size : int
    tiles : HeadTiles
    window : int, optional
    part_tokens : int
        Length of a part as long as there are at most `PARTS_MAX`; a multiple of `block_size`.

    Returns
    -------
    AttentionWork
    """
    contexts = np.asarray(seq_lens, np.int64)
    starts = np.asarray(cu_q_lens, np.int64)
    q_lens = np.diff(starts)

    # Tiles of queries; padding tokens are tiles that see nothing.
    tiles_of_row = -(-q_lens // tiles.queries)
    row = np.repeat(np.arange(len(q_lens)), tiles_of_row)
    first = _ranges(tiles_of_row) * tiles.queries
    count = np.minimum(tiles.queries, q_lens[row] - first)
    position = contexts[row] - q_lens[row] + first
    end = position + count
    begin = np.zeros_like(end) if window is None else np.maximum(0, position - window + 1)

    # Parts of their contexts, and runs of tokens inside a part, one per simdgroup.
    doublings = np.ceil(np.log2(np.maximum(1, contexts / (part_tokens * PARTS_MAX)))).astype(np.int64)
    size = np.where(q_lens <= WINDOW_MAX, part_tokens << doublings, NO_WINDOW)[row]
    run = -(-np.minimum(size, contexts[row]) // (SIMDGROUPS * block_size)) * block_size
    first_part = begin // size
    parts_of_tile = (end - 1) // size - first_part + 1
    tile = np.repeat(np.arange(len(row)), parts_of_tile)
    part = (first_part[tile] + _ranges(parts_of_tile)) * size[tile]
    items = np.stack(
        [
            *(row[tile], starts[row[tile]] + first[tile], count[tile], position[tile], part, run[tile]),
            *(np.maximum(begin[tile], part), np.minimum(end[tile], part + size[tile])),
        ],
        axis=1,
    )
    parts = np.stack(
        [
            _ranges(count),
            np.repeat(np.cumsum(parts_of_tile) - parts_of_tile, count),
            np.repeat(parts_of_tile, count),
        ],
        axis=1,
    )

    padding = np.arange(starts[-1], num_tokens)
    idle = np.zeros((len(padding), 8), np.int64)
    idle[:, 1], idle[:, 2] = padding, 1
    idle_parts = np.zeros((len(padding), 3), np.int64)
    idle_parts[:, 1], idle_parts[:, 2] = len(items) + np.arange(len(padding)), 1
    return AttentionWork(
        tiles, np.concatenate([items, idle]).astype(np.int32), np.concatenate([parts, idle_parts]).astype(np.int32)
    )


def _ranges(counts: np.ndarray) -> np.ndarray:
    """``0 .. n - 1`` for each n of `counts`, one after the other."""
    return np.arange(counts.sum()) - np.repeat(np.cumsum(counts) - counts, counts)


class MetalKernels:
    """Launches the kernels on the pool of one spec.

    Parameters
    ----------
    spec : KVSpec
        Any layout; `block_size` a multiple of 8, head dimensions multiples of 4 up to 256.
    num_blocks : int
    factory : callable, optional
        ``mx.fast.metal_kernel`` or what stands in for it.

    Raises
    ------
    ValueError
        ``[MetalKernels] ...`` for a shape that the kernels do not have.
    """

    def __init__(self, spec: KVSpec, num_blocks: int, factory: Factory | None = None) -> None:
        if spec.block_size % 8:
            raise ValueError(f"[MetalKernels] block_size is {spec.block_size}, it must be a multiple of 8")
        for name, dim in (("head_dim", spec.head_dim), ("v_head_dim", spec.value_head_dim)):
            if dim % 4 or dim > 256:
                raise ValueError(f"[MetalKernels] {name} is {dim}, it must be a multiple of 4, at most 256")
        self.spec = spec
        self.num_blocks = num_blocks
        self._factory = cast(Factory, mx.fast.metal_kernel) if factory is None else factory
        self._layouts: dict[int, mx.array] = {}
        self._built: dict[str, Kernel] = {}

    def attend(
        self,
        layer: int,
        q: mx.array,
        k_pool: mx.array,
        v_pool: mx.array,
        tables: mx.array,
        work: AttentionWork,
        scale: float | None = None,
        options: AttentionOptions | None = None,
    ) -> mx.array:
        """Attention of ``q [T, Hq, D]`` over contexts in the pool, ``[T, Hq, Dv]`` in the dtype of q.

        Nothing is checked. `tables` is int32 ``[B, W]``; `work` was planned for this batch, with the window of
        `options`.
        """
        spec, options = self.spec, options or AttentionOptions()
        num_tokens, num_q_heads = q.shape[:2]
        tiles, num_items = work.tiles, len(work.items)
        sinks = _per_head(options.sinks)
        shared = {
            "Q": q.dtype,
            "VALUE_DIM": spec.value_head_dim,
            "GROUP": num_q_heads // spec.num_kv_heads,
            "HEADS": tiles.heads,
            "QUERIES": tiles.queries,
            "SINKS": options.sinks is not None,
        }
        touching = self._rows_touch()
        template = shared | {
            "T": DTYPES[spec.dtype],
            "DIM": spec.head_dim,
            "BLOCK_SIZE": spec.block_size,
            "SIMDGROUPS": SIMDGROUPS,
            "TOUCHING": touching,
            "SOFT_CAP": options.soft_cap is not None,
            "ALIBI": options.alibi_slopes is not None,
            "MASK": options.mask is not None,
            "DIRECT": work.direct,
        }
        group_threads = SIMDGROUPS * LANES
        num_groups = spec.num_kv_heads * tiles.groups
        result = (num_tokens, num_q_heads, spec.value_head_dim)
        partials = (num_items, num_groups, tiles.rows, spec.value_head_dim + 4)
        (out,) = self._kernel("paged_attention")(
            inputs=[
                *(q, k_pool, v_pool, self._layout(layer), tables, mx.array(work.items)),
                mx.array([spec.head_dim**-0.5 if scale is None else scale, options.soft_cap or 0.0], mx.float32),
                NO_WINDOW if options.window is None else options.window,
                *(_per_head(options.alibi_slopes), sinks, _mask(options.mask)),
            ],
            template=list(template.items()),
            output_shapes=[result if work.direct else partials],
            output_dtypes=[q.dtype if work.direct else mx.float32],
            grid=(num_groups * group_threads, num_items, 1),
            threadgroup=(group_threads, 1, 1),
        )
        if work.direct:
            return out
        chunks = spec.value_head_dim // 4
        (out,) = self._kernel("paged_reduce")(
            inputs=[out, mx.array(work.parts), sinks],
            template=list(shared.items()),
            output_shapes=[result],
            output_dtypes=[q.dtype],
            grid=(chunks, num_q_heads, num_tokens),
            threadgroup=(chunks, min(num_q_heads, 256 // chunks), 1),
        )
        return out

    def gather(
        self, layer: int, plane: str, pool: mx.array, tables: mx.array, seq_lens: mx.array, longest: int
    ) -> mx.array:
        """Contexts of plane "k" or "v" as ``[B, Hk, longest, D]``, 0 past the end of a row. Nothing is checked."""
        spec = self.spec
        dim = dict(spec.planes)[plane]
        layout = self._layout(layer)[:4] if plane == "k" else self._layout(layer)[4:]
        (out,) = self._kernel("gather_blocks")(
            inputs=[pool, layout, tables, seq_lens],
            template=[("T", DTYPES[spec.dtype]), ("DIM", dim), ("BLOCK_SIZE", spec.block_size)],
            output_shapes=[(tables.shape[0], spec.num_kv_heads, longest, dim)],
            output_dtypes=[DTYPES[spec.dtype]],
            grid=(dim // 4, tables.shape[0] * longest, spec.num_kv_heads),
            threadgroup=(dim // 4, min(tables.shape[0] * longest, 1024 // dim), 1),
        )
        return out

    def _layout(self, layer: int) -> mx.array:
        if layer not in self._layouts:
            self._layouts[layer] = mx.array(plane_strides(self.spec, self.num_blocks, layer))
        return self._layouts[layer]

    def _rows_touch(self) -> bool:
        layouts = (self.spec.plane_layout(plane, self.num_blocks) for plane, _ in self.spec.planes)
        return all(layout.slot_stride == dim for layout, (_, dim) in zip(layouts, self.spec.planes, strict=True))

    def _kernel(self, name: str) -> Kernel:
        if name not in self._built:
            header, source = source_text("kv_layout.h"), source_text(f"{name}.metal")
            self._built[name] = self._factory(
                name=f"kvpool_{name}_{content_hash(header, source)}",
                input_names=list(INPUTS[name]),
                output_names=["out"],
                source=source,
                header=header,
                ensure_row_contiguous=False,  # strides are read: a copy of the pool is never made
            )
        return self._built[name]


INPUTS = {
    "paged_attention": (
        *("q", "k_pool", "v_pool", "layout", "tables", "work"),
        *("options", "window", "slopes", "sinks", "mask"),
    ),
    "paged_reduce": ("partials", "parts", "sinks"),
    "gather_blocks": ("pool", "layout", "tables", "seq_lens"),
}


def plane_strides(spec: KVSpec, num_blocks: int, layer: int) -> np.ndarray:
    """Offset, block, slot and head stride of K, then of V, in elements of their base arrays; int64 ``[8]``."""
    numbers = []
    for plane, _ in spec.planes:
        layout = spec.plane_layout(plane, num_blocks)
        offset = layout.offset + layer * layout.layer_stride
        numbers += [offset, layout.block_stride, layout.slot_stride, layout.head_stride]
    return np.array(numbers, np.int64)


def in_place_source(name: str, types: tuple[str, ...], numbers: tuple[int, ...]) -> tuple[str, str]:
    """A whole kernel for one choice of template arguments.

    Parameters
    ----------
    name : {"kv_write", "copy_blocks"}
    types : names of `DTYPES`
        Template arguments that are types: pool and input of "kv_write", pool of "copy_blocks".
    numbers : int
        The others: DIM, VALUE_DIM, BLOCK_SIZE and VECTORS (0 or 1); or BLOCK_SIZE.

    Returns
    -------
    function : str
        Name of the kernel in the library, with a hash of its text: a new text never runs under an old name.
    text : str
        What to compile, after MLX's prelude.
    """
    text = source_text("kv_layout.h") + source_text(f"{name}.metal")
    arguments = ", ".join([*(TYPE_NAMES[t] for t in types), *map(str, numbers)])
    function = "_".join(["kvpool", name, *types, *map(str, numbers), content_hash(text)])
    instance = f"{name}<{arguments}>"
    return function, f'{text}\ntemplate [[host_name("{function}")]] [[kernel]] decltype({instance}) {instance};\n'


@cache
def source_text(name: str) -> str:
    """A file of `kvpool_backends.metal` without its comments, line numbers kept.

    MLX looks for the names of built-in values all over the text and hashes it at every launch.
    """
    try:
        folder = files("kvpool_backends.metal")
    except ModuleNotFoundError:  # a checkout that is not installed
        folder = Path(__file__).parents[2] / "metal"
    lines = folder.joinpath(name).read_text().splitlines()
    return "".join(line.split("//")[0].rstrip() + "\n" for line in lines)


def content_hash(*texts: str) -> str:
    """Ten hexadecimal digits: kernels of the same name and another text are other kernels to MLX."""
    return hashlib.sha256("\0".join(texts).encode()).hexdigest()[:10]


def _per_head(values: np.ndarray | None) -> mx.array:
    return mx.zeros((1,), mx.float32) if values is None else mx.array(np.asarray(values, np.float32))


def _mask(mask: np.ndarray | None) -> mx.array:
    """An option's mask as additive float32 ``[T, 1 or Hq, C]``."""
    if mask is None:
        return mx.zeros((1, 1, 1), mx.float32)
    if mask.dtype == np.bool_:
        mask = np.where(mask, np.float32(0), np.float32(-np.inf))
    return mx.array(mask if mask.ndim == 3 else mask[:, None])
