"""``python -m kvpool_backends.mlx.native build`` compiles the extension, ``... ship`` into the package, for a wheel.

It is compiled against the installed MLX, and checked in a process of its own before it takes its place.
"""

from __future__ import annotations

import json
import os
import shlex
import shutil
import subprocess
import sys
import sysconfig
import tempfile
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from kvpool_backends.mlx import native

CHECK_SECONDS = 60


class BuildError(Exception):
    """The extension could not be built; the text says why, with what the compiler said."""


def main(arguments: list[str]) -> int:
    """Returns the exit status."""
    if arguments in (["build"], ["ship"]):
        print(f"compiling for MLX {native.MLX_VERSION} ...", flush=True)
        begin = time.perf_counter()
        try:
            made = build(native.shipped() if arguments == ["ship"] else None)
        except BuildError as error:
            print(f"could not build the extension: {error}", file=sys.stderr)
            return 1
        print(f"{made} ({time.perf_counter() - begin:.0f} s)")
        return 0
    print("usage: python -m kvpool_backends.mlx.native {build,ship}", file=sys.stderr)
    return 2


def build(where: Path | None = None) -> Path:
    """Build the extension into a folder, by default `native.folder`. Returns the module's path.

    What was there stays until the new one has passed its check. Raises `BuildError`.
    """
    where = where or native.folder()
    where.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=where) as scratch:
        made = compile_to(Path(scratch), rpaths(where))
        check(made)
        stamp = native.wanted_stamp() | {"checksum": native.checksum(made)}
        stamp_file = made.with_name("stamp.json")
        stamp_file.write_text(json.dumps(stamp, indent=1))
        # A process that looks in between finds a checksum that does not fit, and goes on without the extension.
        os.replace(made, native.library(where))
        os.replace(stamp_file, where / "stamp.json")
    return native.library(where)


def compiler() -> list[str]:
    """``CXX``, or the first C++ compiler that there is."""
    given = os.environ.get("CXX")
    if given:
        return shlex.split(given)
    for name in ("c++", "clang++", "g++"):
        found = shutil.which(name)
        if found:
            return [found]
    raise BuildError("there is no C++ compiler (c++, clang++ or g++); on a Mac, `xcode-select --install` brings one")


def rpaths(where: Path) -> list[str]:
    """The places where a module in a folder looks for MLX's library, in this order."""
    here = str(native.mlx_folder() / "lib")
    if where != native.shipped():
        return [here]
    # A module of a wheel finds the MLX that is installed beside kvpool, not one of its builder's.
    beside = "@loader_path" if sys.platform == "darwin" else "$ORIGIN"
    return [f"{beside}/../../../../../mlx/lib", here]


def compile_to(scratch: Path, paths: Sequence[str] = ()) -> Path:
    """Compile the extension in `scratch`; with the part for Metal where MLX has one. `paths`: see `compile_module`."""
    made = native.library(scratch)
    has_metal = sys.platform == "darwin" and (native.mlx_folder() / "include" / "metal_cpp").exists()
    files = [path for path in native.sources() if path.suffix == ".cpp"]
    if not has_metal:
        files = [path for path in files if path.stem != "pool_op_metal"]
    compile_module(files, made, ["-DKVPOOL_METAL"] if has_metal else [], paths)
    return made


def compile_module(
    files: Sequence[Path], made: Path, options: Sequence[str] = (), paths: Sequence[str] = ()
) -> None:
    """Compile C++ files against the installed MLX, one process per file, and link them as a Python module.

    `paths`: where it looks for MLX's library, by default where that is now.
    """
    mlx = native.mlx_folder()
    if not (mlx / "include" / "mlx" / "array.h").exists():
        raise BuildError(f"this MLX came without headers ({mlx / 'include'})")
    command = [*compiler(), "-std=c++20", "-O2", "-fPIC", "-fvisibility=hidden", *options]
    for ours in (native.SOURCES, native.KERNEL_HEADERS):
        command += ["-I", str(ours)]
    for theirs in (mlx / "include", mlx / "include" / "metal_cpp", sysconfig.get_paths()["include"]):
        command += ["-isystem", str(theirs)]

    def compiled(source: Path) -> str:
        target = made.with_name(f"{source.stem}.o")
        _run([*command, "-c", str(source), "-o", str(target)])
        return str(target)

    with ThreadPoolExecutor() as pool:
        objects = list(pool.map(compiled, files))
    link = ["-bundle", "-undefined", "dynamic_lookup"] if sys.platform == "darwin" else ["-shared"]
    lib = mlx / "lib"
    looked_in = [f"-Wl,-rpath,{path}" for path in paths or (lib,)]
    _run([*compiler(), *link, *objects, f"-L{lib}", "-lmlx", *looked_in, "-o", str(made)])


def check(made: Path) -> None:
    """Import a module and run its self-check, in a process of its own: it may well crash."""
    root = str(native.SOURCES.parents[2])
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([root, os.environ.get("PYTHONPATH", "")])}
    code = "import sys, pathlib; from kvpool_backends.mlx import native; "
    code += "native.import_checked(pathlib.Path(sys.argv[1]))"
    _run([sys.executable, "-c", code, str(made)], env=environment, timeout=CHECK_SECONDS)


def _run(command: list[str], **options: object) -> None:
    try:
        done = subprocess.run(command, capture_output=True, text=True, **options)  # type: ignore[call-overload]
    except (OSError, subprocess.TimeoutExpired) as error:
        raise BuildError(f"{command[0]}: {error}") from error
    if done.returncode:
        said = (done.stderr or done.stdout).strip()[-4000:]
        raise BuildError(f"{shlex.join(command[:1])} ended with {done.returncode}\n{said}")


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
