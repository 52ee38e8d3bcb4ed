"""`InPlacePool`: the one owner of a pool's arrays, and of the order of everything that happens to them.

A node of the extension writes into memory that MLX takes for a value. So an array that was made before a write shows
what the write has stored, and a lazy read of it that runs too late reads the future (a write-after-read hazard that
MLX, whose arrays are values, cannot see). One rule makes that impossible:

    Every operation on an array of the pool, one that only reads too, takes the newest handle of it and leaves a newer
    one; and nobody but this class has a handle.

So all operations of an array form one chain in MLX's graph. They run in the order in which they were built, whatever
is evaluated first, from whatever stream. A block may be given to another sequence as soon as the last operation that
uses it is *built*.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from types import ModuleType
from typing import Any, NamedTuple

import mlx.core as mx

from kvpool.spec import KVSpec
from kvpool_backends.mlx.base import PoolMemory
from kvpool_backends.mlx.native import NOWHERE, isa_address

_KV_DTYPES = {"float32": 0, "float16": 1, "bfloat16": 2}  # kvcpu.h


class PoolMoved(RuntimeError):
    """An array of the pool is not where it was allocated: it was copied, and writes would go to the copy."""


class _Chain(NamedTuple):
    """Handles of arrays that are always used together, and what stands for the newest operation on them."""

    handles: tuple[mx.array, ...]  # the objects stay, the arrays that they denote are replaced
    addresses: tuple[int, ...]
    token: mx.array


class InPlacePool:
    """Lazy operations on a pool's memory; whoever else uses `memory` calls `wait` before.

    `module` is the extension. With `on_gpu`, writes, copies, and attention that was `noted`, run on MLX's GPU, by the
    texts `metal` of `metal_texts`; else by CPU kernels of the instruction set `isa`. A node that finds a strange array
    as its input is a RuntimeError of the evaluation.
    """

    def __init__(
        self,
        module: ModuleType,
        spec: KVSpec,
        num_blocks: int,
        memory: PoolMemory,
        *,
        isa: str,
        on_gpu: bool = False,
        metal: Any = None,
    ) -> None:
        self._module = module
        self._on_gpu = on_gpu
        self._layers: list[tuple[Any, _Chain]] = []
        self._chains: dict[tuple[int, ...], _Chain] = {}
        for layer in range(spec.num_layers):
            places: dict[str, tuple[int, ...]] = {}
            used: list[int] = []
            for index, plane in enumerate(spec.stored_planes):
                layout, number = spec.plane_layout(plane.name, num_blocks), spec.base_number(layer, index)
                if number not in used:
                    used.append(number)
                offset = layout.offset + layer * layout.layer_stride
                strides = (layout.block_stride, layout.slot_stride, layout.head_stride)
                places[plane.name] = (used.index(number), offset, *strides)
            sides, self._sides = [], list[list[int]]()  # of the last layer, as of any: which handles are K, which V
            for (name, dim), bits in zip(spec.planes, spec.bits, strict=True):
                parts = [places.get(f"{name}{part}", NOWHERE) for part in ("", "_scales", "_biases")]
                sides.append((dim, bits or 0, spec.quant_group_size if bits else 0, *parts))
                self._sides.append([part[0] for part in parts if part is not NOWHERE])
            chain = self._chain(tuple(used), memory)
            capsule = module.layer(
                isa_address(isa),
                _KV_DTYPES[spec.dtype],
                num_blocks,
                spec.block_size,
                spec.num_kv_heads,
                *sides,
                chain.addresses,
                metal,
            )
            self._layers.append((capsule, chain))

    def _chain(self, numbers: tuple[int, ...], memory: PoolMemory) -> _Chain:
        if numbers not in self._chains:
            arrays = [memory.arrays[number] for number in numbers]
            handles = tuple(mx.array(0) for _ in arrays)
            for handle, array in zip(handles, arrays, strict=True):
                self._module.share(handle, array)
            self._chains[numbers] = _Chain(handles, tuple(map(self._module.address, arrays)), mx.array([]))
        return self._chains[numbers]

    # ---------------------------------------------------------------------------------------- operations

    def write(self, layer: int, k: mx.array, v: mx.array, step: Any) -> None:
        """Store ``k [T, Hk, D]`` and ``v [T, Hk, Dv]`` at the slots of `step`."""
        self._build(*self._layers[layer], step=step, k=k, v=v)

    def attend(self, layer: int, q: mx.array, step: Any, attention: Any) -> mx.array:
        """Attention of ``q [T, Hq, D]`` over the contexts of `step`; on the GPU see `repeat`."""
        return self._build(*self._layers[layer], step=step, attention=attention, q=q)

    def copy_blocks(self, copies: Any) -> None:
        """Copy the first tokens of blocks in all layers."""
        for capsule, chain in self._layers:
            self._build(capsule, chain, copies=copies)

    def read(self, layer: int, kernel: Callable[..., Sequence[mx.array]]) -> Sequence[mx.array]:
        """Return the results of ``kernel(k, v)`` on the planes of a layer, for kernels of MLX.

        A plane is a tuple of an array, or of words, scales and biases. Results take their place in the chain. The
        kernel may use the arrays in no other way, and may not keep them.
        """
        capsule, chain = self._layers[layer]
        results = kernel(*self._planes(chain))
        self._build(capsule, chain, reads=tuple(results))
        return results

    def _planes(self, chain: _Chain) -> Iterator[tuple[mx.array, ...]]:
        return (tuple(chain.handles[number] for number in side) for side in self._sides)

    def noted(self, layer: int, kernel: Callable[..., Sequence[mx.array]], own: tuple[mx.array, ...]) -> Any:
        """Return how ``kernel(k, v)`` attends with ``mx.fast.metal_kernel``, for `repeat`. Nothing is built.

        `own` are the arrays that it takes and that a layer has of its own: first q, then in any order.
        """
        chain = self._layers[layer][1]
        return self._module.metal_attention(kernel(*self._planes(chain))[0], chain.handles, own)

    def repeat(self, layer: int, noted: Any, own: tuple[mx.array, ...]) -> mx.array:
        """Return the attention that was `noted`, of a layer and of arrays of its own, which have the same shapes."""
        return self._build(*self._layers[layer], attention=noted, reads=own)

    def _build(
        self,
        capsule: Any,
        chain: _Chain,
        *,
        step: Any = None,
        copies: Any = None,
        attention: Any = None,
        k: mx.array | None = None,
        v: mx.array | None = None,
        q: mx.array | None = None,
        reads: tuple[mx.array, ...] = (),
    ) -> mx.array:
        result = chain.token if attention is None else mx.array(0)
        self._module.run(
            self._on_gpu, chain.handles, reads, capsule, step, copies, attention, k, v, q, chain.token, result
        )
        return result

    # ------------------------------------------------------------------------------------ what was built

    def token(self, layer: int) -> mx.array:
        """An empty array; with it everything is evaluated that was built on the layer so far."""
        return self._layers[layer][1].token

    def wait(self) -> None:
        """Evaluate everything that was built, and wait for it."""
        mx.eval([chain.handles for chain in self._chains.values()])

    def check_addresses(self) -> None:
        """Raise `PoolMoved` unless all arrays are where they were allocated. After `wait`."""
        for chain in self._chains.values():
            for handle, address in zip(chain.handles, chain.addresses, strict=True):
                found = self._module.address(handle)
                if found != address:
                    raise PoolMoved(f"[mlx native] an array of the pool is at {found:#x}, it was at {address:#x}")
