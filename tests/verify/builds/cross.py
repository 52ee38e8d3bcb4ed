"""This tree compiled for AArch64 on any Linux, for macOS and for Linux: `make cross`.

zig is the compiler, from PyPI. It has the C headers and libraries of both systems; what MLX's extension needs of
Apple's frameworks is three headers of a line, and MLX itself comes as its wheel for macOS. What was compiled for
macOS is linked as far as it can be without a Mac, and is not run. What was compiled for Linux runs under qemu on
Debian's AArch64 Python, where the machine has apt-get and qemu: tests of the core, of the CPU kernels and of the
stand-in. The Metal kernels are compiled as CUDA, too, by NVIDIA's compilers from PyPI: none may spill registers. And
zig's clang checks them as C++ for OpenCL, whose address spaces are those of Metal.
"""

from __future__ import annotations

import importlib.metadata
import os
import shutil
import struct
import subprocess
import sys
import sysconfig
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

from tests.verify.builds.interpreter import ROOT, apt

FOLDER = ROOT / "build" / "cross"
MACOS, LINUX = "aarch64-macos", "aarch64-linux-gnu.2.36"
MACOS_RELEASES = (14, 15, 26)  # with wheels of MLX
LC_SYMTAB = 2  # of Mach-O
MLX_NAMES = ("3mlx4core", "N3MTL", "N2NS", "N2CA")  # parts of mangled names that MLX's library has
KERNELS = ROOT / "kvpool_backends" / "cpu" / "kernels"
NATIVE = ROOT / "kvpool_backends" / "mlx" / "native"
MSL = ROOT / "tests" / "msl"
VERSION = f"{sys.version_info.major}.{sys.version_info.minor}"
SUITES = {"3.11": "bookworm", "3.13": "trixie"}  # of Debian, by its Python
DEBIAN = (
    *(f"python{VERSION}-minimal", f"libpython{VERSION}-minimal", f"libpython{VERSION}-stdlib", "zlib1g", "libexpat1"),
    *("libc6", "libgcc-s1", "libstdc++6", "libffi8", "libbz2-1.0", "liblzma5", "libuuid1", "libsqlite3-0"),
)
PACKAGES = ("numpy", "pytest", "pytest-timeout", "hypothesis")
#: All that MLX's headers need of Apple's.
APPLE = {
    "CoreFoundation/CoreFoundation.h": "typedef double CFTimeInterval;\n",
    "Foundation/Foundation.h": "",
    "IOSurface/IOSurfaceRef.h": "typedef struct __IOSurface *IOSurfaceRef;\n",
}
#: Of the core, of the kernels and of the stand-in: what qemu runs in a minute or two.
TESTS = (
    *(f"tests/core/test_{name}.py" for name in ("pending", "cow", "sequence", "groups", "plan_formats")),
    *("tests/prefix/test_prefix_commit.py", "tests/cpu/test_cpu_move.py", "tests/metal/test_msl_schedules.py"),
    *(
        f"tests/cpu/test_cpu_decode.py::test_{name}"
        for name in (
            *("chunk_around_tiles_of_queries_equals_float64", "nan_of_the_mask_shows_where_it_is_visible"),
            *("tokens_that_a_mask_hides_from_all_never_matter", "query_takes_nothing_from_tokens_that_it_does_not_see"),
        )
    ),
    "tests/cpu/test_cpu_quantized.py::test_masked_tokens_that_are_nan_never_matter",
)
#: A C++ compiler for a Python that qemu runs: zig runs outside of it, and is told that it cross-compiles.
COMPILER = """\
#!/bin/sh
unset PYTHONPATH
for part; do shift; [ "$part" = -mcpu=native ] || set -- "$@" "$part"; done
exec {python} -m ziglang c++ -target {target} "$@"
"""


class Piece(NamedTuple):
    """Sources that become one library, and what they are compiled with."""

    name: str
    sources: tuple[Path, ...]
    options: tuple[str, ...]
    libraries: tuple[str, ...] = ()


def zig(*arguments: str | Path) -> str | None:
    """Run zig; what it says if it fails, else None."""
    done = subprocess.run([sys.executable, "-m", "ziglang", *map(str, arguments)], capture_output=True, text=True)
    return done.stderr[-4000:] or f"exit status {done.returncode}" if done.returncode else None


# ---------------------------------------------------------------------------- pieces


def extension_modules() -> Iterator[Piece]:
    """The core and the CPU backend, from the C files that Cython has made of them."""
    include = sysconfig.get_paths()["include"]
    options = (f"-I{include}", f"-I{ROOT}", f"-I{KERNELS}", "-O1", "-ffp-contract=off", "-w")
    for folder in ("kvpool", "kvpool_backends/cpu"):
        for source in sorted((ROOT / folder).glob("*.pyx")):
            more = tuple(sorted(KERNELS.glob("*.c"))) if source.stem == "_kernels" else ()
            name = f"{folder}/{source.stem}"
            yield Piece(name, (ROOT / "build" / "cython" / f"{name}.c", *more), options)


def stand_in() -> Iterator[Piece]:
    """The runtime of `tests/msl`, and shipped kernels as it compiles them, plain and instrumented."""
    from msl import build

    flags = (*(flag for flag in build.RUNTIME_FLAGS if flag != "-shared"), f"-I{build.INCLUDE}")
    yield Piece("msl/runtime", tuple(sorted(build.RUNTIME.glob("*.cpp"))), flags)
    instrumented = (*build.INSTRUMENTED_FLAGS, *build.CLANG_INSTRUMENTED_FLAGS)
    for number, text in enumerate(shipped_kernels()):
        source = FOLDER / f"kernel{number}.cpp"
        source.write_text(text)
        for kind, more in (("plain", build.FAST_FLAGS), ("instrumented", instrumented)):
            yield Piece(f"msl/kernel{number}_{kind}", (source,), (*build.COMMON_FLAGS, *more, f"-I{build.INCLUDE}"))


def shipped_kernels() -> list[str]:
    """C++ of attention and its reduction over a dense and a packed pool, as the stand-in translates them."""
    import msl.fast
    from metal_cases import Batch, PackedBatch
    from metal_engine import StandIn

    for kind in (Batch, PackedBatch):
        kind(dtype="float16", seq_lens=(40,), part_tokens=32).run(StandIn().factory(0))
    return [kernel.text for kernel in msl.fast._kernels.values()]


def mlx_for_macos(release: int = 15) -> Path:
    """The folder of MLX's wheel for a macOS, downloaded once."""
    version, platform = importlib.metadata.version("mlx"), f"macosx_{release}_0_arm64"
    folder = FOLDER / f"mlx-{version}-{release}"
    if not folder.exists():
        pip("download", "--no-deps", "--dest", FOLDER / "wheels", "--platform", platform, f"mlx-metal=={version}")
        (wheel,) = (FOLDER / "wheels").glob(f"mlx_metal-{version}-*{platform}.whl")
        shutil.unpack_archive(wheel, folder, "zip")
    return folder / "mlx"


def symbols(path: Path) -> dict[str, bool]:
    """The external symbols of a Mach-O file, and whether it defines them."""
    data, at, found = path.read_bytes(), 32, {}
    for _ in range(struct.unpack_from("<I", data, 16)[0]):
        command, size = struct.unpack_from("<II", data, at)
        if command == LC_SYMTAB:
            first, count, strings = struct.unpack_from("<III", data, at + 8)
            for entry in range(count):
                name, kind, section = struct.unpack_from("<IBB", data, first + 16 * entry)
                if kind & 1 and not kind & 0xE0:  # external, and not of a debugger
                    begin = strings + name
                    found[data[begin : data.index(b"\0", begin)].decode()] = section > 0
        at += size
    return found


def missing_symbols() -> list[str]:
    """What the extension needs of MLX and no library of its wheels has: it is linked without a word there."""
    ours = [symbols(made) for made in (FOLDER / MACOS / "native").glob("*.o")]
    defined = {name for one in ours for name, is_defined in one.items() if is_defined}
    needed = {name for one in ours for name in one if any(part in name for part in MLX_NAMES)} - defined
    wrong = []
    for release in MACOS_RELEASES:
        has = symbols(mlx_for_macos(release) / "lib" / "libmlx.dylib")
        missing = sorted(name for name in needed if not has.get(name))
        print(f"{MACOS:24} MLX for macOS {release}: {len(needed)} symbols, {len(missing)} missing", flush=True)
        wrong += [f"MLX for macOS {release} has no {name}" for name in missing]
    return wrong


def native_extension() -> Piece:
    """The extension of the mlx backend with its part for Metal, against MLX for macOS."""
    mlx, apple = mlx_for_macos(), FOLDER / "apple"
    for header, text in APPLE.items():
        (apple / header).parent.mkdir(parents=True, exist_ok=True)
        (apple / header).write_text(text)
    theirs = (mlx / "include", mlx / "include" / "metal_cpp", apple, sysconfig.get_paths()["include"])
    options = ("-std=c++20", "-O1", "-DKVPOOL_METAL", f"-I{NATIVE}", f"-I{KERNELS}")
    options += tuple(part for folder in theirs for part in ("-isystem", str(folder)))
    return Piece("native/_kvpool_mlx", tuple(sorted(NATIVE.glob("*.cpp"))), options, (f"-L{mlx / 'lib'}", "-lmlx"))


# ---------------------------------------------------------------------------- compile


def compile_pieces(target: str, pieces: Iterable[Piece]) -> list[str]:
    """Compile and link; what went wrong, one text a file."""
    wrong: list[str] = []
    with ThreadPoolExecutor(2) as pool:
        for piece, problems in pool.map(lambda piece: (piece, compile_piece(target, piece)), pieces):
            print(f"{target:24} {piece.name:48} {'FAILED' if problems else 'compiled and linked'}", flush=True)
            wrong += problems
    return wrong


def compile_piece(target: str, piece: Piece) -> list[str]:
    """The texts of what failed; of a piece that is linked, none."""
    suffix = "so" if target == LINUX else "dylib"
    library = FOLDER / target / f"{piece.name}.{suffix}"
    library.parent.mkdir(parents=True, exist_ok=True)
    objects, wrong = [], []
    for source in piece.sources:
        made = library.with_name(f"{library.stem}.{source.stem}.o")
        how = "c++" if source.suffix == ".cpp" else "cc"
        said = zig(how, "-target", target, "-fPIC", "-g0", *piece.options, "-c", source, "-o", made)
        objects.append(made)
        wrong += [f"{target} {source}:\n{said}"] if said else []
    if wrong:
        return wrong
    # What the process that loads it has; the stand-in's runtime is complete.
    undefined = ("-undefined", "dynamic_lookup") if target == MACOS and piece.name != "msl/runtime" else ()
    said = zig("c++", "-target", target, "-shared", *undefined, *objects, *piece.libraries, "-o", library)
    return [f"{target} {library}:\n{said}"] if said else []


def spilling_kernels() -> list[str]:
    """Compile the Metal kernels as CUDA, whose compiler needs no GPU; those with more values than registers."""
    from metal_registers import REGISTERS_MAX, every_variant

    wrong = []
    for shape, kernel in every_variant():
        print(f"{'CUDA':24} {shape:48} {kernel.registers} registers, {kernel.spilled} bytes spilled", flush=True)
        if kernel.spilled:
            wrong.append(f"{shape}: {kernel.name} spills {kernel.spilled} bytes with {REGISTERS_MAX} registers")
    return wrong


def refused_kernels(variants: Sequence[dict[str, Any]]) -> list[str]:
    """What clang says against the Metal kernels of variants of `metal_costs`, as C++ and as C++ for OpenCL."""
    import msl
    from metal_costs import batch_of
    from metal_engine import StandIn

    kernels: dict[str, Any] = {}
    with mock.patch.object(msl.Kernel, "launch", lambda self, *_: kernels.setdefault(self.function, self)):
        for variant in variants:
            batch_of(variant).run(StandIn().factory(0))
    with ThreadPoolExecutor(2) as pool:
        wrong = [fault for faults in pool.map(lambda kernel: kernel.faults, kernels.values()) for fault in faults]
    print(f"{'C++ for OpenCL':24} {len(kernels)} kernels, {len(wrong)} objections", flush=True)
    return wrong


def pip(*arguments: str | Path) -> None:
    """Run pip; wheels alone, for another machine."""
    command = [sys.executable, "-m", "pip", *map(str, arguments), "--only-binary=:all:"]
    subprocess.run([*command, "--quiet", "--disable-pip-version-check"], check=True)


# ---------------------------------------------------------------------------- run


def refused() -> str | None:
    """Why nothing for Linux can run here, if it cannot."""
    if sys.implementation.name != "cpython" or VERSION not in SUITES:
        return f"no Debian has Python {VERSION}"
    if not sys.platform.startswith("linux") or shutil.which("apt-get") is None or shutil.which("dpkg-deb") is None:
        return "qemu and a Python for AArch64 come from Debian by apt-get, which this machine lacks"
    return None


def unpacked(folder: Path, architecture: str, *packages: str) -> Path | None:
    """A folder with the content of packages of Debian, downloaded once. None if the mirror lacks one."""
    if not (folder / "made").exists():
        downloads = folder.with_name(f"{folder.name}.packages")
        downloads.mkdir(parents=True, exist_ok=True)
        how = {"cwd": downloads, "types": "deb", "APT::Architecture": architecture}
        suite = SUITES[VERSION]
        if not (apt(suite, "update", **how) and apt(suite, "download", *packages, **how)):
            return None
        for package in sorted(downloads.glob("*.deb")):
            subprocess.run(["dpkg-deb", "--extract", package, folder], check=True)
        shutil.rmtree(downloads)
        (folder / "made").touch()
    return folder


def run_tests(tests: Sequence[str]) -> list[str]:
    """Run tests of this tree on AArch64, under qemu; what went wrong."""
    machine = os.uname().machine
    host = {"x86_64": "amd64", "aarch64": "arm64"}.get(machine, machine)
    emulator, root = unpacked(FOLDER / "qemu", host, "qemu-user-static"), unpacked(FOLDER / "root", "arm64", *DEBIAN)
    if emulator is None or root is None:
        print("not run: the mirror does not give what it takes", flush=True)
        return []
    site, tree = FOLDER / "site", FOLDER / "tree"
    if not site.exists():
        pip("install", "--target", site, "--platform", "manylinux_2_28_aarch64", *PACKAGES)
    shutil.rmtree(tree, ignore_errors=True)
    for part in ("kvpool", "kvpool_backends", "metal", "tests"):
        shutil.copytree(ROOT / part, tree / part, ignore=shutil.ignore_patterns("*.so", "__pycache__"))
    shutil.copy(ROOT / "pyproject.toml", tree)
    suffix = f".cpython-{VERSION.replace('.', '')}-aarch64-linux-gnu.so"
    for package in ("kvpool", "kvpool_backends"):
        for library in (FOLDER / LINUX / package).rglob("*.so"):
            shutil.copy(library, (tree / library.relative_to(FOLDER / LINUX)).with_suffix(suffix))
    (tool,) = (emulator / "usr" / "bin").glob("qemu-aarch64-static")
    python = ["-L", str(root), str(root / "usr" / "bin" / f"python{VERSION}")]
    compiler = FOLDER / "c++"
    compiler.write_text(COMPILER.format(python=sys.executable, target=LINUX))
    compiler.chmod(0o755)
    paths = {"PYTHONPATH": os.pathsep.join([str(site), str(tree)]), "CXX": str(compiler)}
    paths["KVPOOL_MSL_CACHE"] = str(FOLDER / "msl")
    command = [tool, *python, "-m", "pytest", "-q", "-p", "no:cacheprovider", *tests]
    done = subprocess.run(command, cwd=tree, env={**os.environ, **paths})
    return [f"the tests under qemu ended with {done.returncode}"] if done.returncode else []


def main() -> int:
    """Compile everything, run what can run; 1 if anything went wrong."""
    sys.path[:0] = [str(ROOT / "tests" / name) for name in ("", "helpers")]
    import metal_costs

    FOLDER.mkdir(parents=True, exist_ok=True)
    modules, kernels = list(extension_modules()), list(stand_in())
    wrong = compile_pieces(MACOS, [*kernels, *modules, native_extension()]) or missing_symbols()
    wrong += compile_pieces(LINUX, [*kernels, *modules]) + spilling_kernels() + refused_kernels(metal_costs.VARIANTS)
    if why := refused():
        print(f"nothing is run: {why}")
    elif not wrong:
        wrong += run_tests(TESTS)
    print("\n\n".join(wrong) or "everything compiled for macOS and for Linux on AArch64")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
