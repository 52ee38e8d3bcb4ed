"""vLLM's own block pool, out of its source or its wheel, without the rest of vLLM: torch need not be there.

    pip download --no-deps --only-binary :all: vllm==0.33.0

`KVPOOL_VLLM` names the wheel, or a folder that has `vllm/` in it.
"""

import importlib
import importlib.util
import os
import sys
import types
from pathlib import Path

VARIABLE = "KVPOOL_VLLM"
ABSENT = f"vLLM is not here: {VARIABLE} has to name its wheel, or a folder with `vllm/` in it (tested: 0.33.0)"
REAL = ("vllm.v1.core.block_pool", "vllm.v1.core.kv_cache_utils", "vllm.v1.core.kv_cache_metrics")


class _Any(type):
    """Of a class that stands for whatever the pool imports and does not use."""

    def __getattr__(cls, name):
        if name.startswith("__"):
            raise AttributeError(name)
        return cls

    def __call__(cls, *arguments, **options):
        return cls


class _Absent(types.ModuleType):
    """A module of vLLM that is not loaded: every name in it is a class."""

    __path__ = ()

    def __getattr__(self, name):
        if name.startswith("__"):
            raise AttributeError(name)
        return _Any(name, (), {})


class Finder:
    """Some modules of a package are its own, the others are absent."""

    def __init__(self, folder, real):
        self.folder, self.real, self.package = folder, real, real[0].partition(".")[0]

    def find_spec(self, name, path=None, target=None):
        if name in self.real:
            folder = str(Path(self.folder, *name.split(".")[:-1]))
            return importlib.machinery.PathFinder.find_spec(name, [folder])
        is_mine = name.split(".")[0] == self.package
        return importlib.machinery.ModuleSpec(name, self, is_package=True) if is_mine else None

    def create_module(self, spec):
        return _Absent(spec.name)

    def exec_module(self, module):
        pass


def request(keys):
    """What vLLM's pool wants to know of a request whose full blocks have these hashes."""
    return types.SimpleNamespace(block_hashes=keys)


def load():
    """The modules `block_pool` and `kv_cache_utils` of vLLM, and its version; None where there is no source."""
    source = os.environ.get(VARIABLE, "")
    if not source or not Path(source).exists():
        return None
    spec = importlib.machinery.PathFinder.find_spec("_version", [str(Path(source, "vllm"))])
    version = "an unknown version"
    if spec is not None:
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        version = module.__version__
    finder = Finder(source, REAL)
    sys.meta_path.insert(0, finder)
    try:
        return *(importlib.import_module(name) for name in REAL[:2]), version
    finally:
        sys.meta_path.remove(finder)
        for name in [name for name in sys.modules if name.split(".")[0] == "vllm"]:
            del sys.modules[name]  # a vLLM that is installed can still be imported
