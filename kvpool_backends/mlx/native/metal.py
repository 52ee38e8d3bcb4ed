"""The Metal kernels that a node of the extension dispatches: their texts, for one pool."""

from __future__ import annotations

from types import ModuleType
from typing import Any

from kvpool.spec import KVSpec
from kvpool_backends.mlx.metal_kernels import in_place_source
from kvpool_backends.mlx.storage import DTYPES


def metal_texts(module: ModuleType, spec: KVSpec) -> Any:
    """What `InPlacePool` takes as `metal`: "kv_write" for tokens of each dtype, in vectors or not, and "copy_blocks".

    Raises
    ------
    ValueError
        A head dimension is no multiple of 4: the kernels move four elements at a time.
    """
    for name, dim in spec.planes:
        if dim % 4:
            raise ValueError(f"[metal_texts] head_dim of {name} is {dim}, it must be a multiple of 4")
    shape = (spec.head_dim, spec.value_head_dim, spec.block_size)
    write = tuple(
        in_place_source("kv_write", (spec.dtype, tokens), (*shape, vectors)) for tokens in DTYPES for vectors in (0, 1)
    )
    return module.metal_texts(write, in_place_source("copy_blocks", (spec.dtype,), (spec.block_size,)))
