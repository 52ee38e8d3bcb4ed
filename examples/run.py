"""Build an engine's decode loop in C, Cython or Rust, run it on a pool, and compare it with the same loop in Python.

    python examples/run.py c|cython|rust

Needs kvpool installed and a C compiler, Cython or cargo. What is built goes to ``--build``, a temporary folder by
default, and is built again only when its source or kvpool.h is newer.
"""

import argparse
import ctypes
import importlib.util
import os
import shlex
import shutil
import subprocess
import sys
import sysconfig
import tempfile
from pathlib import Path

import numpy as np

import kvpool

HERE = Path(__file__).resolve().parent
SOURCES = {"c": "decode_c.c", "cython": "decode_cython.pyx", "rust": "decode_rust"}
ROWS, STEPS = 8, 100
DARWIN = sys.platform == "darwin"


def is_new(made, *sources):
    """Whether `made` is there and newer than the files it is made from."""
    files = [file for source in sources for file in ([source] if source.is_file() else source.rglob("*"))]
    return made.exists() and all(file.stat().st_mtime <= made.stat().st_mtime for file in files)


def compile_c(source, library):
    """Make an extension module of one file of C."""
    compiler = shlex.split(os.environ.get("CC") or sysconfig.get_config_var("CC") or "cc")
    lookup = ["-undefined", "dynamic_lookup"] if DARWIN else []
    folders = [f"-I{sysconfig.get_path('include')}", f"-I{kvpool.get_include()}"]
    subprocess.run([*compiler, "-O1", "-shared", "-fPIC", *lookup, *folders, source, "-o", library], check=True)


def build(kind, folder):
    """Return the library of an example."""
    source = HERE / SOURCES[kind]
    suffix = ".so" if kind == "rust" else sysconfig.get_config_var("EXT_SUFFIX")
    library = folder / f"{source.stem}{suffix}"
    interface = Path(kvpool.get_include()) / "kvpool"
    if is_new(library, source, interface / "include" / "kvpool.h", interface / "capi.pxd"):
        return library
    folder.mkdir(parents=True, exist_ok=True)
    if kind == "rust":
        flags = "-C link-arg=-undefined -C link-arg=dynamic_lookup" if DARWIN else ""
        command = ["cargo", "build", "-q", "--offline", "--manifest-path", source / "Cargo.toml"]
        environment = {**os.environ, "RUSTFLAGS": flags}
        subprocess.run([*command, "--target-dir", folder / "cargo"], check=True, env=environment)
        made = folder / "cargo" / "debug" / f"libdecode_rust{'.dylib' if DARWIN else '.so'}"
        shutil.copy(made, library)
    elif kind == "cython":
        code = folder / "decode_cython.c"
        command = [sys.executable, "-m", "cython", "-3", "-I", kvpool.get_include(), source, "-o", code]
        subprocess.run(command, check=True)
        compile_c(code, library)
    else:
        compile_c(source, library)
    return library


def load(kind, library):
    """Return the function ``decode(pool, plan, handles, steps)`` of a library."""
    if kind != "rust":
        spec = importlib.util.spec_from_file_location(Path(SOURCES[kind]).stem, library)
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        return module.decode
    decode = ctypes.PyDLL(str(library)).decode  # keeps the GIL, and raises what the library has set
    decode.argtypes = [ctypes.py_object, ctypes.py_object, ctypes.c_void_p, *[ctypes.c_int64] * 2, ctypes.c_void_p]

    def call(pool, plan, handles, steps):
        total = ctypes.c_int64()
        decode(pool, plan, handles.ctypes.data, len(handles), steps, ctypes.addressof(total))
        return total.value

    return call


def decode_python(pool, plan, handles, steps):
    """The loop that the examples make."""
    total = 0
    for _ in range(steps):
        pool.step(plan, handles)
        total += int(plan.slot_mapping.sum())
        pool.done(plan)
    return total


def outcome(decode):
    """Return what a loop gives on a new pool: its sum, and the digest of all that happened to the pool."""
    pool = kvpool.Pool(num_blocks=256, block_size=16)
    plan = kvpool.Plan(pool, ROWS)
    handles = np.array([pool.open() for _ in range(ROWS)], np.int64)
    total = decode(pool, plan, handles, STEPS)
    pool.check()
    return total, pool.digest()


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("kind", choices=SOURCES)
    parser.add_argument("--build", type=Path, help="folder for what is built")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as temporary:
        library = build(options.kind, options.build or Path(temporary))
        found, expected = outcome(load(options.kind, library)), outcome(decode_python)
    print(f"kvpool of {kvpool.get_include()}")
    print(f"{STEPS} steps of {ROWS} sequences: {options.kind} gives {found}, Python {expected}")
    sys.exit(found != expected)


if __name__ == "__main__":
    main()
