"""Two loops of decode steps: from C through the capsule, and the core's own. Built when they are asked for."""

import ctypes
import functools
import importlib.util
import os
import shlex
import subprocess
import sys
import sysconfig
from pathlib import Path

import numpy as np

import kvpool
from benchmarks.baselines import BUILD, HERE, alternate, load_c
from benchmarks.command import main
from benchmarks.gate import Gate

ROWS, STEPS = 64, 256
BLOCK_SIZE = 16
LOOPS = ("capsule", "core")


@functools.cache
def core_steps():
    """Return the function of core_loop.pyx, compiled unless that was done already."""
    source, library = HERE / "core_loop.pyx", BUILD / f"core_loop{sysconfig.get_config_var('EXT_SUFFIX')}"
    newest = max(file.stat().st_mtime for file in [source, *Path(kvpool.__file__).parent.rglob("*.pxd")])
    if not library.exists() or library.stat().st_mtime < newest:
        BUILD.mkdir(parents=True, exist_ok=True)
        code, lookup = BUILD / "core_loop.c", ["-undefined", "dynamic_lookup"] * (sys.platform == "darwin")
        subprocess.run([sys.executable, "-m", "cython", "-I", HERE.parent, source, "-o", code], check=True)
        compiler = shlex.split(os.environ.get("CC") or sysconfig.get_config_var("CC") or "cc")
        include = f"-I{sysconfig.get_path('include')}"
        subprocess.run([*compiler, "-O3", "-shared", "-fPIC", *lookup, include, code, "-o", library], check=True)
    spec = importlib.util.spec_from_file_location("core_loop", library)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module.core_steps


@functools.cache
def capi_steps():
    """Return the function of capi_loop.c, and the table of functions that it takes."""
    library = ctypes.PyDLL(load_c("capi_loop")._name)  # keeps the GIL
    library.capi_steps.argtypes = [*[ctypes.c_void_p] * 4, *[ctypes.c_int64] * 2, ctypes.c_int]
    get = ctypes.pythonapi.PyCapsule_GetPointer
    get.restype, get.argtypes = ctypes.c_void_p, [ctypes.py_object, ctypes.c_char_p]
    return library.capi_steps, get(kvpool._C_API, b"kvpool._C_API")


def decoding(rows=ROWS, *, in_order=True):
    """Return a pool, a plan and the handles of `rows` sequences of staggered lengths, room for a long run."""
    width = 1 << 12
    pool = kvpool.Pool(rows * width + 1, BLOCK_SIZE, max_seqs=rows, max_blocks_per_seq=width, in_order=in_order, seed=1)
    plan, handles = kvpool.Plan(pool, rows), np.array([pool.open() for _ in range(rows)], np.int64)
    prompts = kvpool.Plan(pool, rows, rows * BLOCK_SIZE)
    pool.step(prompts, handles, 1 + np.arange(rows) % BLOCK_SIZE)
    if not in_order:
        pool.done(prompts)
    return pool, plan, handles


def loop(who, steps=STEPS, *, in_order=True):
    """Return a function that makes `steps` decode steps, and its pool."""
    pool, plan, handles = decoding(in_order=in_order)
    if who == "core":
        function, arguments = core_steps(), (pool, plan, handles, steps)
    else:
        function, table = capi_steps()
        arguments = (table, id(pool), id(plan), handles.ctypes.data, len(handles), steps, not in_order)

    def run(keep=(pool, plan, handles)):
        if function(*arguments):
            raise RuntimeError(f"a step of the {who}'s loop failed")

    return run, pool


def time_ratio(rounds=40):
    """Return the capsule's time over the core's, of the best rounds; the two take turns."""
    capsule, core = alternate([(loop(who)[0], 1, None) for who in LOOPS], rounds)
    return capsule / core


def gates(_args):
    """Yield the time of the capsule's loop over that of the core's."""
    yield Gate("decode step from C / the core's own", time_ratio(), 1.2, at_most=True, unit="x")


if __name__ == "__main__":
    sys.exit(main())
