"""What runs the Metal kernels of the tests: `msl`, Metal on the CPU, everywhere; Metal itself where there is a Mac."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from typing import Any

import mlx.core as mx
import msl
import numpy as np

from kvpool_backends.mlx import metal_kernels
from kvpool_backends.mlx.cuda import metal_kernel as as_cuda

#: Inputs that may be the first elements of what the kernel reads.
POOLS = {"k_pool", "v_pool", "pool", "words", "scales", "biases"}
POOLS |= {f"{plane}_{factors}" for plane in "kv" for factors in ("scales", "biases")}
Factory = Callable[..., Callable[..., list[mx.array]]]


class StandIn:
    """`mx.fast.metal_kernel` as the tests' own implementation of Metal has it."""

    name = "stand-in"
    schedules = (0, 1, 2, 3, 4)  # orders of threads; odd ones guard the memory in front of buffers, even ones behind

    def factory(self, schedule: int = 0, *, runs: list[msl.Run] | None = None, lint: bool = False) -> Factory:
        """A factory of kernels that run under one schedule.

        With `runs`, every access is checked and counted there; with `lint`, texts that Metal would refuse are refused.
        """

        def make(**description: Any) -> Callable[..., list[mx.array]]:
            kernel = _kernel(tuple((k, tuple(v) if isinstance(v, list) else v) for k, v in description.items()))

            def launch(**call: Any) -> list[mx.array]:
                call["inputs"] = _whole_pools(description, call)
                with msl.settings(seed=schedule, instrumented=runs is not None, lint=lint) as counted:
                    out = kernel(**call)
                if runs is not None:
                    runs.extend(counted)
                return out

            return launch

        return make


class Cuda:
    """CUDA: the device's own schedule, and nothing is counted."""

    name = "cuda"
    schedules = (0,)

    def factory(self, schedule: int = 0) -> Factory:
        """`mx.fast.cuda_kernel`, behind the interface of `mx.fast.metal_kernel`."""
        return as_cuda


class CudaStandIn:
    """The texts for CUDA, on a CPU."""

    def factory(self, schedule: int = 0) -> Factory:
        """A factory of kernels that run under one schedule."""

        def make(**description: Any) -> Callable[..., list[mx.array]]:
            kernel = as_cuda(factory=msl.cuda_kernel, **description)

            def launch(**call: Any) -> list[mx.array]:
                call["inputs"] = _whole_pools(description, call)
                with msl.settings(seed=schedule):
                    return kernel(**call)

            return launch

        return make


class Native:
    """Metal: the device's own schedule, and nothing is counted."""

    name = "native"
    schedules = (0,)

    def factory(self, schedule: int = 0) -> Factory:
        """`mx.fast.metal_kernel`."""
        return mx.fast.metal_kernel


ENGINES = {"stand-in": StandIn}
ENGINES |= {"native": Native} if mx.metal.is_available() else {}
ENGINES |= {"cuda": Cuda} if mx.cuda.is_available() else {}


def recording(factory: Factory, kernels: set[tuple[str, ...]]) -> Factory:
    """A factory that adds what MLX builds a library for: text, template, dtypes, which inputs are scalars or small."""

    def make(**description: Any) -> Callable[..., list[mx.array]]:
        kernel = factory(**description)

        def launch(**call: Any) -> list[mx.array]:
            inputs = [(x.dtype, x.ndim == 0, x.size < 8) for x in map(mx.array, call["inputs"])]
            kernels.add((description["name"], str(call["template"]), str(inputs), str(call["output_dtypes"])))
            return kernel(**call)

        return launch

    return make


def _whole_pools(description: dict[str, Any], call: dict[str, Any]) -> list[Any]:
    """The inputs of a launch; for the first elements of a pool all of it."""
    named = zip(description["input_names"], call["inputs"], strict=True)
    return [_whole(x) if name in POOLS and x.shape == (8,) else x for name, x in named]


def _whole(x: mx.array) -> mx.array:
    """The buffer of which `x` is the first elements, as an array. MLX keeps its size in front of it, on a CPU."""
    mx.eval(x)
    nbytes = ctypes.c_size_t.from_address(ctypes.addressof(ctypes.c_char.from_buffer(memoryview(x))) - 8).value
    return mx.as_strided(x, (nbytes // x.dtype.size,), (1,), 0)


@cache
def _kernel(description: tuple[tuple[str, Any], ...]) -> Callable[..., list[mx.array]]:
    return msl.metal_kernel(**{k: list(v) if isinstance(v, tuple) else v for k, v in description})


@cache
def _in_place_kernel(text: str, name: str, arguments: str) -> msl.Kernel:
    prelude = "#include <metal_stdlib>\nusing namespace metal;\ntypedef half float16_t;\ntypedef bfloat bfloat16_t;\n"
    return msl.Kernel(prelude + text, name, arguments)


def launch_in_place(
    name: str,
    types: Sequence[str],
    numbers: Sequence[int],
    buffers: Mapping[str, np.ndarray],
    writable: Sequence[str],
    grid: Sequence[int],
    *,
    schedule: int = 0,
    **chosen: Any,
) -> msl.Run:
    """Run a whole kernel on arrays, in order of their buffer indices; those in `writable` change.

    `chosen` are settings of the launch.
    """
    _, text = metal_kernels.in_place_source(name, tuple(types), tuple(numbers))
    text = text[: text.rindex("template [[host_name")]  # the instance is named here instead
    arguments = ", ".join([*(metal_kernels.TYPE_NAMES[t] for t in types), *map(str, numbers)])
    kernel = _in_place_kernel(text, name, arguments)
    bound = {
        index: msl.Bound(array, "in_out" if key in writable else "read_only", key)
        for index, (key, array) in enumerate(buffers.items())
    }
    with msl.settings(seed=schedule, **chosen):
        return kernel.launch(bound, grid, (grid[0], max(1, min(grid[1], 256 // grid[0])), 1))
