"""Checks of arguments, for use inside backends before a byte is changed.

A function takes the backend and reads its `spec`, `num_blocks` and `capabilities`. It raises the errors that
`kvpool.protocol.KVBackend` documents: ``[call] what is wrong (value), the limit``.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from kvpool.protocol import (
    SCORES,
    AnyPlan,
    AttentionOptions,
    Capabilities,
    KVBackend,
    StepArrays,
    check_distinct,
    checked_bytes,
    checked_ids,
)
from kvpool.spec import KVSpec, checked_int

Blocks = Sequence[int] | np.ndarray
_PLAIN = AttentionOptions()

STORED: dict[str, np.dtype[Any]] = {  # what base arrays hold, in numpy: other floats are bits there
    "float32": np.dtype("<f4"),
    "float16": np.dtype("<f2"),
    "bfloat16": np.dtype("<u2"),
    "float8_e4m3": np.dtype("u1"),
    "uint32": np.dtype("<u4"),
    "uint8": np.dtype("u1"),
}


def checked_storage(call: str, can: Capabilities, spec: KVSpec, num_blocks: int, route: str = "") -> int:
    """`num_blocks`, if a backend with the capabilities `can` can serve `spec`; `route` is added to a refusal."""
    if not isinstance(spec, KVSpec):
        raise TypeError(f"[{call}] spec must be a KVSpec, got {type(spec).__name__}")
    refusal = can.refusal(spec)
    if refusal:
        raise ValueError(f"[{call}] {refusal}{route}")
    return checked_int(call, "num_blocks", num_blocks)


def checked_rows(call: str, spec: KVSpec, num_blocks: int, storage: Any) -> np.ndarray:
    """`storage`, if it can hold the blocks of `spec` as bytes, one row each."""
    if not isinstance(storage, np.ndarray) or storage.dtype != np.uint8:
        found = storage.dtype if isinstance(storage, np.ndarray) else type(storage).__name__
        raise TypeError(f"[{call}] storage must be a uint8 numpy array, got {found}")
    if spec.layout != "block":
        raise ValueError(f"[{call}] storage is for layout 'block', the spec has {spec.layout!r}")
    expected, size = (num_blocks, spec.block_nbytes), max(plane.itemsize_nbytes for plane in spec.stored_planes)
    if storage.shape != expected or storage.strides[1] != 1 or not storage.flags.writeable:
        raise ValueError(
            f"[{call}] storage must have shape {list(expected)}, contiguous rows, and be writable; it has shape "
            f"{list(storage.shape)} and strides {list(storage.strides)}"
        )
    if storage.ctypes.data % size or storage.strides[0] % size:
        raise ValueError(f"[{call}] rows of storage must begin at multiples of {size} bytes, got {storage.strides[0]}")
    return storage


# ---------------------------------------------------------------------- blocks


def block_ids(backend: KVBackend, call: str, blocks: Blocks) -> np.ndarray:
    """Block ids as int64 ``[n]``, inside of the pool."""
    return checked_ids(call, "block", blocks, backend.num_blocks, "pool")


def check_layer(backend: KVBackend, call: str, layer: int) -> None:
    """Raise unless `layer` is a layer of the spec."""
    if isinstance(layer, bool) or not isinstance(layer, (int, np.integer)):
        raise TypeError(f"[{call}] layer must be an int, got {type(layer).__name__}")
    if not 0 <= layer < backend.spec.num_layers:
        raise IndexError(f"[{call}] layer is {layer}, the spec has {backend.spec.num_layers} layers")


def gathered(backend: KVBackend, blocks: Blocks, num_tokens: int | None) -> tuple[np.ndarray, int]:
    """The blocks that a `gather` reads, int64, and how many tokens it returns."""
    ids = block_ids(backend, "gather", blocks)
    capacity = ids.size * backend.spec.block_size
    count = capacity if num_tokens is None else checked_int("gather", "num_tokens", num_tokens, least=0)
    if count > capacity:
        raise ValueError(f"[gather] num_tokens is {count}, the blocks hold {capacity}")
    return ids[: -(-count // backend.spec.block_size)], count


def checked_import(backend: KVBackend, blocks: Blocks, data: Any) -> tuple[np.ndarray, np.ndarray]:
    """The arguments of an `import_blocks`: distinct ids and uint8 ``[n, block_nbytes]``."""
    ids = block_ids(backend, "import_blocks", blocks)
    data = checked_bytes("import_blocks", data, ids.size, backend.spec.block_nbytes)
    check_distinct("import_blocks", "block", ids)
    return ids, data


def checked_keep(backend: KVBackend, blocks: Blocks, keep: Any) -> tuple[np.ndarray, np.ndarray]:
    """The arguments of a `compact`: distinct ids, and places as C-contiguous int64 ``[L, Hk, n]`` that ascend."""
    spec, places = backend.spec, np.asarray(keep)
    if places.size and places.dtype.kind not in "iu":
        raise TypeError(f"[compact] keep must be integers, got {places.dtype}")
    ids = block_ids(backend, "compact", blocks)
    check_distinct("compact", "block", ids)
    heads = (spec.num_layers, spec.num_kv_heads)
    if places.ndim != 1 and (places.ndim != 3 or places.shape[:2] != heads):
        raise ValueError(f"[compact] keep must have shape [n] or [{heads[0]}, {heads[1]}, n], got {list(places.shape)}")
    limit = ids.size * spec.block_size
    if places.size:
        if not 0 <= places.min() <= places.max() < limit:
            bad = int(places.min()) if places.min() < 0 else int(places.max())
            raise ValueError(f"[compact] position {bad} is outside the {ids.size} blocks, the limit is {limit}")
        if (np.diff(places, axis=-1) <= 0).any():
            raise ValueError("[compact] keep must ascend along its last axis")
    places = np.broadcast_to(places.astype(np.int64), (*heads, places.shape[-1]))
    return ids, np.ascontiguousarray(places)


def checked_copies(backend: KVBackend, plan: AnyPlan | np.ndarray) -> np.ndarray:
    """The copies ``[K, 3]`` of a plan, or those given."""
    copies, limit = np.asarray(getattr(plan, "copies", plan)), backend.spec.block_size
    if copies.ndim != 2 or copies.shape[1] != 3:
        raise ValueError(f"[copy_blocks] copies must have shape [K, 3], got {list(copies.shape)}")
    if copies.size and copies.dtype.kind not in "iu":
        raise TypeError(f"[copy_blocks] copies must be integers, got {copies.dtype}")
    block_ids(backend, "copy_blocks", copies[:, :2].ravel())
    counts = copies[:, 2]
    if len(copies) and not 1 <= counts.min() <= counts.max() <= limit:
        raise ValueError(f"[copy_blocks] num_tokens is {counts.min()} .. {counts.max()}, the range is 1 .. {limit}")
    return copies


# ---------------------------------------------------------------------- a step


def checked_step(backend: KVBackend, plan: AnyPlan) -> StepArrays:
    """The arrays of a plan for `prepare`, int64. Entries of block tables that nothing reads become 0.

    Rows with queries must be legal. Other rows are used by `read` only; their ids outside of the pool become 0.
    """
    names = (("block_tables", 2), ("seq_lens", 1), ("cu_q_lens", 1), ("slot_mapping", 1))
    tables, seq_lens, cu_q_lens, slots = (_ints(name, getattr(plan, name), ndim) for name, ndim in names)
    size, rows, limit = backend.spec.block_size, len(seq_lens), backend.num_blocks * backend.spec.block_size
    if slots.size and slots.max() >= limit:
        raise IndexError(f"[prepare] slot {slots.max()} is outside the pool, the limit is {limit}")
    q_lens = np.diff(cu_q_lens)
    if cu_q_lens.size != rows + 1 or cu_q_lens[0] != 0 or q_lens.min(initial=0) < 0:
        raise ValueError(f"[prepare] cu_q_lens {cu_q_lens.tolist()} are not prefix sums of {rows} rows")
    if (q_lens > seq_lens).any():
        row = int(np.argmax(q_lens > seq_lens))
        raise ValueError(f"[prepare] row {row} has {q_lens[row]} queries in a context of {seq_lens[row]} tokens")
    if len(tables) < rows:
        raise ValueError(f"[prepare] block_tables must have shape [{rows}, W], got {list(tables.shape)}")
    needs = -(-seq_lens // size)
    width, queried = int(needs.max(initial=0)), q_lens > 0
    if (needs[queried] > tables.shape[1]).any():
        raise ValueError(f"[prepare] a context needs {needs[queried].max()} blocks, the table holds {tables.shape[1]}")
    tables = np.pad(tables[:rows, :width], ((0, 0), (0, max(0, width - tables.shape[1]))))
    used = np.arange(width) < needs[:, None]
    block_ids(backend, "prepare", tables[used & queried[:, None]])
    tables = np.where(used & (tables >= 0) & (tables < backend.num_blocks), tables, 0)
    return StepArrays(tables, seq_lens, cu_q_lens, slots)


def _ints(name: str, given: Any, ndim: int) -> np.ndarray:
    array = np.asarray(given)
    if array.size and array.dtype.kind not in "iu":
        raise TypeError(f"[prepare] {name} must be integers, got {array.dtype}")
    if array.ndim != ndim:
        raise ValueError(f"[prepare] {name} must have {ndim} dimensions, got shape {list(array.shape)}")
    return array.astype(np.int64)


def check_tokens(backend: KVBackend, layer: int, num_tokens: int, k: Any, v: Any) -> None:
    """Check the arguments of a `write` of `num_tokens` tokens."""
    check_layer(backend, "write", layer)
    for (name, dim), x in zip(backend.spec.planes, (k, v), strict=True):
        expected = (num_tokens, backend.spec.num_kv_heads, dim)
        if tuple(x.shape) != expected:
            raise ValueError(f"[write] {name} must have shape {list(expected)}, got {list(x.shape)}")


def check_attends(spec: KVSpec) -> None:
    """Raise unless the planes of `spec` are keys and values: for backends without ``capabilities.latent``."""
    if spec.latent:
        raise ValueError("[attend] the planes hold latents and rotary parts (latent=True), use read")


def checked_queries(
    backend: KVBackend, step: StepArrays, layer: int, q: Any, scale: float | None, options: AttentionOptions | None
) -> tuple[float, AttentionOptions]:
    """Scale and options of an `attend`, if `q` fits the layer and the step, whose arrays were checked."""
    check_layer(backend, "attend", layer)
    if not backend.capabilities.latent:
        check_attends(backend.spec)
    heads, dim = backend.spec.num_kv_heads, backend.spec.query_dim
    if q.ndim != 3 or q.shape[2] != dim:
        raise ValueError(f"[attend] q must have shape [T, Hq, {dim}], got {list(q.shape)}")
    num_tokens, num_heads = int(q.shape[0]), int(q.shape[1])
    if num_heads < 1 or num_heads % heads:
        raise ValueError(f"[attend] {num_heads} query heads are not a multiple of {heads} KV heads")
    if step.cu_q_lens[-1] > num_tokens:
        raise ValueError(f"[attend] cu_q_lens ends at {step.cu_q_lens[-1]}, q has {num_tokens} tokens")
    scale = dim**-0.5 if scale is None else float(scale)
    if not math.isfinite(scale):
        raise ValueError(f"[attend] scale is {scale}, it must be finite")
    longest = 0 if getattr(options, "mask", None) is None else int(step.seq_lens.max(initial=0))  # of a mask alone
    return scale, checked_options(options, backend.capabilities, num_tokens, num_heads, longest)


def checked_options(
    options: AttentionOptions | None, can: Capabilities, num_tokens: int, num_q_heads: int, longest: int
) -> AttentionOptions:
    """The options of an `attend`, checked against T, Hq and the longest context. None is plain attention."""
    if options is None:
        return _PLAIN
    if not isinstance(options, AttentionOptions):
        raise TypeError(f"[attend] options must be an AttentionOptions, got {type(options).__name__}")
    missing = can.lacks(options)
    if missing:
        raise ValueError(f"[attend] backend {can.name!r} has no {', '.join(missing)}, only {list(can.features)}")
    options.check(num_tokens, num_q_heads, longest)
    return options


def checked_results(
    can: Capabilities, return_attn: bool, scores: str | None, scores_out: Any, shape: tuple[int, int, int] = (0, 0, 0)
) -> np.ndarray | None:
    """The part of `scores_out` that an `attend` fills, float32 with the shape `shape`, ``[B, Hk, C]``.

    None if there are no scores, or if the backend makes the array.
    """
    if return_attn and not can.return_attn:
        raise ValueError(f"[attend] backend {can.name!r} does not return weights (return_attn=True), only results")
    if scores is None:
        if scores_out is not None:
            raise ValueError(f"[attend] scores_out needs scores, one of {list(can.scores)}; scores is None")
        return None
    if not isinstance(scores, str):
        raise TypeError(f"[attend] scores must be a str, got {type(scores).__name__}")
    if scores not in SCORES:
        raise ValueError(f"[attend] scores is {scores!r}, the kinds are {list(SCORES)}")
    if scores not in can.scores:
        only = f"no scores {scores!r}, only {list(can.scores)}" if can.scores else "no scores"
        raise ValueError(f"[attend] backend {can.name!r} exports {only}")
    if scores_out is None:
        return None
    if not can.scores_out:
        raise ValueError(f"[attend] backend {can.name!r} fills no scores_out, it returns a new array")
    return _fitting_scores(scores_out, shape)


def _fitting_scores(scores_out: Any, shape: tuple[int, int, int]) -> np.ndarray:
    if not isinstance(scores_out, np.ndarray) or scores_out.dtype != np.float32:
        found = scores_out.dtype if isinstance(scores_out, np.ndarray) else type(scores_out).__name__
        raise TypeError(f"[attend] scores_out must be a float32 numpy array, got {found}")
    rows, heads, longest = shape
    given = scores_out.shape
    if len(given) != 3 or given[0] < rows or given[1] != heads or given[2] < longest:
        raise ValueError(
            f"[attend] scores_out has shape {list(given)}, it must be [B', {heads}, C'] with B' >= {rows} "
            f"and C' >= {longest}"
        )
    if not scores_out.flags.writeable:
        raise ValueError("[attend] scores_out is read-only, it is written")
    if given[2] > 1 and scores_out.strides[2] != 4:
        raise ValueError(f"[attend] scores_out has a stride of {scores_out.strides[2]} bytes between positions, not 4")
    return scores_out[:rows, :, :longest]
