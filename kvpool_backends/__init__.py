"""Backends that ship with kvpool, and how to find any other one.

A backend has a name and a factory, ``"module:attribute"``. Built-in names come first, then the names that installed
packages declare in the entry-point group ``kvpool.backends``. A backend is imported when it is loaded, not before.
The kernels of the folder ``metal/`` are installed as `kvpool_backends.metal`.
"""

from __future__ import annotations

import os
from contextlib import suppress
from importlib import import_module
from importlib.metadata import entry_points
from typing import Any, Protocol, cast

from kvpool.errors import BackendUnavailable, install_command
from kvpool.protocol import KVBackend
from kvpool.spec import KVSpec

__all__ = ["BackendFactory", "available", "known", "load_backend"]

DEFAULTS = ("cpu", "numpy")  # the first that can be imported is the default
ENVIRONMENT_VARIABLE = "KVPOOL_BACKEND"
ENTRY_POINT_GROUP = "kvpool.backends"

_BUILT_IN = {
    "numpy": "kvpool_backends.numpy:NumpyBackend",
    "cpu": "kvpool_backends.cpu:CPUBackend",
    "mlx": "kvpool_backends.mlx:MLXBackend",
}


class BackendFactory(Protocol):
    """The result of `load_backend`: mostly the backend's class."""

    def __call__(self, spec: KVSpec, num_blocks: int, /, **options: Any) -> KVBackend: ...


def load_backend(name: str | None = None) -> BackendFactory:
    """The factory of a backend: ``load_backend("numpy")(spec, num_blocks)`` makes one.

    Parameters
    ----------
    name : str, optional
        A built-in name, or one of the entry-point group ``kvpool.backends``. By default the environment
        variable ``KVPOOL_BACKEND``, and if that is unset or empty, "cpu", or "numpy" where there are no kernels.

    Raises
    ------
    BackendUnavailable
        The name is unknown, or its module cannot be imported. The message says what to install. The original
        exception is chained.
    """
    origin = ""
    if name is None and (name := os.environ.get(ENVIRONMENT_VARIABLE) or None):
        origin = f" (from {ENVIRONMENT_VARIABLE})"
    if name is None:
        for name in DEFAULTS[:-1]:
            with suppress(BackendUnavailable):
                return load_backend(name)
        name = DEFAULTS[-1]
    if not isinstance(name, str):
        raise TypeError(f"[load_backend] name must be a str, got {type(name).__name__} ({name!r})")

    backends = known()
    if name not in backends:
        names = ", ".join(sorted(backends))
        raise BackendUnavailable(f"[load_backend] no backend is called {name!r}{origin}; known are {names}")
    factory, remedy = backends[name]
    module, _, attribute = factory.partition(":")
    try:
        loaded = import_module(module)
        for part in attribute.split("."):
            loaded = getattr(loaded, part)
    except BackendUnavailable:  # the backend's own message is better
        raise
    except Exception as error:  # a broken install can fail with anything; the cause is chained
        raise BackendUnavailable(
            f"[load_backend] backend {name!r}{origin} cannot be imported ({error}): {remedy}"
        ) from error
    return cast(BackendFactory, loaded)


def available() -> tuple[str, ...]:
    """Names of the backends that can be imported here, sorted. Imports each one of them."""
    usable = []
    for name in sorted(known()):
        try:
            load_backend(name)
        except BackendUnavailable:
            continue
        usable.append(name)
    return tuple(usable)


def known() -> dict[str, tuple[str, str]]:
    """Each backend's name, with its factory and what helps when that cannot be imported. Imports nothing.

    A package cannot replace a built-in name.
    """
    declared = {}
    for entry in entry_points(group=ENTRY_POINT_GROUP):
        package = entry.dist.name if entry.dist else entry.module
        declared[entry.name] = (entry.value, f"pip install --force-reinstall {package}")
    remedies = {
        "numpy": "pip install numpy",
        "cpu": "install kvpool again; its native kernels are missing (in a source tree: make build)",
        "mlx": install_command("mlx"),
    }
    return declared | {name: (factory, remedies[name]) for name, factory in _BUILT_IN.items()}
