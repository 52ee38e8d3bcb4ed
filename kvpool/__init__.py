"""kvpool: a block allocator for the KV cache of LLM inference.

`Pool` counts blocks and sequences. `Plan` has the arrays that one `Pool.step` writes for a backend. `Scheduler` decides
which sequences run in a step. None of them handles tensors.
"""

from pathlib import Path
from typing import TYPE_CHECKING

from kvpool.errors import (
    CapacityExceeded,
    DoubleFree,
    KVPoolError,
    OutOfBlocks,
    OutOfSequences,
    PlanStateError,
    StaleHandle,
)

try:
    from kvpool._core import Plan, Pool
except ModuleNotFoundError as error:
    if error.name is None or not error.name.startswith("kvpool._"):
        raise
    raise ImportError(
        "[kvpool] the Cython core is not built: this is the source tree, not an installation; "
        "type `make build`, or `pip install .`"
    ) from error

if TYPE_CHECKING:
    from kvpool.config import KVSpec
    from kvpool.groups import Group
    from kvpool.namespaces import namespace
    from kvpool.scheduler import Output, Request, Scheduler, Step

__version__ = "0.1.0"

__all__ = [
    "CapacityExceeded",
    "DoubleFree",
    "Group",
    "KVPoolError",
    "KVSpec",
    "OutOfBlocks",
    "OutOfSequences",
    "Output",
    "Plan",
    "PlanStateError",
    "Pool",
    "Request",
    "Scheduler",
    "StaleHandle",
    "Step",
    "get_include",
    "namespace",
]

_LATE = {  # imported on first use, because they take time
    "_C_API": "kvpool.capi",
    "Group": "kvpool.groups",
    "KVSpec": "kvpool.config",
    "Output": "kvpool.scheduler",
    "Request": "kvpool.scheduler",
    "Scheduler": "kvpool.scheduler",
    "Step": "kvpool.scheduler",
    "namespace": "kvpool.namespaces",
}


if not TYPE_CHECKING:  # with __getattr__, a type checker would accept any name

    def __getattr__(name: str) -> object:
        if name not in _LATE:
            raise AttributeError(f"module 'kvpool' has no attribute {name!r}")
        from importlib import import_module

        return getattr(import_module(_LATE[name]), name)


def __dir__() -> list[str]:
    return sorted([*__all__, *(name for name in globals() if name.startswith("__"))])


def get_include() -> str:
    """Folder that holds ``kvpool/``: the include path for ``cimport kvpool`` and ``kvpool/include/kvpool.h``."""
    return str(Path(__file__).resolve().parent.parent)
