"""The kernels of `kvpool_backends.metal` on MLX's CUDA backend: `metal_kernel`, by ``mx.fast.cuda_kernel``.

A kernel's text is the same on both. ``cuda.h`` has Metal's language in CUDA, and what is written here around the body
gives it Metal's names for positions in the grid. Blocks of threads lie in one dimension, because CUDA has at most
65,535 of them in the two others.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from functools import lru_cache
from math import prod
from typing import Any, cast

import mlx.core as mx
import numpy as np

from kvpool_backends.mlx.metal import MetalBackend
from kvpool_backends.mlx.metal_kernels import Factory, Kernel, content_hash, source_text

GRID = "grid_size"  # an input of every kernel: threads in each dimension
_POSITIONS = f"""
const uint3 threads_per_grid = {{uint({GRID}[0]), uint({GRID}[1]), uint({GRID}[2])}};
const uint3 threadgroups_per_grid = {{(threads_per_grid.x + blockDim.x - 1) / blockDim.x,
                                     (threads_per_grid.y + blockDim.y - 1) / blockDim.y,
                                     (threads_per_grid.z + blockDim.z - 1) / blockDim.z}};
const uint3 threadgroup_position_in_grid = {{blockIdx.x % threadgroups_per_grid.x,
                                            blockIdx.x / threadgroups_per_grid.x % threadgroups_per_grid.y,
                                            blockIdx.x / threadgroups_per_grid.x / threadgroups_per_grid.y}};
const uint3 thread_position_in_grid = {{threadgroup_position_in_grid.x * blockDim.x + threadIdx.x,
                                       threadgroup_position_in_grid.y * blockDim.y + threadIdx.y,
                                       threadgroup_position_in_grid.z * blockDim.z + threadIdx.z}};
if (thread_position_in_grid.x >= threads_per_grid.x || thread_position_in_grid.y >= threads_per_grid.y ||
    thread_position_in_grid.z >= threads_per_grid.z) {{
  return;
}}
const uint thread_index_in_simdgroup = threadIdx.x % 32, simdgroup_index_in_threadgroup = threadIdx.x / 32;
using metal::max;
using metal::min;
"""


class CudaBackend(MetalBackend):
    """`MetalBackend` where MLX computes on a GPU with CUDA."""

    route = "cuda"

    def _allocate(self) -> None:
        self._metal_kernel = metal_kernel
        super()._allocate()


def metal_kernel(
    *,
    name: str,
    input_names: Sequence[str],
    output_names: Sequence[str],
    source: str,
    header: str,
    ensure_row_contiguous: bool,
    factory: Factory | None = None,
) -> Kernel:
    """Return what ``mx.fast.metal_kernel`` returns for these arguments, for a GPU with CUDA.

    `factory`: ``mx.fast.cuda_kernel``, or what stands in for it.
    """
    without_matrices = header.replace("#include <metal_simdgroup_matrix>\n", "\n")
    header = source_text("cuda.h") + _in_one_address_space(without_matrices)
    cuda_kernel = cast(Factory, mx.fast.cuda_kernel) if factory is None else factory
    made: dict[tuple[Any, ...], Kernel] = {}

    def launch(
        *, inputs: Sequence[Any], grid: tuple[int, int, int], threadgroup: tuple[int, int, int], **call: Any
    ) -> list[mx.array]:
        arrays = [x if isinstance(x, mx.array) else _scalar(x) for x in inputs]
        kind = tuple((str(x.dtype).rpartition(".")[2], x is not given) for x, given in zip(arrays, inputs, strict=True))
        if kind not in made:
            scalars = [name for name, (_, is_scalar) in zip(input_names, kind, strict=True) if is_scalar]
            # MLX finds a compiled kernel by its name, also in a file of that name, and adds the template to it alone.
            made[kind] = cuda_kernel(
                name=f"{name}_{content_hash(header, *(dtype for dtype, _ in kind), *scalars)}",
                input_names=[*(f"{name}_pointer" if name in scalars else name for name in input_names), GRID],
                output_names=list(output_names),
                source=_body(source, scalars),
                header=header,
                ensure_row_contiguous=ensure_row_contiguous,
            )
        blocks = prod(-(-size // group) for size, group in zip(grid, threadgroup, strict=True))
        return made[kind](
            inputs=[*arrays, _sizes(grid)],
            grid=(blocks * threadgroup[0], *threadgroup[1:]),
            threadgroup=threadgroup,
            **call,
        )

    return launch


def _body(source: str, scalars: Sequence[str]) -> str:
    """The body of a kernel, whose `scalars` CUDA gets as pointers."""
    values = "".join(f"const auto {name} = *{name}_pointer;\n" for name in scalars)
    variables = re.sub(r"^threadgroup (\w+ \w+\[)", r"__shared__ \1", source, flags=re.MULTILINE)
    return values + _POSITIONS + _in_one_address_space(variables)


def _in_one_address_space(text: str) -> str:
    return re.sub(r"\b(device|constant|threadgroup|thread) ", "", text)


@lru_cache(maxsize=1024)
def _scalar(x: int) -> mx.array:
    return mx.array([x])


@lru_cache(maxsize=1024)
def _sizes(grid: tuple[int, int, int]) -> mx.array:
    return mx.array(np.array(grid, np.int32))
