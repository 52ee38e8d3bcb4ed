"""Compiles kernels, the runtime and the precompiled header; keeps what it made, by content."""

import atexit
import contextlib
import ctypes
import fcntl
import hashlib
import os
import platform
import shlex
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from functools import cache
from pathlib import Path

from .prepass import MetalError

HERE = Path(__file__).resolve().parent
INCLUDE = HERE / "include"
RUNTIME = HERE / "runtime"
# The kernel's floating point is IEEE, operation by operation: no contraction, half rounded every time.
COMMON_FLAGS = (
    "-std=c++20", "-fPIC", "-g1", "-w", "-ffp-contract=off", "-fno-strict-aliasing", "-fsigned-char",
    "-fno-exceptions", "-fno-rtti", "-fvisibility=hidden", "-fstack-clash-protection", "-U_FORTIFY_SOURCE",
    "-ftrivial-auto-var-init=pattern",
)  # fmt: skip
FAST_FLAGS = ("-O1",)  # compiling costs more than running
# Every access as the text has it: nothing merged, split, peeled or vectorised. The runtime stands in for libtsan.
INSTRUMENTED_FLAGS = ("-O1", "-fsanitize=thread", "-DMSL_INSTRUMENTED", "-fno-unroll-loops")
# With vectors that g++ 12 makes of scalars it forgets that a half between two floats rounds.
GCC_FLAGS = ("-fexcess-precision=16", "-fno-tree-slp-vectorize", "-fno-gnu-unique")
GCC_INSTRUMENTED_FLAGS = (
    "-fno-tree-vectorize", "-fno-store-merging", "-fno-thread-jumps", "-fno-tree-loop-im",
    "--param=tsan-instrument-func-entry-exit=0",
)  # fmt: skip
CLANG_INSTRUMENTED_FLAGS = (
    "-fno-vectorize", "-fno-slp-vectorize", "-mllvm", "-tsan-instrument-func-entry-exit=0",
    "-mllvm", "-tsan-instrument-read-before-write=1",
)  # fmt: skip
RUNTIME_FLAGS = ("-std=c++20", "-O2", "-fPIC", "-shared", "-g1", "-U_FORTIFY_SOURCE")


@cache
def compiler() -> tuple[str, ...]:
    """The command of a C++20 compiler: ``$CXX``, else g++, else clang++."""
    if chosen := os.environ.get("CXX"):
        return tuple(shlex.split(chosen))
    for name in ("g++", "clang++"):
        if shutil.which(name):
            return (name,)
    raise MetalError("[msl] no C++ compiler (g++ >= 12 or clang++ >= 16) found")


@cache
def is_clang() -> bool:
    return "clang" in _output_of((*compiler(), "--version"))


@cache
def cache_folder() -> Path:
    """Where compiled kernels stay: ``$KVPOOL_MSL_CACHE``, else build/msl beside the tests, else a temporary folder."""
    wanted = Path(os.environ.get("KVPOOL_MSL_CACHE", HERE.parent.parent / "build" / "msl"))
    try:
        wanted.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=wanted):
            return wanted
    except OSError:
        folder = Path(tempfile.mkdtemp(prefix="kvpool-msl-"))
        atexit.register(shutil.rmtree, folder, ignore_errors=True)
        return folder


def _output_of(command: tuple[str, ...]) -> str:
    return subprocess.run(command, capture_output=True, text=True, check=False).stdout


@cache
def _machine() -> str:
    """What decides whether compiled code may be used again: compiler, processor, and the files of this folder."""
    digest = hashlib.sha256()
    for path in sorted([*INCLUDE.rglob("*"), *RUNTIME.rglob("*")]):
        if path.is_file():
            digest.update(path.read_bytes())
    processor = platform.machine()
    with contextlib.suppress(OSError):
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        processor += next((line for line in lines if line.startswith(("flags", "Features"))), "")
    digest.update(f"{_output_of((*compiler(), '--version'))}{processor}".encode())
    return digest.hexdigest()


def _key(*parts: object) -> str:
    return hashlib.sha256("\0".join([_machine(), *map(str, parts)]).encode()).hexdigest()[:24]


def _flags(instrumented: bool) -> tuple[str, ...]:
    flags = COMMON_FLAGS + (INSTRUMENTED_FLAGS if instrumented else FAST_FLAGS)
    flags += ("-mcpu=native",) if platform.machine() in ("arm64", "aarch64") else ("-march=native",)
    if is_clang():
        return flags + (CLANG_INSTRUMENTED_FLAGS if instrumented else ())
    return flags + GCC_FLAGS + (GCC_INSTRUMENTED_FLAGS if instrumented else ())


def _run(*command: str | Path) -> None:
    result = subprocess.run([str(part) for part in command], capture_output=True, text=True, check=False)
    if result.returncode:
        raise MetalError(f"[msl] the compiler refused this:\n{result.stderr[:8000]}")


@contextlib.contextmanager
def _made_once(target: Path) -> Iterator[Path | None]:
    """Yield a temporary path to make `target` at, or None when it exists; other processes wait meanwhile."""
    if target.exists():
        yield None
        return
    with open(target.with_suffix(".lock"), "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if target.exists():
            yield None
            return
        temporary = target.with_name(f"{target.stem}.{os.getpid()}{target.suffix}")
        try:
            yield temporary
            temporary.rename(target)
        finally:
            temporary.unlink(missing_ok=True)
            Path(lock.name).unlink(missing_ok=True)


@cache
def runtime() -> ctypes.CDLL:
    """Compile the runtime, if need be, and load it."""
    library = cache_folder() / f"runtime_{_key('runtime', RUNTIME_FLAGS)}.so"
    with _made_once(library) as temporary:
        if temporary:
            _run(*compiler(), *RUNTIME_FLAGS, "-I", INCLUDE, *sorted(RUNTIME.glob("*.cpp")), "-o", temporary)
    loaded = ctypes.CDLL(str(library), mode=ctypes.RTLD_GLOBAL)
    loaded.msl_launch.restype = ctypes.c_int
    return loaded


@cache
def _precompiled_header(instrumented: bool) -> tuple[str, ...]:
    """Options that put the precompiled header in front of a kernel."""
    flags = _flags(instrumented)
    folder = cache_folder() / f"header_{_key('header', flags)}"
    folder.mkdir(exist_ok=True)
    header = folder / "all.h"
    with _made_once(folder / ("all.h.pch" if is_clang() else "all.h.gch")) as temporary:
        if temporary:
            header.write_text('#include "msl/all.h"\n')
            _run(*compiler(), *flags, "-I", INCLUDE, "-x", "c++-header", header, "-o", temporary)
    return ("-include-pch", f"{header}.pch") if is_clang() else ("-include", str(header))


def compile_kernel(text: str, name: str, instrumented: bool) -> Path:
    """Compile a translated kernel; return its shared object."""
    flags = _flags(instrumented)
    library = cache_folder() / f"{name[:60]}_{_key(text, flags)}.so"
    with _made_once(library) as temporary:
        if temporary:
            header = _precompiled_header(instrumented)
            source = temporary.with_suffix(".cpp")
            source.write_text(text)
            shared = ("-shared", *(("-undefined", "dynamic_lookup") if platform.system() == "Darwin" else ()))
            code = temporary.with_suffix(".o")
            command = (*compiler(), *flags, *header, "-I", INCLUDE)
            try:
                if instrumented:  # the runtime stands in for libtsan, which must not be linked
                    _run(*command, "-c", source, "-o", code)
                    link = [flag for flag in flags if flag != "-fsanitize=thread"]
                    _run(*compiler(), *link, *shared, code, "-o", temporary)
                else:
                    _run(*command, *shared, source, "-o", temporary)
            finally:
                source.unlink()
                code.unlink(missing_ok=True)
    return library


def line_of(library: Path, address: int) -> str:
    """Return "file:line" of an address in a shared object, or "" where binutils has no addr2line."""
    tool = shutil.which("addr2line")
    if not tool:
        return ""
    line = _output_of((tool, "-e", str(library), hex(address))).strip().split(" ")[0]
    return "" if line.startswith("?") or line.endswith("?") else Path(line).name
