"""An optional extension that writes into MLX's pool as a node of MLX's own graph; here it is found and checked.

MLX's operations give every array that they change a new value, and that is a copy of the whole pool whenever a read
of the step before is still in flight. The extension adds the one operation that MLX lacks: a node whose output is
the memory of its input. With it a step stays lazy, steps may be pipelined, and the pool is never copied. `pool` owns
the arrays and the order of what happens to them.

It talks to MLX's C++ interface, which changes from one patch release to the next. So it is compiled where it is used,
against the very MLX that is installed there (`__main__`). What was built lies in a folder of its own, ``_kvpool_mlx``
beside a ``stamp.json``, in the user's cache. Wheels for macOS bring folders for some releases of MLX (`shipped`), which
are used where the user has built nothing. A module is imported only if

- the stamp names the MLX that is installed (version and sizes of its libraries), this Python, and these sources;
- the file has the checksum that the stamp says, because a damaged library can end the process that opens it;
- and, once imported, it sees an MLX array as MLX does, and a node of it writes where it should (`self_check`). The
  build ran the same check in a process of its own, so what would crash has crashed there.
"""

from __future__ import annotations

import ctypes
import hashlib
import importlib.machinery
import importlib.util
import json
import logging
import os
import sys
import sysconfig
from functools import cache
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple

import mlx.core as mx
import numpy as np

__all__ = ["load", "status"]

NAME = "_kvpool_mlx"
SOURCES = Path(__file__).parent
KERNEL_HEADERS = SOURCES.parents[1] / "cpu" / "kernels"
NOWHERE = (0,) * 5  # scales and biases of floats
COMMAND = "python -m kvpool_backends.mlx.native build"

_KERNELS = ("kv_write", "kv_attend", "kv_attend_scratch_nbytes", "kv_copy_blocks")
MLX_VERSION: str = mx.__version__  # type: ignore[attr-defined]

_log = logging.getLogger(__name__)


class Unfit(Exception):
    """There is no extension to use; the text says why."""


class _Outcome(NamedTuple):
    module: ModuleType | None
    why: str  # "" if there is a module
    is_built: bool
    where: Path


def load() -> ModuleType | None:
    """The extension, or None. Looks once per process; an extension that does not fit is one line in the log."""
    return _load().module


def status() -> dict[str, Any]:
    """The state of the extension, for ``kvpool doctor``: one that does not fit is ``built``, too."""
    outcome = _load()
    return {
        "active": outcome.module is not None,
        "built": outcome.is_built,
        "why": outcome.why,
        "folder": str(outcome.where),
        "mlx": MLX_VERSION,
        "command": COMMAND,
    }


def folder() -> Path:
    """Folder of the extension for this Python and this MLX: ``KVPOOL_MLX_NATIVE_DIR``, or below the user's cache."""
    given = os.environ.get("KVPOOL_MLX_NATIVE_DIR")
    if given:
        return Path(given)
    if sys.platform == "darwin":
        root = Path.home() / "Library" / "Caches"
    else:
        root = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    # One folder for each place that MLX is installed in: two environments do not take it from each other.
    place = hashlib.sha256(str(mlx_folder()).encode()).hexdigest()[:8]
    return root / "kvpool" / "mlx-native" / f"{sysconfig.get_config_var('SOABI')}-{place}"


def shipped() -> Path:
    """The place of the extension for this MLX in a wheel, if it has one."""
    return SOURCES / "built" / MLX_VERSION


def library(where: Path) -> Path:
    """The compiled module in a folder."""
    return where / (NAME + importlib.machinery.EXTENSION_SUFFIXES[0])


def mlx_folder() -> Path:
    """The installed package: ``include`` and ``lib`` are in it."""
    return Path(mx.__file__).parent


def wanted_stamp() -> dict[str, Any]:
    """The sources and the MLX that a module must have been built from to be used now."""
    libraries = [Path(mx.__file__), *sorted((mlx_folder() / "lib").glob("libmlx.*"))]
    return {
        "mlx": MLX_VERSION,
        "libraries": {path.name: path.stat().st_size for path in libraries},
        "python": sysconfig.get_config_var("SOABI"),
        "sources": checksum(*sources(), KERNEL_HEADERS / "kvcpu.h"),
    }


def sources() -> list[Path]:
    """The extension's C++ files."""
    return sorted([*SOURCES.glob("*.cpp"), *SOURCES.glob("*.h")])


def checksum(*paths: Path) -> str:
    """SHA-256 over the content of files."""
    digest = hashlib.sha256()
    for path in paths:
        digest.update(path.read_bytes())
    return digest.hexdigest()


@cache
def _load() -> _Outcome:
    places = [place for place in (folder(), shipped()) if library(place).exists()]
    where = places[0] if places else folder()
    if os.environ.get("KVPOOL_MLX_NATIVE") == "0":
        return _Outcome(None, "KVPOOL_MLX_NATIVE is 0", library(where).exists(), where)
    if not places:
        return _Outcome(None, f"not built for MLX {MLX_VERSION}", False, where)
    reasons = []
    for place in places:  # one of an older kvpool does not hide the one that was shipped
        try:
            return _Outcome(open_module(place), "", True, place)
        except Unfit as error:
            reasons.append(str(error))
    _log.warning("[mlx native] going on without the extension in %s: %s (%s)", where, reasons[0], COMMAND)
    return _Outcome(None, reasons[0], True, where)


def open_module(where: Path) -> ModuleType:
    """Import and check the module in a folder. Raises `Unfit`, and nothing else."""
    try:
        stamp = json.loads((where / "stamp.json").read_text())
        found_checksum = checksum(library(where))
        wanted = wanted_stamp()
    except (OSError, ValueError) as error:
        raise Unfit(f"its stamp cannot be read ({error}); build it again") from error
    for key, value in wanted.items():
        found = stamp.get(key) if isinstance(stamp, dict) else None
        if found != value:
            if key in ("libraries", "sources"):
                found, value = "others", "these"
            raise Unfit(f"it was built for {key} {found}, here is {value}; build it again")
    if stamp.get("checksum") != found_checksum:
        raise Unfit("the file is damaged (another checksum than when it was built); build it again")
    return import_checked(library(where))


def import_checked(path: Path) -> ModuleType:
    """Import a module that was built for this MLX, hand it the CPU kernels, check it. Raises `Unfit`."""
    try:
        loader = importlib.machinery.ExtensionFileLoader(NAME, str(path))
        spec = importlib.util.spec_from_loader(NAME, loader)
        assert spec is not None
        module = importlib.util.module_from_spec(spec)
        loader.exec_module(module)
        kernels = [getattr(_exported(), name) for name in _KERNELS]
        module.bind(mx.array, *(ctypes.cast(kernel, ctypes.c_void_p).value for kernel in kernels))
        self_check(module)
    except Unfit:
        raise
    except Exception as error:
        raise Unfit(f"it cannot be imported ({type(error).__name__}: {error})") from error
    return module


def _exported() -> ctypes.CDLL:
    """The C functions in `kvpool_backends.cpu._kernels`, which exports them."""
    from kvpool_backends.cpu import _kernels

    return ctypes.CDLL(_kernels.__file__)


def isa_address(name: str) -> int:
    """The instruction set of that name, as kernels take it."""
    exported = _exported()
    exported.kv_isa_at.restype = ctypes.c_void_p
    exported.kv_isa_name.restype = ctypes.c_char_p
    exported.kv_isa_name.argtypes = [ctypes.c_void_p]
    for i in range(exported.kv_isa_count()):
        address = exported.kv_isa_at(i)
        if exported.kv_isa_name(address) == name.encode():
            return address
    raise Unfit(f"the CPU kernels have no instruction set {name!r}")


def self_check(module: Any) -> None:
    """See an array as MLX sees it, write into one through a node, find it in the same memory. Raises `Unfit`."""
    if module.mlx_version() != MLX_VERSION:
        raise Unfit(f"it runs with MLX {module.mlx_version()}, Python has {MLX_VERSION}")
    seen = module.shape(mx.zeros((3, 5)))
    if seen != (3, 5):
        raise Unfit(f"self-check: an array of shape (3, 5) looks like {seen}")
    from kvpool_backends.cpu import default_isa

    base = mx.zeros((2, 1, 1, 4))  # 2 blocks of 1 token, 1 head of 4 elements
    mx.eval(base)
    handle = mx.array(0)
    module.share(handle, base)
    address = module.address(base)
    side = (4, 0, 0, (0, 0, 4, 4, 4), NOWHERE, NOWHERE)
    layer = module.layer(isa_address(default_isa()), 0, 2, 1, 1, side, side, (address,), None)
    step = module.step(1, 2, 1, np.array([1]), 0, None, None, None)
    row, token = mx.arange(4, dtype=mx.float32).reshape(1, 1, 4), mx.array(0)
    with mx.stream(mx.cpu):
        module.run(False, (handle,), (), layer, step, None, None, row, row, None, token, None)
        mx.eval(token, handle)
    if handle is base or module.address(handle) != address or handle.shape != base.shape:
        raise Unfit("self-check: the node's output is not the memory of its input")
    if base.tolist() != [[[[0.0] * 4]], [[[0.0, 1.0, 2.0, 3.0]]]]:
        raise Unfit("self-check: what a node wrote is not where it should be")
