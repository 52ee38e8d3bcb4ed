"""Prompt caches of mlx-lm in files (safetensors), to a store of blocks and back.

``mlx_lm.cache_prompt`` and `save_prompt_cache` write the keys and values of one prompt. The file does not name its
tokens: the caller does. Only files of `KVCache`, one in each layer, are read: what other caches hold is not cut into
blocks of tokens.
"""

from __future__ import annotations

import os
from typing import Any

import mlx.core as mx
import numpy as np
from mlx.utils import tree_unflatten
from mlx_lm.models.cache import KVCache, save_prompt_cache

from kvpool.spec import KVSpec
from kvpool.store import Blocks, BlockStore, leading


def import_prompt_cache(
    path: str | os.PathLike[str], tokens: Any, spec: KVSpec, store: BlockStore, namespace: bytes = b""
) -> int:
    """Give a store the full blocks of a file of mlx-lm.

    Parameters
    ----------
    path : path
        A ``.safetensors`` file, as `save_prompt_cache` writes it.
    tokens : ints ``[n]``
        The prompt of the file, all of it: with the template and the special tokens that the tokenizer added.
    spec : KVSpec
        Of the blocks: ``kv.layout.specs[0]`` of a model with one table.
    store : BlockStore
        Of a layout with one group of such blocks.
    namespace : bytes, optional

    Returns
    -------
    int
        Tokens whose blocks the store has taken.

    Raises
    ------
    ValueError
        The file, the tokens or the store do not fit the spec. Nothing was stored.
    """
    blocks = _blocks("import_prompt_cache", tokens, spec, store, namespace)
    found: Any = mx.load(str(path), return_metadata=True)
    arrays, metadata = found
    classes = tree_unflatten(list(metadata.items()))[1] if "1.0" in metadata else []
    if set(classes) != {"KVCache"} or len(classes) != spec.num_layers:
        raise ValueError(
            f"[import_prompt_cache] {path} has the caches {', '.join(classes) or 'of no model'}; "
            f"{spec.num_layers} of KVCache are needed"
        )
    parts = []
    for layer in range(spec.num_layers):
        length = int(arrays[f"{layer}.2"].item())  # rows behind it are room to grow
        for number, (plane, dim) in enumerate(spec.planes):
            array = arrays[f"{layer}.{number}"][:, :, :length]
            shape = (1, spec.num_kv_heads, len(tokens), dim)
            if tuple(array.shape) != shape or array.dtype != getattr(mx, spec.dtype):
                raise ValueError(
                    f"[import_prompt_cache] {plane} of layer {layer} is {array.dtype} {list(array.shape)}, the tokens "
                    f"and the spec say {spec.dtype} {list(shape)}"
                )
            parts.append(_cut(array, len(blocks), spec.block_size))
    rows = np.concatenate(parts, axis=1)
    return store.store(blocks, rows) * spec.block_size


def export_prompt_cache(
    path: str | os.PathLike[str],
    tokens: Any,
    spec: KVSpec,
    store: BlockStore,
    namespace: bytes = b"",
    metadata: dict[str, str] | None = None,
) -> int:
    """Write what a store has of a prompt to a file that mlx-lm's `load_prompt_cache` reads.

    Returns
    -------
    int
        Tokens in the file: all full blocks from the beginning that were loaded. With 0 no file is written.

    See `import_prompt_cache` for the parameters. `metadata` goes into the file.
    """
    blocks = _blocks("export_prompt_cache", tokens, spec, store, namespace)
    rows = np.empty((len(blocks), spec.block_nbytes), np.uint8)
    count = leading(store.load(blocks, rows))
    if count == 0:
        return 0
    caches, begin = [], 0
    for _ in range(spec.num_layers):
        planes = []
        for _, dim in spec.planes:
            nbytes = spec.block_size * spec.num_kv_heads * dim * spec.itemsize_nbytes
            planes.append(_joined(rows[:count, begin : begin + nbytes], spec, dim))
            begin += nbytes
        caches.append(KVCache())
        caches[-1].state = (*planes, count * spec.block_size)
    save_prompt_cache(str(path), caches, metadata)
    return count * spec.block_size


def _blocks(call: str, tokens: Any, spec: KVSpec, store: BlockStore, namespace: bytes) -> Blocks:
    groups = [(group.block_size, group.nbytes) for group in store.layout.groups]
    if spec.is_quantized or groups != [(spec.block_size, spec.block_nbytes)]:
        raise ValueError(
            f"[{call}] the store has blocks of (tokens, bytes) {groups}; one group of {spec.block_size} tokens and "
            f"{spec.block_nbytes} bytes is needed, of keys and values that are not quantized"
        )
    return store.layout.blocks(tokens, namespace)[0]


def _cut(array: mx.array, count: int, block_size: int) -> np.ndarray:
    """``[1, Hk, n, D]`` as the bytes of full blocks, ``[count, S * Hk * D * itemsize]``."""
    data = np.asarray(mx.contiguous(array[0]).view(mx.uint8))[:, : count * block_size]
    heads, _, nbytes = data.shape
    blocks = data.reshape(heads, count, block_size, nbytes).transpose(1, 2, 0, 3)
    return blocks.reshape(count, block_size * heads * nbytes)


def _joined(rows: np.ndarray, spec: KVSpec, dim: int) -> mx.array:
    """The inverse of `_cut`."""
    nbytes = dim * spec.itemsize_nbytes
    blocks = rows.reshape(len(rows), spec.block_size, spec.num_kv_heads, nbytes).transpose(2, 0, 1, 3)
    data = np.ascontiguousarray(blocks).reshape(1, spec.num_kv_heads, len(rows) * spec.block_size, nbytes)
    return mx.array(data).view(getattr(mx, spec.dtype))
