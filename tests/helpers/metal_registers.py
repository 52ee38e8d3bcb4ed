"""Registers and spills of the attention kernels, by a real compiler: the texts for CUDA, by nvrtc and ptxas.

Apple's compiler is neither, but its GPUs have 128 registers of 32 bits a lane too, and ptxas allocates registers where
reading a text only guesses. `make cross` installs both compilers; they need no GPU. ``python
tests/helpers/metal_registers.py`` prints what every variant of `metal_costs` takes.
"""

from __future__ import annotations

import ctypes
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NamedTuple

import mlx.core as mx
from metal_costs import VARIANTS, batch_of, name_of

from kvpool_backends.mlx.cuda import metal_kernel
from kvpool_backends.mlx.metal_kernels import source_text

REGISTERS_MAX = 128
ARCHITECTURE = "90"
TYPES = {"float32": "float", "float16": "__half", "bfloat16": "__nv_bfloat16", "int32": "int", "int64": "int64_t"}
TYPES |= {"uint32": "uint"}
#: What MLX's own header for kernels has, as far as the texts need it.
PRELUDE = """\
typedef int int32_t;
typedef long long int64_t;
typedef unsigned int uint;
struct Shape { int32_t s[10]; __device__ int32_t operator[](int i) const { return s[i]; } };
struct Strides { int64_t s[10]; __device__ int64_t operator[](int i) const { return s[i]; } };
"""
#: Matrices are multiplied by shuffles: with more registers than Apple's GPUs need, and fewer than NVIDIA's instruction.
PRODUCTS = "using metal::multiply_by_shuffles;\n#define simdgroup_multiply_accumulate multiply_by_shuffles\n"


class Found(NamedTuple):
    """What the compilers say of one kernel."""

    name: str
    registers: int  # with as many as it wants
    spilled: int  # bytes, with at most `REGISTERS_MAX`


class Text(NamedTuple):
    """A kernel as MLX compiles it: what stands before and behind the end of ``cuda.h``."""

    name: str
    dialect: str
    text: str


def texts(variant: dict[str, Any]) -> list[Text]:
    """The kernels that a variant launches, with nothing computed."""
    found: list[Text] = []

    def cuda_kernel(*, name: str, input_names: list[str], output_names: list[str], source: str, header: str, **_: Any):
        def launch(*, inputs, template, output_shapes, output_dtypes, **_: Any) -> list[mx.array]:
            parameters = []
            for argument, x in zip(input_names, inputs, strict=True):
                parameters.append(f"const {_type(x.dtype)}* {argument}")
                for suffix, kind in (("_shape", "Shape"), ("_strides", "Strides")):
                    if x.ndim and argument + suffix in source:
                        parameters.append(f"const __grid_constant__ {kind} {argument}{suffix}")
            parameters += [f"{_type(kind)}* {out}" for out, kind in zip(output_names, output_dtypes, strict=True)]
            constants = "".join(map(_constant, template))
            head = f'namespace mlx {{\nextern "C" __global__ void {name}({", ".join(parameters)}) {{\n'
            dialect = source_text("cuda.h")
            kernel = f"{header.removeprefix(dialect)}{head}{constants}{source}\n}}\n}}\n"
            found.append(Text(name, PRELUDE + dialect, kernel))
            return [mx.zeros(shape, kind) for shape, kind in zip(output_shapes, output_dtypes, strict=True)]

        return launch

    batch_of(variant).run(lambda **description: metal_kernel(factory=cuda_kernel, **description))
    return found


def _type(dtype: mx.Dtype) -> str:
    return TYPES[str(dtype).rpartition(".")[2]]


def _constant(argument: tuple[str, Any]) -> str:
    name, value = argument
    if isinstance(value, bool):
        return f"constexpr bool {name} = {str(value).lower()};\n"
    return f"constexpr int {name} = {value};\n" if isinstance(value, int) else f"using {name} = {_type(value)};\n"


# ---------------------------------------------------------------------------------------------- compilers


@cache
def _tool(name: str) -> Path:
    """The folder of a package of NVIDIA's."""
    spec = find_spec(f"nvidia.{name}")
    assert spec and spec.submodule_search_locations, f"nvidia.{name} is not installed: see make cross"
    return Path(spec.submodule_search_locations[0])


@cache
def _nvrtc() -> ctypes.CDLL:
    return ctypes.CDLL(str(next((_tool("cuda_nvrtc") / "lib").glob("libnvrtc.so.*"))))


def ptx_of(name: str, text: str) -> bytes:
    """The assembly of a text. AssertionError with what the compiler says if it refuses it."""
    nvrtc, program, size = _nvrtc(), ctypes.c_void_p(), ctypes.c_size_t()
    include = f"--include-path={_tool('cuda_runtime') / 'include'}"
    options = [f"--gpu-architecture=compute_{ARCHITECTURE}".encode(), include.encode(), b"-w"]
    nvrtc.nvrtcCreateProgram(ctypes.byref(program), text.encode(), b"kernel.cu", 0, None, None)
    refused = nvrtc.nvrtcCompileProgram(program, len(options), (ctypes.c_char_p * len(options))(*options))
    said = "ProgramLog" if refused else "PTX"
    getattr(nvrtc, f"nvrtcGet{said}Size")(program, ctypes.byref(size))
    made = ctypes.create_string_buffer(size.value)
    getattr(nvrtc, f"nvrtcGet{said}")(program, made)
    nvrtc.nvrtcDestroyProgram(ctypes.byref(program))
    assert not refused, f"{name}: {made.value.decode()[:4000]}"
    return made.value


def _assembled(ptx: Path, *options: str) -> tuple[int, int]:
    """Registers and bytes spilled."""
    command = [_tool("cuda_nvcc") / "bin" / "ptxas", "-v", f"-arch=sm_{ARCHITECTURE}", *options, ptx, "-o", "/dev/null"]
    said = subprocess.run(list(map(str, command)), capture_output=True, text=True, check=True).stderr
    (registers,), (spilled,) = re.findall(r"Used (\d+) registers", said), re.findall(r"(\d+) bytes spill stores", said)
    return int(registers), int(spilled)


def found(kernel: Text) -> Found:
    """Compile one kernel as it is shipped, and with products of one instruction."""
    name, dialect, text = kernel
    ptx_of(name, dialect + text)
    with tempfile.TemporaryDirectory() as folder:
        ptx = Path(folder) / "kernel.ptx"
        ptx.write_bytes(ptx_of(name, dialect + PRODUCTS + text))
        _, spilled = _assembled(ptx, "-maxrregcount", str(REGISTERS_MAX))
        return Found(name, _assembled(ptx)[0], spilled)


def every_variant(part: str = "") -> Iterator[tuple[str, Found]]:
    """Compile the kernels of every variant with this part in its name."""
    named = [(name_of(variant), text) for variant in VARIANTS if part in name_of(variant) for text in texts(variant)]
    with ThreadPoolExecutor(2) as pool:
        yield from zip((name for name, _ in named), pool.map(found, (text for _, text in named)), strict=True)


if __name__ == "__main__":
    for shape, kernel in every_variant(*sys.argv[1:]):
        print(f"{shape:48} {kernel.name[7:22]:16}{kernel.registers:4} registers, {kernel.spilled:5} bytes spilled")
        sys.stdout.flush()
