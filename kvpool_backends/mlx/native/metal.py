"""The Metal kernels that a node of the extension dispatches: their texts, for one pool."""

from __future__ import annotations

from itertools import product
from types import ModuleType
from typing import Any

from kvpool.spec import KVSpec
from kvpool_backends.mlx.metal_kernels import in_place_source
from kvpool_backends.mlx.storage import DTYPES


def metal_texts(module: ModuleType, spec: KVSpec) -> Any:
    """The argument `metal` of `InPlacePool`: kernels that write tokens of each dtype, in vectors or not, and that copy.

    Raises
    ------
    ValueError
        A head dimension is not a multiple of 4: the kernels move four elements at a time.
    """
    for name, dim in spec.planes:
        if dim % 4:
            raise ValueError(f"[metal_texts] head_dim of {name} is {dim}, it must be a multiple of 4")
    block, size = spec.block_size, spec.quant_group_size

    def writes(name: str, *numbers: int, more: tuple[int, ...] = ()) -> tuple[tuple[str, str], ...]:
        kinds = product(DTYPES, (0, 1))
        return tuple(in_place_source(name, (spec.dtype, x), (*numbers, vectors, *more)) for x, vectors in kinds)

    if not spec.is_quantized:
        all_writes = [writes("kv_write", spec.head_dim, spec.value_head_dim, block)]
    else:
        all_writes = [
            writes("kv_write", dim, 0, block)
            if bits is None
            else writes("kv_write_packed", dim, block, more=(bits, size))
            for (_, dim), bits in zip(spec.planes, spec.bits, strict=True)
        ]
    copies = [
        in_place_source("copy_blocks", (dtype,), numbers)
        for dtype, numbers in ((spec.dtype, (block,)), ("uint32", (block,)), (spec.dtype, (block, 1)))
    ]
    return module.metal_texts(tuple(all_writes), *copies)
