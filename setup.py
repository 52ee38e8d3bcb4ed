"""Compile the Cython core. Everything else about the package stands in pyproject.toml.

Environment switches::

    KVPOOL_DEBUG=1                      bounds, None and initialisation checks on, C asserts on, debug symbols
    KVPOOL_SANITIZE=address,undefined   build with these gcc/clang sanitizers (implies debug symbols)
    KVPOOL_FAULTS=1                     allocations fail on demand (kvpool/core/memory.pxi); KVPOOL_DEBUG has it too
    KVPOOL_COVERAGE=1                   count lines and branches of the C code (gcc)
    KVPOOL_OPTIMIZE=1                   the compiler's -O level, 3 unless one of the above says otherwise
    KVPOOL_MLX_EXTENSION=1              compile MLX's extension too, for the MLX that is installed (on a Mac: default)

``python -m tests.verify.builds`` makes and runs such builds beside the one in place.
"""

import json
import os
import re
import shutil
import subprocess
import sys
import sysconfig
import tomllib
from pathlib import Path

from Cython.Build import cythonize
from setuptools import Extension, find_packages, setup
from setuptools.command.build_ext import build_ext

DEBUG = os.environ.get("KVPOOL_DEBUG", "0") not in ("", "0")
SANITIZE = os.environ.get("KVPOOL_SANITIZE", "")
FAULTS = DEBUG or os.environ.get("KVPOOL_FAULTS", "0") not in ("", "0")
COVERAGE = os.environ.get("KVPOOL_COVERAGE", "0") not in ("", "0")
OPTIMIZE = os.environ.get("KVPOOL_OPTIMIZE", "")
VARIANT_FILE = Path("build/cython/variant")
CORE, CPU = Path("kvpool"), Path("kvpool_backends/cpu")
#: The fuzzer of the core, and what threads do at once. Compiled where the tree is compiled in place; no wheel has them.
FUZZER = [Path("tests/verify"), Path("tests/verify/slow")] if "--inplace" in sys.argv else []
#: Compiled for size: the core does more for each call than it does. `_kernels` says so in its text, because the C
#: kernels have its arguments.
FOR_SIZE = ("capi",)
#: What the core is compiled with besides. gcc takes every function that has one caller into it: then calls of one row
#: pay for the registers of all that they might lead to. It also inlines, copies, unrolls and pads where that saves
#: nothing, counted in instructions: a quarter of the binary.
CORE_ARGS = (
    *("-fno-inline-functions-called-once", "--param=inline-unit-growth=15", "--param=max-inline-insns-auto=15"),
    *("--param=early-inlining-insns=6", "--param=max-completely-peeled-insns=60"),
    "--param=max-completely-peel-times=4",
    *(f"-fno-align-{what}" for what in ("functions", "jumps", "labels", "loops")),
)
#: And the kernels of the CPU backend, whose loops are written out: copies of functions and of loops gain nothing.
KERNEL_ARGS = (
    *("-fno-inline-functions", "-fno-split-loops", "-fno-split-paths"),
    *(f"-fno-align-{what}" for what in ("functions", "jumps", "labels", "loops")),
)
#: Plain and fast under the address sanitizer: the judge of the fuzzer walks all of the state, within bounds of its own.
PLAIN = ("_verify",) if "address" in SANITIZE else ()

DIRECTIVES = {
    "language_level": 3,
    "boundscheck": DEBUG,
    "wraparound": False,
    "initializedcheck": DEBUG,
    "nonecheck": DEBUG,
    "cdivision": True,
    "embedsignature": True,
    "freethreading_compatible": True,  # a pool has a lock of its own, and no module has state that threads share bare
}


def compile_flags() -> tuple[list[str], list[str]]:
    """Return the compiler's and the linker's arguments for the chosen switches."""
    level = OPTIMIZE or ("0" if COVERAGE else "1" if DEBUG or SANITIZE else "3")
    compile_args = [f"-O{level}", "-g" if DEBUG or SANITIZE else "-g0"]
    link_args = []
    if DEBUG:
        compile_args += ["-UNDEBUG", "-DKVPOOL_DEBUG=1"]
    if FAULTS:
        compile_args += ["-DKVPOOL_FAULTS=1"]
    if SANITIZE:
        compile_args += [f"-fsanitize={SANITIZE}", "-fno-omit-frame-pointer"]
        link_args += [f"-fsanitize={SANITIZE}"]
    if COVERAGE:
        compile_args += ["--coverage"]
        link_args += ["--coverage"]
    if sys.platform == "linux" and not (DEBUG or SANITIZE or COVERAGE):  # a small wheel; a debug build has the rest
        compile_args += ["-fno-asynchronous-unwind-tables", "-fno-unwind-tables"]
        link_args += ["-Wl,-s", "-Wl,-z,noseparate-code"]
    return compile_args, link_args


def core_sources() -> list[Path]:
    """What is mutated and counted, line by line: the core without `memory`, which makes failures for tests."""
    top = Path(__file__).resolve().parent / CORE
    found = [path for place in ("_core.p*", "core/*.p*", "capi.p*") for path in sorted(top.glob(place))]
    return [path for path in found if path.suffix in (".pyx", ".pxd", ".pxi") and path.stem != "memory"]


def extensions() -> list[Extension]:
    """One per .pyx file; `_kernels` takes the C sources along, each of which sets its instruction set itself."""
    compile_args, link_args = compile_flags()
    include, kernels = CORE / "include", CPU / "kernels"
    made = []
    for source in [path for folder in (CORE, *FUZZER, CPU) for path in sorted(folder.glob("*.pyx"))]:
        is_cpu, has_kernels = source.parent == CPU, source.stem == "_kernels"
        made.append(
            Extension(
                ".".join([*source.parent.parts, source.stem]),
                [str(source), *(map(str, sorted(kernels.glob("*.c"))) if has_kernels else ())],
                include_dirs=[".", *([str(kernels)] if is_cpu else [])],
                depends=[str(header) for header in sorted((kernels if is_cpu else include).glob("*.h"))],
                extra_compile_args=[
                    *compile_args,
                    *(["-pthread", "-ffp-contract=off"] if has_kernels else []),
                    *(CORE_ARGS if source.stem == "_core" and sys.platform == "linux" else ()),
                    *(KERNEL_ARGS if has_kernels and sys.platform == "linux" else ()),
                    *(["-Os"] if source.stem in FOR_SIZE and not COVERAGE else []),
                    *(["-O3", "-fno-sanitize=all"] if source.stem in PLAIN else []),
                ],
                extra_link_args=[*link_args, *(["-pthread"] if has_kernels else [])],
            )
        )
    return made


class BuildAll(build_ext):
    """Compile the extension modules, and MLX's extension into what is going to be installed."""

    def run(self) -> None:
        super().run()
        on_mac = "1" if sys.platform == "darwin" else "0"
        if os.environ.get("KVPOOL_MLX_EXTENSION", on_mac) == "1" and not (self.inplace or self.editable_mode):
            print(mlx_extension(Path(self.build_lib).resolve()), flush=True)


def mlx_extension(build_lib: Path) -> str:
    """Compile MLX's extension into `build_lib`; one line about what became of it. An installation never fails by it.

    In an isolated build, packages of the environment can be imported by a process that does not inherit the isolation.
    """
    places = {sysconfig.get_path(scheme) for scheme in ("purelib", "platlib")}
    native = build_lib / "kvpool_backends" / "mlx" / "native"
    shutil.rmtree(native / "built", ignore_errors=True)  # of an earlier build
    why = "MLX is not installed here yet"
    if not (native / "__main__.py").exists():  # `build_ext` alone: another kvpool would be found, and written to
        why = "the package is not in the build folder"
    elif any(Path(place, "mlx", "include", "mlx", "array.h").exists() for place in places):
        alone = {key: value for key, value in os.environ.items() if key != "PYTHONNOUSERSITE"}
        command = [sys.executable, "-m", "kvpool_backends.mlx.native", "ship"]
        how = {"cwd": build_lib, "env": alone | {"PYTHONPATH": str(build_lib)}, "timeout": 900}
        try:
            done = subprocess.run(command, capture_output=True, text=True, errors="replace", **how)
        except (OSError, subprocess.TimeoutExpired) as error:
            why = str(error)
        else:
            if done.returncode == 0:
                return f"MLX's extension: {done.stdout.splitlines()[-1]}"
            why = " ".join(done.stderr.split())[-400:]
    return f"MLX's extension is not built ({why}); `python -m kvpool_backends.mlx.native build` builds it"


def readme() -> str:
    """Return README.md with links that also work on the page of a package index."""
    files = tomllib.loads(Path("pyproject.toml").read_text())["project"]["urls"]["Source"] + "/blob/main/"
    return re.sub(r"\]\((?!https?:|#)", f"]({files}", Path("README.md").read_text())


if __name__ == "__main__":
    # File times alone would keep objects that other switches made.
    switches = {"debug": DEBUG, "sanitize": SANITIZE, "faults": FAULTS, "coverage": COVERAGE, "optimize": OPTIMIZE}
    variant = json.dumps(switches)
    changed = not VARIANT_FILE.exists() or VARIANT_FILE.read_text() != variant
    packages = find_packages(include=["kvpool", "kvpool.*", "kvpool_backends", "kvpool_backends.*"])
    setup(
        packages=[*packages, "kvpool_backends.metal"],
        long_description=readme(),
        long_description_content_type="text/markdown",
        ext_modules=cythonize(
            extensions(),
            build_dir="build/cython",
            compiler_directives=DIRECTIVES,
            force=changed,
            nthreads=os.cpu_count() if sys.platform == "linux" else 0,  # processes, which elsewhere are no forks
        ),
        cmdclass={"build_ext": BuildAll},
        options={"build_ext": {"force": changed, "parallel": os.cpu_count()}},
    )
    VARIANT_FILE.parent.mkdir(parents=True, exist_ok=True)
    VARIANT_FILE.write_text(variant)
