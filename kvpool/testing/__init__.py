"""The public test kit: what holds the core, and any backend, against independent implementations.

- `ModelPool`, `ModelPlan` (`kvpool.testing.model`): the core's contract in plain Python.
- `kvpool.testing.conformance`: what every backend has to pass.
- `check_store` (`kvpool.testing.stores`): what every store of blocks has to pass.
"""

from __future__ import annotations

import importlib
from typing import Any

_WHERE = {
    "ModelPool": "model",
    "ModelPlan": "model",
    "check_store": "stores",
}
__all__ = ["ModelPlan", "ModelPool", "check_store"]


def __getattr__(name: str) -> Any:
    if name not in _WHERE:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_WHERE[name]}"), name)
